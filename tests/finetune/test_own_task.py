"""Tasks of one's own: from a file to predictions, and what is refused on the way."""

import csv
import dataclasses
import json
import math
import re
import shlex
from pathlib import Path
from unittest.mock import Mock

import datasets
import numpy as np
import pandas as pd
import pytest
import yaml
from sklearn.metrics import accuracy_score, f1_score

from finetune import data, glue
from finetune.data import read_rows, read_split_columns
from finetune.describe_task import DescribeSettings, main
from finetune.metrics import is_collapsed, score_fields
from finetune.publish.model_card import finetuned_card
from finetune.report import __main__ as report
from finetune.report import error_analysis
from finetune.report.error_analysis import ErrorAnalysisSettings
from finetune.results import inputs_differ, read_results, run_name, write_answers
from finetune.run_info import hash_inputs, hash_task_files
from finetune.settings import GlueSettings
from finetune.simple_features import SimpleFeaturesSettings, score_tasks
from finetune.tasks import VALUE_METRICS, Task, load_task, recorded_task
from tiny import ROOT, refused
from tiny_glue import glue_run, run_settings, sentences, tiny_model
from train.command_line import run_command

COLORS = ["red", "green", "blue"] * 4
TEXTS = [f"good film {row}" for row in range(12)]
GOOD = {"text": TEXTS, "color": COLORS}


@pytest.fixture(autouse=True)
def in_a_folder(tmp_path, monkeypatch):
    monkeypatch.chdir(tmp_path)


def write(file: str, columns: dict[str, list]) -> str:
    """Write columns in the format of the file's name."""
    frame = pd.DataFrame(columns)
    if file.endswith(".parquet"):
        frame.to_parquet(file)
    elif file.endswith(".jsonl"):
        frame.to_json(file, orient="records", lines=True)
    elif file.endswith(".tsv"):
        frame.to_csv(file, sep="\t", index=False, quoting=csv.QUOTE_NONE)
    else:
        # as spreadsheets write it, with a byte order mark
        frame.to_csv(file, index=False, lineterminator="\r\n", encoding="utf-8-sig")
    return file


def describe(train: str, **changes) -> Task:
    values = {"columns": ("text",), "label_column": "color", "output": "own.yaml", **changes}
    main(DescribeSettings(train=train, **values))
    return load_task(values["output"])


COMMANDS = {
    "finetune.describe_task": (main, DescribeSettings),
    "finetune/glue.py": (glue.main, GlueSettings),
    "finetune.report.error_analysis": (error_analysis.main, ErrorAnalysisSettings),
}


def test_the_four_commands_of_the_guide_lead_from_a_csv_file_to_predictions(capsys):
    """Word for word, in this process: a launcher only starts the script that it names."""
    guide = (ROOT / "docs/guides/your-own-task.md").read_text()
    section = guide.split("## From a .csv")[1].split("\n## ")[0]
    blocks = re.findall(r"^```(\w*)\n(.*?)^```", section, re.MULTILINE | re.DOTALL)
    commands = [block for language, block in blocks if not language]
    assert len(commands) == 4
    tiny_model(Path("runs/mine/model"), "roformer")
    texts, labels = sentences(400, 0)
    names = ["positive" if label else "negative" for label in labels]
    write("reviews.csv", {"review": texts, "stars": labels, "sentiment": names})
    ids = [f"00{row}" for row in range(9)]
    write("new.csv", {"id": ids, "review": texts[:9]})
    for command in commands[:3]:
        words = shlex.split(command.replace("\\\n", " "))
        (name,) = COMMANDS.keys() & set(words)
        flags = words[words.index(name) + 1 :]
        if name == "finetune/glue.py":  # the model is tiny
            flags += ["--epochs=8", "--batch_size=8", "--length=32", "--learning_rate=5e-3"]
        run_command(*COMMANDS[name], flags)
        if name == "finetune.report.error_analysis":  # the task by its name, too
            run_command(*COMMANDS[name], [flag.removesuffix(".yaml") for flag in flags])
    printed = capsys.readouterr().out
    code = re.fullmatch(r"python - <<'END'\n(.*)END\n", commands[3], re.DOTALL)[1]
    exec(compile(code, "guide", "exec"), {})
    found = yaml.safe_load(capsys.readouterr().out.strip().splitlines()[-1])
    assert [x["label"] for x in found] == ["positive", "negative"]
    assert re.search(r"## validation: 0 of \d\d rows wrong", printed)
    assert "within the split, also one held out of another file." in printed
    rows = pd.read_csv(re.search("test rows with predictions: (.*)", printed)[1], dtype=str)
    assert (rows["id"].tolist(), rows["review"].tolist()) == (ids, texts[:9])
    assert rows["prediction"].tolist() == names[:9]


