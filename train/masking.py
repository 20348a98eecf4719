"""The corruption of masked language modelling, a pure function of (seed, epoch, sequence).

Source: Devlin et al. 2019, "BERT", section 3.1: of the chosen tokens 80 % become [MASK], 10 % a
random token, 10 % stay. Each token is chosen on its own, as in RoBERTa and transformers.
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
        epoch: [B] how many times the corpus has been seen.
        special: Ids of [MASK] and of what is never chosen; V.
        rate: Share of tokens chosen.
        seed: The run's seed.

    Returns:
        Corrupted ids [B, L], and which tokens were chosen [B, L].
    """
    names = (seed, epoch[:, None], sequence[:, None], np.arange(ids.shape[1]))
    chosen = (counter.uniform(0, *names) < rate) & ~np.isin(ids, special.unmaskable)
    fate = counter.uniform(1, *names)
    random_ids = (counter.uniform(2, *names) * special.vocabulary).astype(np.int64)
    corrupted = np.where(chosen & (fate < 0.8), special.mask, ids)
    return np.where(chosen & (fate >= 0.8) & (fate < 0.9), random_ids, corrupted), chosen
