"""Runs and models of a comparison: `bert-0` and `bert-1` are seeds of `bert`."""

import glob
from collections.abc import Sequence
from pathlib import Path

import yaml
from transformers import PreTrainedConfig

from roformer import RoFormerConfig
from train.run_names import model_name, split_seed
from train.settings import InputError


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


def model_and_seed(folder: str) -> tuple[str, int]:
    """Return model and seed of the folder of a run or its model: `bert` and 1 for runs/bert-1.

    The seed is that of the run's settings.yaml, so that runs/roformer-12 may be seed 0 of
    `roformer-12`. Without one, `split_seed` reads the name.
    """
    name, run = model_name(folder), Path(folder)
    settings = (run.parent if run.name == "model" else run) / "settings.yaml"
    if not settings.is_file():
        return split_seed(name)
    seed = yaml.safe_load(settings.read_text())["run"]["seed"]
    return name.removesuffix(f"-{seed}"), seed


def has_plain_rope(config: PreTrainedConfig) -> bool:
    """Whether a model is a RoFormer with softmax attention and unscaled rotary embeddings."""
    return (
        isinstance(config, RoFormerConfig)
        and (config.position_encoding, config.linear_attention) == ("rope", None)
        and (config.rope_parameters or {}).get("rope_type") == "default"
    )
