"""Steps timed in a process of their own, so that no measurement inherits another's memory.

Large tensors come from the system and go back to it at every allocation, which costs a page fault
for every 4 KiB; how much of that a process avoids depends on what it computed before.
"""

import multiprocessing
import time
from collections.abc import Callable, Mapping
from concurrent.futures import ProcessPoolExecutor
from typing import Any

import torch
import transformers

from train.bench.baselines import BenchBatch, Step, Workload, keep_freed_memory

StepFactory = Callable[[str, Workload, BenchBatch], Step]


def in_new_process(function: Callable[..., Any], *arguments: Any) -> Any:
    """Call a function of a module in a new process, which has imported torch and computed nothing.

    The threads of torch are those of the caller.
    """
    context = multiprocessing.get_context("forkserver")
    context.set_forkserver_preload(["train.bench.baselines"])
    with ProcessPoolExecutor(1, context) as pool:
        return pool.submit(_call, torch.get_num_threads(), function, *arguments).result()


def _call(threads: int, function: Callable[..., Any], *arguments: Any) -> Any:
    torch.set_num_threads(threads)
    transformers.utils.logging.set_verbosity_error()  # of zeros at padding, which nobody reads here
    return function(*arguments)


def time_models(
    models: Mapping[str, Workload], make_step: StepFactory, turns: int, keep: bool = False
) -> dict[str, list[float]]:
    """Time a step of each model on the same batch, alternately.

    Args:
        models: Size, batch and precision of each model by its name; the batches are equal.
        make_step: Returns the step of a model.
        turns: Turns to measure, after one for warming up.
        keep: Keep freed memory in this process, which must be a new one.

    Returns:
        Seconds of each model in each turn.
    """
    if keep:
        keep_freed_memory()
    torch.manual_seed(0)
    workload = next(iter(models.values()))
    batch = BenchBatch.random(workload)
    steps = {name: make_step(name, own, batch) for name, own in models.items()}
    return time_steps(steps, turns, torch.device(workload.device))


def time_steps(steps: dict[str, Step], turns: int, device: torch.device) -> dict[str, list[float]]:
    """Time steps alternately, after a turn for warming up.

    Args:
        steps: Steps by name.
        turns: Turns to measure.
        device: Device of the steps; on CUDA each is repeated ten times in a turn.

    Returns:
        Seconds of each step in each turn.
    """
    seconds: dict[str, list[float]] = {name: [] for name in steps}
    repeats = 10 if device.type == "cuda" else 1
    for turn in range(turns + 1):
        # the order is reversed every other turn, so that no step always follows the same one
        for name in list(steps)[:: -1 if turn % 2 else 1]:
            _synchronize(device)
            started = time.perf_counter()
            for _ in range(repeats):
                steps[name]()
            _synchronize(device)
            seconds[name].append((time.perf_counter() - started) / repeats)
    return {name: values[1:] for name, values in seconds.items()}


def _synchronize(device: torch.device) -> None:
    if device.type == "cuda":
        torch.cuda.synchronize()
