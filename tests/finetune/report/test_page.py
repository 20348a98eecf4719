"""The written report: its page, its csv, its Markdown."""

import csv
import re
from itertools import product

import html5lib
import numpy as np
import pandas as pd
import pytest

from finetune.report.__main__ import ReportSettings, main
from finetune.results import read_results, run_name
from tiny import command
from tiny_results import BERT, ROFORMER, diverged, failed, line, simple_features, write

XHTML = "{http://www.w3.org/1999/xhtml}"


@pytest.fixture(scope="module")
def folder(tmp_path_factory):
    """The report of two models and their controls, two rates and failed runs."""
    runs = []
    reduced = {"official": False, "glue_dir": "reduced", "length": 64, "dataset": "mnli (9k)"}
    for seed, model in product(range(3), (BERT, ROFORMER)):
        for control in ({"seed": seed}, {"seed": seed, "random_weights": True}):
            tasks = ("mnli", "mrpc", "rte", "wnli", "demo-order")
            runs += [(model, task, control) for task in tasks]
            runs.append((model, "mnli", control | reduced))
        for task, rate in product(("mrpc", "rte"), (2e-5, 5e-5)):
            runs.append((model, task, {"seed": seed, "length": 512, "learning_rate": rate}))
    draw = np.random.default_rng(0)
    lines = [line(*run, round(draw.normal(0.6, 0.012), 4), **changes) for *run, changes in runs]
    lines[3]["collapsed"] = True
    lines.append(diverged(BERT, "rte", seed=1, length=512, learning_rate=5e-5))
    lines.append(failed(ROFORMER, "mrpc", seed=3))
    lines = [x | {"command": x["command"] + " --note '<b>&'"} for x in lines]
    path = tmp_path_factory.mktemp("report")
    main(ReportSettings(write(path, lines)))
    return path


def parse(folder):
    """The page; an error of the markup raises."""
    return html5lib.HTMLParser(strict=True).parse((folder / "report.html").read_text("utf-8"))


def elements(root, name: str) -> list:
    return list(root.iter(XHTML + name))


def test_the_page_is_one_valid_file_that_loads_and_runs_nothing(folder):
    document = parse(folder)
    tables = elements(document, "table")
    assert len(tables) == len(elements(document, "caption")) > 10
    for table in tables:
        assert {cell.attrib.get("scope") for cell in table.iter(XHTML + "th")} == {"row", "col"}
    loading = {"script", "link", "iframe", "object", "embed", "video", "audio", "base"}
    assert not loading & {str(x.tag).split("}")[-1] for x in document.iter()}
    for element in document.iter():
        for name, value in element.attrib.items():
            assert not name.startswith("on")
            if name in ("href", "src", "action", "data"):
                assert value.startswith(("#", "data:image/png;base64,"))
    text = (folder / "report.html").read_text(encoding="utf-8")
    assert "default-src 'none'" in text
    assert not re.findall(r"url\(|@import|https?://", text)
    pictures = elements(document, "img")
    assert len(pictures) == len(list(folder.glob("report-*.png"))) == 6
    assert all(picture.attrib["alt"] for picture in pictures)


def test_csv_holds_every_metric_and_command_of_every_run(folder):
    lines = {run_name(x)[-10:]: x for x in read_results(str(folder / "results.jsonl"))}
    with (folder / "report.csv").open(newline="") as stream:
        rows = {row["run_id"]: row for row in csv.DictReader(stream)}
    assert rows.keys() == lines.keys()
    for name, run in lines.items():
        for split, values in (run.get("metrics") or {}).items():
            for metric, value in values.items():
                assert float(rows[name][f"metrics {split} {metric}"]) == value
        assert (rows[name]["status"], rows[name]["command"]) == (run["status"], run["command"])
        assert rows[name]["configuration"].startswith(run["model"].split("/")[1])


def test_simple_features_alone_make_a_report(tmp_path):
    main(ReportSettings(write(tmp_path, [simple_features("cola", 0.1)])))
    assert re.search(r"\| simple features +\| +10.0 ", (tmp_path / "report.md").read_text())
    assert pd.read_csv(tmp_path / "report.csv")["metrics validation matthews"].tolist() == [0.1]


def test_a_report_says_the_same_twice_byte_for_byte(folder, tmp_path):
    main(ReportSettings(str(folder / "results.jsonl"), output=str(tmp_path)))
    written = {x.name: x.read_bytes() for x in tmp_path.iterdir()}
    assert written == {x.name: x.read_bytes() for x in folder.iterdir() if "results" not in x.name}
    assert {f"report.{x}" for x in ("md", "tex", "csv", "html")} <= written.keys()
    assert "report-official-scores.png" in written


def test_markdown_opens_with_the_verdict_and_has_the_figures(folder):
    text = (folder / "report.md").read_text(encoding="utf-8")
    assert text.splitlines()[2].startswith("RoFormer − BERT")  # noqa: RUF001
    assert re.findall(r"^\*\*(.*)\*\*$", text, re.MULTILINE)[0].startswith("RoFormer")
    for name in re.findall(r"!\[.*?\]\((.*?)\)", text):
        assert (folder / name).read_bytes().startswith(b"\x89PNG")


def test_one_seed_of_the_demo_task_makes_a_whole_report(tmp_path, capsys):
    sides = [(model, control) for model in (BERT, ROFORMER) for control in (False, True)]
    lines = [line(model, "demo-order", 0.6, random_weights=control) for model, control in sides]
    text = main(ReportSettings(write(tmp_path, lines)))
    assert capsys.readouterr().out.startswith(text)
    assert "as printed" not in text
    parse(tmp_path)


def test_names_that_are_markup_stay_text(tmp_path):
    name = "<script>alert(1)<b>&\"'$x$"
    main(ReportSettings(write(tmp_path, [line(name, "rte", 0.6), line("_b", "rte", 0.5)])))
    document = parse(tmp_path)
    assert not elements(document, "script")
    assert any("alert(1)" in "".join(cell.itertext()) for cell in elements(document, "th"))


def test_a_report_starts_without_torch():
    command("-c", "import sys, finetune.report.__main__; sys.exit('torch' in sys.modules)")
