"""Settings of small files of text."""

from pathlib import Path

from train.data.documents import read_documents
from train.settings import CorpusSettings

TEXTS = ["the cat sees the moon .", "a dog likes a river . " * 30, "my sister hears the song ."]


def corpus(source, tmp_path: Path, **changes) -> CorpusSettings:
    """Settings of a training text: a path, or what the setting may be."""
    train = str(source) if isinstance(source, Path) else source
    return CorpusSettings(train=train, cache=str(tmp_path / "tokens"), **changes)


def texts(source, tmp_path: Path) -> list[str]:
    """The documents of a training text."""
    return list(read_documents(corpus(source, tmp_path), "train"))
