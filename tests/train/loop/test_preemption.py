"""What ends a run early: signals, launchers, readers, limits, dead and hung processes, all real."""

import faulthandler
import json
import os
import shutil
import signal
import subprocess
import sys
import time

import psutil
import pytest
from accelerate import Accelerator
from accelerate.utils.other import get_free_port

import launched_runs as runs
from tiny import ROOT, refused
from train.loop import checkpoint
from train.loop.preemption import STOP_REASONS, PreemptionHandler

SRUN = """#!/bin/sh
echo $$ > "$(dirname "$0")/task"
exec "$@"
"""
SCONTROL = """#!/bin/sh
[ "$1" = show ] && exec hostname
echo "$@" >> "$(dirname "$0")/asked"
"""


def orphan(launcher: subprocess.Popen[bytes]) -> psutil.Process:
    """Kill a launcher, and return the process that it leaves."""
    (process,) = psutil.Process(launcher.pid).children()
    launcher.kill()
    launcher.wait()
    return process


def assert_saved_at_once(launch: runs.Launches, last: int) -> None:
    """A signal came after that step: in the next or the one after all agree, save and leave."""
    assert last < launch.saved_step() <= last + 2
    assert launch.logged_step() == launch.saved_step()  # nothing was trained past what was saved
    assert not list(launch.run.rglob("*.unfinished-*"))


@pytest.mark.slow
def test_ranks_told_to_end_in_any_way_save_the_same_step_and_the_run_is_the_same(launch):
    # four, because DDP adds three or more gradients up in an order that may change
    to_group = [(signal.SIGTERM, "group"), (signal.SIGUSR1, "group")]
    to_rank_0 = [(signal.SIGUSR1, "rank 0"), (signal.SIGINT, "rank 0")]
    to_rank_1 = [(signal.SIGTERM, "rank 1"), (signal.SIGHUP, "rank 1")]
    for number, to in (*to_group, *to_rank_0, *to_rank_1):
        ranks = launch.ranks(*runs.SEVERAL_RANKS, processes=4)
        last = launch.train_until(ranks[0], 2)
        if to == "group":
            os.killpg(ranks[0].pid, number)
        else:
            ranks[int(to[-1])].send_signal(number)
        assert [rank.wait(30) for rank in ranks] == [128 + number] * 4, to
        runs.wait_for(lambda: not runs.child_processes(launch.folder))
        assert_saved_at_once(launch, last)
        name = signal.Signals(number).name
        assert f"{name}: saved after step {launch.saved_step()};" in launch.output()
    torchrun = launch.torchrun(*runs.SEVERAL_RANKS, processes=4)
    last = launch.train_until(torchrun, 2)
    torchrun.terminate()
    assert torchrun.wait(30) != 0
    assert_saved_at_once(launch, last)
    torchrun = launch.torchrun(*runs.SEVERAL_RANKS, processes=4)
    launch.train_until(torchrun, 2)
    orphans = launch.rank_processes()
    assert sorted(orphans) == [0, 1, 2, 3]
    last = launch.logged_step()  # looking for the ranks took a step or two
    torchrun.kill()
    torchrun.wait()
    assert [process.wait(30) for process in orphans.values()] == [128 + signal.SIGHUP] * 4
    assert_saved_at_once(launch, last)
    for more in ([], ["--run.name=whole"]):
        assert launch.torchrun(*runs.SEVERAL_RANKS, *more, processes=4).wait(runs.PATIENCE) == 0
    assert launch.output().count("going on after step") == 8
    runs.assert_same_run(launch.run.with_name("whole"), launch.run)


