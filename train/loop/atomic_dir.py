"""A folder is there whole or not at all: how everything but checkpoints is written."""

import errno
import glob
import os
import re
import shutil
import tempfile
from collections.abc import Iterator
from contextlib import contextmanager
from pathlib import Path

from train.settings import InputError, require

UNFINISHED = ".unfinished-"
"""In the name of a folder that is being filled."""


@contextmanager
def write_dir_atomically(target: Path, replace: bool = False) -> Iterator[Path]:
    """An empty folder to fill, which becomes `target` when the block ends without an error.

    What is already at `target` stays: several processes or machines may make the same folder at
    once, and the first to finish wins. After an error nothing is left.

    Args:
        target: What to make.
        replace: Nobody else makes it: what is there goes, and what kills have left of it.
    """
    target.parent.mkdir(parents=True, exist_ok=True)
    if replace:
        for left in target.parent.glob(f".{glob.escape(target.name)}{UNFINISHED}*"):
            shutil.rmtree(left, ignore_errors=True)  # one that cannot go is hidden and in no way
    prefix = f".{target.name}{UNFINISHED}"
    unfinished = Path(tempfile.mkdtemp(prefix=prefix, dir=target.parent))
    aside = Path(f"{unfinished}-replaced")
    try:
        yield unfinished
        unfinished.chmod(0o755)  # mkdtemp's is private, and so are the files of safetensors
        for file in unfinished.rglob("*.safetensors"):
            file.chmod(0o644)
        if replace and target.exists():
            target.rename(aside)  # not deleted yet: no half of it shall be there
        try:
            unfinished.rename(target)
        except OSError:
            if replace or not target.exists():
                raise
    finally:
        if aside.exists() and not target.exists():
            aside.rename(target)
        for folder in (unfinished, aside):
            shutil.rmtree(folder, ignore_errors=True)


def model_name(place: str) -> str:
    """The telling part of a model's path or hub id: NAME of runs/NAME/model."""
    parts = [part for part in Path(place).parts if part not in ("/", "model")]
    return parts[-1] if parts else "model"


def split_seed(name: str) -> tuple[str, int]:
    """A run's model and seed: `bert-1` is seed 1 of `bert`, and `bert` alone seed 0."""
    found = re.fullmatch(r"(.+)-(\d+)", name)
    return (found[1], int(found[2])) if found else (name, 0)


def check_writable(folder: Path, key: str) -> None:
    """Refuse a folder that could not be made or written, before there is anything to lose.

    Raises:
        InputError: It, or the folder it would be made in, is a file or not ours.
    """
    there = next(path for path in (folder, *folder.parents) if path.exists())
    free = there.is_dir() and os.access(there, os.W_OK | os.X_OK)
    require(free, key, "must be a folder that can be written", there, "choose another")


@contextmanager
def report_full_disk(folder: Path, key: str = "run.folder") -> Iterator[None]:
    """Turn a disk that is full, or a quota, into one line.

    Args:
        folder: What is written to.
        key: The setting that names it.

    Raises:
        InputError: There is no room.
    """
    try:
        yield
    except OSError as error:
        if error.errno not in (errno.ENOSPC, errno.EDQUOT, errno.EFBIG):
            raise
        raise InputError(
            f"{key} must have room, got {os.strerror(error.errno)} in {folder}; make some, "
            "the same command goes on"
        ) from error
