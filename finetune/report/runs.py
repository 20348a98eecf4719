"""Results as one pandas DataFrame of runs, grouped into tasks that may share a table.

A configuration is a model with a way of fine-tuning it: one row of the score tables. A cell holds
its runs on one task, one for each fine-tuning seed. Scores are x 100. GLUE, GLUE tasks with rows
missing and the demo tasks are never in one table.

A `dataset` is a task with its rows, by name: `mnli`, or `mnli (9k)` where rows are missing.

`TaskGroup.rows` has one row for each run of each configuration. Its columns are `RECORDED_COLUMNS`,
which are fields of the result (None where it lacks one), and

    result            the whole line of results.jsonl
    run_id            last ten characters of the run's name
    metrics           validation split -> metric -> score, as in the result
    score             headline metric, mean over validation splits; NaN without a score
    glue_score        mean of all metrics of the task, which GLUE averages over tasks
    group             key of `GROUPS`
    kind              `model`, or a key of `CONTROLS`
    short_name        end of the model's path, unique in the file: bert-1 of runs/bert-1/model
    base_name         last part of it, without the pretraining seed: bert
    pretraining_seed  the number at its end: 1
    best_of           text, the number of rates of which this is the best; empty for one rate
    task_count        tasks that its configuration was run on, by which rows are sorted

and texts, empty where there is nothing to tell apart:

    model_text        model, tokenizer if it is not the model's own, random weights
    inputs_text       hashes of weights, configuration, tokenizer files and data, and the
                      precision: those that differ between runs that are otherwise alike
    control_inputs_text
                      the same without the weights
    data_text         the same for the data alone
    rate_text         the learning rate
    protocol_text     other fields of the protocol
    conditions        inputs, rate and protocol: how the model was fine-tuned
    configuration     model and conditions, the unique name of the row
"""

from collections.abc import Iterable, Mapping, Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import numpy as np
import pandas as pd

from finetune.results import PROTOCOL_FIELDS, RUN_KEY, SIMPLE_FEATURES, Result, run_name
from finetune.tasks import METRIC_NAMES, TASKS, Task, recorded_task
from train.run_names import model_name, name_and_seed

GROUPS = {
    "official": "GLUE, validation split",
    "reduced": "GLUE tasks with rows missing (not the official splits, not a GLUE score)",
    "demo": "demo tasks (not GLUE)",
    "own": "tasks of your own",
    "failed": "tasks of which every run failed",
}
GLUE_TASKS = {name for name, task in TASKS.items() if task.is_glue and "train" in task.splits}
BEST_OF = "best of {} rates by the reported split (the paper's selection)"
RECORDED_COLUMNS = [
    *RUN_KEY, "dataset", "model_type", "status", "collapsed", "parameters", "weights", "config",
    "tokenizer_files", "data", "precision",
]  # fmt: skip
"""Fields of a result that are columns of a group's runs."""
CONTROLS = {
    "random": "random weights",
    "features": "simple features",
    "majority": "majority class",
}
"""Kinds of runs without pretraining, as they are printed."""
WITHOUT_NETWORK = ("features", "majority")
"""Controls without a network: they have no seeds and no protocol."""


@dataclass(frozen=True, eq=False)
class TaskGroup:
    """The runs on tasks that may share a table.

    Attributes:
        name: Key of `GROUPS`.
        titles: Dataset -> title of its column.
        rows: One for each run of each configuration, configurations in the order of the table; the
            module's docstring lists the columns. The best of several rates and the majority class
            are configurations, too. Never count `rows`: use `fine_tuned()` or `recorded()`, in
            which no run stands twice.
    """

    name: str
    titles: dict[str, str]
    rows: pd.DataFrame

    def cells(self) -> dict[tuple[str, str], pd.DataFrame]:
        """Configuration and dataset -> runs, for every cell that has runs."""
        return dict(iter(self.rows.groupby(["configuration", "dataset"], sort=False)))

    def fine_tuned(self) -> pd.DataFrame:
        """The runs of networks, each once."""
        return self.rows[self.rows["kind"].isin(["model", "random"]) & (self.rows["best_of"] == "")]

    def recorded(self) -> pd.DataFrame:
        """The runs that have a result, each once."""
        return self.rows[(self.rows["kind"] != "majority") & (self.rows["best_of"] == "")]

    def average_name(self, datasets: Iterable[str]) -> str:
        """Name of the mean over these tasks; only all nine official ones make the GLUE average."""
        names = set(datasets)
        if self.name == "official" and names == GLUE_TASKS:
            return "GLUE average"
        return f"mean of these {len(names)} tasks, not the GLUE average"


