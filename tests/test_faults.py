"""What clusters do to a run: real processes, real signals, real files.

Commands are started as the README starts them. Whatever is started is gone when its test ends.
"""

import ctypes
import itertools
import json
import os
import platform
import random
import re
import resource
import shutil
import signal
import socket
import subprocess
import sys
import time
from collections.abc import Callable, Iterator
from contextlib import suppress
from pathlib import Path

import numpy as np
import pytest
import torch
import transformers
import yaml
from safetensors.torch import save_file
from test_packing import SPECIAL
from test_packing import store as token_store

from conftest import ROOT, TINY_MODEL, log_rows, sentences
from train import checkpoint, vocabulary
from train.corpus import tokenise
from train.interruptions import REASONS, Interruptions
from train.packing import Sequences, SpecialTokens, Steps
from train.pretrain import blame, main
from train.settings import InputError, PretrainSettings, parse
from train.stages import Stages

SCRIPT = "train/pretrain.py"
LAUNCH = ("-m", "accelerate.commands.launch", "--config_file", "configs/accelerate/cpu.yaml")
TORCHRUN = ("-m", "torch.distributed.run", "--standalone", "--nproc_per_node", "2")
CPU = {"ACCELERATE_USE_CPU": "1"}
AS_LAUNCHED = CPU | {"ACCELERATE_MIXED_PRECISION": "bf16"}  # what cpu.yaml makes of a process
KNOWN_PEAK = "--run.peak_tflops=1"  # nothing to measure at each start
NO_DROPOUT = json.dumps(
    TINY_MODEL | {"hidden_dropout_prob": 0.0, "attention_probs_dropout_prob": 0.0}
)
SUBREAPER = 36  # PR_SET_CHILD_SUBREAPER of prctl(2)
PATIENCE = 120.0
"""Seconds that a busy machine gets for anything that is waited for without a deadline to keep."""

Start = Callable[..., subprocess.Popen[bytes]]


@pytest.fixture
def start(tmp_path: Path) -> Iterator[Start]:
    """Starts a command in a group of its own; orphans come to this process, to be waited for."""
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
        # as many threads as here: sums round alike
        settings = os.environ | {"OMP_NUM_THREADS": "1", "PYTHONUNBUFFERED": "1"} | environment
        with (tmp_path / "output").open("ab") as output:
            process = subprocess.Popen(
                [program, *map(str, arguments)],
                cwd=ROOT, env=settings, stdin=subprocess.DEVNULL, stdout=pipe or output,
                stderr=pipe or output, preexec_fn=limits, process_group=group,
            )  # fmt: skip
        started.append(process)
        return process

    prctl(SUBREAPER, 1)
    try:
        yield begin
    finally:
        for pid in family(tmp_path):
            os.kill(pid, signal.SIGKILL)
        for process in started:
            process.wait()
        while orphan(tmp_path):
            time.sleep(0.01)
        prctl(SUBREAPER, 0)


def family(folder: Path) -> list[int]:
    """All processes whose command names the folder, which is this test's alone."""
    return [pid for pid in map(int, filter(str.isdigit, os.listdir("/proc"))) if runs(pid, folder)]


def runs(pid: int, folder: Path) -> bool:
    try:
        return (
            pid != os.getpid() and str(folder).encode() in Path(f"/proc/{pid}/cmdline").read_bytes()
        )
    except OSError:
        return False


def orphan(folder: Path) -> list[int]:
    """Processes of the test that still run, after those that ended were waited for."""
    left = family(folder)
    for pid in left:
        with suppress(ChildProcessError):
            os.waitpid(pid, os.WNOHANG)
    return left


def ranks(folder: Path) -> dict[int, int]:
    """rank -> process of the training processes of the test."""
    found: dict[int, int] = {}
    for pid in family(folder):
        arguments = Path(f"/proc/{pid}/cmdline").read_bytes().split(b"\0")
        variables = Path(f"/proc/{pid}/environ").read_bytes().split(b"\0")
        local = [v for v in variables if v.startswith(b"LOCAL_RANK=")]
        if SCRIPT.encode() in arguments[:3] and local:
            found[int(local[0].split(b"=")[1])] = pid
    return found


def children(pid: int) -> list[int]:
    return [int(c) for c in Path(f"/proc/{pid}/task/{pid}/children").read_text().split()]


def wait_for(what: Callable[[], object], seconds: float = PATIENCE) -> None:
    end = time.monotonic() + seconds
    while not what():
        assert time.monotonic() < end, "waited in vain"
        time.sleep(0.003)


def said(tmp_path: Path) -> str:
    return (tmp_path / "output").read_text(errors="replace")


def complete_rows(run: Path) -> list[dict]:
    """Rows of a log that is being written."""
    log = run / "log.jsonl"
    text = log.read_text() if log.exists() else ""
    return [json.loads(line) for line in text.splitlines(keepends=True) if line.endswith("\n")]


def reached(run: Path) -> int:
    return max((row["step"] for row in complete_rows(run)), default=0)


def changed(run: Path) -> int:
    log = run / "log.jsonl"
    return log.stat().st_mtime_ns if log.exists() else 0


def saved(run: Path) -> list[str]:
    return sorted(path.name for path in (run / "checkpoints").iterdir())


def newest_step(run: Path) -> int:
    """Step of the newest checkpoint that has its final name."""
    steps = (run / "checkpoints").glob("step-*[0-9]")
    return max((int(path.name.removeprefix("step-")) for path in steps), default=0)


