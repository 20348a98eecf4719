"""Results as one pandas DataFrame of runs, grouped into tasks that may share a table.

A configuration is a model with a way of fine-tuning it: one row of the score tables. A cell holds
its runs on one task, one for each fine-tuning seed. Scores are x 100. GLUE, GLUE tasks with rows
missing and the demo tasks are never in one table.
"""

import sys
from collections.abc import Iterable, Mapping, Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import numpy as np
import pandas as pd

from finetune.results import RECIPE_FIELDS, RUN_KEY, SIMPLE_FEATURES, run_name
from finetune.tasks import METRIC_NAMES, TASKS, Task, recorded_task
from train.atomic_dir import model_name, split_seed

Result = dict[str, Any]

GROUPS = {
    "official": "GLUE, development set",
    "reduced": "GLUE tasks with rows missing (not the official splits, not a GLUE score)",
    "demo": "demo tasks (not GLUE)",
    "own": "tasks of your own",
    "unplaced": "tasks of which every run failed",
}
GLUE_TASKS = {name for name, task in TASKS.items() if task.official and "train" in task.splits}
BEST_OF = "best of {} rates by the reported split (the paper's selection)"
CONTROLS = {
    "random": "random weights",
    "features": "simple features",
    "majority": "majority class",
}
"""Kinds of runs without pretraining, as they are printed."""


@dataclass(frozen=True, eq=False)
class TaskGroup:
    """The runs on tasks that may share a table.

    Attributes:
        name: Key of `GROUPS`.
        titles: Label of a task -> title of its column.
        runs: One row for each run of each configuration, configurations in the order of the table.
            Beside the fields of `RUN_KEY` it has the columns `label`, `model_type`, `status`,
            `collapsed`, `parameters`, `metrics` and

            - `result`: the run's line in results.jsonl; `run_id`: its last ten characters of name
            - `kind`: `model`, or a key of `CONTROLS`
            - `short_name`, `base_name`, `pretraining_seed`: `bert-1`, `bert` and 1 of runs/bert-1
            - `configuration`: unique name of the row
            - `protocol`: the part of it that says how the model was fine-tuned
            - `best_of`: number of rates of which this is the best; empty for a single rate
            - `score`: headline metric, mean over validation splits; NaN without a score
            - `glue_score`: mean of all metrics of the task, which GLUE averages over tasks
    """

    name: str
    titles: dict[str, str]
    runs: pd.DataFrame

    def cells(self) -> dict[tuple[str, str], pd.DataFrame]:
        """Configuration and label -> runs, for every cell that has runs."""
        return dict(iter(self.runs.groupby(["configuration", "label"], sort=False)))

    def fine_tuned(self) -> pd.DataFrame:
        """The runs of networks, each once."""
        return self.runs[self.runs["kind"].isin(["model", "random"]) & (self.runs["best_of"] == "")]

    def recorded(self) -> pd.DataFrame:
        """The runs that have a line in the results, each once."""
        return self.runs[(self.runs["kind"] != "majority") & (self.runs["best_of"] == "")]

    def selected(self) -> pd.DataFrame:
        """The runs of networks; of several learning rates on a task the best one only."""
        networks = self.runs[self.runs["kind"].isin(["model", "random"])]
        best = networks.groupby(["family", "label"])["best_of"].transform("max")
        return networks[networks["best_of"] == best]

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
    runs["origin"], runs["data_origin"] = _origins(runs)
    groups = {name: runs[runs["group"] == name].reset_index(drop=True) for name in GROUPS}
    return [_task_group(name, found) for name, found in groups.items() if len(found)]


def is_complete(result: Result) -> bool:
    """Whether a line is of a known task and has the fields its status implies; warns if not."""
    needed = {"status"} if result.get("status") == "failed" else {"label", "official", "model_type"}
    if result.get("status") == "done":
        needed |= {"collapsed", "metrics", "majority_metrics"}
    known = result["task"] in TASKS or "description" in result
    if known and needed <= result.keys():
        return True
    run = f"{result['task']} {result['model']} seed {result['seed']}"
    print(f"warning: the line of {run} is not complete and was ignored", file=sys.stderr)
    return False


def average(runs: pd.DataFrame, labels: Iterable[str]) -> tuple[float, dict[int, float]] | None:
    """Average tasks as GLUE does: the metrics of a task first, then the tasks.

    Args:
        runs: Runs of one configuration.
        labels: Tasks to average over.

    Returns:
        Mean over tasks of the means over seeds; and seed -> mean over tasks, for seeds with a score
        on all of them. None if a task has no score.
    """
    table = runs.pivot_table(index="seed", columns="label", values="glue_score")
    table = table.reindex(columns=list(labels))
    if table.empty or table.isna().all().any():
        return None
    by_seed = table.dropna().mean(axis=1)
    return float(table.mean().mean()), by_seed.to_dict()


def seed_scores(runs: pd.DataFrame) -> dict[int, float]:
    """Seed -> headline score of the scored runs of a cell."""
    return runs.dropna(subset="score").set_index("seed")["score"].to_dict()


