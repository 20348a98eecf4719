"""Lines of results of every kind, and the report of given lines."""

import json
from pathlib import Path
from types import SimpleNamespace
from typing import Any

import numpy as np

from finetune.report.differences import pair_differences
from finetune.report.runs import build_groups
from finetune.results import PROTOCOL_FIELDS, RUN_KEY, SIMPLE_FEATURES
from finetune.settings import GlueSettings
from finetune.tasks import TASKS

BERT, ROFORMER = "runs/small-bert/model", "runs/small-roformer/model"
SETTINGS = GlueSettings(model="m", task="rte", learning_rate=2e-4)
PROTOCOL = {name: getattr(SETTINGS, name) for name in PROTOCOL_FIELDS}
MAJORITY = {"matthews": 0.0, "accuracy": 0.5, "f1": 0.81, "pearson": 0.0, "spearman": 0.0}


def line(model: str, task: str, score: float, **changes: Any) -> dict[str, Any]:
    """A run whose headline metric is `score`, every other metric 0.02 less, MNLI-mm 0.01 less."""
    row = TASKS[task]
    majority = {name: MAJORITY[name] for name in row.metrics}
    key = {
        "model": model, "tokenizer": None, "random_weights": False, "task": task,
        "glue_dir": "data/glue", "seed": 0, **PROTOCOL,
    }  # fmt: skip
    key |= {name: value for name, value in changes.items() if name in key}
    result = {
        **key,
        "status": "done",
        "collapsed": False,
        "model_type": "bert" if "bert" in model else "roformer",
        "dataset": task,
        "official": row.is_glue,
        "rows": {split: count or 100 for split, count in row.splits.items()},
        "headline_metric": row.headline,
        "metrics": {
            split: {m: score - 0.01 * n - 0.02 * (m != row.headline) for m in row.metrics}
            for n, split in enumerate(row.validation_splits)
        },
        "majority_metrics": dict.fromkeys(row.validation_splits, majority),
        "loss": 0.5,
        "seconds": 42.0,
        "precision": "bf16",
        "device": "cpu",
        "processes": 1,
        "threads": 1,
        "versions": {"torch": "2.13.0", "transformers": "5.23.0"},
        "settings": key | {"test": True},
        "command": f"accelerate launch finetune/glue.py --model {model!r} --seed {key['seed']}",
        **changes,
    }
    scores = [values[row.headline] for values in result["metrics"].values()]
    return {"headline": float(np.mean(scores)), "majority": 0.5, **result}


def diverged(model: str, task: str, **changes: Any) -> dict[str, Any]:
    """A run that ended in infinite gradients."""
    empty = {"status": "diverged", "error": "gradient not finite (41)", "metrics": None}
    result = {**line(model, task, 0.5, **changes), **empty, "headline": None}
    del result["collapsed"], result["loss"]
    return result


def failed(model: str, task: str, **changes: Any) -> dict[str, Any]:
    """A run of which nothing is known but its settings and what went wrong."""
    complete = line(model, task, 0.5, **changes)
    known = {name: complete[name] for name in (*RUN_KEY, "settings", "command")}
    return known | {"status": "failed", "error": "worker died: SIGKILL"}


def simple_features(task: str, score: float, **changes: Any) -> dict[str, Any]:
    """A line of finetune.simple_features, which has no protocol and no settings."""
    none = dict.fromkeys(PROTOCOL)
    result = line(SIMPLE_FEATURES, task, score, model_type=SIMPLE_FEATURES, **none, **changes)
    del result["settings"]
    return result


def write(folder: Path, lines: list[dict[str, Any]]) -> str:
    file = folder / "results.jsonl"
    file.write_text("".join(json.dumps(values) + "\n" for values in lines))
    return str(file)


def report(lines, group: str = "official", pair=None) -> SimpleNamespace:
    """The group of that name, the differences of its pairs, and why there are none."""
    (found,) = (x for x in build_groups(lines) if x.name == group)
    differences, no_pairs = pair_differences(found, pair)
    return SimpleNamespace(group=found, differences=differences, no_pairs=no_pairs)


def texts(table) -> dict[str, dict[str, str]]:
    """Row's name -> column -> text."""
    frame = table.frame.set_index(table.frame.columns[0])
    assert frame.index.is_unique
    return frame.to_dict("index")


def seeds(model: str, task: str, values, **changes) -> list[dict]:
    return [line(model, task, value, seed=seed, **changes) for seed, value in enumerate(values)]
