"""From texts to batches: order, padding, the cache of tokens, and data that are refused."""

import itertools
import json
from types import SimpleNamespace
from unittest.mock import Mock

import numpy as np
import pytest
import transformers
from datasets.exceptions import DatasetGenerationError
from pyarrow import parquet
from transformers import BertConfig

import roformer
from finetune import data
from finetune.data import check_tokenizer, epoch_batches, read_split_columns
from finetune.tasks import TASKS
from tiny import refused
from tiny_glue import load_examples, tiny_tokenizer, write_split, write_stsb


def lengths(rows=1037):
    return np.random.default_rng(0).geometric(0.04, rows).clip(3, 128)


def test_every_example_comes_once_an_epoch_and_the_last_batch_is_kept():
    batches = list(epoch_batches(lengths(), 8, seed=3, epoch=1))
    assert sorted(np.concatenate(batches)) == list(range(1037))
    assert sorted({len(rows) for rows in batches}) == [1037 % 8, 8]
    assert [rows.tolist() for rows in epoch_batches(np.array([5]), 8, 0, 0)] == [[0]]


def test_the_order_is_a_function_of_seed_and_epoch():
    def order(seed, epoch):
        return [tuple(rows) for rows in epoch_batches(lengths(), 8, seed, epoch)]

    assert order(0, 0) == order(0, 0)
    # which rows share a batch changes, not the order of batches alone
    together = [set(map(frozenset, order(*name))) for name in ((0, 0), (0, 1), (1, 0))]
    assert all(len(a & b) < len(a) / 2 for a, b in itertools.combinations(together, 2))


def test_buckets_leave_little_padding_and_batches_are_shuffled():
    sizes = lengths(4000)
    batches = list(epoch_batches(sizes, 16, seed=0, epoch=0))
    longest = np.array([sizes[rows].max() for rows in batches])
    filled = sum(sizes[rows].sum() for rows in batches)
    assert filled / sum(len(rows) * size for rows, size in zip(batches, longest)) > 0.9
    # sorted batches would rise all the way through a window
    assert 0.3 < np.mean(np.diff(longest) > 0) < 0.6


@pytest.mark.parametrize(
    ("task", "encoding"), [("stsb", "joint"), ("stsb", "separate"), ("sst2", "separate")]
)
def test_a_batch_is_what_the_tokenizer_pads(folder, task, encoding, monkeypatch):
    monkeypatch.setattr(data, "ROWS_PER_CALL", 7)  # no text depends on the others of its call
    examples = load_examples(folder / "glue", task, pair_encoding=encoding)
    columns = parquet.read_table(folder / f"glue/{task}/train.parquet").to_pydict()
    rows = np.random.default_rng(0).permutation(41)
    texts = [[columns[name][row] for row in rows] for name in TASKS[task].columns]
    if encoding == "separate":  # each text is encoded alone, beside the other of its row
        texts = [[text for pair in zip(*texts) for text in pair]]
    expected = tiny_tokenizer()(*texts, padding=True, return_tensors="pt")
    batch = examples.batch(rows)
    assert sorted(batch) == ["attention_mask", "input_ids", "labels", "token_type_ids"]
    assert all(batch[name].equal(expected[name]) for name in expected)
    assert batch["labels"].tolist() == [columns["label"][row] for row in rows]
    longest = batch["attention_mask"].sum(1).view(len(rows), -1).amax(1)
    assert examples.lengths[rows].tolist() == longest.tolist()
    assert load_examples(folder / "glue", task, length=9).lengths.max() == 9


@pytest.mark.parametrize("processes", [1, 2, 3])
@pytest.mark.parametrize("tokens", [1, 50, 100])
def test_no_process_gets_more_tokens_than_the_limit(folder, processes, tokens):
    examples = load_examples(folder / "glue", "stsb")
    parts = examples.micro_batches(np.arange(41), tokens, processes)
    assert np.concatenate(parts).tolist() == list(range(41))
    for rows in (part[rank::processes] for part in parts for rank in range(processes)):
        assert len(rows) <= 1 or examples.batch(rows)["input_ids"].numel() <= tokens