def train_until(victim: subprocess.Popen[bytes], run: Path, before: int, steps: int) -> int:
    """Wait until a launch has logged so many steps of its own; the last step in the log.

    Args:
        victim: The launch, which must be alive all the while.
        run: Its folder.
        before: `changed(run)` from before the launch.
        steps: How many.
    """
    begun = newest_step(run)

    def far_enough() -> bool:
        assert victim.poll() is None, "it ended by itself"
        return changed(run) != before and reached(run) >= begun + steps

    wait_for(far_enough)
    return reached(run)


def here(flags: list[str], *more: str) -> PretrainSettings:
    settings = parse(PretrainSettings, [*flags, KNOWN_PEAK, *more])
    main(settings)
    return settings


def assert_same_run(one: Path, other: Path) -> None:
    """Every line of the two logs, but for times, and the final weights, to the bit."""
    for key in ("loss", "accuracy", "gradient_norm", "tokens", "validation_loss"):
        assert log_rows(one, key) == log_rows(other, key)
    weights = [(run / "model" / "model.safetensors").read_bytes() for run in (one, other)]
    assert weights[0] == weights[1]


@pytest.mark.slow
@pytest.mark.parametrize("workers", [0, 2])
def test_a_run_killed_twenty_times_ends_as_one_that_never_was(
    workers, pretrain_flags, tmp_path, start
):
    flags = [
        *pretrain_flags, KNOWN_PEAK, "--optim.steps=300", "--optim.micro_batch=8",
        "--run.save_every=3", "--run.log_every=2", "--run.validate_every=50",
        f"--run.workers={workers}",
    ]  # fmt: skip
    run, draw, resumed = tmp_path / "runs" / "tiny", random.Random(workers), set()
    for kill in range(20):
        before = changed(run)
        command = LAUNCH if kill == 0 else ()  # which only takes longer to start
        victim = start(*command, SCRIPT, *flags, **AS_LAUNCHED)
        train_until(victim, run, before, draw.randint(1, 9) if kill else 4)
        time.sleep(0.03 * draw.random())  # between two lines, inside a step or a save
        os.killpg(victim.pid, signal.SIGKILL)
        assert victim.wait() == -signal.SIGKILL
        resumed.add(newest_step(run))
    assert len(resumed) > 10
    assert start(SCRIPT, *flags, **AS_LAUNCHED).wait(PATIENCE) == 0
    whole = start(SCRIPT, *flags, "--run.name=whole", **AS_LAUNCHED)
    assert whole.wait(PATIENCE) == 0
    assert said(tmp_path).count("going on after step") == 20
    assert_same_run(tmp_path / "runs" / "whole", run)


TWO_RANKS = [
    KNOWN_PEAK, "--optim.steps=60", "--optim.batch_size=128", "--optim.micro_batch=8",
    "--run.save_every=1000", "--run.validate_every=1000",
]  # fmt: skip


def start_ranks(start: Start, flags: list[str]) -> list[subprocess.Popen[bytes]]:
    """Two ranks in one process group, as `srun` starts them: their exit codes can be seen."""
    port = free_port()
    started: list[subprocess.Popen[bytes]] = []
    for rank in range(2):
        names = {"RANK": rank, "LOCAL_RANK": rank, "WORLD_SIZE": 2, "LOCAL_WORLD_SIZE": 2}
        where = {"MASTER_ADDR": "127.0.0.1", "MASTER_PORT": port}
        variables = {name: str(value) for name, value in names.items()} | where | CPU
        group = started[0].pid if started else 0
        started.append(start(SCRIPT, *flags, group=group, **variables))
    return started


@pytest.mark.slow
def test_ranks_told_to_end_in_any_way_save_the_same_step_and_the_run_is_the_same(
    pretrain_flags, tmp_path, start
):
    flags, run = [*pretrain_flags, *TWO_RANKS], tmp_path / "runs" / "tiny"
    for number, to in (
        (signal.SIGTERM, "group"),
        (signal.SIGUSR1, "group"),
        (signal.SIGTERM, "rank 1"),
        (signal.SIGUSR1, "rank 0"),
        (signal.SIGHUP, "rank 1"),
    ):
        before = changed(run)
        both = start_ranks(start, flags)
        last = train_until(both[0], run, before, 2)
        if to == "group":
            os.killpg(both[0].pid, number)
        else:
            both[int(to[-1])].send_signal(number)
        assert [rank.wait(30) for rank in both] == [128 + number] * 2, to
        assert_saved_at_once(run, last)
        assert f"{signal.Signals(number).name}: saved after step {newest_step(run)};" in said(
            tmp_path
        )

    before = changed(run)
    torchrun = start(*TORCHRUN, SCRIPT, *flags, **CPU)
    last = train_until(torchrun, run, before, 2)
    torchrun.terminate()
    assert torchrun.wait(30) != 0
    assert_saved_at_once(run, last)

    before = changed(run)
    torchrun = start(*TORCHRUN, SCRIPT, *flags, **CPU)
    last = train_until(torchrun, run, before, 2)
    orphans = sorted(ranks(tmp_path).items())
    assert [rank for rank, _ in orphans] == [0, 1]
    torchrun.kill()
    torchrun.wait()
    assert [exit_code(pid, 30) for _, pid in orphans] == [128 + signal.SIGHUP] * 2
    assert_saved_at_once(run, last)

    for more in ([], ["--run.name=whole"]):
        assert start(*TORCHRUN, SCRIPT, *flags, *more, **CPU).wait(PATIENCE) == 0
    assert said(tmp_path).count("going on after step") == 7
    assert_same_run(tmp_path / "runs" / "whole", run)


