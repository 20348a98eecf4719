"""The demo tasks: their rules hold in every row, and the same rows come every time."""

import json
from pathlib import Path

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
            main(DemoTasksSettings(str(folder / name), str(folder / "tokens"), 500, 100))
        yield folder


@pytest.fixture(scope="module")
def documents(tasks):
    return [" ".join(text.split()) for text, _ in demo_corpus.read_docstrings()]


def rows(folder, task, split="train"):
    return list(map(json.loads, (folder / "a" / task / f"{split}.jsonl").read_text().splitlines()))


def test_the_same_rows_come_every_time(tasks):
    files = sorted(path.relative_to(tasks / "a") for path in (tasks / "a").rglob("*.jsonl"))
    assert len(files) == 6
    for file in files:
        assert (tasks / "a" / file).read_bytes() == (tasks / "b" / file).read_bytes()


def test_what_is_not_of_these_tasks_is_not_replaced(tmp_path):
    for name in ("thesis.tex", "demo-order/notes.txt"):
        file = tmp_path / name
        file.parent.mkdir(exist_ok=True)
        file.write_text("mine")
        with pytest.raises(InputError, match=f"output must name a new folder .* got .*{name}"):
            main(DemoTasksSettings(str(tmp_path), str(tmp_path / "tokens")))
        assert file.read_text() == "mine"
        file.unlink()
    with pytest.raises(InputError, match="output must name a new folder"):
        main(DemoTasksSettings(__file__, str(tmp_path / "tokens")))
    assert Path(__file__).exists()


def test_shuffled_sentences_hold_the_words_of_a_sentence_in_another_order(tasks, documents):
    found = rows(tasks, "demo-order")
    assert abs(sum(row["label"] for row in found) - len(found) / 2) <= 1
    flat = " ".join(documents)
    assert all(row["sentence"] in flat for row in found if not row["label"])
    assert sum(row["sentence"] in flat for row in found if row["label"]) < len(found) / 50


def test_half_of_the_second_sentences_follow_the_first(tasks, documents):
    found = rows(tasks, "demo-next")
    joined = [f"{row['sentence1']} {row['sentence2']}" for row in found]
    followed = [any(pair in text for text in documents) for pair in joined[:100]]
    assert followed == [bool(row["label"]) for row in found[:100]]


def test_overlap_is_the_share_of_words_kept(tasks):
    for row in rows(tasks, "demo-overlap"):
        first, second = (row[name].removesuffix(".").split() for name in ("sentence1", "sentence2"))
        assert len(first) == len(second)
        share = sum(a == b for a, b in zip(first, second)) / len(first)
        assert row["label"] == pytest.approx(5 * share, abs=1e-3)


def test_training_and_validation_rows_share_no_sentence(tasks):
    train = {row["sentence1"] for row in rows(tasks, "demo-overlap")}
    assert not train & {row["sentence1"] for row in rows(tasks, "demo-overlap", "validation")}
