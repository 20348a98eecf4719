"""Many fine-tuning runs: models x tasks x learning rates x seeds.

    accelerate launch --quiet --config_file configs/accelerate/cpu.yaml -m finetune.grid \
        --config configs/glue/standard.yaml --models '[FOLDER, FOLDER]' --tasks '[rte, cola]' \
        --learning_rates '[2e-4]' --glue_dir glue

A run is one fine-tuning, given by its `GlueSettings`. This process validates everything first and
then hands out the runs to worker processes. A worker takes the lock that is named by the run's key,
without waiting, reads the results again, and makes the run if it has none. A run that another grid
has begun comes last, and then a worker waits until it has been made or left. A worker that dies
breaks its pool, of one process: its run is recorded as failed, and a new pool takes its place. The
kernel frees the locks of the dead and torn lines are cut off, so the same command continues after
any interruption, and several grids may share a results file. The launcher decides the precision;
launch one process and set `--workers`, as a run is too small to gain from several processes.
"""

import multiprocessing
import os
import signal
import sys
import threading
import time
from collections import deque
from collections.abc import Iterator
from concurrent.futures import FIRST_COMPLETED, Future, ProcessPoolExecutor, wait
from concurrent.futures.process import BrokenProcessPool
from dataclasses import asdict, fields
from itertools import product

import torch
from accelerate.utils import parse_flag_from_env
from filelock import Timeout

from finetune import glue
from finetune.models import load_config_and_tokenizer, load_model
from finetune.results import (
    RUN_KEY,
    Result,
    append_result,
    inputs_differ,
    prediction_file,
    read_finished,
    run_lock,
)
from finetune.run_info import (
    format_result,
    hash_inputs,
    rerun_command,
    run_title,
    truncation_lines,
)
from finetune.settings import CommonSettings, GlueSettings, GridSettings
from finetune.simple_features import score_tasks
from finetune.tasks import description_field, load_task
from train.command_line import run_command
from train.loop.launch import launcher_pid, replace_emulated_bfloat16, start_accelerator
from train.settings import InputError, first_line

POLL_SECONDS = 0.5


def main(settings: GridSettings) -> None:
    """Make every run that has no result yet.

    Raises:
        InputError: A run cannot be made (before any run starts), or runs failed (at the end).
    """
    count = int(os.environ.get("WORLD_SIZE", "1"))
    if count != 1:
        raise InputError(
            f"launch must start one process for a grid, got {count}; launch one and give --workers"
        )
    replace_emulated_bfloat16()
    runs = list_runs(settings)
    finished = read_finished(settings.output)
    pending = [run for run in runs if not is_finished(run, finished)]
    check_precision(runs, finished)
    changed = {f"{run.task} of {run.model}" for run in pending if has_changed(run, finished)}
    if changed:
        names = ", ".join(sorted(changed))
        print(f"weights, tokenizer or data changed, made again: {names}")
    check_runs(pending)
    if settings.controls:
        score_tasks(settings)
    print(f"runs: {len(pending)} to make, {len(runs) - len(pending)} done already", flush=True)
    failures, started = 0, time.perf_counter()
    for done, (run, result) in enumerate(make_runs(pending, settings.workers), start=1):
        left = len(pending) - done
        ended = done + min(settings.workers - 1, left) / 2  # the other workers' runs are half done
        seconds = (time.perf_counter() - started) / ended * (len(pending) - ended)
        print_outcome(run, result, f"{done}/{len(pending)}", seconds)
        failures += result is not None and result["status"] == "failed"
    if failures:
        raise InputError(
            f"grid must finish every run, got {failures} of {len(pending)} that failed (above); "
            "remove the causes and start the same command again"
        )


def print_outcome(run: GlueSettings, result: Result | None, count: str, seconds: float) -> None:
    """Print the outcome of a run, None if another grid made it, and the time left."""
    text = format_result(result) if result else f"{run_title(asdict(run))}: made by another grid"
    erase = "\r\x1b[K" if sys.stdout.isatty() else ""  # a worker's progress bar
    print(f"{erase}[{count}] {text}; {seconds / 60:.0f} min left", flush=True)


def list_runs(settings: GridSettings) -> list[GlueSettings]:
    """List all combinations: seed by seed, within a seed task by task."""
    common = {field.name: getattr(settings, field.name) for field in fields(CommonSettings)}
    random_weights = (False, True) if settings.controls else (False,)
    runs = []
    for seed, task, rate, model, random in product(
        settings.seeds, settings.tasks, settings.learning_rates, settings.models, random_weights
    ):
        values = {**common, "learning_rate": rate, "model": model, "seed": seed}
        runs.append(GlueSettings(**values, task=task, random_weights=random))
    return list({run.key: run for run in runs}.values())


def is_finished(run: GlueSettings, finished: dict[tuple, Result]) -> bool:
    """Whether a run has its result, for its current inputs, and test predictions if asked for."""
    result = finished.get(run.key)
    if result is None or has_changed(run, finished):
        return False
    if result["status"] == "diverged":
        return True
    splits = glue.find_test_splits(load_task(run.task), run.glue_dir) if run.test else ()
    return all(prediction_file(run.output, result, split).exists() for split in splits)


def has_changed(run: GlueSettings, finished: dict[tuple, Result]) -> bool:
    """Whether weights, tokenizer or data of a finished run have changed since."""
    return inputs_differ(hash_inputs(run), finished.get(run.key, {}))


