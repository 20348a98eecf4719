"""Which configurations are subtracted: RoFormer - BERT, and each model - its random weights.

Also the verdict: whether a difference between two models counts, or the models learned too little
to be compared.
"""

from collections.abc import Iterator, Sequence
from dataclasses import dataclass

import numpy as np
import pandas as pd

from finetune.report.runs import TaskGroup, average, seed_scores
from finetune.report.statistics import Comparison, compare, holm_corrected
from train.atomic_dir import model_name

MODEL_TYPES = {"RoFormer": ("roformer", "roformer_plus"), "BERT": ("bert",)}
MINUS = "−"  # noqa: RUF001 the sign, not the hyphen
REQUIRED_TASKS = ("sst2", "cola", "stsb")
"""A pair counts if both models learned these: sentiment, grammar, similarity of two sentences."""


@dataclass(frozen=True, eq=False)
class Difference:
    """First configuration minus second.

    Attributes:
        title: Name in print.
        first: Runs of the first configuration.
        second: Runs of the second; of a control they may come from several configurations.
        tasks: Label -> comparison of the headline metric.
        average: Comparison of GLUE's average over `tasks`; None where it is not defined.
        missing: Labels both were run on without a seed that both have a score for.
        over: Differences of single pretraining seeds that this one is taken over.
    """

    title: str
    first: pd.DataFrame
    second: pd.DataFrame
    tasks: dict[str, Comparison]
    average: Comparison | None
    missing: list[str]
    over: tuple["Difference", ...] = ()

    def comparisons(self) -> Iterator[tuple[str, Comparison]]:
        """Each task by its label, then `average`."""
        yield from self.tasks.items()
        if self.average:
            yield "average", self.average


def subtract(title: str, first: pd.DataFrame, second: pd.DataFrame) -> Difference:
    """Compare two configurations on every task both were run on; Holm's family are the tasks."""
    shared = [label for label in first["label"].unique() if label in set(second["label"])]
    tasks, tried = {}, {}
    for label in shared:
        cells = [side[side["label"] == label] for side in (first, second)]
        scores = [seed_scores(cell) for cell in cells]
        tried[label] = {seed for cell in cells for seed in cell["seed"]}
        if scores[0].keys() & scores[1].keys():
            tasks[label] = compare(scores[0], scores[1], len(tried[label]))
    averages = [average(side, tasks) for side in (first, second)]
    mean = None
    if len(tasks) > 1 and averages[0] and averages[1]:
        by_seed = averages[0][1], averages[1][1]
        if by_seed[0].keys() & by_seed[1].keys():
            mean = compare(*by_seed, len(set.union(*(tried[label] for label in tasks))))
    missing = [label for label in shared if label not in tasks]
    return Difference(title, first, second, holm_corrected(tasks), mean, missing)


def pair_differences(
    group: TaskGroup, pair: Sequence[str] | None = None
) -> tuple[list[Difference], str]:
    """Subtract two pretrained models, for every protocol they share.

    If both were pretrained with the same consecutive seeds, which their names end in (`bert-0`,
    `bert-1`), models of the same seed make a pair, and there is one more difference over seeds.

    Args:
        group: Runs of one table.
        pair: The two models; None means the one RoFormer and the one BERT.

    Returns:
        The differences, and the reason if there are none.
    """
    names, sides = _sides(group, pair)
    title = f" {MINUS} ".join(names)
    counts = [len(side[["model", "tokenizer"]].drop_duplicates()) for side in sides]
    if _are_pretraining_seeds(sides, counts):
        found = _over_pretraining_seeds(title, *sides)
    elif counts == [1, 1]:
        found = _by_protocol(title, *sides)
    else:
        there = " and ".join(f"{count} {name}" for count, name in zip(counts, names))
        remedy = '; name two models with --pair "[A, B]"' if max(counts) > 1 else ""
        return [], f"No {title}: it takes one model of each, here are {there}{remedy}."
    reason = (
        f"No {title}: no two rows have recipe, start, data and precision in common and one set of "
        "weights each; their names say what differs."
    )
    return found, "" if found else reason


