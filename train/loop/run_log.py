"""What a run says of itself: settings.yaml, environment.json, progress bar, log.jsonl, tracker."""

import dataclasses
import functools
import json
import math
import platform
import resource
import subprocess
import sys
import time
from collections.abc import Iterable, Iterator
from contextlib import contextmanager
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any, TextIO

import accelerate
import torch
import transformers
import yaml
from accelerate import Accelerator
from accelerate.utils import DynamoBackend
from torch import Tensor
from tqdm import tqdm
from transformers import PreTrainedConfig

from train.loop.flops import step_flops
from train.loop.launch import progress_interval
from train.settings import PretrainSettings, require

Batch = dict[str, Tensor]

SPIKE = 1.0
"""Rise of the loss in nats, from one report to the next, that is worth a warning."""


FREE = {
    "corpus": {"cache", "train", "validation", "tokenizer"},  # what they hold is compared instead
    "optim": {"micro_batch"},
    "run": {
        "folder", "name", "log_every", "validate_every", "validation_sequences", "save_every",
        "keep", "tracker", "workers", "max_hours", "peak_tflops", "allow_drift", "dry",
    },
}  # fmt: skip
"""Keys that may change when a run goes on: they do not decide what is learned."""


def collect_environment(accelerator: Accelerator) -> dict[str, Any]:
    """Versions, machine and commit: what a number needs beside it to be believed."""
    cuda = accelerator.device.type == "cuda"
    return {
        "python": platform.python_version(),
        "torch": torch.__version__,
        "transformers": transformers.__version__,
        "accelerate": accelerate.__version__,
        "machine": torch.cuda.get_device_name() if cuda else _processor(),
        "threads": torch.get_num_threads(),
        "processes": accelerator.num_processes,
        "precision": accelerator.mixed_precision,
        "compiled": _compiled(accelerator),
        "commit": git_commit(),
    }


def _compiled(accelerator: Accelerator) -> str:
    plugin = accelerator.state.dynamo_plugin
    if plugin.backend == DynamoBackend.NO:
        return "no"
    return "regional" if plugin.use_regional_compilation else "full"


def _processor() -> str:
    info = Path("/proc/cpuinfo")
    lines = info.read_text().splitlines() if info.exists() else []
    names = [line.split(":", 1)[1].strip() for line in lines if line.startswith("model name")]
    return f"{len(names)} x {names[0]}" if names else platform.processor()


@functools.cache
def git_commit() -> str:
    """Of the clone that this file is in, "-dirty" where its code is not; else "unknown".

    What a run itself writes into the clone, such as a line of results, does not count.
    """
    root = Path(__file__).parents[2]
    code = [str(root / name) for name in ("roformer", "train", "finetune", "configs")]
    try:
        changed = _git(root, "status", "--porcelain", *code)
        return _git(root, "describe", "--always", "--abbrev=12") + ("-dirty" if changed else "")
    except (OSError, subprocess.CalledProcessError):
        return "unknown"


def _git(clone: Path, *command: str) -> str:
    git = ["git", "-C", str(clone), *command]
    return subprocess.run(git, capture_output=True, text=True, check=True).stdout.strip()


def as_dict(settings: PretrainSettings) -> dict[str, Any]:
    """Settings as plain values, as settings.yaml holds them."""
    return json.loads(json.dumps(dataclasses.asdict(settings)))


def flat_settings(settings: PretrainSettings) -> dict[str, int | float | str | bool]:
    """Settings by the name of their flag, for a tracker; lists as JSON, without those not set."""
    found: dict[str, int | float | str | bool] = {}

    def add(name: str, value: Any) -> None:
        if isinstance(value, dict):
            for key, inner in value.items():
                add(f"{name}.{key}".removeprefix("."), inner)
        elif value is not None:
            found[name] = value if isinstance(value, int | float | str) else json.dumps(value)

    add("", as_dict(settings))
    return found


