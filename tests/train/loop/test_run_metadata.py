"""settings.yaml and environment.json: what a resumed run may change, and what it records."""

import dataclasses
import json
import re
from functools import partial
from pathlib import Path
from unittest.mock import Mock

import pytest
import torch
from accelerate import Accelerator

from tiny import refused
from train.loop.run_metadata import check_changed_settings, write_metadata
from train.settings import OptimSettings, PretrainSettings, RunSettings, StageSettings


def settings_of(run: RunSettings | None = None, **optim: object) -> PretrainSettings:
    optim = {"steps": 9, "warmup_steps": 2} | optim
    return PretrainSettings(OptimSettings(**optim), run=run or RunSettings())


SETTINGS = settings_of()
DRIFT = RunSettings(allow_drift=True)


def changes(folder: Path, settings: PretrainSettings, precision: str = "no") -> dict:
    """What has changed since the run began, if it may change."""
    return check_changed_settings(folder, dataclasses.replace(settings, run=DRIFT), precision)


def write(folder: Path, settings: PretrainSettings, step: int = 0) -> None:
    """Write the metadata as a launch that goes on from a step does."""
    accelerator = Accelerator(cpu=True)
    changed = changes(folder, settings, accelerator.mixed_precision)
    write_metadata(folder, settings, accelerator, step, 7, changed)


@pytest.fixture
def begun(tmp_path):
    write(tmp_path, SETTINGS)
    (tmp_path / "checkpoints/step-00000001").mkdir(parents=True)
    return tmp_path


def test_a_kill_while_settings_change_leaves_the_old_ones(begun, monkeypatch):
    about = json.loads((begun / "environment.json").read_text())
    assert (about["torch"], about["parameters"]) == (torch.__version__, 7)
    assert about["commit"] != "unknown"
    assert about["machine"]
    before = (begun / "settings.yaml").read_text()
    other = settings_of(learning_rate=0.5)
    assert changes(begun, other) == {"optim.learning_rate": (1e-3, 0.5)}
    with monkeypatch.context() as patch:
        patch.setattr(Path, "replace", Mock(side_effect=KeyboardInterrupt))
        with pytest.raises(KeyboardInterrupt):
            write(begun, other, 7)
    assert (begun / "settings.yaml").read_text() == before
    write(begun, other, 7)
    assert not changes(begun, other)


def test_another_precision_is_refused_and_noted_where_it_may_be(begun, monkeypatch):
    check = partial(check_changed_settings, begun, SETTINGS, "bf16")
    refused(check, f"mixed_precision must stay 'no' for the run in {begun}, got 'bf16'; choose an")
    monkeypatch.setattr(Accelerator, "mixed_precision", "bf16")
    write(begun, SETTINGS, 7)
    note = "# changed after step 7: mixed_precision from 'no' to 'bf16'"
    assert (begun / "settings.yaml").read_text().splitlines()[0] == note
    check()  # from now on it is the run's
    assert changes(begun, SETTINGS) == {"mixed_precision": ("bf16", "no")}
    about = json.loads((begun / "environment.json").read_text())
    assert (about["precision"], about["parameters"]) == ("bf16", 7)
    (begun / "environment.json").write_text("{}")  # a run that does not say goes on
    assert not changes(begun, SETTINGS)


def test_an_environment_that_was_deleted_is_written_again(begun):
    """Publishing a run needs it."""
    before = (begun / "settings.yaml").read_text()
    (begun / "environment.json").unlink()
    assert not changes(begun, SETTINGS, "bf16")
    write(begun, SETTINGS, 5)
    assert json.loads((begun / "environment.json").read_text())["parameters"] == 7
    assert (begun / "settings.yaml").read_text() == before


def test_before_the_first_checkpoint_the_settings_are_those_of_the_last_launch(begun):
    write(begun, dataclasses.replace(SETTINGS, run=RunSettings(log_every=7)))
    assert "log_every: 7" in (begun / "settings.yaml").read_text()
    write(begun, SETTINGS, 5)
    assert "log_every: 7" in (begun / "settings.yaml").read_text()
    muon = settings_of(name="muon")
    refused(partial(check_changed_settings, begun, muon, "bf16"), "optim.name must stay")
    (begun / "checkpoints/step-00000001").rmdir()
    assert not check_changed_settings(begun, muon, "bf16")


def test_a_run_goes_on_under_another_name_of_its_folder_and_with_less_memory(begun):
    check_changed_settings(begun, settings_of(RunSettings(name="x")), "no")
    model = dataclasses.replace(SETTINGS.model, gradient_checkpointing=True)
    check_changed_settings(begun, dataclasses.replace(SETTINGS, model=model), "no")


def test_a_setting_added_after_a_run_began_had_its_default_and_one_removed_is_ignored(begun):
    file = begun / "settings.yaml"
    text = re.sub("  (name: adamw|clip_norm: .*)\n", "", file.read_text(), count=2)
    file.write_text(text.replace("optim:\n", "optim:\n  removed: 2\n"))
    assert "adamw" not in text
    check_changed_settings(begun, SETTINGS, "no")
    other = settings_of(clip_norm=0.5)
    assert changes(begun, other) == {"optim.clip_norm": (1.0, 0.5)}


def test_a_field_of_stages_added_after_a_run_began_was_null(tmp_path):
    staged = [PretrainSettings(stages=[StageSettings(900, length=x)]) for x in (None, 64)]
    write(tmp_path, staged[0])
    (tmp_path / "checkpoints/step-00000001").mkdir(parents=True)
    text = (tmp_path / "settings.yaml").read_text()
    assert text.count("  length: null\n") == 1
    (tmp_path / "settings.yaml").write_text(text.replace("  length: null\n", ""))
    assert [set(changes(tmp_path, settings)) for settings in staged] == [set(), {"stages"}]


def test_another_optimizer_is_refused_even_where_settings_may_change(begun):
    other = settings_of(DRIFT, name="muon")
    check = partial(check_changed_settings, begun, other, "no")
    refused(check, "optim.name must stay 'adamw'", "got 'muon'; choose another run.name")
