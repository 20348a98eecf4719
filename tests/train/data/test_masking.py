"""The corruption against BERT's shares and against transformers' own collator."""

import dataclasses
from functools import partial

import numpy as np
import pytest
import transformers
from scipy import stats
from transformers import DataCollatorForLanguageModeling

from tiny import refused
from tiny_glue import tiny_tokenizer
from train.data import vocabulary
from train.data.masking import mask_tokens
from train.data.vocabulary import Vocab

VOCAB = Vocab(2, 3, 0, 4, 60, (0, 1, 2, 3, 4))
# ids from 40 on continue a word
WORDS = dataclasses.replace(VOCAB, is_continuation=np.arange(60) >= 40)


def mask(ids, rows, vocab=VOCAB, rate=0.15, epoch=0, seed=0):
    scheme = {"vocab": vocab, "mask_rate": rate, "seed": seed, "whole_word": vocab is WORDS}
    return mask_tokens(ids, rows, np.full_like(rows, epoch), **scheme)


def sample(rate: float = 0.15, vocab=VOCAB):
    ids = np.random.default_rng(0).integers(5, 60, (1000, 100))
    ids[:, 0], ids[:, 50], ids[:, -1] = 2, 3, 0
    return ids, *mask(ids, np.arange(1000), vocab, rate)


def within(count: int, number: int, share: float) -> bool:
    return abs(count - number * share) < 3 * np.sqrt(number * share * (1 - share))


@pytest.mark.parametrize("rate", [0.15, 0.3])
@pytest.mark.parametrize("vocab", [VOCAB, WORDS], ids=["tokens", "words"])
def test_tokens_or_whole_words_are_chosen_at_the_rate_and_changed_by_berts_shares(vocab, rate):
    ids, corrupted, chosen = sample(rate, vocab=vocab)
    assert not chosen[ids < 5].any()  # special tokens and padding
    np.testing.assert_array_equal(corrupted[~chosen], ids[~chosen])
    begins = (ids < 40) | (np.roll(ids, 1, axis=1) < 5) | (vocab is VOCAB)
    number = begins.cumsum()  # of the word of each token
    tokens, hits = np.bincount(number), np.bincount(number, chosen.flatten())
    maskable = np.bincount(number, (ids >= 5).flatten()) > 0
    assert set(np.unique(hits[maskable] / tokens[maskable])) == {0.0, 1.0}
    assert within((hits > 0).sum(), maskable.sum(), rate)
    # tokens of a word are chosen together, but each draws its own 80/10/10 action
    assert within((corrupted[chosen] == VOCAB.mask_id).sum(), chosen.sum(), 0.8)
    # a random token is the original one time in V
    assert within((corrupted[chosen] == ids[chosen]).sum(), chosen.sum(), 0.1 + 0.1 / 60)
    later = chosen & WORDS.is_continuation[ids]
    first = np.roll(corrupted, 1, axis=1) == VOCAB.mask_id
    assert within((corrupted[later & first] == VOCAB.mask_id).sum(), (later & first).sum(), 0.8)


def test_a_sequence_that_begins_inside_a_word_begins_a_word():
    ids = np.tile([2, 50, 50, 3, 0], (2000, 1))
    _, chosen = mask(ids, np.arange(2000), WORDS, 0.5)
    assert (chosen[:, 1] == chosen[:, 2]).all()
    assert within(chosen[:, 1].sum(), 2000, 0.5)


def test_words_go_on_where_the_vocabulary_says(tmp_path):
    pieces = [*vocabulary.SPECIAL_TOKENS, "walk", "##ing", "##s"]
    vocabulary.save_tokenizer(pieces, tmp_path / "pieces")
    vocab = Vocab.from_tokenizer(vocabulary.load_tokenizer(str(tmp_path / "pieces")))
    assert vocab.is_continuation.tolist() == [False] * 6 + [True] * 2
    other = transformers.RobertaTokenizer(vocab={"<s>": 0, "</s>": 1, "<pad>": 2, "<mask>": 3})
    vocab = Vocab.from_tokenizer(other)
    vocab.check_whole_word(False)
    refused(partial(vocab.check_whole_word, True), "corpus.whole_word must be false")


@pytest.mark.parametrize("vocab", [VOCAB, WORDS], ids=["tokens", "words"])
def test_masks_belong_to_the_sequence_not_to_its_batch(vocab):
    ids, whole, _ = sample(vocab=vocab)
    rows = np.array([7, 3, 900])
    alone, _ = mask(ids[rows, :50], rows, vocab)
    np.testing.assert_array_equal(alone, whole[rows, :50])


def test_the_masks_of_runs_that_resume_stay():
    ids, found = np.tile([5, 45], 6)[None], []
    for vocab in (VOCAB, WORDS):
        corrupted, chosen = mask(ids, np.array([2]), vocab, 0.3, epoch=1, seed=21)
        found.append(dict(zip(np.flatnonzero(chosen).tolist(), corrupted[chosen].tolist())))
    assert found[0] == {1: 4, 2: 4, 4: 42, 5: 45, 8: 4}  # [MASK], a random token, its own
    assert found[1] == {2: 4, 3: 5, 4: 42, 5: 45, 8: 4, 9: 4}


def test_masks_are_distributed_as_transformers_collator_makes_them(tokenizer):
    vocab = Vocab.from_tokenizer(tokenizer)
    ids = np.random.default_rng(0).integers(5, len(tokenizer), (2000, 40))  # 80,000 tokens
    ours = mask(ids, np.arange(2000), vocab)
    collator = DataCollatorForLanguageModeling(tokenizer, mlm_probability=0.15)
    batch = collator([{"input_ids": row} for row in ids.tolist()])
    both = ours, (batch["input_ids"].numpy(), (batch["labels"] != -100).numpy())
    most = 14
    counts = [np.bincount(c.sum(1).clip(max=most), minlength=most + 1) for _, c in both]
    kept = np.minimum(*counts) > 5
    assert stats.chi2_contingency(np.stack(counts)[:, kept]).pvalue > 0.001
    # what each chosen token became: itself, or one of the vocabulary's ids, [MASK] among them
    became = [np.where(corrupted == ids, -1, corrupted)[chosen] for corrupted, chosen in both]
    counts = [np.bincount(values + 1, minlength=len(tokenizer) + 1) for values in became]
    assert stats.chi2_contingency(np.stack(counts)).pvalue > 0.001


def test_a_vocabulary_without_a_mask_is_refused_by_name():
    tokenizer = tiny_tokenizer()
    tokenizer.mask_token = None
    refused(lambda: Vocab.from_tokenizer(tokenizer), "[MASK]", "got none for ['mask_token_id'")
