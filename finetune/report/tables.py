"""The tables of the report: DataFrames of text, made from the runs of a group.

Every table has the name of its row in the first column. The report writes each of them as Markdown,
LaTeX and HTML.
"""

from collections.abc import Sequence
from dataclasses import dataclass, field

import numpy as np
import pandas as pd

from finetune.report.differences import Difference, verdicts
from finetune.report.runs import (
    GROUPS,
    TaskGroup,
    average,
    format_number,
    shown_configurations,
    task_title,
)
from finetune.report.statistics import Comparison
from finetune.tasks import TASKS

DASH = "–"  # noqa: RUF001 an empty cell

PAPER_TASKS = ("mrpc", "sst2", "qnli", "stsb", "qqp", "mnli")
PAPER = {
    "BERT, as printed": ("test server", "88.9", "93.5", "90.5", "85.8", "71.2", "84.6/83.4"),
    "RoFormer, as printed": ("validation", "89.5", "90.7", "88.0", "87.0", "86.4", "80.2/79.8"),
}
"""Su et al. 2021, arXiv:2104.09864, table 2: split of the numbers, then `PAPER_TASKS`."""
PAPER_REMARK = (
    "The two printed rows are not comparable with each other, nor are ours with either: BERT's is "
    "the fully trained model on the test server, RoFormer's the validation split after 100,000 "
    "steps of pretraining with the best of four rates."
)


@dataclass(frozen=True, eq=False)
class Table:
    """A table in print.

    Attributes:
        title: Stands above it.
        frame: Text; empty if there are only remarks.
        remarks: Sentences that stand below it.
    """

    title: str
    frame: pd.DataFrame
    remarks: list[str] = field(default_factory=list)


def group_tables(
    group: TaskGroup,
    pairs: Sequence[Difference],
    controls: Sequence[Difference],
    no_pairs: str = "",
) -> list[Table]:
    """All tables of a group that have something to show.

    Args:
        group: Its runs.
        pairs: Differences between two models.
        controls: Differences between a model and its random weights.
        no_pairs: The reason that `pairs` is empty.
    """
    tables = [score_table(group)]
    if pairs:
        tables.append(pair_table(group, pairs, verdicts(group, pairs, controls)))
    else:
        tables.append(Table("", pd.DataFrame(), [no_pairs]))
    if controls:
        tables.append(control_table(group, controls))
    problems = problem_table(group)
    return [*tables, problems] if len(problems.frame) else tables


def score_table(group: TaskGroup) -> Table:
    """Mean and spread over seeds of every configuration on every task, and the average."""
    cells = {(row, label): score_text(runs) for row, label, runs in group.cells()}
    rows = []
    for configuration, runs in group.runs.groupby("configuration", sort=False):
        row = {"model": configuration}
        row |= {t: cells.get((configuration, label), DASH) for label, t in group.titles.items()}
        if len(group.titles) > 1:
            row[group.average_name(group.titles)] = average_text(runs, list(group.titles))
        rows.append(row)
    remark = "Mean ± sample standard deviation over seeds (their number), x 100, validation split."
    if len(group.titles) > 1:
        remark += f" The last column is the mean over {', '.join(group.titles)}."
    return Table(f"{GROUPS[group.name]}: scores", pd.DataFrame(rows), [remark])


def score_text(runs: pd.DataFrame) -> str:
    """Mean ± standard deviation for each validation split, and the number of seeds of a cell."""
    task, first = TASKS[runs["task"].iloc[0]], runs.iloc[0]
    scored = runs.dropna(subset="score")
    splits = [
        [100 * metrics[split][task.headline] for metrics in scored["metrics"]]
        for split in task.validation_splits
    ]
    text = "/".join(map(spread_text, splits)) if len(scored) else DASH
    if first["kind"] == "majority":
        return text
    count = f"{len(scored)}" if len(scored) == len(runs) else f"{len(scored)} of {len(runs)}"
    outcomes = outcome_counts(runs)
    problems = [f"{outcomes[x]} {x}" for x in ("collapsed", "diverged", "failed") if outcomes[x]]
    text += f" ({'; '.join([count, ', '.join(problems)] if problems else [count])})"
    return text + (f" at {format_number(first['learning_rate'])}" if first["best_of"] else "")


def spread_text(values: Sequence[float]) -> str:
    """Mean ± sample standard deviation; the latter for two values or more."""
    deviation = f" ± {np.std(values, ddof=1):.1f}" if len(values) > 1 else ""
    return f"{np.mean(values):.1f}{deviation}"


def outcome_counts(runs: pd.DataFrame) -> dict[str, int]:
    """Number of runs of a cell, and how many have a score, collapsed, diverged, failed."""
    status = runs["status"].tolist()
    return {
        "runs": len(runs),
        "scored": status.count("done"),
        "collapsed": int(runs["collapsed"].sum()),
        "diverged": status.count("diverged"),
        "failed": status.count("failed"),
    }


