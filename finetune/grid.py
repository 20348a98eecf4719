"""Many runs: `accelerate launch -m finetune.grid --models '[a, b]' --tasks '[cola]'`.

This process reads and checks everything, hands out the runs and watches; its workers make them. A
run that has a line in the results is left out, so the same command goes on after a stop, whatever
stopped it. The launcher decides the precision; let it start one process and give `--workers`: a run
is too small to be worth spreading over processes.
"""

import multiprocessing
import os
import signal
import threading
import time
from collections import deque
from contextlib import suppress
from dataclasses import asdict, fields, replace
from itertools import product
from multiprocessing.connection import Connection, wait
from pathlib import Path
from typing import Any

import torch

from finetune import glue
from finetune.progress_table import Board
from finetune.results import (
    RunLocks,
    append_result,
    hash_differs,
    prediction_file,
    read_results,
    run_key,
    run_name,
)
from finetune.settings import GlueSettings, GridSettings, Recipe
from finetune.tasks import TASKS
from train.loop.launch import launcher_pid, run_command, start_accelerator
from train.settings import InputError, require

FROM_MNLI = ("rte", "mrpc", "stsb")
SECONDS = 0.5
"""Between two signs of life of a worker."""


def main(settings: GridSettings) -> None:
    """Make every run that has no line in the results yet.

    Raises:
        InputError: A run cannot be made (said before any is), or some failed (after the rest).
    """
    processes = int(os.environ.get("WORLD_SIZE", "1"))
    remedy = "launch one and give --workers"
    require(processes == 1, "launch", "must start one process for a grid", processes, remedy)
    runs = all_runs(settings)
    done = finished(settings.output)
    missing = [run for run in runs if not is_done(run, done)]
    again = {run.save for run in missing if run.save}  # and what starts from these
    missing += [run for run in runs if run.mnli in again and run not in missing]
    for run in runs:
        require_precision(run, done)
    stale = {what for run in missing if (what := other_inputs(run, done))}
    if stale:
        print(f"not what their results are of: {', '.join(sorted(stale))}; made again")
    check(missing)
    failures = 0
    if missing:
        locks = RunLocks(settings.output)
        with Board(runs, missing, settings.workers) as board:
            failures = hand_out(missing, settings.workers, locks, board)
    else:
        print(f"0 runs to make, {len(runs)} done already")
    if failures:
        raise InputError(
            f"grid must finish every run, got {failures} of {len(missing)} that failed (above); "
            "mend them and start the same command again"
        )


def all_runs(settings: GridSettings) -> list[GlueSettings]:
    """Every combination, checked; all models meet a task before the next task begins.

    Raises:
        InputError: One of them cannot be run.
    """
    recipe = {field.name: getattr(settings, field.name) for field in fields(Recipe)}
    rates = settings.learning_rates or [settings.learning_rate]
    controls = (False, True) if settings.random_control else (False,)
    runs = []
    for seed, task, rate, model, control in product(
        settings.seeds, settings.tasks, rates, settings.models, controls
    ):
        values = {**recipe, "learning_rate": rate, "model": model, "seed": seed}
        run = GlueSettings(**values, task=task, random_weights=control)
        if settings.from_mnli and not control:
            if task == "mnli":
                run = replace(run, save=mnli_folder(run))
            elif task in FROM_MNLI:
                runs.append(replace(run, mnli=mnli_folder(run)))
        runs.append(run)
    unique = {run_key(asdict(run)): run for run in runs}
    return sorted(unique.values(), key=lambda run: run.mnli is not None)


def mnli_folder(run: GlueSettings) -> str:
    """Where the model that MNLI's run of the same recipe and seed makes is kept."""
    name = run_name(asdict(replace(run, task="mnli", mnli=None)))
    return str(Path(run.output).parent / "mnli" / name)


def finished(output: str) -> dict[tuple, dict[str, Any]]:
    """The lines that need not be made again, by their key; a torn one is none."""
    if not Path(output).is_file():
        return {}
    return {run_key(x): x for x in read_results(output) if x["status"] != "failed"}


