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
from typing import Any, Literal

import torch
import transformers

from train.atomic_dir import check_writable
from train.bench.baselines import MASK_RATE, STEPS, STOCK, Workload, make_model
from train.loop.run_log import measure_peak_flops, step_flops
from train.settings import InputError

Seconds = dict[str, list[float]]
"""Model -> seconds of its step in each turn."""


@dataclass(frozen=True)
class BenchSettings:
    """Measure training and inference against models of equal size."""

    device: str = "cpu"
    """cpu or cuda."""
    parts: list[str] = field(default_factory=list)
    """Parts to run; empty means all parts of the device."""
    rounds: int = 5
    """Turns of each model that count, after one for warming up."""
    scale: Literal["full", "tiny"] = "full"
    """full, or tiny: the same steps with tiny models and texts, to test the benchmark."""
    output: str = "runs/bench-cpu.json"
    """JSON file to write; the tables are written beside it as .md. Other parts in it are kept."""

    def __post_init__(self) -> None:
        if self.rounds < 2:
            raise InputError(f"rounds must be at least 2, got {self.rounds}; use 5")
        if Path(self.output).suffix != ".json":
            raise InputError(f"output must end in .json, got {self.output}; rename it")
        check_writable(Path(self.output).parent, "output")


class Benchmark:
    """Times models and collects the `rows` of a table, with the keys of the JSON file."""

    def __init__(self, settings: BenchSettings) -> None:
        self.settings = settings
        self.rows: list[dict[str, Any]] = []

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
        average: Callable[[Sequence[float]], float] = statistics.median,
    ) -> None:
        """Add a row and print it: the average and the range of values, one for each turn."""
        row = {"case": case, "model": model, "value": average(values), "unit": unit}
        self.rows.append(row | {"low": min(values), "high": max(values)})
        print(" | ".join(cells(self.rows[-1])), flush=True)

    def time(self, task: str, names: Sequence[str], workload: Workload) -> Seconds:
        """Time models alternately in a new process, as `time_models`."""
        context = multiprocessing.get_context("forkserver")  # torch imported, nothing computed
        context.set_forkserver_preload(["train.bench.baselines"])
        quiet = transformers.utils.logging.set_verbosity_error  # of zeros at padding
        with ProcessPoolExecutor(1, context, quiet) as pool:
            return pool.submit(time_models, task, names, workload, self.settings.rounds).result()

    def compare(
        self,
        task: str,
        workload: Workload,
        names: Sequence[str],
        baselines: Sequence[str] = (STOCK,),
    ) -> Seconds:
        """Add the speed-up of models over baselines, as ratios within a turn."""
        seconds = self.time(task, [*baselines, *names], workload)
        for name in names:
            for baseline in baselines:
                model = name if baseline == STOCK else f"{name} against {baseline}"
                ratios = [a / b for a, b in zip(seconds[baseline], seconds[name])]
                self.add(f"{task}, {workload}", model, ratios, "x")
        return seconds

    def add_speeds(self, task: str, workload: Workload, seconds: Seconds) -> None:
        """Add the tokens per second of models, padding not counted."""
        for name, values in seconds.items():
            speeds = [workload.tokens / x for x in values]
            self.add(f"{task}, {workload}", name, speeds, "tokens/s")

    def add_share_of_peak(self, workload: Workload, name: str, seconds: Sequence[float]) -> None:
        """Add the operations of a training step over those of matrix products in that time."""
        lengths, tokens = workload.lengths(), float(workload.tokens)
        config, squares = make_model(name, workload).config, float((lengths**2).sum())
        flops = step_flops(config, tokens, squares, MASK_RATE * tokens)
        dtype = torch.bfloat16 if workload.bf16 else torch.float32
        peak = measure_peak_flops(torch.device(workload.device), dtype)
        shares = [100 * flops / peak / x for x in seconds]
        self.add(f"training, {workload}", name, shares, f"% of {peak / 1e12:.3g} TFLOP/s")


def cells(row: Mapping[str, Any]) -> list[str]:
    """Format a row of a table."""
    digits = ",.0f" if abs(row["value"]) >= 1000 else ",.2f"
    value, low, high = (f"{row[key]:{digits}}" for key in ("value", "low", "high"))
    return [row["case"], row["model"], f"{value} {row['unit']} ({low} to {high})"]


def time_models(task: str, names: Sequence[str], workload: Workload, turns: int) -> Seconds:
    """Time a step of each model on the same batch alternately, after a turn for warming up.

    The steps are those of a task, a key of `STEPS`; on cuda a turn repeats each ten times.
    """
    steps = {name: STEPS[task](name, workload) for name in names}
    seconds: Seconds = {name: [] for name in names}
    repeats = 10 if workload.device == "cuda" else 1
    synchronize = torch.get_device_module(workload.device).synchronize
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
