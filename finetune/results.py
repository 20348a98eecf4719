"""What a run leaves: its line in results.jsonl, and its predictions beside it.

    results.jsonl                               one line a run
    predictions/TASK-MODEL-DIGEST/SPLIT.parquet  columns row, label (-1 on test splits), logits
    NAME.jsonl, NAME-predictions/...            the same of a file of another name

A line is there whole or not at all, and its predictions are there before it. Several processes may
append to one file: a run is claimed before it is made, so that none is made twice.
"""

import errno
import fcntl
import functools
import hashlib
import json
import os
import sys
from collections.abc import Collection, Iterator, Mapping, Sequence
from contextlib import contextmanager
from pathlib import Path
from typing import Any

import numpy as np
import pyarrow
from numpy.typing import NDArray
from pyarrow import parquet

from train.loop.atomic_dir import model_name, report_full_disk
from train.settings import InputError, reason

RECIPE_FIELDS = (
    "learning_rate", "epochs", "batch_size", "length", "schedule", "warmup_share", "weight_decay",
    "clip_norm",
)  # fmt: skip
"""What a protocol fixes for all its models, tasks and seeds."""

RUN_KEY = (
    "model", "tokenizer", "random_weights", "mnli", "task", "glue_dir", "seed", *RECIPE_FIELDS,
)  # fmt: skip
"""What tells runs apart; two runs with the same key are the same run."""


INPUT_HASHES = ("weights", "data")
"""What the key names by place: a line holds a hash of what was there."""


def run_key(values: Mapping[str, Any]) -> tuple:
    """The key of a run, from its line or from its settings."""
    return tuple(values[name] for name in RUN_KEY)


def hash_weights(model: str, random: bool = False) -> str | None:
    """Which weights a local folder holds, in 16 characters; None for a hub id, or without any.

    Random ones are drawn from its configuration, and so known by that.
    """
    kinds = ("config.json",) if random else ("*.safetensors", "*.bin")
    found = (sorted(Path(model).glob(kind)) for kind in kinds)
    return hash_files(next(filter(None, found), []))


def hash_files(files: Sequence[Path]) -> str | None:
    """What is in some files, in 16 characters; None without any."""
    states = [(str(file), file.stat().st_size, file.stat().st_mtime_ns) for file in files]
    return _hash_contents(tuple(states)) if files else None


@functools.cache
def _hash_contents(files: tuple[tuple[str, int, int], ...]) -> str:
    """Of files by name, size and time of change: read once in a process, for all its runs."""
    digest = hashlib.sha256()
    for name, *_ in files:
        with open(name, "rb") as stream:
            digest.update(hashlib.file_digest(stream, "sha256").digest())
    return digest.hexdigest()[:16]


def hash_differs(found: str | None, line: Mapping[str, Any], name: str) -> bool:
    """Whether a line is of another of `INPUT_HASHES`; one that does not say is of this."""
    return found is not None and line.get(name, found) not in (None, found)


def run_name(values: Mapping[str, Any]) -> str:
    """The name of a run's folder under predictions/: readable, and different for different keys."""
    digest = hashlib.sha256(json.dumps(run_key(values)).encode()).hexdigest()[:10]
    return f"{values['task']}-{model_name(values['model'])}-{digest}"


def prediction_file(results: str, line: Mapping[str, Any], split: str) -> Path:
    """Where the predictions of a run on a split are: each results file has a folder of its own."""
    file = Path(results)
    folder = "predictions" if file.stem == "results" else f"{file.stem}-predictions"
    return file.parent / folder / run_name(line) / f"{split}.parquet"


def write_predictions(file: Path, labels: NDArray, logits: NDArray[np.float32]) -> None:
    """Write labels [N] and logits [N, outputs]; rows as in the split's file."""
    columns = {"row": np.arange(len(labels)), "label": labels, "logits": list(logits)}
    file.parent.mkdir(parents=True, exist_ok=True)
    unfinished = file.with_suffix(".tmp")
    parquet.write_table(pyarrow.table(columns), unfinished, compression="zstd")
    unfinished.replace(file)


def delete_stale_predictions(results: str, line: Mapping[str, Any], kept: Collection[str]) -> None:
    """Delete what an earlier run of this name predicted, but for splits that are written again."""
    for file in prediction_file(results, line, "any").parent.glob("*.parquet"):
        if file.stem not in kept:
            file.unlink()


