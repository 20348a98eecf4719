"""Speed beside peers: `make bench` on a CPU, `make bench-gpu` on an NVIDIA GPU.

All peers run in one process, in turns; what counts are the ratios between neighbours in a round,
absolute times are this machine's. Only real tokens are counted. First the outputs and gradients are
compared with float64, so that nothing wrong is fast.
"""

import json
import os
import statistics
import subprocess
import sys
import tempfile
import time
from collections.abc import Callable, Iterable, Sequence
from dataclasses import asdict, dataclass, field, replace
from pathlib import Path
from typing import Any

import numpy as np
import torch
from accelerate import Accelerator
from torch.multiprocessing.reductions import StorageWeakRef
from torch.utils._python_dispatch import TorchDispatchMode
from transformers import PreTrainedConfig

from train.bench.accuracy import differences
from train.bench.baselines import (
    BERT,
    DENSE,
    MASK_RATE,
    MODERN,
    OUR_BERT,
    OURS,
    STOCK,
    Batch,
    Step,
    Work,
    forward_step,
    keep_freed_memory,
    model_of,
    training_step,
    without_levers,
    without_positions,
)
from train.bench.tables import Row, draw, line_of, page
from train.data.batching import SequenceIndex, StepDataset
from train.data.masking import Vocab
from train.data.token_store import TokenStore
from train.loop.flops import measure_peak_flops, step_flops
from train.loop.run_metadata import collect_environment
from train.settings import InputError, require

Maker = Callable[[str, Work, Batch], Step]
LENGTHS = (128, 256, 512, 1024, 2048, 4096, 8192)


@dataclass(frozen=True)
class BenchSettings:
    """Time training and inference against peers of equal size."""

    device: str = "cpu"
    """cpu or cuda."""
    parts: list[str] = field(default_factory=list)
    """Which tables; empty means all of that device."""
    rounds: int = 3
    """Times every peer has its turn, after one that does not count."""
    scale: str = "full"
    """full, or tiny: the same steps with tiny models and texts, to try them out."""
    output: str = "results/bench-cpu.json"
    """File for the numbers; the table (.md) and the picture (.png) go beside it."""


class Bench:
    """Measures, and keeps the lines."""

    def __init__(self, settings: BenchSettings) -> None:
        self.settings = settings
        self.device = torch.device(settings.device)
        self.rows: list[Row] = []
        self.peaks = {
            bf16: measure_peak_flops(self.device, torch.bfloat16 if bf16 else torch.float32)
            for bf16 in (False, True)
        }

    def work(self, **changes: Any) -> Work:
        """A piece of work on the device, at the scale asked for."""
        work = Work(device=self.settings.device, **changes)
        if self.settings.scale == "full":
            return work
        return replace(work, size="tiny", batch=2, length=min(work.length, 64))

    def add(self, *facts: Any, at_least: float | None = None, at_most: float | None = None) -> None:
        """Keep a line and print it; `facts` are those of `Row`, in order."""
        row = Row(*facts)
        if self.settings.scale != "full":
            at_least = at_most = None  # nothing is asked of a trial
        if at_least is not None:
            reached = row.value >= at_least
            row = replace(row, asked=f">= {at_least:g} {row.unit}", reached=reached)
        if at_most is not None:
            reached = row.value <= at_most
            row = replace(row, asked=f"<= {at_most:g} {row.unit}", reached=reached)
        self.rows.append(row)
        print(line_of(row), flush=True)

    def turns(self, steps: dict[str, Step], times: int = 1) -> dict[str, list[float]]:
        """Seconds of each step in each round, taken in turns; the first round warms up."""
        rounds = self.settings.rounds * times
        seconds: dict[str, list[float]] = {name: [] for name in steps}
        repeats = 10 if self.device.type == "cuda" else 1
        for number in range(rounds + 1):
            order = list(steps.items())  # there and back: nobody always follows the same
            for name, step in order[:: -1 if number % 2 else 1]:
                self.wait()
                started = time.perf_counter()
                for _ in range(repeats):
                    step()
                self.wait()
                seconds[name].append((time.perf_counter() - started) / repeats)
        return {name: values[1:] for name, values in seconds.items()}

    def wait(self) -> None:
        """Until the device has done what it was told."""
        if self.device.type == "cuda":
            torch.cuda.synchronize()

    def against(
        self,
        part: str,
        work: Work,
        floors: dict[str, float | None],
        make: Maker = training_step,
        theirs: Work | None = None,
    ) -> None:
        """Ours against peers.

        Args:
            part: The table.
            work: Of ours.
            floors: The peers, and how many times faster than each ours must be.
            make: A step from a peer's name.
            theirs: What peers do, when it is not the same.
        """
        torch.manual_seed(0)
        batch = Batch.of(work)
        steps = {OURS: make(OURS, work, batch)}
        steps |= {name: make(name, theirs or work, batch) for name in floors}
        seconds = self.turns(steps)
        flops = 0.0
        if make is training_step:
            config = model_of(OURS, work).config
            flops = flops_of(config, work.lengths()) / self.peaks[work.bf16]
        for name, values in seconds.items():
            speed = work.tokens / statistics.median(values)
            case = str(work if name == OURS else theirs or work)
            self.add(part, case, name, speed, "tokens/s")
            if name == OURS and flops:
                share = 100 * flops / statistics.median(values)
                at_least = MFU_FLOOR if self.device.type == "cuda" and work.length == 512 else None
                self.add(part, case, name, share, "% of peak", at_least=at_least)
            if name != OURS:
                facts = spread(values, seconds[OURS])
                between = case if theirs is None else f"{work} against {case}"
                self.add(part, between, name, facts[0], "x", *facts[1:], at_least=floors[name])


