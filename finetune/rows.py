"""Lines of results to tables: what shares a cell, what a row is, what is averaged and compared.

A cell holds the runs of one model with one recipe on one task, one for each seed. GLUE, GLUE tasks
with rows missing and the demo tasks are never in one table. All scores here are x 100.
"""

import sys
from collections import defaultdict
from collections.abc import Iterable, Iterator, Mapping, Sequence
from dataclasses import dataclass
from functools import cached_property
from pathlib import Path
from typing import Any, NamedTuple

import numpy as np
from numpy.typing import NDArray

from finetune.comparison import Comparison, compare, corrected
from finetune.results import KEY, RECIPE, run_name
from finetune.tasks import TASKS, Task
from train.settings import require

Line = dict[str, Any]

GROUPS = {
    "official": "GLUE, development set",
    "reduced": "GLUE tasks with rows missing (not the official splits, not a GLUE score)",
    "demo": "demo tasks (not GLUE)",
    "unplaced": "tasks of which every run failed",
}
NINE = {name for name, task in TASKS.items() if task.official and "train" in task.splits}
METRIC_NAMES = {"f1": "F1", "matthews": "Matthews", "pearson": "Pearson", "spearman": "Spearman"}
RECIPE_WORDS = (
    "rate {}", "{} epochs", "batch {}", "length {}", "{} schedule", "warm-up {}", "decay {}",
    "clipped at {}",
)  # fmt: skip
BEST = "best of {} rates by the reported split (the paper's selection)"
TYPES = {"RoFormer": ("roformer", "roformer_plus"), "BERT": ("bert",)}
MINUS = "−"  # noqa: RUF001 the sign, not the hyphen


class RowKey(NamedTuple):
    """What the runs of a row have in common.

    Attributes:
        control: Whether the weights were never pretrained.
        model: Folder or hub id.
        tokenizer: The same; "" is the model's own.
        mnli: "", or from where the runs started.
        rates: "", or among how many rates one was chosen for each task, by the reported split.
        recipe: Values of `RECIPE`, without a rate that was chosen.
    """

    control: bool
    model: str
    tokenizer: str
    mnli: str
    rates: str
    recipe: tuple[Any, ...]

    @property
    def side(self) -> tuple[str, str]:
        """Model and tokenizer: what a difference is between."""
        return self.model, self.tokenizer

    @property
    def way(self) -> tuple[Any, ...]:
        """How it was fine-tuned: what two rows must share to be compared."""
        return self.mnli, self.rates, self.recipe

    def over_rates(self, rates: str = "") -> "RowKey":
        """The same with the best of several rates."""
        return self._replace(rates=rates, recipe=(None, *self.recipe[1:]))


@dataclass(frozen=True)
class Cell:
    """The runs of one row on one task, in the order of their seeds."""

    runs: tuple[Line, ...]

    @property
    def task(self) -> Task:
        """Its row of the table of tasks."""
        return TASKS[self.runs[0]["task"]]

    @property
    def anchor(self) -> str:
        """Where the page lists the runs."""
        return f"cell-{run_id(self.runs[0])}"

    @property
    def rate(self) -> float:
        """The learning rate."""
        return self.runs[0]["learning_rate"]

    @cached_property
    def scored(self) -> dict[int, Line]:
        """The runs that have a score, by seed; a collapsed one has."""
        return {run["seed"]: run for run in self.runs if run["status"] == "done"}

    def values(self, split: str, metric: str) -> NDArray[np.float64]:
        """A metric over the seeds, [scored runs]."""
        return 100 * np.array([run["metrics"][split][metric] for run in self.scored.values()])

    @cached_property
    def headlines(self) -> dict[int, float]:
        """Seed -> headline metric; the mean of MNLI's two splits."""
        return self._by_seed([self.task.headline])

    @cached_property
    def glue_scores(self) -> dict[int, float]:
        """Seed -> what GLUE averages over tasks: the mean of all the task's metrics."""
        return self._by_seed(self.task.metrics)

    def _by_seed(self, metrics: Sequence[str]) -> dict[int, float]:
        table = [self.values(split, m) for split in self.task.validations for m in metrics]
        return dict(zip(self.scored, np.mean(table, axis=0).tolist()))

    def tally(self) -> dict[str, int]:
        """How many runs there are, have a score, collapsed, diverged, failed."""
        states = [run["status"] for run in self.runs]
        return {
            "runs": len(states),
            "scored": states.count("done"),
            "collapsed": sum(run["collapsed"] for run in self.runs),
            "diverged": states.count("diverged"),
            "failed": states.count("failed"),
        }


