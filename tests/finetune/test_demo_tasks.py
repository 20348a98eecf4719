"""The demo task: its rules hold in every row, and the same rows come every time."""

import json

import pytest

from finetune.demo_tasks import DemoTasksSettings, main
from train.data import demo_corpus
from train.settings import InputError


@pytest.fixture(scope="module")
def tasks(tmp_path_factory):
    folder = tmp_path_factory.mktemp("demo")
    with pytest.MonkeyPatch.context() as patch:
        patch.setattr(demo_corpus, "MEGABYTES", 1)
        for name in ("a", "b"):
            # all rows: few sentences are in both parts of the text
            main(DemoTasksSettings(str(folder / name), str(folder / "tokens"), 10_000, 10_000))
        yield folder


@pytest.fixture(scope="module")
def documents(tasks):
    return [" ".join(text.split()) for text, _ in demo_corpus.read_docstrings()]


def rows(folder, task, split="train"):
    return list(map(json.loads, (folder / "a" / task / f"{split}.jsonl").read_text().splitlines()))


def sorted_words(sentence):
    return tuple(sorted(sentence.removesuffix(".").split()))


def test_the_same_rows_come_every_time(tasks):
    files = sorted(path.relative_to(tasks / "a") for path in (tasks / "a").rglob("*.jsonl"))
    assert len(files) == 2
    for file in files:
        assert (tasks / "a" / file).read_bytes() == (tasks / "b" / file).read_bytes()


def test_every_second_sentence_has_its_words_backwards(tasks, documents):
    found = rows(tasks, "demo-order")
    assert abs(sum(row["label"] for row in found) - len(found) / 2) <= 1
    flat = " ".join(documents)
    for row in found[:500]:
        words = row["sentence"].removesuffix(".").split()
        assert f"{' '.join(words[::-1] if row['label'] else words)}." in flat


def test_training_and_validation_rows_share_no_sentence(tasks):
    train, validation = (
        {sorted_words(row["sentence"]) for row in rows(tasks, "demo-order", part)}
        for part in ("train", "validation")
    )
    assert train
    assert validation
    assert not train & validation


def test_an_output_that_is_a_file_is_refused():
    with pytest.raises(InputError, match="output must be a folder that can be written"):
        main(DemoTasksSettings(__file__))
