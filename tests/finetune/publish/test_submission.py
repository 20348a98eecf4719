"""The zip for GLUE's server: what a plain reader of csv finds in it, and what is refused where."""

import csv
import errno
import io
import json
import re
import zipfile
from collections.abc import Iterable
from contextlib import suppress
from itertools import product
from pathlib import Path

import numpy as np
import pytest

from finetune.publish import submission
from finetune.publish.submission import SubmissionSettings, main
from finetune.results import prediction_file, write_predictions
from tiny import command
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


@pytest.fixture(scope="module")
def contents(all_runs) -> dict[str, list[str]]:
    """The lines of each file of a good zip."""
    main(settings(all_runs))
    with zipfile.ZipFile(settings(all_runs).output) as archive:
        return {name: archive.read(name).decode().splitlines() for name in archive.namelist()}


def server_wants(names: Iterable[str], monkeypatch) -> None:
    """Fewer files than GLUE's, where the rest, QQP above all, would only take time."""
    chosen = tuple(member for member in submission.FILES if member.name in names)
    monkeypatch.setattr(submission, "FILES", chosen)


@pytest.fixture
def small(monkeypatch) -> None:
    server_wants(SMALL, monkeypatch)


def zipped(file: Path, contents: dict[str, list[str]], method: int = zipfile.ZIP_STORED) -> str:
    with zipfile.ZipFile(file, "w", method) as archive:
        for name, lines in contents.items():
            text = "".join(text + "\n" for text in lines)
            archive.writestr(name, text.encode("utf-8", "surrogateescape"))
    return str(file)


def check(file: str) -> None:
    main(SubmissionSettings(check=file))


def refusal(file: str) -> str:
    """The one line with which a zip is refused."""
    with pytest.raises(InputError) as error:
        check(file)
    message = str(error.value)
    assert message.isprintable(), "more than one line, or bytes that upset a terminal"
    return message


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
    notes = "from MNLI, one answer for every validation row, best of 3"
    assert re.search(rf"70.0 +wnli-a-\w{{10}}, learning rate 2e-05, seed 2, {notes}$", row)


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
    old = Path(settings(tmp_path).output)
    old.parent.mkdir()
    old.write_bytes(b"old")
    with pytest.raises(InputError, match=rule):
        main(settings(tmp_path, placeholders=True))
    assert [(path.name, path.read_bytes()) for path in old.parent.iterdir()] == [("s.zip", b"old")]


def test_a_full_disk_leaves_an_old_zip_alone(tmp_path, small, monkeypatch):
    write_run(tmp_path, line("wnli"))
    old = Path(settings(tmp_path).output)
    old.parent.mkdir()
    old.write_bytes(b"old")

    def full(path: Path, content: bytes) -> int:
        raise OSError(errno.ENOSPC, "no space left")

    monkeypatch.setattr(Path, "write_bytes", full)
    with pytest.raises(InputError, match="^output must have room"):
        main(settings(tmp_path, placeholders=True))
    assert [(path.name, path.read_bytes()) for path in old.parent.iterdir()] == [("s.zip", b"old")]


def test_our_own_zip_is_held_to_the_same_rules(tmp_path, small, monkeypatch):
    write_run(tmp_path, line("wnli"))
    monkeypatch.setattr(submission, "HEADER", "id\tprediction")
    made = submission.tsv(str(tmp_path), submission.FILES[0], submission.Source(None, ""))
    monkeypatch.undo()
    monkeypatch.setattr(submission, "tsv", lambda *_: made)
    with pytest.raises(InputError, match="CoLA.tsv line 1 must be 'index"):
        main(settings(tmp_path, placeholders=True))
    assert not Path(settings(tmp_path).output).exists()


# --- what is refused, and where