MFU_FLOOR = 45.0
"""Percent of the device's arithmetic that training at length 512 must use on a GPU."""


def flops_of(config: PreTrainedConfig, lengths: np.ndarray) -> float:
    """Of a training step on sequences of these lengths."""
    tokens = float(lengths.sum())
    return step_flops(config, tokens, float((lengths**2).sum()), MASK_RATE * tokens)


def spread(theirs: Sequence[float], ours: Sequence[float]) -> tuple[float, float, float]:
    """Median, least and greatest ratio of neighbours."""
    ratios = sorted(a / b for a, b in zip(theirs, ours))
    return statistics.median(ratios), ratios[0], ratios[-1]


def check(bench: Bench) -> None:
    """Outputs and gradients of the kernels and of the loss against float64 on a CPU."""
    for name, worst, limit in differences(bench.device):
        bench.add("check", "results and gradients", name, worst, "off float64", at_most=limit)


def training(bench: Bench) -> None:
    """A step of pretraining without padding."""
    for bf16, dropout, floor in (
        (False, 0.1, 2.0),
        (True, 0.1, 2.4),
        (False, 0.0, 2.6),
        (True, 0.0, 3.0),
    ):
        peers: dict[str, float | None] = {STOCK: floor, BERT: None, MODERN: None}
        peers |= {OUR_BERT: None} if bf16 else {}
        bench.against("training", bench.work(bf16=bf16, dropout=dropout), peers)


def padding(bench: Bench) -> None:
    """A step of pretraining on sequences of different lengths."""
    for bf16, floor in ((False, 4.5), (True, 5.5)):
        work = bench.work(bf16=bf16, padded=True)
        beside: dict[str, float | None] = {BERT: None, MODERN: None} if bf16 else {}
        bench.against("padding", work, {STOCK: floor, **beside})


def base(bench: Bench) -> None:
    """A step of a base model in bfloat16 against stock as it comes, in float32."""
    for batch, length in ((16, 128), (4, 512)):
        theirs = bench.work(size="base", batch=batch, length=length)
        bench.against("base", replace(theirs, bf16=True), {STOCK: 4.0}, theirs=theirs)


def forward(bench: Bench) -> None:
    """The encoder without gradients; bf16 is the dtype of the weights."""
    shapes = [("small", 32, 128), ("small", 8, 512), ("small", 2, 2048), ("base", 4, 512)]
    for size, batch, length in shapes:
        for bf16 in (False, True):
            shape = {"size": size, "batch": batch, "length": length}
            work = bench.work(bf16=bf16, dropout=0.0, **shape)
            bench.against("forward", work, {STOCK: 1.3, BERT: 0.97}, forward_step)
    work = bench.work(size="base", batch=4, bf16=True, dropout=0.0, padded=True)
    bench.against("forward", work, {STOCK: None, BERT: None}, forward_step)


def kept(bench: Bench) -> None:
    """Training where the memory of freed tensors is kept by all peers; ours gains least by it."""
    keep_freed_memory()  # for good, so this part comes last
    for bf16, dropout in ((False, 0.1), (True, 0.1), (True, 0.0)):
        work = bench.work(bf16=bf16, dropout=dropout)
        bench.against("kept", work, {STOCK: None, BERT: None, MODERN: None})
    bench.against("kept", bench.work(bf16=True, padded=True), {STOCK: None})


