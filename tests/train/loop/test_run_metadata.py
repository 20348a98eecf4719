"""settings.yaml and environment.json: what a resumed run may change, and what it records."""

import dataclasses
import json
import re
import subprocess
from pathlib import Path
from types import SimpleNamespace

import pytest
import torch
from accelerate import Accelerator

from train import environment
from train.loop.run_metadata import changed_settings, check_settings_unchanged, write_metadata
from train.settings import InputError, OptimSettings, PretrainSettings, RunSettings


def started(tmp_path, **optim):
    folder, settings = tmp_path / "run", PretrainSettings(OptimSettings(steps=9, **optim))
    folder.mkdir(exist_ok=True)
    return folder, settings, Accelerator(cpu=True)


def test_a_kill_while_settings_change_leaves_the_old_ones(tmp_path, monkeypatch):
    folder, settings, accelerator = started(tmp_path)
    write_metadata(folder, settings, accelerator, 0, 7, {})
    environment = json.loads((folder / "environment.json").read_text())
    assert (environment["torch"], environment["parameters"]) == (torch.__version__, 7)
    assert environment["commit"] != "unknown"
    assert environment["machine"]
    before = (folder / "settings.yaml").read_text()
    _, other, _ = started(tmp_path, learning_rate=0.5)
    assert changed_settings(folder, other, "no") == {"optim.learning_rate": (1e-3, 0.5)}

    def killed(path, target):
        raise KeyboardInterrupt

    with monkeypatch.context() as patch:
        patch.setattr(Path, "replace", killed)
        with pytest.raises(KeyboardInterrupt):
            write_metadata(folder, other, accelerator, 7, 7, changed_settings(folder, other, "no"))
    assert (folder / "settings.yaml").read_text() == before
    write_metadata(folder, other, accelerator, 7, 7, changed_settings(folder, other, "no"))
    assert not changed_settings(folder, other, "no")


def test_another_precision_is_refused_and_noted_where_it_may_be(tmp_path):
    folder, settings, accelerator = started(tmp_path)
    write_metadata(folder, settings, accelerator, 0, 7, {})
    with pytest.raises(
        InputError, match="mixed_precision must stay 'no' for the run in .*, got 'bf16'; choose an"
    ):
        check_settings_unchanged(folder, settings, "bf16")
    drifting = dataclasses.replace(settings, run=RunSettings(allow_drift=True))
    check_settings_unchanged(folder, drifting, "bf16")
    changed = changed_settings(folder, settings, "bf16")
    other = SimpleNamespace(mixed_precision="bf16")
    write_metadata(folder, settings, other, 7, 7, changed)
    note = "# run.allow_drift changed after step 7: mixed_precision from 'no' to 'bf16'"
    assert (folder / "settings.yaml").read_text().splitlines()[0] == note
    check_settings_unchanged(folder, settings, "bf16")  # from now on it is the run's
    assert changed_settings(folder, settings, "no") == {"mixed_precision": ("bf16", "no")}
    about = json.loads((folder / "environment.json").read_text())
    assert (about["precision"], about["parameters"]) == ("bf16", 7)
    for earlier in ("{}", None):  # a run that does not say goes on
        (folder / "environment.json").unlink()
        if earlier is not None:
            (folder / "environment.json").write_text(earlier)
        assert not changed_settings(folder, settings, "no")


def test_an_environment_that_was_deleted_is_written_again(tmp_path):
    """As the message about a broken one says; publishing a run needs it."""
    folder, settings, accelerator = started(tmp_path)
    write_metadata(folder, settings, accelerator, 0, 7, {})
    before = (folder / "settings.yaml").read_text()
    (folder / "environment.json").unlink()
    write_metadata(folder, settings, accelerator, 5, 7, {})
    assert json.loads((folder / "environment.json").read_text())["parameters"] == 7
    assert (folder / "settings.yaml").read_text() == before


def test_a_run_goes_on_under_another_name_of_its_folder(tmp_path):
    folder, settings, accelerator = started(tmp_path)
    write_metadata(folder, settings, accelerator, 0, 7, {})
    check_settings_unchanged(folder, dataclasses.replace(settings, run=RunSettings(name="x")), "no")


def test_a_setting_added_after_a_run_began_had_its_default(tmp_path):
    folder, settings, accelerator = started(tmp_path)
    write_metadata(folder, settings, accelerator, 0, 7, {})
    file = folder / "settings.yaml"
    file.write_text(re.sub("  (name: adamw|muon_scale: .*)\n", "", file.read_text(), count=2))
    assert "adamw" not in file.read_text()
    check_settings_unchanged(folder, settings, "no")
    _, other, _ = started(tmp_path, muon_scale=0.5)
    assert changed_settings(folder, other, "no") == {"optim.muon_scale": (0.8, 0.5)}


def test_another_optimizer_is_refused_even_where_settings_may_change(tmp_path):
    folder, settings, accelerator = started(tmp_path)
    write_metadata(folder, settings, accelerator, 0, 7, {})
    drifting = dataclasses.replace(
        settings, optim=OptimSettings(steps=9, name="muon"), run=RunSettings(allow_drift=True)
    )
    with pytest.raises(InputError, match=r"optim.name must stay 'adamw' .* another run.name$"):
        check_settings_unchanged(folder, drifting, "no")


@pytest.mark.parametrize("torn", ["", "optim: {", "[1]", "\x00"])
def test_settings_that_cannot_be_read_are_named(torn, tmp_path):
    folder, settings, _ = started(tmp_path)
    (folder / "settings.yaml").write_text(torn)
    with pytest.raises(InputError, match="settings.yaml must hold the settings of the run, got"):
        changed_settings(folder, settings, "no")


def test_the_commit_is_dirty_by_code_and_not_by_what_runs_write(tmp_path, monkeypatch):
    for name in ("roformer", "train", "finetune", "configs", "results"):
        (tmp_path / name).mkdir()
        (tmp_path / name / "file").write_text("committed")
    one = ["-c", "user.name=x", "-c", "user.email=x@x", "commit", "-qm", "x"]
    for command in (["init", "-q"], ["add", "."], one):
        subprocess.run(["git", "-C", tmp_path, *command], check=True)
    monkeypatch.setattr(environment, "__file__", str(tmp_path / "train" / "environment.py"))
    clean = environment.git_commit.__wrapped__()
    assert len(clean) == 12
    (tmp_path / "results" / "file").write_text("another line")
    assert environment.git_commit.__wrapped__() == clean
    (tmp_path / "finetune" / "file").write_text("changed")
    assert environment.git_commit.__wrapped__() == f"{clean}-dirty"