def changed_settings(
    folder: Path, settings: PretrainSettings, precision: str
) -> dict[str, tuple[Any, Any]]:
    """Keys that decide what is learned and differ from the run that is there: (there, here).

    Args:
        folder: The run's folder.
        settings: Of this launch.
        precision: Its mixed precision, which the launcher decides and environment.json remembers.

    Raises:
        InputError: What the run says of itself cannot be read.
    """
    if not (folder / "settings.yaml").exists():
        return {}
    before = _read(folder / "settings.yaml", "the settings")
    changed: dict[str, tuple[Any, Any]] = {}
    for section, values in as_dict(settings).items():
        for key, value in values.items() if isinstance(values, dict) else [("", values)]:
            begun = before.get(section, {})
            begun = begun.get(key) if key else begun or []
            if section == "stages":
                begun, value = ([_decisive(stage) for stage in x] for x in (begun, value))
            if begun != value and key not in FREE.get(section, ()):
                changed[f"{section}.{key}".removesuffix(".")] = begun, value
    if (folder / "environment.json").exists():
        begun = _read(folder / "environment.json", "the environment").get("precision", precision)
        if begun != precision:
            changed["mixed_precision"] = begun, precision
    return changed


def _decisive(stage: dict[str, Any]) -> dict[str, Any]:
    free = FREE["optim"] | FREE["corpus"]
    return {key: value for key, value in stage.items() if key not in free}


def _read(file: Path, what: str) -> dict[str, Any]:
    try:
        found = yaml.safe_load(file.read_text(encoding="utf-8"))  # which reads JSON as well
    except (ValueError, yaml.YAMLError):
        found = None
    rule, remedy = f"must hold {what} of the run", "delete it to go on"
    require(isinstance(found, dict), str(file), rule, "none", remedy)
    return found


def check_settings_unchanged(folder: Path, settings: PretrainSettings, precision: str) -> None:
    """Stop a run from going on under other settings than it began with.

    Raises:
        InputError: A key that decides what is learned has changed.
    """
    for key, (begun, value) in changed_settings(folder, settings, precision).items():
        rule = f"must stay {begun!r} for the run in {folder}"
        remedy = "choose another run.name, or set run.allow_drift true"
        require(settings.run.allow_drift, key, rule, repr(value), remedy)


def write_header(
    folder: Path,
    settings: PretrainSettings,
    accelerator: Accelerator,
    step: int,
    parameters: int,
    changed: dict[str, tuple[Any, Any]],
) -> None:
    """Write environment.json and settings.yaml, when a run begins or goes on under other settings.

    An environment.json that was deleted is written again, with what is here now.

    What changed is said, and stays in the comments that settings.yaml opens with: a result of the
    run belongs to neither settings alone.
    """
    file, notes = folder / "settings.yaml", ""
    begins, place = not file.exists(), folder / "environment.json"
    if begins or not place.exists():
        about = collect_environment(accelerator) | {"parameters": parameters}
        _write_whole(place, json.dumps(about, indent=2) + "\n")
    if not begins and not changed:
        return
    if changed and not begins:
        keys = "; ".join(
            f"{key} from {begun!r} to {value!r}" for key, (begun, value) in changed.items()
        )
        note = f"run.allow_drift changed after step {step}: {keys}"
        print(f"warning: {note}", flush=True)
        lines = file.read_text(encoding="utf-8").splitlines()
        notes = "".join(f"{line}\n" for line in [*lines, f"# {note}"] if line.startswith("#"))
        if "mixed_precision" in changed:
            about = _read(place, "the environment")
            about["precision"] = accelerator.mixed_precision
            _write_whole(place, json.dumps(about, indent=2) + "\n")
    _write_whole(file, notes + yaml.safe_dump(as_dict(settings), sort_keys=False))


def _write_whole(file: Path, text: str) -> None:
    unfinished = file.with_name(f"{file.name}.tmp")
    unfinished.write_text(text, encoding="utf-8")
    unfinished.replace(file)