@dataclass(frozen=True)
class Row:
    """One line of a table.

    Attributes:
        name: In print; no other row has it.
        short: The model's name alone.
        model_type: transformers' name of the architecture.
        kind: model, random (weights never pretrained) or majority.
        way: How it was fine-tuned, where the table has several ways.
        key: What its runs have in common.
        cells: By the tasks' labels; a task that was not run is absent.
    """

    name: str
    short: str
    model_type: str
    kind: str
    way: str
    key: RowKey
    cells: dict[str, Cell]

    @property
    def anchor(self) -> str:
        """Where the page lists the runs."""
        cell = next(iter(self.cells.values()))
        return f"{'best' if self.key.rates else 'row'}-{run_id(cell.runs[0])}"

    def average(self, labels: Iterable[str]) -> tuple[float, dict[int, float]] | None:
        """GLUE's: each task's metrics averaged, then the mean over tasks.

        Returns:
            The mean over tasks of their means over seeds, and the mean over tasks of each seed that
            has a score on all of them; None when a task has no score.
        """
        cells = [self.cells.get(label) for label in labels]
        scores = [cell.glue_scores if cell else {} for cell in cells]
        if not scores or not all(scores):
            return None
        shared = sorted(set.intersection(*(set(score) for score in scores)))
        whole = float(np.mean([np.mean(list(score.values())) for score in scores]))
        return whole, {seed: float(np.mean([s[seed] for s in scores])) for seed in shared}


@dataclass(frozen=True)
class Difference:
    """First row minus second: by label the headline metric, and GLUE's average of these tasks.

    `missing` are tasks that both were run on without a seed for which both have a score.
    """

    title: str
    first: Row
    second: Row
    tasks: dict[str, Comparison]
    average: Comparison | None
    missing: list[str]

    def parts(self) -> Iterator[tuple[str, Comparison, tuple[str, str]]]:
        """Each task by its label, then "average", with where the page lists the runs of both."""
        for label, comparison in self.tasks.items():
            places = self.first.cells[label].anchor, self.second.cells[label].anchor
            yield label, comparison, places
        if self.average:
            yield "average", self.average, (self.first.anchor, self.second.anchor)


@dataclass(frozen=True)
class Table:
    """One group of tasks.

    Attributes:
        group: Key of `GROUPS`.
        labels: Label -> title of the column.
        rows: Models, controls, the majority baseline.
        pairs: RoFormer - BERT, or the two models asked for, one for each way of fine-tuning.
        controls: Pretrained - random weights, of each model.
        remark: Why there are no `pairs`.
        troubles: (Row's name, run) of those that collapsed, diverged or failed.
    """

    group: str
    labels: dict[str, str]
    rows: list[Row]
    pairs: list[Difference]
    controls: list[Difference]
    remark: str
    troubles: list[tuple[str, Line]]

    def average_name(self, labels: Iterable[str]) -> str:
        """What the mean over tasks of this table may be called."""
        names = set(labels)
        if self.group == "official" and names == NINE:
            return "GLUE average"
        return f"mean of these {len(names)} tasks, not the GLUE average"


def number(value: object) -> str:
    """A value of the recipe: 2e-4 and not 0.0002, which takes counting."""
    if not isinstance(value, float):
        return str(value)
    mantissa, exponent = f"{value:e}".split("e")
    return f"{value:g}" if not 0 < value < 1e-2 else f"{float(mantissa):g}e{int(exponent)}"


def run_id(line: Line) -> str:
    """The run in ten characters: the end of its name under predictions/."""
    return run_name(line)[-10:]


def build_tables(lines: Iterable[Line], pair: Sequence[str] | None = None) -> list[Table]:
    """Every group that has runs.

    Args:
        lines: Of a results file.
        pair: The two models to compare; None means the one RoFormer and the one BERT.

    Raises:
        InputError: A model of the pair is not there.
    """
    placed = place([line for line in lines if is_complete(line)])
    names = short_names({line["model"] for line in placed})
    chosen = None if pair is None else [_named(names, name) for name in pair]
    different = chosen is None or len(set(chosen)) == 2
    require(different, "pair", "must be two models", f"{chosen} for {pair}", "name another")
    groups = {group: [line for line in placed if line["group"] == group] for group in GROUPS}
    return [_build(group, runs, names, chosen) for group, runs in groups.items() if runs]


def is_complete(line: Line) -> bool:
    """Whether a line is of a known task and has what its status promises; if not, a warning."""
    task, status = TASKS.get(line["task"]), line.get("status")
    described = {"label", "official", "model_type"}
    promised = {"done": {*described, "collapsed"}, "diverged": described, "failed": set()}
    complete = task is not None and status in promised and promised[status] <= line.keys()
    if task is not None and status == "done":
        tables = [line.get(field) or {} for field in ("metrics", "majority_metrics")]
        splits = [table.get(split) or {} for table in tables for split in task.validations]
        scores = [split.get(metric) for split in splits for metric in task.metrics]
        complete &= bool(scores) and all(isinstance(score, float | int) for score in scores)
    if not complete:
        which = f"{line['task']} {line['model']} seed {line['seed']}"
        print(f"warning: the line of {which} is not complete and was ignored", file=sys.stderr)
    return complete


