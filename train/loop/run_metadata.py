"""settings.yaml and environment.json of a run, and the check that a resumed run keeps its settings.

The numbers of a run need both beside them: the settings it was trained with, and the versions,
machine and git commit.
"""

import dataclasses
import json
from collections.abc import Iterator
from pathlib import Path
from typing import Any

import yaml
from accelerate import Accelerator

from train.atomic_dir import write_text_atomically
from train.environment import collect_environment
from train.settings import InputError, PretrainSettings

ChangedSettings = dict[str, tuple[Any, Any]]
"""Changed keys with the value at the beginning of the run and the value now."""

CHANGEABLE = {
    "corpus": {"cache", "train", "validation", "tokenizer"},  # their contents are compared instead
    "optim": {"micro_batch"},
    "run": {
        "folder", "name", "log_every", "validate_every", "validation_sequences", "save_every",
        "keep", "tracker", "workers", "max_hours", "peak_tflops", "allow_drift", "dry",
    },
}  # fmt: skip
"""Keys that may change when a run is resumed: trained weights do not depend on them, except that
with dropout the draws depend on `micro_batch`, as on the number of processes."""


def settings_dict(settings: Any) -> dict[str, Any]:
    """Return the settings as JSON values, as settings.yaml holds them."""
    return json.loads(json.dumps(dataclasses.asdict(settings)))


def flat_settings(settings: PretrainSettings) -> dict[str, int | float | str | bool]:
    """Return the settings by flag name for a tracker: lists as JSON, without null values."""
    return dict(_flatten(settings_dict(settings)))


def _flatten(values: dict[str, Any], prefix: str = "") -> Iterator[tuple[str, Any]]:
    for key, value in values.items():
        if isinstance(value, dict):
            yield from _flatten(value, f"{prefix}{key}.")
        elif value is not None:
            is_scalar = isinstance(value, int | float | str)
            yield f"{prefix}{key}", value if is_scalar else json.dumps(value)


def changed_settings(folder: Path, settings: PretrainSettings, precision: str) -> ChangedSettings:
    """Compare settings and mixed precision with those the run in a folder began with.

    Returned are the changed keys on which trained weights depend, none for a new run. The launcher
    decides the precision, which environment.json holds and not settings.yaml.
    """
    if not (folder / "settings.yaml").exists():
        return {}
    before = _read_mapping(folder / "settings.yaml", "the settings")
    changed: ChangedSettings = {}
    now = settings_dict(settings)
    stages = [_decisive(stage) for stage in now.pop("stages")]
    stages_before = [_decisive(stage) for stage in before.get("stages") or []]
    for section, values in now.items():
        # a run that began before a setting was added had its default
        begun_section = settings_dict(type(getattr(settings, section))()) | before.get(section, {})
        for key, value in values.items():
            begun = begun_section[key]
            if begun != value and key not in CHANGEABLE.get(section, ()):
                changed[f"{section}.{key}"] = begun, value
    if stages_before != stages:
        changed["stages"] = stages_before, stages
    if (folder / "environment.json").exists():
        environment = _read_mapping(folder / "environment.json", "the environment")
        begun = environment.get("precision", precision)
        if begun != precision:
            changed["mixed_precision"] = begun, precision
    return changed


def _decisive(stage: dict[str, Any]) -> dict[str, Any]:
    """Fields of a stage that must stay; null, the default, is as good as a missing field."""
    changeable = CHANGEABLE["optim"] | CHANGEABLE["corpus"]
    return {k: v for k, v in stage.items() if v is not None and k not in changeable}


def _read_mapping(file: Path, what: str) -> dict[str, Any]:
    try:
        content = yaml.safe_load(file.read_text(encoding="utf-8"))  # JSON is YAML
    except (ValueError, yaml.YAMLError):
        content = None
    if not isinstance(content, dict):
        raise InputError(f"{file} must hold {what} of the run, got none; delete it to go on")
    return content


def check_settings_unchanged(folder: Path, settings: PretrainSettings, precision: str) -> None:
    """Check that no setting on which trained weights depend has changed, or that it may change."""
    for key, (begun, value) in changed_settings(folder, settings, precision).items():
        fixed = key == "optim.name"  # another optimizer cannot read the state in a checkpoint
        if fixed or not settings.run.allow_drift:
            remedy = "choose another run.name" + ("" if fixed else ", or set run.allow_drift true")
            raise InputError(
                f"{key} must stay {begun!r} for the run in {folder}, got {value!r}; {remedy}"
            )


def write_metadata(
    folder: Path,
    settings: PretrainSettings,
    accelerator: Accelerator,
    step: int,
    parameters: int,
    changed: ChangedSettings,
) -> None:
    """Write environment.json and settings.yaml if they are missing or settings have changed.

    Changes are printed, and kept as comments at the top of settings.yaml, because results of the
    run belong to neither set of settings alone. The run goes on from `step`.
    """
    settings_file, environment_file = folder / "settings.yaml", folder / "environment.json"
    is_new, comments = not settings_file.exists(), ""
    environment: dict[str, Any] | None = None
    if is_new or not environment_file.exists():
        environment = collect_environment(accelerator) | {"parameters": parameters}
    elif "mixed_precision" in changed:
        environment = _read_mapping(environment_file, "the environment")
        environment["precision"] = accelerator.mixed_precision
    if environment is not None:
        write_text_atomically(environment_file, json.dumps(environment, indent=2) + "\n")
    if not is_new and not changed:
        return
    if not is_new:
        changes = "; ".join(
            f"{key} from {begun!r} to {value!r}" for key, (begun, value) in changed.items()
        )
        note = f"run.allow_drift changed after step {step}: {changes}"
        print(f"warning: {note}", flush=True)
        lines = [*settings_file.read_text(encoding="utf-8").splitlines(), f"# {note}"]
        comments = "".join(f"{line}\n" for line in lines if line.startswith("#"))
    text = comments + yaml.safe_dump(settings_dict(settings), sort_keys=False)
    write_text_atomically(settings_file, text)