def control_differences(group: TaskGroup) -> list[Difference]:
    """Subtract from each pretrained configuration its control from random weights.

    Random weights depend on the architecture and not on the pretraining: for tasks that a model's
    own control was not run on, the control of another pretraining seed of the same size serves.
    """
    random = group.runs[group.runs["kind"] == "random"]
    differences = []
    pretrained = group.runs[group.runs["kind"] == "model"]
    for configuration, runs in pretrained.groupby("configuration", sort=False):
        same = ["base_name", "model_type", "tokenizer", "protocol"]
        controls = random[(random[same] == runs[same].iloc[0]).all(axis=1)]
        is_own = controls["model"] == runs["model"].iloc[0]
        controls = pd.concat([controls[is_own], controls[~is_own]])
        by_model = controls.groupby("configuration", sort=False)
        fitting = [control for _, control in by_model if _same_size(runs, control)]
        if fitting:
            control = pd.concat(fitting)
            source = control.groupby("label")["configuration"].transform("first")
            control = control[control["configuration"] == source]
            title = f"{configuration} {MINUS} random weights"
            differences.append(subtract(title, runs, control))
    return differences


def verdicts(
    group: TaskGroup, pairs: Sequence[Difference], controls: Sequence[Difference]
) -> list[str]:
    """Say of each pair whether it counts.

    Both models must exceed their random weights by more than the larger sample standard deviation
    over seeds, on each of `REQUIRED_TASKS`.

    Returns:
        A sentence for each pair; none if there is no pair or none of the tasks.
    """
    if not pairs or not set(REQUIRED_TASKS) & group.titles.keys():
        return []
    control_of = {_configuration(control.first): control for control in controls}
    sentences = [_verdict(pair, group, control_of) for pair in pairs if _controls(pair, control_of)]
    unknown = "Whether this counts cannot be said: no random weights beside both models."
    return sentences or [unknown]


def _sides(
    group: TaskGroup, pair: Sequence[str] | None
) -> tuple[list[str], tuple[pd.DataFrame, pd.DataFrame]]:
    """Names and pretrained runs of the two models, or of all RoFormers and all BERTs."""
    runs = group.runs[group.runs["kind"] == "model"]
    if pair is None:
        first, second = (runs[runs["model_type"].isin(types)] for types in MODEL_TYPES.values())
        return list(MODEL_TYPES), (first, second)
    first, second = (runs[runs["model"] == model] for model in pair)
    names = [
        side["short_name"].iloc[0] if len(side) else model_name(model)
        for side, model in zip((first, second), pair)
    ]
    return names, (first, second)


def _are_pretraining_seeds(sides: Sequence[pd.DataFrame], counts: Sequence[int]) -> bool:
    """Whether both sides are one model each, pretrained with the same consecutive seeds."""
    seeds = [sorted(side["pretraining_seed"].unique().tolist()) for side in sides]
    number = len(seeds[0])
    consecutive = number > 1 and seeds[0][-1] - seeds[0][0] == number - 1
    same = seeds[0] == seeds[1] and list(counts) == [number, number]
    return consecutive and same and all(map(_has_one_size, sides))


def _by_protocol(title: str, first: pd.DataFrame, second: pd.DataFrame) -> list[Difference]:
    """One difference for each protocol that both sides were fine-tuned with."""
    shared = [p for p in first["protocol"].unique() if p in set(second["protocol"])]
    return [
        subtract(
            f"{title}, {protocol}".removesuffix(", "),
            first[first["protocol"] == protocol],
            second[second["protocol"] == protocol],
        )
        for protocol in shared
    ]


