"""Sequences and steps: everything once, little padding, the same for any number of processes."""

import numpy as np
import pytest
import torch

from train.corpus import TokenStore
from train.packing import Sequences, SpecialTokens, Steps, ordered
from train.settings import InputError

SPECIAL = SpecialTokens(2, 3, 0, 4, 60_000, (0, 1, 2, 3, 4))


def store(lengths, tmp_path) -> TokenStore:
    ends = np.cumsum(lengths)
    return TokenStore(np.arange(5, 5 + ends[-1]), ends, tmp_path)


@pytest.fixture
def sequences(tmp_path) -> Sequences:
    """Document lengths as skewed as Wikipedia's; 0 and exact multiples among them."""
    lengths = np.random.default_rng(0).lognormal(4, 1.2, 3000).astype(int)
    lengths[:4] = [0, 62, 124, 63]
    return Sequences(store(lengths, tmp_path), 64)


def steps_of(sequences, batch=32, micro=32, processes=1, rank=0, seed=0) -> Steps:
    return Steps(sequences, SPECIAL, batch, micro, 0.15, seed, processes, rank)


def tokens_of(batch) -> torch.Tensor:
    """Original tokens of a batch, masks undone."""
    ids = batch["input_ids"].flatten().clone()
    ids[batch["places"]] = batch["targets"]
    return ids[ids >= 5]


def test_pieces_tile_the_corpus_and_stay_inside_documents(sequences):
    start, size = sequences.spans(np.arange(len(sequences)))
    np.testing.assert_array_equal(start[1:], (start + size)[:-1])
    assert start[0] == 0
    assert start[-1] + size[-1] == sequences.store.ends[-1]
    assert size.min() >= 1
    assert size.max() == 62
    document = np.searchsorted(sequences.store.ends, start, side="right")
    assert (start + size <= sequences.store.ends[document]).all()


def test_every_token_is_seen_once_an_epoch(sequences):
    steps = steps_of(sequences)
    number = len(sequences)
    seen = torch.cat([tokens_of(b) for step in range(number // 32 + 1) for b in steps[step]])
    place = np.arange(number)
    assert sorted(ordered(sequences, place, 0).tolist()) == list(range(number))
    assert sorted(ordered(sequences, place + number, 0).tolist()) == list(range(number))
    counts = torch.bincount(seen, minlength=5 + int(sequences.store.ends[-1]))[5:]
    assert counts.min() == 1  # the last step already reaches into the second epoch
    assert (counts > 1).sum() <= 32 * 62


def test_an_epoch_is_reordered_and_a_seed_decides(sequences):
    place = np.arange(500)
    first = ordered(sequences, place, 0)
    assert (first == ordered(sequences, place, 0)).all()
    assert (first != ordered(sequences, place, 1)).mean() > 0.9
    assert (first != ordered(sequences, place + len(sequences), 0)).mean() > 0.9


def test_almost_nothing_is_padding(sequences):
    batches = [b for step in range(60) for b in steps_of(sequences, 64, 8)[step]]
    real = sum(b["attention_mask"].sum().item() for b in batches)
    assert real / sum(b["attention_mask"].numel() for b in batches) > 0.97


def test_a_step_sees_short_and_long_sequences(sequences):
    steps = steps_of(sequences, 64, 8)
    lengths = [np.concatenate([b["attention_mask"].sum(1) for b in steps[i]]) for i in range(9)]
    assert np.mean([np.ptp(step) for step in lengths]) > 25


@pytest.mark.parametrize(("processes", "micro"), [(1, 4), (2, 8), (2, 16), (4, 8)])
def test_a_step_holds_the_same_examples_however_it_is_shared_out(sequences, processes, micro):
    def rows(batches):
        return sorted(
            (tuple(ids[mask.bool()].tolist()))
            for b in batches
            for ids, mask in zip(b["input_ids"], b["attention_mask"])
        )

    shared = [b for r in range(processes) for b in steps_of(sequences, 32, micro, processes, r)[5]]
    assert rows(shared) == rows(steps_of(sequences)[5])


def test_rows_are_framed_and_masked_where_it_says(sequences):
    (batch,) = steps_of(sequences)[0]
    assert (batch["input_ids"][:, 0] == 2).all()
    last = batch["attention_mask"].sum(1) - 1
    assert (batch["input_ids"][torch.arange(32), last] == 3).all()
    assert (batch["input_ids"][batch["attention_mask"] == 0] == 0).all()
    share = len(batch["places"]) / batch["attention_mask"].sum()
    assert 0.1 < share < 0.2


def test_batches_that_cannot_be_shared_out_are_refused(sequences):
    with pytest.raises(
        InputError, match=r"optim.batch_size must be a multiple .*\(12 x 2 = 24\), got 32"
    ):
        steps_of(sequences, 32, 12, 2)