def task_title(task: Task, name: str = "") -> str:
    """Title of a task's column: its name, or the one given, and its headline metric."""
    metric = METRIC_NAMES[task.headline][1].removesuffix(" correlation")
    return f"{name or task.title}, {metric}"


def shorten_names(models: Iterable[str]) -> dict[str, str]:
    """Name each model by the last parts of its path, as many as tell all of them apart."""
    names = {model: model_name(model) for model in models}
    parts = {model: [x for x in Path(model).parts if x not in ("/", "model")] for model in names}
    for depth in range(2, 1 + max(map(len, parts.values()), default=0)):
        if len(set(names.values())) == len(names):
            break
        names = {model: "/".join(parts[model][-depth:]) for model in names}
    return names if len(set(names.values())) == len(names) else {model: model for model in names}


def _labelled_runs(results: Sequence[Result]) -> pd.DataFrame:
    """One row for each result, in the order of tasks and seeds.

    A run that failed early has neither label nor model type: it takes those of other runs of its
    task on the same data, and of its model.
    """
    labelled = [result for result in results if "label" in result]
    types = {result["model"]: result["model_type"] for result in labelled}
    names = shorten_names(dict.fromkeys(x["model"] for x in results))
    places = {(x["task"], x["glue_dir"]): (_group(x), x["label"]) for x in labelled}
    rows: list[dict[str, Any]] = []
    for result in results:
        task, model = recorded_task(result), result["model"]
        if "label" in result:
            place = _group(result), result["label"]
        else:
            unknown = "unplaced" if task.official else _group(result), task.name
            place = places.get((result["task"], result["glue_dir"]), unknown)
        row = {name: result.get(name) for name in (*RUN_KEY, "weights", "data", "precision")}
        row |= {
            "group": place[0],
            "label": place[1],
            "status": result["status"],
            "best_of": "",
            "kind": "random" if result["random_weights"] else "model",
            "model_type": types.get(model, "unknown type"),
            "short_name": names[model],
            "base_name": split_seed(model_name(model))[0],
            "pretraining_seed": split_seed(names[model])[1],
            "collapsed": result.get("collapsed", False),
            "parameters": result.get("parameters", np.nan),
            "result": result,
            "run_id": run_name(result)[-10:],
        }
        row |= {"kind": "features"} if model == SIMPLE_FEATURES else {}
        rows.append(row | _scores(task, result.get("metrics")))
    order = list(dict.fromkeys([*TASKS, *(result["task"] for result in results)]))
    rows.sort(key=lambda row: (order.index(row["task"]), row["label"], row["seed"]))
    return pd.DataFrame(rows).fillna({"tokenizer": "", "mnli": "", "glue_dir": "the hub"})


def _group(result: Result) -> str:
    if not recorded_task(result).official:
        return "demo" if result["task"] in TASKS else "own"
    return "official" if result["official"] else "reduced"


def _scores(task: Task, metrics: Mapping[str, Mapping[str, float]] | None) -> dict[str, Any]:
    """Metrics of a run, its headline score and the mean of all its metrics, x 100."""
    scores = {"metrics": metrics, "score": np.nan, "glue_score": np.nan}
    for name, chosen in (("score", [task.headline]), ("glue_score", list(task.metrics))):
        if metrics:
            values = [metrics[s][metric] for s in task.validation_splits for metric in chosen]
            scores[name] = 100 * float(np.mean(values))
    return scores


def _origins(runs: pd.DataFrame) -> tuple[list[str], list[str]]:
    """Texts that tell apart runs with other initial weights, data or precision; mostly empty.

    The second one leaves out the initial weights, which random weights do not depend on. Folders
    change between runs: results of the weights or data that a folder held before are not further
    seeds of what it holds now. Each seed that starts from MNLI has weights of its own.
    """
    networks = runs[runs["kind"] != "features"]
    labels = networks.loc[networks["task"] == "mnli", "label"].unique()
    mnli = labels[0].replace("mnli", "MNLI") if len(labels) == 1 else "MNLI"
    is_start = networks["mnli"] != ""
    is_hashed = networks.groupby("label")["data"].transform("count") > 0
    networks = networks.assign(
        start=networks["seed"].where(is_start, -1),
        data=networks["data"].where(is_hashed, networks["glue_dir"]),
    )
    texts = [is_start.map({True: f"started from {mnli}", False: ""})]
    shared_by = {
        "weights": ["model", "random_weights", "start"],
        "data": ["label"],
        "precision": ["group"],
    }
    for name, keys in shared_by.items():
        varies = networks.groupby(keys)[name].transform("nunique") > 1
        texts.append((f"{name} " + networks[name]).where(varies, "").fillna(""))
    table = pd.concat(texts, axis=1).reindex(runs.index, fill_value="").to_numpy()
    return [_join(*row) for row in table], [_join(*row[2:]) for row in table]