def build_groups(results: Sequence[Result]) -> list[TaskGroup]:
    """Group the results of a file; groups without runs are left out."""
    if not results:
        return []
    order = [*TASKS, *(result["task"] for result in results)]
    runs = _labelled_runs(sorted(results, key=lambda x: (order.index(x["task"]), x["seed"])))
    runs = runs.assign(**_input_texts(runs))
    groups = dict(iter(runs.groupby("group")))
    return [_task_group(name, groups[name]) for name in GROUPS if name in groups]


def average(runs: pd.DataFrame, datasets: Iterable[str]) -> tuple[float, dict[int, float]]:
    """Average the tasks of a configuration as GLUE does: the metrics of a task first.

    Returns:
        Mean over tasks of the means over seeds, nan if a task has no score; and seed -> mean over
        tasks, for seeds with a score on all of them.
    """
    table = runs.pivot_table(index="seed", columns="dataset", values="glue_score")
    table = table.reindex(columns=list(datasets))
    return float(table.mean().mean(skipna=False)), table.dropna().mean(axis=1).to_dict()


def seed_scores(runs: pd.DataFrame) -> dict[int, float]:
    """Seed -> headline score of the scored runs of a cell."""
    return runs.dropna(subset="score").set_index("seed")["score"].to_dict()


def task_title(task: Task, name: str = "") -> str:
    """Title of a task's column: its name, or the one given, and its headline metric."""
    metric = METRIC_NAMES[task.headline][1].removesuffix(" correlation")
    return f"{name or task.title}, {metric}"


def shorten_names(models: Iterable[str]) -> dict[str, str]:
    """Name each model by the last parts of its path, as many as tell all of them apart."""
    parts = {x: [part for part in Path(x).parts if part not in ("/", "model")] for x in models}
    for depth in range(1, 1 + max(map(len, parts.values()), default=0)):
        names = {model: "/".join(parts[model][-depth:]) or model for model in parts}
        if len(set(names.values())) == len(names):
            return names
    return {model: model for model in parts}


def _labelled_runs(results: Sequence[Result]) -> pd.DataFrame:
    """One row for each result.

    A run that failed early has neither dataset nor model type: it takes those of other runs of
    its task on the same data, and of its model.
    """
    # None where a field is missing: of a column without values pandas would make a float column,
    # which refuses text later
    runs = pd.DataFrame([{name: x.get(name) for name in RECORDED_COLUMNS} for x in results])
    runs["result"] = results
    runs = runs.join(_scores(runs["result"], "metrics"))
    runs["run_id"] = [run_name(result)[-10:] for result in results]
    runs["kind"] = runs["random_weights"].map({True: "random", False: "model"})
    runs.loc[runs["model"] == SIMPLE_FEATURES, "kind"] = "features"
    runs["best_of"] = ""
    runs["short_name"] = runs["model"].map(shorten_names(runs["model"]))
    runs["base_name"] = [name_and_seed(model_name(model))[0] for model in runs["model"]]
    runs["pretraining_seed"] = [name_and_seed(name)[1] for name in runs["short_name"]]
    runs["group"] = [_group(result) for result in results]
    runs = runs.fillna({"tokenizer": "", "glue_dir": "the hub", "collapsed": False})
    types = runs.groupby("model")["model_type"].transform("last")
    runs["model_type"] = types.fillna("unknown type")
    known = runs.groupby(["task", "glue_dir"])[["group", "dataset"]].transform("last")
    runs["group"] = runs["group"].fillna(known["group"]).fillna("failed")
    task_names = pd.Series([recorded_task(result).name for result in results])
    runs["dataset"] = runs["dataset"].fillna(known["dataset"]).fillna(task_names)
    return runs