def rope(bench: Bench) -> None:
    """What the rotation costs: the same step with and without it."""
    gpu = bench.device.type == "cuda"
    limit = 1.0 if gpu else 3.0
    sizes = [("small", 8, False), ("small", 8, True), ("base", 2, True)]
    for size, batch, bf16 in [("base", 64, True)] if gpu else sizes:
        work = bench.work(size=size, batch=batch, bf16=bf16, dropout=0.0, compiled=gpu)
        step = training_step(OURS, work, Batch.of(work))
        seconds = bench.turns({"with": step, "without": without_positions(step)}, times=3)
        shares = [1 - a / b for a, b in zip(seconds["without"], seconds["with"])]
        middle, low, high = (100 * x for x in quartiles(shares))
        bench.add("rope", str(work), OURS, middle, "% of a step", low, high, at_most=limit)


def quartiles(values: Iterable[float]) -> tuple[float, float, float]:
    """Median, first and third quartile."""
    low, middle, high = statistics.quantiles(values, n=4, method="inclusive")
    return middle, low, high


def levers(bench: Bench) -> None:
    """What makes our step fast on a CPU, taken away one by one: the time that costs."""
    for batch, length, dropout in ((8, 512, 0.1), (2, 2048, 0.1), (2, 2048, 0.0)):
        work = bench.work(batch=batch, length=length, bf16=True, dropout=dropout)
        step = training_step(OURS, work, Batch.of(work))
        idle = {DENSE}
        idle |= set() if dropout else {"that with torch's dropout"}
        others = {name: x for name, x in without_levers(step).items() if name not in idle}
        _levers(bench, str(work), step, others)
    for bf16, make in ((False, training_step), (False, forward_step), (True, forward_step)):
        work = bench.work(bf16=bf16, dropout=0.1 if make is training_step else 0.0)
        step = make(OURS, work, Batch.of(work))
        case = f"{work}{', forward' if make is forward_step else ''}"
        _levers(bench, case, step, {DENSE: without_levers(step)[DENSE]})


def _levers(bench: Bench, case: str, step: Step, others: dict[str, Step]) -> None:
    seconds = bench.turns({OURS: step} | others)
    for name in others:
        facts = spread(seconds[name], seconds[OURS])
        bench.add("levers", case, name, facts[0], "x the time", *facts[1:])


