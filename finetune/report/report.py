"""The report of a results file: `python -m finetune.report results.jsonl`.

Writes report.md, .tex, .json, .csv, .html and report-*.png. report.html is one file that opens from
disk, with pictures embedded. Every metric of every seed is in report.json and report.csv.
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

from finetune.report.differences import MINUS, Difference, control_differences, pair_differences
from finetune.report.figures import Picture, draw_figures
from finetune.report.markdown_table import escape_cell, markdown_table
from finetune.report.runs import GROUPS, METRIC_NAMES, Result, TaskGroup, average, build_groups
from finetune.report.tables import Table, group_tables, outcome_counts, paper_table
from finetune.results import RECIPE_FIELDS, read_results
from finetune.tasks import TASKS
from train.settings import InputError, require

TEMPLATES = Path(__file__).parent / "templates"
LATEX_HEAD = r"% needs \usepackage{booktabs} and \usepackage[T1]{fontenc}"

NOTES = (
    "Scores are those of the validation split (GLUE's development set) after the last epoch. "
    "Columns show the headline metric, the RoFormer paper's (Matthews for CoLA); report.json and "
    "report.csv have all metrics. MNLI is matched/mismatched.",
    "A run that collapsed gives every example the same answer; its score counts. A run that "
    "diverged or failed has no score: the mean is over the rest, as '4 of 5' says.",
    "Averages are as GLUE defines them: the metrics of a task are averaged first (F1 and accuracy "
    "of MRPC and QQP, Pearson and Spearman of STS-B, both splits of MNLI), then the tasks; AX does "
    "not count. Only all nine official tasks make the GLUE average. The ± of an average is over "
    "seeds, and given if all tasks have the same seeds.",
    "The majority baseline always gives the most common training class or, for a regression, the "
    "mean, whose correlation is taken as 0.",
    "Nothing is selected by the split that is reported, except in rows 'best of ... rates': there "
    "the rate of each task is the one with the best mean over seeds on that very split, as in the "
    "paper; such a score is biased upwards. Only rates with the most scored seeds compete.",
    "A difference is taken seed by seed between runs of the same recipe. Intervals are those of "
    "Student's t, p-values those of the paired t-test; a single pair, or pairs that all differ by "
    "the same, have neither. p (Holm) is corrected over the tasks of one "
    "comparison. The effect size is Hedges' g_z: mean over standard deviation of the differences, "
    "corrected for few seeds; report.json has Cohen's d_z too.",
    "Intervals and tests are about the seeds of fine-tuning, for the given checkpoints and "
    "validation examples. Another pretraining run or other examples may change more than a seed. "
    "Only differences 'over ... pretraining seeds' treat pretraining as random.",
)


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
class Section:
    """A heading of the report with its tables and pictures."""

    name: str
    title: str
    tables: list[Table]
    pictures: list[Picture]


@dataclass(frozen=True, eq=False)
class GroupReport:
    """Everything computed from the runs of one group."""

    group: TaskGroup
    pairs: list[Difference]
    controls: list[Difference]
    no_pairs: str


def main(settings: ReportSettings) -> str:
    """Print the tables and write every form of the report.

    Returns:
        The tables as Markdown.

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
    print(f"Figures, notes and the command of each run: {folder}/report.html")
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
        names = {run.model: run.short_name for group in groups for run in group.runs.itertuples()}
        known = {name: model for model, name in names.items()} | {model: model for model in names}
        listed, rule = ", ".join(sorted(names.values())), "must name models of the results"
        for name in pair:
            require(name in known, "pair", rule, name, f"they have {listed}")
        models = [known[name] for name in pair]
        require(models[0] != models[1], "pair", "must be two models", models, "name another")
    reports = []
    for group in groups:
        pairs, no_pairs = pair_differences(group, models)
        reports.append(GroupReport(group, pairs, control_differences(group), no_pairs))
    return reports


