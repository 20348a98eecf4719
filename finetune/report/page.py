"""The report as one HTML page that opens from disk: no script, nothing loaded from elsewhere.

Every number of a table links to the runs it was computed from, each with the command that made it.
"""

import re
import sys
from collections.abc import Iterable, Sequence
from dataclasses import dataclass, field
from html import escape
from itertools import zip_longest

import numpy as np
from numpy.typing import NDArray
from sklearn.metrics import confusion_matrix

from finetune.report.cells import Cell, Line, run_id
from finetune.report.differences import MINUS
from finetune.report.tables import GROUPS, METRIC_NAMES, Table
from finetune.results import prediction_file, read_predictions
from train.settings import InputError

STYLE = """
:root { color-scheme: light dark; --ink: #1b1f24; --faint: #59636e; --line: #d1d9e0;
  --page: #ffffff; --shade: #f6f8fa; --link: #0a58ca; --hue: #0072b2; }
@media (prefers-color-scheme: dark) { :root { --ink: #e6edf3; --faint: #9aa5b1; --line: #3a424c;
  --page: #0d1117; --shade: #161b22; --link: #79b8ff; --hue: #3b9ddb; } }
* { box-sizing: border-box; }
body { margin: 0 auto; padding: 1rem clamp(.8rem, 3vw, 2.5rem) 4rem; max-width: 100rem;
  background: var(--page); color: var(--ink); font: 16px/1.5 system-ui, sans-serif; }
h1 { margin: .5rem 0 0; font-size: 1.8rem; } h2 { margin: 2.5rem 0 .5rem; font-size: 1.4rem; }
h3 { margin: 2rem 0 .4rem; font-size: 1.1rem; }
p, li { max-width: 48rem; overflow-wrap: anywhere; } nav li { display: inline; margin-right: 1rem; }
nav ul { padding: 0; } a { color: var(--link); }
table a { text-decoration: none; } table a:hover, table a:focus { text-decoration: underline; }
.scroll { overflow-x: auto; margin: .8rem 0; max-width: 100%; }
table { border-collapse: separate; border-spacing: 0; font-size: .8125rem;
  font-variant-numeric: tabular-nums; }
caption { text-align: left; font-weight: 600; padding: .3rem 0; }
th, td { padding: .35rem .5rem; border-top: 1px solid var(--line); text-align: right;
  vertical-align: top; }
thead th { background: var(--shade); vertical-align: bottom; }
thead th:first-child, .words { text-align: left; } tbody th { font-weight: 500; }
.first th:first-child { position: sticky; left: 0; background: var(--page); min-width: 9rem; }
.first thead th:first-child { background: var(--shade); }
.runs th, .runs td { text-align: left; white-space: nowrap; }
td small { display: block; color: var(--faint); }
code { font: .8rem/1.4 ui-monospace, monospace; } :target { background: var(--shade); }
tr:target > * { background: var(--shade); } figure { margin: 1.2rem 0; }
figcaption { color: var(--faint); font-size: .875rem; max-width: 48rem; }
svg { display: block; height: auto; }
svg * { stroke-linejoin: round; stroke-linecap: butt; }
.matrices { display: flex; flex-wrap: wrap; gap: .5rem 2.5rem; align-items: start; }
.matrices > div { max-width: 100%; overflow-x: auto; }
.matrices td { background: color-mix(in srgb, var(--hue) calc(var(--share) * 60%), transparent); }
summary { cursor: pointer; padding: .3rem 0; }
""".strip()


@dataclass(frozen=True)
class Entry:
    """One cell in print.

    Attributes:
        text: What stands there.
        link: Id of what it was computed from, in the page.
        small: What is added where there is room.
    """

    text: str
    link: str = ""
    small: str = ""

    @property
    def side(self) -> str:
        """Class of its column: words stand on the left."""
        return "words" if self.text[:1].isalpha() else ""


@dataclass(frozen=True)
class Grid:
    """A table in print, and what has to be said of it."""

    title: str
    heads: list[str]
    rows: list[list[Entry]]
    remarks: list[str] = field(default_factory=list)


@dataclass(frozen=True)
class Picture:
    """A figure: the stem of its file, what it shows, and itself as an SVG document."""

    name: str
    caption: str
    svg: str


@dataclass(frozen=True)
class Section:
    """Tables and figures under one heading."""

    anchor: str
    title: str
    grids: list[Grid]
    pictures: list[Picture] = field(default_factory=list)


