"""Sequences and steps: everything once, little padding, the same for any number of processes."""

import dataclasses
import tracemalloc

import numpy as np
import pytest
import torch

from launched_runs import NO_DROPOUT, assert_close_runs, model_flag
from tiny_tokens import VOCAB, make_token_store
from train.data import batching, stateless_rng
from train.data.batching import (
    IGNORE_INDEX,
    BatchFormat,
    SequenceIndex,
    StepDataset,
    make_batch,
    max_predictions,
    training_order,
)


@pytest.fixture
def sequences(tmp_path) -> SequenceIndex:
    """Document lengths as skewed as Wikipedia's; 0 and exact multiples among them."""
    lengths = np.random.default_rng(0).lognormal(4, 1.2, 3000).astype(int)
    lengths[:4] = [0, 62, 124, 63]
    return SequenceIndex(make_token_store(lengths, tmp_path), 64)


def steps_of(sequences, batch=32, micro=32, processes=1, rank=0, **layout) -> StepDataset:
    batch_format = BatchFormat(VOCAB, 0.15, 0, **layout)
    return StepDataset(sequences, batch_format, batch, micro, processes, rank)


def originals(batch) -> torch.Tensor:
    """Ids of a batch, masks undone."""
    ids = batch["input_ids"].flatten().clone()
    real = batch["labels"] != IGNORE_INDEX
    ids[batch["label_positions"][real]] = batch["labels"][real]
    return ids.view_as(batch["input_ids"])


def rows_of(batch) -> list[tuple[int, ...]]:
    """The sequences of a padded batch, masks undone."""
    kept = batch["attention_mask"].bool()
    return [tuple(row[mask].tolist()) for row, mask in zip(originals(batch), kept)]


def test_pieces_tile_the_corpus_and_stay_inside_documents(sequences):
    start, size = sequences.locate(np.arange(len(sequences)))
    np.testing.assert_array_equal(start[1:], (start + size)[:-1])
    assert start[0] == 0
    assert start[-1] + size[-1] == sequences.store.document_ends[-1]
    assert size.min() >= 1
    assert size.max() == 62
    document = np.searchsorted(sequences.store.document_ends, start, side="right")
    assert (start + size <= sequences.store.document_ends[document]).all()


@pytest.mark.parametrize("packed", [False, True], ids=["padded", "packed"])
def test_every_token_is_seen_exactly_once_an_epoch(sequences, packed):
    number, batch_format = len(sequences), BatchFormat(VOCAB, 0.15, 0, packed=packed)
    for epoch in (0, 1):
        place = np.arange(epoch * number, (epoch + 1) * number)
        index, epochs = training_order(sequences, place, 0)
        assert (epochs == epoch).all()
        batches = [
            make_batch(sequences, index[i : i + 50], epochs[i : i + 50], batch_format)
            for i in range(0, number, 50)
        ]
        seen = torch.cat([originals(batch).flatten() for batch in batches])
        counts = torch.bincount(seen[seen >= 5])[5:]
        assert len(counts) == sequences.store.document_ends[-1]
        assert (counts == 1).all()


def test_a_packed_step_holds_the_sequences_and_masks_of_the_padded_one(sequences):
    for padded, packed in zip(
        steps_of(sequences, 32, 8)[4], steps_of(sequences, 32, 8, packed=True)[4]
    ):
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
    padded, packed = (
        pretrain(model_flag(**NO_DROPOUT), f"--run.name={kernel}", f"--model.attention={kernel}")
        for kernel in ("sdpa", "unpadded")
    )
    assert_close_runs(padded, packed, rel=1e-5)


def test_a_fixed_capacity_changes_no_mask_and_is_never_too_small(sequences):
    for multiple in (500, 40):  # more than is predicted, and less
        padded = steps_of(sequences, pad_predictions_to=multiple)
        for free, fixed in zip(steps_of(sequences)[2], padded[2]):
            number = len(free["labels"])
            assert torch.equal(fixed["input_ids"], free["input_ids"])
            assert torch.equal(fixed["label_positions"][:number], free["label_positions"])
            assert torch.equal(fixed["labels"][:number], free["labels"])
            assert (fixed["labels"][number:] == IGNORE_INDEX).all()
            assert len(fixed["labels"]) == len(fixed["label_positions"])
            assert 0 <= len(fixed["labels"]) - number < multiple
            assert len(fixed["labels"]) % multiple == 0


