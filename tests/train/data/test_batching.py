"""Sequences and steps: everything once, little padding, the same for any number of processes."""

import tracemalloc

import numpy as np
import pytest
import torch

from launched_runs import NO_DROPOUT, assert_close_runs, model_flag
from tiny_tokens import VOCAB, make_token_store
from train.data import batching, stateless_rng
from train.data.batching import IGNORE_INDEX, BatchFormat, SequenceIndex, StepDataset


@pytest.fixture
def sequences(tmp_path) -> SequenceIndex:
    """Document lengths as skewed as Wikipedia's; 0 and exact multiples among them."""
    lengths = np.random.default_rng(0).lognormal(4, 1.2, 3000).astype(int)
    lengths[:4] = [0, 62, 124, 63]
    return SequenceIndex(make_token_store(lengths, tmp_path), 64)


def steps_of(sequences, batch=32, micro=32, processes=1, rank=0, **layout) -> StepDataset:
    batch_format = BatchFormat(VOCAB, 0.15, 0, **layout)
    return StepDataset(sequences, batch_format, 99, batch, micro, processes, rank)


def originals(batch) -> torch.Tensor:
    """Ids of a batch, masks undone."""
    ids = batch["input_ids"].flatten().clone()
    real = batch["labels"] != IGNORE_INDEX
    ids[batch["label_indices"][real]] = batch["labels"][real]
    return ids.view_as(batch["input_ids"])


def test_sequences_hold_tokens_and_stay_inside_documents(sequences):
    start, size = sequences.locate(np.arange(len(sequences)))
    assert size.min() >= 1
    assert size.max() == 62
    document = np.searchsorted(sequences.store.document_ends, start, side="right")
    assert (start + size <= sequences.store.document_ends[document]).all()


def test_every_token_is_seen_exactly_once_an_epoch(sequences):
    number, batch_format = len(sequences), BatchFormat(VOCAB, 0.15, 0)
    for epoch in (0, 1):
        sample_index = np.arange(epoch * number, (epoch + 1) * number)
        index, epochs = batching.training_order(sequences, sample_index, 0)
        assert (epochs == epoch).all()
        batches = [
            batching.make_batch(sequences, index[i : i + 50], epochs[i : i + 50], batch_format)
            for i in range(0, number, 50)
        ]
        seen = torch.cat([originals(batch).flatten() for batch in batches])
        counts = torch.bincount(seen[seen >= 5])[5:]
        assert len(counts) == sequences.store.document_ends[-1]
        assert (counts == 1).all()


def test_a_packed_step_holds_the_sequences_and_masks_of_the_padded_one(sequences):
    steps = [steps_of(sequences, 32, 8, packed=packed)[4] for packed in (False, True)]
    for padded, packed in zip(*steps):
        mask = padded["attention_mask"].bool()
        assert torch.equal(packed["input_ids"][0], padded["input_ids"][mask])
        assert torch.equal(originals(packed)[0], originals(padded)[mask])
        assert torch.equal(packed["labels"], padded["labels"])
        lengths = packed["cu_seq_lens_q"].diff()
        assert lengths.tolist() == mask.sum(1).tolist()
        assert packed["cu_seq_lens_q"].dtype == torch.int32
        assert packed["max_length_q"] == lengths.max()
        positions = torch.cat([torch.arange(n) for n in lengths])
        assert packed["position_ids"].tolist() == [positions.tolist()]


def test_a_packed_run_logs_the_losses_of_a_padded_one(pretrain):
    still = model_flag(**NO_DROPOUT)
    padded = pretrain(still, "--run.name=padded", "--model.attention=sdpa")
    packed = pretrain(still, "--run.name=packed", "--model.attention=unpadded")
    assert_close_runs(padded, packed, rel=1e-5)


def test_a_fixed_capacity_changes_no_mask_and_is_never_too_small(sequences, monkeypatch):
    for multiple in (500, 40):  # more than is predicted, and less
        monkeypatch.setattr(batching, "label_capacity", lambda *rest, n=multiple: n)
        padded = steps_of(sequences, constant_shapes=True)
        for free, fixed in zip(steps_of(sequences)[2], padded[2]):
            number = len(free["labels"])
            assert torch.equal(fixed["input_ids"], free["input_ids"])
            assert torch.equal(fixed["label_indices"][:number], free["label_indices"])
            assert torch.equal(fixed["labels"][:number], free["labels"])
            assert (fixed["labels"][number:] == IGNORE_INDEX).all()
            assert len(fixed["labels"]) == len(fixed["label_indices"])
            assert 0 <= len(fixed["labels"]) - number < multiple
            assert len(fixed["labels"]) % multiple == 0


