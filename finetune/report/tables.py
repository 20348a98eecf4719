"""The tables of the report: DataFrames of text, made from the runs of a group.

Every table has the name of its row in the first column.
"""

from collections.abc import Iterable, Mapping, Sequence
from dataclasses import dataclass

import numpy as np
import pandas as pd

from finetune.report.differences import AVERAGE, Difference, above_controls, control_gains
from finetune.report.runs import (
    CONTROLS,
    GROUPS,
    WITHOUT_NETWORK,
    TaskGroup,
    average,
    task_title,
)
from finetune.results import PROTOCOL_FIELDS
from finetune.tasks import TASKS, recorded_task
from train.intervals import Comparison

DASH = "–"  # noqa: RUF001 an empty cell

PAPER_TASKS = ("mrpc", "sst2", "qnli", "stsb", "qqp", "mnli")
PAPER = {
    "BERT, as printed": ("test server", "88.9", "93.5", "90.5", "85.8", "71.2", "84.6/83.4"),
    "RoFormer, as printed": ("validation", "89.5", "90.7", "88.0", "87.0", "86.4", "80.2/79.8"),
}
"""Su et al. 2021, arXiv:2104.09864, table 2: split of the numbers, then `PAPER_TASKS`."""


@dataclass(frozen=True, eq=False)
class Table:
    """A table of text with the title above it; templates/notes.j2 says what the texts mean."""

    title: str
    frame: pd.DataFrame


def group_tables(group: TaskGroup, differences: Sequence[Difference]) -> list[Table]:
    """All tables of a group that have something to show, the differences first.

    The paper's table stands beside official scores on two of its tasks or more only.
    """
    gains = control_gains(group)
    tables = [difference_table(group, same, gains) for same in by_conditions(differences)]
    tables += [score_table(group), gain_table(group, gains), problem_table(group)]
    has_tasks = len(group.titles.keys() & set(PAPER_TASKS)) > 1
    tables += [paper_table(group)] if group.name == "official" and has_tasks else []
    return [table for table in tables if len(table.frame)]


def by_conditions(differences: Sequence[Difference]) -> list[list[Difference]]:
    """Divide differences by their conditions."""
    names = dict.fromkeys(difference.conditions for difference in differences)
    return [[x for x in differences if x.conditions == name] for name in names]


def verdicts(group: TaskGroup, differences: Sequence[Difference]) -> list[str]:
    """Say where models are above all controls, which are compared, and the common protocol."""
    gains, sentences = control_gains(group), list[str]()
    if not differences:
        judged = gains[gains["absent"] == ""]
        for configuration, rows in judged.groupby("configuration", sort=False):
            above = dict(zip(rows["dataset"], rows["is_above"]))
            sentences.append(f"{configuration}: {_verdict(group, above)}")
    rest = " Where this is not shown, a model may be no better than a control."
    for same in by_conditions(differences):
        both = above_controls(same, gains)
        verdict = f"both models {_verdict(group, both)}"
        for side, name in enumerate(same[0].names):
            above = above_controls(same, gains, sides=(side,))
            alone = [group.titles[x] for x in above if above[x] and both[x] is False]
            verdict += f" {name} alone on: {'; '.join(alone)}." if alone else ""
        verdict += rest if False in both.values() else ""
        sentences.append(f"{same[0].title()}: {verdict}")
    if differences:
        first, second = [pair.first for pair in differences], [pair.second for pair in differences]
        models = [dict.fromkeys(x["short_name"].iloc[0] for x in runs) for runs in (first, second)]
        who = [f"{n}: {', '.join(found)}" for n, found in zip(differences[0].names, models)]
        sentences.append(f"{'; '.join(who)}.")
    by_model = gains[gains["absent"] != ""].groupby(["absent", "configuration"], sort=False)
    unjudged = by_model["dataset"].agg(lambda tasks: "; ".join(group.titles[x] for x in tasks))
    for (absent, titles), rows in unjudged.reset_index().groupby(["absent", "dataset"], sort=False):
        names, remedy = "; ".join(rows["configuration"]), "finetune.grid has --controls and --seeds"
        sentences.append(f"Not judged: {names} ({absent}; {remedy}) on {titles}.")
    return [*sentences, *_protocol(group)]


