"""Results as one pandas DataFrame of runs, grouped into tasks that may share a table.

A configuration is a model with a way of fine-tuning it: one row of the score tables. A cell holds
its runs on one task, one for each fine-tuning seed. Scores are x 100. GLUE, GLUE tasks with rows
missing and the demo tasks are never in one table.
"""

import sys
from collections import Counter
from collections.abc import Iterable, Mapping, Sequence
from dataclasses import dataclass
from typing import Any

import numpy as np
import pandas as pd

from finetune.results import RECIPE_FIELDS, RUN_KEY, run_name
from finetune.tasks import TASKS, Task
from train.atomic_dir import model_name, split_seed

Result = dict[str, Any]

GROUPS = {
    "official": "GLUE, development set",
    "reduced": "GLUE tasks with rows missing (not the official splits, not a GLUE score)",
    "demo": "demo tasks (not GLUE)",
    "unplaced": "tasks of which every run failed",
}
GLUE_TASKS = {name for name, task in TASKS.items() if task.official and "train" in task.splits}
METRIC_NAMES = {"f1": "F1", "matthews": "Matthews", "pearson": "Pearson", "spearman": "Spearman"}
RECIPE_TEXT = {
    "learning_rate": "rate {}",
    "epochs": "{} epochs",
    "batch_size": "batch {}",
    "length": "length {}",
    "schedule": "{} schedule",
    "warmup_share": "warm-up {}",
    "weight_decay": "decay {}",
    "clip_norm": "clipped at {}",
}
BEST_OF = "best of {} rates by the reported split (the paper's selection)"
BASELINE = "majority baseline"


@dataclass(frozen=True, eq=False)
class TaskGroup:
    """The runs on tasks that may share a table.

    Attributes:
        name: Key of `GROUPS`.
        titles: Label of a task -> title of its column.
        runs: One row for each run of each configuration, configurations in the order of the table.
            Beside the fields of `KEY` it has the columns `label`, `model_type`, `status`,
            `collapsed`, `parameters`, `metrics` and

            - `result`: the run's line in results.jsonl; `run_id`: its last ten characters of name
            - `kind`: `model`, `random` (weights never pretrained) or `majority` (baseline)
            - `short_name`, `base_name`, `pretraining_seed`: `bert-1`, `bert` and 1 of runs/bert-1
            - `configuration`: unique name of the row
            - `protocol`: the part of it that says how the model was fine-tuned
            - `family`: configurations with the same family differ in the learning rate alone
            - `best_of`: number of rates of which this is the best; empty for a single rate
            - `score`: headline metric, mean over validation splits; NaN without a score
            - `glue_score`: mean of all metrics of the task, which GLUE averages over tasks
    """

    name: str
    titles: dict[str, str]
    runs: pd.DataFrame

    def cells(self) -> Iterable[tuple[str, str, pd.DataFrame]]:
        """Configuration, label and runs of every cell that has runs."""
        for (configuration, label), runs in self.runs.groupby(
            ["configuration", "label"], sort=False
        ):
            yield configuration, label, runs

    def average_name(self, labels: Iterable[str]) -> str:
        """Name of the mean over these tasks; only all nine official ones make the GLUE average."""
        names = set(labels)
        if self.name == "official" and names == GLUE_TASKS:
            return "GLUE average"
        return f"mean of these {len(names)} tasks, not the GLUE average"


def build_groups(results: Iterable[Result]) -> list[TaskGroup]:
    """Group the lines of a results file; groups without runs are left out."""
    complete = [result for result in results if is_complete(result)]
    if not complete:
        return []
    runs = _labelled_runs(complete)
    runs["origin"] = _origins(runs)
    groups = {name: runs[runs["group"] == name].copy() for name in GROUPS}
    return [_task_group(name, found) for name, found in groups.items() if len(found)]


