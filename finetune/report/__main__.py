"""The report of a results file: `python -m finetune.report runs/results.jsonl`.

Writes report.md, .html, .tex, .csv and report-*.png. report.html is one file that opens from disk,
with pictures. report.csv has every metric of every run, and the command that repeats it.
"""

import base64
import re
import sys
from collections.abc import Iterable, Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import jinja2
import pandas as pd

from finetune.report.differences import MINUS, pair_differences
from finetune.report.figures import draw_figures
from finetune.report.runs import GROUPS, TaskGroup, build_groups
from finetune.report.tables import Table, group_tables, verdicts
from finetune.results import RUN_KEY, read_results
from finetune.settings import normalize_paths
from train.atomic_dir import check_writable, report_full_disk
from train.command_line import run_command
from train.settings import InputError
from train.tables import escape_cell, markdown_table

TEMPLATES = Path(__file__).parent / "templates"
CSV_FIELDS = {*RUN_KEY, "status", "error", "collapsed", "metrics", "test_metrics"}
CSV_FIELDS |= {"loss", "seconds", "command"}
LATEX_HEAD = r"% needs \usepackage{booktabs} and \usepackage[T1]{fontenc}"


@dataclass(frozen=True)
class ReportSettings:
    """Tables and figures of a results file: python -m finetune.report RESULTS [--pair "[A, B]"]."""

    results: str
    """File that finetune/glue.py or finetune/grid.py wrote; needs no flag as first argument."""
    output: str | None = None
    """Folder for the report; null means the folder of the results."""
    pair: list[str] | None = None
    """Two models to compare, as [A, B] for A - B, each a path or short name of the report; null
    means the one RoFormer and the one BERT."""

    def __post_init__(self) -> None:
        if self.pair is not None and (len(self.pair) != 2 or len(set(self.pair)) != 2):
            raise InputError(f'pair must be two models, got {self.pair}; write --pair "[A, B]"')
        normalize_paths(self, "pair")


def main(settings: ReportSettings) -> str:
    """Print the report as Markdown and write it in all its forms.

    Raises:
        InputError: There are no results, the pair is not among them, or the output is not writable.
    """
    groups = build_groups(read_results(settings.results))
    if not groups:
        raise InputError(
            f"results must hold a complete line, got {settings.results}; make a run first"
        )
    pair = settings.pair
    if pair is not None:
        runs = pd.concat([group.fine_tuned() for group in groups])
        short_names = dict(zip(runs["model"], runs["short_name"]))
        given, pair = pair, [short_names.get(x, x) for x in pair]
        if len(set(pair) & set(short_names.values())) != 2:
            raise InputError(
                f"pair must name two models of the results, got {', '.join(given)}; "
                f"they have {', '.join(sorted(set(short_names.values())))}"
            )
    folder = Path(settings.output or Path(settings.results).parent)
    check_writable(folder, "output")
    folder.mkdir(parents=True, exist_ok=True)
    with report_full_disk(folder, "output"):
        text = write_report(groups, pair, folder)
    print(text)
    print(f"Written to {folder}: report.html, .md, .tex; report.csv with the command of each run")
    return text


def write_report(groups: Sequence[TaskGroup], pair: Sequence[str] | None, folder: Path) -> str:
    """Write the report in all its forms; returns it as Markdown.

    `pair` is that of `pair_differences`.
    """
    sections = []
    for group in groups:
        differences, reason = pair_differences(group, pair)
        section: dict[str, Any] = {"name": group.name, "title": GROUPS[group.name]}
        section["sentences"] = [*filter(None, [reason]), *verdicts(group, differences)]
        section["tables"] = group_tables(group, differences)
        section["pictures"] = draw_figures(group, differences, folder)
        sections.append(section)
    environment = jinja2.Environment(
        loader=jinja2.FileSystemLoader(TEMPLATES),
        autoescape=jinja2.select_autoescape(["html.j2"]),
        undefined=jinja2.StrictUndefined,
        trim_blocks=True,
        lstrip_blocks=True,
    )
    environment.filters["markdown_table"] = lambda frame: markdown_table(
        frame.rename(columns=escape_cell).map(escape_cell)
    )
    environment.filters["base64"] = lambda picture: base64.b64encode(
        (folder / picture).read_bytes()
    ).decode()
    tables = [table for section in sections for table in section["tables"]]
    shown = " ".join(f"{table.title} {table.frame.to_csv()}" for table in tables)
    text = {
        suffix: environment.get_template(f"report.{suffix}.j2").render(
            sections=sections, shown=shown
        )
        for suffix in ("md", "html")
    }
    tex = latex_tables(tables)
    for suffix, content in {**text, "tex": tex, "csv": csv_report(groups)}.items():
        (folder / f"report.{suffix}").write_text(content, encoding="utf-8")
    return text["md"]


def latex_tables(tables: Iterable[Table]) -> str:
    """The tables for a paper, by pandas' writer."""
    texts = []
    for table in tables:
        columns = "l" + "r" * (len(table.frame.columns) - 1)
        options = {"index": False, "escape": True, "column_format": columns}
        caption = re.sub(r"([_%&#$])", r"\\\1", table.title)
        texts.append(table.frame.to_latex(**options, caption=caption))
    text = "\n".join([LATEX_HEAD, *texts]).replace(MINUS, "$-$")
    return re.sub(r"(?<![\w{])-(?=\d)", "$-$", text)


def csv_report(groups: Sequence[TaskGroup]) -> str:
    """One line for each run: what its result says of it, every metric of every split, its command.

    Beside the fields of a result it has the report's name of the row, `configuration`.
    """
    runs = pd.concat([group.recorded() for group in groups])
    fields = pd.json_normalize(runs["result"].tolist(), sep=" ")
    columns = [name for name in fields if name.split(" ")[0] in CSV_FIELDS]
    table = runs[["group", "configuration", "run_id"]].reset_index(drop=True)
    return table.join(fields[columns]).to_csv(index=False)


if __name__ == "__main__":
    flags = sys.argv[1:]
    is_path = flags and not flags[0].startswith("-")
    run_command(main, ReportSettings, ["--results", *flags] if is_path else flags)