def test_the_capacity_is_hardly_ever_exceeded_and_hardly_larger():
    drawn = np.random.default_rng(0).binomial(4096, 0.15, 100_000)
    assert drawn.max() < batching.label_capacity(4096, 0.15) < 1.25 * 4096 * 0.15


@pytest.mark.parametrize(("batch", "micro"), [(64, 8), (256, 64)])
def test_almost_nothing_is_padding_though_steps_see_all_lengths(sequences, batch, micro):
    steps = steps_of(sequences, batch, micro)
    masks = [[x["attention_mask"] for x in steps[step]] for step in range(3840 // batch)]
    assert torch.cat([mask.flatten() for step in masks for mask in step]).double().mean() > 0.97
    lengths = [np.concatenate([mask.sum(1) for mask in step]) for step in masks]
    assert np.mean([np.ptp(step) for step in lengths]) > 25


class Billion(SequenceIndex):
    """As many sequences as a corpus of 100 billion tokens has, of lengths made up on the spot."""

    def __init__(self) -> None:
        self._first_ids = np.array([10**9])

    def locate(self, index):
        return index * 126, (1 + stateless_rng.random_bits(7, index) % 126).astype(np.int64)


@pytest.mark.parametrize(("processes", "micro"), [(1, 2), (2, 64), (8, 256), (256, 2)])
def test_a_billion_sequences_are_shared_out_once_among_any_number_of_ranks(processes, micro):
    sequences = Billion()
    for step in (123_456, 10**9 // 2048):  # the second crosses into the next epoch
        sample_index = np.arange(step * 2048, (step + 1) * 2048)
        expected, epochs = batching.training_order(sequences, sample_index, 0, 512)
        found = []
        for rank in range(processes):
            steps = steps_of(sequences, 2048, micro, processes, rank)
            micro_batches = steps.micro_batch_sequences(step)
            sizes = [len(index) for index, _ in micro_batches]
            assert sizes == [micro] * (2048 // processes // micro)
            found += [pair for micro_batch in micro_batches for pair in zip(*micro_batch)]
        assert sorted(found) == sorted(zip(expected, epochs))


def test_a_rank_of_a_thousand_needs_no_memory_for_a_billion_sequences():
    steps = steps_of(Billion(), 2048, 2, 1024, 1023)
    tracemalloc.start()
    steps.micro_batch_sequences(123_456)
    peak = tracemalloc.get_traced_memory()[1]
    tracemalloc.stop()
    assert peak < 2e6


def test_rows_are_framed_and_masked_where_it_says(sequences):
    (batch,) = steps_of(sequences)[0]
    assert (batch["input_ids"][:, 0] == 2).all()
    last = batch["attention_mask"].sum(1) - 1
    assert (batch["input_ids"][torch.arange(32), last] == 3).all()
    assert (batch["input_ids"][batch["attention_mask"] == 0] == 0).all()


def test_masks_differ_in_every_epoch_and_with_every_seed(sequences):
    def masked(epoch, seed):
        epochs, batch_format = np.full(50, epoch), BatchFormat(VOCAB, 0.15, seed)
        batch = batching.make_batch(sequences, np.arange(50), epochs, batch_format)
        return batch["label_indices"]

    for other in (masked(1, 0), masked(0, 1)):
        assert torch.isin(masked(0, 0), other).float().mean() < 0.3


def test_lengths_come_in_another_order_in_every_epoch_and_with_every_seed(sequences):
    def sizes(epoch, seed):
        sample_index = epoch * len(sequences) + np.arange(1024)
        index, _ = batching.training_order(sequences, sample_index, seed)
        tenths = np.bincount(10 * index // len(sequences))
        assert tenths.min() > 0.5 * tenths.mean()  # from everywhere in the text
        return sequences.locate(index)[1]

    for other in (sizes(1, 0), sizes(0, 1)):
        assert abs(np.corrcoef(sizes(0, 0), other)[0, 1]) < 0.3


def test_other_sequences_come_together_in_every_epoch(tmp_path):
    sequences = SequenceIndex(make_token_store(np.arange(5, 300), tmp_path), 8)
    assert len(sequences) > 3 * batching.WINDOW
    firsts = np.arange(batching.WINDOW), np.arange(batching.WINDOW) + len(sequences)
    windows = [set(batching.training_order(sequences, x, seed=0)[0].tolist()) for x in firsts]
    assert len(windows[0] & windows[1]) < batching.WINDOW / 2