def length(bench: Bench) -> None:
    """Cost of a token against the length, 8,192 tokens at a time, beside the formula's."""
    size = "base" if bench.device.type == "cuda" else "small"
    works = [
        bench.work(size=size, batch=8192 // n, length=n, bf16=True, dropout=0.0) for n in LENGTHS
    ]
    if bench.settings.scale != "full":
        works = [replace(w, length=n) for w, n in zip(works, (16, 32, 64))]
    steps = {str(w.length): training_step(OURS, w, Batch.of(w)) for w in works}
    seconds = bench.turns(steps)
    config = model_of(OURS, works[0]).config
    cost = [statistics.median(seconds[str(w.length)]) / w.tokens for w in works]
    paper = [flops_of(config, w.lengths()) / w.tokens for w in works]
    for work, seen, counted in zip(works, cost, paper):
        bench.add("length", str(work), OURS, 1 / seen, "tokens/s")
        bench.add("length", str(work), OURS, seen / cost[0], f"x the cost at {works[0].length}")
        bench.add("length", str(work), "formula", counted / paper[0], "x on paper")


class Kept(TorchDispatchMode):
    """Every storage that an operation makes, by weak reference: which are there afterwards?

    Hooks on saved tensors would not see what another hook holds.
    """

    def __init__(self) -> None:
        super().__init__()
        self.made: dict[int, tuple[StorageWeakRef, int]] = {}

    def __torch_dispatch__(self, func: Any, types: Any, args: Any = (), kwargs: Any = None) -> Any:
        """Compute, and note what came out."""
        result = func(*args, **(kwargs or {}))
        for tensor in torch.utils._pytree.tree_leaves(result):
            if isinstance(tensor, torch.Tensor):
                storage = tensor.untyped_storage()
                self.made[storage._cdata] = StorageWeakRef(storage), storage.nbytes()
        return result

    def bytes(self, but: set[int]) -> int:
        """Of all that are left, without those that were there before."""
        alive = {place: size for place, (ref, size) in self.made.items() if not ref.expired()}
        return sum(size for place, size in alive.items() if place not in but)


def memory(bench: Bench) -> None:
    """Bytes a training step keeps for its backward pass, attention dropout 0."""
    work = bench.work(size="base", attention_dropout=0.0)
    batch, kept = Batch.of(work), {}
    for name in (OURS, STOCK):
        model = model_of(name, work)
        model = model.to(work.device).train()
        options = {"sparse_prediction": True} if name == OURS else {}
        with Kept() as storages:
            loss = model(input_ids=batch.ids, labels=batch.labels, **options).loss
        assert loss.requires_grad
        own = {p.untyped_storage()._cdata for p in model.parameters()}
        kept[name] = storages.bytes(but=own) / 1e6
        bench.add("memory", str(work), name, kept[name], "MB")
        del loss, model
    share = 100 * kept[OURS] / kept[STOCK]
    bench.add("memory", str(work), OURS, share, "% of stock", at_most=50.0)


def data(bench: Bench) -> None:
    """Masked batches made by one process from tokens on disk."""
    tokens = 20_000_000 if bench.settings.scale == "full" else 200_000
    with tempfile.TemporaryDirectory() as folder:
        sequences = SequenceIndex(random_store(Path(folder), tokens), 512)
        vocab = Vocab(2, 3, 0, 4, VOCABULARY_OF_STORE, (0, 1, 2, 3, 4))
        for packed in (False, True):
            steps = StepDataset(sequences, vocab, 256, 64, MASK_RATE, 0, packed=packed)
            speeds = []
            for step in range(bench.settings.rounds + 1):
                started = time.perf_counter()
                batches = steps[step]
                seconds = time.perf_counter() - started
                targets = sum(int(b["input_ids"].ne(vocab.pad_id).sum()) for b in batches)
                speeds.append(targets / seconds)
            layout = "packed rows" if packed else "padded rows"
            middle, low, high = quartiles(speeds[1:])
            facts = ("data", layout, "one process", middle, "tokens/s", low, high)
            bench.add(*facts, at_least=2e6)


VOCABULARY_OF_STORE = 30522


def random_store(folder: Path, tokens: int) -> TokenStore:
    """Documents of 20 to 2,000 random tokens, as the tokeniser leaves them on disk."""
    draw = np.random.default_rng(0)
    (folder / "0").mkdir()
    draw.integers(5, VOCABULARY_OF_STORE, tokens, dtype=np.uint16).tofile(folder / "0/tokens.bin")
    ends = np.cumsum(draw.integers(20, 2000, tokens // 1000))
    ends = np.append(ends[ends < tokens], tokens)
    starts = np.zeros(1, np.int64)
    return TokenStore(ends, (folder / "0",), starts, np.dtype(np.uint16), (len(ends),), folder)


IMPORT = """
import time, transformers.models.roformer.modeling_roformer
started = time.perf_counter()
import roformer
print(time.perf_counter() - started)
"""

COMPILE = """
import time, torch
from train.bench.baselines import OURS, Batch, Work, training_step
work = Work({size!r}, 2, 128, True, 0.0, device={device!r}, compiled=True)
step = training_step(OURS, work, Batch.of(work))
started = time.perf_counter()
step()
torch.cuda.is_available() and torch.cuda.synchronize()
print(time.perf_counter() - started)
"""


def start(bench: Bench) -> None:
    """What the package adds to an import, and how long the first compiled step takes."""
    seconds = [python(IMPORT) for _ in range(bench.settings.rounds)]
    middle, low, high = quartiles(seconds)
    name = "import roformer, after transformers' model"
    bench.add("start", name, OURS, middle, "s", low, high, at_most=0.3)
    size = "base" if bench.device.type == "cuda" else "small"
    size = size if bench.settings.scale == "full" else "tiny"
    code = COMPILE.format(size=size, device=bench.settings.device)
    with tempfile.TemporaryDirectory() as cache:
        for word in ("first", "next"):
            try:
                took = python(code, TORCHINDUCTOR_CACHE_DIR=cache)
            except subprocess.CalledProcessError as error:
                reason = (error.stderr.strip().splitlines() or ["no reason"])[-1]
                print(f"warning: a compiled step was not measured: {reason}", file=sys.stderr)
                break
            bench.add(
                "start", f"compiled step of a {size} model, {word} start", OURS, took, "s",
                at_most=90.0,
            )  # fmt: skip


def python(code: str, **environment: str) -> float:
    """The number that a fresh interpreter prints last."""
    done = subprocess.run(
        [sys.executable, "-c", code],
        env=os.environ | environment,
        capture_output=True,
        text=True,
        check=True,
    )
    return float(done.stdout.split()[-1])


def training_on_gpu(bench: Bench) -> None:
    """A compiled step of pretraining on packed rows, without dropout in attention."""
    sizes = [("base", n) for n in (128, 512, 2048, 8192)] + [("large", 512)]
    for size, length in sizes:
        work = bench.work(size=size, batch=32768 // length, length=length, bf16=True,
                          attention_dropout=0.0, compiled=True)  # fmt: skip
        beside: dict[str, float | None] = {STOCK: 5.0, BERT: None, OUR_BERT: 0.99}
        bench.against("training", work, beside if (size, length) == ("base", 512) else {})


PARTS: dict[str, dict[str, Callable[[Bench], None]]] = {
    "cpu": {
        "check": check,
        "training": training,
        "padding": padding,
        "base": base,
        "forward": forward,
        "rope": rope,
        "levers": levers,
        "length": length,
        "memory": memory,
        "data": data,
        "start": start,
        "kept": kept,
    },
    "cuda": {
        "check": check,
        "training": training_on_gpu,
        "rope": rope,
        "length": length,
        "data": data,
        "start": start,
    },
}


def main(settings: BenchSettings) -> None:
    """Measure, print, and write numbers, tables and picture after every part.

    Raises:
        InputError: A setting, or a kernel that does not compute what it should.
    """
    known = refuse(settings)
    bench, seconds = Bench(settings), {}
    for part in known:  # in their order: the last one changes the process
        if settings.parts and part not in settings.parts:
            continue
        started = time.monotonic()
        print(f"== {part}: {known[part].__doc__}", flush=True)
        known[part](bench)
        seconds[part] = round(time.monotonic() - started, 1)
        write(bench, seconds, {name: make.__doc__ or "" for name, make in known.items()})
    asked = [row for row in bench.rows if row.reached is not None]
    print(
        f"== {sum(row.reached or False for row in asked)} of {len(asked)} targets reached, ", end=""
    )
    print(f"{sum(seconds.values()):.0f} s")
    for row in bench.rows:
        if row.asked or row.unit == "% of peak":
            print(line_of(row))


def refuse(settings: BenchSettings) -> dict[str, Callable[[Bench], None]]:
    """The parts of the device, when all settings are such that it can begin.

    Raises:
        InputError: One of them is not.
    """
    there = settings.device in PARTS and (settings.device == "cpu" or torch.cuda.is_available())
    known = PARTS.get(settings.device, {})
    found = f"{settings.device} with CUDA {torch.cuda.is_available()}"
    require(there, "device", "must be cpu, or cuda where there is one", found, "take cpu")
    unknown = [part for part in settings.parts if part not in known]
    rule = f"must be of {', '.join(known)}"
    require(not unknown, "parts", rule, ", ".join(unknown), "leave it out for all")
    rule = "must be one of full, tiny"
    require(settings.scale in ("full", "tiny"), "scale", rule, settings.scale, "take full")
    require(settings.rounds > 1, "rounds", "must be at least 2", settings.rounds, "take 3")
    output = Path(settings.output)
    require(output.suffix == ".json", "output", "must end in .json", settings.output, "rename it")
    try:
        output.parent.mkdir(parents=True, exist_ok=True)
        output.touch()
    except OSError as error:
        rule = "must be a file that can be written"
        found = f"{settings.output} ({error.strerror})"
        raise InputError(f"output {rule}, got {found}; name another") from error
    return known


def write(bench: Bench, seconds: dict[str, float], meanings: dict[str, str]) -> None:
    """Numbers, tables and picture of what has been measured so far."""
    settings = bench.settings
    about = collect_environment(Accelerator(cpu=settings.device == "cpu")) | {
        "settings": asdict(settings),
        "peak_tflops": {"bf16" if k else "fp32": v / 1e12 for k, v in bench.peaks.items()},
        "seconds": seconds,
    }
    output = Path(settings.output)
    rows = [asdict(row) for row in bench.rows]
    output.write_text(json.dumps(about | {"rows": rows}, indent=1) + "\n")
    output.with_suffix(".md").write_text(page(about, bench.rows, meanings))
    draw(bench.rows, STOCK, output.with_suffix(".png"))