GOOD = {"sentence": ["good film", "bad film"], "label": [1, 0]}
PAIR = {"question1": ["good", " "], "question2": ["film", ""], "label": [1, 0]}
STSB = {"sentence1": ["a"], "sentence2": ["the"], "label": [5.5]}


@pytest.mark.parametrize(
    ("split", "columns", "words"),
    [
        ("sst2/train", {"text": ["good"], "label": [1]}, ["sentence, label", "got text, label"]),
        ("sst2/train", {**GOOD, "label": [1, 2]}, ["label of", "got 2 in row 1,"]),
        ("sst2/train", {**GOOD, "label": [0.5, 1.0]}, ["label", "0.5 in row 0"]),
        ("sst2/train", {**GOOD, "label": ["1", "no"]}, ["label", "'no' in row 1"]),
        ("sst2/train", {**GOOD, "label": [1, None]}, ["label", "None in row 1"]),
        ("sst2/train", {**GOOD, "sentence": ["good", None]}, ["sentence", "None in row 1"]),
        ("sst2/train", {**GOOD, "sentence": ["good", " "]}, ["sentence", "' ' in row 1"]),
        ("sst2/train", {"sentence": [], "label": []}, ["at least one row"]),
        ("sst2/test", {"sentence": ["a", "b"], "idx": [1, 0]}, ["idx of", "got 1, 0"]),
        ("qqp/train", PAIR, ["column question1 of", "' ' in row 1"]),
        ("stsb/train", STSB, ["label of", "0 to 5", "5.5"]),
    ],
)
def test_a_bad_file_is_refused_in_one_line(tmp_path, split, columns, words):
    task, part = split.split("/")
    write_split(tmp_path, task, part, columns)
    refused(lambda: load_examples(tmp_path, task, part), f"{tmp_path}/{split}.parquet", *words)


def test_text_may_be_blank_in_a_test_split_without_labels_and_once_in_a_pair(tmp_path):
    write_split(tmp_path, "sst2", "test", {"sentence": ["good", ""], "idx": [0, 1]})
    examples = load_examples(tmp_path, "sst2", "test")
    assert examples.labels.tolist() == [-1, -1]
    assert examples.lengths.tolist() == [3, 2]
    write_split(tmp_path, "sst2", "test", {"sentence": ["good", "bad"], "label": [-1, 1]})
    assert load_examples(tmp_path, "sst2", "test").labels.tolist() == [-1, 1]
    # as in official QQP
    write_split(tmp_path, "qqp", "train", {**PAIR, "question1": ["good", "bad"]})
    assert load_examples(tmp_path, "qqp").lengths.tolist() == [5, 4]


def test_words_cut_in_python_are_tokenized_too(tmp_path):
    """Chinese checkpoints: such a tokenizer cannot be written down whole."""
    pieces = ["[PAD]", "[UNK]", "[CLS]", "[SEP]", "[MASK]", "今", "天", "气", "好"]
    vocabulary = {piece: number for number, piece in enumerate(pieces)}
    tokenizer = transformers.RoFormerTokenizer(vocab=vocabulary)
    asked = [["今天天气"], ["好"]], tokenizer, 16, str(tmp_path)
    made = data.tokenize(*asked)
    assert made["input_ids"].tolist() == [2, 5, 6, 6, 7, 3, 8, 3]
    assert "token_type_ids" not in made
    tokenizer.model_input_names = [*tokenizer.model_input_names, "token_type_ids"]
    assert data.tokenize(*asked)["token_type_ids"].tolist() == [0] * 6 + [1, 1]


