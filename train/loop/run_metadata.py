"""settings.yaml and environment.json of a run, and the check that a resumed run keeps its settings.

The numbers of a run need both beside them: the settings it was trained with, and the versions,
machine and git commit.
"""

import dataclasses
import functools
import json
import platform
import subprocess
from collections.abc import Iterator
from pathlib import Path
from typing import Any

import accelerate
import torch
import transformers
import yaml
from accelerate import Accelerator

from train.atomic_dir import write_text_atomically
from train.loop.launch import is_compiled
from train.settings import InputError, PretrainSettings

CHANGEABLE = {
    "corpus": {"cache", "train", "validation", "tokenizer"},  # their contents are compared instead
    "model": {"gradient_checkpointing"},
    "optim": {"micro_batch"},
    "run": {
        "folder", "name", "log_every", "validate_every", "validation_sequences", "save_every",
        "keep", "tracker", "max_hours", "peak_tflops", "allow_drift", "dry",
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


def _changed_settings(
    folder: Path, settings: PretrainSettings, precision: str
) -> dict[str, tuple[Any, Any]]:
    if not (folder / "settings.yaml").exists():
        return {}
    before = yaml.safe_load((folder / "settings.yaml").read_text(encoding="utf-8"))
    changed: dict[str, tuple[Any, Any]] = {}
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
        environment = json.loads((folder / "environment.json").read_text(encoding="utf-8"))
        begun = environment.get("precision", precision)
        if begun != precision:
            changed["mixed_precision"] = begun, precision
    return changed


def _decisive(stage: dict[str, Any]) -> dict[str, Any]:
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


def write_metadata(
    folder: Path,
    settings: PretrainSettings,
    accelerator: Accelerator,
    step: int,
    parameters: int,
    changed: dict[str, tuple[Any, Any]],
) -> None:
    """Write environment.json and settings.yaml if they are missing or settings have changed.

    Changes are printed, and kept as comments at the top of settings.yaml, because results of the
    run belong to neither set of settings alone. The run goes on from `step`.
    """
    settings_file, environment_file = folder / "settings.yaml", folder / "environment.json"
    is_new, comments = not settings_file.exists(), ""
    if is_new or not environment_file.exists() or "mixed_precision" in changed:
        environment = collect_environment(accelerator) | {"parameters": parameters}
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


def collect_environment(accelerator: Accelerator) -> dict[str, Any]:
    """Return versions, machine, launch and git commit, as environment.json holds them."""
    cuda = accelerator.device.type == "cuda"
    is_regional = accelerator.state.dynamo_plugin.use_regional_compilation
    compiled = ("regional" if is_regional else "full") if is_compiled(accelerator) else "no"
    return {
        "python": platform.python_version(),
        "torch": torch.__version__,
        "transformers": transformers.__version__,
        "accelerate": accelerate.__version__,
        "machine": torch.cuda.get_device_name() if cuda else _processor(),
        "threads": torch.get_num_threads(),
        "processes": accelerator.num_processes,
        "precision": accelerator.mixed_precision,
        "compiled": compiled,
        "commit": git_commit(),
    }


def _processor() -> str:
    info = Path("/proc/cpuinfo")
    lines = info.read_text().splitlines() if info.exists() else []
    names = [line.split(":", 1)[1].strip() for line in lines if line.startswith("model name")]
    return f"{len(names)} x {names[0]}" if names else platform.processor()


@functools.cache
def git_commit() -> str:
    """Return the commit of this clone, with "-dirty" if code has changed, or "unknown".

    Files that runs write into the clone, such as results, do not count as changes.
    """
    root = Path(__file__).parents[2]
    code = [str(root / name) for name in ("roformer", "train", "finetune", "configs")]
    try:
        changed = _git(root, "status", "--porcelain", *code)
        return _git(root, "describe", "--always", "--abbrev=12") + ("-dirty" if changed else "")
    except (OSError, subprocess.CalledProcessError):
        return "unknown"


def _git(clone: Path, *command: str) -> str:
    git = ["git", "-C", str(clone), *command]
    return subprocess.run(git, capture_output=True, text=True, check=True).stdout.strip()
