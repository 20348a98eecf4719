"""Timing of steps: settings of the benchmark, alternating rounds, ratios and targets."""

import statistics
from collections.abc import Mapping, Sequence
from dataclasses import dataclass, field, replace
from pathlib import Path
from typing import Any

import torch

from train.atomic_dir import check_writable
from train.bench.baselines import (
    MASK_RATE,
    OURS,
    Workload,
    make_baseline,
    make_training_step,
)
from train.bench.processes import StepFactory, in_new_process, time_models
from train.bench.tables import Measurement
from train.loop.flops import measure_peak_flops, step_flops
from train.settings import require

GPU_MFU_TARGET = 45.0
"""Model FLOPs utilization in percent that training at length 512 should reach on a GPU."""


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
    """JSON file to write; the tables (.md) and the figure (.png) are written beside it."""

    def __post_init__(self) -> None:
        scales = ("full", "tiny")
        rule = f"must be one of {', '.join(scales)}"
        require(self.scale in scales, "scale", rule, self.scale, "use full")
        require(self.rounds > 1, "rounds", "must be at least 2", self.rounds, "use 5")
        named = Path(self.output).suffix == ".json"
        require(named, "output", "must end in .json", self.output, "rename it")
        check_writable(Path(self.output).parent, "output")


class Benchmark:
    """Times steps and collects measurements."""

    def __init__(self, settings: BenchSettings) -> None:
        self.settings = settings
        self.device = torch.device(settings.device)
        self.rows: list[Measurement] = []
        self.peak_flops = {
            bf16: measure_peak_flops(self.device, torch.bfloat16 if bf16 else torch.float32)
            for bf16 in (False, True)
        }

    def workload(self, **fields: Any) -> Workload:
        """Return a workload on the device, reduced if `scale` is tiny."""
        workload = Workload(device=self.settings.device, **fields)
        if self.settings.scale == "full":
            return workload
        return replace(workload, size="tiny", batch=2, length=min(workload.length, 64))

    def add(
        self, *fields: Any, at_least: float | None = None, at_most: float | None = None
    ) -> None:
        """Add a measurement and print it.

        Args:
            *fields: Fields of `Measurement` in their order.
            at_least: Target from below; ignored if `scale` is tiny, as is `at_most`.
            at_most: Target from above.
        """
        row, full = Measurement(*fields), self.settings.scale == "full"
        for sign, limit in ((">=", at_least), ("<=", at_most)):
            if full and limit is not None:
                reached = row.value >= limit if sign == ">=" else row.value <= limit
                row = replace(row, asked=f"{sign} {limit:g} {row.unit}", reached=reached)
        self.rows.append(row)
        print(" | ".join(row.cells()), flush=True)

    def measure(
        self,
        models: Mapping[str, Workload],
        make_step: StepFactory = make_training_step,
        factor: int = 1,
        keep: bool = False,
    ) -> dict[str, list[float]]:
        """Time models alternately in a new process: seconds of each in each turn.

        Args:
            models: Workload of each model.
            make_step: Returns the step of a model.
            factor: Multiple of `rounds` to measure.
            keep: Keep freed memory in the process.
        """
        return in_new_process(time_models, models, make_step, factor * self.settings.rounds, keep)

    def compare(
        self,
        part: str,
        workload: Workload,
        targets: dict[str, float | None],
        make_step: StepFactory = make_training_step,
        baseline_workload: Workload | None = None,
        keep: bool = False,
    ) -> None:
        """Measure this project's model against others.

        Args:
            part: Table of the measurements.
            workload: Workload of this project's model.
            targets: Models to compare with, and the speed-up over each that is the target.
            make_step: Returns the step of a model.
            baseline_workload: Workload of the other models, if it differs.
            keep: Keep freed memory in the process.
        """
        others = baseline_workload or workload
        models = {OURS: workload} | dict.fromkeys(targets, others)
        seconds = self.measure(models, make_step, keep=keep)
        ours = statistics.median(seconds[OURS])
        self.add(part, str(workload), OURS, workload.tokens / ours, "tokens/s")
        if make_step is make_training_step:
            mfu = self.share_of_peak(OURS, workload, ours)
            has_target = self.device.type == "cuda" and workload.length == 512
            target = GPU_MFU_TARGET if has_target else None
            self.add(part, str(workload), OURS, mfu, "% of peak", at_least=target)
        for name, target in targets.items():
            speed = workload.tokens / statistics.median(seconds[name])
            self.add(part, str(others), name, speed, "tokens/s")
            ratio, low, high = speedup(seconds[name], seconds[OURS])
            case = str(workload) if baseline_workload is None else f"{workload} against {others}"
            self.add(part, case, name, ratio, "x", low, high, at_least=target)

    def share_of_peak(self, name: str, workload: Workload, seconds: float) -> float:
        """Operations of a training step over those of the device's peak in that time, percent."""
        lengths, tokens = workload.lengths(), float(workload.tokens)
        config, squares = make_baseline(name, workload).config, float((lengths**2).sum())
        flops = step_flops(config, tokens, squares, MASK_RATE * tokens)
        return 100 * flops / self.peak_flops[workload.bf16] / seconds


def speedup(baseline: Sequence[float], ours: Sequence[float]) -> tuple[float, float, float]:
    """Median, lowest and highest ratio of times within a turn."""
    ratios = sorted(a / b for a, b in zip(baseline, ours))
    return statistics.median(ratios), ratios[0], ratios[-1]
