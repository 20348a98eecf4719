"""Parts of the benchmark; the docstring of each part is the caption of its table."""

import statistics
import tempfile
import time
from collections.abc import Callable, Iterable
from dataclasses import replace
from pathlib import Path

import numpy as np

from train.bench.baselines import (
    BERT,
    MASK_RATE,
    MODERN,
    OUR_BERT,
    OURS,
    OURS_WITHOUT_POSITIONS,
    STOCK,
    VOCAB_SIZE,
    make_forward_step,
)
from train.bench.defaults import defaults, long_text, one_thread, peak, trainer
from train.bench.timing import Benchmark
from train.data.batching import SequenceIndex, StepDataset
from train.data.masking import Vocab
from train.data.token_store import TokenStore


def training(benchmark: Benchmark) -> None:
    """A step of pretraining without padding."""
    for bf16, dropout, target in (
        (False, 0.1, 2.0),
        (True, 0.1, 2.4),
        (False, 0.0, 2.6),
        (True, 0.0, 3.0),
    ):
        targets: dict[str, float | None] = {STOCK: target, BERT: None, MODERN: None}
        targets |= {OUR_BERT: None} if bf16 else {}
        benchmark.compare("training", benchmark.workload(bf16=bf16, dropout=dropout), targets)


def padding(benchmark: Benchmark) -> None:
    """A step of pretraining on sequences of different lengths."""
    for bf16, target in ((False, 4.5), (True, 5.5)):
        targets: dict[str, float | None] = {STOCK: target}
        targets |= {BERT: None, MODERN: None} if bf16 else {}
        benchmark.compare("padding", benchmark.workload(bf16=bf16, padded=True), targets)


def base(benchmark: Benchmark) -> None:
    """A step of a base model in bfloat16 against transformers' RoFormer in float32, its default."""
    for batch, length in ((16, 128), (4, 512)):
        stock = benchmark.workload(size="base", batch=batch, length=length)
        ours = replace(stock, bf16=True)
        benchmark.compare("base", ours, {STOCK: 4.0}, baseline_workload=stock)


def forward(benchmark: Benchmark) -> None:
    """The encoder without gradients; bf16 is the dtype of the weights."""
    shapes = [("small", 32, 128), ("small", 8, 512), ("small", 2, 2048), ("base", 4, 512)]
    for size, batch, length in shapes:
        for bf16 in (False, True):
            workload = benchmark.workload(
                size=size, batch=batch, length=length, bf16=bf16, dropout=0.0
            )
            benchmark.compare("forward", workload, {STOCK: 1.3, BERT: 0.97}, make_forward_step)
    workload = benchmark.workload(size="base", batch=4, bf16=True, dropout=0.0, padded=True)
    benchmark.compare("forward", workload, {STOCK: None, BERT: None}, make_forward_step)


def kept(benchmark: Benchmark) -> None:
    """Training in a process that keeps freed memory, which helps other models more than ours."""
    for bf16, dropout in ((False, 0.1), (True, 0.1), (True, 0.0)):
        workload = benchmark.workload(bf16=bf16, dropout=dropout)
        targets: dict[str, float | None] = {STOCK: None, BERT: None, MODERN: None}
        benchmark.compare("kept", workload, targets, keep=True)
    workload = benchmark.workload(bf16=True, padded=True)
    benchmark.compare("kept", workload, {STOCK: None}, keep=True)


def rope(benchmark: Benchmark) -> None:
    """Share of a training step that the rotation takes: rope against position_encoding none."""
    gpu = benchmark.device.type == "cuda"
    sizes = [("small", 8, False), ("small", 8, True), ("base", 2, True)]
    for size, batch, bf16 in [("base", 64, True)] if gpu else sizes:
        workload = benchmark.workload(size=size, batch=batch, bf16=bf16, dropout=0.0, compiled=gpu)
        models = dict.fromkeys((OURS, OURS_WITHOUT_POSITIONS), workload)
        seconds = benchmark.measure(models, factor=3)
        pairs = zip(seconds[OURS_WITHOUT_POSITIONS], seconds[OURS])
        median, low, high = quartiles(100 * (1 - without / rotated) for without, rotated in pairs)
        fields = ("rope", str(workload), OURS, median, "% of a step", low, high)
        benchmark.add(*fields, at_most=4.0 if gpu else 3.0)


def quartiles(values: Iterable[float]) -> tuple[float, float, float]:
    """Median, first and third quartile."""
    low, median, high = statistics.quantiles(values, n=4, method="inclusive")
    return median, low, high


def data(benchmark: Benchmark) -> None:
    """Masked batches made by one process from tokens on disk."""
    tokens = 20_000_000 if benchmark.settings.scale == "full" else 200_000
    with tempfile.TemporaryDirectory() as folder:
        sequences = SequenceIndex(random_store(Path(folder), tokens), 512)
        vocab = Vocab(2, 3, 0, 4, VOCAB_SIZE, (0, 1, 2, 3, 4))
        for packed in (False, True):
            steps = StepDataset(sequences, vocab, 256, 64, MASK_RATE, 0, packed=packed)
            speeds = []
            for step in range(benchmark.settings.rounds + 1):
                started = time.perf_counter()
                batches = steps[step]
                seconds = time.perf_counter() - started
                made = sum(int(b["input_ids"].ne(vocab.pad_id).sum()) for b in batches)
                speeds.append(made / seconds)
            layout = "packed rows" if packed else "padded rows"
            median, low, high = quartiles(speeds[1:])
            fields = ("data", layout, "one process", median, "tokens/s", low, high)
            benchmark.add(*fields, at_least=2e6)


def random_store(folder: Path, tokens: int) -> TokenStore:
    """Write documents of 20 to 2,000 random tokens as `tokenize_corpus` would."""
    rng = np.random.default_rng(0)
    (folder / "0").mkdir()
    rng.integers(5, VOCAB_SIZE, tokens, dtype=np.uint16).tofile(folder / "0/tokens.bin")
    ends = np.cumsum(rng.integers(20, 2000, tokens // 1000))
    ends = np.append(ends[ends < tokens], tokens)
    starts = np.zeros(1, np.int64)
    return TokenStore(ends, (folder / "0",), starts, np.dtype(np.uint16), (len(ends),), folder)


def training_on_gpu(benchmark: Benchmark) -> None:
    """A compiled step of pretraining on packed rows, without attention dropout."""
    sizes = [("base", n) for n in (128, 512, 2048, 8192)] + [("large", 512)]
    for size, tokens in sizes:
        workload = benchmark.workload(size=size, batch=32768 // tokens, length=tokens, bf16=True,
                                      attention_dropout=0.0, compiled=True)  # fmt: skip
        targets: dict[str, float | None] = {STOCK: 5.0, BERT: None, OUR_BERT: 0.99}
        benchmark.compare("training", workload, targets if (size, tokens) == ("base", 512) else {})


CPU_PARTS = (
    defaults, one_thread, trainer, long_text, peak, training, padding, base, forward, rope,
    data, kept,
)  # fmt: skip
PARTS: dict[str, dict[str, Callable[[Benchmark], None]]] = {
    "cpu": {part.__name__: part for part in CPU_PARTS},
    "cuda": {"training": training_on_gpu, "rope": rope, "data": data},
}
"""Device -> name -> part, in the order in which they run."""