def is_complete(result: Result) -> bool:
    """Whether a line is of a known task and has the fields its status implies; warns if not."""
    task, status = TASKS.get(result["task"]), result.get("status")
    described = {"label", "official", "model_type"}
    needed = {"done": {*described, "collapsed"}, "diverged": described, "failed": set()}
    complete = task is not None and status in needed and needed[status] <= result.keys()
    if task is not None and status == "done":
        tables = [result.get(field) or {} for field in ("metrics", "majority_metrics")]
        splits = [table.get(split) or {} for table in tables for split in task.validation_splits]
        scores = [split.get(metric) for split in splits for metric in task.metrics]
        complete &= bool(scores) and all(isinstance(score, float | int) for score in scores)
    if not complete:
        run = f"{result['task']} {result['model']} seed {result['seed']}"
        print(f"warning: the line of {run} is not complete and was ignored", file=sys.stderr)
    return complete


def average(runs: pd.DataFrame, labels: Iterable[str]) -> tuple[float, dict[int, float]] | None:
    """Average tasks as GLUE does: the metrics of a task first, then the tasks.

    Args:
        runs: Runs of one configuration.
        labels: Tasks to average over.

    Returns:
        Mean over tasks of the means over seeds; and seed -> mean over tasks, for seeds with a score
        on all of them. None if a task has no score.
    """
    table = runs.pivot(index="seed", columns="label", values="glue_score")
    table = table.reindex(columns=list(labels))
    if table.empty or table.isna().all().any():
        return None
    by_seed = table.dropna().mean(axis=1)
    return float(table.mean().mean()), by_seed.to_dict()


def seed_scores(runs: pd.DataFrame) -> dict[int, float]:
    """Seed -> headline score of the scored runs of a cell."""
    scored = runs.dropna(subset="score")
    return dict(zip(scored["seed"].tolist(), scored["score"].tolist()))


def format_number(value: object) -> str:
    """Format a value of the recipe; small floats in scientific notation, 2e-4 for 0.0002."""
    if not isinstance(value, float):
        return str(value)
    mantissa, exponent = f"{value:e}".split("e")
    return f"{value:g}" if not 0 < value < 1e-2 else f"{float(mantissa):g}e{int(exponent)}"


def task_title(task: Task, name: str = "") -> str:
    """Title of a task's column: its name, or the one given, and its headline metric."""
    return f"{name or task.title}, {METRIC_NAMES.get(task.headline, task.headline)}"


def shown_configurations(group: TaskGroup) -> list[str]:
    """Configurations without single learning rates that a best-of configuration stands for."""
    labels = {c: set(runs["label"]) for c, runs in group.runs.groupby("configuration")}
    heads = group.runs[group.runs["kind"] != "majority"].drop_duplicates("configuration")
    best = heads[heads["best_of"] != ""]
    covering = {run.family: labels[run.configuration] for run in best.itertuples()}
    return [
        run.configuration
        for run in heads.itertuples()
        if run.best_of or not labels[run.configuration] <= covering.get(run.family, set())
    ]


def _labelled_runs(results: Sequence[Result]) -> pd.DataFrame:
    """One row for each result, in the order of tasks and seeds.

    A run that failed early has neither label nor model type: it takes those of other runs of its
    task, of the same data if there are any, and of its model.
    """
    labelled = [result for result in results if "label" in result]
    types = {result["model"]: result["model_type"] for result in labelled}
    names = _short_names({result["model"] for result in results})
    known: dict[Any, tuple[str, str]] = {}
    for result in labelled:
        location = _group(result), result["label"]
        known[result["task"]] = known[result["task"], result["glue_dir"]] = location
    rows: list[dict[str, Any]] = []
    for result in results:
        task, model = TASKS[result["task"]], result["model"]
        unknown = "unplaced" if task.official else "demo", task.name
        location = known.get((task.name, result["glue_dir"]), known.get(task.name, unknown))
        group, label = (_group(result), result["label"]) if "label" in result else location
        row = {name: result.get(name) for name in (*RUN_KEY, "weights", "data", "precision")}
        row |= {"group": group, "label": label, "status": result["status"]}
        row |= {"model_type": types.get(model, "unknown type"), "short_name": names[model]}
        row |= {"base_name": split_seed(model_name(model))[0]}
        row |= {"pretraining_seed": split_seed(names[model])[1]}
        row |= {"collapsed": result.get("collapsed", False)}
        row |= {"parameters": result.get("parameters", np.nan)}
        row |= {"result": result, "run_id": run_name(result)[-10:]}
        rows.append(row | _scores(task, result.get("metrics")))
    order = list(TASKS)
    rows.sort(key=lambda row: (order.index(row["task"]), row["label"], row["seed"]))
    runs = pd.DataFrame(rows)
    return runs.fillna({"tokenizer": "", "mnli": "", "glue_dir": "the hub"})


