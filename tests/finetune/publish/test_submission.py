"""The zip for GLUE's server: what a plain reader of csv finds in it, and what is refused."""

import csv
import io
import re
import zipfile
from pathlib import Path

import numpy as np
import pytest

from finetune.publish import submission
from finetune.publish.submission import SubmissionSettings, main
from finetune.results import SIMPLE_FEATURES, append_result, prediction_file, write_predictions
from tiny import refused
from tiny_results import line as a_line
from tiny_results import simple_features

MODEL = "runs/a/model"
NLI = ["entailment", "neutral", "contradiction"]
# what the server takes, written down a second time: file -> task, predictions, rows, answers by id
FILES = {
    "CoLA.tsv": ("cola", "test", 1063, ["0", "1"]),
    "SST-2.tsv": ("sst2", "test", 1821, ["0", "1"]),
    "MRPC.tsv": ("mrpc", "test", 1725, ["0", "1"]),
    "STS-B.tsv": ("stsb", "test", 1379, None),
    "QQP.tsv": ("qqp", "test", 390965, ["0", "1"]),
    "MNLI-m.tsv": ("mnli", "test_matched", 9796, NLI),
    "MNLI-mm.tsv": ("mnli", "test_mismatched", 9847, NLI),
    "QNLI.tsv": ("qnli", "test", 5463, ["entailment", "not_entailment"]),
    "RTE.tsv": ("rte", "test", 3000, ["entailment", "not_entailment"]),
    "WNLI.tsv": ("wnli", "test", 146, ["0", "1"]),
    "AX.tsv": ("mnli", "ax", 1104, NLI),
}
SERVER_FILES = submission.FILES
SMALL = ("STS-B.tsv", "MNLI-m.tsv", "MNLI-mm.tsv", "WNLI.tsv", "AX.tsv")


def line(task: str, headline: float = 0.5, **changes) -> dict:
    changes = {"model": MODEL, "headline_metric": "accuracy", "headline": headline, **changes}
    return a_line(changes.pop("model"), task, headline, **changes)


def logits_of(run: dict, name: str) -> np.ndarray:
    """What a run says: other numbers for every file, headline and seed; beyond 0..5 for STS-B."""
    _, _, rows, labels = FILES[name]
    draw = np.random.default_rng([len(name), rows, int((run["headline"] or 0) * 1000), run["seed"]])
    width = 1 if labels is None else len(labels)
    return draw.normal(2.5, 2.5, (rows, width)).astype(np.float32)


def write_run(folder: Path, run: dict, leave_out: tuple[str, ...] = ()) -> None:
    append_result(str(folder / "results.jsonl"), run)
    for name, (task, split, rows, _) in FILES.items():
        if task == run["task"] and name not in leave_out:
            file = prediction_file(str(folder / "results.jsonl"), run, split)
            write_predictions(file, np.full(rows, -1), logits_of(run, name))


def settings(folder: Path, **changes) -> SubmissionSettings:
    names = {"results": str(folder / "results.jsonl"), "output": str(folder / "out" / "s.zip")}
    return SubmissionSettings(**{"model": MODEL, **names, **changes})


def built(folder: Path, **changes) -> dict[str, list[list[str]]]:
    """The rows of each file, as csv reads them."""
    chosen = settings(folder, **changes)
    main(chosen)
    with zipfile.ZipFile(chosen.output) as archive:
        return {
            name: list(csv.reader(io.StringIO(archive.read(name).decode()), delimiter="\t"))
            for name in archive.namelist()
        }


def answers(run: dict, name: str) -> list[list[str]]:
    """What the file should hold, worked out row by row."""
    rows = [["index", "prediction"]]
    labels = FILES[name][3]
    for row, values in enumerate(logits_of(run, name).tolist()):
        if labels is None:
            rows.append([str(row), f"{min(5.0, max(0.0, values[0])):.3f}"])
        else:
            rows.append([str(row), labels[values.index(max(values))]])
    return rows


@pytest.fixture(autouse=True)
def small(monkeypatch) -> None:
    """Fewer files than GLUE's, where the rest, QQP above all, would only take time."""
    chosen = tuple(member for member in SERVER_FILES if member.name in SMALL)
    monkeypatch.setattr(submission, "FILES", chosen)


def test_the_files_are_those_of_the_server():
    found = [(x.name, (x.task, x.split, x.rows, x.labels and list(x.labels))) for x in SERVER_FILES]
    assert found == list(FILES.items())


def test_every_file_says_what_its_run_predicted(tmp_path, capsys):
    for task in ("stsb", "mnli", "wnli"):
        write_run(tmp_path, line(task))
    found = built(tmp_path)
    assert list(found) == list(SMALL)
    for name, rows in found.items():
        assert rows == answers(line(FILES[name][0]), name), name
    values = [float(value) for _, value in found["STS-B.tsv"][1:]]
    assert (min(values), max(values)) == (0, 5)
    *table, _ = capsys.readouterr().out.splitlines()
    assert [row.split()[0] for row in table] == list(SMALL)
    assert all("accuracy 50.0 on validation" in row for row in table)
    assert [path.name for path in (tmp_path / "out").iterdir()] == ["s.zip"]


