"""Many fine-tuning runs: `accelerate launch --quiet -m finetune.grid --models '[a]' ...`.

This process validates everything first and then hands out the runs to worker processes. A run that
has a line in the results is skipped, so the same command continues after any interruption, and
several grids may share a results file. The launcher decides the precision; launch one process and
set `--workers`, as a run is too small to gain from several processes.
"""

import multiprocessing
import os
import signal
import sys
import threading
import time
from collections import deque
from concurrent.futures import FIRST_COMPLETED, Future, ProcessPoolExecutor, wait
from concurrent.futures.process import BrokenProcessPool
from dataclasses import asdict, fields, replace
from itertools import product
from pathlib import Path
from typing import Any

import numpy as np
import torch

from finetune import glue
from finetune.results import (
    append_result,
    hash_differs,
    prediction_file,
    read_results,
    run_key,
    run_locks,
    run_name,
)
from finetune.run_info import format_result, hash_inputs, rerun_command
from finetune.settings import GlueSettings, GridSettings, Recipe
from finetune.simple_features import SimpleFeaturesSettings, score_tasks
from finetune.tasks import describe_task, load_task
from train.command_line import run_command
from train.loop.launch import launcher_pid, start_accelerator
from train.settings import InputError, require

MNLI_TASKS = ("rte", "mrpc", "stsb")
"""Tasks that `from_mnli` also starts from the model fine-tuned on MNLI."""
POLL_SECONDS = 0.5
Line = dict[str, Any]
Finished = dict[tuple, Line]
"""Lines of finished runs by their key."""


def main(settings: GridSettings) -> None:
    """Make every run that has no line in the results yet.

    Raises:
        InputError: A run cannot be made (before any run starts), or runs failed (at the end).
    """
    processes = int(os.environ.get("WORLD_SIZE", "1"))
    remedy = "launch one and give --workers"
    require(processes == 1, "launch", "must start one process for a grid", processes, remedy)
    runs = list_runs(settings)
    finished = read_finished(settings.output)
    pending = [run for run in runs if not is_finished(run, finished)]
    remade = {run.save for run in pending if run.save}  # runs that start from them follow
    pending += [run for run in runs if run.mnli in remade and run not in pending]
    for run in runs:
        check_precision(run, finished)
    changed = {description for run in pending if (description := changed_input(run, finished))}
    if changed:
        print(f"changed since their results: {', '.join(sorted(changed))}; made again")
    check_runs(pending)
    if settings.random_control:
        score_tasks(SimpleFeaturesSettings(settings.tasks, settings.glue_dir, settings.output))
    print(f"{len(pending)} runs to make, {len(runs) - len(pending)} done already", flush=True)
    progress, failures = Progress(len(pending), settings.workers), 0
    for from_mnli in (False, True):  # runs that start from MNLI need its models
        phase = [run for run in pending if (run.mnli is not None) == from_mnli]
        failures += make_runs(phase, settings.workers, progress)
    if failures:
        raise InputError(
            f"grid must finish every run, got {failures} of {len(pending)} that failed (above); "
            "remove the causes and start the same command again"
        )