def _task_group(name: str, runs: pd.DataFrame) -> TaskGroup:
    """Name the configurations of a group; add the best of several rates and the majority class."""
    is_fixed = runs["kind"] == "features"
    networks = runs[~is_fixed].copy()
    by_task = _fields_by_task(networks)
    identity = [field for field in RECIPE_FIELDS if field not in by_task]
    varying = [field for field in identity if networks[field].nunique() > 1]
    titles, majority = _titles(runs, by_task), _majority(runs)
    fixed = pd.concat([runs[is_fixed].drop_duplicates("label", keep="last"), majority])
    fixed = fixed.assign(protocol="", family="", configuration=fixed["kind"].map(CONTROLS))
    if networks.empty:
        return TaskGroup(name, titles, fixed)
    runs = networks
    rate = [field for field in varying if field == "learning_rate"]
    rest = [field for field in varying if field != "learning_rate"]
    runs["rate_text"] = [_recipe_text(run, rate) for run in runs.to_dict("records")]
    runs["recipe_text"] = [_recipe_text(run, rest) for run in runs.to_dict("records")]
    runs["model_text"] = _model_texts(runs)
    runs["family"] = list(map(_join, runs["model_text"], runs["origin"], runs["recipe_text"]))
    runs = pd.concat([runs, *_best_rates(runs)], ignore_index=True)
    runs["protocol"] = list(map(_join, runs["origin"], runs["rate_text"], runs["recipe_text"]))
    runs["configuration"] = list(map(_join, runs["model_text"], runs["protocol"]))
    runs["tasks_less"] = -runs.groupby("configuration")["label"].transform("nunique")
    order = ["random_weights", "model_text", "origin", "best_of", "tasks_less", *identity]
    runs = pd.concat([runs.sort_values(order, kind="stable"), fixed], ignore_index=True)
    return TaskGroup(name, titles, runs)


def _model_texts(runs: pd.DataFrame) -> list[str]:
    """Names of the models; random weights of one architecture are one row, whoever lent them.

    Random weights do not depend on the pretraining. A second source for a task, and models of
    several sizes, which names such as roformer-128 do not tell from seeds, keep their names.
    """
    sources = runs.groupby(["kind", "base_name", "tokenizer", "origin", "label"])["model"]
    sizes = runs.groupby(["base_name", "label"])["parameters"].transform("nunique")
    is_one_size = sizes.groupby(runs["base_name"]).transform("max") <= 1
    is_first = (runs["model"] == sources.transform("first")) & is_one_size
    is_random = runs["kind"] == "random"
    names = runs["base_name"].where(is_random & is_first, runs["short_name"])
    tokenizers = ("tokenizer " + runs["tokenizer"]).where(runs["tokenizer"] != "", "")
    kinds = is_random.map({True: CONTROLS["random"], False: ""})
    return list(map(_join, names, tokenizers, kinds))


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
    is_fixed = runs["kind"] == "features"  # these have no recipe
    tasks = pd.concat([runs[~is_fixed], runs[is_fixed]]).drop_duplicates("label").sort_index()
    usual = tasks[list(by_task)].mode()
    titles = {}
    for run in tasks.to_dict("records"):
        task = recorded_task(run["result"])
        name = "" if run["label"] == task.name else run["label"]
        unusual = [f for f in by_task if pd.notna(run[f]) and run[f] != usual[f][0]]
        titles[run["label"]] = _join(task_title(task, name), _recipe_text(run, unusual))
    return titles


def _best_rates(runs: pd.DataFrame) -> list[pd.DataFrame]:
    """The paper's selection: for each task the learning rate with the best mean over seeds.

    It is made on the split that is reported, among the rates with the most scored seeds; of equal
    ones the smallest rate is taken. A task that was run with one rate has no selection.
    """
    selections = []
    for _, cell in runs.groupby(["family", "label"], sort=False):
        rates = cell.groupby("learning_rate")["score"].agg(["count", "mean"])
        if len(rates) > 1:
            complete = rates.loc[rates["count"] == rates["count"].max(), "mean"]
            best = cell[cell["learning_rate"] == complete.fillna(0.0).idxmax()]
            text = {"best_of": str(len(rates)), "rate_text": BEST_OF.format(len(rates))}
            selections.append(best.assign(**text))
    return selections


def _majority(runs: pd.DataFrame) -> pd.DataFrame:
    """The majority class as a configuration: its scores are part of every scored line."""
    last = runs[runs["status"] == "done"].drop_duplicates("label", keep="last")
    scores = [_scores(recorded_task(x), x["majority_metrics"]) for x in last["result"]]
    majority = last.assign(kind="majority", collapsed=False)
    return majority.assign(**pd.DataFrame(scores, index=last.index)) if scores else majority


def _recipe_text(run: Mapping[str, Any], fields: Sequence[str]) -> str:
    return _join(*(RECIPE_FIELDS[field].format(run[field]) for field in fields))


def _join(*texts: str) -> str:
    return ", ".join(filter(None, texts))