def read_predictions(file: Path) -> tuple[NDArray, NDArray[np.float32]]:
    """Labels [N] and logits [N, outputs].

    Raises:
        InputError: There is no such file.
    """
    try:
        table = parquet.read_table(file)
    except (OSError, pyarrow.ArrowException) as error:
        raise InputError(
            f"predictions must be in {file}, got {reason(error)}; make the run again"
        ) from error
    logits = np.stack(table["logits"].to_numpy()).astype(np.float32)
    return table["label"].to_numpy(), logits


class RunLocks:
    """Which runs of a results file this process has taken: no other process makes them meanwhile.

    A claim is a lock on one byte of FILE.lock, named by the run; the kernel gives it back when the
    process ends, however it ends. Byte 0 is held while a line is appended.

    Args:
        results: The results file; its folder is made.
    """

    def __init__(self, results: str) -> None:
        self.results, self.warned = results, False
        Path(results).parent.mkdir(parents=True, exist_ok=True)
        # one descriptor for as long as the process lives: closing any would free all its locks
        self.file = os.open(f"{results}.lock", os.O_RDWR | os.O_CREAT, 0o644)

    def acquire(self, values: Mapping[str, Any]) -> bool:
        """Claim a run; false when another process has it."""
        try:
            self._lock(fcntl.LOCK_EX | fcntl.LOCK_NB, self._place(values))
        except (BlockingIOError, PermissionError):
            return False
        return True

    def release(self, values: Mapping[str, Any]) -> None:
        """Give a run back."""
        self._lock(fcntl.LOCK_UN, self._place(values))

    @contextmanager
    def append_lock(self) -> Iterator[None]:
        """While nobody else appends."""
        self._lock(fcntl.LOCK_EX, 0)
        try:
            yield
        finally:
            self._lock(fcntl.LOCK_UN, 0)

    def _lock(self, how: int, place: int) -> None:
        try:
            fcntl.lockf(self.file, how, 1, place)
        except (BlockingIOError, PermissionError):
            raise
        except OSError as error:  # Lustre as it is often mounted
            if not self.warned:
                print(f"warning: no lock on {self.results}: {error.strerror}; start one grid only")
            self.warned = True

    @staticmethod
    def _place(values: Mapping[str, Any]) -> int:
        return 1 + int(hashlib.sha256(run_name(values).encode()).hexdigest()[:15], 16)


def append_result(locks: RunLocks, result: Mapping[str, Any]) -> None:
    """Add one line in a single write, on disk when this returns; a torn last line is cut off.

    Raises:
        InputError: There is no room for it; what was written of it is no line.
    """
    line = (json.dumps(result, allow_nan=False) + "\n").encode()
    with report_full_disk(Path(locks.results).parent, "output"), locks.append_lock():
        truncate_partial_line(locks.results)
        file = os.open(locks.results, os.O_WRONLY | os.O_CREAT | os.O_APPEND, 0o644)
        try:
            if os.write(file, line) < len(line):  # the first part of it still had room
                raise OSError(errno.ENOSPC, os.strerror(errno.ENOSPC))
            os.fsync(file)
        finally:
            os.close(file)


def truncate_partial_line(results: str) -> None:
    """Cut off what a crash left of a line, which has no end; its run will be made again."""
    path = Path(results)
    if not path.exists():
        return
    with path.open("rb+") as stream:
        stream.seek(0)
        content = stream.read()
        whole = content.rfind(b"\n") + 1
        if whole < len(content):
            stream.truncate(whole)
            torn = content[whole:][:40].decode(errors="replace")
            print(f"warning: {results} ended in a torn line, cut off: {torn}...", file=sys.stderr)


def read_results(path: str) -> list[dict[str, Any]]:
    """The lines of a results file, of a run that was made twice the last that did not fail, or
    failed from other inputs; one warning for each that cannot be read.

    Raises:
        InputError: There is no such file.
    """  # noqa: D205 one sentence
    if not Path(path).is_file():
        raise InputError(
            f"results must be a file written by finetune/glue.py, got {path}; check the path"
        )
    results: dict[tuple, dict[str, Any]] = {}
    content = Path(path).read_text(encoding="utf-8", errors="replace")
    for number, line in enumerate(content.split("\n"), 1):
        if line.strip():
            try:
                result = json.loads(line)
                key = run_key(result)
                before = results.get(key, result)
                failed = result["status"] == "failed"
                other = any(hash_differs(result.get(name), before, name) for name in INPUT_HASHES)
                if not failed or before is result or other:
                    results[key] = result
            except (ValueError, KeyError, TypeError):
                print(f"warning: {path} line {number} is torn and was ignored", file=sys.stderr)
    return list(results.values())
