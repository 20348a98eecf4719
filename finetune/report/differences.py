"""What is subtracted: RoFormer - BERT seed by seed, and each model - its best control.

A difference says something about pretraining only on tasks where each of the two models exceeds its
best control without pretraining by more than the spread over seeds; `above_controls` finds them.
"""

from collections.abc import Sequence
from dataclasses import dataclass

import numpy as np
import pandas as pd

from finetune.report.runs import CONTROLS, WITHOUT_NETWORK, TaskGroup, average, seed_scores
from train.intervals import Comparison, compare, holm_corrected

MODEL_TYPES = {"RoFormer": ("roformer", "roformer_plus"), "BERT": ("bert",)}
MINUS = "−"  # noqa: RUF001 the sign, not the hyphen
AVERAGE = ""
"""Stands for a dataset in the comparison of averages over tasks; no task has this name."""


@dataclass(frozen=True, eq=False)
class Difference:
    """First configuration minus second.

    Attributes:
        names: Of the two models, or of what they stand for.
        seeds_text: The pretraining seed, or over how many; empty for one model of each.
        first: Runs of the first configuration.
        second: Runs of the second.
        tasks: Dataset -> comparison of the headline metric, where a seed has a score of both;
            and under `AVERAGE` that of GLUE's average over them, where it is defined.
        is_over_pretraining_seeds: Whether there is a difference for each of them, not for each
            seed of fine-tuning.
    """

    names: Sequence[str]
    seeds_text: str
    first: pd.DataFrame
    second: pd.DataFrame
    tasks: dict[str, Comparison]
    is_over_pretraining_seeds: bool = False

    @property
    def conditions(self) -> str:
        """How both were fine-tuned."""
        return self.first["conditions"].iloc[0]

    def title(self, with_seeds: bool = False) -> str:
        """Name in print: both models, on request the pretraining seeds, and the conditions."""
        seeds = self.seeds_text if with_seeds else ""
        return ", ".join(filter(None, (f" {MINUS} ".join(self.names), seeds, self.conditions)))


def subtract(
    names: Sequence[str], seeds_text: str, first: pd.DataFrame, second: pd.DataFrame
) -> Difference:
    """Compare two configurations on every task both were run on; Holm's family are the tasks."""
    tasks, tried = {}, {}
    for dataset in first["dataset"].unique():
        cells = [runs[runs["dataset"] == dataset] for runs in (first, second)]
        scores = [seed_scores(cell) for cell in cells]
        if scores[0].keys() & scores[1].keys():
            tried[dataset] = {seed for cell in cells for seed in cell["seed"]}
            tasks[dataset] = compare(scores[0], scores[1], len(tried[dataset]))
    averages = average(first, tasks)[1], average(second, tasks)[1]
    tasks = holm_corrected(tasks)
    if len(tasks) > 1 and averages[0].keys() & averages[1].keys():
        tasks[AVERAGE] = compare(*averages, len(set.union(*tried.values())))
    return Difference(names, seeds_text, first, second, tasks)


def pair_differences(
    group: TaskGroup, pair: Sequence[str] | None = None
) -> tuple[list[Difference], str]:
    """Subtract two pretrained models, for all conditions they share.

    If both were pretrained with the same consecutive seeds, which their names end in (`bert-0`,
    `bert-1`), models of the same seed make a pair, and there is one more difference over seeds.

    `pair` are short names of two models; None means all RoFormers and all BERTs.

    Returns:
        The differences, and the reason if there are none.
    """
    runs = group.rows[group.rows["kind"] == "model"]
    if pair is None:
        names = list(MODEL_TYPES)
        both = [runs[runs["model_type"].isin(types)] for types in MODEL_TYPES.values()]
    else:
        names, both = list(pair), [runs[runs["short_name"] == name] for name in pair]
    counts = [len(found[["model", "tokenizer"]].drop_duplicates()) for found in both]
    seeds = _shared_seeds(both, counts)
    title = f" {MINUS} ".join(names)
    if runs["model"].nunique() == 1:
        return [], "One model, no comparison."
    if not seeds and counts != [1, 1]:
        there = " and ".join(f"{count} {name}" for count, name in zip(counts, names))
        remedy = '; name two models with --pair "[A, B]"' if max(counts) > 1 else ""
        return [], f"No {title}: it takes one model of each, here are {there}{remedy}."
    differences = []
    for conditions in both[0]["conditions"].unique():
        rows = [found[found["conditions"] == conditions] for found in both]
        parts = []
        for seed in seeds or (None,):
            first, second = (x if seed is None else x[x["pretraining_seed"] == seed] for x in rows)
            if len(first) and len(second):
                seeds_text = "" if seed is None else f"pretraining seed {seed}"
                parts.append(subtract(names, seeds_text, first, second))
        differences += parts
        if seeds and len(parts) == len(seeds):
            differences.append(_over_pretraining_seeds(parts))
    reason = (
        f"No {title}: no two rows have protocol, data and precision in common and one set of "
        "weights each; their names say what differs."
    )
    return differences, "" if differences else reason


