"""A token store without a text, and its vocabulary."""

import numpy as np

from train.data.corpus import TokenStore
from train.data.masking import Vocab

VOCAB = Vocab(2, 3, 0, 4, 60_000, (0, 1, 2, 3, 4))


def make_token_store(lengths, tmp_path) -> TokenStore:
    """Write documents of these lengths in one shard; tokens are 5, 6, 7, ..., each once."""
    ends = np.cumsum(lengths)
    ids = np.dtype(np.uint32)
    np.arange(5, 5 + ends[-1], dtype=ids).tofile(tmp_path / "tokens.bin")
    return TokenStore(ends, (tmp_path,), np.zeros(1, np.int64), ids, (len(ends),), "made")