def test_tokens_are_made_once_and_anew_for_another_tokenizer_length_text_or_row(tmp_path):
    write_stsb(tmp_path)
    made = load_examples(tmp_path, "stsb")
    (file,) = (tmp_path / "tokens").iterdir()
    before = file.stat().st_mtime_ns
    again = load_examples(tmp_path, "stsb")
    assert file.stat().st_mtime_ns == before
    assert all((again.inputs[name] == made.inputs[name]).all() for name in made.inputs)
    load_examples(tmp_path, "stsb", "validation")
    larger, left = tiny_tokenizer(), tiny_tokenizer()
    larger.add_tokens(["sofa"])
    left.truncation_side = "left"
    for tokenizer in (None, larger, left):
        load_examples(tmp_path, "stsb", length=9, tokenizer=tokenizer)
    assert len(list((tmp_path / "tokens").iterdir())) == 5
    # two texts of one row are not taken for two rows
    for texts, lengths in (([["good"], ["bad"]], [5]), ([["good", "bad"]], [3, 3])):
        made = data.tokenize(texts, tiny_tokenizer(), 16, str(tmp_path))
        assert made["lengths"].tolist() == lengths
    for row in (["a\0b", "c"], ["a", "b\0c"]):
        data.tokenize([row], tiny_tokenizer(), 16, str(tmp_path))
    assert len(list(tmp_path.glob("task-*"))) == 4


def test_a_file_that_is_not_what_it_is_called_is_refused(tmp_path):
    (tmp_path / "sst2").mkdir()
    for suffix, text, *found in (
        ("parquet", "no parquet", "readable"),
        ("jsonl", b'{"sentence": "caf\xe9", "label": 1}', "readable", "utf-8"),
        ("jsonl", "\ufeff" + json.dumps({"sentence": "a", "label": 1}) + "\n3", "int instead of"),
        ("csv", "sentence,label\na,1\nb", "1 values for 2 columns in row 1"),
        ("tsv", "sentence\tlabel\na\rz\t0", "1 values for 2 columns in row 0"),
        ("csv", "sentence,label,label\na,1,0", "two columns label"),
        ("jsonl", json.dumps({"sentence": "a \ud800", "label": 1}), "must hold text, got"),
    ):
        file = tmp_path / "sst2" / f"train.{suffix}"
        file.write_bytes(text if isinstance(text, bytes) else text.encode())
        refused(lambda: load_examples(tmp_path, "sst2"), file.name, *found)
        file.unlink()


@pytest.mark.parametrize(
    "error", [RuntimeError("Dataset scripts are no longer supported"), DatasetGenerationError("x")]
)
def test_hub_data_that_datasets_cannot_read_are_one_line(monkeypatch, error):
    monkeypatch.setattr("datasets.load_dataset", Mock(side_effect=error))
    refused(lambda: read_split_columns(TASKS["rte"], "train", None), "hub must hold", str(error))


def test_without_a_folder_and_offline_the_remedy_is_named(monkeypatch):
    monkeypatch.setattr("datasets.config.HF_HUB_OFFLINE", True)
    monkeypatch.setattr("finetune.data.HUB_DATA", "nobody/has-this")
    read = lambda: read_split_columns(TASKS["rte"], "train", None)  # noqa: E731
    refused(read, "hub must hold nobody/has-this", "without a connection", "--glue_dir")


def test_a_length_or_a_tokenizer_that_does_not_fit_the_model_is_refused():
    tokenizer = tiny_tokenizer()
    bert = BertConfig(max_position_embeddings=64, vocab_size=100)
    refused(lambda: check_tokenizer(bert, tokenizer, 65), "length", "64 positions", "got 65")
    check_tokenizer(bert, tokenizer, 64)
    ours = roformer.RoFormerConfig(max_position_embeddings=64, vocab_size=100)
    check_tokenizer(ours, tokenizer, 65)
    small = SimpleNamespace(vocab_size=16)
    refused(lambda: check_tokenizer(small, tokenizer, 8), "tokenizer", "model's 16", "got 16")
