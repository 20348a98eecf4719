"""Times of models that alternate in a process of their own, and the rows of the tables.

Large tensors come from the system and go back to it at every allocation, which costs a page fault
for every 4 KiB; how much of that a process avoids depends on what it computed before. Hence a new
process for every comparison, and ratios within a turn.
"""

import multiprocessing
import statistics
import time
from collections.abc import Callable, Mapping, Sequence
from concurrent.futures import ProcessPoolExecutor
from dataclasses import dataclass, field, replace
from pathlib import Path
from typing import Any

import torch
import transformers

from train.atomic_dir import check_writable
from train.bench.baselines import (
    MASK_RATE,
    STEPS,
    STOCK,
    Step,
    Workload,
    make_baseline,
)
from train.loop.flops import measure_peak_flops, step_flops
from train.settings import require


@dataclass(frozen=True)
class BenchSettings:
    """Measure training and inference against models of equal size."""

    device: str = "cpu"
    """cpu or cuda."""
    parts: list[str] = field(default_factory=list)
    """Parts to run; empty means all parts of the device."""
    rounds: int = 5
    """Turns of each model that count, after one for warming up."""
    scale: str = "full"
    """full, or tiny: the same steps with tiny models and texts, to test the benchmark."""
    output: str = "results/bench-cpu.json"
    """JSON file to write; the tables are written beside it as .md. Other parts in it are kept."""

    def __post_init__(self) -> None:
        scales = ("full", "tiny")
        rule = f"must be one of {', '.join(scales)}"
        require(self.scale in scales, "scale", rule, self.scale, "use full")
        require(self.rounds > 1, "rounds", "must be at least 2", self.rounds, "use 5")
        named = Path(self.output).suffix == ".json"
        require(named, "output", "must end in .json", self.output, "rename it")
        check_writable(Path(self.output).parent, "output")


class Benchmark:
    """Times models and collects the rows of the tables.

    Attributes:
        settings: What to measure.
        part: Name of the table that rows are added to.
        rows: Rows so far; their keys are those of the JSON file.
        peak_flops: Measured operations per second of a matrix product, in bfloat16 (key True) and
            float32.
    """

    def __init__(self, settings: BenchSettings) -> None:
        self.settings, self.part = settings, ""
        self.rows: list[dict[str, Any]] = []
        device = torch.device(settings.device)
        self.peak_flops = {
            bf16: measure_peak_flops(device, torch.bfloat16 if bf16 else torch.float32)
            for bf16 in (False, True)
        }

    def workload(self, **fields: Any) -> Workload:
        """Return a workload on the device, reduced if `scale` is tiny."""
        workload = Workload(device=self.settings.device, **fields)
        if self.settings.scale == "full":
            return workload
        return replace(workload, size="tiny", batch=2, length=min(workload.length, 64))

    def add(
        self,
        case: str,
        model: str,
        values: Sequence[float],
        unit: str,
        target: float | None = None,
        average: Callable[[Sequence[float]], float] = statistics.median,
    ) -> None:
        """Add a row and print it: the average and the range of some values.

        Args:
            case: What was computed.
            model: What computed it.
            values: One for each turn.
            unit: Unit of the values.
            target: What the average should reach; ignored if `scale` is tiny.
            average: Median, or another mean.
        """
        value, asked, reached = average(values), "", None
        if target is not None and self.settings.scale == "full":
            asked, reached = f">= {target:g} {unit}", value >= target
        row = {"part": self.part, "case": case, "peer": model, "value": value, "unit": unit}
        row |= {"low": min(values), "high": max(values), "asked": asked, "reached": reached}
        self.rows.append(row)
        print(" | ".join(cells(row)), flush=True)

    def time(
        self, task: str, names: Sequence[str], workload: Workload, factor: int = 1
    ) -> dict[str, list[float]]:
        """Time models alternately in a new process: seconds of each in `factor` x `rounds` turns.

        Args:
            task: A key of `STEPS`.
            names: Models.
            workload: Their size, batch and precision.
            factor: Multiple of `rounds`.
        """
        turns = factor * self.settings.rounds
        return in_new_process(time_models, task, list(names), workload, turns)

    def compare(
        self,
        task: str,
        workload: Workload,
        targets: Mapping[str, float | None],
        baselines: Sequence[str] = (STOCK,),
    ) -> dict[str, list[float]]:
        """Add the speed-up of models over baselines, as ratios within a turn.

        Args:
            task: A key of `STEPS`.
            workload: Size, batch and precision.
            targets: Models, and the speed-up over the first baseline that each should reach.
            baselines: Models to compare with.

        Returns:
            Seconds of each model in each turn.
        """
        seconds = self.time(task, [*baselines, *targets], workload)
        for name, target in targets.items():
            for baseline in baselines:
                model = name if baseline == STOCK else f"{name} against {baseline}"
                ratios = [a / b for a, b in zip(seconds[baseline], seconds[name])]
                least = target if baseline == baselines[0] else None
                self.add(f"{task}, {workload}", model, ratios, "x", least)
        return seconds

    def add_speed(self, task: str, workload: Workload, name: str, seconds: Sequence[float]) -> None:
        """Add the tokens per second of a model, padding not counted."""
        speeds = [workload.tokens / x for x in seconds]
        self.add(f"{task}, {workload}", name, speeds, "tokens/s")

    def add_share_of_peak(
        self, workload: Workload, name: str, seconds: Sequence[float], target: float | None = None
    ) -> None:
        """Add the operations of a training step over those of the device's peak in that time."""
        lengths, tokens = workload.lengths(), float(workload.tokens)
        config, squares = make_baseline(name, workload).config, float((lengths**2).sum())
        flops = step_flops(config, tokens, squares, MASK_RATE * tokens)
        shares = [100 * flops / self.peak_flops[workload.bf16] / x for x in seconds]
        self.add(f"training, {workload}", name, shares, "% of peak", target)