@pytest.mark.slow
def test_a_signal_to_two_ranks_and_their_workers_costs_nothing(pretrain_flags, tmp_path, start):
    flags, run = [*pretrain_flags, *TWO_RANKS, "--run.workers=2"], tmp_path / "runs" / "tiny"
    for number in (signal.SIGTERM, signal.SIGUSR1):
        before = changed(run)
        both = start_ranks(start, flags)
        last = train_until(both[0], run, before, 2)
        assert all(len(children(rank.pid)) >= 2 for rank in both)
        os.killpg(both[0].pid, number)  # the workers hear it too
        assert [rank.wait(30) for rank in both] == [128 + number] * 2
        assert_saved_at_once(run, last)
        wait_for(lambda: not family(tmp_path))
    for more in ([], ["--run.name=whole"]):
        assert start(*TORCHRUN, SCRIPT, *flags, *more, **CPU).wait(PATIENCE) == 0
    assert said(tmp_path).count("going on after step") == 2
    assert_same_run(tmp_path / "runs" / "whole", run)


def assert_saved_at_once(run: Path, last: int) -> None:
    """A signal came after that step: in the next or the one after all agree, save and leave."""
    assert last < newest_step(run) <= last + 2
    assert reached(run) == newest_step(run)  # nothing was trained past what was saved
    assert not list(run.rglob("*.tmp"))


SRUN = """#!/bin/sh
echo $$ > "$(dirname "$0")/task"
exec "$@"
"""
SCONTROL = """#!/bin/sh
[ "$1" = show ] && exec hostname
echo "$@" >> "$(dirname "$0")/asked"
"""


@pytest.mark.slow
def test_the_slurm_script_queues_again_what_a_signal_ended_and_nothing_else(
    pretrain_flags, tmp_path, start
):
    """SLURM's stand-in signals the task of the step alone, as SLURM does, not the batch shell."""
    flags, run, folder = [*pretrain_flags, *TWO_RANKS], tmp_path / "runs" / "tiny", tmp_path / "bin"
    folder.mkdir()
    text = (ROOT / "configs" / "accelerate" / "slurm.sh").read_text()
    for name, body in (("srun", SRUN), ("scontrol", SCONTROL), ("slurm.sh", text)):
        for here, there in (
            (".venv/bin/torchrun", f"{sys.executable} -m torch.distributed.run"),
            ("--nproc_per_node 8", "--nproc_per_node 2"),
            ("29500", free_port()),
        ):
            assert name != "slurm.sh" or here in body
            body = body.replace(here, there)
        (folder / name).write_text(body)
        (folder / name).chmod(0o755)
    slurm = {"SLURM_JOB_ID": "7", "SLURM_NNODES": "1", "SLURM_NODEID": "0"} | CPU
    slurm |= {"SLURM_JOB_NODELIST": "", "PATH": f"{folder}:{os.environ['PATH']}"}

    def job(*more: str) -> subprocess.Popen[bytes]:
        return start(folder / "slurm.sh", *flags, *more, program="bash", **slurm)

    first = job()
    last = train_until(first, run, 0, 2)
    os.kill(int((folder / "task").read_text()), signal.SIGUSR1)
    assert first.wait(60) == 0
    assert_saved_at_once(run, last)
    assert (folder / "asked").read_text() == "requeue 7\n"
    assert job("--optim.learning_rate=9").wait(PATIENCE) not in (0, None)
    assert job().wait(PATIENCE) == 0
    assert reached(run) == 60
    assert said(tmp_path).count("going on after step") == 1
    assert (folder / "asked").read_text() == "requeue 7\n"


def free_port() -> str:
    with socket.socket() as probe:
        probe.bind(("127.0.0.1", 0))
        return str(probe.getsockname()[1])


def exit_code(pid: int, seconds: float) -> int:
    """What an orphan ends with."""
    ended: list[int] = []

    def over() -> bool:
        done, status = os.waitpid(pid, os.WNOHANG)
        ended.extend([os.waitstatus_to_exitcode(status)] * bool(done))
        return bool(done)

    wait_for(over, seconds)
    return ended[0]


def test_a_process_whose_launcher_was_killed_saves_and_leaves(pretrain_flags, tmp_path, start):
    flags = [*pretrain_flags, "--optim.steps=100000", "--run.save_every=100000", KNOWN_PEAK]
    run = tmp_path / "runs" / "tiny"
    launcher = start(*LAUNCH, SCRIPT, *flags)
    train_until(launcher, run, 0, 3)
    (process,) = children(launcher.pid)
    launcher.kill()
    launcher.wait()
    assert exit_code(process, 30) == 128 + signal.SIGHUP
    assert newest_step(run) == reached(run)
    assert f"the launcher died: saved after step {newest_step(run)}" in said(tmp_path)


ENDLESS = ["--optim.steps=100000", "--run.save_every=100000", KNOWN_PEAK]


