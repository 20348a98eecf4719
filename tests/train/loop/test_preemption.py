"""What ends a run early: signals, launchers, readers, limits, dead and hung processes, all real."""

import json
import math
import os
import re
import signal
import subprocess
import sys
import time
from pathlib import Path

import pytest
from accelerate import Accelerator

from launched_runs import (
    CPU,
    ENDLESS,
    LAUNCH,
    PATIENCE,
    SCRIPT,
    TORCHRUN,
    TWO_RANKS,
    assert_same_run,
    child_pids,
    child_processes,
    free_port,
    last_logged_step,
    list_checkpoints,
    log_mtime,
    newest_step,
    rank_pids,
    read_output,
    run_in_process,
    start_ranks,
    train_until,
    wait_for,
)
from tiny import ROOT
from train.loop import checkpoint
from train.loop.preemption import MIN_STALL_SECONDS, STOP_REASONS, PreemptionHandler

SRUN = """#!/bin/sh
echo $$ > "$(dirname "$0")/task"
exec "$@"
"""


SCONTROL = """#!/bin/sh
[ "$1" = show ] && exec hostname
echo "$@" >> "$(dirname "$0")/asked"
"""


@pytest.mark.slow
def test_ranks_told_to_end_in_any_way_save_the_same_step_and_the_run_is_the_same(
    pretrain_flags, tmp_path, start
):
    flags, run = [*pretrain_flags, *TWO_RANKS], tmp_path / "runs" / "tiny"
    for number, to, workers in (
        (signal.SIGTERM, "group", 2),  # data workers receive it too
        (signal.SIGUSR1, "group", 2),
        (signal.SIGTERM, "rank 1", 0),
        (signal.SIGUSR1, "rank 0", 0),
        (signal.SIGHUP, "rank 1", 0),
        (signal.SIGINT, "rank 0", 0),
    ):
        before = log_mtime(run)
        both = start_ranks(start, [*flags, f"--run.workers={workers}"])
        last = train_until(both[0], run, before, 2)
        assert all(len(child_pids(rank.pid)) >= workers for rank in both)
        if to == "group":
            os.killpg(both[0].pid, number)
        else:
            both[int(to[-1])].send_signal(number)
        assert [rank.wait(30) for rank in both] == [128 + number] * 2, to
        wait_for(lambda: not child_processes(tmp_path))
        assert_saved_at_once(run, last)
        assert (
            f"{signal.Signals(number).name}: saved after step {newest_step(run)};"
            in read_output(tmp_path)
        )

    before = log_mtime(run)
    torchrun = start(*TORCHRUN, SCRIPT, *flags, **CPU)
    last = train_until(torchrun, run, before, 2)
    torchrun.terminate()
    assert torchrun.wait(30) != 0
    assert_saved_at_once(run, last)

    before = log_mtime(run)
    torchrun = start(*TORCHRUN, SCRIPT, *flags, **CPU)
    train_until(torchrun, run, before, 2)
    orphans = sorted(rank_pids(tmp_path).items())
    assert [rank for rank, _ in orphans] == [0, 1]
    last = last_logged_step(run)  # looking for the ranks took a step or two
    torchrun.kill()
    torchrun.wait()
    assert [exit_code(pid, 30) for _, pid in orphans] == [128 + signal.SIGHUP] * 2
    assert_saved_at_once(run, last)

    for more in ([], ["--run.name=whole"]):
        assert start(*TORCHRUN, SCRIPT, *flags, *more, **CPU).wait(PATIENCE) == 0
    assert read_output(tmp_path).count("going on after step") == 8
    assert_same_run(tmp_path / "runs" / "whole", run)


def assert_saved_at_once(run: Path, last: int) -> None:
    """A signal came after that step: in the next or the one after all agree, save and leave."""
    assert last < newest_step(run) <= last + 2
    assert last_logged_step(run) == newest_step(run)  # nothing was trained past what was saved
    assert not list(run.rglob("*.unfinished-*"))