def _over_pretraining_seeds(
    title: str, first: pd.DataFrame, second: pd.DataFrame
) -> list[Difference]:
    """Differences of each pretraining seed; then, for each protocol, over these seeds.

    The last takes each seed's mean over fine-tuning as one number: fine-tuning more often does not
    reduce the variance between pretraining runs.
    """
    by_seed = {
        seed: _by_protocol(
            f"{title}, pretraining seed {seed}",
            first[first["pretraining_seed"] == seed],
            second[second["pretraining_seed"] == seed],
        )
        for seed in sorted(first["pretraining_seed"].unique().tolist())
    }
    over = []
    for example in next(iter(by_seed.values())):
        protocol = _protocol(example)
        same = {s: d for s, found in by_seed.items() for d in found if _protocol(d) == protocol}
        if len(same) < len(by_seed):
            continue
        labels = dict.fromkeys(label for d in same.values() for label in d.tasks)
        shared = [label for label in labels if all(label in d.tasks for d in same.values())]
        zeros = dict.fromkeys(same, 0.0)
        means = {label: {s: d.tasks[label].mean for s, d in same.items()} for label in shared}
        tasks = {label: compare(means[label], zeros, len(same)) for label in shared}
        missing = [label for label in labels if label not in tasks]
        name = f"{title}, over {len(same)} pretraining seeds, {protocol}".removesuffix(", ")
        sides, parts = (example.first, example.second), tuple(same.values())
        over.append(Difference(name, *sides, holm_corrected(tasks), None, missing, parts))
    return [difference for found in by_seed.values() for difference in found] + over


def _verdict(pair: Difference, group: TaskGroup, control_of: dict[str, Difference]) -> str:
    doubts = []
    for part in pair.over or (pair,):
        controls = _controls(part, control_of)
        doubts += [] if controls else [f"{part.title}: no random weights beside both"]
        for control in controls:
            for label in REQUIRED_TASKS:
                doubt = _doubt(control, label)
                name = f"{control.first['short_name'].iloc[0]}, {group.titles.get(label, label)}"
                doubts += [f"{name}: {doubt}"] if doubt else []
    if doubts:
        return f"{pair.title} does not count yet: {'; '.join(doubts)}."
    names = "; ".join(group.titles[label] for label in REQUIRED_TASKS)
    return (
        f"{pair.title} counts: both models stand above their random weights by more than the "
        f"larger sample standard deviation over seeds on {names}."
    )


def _doubt(control: Difference, label: str) -> str:
    """Why a pretrained model is not above its random weights on a task; empty if it is."""
    cells = [side[side["label"] == label] for side in (control.first, control.second)]
    if cells[0].empty or cells[1].empty:
        return "not run" if cells[0].empty else "no control"
    scores = [np.array(list(seed_scores(cell).values())) for cell in cells]
    if not all(map(len, scores)):
        return "no run has a score"
    spreads = [float(values.std(ddof=1)) for values in scores if len(values) > 1]
    if not spreads:
        return "one seed, so the spread is not known"
    gain, spread = float(scores[0].mean() - scores[1].mean()), max(spreads)
    return "" if gain > spread else f"{gain:+.1f} over random weights, spread {spread:.1f}"


def _controls(pair: Difference, control_of: dict[str, Difference]) -> list[Difference]:
    """The control differences of both sides, or nothing."""
    names = [_configuration(side) for side in (pair.first, pair.second)]
    return [control_of[name] for name in names] if set(names) <= control_of.keys() else []


def _configuration(runs: pd.DataFrame) -> str:
    return runs["configuration"].iloc[0]


def _protocol(difference: Difference) -> str:
    return difference.first["protocol"].iloc[0]


def _has_one_size(runs: pd.DataFrame) -> bool:
    """Whether all models have the same number of parameters, as far as it is known.

    Names do not tell: `roformer-128` and `roformer-768` may be pretraining seeds, or widths.
    """
    return bool((runs.groupby("label")["parameters"].nunique() <= 1).all())


def _same_size(first: pd.DataFrame, second: pd.DataFrame) -> bool:
    labels = set(first["label"]) & set(second["label"])
    return _has_one_size(pd.concat([x[x["label"].isin(labels)] for x in (first, second)]))
