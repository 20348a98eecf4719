"""Default options on both sides: this project's classes against transformers' RoFormer.

Every cell is a process of its own. Inference computes hidden states, or the logits of all tokens,
with the weights in the precision of the cell; training computes a forward pass with labels, its
backward pass and AdamW, under autocast in bfloat16.
"""

import statistics
from itertools import product
from typing import Any

import psutil
import torch

from train.bench.baselines import (
    DEFAULT,
    SIZES,
    SPARSE,
    STOCK,
    Workload,
    make_forward_step,
    make_logits_step,
    make_training_step,
)
from train.bench.processes import StepFactory
from train.bench.timing import Benchmark, speedup
from train.bench.trainer_steps import make_classification_step, make_pretraining_step

SHAPES = ((32, 128), (8, 512), (2, 2048))
BYTES_PER_SCORE = 12
"""Memory of transformers' attention for each score of a layer, at its peak."""

TASKS: dict[str, tuple[StepFactory, float, dict[str, float | None]]] = {
    "inference": (make_forward_step, 0.0, {DEFAULT: 1.9}),
    "inference with logits": (make_logits_step, 0.0, {DEFAULT: None}),
    "training": (make_training_step, 0.1, {DEFAULT: 1.4, SPARSE: 3.7}),
}
"""Task -> step, dropout, and models with the geometric mean that each should reach."""


def defaults(benchmark: Benchmark) -> None:
    """Default options against transformers' RoFormer, each cell in a process of its own."""
    compare_defaults(benchmark, "defaults")


def one_thread(benchmark: Benchmark) -> None:
    """The same on one thread."""
    threads = torch.get_num_threads()
    torch.set_num_threads(1)
    compare_defaults(benchmark, "one_thread")
    torch.set_num_threads(threads)


def compare_defaults(benchmark: Benchmark, part: str) -> None:
    """Measure all cells of a table, and their geometric mean for each task and model."""
    for task, (make_step, dropout, targets) in TASKS.items():
        ratios: dict[str, list[float]] = {name: [] for name in targets}
        shapes = SHAPES if benchmark.settings.scale == "full" else SHAPES[:1]
        for (batch, length), padded, bf16 in product(shapes, (False, True), (False, True)):
            workload = benchmark.workload(
                batch=batch, length=length, padded=padded, bf16=bf16, dropout=dropout
            )
            least: dict[str, float | None] = dict.fromkeys(targets, 1.0)
            for name, ratio in compare(benchmark, part, task, workload, make_step, least).items():
                ratios[name].append(ratio)
        for name, target in targets.items():
            found = ratios[name]
            mean = statistics.geometric_mean(found)
            fields = (part, f"{task}, geometric mean", name, mean, "x", min(found), max(found))
            benchmark.add(*fields, at_least=target)


def compare(
    benchmark: Benchmark,
    part: str,
    task: str,
    workload: Workload,
    make_step: StepFactory,
    targets: dict[str, float | None],
) -> dict[str, float]:
    """Add the speed-up of models over transformers' RoFormer; returns the medians by name."""
    seconds = benchmark.measure(dict.fromkeys((STOCK, *targets), workload), make_step)
    medians = {}
    for name, target in targets.items():
        ratio, low, high = speedup(seconds[STOCK], seconds[name])
        medians[name] = ratio
        fields: Any = (part, f"{task}, {workload}", name, ratio, "x", low, high)
        benchmark.add(*fields, at_least=target)
    return medians


def trainer(benchmark: Benchmark) -> None:
    """Three steps of `Trainer` with default options: masked tokens, and rows as long as MRPC's."""
    for bf16, target in ((False, 1.8), (True, 2.2)):
        workload = benchmark.workload(bf16=bf16)
        targets: dict[str, float | None] = {DEFAULT: 1.0, SPARSE: target}
        compare(benchmark, "trainer", "pretraining", workload, make_pretraining_step, targets)
        workload = benchmark.workload(bf16=bf16, batch=32, length=128)
        make_step = make_classification_step
        compare(benchmark, "trainer", "classification", workload, make_step, {DEFAULT: 1.5})


def long_text(benchmark: Benchmark) -> None:
    """One text of 8,192 tokens; transformers' RoFormer only where the memory is enough."""
    for task, (make_step, dropout, targets) in TASKS.items():
        if make_step is make_logits_step:
            continue
        for bf16 in (False, True):
            workload = benchmark.workload(batch=1, length=8192, bf16=bf16, dropout=dropout)
            if stock_fits(workload, training=dropout > 0):
                least: dict[str, float | None] = dict.fromkeys(targets, 1.0)
                compare(benchmark, "long_text", task, workload, make_step, least)
                continue
            seconds = benchmark.measure(dict.fromkeys(targets, workload), make_step)
            for name in targets:
                fields = ("long_text", f"{task}, {workload}", name)
                speed = workload.tokens / statistics.median(seconds[name])
                benchmark.add(*fields, speed, "tokens/s; transformers' lacks memory")


def stock_fits(workload: Workload, training: bool) -> bool:
    """Return whether the scores of transformers' RoFormer fit into the free memory."""
    layers, _, heads = SIZES[workload.size]
    scores = workload.batch * heads * workload.length**2 * (layers if training else 1)
    return psutil.virtual_memory().available > 1.5 * BYTES_PER_SCORE * scores


def peak(benchmark: Benchmark) -> None:
    """Share of the measured peak of matrix products in training, without dropout."""
    for size, target in (("small", 60.0), ("base", 75.0)):
        workload = benchmark.workload(size=size, bf16=True, dropout=0.0)
        (values,) = benchmark.measure({SPARSE: workload}).values()
        shares = sorted(benchmark.share_of_peak(SPARSE, workload, seconds) for seconds in values)
        fields: Any = ("peak", str(workload), SPARSE, statistics.median(shares), "% of peak")
        benchmark.add(*fields, shares[0], shares[-1], at_least=target)