@pytest.mark.slow
def test_the_slurm_script_queues_again_only_what_a_signal_ended(tmp_path, launch):
    """SLURM's stand-in signals the task of the step alone, as SLURM does, not the batch shell."""
    folder = tmp_path / "bin"
    folder.mkdir()
    text = (ROOT / "configs" / "accelerate" / "slurm.sh").read_text()
    for ours, there in (
        (".venv/bin/torchrun", f"{sys.executable} -m torch.distributed.run"),
        ("--nproc_per_node 8", "--nproc_per_node 2"),
        ("29500", str(get_free_port())),
    ):
        assert ours in text
        text = text.replace(ours, there)
    for name, body in (("srun", SRUN), ("scontrol", SCONTROL), ("slurm.sh", text)):
        (folder / name).write_text(body)
        (folder / name).chmod(0o755)
    slurm = {
        "SLURM_JOB_ID": "7", "SLURM_NNODES": "1", "SLURM_NODEID": "0", "SLURM_CPUS_PER_TASK": "2",
        "SLURM_JOB_NODELIST": "", "PATH": f"{folder}:{os.environ['PATH']}",
    }  # fmt: skip

    def job(*more: str) -> subprocess.Popen[bytes]:
        flags = [*launch.flags, *runs.SEVERAL_RANKS, *more]
        return launch.start(folder / "slurm.sh", *flags, program="bash", **(runs.CPU | slurm))

    first = job()
    last = launch.train_until(first, 2)
    os.kill(int((folder / "task").read_text()), signal.SIGUSR1)
    assert first.wait(60) == 0
    assert_saved_at_once(launch, last)
    assert json.loads((launch.run / "environment.json").read_text())["precision"] == runs.PRECISION
    assert (folder / "asked").read_text() == "requeue 7\n"
    assert job("--optim.learning_rate=9").wait(runs.PATIENCE) not in (0, None)
    assert job().wait(runs.PATIENCE) == 0
    assert launch.logged_step() == 60
    assert launch.output().count("going on after step") == 1
    assert (folder / "asked").read_text() == "requeue 7\n"


@pytest.mark.parametrize(
    "gone", ["launcher", "reader", pytest.param("reader and launcher", marks=pytest.mark.slow)]
)
def test_a_process_whose_launcher_or_reader_is_gone_saves_and_leaves(gone, launch):
    """As under `accelerate launch ... 2>&1 | tee log`, when one dies, or `tee` and the launcher."""
    reader, writer = os.pipe()
    output = {"pipe": writer, "PYTHONUNBUFFERED": ""} if "reader" in gone else {}
    first = launch(*runs.ENDLESS, launcher=runs.LAUNCH if "launcher" in gone else (), **output)
    os.close(writer)
    launch.train_until(first, 3)
    process = orphan(first) if "launcher" in gone else first
    os.close(reader)
    assert process.wait(30) == 128 + signal.SIGHUP
    assert launch.saved_step() == launch.logged_step() > 0
    if gone == "launcher":
        assert f"the launcher died: saved after step {launch.saved_step()}" in launch.output()


@pytest.mark.parametrize("number", [signal.SIGHUP, signal.SIGINT])
def test_a_signal_is_heard_unless_it_is_to_be_ignored(number):
    for before, heard in ((signal.SIG_DFL, True), (signal.SIG_IGN, False)):  # the latter by `nohup`
        own = signal.signal(number, before)
        with PreemptionHandler(time.monotonic(), None) as preemption:
            os.kill(os.getpid(), number)
            told = dict(zip(STOP_REASONS, preemption.stop_requests()))
        assert told == {reason: heard and reason == number.name for reason in STOP_REASONS}
        assert signal.signal(number, own) == before


def test_what_a_shell_started_without_a_launcher_outlives_it(pretrain_flags, tmp_path, launch):
    flags = " ".join([*pretrain_flags, *runs.ENDLESS])
    line = f"nohup {sys.executable} {runs.SCRIPT} {flags} >> {tmp_path / 'output'} 2>&1 & wait"
    shell = launch.start("-c", line, program="sh", **runs.CPU)
    launch.train_until(shell, 3)
    process = orphan(shell)
    last = launch.logged_step()
    runs.wait_for(lambda: launch.logged_step() > last + 5)
    process.terminate()
    assert process.wait(30) == 128 + signal.SIGTERM


def test_ctrl_c_in_a_terminal_saves_and_again_ends_at_once(launch):
    launcher = launch(*runs.ENDLESS, launcher=runs.LAUNCH)
    launch.train_until(launcher, 3)
    (process,) = psutil.Process(launcher.pid).children()
    os.killpg(launcher.pid, signal.SIGINT)  # the launcher hears it too
    assert launcher.wait(30) != 0
    assert process.wait(30) == 128 + signal.SIGINT
    assert launch.saved_step() == launch.logged_step() >= 3
    assert f"SIGINT: saved after step {launch.saved_step()};" in launch.output()
    own = signal.signal(signal.SIGINT, signal.default_int_handler)
    with PreemptionHandler(time.monotonic(), None):
        os.kill(os.getpid(), signal.SIGINT)
        with pytest.raises(KeyboardInterrupt):
            os.kill(os.getpid(), signal.SIGINT)
    signal.signal(signal.SIGINT, own)


@pytest.mark.slow
def test_a_launcher_that_died_before_the_first_step_is_noticed_at_it(launch):
    # so that the process waits before its first step
    with checkpoint.lock_run_dir(launch.run, Accelerator(cpu=True)):
        launcher = launch(*runs.ENDLESS, launcher=runs.LAUNCH)
        runs.wait_for(lambda: "waiting up to" in launch.output())
        process = orphan(launcher)
    assert process.wait(30) == 128 + signal.SIGHUP
    assert launch.saved_step() == 1


