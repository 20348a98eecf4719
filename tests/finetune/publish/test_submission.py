"""The zip for GLUE's server: what a plain reader of csv finds in it, and what is refused."""

import csv
import errno
import io
import json
import re
import zipfile
from collections.abc import Iterable
from pathlib import Path

import numpy as np
import pytest

from finetune.publish import submission
from finetune.publish.submission import SubmissionSettings, main
from finetune.results import prediction_file, write_predictions
from tiny_results import line as a_line
from train.settings import InputError

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
SMALL = ("STS-B.tsv", "MNLI-m.tsv", "MNLI-mm.tsv", "WNLI.tsv", "AX.tsv")


def line(task: str, headline: float = 0.5, **changes) -> dict:
    changes = {"model": MODEL, "learning_rate": 2e-5, "glue_dir": None, **changes}
    facts = {"collapsed": False, "official": True, "headline_metric": "accuracy"}
    return a_line(changes["model"], task, headline, **facts) | {"headline": headline} | changes


def logits_of(run: dict, name: str) -> np.ndarray:
    """What a run says: other numbers for every file, headline and seed; beyond 0..5 for STS-B."""
    _, _, rows, labels = FILES[name]
    draw = np.random.default_rng([len(name), rows, int((run["headline"] or 0) * 1000), run["seed"]])
    width = 1 if labels is None else len(labels)
    return draw.normal(2.5, 2.5, (rows, width)).astype(np.float32)


def write_run(folder: Path, run: dict, leave_out: tuple[str, ...] = ()) -> None:
    """A line and its predictions."""
    with (folder / "results.jsonl").open("a") as stream:
        stream.write(json.dumps(run) + "\n")
    for name, (task, split, rows, _) in FILES.items():
        if task == run["task"] and name not in leave_out:
            file = prediction_file(str(folder / "results.jsonl"), run, split)
            write_predictions(file, np.full(rows, -1), logits_of(run, name))


def settings(folder: Path, **changes) -> SubmissionSettings:
    names = {"results": str(folder / "results.jsonl"), "output": str(folder / "out" / "s.zip")}
    return SubmissionSettings(**{**names, "model": MODEL, **changes})


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


@pytest.fixture(scope="module")
def all_runs(tmp_path_factory) -> Path:
    """A folder with a run of every task."""
    folder = tmp_path_factory.mktemp("whole")
    for task in dict.fromkeys(task for task, *_ in FILES.values()):
        write_run(folder, line(task))
    return folder


def server_wants(names: Iterable[str], monkeypatch) -> None:
    """Fewer files than GLUE's, where the rest, QQP above all, would only take time."""
    chosen = tuple(member for member in submission.FILES if member.name in names)
    monkeypatch.setattr(submission, "FILES", chosen)


@pytest.fixture
def small(monkeypatch) -> None:
    server_wants(SMALL, monkeypatch)


# --- what is written


def test_the_files_are_those_of_the_server():
    """Rows and classes of all eleven, QQP's 390,965 rows among them."""
    found = {
        file.name: (file.task, file.split, file.rows, file.labels and list(file.labels))
        for file in submission.FILES
    }
    assert list(found.items()) == list(FILES.items())


def test_every_file_says_what_its_run_predicted(all_runs, capsys, monkeypatch):
    names = [name for name in FILES if name != "QQP.tsv"]
    server_wants(names, monkeypatch)
    found = built(all_runs)
    assert list(found) == names
    for name in names:
        assert found[name] == answers(line(FILES[name][0]), name), name
    values = [float(value) for _, value in found["STS-B.tsv"][1:]]
    assert min(values) == 0
    assert max(values) == 5
    table = capsys.readouterr().out.splitlines()
    assert [row.split()[0] for row in table[1:-1]] == names
    assert all("accuracy 50.0" in row and "the only run" in row for row in table[1:-1])


def test_the_same_predictions_give_the_same_bytes(all_runs, tmp_path, small):
    first, second = tmp_path / "a.zip", tmp_path / "b.zip"
    for output in (first, second):
        main(settings(all_runs, output=str(output)))
    assert first.read_bytes() == second.read_bytes()
    with zipfile.ZipFile(first) as archive:
        assert {info.date_time for info in archive.infolist()} == {(1980, 1, 1, 0, 0, 0)}
        assert {info.external_attr >> 16 for info in archive.infolist()} == {0o644}
    assert sorted(path.name for path in tmp_path.iterdir()) == ["a.zip", "b.zip"]