def test_the_capacity_is_hardly_ever_exceeded_and_hardly_larger():
    drawn = np.random.default_rng(0).binomial(4096, 0.15, 100_000)
    assert drawn.max() < max_predictions(4096, 0.15) < 1.25 * 4096 * 0.15


def taken(sequences, epoch) -> np.ndarray:
    """How often an epoch takes each sequence."""
    number = sequences.epoch_size
    index, _ = training_order(sequences, np.arange(epoch * number, (epoch + 1) * number), 0)
    return np.bincount(index, minlength=len(sequences))


def test_weights_repeat_a_part_or_spread_it_over_epochs(tmp_path):
    parts = (40, 31, 100)
    lengths = np.random.default_rng(0).integers(0, 300, sum(parts))
    tokens = dataclasses.replace(make_token_store(lengths, tmp_path), source_documents=parts)
    sequences = SequenceIndex(tokens, 64, [2.0, 1.0, 0.5])
    first, second = (
        np.split(taken(sequences, e), sequences.source_sizes.cumsum()[:-1]) for e in (0, 1)
    )
    assert sequences.source_sizes.tolist() == [
        -(part // 62).sum() for part in np.split(-lengths, np.cumsum(parts)[:-1])
    ]
    for epoch in (first, second):
        assert set(epoch[0]) == {2}
        assert set(epoch[1]) == {1}
        assert set(epoch[2]) == {0, 1}
        assert abs(epoch[2].mean() - 0.5) < 0.01
    assert (first[2] + second[2] == 1).mean() > 0.99  # an odd one comes again
    documents = np.add.reduceat(first[2], np.arange(0, len(first[2]), 20))
    assert (documents > 0).all()  # the half is spread over the part
    index, epoch = training_order(sequences, np.arange(3 * sequences.epoch_size), 0)
    assert len(set(zip(index.tolist(), epoch.tolist()))) == len(index)  # so each is masked anew


def test_lengths_are_sorted_inside_windows_of_the_permutation(sequences, monkeypatch):
    assert batching.WINDOW >= 256  # fewer would show the model one length for long
    monkeypatch.setattr(batching, "WINDOW", 256)
    number = len(sequences)
    assert number > 3 * 256
    for first in range(0, number, 256):
        places = np.arange(first, min(first + 256, number))
        index, _ = training_order(sequences, places + number, 5)  # of the second epoch
        assert sorted(index) == sorted(stateless_rng.permute(places, number, 5, 1))
        assert not np.array_equal(index, stateless_rng.permute(places, number, 5, 1))


def test_weights_of_one_change_nothing(sequences):
    weighed = SequenceIndex(sequences.store, 64, [1.0])
    place = np.arange(100, 400)
    for one, other in zip(training_order(weighed, place, 0), training_order(sequences, place, 0)):
        assert (one == other).all()
    assert weighed.mean_length == sequences.mean_length


def test_the_mean_length_is_that_of_an_epoch(tmp_path):
    tokens = dataclasses.replace(
        make_token_store([10] * 50 + [30] * 50, tmp_path), source_documents=(50, 50)
    )
    assert SequenceIndex(tokens, 64).mean_length == pytest.approx(2 + 20)
    assert SequenceIndex(tokens, 64, [3.0, 1.0]).mean_length == pytest.approx(2 + 15)


@pytest.mark.parametrize(("batch", "micro"), [(64, 8), (256, 64)])
def test_almost_nothing_is_padding(sequences, batch, micro):
    steps = steps_of(sequences, batch, micro)
    batches = [b for step in range(3840 // batch) for b in steps[step]]
    real = sum(b["attention_mask"].sum().item() for b in batches)
    assert real / sum(b["attention_mask"].numel() for b in batches) > 0.97


def test_a_step_sees_short_and_long_sequences(sequences):
    steps = steps_of(sequences, 64, 8)
    lengths = [np.concatenate([b["attention_mask"].sum(1) for b in steps[i]]) for i in range(9)]
    assert np.mean([np.ptp(step) for step in lengths]) > 25


@pytest.mark.parametrize(("processes", "micro"), [(1, 4), (2, 8), (2, 16), (4, 8)])
def test_a_step_holds_the_same_examples_however_it_is_shared_out(sequences, processes, micro):
    def rows(batches):
        return sorted(row for batch in batches for row in rows_of(batch))

    shared = [b for r in range(processes) for b in steps_of(sequences, 32, micro, processes, r)[5]]
    assert rows(shared) == rows(steps_of(sequences)[5])


class Billion(SequenceIndex):
    """As many sequences as a corpus of 100 billion tokens has, of lengths made up on the spot."""

    def __init__(self) -> None:
        self.source_sizes = self.source_draws = np.array([10**9])

    def locate(self, index):
        return index * 126, (1 + stateless_rng.random_bits(7, index) % 126).astype(np.int64)


@pytest.mark.parametrize("processes", [1, 8, 256])
def test_a_billion_sequences_are_shared_out_once_among_any_number_of_ranks(processes):
    sequences = Billion()
    for step in (123_456, 10**9 // 2048):  # the second crosses into the next epoch
        place = np.arange(step * 2048, (step + 1) * 2048)
        expected, epochs = training_order(sequences, place, 0, 512)
        found = []
        for rank in range(processes):
            steps = steps_of(sequences, 2048, 2, processes, rank)
            micro_batches = steps.micro_batch_indices(step)
            assert sum(len(index) for index, _ in micro_batches) == 2048 // processes
            found += [pair for micro_batch in micro_batches for pair in zip(*micro_batch)]
        assert sorted(found) == sorted(zip(expected, epochs))


def test_a_rank_of_a_thousand_needs_no_memory_for_a_billion_sequences():
    steps = steps_of(Billion(), 2048, 2, 1024, 1023)
    tracemalloc.start()
    steps.micro_batch_indices(123_456)
    peak = tracemalloc.get_traced_memory()[1]
    tracemalloc.stop()
    assert peak < 2e6


def test_the_order_of_a_billion_repeats_nothing():
    # half a million places: a function that is no permutation would collide about 130 times
    windows = np.random.default_rng(0).choice(10**9 // 2048, 256, replace=False)
    place = (windows[:, None] * 2048 + np.arange(2048)).flatten()
    found = stateless_rng.permute(place, 10**9, 0, 0)
    assert len(np.unique(found)) == len(place)
    assert found.min() >= 0
    assert found.max() < 10**9
    assert stateless_rng.permute(place[7], 10**9, 0, 0) == found[7]


def test_a_document_costs_a_process_half_a_byte(tmp_path):
    sequences = SequenceIndex(make_token_store(np.full(100_000, 3), tmp_path), 64)
    held = sum(x.nbytes for x in vars(sequences).values() if isinstance(x, np.ndarray))
    assert held < 0.6 * 100_000


def test_rows_are_framed_and_masked_where_it_says(sequences):
    (batch,) = steps_of(sequences)[0]
    assert (batch["input_ids"][:, 0] == 2).all()
    last = batch["attention_mask"].sum(1) - 1
    assert (batch["input_ids"][torch.arange(32), last] == 3).all()
    assert (batch["input_ids"][batch["attention_mask"] == 0] == 0).all()
    share = len(batch["label_positions"]) / batch["attention_mask"].sum()
    assert 0.1 < share < 0.2


def test_a_sequence_is_masked_differently_in_every_epoch(sequences):
    rows, batch_format = np.arange(50), BatchFormat(VOCAB, 0.15, 0)
    first, second = (
        make_batch(sequences, rows, np.full(50, epoch), batch_format)["label_positions"].tolist()
        for epoch in (0, 1)
    )
    assert len(set(first) & set(second)) < 0.3 * len(first)


def test_lengths_come_in_another_order_in_every_epoch_and_with_every_seed(sequences):
    def sizes(epoch, seed):
        place = epoch * sequences.epoch_size + np.arange(1024)
        return sequences.locate(training_order(sequences, place, seed)[0])[1]

    for other in (sizes(1, 0), sizes(0, 1)):
        assert abs(np.corrcoef(sizes(0, 0), other)[0, 1]) < 0.3
