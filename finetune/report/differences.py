"""Which rows are subtracted from which: RoFormer - BERT, and a model - its random weights."""

from collections.abc import Iterator, Sequence
from dataclasses import dataclass, replace
from typing import Any

from finetune.report.cells import Row
from finetune.report.statistics import Comparison, compare, corrected
from train.loop.atomic_dir import model_name, split_seed

TYPES = {"RoFormer": ("roformer", "roformer_plus"), "BERT": ("bert",)}
MINUS = "−"  # noqa: RUF001 the sign, not the hyphen


@dataclass(frozen=True)
class Difference:
    """First row minus second: by label the headline metric, and GLUE's average of these tasks.

    `missing` are tasks that both were run on without a seed for which both have a score, or not
    with every seed of pretraining; `over` are the differences of single pretraining seeds that this
    one is taken over.
    """

    title: str
    first: Row
    second: Row
    tasks: dict[str, Comparison]
    average: Comparison | None
    missing: list[str]
    over: tuple["Difference", ...] = ()

    def parts(self) -> Iterator[tuple[str, Comparison, tuple[str, str]]]:
        """Each task by its label, then "average", with where the page lists the runs of both."""
        for label, comparison in self.tasks.items():
            places = self.first.cells[label].anchor, self.second.cells[label].anchor
            yield label, comparison, places
        if self.average:
            yield "average", self.average, (self.first.anchor, self.second.anchor)


def pair_differences(
    rows: Sequence[Row], pair: Sequence[str] | None
) -> tuple[list[Difference], str]:
    """The two models' pretrained rows of the same way of fine-tuning, subtracted.

    Where both were pretrained with several seeds, which their names end in (`bert-0`, `bert-1`),
    those of the same seed make a pair, and over these there is a difference more.

    Args:
        rows: Of one table.
        pair: The two models; None means the one RoFormer and the one BERT.

    Returns:
        The differences, and why there are none.
    """
    pretrained = [row for row in rows if row.kind == "model"]
    if pair is None:
        names = ["RoFormer", "BERT"]
        sides = [[r for r in pretrained if r.model_type in TYPES[name]] for name in names]
    else:
        names = [model_name(model) for model in pair]
        sides = [[row for row in pretrained if row.key.model == model] for model in pair]
        names = [side[0].short if side else name for side, name in zip(sides, names)]
    title, counts = f" {MINUS} ".join(names), [len({row.key.side for row in x}) for x in sides]
    seeds = [sorted({seed_of(row) for row in side}) for side in sides]
    alike = all(_same_size(side[0], row) for side in sides for row in side)
    nothing = (
        f"No {title}: no two rows have recipe, start, data and precision in common and one set of "
        "weights each; their names say what differs."
    )
    number = _in_a_row(seeds[0])
    if alike and number > 1 and seeds[0] == seeds[1] and counts == [number] * 2:
        over = over_seeds(title, *sides)
        return over, "" if over else nothing
    if counts != [1, 1]:
        found = " and ".join(f"{count} {name}" for count, name in zip(counts, names))
        remedy = '; name two models with --pair "[A, B]"' if max(counts) > 1 else ""
        return [], f"No {title}: it takes one model of each, here are {found}{remedy}."
    same = differences(title, *sides)
    return same, "" if same else nothing


def differences(title: str, first: Sequence[Row], second: Sequence[Row]) -> list[Difference]:
    """One for each way of fine-tuning that both have."""
    return [subtract(f"{title}, {a.way}".removesuffix(", "), a, b)
            for a in first for b in second if a.key.way == b.key.way]  # fmt: skip


def seed_of(row: Row) -> int:
    """The seed of pretraining by the model's name: 1 of `bert-1`, 0 where it names none."""
    return split_seed(row.short)[1]


def _in_a_row(seeds: Sequence[int]) -> int:
    """How many seeds there are, when they count up: 50 and 100 are rather millions of tokens."""
    return len(seeds) if seeds and seeds[-1] - seeds[0] == len(seeds) - 1 else 0


