import csv
import json
import re
from collections import Counter

import html5lib
import numpy as np
import pytest
from sklearn.metrics import confusion_matrix

from finetune.report.page import confusion
from finetune.report.report import ReportSettings, main
from finetune.report.tables import build_tables
from finetune.results import prediction_file, read_predictions, read_results, run_name
from tiny_results import BERT, ROFORMER, grid, line, predictions, write

XHTML = "{http://www.w3.org/1999/xhtml}"
SVG = "{http://www.w3.org/2000/svg}"


@pytest.fixture(scope="module")
def folder(tmp_path_factory):
    """The report of a whole grid, with predictions of two tasks."""
    place = tmp_path_factory.mktemp("report")
    lines = [x | {"command": x.get("command", "") + " --note '<b>&'"} for x in grid()]
    lines = [x for x in lines if x["task"] not in ("sst2", "qqp", "cola", "qnli")]
    file = write(place, lines)
    for result in lines:
        if result["status"] == "done" and result["task"] in ("mrpc", "mnli", "stsb"):
            predictions(file, result)
    main(ReportSettings(file))
    return place


@pytest.fixture(scope="module")
def document(folder):
    text = (folder / "report.html").read_text(encoding="utf-8")
    return html5lib.HTMLParser(strict=True).parse(text)  # an error of the markup raises


def elements(root, name: str) -> list:
    return list(root.iter(XHTML + name))


def text_of(element) -> str:
    return "".join(element.itertext())


def test_the_page_is_valid_and_says_what_it_is(document):
    assert document.attrib["lang"] == "en"
    assert [text_of(title) for title in elements(document, "title")] == ["Fine-tuning report"]
    names = [meta.attrib.get("name") for meta in elements(document, "meta")]
    assert "viewport" in names
    tables = elements(document, "table")
    assert len(tables) == len(elements(document, "caption")) > 50
    for table in tables:
        scopes = {cell.attrib.get("scope") for cell in table.iter(XHTML + "th")}
        assert scopes == {"row", "col"}
    for name in ("header", "nav", "main", "h1"):
        assert len(elements(document, name)) == 1


def test_the_page_loads_nothing_and_runs_nothing(folder, document):
    text = (folder / "report.html").read_text(encoding="utf-8")
    loading = {"script", "link", "img", "iframe", "object", "embed", "video", "audio", "base"}
    assert not loading & {str(x.tag).split("}")[-1] for x in document.iter()}
    assert not re.search(r"url\((?!#)|@import|expression\(", text)
    for element in document.iter():
        for name, value in element.attrib.items():
            assert not name.startswith("on")
            if name.split("}")[-1] in ("href", "src", "action", "data"):
                assert value.startswith("#")
    outside = set(re.findall(r"https?://[^\s\"'<>)]+", text))
    assert outside <= {"http://www.w3.org/2000/svg", "http://www.w3.org/1999/xlink"}
    assert "default-src 'none'" in text


def test_every_id_is_unique_and_every_link_leads_somewhere(document):
    ids = Counter(x.attrib["id"] for x in document.iter() if "id" in x.attrib)
    assert ids.most_common(1)[0][1] == 1
    links = {
        value[1:]
        for element in document.iter()
        for name, value in element.attrib.items()
        if name.split("}")[-1] == "href"
    }
    assert links <= ids.keys()
    drawings = list(document.iter(SVG + "svg"))
    assert len(drawings) == 7  # scores and differences of three groups, rates of the official one
    uses = {v[5:-1] for d in drawings for x in d.iter() for v in x.attrib.values() if "url(" in v}
    assert uses
    assert uses <= ids.keys()
    assert all(drawing.attrib["aria-label"] for drawing in drawings)


def test_every_number_leads_to_the_commands_that_made_it(document, folder):
    parents = {child: parent for parent in document.iter() for child in parent}
    places = {x.attrib["id"]: x for x in document.iter() if "id" in x.attrib}
    numbers = 0
    for section in elements(document, "section"):
        if section.attrib["id"] not in ("official", "reduced", "demo", "paper"):
            continue
        for cell in section.iter(XHTML + "td"):
            row = text_of(parents[cell])
            if not re.search(r"\d", text_of(cell)) or "as printed" in row:
                continue
            numbers += 1
            (link,) = cell.iter(XHTML + "a")
            place = places[link.attrib["href"][1:]]
            # a cell's or a run's commands, or links to the two sides of a difference
            found = [text_of(code) for code in place.iter(XHTML + "code")]
            onward = list(place.iter(XHTML + "a"))
            heading = place.tag == XHTML + "h3" or place.attrib["id"] == "notes"
            assert (
                heading
                or len(onward) == 2
                or all("glue.py" in x or x == "none was kept" for x in found)
            )
    assert numbers > 150
    commands = {text_of(code) for code in elements(document, "code")}
    lines = read_results(str(folder / "results.jsonl"))
    assert {x["command"] for x in lines if x["status"] != "failed"} <= commands


def test_a_cell_leads_to_exactly_its_runs(document, folder):
    (official,) = (x for x in elements(document, "section") if x.attrib["id"] == "official")
    places = {x.attrib["id"]: x for x in document.iter() if "id" in x.attrib}
    rows = next(official.iter(XHTML + "tbody"))
    names = {text_of(row[0]).replace("\N{WORD JOINER}", ""): row for row in rows}
    row = names["small-bert (bert), rate 5e-5, length 512"]
    (cell,) = (x for x in row if "4\N{NO-BREAK SPACE}of\N{NO-BREAK SPACE}5" in text_of(x))
    (link,) = cell.iter(XHTML + "a")
    runs = places[link.attrib["href"][1:]]
    outcomes = [text_of(x[1]) for x in next(runs.iter(XHTML + "tbody"))]
    assert outcomes == ["done", "done", "done", "diverged", "done"]


