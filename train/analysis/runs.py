"""Logs of runs, and the names of runs and models: `bert-0` and `bert-1` are seeds of `bert`."""

import glob
import json
import math
from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from pathlib import Path

import pandas as pd
import yaml

from train.atomic_dir import model_name, split_seed
from train.data.vocabulary import BYTES
from train.settings import InputError

NATS, BITS = "nats a predicted token", "bits a byte"


@dataclass(frozen=True)
class Run:
    """Log of a run: rows of log.jsonl with `loss` and, held out, with `validation_loss`.

    `model` is the name of its folder without the seed at its end.
    """

    name: str
    model: str
    seed: int
    training: pd.DataFrame
    held_out: pd.DataFrame
    parameters: int | None
    bytewise: bool


Models = Mapping[str, Mapping[int, Run]]
"""Model -> seed -> run."""


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


def read_runs(patterns: Sequence[str]) -> tuple[Models, str]:
    """Read the logs of runs, and the unit of their losses: `BITS` if all runs read bytes.

    Raises:
        InputError: A folder holds no run, or two runs have the same model and seed.
    """
    models: dict[str, dict[int, Run]] = {}
    runs = [read_run(folder) for folder in find_folders(patterns, "runs").values()]
    for run in runs:
        seeds = models.setdefault(run.model, {})
        if run.seed in seeds:
            raise InputError(
                f"runs must differ in model or seed, got two of {run.model} with seed {run.seed}; "
                "drop one"
            )
        seeds[run.seed] = run
    if not all(run.bytewise for run in runs):
        return models, NATS
    for run in runs:
        run.training["loss"] /= math.log(2)
        run.held_out["validation_loss"] /= math.log(2)
    return models, BITS


def read_run(folder: str) -> Run:
    """Read log.jsonl, environment.json and settings.yaml of a run folder."""
    log, name = Path(folder) / "log.jsonl", Path(folder).name
    if not log.is_file():
        raise InputError(f"runs must hold a log.jsonl, got {folder}; name folders under run.folder")
    rows = [json.loads(line) for line in log.read_text().splitlines() if line.endswith("}")]
    training = pd.DataFrame([row for row in rows if "loss" in row])
    held_out = pd.DataFrame([row for row in rows if "validation_loss" in row])
    if training.empty or held_out.empty:
        raise InputError(
            f"runs must have logged and evaluated, got {folder}; wait, or run it longer"
        )
    settings = yaml.safe_load((log.parent / "settings.yaml").read_text())
    model, seed = model_and_seed(folder)
    return Run(
        name=name,
        model=model,
        seed=seed,
        training=training,
        held_out=held_out,
        parameters=json.loads((log.parent / "environment.json").read_text()).get("parameters"),
        bytewise=settings["corpus"]["tokenizer"] == BYTES,
    )
