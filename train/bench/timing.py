"""Timing of steps: settings of the benchmark, alternating rounds, ratios and targets."""

import statistics
import time
from collections.abc import Callable, Sequence
from dataclasses import dataclass, field, replace
from pathlib import Path
from typing import Any

import numpy as np
import torch
from transformers import PreTrainedConfig

from train.atomic_dir import check_writable
from train.bench.baselines import (
    MASK_RATE,
    OURS,
    BenchBatch,
    Step,
    Workload,
    make_baseline,
    make_training_step,
)
from train.bench.tables import Measurement
from train.loop.flops import measure_peak_flops, step_flops
from train.settings import require

StepFactory = Callable[[str, Workload, BenchBatch], Step]

GPU_MFU_TARGET = 45.0
"""Model FLOPs utilization in percent that training at length 512 should reach on a GPU."""


@dataclass(frozen=True)
class BenchSettings:
    """Measure training and inference against models of equal size."""

    device: str = "cpu"
    """cpu or cuda."""
    parts: list[str] = field(default_factory=list)
    """Parts to run; empty means all parts of the device."""
    rounds: int = 3
    """Rounds that count, after one for warming up."""
    scale: str = "full"
    """full, or tiny: the same steps with tiny models and texts, to test the benchmark."""
    output: str = "results/bench-cpu.json"
    """JSON file to write; the tables (.md) and the figure (.png) are written beside it."""

    def __post_init__(self) -> None:
        scales = ("full", "tiny")
        rule = f"must be one of {', '.join(scales)}"
        require(self.scale in scales, "scale", rule, self.scale, "use full")
        require(self.rounds > 1, "rounds", "must be at least 2", self.rounds, "use 3")
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
        row = Measurement(*fields)
        if self.settings.scale == "full" and at_least is not None:
            asked, reached = f">= {at_least:g} {row.unit}", row.value >= at_least
            row = replace(row, asked=asked, reached=reached)
        if self.settings.scale == "full" and at_most is not None:
            asked, reached = f"<= {at_most:g} {row.unit}", row.value <= at_most
            row = replace(row, asked=asked, reached=reached)
        self.rows.append(row)
        print(" | ".join(row.cells()), flush=True)

    def time_steps(self, steps: dict[str, Step], factor: int = 1) -> dict[str, list[float]]:
        """Time steps alternately, after a round for warming up.

        Args:
            steps: Steps by name.
            factor: Multiple of `rounds` to measure.

        Returns:
            Seconds of each step in each round.
        """
        seconds: dict[str, list[float]] = {name: [] for name in steps}
        repeats = 10 if self.device.type == "cuda" else 1
        for round_number in range(self.settings.rounds * factor + 1):
            # the order is reversed every other round, so that no step always follows the same one
            for name in list(steps)[:: -1 if round_number % 2 else 1]:
                self.synchronize()
                started = time.perf_counter()
                for _ in range(repeats):
                    steps[name]()
                self.synchronize()
                seconds[name].append((time.perf_counter() - started) / repeats)
        return {name: values[1:] for name, values in seconds.items()}

    def synchronize(self) -> None:
        """Wait until the device has finished all kernels."""
        if self.device.type == "cuda":
            torch.cuda.synchronize()

    def compare(
        self,
        part: str,
        workload: Workload,
        targets: dict[str, float | None],
        make_step: StepFactory = make_training_step,
        baseline_workload: Workload | None = None,
    ) -> None:
        """Measure this project's model against others.

        Args:
            part: Table of the measurements.
            workload: Workload of this project's model.
            targets: Models to compare with, and the speed-up over each that is the target.
            make_step: Returns the step of a model.
            baseline_workload: Workload of the other models, if it differs.
        """
        torch.manual_seed(0)
        batch = BenchBatch.random(workload)
        others = baseline_workload or workload
        steps = {OURS: make_step(OURS, workload, batch)}
        steps |= {name: make_step(name, others, batch) for name in targets}
        seconds = self.time_steps(steps)
        ours = statistics.median(seconds[OURS])
        self.add(part, str(workload), OURS, workload.tokens / ours, "tokens/s")
        if make_step is make_training_step:
            config = make_baseline(OURS, workload).config
            flops = training_flops(config, workload.lengths())
            mfu = 100 * flops / self.peak_flops[workload.bf16] / ours
            has_target = self.device.type == "cuda" and workload.length == 512
            target = GPU_MFU_TARGET if has_target else None
            self.add(part, str(workload), OURS, mfu, "% of peak", at_least=target)
        for name, target in targets.items():
            speed = workload.tokens / statistics.median(seconds[name])
            self.add(part, str(others), name, speed, "tokens/s")
            ratio, low, high = speedup(seconds[name], seconds[OURS])
            case = str(workload) if baseline_workload is None else f"{workload} against {others}"
            self.add(part, case, name, ratio, "x", low, high, at_least=target)


def training_flops(config: PreTrainedConfig, lengths: np.ndarray) -> float:
    """Floating-point operations of a training step on sequences of these lengths."""
    tokens = float(lengths.sum())
    return step_flops(config, tokens, float((lengths**2).sum()), MASK_RATE * tokens)


def speedup(baseline: Sequence[float], ours: Sequence[float]) -> tuple[float, float, float]:
    """Median, lowest and highest ratio of times within a round."""
    ratios = sorted(a / b for a, b in zip(baseline, ours))
    return statistics.median(ratios), ratios[0], ratios[-1]
