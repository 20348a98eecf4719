"""Lines of results to tables: what a row is, which tasks stand together, what is averaged.

GLUE, GLUE tasks with rows missing and the demo tasks are never in one table.
"""

import sys
from collections import Counter, defaultdict
from collections.abc import Iterable, Mapping, Sequence
from dataclasses import dataclass
from typing import Any

import numpy as np

from finetune.report.cells import Cell, Line, Row, RowKey, number
from finetune.report.differences import Difference, control_differences, pair_differences
from finetune.results import RECIPE_FIELDS, RUN_KEY
from finetune.tasks import TASKS
from train.loop.atomic_dir import model_name
from train.settings import require

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
        splits = [table.get(split) or {} for table in tables for split in task.validation_splits]
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
    starts, data, order = mnli_names(placed), data_names(placed), list(TASKS)
    for line, changed in zip(placed, input_names(placed)):
        words = [starts[line["mnli"]], data.get((line["label"], line["glue_dir"]), ""), *changed]
        line["start"] = ", ".join(filter(None, words))
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
    """The name of each model; the whole path where two have one name."""
    short = {model: model_name(model) for model in models}
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
    by_task = recipe_by_task(lines)
    own = own_recipes(lines, by_task)
    titles = {line["label"]: column_title(line) for line in lines}
    labels = {label: ", ".join([title, *own[label]]) for label, title in titles.items()}
    rows = model_rows(lines, names, by_task)
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


def recipe_by_task(lines: Sequence[Line]) -> set[int]:
    """Places of `RECIPE_FIELDS` where tasks differ and no task has two values.

    A protocol may give a task more epochs than the others. What all runs of a column share does
    not tell rows apart.
    """
    values: dict[int, dict[str, set[Any]]] = defaultdict(lambda: defaultdict(set))
    for line in lines:
        for place, name in enumerate(RECIPE_FIELDS):
            values[place][line["label"]].add(line[name])
    return {
        place
        for place, tasks in values.items()
        if len(set.union(*tasks.values())) > 1 and all(len(found) == 1 for found in tasks.values())
    }


def own_recipes(lines: Sequence[Line], by_task: set[int]) -> dict[str, list[str]]:
    """Of each label, in words, its values `by_task` that are not the commonest."""
    recipes = {line["label"]: [line[name] for name in RECIPE_FIELDS] for line in lines}
    words: dict[str, list[str]] = {label: [] for label in recipes}
    for place in sorted(by_task):
        usual = Counter(recipe[place] for recipe in recipes.values()).most_common(1)[0][0]
        for label, recipe in recipes.items():
            if recipe[place] != usual:
                words[label].append(RECIPE_WORDS[place].format(number(recipe[place])))
    return words


def model_rows(lines: Sequence[Line], names: dict[str, str], by_task: set[int]) -> list[Row]:
    """A row for each model and recipe, and one for the best of its rates.

    Pretrained models come first; of a model the row with most tasks, rates as they grow, the best
    of them, starts from MNLI.
    """
    runs: dict[RowKey, dict[str, list[Line]]] = defaultdict(lambda: defaultdict(list))
    for line in lines:
        side = line["random_weights"], line["model"], line["tokenizer"] or ""
        recipe = (None if i in by_task else line[name] for i, name in enumerate(RECIPE_FIELDS))
        key = RowKey(*side, line["start"], "", tuple(recipe))
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
    others = [name for name in RUN_KEY if name != "mnli"]
    several = len({tuple(line[name] for name in others) for line in started}) < len(started)
    folders = {line["mnli"] for line in started}
    return {None: ""} | {x: f"started from {x if several else source}" for x in folders}


def data_names(lines: Sequence[Line]) -> dict[tuple[str, str | None], str]:
    """What to call the data of a task whose folders must be told apart, by label and folder.

    Those are the folders of a label under which one run was made with several of them.
    """
    others = [name for name in RUN_KEY if name != "glue_dir"]
    folders: dict[tuple, set[str | None]] = defaultdict(set)
    for line in lines:
        folders[line["label"], *(line[name] for name in others)].add(line["glue_dir"])
    several = {label for (label, *_), found in folders.items() if len(found) > 1}
    places = {(x["label"], x["glue_dir"]) for x in lines if x["label"] in several}
    return {place: f"data of {place[1] or 'the hub'}" for place in places}


def input_names(lines: Sequence[Line]) -> list[list[str]]:
    """Of each line what to call its weights, data and precision, where the file has several.

    Weights change in place between runs: those of what was there before are not seeds of what is
    there now. Data of one label that differ are different data, wherever they are.
    """
    found: dict[tuple[str, tuple], set[str]] = defaultdict(set)
    places: list[dict[str, tuple]] = []
    for line in lines:
        seed = line["seed"] if line["mnli"] else None  # each has a model of MNLI of its own
        model = line["model"], line["random_weights"], line["mnli"], seed
        places.append({"weights": model, "data": (line["label"],), "precision": ()})
        for name, where in places[-1].items():
            if line.get(name) is not None:
                found[name, where].add(line[name])
    return [
        [f"{name} {line[name][:8]}" for name, where in both.items()
         if len(found[name, where]) > 1 and line.get(name) is not None]
        for line, both in zip(lines, places)
    ]  # fmt: skip


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
