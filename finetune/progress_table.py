"""How far a grid is: one live table on a terminal, a line a run elsewhere."""

from collections import defaultdict
from collections.abc import Sequence
from typing import Any

import numpy as np
from rich.console import Console
from rich.live import Live
from rich.table import Table

from finetune.glue import summary
from finetune.settings import GlueSettings

Cell = tuple[str, str]  # task and model, each a row of the table


class Board:
    """The table of a grid.

    Args:
        runs: All runs of the grid.
        missing: Those to be made.
        workers: Processes that make them.
    """

    def __init__(
        self, runs: Sequence[GlueSettings], missing: Sequence[GlueSettings], workers: int
    ) -> None:
        self.runs, self.total, self.workers = runs, len(missing), workers
        self.left: dict[Cell, int] = defaultdict(int)
        for run in missing:
            self.left[cell_of(run)] += 1
        self.scores: dict[Cell, list[float]] = defaultdict(list)
        self.seconds: dict[Cell, list[float]] = defaultdict(list)
        self.now: dict[int, tuple[GlueSettings, tuple[float, ...]]] = {}
        self.made, self.lost = 0, 0
        self.console = Console()
        self.live = Live(self.table(), console=self.console, refresh_per_second=2)

    def __enter__(self) -> "Board":
        done = len(self.runs) - self.total
        print(f"{self.total} runs to make, {done} done already", flush=True)
        if self.console.is_terminal:
            self.live.start()
        return self

    def __exit__(self, *error: object) -> None:
        if self.console.is_terminal:
            self.live.stop()

    def show(self, worker: int, run: GlueSettings, what: str, value: Any) -> None:
        """Take in what a worker said of its run."""
        if what == "step":
            self.now[worker] = run, value
        else:
            self.now.pop(worker, None)
            self.made += 1
            self.left[cell_of(run)] -= 1
            if what == "elsewhere":
                line = f"{run.task} {run.model} seed {run.seed}: made by another grid"
            else:
                line = summary(value)
                if what == "done":
                    self.seconds[cell_of(run)].append(value["seconds"])
                    if value["headline"] is not None:
                        self.scores[cell_of(run)].append(value["headline"])
            self.lost += what in ("failed", "dead")
            text = f"[{self.made}/{self.total}] {line}; {self.time_left()}"
            self.console.print(text, markup=False, highlight=False, soft_wrap=True)
        if self.console.is_terminal:
            self.live.update(self.table())

    def time_left(self) -> str:
        """Minutes until the end, as long as runs of a kind take as long as they have so far."""
        known = [np.mean(times) for times in self.seconds.values()]
        if not known:
            return "time left unknown"
        guess = float(np.mean(known))
        total = sum(
            count * float(np.mean(self.seconds.get(cell, [guess])))
            for cell, count in self.left.items()
        )
        return f"{total / self.workers / 60:.0f} min left"

    def table(self) -> Table:
        """The table as it is now."""
        title = f"{self.made}/{self.total} runs, {self.lost} failed, {self.time_left()}"
        table = Table("task", "model", "left", "score × 100", "running", title=title)  # noqa: RUF001
        running: dict[Cell, list[str]] = defaultdict(list)
        for run, (step, steps, loss) in self.now.values():
            running[cell_of(run)].append(f"{step / steps:.0%} loss {loss:.3f}")
        for cell in dict.fromkeys(cell_of(run) for run in self.runs):
            scores = 100 * np.array(self.scores[cell])
            mean = f"{scores.mean():.1f} ({len(scores)})" if len(scores) else ""
            table.add_row(*cell, str(self.left[cell]), mean, ", ".join(running[cell]))
        return table


def cell_of(run: GlueSettings) -> Cell:
    """The row of the table that a run belongs to."""
    model = run.model + ", random weights" * run.random_weights
    model += f" rate {run.learning_rate:g}" + ", from MNLI" * (run.mnli is not None)
    return run.task, model
