"""Folders and files that are written atomically, and checks of the disk."""

import errno
import glob
import os
import re
import shutil
import tempfile
import uuid
from collections.abc import Iterator
from contextlib import contextmanager
from pathlib import Path

from train.settings import InputError

UNFINISHED = ".unfinished-"
"""Part of the name of a temporary folder."""


@contextmanager
def write_dir_atomically(target: Path, replace: bool = False) -> Iterator[Path]:
    """Yield an empty temporary folder, which is renamed to `target` at the end of the block.

    An existing `target` is kept: several processes or machines may write the same folder at once,
    and the first to finish wins. After an error the temporary folder is deleted. `replace`, for
    folders that no other process writes, replaces `target`, and deletes what killed processes have
    left of it.
    """
    target.parent.mkdir(parents=True, exist_ok=True)
    if replace:
        for left in target.parent.glob(f".{glob.escape(target.name)}{UNFINISHED}*"):
            shutil.rmtree(left, ignore_errors=True)
    # processes of several machines may write it, and have the same id
    temporary = target.with_name(f".{target.name}{UNFINISHED}{uuid.uuid4().hex}")
    replaced = Path(f"{temporary}-replaced")
    try:
        temporary.mkdir()
        yield temporary
        for file in temporary.rglob("*.safetensors"):  # which give no access to other users
            file.chmod(temporary.stat().st_mode & 0o666)  # as the umask gives it to a file
        for path in [*temporary.rglob("*"), temporary]:
            _fsync(path)  # after a power cut the folder is there whole, or not at all
        if replace and target.exists():
            target.rename(replaced)  # restored if the next rename fails
        try:
            temporary.rename(target)
        except OSError:
            if replace or not target.exists():
                raise
        _fsync(target.parent)
    finally:
        if replaced.exists() and not target.exists():
            replaced.rename(target)
        for folder in (temporary, replaced):
            shutil.rmtree(folder, ignore_errors=True)


def _fsync(path: Path) -> None:
    """Flush a file's content, or a folder's entries, to the disk."""
    descriptor = os.open(path, os.O_RDONLY)
    try:
        os.fsync(descriptor)
    finally:
        os.close(descriptor)


@contextmanager
def write_file_atomically(file: Path) -> Iterator[Path]:
    """Yield the path of a temporary file, which replaces `file` at the end of the block.

    The file is always the old or the new one. After an error the temporary file is deleted.
    """
    file.parent.mkdir(parents=True, exist_ok=True)
    temporary = file.with_name(f"{file.name}.{uuid.uuid4().hex}.tmp")
    try:
        yield temporary
        _fsync(temporary)  # after a power cut the file is the old or the new one, too
        temporary.replace(file)
    finally:
        temporary.unlink(missing_ok=True)


def write_text_atomically(file: Path, text: str) -> None:
    """Write a text file as `write_file_atomically`."""
    with write_file_atomically(file) as temporary:
        temporary.write_text(text, encoding="utf-8")


def check_writable(folder: Path, key: str) -> None:
    """Check that a folder can be created and written, by making a folder there for a moment."""
    if str(folder).startswith("~"):
        rule = "must be a folder without ~, which only a shell replaces"
        raise InputError(f"{key} {rule}, got {folder}; write the path out")
    existing = folder
    try:  # permissions alone do not tell: root may do all, but nobody may write into /proc
        while not (existing.exists() or existing.is_symlink()):  # a link may be broken
            existing = existing.parent
        tempfile.TemporaryDirectory(prefix=UNFINISHED, dir=existing).cleanup()
    except OSError as error:
        raise InputError(
            f"{key} must be a folder that can be written, got {existing} ({error.strerror}); "
            "choose another"
        ) from error


def full_disk_errno(error: BaseException) -> int | None:
    """Return the errno of an error of a full disk, quota or file-size limit; None of others."""
    # the Rust libraries have it in the text alone
    found = re.search(r"\(os error (\d+)\)", str(error))
    number = int(found[1]) if found else getattr(error, "errno", None)
    return number if number in (errno.ENOSPC, errno.EDQUOT, errno.EFBIG) else None


@contextmanager
def report_full_disk(folder: Path, key: str = "run.folder") -> Iterator[None]:
    """Turn the errors of `full_disk_errno` into an `InputError` for a setting."""
    try:
        yield
    except InputError:
        raise
    except Exception as error:  # that of tokenizers is bare
        number = full_disk_errno(error)
        if number is None:
            raise
        raise InputError(
            f"{key} must have room, got {os.strerror(number)} in {folder}; make some, "
            "the same command goes on"
        ) from error
