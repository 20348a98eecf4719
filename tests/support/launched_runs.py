"""Pretraining runs in processes of their own: start, watch and signal."""

import itertools
import json
import os
import signal
import subprocess
import sys
import time
from collections.abc import Callable
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import psutil
import pytest
from accelerate.utils.other import get_free_port

from roformer.kernels.conditions import bfloat16_is_emulated
from tiny import TINY_MODEL, log_rows

SCRIPT = "train/pretrain.py"
LAUNCH = ("-m", "accelerate.commands.launch", "--config_file", "configs/accelerate/cpu.yaml")
TORCHRUN = ("-m", "torch.distributed.run", "--standalone", "--nproc_per_node", "2")
CPU = {"ACCELERATE_USE_CPU": "1"}
AS_LAUNCHED = CPU | {"ACCELERATE_MIXED_PRECISION": "bf16"}  # what cpu.yaml makes of a process
PRECISION = "no" if bfloat16_is_emulated() else "bf16"  # what this CPU makes of it
NO_DROPOUT = {"hidden_dropout_prob": 0.0, "attention_probs_dropout_prob": 0.0}
PATIENCE = 120.0
"""Seconds until a test gives up waiting; generous, for busy machines."""
Process = subprocess.Popen[bytes]
Start = Callable[..., Process]
SEVERAL_RANKS = [
    "--optim.steps=60", "--optim.batch_size=128", "--optim.micro_batch=8",
    "--run.save_every=1000", "--run.validate_every=1000",
]  # fmt: skip
ENDLESS = ["--optim.steps=100000", "--run.save_every=100000"]


def model_flag(**fields: object) -> str:
    """The flag for the tiny model with other fields of its configuration."""
    return f"--model.config={json.dumps(TINY_MODEL | fields)}"


def child_processes(folder: Path) -> list[psutil.Process]:
    """Processes whose command line names the folder, which only this test uses."""
    others = (p for p in psutil.process_iter(["cmdline"]) if p.pid != os.getpid())
    return [p for p in others if str(folder) in " ".join(p.info["cmdline"] or [])]


def wait_for(what: Callable[[], object], seconds: float = PATIENCE) -> None:
    end = time.monotonic() + seconds
    while not what():
        assert time.monotonic() < end, "waited in vain"
        time.sleep(0.003)


def killed_at(moment: int, action: Callable[[], object]) -> bool:
    """Whether a forked child that does `action` is killed at its n-th change of files.

    A change is a file opened for writing, one half of a text, a flush, or a change of a folder.
    """
    child = os.fork()
    if child:
        code = os.waitstatus_to_exitcode(os.waitpid(child, 0)[1])
        assert code in (0, -signal.SIGKILL)
        return code != 0
    moments = itertools.count(1)
    write_text, fsync = Path.write_text, os.fsync

    def change(event: str = "", arguments: tuple = ()) -> None:
        folders = {"os.mkdir", "os.rename", "os.remove", "os.rmdir"}
        writes = event == "open" and arguments[2] & (os.O_WRONLY | os.O_RDWR)
        if (not event or writes or event in folders) and next(moments) == moment:
            os.kill(os.getpid(), signal.SIGKILL)

    def flush(descriptor: int) -> None:
        change()
        fsync(descriptor)

    def write_in_halves(path: Path, text: str, **options: str) -> None:
        for part in (text[: len(text) // 2], text):
            write_text(path, part, **options)
            change()

    try:
        os.fsync, Path.write_text = flush, write_in_halves
        sys.addaudithook(change)
        action()
    finally:
        os._exit(0 if sys.exc_info()[0] is None else 1)


def complete_rows(run: Path) -> list[dict]:
    """Complete rows of a log that may be being written."""
    log = run / "log.jsonl"
    text = log.read_text() if log.exists() else ""
    return [json.loads(line) for line in text.splitlines(keepends=True) if line.endswith("\n")]


def list_checkpoints(run: Path) -> list[str]:
    return sorted(path.name for path in (run / "checkpoints").iterdir())


def assert_same_run(one: Path, other: Path) -> None:
    """Check that two runs logged the same values and ended with the same weights, to the bit."""
    for key in ("loss", "gradient_norm", "tokens", "validation_accuracy", "validation_loss"):
        assert log_rows(one, key) == log_rows(other, key)
    weights = [(run / "model" / "model.safetensors").read_bytes() for run in (one, other)]
    assert weights[0] == weights[1]


def assert_close_runs(one: Path, other: Path, *keys: str, rel: float = 1e-6) -> None:
    """Check that two runs logged the same values at the same steps, up to rounding."""
    for key in keys or ("loss", "validation_loss", "tokens"):
        expected = log_rows(one, key)
        assert expected, key
        assert log_rows(other, key) == pytest.approx(expected, rel=rel), key


@dataclass
class Launches:
    """Starts processes of the run of `pretrain_flags`, and watches them."""

    start: Start
    flags: list[str]
    folder: Path  # the test's own, which the command line of every process names

    @property
    def run(self) -> Path:
        return self.folder / "runs" / "tiny"

    def __call__(self, *flags: str, launcher: tuple[str, ...] = (), **options: Any) -> Process:
        """Start the script, without a launcher or with LAUNCH or TORCHRUN."""
        return self.start(*launcher, SCRIPT, *self.flags, *flags, **(CPU | options))

    def torchrun(self, *flags: str, processes: int = 2) -> Process:
        return self(*flags, launcher=(*TORCHRUN[:-1], str(processes)))

    def ranks(self, *flags: str, processes: int = 2) -> list[Process]:
        """Start ranks in one process group, as `srun` does; each has its own exit code."""
        address = {"MASTER_ADDR": "127.0.0.1", "MASTER_PORT": str(get_free_port())}
        size, started = str(processes), list[Process]()
        for rank in map(str, range(processes)):
            names = {"RANK": rank, "LOCAL_RANK": rank, "WORLD_SIZE": size, "LOCAL_WORLD_SIZE": size}
            group = started[0].pid if started else 0
            started.append(self(*flags, group=group, **names, **address))
        return started

    def train_until(self, victim: Process, steps: int) -> int:
        """Wait until a launch, just started, has logged some steps of its own; return the last."""
        begun, log = self.saved_step(), self.run / "log.jsonl"
        before = log.exists() and log.stat().st_mtime_ns

        def far_enough() -> bool:
            assert victim.poll() is None, "it ended by itself"
            changed = log.exists() and log.stat().st_mtime_ns != before
            return changed and self.logged_step() >= begun + steps

        wait_for(far_enough)
        return self.logged_step()

    def output(self) -> str:
        """Standard output and errors of all commands of the test."""
        return (self.folder / "output").read_text(errors="replace")

    def logged_step(self) -> int:
        """Last step in log.jsonl, or 0."""
        return max((row["step"] for row in complete_rows(self.run)), default=0)

    def saved_step(self) -> int:
        """Step of the newest checkpoint that has its final name, or 0."""
        steps = (self.run / "checkpoints").glob("step-*[0-9]")
        return max((int(path.name.removeprefix("step-")) for path in steps), default=0)

    def rank_processes(self) -> dict[int, psutil.Process]:
        scripts = [p for p in child_processes(self.folder) if SCRIPT in p.cmdline()[:3]]
        ranks = {p.environ().get("LOCAL_RANK"): p for p in scripts}
        return {int(rank): process for rank, process in ranks.items() if rank is not None}