@pytest.mark.slow
def test_the_slurm_script_queues_again_what_a_signal_ended_and_nothing_else(
    pretrain_flags, tmp_path, start
):
    """SLURM's stand-in signals the task of the step alone, as SLURM does, not the batch shell."""
    flags, run, folder = [*pretrain_flags, *TWO_RANKS], tmp_path / "runs" / "tiny", tmp_path / "bin"
    folder.mkdir()
    text = (ROOT / "configs" / "accelerate" / "slurm.sh").read_text()
    for name, body in (("srun", SRUN), ("scontrol", SCONTROL), ("slurm.sh", text)):
        for ours, there in (
            (".venv/bin/torchrun", f"{sys.executable} -m torch.distributed.run"),
            ("--nproc_per_node 8", "--nproc_per_node 2"),
            ("29500", free_port()),
        ):
            assert name != "slurm.sh" or ours in body
            body = body.replace(ours, there)
        (folder / name).write_text(body)
        (folder / name).chmod(0o755)
    slurm = {"SLURM_JOB_ID": "7", "SLURM_NNODES": "1", "SLURM_NODEID": "0"} | CPU
    slurm |= {
        "SLURM_CPUS_PER_TASK": "2",
        "SLURM_JOB_NODELIST": "",
        "PATH": f"{folder}:{os.environ['PATH']}",
    }

    def job(*more: str) -> subprocess.Popen[bytes]:
        return start(folder / "slurm.sh", *flags, *more, program="bash", **slurm)

    first = job()
    last = train_until(first, run, 0, 2)
    os.kill(int((folder / "task").read_text()), signal.SIGUSR1)
    assert first.wait(60) == 0
    assert_saved_at_once(run, last)
    assert json.loads((run / "environment.json").read_text())["precision"] == "bf16"
    assert (folder / "asked").read_text() == "requeue 7\n"
    assert job("--optim.learning_rate=9").wait(PATIENCE) not in (0, None)
    assert job().wait(PATIENCE) == 0
    assert last_logged_step(run) == 60
    assert read_output(tmp_path).count("going on after step") == 1
    assert (folder / "asked").read_text() == "requeue 7\n"


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
    run = tmp_path / "runs" / "tiny"
    launcher = start(*LAUNCH, SCRIPT, *pretrain_flags, *ENDLESS)
    train_until(launcher, run, 0, 3)
    (process,) = child_pids(launcher.pid)
    launcher.kill()
    launcher.wait()
    assert exit_code(process, 30) == 128 + signal.SIGHUP
    assert newest_step(run) == last_logged_step(run)
    assert f"the launcher died: saved after step {newest_step(run)}" in read_output(tmp_path)


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
    (process,) = child_pids(first.pid) if command else (first.pid,)
    if command:
        first.kill()
        first.wait()
    os.close(reader)
    code = exit_code(process, 30) if command else first.wait(30)
    assert code == 128 + signal.SIGHUP
    assert newest_step(run) == last_logged_step(run) > 0


@pytest.mark.parametrize("number", [signal.SIGHUP, signal.SIGINT])
def test_a_signal_is_heard_unless_it_is_to_be_ignored(number):
    for before, heard in ((signal.SIG_DFL, True), (signal.SIG_IGN, False)):  # the latter by `nohup`
        own = signal.signal(number, before)
        with PreemptionHandler(time.monotonic(), None) as preemption:
            os.kill(os.getpid(), number)
            told = dict(zip(STOP_REASONS, preemption.stop_requests()))
        assert told == {reason: heard and reason == number.name for reason in STOP_REASONS}
        assert signal.signal(number, own) == before


def test_what_a_shell_started_without_a_launcher_outlives_it(pretrain_flags, tmp_path, start):
    run, flags = tmp_path / "runs" / "tiny", " ".join([*pretrain_flags, *ENDLESS])
    line = f"nohup {sys.executable} {SCRIPT} {flags} >> {tmp_path / 'output'} 2>&1 & wait"
    shell = start("-c", line, program="sh", **CPU)
    train_until(shell, run, 0, 3)
    (process,) = child_pids(shell.pid)
    shell.kill()
    shell.wait()
    last = last_logged_step(run)
    wait_for(lambda: last_logged_step(run) > last + 5)
    os.kill(process, signal.SIGTERM)
    assert exit_code(process, 30) == 128 + signal.SIGTERM


