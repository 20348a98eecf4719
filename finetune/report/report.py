"""results.jsonl to tables and figures: `python -m finetune.report results.jsonl`.

Writes report.md, .tex, .json, .csv and .html and report-*.png. What is in a table is decided in
rows.py, what a difference is in comparison.py; this file puts both into words.
"""

import csv
import io
import json
import re
from collections.abc import Iterable, Mapping, Sequence
from dataclasses import asdict, dataclass
from pathlib import Path
from typing import Any

import numpy as np
from numpy.typing import NDArray

from finetune.report.cells import Cell, Line, Row, number, run_id
from finetune.report.differences import MINUS, Difference
from finetune.report.figures import draw
from finetune.report.page import Entry, Grid, Section, page, run_scores
from finetune.report.statistics import Comparison
from finetune.report.tables import GROUPS, Table, build_tables, column_title, without_rates
from finetune.report.verdict import verdicts
from finetune.results import RECIPE_FIELDS, read_results
from train.settings import InputError, require

DASH = "–"  # noqa: RUF001 an empty cell, as tables have it

NOTES = (
    "Scores are those of the validation split (GLUE's development set) after the last epoch. "
    "Columns show the headline metric, the RoFormer paper's (Matthews for CoLA); report.json and "
    "report.csv have all metrics. MNLI is matched/mismatched.",
    "A run that collapsed gives every example the same answer; its score counts. A run that "
    "diverged or failed has no score: the mean is over the rest, as '4 of 5' says.",
    "Averages are as GLUE defines them: the metrics of a task are averaged first (F1 and accuracy "
    "of MRPC and QQP, Pearson and Spearman of STS-B, both splits of MNLI), then the tasks; AX does "
    "not count. Only all nine official tasks make the GLUE average. The ± of an average is over "
    "seeds and stands where all tasks have the same ones.",
    "The majority baseline always says the commonest training class, or for a regression its mean, "
    "which correlates 0.",
    "Nothing is selected by the split that is reported, except in rows 'best of ... rates': there "
    "the rate of each task is the one with the best mean over seeds on that very split, which is "
    "what the paper did; such a score is too good. Only rates with the most scored seeds compete.",
    "A difference is taken seed by seed between runs of the same recipe. Intervals are those of "
    "Student's t, p-values those of the paired t-test. p (Holm) is corrected over the tasks of one "
    "comparison. The effect size is Hedges' g_z: mean over standard deviation of the differences, "
    "corrected for few seeds; report.json has Cohen's d_z too.",
    "All of this is about the seeds of fine-tuning, with the two checkpoints and the validation "
    "examples as they are. Another pretraining run or other examples may change more than a seed. "
    "Only a difference 'over ... pretraining seeds' takes those for its seeds.",
)

PAPER_HEADS = ("MRPC, F1", "SST-2, accuracy", "QNLI, accuracy", "STS-B, Spearman", "QQP, F1",
               "MNLI m/mm, accuracy")  # fmt: skip
PAPER = {
    "BERT, as printed": ("test server", "88.9", "93.5", "90.5", "85.8", "71.2", "84.6/83.4"),
    "RoFormer, as printed": ("validation", "89.5", "90.7", "88.0", "87.0", "86.4", "80.2/79.8"),
}
PAPER_REMARK = (
    "The two printed rows are not comparable with each other, nor are ours with either: BERT's is "
    "the fully trained model on the test server, RoFormer's the validation split after 100,000 "
    "steps of pretraining with the best of four rates."
)


@dataclass(frozen=True)
class ReportSettings:
    """Tables and figures from a results file."""

    results: str
    """File that finetune/glue.py or finetune/grid.py wrote."""
    output: str | None = None
    """Folder for the report; null means the results' own."""
    pair: list[str] | None = None
    """Two models to compare, as [A, B] for A - B; null means the one RoFormer and the one BERT."""

    def __post_init__(self) -> None:
        two = self.pair is None or len(set(self.pair)) == 2
        require(two, "pair", "must be two models", self.pair, 'write --pair "[A, B]"')
        file = self.output is not None and Path(self.output).is_file()
        require(not file, "output", "must name a folder", f"the file {self.output}", "rename it")