def _group(result: Result) -> str | None:
    """Key of `GROUPS`; None for a GLUE task whose rows were not counted."""
    if not recorded_task(result).is_glue:
        return "demo" if result["task"] in TASKS else "own"
    is_official = result.get("official")
    if is_official is None:
        return None
    return "official" if is_official else "reduced"


def _scores(results: pd.Series, field: str) -> pd.DataFrame:
    """Make `metrics`, `score` and `glue_score` from the field that has metrics by split."""
    rows = []
    for result in results:
        task, metrics = recorded_task(result), result.get(field)
        score = glue_score = np.nan
        if metrics:
            splits = [metrics[split] for split in task.validation_splits]
            score = 100 * np.mean([values[task.headline] for values in splits])
            glue_score = 100 * np.mean([values[x] for values in splits for x in task.metrics])
        rows.append((metrics, score, glue_score))
    return pd.DataFrame(rows, results.index, ["metrics", "score", "glue_score"])


def _input_texts(runs: pd.DataFrame) -> dict[str, Sequence[str]]:
    """Make `inputs_text`, and its parts `control_inputs_text` and `data_text` for the controls.

    A folder may hold other files than when an earlier run read it. Runs of both are not seeds of
    one configuration, so each gets the hash of what it read in its name.
    """
    is_hashed = runs.groupby("dataset")["data"].transform("count") > 0
    runs = runs.assign(data=runs["data"].where(is_hashed, runs["glue_dir"]))

    def differing(name: str, *keys: str) -> pd.Series:
        """The text "NAME VALUE" where the column varies among the rows with the same keys."""
        varies = runs.groupby(list(keys))[name].transform("nunique") > 1
        texts = runs[name].map(f"{name} {{}}".format, na_action="ignore")
        return texts.where(varies, "").fillna("")

    weights, config = differing("weights", "model", "random_weights"), differing("config", "model")
    tokenizer = differing("tokenizer_files", "model", "tokenizer")
    data, precision = differing("data", "dataset"), differing("precision", "group")
    control = list(map(_join, config, tokenizer, data, precision))
    inputs = list(map(_join, weights, control))
    return {"inputs_text": inputs, "control_inputs_text": control, "data_text": data}


def _task_group(name: str, runs: pd.DataFrame) -> TaskGroup:
    """Name the configurations of a group; add the best of several rates and the majority class."""
    is_features = runs["kind"] == "features"
    features = runs[is_features].drop_duplicates(["dataset", "data_text"], keep="last")
    baselines = pd.concat([features, _majority(runs)])
    names = list(map(_join, baselines["kind"].map(CONTROLS), baselines["data_text"]))
    baselines = baselines.assign(conditions="", configuration=names)
    runs = runs[~is_features].copy()
    by_task = _fields_by_task(runs)
    titles = _titles(pd.concat([runs, features]), by_task)
    if runs.empty:
        return TaskGroup(name, titles, baselines)
    identity = [field for field in PROTOCOL_FIELDS if field not in by_task]
    varying = [field for field in identity if runs[field].nunique() > 1]
    rate = [field for field in varying if field == "learning_rate"]
    rest = [field for field in varying if field != "learning_rate"]
    for column, fields in {"rate_text": rate, "protocol_text": rest}.items():
        runs[column] = [_protocol_text(run, fields) for run in runs.to_dict("records")]
    runs["model_text"] = _model_texts(runs)
    runs = pd.concat([runs, *_best_rates(runs)], ignore_index=True)
    parts = (runs[name] for name in ("inputs_text", "rate_text", "protocol_text"))
    runs["conditions"] = list(map(_join, *parts))
    runs["configuration"] = list(map(_join, runs["model_text"], runs["conditions"]))
    # the same data may have been read from two folders: a seed counts once, best a scored run
    scored_last = runs["score"].notna().argsort(kind="stable")
    same = ["configuration", "dataset", "seed"]
    runs = runs.iloc[scored_last].drop_duplicates(same, keep="last").sort_index()
    runs["task_count"] = runs.groupby("configuration")["dataset"].transform("nunique")
    order = ["random_weights", "model_text", "inputs_text", "best_of", "task_count", *identity]
    runs = runs.sort_values(order, ascending=[name != "task_count" for name in order])
    runs = pd.concat([runs, baselines], ignore_index=True)
    return TaskGroup(name, titles, runs)


