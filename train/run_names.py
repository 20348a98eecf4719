"""What the name of a run tells: its model, and the seed of its pretraining.

`bert-0` and `bert-1` are seeds of `bert`.
"""

import glob
import re
from collections.abc import Sequence
from pathlib import Path

import yaml

from train.settings import InputError


def model_name(path: str) -> str:
    """Return the name of a model from its path or hub id: NAME of runs/NAME/model."""
    parts = [part for part in Path(path).parts if part not in ("/", "model")]
    return parts[-1] if parts else "model"


def name_and_seed(name: str) -> tuple[str, int]:
    """Split a run's name into model and seed: `bert-1` is seed 1 of `bert`, `bert` is seed 0.

    A seed has one or two digits: `bert-128` is a model of that name, and so is Google's
    `bert_uncased_L-4_H-256_A-4`, where _A- is the number of heads. Where a run has a
    settings.yaml, `model_and_seed` reads that instead.
    """
    match = re.fullmatch(r"(.+)(?<!_A)-(\d{1,2})", name)
    return (match[1], int(match[2])) if match else (name, 0)


def model_and_seed(folder: str) -> tuple[str, int]:
    """Return model and seed of the folder of a run or its model: `bert` and 1 for runs/bert-1.

    The seed is that of the run's settings.yaml, so that runs/roformer-12 may be seed 0 of
    `roformer-12`. Without one, `name_and_seed` reads the name.
    """
    name, run = model_name(folder), Path(folder)
    settings = (run.parent if run.name == "model" else run) / "settings.yaml"
    if not settings.is_file():
        return name_and_seed(name)
    seed = yaml.safe_load(settings.read_text())["run"]["seed"]
    return name.removesuffix(f"-{seed}"), seed


def find_folders(patterns: Sequence[str], key: str) -> dict[str, str]:
    """Return the folders of runs or models by their name: `a` for runs/a and for runs/a/model.

    Patterns are folders or globs, in the setting `key`. A folder counts once; names must differ.
    """
    folders: dict[str, str] = {}
    for folder in [path for x in patterns for path in (sorted(glob.glob(x)) or [x])]:
        name = model_name(folder)
        if folders.setdefault(name, folder) != folder:
            raise InputError(f"{key} must have different names, got {name} twice; rename one")
    return folders