def test_matrices_count_what_scikit_learn_counts(folder, document):
    file = str(folder / "results.jsonl")
    lines = read_results(file)
    (table,) = (x for x in build_tables(lines) if x.group == "official")
    cell = table.rows[0].cells["mnli"]
    counts, runs = confusion(cell, "validation_matched", file)
    files = [prediction_file(file, run, "validation_matched") for run in cell.runs]
    kept = [read_predictions(x) for x in files]
    labels = np.concatenate([label for label, _ in kept])
    classes = np.concatenate([logits.argmax(axis=1) for _, logits in kept])
    assert runs == 5
    assert counts.tolist() == confusion_matrix(labels, classes, labels=[0, 1, 2]).tolist()
    captions = [text_of(x) for x in elements(document, "caption")]
    assert "MNLI m/mm matched, 5 of 5 seeds" in captions
    assert not any(x.startswith("STS-B,") and x.endswith("seeds") for x in captions)  # no classes


def test_predictions_that_cannot_be_read_are_one_warning(tmp_path, capsys):
    lines = [line(BERT, "rte", 0.6, seed=seed) for seed in (0, 1)]
    file = write(tmp_path, lines)
    for result in lines:
        predictions(file, result)
    prediction_file(file, lines[1], "validation").write_bytes(b"torn")
    cell = build_tables(lines)[0].rows[0].cells["rte"]
    assert confusion(cell, "validation", file)[1] == 1
    assert len(capsys.readouterr().err.splitlines()) == 1


def test_json_and_csv_hold_every_metric_of_every_run(folder):
    report = json.loads((folder / "report.json").read_text())
    lines = {run_name(x)[-10:]: x for x in read_results(str(folder / "results.jsonl"))}
    assert report["runs"].keys() == lines.keys()
    found = 0
    for record in report["scores"]:
        if record["kind"] == "majority" or record["task"] == "average" or record["split"] == "all":
            continue
        runs = [lines[name] for name in record["run_ids"] if lines[name]["status"] == "done"]
        values = [100 * run["metrics"][record["split"]][record["metric"]] for run in runs]
        assert list(record["seeds"].values()) == pytest.approx(values)
        assert record["mean"] == pytest.approx(np.mean(values))
        assert record["median"] == pytest.approx(np.median(values))
        assert record["std"] == pytest.approx(np.std(values, ddof=1))
        assert (record["scored"], record["runs"]) == (len(runs), 5)
        found += len(values) * (not record["selected_by_reported_split"])
    metrics = [x["metrics"] for x in lines.values() if x["status"] == "done"]
    assert found == sum(len(values) for run in metrics for values in run.values())
    with (folder / "report.csv").open(newline="") as stream:
        rows = list(csv.DictReader(stream))
    assert len(rows) == len(report["scores"]) + len(report["differences"])
    for row, record in zip(rows, [*report["scores"], *report["differences"]]):
        assert float(row["mean"]) == pytest.approx(record["mean"])
        assert row["row"] == record["row"]


def test_a_report_says_the_same_twice_byte_for_byte(tmp_path):
    lines = [line(model, "rte", 0.6 + seed / 50, seed=seed, learning_rate=rate)
             for model in (BERT, ROFORMER) for seed in (0, 1) for rate in (2e-5, 3e-5)]  # fmt: skip
    file = write(tmp_path, lines)
    for name in ("a", "b"):
        main(ReportSettings(file, output=str(tmp_path / name)))
    first = {x.name: x.read_bytes() for x in (tmp_path / "a").iterdir()}
    assert first == {x.name: x.read_bytes() for x in (tmp_path / "b").iterdir()}
    pictures = {name for name in first if name.endswith(".png")}
    assert pictures == {f"report-official-{x}.png" for x in ("scores", "differences", "rates")}
    assert {f"report.{x}" for x in ("md", "tex", "json", "csv", "html")} == first.keys() - pictures


def test_markdown_has_the_figures_and_every_command(folder):
    text = (folder / "report.md").read_text(encoding="utf-8")
    for name in re.findall(r"!\[.*?\]\((.*?)\)", text):
        assert (folder / name).read_bytes().startswith(b"\x89PNG")
    lines = read_results(str(folder / "results.jsonl"))
    block = text.split("### Commands")[1]
    assert all(x["command"] in block for x in lines if x["status"] != "failed")


def test_one_seed_of_demo_tasks_makes_a_whole_report(tmp_path, capsys):
    tasks = ("demo-order", "demo-next", "demo-overlap")
    sides = [(model, control) for model in (BERT, ROFORMER) for control in (False, True)]
    lines = [line(model, x, 0.6, random_weights=control) for model, control in sides for x in tasks]
    text = main(ReportSettings(write(tmp_path, lines)))
    assert capsys.readouterr().out.startswith(text)
    assert "No interval and no test where there is one pair." in text
    assert "mean of these 3 tasks, not the GLUE average" in text
    assert "as printed" not in text
    page = (tmp_path / "report.html").read_text(encoding="utf-8")
    html5lib.HTMLParser(strict=True).parse(page)
    assert not (tmp_path / "report-demo-rates.png").exists()


def test_names_that_are_markup_stay_text(tmp_path):
    name = "<script>alert(1)<b>&\"'$x$"
    file = write(tmp_path, [line(name, "rte", 0.6), line("_b", "rte", 0.5)])
    main(ReportSettings(file))
    text = (tmp_path / "report.html").read_text(encoding="utf-8")
    document = html5lib.HTMLParser(strict=True).parse(text)
    assert not elements(document, "script")
    assert any("alert(1)" in text_of(cell) for cell in elements(document, "th"))