def page(
    title: str, sections: Sequence[Section], notes: Sequence[str], tables: Sequence[Table],
    results: str,
) -> str:  # fmt: skip
    """The whole document.

    Args:
        title: Of the page.
        sections: Tables and figures.
        notes: How to read them.
        tables: What they were made from: the runs are listed.
        results: File of the lines, beside which the predictions are.
    """
    parts = [(s.anchor, s.title, _section(s)) for s in sections]
    parts.append(("notes", "Notes", tag("ul", *(tag("li", escape(note)) for note in notes))))
    matrices = "".join(_matrices(table, results) for table in tables)
    if matrices:
        explained = tag("p", CONFUSION)
        parts.append(("confusion", "Confusion matrices", explained + matrices))
    parts.append(("runs", "Runs", "".join(_runs(table) for table in tables)))
    links = (tag("li", tag("a", escape(name), href=f"#{anchor}")) for anchor, name, _ in parts)
    nav = tag("nav", tag("ul", *links), aria_label="Contents")
    shown = (tag("section", tag("h2", escape(name)), x, id=anchor) for anchor, name, x in parts)
    header = tag("header", tag("h1", escape(title)), nav)
    head = HEAD.format(title=escape(title), style=STYLE)
    return "\n".join([head, "<body>", header, tag("main", *shown), "</body>", "</html>", ""])


HEAD = """<!DOCTYPE html>
<html lang="en">
<head>
<meta charset="utf-8">
<meta name="viewport" content="width=device-width, initial-scale=1">
<meta http-equiv="Content-Security-Policy" content="default-src 'none'; style-src 'unsafe-inline'">
<title>{title}</title>
<style>
{style}
</style>
</head>"""
CONFUSION = (
    "Rows: the class of the example; columns: the class predicted; counts summed over the seeds "
    "whose predictions are kept. The shade is the share of the row."
)


def tag(name: str, *content: str, **attributes: str) -> str:
    """An element around markup; values of attributes are escaped, `class_` is class."""
    pairs = ((key.rstrip("_").replace("_", "-"), value) for key, value in attributes.items())
    inside = "".join(f' {key}="{escape(value)}"' for key, value in pairs if value)
    return f"<{name}{inside}>{''.join(content)}</{name}>"


def table_tag(
    title: str, heads: Sequence[str], rows: Iterable[str], kind: str, sides: Iterable[str] = ()
) -> str:
    """A table that scrolls inside its container; rows are markup, sides classes of the heads."""
    pairs = zip_longest(heads, sides, fillvalue="")
    head = tag("tr", *(tag("th", escape(x), scope="col", class_=side) for x, side in pairs))
    parts = tag("caption", escape(title)), tag("thead", head), tag("tbody", *rows)
    table = tag("table", *parts, class_=kind)
    return tag("div", table, class_="scroll", role="region", aria_label=title, tabindex="0") + "\n"


def _section(section: Section) -> str:
    parts = []
    for grid in section.grids:
        rows = [tag("tr", _entry(x[0], "th", "row"), *map(_entry, x[1:])) for x in grid.rows]
        if rows:
            sides = [entry.side for entry in grid.rows[0]]
            parts.append(table_tag(grid.title, grid.heads, rows, "first", sides))
        parts += [tag("p", escape(remark)) for remark in grid.remarks]
    for picture in section.pictures:
        label = picture.caption
        drawing = tag("div", inline_svg(picture), class_="scroll", tabindex="0", role="group",
                      aria_label=label)  # fmt: skip
        parts.append(tag("figure", drawing, tag("figcaption", escape(label))) + "\n")
    return "".join(parts)


def _entry(entry: Entry, element: str = "td", scope: str = "") -> str:
    # a number stays with its spread and exponent; the two of MNLI may stand below each other
    together = re.compile(r" ± | of | at (?=\d)|\[.*?\]")
    text = together.sub(lambda x: x[0].replace(" ", "\N{NO-BREAK SPACE}"), entry.text)
    text = re.sub(r"(?<=\de-)(?=\d)", "\N{WORD JOINER}", escape(text))
    text = re.sub(r"(?<=\d)/(?=\d)", "/<wbr>", text)
    text = tag("a", text, href=f"#{entry.link}") if entry.link else text
    small = tag("small", escape(entry.small)) if entry.small else ""
    return tag(element, text, small, scope=scope, class_=entry.side)


def inline_svg(picture: Picture) -> str:
    """The drawing for the inside of a page: ids that no other drawing has, no prolog."""
    svg = picture.svg[picture.svg.index("<svg") :].strip()
    svg = re.sub(r"<metadata>.*?</metadata>|<style.*?</style>|<!--.*?-->", "", svg, flags=re.DOTALL)
    svg = re.sub(r'\bid="', f'id="{picture.name}-', svg)
    svg = re.sub(r'(href="#|url\(#)', rf"\g<1>{picture.name}-", svg)
    size = re.compile(r'width="([\d.]+pt)" height="[\d.]+pt"')
    svg = size.sub(r'style="width: \1"', svg, count=1)
    shown = f'<svg role="img" aria-label="{escape(picture.caption)}"'
    return svg.replace("<svg", shown, 1)


