"""Parts of the benchmark; the docstring of each part is the caption of its table.

Default options mean `RoFormerForMaskedLM(config)` on both sides; explicit ones this project's
pretraining loop and `unpadded` attention. Inference has its weights in the precision of the case;
training is a forward pass with labels, its backward pass and AdamW, under autocast in bfloat16.

Large tensors come from the system and go back to it at every allocation, which costs a page fault
for every 4 KiB; how much of that a process avoids depends on what it computed before. Hence a new
process for every comparison, and ratios within a turn.
"""

import multiprocessing
import statistics
from collections.abc import Callable, Mapping, Sequence
from concurrent.futures import ProcessPoolExecutor
from dataclasses import dataclass, field, replace
from itertools import product
from pathlib import Path
from typing import Any, Literal

import psutil
import torch
import transformers

from train.atomic_dir import check_writable
from train.bench.baselines import (
    BERT,
    DEFAULT,
    LINEAR,
    MASK_RATE,
    MODERN,
    OURS,
    SIZES,
    SPARSE,
    STOCK,
    Seconds,
    Workload,
    make_model,
    time_models,
)
from train.loop.run_log import measure_peak_flops, step_flops
from train.settings import InputError, check_fields

SHAPES = ((32, 128), (8, 512), (2, 2048))
BYTES_PER_SCORE = 12
"""Memory of transformers' attention for each score of a layer, at its peak."""

TASKS = {
    "inference": (0.0, [DEFAULT]),
    "inference with logits": (0.0, [DEFAULT]),
    "training": (0.1, [DEFAULT, SPARSE]),
}
"""Task -> dropout, and models to compare with transformers' RoFormer."""


@dataclass(frozen=True)
class BenchSettings:
    """Measure training and inference against models of equal size."""

    device: Literal["cpu", "cuda"] = "cpu"
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
        check_fields(self, lambda x: x >= 1, "must be at least 1", "rounds")
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


def defaults(benchmark: Benchmark) -> None:
    """Default options against transformers' RoFormer, each cell in a process of its own."""
    shapes = SHAPES if benchmark.settings.scale == "full" else SHAPES[:1]
    for task, (dropout, names) in TASKS.items():
        first = len(benchmark.rows)
        for (batch, length), padded, bf16 in product(shapes, (False, True), (False, True)):
            workload = benchmark.workload(
                batch=batch, length=length, padded=padded, bf16=bf16, dropout=dropout
            )
            benchmark.compare(task, workload, names)
        rows, case = benchmark.rows[first:], f"{task}, geometric mean"
        for name in names:
            values = [row["value"] for row in rows if row["model"] == name]
            benchmark.add(case, name, values, "x", statistics.geometric_mean)


def trainer(benchmark: Benchmark) -> None:
    """`Trainer` with default options: 3 steps on masked tokens, 10 on rows as long as MRPC's."""
    for bf16 in (False, True):
        benchmark.compare("pretraining", benchmark.workload(bf16=bf16), [DEFAULT, SPARSE])
        workload = benchmark.workload(bf16=bf16, batch=32, length=128)
        benchmark.compare("classification", workload, [DEFAULT])


def long_text(benchmark: Benchmark) -> None:
    """One text of 8,192 tokens; transformers' RoFormer only where the memory is enough."""
    for task, bf16 in product(("inference", "training"), (False, True)):
        dropout, names = TASKS[task]
        workload = benchmark.workload(batch=1, length=8192, bf16=bf16, dropout=dropout)
        if stock_fits(workload, training=task == "training"):
            benchmark.compare(task, workload, names)
        else:
            print(f"{task}, {workload}: transformers' RoFormer needs more memory than is free")
            benchmark.add_speeds(task, workload, benchmark.time(task, names, workload))


def stock_fits(workload: Workload, training: bool) -> bool:
    """Return whether the scores of transformers' RoFormer fit into the free memory."""
    layers, _, heads = SIZES[workload.size]
    scores = workload.batch * heads * workload.length**2 * (layers if training else 1)
    return psutil.virtual_memory().available > 1.5 * BYTES_PER_SCORE * scores


def peak(benchmark: Benchmark) -> None:
    """Share of the measured peak of matrix products in training, without dropout."""
    for size in ("small", "base"):
        workload = benchmark.workload(size=size, bf16=True, dropout=0.0)
        (seconds,) = benchmark.time("training", [SPARSE], workload).values()
        benchmark.add_share_of_peak(workload, SPARSE, seconds)


def explicit(benchmark: Benchmark) -> None:
    """Explicit options against transformers' models with their fastest kernels."""
    cases = ((0.1, False), (0.0, False), (0.1, True))
    for (dropout, padded), bf16 in product(cases, (False, True)):
        workload = benchmark.workload(bf16=bf16, dropout=dropout, padded=padded)
        seconds = benchmark.compare("training", workload, [OURS], (STOCK, BERT, MODERN))
        benchmark.add_speeds("training", workload, {OURS: seconds[OURS]})
    for size, batch, bf16, padded in (
        ("small", 8, False, False),
        ("small", 8, True, False),
        ("base", 4, False, False),
        ("base", 4, True, True),
    ):
        workload = benchmark.workload(size=size, batch=batch, bf16=bf16, dropout=0.0, padded=padded)
        benchmark.compare("inference", workload, [OURS], (STOCK, BERT))


def explicit_on_gpu(benchmark: Benchmark) -> None:
    """A compiled step of pretraining on packed rows against transformers' models, compiled too."""
    lengths = (512, 128, 2048, 8192)  # the row with the other models first
    for size, length in (*(("base", length) for length in lengths), ("large", 512)):
        workload = benchmark.workload(
            size=size, batch=32768 // length, length=length, bf16=True, compiled=True
        )
        compared = (size, length) == ("base", 512)
        baselines = (STOCK, BERT) if compared else ()
        seconds = benchmark.compare("training", workload, [OURS], baselines)[OURS]
        benchmark.add_speeds("training", workload, {OURS: seconds})
        benchmark.add_share_of_peak(workload, OURS, seconds)


def attention_scaling(benchmark: Benchmark) -> None:
    """Hidden states of one text: tokens/s are constant where the cost is linear in the length."""
    for length in (2**n for n in range(9, 16, 2)):
        workload = benchmark.workload(batch=1, length=length, dropout=0.0)
        seconds = benchmark.compare("inference", workload, list(LINEAR), (DEFAULT,))
        benchmark.add_speeds("inference", workload, seconds)


CPU_PARTS = (defaults, trainer, long_text, peak, explicit, attention_scaling)
PARTS: Mapping[str, Mapping[str, Callable[[Benchmark], None]]] = {
    "cpu": {part.__name__: part for part in CPU_PARTS},
    "cuda": {"training": explicit_on_gpu},
}
"""Device -> name -> part, in the order in which they run."""
