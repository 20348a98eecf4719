"""What a table of results is made of: the runs that share a cell, the cells that share a row.

A cell holds the runs of one model with one recipe on one task, one for each seed. All scores here
are x 100.
"""

from collections.abc import Iterable, Sequence
from dataclasses import dataclass
from functools import cached_property
from typing import Any, NamedTuple

import numpy as np
from numpy.typing import NDArray

from finetune.results import run_name
from finetune.tasks import TASKS, Task

Line = dict[str, Any]


class RowKey(NamedTuple):
    """What the runs of a row have in common.

    Attributes:
        control: Whether the weights were never pretrained.
        model: Folder or hub id.
        tokenizer: The same; "" is the model's own.
        mnli: "", or from where the runs started, and on whose data where that must be said.
        rates: "", or among how many rates one was chosen for each task, by the reported split.
        recipe: Values of `RECIPE_FIELDS`, without a rate that was chosen and what goes by the task.
    """

    control: bool
    model: str
    tokenizer: str
    mnli: str
    rates: str
    recipe: tuple[Any, ...]

    @property
    def side(self) -> tuple[str, str]:
        """Model and tokenizer: what a difference is between."""
        return self.model, self.tokenizer

    @property
    def way(self) -> tuple[Any, ...]:
        """How it was fine-tuned: what two rows must share to be compared."""
        return self.mnli, self.rates, self.recipe

    def over_rates(self, rates: str = "") -> "RowKey":
        """The same with the best of several rates."""
        return self._replace(rates=rates, recipe=(None, *self.recipe[1:]))


@dataclass(frozen=True)
class Cell:
    """The runs of one row on one task, in the order of their seeds."""

    runs: tuple[Line, ...]

    @property
    def task(self) -> Task:
        """Its row of the table of tasks."""
        return TASKS[self.runs[0]["task"]]

    @property
    def anchor(self) -> str:
        """Where the page lists the runs."""
        return f"cell-{run_id(self.runs[0])}"

    @property
    def rate(self) -> float:
        """The learning rate."""
        return self.runs[0]["learning_rate"]

    @cached_property
    def scored(self) -> dict[int, Line]:
        """The runs that have a score, by seed; a collapsed one has."""
        return {run["seed"]: run for run in self.runs if run["status"] == "done"}

    def values(self, split: str, metric: str) -> NDArray[np.float64]:
        """A metric over the seeds, [scored runs]."""
        return 100 * np.array([run["metrics"][split][metric] for run in self.scored.values()])

    @cached_property
    def headlines(self) -> dict[int, float]:
        """Seed -> headline metric; the mean of MNLI's two splits."""
        return self._by_seed([self.task.headline])

    @cached_property
    def glue_scores(self) -> dict[int, float]:
        """Seed -> what GLUE averages over tasks: the mean of all the task's metrics."""
        return self._by_seed(self.task.metrics)

    def _by_seed(self, metrics: Sequence[str]) -> dict[int, float]:
        table = [self.values(split, m) for split in self.task.validation_splits for m in metrics]
        return dict(zip(self.scored, np.mean(table, axis=0).tolist()))

    def tally(self) -> dict[str, int]:
        """How many runs there are, have a score, collapsed, diverged, failed."""
        states = [run["status"] for run in self.runs]
        return {
            "runs": len(states),
            "scored": states.count("done"),
            "collapsed": sum(run["collapsed"] for run in self.runs),
            "diverged": states.count("diverged"),
            "failed": states.count("failed"),
        }


@dataclass(frozen=True)
class Row:
    """One line of a table.

    Attributes:
        name: In print; no other row has it.
        short: The model's name alone.
        model_type: transformers' name of the architecture.
        kind: model, random (weights never pretrained) or majority.
        way: How it was fine-tuned, where the table has several ways.
        key: What its runs have in common.
        cells: By the tasks' labels; a task that was not run is absent.
    """

    name: str
    short: str
    model_type: str
    kind: str
    way: str
    key: RowKey
    cells: dict[str, Cell]

    @property
    def anchor(self) -> str:
        """Where the page lists the runs."""
        cell = next(iter(self.cells.values()))
        return f"{'best' if self.key.rates else 'row'}-{run_id(cell.runs[0])}"

    def average(self, labels: Iterable[str]) -> tuple[float, dict[int, float]] | None:
        """GLUE's: each task's metrics averaged, then the mean over tasks.

        Returns:
            The mean over tasks of their means over seeds, and the mean over tasks of each seed that
            has a score on all of them; None when a task has no score.
        """
        cells = [self.cells.get(label) for label in labels]
        scores = [cell.glue_scores if cell else {} for cell in cells]
        if not scores or not all(scores):
            return None
        shared = sorted(set.intersection(*(set(score) for score in scores)))
        whole = float(np.mean([np.mean(list(score.values())) for score in scores]))
        return whole, {seed: float(np.mean([s[seed] for s in scores])) for seed in shared}


def number(value: object) -> str:
    """A value of the recipe: 2e-4 and not 0.0002, which takes counting."""
    if not isinstance(value, float):
        return str(value)
    mantissa, exponent = f"{value:e}".split("e")
    return f"{value:g}" if not 0 < value < 1e-2 else f"{float(mantissa):g}e{int(exponent)}"


def run_id(line: Line) -> str:
    """The run in ten characters: the end of its name under predictions/."""
    return run_name(line)[-10:]
