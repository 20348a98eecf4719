"""What ends a run early: signals, a dead launcher or reader, a time limit, a stall.

A request to stop may reach only one of the processes. The all-reduce of each step therefore carries
the requests of all of them, so that all processes save and exit after the same step.
"""

import errno
import faulthandler
import os
import signal
import sys
import time
from collections.abc import Callable, Iterator
from contextlib import contextmanager
from functools import partial
from types import FrameType
from typing import Any, TextIO, cast

from accelerate import Accelerator

from train.loop.launch import launcher_pid

SIGNALS = (signal.SIGTERM, signal.SIGUSR1, signal.SIGHUP, signal.SIGINT)
LAUNCHER_DIED, READER_DIED = "the launcher died", "the reader of the output died"
TIME_LIMIT = "run.max_hours"

STOP_REASONS = {number.name: 128 + number for number in SIGNALS}
STOP_REASONS |= dict.fromkeys((LAUNCHER_DIED, READER_DIED), 128 + signal.SIGHUP) | {TIME_LIMIT: 0}
"""Exit code for each stop reason, by the shell's convention; a time limit is not a failure."""

MIN_STALL_SECONDS = 120.0
"""Shortest heartbeat timeout: a slow disk is no fault."""

MIN_STALL_SECONDS_COMPILED = 600.0
"""The same with torch.compile, which may stop at any step to compile a new shape."""

MAX_SAVE_SECONDS = 900.0
"""Heartbeat timeout while a checkpoint is written."""


class BrokenPipeGuard:
    """Standard output or error that is redirected to /dev/null when its reader exits.

    Otherwise the next line printed after the end of `| tee log` would end the process before it
    has saved a checkpoint.
    """

    def __init__(self, stream: TextIO, on_broken_pipe: Callable[[], None]) -> None:
        self.stream, self.on_broken_pipe = stream, on_broken_pipe

    def __getattr__(self, name: str) -> Any:
        return getattr(self.stream, name)

    def write(self, text: str) -> int:
        """Write and flush: text left in the buffer would raise when the process exits."""
        try:
            self.stream.write(text)
            self.stream.flush()
        except OSError as error:
            if error.errno not in (errno.EPIPE, errno.EIO):  # pipe, terminal
                raise
            os.dup2(os.open(os.devnull, os.O_WRONLY), self.stream.fileno())
            self.on_broken_pipe()
        return len(text)


class PreemptionHandler:
    """Context manager that collects requests to stop, and ends a process of several that hangs.

    Inside the context, signals are recorded instead of ending the process, and broken output pipes
    are tolerated. With several processes faulthandler's watchdog expects regular calls of
    `heartbeat`: if one hangs, the others would wait for it. The launch has to stop `max_hours`
    after it `started` (by `time.monotonic`); `compiled` steps may take minutes.
    """

    def __init__(
        self,
        started: float,
        max_hours: float | None,
        num_processes: int = 1,
        compiled: bool = False,
    ) -> None:
        self.has_watchdog = num_processes > 1
        self.min_timeout = MIN_STALL_SECONDS_COMPILED if compiled else MIN_STALL_SECONDS
        self.deadline = None if max_hours is None else started + 3600 * max_hours
        self.launcher_pid = launcher_pid()  # compared later: a dead launcher changes getppid()
        self.requested: set[str] = set()
        self.last_heartbeat: float | None = None
        self.longest_interval = 0.0  # between two heartbeats
        self.step_started: float | None = None  # None for a step that may compile
        self.longest_step = 0.0  # without those that may; evaluation and save included

    def __enter__(self) -> "PreemptionHandler":
        # `nohup` and the `&` of a script set signals to be ignored
        heard = [number for number in SIGNALS if signal.getsignal(number) != signal.SIG_IGN]
        self.handlers = {number: signal.signal(number, self._on_signal) for number in heard}
        on_broken_pipe = partial(self.requested.add, READER_DIED)
        self.streams = sys.stdout, sys.stderr  # None when closed by `>&-`
        sys.stdout, sys.stderr = (
            stream and cast(TextIO, BrokenPipeGuard(stream, on_broken_pipe))
            for stream in self.streams
        )
        return self

    def __exit__(self, *error: object) -> None:
        faulthandler.cancel_dump_traceback_later()
        sys.stdout, sys.stderr = self.streams
        for number, handler in self.handlers.items():
            signal.signal(number, handler)

    def _on_signal(self, number: int, frame: FrameType | None) -> None:
        name = signal.Signals(number).name
        if number == signal.SIGINT and name in self.requested:
            signal.default_int_handler(number, frame)  # a second Ctrl-C ends without saving
        self.requested.add(name)

    def stop_requests(self) -> list[bool]:
        """Return for each of `STOP_REASONS` whether this process has a reason to stop.

        The time limit is reported early, by twice the longest step so far, evaluation and save
        included: if the next step may exceed it, this one is the last. Steps that may compile do
        not count.
        """
        if self.launcher_pid not in (None, os.getppid()):
            self.requested.add(LAUNCHER_DIED)
        if self.deadline is not None and time.monotonic() + 2 * self.longest_step > self.deadline:
            self.requested.add(TIME_LIMIT)
        return [reason in self.requested for reason in STOP_REASONS]

    def start_step(self, is_new_stage: bool) -> None:
        """Begin a step; the first of a launch or stage may compile, and has no timeout."""
        now, may_compile = time.monotonic(), is_new_stage or self.last_heartbeat is None
        if self.step_started is not None:
            self.longest_step = max(self.longest_step, now - self.step_started)
        self.step_started = None if may_compile else now
        self.heartbeat()
        if may_compile:
            faulthandler.cancel_dump_traceback_later()

    def heartbeat(self) -> None:
        """Report progress to the watchdog: at each step and each batch of an evaluation.

        Without a heartbeat for ten times the longest interval so far, and at least `min_timeout`,
        a process of several prints its stack and exits, so that the launcher ends the others.
        """
        now = time.monotonic()
        if self.last_heartbeat is not None:
            self.longest_interval = max(self.longest_interval, now - self.last_heartbeat)
        self.last_heartbeat = now
        self._start_watchdog(max(self.min_timeout, 10 * self.longest_interval))

    @contextmanager
    def extend_timeout(self) -> Iterator[None]:
        """Raise the heartbeat timeout to `MAX_SAVE_SECONDS` while a checkpoint is written."""
        self._start_watchdog(max(MAX_SAVE_SECONDS, 10 * self.longest_interval))
        yield
        self.last_heartbeat = time.monotonic()  # a save is no interval between heartbeats

    def _start_watchdog(self, seconds: float) -> None:
        if self.has_watchdog:
            faulthandler.dump_traceback_later(seconds, exit=True, file=2)


def announce_stop(counts: list[float], step: int, accelerator: Accelerator) -> str:
    """Print and return the first of `STOP_REASONS` that any process has."""
    reason = next(name for name, count in zip(STOP_REASONS, counts) if count)
    accelerator.print(f"{reason}: saved after step {step}; the same command goes on")
    return reason
