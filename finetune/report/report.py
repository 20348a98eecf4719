"""The report of a results file: `python -m finetune.report results.jsonl`.

Writes report.md, .tex, .json, .csv, .html and report-*.png. report.html is one file that opens from
disk, with pictures and the command of every run. report.json and report.csv have every metric of
every seed.
"""

import base64
import json
import re
from collections.abc import Iterable, Sequence
from dataclasses import asdict, dataclass
from pathlib import Path
from typing import Any

import jinja2
import numpy as np
import pandas as pd

from finetune.report.differences import MINUS, Difference, control_gains, pair_differences
from finetune.report.figures import Picture, draw_figures
from finetune.report.markdown_table import escape_cell, markdown_table
from finetune.report.runs import GROUPS, METRIC_NAMES, Result, TaskGroup, average, build_groups
from finetune.report.tables import Table, group_tables, outcome_counts, paper_table, verdicts
from finetune.results import RECIPE_FIELDS, read_results
from finetune.tasks import recorded_task
from train.settings import InputError, require

TEMPLATES = Path(__file__).parent / "templates"
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
        two = self.pair is None or len(set(self.pair)) == 2
        require(two, "pair", "must be two models", self.pair, 'write --pair "[A, B]"')
        file = self.output is not None and Path(self.output).is_file()
        require(not file, "output", "must name a folder", f"the file {self.output}", "rename it")


@dataclass(frozen=True, eq=False)
class GroupReport:
    """A group, its differences and the reason if there are none."""

    group: TaskGroup
    pairs: list[Difference]
    no_pairs: str


@dataclass(frozen=True, eq=False)
class Section:
    """A heading of the report with the sentences, tables and pictures under it."""

    name: str
    title: str
    sentences: list[str]
    tables: list[Table]
    pictures: list[Picture]
    runs: dict[str, pd.DataFrame]


def main(settings: ReportSettings) -> str:
    """Print the report as Markdown and write it in all its forms.

    Raises:
        InputError: There are no results, the pair is not among them, or the output is not writable.
    """
    reports = compare_groups(read_results(settings.results), settings.pair)
    rule = "must hold a complete line"
    require(bool(reports), "results", rule, settings.results, "make a run first")
    folder = Path(settings.output or Path(settings.results).parent)
    try:
        folder.mkdir(parents=True, exist_ok=True)
        text = write_report(reports, folder)
    except OSError as error:
        raise InputError(f"output must be writable, got {error}; choose another") from error
    print(text)
    print(f"With the command of each run: {folder}/report.html")
    print("Beside it: report.md, .tex, .json, .csv and report-*.png")
    return text


def compare_groups(
    results: Sequence[Result], pair: Sequence[str] | None = None
) -> list[GroupReport]:
    """Group results and take all differences.

    Args:
        results: Lines of a results file.
        pair: Two models by path or short name; None means the one RoFormer and the one BERT.

    Raises:
        InputError: A model of the pair is not in the results, or both are the same.
    """
    groups = build_groups(results)
    models = None
    if pair is not None and groups:
        runs = pd.concat([group.fine_tuned() for group in groups])
        names = dict(zip(runs["model"], runs["short_name"]))
        known = {name: model for model, name in names.items()} | {model: model for model in names}
        listed, rule = ", ".join(sorted(names.values())), "must name models of the results"
        for name in pair:
            require(name in known, "pair", rule, name, f"they have {listed}")
        models = [known[name] for name in pair]
        require(models[0] != models[1], "pair", "must be two models", models, "name another")
    return [GroupReport(group, *pair_differences(group, models)) for group in groups]


def write_report(reports: Sequence[GroupReport], folder: Path) -> str:
    """Write the report in all its forms; returns it as Markdown."""
    sections, records = make_sections(reports, folder), json_report(reports)
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
        (folder / picture.file).read_bytes()
    ).decode()
    text = {
        suffix: environment.get_template(f"report.{suffix}.j2").render(sections=sections)
        for suffix in ("md", "html")
    }
    files = {
        **text,
        "tex": latex_tables(table for section in sections for table in section.tables),
        "json": json.dumps(records, indent=1, allow_nan=False) + "\n",
        "csv": csv_report([*records["scores"], *records["differences"]]),
    }
    for suffix, content in files.items():
        (folder / f"report.{suffix}").write_text(content, encoding="utf-8")
    return text["md"]


def make_sections(reports: Sequence[GroupReport], folder: Path) -> list[Section]:
    """Draw the figures; a section for each group, and the paper's table beside official scores."""
    sections = []
    for x in reports:
        sentences = [*filter(None, [x.no_pairs]), *verdicts(x.group, x.pairs)]
        tables, pictures = group_tables(x.group, x.pairs), draw_figures(x.group, x.pairs, folder)
        title, runs = GROUPS[x.group.name], run_tables(x.group)
        sections.append(Section(x.group.name, title, sentences, tables, pictures, runs))
    for x in reports:
        if x.group.name == "official":
            table = paper_table(x.group)
            sections.append(Section("paper", "The paper's table", [], [table], [], {}))
    return sections


def run_tables(group: TaskGroup) -> dict[str, pd.DataFrame]:
    """Configuration -> its runs in words, with their commands."""
    return {
        configuration: pd.DataFrame([_run_texts(run, group) for run in found.itertuples()])
        for configuration, found in group.fine_tuned().groupby("configuration", sort=False)
    }


