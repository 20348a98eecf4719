"""log.jsonl of a run, with its progress bar, throughput, model FLOPs utilisation and tracker."""

import json
import math
import sys
import time
from collections.abc import Iterable, Iterator
from contextlib import contextmanager, suppress
from pathlib import Path
from typing import Any, NamedTuple, TextIO

import torch
from accelerate import Accelerator
from torch import Tensor
from tqdm import tqdm
from transformers import PreTrainedConfig

from roformer.kernels import Linear
from train.atomic_dir import write_text_atomically
from train.command_line import progress_interval
from train.loop.memory import peak_memory

SPIKE = 1.0
"""Rise of the loss in nats, from one report to the next, that causes a warning."""


class Sums(NamedTuple):
    """Sums over the micro-batches since the last report; `squares` are of lengths."""

    loss: float = 0.0
    labelled: float = 0.0
    tokens: float = 0.0
    squares: float = 0.0


INITIAL_STATE: dict[str, Any] = {
    "tokens": 0, "seconds": 0.0, "reported": 0, "pending": Sums(), "unreported": [0.0, 0.0],
}  # fmt: skip
"""`RunLog.state` before the first step; `checkpoint.Checkpoints` tells what the keys mean."""


class Clock:
    """Seconds of the run, and of training since the last report.

    Those of the run add up the training loops of all launches with evaluations and saves; those of
    training exclude evaluations. `waited` is the part of the latter spent waiting for batches.
    """

    def __init__(self, previous_seconds: float, interval_seconds: float, waited: float) -> None:
        now = time.perf_counter()
        self.run_started, self.interval_started = now - previous_seconds, now - interval_seconds
        self.waited = waited

    @property
    def seconds(self) -> float:
        """Seconds of the run so far, over all its launches."""
        return time.perf_counter() - self.run_started

    @property
    def interval_seconds(self) -> float:
        """Seconds of training since the last report."""
        return time.perf_counter() - self.interval_started

    def start_interval(self) -> None:
        """Start a new reporting interval."""
        self.interval_started, self.waited = time.perf_counter(), 0.0

    @contextmanager
    def paused(self) -> Iterator[None]:
        """Exclude an evaluation from the training time, and so from the throughput."""
        started = time.perf_counter()
        yield
        self.interval_started += time.perf_counter() - started

    def time_batches(self, batches: Iterable[Any]) -> Iterator[Any]:
        """Yield the batches, adding the time spent waiting for each to `waited`."""
        iterator = iter(batches)
        started = time.perf_counter()
        for batch in iterator:
            self.waited += time.perf_counter() - started
            yield batch
            started = time.perf_counter()


class RunLog:
    """Accumulates metrics and writes them to log.jsonl, progress bar and tracker.

    Between two reports nothing synchronises with the device: device values are summed on the
    device, host values on the host. Micro-batches whose loss is not finite are left out of the
    mean loss. The initial `state` is `step`, with `RunLog.state` at that step or
    `INITIAL_STATE`. `steps` is the number of steps of the run; `peak_flops` is of one device.
    """

    def __init__(
        self,
        accelerator: Accelerator,
        folder: Path,
        state: dict[str, Any],
        steps: int,
        config: PreTrainedConfig,
        peak_flops: float,
    ) -> None:
        self.accelerator, self.config, self.peak_flops = accelerator, config, peak_flops
        self.reported_tokens, self.reported_step = state["tokens"], state["reported"]
        self.last_loss: float | None = None
        self.clock = Clock(state["seconds"], *state["unreported"])
        is_main = accelerator.is_main_process
        self._reset_sums(Sums(*state["pending"]) if is_main else Sums())
        self.bar = tqdm(
            total=steps,
            initial=state["step"],
            disable=not is_main,
            unit="step",
            dynamic_ncols=True,
            mininterval=progress_interval(),
        )
        self.stream: TextIO | None = None
        if is_main:
            truncate_log(folder / "log.jsonl", state["step"])
            self.stream = (folder / "log.jsonl").open("a")

    def _reset_sums(self, values: Sums) -> None:
        """Set the sums: the first two are added on the device, the others on the host."""
        sums = torch.tensor(values, dtype=torch.float64)
        self.device_sums, self.host_sums = sums[:2].to(self.accelerator.device), sums[2:]

    def _reduce_sums(self) -> Sums:
        """Return the sums over all processes; a collective call."""
        host_sums = self.host_sums.to(self.device_sums.device)
        sums = self.accelerator.reduce(torch.cat((self.device_sums, host_sums)))
        return Sums(*sums.tolist())

    def state(self) -> dict[str, Any]:
        """Return what a checkpoint needs for the log to continue exactly; a collective call."""
        return {
            "tokens": self.reported_tokens,
            "seconds": self.clock.seconds,
            "reported": self.reported_step,
            "pending": self._reduce_sums(),
            "unreported": [self.clock.interval_seconds, self.clock.waited],
        }

    def add(self, loss: Tensor, batch: dict[str, Any]) -> None:
        """Add a micro-batch of this process, on the host, with its summed loss, on the device."""
        if "attention_mask" in batch:
            lengths = batch["attention_mask"].sum(dim=-1).double()
        else:  # a packed row
            lengths = batch["cu_seq_lens_q"].diff().double()
        self.host_sums += torch.stack((lengths.sum(), lengths.square().sum()))
        loss, labelled = loss.detach().double(), int((batch["labels"] >= 0).sum())
        values = torch.stack((loss, torch.full_like(loss, labelled)))
        self.device_sums += torch.where(loss.isfinite(), values, 0.0)

    def report_training(self, step: int, learning_rate: float, gradient_norm: Tensor) -> None:
        """Write the metrics of all steps since the last report."""
        loss, labelled, tokens, squares = self._reduce_sums()
        self.reported_tokens += int(tokens)
        elapsed = self.clock.interval_seconds
        flops = step_flops(self.config, tokens, squares, labelled)
        peak = self.peak_flops * self.accelerator.num_processes
        row = {
            "step": step,
            "tokens": self.reported_tokens,
            "seconds": round(self.clock.seconds, 2),
            "loss": loss / labelled if labelled else math.nan,
            "learning_rate": learning_rate,
            "gradient_norm": float(gradient_norm),
            "tokens_per_second": round(tokens / elapsed),
            "seconds_per_step": round(elapsed / (step - self.reported_step), 4),
            "data_wait": round(self.clock.waited / elapsed, 4),
            "mfu": round(flops / elapsed / peak, 4),
            "memory_gb": round(peak_memory(self.accelerator.device) / 1e9, 3),
        }
        if self.last_loss is not None and row["loss"] > self.last_loss + SPIKE:
            self.warn(f"the loss rose from {self.last_loss:.2f} to {row['loss']:.2f} at {step}")
        if labelled:
            self.last_loss = row["loss"]
        self.reported_step = step
        self.clock.start_interval()
        self._reset_sums(Sums())
        self.bar.set_postfix_str(f"loss {row['loss']:.3f}, {row['tokens_per_second']:,} tokens/s")
        self.bar.update(step - self.bar.n)
        self._write(row)

    def report_validation(self, step: int, scores: dict[str, float]) -> None:
        """Write the scores of an evaluation, with the tokens so far, and show its loss."""
        tokens = self.reported_tokens + int(self._reduce_sums().tokens)
        seconds = round(self.clock.seconds, 2)
        self.bar.set_postfix_str(f"held-out loss {scores['validation_loss']:.3f}")
        self._write({"step": step, "tokens": tokens, "seconds": seconds, **scores})

    def warn(self, line: str) -> None:
        """Print a warning above the progress bar, on the main process."""
        if self.accelerator.is_main_process:
            self.bar.write(f"warning: {line}", file=sys.stderr)

    def _write(self, row: dict[str, Any]) -> None:
        row = {key: value for key, value in row.items() if math.isfinite(value)}  # JSON has no nan
        self.accelerator.log({k: v for k, v in row.items() if k != "step"}, step=row["step"])
        if self.stream is not None:
            self.stream.write(json.dumps(row, allow_nan=False) + "\n")
            self.stream.flush()

    def __enter__(self) -> "RunLog":
        return self

    def __exit__(self, *error: object) -> None:
        self.bar.close()
        if self.stream is not None:
            self.stream.close()