def _group(result: Result) -> str:
    if not TASKS[result["task"]].official:
        return "demo"
    return "official" if result["official"] else "reduced"


def _origins(runs: pd.DataFrame) -> list[str]:
    """Text that tells apart runs with other initial weights, data or precision; mostly empty.

    Folders change between runs: results of the weights or data that a folder held before are not
    further seeds of what it holds now. Each seed that starts from MNLI has a folder of its own;
    the folder is named only if one seed started from several.
    """
    started = runs[runs["mnli"] != ""]
    several_starts = started.duplicated([name for name in RUN_KEY if name != "mnli"]).any()
    mnli_labels = set(runs.loc[runs["task"] == "mnli", "label"])
    mnli = mnli_labels.pop().replace("mnli", "MNLI") if len(mnli_labels) == 1 else "MNLI"
    same_run = ["label", *(name for name in RUN_KEY if name != "glue_dir")]
    folders = runs.groupby(same_run)["glue_dir"].transform("nunique")
    several_folders = set(runs.loc[folders > 1, "label"])
    start_seed = runs["seed"].where(runs["mnli"] != "", -1)
    everything = pd.Series(0, index=runs.index)
    shared_by = {
        "weights": ["model", "random_weights", "mnli", start_seed],
        "data": ["label"],
        "precision": [everything],
    }
    varies = {
        name: runs.groupby(keys)[name].transform("nunique") > 1 for name, keys in shared_by.items()
    }
    origins = []
    for run in runs.itertuples():
        source = run.mnli if several_starts else mnli
        texts = [f"started from {source}"] if run.mnli else []
        texts += [f"data of {run.glue_dir}"] if run.label in several_folders else []
        for name, differs in varies.items():
            value = getattr(run, name)
            texts += [f"{name} {value[:8]}"] if differs[run.Index] and value == value else []
        origins.append(", ".join(texts))
    return origins


def _task_group(name: str, runs: pd.DataFrame) -> TaskGroup:
    """Name the configurations of a group; add the best of several rates and the baseline."""
    by_task = _fields_by_task(runs)
    identity = [field for field in RECIPE_FIELDS if field not in by_task]
    varying = [field for field in identity if runs[field].nunique() > 1]
    rate = [field for field in varying if field == "learning_rate"]
    others = [field for field in varying if field != "learning_rate"]
    runs["kind"] = np.where(runs["random_weights"], "random", "model")
    runs["best_of"] = ""
    runs["rate_text"] = _recipe_texts(runs, rate)
    runs["recipe_text"] = _recipe_texts(runs, others)
    runs["model_text"] = [
        _join(
            f"{run.short_name} ({run.model_type})",
            f"tokenizer {run.tokenizer}" if run.tokenizer else "",
            "random weights" if run.random_weights else "",
        )
        for run in runs.itertuples()
    ]
    runs["family"] = list(map(_join, runs["model_text"], runs["origin"], runs["recipe_text"]))
    titles = _titles(runs, by_task)
    baseline = _baseline(runs)
    runs = pd.concat([runs, *_best_rates(runs)], ignore_index=True)
    runs["protocol"] = list(map(_join, runs["origin"], runs["rate_text"], runs["recipe_text"]))
    runs["configuration"] = list(map(_join, runs["model_text"], runs["protocol"]))
    runs = pd.concat([_sorted(runs, identity), baseline], ignore_index=True)
    return TaskGroup(name, titles, runs)


def _scores(task: Task, metrics: Mapping[str, Mapping[str, float]] | None) -> dict[str, Any]:
    """Metrics of a run, its headline score and the mean of all its metrics, x 100."""
    scores = {"metrics": metrics, "score": np.nan, "glue_score": np.nan}
    for name, chosen in (("score", [task.headline]), ("glue_score", list(task.metrics))):
        if metrics:
            values = [
                metrics[split][metric] for split in task.validation_splits for metric in chosen
            ]
            scores[name] = 100 * float(np.mean(values))
    return scores