def _run_texts(run: Any, group: TaskGroup) -> dict[str, str]:
    result: Result = run.result
    versions = result.get("versions", {})
    machine = [result.get("precision"), result.get("device"), *map(" ".join, versions.items())]
    scores = [
        f"{split.removeprefix('validation_')} {METRIC_NAMES.get(name, name)} {100 * value:.1f}"
        for split, metrics in (run.metrics or {}).items()
        for name, value in metrics.items()
    ]
    return {
        "task": group.titles[run.label],
        "seed": str(run.seed),
        "outcome": "collapsed" if run.collapsed else run.status,
        "scores": ", ".join(scores).replace("validation ", "") or result.get("error", ""),
        "loss": "" if result.get("loss") is None else f"{result['loss']:.3f}",
        "seconds": "" if result.get("seconds") is None else f"{result['seconds']:.0f}",
        "machine": ", ".join(filter(None, machine)),
        "command": result.get("command", "none was kept"),
    }


def latex_tables(tables: Iterable[Table]) -> str:
    """The tables for a paper, by pandas' writer."""
    texts = [
        table.frame.to_latex(
            index=False,
            escape=True,
            caption=table.title,
            column_format="l" + "r" * (len(table.frame.columns) - 1),
        )
        for table in tables
    ]
    text = "\n".join([LATEX_HEAD, *texts]).replace(MINUS, "$-$")
    return re.sub(r"(?<![\w{])-(?=\d)", "$-$", text)


def json_report(reports: Sequence[GroupReport]) -> dict[str, Any]:
    """Every metric of every seed, every difference, and the run behind each number."""
    fields = ("model", "task", "seed", "status", "collapsed", "error", "seconds", "command")
    runs = {
        run.run_id: {name: run.result.get(name) for name in fields}
        for x in reports
        for run in x.group.runs.itertuples()
    }
    groups = {
        x.group.name: {
            "title": GROUPS[x.group.name],
            "average": x.group.average_name(x.group.titles),
            "average_over": list(x.group.titles),
            "verdicts": [*filter(None, [x.no_pairs]), *verdicts(x.group, x.pairs)],
        }
        for x in reports
    }
    gains = pd.concat([control_gains(x.group).assign(group=x.group.name) for x in reports])
    return {
        "groups": groups,
        "scores": [record for x in reports for record in score_records(x.group)],
        "differences": [record for x in reports for record in difference_records(x)],
        "gains": gains.astype(object).where(gains.notna(), None).to_dict("records"),
        "runs": runs,
    }


def score_records(group: TaskGroup) -> Iterable[dict[str, Any]]:
    """For each cell every metric of every split and the two means that tables show; averages."""
    for configuration, runs in group.runs.groupby("configuration", sort=False):
        first = runs.iloc[0]
        head = {"group": group.name, "kind": first["kind"], "row": configuration}
        head |= {name: first[name] for name in ("model_type", "tokenizer", "protocol")}
        head |= {"selected_by_reported_split": bool(first["best_of"])}
        for label, cell in runs.groupby("label", sort=False):
            recipe = {name: cell["result"].iloc[0][name] for name in RECIPE_FIELDS}
            facts = {**head, "model": cell["model"].iloc[0], "task": label, **recipe}
            facts |= {**outcome_counts(cell), "run_ids": cell["run_id"].tolist()}
            for split, metric, scores in _metrics(cell):
                yield {**facts, "split": split, "metric": metric, **_statistics(scores)}
        found = average(runs, group.titles)
        if found is not None and len(group.titles) > 1:
            head |= {"task": "average", "metric": group.average_name(group.titles)}
            yield {**head, **_statistics(found[1]), "mean": found[0]}


def _metrics(cell: pd.DataFrame) -> Iterable[tuple[str, str, dict[int, float]]]:
    """Split, metric, seed -> score."""
    task, scored = recorded_task(cell["result"].iloc[0]), cell.dropna(subset="score")
    seeds = scored["seed"].tolist()
    for split in task.validation_splits:
        for metric in task.metrics:
            values = [100 * metrics[split][metric] for metrics in scored["metrics"]]
            yield split, metric, dict(zip(seeds, values))
    yield "all", "headline", dict(zip(seeds, scored["score"].tolist()))
    yield "all", "mean of metrics", dict(zip(seeds, scored["glue_score"].tolist()))


def _statistics(scores: dict[int, float]) -> dict[str, Any]:
    """Mean, sample standard deviation and median over seeds; None where there are too few."""
    values = list(scores.values())
    mean, median = (float(f(values)) if values else None for f in (np.mean, np.median))
    std = float(np.std(values, ddof=1)) if len(values) > 1 else None
    return {"mean": mean, "std": std, "median": median, "seeds": scores}


def difference_records(report: GroupReport) -> Iterable[dict[str, Any]]:
    """For each difference every task, then the average."""
    for pair in report.pairs:
        models = [side["model"].iloc[0] for side in (pair.first, pair.second)]
        head = {"group": report.group.name, "kind": "pair", "row": pair.title}
        head |= {"model": models[0], "minus": models[1]}
        for label, comparison in pair.comparisons():
            values = asdict(comparison)
            low, high = values.pop("t_interval") or (None, None)
            values |= {"t_interval_low": low, "t_interval_high": high}
            values["seeds"] = values.pop("differences")
            average_name = report.group.average_name(pair.tasks)
            metric = average_name if label == "average" else "headline"
            yield {**head, "task": label, "metric": metric, **values}


def csv_report(records: Sequence[dict[str, Any]]) -> str:
    """The records of report.json as one table; seeds as SEED:SCORE, separated by spaces."""
    frame = pd.DataFrame(records)
    frame["seeds"] = [
        " ".join(f"{seed}:{score:.6g}" for seed, score in seeds.items()) for seeds in frame["seeds"]
    ]
    frame["run_ids"] = [" ".join(record.get("run_ids", [])) for record in records]
    return frame.to_csv(index=False)