def read_log(log: Path) -> list[dict[str, Any]]:
    """Read the rows of log.jsonl; none of a missing file."""
    rows = []
    for line in log.read_text(errors="replace").splitlines() if log.exists() else ():
        with suppress(ValueError):  # torn by a kill or a power cut
            rows.append(json.loads(line))
    return [row for row in rows if isinstance(row, dict) and "step" in row]


def truncate_log(log: Path, step: int) -> None:
    """Remove the rows after a step, which a killed run logged after its last checkpoint."""
    kept = [f"{json.dumps(row)}\n" for row in read_log(log) if row["step"] <= step]
    write_text_atomically(log, "".join(kept))


def step_flops(config: PreTrainedConfig, tokens: float, squares: float, labelled: float) -> float:
    """Return the floating-point operations of a forward and backward pass.

    6 N (4 E^2 + 2 E F) per token, 12 N E per pair of tokens of a sequence and 6 (E^2 + V E) per
    labelled token, with N layers, hidden size E, intermediate size F and V vocabulary entries.
    Linear attention with M features per head costs 12 N E M per token instead of the pairs; FAVOR+,
    which also computes its random projections, 20 N E M. Causal attention counts all pairs.
    Padding and position biases are not counted; `squares` is the sum of the squared lengths of the
    sequences. The vocabulary layer is counted for labelled tokens only. A multiplication and an
    addition are two operations; forward and backward pass together cost three times the forward
    pass.
    """
    E, F = config.hidden_size, config.intermediate_size  # noqa: N806
    layers, V = config.num_hidden_layers, config.vocab_size  # noqa: N806
    weights = 6 * layers * (4 * E**2 + 2 * E * F) * tokens
    kind, attention = getattr(config, "linear_attention", None), 12 * squares
    if kind is not None:
        attention = 12 * tokens * E / config.num_attention_heads
    if kind == "favor":
        attention = 20 * tokens * config.random_features
    return weights + layers * E * attention + 6 * (E**2 + V * E) * labelled


def measure_peak_flops(device: torch.device, dtype: torch.dtype) -> float:
    """Measure the operations per second of a large matrix product, the best of six."""
    size = 8192 if device.type == "cuda" else 1024
    layer = Linear(size, size, bias=False, device=device, dtype=dtype)  # as fast as the model's
    rows = torch.randn(size, size, device=device, dtype=dtype)
    seconds = []
    synchronize = torch.get_device_module(device).synchronize
    for _ in range(6):
        synchronize(device)
        started = time.perf_counter()
        with torch.no_grad():
            layer(rows)
        synchronize(device)
        seconds.append(time.perf_counter() - started)
    return 2 * size**3 / min(seconds)
