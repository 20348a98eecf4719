"""What a run says of itself: progress bar, log.jsonl, tracker, environment.json."""

import json
import platform
import subprocess
import time
from pathlib import Path
from typing import Any, TextIO

import accelerate
import torch
import transformers
from accelerate import Accelerator
from torch import Tensor
from tqdm import tqdm

Batch = dict[str, Tensor]


def environment(accelerator: Accelerator) -> dict[str, Any]:
    """Versions, machine and commit: what a number needs beside it to be believed."""
    cuda = torch.cuda.is_available()
    return {
        "python": platform.python_version(),
        "torch": torch.__version__,
        "transformers": transformers.__version__,
        "accelerate": accelerate.__version__,
        "machine": torch.cuda.get_device_name() if cuda else _processor(),
        "threads": torch.get_num_threads(),
        "processes": accelerator.num_processes,
        "precision": accelerator.mixed_precision,
        "commit": _commit(),
    }


def _processor() -> str:
    info = Path("/proc/cpuinfo")
    lines = info.read_text().splitlines() if info.exists() else []
    names = [line.split(":", 1)[1].strip() for line in lines if line.startswith("model name")]
    return f"{len(names)} x {names[0]}" if names else platform.processor()


def _commit() -> str:
    git = [
        "git",
        "-C",
        str(Path(__file__).parent),
        "describe",
        "--always",
        "--dirty",
        "--abbrev=12",
    ]
    try:
        return subprocess.run(git, capture_output=True, text=True, check=True).stdout.strip()
    except (OSError, subprocess.CalledProcessError):
        return "unknown"


class Journal:
    """Counts what a run has done and reports it, on the main process.

    Sums stay on the device between two reports, so that no step waits for the host.

    Args:
        accelerator: Adds up over processes and feeds the tracker.
        folder: The run's folder.
        state: `step`, and what `state` returned when it was reached, or zeros.
        steps: Steps of the whole run, for the bar.
    """

    def __init__(
        self, accelerator: Accelerator, folder: Path, state: dict[str, Any], steps: int
    ) -> None:
        self.accelerator = accelerator
        self.tokens = state["tokens"]
        self.seconds_before = state["seconds"]
        self.started = self.reported = time.perf_counter()
        self._clear()
        main = accelerator.is_main_process
        if main:  # what was counted since the last report when the checkpoint was written
            self.sums += torch.tensor(
                state["pending"], dtype=torch.float64, device=self.sums.device
            )
        self.bar = tqdm(
            total=steps, initial=state["step"], unit="step", disable=not main, dynamic_ncols=True
        )
        self.stream: TextIO | None = None
        if main:
            forget_after(folder / "log.jsonl", state["step"])
            self.stream = (folder / "log.jsonl").open("a")

    def _clear(self) -> None:
        self.sums = torch.zeros(4, dtype=torch.float64, device=self.accelerator.device)

    @property
    def seconds(self) -> float:
        """Wall-clock of the run so far, over all its restarts."""
        return self.seconds_before + time.perf_counter() - self.started

    def state(self) -> dict[str, Any]:
        """What a checkpoint must hold for the log to go on as if nothing had happened."""
        pending = self.accelerator.reduce(self.sums).tolist()
        return {"tokens": self.tokens, "seconds": self.seconds, "pending": pending}

    def add(self, loss: Tensor, right: Tensor, batch: Batch) -> None:
        """Count one micro-batch of this process."""
        predicted, tokens = right.new_tensor(len(batch["targets"])), batch["attention_mask"].sum()
        values = (loss.detach(), right, predicted, tokens)
        self.sums += torch.stack([v.double().to(self.sums.device) for v in values])

    def training(self, step: int, learning_rate: float, gradient_norm: Tensor) -> None:
        """Report the steps since the last report."""
        loss, right, predicted, tokens = self.accelerator.reduce(self.sums).tolist()
        self.tokens += int(tokens)
        now = time.perf_counter()
        row = {
            "step": step,
            "tokens": self.tokens,
            "seconds": round(self.seconds, 2),
            "loss": loss / max(predicted, 1),
            "accuracy": right / max(predicted, 1),
            "learning_rate": learning_rate,
            "gradient_norm": float(gradient_norm),
            "tokens_per_second": round(tokens / (now - self.reported)),
        }
        self.reported = now
        self._clear()
        self.bar.set_postfix_str(f"loss {row['loss']:.3f}, {row['tokens_per_second']:,} tokens/s")
        self.bar.update(step - self.bar.n)
        self._write(row)

    def validation(self, step: int, scores: dict[str, float]) -> None:
        """Report an evaluation; its time does not count as training speed."""
        self._write(
            {"step": step, "tokens": self.tokens, "seconds": round(self.seconds, 2), **scores}
        )
        self.reported = time.perf_counter()

    def _write(self, row: dict[str, Any]) -> None:
        self.accelerator.log({k: v for k, v in row.items() if k != "step"}, step=row["step"])
        if self.stream is not None:
            self.stream.write(json.dumps(row) + "\n")
            self.stream.flush()

    def __enter__(self) -> "Journal":
        return self

    def __exit__(self, *error: object) -> None:
        self.bar.close()
        if self.stream is not None:
            self.stream.close()


def forget_after(log: Path, step: int) -> None:
    """Drop what a killed run had logged past the checkpoint that it goes on from."""
    if log.exists():
        lines = log.read_text().splitlines(keepends=True)
        kept = [line for line in lines if line.endswith("\n") and json.loads(line)["step"] <= step]
        log.write_text("".join(kept))
