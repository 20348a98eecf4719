"""Masking, in step 4 of the data path: a pure function of (seed, stage, epoch, sequence).

Each stage has its own `seed`. Source: Devlin et al. 2019, "BERT", section 3.1: of the chosen tokens
80 % become [MASK], 10 % a random token, 10 % stay. Tokens are chosen independently, as in RoBERTa
and transformers, or by whole words, as in BERT's later checkpoints; the 80/10/10 action is drawn
per token in both cases. docs/design/architecture.md says what to edit to add a scheme.
"""

import numpy as np
from numpy.typing import NDArray

from train.data import stateless_rng
from train.data.vocabulary import Vocab

IGNORE_INDEX = -100
"""Label that the loss ignores, as in torch's cross-entropy; it pads `labels` to a fixed size. The
same as `roformer.losses.IGNORE_INDEX`: train.data imports nothing of roformer."""

CHOICE_STREAM, ACTION_STREAM, RANDOM_ID_STREAM = 0, 1, 2
"""First argument of `uniform`, which makes the draws of a token independent: is it chosen, which
80/10/10 action, which random token. Other numbers are other masks, also in runs that resume."""


def mask_tokens(
    ids: NDArray[np.int64],
    sequence_ids: NDArray[np.int64],
    epochs: NDArray[np.int64],
    *,
    vocab: Vocab,
    mask_rate: float,
    seed: int,
    whole_word: bool = False,
) -> tuple[NDArray[np.int64], NDArray[np.bool_]]:
    """Choose some of the tokens [B, L] to predict, and corrupt them.

    The draws of a row depend on `seed`, its sequence id [B] and its epoch [B] only. What happens to
    a token depends on its own and earlier columns, never on padding. `mask_rate` is the share of
    tokens chosen; with `whole_word` all pieces of a word are chosen or none.

    Returns:
        Corrupted ids [B, L], and whether each token was chosen [B, L].
    """
    row_key, column = (seed, epochs[:, None], sequence_ids[:, None]), np.arange(ids.shape[1])
    deciding_column = column  # whose draw counts: the token's own, or that of its word's start
    if whole_word:
        assert vocab.is_continuation is not None  # `check_whole_word` was called before
        # all tokens of a word share the draw of its first column, and those of a word that began
        # in an earlier sequence that of [CLS]
        deciding_column = np.maximum.accumulate(
            np.where(vocab.is_continuation[ids], 0, column), axis=1
        )
    chosen = stateless_rng.uniform(CHOICE_STREAM, *row_key, deciding_column) < mask_rate
    chosen &= ~np.isin(ids, vocab.special_ids)
    action = stateless_rng.uniform(ACTION_STREAM, *row_key, column)
    draws = stateless_rng.uniform(RANDOM_ID_STREAM, *row_key, column)
    random_ids = (draws * vocab.size).astype(np.int64)
    to_mask, to_random = chosen & (action < 0.8), chosen & (action >= 0.8) & (action < 0.9)
    return np.where(to_mask, vocab.mask_id, np.where(to_random, random_ids, ids)), chosen