def main(settings: ReportSettings) -> str:
    """Print the tables and write every form of the report.

    Returns:
        The Markdown tables.

    Raises:
        InputError: There are no results, or the pair is not among them.
    """
    tables = build_tables(read_results(settings.results), settings.pair)
    found = settings.results
    require(bool(tables), "results", "must hold a complete line", found, "make a run first")
    folder = Path(settings.output or Path(settings.results).parent)
    try:
        folder.mkdir(parents=True, exist_ok=True)
        sections = sections_of(tables, folder)
        grids = [grid for section in sections for grid in section.grids if grid.rows]
        records = as_json(tables)
        files = {
            "md": markdown_file(sections, tables),
            "tex": "\n".join([LATEX_HEAD, *map(latex, grids)]),
            "json": json.dumps(records, indent=1, allow_nan=False) + "\n",
            "csv": as_csv([*records["scores"], *records["differences"]]),
            "html": page("Fine-tuning report", sections, NOTES, tables, settings.results),
        }
        for suffix, content in files.items():
            (folder / f"report.{suffix}").write_text(content, encoding="utf-8")
    except OSError as error:
        raise InputError(f"output must be writable, got {error}; choose another") from error
    text = "\n".join(markdown(section) for section in sections)
    print(
        f"{text}\nAll of it, with figures, notes and the command of each run: {folder}/report.html"
    )
    print("Beside it: report.md, .tex, .json, .csv and report-*.png")
    return text


def sections_of(tables: Sequence[Table], folder: Path) -> list[Section]:
    """Each group of tasks, and the paper's table where there are official scores beside it."""
    sections = []
    for table in tables:
        grids = [score_grid(table), *pair_grid(table), *control_grid(table), *trouble_grid(table)]
        title = GROUPS[table.group]
        sections.append(Section(table.group, title, grids, draw(table, folder)))
    official = [table for table in tables if table.group == "official"]
    return sections + [Section("paper", "The paper's table", [paper_grid(x)]) for x in official]


def score_grid(table: Table) -> Grid:
    """The main table."""
    several = len(table.labels) > 1
    heads = ["model", *table.labels.values()]
    heads += [table.average_name(table.labels)] * several
    rows = []
    for row in table.rows:
        cells = [score_entry(row, row.cells.get(label)) for label in table.labels]
        cells += [average_entry(row, table)] * several
        rows.append([Entry(row.name, "" if row.kind == "majority" else row.anchor), *cells])
    remark = "Mean ± sample standard deviation over seeds (their number), x 100, validation split."
    remark += f" The last column is the mean over {', '.join(table.labels)}." * several
    return Grid(f"{GROUPS[table.group]}: scores", heads, rows, [remark])


def score_entry(row: Row, cell: Cell | None) -> Entry:
    """Mean ± deviation over seeds (seeds), for each validation split."""
    if cell is None:
        return Entry(DASH)
    splits = [cell.values(split, cell.task.headline) for split in cell.task.validation_splits]
    if row.kind == "majority":
        return Entry("/".join(f"{x[0]:.1f}" for x in splits), f"run-{run_id(cell.runs[0])}")
    text = "/".join(spread(x) for x in splits) if cell.scored else DASH
    text += f" ({count(cell)})" + f" at {number(cell.rate)}" * bool(row.key.rates)
    median = "/".join(f"{np.median(x):.1f}" for x in splits) if len(cell.scored) > 1 else ""
    return Entry(text, cell.anchor, f"median {median}" if median else "")


def spread(values: NDArray[np.float64]) -> str:
    """Mean ± sample standard deviation; without the latter for a single value."""
    return f"{values.mean():.1f}" + (f" ± {values.std(ddof=1):.1f}" if len(values) > 1 else "")


def count(cell: Cell) -> str:
    """Number of seeds, and what became of those that are not like others."""
    tally = cell.tally()
    runs, scored = tally["runs"], tally["scored"]
    others = ", ".join(f"{tally[x]} {x}" for x in ("collapsed", "diverged", "failed") if tally[x])
    return (f"{scored}" if scored == runs else f"{scored} of {runs}") + f"; {others}" * bool(others)


def average_entry(row: Row, table: Table) -> Entry:
    """The average; its spread where all tasks have the same seeds."""
    average = row.average(table.labels)
    if average is None:
        return Entry(DASH)
    mean, by_seed = average
    if row.kind == "majority":
        return Entry(f"{mean:.1f}", "notes")
    if any(len(cell.scored) != len(by_seed) for cell in row.cells.values()):
        return Entry(f"{mean:.1f}", row.anchor)
    return Entry(f"{spread(np.array(list(by_seed.values())))} ({len(by_seed)})", row.anchor)


