"""Learn a WordPiece vocabulary.

    python -m train.vocabulary --corpus.train TEXT --corpus.tokenizer FOLDER

The same text gives the same bytes, in every process and on every machine.
"""

import os
import shutil
from collections import Counter
from collections.abc import Callable, Iterator
from dataclasses import dataclass, field
from pathlib import Path

from tokenizers import BertWordPieceTokenizer
from transformers import AutoTokenizer, BertTokenizer, PreTrainedTokenizerBase

from train.corpus import documents
from train.launch import run_command
from train.settings import CorpusSettings, InputError, require

ALPHABET = 1000
"""Most characters that get pieces of their own, as in bert-base-uncased."""

SPECIAL = ("[PAD]", "[UNK]", "[CLS]", "[SEP]", "[MASK]")


@dataclass(frozen=True)
class VocabularySettings:
    """Learn a WordPiece vocabulary from text."""

    corpus: CorpusSettings = field(default_factory=CorpusSettings)


def learn(texts: Callable[[], Iterator[str]], size: int) -> list[str]:
    """The pieces of a lower-cased WordPiece vocabulary, in canonical order.

    The trainer breaks ties between equally frequent pairs by their numbers, and numbers pieces as
    its hash map happens to hand them out. Given the alphabet and its continuations in sorted order
    beforehand, it has no choice left, and the same text gives the same pieces.

    Args:
        texts: Called for each of the two passes over the documents.
        size: Most pieces, special tokens included.

    Returns:
        Special tokens, then whole-word beginnings, then continuations (##), each sorted.
    """
    tokenizer = BertWordPieceTokenizer(lowercase=True)
    normalise = tokenizer.normalizer.normalize_str
    counts: Counter[str] = Counter()
    for text in texts():
        counts.update(normalise(text))
    frequent = sorted(counts, key=lambda c: (-counts[c], c))
    alphabet = sorted(c for c in frequent[:ALPHABET] if not c.isspace())
    continuations = [f"##{c}" for c in alphabet]
    tokenizer.train_from_iterator(
        texts(),
        vocab_size=size,
        min_frequency=2,
        limit_alphabet=ALPHABET,
        initial_alphabet=alphabet,
        special_tokens=[*SPECIAL, *alphabet, *continuations],
    )
    pieces = set(tokenizer.get_vocab()) - set(SPECIAL)
    return [*SPECIAL, *sorted(pieces, key=lambda piece: (piece.startswith("##"), piece))]


def save(pieces: list[str], folder: str | Path, length: int) -> None:
    """Write a BERT tokenizer and its vocab.txt, whole or not at all."""
    tokenizer = BertTokenizer(vocab={piece: i for i, piece in enumerate(pieces)})
    tokenizer.model_max_length = length
    target = Path(folder)
    target.parent.mkdir(parents=True, exist_ok=True)
    unfinished = target.with_name(f"{target.name}.{os.getpid()}.tmp")
    tokenizer.save_pretrained(unfinished)
    (unfinished / "vocab.txt").write_text("\n".join(pieces) + "\n", encoding="utf-8")
    if target.exists():
        shutil.rmtree(target)
    unfinished.rename(target)


def learn_if_missing(corpus: CorpusSettings) -> None:
    """Learn `corpus.tokenizer` from the training text, unless it is there or none was asked for."""
    if corpus.vocabulary_size is None or Path(corpus.tokenizer).exists():
        return
    rule = "must be at least 100"
    require(
        corpus.vocabulary_size >= 100,
        "corpus.vocabulary_size",
        rule,
        corpus.vocabulary_size,
        "8192 is small",
    )
    save(
        learn(lambda: documents(corpus, "train"), corpus.vocabulary_size),
        corpus.tokenizer,
        corpus.length,
    )


def load(name: str) -> PreTrainedTokenizerBase:
    """A fast tokenizer from a folder, a vocab.txt or the hub.

    Raises:
        InputError: There is none, or it is a slow one.
    """
    if Path(name).is_file():
        pieces = Path(name).read_text(encoding="utf-8").splitlines()
        return BertTokenizer(vocab={piece: i for i, piece in enumerate(pieces)})
    try:
        tokenizer = AutoTokenizer.from_pretrained(name)
    except (OSError, ValueError) as error:
        raise InputError(
            f"corpus.tokenizer must be a folder, vocab.txt or hub id, got {name!r}; "
            "check the path, or give corpus.vocabulary_size to learn one there"
        ) from error
    require(
        tokenizer.is_fast,
        "corpus.tokenizer",
        "must be a fast tokenizer",
        name,
        "use a BERT tokenizer",
    )
    return tokenizer


def main(settings: VocabularySettings) -> None:
    """Learn and save; says where."""
    learn_if_missing(settings.corpus)
    print(f"{len(load(settings.corpus.tokenizer))} pieces in {settings.corpus.tokenizer}")


if __name__ == "__main__":
    run_command(main, VocabularySettings)