INITIAL_STATE: dict[str, Any] = {
    "tokens": 0, "seconds": 0.0, "reported": 0, "pending": [0.0] * 5, "unreported": [0.0, 0.0],
}  # fmt: skip
"""What `RunLog.state` would return before the first step."""


@dataclass
class Clock:
    """Seconds of the run, and what they went into since the last report."""

    before: float
    trained: float = 0.0
    """Seconds since the last report without pauses, up to where `since` begins."""
    waited: float = 0.0
    """Those of them that were spent waiting for batches."""
    started: float = field(default_factory=time.perf_counter)
    since: float = field(default_factory=time.perf_counter)

    @property
    def seconds(self) -> float:
        """Wall-clock of the run so far, over all its launches."""
        return self.before + time.perf_counter() - self.started

    def training(self) -> float:
        """Seconds of training since the last report."""
        now = time.perf_counter()
        self.trained, self.since = self.trained + now - self.since, now
        return self.trained

    @contextmanager
    def paused(self) -> Iterator[None]:
        """What is done inside is no training: it takes the run's time and does not slow it."""
        self.training()
        yield
        self.since = time.perf_counter()

    def timed(self, batches: Iterable[Any]) -> Iterator[Any]:
        """The batches, with the time that was waited for each counted."""
        source = iter(batches)
        while True:
            started = time.perf_counter()
            batch = next(source, None)
            if batch is None:
                return
            self.waited += time.perf_counter() - started
            yield batch


