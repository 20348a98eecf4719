"""What ends a run before its time: signals, a launcher or reader that died, a limit, a stall.

Whichever process is told, all of them save and leave after the same step: what each has heard is
added up over processes with the predicted tokens of the step, so agreeing costs nothing extra.
"""

import errno
import faulthandler
import math
import multiprocessing
import os
import signal
import sys
import threading
import time
from collections.abc import Callable, Iterator
from contextlib import contextmanager
from types import FrameType
from typing import Any, TextIO, cast

import torch
from torch import Tensor

from train.loop.launch import launcher_pid

SIGNALS = (signal.SIGTERM, signal.SIGUSR1, signal.SIGHUP, signal.SIGINT)
LAUNCHER = "the launcher died"
LIMIT = "run.max_hours"

STOP_REASONS = (*(number.name for number in SIGNALS), LAUNCHER, LIMIT)
EXIT_CODES = (*(128 + number for number in SIGNALS), 128 + signal.SIGHUP, 0)
"""What the process ends with for each reason, as a shell would have it; a limit is no failure."""

MIN_STALL_SECONDS = 25.0
"""Seconds without a sign of life, at least, before a process counts as stuck; torchrun then gives
the others 30 to end: a minute in all."""

TICK = 0.5
"""Seconds between two looks at whether there was a sign."""

MAX_SAVE_SECONDS = 900.0
"""Seconds a checkpoint may take to write, and the other processes to wait for it."""


class ClosablePipe:
    """Standard output or error, which leads nowhere from the moment that nobody reads it.

    Otherwise the next line of a process whose `| tee log` is gone would end it before it saves.

    Args:
        stream: Where it leads.
        unread: Called when nobody reads it any more.
    """

    def __init__(self, stream: TextIO, unread: Callable[[], None]) -> None:
        self.stream, self.unread = stream, unread

    def __getattr__(self, name: str) -> Any:
        return getattr(self.stream, name)

    def write(self, text: str) -> int:
        """Write at once: a line that waits in a buffer would fail when the process ends."""
        with self._outlived():
            self.stream.write(text)
            self.stream.flush()
        return len(text)

    def flush(self) -> None:
        """Write what waits."""
        with self._outlived():
            self.stream.flush()

    @contextmanager
    def _outlived(self) -> Iterator[None]:
        try:
            yield
        except OSError as error:
            if error.errno not in (errno.EPIPE, errno.EIO):  # a pipe's reader, a terminal
                raise
            nowhere = os.open(os.devnull, os.O_WRONLY)
            os.dup2(nowhere, self.stream.fileno())
            os.close(nowhere)
            self.unread()