def place(lines: Sequence[Line]) -> list[Line]:
    """Lines with group, label, model type and start, in the order of tasks and seeds.

    A run that failed did not get as far as these: they are those of other runs of its task (of the
    same data, if there are any) and model.
    """
    places: dict[Any, dict[str, str]] = {}
    types: dict[str, str] = {}
    placed = []
    for line in (line for line in lines if "label" in line):
        group = "official" if line["official"] else "reduced"
        group = group if TASKS[line["task"]].official else "demo"
        found = {"group": group, "label": line["label"]}
        places[line["task"]] = places[line["task"], line["glue_dir"]] = found
        types[line["model"]] = line["model_type"]
        placed.append({"collapsed": False, **line, **found})
    for line in (line for line in lines if "label" not in line):
        task, kind = line["task"], types.get(line["model"], "unknown type")
        other = {"group": "unplaced" if TASKS[task].official else "demo", "label": task}
        found = places.get((task, line["glue_dir"]), places.get(task, other))
        placed.append({"collapsed": False, **line, **found, "model_type": kind})
    starts, order = mnli_names(placed), list(TASKS)
    placed = [{**line, "start": starts[line["mnli"]]} for line in placed]
    return sorted(placed, key=lambda x: (order.index(x["task"]), x["label"], x["seed"]))


def sweeps(rows: Sequence[Row]) -> list[tuple[Row, list[Row]]]:
    """The rows of best rates, each with the rows it was chosen from."""
    best = [row for row in rows if row.key.rates]
    single = [row for row in rows if not row.key.rates]
    return [(b, [row for row in single if row.key.over_rates(b.key.rates) == b.key]) for b in best]


def without_rates(rows: Sequence[Row]) -> list[Row]:
    """The rows of models, without those of single rates of which the best has a row."""
    tried = [r for b, family in sweeps(rows) for r in family if r.cells.keys() <= b.cells.keys()]
    return [row for row in rows if row.kind != "majority" and row not in tried]


def short_names(models: Iterable[str]) -> dict[str, str]:
    """The telling part of each path: runs/NAME/model is NAME; the whole where two are equal."""
    short = {}
    for model in models:
        parts = [part for part in Path(model).parts if part not in ("model", "/")]
        short[model] = parts[-1] if parts else model
    taken = list(short.values())
    return {model: name if taken.count(name) == 1 else model for model, name in short.items()}


def _named(names: dict[str, str], given: str) -> str:
    found = [model for model, name in names.items() if given in (model, name)]
    listed = ", ".join(sorted(names.values()))
    require(bool(found), "pair", "must name models of the results", given, f"they have {listed}")
    return found[0]


def _build(
    group: str, lines: Sequence[Line], names: dict[str, str], pair: Sequence[str] | None
) -> Table:
    labels = {line["label"]: column_title(line) for line in lines}
    rows = model_rows(lines, names)
    pairs, remark = pair_differences(rows, pair)
    floors = {x["label"]: Cell((x | {"metrics": x["majority_metrics"], "collapsed": False},))
              for x in lines if x["status"] == "done"}  # fmt: skip
    key = RowKey(False, "", "", "", "", (None,))
    baseline = [Row("majority baseline", "", "", "majority", "", key, floors)] if floors else []
    troubles = [
        (row.name, run)
        for row in rows
        if not row.key.rates
        for cell in row.cells.values()
        for run in cell.runs
        if run["status"] != "done" or run["collapsed"]
    ]
    controls = control_differences(rows)
    return Table(group, labels, [*rows, *baseline], pairs, controls, remark, troubles)


def column_title(line: Line) -> str:
    """The task and its headline metric; a task with rows missing keeps its own label."""
    task = TASKS[line["task"]]
    name = task.title if line["label"] == task.name else line["label"]
    return f"{name}, {METRIC_NAMES.get(task.headline, task.headline)}"