class RunLog:
    """Counts what a run has done and reports it, on the main process.

    Between two reports it waits for nothing: what the device computes is summed there, what the
    host knows of a batch is summed here. A micro-batch whose loss is not finite has no part in the
    loss.

    Args:
        accelerator: Adds up over processes and feeds the tracker.
        folder: The run's folder.
        state: `step`, and what `state` returned when it was reached, or `NOTHING`.
        steps: Steps of the whole run, for the bar; None when its end is a time.
        config: The encoder's, for the count of operations.
        peak: Operations a second of one device.
    """

    def __init__(
        self,
        accelerator: Accelerator,
        folder: Path,
        state: dict[str, Any],
        steps: int | None,
        config: PreTrainedConfig,
        peak: float,
    ) -> None:
        self.accelerator, self.config, self.peak = accelerator, config, peak
        self.tokens, self.step = state["tokens"], state["reported"]
        self.validated: tuple[int, float] | None = None  # step and loss
        self.last_loss: float | None = None
        self.clock = Clock(state["seconds"], *state["unreported"])
        main = accelerator.is_main_process
        # what was counted since the last report when the checkpoint was written
        self._count_from(state["pending"] if main else INITIAL_STATE["pending"])
        looks = {"unit": "step", "dynamic_ncols": True, "mininterval": progress_interval()}
        self.bar = tqdm(total=steps, initial=state["step"], disable=not main, **looks)
        self.stream: TextIO | None = None
        if main:
            truncate_log(folder / "log.jsonl", state["step"])
            self.stream = (folder / "log.jsonl").open("a")

    def _count_from(self, pending: list[float]) -> None:
        """Begin to count: loss, right and predicted on the device; tokens and their squares."""
        counts = torch.tensor(pending, dtype=torch.float64)
        self.computed, self.read = counts[:3].to(self.accelerator.device), counts[3:]

    def _sums(self) -> list[float]:
        """What was counted, over all processes; every process must call it."""
        return self.accelerator.reduce(
            torch.cat((self.computed, self.read.to(self.computed.device)))
        ).tolist()

    def state(self, step: int) -> dict[str, Any]:
        """What a checkpoint after a step must hold for the log to go on as if nothing had happened.

        And the held-out loss, if it was measured after that very step.
        """
        at, loss = self.validated or (None, math.nan)
        return {
            "tokens": self.tokens,
            "seconds": self.clock.seconds,
            "reported": self.step,
            "pending": self._sums(),
            "unreported": [self.clock.training(), self.clock.waited],
            "validation_loss": loss if at == step and math.isfinite(loss) else None,
        }

    def add(self, loss: Tensor, right: Tensor, batch: Batch) -> None:
        """Count one micro-batch of this process, `batch` on the host."""
        lengths = sequence_lengths(batch).double()
        self.read += torch.stack((lengths.sum(), lengths.square().sum()))
        loss, predicted = loss.detach().double(), int((batch["labels"] >= 0).sum())
        values = torch.stack((loss, right.double(), torch.full_like(loss, predicted)))
        self.computed += torch.where(loss.isfinite(), values, 0.0)

    def training(self, step: int, learning_rate: float, gradient_norm: Tensor) -> None:
        """Report the steps since the last report; what is not finite is left out."""
        loss, right, predicted, tokens, squares = self._sums()
        self.tokens += int(tokens)
        elapsed, steps = self.clock.training(), max(step - self.step, 1)
        flops = step_flops(self.config, tokens, squares, predicted)
        row = {
            "step": step,
            "tokens": self.tokens,
            "seconds": round(self.clock.seconds, 2),
            "loss": loss / predicted if predicted else math.nan,
            "accuracy": right / predicted if predicted else math.nan,
            "learning_rate": learning_rate,
            "gradient_norm": float(gradient_norm),
            "tokens_per_second": round(tokens / elapsed),
            "seconds_per_step": round(elapsed / steps, 4),
            "data_wait": round(self.clock.waited / elapsed, 4),
            "mfu": round(flops / elapsed / self.peak / self.accelerator.num_processes, 4),
            "memory_gb": round(peak_memory(self.accelerator.device) / 1e9, 3),
        }
        if self.last_loss is not None and row["loss"] > self.last_loss + SPIKE:
            self.warn(f"the loss rose from {self.last_loss:.2f} to {row['loss']:.2f} at {step}")
        if predicted:
            self.last_loss = row["loss"]
        self.step = step
        self.clock.trained = self.clock.waited = 0.0
        self._count_from(INITIAL_STATE["pending"])
        self.bar.set_postfix_str(f"loss {row['loss']:.3f}, {row['tokens_per_second']:,} tokens/s")
        self.bar.update(step - self.bar.n)
        self._write(row)

    def validation(self, step: int, scores: dict[str, float]) -> None:
        """Report an evaluation, at the tokens of all steps so far."""
        self.validated = step, scores["validation_loss"]
        tokens = self.tokens + int(self._sums()[3])
        seconds = round(self.clock.seconds, 2)
        self._write({"step": step, "tokens": tokens, "seconds": seconds, **scores})

    def warn(self, line: str) -> None:
        """Say something above the bar, once for all processes."""
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


def sequence_lengths(batch: Batch) -> Tensor:
    """Real tokens of each sequence of a micro-batch, padded or packed, [n]."""
    if "attention_mask" in batch:
        return batch["attention_mask"].sum(dim=-1)
    return batch["cu_seq_lens_q"].diff()


def peak_memory(device: torch.device) -> int:
    """Largest use so far in bytes: of a GPU, or of the process where there is none."""
    if device.type == "cuda":
        return torch.cuda.max_memory_allocated(device)
    peak = resource.getrusage(resource.RUSAGE_SELF).ru_maxrss
    return peak if sys.platform == "darwin" else peak * 1024  # macOS counts bytes, Linux KiB


def truncate_log(log: Path, step: int) -> None:
    """Drop what a killed run had logged past the checkpoint that it goes on from."""
    if log.exists():
        lines = log.read_text(errors="replace").splitlines(keepends=True)
        kept = [line for line in lines if line.endswith("\n") and _step_of(line) <= step]
        shorter = log.with_suffix(".tmp")
        shorter.write_text("".join(kept))
        shorter.replace(log)  # a kill leaves one or the other


def _step_of(line: str) -> float:
    """Of a line of the log; none is so early that what a power cut left would be kept."""
    try:
        return json.loads(line)["step"]
    except (ValueError, KeyError, TypeError):
        return math.inf
