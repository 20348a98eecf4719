"""Step 4 of the data path: reads the token ids that `train.data.corpus` has written to disk.

Needs neither a tokenizer nor the text, so that worker processes that make batches start quickly.
"""

from dataclasses import dataclass
from pathlib import Path
from typing import Any

import numpy as np
from numpy.typing import NDArray


@dataclass(frozen=True)
class TokenStore:
    """Token ids of a corpus, in shards; each document lies in one shard.

    Attributes:
        document_ends: End of each document in the tokens of all shards, [documents], int64,
            memory-mapped.
        shards: Folders of the shards, in order.
        shard_starts: Start of each shard in the tokens of all shards, [shards], int64.
        dtype: dtype of the ids on disk, uint16 or uint32.
        source_documents: Number of documents of each name in `corpus.train`, in order.
        folder: Folder of the joined corpus; its name is a hash of what decides the tokens.
    """

    document_ends: NDArray[np.int64]
    shards: tuple[Path, ...]
    shard_starts: NDArray[np.int64]
    dtype: np.dtype
    source_documents: tuple[int, ...]
    folder: Path

    def read(self, start: int, count: int) -> NDArray[Any]:
        """Read `count` ids from position `start` in the tokens of all shards; one shard holds them.

        Opening the file at each call takes 11 microseconds from the page cache. Mapping every shard
        instead would exceed the limit of open files: 100 billion tokens are 6,000 shards.
        """
        shard = int(np.searchsorted(self.shard_starts, start, side="right")) - 1
        offset = (start - int(self.shard_starts[shard])) * self.dtype.itemsize
        ids = np.fromfile(self.shards[shard] / "tokens.bin", self.dtype, count, offset=offset)
        assert len(ids) == count, f"{self.shards[shard]} ends early"
        return ids