def _model_texts(runs: pd.DataFrame) -> list[str]:
    """Names of the models; random weights of one architecture are one row.

    Random weights do not depend on the pretraining, so that those of bert-0 and bert-1 are called
    bert. If both were run on one task, the second keeps its full name.
    """
    sources = runs.groupby(["kind", "base_name", "tokenizer", "inputs_text", "dataset"])["model"]
    is_first = runs["model"] == sources.transform("first")
    is_random = runs["kind"] == "random"
    names = runs["base_name"].where(is_random & is_first, runs["short_name"])
    tokenizers = ("tokenizer " + runs["tokenizer"]).where(runs["tokenizer"] != "", "")
    kinds = is_random.map({True: CONTROLS["random"], False: ""})
    return list(map(_join, names, tokenizers, kinds))


def _fields_by_task(runs: pd.DataFrame) -> list[str]:
    """Fields of the protocol that differ between tasks and are the same in all runs of a task.

    A protocol may give one task more epochs than the others; that is a property of the column and
    does not make another configuration.
    """
    per_task = runs.groupby("dataset")[list(PROTOCOL_FIELDS)].nunique()
    return [
        field
        for field in PROTOCOL_FIELDS
        if runs[field].nunique() > 1 and (per_task[field] == 1).all()
    ]


def _titles(runs: pd.DataFrame, by_task: Sequence[str]) -> dict[str, str]:
    """Dataset -> title, headline metric and the values `by_task` that are not the most common.

    Simple features, which have no protocol, are the last of `runs`.
    """
    tasks = runs.drop_duplicates("dataset").sort_index()
    usual = tasks[list(by_task)].mode()
    titles = {}
    for run in tasks.to_dict("records"):
        task = recorded_task(run["result"])
        name = "" if run["dataset"] == task.name else run["dataset"]
        unusual = [f for f in by_task if pd.notna(run[f]) and run[f] != usual[f][0]]
        titles[run["dataset"]] = _join(task_title(task, name), _protocol_text(run, unusual))
    return titles


def _best_rates(runs: pd.DataFrame) -> list[pd.DataFrame]:
    """The paper's selection: for each task the learning rate with the best mean over seeds.

    It is made on the split that is reported, among the rates with the most scored seeds; of equal
    ones the smallest rate is taken. A task that was run with one rate has no selection.
    """
    selections = []
    rest = ["model_text", "inputs_text", "protocol_text", "dataset"]
    for _, cell in runs.groupby(rest, sort=False):
        rates = cell.groupby("learning_rate")["score"].agg(["count", "mean"])
        if len(rates) > 1:
            complete = rates.loc[rates["count"] == rates["count"].max(), "mean"]
            best = cell[cell["learning_rate"] == complete.fillna(0.0).idxmax()]
            text = BEST_OF.format(len(rates))
            selections.append(best.assign(best_of=str(len(rates)), rate_text=text))
    return selections


def _majority(runs: pd.DataFrame) -> pd.DataFrame:
    """The majority class as a configuration: its scores are part of every result with scores."""
    done = runs[runs["status"] == "done"]
    last = done.drop_duplicates(["dataset", "data_text"], keep="last")
    scores = _scores(last["result"], "majority_metrics")
    return last.assign(kind="majority", collapsed=False, **scores)


def _protocol_text(run: Mapping[str, Any], fields: Sequence[str]) -> str:
    return _join(*(PROTOCOL_FIELDS[field].format(run[field]) for field in fields))


def _join(*texts: str) -> str:
    return ", ".join(filter(None, texts))