class PreemptionHandler:
    """Listens while the loop runs; a launcher that dies from the moment this is made is noticed.

    Args:
        started: When this launch began, by `time.monotonic`.
        max_hours: Hours after which this launch shall stop, or None.
        compiled: A step may stop to compile a new shape, which takes minutes.
    """

    def __init__(self, started: float, max_hours: float | None, compiled: bool = False) -> None:
        self.shortest = 600.0 if compiled else MIN_STALL_SECONDS
        self.deadline = None if max_hours is None else started + 3600 * max_hours
        self.launcher_pid = launcher_pid()
        self.heard: set[str] = set()
        self.longest = 0.0
        self.last_sign: float | None = None
        self.quiet, self.limit = 0.0, math.inf  # seconds without a sign: there are, there may be
        self.over = threading.Event()

    def __enter__(self) -> "PreemptionHandler":
        threading.Thread(target=self._watch, daemon=True).start()
        self.before = {number: signal.signal(number, self._hear) for number in SIGNALS}
        for number, handler in self.before.items():
            if handler == signal.SIG_IGN:  # as `nohup`, or a script's `&`, wants it
                signal.signal(number, handler)
        self.streams = sys.stdout, sys.stderr
        outlets = [s and cast(TextIO, ClosablePipe(s, self._unread)) for s in self.streams]
        sys.stdout, sys.stderr = outlets
        return self

    def __exit__(self, *error: object) -> None:
        self.over.set()
        if sys.stdout:  # there is none after `>&-`
            sys.stdout.flush()  # while that cannot fail: at the end of the process it would
        sys.stdout, sys.stderr = self.streams
        for number, handler in self.before.items():
            signal.signal(number, handler)

    def _hear(self, number: int, frame: FrameType | None) -> None:
        name = signal.Signals(number).name
        if number == signal.SIGINT and name in self.heard:
            signal.default_int_handler(number, frame)  # whoever presses Ctrl-C again means now
        self.heard.add(name)

    def _unread(self) -> None:
        self.heard.add(LAUNCHER)

    def stop_requests(self) -> list[bool]:
        """Whether this process has heard each of `STOP_REASONS`.

        A limit is heard one step early, and a save, so that the checkpoint is there before it.
        """
        if self.launcher_pid not in (None, os.getppid()):
            self.heard.add(LAUNCHER)
        if self.deadline is not None and time.monotonic() + 3 * self.longest > self.deadline:
            self.heard.add(LIMIT)
        return [reason in self.heard for reason in STOP_REASONS]

    def heartbeat(self) -> None:
        """Give a sign of life; without one for ten times the longest pause so far, and
        `MIN_STALL_SECONDS` at least, the process prints where it is stuck and ends, so that the
        launcher stops the others.
        """  # noqa: D205 one sentence
        now = time.monotonic()
        if self.last_sign is not None:
            # the first pause holds compilation and the start of the workers: nothing to go by
            pause = min(now - self.last_sign, self.quiet + 2 * TICK)
            self.longest = max(self.longest, pause)
            self.limit = max(self.shortest, 10 * self.longest)
        self.last_sign, self.quiet = now, 0.0

    def _watch(self) -> None:
        """Count the seconds without a sign, but not those in which the process was stopped, by
        Ctrl-Z for instance: whatever passed, a look is one tick. A process that never lets Python
        run again is ended by the others.
        """  # noqa: D205 one sentence
        while not self.over.wait(TICK):
            self.quiet += TICK
            if self.quiet > self.limit:
                os.write(2, f"no sign of life for {self.limit:.0f} s, stuck here:\n".encode())
                faulthandler.dump_traceback(file=2)
                os._exit(1)

    @contextmanager
    def extend_timeout(self) -> Iterator[None]:
        """For a save: a disk may be slow, but nobody waits for a process that hangs for ever."""
        self.quiet, self.limit = 0.0, MAX_SAVE_SECONDS
        yield
        self.last_sign = time.monotonic()


def end_workers() -> None:
    """At exit, kill what is left of the data workers: multiprocessing would send them a SIGTERM,
    which they ignore, and wait for ever.
    """  # noqa: D205 one sentence
    signal.signal(signal.SIGCHLD, signal.SIG_DFL)  # torch's would call their end an error
    for worker in multiprocessing.active_children():
        worker.kill()


def ignore_signals(worker: int) -> None:
    """For data workers: a signal to the whole group is for the loop to obey, not for them."""
    for number in SIGNALS:
        signal.signal(number, signal.SIG_IGN)


class AsyncScalars:
    """Numbers on their way from the device to the host, which nobody waits for until they are read.

    Args:
        tensor: [n], on any device.
    """

    def __init__(self, tensor: Tensor) -> None:
        self.event: torch.cuda.Event | None = None
        self.host = tensor
        if tensor.is_cuda:
            self.host = torch.empty(tensor.shape, dtype=tensor.dtype, pin_memory=True)
            self.host.copy_(tensor, non_blocking=True)
            self.event = torch.cuda.Event()
            self.event.record()

    def result(self) -> list[float]:
        """The numbers; waits for what the device did before them and nothing after."""
        if self.event is not None:
            self.event.synchronize()
        return self.host.tolist()
