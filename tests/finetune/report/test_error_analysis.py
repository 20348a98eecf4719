"""Mistakes: the numbers are scikit-learn's, the rows are the data's, misfits are refused."""

import re
from dataclasses import replace
from pathlib import Path

import numpy as np
import pytest
from scipy.special import softmax
from sklearn.metrics import confusion_matrix

from finetune.report import error_analysis
from finetune.report.error_analysis import NUM_MISTAKES, ErrorAnalysisSettings, confusion_table
from finetune.results import append_result, prediction_file, run_name, write_predictions
from finetune.tasks import TASKS
from tiny import refused
from tiny_glue import write_split
from tiny_results import line as results_line

NAMES = TASKS["mnli"].labels


def random_data(task: str, rows: int = 120) -> dict[str, tuple]:
    """Labels, logits and texts of each split."""
    known, data = TASKS[task], {}
    for seed, split in enumerate(known.validation_splits):
        draw = np.random.default_rng(seed)
        if known.is_regression:
            labels = np.float32(draw.random(rows) * 5)
            logits = (labels + draw.normal(size=rows))[:, None]
        else:
            labels = draw.integers(0, known.num_labels, rows)
            logits = draw.normal(size=(rows, known.num_labels))
            logits[np.arange(rows), labels] += 1
            logits[:3] += 2000  # alike for all classes, and beyond what exp can hold
        texts = {name: [f"{name} {split} {i} said" for i in range(rows)] for name in known.columns}
        data[split] = labels, np.float32(logits), texts
    return data


def two_texts(texts: list[str], labels: list[int], logits: list[list[int]]) -> dict[str, tuple]:
    """The same of RTE."""
    columns = {"sentence1": texts, "sentence2": [f"{text} two" for text in texts]}
    return {"validation": (np.array(labels), np.float32(logits), columns)}


def add_run(folder: Path, task: str, data: dict[str, tuple], **changes) -> dict:
    line = results_line("runs/small/model", task, 0.4321)
    line |= {"glue_dir": str(folder / "glue"), **changes}
    append_result(str(folder / "results.jsonl"), line)
    for split, (labels, logits, texts) in data.items():
        write_split(folder / "glue", task, split, {**texts, "label": labels.tolist()})
        file = prediction_file(str(folder / "results.jsonl"), line, split)
        write_predictions(file, labels, logits)
    return line


def analyse(folder: Path, task: str, **changes) -> str:
    given = {"results": str(folder / "results.jsonl"), "model": "runs/small/model", "task": task}
    return error_analysis.main(ErrorAnalysisSettings(**given | changes))


def test_of_many_classes_only_mistakes_are_counted_the_most_frequent_first():
    ids, names = np.repeat(np.arange(30), 3), np.array([f"c{i}" for i in range(30)])
    table = confusion_table(ids, np.where(ids < 1, 29, np.where(np.arange(90) == 4, 5, ids)), names)
    rows = [line.split()[1::2] for line in table.splitlines()[2:]]
    assert rows == [["c0", "c29", "3"], ["c1", "c5", "1"]]


def test_names_of_classes_do_not_break_the_tables():
    task = replace(TASKS["cola"], labels=("a | b", "c"))
    rows = np.array([0, 1]), np.float32([[0, 1], [0, 1]]), {"sentence": ["x", "y"]}
    page = "\n".join(error_analysis.analyse_split(task, *rows))
    assert [len(row) for table in tables(page) for row in table] == [4] * 3 + [5] * 2


def tables(text: str) -> list[list[list[str]]]:
    """The cells of each table, its header first, without Markdown's own signs."""
    found, rows = [], []
    for line in [*text.splitlines(), ""]:
        if line.startswith("| "):
            cells = re.split(r"(?<!\\) \| ", line.removeprefix("| ").removesuffix(" |"))
            rows.append([re.sub(r"\\(.)", r"\1", cell.strip()) for cell in cells])
        elif rows:
            assert {len(row) for row in rows} == {len(rows[0])}
            found.append([rows[0], *rows[2:]])
            rows = []
    return found


@pytest.mark.parametrize("task", ["rte", "cola", "mnli"])
def test_the_confusion_is_scikit_learns(tmp_path, task):
    data = random_data(task)
    add_run(tmp_path, task, data)
    text = analyse(tmp_path, task)
    names = list(TASKS[task].labels)
    found = [t for t in tables(text) if t[0][0].startswith("label /")]
    assert len(found) == len(TASKS[task].validation_splits)
    for table, split in zip(found, TASKS[task].validation_splits):
        labels, logits, _ = data[split]
        counts = confusion_matrix(labels, logits.argmax(axis=1))
        shares = confusion_matrix(labels, logits.argmax(axis=1), normalize="true")
        assert table[0][1:] == [*names, "rows"]
        for name, row, count, share in zip(names, table[1:], counts, shares):
            cells = [f"{n} ({100 * s:.1f} %)" for n, s in zip(count, share)]
            assert row == [name, *cells, str(count.sum())]
        wrong = int(counts.sum() - np.trace(counts))
        assert f"## {split}: {wrong} of {len(labels)} rows wrong" in text
    assert "43.2 (x 100, validation split)" in text
    assert "collapsed" not in text