# --- which run


def test_the_best_predicted_run_on_validation_is_used_and_printed(tmp_path, small, capsys):
    for seed, headline in enumerate((0.5, 0.6)):
        write_run(tmp_path, line("wnli", headline, seed=seed))
    best = line("wnli", 0.7, seed=2, collapsed=True, mnli="runs/mnli")
    write_run(tmp_path, best)
    write_run(tmp_path, line("wnli", 0.9, seed=3), leave_out=("WNLI.tsv",))
    write_run(tmp_path, line("stsb"))
    file = prediction_file(str(tmp_path / "results.jsonl"), line("stsb"), "test")
    write_predictions(file, np.full(1379, -1), np.full((1379, 1), -0.0, np.float32))
    found = built(tmp_path, placeholders=True)
    assert found["WNLI.tsv"] == answers(best, "WNLI.tsv")
    assert {value for _, value in found["STS-B.tsv"][1:]} == {"0.000"}  # never -0.000
    (row,) = (row for row in capsys.readouterr().out.splitlines() if row.startswith("WNLI.tsv"))
    notes = "seed 2, best of 3, one answer for every validation row"
    assert re.search(rf"70.0 +wnli-a-\w{{10}}, {notes}$", row)


def test_a_zip_is_of_one_models_weights(tmp_path, small):
    """A folder's model was replaced, and its runs made again but for the best."""
    write_run(tmp_path, line("wnli", 0.9, weights="old"))
    write_run(tmp_path, line("wnli", 0.5, seed=1, weights="new"))
    write_run(tmp_path, line("stsb", 0.5, weights="new"))
    found = built(tmp_path, placeholders=True)
    assert found["WNLI.tsv"] == answers(line("wnli", 0.5, seed=1), "WNLI.tsv")
    write_run(tmp_path, line("wnli", 0.5, seed=1, weights="newer"))
    with pytest.raises(InputError, match="only runs of other weights"):
        built(tmp_path)


@pytest.mark.parametrize(
    "changes",
    [
        {"random_weights": True},
        {"status": "diverged", "headline": None},
        {"status": "failed"},
        {"official": False},
        {"model": "runs/b/model"},
        {"task": "rte"},
    ],
    ids=str,
)
def test_what_is_no_result_of_the_model_never_serves(tmp_path, small, changes):
    write_run(tmp_path, line("wnli", 0.5))
    write_run(tmp_path, line("wnli", 0.9, seed=1) | changes)
    found = built(tmp_path, placeholders=True)
    assert found["WNLI.tsv"] == answers(line("wnli", 0.5), "WNLI.tsv")


def test_one_run_predicts_both_halves_of_mnli_and_ax(tmp_path, small):
    best = line("mnli", 0.8, seed=1)
    for run in (line("mnli", 0.7), best, line("stsb"), line("wnli")):
        write_run(tmp_path, run)
    found = built(tmp_path)
    for name in ("MNLI-m.tsv", "MNLI-mm.tsv", "AX.tsv"):
        assert found[name] == answers(best, name)


def test_a_tie_is_broken_the_same_way_in_any_order(tmp_path, small):
    runs = [line("wnli", seed=seed) for seed in range(4)]
    zips = []
    for name, order in (("a", runs), ("b", runs[::-1])):
        (tmp_path / name).mkdir()
        for run in order:
            write_run(tmp_path / name, run)
        main(settings(tmp_path / name, placeholders=True))
        zips.append(Path(settings(tmp_path / name).output).read_bytes())
    assert zips[0] == zips[1]


# --- what is missing


def test_missing_predictions_are_named_with_their_reason_and_their_tasks(tmp_path, small):
    write_run(tmp_path, line("wnli"))
    write_run(tmp_path, line("mnli"), leave_out=("AX.tsv",))
    with pytest.raises(InputError) as error:
        main(settings(tmp_path))
    message = str(error.value)
    assert message.isprintable()
    assert "none for STS-B.tsv (no run), AX.tsv (not predicted by the run on MNLI);" in message
    assert "--tasks '[stsb, mnli]' --test true" in message
    assert not (tmp_path / "out").exists()


