"""What the name of a run tells: its model, and the seed of its pretraining."""

import re
from pathlib import Path


def model_name(path: str) -> str:
    """Return the name of a model from its path or hub id: NAME of runs/NAME/model."""
    parts = [part for part in Path(path).parts if part not in ("/", "model")]
    return parts[-1] if parts else "model"


def split_seed(name: str) -> tuple[str, int]:
    """Split a run's name into model and seed: `bert-1` is seed 1 of `bert`, `bert` is seed 0.

    A seed has one or two digits: `bert-128` is a model of that name. Where a run has a
    settings.yaml, `train.analysis.runs.model_and_seed` reads that instead.
    """
    match = re.fullmatch(r"(.+)-(\d{1,2})", name)
    return (match[1], int(match[2])) if match else (name, 0)