def test_the_best_predicted_run_on_validation_is_used_and_printed(tmp_path, capsys):
    """One run predicts both halves of MNLI and AX, though there is a better one without AX."""
    best = {"wnli": line("wnli", 0.7, seed=2), "mnli": line("mnli", 0.8, seed=1)}
    worse = line("wnli", 0.5), line("wnli", 0.6, seed=1), line("mnli", 0.7)
    for run in (*worse, *best.values(), line("stsb")):
        write_run(tmp_path, run)
    write_run(tmp_path, line("wnli", 0.9, seed=3), leave_out=("WNLI.tsv",))
    write_run(tmp_path, line("mnli", 0.9, seed=2), leave_out=("AX.tsv",))
    file = prediction_file(str(tmp_path / "results.jsonl"), line("stsb"), "test")
    write_predictions(file, np.full(1379, -1), np.full((1379, 1), -0.0, np.float32))
    found = built(tmp_path)
    for name in ("WNLI.tsv", "MNLI-m.tsv", "MNLI-mm.tsv", "AX.tsv"):
        assert found[name] == answers(best[FILES[name][0]], name)
    assert {value for _, value in found["STS-B.tsv"][1:]} == {"0.000"}  # never -0.000
    (row,) = (row for row in capsys.readouterr().out.splitlines() if row.startswith("WNLI.tsv"))
    assert re.search(r"wnli-a-\w{10}, seed 2, accuracy 70.0 on validation$", row)


@pytest.mark.parametrize(
    "changes",
    [
        {"random_weights": True},
        {"status": "diverged", "headline": None},
        {"weights": "old"},  # the folder's model was replaced, and its runs made again but for this
        {"official": False},
        {"settings": {"test": False}},  # the predictions there are an earlier run's
        {"model": "runs/b/model"},
        {"task": "rte"},
    ],
    ids=str,
)
def test_what_is_no_result_of_the_model_never_serves(tmp_path, changes):
    write_run(tmp_path, line("wnli", 0.9, seed=1) | changes)
    write_run(tmp_path, line("wnli", 0.5, weights="new"))
    found = built(tmp_path, placeholders=True)
    assert found["WNLI.tsv"] == answers(line("wnli", 0.5), "WNLI.tsv")


def test_equal_scores_give_the_same_run_in_any_order(tmp_path):
    runs = [line("wnli", seed=seed) for seed in range(4)]
    found = []
    for name, order in (("a", runs), ("b", runs[::-1])):
        (tmp_path / name).mkdir()
        for run in order:
            write_run(tmp_path / name, run)
        found.append(built(tmp_path / name, placeholders=True))
    assert found[0] == found[1]


def test_placeholders_are_one_valid_answer_and_are_printed(tmp_path, capsys):
    """Data without AX still give the files of MNLI."""
    run = line("mnli")
    write_run(tmp_path, run, leave_out=("AX.tsv",))
    found = built(tmp_path, placeholders=True)
    assert found["MNLI-m.tsv"] == answers(run, "MNLI-m.tsv")
    assert {answer for _, answer in found["AX.tsv"][1:]} == {"entailment"}
    assert {answer for _, answer in found["STS-B.tsv"][1:]} == {"0.000"}
    printed = capsys.readouterr()
    assert printed.out.count("PLACEHOLDER") == 3
    assert "warning: the server's scores of placeholders" in printed.err


CONTROLS = [line("wnli", model="c", random_weights=True), simple_features("wnli", 0.5)]


@pytest.mark.parametrize(
    ("runs", "changes", "words"),
    [
        ([line("wnli"), line("stsb")], {}, ["none for MNLI-m.tsv, MNLI-mm.tsv, AX.tsv;", "--test"]),
        ([line("rte")], {"placeholders": True}, ["for at least one file, got none"]),
        ([line("wnli"), *CONTROLS], {"model": "b"}, ["model must be one", f"b; there: {MODEL}"]),
        ([line("wnli"), *CONTROLS], {"model": SIMPLE_FEATURES}, [f"features; there: {MODEL}"]),
    ],
    ids=["missing", "placeholders alone", "unknown model", "simple features"],
)
def test_results_of_which_no_zip_can_be_made_are_refused(tmp_path, runs, changes, words):
    for run in runs:
        write_run(tmp_path, run)
    refused(lambda: main(settings(tmp_path, **changes)), *words)
    assert not (tmp_path / "out").exists()


@pytest.mark.parametrize("shape", [(145, 2), (146, 3)])
def test_predictions_that_do_not_fit_leave_an_old_zip_alone(tmp_path, shape):
    write_run(tmp_path, line("wnli"))
    file = prediction_file(str(tmp_path / "results.jsonl"), line("wnli"), "test")
    write_predictions(file, np.full(shape[0], -1), np.zeros(shape, np.float32))
    old = tmp_path / "out" / "s.zip"
    old.parent.mkdir()
    old.write_bytes(b"old")
    zip_of = settings(tmp_path, placeholders=True)
    refused(lambda: main(zip_of), "must be 146 rows of 2", f"got {shape}")
    assert [(path.name, path.read_bytes()) for path in old.parent.iterdir()] == [("s.zip", b"old")]


@pytest.mark.parametrize("output", ["results.jsonl", "FOLDER.zip", "file/s.zip"])
def test_an_output_that_is_no_zip_is_refused(tmp_path, monkeypatch, output):
    monkeypatch.chdir(tmp_path)
    Path("FOLDER.zip").mkdir()
    Path("file").touch()
    refused(lambda: SubmissionSettings(model="m", output=output), "output must")