def average_text(runs: pd.DataFrame, labels: Sequence[str]) -> str:
    """The average of a configuration; its spread if all tasks have the same seeds."""
    found = average(runs, labels)
    if found is None:
        return DASH
    mean, by_seed = found
    scored = runs.dropna(subset="score").groupby("label")["seed"].count()
    if runs["kind"].iloc[0] == "majority" or (scored != len(by_seed)).any():
        return f"{mean:.1f}"
    return f"{spread_text(list(by_seed.values()))} ({len(by_seed)})"


def pair_table(group: TaskGroup, pairs: Sequence[Difference], verdict: Sequence[str]) -> Table:
    """Differences between two models, one row a task; columns that nothing fills are left out."""
    rows = []
    for pair in pairs:
        for label, comparison in pair.comparisons():
            task = group.titles.get(label, group.average_name(pair.tasks))
            rows.append({"difference": pair.title, "task": task, **comparison_texts(comparison)})
    missing = [
        f"{pair.title}, {label}: "
        f"{'not run with all of them' if pair.over else 'no seed with a score on both sides'}."
        for pair in pairs
        for label in pair.missing
    ]
    frame = pd.DataFrame(rows).replace("", pd.NA).dropna(axis=1, how="all").fillna(DASH)
    return Table("Differences, seed by seed", frame, [*missing, *verdict])


def comparison_texts(comparison: Comparison) -> dict[str, str]:
    """A comparison in words; "" for what is not defined."""
    count, effect = len(comparison.differences), comparison.hedges_gz
    return {
        "seeds": f"{count}" if count == comparison.tried else f"{count} of {comparison.tried}",
        "mean": f"{comparison.mean:+.2f}",
        "median": f"{comparison.median:+.2f}" if count > 1 else "",
        "95 % t interval": "" if comparison.t_interval is None
        else "[{:+.2f}, {:+.2f}]".format(*comparison.t_interval),
        "p (paired t)": p_text(comparison.p),
        "p (Holm)": p_text(comparison.p_holm),
        "effect size g_z": "" if effect is None else f"{effect:+.2f}",
    }  # fmt: skip


def p_text(p: float | None) -> str:
    """A p-value with three digits."""
    if p is None:
        return ""
    return "< 0.001" if p < 0.0005 else f"{p:.3f}"


def control_table(group: TaskGroup, controls: Sequence[Difference]) -> Table:
    """Pretrained minus random weights, one row a configuration and one column a task."""
    rows = []
    for control in controls:
        texts = {label: control_text(c) for label, c in control.comparisons()}
        row = {"difference": control.title}
        row |= {title: texts.get(label, DASH) for label, title in group.titles.items()}
        if len(group.titles) > 1:
            complete = control.tasks.keys() == group.titles.keys()
            mean = texts.get("average", DASH) if complete else DASH
            row[group.average_name(group.titles)] = mean
        rows.append(row)
    remark = "Mean difference, [95 % t interval], p of the paired t-test."
    title = "Pretrained against random weights, seed by seed"
    return Table(title, pd.DataFrame(rows), [remark])


def control_text(comparison: Comparison) -> str:
    """A comparison in one cell."""
    text = f"{comparison.mean:+.1f}"
    if comparison.t_interval is None:
        return text
    low, high = comparison.t_interval
    return f"{text} [{low:+.1f}, {high:+.1f}] p {p_text(comparison.p)}"


def problem_table(group: TaskGroup) -> Table:
    """Runs that collapsed, diverged or failed."""
    runs = group.runs[(group.runs["kind"] != "majority") & (group.runs["best_of"] == "")]
    runs = runs[(runs["status"] != "done") | runs["collapsed"]]
    one_answer = "one answer for every example"
    rows = [
        {
            "model": run.configuration,
            "task": group.titles[run.label],
            "seed": str(run.seed),
            "outcome": "collapsed" if run.collapsed else run.status,
            "reason": " ".join(run.result.get("error", one_answer).split())[:160],
        }
        for run in runs.itertuples()
    ]
    return Table(f"Runs that collapsed, diverged or failed: {len(rows)}", pd.DataFrame(rows))


def paper_table(group: TaskGroup) -> Table:
    """The paper's GLUE scores and those of our pretrained models, each with its split."""
    columns = ["row", "split of its numbers", *(task_title(TASKS[task]) for task in PAPER_TASKS)]
    rows: list[Sequence[str]] = [(name, *values) for name, values in PAPER.items()]
    cells = {(row, label): score_text(runs) for row, label, runs in group.cells()}
    models = set(group.runs.loc[group.runs["kind"] == "model", "configuration"])
    for row in filter(models.__contains__, shown_configurations(group)):
        scores = [cells.get((row, label)) for label in PAPER_TASKS]
        if any(scores):
            texts = [score or DASH for score in scores]
            rows.append((f"{row}, ours", "validation (development set)", *texts))
    title = "GLUE as printed by Su et al. 2021 (arXiv:2104.09864), and ours"
    return Table(title, pd.DataFrame(rows, columns=columns), [PAPER_REMARK])