def check_precision(runs: list[GlueSettings], finished: dict[tuple, Result]) -> None:
    """Refuse to continue these runs in another precision, which would mix precisions in a cell."""
    precision = launch_precision()
    for run in runs:
        earlier = finished.get(run.key, {}).get("precision", precision)
        if earlier != precision:
            raise InputError(
                f"launch must have the mixed precision {earlier} of the runs in {run.output}, "
                f"got {precision}; launch as before, or choose another output"
            )


def launch_precision() -> str:
    """Mixed precision of this launch by Accelerate's name."""
    return os.environ.get("ACCELERATE_MIXED_PRECISION", "no")


def check_runs(runs: list[GlueSettings]) -> None:
    """Load every model and every task's data, and send a batch through each model.

    Prints how much of the texts is cut off, for each task once.
    """
    # the first run of a model and task stands for the others
    unique, printed = {(run.model, run.task): run for run in reversed(runs)}, set[str]()
    for run in unique.values():
        task = load_task(run.task)
        config, tokenizer = load_config_and_tokenizer(run, task)
        data = glue.load_data(run, task, tokenizer)
        glue.check_forward(load_model(run, config), data, task)
        if run.task not in printed:
            cut = {split: examples.truncation for split, examples in data.items()}
            for line in truncation_lines(run.length, cut):
                print(f"{run.task} {line}", flush=True)
        printed.add(run.task)


def make_runs(
    runs: list[GlueSettings], workers: int
) -> Iterator[tuple[GlueSettings, Result | None]]:
    """Make runs in parallel, each worker in a pool of its own.

    Yields:
        A run that has ended, and its result as from `make_run`.
    """
    pending, count = deque((run, False) for run in runs), min(workers, len(runs))
    threads = max(1, torch.get_num_threads() // max(1, count))
    pools = {worker: start_worker(worker, threads) for worker in range(count)}
    running: dict[Future, tuple[int, GlueSettings, bool]] = {}
    try:
        while pending or running:
            idle = pools.keys() - {worker for worker, *_ in running.values()}
            for worker in list(idle)[: len(pending)]:
                run, waits = pending.popleft()
                try:
                    future = pools[worker].submit(make_run, run, worker, waits=waits)
                except BrokenProcessPool:  # its process has died
                    pools[worker] = start_worker(worker, threads)
                    future = pools[worker].submit(make_run, run, worker, waits=waits)
                running[future] = worker, run, waits
            done, _ = wait(running, return_when=FIRST_COMPLETED)
            for future in done:
                _, run, waited = running.pop(future)
                result = collect_result(future, run, threads)
                if result is None and not waited:
                    pending.append((run, True))
                else:
                    yield run, result
        for pool in pools.values():
            pool.shutdown()  # a worker ends by itself; one killed leaves semaphores behind
    except KeyboardInterrupt:
        raise InputError("grid must run to its end, got an interrupt; start it again") from None
    finally:
        for process in multiprocessing.active_children():
            process.kill()


def start_worker(worker: int, threads: int) -> ProcessPoolExecutor:
    """Create a pool of one process: GPU `worker` modulo their number, its number of CPU threads."""
    context = multiprocessing.get_context("spawn")  # CUDA does not survive a fork
    return ProcessPoolExecutor(1, context, initialize_worker, (worker, threads, os.getpid()))


def initialize_worker(worker: int, threads: int, parent: int) -> None:
    """Prepare a worker process, which ends when its parent does."""
    signal.signal(signal.SIGINT, signal.SIG_IGN)  # the parent handles interrupts
    end_with_parent(parent)
    torch.set_num_threads(threads)
    if torch.cuda.is_available():
        torch.cuda.set_device(worker % torch.cuda.device_count())


def end_with_parent(parent: int | None) -> None:
    """End this process as soon as its parent, given by its id, has ended; None never does."""

    def watch() -> None:
        while os.getppid() == parent:
            time.sleep(POLL_SECONDS)
        os._exit(1)

    if parent is not None:
        threading.Thread(target=watch, daemon=True).start()


def make_run(run: GlueSettings, worker: int, waits: bool = False) -> Result | None:
    """Make one run in a worker; None if another grid has made it or, without `waits`, makes it."""
    try:
        lock = run_lock(run.output, asdict(run)).acquire(blocking=waits)
    except Timeout:
        return None
    with lock:
        if is_finished(run, read_finished(run.output)):
            return None
        accelerator = start_accelerator()  # one per run: with fp16 it holds the loss scale
        try:
            return glue.run(run, accelerator, bar_line=worker, quiet=True)
        finally:
            accelerator.free_memory()


def collect_result(future: Future, run: GlueSettings, threads: int) -> Result | None:
    """Get the result of a finished future; that of a failed run is appended to the file here."""
    error = future.exception()
    if error is None:
        return future.result()
    message = f"{type(error).__name__}: {first_line(error)}"
    if isinstance(error, BrokenProcessPool):
        message = "its process died, which a kill or a lack of memory can cause"
    values = asdict(run)
    on_gpu = torch.cuda.is_available() and not parse_flag_from_env("ACCELERATE_USE_CPU")
    result = {
        **{name: values[name] for name in RUN_KEY},
        **description_field(load_task(run.task)),
        **hash_inputs(run),
        "status": "failed",
        "error": message,
        "settings": values,
        "command": rerun_command(run, launch_precision(), None if on_gpu else threads),
    }
    append_result(run.output, result)
    return result


if __name__ == "__main__":
    end_with_parent(launcher_pid())
    run_command(main, GridSettings)