def pair_grid(table: Table) -> list[Grid]:
    """RoFormer - BERT, a line for each task and the average; no column that nothing fills."""
    if not table.pairs:
        return [Grid("", [], [], [table.remark])]
    rows = []
    for difference in table.pairs:
        for label, comparison, places in difference.parts():
            name = table.labels.get(label, table.average_name(difference.tasks))
            words = [name, *comparison_words(comparison)]
            link = "-".join(places)
            rows.append([Entry(difference.title), *(Entry(word or DASH, link) for word in words)])
    kept = [i for i in range(len(PAIR_HEADS)) if any(row[i].text != DASH for row in rows)]
    why = {False: "no seed with a score on both sides", True: "not run with all of them"}
    missing = [f"{x.title}, {label}: {why[bool(x.over)]}."
               for x in table.pairs for label in x.missing]  # fmt: skip
    heads, rows = [PAIR_HEADS[i] for i in kept], [[row[i] for i in kept] for row in rows]
    remarks = [*untested(table.pairs), *missing, *verdicts(table)]
    return [Grid("Differences, seed by seed", heads, rows, remarks)]


PAIR_HEADS = ("difference", "task", "seeds", "mean", "median", "95 % t interval", "p (paired t)",
              "p (Holm)", "effect size g_z")  # fmt: skip


def comparison_words(comparison: Comparison) -> list[str]:
    """The columns of a difference from `seeds` on; "" where there is nothing to say."""
    pairs, effect = len(comparison.differences), comparison.hedges_gz
    return [
        f"{pairs} of {comparison.tried}" if pairs < comparison.tried else f"{pairs}",
        f"{comparison.mean:+.2f}",
        f"{comparison.median:+.2f}" if pairs > 1 else "",
        interval(comparison.t_interval),
        p_text(comparison.p),
        p_text(comparison.p_holm),
        "" if effect is None else f"{effect:+.2f}",
    ]


def untested(differences: Iterable[Difference]) -> list[str]:
    """Where there is no interval and no test, and why."""
    parts = [(f"{d.title}, {label}", c) for d in differences for label, c, _ in d.parts()]
    remarks = []
    for why in dict.fromkeys(c.why for _, c in parts if c.why):
        places = [place for place, c in parts if c.why == why]
        listed = "" if len(places) == len(parts) else f": {'; '.join(places)}"
        remarks.append(f"No interval and no test where {why}{listed}.")
    return remarks


def interval(values: tuple[float, float] | None) -> str:
    """[low, high], or nothing."""
    return "" if values is None else f"[{values[0]:+.2f}, {values[1]:+.2f}]"


def p_text(p: float | None) -> str:
    """Three digits, or nothing."""
    if p is None:
        return ""
    return "< 0.001" if p < 0.0005 else f"{p:.3f}"


def control_grid(table: Table) -> list[Grid]:
    """Pretrained - random weights: the mean difference, its t interval and p-value."""
    if not table.controls:
        return []
    several = len(table.labels) > 1
    heads = ["difference", *table.labels.values()]
    heads += [table.average_name(table.labels)] * several
    rows = []
    for difference in table.controls:
        found = {label: (c, "-".join(places)) for label, c, places in difference.parts()}
        if difference.tasks.keys() != table.labels.keys():
            found.pop("average", None)
        keys = [*table.labels, *["average"] * several]
        entries = [control_entry(*found[key]) if key in found else Entry(DASH) for key in keys]
        rows.append([Entry(difference.title), *entries])
    remarks = ["Mean difference, [95 % t interval], p of the paired t-test."]
    remarks += untested(table.controls)
    return [Grid("Pretrained against random weights, seed by seed", heads, rows, remarks)]


def control_entry(comparison: Comparison, place: str) -> Entry:
    """A difference in one cell."""
    words = [f"{comparison.mean:+.1f}"]
    if comparison.t_interval and comparison.p is not None:
        low, high = comparison.t_interval
        words += [f"[{low:+.1f}, {high:+.1f}]", f"p {p_text(comparison.p)}"]
    return Entry(" ".join(words), place)


def trouble_grid(table: Table) -> list[Grid]:
    """The runs that collapsed, diverged or failed."""
    rows = []
    for name, run in table.troubles:
        what = "collapsed" if run["collapsed"] else run["status"]
        why = " ".join(str(run.get("error", "one answer for every example")).split())[:160]
        words = [name, table.labels[run["label"]], str(run["seed"]), what, why]
        rows.append([Entry(word, f"run-{run_id(run)}") for word in words])
    heads = ["model", "task", "seed", "outcome", "reason"]
    title = f"Runs that collapsed, diverged or failed: {len(rows)}"
    return [Grid(title, heads, rows)] if rows else []