def list_runs(settings: GridSettings) -> list[GlueSettings]:
    """List all combinations; all models meet a task before the next task.

    Raises:
        InputError: The settings of a run are invalid.
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
            elif task in MNLI_TASKS:
                runs.append(replace(run, mnli=mnli_folder(run)))
        runs.append(run)
    return list({run_key(asdict(run)): run for run in runs}.values())


def mnli_run(run: GlueSettings) -> GlueSettings:
    """The MNLI run of the same model, recipe and seed."""
    return replace(run, task="mnli", mnli=None)


def mnli_folder(run: GlueSettings) -> str:
    """Where `mnli_run` saves its model."""
    return str(Path(run.output).parent / "mnli" / run_name(asdict(mnli_run(run))))


def read_finished(output: str) -> Finished:
    """Read the lines of all runs that did not fail."""
    if not Path(output).is_file():
        return {}
    return {run_key(line): line for line in read_results(output) if line["status"] != "failed"}


def is_finished(run: GlueSettings, finished: Finished) -> bool:
    """Whether a run has its line, for its current inputs, and all files that are asked for."""
    line = finished.get(run_key(asdict(run)))
    if line is None or changed_input(run, finished):
        return False
    if line["status"] == "diverged":
        return True
    splits = glue.test_splits(run) if run.test else ()
    files = [prediction_file(run.output, line, split) for split in splits]
    return all(file.exists() for file in files) and (run.save is None or Path(run.save).exists())


def changed_input(run: GlueSettings, finished: Finished) -> str | None:
    """Name the input of a finished run, weights or data, that has changed since; None if none."""
    line = finished.get(run_key(asdict(run)))
    if line is None:
        return None
    names = {
        "weights": f"the weights of {run.mnli or run.model}",
        "data": f"{run.task} of {run.glue_dir}" if run.glue_dir else f"the data of {run.task}",
    }
    hashes = hash_inputs(run).items()
    return next((names[name] for name, value in hashes if hash_differs(value, line, name)), None)


def check_precision(run: GlueSettings, finished: Finished) -> None:
    """Refuse to continue in another precision, which would mix precisions in one table.

    Raises:
        InputError: A finished run was made in another precision than this launch's.
    """
    precision = launch_precision()
    earlier = finished.get(run_key(asdict(run)), {}).get("precision", precision)
    rule = f"must have the mixed precision {earlier} of the runs in {run.output}"
    remedy = "launch as before, or choose another output"
    require(earlier == precision, "launch", rule, precision, remedy)


def launch_precision() -> str:
    """Mixed precision of this launch by Accelerate's name."""
    return os.environ.get("ACCELERATE_MIXED_PRECISION", "no")


def check_runs(runs: list[GlueSettings]) -> None:
    """Load every model and every task's data, and send a batch through each model.

    Raises:
        InputError: One of them cannot be used.
    """
    unique = {(run.model, run.task): replace(run, mnli=None) for run in reversed(runs)}
    for run in unique.values():
        task = load_task(run.task)
        config, tokenizer = glue.load_config_and_tokenizer(run, task)
        data = glue.load_data(run, task, tokenizer)
        glue.check_forward(glue.load_model(run, config), data, task)


def make_runs(runs: list[GlueSettings], workers: int, progress: "Progress") -> int:
    """Make runs in parallel and print a line for each.

    Each worker is a pool of one process: when a process dies, its run fails and its pool is
    replaced, and the other workers go on.

    Returns:
        Number of failed runs.
    """
    pending, failures, launcher = deque(runs), 0, launcher_pid()
    count = min(workers, len(runs))
    pools = {slot: start_worker(slot, count) for slot in range(count)}
    futures: dict[Future, tuple[int, GlueSettings]] = {}
    try:
        while pending or futures:
            for slot in pools.keys() - {slot for slot, _ in futures.values()}:
                if pending:
                    future = submit_run(pending[0], pools, slot)
                    futures[future] = slot, pending.popleft()
            done, _ = wait(futures, timeout=POLL_SECONDS, return_when=FIRST_COMPLETED)
            for future in done:
                slot, run = futures.pop(future)
                line = collect_line(future, run)
                if isinstance(future.exception(), BrokenProcessPool):
                    pools[slot] = start_worker(slot, count)
                failures += line is not None and line["status"] == "failed"
                progress.print_line(run, line)
            alive = launcher in (None, os.getppid())
            rule, remedy = "must live as long as its grid", "start the same command again"
            require(alive, "launcher", rule, "its end", remedy)
        for pool in pools.values():
            pool.shutdown()  # Python warns of the semaphores that a killed worker leaves
    except KeyboardInterrupt:
        raise InputError("grid must run to its end, got an interrupt; start it again") from None
    finally:
        for process in multiprocessing.active_children():
            process.kill()
    return failures