def _short_names(models: Iterable[str]) -> dict[str, str]:
    """Name of each model's folder; the whole path if two folders have the same name."""
    short = {model: model_name(model) for model in models}
    taken = Counter(short.values())
    return {model: name if taken[name] == 1 else model for model, name in short.items()}


def _fields_by_task(runs: pd.DataFrame) -> list[str]:
    """Fields of the recipe that differ between tasks and are the same in all runs of a task.

    A protocol may give one task more epochs than the others; that is a property of the column and
    does not make another configuration.
    """
    per_task = runs.groupby("label")[list(RECIPE_FIELDS)].nunique()
    return [
        field
        for field in RECIPE_FIELDS
        if runs[field].nunique() > 1 and (per_task[field] == 1).all()
    ]


def _titles(runs: pd.DataFrame, by_task: Sequence[str]) -> dict[str, str]:
    """Label -> title, headline metric and the values `by_task` that are not the most common."""
    tasks = runs.drop_duplicates("label")
    usual = {field: Counter(tasks[field]).most_common(1)[0][0] for field in by_task}
    titles = {}
    for run in tasks.to_dict("records"):
        task = TASKS[run["task"]]
        name = "" if run["label"] == task.name else run["label"]
        unusual = [field for field in by_task if run[field] != usual[field]]
        titles[run["label"]] = _join(task_title(task, name), _recipe_text(run, unusual))
    return titles


def _best_rates(runs: pd.DataFrame) -> list[pd.DataFrame]:
    """The paper's selection: for each task the learning rate with the best mean over seeds.

    It is made on the split that is reported. A task that was run with one rate has no selection.
    """
    selections = []
    for _, family in runs.groupby("family", sort=False):
        tried = family.groupby("label")["learning_rate"].transform("nunique")
        tasks = family[tried > 1].groupby("label", sort=False)
        chosen = [task[task["learning_rate"] == _best_rate(task)] for _, task in tasks]
        if chosen:
            count = " or ".join(sorted({str(count) for count in tried if count > 1}))
            text = {"best_of": count, "rate_text": BEST_OF.format(count)}
            selections.append(pd.concat(chosen).assign(**text))
    return selections


def _best_rate(runs: pd.DataFrame) -> float:
    """The best mean among the rates with the most scored seeds; of equal ones the smallest rate."""
    rates = runs.groupby("learning_rate")["score"].agg(["count", "mean"])
    complete = rates.loc[rates["count"] == rates["count"].max(), "mean"]
    return complete.fillna(0.0).idxmax()


def _baseline(runs: pd.DataFrame) -> pd.DataFrame:
    """The majority baseline as a configuration: its scores are part of every scored line."""
    last = runs[runs["status"] == "done"].drop_duplicates("label", keep="last")
    scores = [
        _scores(TASKS[result["task"]], result["majority_metrics"]) for result in last["result"]
    ]
    names = dict.fromkeys(("configuration", "family"), BASELINE)
    baseline = last.assign(kind="majority", protocol="", collapsed=False, **names)
    return baseline.assign(**pd.DataFrame(scores, index=last.index)) if scores else baseline


def _sorted(runs: pd.DataFrame, identity: Sequence[str]) -> pd.DataFrame:
    """Pretrained models first; of a model the configuration with most tasks, then rates upwards."""
    keys = {
        "tasks": runs.groupby("configuration")["label"].transform("nunique"),
        **{f"{field}_key": runs[field] for field in identity},
    }
    if "learning_rate_key" in keys:
        keys["learning_rate_key"] = runs["learning_rate"].where(runs["best_of"] == "", 0.0)
    by = ["random_weights", "model", "tokenizer", "origin", "best_of", *keys]
    ascending = [name != "tasks" for name in by]
    return runs.assign(**keys).sort_values(by, ascending=ascending, kind="stable")


def _recipe_texts(runs: pd.DataFrame, fields: Sequence[str]) -> list[str]:
    return [_recipe_text(run, fields) for run in runs.to_dict("records")]


def _recipe_text(run: Mapping[str, Any], fields: Sequence[str]) -> str:
    return _join(*(RECIPE_TEXT[field].format(format_number(run[field])) for field in fields))


def _join(*texts: str) -> str:
    return ", ".join(filter(None, texts))