def test_a_collapsed_run_without_mistakes_says_both(tmp_path):
    data = two_texts(["a", "b"], [1, 1], [[0, 1], [0, 1]])
    add_run(tmp_path, "rte", data, collapsed=True)
    text = analyse(tmp_path, "rte")
    assert text.index("The run collapsed") < text.index("## validation")
    assert tables(text)[0][1] == ["entailment", "0 (0.0 %)", "0 (0.0 %)", "0"]
    assert "No row is wrong." in text


def test_the_mistakes_are_the_wrong_answers_of_highest_probability(tmp_path):
    data = random_data("mnli", rows=200)
    add_run(tmp_path, "mnli", data)
    found = [t for t in tables(analyse(tmp_path, "mnli")) if "probability" in t[0]]
    for table, split in zip(found, TASKS["mnli"].validation_splits):
        labels, logits, texts = data[split]
        assert len(table) == 1 + NUM_MISTAKES
        probabilities = softmax(logits.astype(np.float64), axis=1)
        answers = logits.argmax(axis=1)
        wrong = {int(row): probabilities[row].max() for row in np.flatnonzero(answers != labels)}
        shown = [int(row[0]) for row in table[1:]]
        assert [wrong[row] for row in shown] == sorted(wrong.values(), reverse=True)[:NUM_MISTAKES]
        for number, gold, answer, probability, premise, hypothesis in table[1:]:
            row = int(number)
            assert (gold, answer) == (NAMES[labels[row]], NAMES[answers[row]])
            assert float(probability) == pytest.approx(wrong[row], abs=1e-4)
            assert [premise, hypothesis] == [texts["premise"][row], texts["hypothesis"][row]]


def test_texts_are_shown_in_their_cells_and_shortened(tmp_path):
    odd = ["a | b * c <b>&amp;</b> `x` \n\t end", "word " * 200, "x" * 500]
    add_run(tmp_path, "rte", two_texts(odd, [0, 0, 0], [[0, 3], [0, 2], [0, 1]]))
    shown = [row[4] for row in tables(analyse(tmp_path, "rte"))[1][1:]]
    assert shown[0] == " ".join(odd[0].split())
    for text, full in zip(shown[1:], odd[1:]):
        assert len(text) <= error_analysis.MAX_CHARACTERS
        assert text.endswith(" …")
        assert full.startswith(text.removesuffix(" …"))


def test_a_regression_shows_its_largest_errors(tmp_path):
    data = random_data("stsb", rows=300)
    add_run(tmp_path, "stsb", data)
    labels, logits, texts = data["validation"]
    (largest,) = tables(analyse(tmp_path, "stsb"))
    errors = logits[:, 0].astype(np.float64) - labels
    assert len(largest) == 1 + NUM_MISTAKES
    assert [int(row[0]) for row in largest[1:]] == list(np.argsort(-abs(errors))[:NUM_MISTAKES])
    for row in largest[1:]:
        assert float(row[3]) == pytest.approx(errors[int(row[0])], abs=0.0051)
        assert row[4] == texts["sentence1"][int(row[0])]


def test_data_that_were_not_scored_are_refused(tmp_path):
    add_run(tmp_path, "rte", random_data("rte"))
    data = random_data("rte", rows=90)
    add_run(tmp_path, "rte", data, seed=9)
    found = "got other rows or labels; name their folder"
    refused(lambda: analyse(tmp_path, "rte"), "rte/validation must be the data", found)
    labels, _, texts = data["validation"]
    labels[[11, 40]] = 1 - labels[[11, 40]]
    other = {**texts, "label": labels.tolist()}
    write_split(tmp_path / "elsewhere", "rte", "validation", other)
    elsewhere = {"seed": 9, "glue_dir": str(tmp_path / "elsewhere")}
    refused(lambda: analyse(tmp_path, "rte", **elsewhere), found)


def test_one_scored_run_must_be_named_and_random_weights_only_by_their_folder(tmp_path):
    diverged = {"seed": 1, "status": "diverged", "metrics": None}
    changed = ({}, {"learning_rate": 3e-5}, diverged, {"seed": 2})
    runs = [add_run(tmp_path, "rte", random_data("rte"), **changes) for changes in changed]
    control = add_run(tmp_path, "rte", {}, seed=2, random_weights=True, status="failed")
    refused(lambda: analyse(tmp_path, "rte", seed=5), "seed 5, got none; it has the models small")
    refused(lambda: analyse(tmp_path, "mrpc"), "task mrpc", "got none; it has the tasks rte")
    refused(lambda: analyse(tmp_path, "rte", seed=1), "one scored run", "got none")
    refused(lambda: analyse(tmp_path, "rte", seed=2, run=run_name(control)), "got none")
    two = [run_name(run) for run in runs[:2]]
    refused(lambda: analyse(tmp_path, "rte"), "give its --run", *two)
    for changes in ({"run": two[0]}, {"run": two[1]}, {"seed": 2, "model": "small"}):
        assert "rows wrong" in analyse(tmp_path, "rte", **changes)