BROKEN = {
    "other header": ("RTE.tsv", 1, ["id\tlabel"], "line 1 must be 'index"),
    "byte order mark": ("RTE.tsv", 1, ["\ufeffindex\tprediction"], "line 1 must be 'index"),
    "other line ends": ("RTE.tsv", 9, ["7\tentailment\r"], "line 9 must be 7, a tab and one of"),
    "row left out": ("RTE.tsv", 9, [], "line 9 must be 7"),
    "padded index": ("RTE.tsv", 9, ["07\tentailment"], "line 9 must be 7"),
    "blanks for the tab": ("RTE.tsv", 9, ["7    entailment"], "line 9 must be 7"),
    "third column": ("RTE.tsv", 9, ["7\tentailment\t0.9"], "line 9 must be 7"),
    "id for a name": ("RTE.tsv", 9, ["7\t1"], "line 9 .* one of entailment, not_entailment"),
    "class of another task": ("MNLI-mm.tsv", 9, ["7\tnot_entailment"], "line 9 .*neutral"),
    "name for an id": ("WNLI.tsv", 147, ["145\tentailment"], "line 147 .* one of 0, 1"),
    "float for an id": ("MRPC.tsv", 9, ["7\t1.0"], "line 9 .* one of 0, 1"),
    "too high": ("STS-B.tsv", 9, ["7\t5.001"], "line 9 .* a number from 0 to 5"),
    "not a number": ("STS-B.tsv", 9, ["7\tnan"], "line 9 .* a number"),
    "python's number": ("STS-B.tsv", 9, ["7\t0_1"], "line 9 .* a number"),
    "other digits": ("STS-B.tsv", 9, ["7\t\uff13"], "line 9 .* a number"),
    "no text": ("AX.tsv", 9, ["7\tneutral\udcff"], "line 9 must be 7"),
    "one row short": ("RTE.tsv", 3001, [], "must have the 3000 rows .*, got 2999"),
    "one row more": ("RTE.tsv", 3002, ["3000\tentailment"], "must have the 3000 rows"),
    "cut off": ("MRPC.tsv", 391, None, "must have the 1725 rows .*, got 389"),
    "nothing": ("WNLI.tsv", 1, None, "line 1 must be 'index"),
}


@pytest.mark.parametrize(("name", "number", "lines", "rule"), BROKEN.values(), ids=BROKEN)
def test_a_broken_line_is_refused_by_its_number(
    contents, tmp_path, monkeypatch, name, number, lines, rule
):
    """`lines` stand in place of the good line of that number; None cuts the file off before it."""
    files = {other: good for other, good in contents.items() if other != "QQP.tsv"}
    server_wants(files, monkeypatch)
    good = files[name]
    files[name] = good[: number - 1] + ([] if lines is None else [*lines, *good[number:]])
    message = refusal(zipped(tmp_path / "s.zip", files))
    assert re.search(rf"^check: {name} {rule}", message)


def test_what_others_write_differently_is_taken(contents, tmp_path, capsys):
    lines = ["0\t5", "1\t0", "2\t3.", "3\t4.123456789", "4\t1e-05", "5\t5.000"]
    others = {"STS-B.tsv": [contents["STS-B.tsv"][0], *lines, *contents["STS-B.tsv"][7:]]}
    backwards = dict(reversed((contents | others).items()))
    check(zipped(tmp_path / "s.zip", backwards, zipfile.ZIP_DEFLATED))
    assert "all 11 files are as the server takes them" in capsys.readouterr().out
    with zipfile.ZipFile(tmp_path / "t.zip", "w") as archive:
        for name, lines in contents.items():
            archive.writestr(name, "\n".join(lines))  # the last line without an end
    check(str(tmp_path / "t.zip"))


