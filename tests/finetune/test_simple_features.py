"""The control from simple features: its numbers are scikit-learn's, its records are results."""

import json
import re
from collections import Counter
from concurrent.futures import ThreadPoolExecutor

import numpy as np
import pytest
from sklearn.feature_extraction.text import TfidfVectorizer

from finetune.metrics import compute_metrics
from finetune.results import SIMPLE_FEATURES, prediction_file, read_results
from finetune.simple_features import WORD, SimpleFeaturesSettings, features, predict, score_tasks
from finetune.tasks import TASKS
from tiny import refused
from tiny_glue import predictions_of, write_split


def ask(folder, *tasks) -> SimpleFeaturesSettings:
    output = str(folder / "results.jsonl")
    return SimpleFeaturesSettings(tasks=list(tasks), glue_dir=str(folder / "glue"), output=output)


def test_features_of_a_pair_are_cosine_and_share_of_common_words():
    first, second = ["a good film", "the play", "sad"], ["good good film today", "a book", "sad"]
    vectorizer = TfidfVectorizer().fit([*first, *second])  # leaves out words of one letter
    found = features(vectorizer, TASKS["mrpc"], {"sentence1": first, "sentence2": second})
    vectors = [vectorizer.transform(texts).toarray() for texts in (first, second)]
    assert found[:, 0] == pytest.approx([a @ b for a, b in zip(*vectors)])
    assert found[:, 1] == pytest.approx([2 / 3, 0, 1])
    assert re.findall(WORD, "2008年 NBA球, a day") == ["2008", "年", "NBA", "球", "day"]


def test_records_hold_the_scores_of_the_predictions_beside_them(folder):
    settings = ask(folder, "sst2", "stsb", "mnli")
    score_tasks(settings)
    records = read_results(settings.output)
    assert [record["task"] for record in records] == ["sst2", "stsb", "mnli"]
    for record in records:
        task = TASKS[record["task"]]
        for split in task.validation_splits:
            labels, logits = predictions_of(settings, record, split)
            assert logits.shape == (record["rows"][split], task.num_labels)
            answers = logits[:, 0] if task.labels is None else logits.argmax(axis=1)
            assert compute_metrics(task, answers, labels) == record["metrics"][split]
    assert records[0]["headline"] == 1.0  # a word tells the class
    assert records[0]["command"].startswith("python -m finetune.simple_features --tasks '[sst2]'")
    assert records[0]["model"] == SIMPLE_FEATURES
    assert np.mean([x["official"] for x in records]) == 0
    # a class that is not in the training split is never predicted
    assert records[2]["metrics"]["validation_matched"]["accuracy"] == pytest.approx(2 / 3)


def test_a_task_is_scored_once_for_the_same_data(folder, capsys):
    settings = ask(folder, "sst2", "mnli")
    with ThreadPoolExecutor(2) as pool:
        list(pool.map(score_tasks, [settings, settings]))
    [record, _] = read_results(settings.output)
    stale = prediction_file(settings.output, record, "test")  # would be taken for the new data's
    writing = stale.with_name("validation.parquet.0a.tmp")  # of another process
    for file in (stale, writing):
        file.write_bytes(b"")
    texts = {"sentence": ["good film", "bad film", "sad day"], "label": [1, 0, 0]}
    write_split(folder / "glue", "sst2", "train", texts)
    score_tasks(settings)
    lines = [json.loads(x)["task"] for x in (folder / "results.jsonl").read_text().splitlines()]
    assert Counter(lines) == {"sst2": 2, "mnli": 1}
    assert writing.exists() > stale.exists()
    assert len(capsys.readouterr().out.splitlines()) == 3


def test_missing_data_are_refused_and_a_task_that_cannot_be_fitted_is_left_out(folder, capsys):
    refused(lambda: ask(folder, "ax"), "task must", "got 'ax'")
    refused(lambda: score_tasks(ask(folder, "rte")), "glue_dir must")
    one_class = {"sentence": ["a film", "a day"], "label": [1, 1]}
    write_split(folder / "glue", "sst2", "train", one_class)
    score_tasks(ask(folder, "sst2"))
    assert "warning: sst2 has no simple features: " in capsys.readouterr().err
    assert not (folder / "results.jsonl").exists()


def test_a_prediction_does_not_depend_on_the_other_rows_that_are_scored(folder):
    train = {"sentence": ["good film", "bad day", "film"], "label": np.array([1, 0, 0])}
    logits = []
    for others in ([], ["bad bad sofa", "sofa"]):
        columns = {"train": train, "validation": {"sentence": ["bad film sofa", *others]}}
        logits.append(predict(TASKS["sst2"], columns)["validation"][0])
    np.testing.assert_array_equal(*logits)