def test_ctrl_c_in_a_terminal_saves_and_again_ends_at_once(pretrain_flags, tmp_path, start):
    run = tmp_path / "runs" / "tiny"
    launcher = start(*LAUNCH, SCRIPT, *pretrain_flags, *ENDLESS, "--run.workers=2")
    train_until(launcher, run, 0, 3)
    (process,) = child_pids(launcher.pid)
    os.killpg(launcher.pid, signal.SIGINT)  # the launcher and the workers hear it too
    assert launcher.wait(30) != 0
    assert exit_code(process, 30) == 128 + signal.SIGINT
    assert newest_step(run) == last_logged_step(run) >= 3
    assert f"SIGINT: saved after step {newest_step(run)};" in read_output(tmp_path)
    own = signal.signal(signal.SIGINT, signal.default_int_handler)
    with PreemptionHandler(time.monotonic(), None):
        os.kill(os.getpid(), signal.SIGINT)
        with pytest.raises(KeyboardInterrupt):
            os.kill(os.getpid(), signal.SIGINT)
    signal.signal(signal.SIGINT, own)


@pytest.mark.slow
def test_a_launcher_that_died_before_the_first_step_is_noticed_at_it(
    pretrain_flags, tmp_path, start
):
    run = tmp_path / "runs" / "tiny"
    # so that the process waits before its first step
    with checkpoint.lock_run_dir(run, Accelerator(cpu=True)):
        launcher = start(*LAUNCH, SCRIPT, *pretrain_flags, *ENDLESS)
        wait_for(lambda: "waiting up to" in read_output(tmp_path))
        (process,) = child_pids(launcher.pid)
        launcher.kill()
        launcher.wait()
    assert exit_code(process, 30) == 128 + signal.SIGHUP
    assert newest_step(run) == 1


def test_a_launch_ends_before_its_hours_and_the_next_goes_on(pretrain_flags, tmp_path, capsys):
    flags = [
        *pretrain_flags, "--optim.steps=40", "--optim.batch_size=128",
        "--run.save_every=1000", "--run.validate_every=1000",
    ]  # fmt: skip
    started = time.monotonic()
    run_in_process(flags, "--run.name=whole")
    run, seconds = tmp_path / "runs" / "tiny", 0.6 * (time.monotonic() - started)
    run_in_process(flags, f"--run.max_hours={seconds / 3600}")
    (name,) = list_checkpoints(run)
    state = json.loads((run / "checkpoints" / name / "state.json").read_text())
    assert 0 < state["step"] < 40
    assert state["seconds"] < seconds
    assert f"run.max_hours: saved after step {state['step']};" in capsys.readouterr().out
    assert not (run / "model").exists()
    run_in_process(flags)
    assert_same_run(tmp_path / "runs" / "whole", run)


def test_steps_that_compiled_do_not_end_a_launch_early(monkeypatch):
    now, limit = [0.0], PreemptionHandler(0.0, 100 / 3600)
    monkeypatch.setattr(time, "monotonic", lambda: now[0])
    for seconds in (0, 30, *[1] * 20):
        now[0] += seconds
        limit.silent_seconds = seconds  # as the watchdog counts them
        limit.heartbeat()
    assert not any(limit.stop_requests())
    assert limit.timeout == 300  # a later compilation may take as long
    now[0] = 98.0
    assert any(limit.stop_requests())


def test_time_is_kept_for_an_evaluation_which_does_not_count_as_steps(monkeypatch):
    now, limit = [0.0], PreemptionHandler(0.0, 100 / 3600)
    monkeypatch.setattr(time, "monotonic", lambda: now[0])
    for seconds, in_evaluation in [(0, False), (2, False), (2, True), *[(0.5, True)] * 40]:
        now[0] += seconds
        limit.silent_seconds = seconds
        limit.heartbeat(in_evaluation)
    now[0] += 0.5
    limit.heartbeat()  # the evaluation took 20.5 s, steps take 2 s
    for seconds, expected in ((100 - 20.5 - 6 - 0.1, False), (100 - 20.5 - 6 + 0.1, True)):
        now[0] = seconds
        assert any(limit.stop_requests()) == expected