def write_report(reports: Sequence[GroupReport], folder: Path) -> str:
    """Write the report in all its forms.

    Returns:
        The tables as Markdown.
    """
    sections = make_sections(reports, folder)
    records = json_report(reports)
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
    context = {
        "sections": sections,
        "runs": {GROUPS[x.group.name]: run_tables(x.group) for x in reports},
        "notes": NOTES,
    }
    markdown = environment.get_template("tables.md.j2").render(context)
    files = {
        "md": environment.get_template("report.md.j2").render(context),
        "html": environment.get_template("report.html.j2").render(context),
        "tex": latex_tables(table for section in sections for table in section.tables),
        "json": json.dumps(records, indent=1, allow_nan=False) + "\n",
        "csv": csv_report([*records["scores"], *records["differences"]]),
    }
    for suffix, content in files.items():
        (folder / f"report.{suffix}").write_text(content, encoding="utf-8")
    return markdown


def make_sections(reports: Sequence[GroupReport], folder: Path) -> list[Section]:
    """Draw the figures; a section for each group, and the paper's table beside official scores."""
    sections = []
    for x in reports:
        tables = group_tables(x.group, x.pairs, x.controls, x.no_pairs)
        pictures = draw_figures(x.group, x.pairs, x.controls, folder)
        sections.append(Section(x.group.name, GROUPS[x.group.name], tables, pictures))
    official = [x.group for x in reports if x.group.name == "official"]
    paper = [Section("paper", "The paper's table", [paper_table(x)], []) for x in official]
    return sections + paper


def run_tables(group: TaskGroup) -> dict[str, pd.DataFrame]:
    """Configuration -> its runs in words, with their commands."""
    runs = group.runs[(group.runs["kind"] != "majority") & (group.runs["best_of"] == "")]
    return {
        configuration: pd.DataFrame([_run_texts(run, group) for run in found.itertuples()])
        for configuration, found in runs.groupby("configuration", sort=False)
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
        if len(table.frame)
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
            "no_difference": x.no_pairs,
        }
        for x in reports
    }
    return {
        "groups": groups,
        "scores": [record for x in reports for record in score_records(x.group)],
        "differences": [record for x in reports for record in difference_records(x)],
        "runs": runs,
    }


def score_records(group: TaskGroup) -> Iterable[dict[str, Any]]:
    """For each cell every metric of every split and the two means that tables show; averages."""
    for configuration, runs in group.runs.groupby("configuration", sort=False):
        first = runs.iloc[0]
        head = {"group": group.name, "kind": first["kind"], "row": configuration}
        head |= {name: first[name] for name in ("model", "tokenizer")}
        head |= {"mnli": first["origin"], "selected_by_reported_split": bool(first["best_of"])}
        for label, cell in runs.groupby("label", sort=False):
            recipe = {name: cell["result"].iloc[0][name] for name in RECIPE_FIELDS}
            facts = {**head, "task": label, **recipe, **outcome_counts(cell)}
            facts["run_ids"] = cell["run_id"].tolist()
            for split, metric, scores in _metrics(cell):
                yield {**facts, "split": split, "metric": metric, **_statistics(scores)}
        found = average(runs, group.titles)
        if found is not None and len(group.titles) > 1:
            head |= {"task": "average", "metric": group.average_name(group.titles)}
            yield {**head, **_statistics(found[1]), "mean": found[0]}


def _metrics(cell: pd.DataFrame) -> Iterable[tuple[str, str, dict[int, float]]]:
    """Split, metric, seed -> score."""
    task, scored = TASKS[cell["task"].iloc[0]], cell.dropna(subset="score")
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
    for kind, differences in (("pair", report.pairs), ("control", report.controls)):
        for difference in differences:
            models = [side["model"].iloc[0] for side in (difference.first, difference.second)]
            head = {"group": report.group.name, "kind": kind, "row": difference.title}
            head |= {"model": models[0], "minus": models[1]}
            for label, comparison in difference.comparisons():
                name = report.group.average_name(difference.tasks)
                values = asdict(comparison)
                low, high = values.pop("t_interval") or (None, None)
                values |= {"t_interval_low": low, "t_interval_high": high}
                values["seeds"] = values.pop("differences")
                metric = name if label == "average" else "headline"
                yield {**head, "task": label, "metric": metric, **values}


def csv_report(records: Sequence[dict[str, Any]]) -> str:
    """The records of report.json as one table; seeds as SEED:SCORE, separated by spaces."""
    frame = pd.DataFrame(records)
    frame["seeds"] = [
        " ".join(f"{seed}:{score:.6g}" for seed, score in seeds.items()) for seeds in frame["seeds"]
    ]
    frame["run_ids"] = [" ".join(record.get("run_ids", [])) for record in records]
    return frame.to_csv(index=False)