def model_rows(lines: Sequence[Line], names: dict[str, str]) -> list[Row]:
    """A row for each model and recipe, and one for the best of its rates.

    Pretrained models come first; of a model the row with most tasks, rates as they grow, the best
    of them, starts from MNLI.
    """
    runs: dict[RowKey, dict[str, list[Line]]] = defaultdict(lambda: defaultdict(list))
    for line in lines:
        side = line["random_weights"], line["model"], line["tokenizer"] or ""
        key = RowKey(*side, line["start"], "", tuple(line[name] for name in RECIPE))
        runs[key][line["label"]].append(line)
    cells = {k: {label: Cell(tuple(x)) for label, x in row.items()} for k, row in runs.items()}
    recipes = zip(*(key.recipe for key in cells))
    varying = [place for place, values in enumerate(recipes) if len(set(values)) > 1]
    cells |= best_rates(cells)
    types = {line["model"]: line["model_type"] for line in lines}
    rows = []
    for key in sorted(cells, key=lambda key: (*key[:-1], -len(cells[key]), key.recipe)):
        words = [f"{names[key.model]} ({types[key.model]})"]
        words += [f"tokenizer {key.tokenizer}"] * bool(key.tokenizer)
        words += ["random weights"] * key.control
        way = [key.mnli] * bool(key.mnli)
        way += [BEST.format(key.rates)] * bool(key.rates)
        shown = [i for i in varying if key.recipe[i] is not None]
        way += [RECIPE_WORDS[i].format(number(key.recipe[i])) for i in shown]
        kind, name = "random" if key.control else "model", ", ".join([*words, *way])
        short, model_type = names[key.model], types[key.model]
        rows.append(Row(name, short, model_type, kind, ", ".join(way), key, cells[key]))
    return rows


def mnli_names(lines: Sequence[Line]) -> dict[str | None, str]:
    """What to call a start from MNLI: each seed has a folder of its own, all go by one name.

    Only where one seed started from several folders do these tell rows apart. Where the runs of
    MNLI in the file had rows missing, the name says how many they had.
    """
    made = {line["label"].replace("mnli", "MNLI") for line in lines if line["task"] == "mnli"}
    source = made.pop() if len(made) == 1 else "MNLI"
    started = [line for line in lines if line["mnli"] is not None]
    others = [name for name in KEY if name != "mnli"]
    several = len({tuple(line[name] for name in others) for line in started}) < len(started)
    folders = {line["mnli"] for line in started}
    return {None: ""} | {x: f"started from {x if several else source}" for x in folders}


def best_rates(cells: Mapping[RowKey, dict[str, Cell]]) -> dict[RowKey, dict[str, Cell]]:
    """The paper's selection: for each task the rate with the best mean over seeds.

    It is made on the split that is reported. A task run with one rate has no cell here.
    """
    families: dict[RowKey, dict[str, list[Cell]]] = defaultdict(lambda: defaultdict(list))
    for key, row in cells.items():
        for label, cell in row.items():
            families[key.over_rates()][label].append(cell)
    best: dict[RowKey, dict[str, Cell]] = {}
    for key, tasks in families.items():
        chosen = {label: best_cell(tried) for label, tried in tasks.items() if len(tried) > 1}
        if chosen:
            counts = sorted({str(len(tasks[label])) for label in chosen})
            best[key.over_rates(" or ".join(counts))] = chosen
    return best


def best_cell(rates: Sequence[Cell]) -> Cell:
    """The best mean among the rates with the most scored seeds; of equal ones the smallest rate."""
    most = max(len(cell.scored) for cell in rates)
    complete = sorted((x for x in rates if len(x.scored) == most), key=lambda cell: cell.rate)
    return max(complete, key=lambda cell: np.mean(list(cell.headlines.values())) if most else 0)


def pair_differences(
    rows: Sequence[Row], pair: Sequence[str] | None
) -> tuple[list[Difference], str]:
    """The two models' pretrained rows of the same way of fine-tuning, subtracted.

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
        names = [Path(model).name for model in pair]
        sides = [[row for row in pretrained if row.key.model == model] for model in pair]
        names = [side[0].short if side else name for side, name in zip(sides, names)]
    title, counts = f" {MINUS} ".join(names), [len({row.key.side for row in x}) for x in sides]
    if counts != [1, 1]:
        found = " and ".join(f"{count} {name}" for count, name in zip(counts, names))
        remedy = '; name two models with --pair "[A, B]"' if max(counts) > 1 else ""
        return [], f"No {title}: it takes one model of each, here are {found}{remedy}."
    same = [subtract(f"{title}, {a.way}".removesuffix(", "), a, b)
            for a in sides[0] for b in sides[1] if a.key.way == b.key.way]  # fmt: skip
    return same, "" if same else f"No {title}: nothing was run with the same recipe on both."


def control_differences(rows: Sequence[Row]) -> list[Difference]:
    """Each model minus its control: the same architecture and recipe from random weights."""
    controls = {row.key: row for row in rows if row.kind == "random"}
    pairs = [(row, controls.get(row.key._replace(control=True))) for row in rows]
    return [subtract(f"{a.name} {MINUS} random weights", a, b) for a, b in pairs
            if a.kind == "model" and b is not None]  # fmt: skip


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
