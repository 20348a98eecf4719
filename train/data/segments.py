"""Part of step 4 of the data path: sequences cut into two segments, [CLS] A [SEP] B [SEP].

Sources of the two objectives for [CLS]: Devlin et al. 2019, "BERT", section 3.1 (next sentence) and
Lan et al. 2020, "ALBERT" (arXiv:1909.11942), section 3.1 (order). A cut, and whether B is replaced,
are functions of (seed, epoch, sequence), as the masks are.
"""

from collections.abc import Sequence

import numpy as np
from numpy.typing import NDArray

from train.data import stateless_rng
from train.data.masking import IGNORE_INDEX, Vocab

Tokens = NDArray[np.integer]
Indices = NDArray[np.int64]

SENTENCE_OBJECTIVES = ("next", "order")
"""Values of `corpus.segments` with an objective for [CLS]."""

CUT_STREAM, CHANGE_STREAM, OTHER_STREAM = 3, 4, 5
"""First keys of the random draws, after those of `train.data.masking`."""


def draw_other_sequences(sequence_ids: Indices, epochs: Indices, count: int, seed: int) -> Indices:
    """Draw for each sequence one of `count` sequences that may give its second segment, [B]."""
    bits = stateless_rng.random_bits(OTHER_STREAM, seed, epochs, sequence_ids)
    return (bits % np.uint64(count)).astype(np.int64)


def split_segments(
    texts: Sequence[Tokens],
    others: Sequence[Tokens],
    sequence_ids: Indices,
    epochs: Indices,
    vocab: Vocab,
    segments: str,
    seed: int,
) -> tuple[list[tuple[Tokens, Tokens]], Indices]:
    """Cut texts, the tokens of sequences without special ones, in two.

    The `others`, from `draw_other_sequences`, are read for "next" only. Sequence and epoch [B]
    decide the cut, with the seed, as they decide the masks.

    Returns:
        A and B of each sequence, B empty if it has one token; and [B] int64, 0 if B follows A, 1 if
        not, `IGNORE_INDEX` if B is empty.
    """
    key = seed, epochs, sequence_ids
    draws = stateless_rng.uniform(CUT_STREAM, *key)
    is_changed = stateless_rng.uniform(CHANGE_STREAM, *key) < 0.5
    is_changed &= segments in SENTENCE_OBJECTIVES
    pairs, labels = [], is_changed.astype(np.int64)
    for row, tokens in enumerate(texts):
        cut = find_cut(tokens, float(draws[row]), vocab.sentence_end_ids)
        a, b = tokens[:cut], tokens[cut:]
        if len(b) == 0:
            labels[row] = IGNORE_INDEX
        elif is_changed[row]:
            a, b = (b, a) if segments == "order" else (a, others[row][-len(b) :])
        pairs.append((a, b))
    return pairs, labels


def find_cut(tokens: Tokens, draw: float, sentence_end_ids: tuple[int, ...]) -> int:
    """Return the length of the first segment: up to the end of a sentence, if one ends inside.

    A uniform number in [0, 1), `draw`, chooses among the possible cuts of tokens [n].
    """
    cuts = 1 + np.flatnonzero(np.isin(tokens[:-1], sentence_end_ids))
    if len(cuts) == 0:
        cuts = np.arange(1, len(tokens))
    return int(cuts[int(draw * len(cuts))]) if len(cuts) else len(tokens)