@pytest.mark.parametrize(
    "gone", ["reader", pytest.param("reader and launcher", marks=pytest.mark.slow)]
)
def test_a_process_whose_output_nobody_reads_any_more_saves_and_leaves(
    gone, pretrain_flags, tmp_path, start
):
    """As under `accelerate launch ... 2>&1 | tee log`, when `tee` dies, alone or with the rest."""
    run = tmp_path / "runs" / "tiny"
    reader, writer = os.pipe()
    command = LAUNCH if "launcher" in gone else ()
    flags = [*pretrain_flags, *ENDLESS]
    first = start(*command, SCRIPT, *flags, pipe=writer, PYTHONUNBUFFERED="", **CPU)
    os.close(writer)
    train_until(first, run, 0, 3)
    (process,) = children(first.pid) if command else (first.pid,)
    if command:
        first.kill()
        first.wait()
    os.close(reader)
    code = exit_code(process, 30) if command else first.wait(30)
    assert code == 128 + signal.SIGHUP
    assert newest_step(run) == reached(run) > 0


def test_a_hangup_is_heard_unless_it_is_to_be_ignored():
    for before, heard in ((signal.SIG_DFL, True), (signal.SIG_IGN, False)):  # the latter by `nohup`
        own = signal.signal(signal.SIGHUP, before)
        with Interruptions(time.monotonic(), None) as interruptions:
            os.kill(os.getpid(), signal.SIGHUP)
            told = dict(zip(REASONS, interruptions.told()))
        assert told == {reason: heard and reason == "SIGHUP" for reason in REASONS}
        assert signal.signal(signal.SIGHUP, own) == before


def test_of_two_launches_one_waits_until_the_other_has_saved(pretrain_flags, tmp_path, start):
    run, flags = tmp_path / "runs" / "tiny", [*pretrain_flags, *ENDLESS]
    both = {process.pid: process for process in (start(SCRIPT, *flags, **CPU) for _ in range(2))}
    wait_for(lambda: "waiting up to 60 s: " in said(tmp_path))
    wait_for(lambda: reached(run) > 1)
    line = re.compile(rf"{run} in use by process (\d+) on {platform.node()}\n")
    (holder,) = line.findall(said(tmp_path))
    first = both.pop(int(holder))
    main(parse(PretrainSettings, [*flags, "--run.dry=true"]))  # needs no lock
    first.terminate()
    assert first.wait(30) == 128 + signal.SIGTERM
    (step,) = re.findall(r"SIGTERM: saved after step (\d+);", said(tmp_path))
    wait_for(lambda: reached(run) > int(step))
    assert f"going on after step {step}\n" in said(tmp_path)
    steps = [row["step"] for row in complete_rows(run) if "loss" in row]
    assert steps == [*range(1, len(steps) + 1)]  # nothing lost, nothing twice
    assert len(line.findall(said(tmp_path))) == 1


@pytest.mark.slow
def test_a_second_launch_of_two_ranks_gives_up_in_one_line(pretrain_flags, tmp_path, start):
    run, flags = tmp_path / "runs" / "tiny", [*pretrain_flags, *ENDLESS]
    first = start(SCRIPT, *flags, **CPU)
    train_until(first, run, 0, 2)
    second = start_ranks(start, [*flags, "--optim.micro_batch=8"])
    wait_for(lambda: "waiting up to 60 s: " in said(tmp_path))
    assert [rank.wait(PATIENCE) for rank in second] == [2, 2]
    (error,) = re.findall("error: .*", said(tmp_path))  # after the bar of the first
    holder = f"process {first.pid} on {platform.node()}"
    assert error == (
        f"error: run.folder must be free, got {run} in use by {holder}; "
        "end it, or choose another run.name"
    )
    assert "Traceback" not in said(tmp_path)
    first.terminate()
    assert first.wait(30) == 128 + signal.SIGTERM
    assert newest_step(run) == reached(run)


@pytest.mark.slow
def test_a_launcher_that_died_before_the_first_step_is_noticed_at_it(
    pretrain_flags, tmp_path, start
):
    run = tmp_path / "runs" / "tiny"
    with checkpoint.alone(run):  # so that the process waits before its first step
        launcher = start(*LAUNCH, SCRIPT, *pretrain_flags, *ENDLESS)
        wait_for(lambda: "waiting up to" in said(tmp_path))
        (process,) = children(launcher.pid)
        launcher.kill()
        launcher.wait()
    assert exit_code(process, 30) == 128 + signal.SIGHUP
    assert newest_step(run) == 1


@pytest.fixture
def poisoned(tmp_path: Path, tokenizer: transformers.PreTrainedTokenizerBase) -> dict[str, Path]:
    """A BERT that has no number for the last place of a full sequence; texts with few and many."""
    sizes = {**json.loads(NO_DROPOUT), "vocab_size": len(tokenizer)}
    torch.manual_seed(0)
    model = transformers.BertForMaskedLM(transformers.BertConfig(**sizes))
    with torch.no_grad():
        model.bert.embeddings.position_embeddings.weight[31] = torch.nan
    model.save_pretrained(tmp_path / "init")
    tokenizer.save_pretrained(tmp_path / "init")
    for name, often in (("rarely", 60), ("always", 1)):
        texts = [" ".join(sentences(3 if i % often else 6, i)) for i in range(300)]
        lines = (json.dumps({"text": text}) + "\n" for text in texts)
        (tmp_path / f"{name}.jsonl").write_text("".join(lines))
    return {name: tmp_path / f"{name}.jsonl" for name in ("rarely", "always")}


