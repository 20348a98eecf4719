"""Settings of small texts, and a token store without a text."""

from pathlib import Path

import numpy as np

from train.data.corpus import TokenStore
from train.data.documents import read_documents
from train.data.vocabulary import Vocab
from train.settings import CorpusSettings

TEXTS = ["the cat sees the moon .", "a dog likes a river . " * 30, "my sister hears the song ."]
VOCAB = Vocab(2, 3, 0, 4, 60_000, (0, 1, 2, 3, 4))


def corpus(source, tmp_path: Path, **changes) -> CorpusSettings:
    """Settings of a training text: a path, or what the setting may be."""
    train = str(source) if isinstance(source, Path) else source
    return CorpusSettings(train=train, cache=str(tmp_path / "tokens"), **changes)


def texts(source, tmp_path: Path) -> list[str]:
    return list(read_documents(corpus(source, tmp_path), "train"))


def make_token_store(lengths, tmp_path) -> TokenStore:
    """Write documents of these lengths in one shard; tokens are 5, 6, 7, ..., each once."""
    ends = np.cumsum(lengths)
    ids = np.dtype(np.uint32)
    np.arange(5, 5 + ends[-1], dtype=ids).tofile(tmp_path / "tokens.bin")
    return TokenStore(ends, (tmp_path,), np.zeros(1, np.int64), ids, "made", "made")
