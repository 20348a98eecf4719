"""Pretraining runs in processes of their own: start, watch, signal and clean up."""

import ctypes
import json
import os
import signal
import socket
import subprocess
import sys
import time
from collections.abc import Callable, Iterator
from contextlib import contextmanager, suppress
from pathlib import Path

from tiny import ROOT, TINY_MODEL, log_rows
from train.command_line import parse_settings
from train.pretrain import main
from train.settings import PretrainSettings

SCRIPT = "train/pretrain.py"

LAUNCH = ("-m", "accelerate.commands.launch", "--config_file", "configs/accelerate/cpu.yaml")

TORCHRUN = ("-m", "torch.distributed.run", "--standalone", "--nproc_per_node", "2")

CPU = {"ACCELERATE_USE_CPU": "1"}

AS_LAUNCHED = CPU | {"ACCELERATE_MIXED_PRECISION": "bf16"}  # what cpu.yaml makes of a process

NO_DROPOUT = json.dumps(
    TINY_MODEL | {"hidden_dropout_prob": 0.0, "attention_probs_dropout_prob": 0.0}
)

SUBREAPER = 36  # PR_SET_CHILD_SUBREAPER of prctl(2)

PATIENCE = 120.0
"""Seconds until a test gives up waiting; generous, for busy machines."""

Start = Callable[..., subprocess.Popen[bytes]]

TWO_RANKS = [
    "--optim.steps=60", "--optim.batch_size=128", "--optim.micro_batch=8",
    "--run.save_every=1000", "--run.validate_every=1000",
]  # fmt: skip

ENDLESS = ["--optim.steps=100000", "--run.save_every=100000"]


@contextmanager
def process_starter(tmp_path: Path) -> Iterator[Start]:
    """Yield a function that starts a command in a process group of its own.

    At the end all its processes are killed. Orphans become children of this process (a subreaper),
    so that they can be waited for.
    """
    started: list[subprocess.Popen[bytes]] = []
    prctl = ctypes.CDLL(None, use_errno=True).prctl

    def begin(
        *arguments: str | Path,
        limits: Callable[[], None] | None = None,
        program: str = sys.executable,
        group: int = 0,
        pipe: int | None = None,
        **environment: str,
    ) -> subprocess.Popen[bytes]:
        def prepare() -> None:
            for number in (signal.SIGHUP, signal.SIGINT):  # these tests may run under `nohup`
                signal.signal(number, signal.SIG_DFL)
            if limits is not None:
                limits()

        # as many threads as here: sums round alike
        settings = os.environ | {"OMP_NUM_THREADS": "1", "PYTHONUNBUFFERED": "1"} | environment
        with (tmp_path / "output").open("ab") as output:
            process = subprocess.Popen(
                [program, *map(str, arguments)],
                cwd=ROOT, env=settings, stdin=subprocess.DEVNULL, stdout=pipe or output,
                stderr=pipe or output, preexec_fn=prepare, process_group=group,
            )  # fmt: skip
        started.append(process)
        return process

    prctl(SUBREAPER, 1)
    try:
        yield begin
    finally:
        for pid in child_processes(tmp_path):
            os.kill(pid, signal.SIGKILL)
        for process in started:
            process.wait()
        while remaining_processes(tmp_path):
            time.sleep(0.01)
        prctl(SUBREAPER, 0)


def child_processes(folder: Path) -> list[int]:
    """Processes whose command line names the folder, which only this test uses."""
    pids = map(int, filter(str.isdigit, os.listdir("/proc")))
    return [pid for pid in pids if names_folder(pid, folder)]


def names_folder(pid: int, folder: Path) -> bool:
    """Whether the command line of another process names a folder."""
    try:
        command = Path(f"/proc/{pid}/cmdline").read_bytes()
    except OSError:
        return False
    return pid != os.getpid() and str(folder).encode() in command


def remaining_processes(folder: Path) -> list[int]:
    """Processes of the test that still run; ended ones are waited for."""
    left = child_processes(folder)
    for pid in left:
        with suppress(ChildProcessError):
            os.waitpid(pid, os.WNOHANG)
    return left