@pytest.mark.parametrize("suffix", ["csv", "tsv", "jsonl", "parquet"])
@pytest.mark.parametrize("values", [COLORS, [3, 10, 2] * 4, [2.0, 3.0, 10.0] * 4])
def test_files_of_all_types_and_labels_of_all_kinds_are_the_same_task(suffix, values, capsys):
    """Quotes, numbers, dates and names of missing values are text like any other."""
    texts = ['"a day', "NA", "null", "nan", "12", "2020-01-01", '12"', "a,b", *TEXTS[:4]]
    task = describe(write(f"own.{suffix}", {"text": texts, "color": values}), validation_share=0.25)
    is_text = suffix in ("csv", "tsv")  # a number is what the file says
    names = [str(x) if is_text else str(x).removesuffix(".0") for x in values]
    expected = tuple(sorted(set(names), key=str if values is COLORS else float))
    assert task.labels == expected
    splits = [read_split_columns(task, split, None) for split in ("train", "validation")]
    assert [len(columns["label"]) for columns in splits] == [9, 3]
    found = {text: label for x in splits for text, label in zip(x["text"], x["label"])}
    assert {text: expected[label] for text, label in found.items()} == dict(zip(texts, names))
    assert "validation: 3 rows" in capsys.readouterr().out


@pytest.mark.parametrize("suffix", ["csv", "jsonl"])
def test_texts_may_have_lines(suffix):
    texts = [f"{row:04}\n" * 300 for row in range(3)]
    columns = {"text": texts, "color": ["no", "yes", "no"]}
    task = describe(write(f"own.{suffix}", columns), validation=write(f"v.{suffix}", columns))
    assert read_split_columns(task, "train", None)["text"] == texts
    assert task.labels == ("no", "yes")  # which YAML reads as truth values without quotes


