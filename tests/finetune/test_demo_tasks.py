"""The demo task: its rules hold in every row, and the same rows come every time."""

import json

import pytest

from finetune.demo_tasks import DemoTasksSettings, main
from tiny import refused
from train.data import demo_corpus


@pytest.fixture(scope="module")
def tasks(tmp_path_factory):
    folder = tmp_path_factory.mktemp("demo")
    with pytest.MonkeyPatch.context() as patch:
        patch.setattr(demo_corpus, "MEGABYTES", 1)
        for name in ("a", "b"):
            # all rows: few sentences are in both parts of the text
            main(DemoTasksSettings(str(folder / name), str(folder / "tokens"), 10_000, 10_000))
        yield folder


def rows(folder, split):
    lines = (folder / "a" / "demo-order" / f"{split}.jsonl").read_text().splitlines()
    return [json.loads(line) for line in lines]


def words(row):
    return row["sentence"].removesuffix(".").split()


def test_the_same_rows_come_every_time(tasks):
    files = [path.relative_to(tasks / "a") for path in (tasks / "a").rglob("*.jsonl")]
    assert len(files) == 2
    for file in files:
        assert (tasks / "a" / file).read_bytes() == (tasks / "b" / file).read_bytes()


def test_every_second_sentence_has_its_words_backwards(tasks):
    found = rows(tasks, "train")
    assert abs(sum(row["label"] for row in found) - len(found) / 2) <= 1
    text = " ".join(" ".join(text.split()) for text, _ in demo_corpus.read_docstrings())
    for row in found[:500]:
        natural = words(row)[::-1] if row["label"] else words(row)
        assert f"{' '.join(natural)}." in text


def test_training_and_validation_rows_share_no_sentence(tasks):
    splits = [rows(tasks, split) for split in ("train", "validation")]
    train, validation = ({tuple(sorted(words(row))) for row in found} for found in splits)
    assert train
    assert validation
    assert not train & validation


def test_an_output_that_is_a_file_and_no_rows_are_refused():
    refused(lambda: main(DemoTasksSettings(__file__)), "output must be a folder")
    refused(lambda: DemoTasksSettings(train_rows=0), "train_rows must")
