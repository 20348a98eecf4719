"""The data loader of a run; its workers ignore signals and end with the process that uses them."""

import atexit
import multiprocessing
import resource
import signal
from contextlib import suppress

import torch
from torch.utils.data import DataLoader

from train.data.batching import StagedDataset
from train.loop.preemption import SIGNALS


def make_loader(
    dataset: StagedDataset, start_step: int, workers: int, device: torch.device
) -> DataLoader:
    """Build a loader that yields the micro-batches of one step at a time, from `start_step` on."""
    if workers:
        # registered after multiprocessing's own exit function, so called before it
        atexit.register(kill_workers)
        # each tensor from a worker is an open file
        _, hard_limit = resource.getrlimit(resource.RLIMIT_NOFILE)
        with suppress(ValueError, OSError):  # macOS reports an unlimited hard limit, but refuses it
            resource.setrlimit(resource.RLIMIT_NOFILE, (hard_limit, hard_limit))
    return DataLoader(
        dataset,
        batch_size=None,
        sampler=range(start_step, dataset.total),
        num_workers=workers,
        worker_init_fn=ignore_signals,
        pin_memory=device.type == "cuda",  # required for non-blocking copies
    )


def ignore_signals(worker_id: int) -> None:
    """Ignore in a data worker the signals that a process group receives; the loop handles them."""
    for number in SIGNALS:
        signal.signal(number, signal.SIG_IGN)


def kill_workers() -> None:
    """Kill remaining data workers at exit.

    multiprocessing would send SIGTERM, which they ignore, and wait for ever.
    """
    signal.signal(signal.SIGCHLD, signal.SIG_DFL)  # torch's handler would report an error
    for worker in multiprocessing.active_children():
        worker.kill()
