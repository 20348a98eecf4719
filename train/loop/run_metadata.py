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
from train.loop.launch import collect_environment
from train.settings import CHANGEABLE, InputError, PretrainSettings, first_line


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


def read_metadata(file: Path) -> dict[str, Any]:
    """Read settings.yaml or environment.json of a run folder."""
    read = json.loads if file.suffix == ".json" else yaml.safe_load
    try:
        content = read(file.read_text(encoding="utf-8"))
        if not isinstance(content, dict):
            raise ValueError(f"{content!r:.40}")
    except (OSError, ValueError, yaml.YAMLError) as error:
        rule = "must hold what the run wrote"
        raise InputError(
            f"{file} {rule}, got {first_line(error)}; restore it, or begin another run"
        ) from error
    return content


def _changed_settings(
    folder: Path, settings: PretrainSettings, precision: str
) -> dict[str, tuple[Any, Any]]:
    has_checkpoint = any((folder / "checkpoints").glob("*step-*[0-9]"))  # also a damaged one
    if not has_checkpoint or not (folder / "settings.yaml").exists():
        return {}
    before = read_metadata(folder / "settings.yaml")
    changed: dict[str, tuple[Any, Any]] = {}
    now = settings_dict(settings)
    stages = [_fixed_fields(stage) for stage in now.pop("stages")]
    stages_before = [_fixed_fields(stage) for stage in before.get("stages") or []]
    for section, values in now.items():
        # a run that began before a setting was added had its default
        defaults = settings_dict(type(getattr(settings, section))())
        begun = {key: before.get(section, {}).get(key, defaults[key]) for key in defaults}
        old, new = dict(_flatten(begun)), dict(_flatten(values))
        for key in old | new:  # config.hidden_size is a key of model
            is_changed = old.get(key) != new.get(key)
            if is_changed and key.split(".")[0] not in CHANGEABLE.get(section, ()):
                changed[f"{section}.{key}"] = old.get(key), new.get(key)
    if stages_before != stages:
        changed["stages"] = stages_before, stages
    if (folder / "environment.json").exists():
        begun_precision = read_metadata(folder / "environment.json").get("precision", precision)
        if begun_precision != precision:
            changed["mixed_precision"] = begun_precision, precision
    return changed


def _fixed_fields(stage: dict[str, Any]) -> dict[str, Any]:
    """Fields of a stage that must stay; null, the default, is as good as a missing field."""
    changeable = CHANGEABLE["optim"] | CHANGEABLE["corpus"]
    return {k: v for k, v in stage.items() if v is not None and k not in changeable}


def check_changed_settings(
    folder: Path, settings: PretrainSettings, precision: str
) -> dict[str, tuple[Any, Any]]:
    """Compare settings and mixed precision with those the run in a folder began with.

    The launcher decides the precision, which environment.json holds and not settings.yaml.

    Returns:
        The changed keys on which trained weights depend, with the value at the beginning of the run
        and the value now; none for a new run.

    Raises:
        InputError: One of them may not change.
    """
    changed = _changed_settings(folder, settings, precision)
    for key, (begun, value) in changed.items():
        fixed = key == "optim.name"  # another optimizer cannot read the state in a checkpoint
        if fixed or not settings.run.allow_drift:
            remedy = "choose another run.name" + ("" if fixed else ", or set run.allow_drift true")
            raise InputError(
                f"{key} must stay {begun!r} for the run in {folder}, got {value!r}; {remedy}"
            )
    return changed


def changed_versions(folder: Path, accelerator: Accelerator) -> dict[str, tuple[Any, Any]]:
    """Return the versions, and the commit, that differ from environment.json: before and now."""
    now, file = collect_environment(accelerator), folder / "environment.json"
    before = now | (read_metadata(file) if file.exists() else {})
    names = ("python", "torch", "transformers", "accelerate", "commit")
    return {name: (before[name], now[name]) for name in names if before[name] != now[name]}


def write_metadata(
    folder: Path,
    settings: PretrainSettings,
    accelerator: Accelerator,
    step: int,
    parameters: int,
    changed: dict[str, tuple[Any, Any]],
) -> None:
    """Write environment.json and settings.yaml if they are missing or something has changed.

    Changes are printed, and kept as comments at the top of settings.yaml, because results of the
    run belong to neither set of settings or versions alone. The run goes on from `step`.
    """
    settings_file, environment_file = folder / "settings.yaml", folder / "environment.json"
    # without a checkpoint the run begins anew, with the settings of this launch
    is_new = step == 0 or not settings_file.exists()
    comments = ""
    if changed and not is_new:
        changes = "; ".join(
            f"{key} from {begun!r} to {value!r}" for key, (begun, value) in changed.items()
        )
        note = f"changed after step {step}: {changes}"
        print(f"warning: {note}", flush=True)
        lines = [*settings_file.read_text(encoding="utf-8").splitlines(), f"# {note}"]
        comments = "".join(f"{line}\n" for line in lines if line.startswith("#"))
    if is_new or changed:
        text = comments + yaml.safe_dump(settings_dict(settings), sort_keys=False)
        write_text_atomically(settings_file, text)
    if is_new or changed or not environment_file.exists():  # last: a kill repeats the note
        environment = collect_environment(accelerator) | {"parameters": parameters}
        write_text_atomically(environment_file, json.dumps(environment, indent=2) + "\n")