def rank_pids(folder: Path) -> dict[int, int]:
    """Process id of each rank of the test's training processes."""
    found: dict[int, int] = {}
    for pid in child_processes(folder):
        arguments = Path(f"/proc/{pid}/cmdline").read_bytes().split(b"\0")
        variables = Path(f"/proc/{pid}/environ").read_bytes().split(b"\0")
        local = [v for v in variables if v.startswith(b"LOCAL_RANK=")]
        if SCRIPT.encode() in arguments[:3] and local:
            found[int(local[0].split(b"=")[1])] = pid
    return found


def child_pids(pid: int) -> list[int]:
    """Process ids of the children of a process."""
    return [int(c) for c in Path(f"/proc/{pid}/task/{pid}/children").read_text().split()]


def wait_for(what: Callable[[], object], seconds: float = PATIENCE) -> None:
    """Wait until `what()` is true."""
    end = time.monotonic() + seconds
    while not what():
        assert time.monotonic() < end, "waited in vain"
        time.sleep(0.003)


def read_output(tmp_path: Path) -> str:
    """Standard output and errors of all commands of the test."""
    return (tmp_path / "output").read_text(errors="replace")


def complete_rows(run: Path) -> list[dict]:
    """Complete rows of a log that may be being written."""
    log = run / "log.jsonl"
    text = log.read_text() if log.exists() else ""
    return [json.loads(line) for line in text.splitlines(keepends=True) if line.endswith("\n")]


def last_logged_step(run: Path) -> int:
    """Last step in log.jsonl, or 0."""
    return max((row["step"] for row in complete_rows(run)), default=0)


def log_mtime(run: Path) -> int:
    """Modification time of log.jsonl in nanoseconds, or 0 without one."""
    log = run / "log.jsonl"
    return log.stat().st_mtime_ns if log.exists() else 0


def list_checkpoints(run: Path) -> list[str]:
    """Names of the checkpoints of a run, sorted."""
    return sorted(path.name for path in (run / "checkpoints").iterdir())


def newest_step(run: Path) -> int:
    """Step of the newest checkpoint that has its final name."""
    steps = (run / "checkpoints").glob("step-*[0-9]")
    return max((int(path.name.removeprefix("step-")) for path in steps), default=0)


def train_until(victim: subprocess.Popen[bytes], run: Path, before: int, steps: int) -> int:
    """Wait until a launch has logged `steps` steps of its own; return the last logged step.

    Args:
        victim: The launch, which must not end before.
        run: Its folder.
        before: `log_mtime(run)` before the launch.
        steps: Number of steps.
    """
    begun = newest_step(run)

    def far_enough() -> bool:
        assert victim.poll() is None, "it ended by itself"
        return log_mtime(run) != before and last_logged_step(run) >= begun + steps

    wait_for(far_enough)
    return last_logged_step(run)


def run_in_process(flags: list[str], *more: str) -> PretrainSettings:
    """Pretrain in this process."""
    settings = parse_settings(PretrainSettings, [*flags, *more])
    main(settings)
    return settings


def assert_same_run(one: Path, other: Path) -> None:
    """Check that two runs logged the same values and ended with the same weights, to the bit."""
    for key in ("loss", "accuracy", "gradient_norm", "tokens", "validation_loss"):
        assert log_rows(one, key) == log_rows(other, key)
    weights = [(run / "model" / "model.safetensors").read_bytes() for run in (one, other)]
    assert weights[0] == weights[1]


def start_ranks(start: Start, flags: list[str]) -> list[subprocess.Popen[bytes]]:
    """Start two ranks in one process group, as `srun` does; the exit code of each is visible."""
    port = free_port()
    started: list[subprocess.Popen[bytes]] = []
    for rank in range(2):
        names = {"RANK": rank, "LOCAL_RANK": rank, "WORLD_SIZE": 2, "LOCAL_WORLD_SIZE": 2}
        address = {"MASTER_ADDR": "127.0.0.1", "MASTER_PORT": port}
        variables = {name: str(value) for name, value in names.items()} | address | CPU
        group = started[0].pid if started else 0
        started.append(start(SCRIPT, *flags, group=group, **variables))
    return started


def free_port() -> str:
    """A free port of this machine."""
    with socket.socket() as probe:
        probe.bind(("127.0.0.1", 0))
        return str(probe.getsockname()[1])