def paper_grid(table: Table) -> Grid:
    """The paper's numbers and our pretrained models', each with its split."""
    rows = [[Entry(x) for x in (name, *values)] for name, values in PAPER.items()]
    cells = {label: cell for row in table.rows for label, cell in row.cells.items()}
    titles = {column_title(cell.runs[0]): label for label, cell in cells.items()}
    for row in (row for row in without_rates(table.rows) if row.kind == "model"):
        found = [row.cells.get(titles.get(head, "")) for head in PAPER_HEADS]
        if any(found):
            scores = [score_entry(row, cell) for cell in found]
            split = Entry("validation (development set)")
            rows.append([Entry(f"{row.name}, ours", row.anchor), split, *scores])
    heads = ["row", "split of its numbers", *PAPER_HEADS]
    title = "GLUE as printed by Su et al. 2021 (arXiv:2104.09864), and ours"
    return Grid(title, heads, rows, [PAPER_REMARK])


def markdown(section: Section) -> str:
    """Heading, tables, remarks."""
    parts = [f"### {section.title}"]
    for grid in section.grids:
        parts += [f"**{grid.title}**", pipe_table(grid)] if grid.rows else []
        parts += grid.remarks
    return "\n\n".join(parts) + "\n"


def markdown_file(sections: Sequence[Section], tables: Sequence[Table]) -> str:
    """Tables, figures, notes, and every run's command."""
    parts = []
    for section in sections:
        parts.append(markdown(section).strip())
        parts += [f"![{picture.caption}]({picture.name}.png)" for picture in section.pictures]
    parts += ["### Notes", "\n".join(f"- {note}" for note in NOTES), "### Commands"]
    parts.append("<details><summary>The command that made each run</summary>")
    for table in tables:
        for row in table.rows:
            if row.kind != "majority" and not row.key.rates:
                runs = [(label, run) for label, cell in row.cells.items() for run in cell.runs]
                lines = [shell_lines(label, run) for label, run in runs]
                head = [f"{row.name}; {GROUPS[table.group]}", "", "```sh"]
                parts.append("\n".join([*head, *lines, "```"]))
    return "\n\n".join([*parts, "</details>"]) + "\n"


def shell_lines(label: str, run: Line) -> str:
    """A run's command, under what came of it."""
    outcome = run_scores(run) or f"{run['status']}: {run.get('error', '')}"
    command = run.get("command", "# its line holds no command")
    return f"# {label}, seed {run['seed']}: {' '.join(outcome.split())}\n{command}"


def pipe_table(grid: Grid) -> str:
    """A Markdown table whose columns line up on a terminal."""
    plain = [grid.heads, *([entry.text for entry in row] for row in grid.rows)]
    lines = [
        [re.sub(r"([|*`]|<(?=\S))", r"\\\1", " ".join(text.split())) for text in line]
        for line in plain
    ]
    widths = [max(map(len, column)) for column in zip(*lines)]
    rule = [":" + "-" * (widths[0] + 1), *("-" * (width + 1) + ":" for width in widths[1:])]
    padded = [[line[0].ljust(widths[0]), *(x.rjust(w) for x, w in zip(line[1:], widths[1:]))]
              for line in lines]  # fmt: skip
    text = ["| " + " | ".join(line) + " |" for line in padded]
    return "\n".join([text[0], "|" + "|".join(rule) + "|", *text[1:]])


LATEX_HEAD = "% needs \\usepackage{booktabs,graphicx} and UTF-8"
LATEX_SIGNS = {
    "\\": r"\textbackslash{}", "&": r"\&", "%": r"\%", "$": r"\$", "#": r"\#", "_": r"\_",
    "{": r"\{", "}": r"\}", "~": r"\textasciitilde{}", "^": r"\textasciicircum{}",
    "<": r"$<$", ">": r"$>$", "[": "{[}", "|": r"\textbar{}", "±": r"$\pm$", MINUS: "$-$",
    DASH: "--",
}  # fmt: skip


def latex(grid: Grid) -> str:
    """A table for a paper, as wide as the text."""

    def line(texts: Iterable[str]) -> str:
        return " & ".join(escape_latex(text) for text in texts) + r" \\"

    return "\n".join(
        [
            r"\begin{table}",
            r"\centering",
            rf"\caption{{{escape_latex(' '.join([grid.title + '.', *grid.remarks]))}}}",
            r"\resizebox{\textwidth}{!}{%",
            rf"\begin{{tabular}}{{l{'r' * (len(grid.heads) - 1)}}}",
            r"\toprule",
            line(grid.heads),
            r"\midrule",
            *(line(entry.text for entry in row) for row in grid.rows),
            r"\bottomrule",
            r"\end{tabular}}",
            r"\end{table}",
            "",
        ]
    )