def test_names_of_classes_come_back_from_the_file():
    for names in (["1e3", "2.5E+5", "😀", "0x1e"], [str(2**60), str(2**60 + 1)]):
        train = write("own.csv", {"text": TEXTS, "color": names * (12 // len(names))})
        Path("own.yaml").unlink(missing_ok=True)
        assert describe(train, validation=train).labels == tuple(sorted(names))


def test_columns_without_a_name_stay_apart():
    Path("own.csv").write_text("text,color,,\na,red,5,7\n")
    task = Task(name="own", columns=("text",), label_column="color", train="own.csv")
    assert [*read_rows(task, "train", None)[1].values()] == [["a"], ["red"], ["5"], ["7"]]


@pytest.mark.parametrize("labels", [["a", "b"], [0, 1], [0.5, 1.5], [True, False]])
def test_unused_columns_of_jsonl_may_hold_anything(labels):
    rows = [{"text": x, "color": y, "meta": z} for x, y, z in zip("ab", labels, (1, {"x": "y"}))]
    Path("own.jsonl").write_text("\n".join(map(json.dumps, rows)))
    task = Task(name="own", columns=("text",), label_column="color", train="own.jsonl")
    columns = {"text": ["a", "b"], "color": labels, "meta": [1, {"x": "y"}]}
    assert read_rows(task, "train", None) == ("own.jsonl", columns)
    rows = columns | {"text": ["a\rb", "c"], "id": [2**60 + 1, None]}
    write_answers(Path("answers.csv"), rows, None, np.zeros((2, 1)))
    answers = pd.read_csv("answers.csv", dtype=str, keep_default_na=False)
    assert answers["meta"].tolist() == ["1", "{'x': 'y'}"]
    assert answers["id"].tolist() == [str(2**60 + 1), ""]


def test_ids_are_read_where_the_rows_have_no_names(capsys):
    train = write("own.csv", {"text": TEXTS, "color": [0, 1, 2] * 4})
    task = describe(train, labels=("blue", "green", "red", "pink"), validation=train)
    assert read_split_columns(task, "train", None)["label"].tolist() == [0, 1, 2] * 4
    assert "warning: class pink has no row in train" in capsys.readouterr().err
    write("some.csv", {"text": TEXTS[:2], "color": ["blue", "green"]})
    write("own.csv", {"text": TEXTS, "color": COLORS})
    describe("own.csv", validation="some.csv", output="other.yaml")
    assert "warning: class red has no row in validation" in capsys.readouterr().err
    refused(lambda: own_run(test=True), "test must be false")


def test_classes_that_are_numbers_are_no_ids_and_may_have_another_form():
    train = write("own.csv", {"text": TEXTS, "color": ["2", "1.0", "3", "2.0", "1", "3.0"] * 2})
    floats = write("floats.csv", {"text": TEXTS[:3], "color": ["1.0", "2.0", "1"]})
    hidden = write("hidden.csv", {"text": TEXTS[:2], "color": [-1, -1]})
    task = describe(train, validation=floats, test=hidden, output="folder/own.yaml")
    assert task.labels == ("1", "2", "3")
    assert read_split_columns(task, "validation", None)["label"].tolist() == [0, 1, 0]
    assert read_split_columns(task, "test", None)["label"].tolist() == [-1, -1]  # none


def test_a_blank_line_of_one_column_is_an_empty_text():
    Path("new.csv").write_text("text\n\nfirst\n\nsecond\n\n")
    task = describe(write("own.csv", GOOD), test="new.csv")
    assert read_split_columns(task, "test", None)["text"] == ["", "first", "", "second"]


@pytest.mark.parametrize(
    ("text", "found"), [("text;color\na, b;red\n", "semicolons"), ('text\na\n"a"b\n', "line 3")]
)
def test_what_is_wrong_with_a_csv_file_is_said(text, found):
    Path("own.csv").write_text(text)
    refused(lambda: describe("own.csv"), "own.csv", found)


def test_held_out_rows_depend_on_the_seed_and_equal_texts_stay_together(capsys):
    file = write("own.csv", {"text": TEXTS * 3, "color": COLORS * 3})
    tasks = [describe(file, split_seed=seed, output=f"{seed}.yaml") for seed in (0, 0, 1)]
    held = [set(read_split_columns(task, "validation", None)["text"]) for task in tasks]
    assert held[0] == held[1] != held[2]
    assert not held[0] & set(read_split_columns(tasks[0], "train", None)["text"])
    assert "also in train" not in capsys.readouterr().err


def test_texts_of_train_in_another_split_are_counted_in_a_warning(capsys):
    other = write("v.csv", {"text": [*TEXTS[:2], "other"], "color": COLORS[:3]})
    describe(write("own.csv", GOOD), validation=other)
    assert capsys.readouterr().err == "warning: 2 rows of validation are also in train\n"


@pytest.mark.parametrize(
    ("columns", "changes", "words"),
    [
        ({"body": TEXTS, "color": COLORS}, {}, ["own.csv", "text, color", "got body, color"]),
        ({**GOOD, "color": ["", *COLORS[1:]]}, {}, ["color of own.csv", "'' in row 0"]),
        ({**GOOD, "color": ["red"] * 12}, {}, ["labels", "two different classes", "got red"]),
        ({**GOOD, "color": [0.5] * 12}, {}, ["color", "got 0.5", "--regression true"]),
        (GOOD, {"regression": True}, ["color of own.csv", "numbers", "'red' in row 0"]),
        ({**GOOD, "color": [1e39] * 12}, {"regression": True}, ["color of own.csv", "numbers"]),
        (GOOD, {"labels": ("red", "green")}, ["color of own.csv", "red, green", "'blue' in"]),
        (GOOD, {"labels": ("red", "red")}, ["labels", "different"]),
        (GOOD, {"metrics": ("f1",)}, ["metrics", "macro_f1", "3 classes"]),
        (GOOD, {"metrics": ("rouge",)}, ["metrics", "accuracy", "got rouge"]),
        (GOOD, {"headline": "matthews"}, ["headline", "accuracy, macro_f1", "got matthews"]),
        (GOOD, {"columns": ("text", "text")}, ["columns", "one or two"]),
        (GOOD, {"validation_share": 1.0}, ["validation_share", "below 1"]),
        (GOOD, {"validation": "none.csv"}, ["none.csv must be a file"]),
        (GOOD, {"validation": "own.txt"}, ["own.txt", ".csv"]),
        (GOOD, {"name": "rte"}, ["name", "rte"]),
        (GOOD, {"labels": ("red", "blue"), "regression": True}, ["labels must be null"]),
        (GOOD, {"value_range": (0.0, 5.0)}, ["value_range must", "null for classes"]),
        ({"label": TEXTS, "color": COLORS}, {"columns": ("label",)}, ["columns must"]),
        ({"text": ["a", "a"], "color": ["x", "y"]}, {}, ["train of own", "different texts"]),
        (GOOD | {"prediction": COLORS}, {"test": "own.csv"}, ["own.csv must not", "prediction"]),
    ],
)
def test_a_task_that_cannot_be_is_refused_in_one_line(columns, changes, words):
    refused(lambda: describe(write("own.csv", columns), **changes), *words)


@pytest.mark.parametrize(
    ("text", "words"),
    [
        ("columns: [text]\nlabels: [a, b]\n", ["train of own.yaml", "null"]),
        ("colums: [text]\n", ["colums", "columns"]),
    ],
)
def test_a_wrong_description_is_refused_in_one_line(text, words):
    Path("own.yaml").write_text(text)
    refused(lambda: GlueSettings(model="m", task="own.yaml"), *words)


def test_a_file_with_other_content_is_never_overwritten():
    train = write("own.csv", GOOD)
    for _ in range(2):
        describe(train)
    edited = Path("own.yaml").read_text() + "# mine\n"
    Path("own.yaml").write_text(edited)
    refused(lambda: describe(train), "output", "own.yaml")
    assert Path("own.yaml").read_text() == edited
    Path("folder.yaml").mkdir()
    refused(lambda: describe(train, output="folder.yaml"), "output", "folder.yaml")


def test_a_data_set_of_the_hub_gives_its_class_names(monkeypatch):
    names = datasets.ClassLabel(names=["red", "green"])
    features = datasets.Features({"text": datasets.Value("string"), "color": names})
    rows = datasets.Dataset.from_dict({"text": ["a", "b", "c"], "color": [1, 0, 1]}, features)
    load_dataset = Mock(return_value=rows)
    monkeypatch.setattr(data.datasets, "load_dataset", load_dataset)
    options = {"hub": "me/colors", "hub_config": "small", "validation": "valid"}
    task = describe("train[:9]", **options)
    asked = {(*call.args, call.kwargs["split"]) for call in load_dataset.call_args_list}
    assert asked == {("me/colors", "small", "train[:9]"), ("me/colors", "small", "valid")}
    assert task.labels == ("green", "red")
    assert read_split_columns(task, "train", None)["label"].tolist() == [0, 1, 0]


def own_run(**changes) -> dict:
    tiny_model(Path("model"), "roformer")
    return glue_run(run_settings(Path(), "own.yaml", glue_dir=None, **changes))


def predicted() -> list:
    (file,) = Path("predictions").rglob("test.csv")
    return pd.read_csv(file)["prediction"].tolist()


def test_pairs_of_three_classes_are_scored_on_labelled_test_rows(capsys):
    """From files to the report and the card, beside a control, without the YAML file."""
    (first, a), (second, b) = sentences(240, 0), sentences(240, 1)
    names = [("none", "one", "both")[x + y] for x, y in zip(a, b)]
    columns = {"one": first, "two": second, "color": names}
    for file, rows in (("own.csv", slice(200)), ("test.csv", slice(200, 240))):
        write(file, {name: values[rows] for name, values in columns.items()})
    task = describe("own.csv", test="test.csv", columns=("one", "two"))
    assert task.labels == ("both", "none", "one")
    result = own_run(test=True, epochs=6)
    truth_and_answers = names[200:], predicted()
    accuracy = accuracy_score(*truth_and_answers)
    macro_f1 = f1_score(*truth_and_answers, average="macro")
    assert result["test_metrics"] == pytest.approx({"accuracy": accuracy, "macro_f1": macro_f1})
    score_tasks(SimpleFeaturesSettings(tasks=["own.yaml"], output="results.jsonl"))
    Path("own.yaml").unlink()
    records = read_results("results.jsonl")
    assert recorded_task(records[0]) == task
    run_names = [run_name(record).rpartition("-")[0] for record in records]
    assert run_names == ["own-model", "own-simple-features"]
    card = str(finetuned_card(result, "roformer"))
    assert f"| test | all | {100 * accuracy:.1f} |" in card
    assert not re.search("English|language", card)
    report.main(report.ReportSettings(results="results.jsonl"))
    printed = capsys.readouterr().out
    assert "tasks of your own" in printed
    found = pd.read_csv("report.csv", dtype=str)["test_metrics accuracy"]
    assert str(accuracy) in found.tolist()


def test_a_run_is_recorded_after_the_file_of_its_answers(monkeypatch):
    write("own.csv", GOOD)
    describe("own.csv", test=write("test.csv", {"text": TEXTS}))
    monkeypatch.setattr(glue, "write_answers", lambda *rest: 1 / 0)
    with pytest.raises(ZeroDivisionError):
        own_run(test=True)
    assert not Path("results.jsonl").exists()


def test_simple_features_score_test_rows_and_read_chinese_characters():
    texts = ["红色的花", "蓝色的海", "白色的云"] * 4  # no spaces: a word is a character
    train, test = (write(f"{x}.csv", {"text": texts, "color": COLORS}) for x in ("train", "test"))
    describe(train, validation=train, test=test)
    for with_test, rows, lines in ((False, 12, 1), (True, 12, 2), (True, 12, 2), (True, 9, 3)):
        write(test, {"text": texts[:rows], "color": COLORS[:rows]})
        score_tasks(SimpleFeaturesSettings(["own.yaml"], test=with_test))
        records = [json.loads(x) for x in Path("runs/results.jsonl").read_text().splitlines()]
        assert len(records) == lines
        assert ("test_metrics" in records[-1]) == with_test
    assert records[-1]["headline"] == records[-1]["test_metrics"]["accuracy"] == 1.0


def test_a_regression_of_any_range_is_scored_and_predicted():
    texts, labels = sentences(80, 0)
    write("own.jsonl", {"text": texts, "color": [10.0 * label - 3 for label in labels]})
    write("test.jsonl", {"text": texts[:3]})
    task = describe("own.jsonl", regression=True, test="test.jsonl")
    assert task.metrics == VALUE_METRICS
    assert "test_metrics" not in own_run(test=True)
    assert np.isfinite(predicted()).tolist() == [True] * 3
    values = np.array([[-1.0], [2.0]], np.float32)
    logits = dict.fromkeys(("validation", "test"), values)
    scores = score_fields(task, logits, dict.fromkeys(logits, np.array([-1.0, 7.0])))
    assert scores["test_metrics"]["spearman"] == pytest.approx(1)  # -1 is a label like any other
    assert is_collapsed(task, values, np.array([0.0, 2000.0]))
    for lowest, missing in ((-1.0, False), (0.0, True)):  # -1 stands for none outside the range
        ranged = dataclasses.replace(task, value_range=(lowest, 5.0))
        assert ranged.is_missing(np.array([math.nan, -1.0])).tolist() == [True, missing]


def test_the_hash_covers_what_decides_the_rows_and_their_scores():
    file, metrics = write("own.csv", GOOD), ("accuracy", "macro_f1")
    same = [{"title": "Own"}, {"metrics": metrics}]
    other = [{"split_seed": 1}, {"labels": ("green", "red", "blue")}, {"metrics": ("matthews",)}]
    every = enumerate([*same, *other])
    tasks = [describe(file, output=f"{i}/own.yaml", **changes) for i, changes in every]
    hashes = [hash_task_files(task, None) for task in tasks]
    assert (len({*hashes[:2]}), len({*hashes})) == (1, 4)
    Path("own.csv").write_text(Path("own.csv").read_text() + "more,red\n")
    assert hash_task_files(tasks[0], None) not in hashes


def test_a_run_with_other_test_rows_is_made_again():
    describe(write("own.csv", GOOD), test=write("test.csv", {"text": TEXTS}))
    run = GlueSettings(model="m", task="own.yaml", test=True)
    before = hash_inputs(run)
    assert before["weights"] is None  # no folder, so a model of the hub
    write("test.csv", {"text": TEXTS[:9]})
    assert inputs_differ(hash_inputs(run), before)
    assert not inputs_differ(hash_inputs(dataclasses.replace(run, test=False)), before)