def full_sequences(settings: PretrainSettings, tokenizer: object) -> dict[int, dict[int, list]]:
    """Step from 1 -> rank of two that meets a sequence of 32 tokens -> all sequences it meets."""
    store = tokenise(settings.corpus, "train", tokenizer)
    sequences, special = Sequences(store, settings.corpus.length), SpecialTokens.of(tokenizer)
    found: dict[int, dict[int, list]] = {}
    for rank, step in itertools.product(range(2), range(16)):
        steps = Steps(sequences, special, 16, 8, 0.15, settings.run.seed, 2, rank)
        if max(batch["input_ids"].shape[1] for batch in steps[step]) == 32:
            (share,) = steps.shares(step)
            found.setdefault(step + 1, {})[rank] = share[0].tolist()
    return found


def words(share: list[int], number: int, rank: int) -> str:
    more = ", ..." if number < len(share) else ""
    return f"sequences {', '.join(map(str, share[:number]))}{more} of process {rank}"


def weights_of(run: Path, step: int) -> bytes:
    return (run / "checkpoints" / f"step-{step:08d}" / "weights.safetensors").read_bytes()


def test_a_gradient_that_is_not_finite_on_one_rank_moves_no_rank_and_three_end_the_run(
    poisoned, pretrain_flags, tokenizer, tmp_path, start
):
    stages = [{"steps": 16}, {"steps": 9, "train": str(poisoned["always"])}]
    flags = [
        *pretrain_flags, KNOWN_PEAK, "--model.type=bert", f"--model.init={tmp_path / 'init'}",
        "--model.config={}", f"--corpus.train={poisoned['rarely']}", "--optim.steps=null",
        f"--stages={json.dumps(stages)}", "--optim.micro_batch=8", "--run.save_every=1",
        "--run.keep=99", "--run.validate_every=1000",
    ]  # fmt: skip
    bad = full_sequences(parse(PretrainSettings, flags), tokenizer)
    assert 0 < len(bad) < 8  # what follows is about some steps of the first stage
    assert {1} in map(set, bad.values())  # the longest are the last rank's
    with pytest.raises(InputError, match="3 steps in a row, the last 19"):
        here(flags, "--run.name=one")
    torchrun = start(*TORCHRUN, SCRIPT, *flags, **CPU)
    assert torchrun.wait(PATIENCE) != 0
    run, losses = tmp_path / "runs" / "tiny", log_rows(tmp_path / "runs" / "tiny")
    infinite = [step for step, loss in losses.items() if not np.isfinite(loss)]
    assert infinite == [*sorted(bad), 17, 18, 19]
    # as in one process, where there is no other rank whose weights could have moved
    one = log_rows(tmp_path / "runs" / "one")
    np.testing.assert_allclose(list(losses.values()), list(one.values()), rtol=1e-6)
    for step in range(2, 17):
        assert (weights_of(run, step) == weights_of(run, step - 1)) == (step in bad), step
    warned = re.findall(
        r"step (\d+) changed no weight.* loss is not finite in (.*)", said(tmp_path)
    )
    assert [int(step) for step, _ in warned] == infinite
    for step, named in warned[: len(bad)]:
        guilty = bad[int(step)].items()
        assert named == " and ".join(words(share, 8 // len(guilty), rank) for rank, share in guilty)
    (error,) = [line for line in said(tmp_path).splitlines() if line.startswith("error: ")]
    assert error.endswith(f"goes on from {run}/checkpoints/step-00000018")


def test_a_gradient_that_overflows_is_told_from_a_loss_that_does(
    pretrain_flags, tokenizer, tmp_path, capsys
):
    # words that are all alike: LayerNorm divides their gradient by the root of its epsilon
    sizes = {**json.loads(NO_DROPOUT), "layer_norm_eps": 1e-44, "tie_word_embeddings": False}
    model = transformers.BertForMaskedLM(
        transformers.BertConfig(vocab_size=len(tokenizer), **sizes)
    )
    for table in model.bert.embeddings.children():
        if isinstance(table, torch.nn.Embedding):
            torch.nn.init.zeros_(table.weight)
    model.save_pretrained(tmp_path / "init")
    tokenizer.save_pretrained(tmp_path / "init")
    init = ["--model.type=bert", f"--model.init={tmp_path / 'init'}", "--model.config={}"]
    with pytest.raises(InputError, match="3 steps in a row, the last 3, .* begins again"):
        here(pretrain_flags, *init)
    assert all(map(np.isfinite, log_rows(tmp_path / "runs" / "tiny").values()))
    assert "its loss is finite everywhere, with sequences " in capsys.readouterr().err


def test_a_warning_names_at_most_eight_sequences_of_those_to_blame(tmp_path):
    sequences = Sequences(token_store(np.arange(5, 205), tmp_path), 64)
    steps = [Steps(sequences, SPECIAL, 64, 8, 0.15, 0, 4, rank) for rank in range(4)]
    whole = Stages([(2, Steps(sequences, SPECIAL, 8, 8, 0.15, 7)), (9, steps[3])])

    def some(rank: int, micro_batch: int, number: int) -> str:
        return words(steps[rank].shares(3)[micro_batch][0].tolist(), number, rank)

    lost = torch.zeros(4, 2, dtype=torch.long)
    finite = " and ".join(some(rank, 0, 2) for rank in range(4))
    assert blame(whole, 5, lost) == f"its loss is finite everywhere, with {finite}"
    lost[2, 1] = 1
    assert blame(whole, 5, lost) == f"its loss is not finite in {some(2, 1, 8)}"
    lost[0, 1] = 1
    both = f"{some(0, 1, 4)} and {some(2, 1, 4)}"
    assert blame(whole, 5, lost) == f"its loss is not finite in {both}"
    lost[:] = 1
    told = blame(whole, 5, lost)
    assert len(re.findall(r"\d+(?=,)", told)) == 8
    assert told.endswith(" of process 1 and others")


def test_a_loss_that_jumps_is_a_warning_and_the_run_goes_on(pretrain_flags, tmp_path, capsys):
    here(pretrain_flags, "--optim.learning_rate=3", "--optim.schedule=constant")
    losses = log_rows(tmp_path / "runs" / "tiny")
    jumps = [step for step in range(2, 13) if losses[step] > losses[step - 1] + 1]
    warned = re.findall(r"warning: the loss rose from .* at (\d+)", capsys.readouterr().err)
    assert list(map(int, warned)) == jumps
    assert jumps
    assert sorted(losses) == list(range(1, 13))


def test_a_launch_ends_before_its_hours_and_the_next_goes_on(pretrain_flags, tmp_path, start):
    flags = [
        *pretrain_flags, KNOWN_PEAK, "--optim.steps=40", "--optim.batch_size=128",
        "--run.save_every=1000", "--run.validate_every=1000",
    ]  # fmt: skip
    here(flags, "--run.name=whole")
    run, seconds = tmp_path / "runs" / "tiny", 1.0
    limited = start(SCRIPT, *flags, f"--run.max_hours={seconds / 3600}", **CPU)
    assert limited.wait(PATIENCE) == 0
    (name,) = saved(run)
    state = json.loads((run / "checkpoints" / name / "state.json").read_text())
    assert 0 < state["step"] < 40
    assert state["seconds"] < seconds
    assert f"run.max_hours: saved after step {state['step']};" in said(tmp_path)
    assert not (run / "model").exists()
    here(flags)
    assert_same_run(tmp_path / "runs" / "whole", run)


def full_disks() -> list[str]:
    """Ways to run out of room that this machine permits: every one has the first."""
    mount = ["unshare", "-rm", "mount", "-t", "tmpfs", "none", "/mnt"]
    try:
        may = subprocess.run(mount, capture_output=True, check=False).returncode == 0
    except OSError:
        may = False
    return ["a limit", *["a full tmpfs"] * may]


@pytest.mark.parametrize("disk", full_disks())
def test_a_full_disk_costs_no_checkpoint_and_ends_in_one_line(
    disk, pretrain_flags, tmp_path, start
):
    run = tmp_path / "runs" / "tiny"
    here(pretrain_flags, "--run.max_hours=1e-9")  # which is over after a step
    assert saved(run) == ["step-00000001"]
    files = {path: path.read_bytes() for path in (run / "checkpoints").rglob("*.*")}
    room = sum(map(len, files.values()))
    if disk == "a limit":
        size = (run / "checkpoints" / "step-00000001" / "optimizer.safetensors").stat().st_size
        limit = (size * 3 // 4, resource.RLIM_INFINITY)
        limited = start(
            SCRIPT, *pretrain_flags, KNOWN_PEAK, **CPU,
            limits=lambda: resource.setrlimit(resource.RLIMIT_FSIZE, limit),
        )  # fmt: skip
    else:  # seen by the run alone, and copied back before it goes
        inside, copy = tmp_path / "runs", tmp_path / "copy"
        shutil.copytree(inside, copy)
        script = (
            f"mount -t tmpfs -o size={room * 3 // 2} none {inside} && cp -r {copy}/. {inside} && "
            f'{{ "$@"; code=$?; rm -r {copy}; cp -r {inside} {copy}; exit $code; }}'
        )
        flags = [*pretrain_flags, KNOWN_PEAK]
        limited = start(
            "-rm",
            "sh",
            "-c",
            script,
            "sh",
            sys.executable,
            SCRIPT,
            *flags,
            program="unshare",
            **CPU,
        )
    assert limited.wait(PATIENCE) == 2
    if disk != "a limit":
        shutil.rmtree(tmp_path / "runs")
        (tmp_path / "copy").rename(tmp_path / "runs")
    assert {path: path.read_bytes() for path in (run / "checkpoints").rglob("*.*")} == files
    for step in (4, 8):
        assert f"warning: no checkpoint after step {step}, the one before stays" in said(tmp_path)
    (error,) = [line for line in said(tmp_path).splitlines() if line.startswith("error: ")]
    assert "run.folder must have room for a checkpoint, got" in error
    assert "Traceback" not in said(tmp_path)
    here(pretrain_flags)
    here(pretrain_flags, "--run.name=whole")
    assert_same_run(tmp_path / "runs" / "whole", run)


def test_a_rank_that_dies_stops_the_launch(pretrain_flags, tmp_path, start):
    flags, run = [*pretrain_flags, *TWO_RANKS, "--run.save_every=1"], tmp_path / "runs" / "tiny"
    torchrun = start(*TORCHRUN, SCRIPT, *flags, **CPU)
    train_until(torchrun, run, 0, 2)
    os.kill(ranks(tmp_path)[1], signal.SIGKILL)
    assert torchrun.wait(60) != 0
    assert "Signal 9 (SIGKILL)" in said(tmp_path)
    assert not family(tmp_path)
    assert checkpoint.newest(run) is not None


@pytest.mark.slow
def test_a_rank_that_hangs_stops_the_launch_and_the_other_says_where(
    pretrain_flags, tmp_path, start
):
    flags, run = [*pretrain_flags, *TWO_RANKS], tmp_path / "runs" / "tiny"
    here(flags, "--run.max_hours=1e-9")  # a checkpoint after the first step
    before = changed(run)
    torchrun = start(*TORCHRUN, SCRIPT, *flags, **CPU)
    train_until(torchrun, run, before, 2)
    os.kill(ranks(tmp_path)[1], signal.SIGSTOP)
    assert torchrun.wait(75) != 0
    assert "Timeout (0:0" in said(tmp_path)
    assert "most recent call first" in said(tmp_path)
    assert not family(tmp_path)
    assert start(*TORCHRUN, SCRIPT, *flags, **CPU).wait(PATIENCE) == 0
    assert "going on after step" in said(tmp_path)


def test_a_data_worker_that_is_killed_stops_the_launch_and_the_next_goes_on(
    pretrain_flags, tmp_path, start
):
    flags = [*pretrain_flags, KNOWN_PEAK, "--optim.steps=200", "--run.save_every=2"]
    run = tmp_path / "runs" / "tiny"
    launch = start(SCRIPT, *flags, "--run.workers=2", **CPU)
    train_until(launch, run, 0, 2)
    os.kill(children(launch.pid)[0], signal.SIGKILL)
    assert launch.wait(60) not in (0, None)
    # torch's words depend on who notices first: its signal handler or the queue
    reason = r"DataLoader worker \(pid.*\) (is killed by signal: Killed|exited unexpectedly)"
    assert re.search(reason, said(tmp_path))
    assert not family(tmp_path)
    here(flags)
    here(flags, "--run.name=whole")
    assert_same_run(tmp_path / "runs" / "whole", run)


@pytest.mark.slow
def test_one_process_then_two_then_one_train_as_one_alone(pretrain_flags, tmp_path, start):
    flags = [
        *pretrain_flags, f"--model.config={NO_DROPOUT}", "--optim.batch_size=128",
        "--optim.micro_batch=8", "--optim.steps=40", "--run.validate_every=20", KNOWN_PEAK,
    ]  # fmt: skip
    run = tmp_path / "runs" / "tiny"
    first = start(SCRIPT, *flags, **CPU)
    for processes, launch in ((1, first), (2, None)):
        before = changed(run) if launch is None else 0
        launch = launch or start(*TORCHRUN, SCRIPT, *flags, **CPU)
        train_until(launch, run, before, 4)
        launch.terminate()
        assert launch.wait(60) == (143 if processes == 1 else 1)
    here(flags)
    here(flags, "--run.name=whole")
    for key in ("loss", "validation_loss", "tokens"):
        both = [log_rows(tmp_path / "runs" / name, key) for name in ("whole", "tiny")]
        assert list(both[0]) == list(both[1])
        np.testing.assert_allclose(list(both[1].values()), list(both[0].values()), rtol=1e-6)


def small() -> tuple[torch.nn.Module, torch.optim.Optimizer]:
    torch.manual_seed(0)
    model = torch.nn.Linear(30, 30)
    optimizer = torch.optim.AdamW(model.parameters())
    model(torch.ones(1, 30)).sum().backward()
    optimizer.step()
    return model, optimizer


def write_half(path: Path, write: Callable[[], object], moment: Callable[[], None]) -> None:
    """Let a moment pass when half of a file is there, and one when all of it is."""
    write()
    whole = path.read_bytes()
    path.write_bytes(whole[: len(whole) // 2])
    moment()
    path.write_bytes(whole)
    moment()


def save_and_die(folder: Path, last: int) -> int:
    """A child of this process saves and retains, and kills itself at that moment; its status."""
    child = os.fork()
    if child:
        return os.waitpid(child, 0)[1]
    moments = itertools.count(1)
    write_text, fsync = Path.write_text, os.fsync

    def moment(event: str = "", arguments: tuple = ()) -> None:
        touches = {"open", "os.mkdir", "os.rename", "os.remove", "os.rmdir"}
        if (not event or event in touches) and next(moments) == last:
            os.kill(os.getpid(), signal.SIGKILL)

    def flush(descriptor: int) -> None:
        moment()
        fsync(descriptor)

    def write_tensors(tensors: dict, path: Path) -> None:
        write_half(path, lambda: save_file(tensors, path), moment)

    def write_words(path: Path, text: str) -> None:
        write_half(path, lambda: write_text(path, text), moment)

    try:
        held = checkpoint.content(*small())
        os.fsync, Path.write_text, checkpoint.save_file = flush, write_words, write_tensors
        sys.addaudithook(moment)
        checkpoint.save(folder, 3, held, {})
        checkpoint.retain(folder, 2)
    finally:
        os._exit(0 if sys.exc_info()[0] is None else 1)


@pytest.mark.filterwarnings("ignore:.*fork:DeprecationWarning")
def test_a_kill_at_any_write_flush_or_rename_of_a_save_leaves_a_checkpoint(tmp_path):
    begun = tmp_path / "begun"
    for step in (1, 2):
        checkpoint.save(begun, step, checkpoint.content(*small()), {})
    killed = []
    for last in itertools.count(1):
        run = tmp_path / f"killed-{last}"
        shutil.copytree(begun, run)
        status = save_and_die(run, last)
        path = checkpoint.newest(run)
        killed.append(path.name)
        assert checkpoint.load(path, *small())["step"] == int(path.name[-1])
        checkpoint.save(run, 4, checkpoint.content(*small()), {})
        checkpoint.retain(run, 2)
        assert saved(run) == [path.name, "step-00000004"]
        if status == 0:
            break
        assert os.WTERMSIG(status) == signal.SIGKILL
    assert killed == sorted(killed)  # the new one is there from one moment on
    assert set(killed) == {"step-00000002", "step-00000003"}
    assert len(killed) > 25


def test_a_foreign_or_empty_folder_is_set_aside_with_one_warning(tmp_path, capsys):
    checkpoint.save(tmp_path, 3, checkpoint.content(*small()), {})
    (tmp_path / "checkpoints" / "step-00000009").mkdir()
    foreign = tmp_path / "checkpoints" / "step-99-of-mine1"
    foreign.mkdir()
    (foreign / "notes.txt").write_text("do not lose me")
    assert checkpoint.newest(tmp_path).name == "step-00000003"
    lines = capsys.readouterr().out.splitlines()
    assert [name in line for name, line in zip((foreign.name, "step-00000009"), lines)] == [
        True
    ] * 2
    assert list(tmp_path.rglob("notes.txt"))


def test_the_same_step_damaged_twice_is_set_aside_twice(tmp_path):
    checkpoint.save(tmp_path, 3, checkpoint.content(*small()), {})
    for _ in range(2):
        path = checkpoint.save(tmp_path, 6, checkpoint.content(*small()), {})
        (path / "state.json").write_text("{}")
        assert checkpoint.newest(tmp_path).name == "step-00000003"


def test_a_run_goes_on_under_other_settings_and_text_when_it_may(
    pretrain_flags, corpus_folder, tmp_path, tokenizer, capsys
):
    drift = "--run.allow_drift=true"
    here(pretrain_flags, "--run.max_hours=1e-9")
    with pytest.raises(InputError, match="optim.learning_rate must stay 0.001"):
        here(pretrain_flags, "--optim.learning_rate=0.5")
    pieces = sorted(tokenizer.get_vocab(), key=tokenizer.get_vocab().get)
    vocabulary.save([*pieces[:-2], pieces[-1], pieces[-2]], tmp_path / "swapped", 64)
    other = f"--corpus.tokenizer={tmp_path / 'swapped'}"
    with pytest.raises(InputError, match="corpus.tokenizer.* must give the tokens"):
        here(pretrain_flags, other)
    validation = f"--corpus.train={corpus_folder / 'validation.jsonl'}"
    with pytest.raises(InputError, match="corpus.train.* must give the tokens"):
        here(pretrain_flags, validation)
    here(pretrain_flags, "--run.max_hours=1e-9", "--optim.micro_batch=4")  # decides nothing
    here(pretrain_flags, "--run.max_hours=1e-9", "--optim.learning_rate=0.5", drift)
    run = tmp_path / "runs" / "tiny"
    rates = log_rows(run, "learning_rate")
    assert sorted(rates) == [1, 2, 3]
    assert rates[3] > 0.4
    # what it says of itself is what it does, now and from now on
    first = "run.allow_drift changed after step 2: optim.learning_rate from 0.001 to 0.5"
    assert capsys.readouterr().out.count(f"warning: {first}\n") == 1
    text = (run / "settings.yaml").read_text()
    assert text.splitlines()[0] == f"# {first}"
    assert yaml.safe_load(text)["optim"]["learning_rate"] == 0.5
    with pytest.raises(InputError, match="optim.learning_rate must stay 0.5 .* got 0.001"):
        here(pretrain_flags)
    other_size = f"--model.config={json.dumps(TINY_MODEL | {'intermediate_size': 32})}"
    with pytest.raises(InputError, match="must hold this model, got another's"):
        here(pretrain_flags, other_size, drift)
    assert (run / "settings.yaml").read_text() == text  # what could not go on has changed nothing
    fast = "--optim.learning_rate=0.5"
    here(pretrain_flags, other, validation, fast, drift)
    assert reached(run) == 12
    notes = [line for line in (run / "settings.yaml").read_text().splitlines() if "# " in line]
    assert notes[0] == f"# {first}"
    assert notes[1].startswith("# run.allow_drift changed after step 3: the tokens of corpus.")
    assert len(notes) == 2


@pytest.mark.slow
def test_a_micro_batch_that_does_not_fit_is_halved_and_learns_the_same(
    pretrain_flags, tmp_path, start
):
    flags = [
        *pretrain_flags, KNOWN_PEAK, f"--model.config={NO_DROPOUT}", "--model.attention=eager",
        "--corpus.length=512", "--optim.steps=3", "--optim.batch_size=64",
    ]  # fmt: skip
    largest = [0]
    process = start(SCRIPT, *flags, "--run.name=whole", "--optim.micro_batch=8", **CPU)

    def watched() -> bool:
        text = Path(f"/proc/{process.pid}/status").read_text()
        largest.extend(int(size) << 10 for size in re.findall(r"VmPeak:\s+(\d+)", text))
        return process.poll() is not None

    wait_for(watched)
    assert process.returncode == 0
    room = (max(largest) + (150 << 20), resource.RLIM_INFINITY)
    limited = start(
        SCRIPT, *flags, "--optim.micro_batch=64", **CPU,
        limits=lambda: resource.setrlimit(resource.RLIMIT_AS, room),
    )  # fmt: skip
    assert limited.wait(PATIENCE) == 0, said(tmp_path)
    assert "warning: out of memory; optim.micro_batch is 32 in this launch" in said(tmp_path)
    losses = [list(log_rows(tmp_path / "runs" / name).values()) for name in ("whole", "tiny")]
    np.testing.assert_allclose(losses[1], losses[0], rtol=1e-6)