def _protocol(group: TaskGroup) -> list[str]:
    """Say what all fine-tuned runs have in common of the protocol, and their precision."""
    runs = group.fine_tuned().replace({"precision": {"no": "float32"}})
    formats = PROTOCOL_FIELDS | {"precision": "precision {}"}
    values = {name: runs[name].dropna().unique() for name in formats}
    texts = [formats[name].format(found[0]) for name, found in values.items() if len(found) == 1]
    return [f"All runs: {', '.join(texts)}."] if texts else []


def _verdict(group: TaskGroup, above: Mapping[str, bool | None]) -> str:
    """Say on which of the tasks that are judged models are above all controls."""
    judged = [found for found in above.values() if found is not None]
    if not judged:
        return "not judged on any task."
    titles = [group.titles[dataset] for dataset, found in above.items() if found]
    names = f": {'; '.join(titles)}" if titles else ""
    count = f"{len(titles)} of {len(judged)} tasks"
    return f"above all controls by more than the spread on {count}{names}."


def difference_table(
    group: TaskGroup, differences: Sequence[Difference], gains: pd.DataFrame
) -> Table:
    """Differences between two models under the same conditions, a row for each task."""
    cells = {}
    for pair in differences:
        mean = group.average_name(pair.tasks.keys() - {AVERAGE})
        texts = {name or mean: comparison_text(found) for name, found in pair.tasks.items()}
        cells[pair.seeds_text or "difference"] = texts
    words = {True: "yes", False: "not shown", None: "not judged"}
    above = above_controls(differences, gains)
    cells["both above all controls"] = {dataset: words[found] for dataset, found in above.items()}
    frame = pd.DataFrame(cells).fillna(DASH)
    order = dict.fromkeys([*group.titles, *frame.index])  # the averages last
    frame = frame.loc[[name for name in order if name in frame.index]].rename(index=group.titles)
    return Table(differences[0].title(), frame.reset_index(names="task"))


def comparison_text(comparison: Comparison) -> str:
    """Mean with interval and corrected p; the single differences where these are not defined."""
    values, text = list(comparison.differences.values()), f"{comparison.mean:+.2f}"
    if comparison.t_interval is not None:
        low, high = comparison.t_interval
        text += f" [{low:+.2f}, {high:+.2f}]"
        p = comparison.p if comparison.p_holm is None else comparison.p_holm
        text += "" if p is None else f", p {'< 0.001' if p < 0.0005 else f'{p:.3f}'}"
    elif len(values) > 1:
        text += f" ({', '.join(f'{value:+.2f}' for value in values)})"
    missing = len(values) < comparison.tried
    return text + (f", {len(values)} of {comparison.tried} seeds" if missing else "")


def score_table(group: TaskGroup) -> Table:
    """Mean and spread over seeds of every configuration on every task, and the average."""
    frame = _by_task(group, [(*key, score_text(runs)) for key, runs in group.cells().items()])
    if len(group.titles) > 1:
        rows = group.rows.groupby("configuration", sort=False)
        averages = [average_text(runs, list(group.titles)) for _, runs in rows]
        frame[group.average_name(group.titles)] = averages
    return Table(f"{GROUPS[group.name]}: scores", frame)


def _by_task(group: TaskGroup, texts: Iterable[tuple[str, str, str]]) -> pd.DataFrame:
    """Arrange (configuration, dataset, text): a row a configuration, a column a task."""
    cells = pd.DataFrame(texts, columns=["model", "dataset", "text"])
    frame = cells.pivot(index="model", columns="dataset", values="text")
    frame = frame.reindex(index=cells["model"].unique(), columns=list(group.titles)).fillna(DASH)
    return frame.set_axis(list(group.titles.values()), axis=1).reset_index(names="model")


