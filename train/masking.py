"""The corruption of masked language modelling, a pure function of (seed, epoch, sequence).

Source: Devlin et al. 2019, "BERT", section 3.1: of the chosen tokens 80 % become [MASK], 10 % a
random token, 10 % stay. Each token is chosen on its own, as in RoBERTa and transformers, or each
word as a whole (its tokens then meet their fates one by one), as in BERT's later checkpoints.
"""

from typing import Protocol

import numpy as np
from numpy.typing import NDArray

from train import counter


class MaskIds(Protocol):
    """What masking must know of a vocabulary."""

    @property
    def mask(self) -> int:
        """Id of [MASK]."""

    @property
    def vocabulary(self) -> int:
        """Number of ids, V."""

    @property
    def unmaskable(self) -> tuple[int, ...]:
        """Ids that are never chosen: special tokens and padding."""

    @property
    def continuing(self) -> NDArray[np.bool_] | None:
        """[V] which ids go on with the word before them; None chooses token by token."""


def corrupt(
    ids: NDArray[np.int64],
    sequence: NDArray[np.int64],
    epoch: NDArray[np.int64],
    special: MaskIds,
    rate: float,
    seed: int,
) -> tuple[NDArray[np.int64], NDArray[np.bool_]]:
    """Choose tokens and corrupt them.

    Args:
        ids: [B, L] token ids.
        sequence: [B] which sequence each row is; with epoch and seed it decides the row's masks,
            whatever the batch it stands in.
        epoch: [B] how many times the sequence has been seen.
        special: Ids of [MASK] and of what is never chosen; V; where words go on.
        rate: Share of tokens chosen.
        seed: The run's seed.

    Returns:
        Corrupted ids [B, L], and which tokens were chosen [B, L].
    """
    names, column = (seed, epoch[:, None], sequence[:, None]), np.arange(ids.shape[1])
    never = np.isin(ids, special.unmaskable)
    unit = column
    if special.continuing is not None:
        # a word is named by the column it starts in; a special token, never chosen, starts one too
        unit = np.maximum.accumulate(np.where(special.continuing[ids], 0, column), axis=1)
    chosen = (counter.uniform(0, *names, unit) < rate) & ~never
    fate = counter.uniform(1, *names, column)
    random_ids = (counter.uniform(2, *names, column) * special.vocabulary).astype(np.int64)
    corrupted = np.where(chosen & (fate < 0.8), special.mask, ids)
    return np.where(chosen & (fate >= 0.8) & (fate < 0.9), random_ids, corrupted), chosen
