"""Sequences of two segments: where they are cut, what is replaced, and what learns from it."""

import numpy as np
import pytest
import torch
import transformers
from safetensors.torch import load_file

import roformer
from launched_runs import assert_same_run
from tiny import TINY_MODEL
from tiny_tokens import VOCAB, make_token_store
from train.data.batching import BatchFormat, SequenceIndex, make_batch
from train.data.masking import IGNORE_INDEX
from train.data.segments import find_cut
from train.loop.objective import LanguageModel


@pytest.fixture
def sequences(tmp_path) -> SequenceIndex:
    lengths = np.random.default_rng(0).integers(1, 60, 200)
    return SequenceIndex(make_token_store(lengths, tmp_path), 32, special_tokens=3)


def batch_of(sequences, segments, rows=200, epoch=0, **options) -> dict:
    ids = np.arange(rows)
    batch_format = BatchFormat(VOCAB, 0.15, 0, segments=segments, **options)
    return make_batch(sequences, ids, ids * 0 + epoch, batch_format)


def segments_of(batch) -> list[tuple[list[int], list[int]]]:
    """A and B of each row without special tokens, masks undone."""
    ids, types = batch["input_ids"].flatten().clone(), batch["token_type_ids"]
    ids[batch["label_positions"]] = batch["labels"]
    pairs = []
    for row, kinds, mask in zip(ids.view_as(types), types, batch["attention_mask"].bool()):
        cls, *first = row[mask & (kinds == 0)].tolist()
        second = row[mask & (kinds == 1)].tolist()
        assert (cls, first.pop(), second.pop()) == (VOCAB.cls_id, VOCAB.sep_id, VOCAB.sep_id)
        pairs.append((first, second))
    return pairs


def test_two_segments_are_the_sequence_cut_once(sequences):
    start, size = sequences.locate(np.arange(200))
    batch = batch_of(sequences, "two")
    assert "sentence_labels" not in batch
    assert batch["input_ids"].shape[1] <= 32
    for (a, b), first, count in zip(segments_of(batch), start.tolist(), size.tolist()):
        assert a + b == sequences.store.read(first, count).tolist()
        assert bool(b) == (count > 1)
    assert len({len(a) for a, _ in segments_of(batch)}) > 15


@pytest.mark.parametrize("segments", ["next", "order"])
def test_half_of_the_second_segments_do_not_follow_and_the_label_says_which(sequences, segments):
    plain = segments_of(batch_of(sequences, "two"))
    batch = batch_of(sequences, segments)
    labels = batch["sentence_labels"].tolist()
    for (a, b), (first, second), label in zip(plain, segments_of(batch), labels):
        assert (label == IGNORE_INDEX) == (b == [])
        if label != 1:
            assert (first, second) == (a, b)
        elif segments == "order":
            assert (first, second) == (b, a)
        else:  # as long as what it replaces, or the whole of a shorter sequence
            assert first == a
            assert second != b
            assert 1 <= len(second) <= len(b)
    assert 0.35 < np.mean(np.array(labels) == 1) < 0.6
    assert batch_of(sequences, segments, epoch=1)["sentence_labels"].tolist() != labels


def test_a_packed_row_holds_the_padded_rows(sequences):
    padded, packed = (batch_of(sequences, "next", packed=p) for p in (False, True))
    mask = padded["attention_mask"].bool()
    for name in ("input_ids", "token_type_ids"):
        assert torch.equal(packed[name][0], padded[name][mask])
    assert torch.equal(packed["sentence_labels"], padded["sentence_labels"])


@pytest.mark.parametrize(
    ("tokens", "cuts"),
    [([7, 8, 9], {1, 2}), ([7, 1, 8, 1, 9, 1], {2, 4}), ([7, 8, 1], {1, 2}), ([7], {1}), ([], {0})],
)
def test_cuts_are_ends_of_sentences_inside_if_there_are_any(tokens, cuts):
    draws = np.linspace(0, 1, 50, endpoint=False)
    assert {find_cut(np.array(tokens), draw, (1,)) for draw in draws} == cuts


@pytest.mark.parametrize(
    ("kind", "kernel"), [("RoFormer", None), ("RoFormer", "unpadded"), ("Bert", None)]
)
def test_the_first_token_learns_its_labels(kind, kernel, sequences):
    torch.manual_seed(0)
    package = roformer if kind == "RoFormer" else transformers
    config = getattr(package, f"{kind}Config")(vocab_size=60_000, **TINY_MODEL)
    model = getattr(package, f"{kind}ForMaskedLM")._from_config(config, attn_implementation=kernel)
    language_model = LanguageModel(model.eval(), sentence_weight=5.0)
    batch = batch_of(sequences, "order", rows=24, packed=language_model.packed)
    optimizer = torch.optim.AdamW(language_model.parameters(), lr=5e-3)
    labels = batch.pop("sentence_labels")
    count = int((labels != IGNORE_INDEX).sum())
    for _ in range(60):
        loss, _ = language_model(**batch, sentence_labels=labels)
        words, _ = language_model(**batch)
        (loss - words).backward()  # 5 times the summed cross-entropy of the labels
        optimizer.step()
        optimizer.zero_grad()
    assert 0 <= (loss - words) / 5 / count < 0.1


@pytest.mark.parametrize("kind", ["roformer", "bert"])
def test_a_run_with_an_objective_for_the_first_token_is_resumed_exactly(kind, pretrain):
    flags = [f"--model.type={kind}", "--corpus.segments=next"]
    whole = pretrain(*flags, "--run.name=whole")
    pretrain(*flags, "--run.max_hours=1e-9")
    run = pretrain(*flags)
    assert_same_run(whole, run)
    load = transformers.AutoModelForMaskedLM.from_pretrained
    _, report = load(run / "model", output_loading_info=True)
    assert not report["unexpected_keys"]
    weights = load_file(run / "model" / "model.safetensors")
    types = weights[f"{kind}.embeddings.token_type_embeddings.weight"]
    assert not torch.equal(types[0], types[1])  # the second one was trained