def cells(row: Mapping[str, Any]) -> list[str]:
    """Format a row of a table."""
    digits = ",.0f" if abs(row["value"]) >= 1000 else ",.2f"
    value = f"{row['value']:{digits}} {row['unit']}"
    if row["low"] is not None:  # as in files of earlier commits
        value += f" ({row['low']:{digits}} to {row['high']:{digits}})"
    verdict = {None: "", True: ", reached", False: ", **missed**"}[row["reached"]]
    return [row["case"], row["peer"], value, f"{row['asked']}{verdict}"]


def in_new_process(function: Callable[..., Any], *arguments: Any) -> Any:
    """Call a function of a module in a new process, which has imported torch and computed nothing.

    The threads of torch are those of the caller.
    """
    context = multiprocessing.get_context("forkserver")
    context.set_forkserver_preload(["train.bench.baselines"])
    with ProcessPoolExecutor(1, context) as pool:
        return pool.submit(_call, torch.get_num_threads(), function, *arguments).result()


def _call(threads: int, function: Callable[..., Any], *arguments: Any) -> Any:
    torch.set_num_threads(threads)
    transformers.utils.logging.set_verbosity_error()  # of zeros at padding, which nobody reads here
    return function(*arguments)


def time_models(
    task: str, names: Sequence[str], workload: Workload, turns: int
) -> dict[str, list[float]]:
    """Time a step of each model on the same batch: seconds of each in each turn."""
    steps = {name: STEPS[task](name, workload) for name in names}
    return time_steps(steps, turns, workload.device)


def time_steps(
    steps: Mapping[str, Step], turns: int, device: str = "cpu"
) -> dict[str, list[float]]:
    """Time steps alternately, after a turn for warming up.

    Args:
        steps: Steps by name.
        turns: Turns to measure.
        device: Device of the steps; on cuda each is repeated ten times in a turn.

    Returns:
        Seconds of each step in each turn.
    """
    seconds: dict[str, list[float]] = {name: [] for name in steps}
    cuda = device == "cuda"
    repeats = 10 if cuda else 1
    synchronize: Callable[[], None] = torch.cuda.synchronize if cuda else lambda: None
    for turn in range(turns + 1):
        # the order is reversed every other turn, so that no step always follows the same one
        for name in list(steps)[:: -1 if turn % 2 else 1]:
            synchronize()
            started = time.perf_counter()
            for _ in range(repeats):
                steps[name]()
            synchronize()
            seconds[name].append((time.perf_counter() - started) / repeats)
    return {name: values[1:] for name, values in seconds.items()}