def is_done(run: GlueSettings, done: dict[tuple, dict[str, Any]]) -> bool:
    """Whether a run has its line, and what others need of it is there."""
    line = done.get(run_key(asdict(run)))
    if line is None or other_inputs(run, done):
        return False
    if line["status"] == "diverged":
        return True
    wanted = glue.unlabelled(run) if run.test else ()
    files = [prediction_file(run.output, line, split) for split in wanted]
    return all(f.exists() for f in files) and (run.save is None or Path(run.save).exists())


def other_inputs(run: GlueSettings, done: dict[tuple, dict[str, Any]]) -> str | None:
    """What is no longer what a run's line is of: its model's weights, or its data; None is none."""
    line = done.get(run_key(asdict(run)))
    if line is None:
        return None
    names = {
        "weights": f"the weights of {run.mnli or run.model}",
        "data": f"{run.task} of {run.glue_dir}",
    }
    found = glue.inputs_of(run).items()
    return next((names[name] for name, value in found if hash_differs(value, line, name)), None)


def require_precision(run: GlueSettings, done: dict[tuple, dict[str, Any]]) -> None:
    """Refuse to go on in another precision: the runs of one table are made alike.

    Raises:
        InputError: A run's line is of another than this launch's.
    """
    here = os.environ.get("ACCELERATE_MIXED_PRECISION", "no")
    there = done.get(run_key(asdict(run)), {}).get("precision", here)
    rule = f"must have the mixed precision {there} of the runs in {run.output}"
    remedy = "launch as before, or choose another output"
    require(there == here, "launch", rule, here, remedy)


def check(runs: list[GlueSettings]) -> None:
    """Read every model's description and every task's data, and send a batch through each model.

    Raises:
        InputError: One of them cannot be used, before any run is made.
    """
    first = {(run.model, run.task): replace(run, mnli=None) for run in reversed(runs)}
    for run in first.values():
        task = TASKS[run.task]
        config, tokenizer = glue.load_config_and_tokenizer(run, task)
        data = glue.load_data(run, task, tokenizer)
        glue.require_run(glue.load_model(run, config), glue.longest(data), task)


def hand_out(runs: list[GlueSettings], count: int, locks: RunLocks, board: Board) -> int:
    """Give every run to a worker; one that dies fails its run alone and is replaced.

    Returns:
        How many runs failed.
    """
    pending, failures, started_by = deque(runs), 0, launcher_pid()
    workers = [Worker(number, count) for number in range(min(count, len(runs)))]
    try:
        while pending or any(worker.run for worker in workers):
            making = [worker.run for worker in workers if worker.run]
            for worker in (worker for worker in workers if not worker.run):
                run = next_run(pending, making, locks)
                if run is not None:
                    worker.start(run)
                    making.append(run)
            ready = wait_for(workers, started_by)
            for worker in [w for w in workers if w.connection in ready]:
                run, (what, value) = worker.run, worker.hear()
                assert run is not None
                if what == "dead":
                    workers[worker.number] = Worker(worker.number, count)
                    lines = finished(run.output)  # it may have written its line before
                    if is_done(run, lines):
                        what, value = "done", lines[run_key(asdict(run))]
                if what in ("dead", "failed"):
                    failures += 1
                    value = failed_line(run, value)
                    append_result(locks, value)
                board.show(worker.number, run, what, value)
    except KeyboardInterrupt:
        raise InputError(
            "grid must be left alone, got an interrupt; the same command goes on"
        ) from None
    finally:
        for worker in workers:
            worker.process.kill()
    return failures


def next_run(
    pending: deque[GlueSettings], making: list[GlueSettings], locks: RunLocks
) -> GlueSettings | None:
    """Take the first run that can begin: one that starts from MNLI waits for that run."""
    others = {run.save for run in (*pending, *making) if run.save}
    for run in pending:
        if run.mnli is None or not (run.mnli in others or is_made_elsewhere(run, locks)):
            pending.remove(run)
            return run
    return None