def test_a_launch_ends_before_its_hours_and_the_next_goes_on(pretrain, capsys):
    flags = ["--optim.steps=40", "--optim.batch_size=128"]
    flags += ["--run.save_every=1000", "--run.validate_every=1000"]
    started = time.monotonic()
    whole = pretrain(*flags, "--run.name=whole")
    seconds = 0.4 * (time.monotonic() - started)
    run = pretrain(*flags, f"--run.max_hours={seconds / 3600}")
    (name,) = runs.list_checkpoints(run)
    state = json.loads((run / "checkpoints" / name / "state.json").read_text())
    assert 0 < state["step"] < 40
    assert state["seconds"] < seconds
    assert f"run.max_hours: saved after step {state['step']};" in capsys.readouterr().out
    assert not (run / "model").exists()
    pretrain(*flags)
    runs.assert_same_run(whole, run)
    shutil.rmtree(run / "checkpoints")
    refused(lambda: pretrain(*flags), "run.name must have its checkpoints")
    assert (run / "model" / "config.json").exists()


@pytest.fixture
def clock(monkeypatch):
    """How to sleep, and timeouts that the watchdog got, None where it was switched off."""
    now, found = [0.0], []
    monkeypatch.setattr(time, "monotonic", lambda: now[0])
    monkeypatch.setattr(faulthandler, "dump_traceback_later", lambda s, **_: found.append(s))
    monkeypatch.setattr(faulthandler, "cancel_dump_traceback_later", lambda: found.append(None))
    return lambda seconds: now.append(now.pop() + seconds), found


def test_first_steps_of_launch_and_stage_may_take_any_time_and_end_no_launch(clock):
    sleep, timeouts = clock
    limit = PreemptionHandler(0.0, 100 / 3600, num_processes=2)
    found = []
    for seconds, is_new_stage in ((0, True), (30, False), (1, True), (40, False), (1, False)):
        sleep(seconds)
        limit.start_step(is_new_stage)
        found.append(timeouts[-1])
        assert not any(limit.stop_requests())
    assert found == [None, 300, None, 400, 400]  # a later compilation may take as long
    timeouts.clear()
    PreemptionHandler(0.0, None).start_step(False)  # a single process may wait for ever
    assert set(timeouts) <= {None}
    sleep(25)  # until 97
    assert not any(limit.stop_requests())
    sleep(1.1)
    assert any(limit.stop_requests())


def test_time_is_kept_for_a_save_and_an_evaluation_which_are_no_intervals(clock):
    sleep, timeouts = clock
    limit = PreemptionHandler(0.0, 200 / 3600, num_processes=2)
    for _ in range(2):
        limit.start_step(False)
        sleep(2)
    for _ in range(40):
        limit.heartbeat()
        sleep(0.5)
    with limit.extend_timeout():
        sleep(10)
    assert timeouts[-1] == 900
    limit.start_step(False)
    assert timeouts[-1] == 120  # no interval took more than 2 s
    sleep(200 - 34 - 2 * 32 - 0.1)  # 34 so far, of which 32 are of the longest step
    assert not any(limit.stop_requests())
    sleep(0.2)
    assert any(limit.stop_requests())


def test_a_rank_that_dies_stops_the_launch(launch):
    torchrun = launch.torchrun(*runs.SEVERAL_RANKS, "--run.save_every=1")
    launch.train_until(torchrun, 2)
    launch.rank_processes()[1].kill()
    assert torchrun.wait(60) != 0
    assert "Signal 9 (SIGKILL)" in launch.output()
    assert not runs.child_processes(launch.folder)
    assert checkpoint.recover_latest(launch.run) is not None


@pytest.mark.slow
def test_a_rank_that_hangs_stops_the_launch_and_the_other_says_where(pretrain, launch):
    pretrain(*runs.SEVERAL_RANKS, "--run.max_hours=1e-9")  # a checkpoint after the first step
    torchrun = launch.torchrun(*runs.SEVERAL_RANKS)
    launch.train_until(torchrun, 2)
    launch.rank_processes()[1].suspend()
    assert torchrun.wait(170) != 0
    assert "Timeout (0:02:00)!" in launch.output()
    assert "most recent call first" in launch.output()
    assert not runs.child_processes(launch.folder)
    assert launch.torchrun(*runs.SEVERAL_RANKS).wait(runs.PATIENCE) == 0
    assert "going on after step" in launch.output()