@pytest.mark.parametrize(
    ("rename", "found"),
    [
        ({"RTE.tsv": None}, "no RTE.tsv"),
        ({"RTE.tsv": "rte.tsv"}, "'rte.tsv', no RTE.tsv"),
        ({name: f"s/{name}" for name in FILES}, "'s/CoLA.tsv', .*, no AX.tsv"),
        ({"RTE.tsv": "\u202ervt\n.tsv"}, r"'\\u202ervt\\n.tsv', no RTE.tsv"),
        ({None: "readme.txt"}, "'readme.txt'"),
    ],
)
def test_other_files_are_refused_by_name(contents, tmp_path, rename, found):
    named = {rename.get(name, name): lines for name, lines in contents.items()}
    named |= {rename[None]: []} if None in rename else {}
    named.pop(None, None)
    message = refusal(zipped(tmp_path / "s.zip", named))
    assert re.search(rf"AX.tsv once and nothing else, got {found}; zip these files alone", message)


def test_a_file_that_is_there_twice_is_refused(contents, tmp_path):
    file = zipped(tmp_path / "s.zip", contents)
    with zipfile.ZipFile(file, "a") as archive, pytest.warns(UserWarning, match="Duplicate"):
        archive.writestr("RTE.tsv", "index\tprediction\n")
    assert "got 'RTE.tsv', 'RTE.tsv';" in refusal(file)


def test_what_is_no_zip_is_refused(tmp_path):
    (tmp_path / "text.zip").write_text("index\tprediction\n")
    for name in ("none.zip", "", "s" * 300, "text.zip"):
        assert refusal(str(tmp_path / name)).startswith("check must be a zip, got ")


@pytest.mark.parametrize("method", [zipfile.ZIP_STORED, zipfile.ZIP_DEFLATED])
def test_a_damaged_zip_is_refused_in_one_line_or_reads_as_before(
    contents, tmp_path, monkeypatch, method
):
    """Cut off anywhere, and with any byte changed: the checksum covers what no rule can."""
    server_wants(["WNLI.tsv"], monkeypatch)
    file = zipped(tmp_path / "s.zip", {"WNLI.tsv": contents["WNLI.tsv"]}, method)
    good = Path(file).read_bytes()
    text = "\n".join(contents["WNLI.tsv"]) + "\n"
    damaged = [good[:length] for length in range(len(good))]
    for place, value in product(range(len(good)), (0, 1, 255)):
        damaged.append(good[:place] + bytes([good[place] ^ value]) + good[place + 1 :])
    damaged += [good[:place] + b"\xff" * 4 + good[place + 4 :] for place in range(len(good) - 4)]
    for packed in damaged:
        with suppress(InputError):
            submission.check_zip(io.BytesIO(packed), "s.zip")
            with zipfile.ZipFile(io.BytesIO(packed)) as archive:
                assert archive.read("WNLI.tsv").decode() == text


# --- the command


def test_the_command_checks_a_zip_and_refuses_in_one_line(contents, tmp_path):
    lines = [*contents["RTE.tsv"][:8], "7\tmaybe", *contents["RTE.tsv"][9:]]
    file = zipped(tmp_path / "s.zip", contents | {"RTE.tsv": lines})
    done = command("-m", "finetune.publish.submission", "--check", file)
    assert done.returncode == 2
    assert done.stderr == (
        "error: check: RTE.tsv line 9 must be 7, a tab and one of entailment, not_entailment, "
        "got '7\\tmaybe'; correct it\n"
    )


@pytest.mark.parametrize(
    ("changes", "rule"),
    [
        ({}, "submission needs one of model and check, got neither"),
        ({"model": "m", "check": "s.zip"}, "got model and check"),
        ({"model": "m", "output": "results.jsonl"}, "output must name a file that ends in .zip"),
        ({"model": "m", "output": "FOLDER.zip"}, "output must name a file that ends in .zip"),
        ({"model": "m", "output": "file/s.zip"}, "output must "),
    ],
)
def test_settings_that_say_too_little_or_too_much_are_refused(tmp_path, monkeypatch, changes, rule):
    monkeypatch.chdir(tmp_path)
    Path("FOLDER.zip").mkdir()
    Path("file").touch()
    with pytest.raises(InputError, match=rule):
        SubmissionSettings(**changes)
