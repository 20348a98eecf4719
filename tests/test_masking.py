"""The corruption against BERT's shares and against transformers' own collator."""

import numpy as np
import pytest
import torch
from scipy import stats
from transformers import DataCollatorForLanguageModeling

from train.masking import corrupt
from train.packing import SpecialTokens

SPECIAL = SpecialTokens(2, 3, 0, 4, 60, (0, 1, 2, 3, 4))


def sample(rate: float = 0.15, seed: int = 0, rows: int = 1000):
    ids = np.random.default_rng(0).integers(5, 60, (rows, 100))
    ids[:, 0], ids[:, -1] = 2, 0
    index = np.arange(rows)
    return ids, *corrupt(ids, index, np.zeros_like(index), SPECIAL, rate, seed)


def within(count: int, number: int, share: float) -> bool:
    return abs(count - number * share) < 3 * np.sqrt(number * share * (1 - share))


@pytest.mark.parametrize("rate", [0.15, 0.3])
def test_shares_are_berts_on_100_000_tokens(rate):
    ids, corrupted, chosen = sample(rate)
    inner, number = chosen[:, 1:-1], chosen.sum()
    assert within(number, inner.size, rate)
    assert within((corrupted[chosen] == SPECIAL.mask).sum(), number, 0.8)
    # a random token is the original one time in V
    assert within((corrupted[chosen] == ids[chosen]).sum(), number, 0.1 + 0.1 / 60)


def test_special_tokens_and_padding_are_never_chosen():
    _, corrupted, chosen = sample(0.9)
    assert not chosen[:, [0, -1]].any()
    assert (corrupted[:, 0] == 2).all()
    assert (corrupted[:, -1] == 0).all()


def test_what_is_not_chosen_stays():
    ids, corrupted, chosen = sample()
    np.testing.assert_array_equal(corrupted[~chosen], ids[~chosen])


def test_masks_belong_to_the_sequence_not_to_its_batch():
    ids, whole, _ = sample()
    rows = np.array([7, 3, 900])
    alone, _ = corrupt(ids[rows, :50], rows, np.zeros(3, int), SPECIAL, 0.15, 0)
    np.testing.assert_array_equal(alone, whole[rows, :50])


def test_epochs_and_seeds_give_other_masks():
    ids, whole, _ = sample()
    index = np.arange(len(ids))
    later, _ = corrupt(ids, index, np.ones_like(index), SPECIAL, 0.15, 0)
    assert (later != whole).mean() > 0.1
    assert (sample(seed=1)[1] != whole).mean() > 0.1


def test_masked_counts_are_distributed_as_transformers_collator_makes_them(tokenizer):
    special = SpecialTokens.of(tokenizer)
    ids = np.random.default_rng(0).integers(5, len(tokenizer), (2000, 40))
    index = np.arange(2000)
    _, ours = corrupt(ids, index, np.zeros_like(index), special, 0.15, 0)
    torch.manual_seed(0)
    collator = DataCollatorForLanguageModeling(tokenizer, mlm_probability=0.15)
    theirs = (collator([{"input_ids": row} for row in ids.tolist()])["labels"] != -100).numpy()
    most = 14
    counts = [np.bincount(m.sum(1).clip(max=most), minlength=most + 1) for m in (ours, theirs)]
    kept = np.minimum(*counts) > 5
    assert stats.chi2_contingency(np.stack(counts)[:, kept]).pvalue > 0.001