def over_seeds(title: str, first: Sequence[Row], second: Sequence[Row]) -> list[Difference]:
    """Differences of each seed of pretraining; then, for each way, over these seeds.

    The last takes each seed's mean over fine-tuning as one number: what a pretraining run changes
    is not made smaller by fine-tuning it more often.
    """
    found = {
        seed: differences(
            f"{title}, pretraining seed {seed}",
            [row for row in first if seed_of(row) == seed],
            [row for row in second if seed_of(row) == seed],
        )
        for seed in sorted({seed_of(row) for row in first})
    }
    whole = []
    for one in next(iter(found.values())):
        same = {seed: d for seed, parts in found.items() for d in parts
                if d.first.key.way == one.first.key.way}  # fmt: skip
        if len(same) < len(found):
            continue
        nothing = dict.fromkeys(same, 0.0)  # what the means are compared with
        labels = dict.fromkeys(label for d in same.values() for label in d.tasks)
        tasks = {
            label: compare(
                {seed: d.tasks[label].mean for seed, d in same.items()}, nothing, len(same)
            )
            for label in labels
            if all(label in d.tasks for d in same.values())
        }
        missing = [label for label in labels if label not in tasks]
        name = f"{title}, over {len(same)} pretraining seeds, {one.first.way}".removesuffix(", ")
        parts = tuple(same.values())
        whole.append(
            Difference(name, one.first, one.second, corrected(tasks), None, missing, parts)
        )
    return [difference for parts in found.values() for difference in parts] + whole


def control_differences(rows: Sequence[Row]) -> list[Difference]:
    """Each model minus its control: the same architecture and recipe from random weights.

    Tasks that its own was not run on come from that of another seed of pretraining, of the same
    size: random weights are of none.
    """
    random = [row for row in rows if row.kind == "random"]
    pairs = [(row, _control_of(row, random)) for row in rows if row.kind == "model"]
    return [subtract(f"{a.name} {MINUS} random weights", a, b) for a, b in pairs if b is not None]


def _control_of(row: Row, random: Sequence[Row]) -> Row | None:
    own = row.key._replace(control=True)
    alike = [x for x in random if _same_size(x, row)]  # a folder's model may have been replaced
    found = [x for x in alike if x.key == own]
    found += [x for x in alike if x.key != own and _beginning(x) == _beginning(row)]
    if not found:
        return None
    cells = {label: cell for x in reversed(found) for label, cell in x.cells.items()}
    return replace(found[0], cells=cells)


def _same_size(first: Row, second: Row) -> bool:
    """Whether two rows have as many parameters, on every task of which both say how many.

    Names do not tell: `roformer-128` and `roformer-768` may be seeds, or widths.
    """
    sizes: list[dict[str, Any]] = [
        {label: run["parameters"] for label, cell in row.cells.items() for run in cell.runs
         if "parameters" in run}
        for row in (first, second)
    ]  # fmt: skip
    return all(sizes[0][label] == sizes[1][label] for label in sizes[0].keys() & sizes[1].keys())


def _beginning(row: Row) -> tuple[object, ...]:
    """What decides a model's random weights, fine-tuned in one way."""
    name, _ = split_seed(model_name(row.key.model))
    return name, row.model_type, row.key.tokenizer, row.key.way


def subtract(title: str, first: Row, second: Row) -> Difference:
    """First minus second; p-values are corrected over the tasks."""
    cells = {label: (cell, second.cells[label]) for label, cell in first.cells.items()
             if label in second.cells}  # fmt: skip
    seeds = {label: {run["seed"] for cell in both for run in cell.runs}
             for label, both in cells.items()}  # fmt: skip
    tasks = {
        label: compare(a.headlines, b.headlines, len(seeds[label]))
        for label, (a, b) in cells.items()
        if a.scored.keys() & b.scored.keys()
    }
    averages = [row.average(tasks) for row in (first, second)]
    average = None
    if len(tasks) > 1 and averages[0] and averages[1]:
        by_seed = averages[0][1], averages[1][1]
        if by_seed[0].keys() & by_seed[1].keys():
            average = compare(*by_seed, len(set.union(*(seeds[label] for label in tasks))))
    missing = [label for label in cells if label not in tasks]
    return Difference(title, first, second, corrected(tasks), average, missing)
