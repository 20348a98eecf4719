"""Results with every kind of run, and the report of given lines."""

import json
from itertools import product
from pathlib import Path
from typing import Any

import numpy as np

from finetune.report.report import GroupReport, compare_groups
from finetune.results import RUN_KEY, SIMPLE_FEATURES, run_key
from finetune.tasks import TASKS

BERT, ROFORMER = "runs/small-bert/model", "runs/small-roformer/model"
RECIPE = {
    "learning_rate": 2e-4,
    "epochs": 3,
    "batch_size": 32,
    "length": 128,
    "schedule": "linear",
    "warmup_share": 0.1,
    "weight_decay": 0.01,
    "clip_norm": 1.0,
    "pooling": "own",
    "pair_encoding": "joint",
}
MAJORITY = {"matthews": 0.0, "accuracy": 0.5, "f1": 0.81, "pearson": 0.0, "spearman": 0.0}


def line(model: str, task: str, score: float, **changes: Any) -> dict[str, Any]:
    """A run whose headline metric is `score`, every other metric 0.02 less, MNLI-mm 0.01 less."""
    row = TASKS[task]
    key = {
        "model": model, "tokenizer": None, "random_weights": False, "mnli": None, "task": task,
        "glue_dir": "data/glue", "seed": 0, **RECIPE,
    }  # fmt: skip
    key |= {name: value for name, value in changes.items() if name in key}
    result = {
        **key,
        "status": "done",
        "collapsed": False,
        "model_type": "bert" if "bert" in model else "roformer",
        "label": task,
        "official": row.is_glue,
        "rows": {split: count or 100 for split, count in row.splits.items()},
        "headline_metric": row.headline,
        "metrics": {
            split: {m: score - 0.01 * n - 0.02 * (m != row.headline) for m in row.metrics}
            for n, split in enumerate(row.validation_splits)
        },
        "majority_metrics": {
            s: {m: MAJORITY[m] for m in row.metrics} for s in row.validation_splits
        },
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
    key = {name: complete[name] for name in RUN_KEY}
    made = {"settings": complete["settings"], "command": complete["command"]}
    return {**key, **made, "status": "failed", "error": "worker died: SIGKILL"}


def simple_features(task: str, score: float) -> dict[str, Any]:
    """A line of finetune.simple_features, which has no recipe."""
    recipe = dict.fromkeys(RECIPE)
    return line(SIMPLE_FEATURES, task, score, model_type=SIMPLE_FEATURES, **recipe)


def write(folder: Path, lines: list[dict[str, Any]]) -> str:
    """A results file with these lines."""
    file = folder / "results.jsonl"
    file.write_text("".join(json.dumps(values) + "\n" for values in lines))
    return str(file)


def grid() -> list[dict[str, Any]]:
    """Two models and their controls, two rates on two tasks, starts from MNLI, runs that failed."""
    draw = np.random.default_rng(0)
    lines = []

    def add(model: str, task: str, **changes: Any) -> None:
        gain = 0.015 * (model == ROFORMER) - 0.12 * changes.get("random_weights", False)
        score = 0.6 + gain + float(draw.normal(0, 0.012))
        lines.append(line(model, task, round(score, 4), **changes))

    reduced = {"official": False, "glue_dir": "reduced", "length": 64, "label": "mnli (9k)"}
    for seed, model in product(range(3), (BERT, ROFORMER)):
        for control in ({"seed": seed}, {"seed": seed, "random_weights": True}):
            for task in ("mnli", "mrpc", "rte", "wnli", "demo-order"):
                add(model, task, **control)
            add(model, "mnli", **control, **reduced)
        add(model, "rte", seed=seed, mnli=f"mnli/{Path(model).parent.name}-{seed}")
        for task, rate in product(("mrpc", "rte"), (2e-5, 5e-5)):
            add(model, task, seed=seed, length=512, learning_rate=rate)
    next(x for x in lines if x["task"] == "wnli")["collapsed"] = True
    without_score = [diverged(BERT, "rte", seed=1, length=512, learning_rate=5e-5)]
    without_score.append(failed(ROFORMER, "mrpc", seed=2))
    keys = [run_key(x) for x in without_score]
    return [x for x in lines if run_key(x) not in keys] + without_score


def report(lines, group: str = "official", pair=None) -> GroupReport:
    (found,) = (x for x in compare_groups(lines, pair) if x.group.name == group)
    return found


def texts(table) -> dict[str, dict[str, str]]:
    """Row's name -> column -> text."""
    frame = table.frame.set_index(table.frame.columns[0])
    assert frame.index.is_unique
    return frame.to_dict("index")


def seeds(model: str, task: str, values, **changes) -> list[dict]:
    return [line(model, task, value, seed=seed, **changes) for seed, value in enumerate(values)]
