"""The corruption of masked language modelling, a pure function of (seed, epoch, sequence).

Source: Devlin et al. 2019, "BERT", section 3.1: of the chosen tokens 80 % become [MASK], 10 % a
random token, 10 % stay. Each token is chosen on its own, as in RoBERTa and transformers, or each
word as a whole (its tokens then meet their fates one by one), as in BERT's later checkpoints.
"""

from dataclasses import dataclass

import numpy as np
from numpy.typing import NDArray
from transformers import PreTrainedTokenizerBase

from train.data import stateless_rng
from train.settings import require


@dataclass(frozen=True)
class Vocab:
    """What the data path must know of a vocabulary.

    Attributes:
        cls_id, sep_id, pad_id, mask_id: Ids of [CLS], [SEP], [PAD] and [MASK].
        size: Number of ids, V.
        special_ids: Ids that are never masked: all special tokens.
        is_continuation: [V] whether an id continues the word before it (##ing); None masks single
            tokens instead of whole words.
    """

    cls_id: int
    sep_id: int
    pad_id: int
    mask_id: int
    size: int
    special_ids: tuple[int, ...]
    is_continuation: NDArray[np.bool_] | None = None

    @classmethod
    def from_tokenizer(
        cls, tokenizer: PreTrainedTokenizerBase, whole_word: bool = False
    ) -> "Vocab":
        """Read them off a tokenizer.

        Raises:
            InputError: It lacks one that masked language modelling needs, or whole words are asked
                for and its pieces do not say where a word goes on.
        """
        names = ("cls_token_id", "sep_token_id", "pad_token_id", "mask_token_id")
        ids = [getattr(tokenizer, name) for name in names]
        missing = [name for name, value in zip(names, ids) if value is None]
        rule = "must have [CLS], [SEP], [PAD] and [MASK]"
        require(
            not missing, "corpus.tokenizer", rule, f"none for {missing}", "use a BERT tokenizer"
        )
        first, last, padding, mask = ids
        unmaskable = tuple(sorted(tokenizer.all_special_ids))
        continuing = _continuing(tokenizer) if whole_word else None
        return cls(first, last, padding, mask, len(tokenizer), unmaskable, continuing)


def _continuing(tokenizer: PreTrainedTokenizerBase) -> NDArray[np.bool_]:
    model = tokenizer.backend_tokenizer.model
    prefix = getattr(model, "continuing_subword_prefix", None)
    rule, remedy = "must be false unless pieces are WordPiece's (##ing)", "use a BERT tokenizer"
    require(bool(prefix), "corpus.whole_word", rule, f"true with {type(model).__name__}", remedy)
    pieces = tokenizer.convert_ids_to_tokens(list(range(len(tokenizer))))
    return np.array([piece.startswith(prefix) for piece in pieces])


def mask_tokens(
    ids: NDArray[np.int64],
    sequence: NDArray[np.int64],
    epoch: NDArray[np.int64],
    vocab: Vocab,
    rate: float,
    seed: int,
) -> tuple[NDArray[np.int64], NDArray[np.bool_]]:
    """Choose tokens and corrupt them.

    Args:
        ids: [B, L] token ids.
        sequence: [B] which sequence each row is; with epoch and seed it decides the row's masks,
            whatever the batch it stands in.
        epoch: [B] how many times the sequence has been seen.
        vocab: Ids of [MASK] and of what is never chosen; V; where words go on.
        rate: Share of tokens chosen.
        seed: The run's seed.

    Returns:
        Corrupted ids [B, L], and which tokens were chosen [B, L].
    """
    names, column = (seed, epoch[:, None], sequence[:, None]), np.arange(ids.shape[1])
    never = np.isin(ids, vocab.special_ids)
    unit = column
    if vocab.is_continuation is not None:
        # a word is named by the column it starts in; a special token, never chosen, starts one too
        unit = np.maximum.accumulate(np.where(vocab.is_continuation[ids], 0, column), axis=1)
    chosen = (stateless_rng.uniform(0, *names, unit) < rate) & ~never
    fate = stateless_rng.uniform(1, *names, column)
    random_ids = (stateless_rng.uniform(2, *names, column) * vocab.size).astype(np.int64)
    corrupted = np.where(chosen & (fate < 0.8), vocab.mask_id, ids)
    return np.where(chosen & (fate >= 0.8) & (fate < 0.9), random_ids, corrupted), chosen