def test_the_first_step_of_a_stage_may_take_any_time(monkeypatch):
    now, limit = [0.0], PreemptionHandler(0.0, None)
    monkeypatch.setattr(time, "monotonic", lambda: now[0])
    for seconds, is_new_stage, timeout in (
        (0, True, math.inf),
        (1, False, 25),
        (1, True, math.inf),
    ):
        now[0] += seconds
        limit.silent_seconds = seconds
        limit.heartbeat(is_new_stage=is_new_stage)
        assert limit.timeout == timeout
    now[0] += 100
    limit.silent_seconds = 100
    limit.heartbeat()
    assert limit.timeout == 1000


def test_a_rank_that_dies_stops_the_launch(pretrain_flags, tmp_path, start):
    flags, run = [*pretrain_flags, *TWO_RANKS, "--run.save_every=1"], tmp_path / "runs" / "tiny"
    torchrun = start(*TORCHRUN, SCRIPT, *flags, **CPU)
    train_until(torchrun, run, 0, 2)
    os.kill(rank_pids(tmp_path)[1], signal.SIGKILL)
    assert torchrun.wait(60) != 0
    assert "Signal 9 (SIGKILL)" in read_output(tmp_path)
    assert not child_processes(tmp_path)
    assert checkpoint.latest(run) is not None


@pytest.mark.slow
def test_a_rank_that_hangs_stops_the_launch_and_the_other_says_where(
    pretrain_flags, tmp_path, start
):
    flags, run = [*pretrain_flags, *TWO_RANKS], tmp_path / "runs" / "tiny"
    run_in_process(flags, "--run.max_hours=1e-9")  # a checkpoint after the first step
    before = log_mtime(run)
    torchrun = start(*TORCHRUN, SCRIPT, *flags, **CPU)
    train_until(torchrun, run, before, 2)
    os.kill(rank_pids(tmp_path)[1], signal.SIGSTOP)
    assert torchrun.wait(75) != 0
    assert "no sign of life for 25 s, stuck here" in read_output(tmp_path)
    assert "most recent call first" in read_output(tmp_path)
    assert not child_processes(tmp_path)
    assert start(*TORCHRUN, SCRIPT, *flags, **CPU).wait(PATIENCE) == 0
    assert "going on after step" in read_output(tmp_path)


@pytest.mark.slow
def test_a_run_that_was_stopped_goes_on_when_it_is_continued(pretrain_flags, tmp_path, start):
    flags = [*pretrain_flags, "--optim.steps=200"]
    run_in_process(flags, "--run.name=whole")
    launch, run = start(SCRIPT, *flags, **CPU), tmp_path / "runs" / "tiny"
    train_until(launch, run, 0, 2)
    os.kill(launch.pid, signal.SIGSTOP)
    time.sleep(MIN_STALL_SECONDS + 3)
    os.kill(launch.pid, signal.SIGCONT)
    assert launch.wait(PATIENCE) == 0
    assert_same_run(tmp_path / "runs" / "whole", run)


def test_a_data_worker_that_is_killed_stops_the_launch_and_the_next_goes_on(
    pretrain_flags, tmp_path, start
):
    flags = [*pretrain_flags, "--optim.steps=80", "--run.save_every=2"]
    run = tmp_path / "runs" / "tiny"
    launch = start(SCRIPT, *flags, "--run.workers=2", **CPU)
    train_until(launch, run, 0, 2)
    os.kill(child_pids(launch.pid)[0], signal.SIGKILL)
    assert launch.wait(60) not in (0, None)
    # torch's words depend on who notices first: its signal handler, the queue, or the pipe
    reason = r"DataLoader worker \(pid.*\) (is killed by signal: Killed|exited unexpectedly)"
    assert re.search(rf"{reason}|multiprocessing/connection.py", read_output(tmp_path))
    assert not child_processes(tmp_path)
    run_in_process(flags)
    run_in_process(flags, "--run.name=whole")
    assert_same_run(tmp_path / "runs" / "whole", run)