def score_text(runs: pd.DataFrame) -> str:
    """Mean ± standard deviation for each validation split, and the number of seeds of a cell."""
    task, first = recorded_task(runs["result"].iloc[0]), runs.iloc[0]
    scored = runs.dropna(subset="score")
    splits = [
        [100 * metrics[split][task.headline] for metrics in scored["metrics"]]
        for split in task.validation_splits
    ]
    text = "/".join(map(spread_text, splits)) if len(scored) else DASH
    if first["kind"] in WITHOUT_NETWORK:
        return text
    count = f"{len(scored)}" if len(scored) == len(runs) else f"{len(scored)} of {len(runs)}"
    outcomes = {"collapsed": int(runs["collapsed"].sum()), **runs["status"].value_counts()}
    names = ("collapsed", "diverged", "failed")
    problems = ", ".join(f"{outcomes[name]} {name}" for name in names if outcomes.get(name))
    text += f" ({count}; {problems})" if problems else f" ({count})"
    return text + (f" at {first['learning_rate']:g}" if first["best_of"] else "")


def spread_text(values: Sequence[float]) -> str:
    """Mean ± sample standard deviation; the latter for two values or more."""
    deviation = f" ± {np.std(values, ddof=1):.1f}" if len(values) > 1 else ""
    return f"{np.mean(values):.1f}{deviation}"


def average_text(runs: pd.DataFrame, datasets: Sequence[str]) -> str:
    """The average of a configuration; its spread if all tasks have the same seeds."""
    mean, by_seed = average(runs, datasets)
    if np.isnan(mean):
        return DASH
    scored = runs.dropna(subset="score").groupby("dataset")["seed"].count()
    is_baseline = runs["kind"].iloc[0] in WITHOUT_NETWORK
    if is_baseline or (scored != len(by_seed)).any():
        return f"{mean:.1f}"
    return f"{spread_text(list(by_seed.values()))} ({len(by_seed)})"


def gain_table(group: TaskGroup, gains: pd.DataFrame) -> Table:
    """What each pretrained configuration is above its best control, one column a task."""
    texts = []
    for row in gains[gains["control"] != ""].itertuples():  # others have no scores, or no control
        spread = "" if np.isnan(row.spread) else f"{row.spread:.1f}, "
        text = f"{row.gain:+.1f} against {CONTROLS[row.control]} ({spread}n = {row.n})"
        texts.append((row.configuration, row.dataset, text))
    return Table("Difference from the best control without pretraining", _by_task(group, texts))


def problem_table(group: TaskGroup) -> Table:
    """Runs that diverged or failed; those that collapsed have scores and are counted there."""
    runs = group.fine_tuned()
    runs = runs[runs["status"] != "done"]
    columns = {
        "model": runs["configuration"],
        "task": runs["dataset"].map(group.titles),
        "seed": runs["seed"].astype(str),
        "outcome": runs["status"],
        "reason": [" ".join(x.get("error", "").split())[:160] for x in runs["result"]],
    }
    return Table(f"Runs that diverged or failed: {len(runs)}", pd.DataFrame(columns))


def paper_table(group: TaskGroup) -> Table:
    """The paper's GLUE scores above those of our pretrained models, each with its split."""
    rows: list[Sequence[str]] = [(name, *values) for name, values in PAPER.items()]
    models = group.rows[(group.rows["kind"] == "model") & group.rows["task"].isin(PAPER_TASKS)]
    for configuration, runs in models.groupby("configuration", sort=False):
        scores = {dataset: score_text(cell) for dataset, cell in runs.groupby("dataset")}
        texts = [scores.get(dataset, DASH) for dataset in PAPER_TASKS]
        rows.append((configuration, "validation", *texts))
    columns = ["model", "split", *(task_title(TASKS[task]) for task in PAPER_TASKS)]
    title = "GLUE as printed by Su et al. 2021 (arXiv:2104.09864), and ours; not comparable"
    return Table(title, pd.DataFrame(rows, columns=columns))
