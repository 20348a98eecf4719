"""Logs of runs, grouped by model: names that end in the seed, as `bert-0` and `bert-1`."""

import glob
import json
import math
from collections import defaultdict
from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from pathlib import Path

import pandas as pd
import yaml

from train.atomic_dir import split_seed
from train.data.vocabulary import BYTES
from train.settings import require

NATS, BITS = "nats a predicted token", "bits a byte"


@dataclass(frozen=True)
class Run:
    """Log of a run.

    Attributes:
        name: Name of its folder.
        training: Rows of log.jsonl with `loss`.
        held_out: Rows with `validation_loss`.
        parameters: Number of parameters, if known.
        bytewise: Whether its tokens are bytes.
        seed: `run.seed`, if known.
    """

    name: str
    training: pd.DataFrame
    held_out: pd.DataFrame
    parameters: int | None = None
    bytewise: bool = False
    seed: int | None = None


Models = Mapping[str, Mapping[int, Run]]
"""Model -> seed -> run."""


def expand_globs(patterns: Sequence[str]) -> list[str]:
    """Replace every glob by the sorted paths it matches; each path is listed once."""
    found = [path for x in patterns for path in (sorted(glob.glob(x)) or [x])]
    return list(dict.fromkeys(found))


def read_runs(patterns: Sequence[str]) -> tuple[Models, str]:
    """Read the logs of runs.

    Args:
        patterns: Run folders or globs.

    Returns:
        Model -> seed -> run, and the unit of the losses: `BITS` if all runs read bytes.

    Raises:
        InputError: A folder holds no run, or two runs have the same name.
    """
    require(len(patterns) > 0, "runs", "must name a run folder", "none", "add one")
    runs = [read_log(folder) for folder in expand_globs(patterns)]
    seeds_of_runs = {run.name: run.seed for run in runs}
    models = group_by_model([run.name for run in runs], "runs", seeds_of_runs)
    by_name = {run.name: run for run in runs}
    grouped = {m: {s: by_name[name] for s, name in seeds.items()} for m, seeds in models.items()}
    if not all(run.bytewise for run in runs):
        return grouped, NATS
    for run in runs:
        run.training["loss"] /= math.log(2)
        run.held_out["validation_loss"] /= math.log(2)
    return grouped, BITS


def read_log(folder: str) -> Run:
    """Read log.jsonl, environment.json and settings.yaml of a run folder.

    Raises:
        InputError: It has no log, or nothing was logged or evaluated yet.
    """
    log, environment, settings = (
        Path(folder) / name for name in ("log.jsonl", "environment.json", "settings.yaml")
    )
    require(log.is_file(), "runs", "must hold a log.jsonl", folder, "name folders under run.folder")
    rows = [json.loads(line) for line in log.read_text().splitlines() if line.endswith("}")]
    training = pd.DataFrame([row for row in rows if "loss" in row])
    held_out = pd.DataFrame([row for row in rows if "validation_loss" in row])
    logged = not training.empty and not held_out.empty
    require(logged, "runs", "must have logged and evaluated", folder, "wait, or run it longer")
    known = json.loads(environment.read_text()) if environment.is_file() else {}
    given = yaml.safe_load(settings.read_text()) if settings.is_file() else {}
    return Run(
        name=Path(folder).name,
        training=training,
        held_out=held_out,
        parameters=known.get("parameters"),
        bytewise=given.get("corpus", {}).get("tokenizer") == BYTES,
        seed=given.get("run", {}).get("seed"),
    )


def group_by_model(
    names: Sequence[str], key: str = "models", known_seeds: Mapping[str, int | None] | None = None
) -> dict[str, dict[int, str]]:
    """Group runs that differ in their seed: `bert-0` and `bert-1` are seeds of `bert`.

    Args:
        names: Names of runs; one without a number is seed 0.
        key: Setting to name in an error.
        known_seeds: `run.seed` by name; another number in a name, as in `width-16`, is no seed.

    Returns:
        Model -> seed -> name.

    Raises:
        InputError: Two runs have the same model and seed.
    """
    models: dict[str, dict[int, str]] = defaultdict(dict)
    for name in names:
        model, seed = split_seed(name)
        if (known_seeds or {}).get(name) not in (None, seed):
            model, seed = name, 0
        unique = seed not in models[model]
        require(unique, key, "must have different names", f"{model} twice", "rename one")
        models[model][seed] = name
    return dict(models)