def _runs(table: Table) -> str:
    parts = []
    for row in table.rows:
        if row.kind == "majority":
            continue
        parts.append(tag("h3", escape(row.name), id=row.anchor))
        if row.key.rates:
            chosen = [tag("a", escape(table.labels[label]), href=f"#{cell.anchor}")
                      for label, cell in row.cells.items()]  # fmt: skip
            parts.append(tag("p", "The runs of the rates chosen: ", ", ".join(chosen)))
            continue
        for label, cell in row.cells.items():
            runs = table_tag(table.labels[label], RUN_HEADS, map(_run, cell.runs), "runs")
            parts.append(tag("div", runs, id=cell.anchor))
    pairs = {}
    for difference in (*table.pairs, *table.controls):
        names = difference.first.name, difference.second.name
        for label, _, places in difference.parts():
            links = [tag("a", escape(name), href=f"#{x}") for name, x in zip(names, places)]
            text = escape(table.labels.get(label, label)) + ": " + f" {MINUS} ".join(links)
            pairs["-".join(places)] = tag("li", text, id="-".join(places))
    parts += [tag("h3", "Differences"), tag("ul", *pairs.values())] * bool(pairs)
    return "".join(parts)


RUN_HEADS = ("seed", "outcome", "scores", "loss", "seconds", "machine", "versions", "command")


def _run(run: Line) -> str:
    processes = run.get("processes", 1)
    machine = [run.get("precision"), run.get("device"), f"{processes} processes" * (processes > 1)]
    values = [
        "collapsed" if run["collapsed"] else run["status"],
        run_scores(run) or run.get("error", ""),
        f"{run['loss']:.3f}" if run.get("loss") is not None else "",
        f"{run['seconds']:.0f}" if run.get("seconds") is not None else "",
        ", ".join(filter(None, machine)),
        ", ".join(f"{name} {version}" for name, version in run.get("versions", {}).items()),
    ]
    cells = [tag("td", escape(str(value))) for value in values]
    cells.append(tag("td", tag("code", escape(run.get("command", "none was kept")))))
    return tag(
        "tr", tag("th", escape(str(run["seed"])), scope="row"), *cells, id=f"run-{run_id(run)}"
    )


def run_scores(run: Line) -> str:
    """All metrics of a run in words; "" when it has none."""
    parts = []
    for split, metrics in (run.get("metrics") or {}).items():
        words = (f"{METRIC_NAMES.get(name, name)} {100 * x:.1f}" for name, x in metrics.items())
        parts.append(f"{split.removeprefix('validation').strip('_')} {', '.join(words)}".strip())
    return "; ".join(parts)


def _matrices(table: Table, results: str) -> str:
    rows = []
    for row in table.rows:
        if row.kind != "majority" and not row.key.rates:
            cells = [(table.labels[x], cell) for x, cell in row.cells.items() if cell.task.labels]
            inner = "".join(_matrix(title, cell, results) for title, cell in cells)
            if inner:
                blocks = tag("div", inner, class_="matrices")
                rows.append(tag("details", tag("summary", escape(row.name)), blocks))
    return tag("h3", escape(GROUPS[table.group])) + "".join(rows) if rows else ""


def _matrix(title: str, cell: Cell, results: str) -> str:
    parts, names = [], cell.task.labels or ()
    for split in cell.task.validation_splits:
        counts, runs = confusion(cell, split, results)
        shares = counts / np.maximum(1, counts.sum(axis=1, keepdims=True))
        lines = []
        for name, numbers, tints in zip(names, counts.tolist(), shares.tolist()):
            boxes = [tag("td", f"{n}", style=f"--share: {x:.3f}") for n, x in zip(numbers, tints)]
            lines.append(tag("tr", tag("th", escape(name), scope="row"), *boxes))
        part = split.removeprefix("validation").replace("_", " ")
        caption = f"{title.split(',')[0]}{part}, {runs} of {len(cell.runs)} seeds"
        parts.append(table_tag(caption, ("", *names), lines, "") if runs else "")
    return "".join(parts)


def confusion(cell: Cell, split: str, results: str) -> tuple[NDArray[np.int64], int]:
    """Counts [true class, predicted class] over the runs whose predictions are there.

    Args:
        cell: Runs of a classification.
        split: Validation split.
        results: File of the lines.

    Returns:
        The counts, and the number of runs.
    """
    classes, runs = cell.task.num_labels, 0
    counts = np.zeros((classes, classes), dtype=np.int64)
    for run in cell.scored.values():
        file = prediction_file(results, run, split)
        if file.is_file():
            try:
                labels, logits = read_predictions(file)
            except InputError as error:
                print(f"warning: {error}", file=sys.stderr)
                continue
            answers = logits.argmax(axis=1)
            counts += confusion_matrix(labels, answers, labels=range(classes))
            runs += 1
    return counts, runs