def escape_latex(text: str) -> str:
    """Text in which LaTeX sees no command; the hyphen before a number is its sign."""
    text = re.sub(r"(?<!\w)-(?=\d)", MINUS, text)
    return "".join(LATEX_SIGNS.get(sign, sign) for sign in text)


def as_json(tables: Sequence[Table]) -> dict[str, Any]:
    """Every metric of every seed, every difference, and the run behind each number."""
    groups = {
        table.group: {"title": GROUPS[table.group], "average": table.average_name(table.labels),
                      "average_over": list(table.labels), "no_difference": table.remark}
        for table in tables
    }  # fmt: skip
    cells = [cell for table in tables for row in table.rows for cell in row.cells.values()]
    fields = ("model", "task", "seed", "status", "collapsed", "error", "seconds", "command")
    return {
        "notes": NOTES,
        "groups": groups,
        "scores": [record for table in tables for record in score_records(table)],
        "differences": [record for table in tables for record in difference_records(table)],
        "paper": {"heads": PAPER_HEADS, "rows": PAPER, "remark": PAPER_REMARK},
        "runs": {run_id(x): {name: x.get(name) for name in fields} for c in cells for x in c.runs},
    }


def score_records(table: Table) -> Iterable[dict[str, Any]]:
    """For each row and task every metric of every split, then the two means that tables show."""
    for row in table.rows:
        side = {"model": row.key.model, "tokenizer": row.key.tokenizer, "mnli": row.key.mnli}
        head: dict[str, Any] = {"group": table.group, "kind": row.kind, "row": row.name, **side}
        head["selected_by_reported_split"] = bool(row.key.rates)
        for label, cell in row.cells.items():
            recipe = {name: cell.runs[0][name] for name in RECIPE_FIELDS}
            whole = {**head, "task": label, **recipe, **cell.tally()}
            whole["run_ids"] = [run_id(run) for run in cell.runs]
            for split, metric, seeds in metrics_of(cell):
                yield {**whole, "split": split, "metric": metric, **statistics(seeds)}
        average = row.average(table.labels)
        if average is not None and len(table.labels) > 1:
            name = table.average_name(table.labels)
            whole = {**statistics(average[1]), "mean": average[0]}
            yield {**head, "task": "average", "metric": name, **whole}


def metrics_of(cell: Cell) -> Iterable[tuple[str, str, dict[int, float]]]:
    """Split, metric, seed -> score."""
    for split in cell.task.validation_splits:
        for metric in cell.task.metrics:
            yield split, metric, dict(zip(cell.scored, cell.values(split, metric).tolist()))
    yield "all", "headline", cell.headlines
    yield "all", "mean of metrics", cell.glue_scores


def statistics(seeds: Mapping[int, float]) -> dict[str, Any]:
    """Mean, sample standard deviation and median over seeds, None where there are too few."""
    values = list(seeds.values())
    mean, median = (float(f(values)) if values else None for f in (np.mean, np.median))
    std = float(np.std(values, ddof=1)) if len(values) > 1 else None
    return {"mean": mean, "std": std, "median": median, "seeds": dict(seeds)}


def difference_records(table: Table) -> Iterable[dict[str, Any]]:
    """For each difference every task, then the average."""
    for kind, differences in (("pair", table.pairs), ("control", table.controls)):
        for difference in differences:
            models = {"model": difference.first.key.model, "minus": difference.second.key.model}
            head = {"group": table.group, "kind": kind, "row": difference.title, **models}
            average = table.average_name(difference.tasks)
            for label, comparison, _ in difference.parts():
                values = {**asdict(comparison), "seeds": comparison.differences}
                low, high = values.pop("t_interval") or (None, None)
                values |= {"t_interval_low": low, "t_interval_high": high}
                del values["differences"]
                name = average if label == "average" else "headline"
                yield {**head, "task": label, "metric": name, **values}


def as_csv(records: Sequence[Mapping[str, Any]]) -> str:
    """The records of report.json in one table."""
    stream = io.StringIO()
    heads = list(dict.fromkeys(name for record in records for name in record))
    writer = csv.DictWriter(stream, heads, restval="", lineterminator="\n")
    writer.writeheader()
    for record in records:
        seeds = " ".join(f"{seed}:{score:.6g}" for seed, score in record["seeds"].items())
        writer.writerow({**record, "seeds": seeds, "run_ids": " ".join(record.get("run_ids", []))})
    return stream.getvalue()