def control_gains(group: TaskGroup) -> pd.DataFrame:
    """Compare each pretrained configuration on each task with its best control.

    Returns:
        Columns configuration, dataset, control (a kind of `CONTROLS`), gain (difference of the
        means over seeds), spread (the larger sample standard deviation over seeds of the two; nan
        if either has a single seed), absent (what is missing to judge the gain), is_above
        (nothing is, and the gain exceeds the spread) and n (text, the scored runs of each).
    """
    runs = group.rows.fillna({"parameters": 0})  # of runs that failed early
    columns = ["configuration", "dataset", "control", "gain", "spread", "absent", "is_above", "n"]
    same = ["base_name", "model_type", "tokenizer", "parameters"]
    same += ["control_inputs_text", "rate_text", "protocol_text"]  # conditions but for the weights
    rows = []
    for (configuration, dataset), cell in group.cells().items():
        if cell["kind"].iloc[0] != "model":
            continue
        scored = runs[runs["dataset"] == dataset].dropna(subset="score")
        wanted = runs.loc[cell.index, same].max()  # the size is 0 where a run failed early
        is_random = (scored["kind"] == "random") & (scored[same] == wanted).all(axis=1)
        config = scored["config"]  # older results have no hash of it
        is_random &= config.isin(cell["config"]) | config.isna() | cell["config"].isna().all()
        is_same_data = scored["data_text"].isin(cell["data_text"])
        is_baseline = scored["kind"].isin(WITHOUT_NETWORK) & is_same_data
        controls = scored[is_random | is_baseline]
        rows.append((configuration, dataset, *_gain(cell["score"], controls)))
    return pd.DataFrame(rows, columns=columns)


def above_controls(
    differences: Sequence[Difference], gains: pd.DataFrame, sides: Sequence[int] = (0, 1)
) -> dict[str, bool | None]:
    """Dataset -> whether all models compared under the same conditions are above all controls.

    None where something is absent to judge one of them. With `sides` (0,) only the first models
    are asked, with (1,) the second.
    """
    compared = [(pair.first, pair.second)[side] for pair in differences for side in sides]
    names = {runs["configuration"].iloc[0] for runs in compared}
    rows = gains[gains["configuration"].isin(names)]
    found: dict[str, bool | None] = {}
    for dataset in {x: None for pair in differences for x in pair.tasks if x != AVERAGE}:
        of_task = rows[rows["dataset"] == dataset]
        is_judged = (of_task["absent"] == "").all()
        found[dataset] = bool(of_task["is_above"].all()) if is_judged else None
    return found


def _gain(scores: pd.Series, controls: pd.DataFrame) -> tuple[str, float, float, str, bool, str]:
    """The columns of `control_gains` from control on."""
    by_row = controls.groupby(["kind", "configuration"])["score"].agg(["mean", "std", "count"])
    absent = [f"no {CONTROLS[x]}" for x in ("random", "features") if x not in by_row.index]
    if by_row.empty or scores.isna().all():
        return "", float("nan"), float("nan"), ", ".join([*absent, "no scores"]), False, ""
    best = by_row["mean"].idxmax()
    model, control = scores.agg(["mean", "std", "count"]), by_row.loc[best]
    gain = float(model["mean"] - control["mean"])
    spread, counts = float(model["std"]), f"{model['count']:.0f}"  # the spread of one seed is nan
    if best[0] == "random":  # features and majority class have no seeds
        spread = float(np.max([spread, control["std"]]))
        counts += f" and {control['count']:.0f}"
    absent += ["no second seed"] if pd.isna(spread) else []
    return best[0], gain, spread, ", ".join(absent), not absent and gain > spread, counts


def _shared_seeds(both: Sequence[pd.DataFrame], counts: Sequence[int]) -> list[int]:
    """The consecutive pretraining seeds of both models, if each is one architecture; else none."""
    seeds, others = (sorted(runs["pretraining_seed"].unique().tolist()) for runs in both)
    is_consecutive = len(seeds) > 1 and seeds[-1] - seeds[0] == len(seeds) - 1
    is_same = seeds == others and list(counts) == [len(seeds), len(seeds)]
    kinds = ["base_name", "model_type", "tokenizer", "parameters"]
    varying = [(runs.groupby("dataset")[kinds].nunique() > 1).any(axis=None) for runs in both]
    return seeds if is_consecutive and is_same and not any(varying) else []


def _over_pretraining_seeds(parts: list[Difference]) -> Difference:
    """The mean over pretraining seeds; each seed's mean over fine-tuning is one number.

    Fine-tuning more often does not reduce the variance between pretraining runs.
    """
    seeds = [int(part.first["pretraining_seed"].iloc[0]) for part in parts]
    zeros, tasks = dict.fromkeys(seeds, 0.0), {}
    for dataset in parts[0].tasks:
        if dataset != AVERAGE and all(dataset in part.tasks for part in parts):
            means = dict(zip(seeds, (part.tasks[dataset].mean for part in parts)))
            tasks[dataset] = compare(means, zeros, len(parts))
    title = f"over {len(parts)} pretraining seeds"
    both = parts[0].first, parts[0].second
    return Difference(parts[0].names, title, *both, holm_corrected(tasks), True)