def is_made_elsewhere(run: GlueSettings, locks: RunLocks) -> bool:
    """Whether another grid is at the run of MNLI that this one starts from."""
    source = asdict(replace(run, task="mnli", mnli=None))
    if Path(str(run.mnli)).exists():
        return False
    if not locks.acquire(source):
        return True
    locks.release(source)
    return False


def failed_line(run: GlueSettings, error: str) -> dict[str, Any]:
    """The line of a run that has no outcome; a grid makes it again."""
    values, precision = asdict(run), os.environ.get("ACCELERATE_MIXED_PRECISION", "no")
    command = glue.command_of(run, precision, cpu=not torch.cuda.is_available())
    return {
        **values,
        **glue.inputs_of(run),
        "status": "failed",
        "error": error,
        "settings": values,
        "command": command,
    }


def wait_for(workers: list["Worker"], started_by: int | None) -> list[Any]:
    """Connections on which a worker has something to say; those without a run say nothing.

    Raises:
        InputError: The launcher died.
    """
    alive, rule = started_by in (None, os.getppid()), "must live as long as its grid"
    require(alive, "launcher", rule, "its end", "the same command goes on")
    return wait([worker.connection for worker in workers if worker.run], timeout=SECONDS)


class Worker:
    """A process that makes runs one after the other.

    Args:
        number: Counts from 0; chooses the GPU.
        count: Workers in all, which share the processor's threads.
    """

    def __init__(self, number: int, count: int) -> None:
        self.number = number
        self.run: GlueSettings | None = None
        context = multiprocessing.get_context("spawn")  # a forked process cannot use CUDA
        self.connection, theirs = context.Pipe()
        threads = max(1, torch.get_num_threads() // count)
        self.process = context.Process(target=work, args=(number, threads, theirs), daemon=True)
        self.process.start()
        theirs.close()  # or its end would not be noticed

    def start(self, run: GlueSettings) -> None:
        """Give it a run."""
        self.run = run
        with suppress(OSError):  # it is gone, as `hear` will find
            self.connection.send(run)

    def hear(self) -> tuple[str, Any]:
        """What it says: step, done, failed or elsewhere; dead when it is gone."""
        try:
            what, value = self.connection.recv()
        except (EOFError, OSError):
            self.process.join()
            what, value = "dead", f"its process ended with {self.process.exitcode}"
        if what != "step":
            self.run = None
        return what, value


def work(number: int, threads: int, connection: Connection) -> None:
    """A worker's life: make the run it is given, say how far it is and how it ended."""
    signal.signal(signal.SIGINT, signal.SIG_IGN)  # for the watching process to obey
    threading.Thread(target=_end_with_parent, args=(os.getppid(),), daemon=True).start()
    torch.set_num_threads(threads)
    if torch.cuda.is_available():
        torch.cuda.set_device(number % torch.cuda.device_count())
    locks: RunLocks | None = None
    said = 0.0

    def watch(*progress: float) -> None:
        nonlocal said
        if time.monotonic() > said + SECONDS:
            said = time.monotonic()
            connection.send(("step", progress))

    while True:
        run = connection.recv()
        locks = locks or RunLocks(run.output)
        if not locks.acquire(asdict(run)):
            connection.send(("elsewhere", None))
            continue
        accelerator = start_accelerator()  # of its own: in fp16 it holds the scale of the losses
        try:
            if is_done(run, finished(run.output)):  # by another grid, meanwhile
                connection.send(("elsewhere", None))
            else:
                connection.send(("done", glue.main(run, accelerator, locks, watch)))
        except Exception as error:
            reason = next(iter(str(error).splitlines()), "")
            connection.send(("failed", f"{type(error).__name__}: {reason}"))
        finally:
            locks.release(asdict(run))
            accelerator.free_memory()


def _end_with_parent(parent: int) -> None:
    while os.getppid() == parent:
        time.sleep(SECONDS)
    os._exit(1)


if __name__ == "__main__":
    run_command(main, GridSettings)
