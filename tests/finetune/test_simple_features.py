"""The control from simple features: its numbers are scikit-learn's, its records are results."""

import json
from collections import Counter

import numpy as np
import pytest
from sklearn.feature_extraction.text import TfidfVectorizer

from finetune.metrics import score
from finetune.results import SIMPLE_FEATURES, prediction_file, read_predictions, read_results
from finetune.simple_features import SimpleFeaturesSettings, features, score_tasks
from finetune.tasks import TASKS
from tiny_glue import write_mnli, write_split, write_sst2, write_stsb
from train.settings import InputError


def ask(folder, *tasks) -> SimpleFeaturesSettings:
    output = str(folder / "results.jsonl")
    return SimpleFeaturesSettings(tasks=list(tasks), glue_dir=str(folder / "glue"), output=output)


@pytest.fixture
def folder(tmp_path):
    for write in (write_sst2, write_stsb, write_mnli):
        write(tmp_path / "glue")
    return tmp_path


def test_features_of_a_pair_are_cosine_and_share_of_common_words():
    first, second = ["a good film", "the play", "sad"], ["good good film today", "a book", "sad"]
    rows = [
        text.replace("a ", "") for text in (*first, *second)
    ]  # words of one letter are left out
    vectorizer = TfidfVectorizer().fit(rows)
    columns = {"sentence1": first, "sentence2": second}
    found = features(vectorizer, TASKS["mrpc"], columns)
    vectors = [vectorizer.transform(texts).toarray() for texts in (first, second)]
    assert found[:, 0] == pytest.approx([a @ b for a, b in zip(*vectors)])
    assert found[:, 1] == pytest.approx([2 / 3, 0, 1])


def test_records_hold_the_scores_of_the_predictions_beside_them(folder):
    settings = ask(folder, "sst2", "stsb", "mnli")
    score_tasks(settings)
    records = read_results(settings.output)
    assert [record["task"] for record in records] == ["sst2", "stsb", "mnli"]
    for record in records:
        task = TASKS[record["task"]]
        for split in task.validation_splits:
            labels, logits = read_predictions(prediction_file(settings.output, record, split))
            assert logits.shape == (record["rows"][split], task.num_labels)
            answers = logits[:, 0] if task.labels is None else logits.argmax(axis=1)
            assert score(task, answers, labels) == record["metrics"][split]
    assert records[0]["headline"] == 1.0  # a word tells the class
    assert records[0]["command"].startswith("python -m finetune.simple_features --tasks '[sst2]'")
    assert records[0]["model"] == SIMPLE_FEATURES
    assert np.mean([x["official"] for x in records]) == 0
    # a class that is not in the training split is never predicted
    assert records[2]["metrics"]["validation_matched"]["accuracy"] == pytest.approx(2 / 3)


def test_a_task_is_scored_once_for_the_same_data(folder, capsys):
    settings = ask(folder, "sst2", "mnli")
    for _ in range(2):
        score_tasks(settings)
    texts = {"sentence": ["good film", "bad film", "sad day"], "label": [1, 0, 0]}
    write_split(folder / "glue", "sst2", "train", texts)
    score_tasks(settings)
    lines = [json.loads(x)["task"] for x in (folder / "results.jsonl").read_text().splitlines()]
    assert Counter(lines) == {"sst2": 2, "mnli": 1}
    assert len(capsys.readouterr().out.splitlines()) == 3


def test_a_task_without_a_training_split_is_refused(tmp_path):
    with pytest.raises(InputError, match="task .* got 'ax'"):
        ask(tmp_path, "ax")
    with pytest.raises(InputError, match="glue_dir"):
        score_tasks(ask(tmp_path, "rte"))


def test_data_that_cannot_be_fitted_are_refused(folder):
    write_split(
        folder / "glue", "sst2", "train", {"sentence": ["a film", "a day"], "label": [1, 1]}
    )
    with pytest.raises(InputError, match="^sst2/train must have"):
        score_tasks(ask(folder, "sst2"))
    with pytest.raises(InputError, match="^tasks must"):
        ask(folder)
