"""Tokens on disk, read: what `train.data.corpus` has written; nothing here needs its tools."""

from dataclasses import dataclass
from pathlib import Path
from typing import Any

import numpy as np
from numpy.typing import NDArray


@dataclass(frozen=True)
class TokenStore:
    """Tokenised documents in shards; a document lies in one of them.

    Attributes:
        ends: End of each document in the tokens of all shards, [documents], int64, memory-mapped.
        shards: Their folders, in order.
        starts: Where each shard begins in the tokens of all, [shards], int64.
        dtype: Of the ids on disk, uint16 or uint32.
        parts: Documents of each name in the setting, in order.
        folder: Of the corpus; its name changes when the tokens do.
    """

    ends: NDArray[np.int64]
    shards: tuple[Path, ...]
    starts: NDArray[np.int64]
    dtype: np.dtype
    parts: tuple[int, ...]
    folder: Path

    def read(self, start: int, number: int) -> NDArray[Any]:
        """Ids `start` to `start + number` of all, [number]; they must lie in one shard.

        They come from the system's cache of the file, 11 microseconds a sequence, and no file stays
        open: a mapping of each of the 6,000 shards of 100 billion tokens would be more files than a
        process may hold.
        """
        shard = int(np.searchsorted(self.starts, start, side="right")) - 1
        offset = (start - int(self.starts[shard])) * self.dtype.itemsize
        ids = np.fromfile(self.shards[shard] / "tokens.bin", self.dtype, number, offset=offset)
        assert len(ids) == number, f"{self.shards[shard]} ends early"
        return ids