@pytest.mark.parametrize(
    ("changes", "reason"),
    [
        ({"status": "diverged"}, "no run that ended well"),
        ({"official": False}, "only runs on data with rows missing"),
        ({}, "only runs without --test true"),
        ({"settings": {"test": False}}, "only runs without --test true"),
    ],
)
def test_the_reason_is_the_first_that_leaves_no_run(tmp_path, small, changes, reason):
    # with test false the predictions there are an earlier run's
    write_run(
        tmp_path, line("wnli") | changes, leave_out=("WNLI.tsv",) * ("settings" not in changes)
    )
    write_run(tmp_path, line("stsb"))
    with pytest.raises(InputError, match=re.escape(f"WNLI.tsv ({reason})")):
        main(settings(tmp_path))


def test_placeholders_are_one_valid_answer_and_are_printed(tmp_path, small, capsys):
    write_run(tmp_path, line("wnli"))
    found = built(tmp_path, placeholders=True)
    assert {answer for _, answer in found["AX.tsv"][1:]} == {"entailment"}
    assert {answer for _, answer in found["STS-B.tsv"][1:]} == {"0.000"}
    printed = capsys.readouterr()
    assert printed.out.count("PLACEHOLDER") == 4
    assert "warning: STS-B.tsv, MNLI-m.tsv, MNLI-mm.tsv, AX.tsv hold placeholders" in printed.err


def test_a_zip_of_placeholders_alone_is_refused(tmp_path, small):
    write_run(tmp_path, line("wnli"), leave_out=("WNLI.tsv",))
    with pytest.raises(InputError, match=r"^placeholders needs .* got none \(no run, only runs"):
        main(settings(tmp_path, placeholders=True))
    assert not (tmp_path / "out").exists()


def test_a_model_that_is_not_in_the_results_is_refused_with_those_that_are(tmp_path):
    write_run(tmp_path, line("wnli"))
    write_run(tmp_path, line("wnli", model="c", random_weights=True))
    with pytest.raises(InputError, match=rf"model must be one .*, got b; there: {MODEL}$"):
        main(settings(tmp_path, model="b"))


@pytest.mark.parametrize(
    ("rows", "width", "value", "rule"),
    [
        (145, 2, 0.0, r"must be 146 rows of 2, .*, got \(145, 2\)"),
        (147, 2, 0.0, "must be 146 rows of 2"),
        (146, 3, 0.0, "must be 146 rows of 2"),
        (146, 2, np.nan, "must hold finite numbers"),
    ],
)
def test_predictions_that_do_not_fit_leave_an_old_zip_alone(
    tmp_path, small, rows, width, value, rule
):
    write_run(tmp_path, line("wnli"))
    file = prediction_file(str(tmp_path / "results.jsonl"), line("wnli"), "test")
    write_predictions(file, np.full(rows, -1), np.full((rows, width), value, np.float32))
    refused_beside_an_old_zip(tmp_path, rule)


def test_a_full_disk_leaves_an_old_zip_alone(tmp_path, small, monkeypatch):
    write_run(tmp_path, line("wnli"))
    write_bytes = Path.write_bytes

    def full(path: Path, content: bytes) -> int:
        if content == b"old":
            return write_bytes(path, content)
        raise OSError(errno.ENOSPC, "no space left")

    monkeypatch.setattr(Path, "write_bytes", full)
    refused_beside_an_old_zip(tmp_path, "^output must have room")


def refused_beside_an_old_zip(folder: Path, rule: str) -> None:
    """Nothing is written, and an earlier zip stays."""
    old = Path(settings(folder).output)
    old.parent.mkdir()
    old.write_bytes(b"old")
    with pytest.raises(InputError, match=rule):
        main(settings(folder, placeholders=True))
    assert [(path.name, path.read_bytes()) for path in old.parent.iterdir()] == [("s.zip", b"old")]


@pytest.mark.parametrize("output", ["results.jsonl", "FOLDER.zip", "file/s.zip"])
def test_an_output_that_is_no_zip_is_refused(tmp_path, monkeypatch, output):
    monkeypatch.chdir(tmp_path)
    Path("FOLDER.zip").mkdir()
    Path("file").touch()
    with pytest.raises(InputError, match="^output must "):
        SubmissionSettings(model="m", output=output)
