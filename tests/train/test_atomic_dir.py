"""A folder or file is there whole or not at all, whatever fails on the way."""

import os
from pathlib import Path

import pytest
import torch
from safetensors.torch import save_file

from tiny import refused
from train import atomic_dir
from train.atomic_dir import report_full_disk, write_dir_atomically, write_file_atomically
from train.settings import InputError


def fill(target: Path, text: str, replace: bool) -> None:
    with write_dir_atomically(target, replace) as unfinished:
        (unfinished / "file").write_text(text)


@pytest.mark.parametrize(("replace", "kept"), [(False, "old"), (True, "new")])
def test_what_is_there_stays_or_is_replaced(replace, kept, tmp_path):
    for text in ("old", "new"):
        fill(tmp_path / "made", text, replace)
    assert [path.name for path in tmp_path.iterdir()] == ["made"]
    assert (tmp_path / "made" / "file").read_text() == kept


def test_a_tilde_that_no_shell_replaced_is_refused():
    refused(lambda: atomic_dir.check_writable(Path("~/made"), "output"), "output must", "~/made")


def test_other_users_have_the_access_that_the_umask_gives(tmp_path):
    for umask, modes in ((0o027, (0o750, 0o640)), (0o002, (0o775, 0o664))):
        folder, before = tmp_path / oct(umask), os.umask(umask)
        with write_dir_atomically(folder) as unfinished:
            save_file({"a": torch.zeros(1)}, unfinished / "a.safetensors")
        os.umask(before)
        for path, mode in zip((folder, folder / "a.safetensors"), modes):
            assert path.stat().st_mode & 0o777 == mode


def test_a_replacement_that_fails_says_so_and_leaves_what_was_there(tmp_path, monkeypatch):
    target = tmp_path / "made"
    fill(target, "old", replace=True)
    rename = Path.rename

    def failing(path, to):
        if (path / "file").read_text() == "new":
            raise PermissionError(13, "Permission denied")
        return rename(path, to)

    monkeypatch.setattr(Path, "rename", failing)
    with pytest.raises(PermissionError):
        fill(target, "new", replace=True)
    assert [path.name for path in tmp_path.iterdir()] == ["made"]
    assert (target / "file").read_text() == "old"


def test_a_file_that_cannot_be_written_leaves_what_was_there_and_nothing_else(tmp_path):
    file = tmp_path / "made" / "file"
    for text in ("old", "new"):
        with write_file_atomically(file) as unfinished:
            unfinished.write_text(text)

    def write_half():
        with write_file_atomically(file) as unfinished:
            unfinished.write_text("half")
            raise OSError("full")

    with pytest.raises(OSError, match="full"):
        write_half()
    assert file.read_text() == "new"
    assert [path.name for path in file.parent.iterdir()] == ["file"]


def test_a_full_disk_is_one_line_whichever_library_meets_it(tmp_path):
    for error in (OSError(28, "full"), Exception("File too large (os error 27)")):
        with pytest.raises(InputError, match="run.folder must"), report_full_disk(tmp_path):
            raise error


def test_what_gets_its_name_is_on_the_disk_before(tmp_path, monkeypatch):
    """No kill can tell: after a power cut what was renamed too early would be there, and empty."""
    events, fsync = [], os.fsync

    def flush(descriptor):
        events.append(Path(os.readlink(f"/proc/self/fd/{descriptor}")).name.split(".")[-1])
        fsync(descriptor)

    monkeypatch.setattr(os, "fsync", flush)
    for name in ("rename", "replace"):
        change = getattr(Path, name)
        named = lambda path, to, change=change: events.append("named") or change(path, to)  # noqa: E731
        monkeypatch.setattr(Path, name, named)
    fill(tmp_path / "made", "new", replace=False)
    (temporary,) = (x for x in events if x.startswith("unfinished"))
    assert events == ["file", temporary, "named", tmp_path.name]
    events.clear()
    with write_file_atomically(tmp_path / "text") as unfinished:
        unfinished.write_text("new")
    assert events == ["tmp", "named"]