def submit_run(run: GlueSettings, pools: dict[int, ProcessPoolExecutor], slot: int) -> Future:
    """Hand a run to the worker of a slot, replaced if its process died between two runs."""
    try:
        return pools[slot].submit(make_run, run, slot)
    except BrokenProcessPool:
        pools[slot] = start_worker(slot, len(pools))
        return pools[slot].submit(make_run, run, slot)


def start_worker(slot: int, workers: int) -> ProcessPoolExecutor:
    """Create a pool of one process, which uses GPU `slot` and its share of the CPU threads."""
    threads = max(1, torch.get_num_threads() // workers)
    context = multiprocessing.get_context("spawn")  # CUDA does not survive a fork
    return ProcessPoolExecutor(1, context, initialize_worker, (slot, threads, os.getpid()))


def initialize_worker(slot: int, threads: int, parent: int) -> None:
    """Prepare a worker process, which ends when its parent does."""

    def end_with_parent() -> None:
        while os.getppid() == parent:
            time.sleep(POLL_SECONDS)
        os._exit(1)

    signal.signal(signal.SIGINT, signal.SIG_IGN)  # the parent handles interrupts
    threading.Thread(target=end_with_parent, daemon=True).start()
    torch.set_num_threads(threads)
    if torch.cuda.is_available():
        torch.cuda.set_device(slot % torch.cuda.device_count())


def make_run(run: GlueSettings, slot: int) -> Line | None:
    """Make one run in a worker process; None if another grid is making it or has made it."""
    locks, source = run_locks(run.output), asdict(mnli_run(run))
    while run.mnli is not None and not Path(run.mnli).exists():
        if locks.acquire(source):  # else another grid is making the MNLI run
            locks.release(source)
            break
        time.sleep(POLL_SECONDS)
    if not locks.acquire(asdict(run)):
        return None
    accelerator = start_accelerator()  # one per run: with fp16 it holds the loss scale
    try:
        if is_finished(run, read_finished(run.output)):
            return None
        return glue.main(run, accelerator, glue.progress_bar(run, position=slot))
    finally:
        locks.release(asdict(run))
        accelerator.free_memory()


def collect_line(future: Future, run: GlueSettings) -> Line | None:
    """Get the line of a finished future; that of a failed run is appended to the results here."""
    error = future.exception()
    if error is None:
        return future.result()
    message = f"{type(error).__name__}: {next(iter(str(error).splitlines()), '')}"
    if isinstance(error, BrokenProcessPool):
        lines = read_finished(run.output)
        if is_finished(run, lines):  # the process died after its last action
            return lines[run_key(asdict(run))]
        message = "its process died, which a kill or a lack of memory can cause"
    values = asdict(run)
    line = {
        **values,
        **describe_task(load_task(run.task)),
        **hash_inputs(run),
        "status": "failed",
        "error": message,
        "settings": values,
        "command": rerun_command(run, launch_precision(), cpu=not torch.cuda.is_available()),
    }
    append_result(run.output, line)
    return line


class Progress:
    """Prints one line per run, and the time left.

    Args:
        total: Number of runs to make.
        workers: Runs made in parallel.
    """

    def __init__(self, total: int, workers: int) -> None:
        self.total, self.workers, self.done = total, workers, 0
        self.seconds: list[float] = []

    def print_line(self, run: GlueSettings, line: Line | None) -> None:
        """Print the outcome of a run; None means that another grid made it."""
        self.done += 1
        if line is None:
            text = f"{run.task} {run.model} seed {run.seed}: made by another grid"
        else:
            text = format_result(line)
            self.seconds += [line["seconds"]] if "seconds" in line else []
        erase = "\r\x1b[K" if sys.stdout.isatty() else ""  # a worker's progress bar
        print(f"{erase}[{self.done}/{self.total}] {text}; {self.time_left()}", flush=True)

    def time_left(self) -> str:
        """Estimate the time of the remaining runs by the mean time of those made."""
        if not self.seconds:
            return "time left unknown"
        seconds = float(np.mean(self.seconds)) * (self.total - self.done) / self.workers
        return f"{seconds / 60:.0f} min left"


if __name__ == "__main__":
    run_command(main, GridSettings)
