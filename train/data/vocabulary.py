"""Learn a WordPiece vocabulary.

    python -m train.data.vocabulary --corpus.vocabulary_size 8192 --corpus.train TEXT \
      --corpus.tokenizer FOLDER

The same text gives the same bytes, in every process and on every machine.
"""

import json
import re
from collections import Counter
from collections.abc import Callable, Iterator
from dataclasses import dataclass, field
from pathlib import Path

from tokenizers import (
    BertWordPieceTokenizer,
    Tokenizer,
    decoders,
    models,
    pre_tokenizers,
    processors,
)
from transformers import (
    AutoTokenizer,
    BertTokenizer,
    PreTrainedTokenizerBase,
    PreTrainedTokenizerFast,
)

from train.data.documents import read_documents
from train.loop.atomic_dir import write_dir_atomically
from train.loop.launch import run_command
from train.settings import CorpusSettings, InputError, require

ALPHABET = 1000
"""Most characters that get pieces of their own, as in bert-base-uncased."""

BYTES = "bytes"
"""Name of the tokenizer that needs no vocabulary."""

SPECIAL_TOKENS = ("[PAD]", "[UNK]", "[CLS]", "[SEP]", "[MASK]")


@dataclass(frozen=True)
class VocabularySettings:
    """Learn a WordPiece vocabulary from text."""

    corpus: CorpusSettings = field(default_factory=CorpusSettings)


def train_wordpiece(texts: Callable[[], Iterator[str]], size: int) -> list[str]:
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
    if not counts:
        raise InputError("corpus.train must hold text to learn from, got none; check the files")
    frequent = sorted((c for c in counts if not c.isspace()), key=lambda c: (-counts[c], c))
    # a character takes two places, beginning and continuation: leave at least half for words
    alphabet = sorted(frequent[: min(ALPHABET, (size - len(SPECIAL_TOKENS)) // 4)])
    continuations = [f"##{c}" for c in alphabet]
    tokenizer.train_from_iterator(
        texts(),
        vocab_size=size,
        min_frequency=2,
        limit_alphabet=len(alphabet),
        initial_alphabet=alphabet,
        special_tokens=[*SPECIAL_TOKENS, *alphabet, *continuations],
    )
    pieces = set(tokenizer.get_vocab()) - set(SPECIAL_TOKENS)
    return [*SPECIAL_TOKENS, *sorted(pieces, key=lambda piece: (piece.startswith("##"), piece))]


def save_tokenizer(pieces: list[str], folder: str | Path) -> None:
    """Write a BERT tokenizer, which knows no limit of length, and its vocab.txt, or neither."""
    tokenizer = BertTokenizer(vocab={piece: i for i, piece in enumerate(pieces)})
    with write_dir_atomically(Path(folder)) as unfinished:
        tokenizer.save_pretrained(unfinished)
        (unfinished / "vocab.txt").write_text("\n".join(pieces) + "\n", encoding="utf-8")


def train_if_missing(corpus: CorpusSettings) -> None:
    """Learn `corpus.tokenizer` from the training text, unless it is there or none was asked for.

    Raises:
        InputError: The size is too small, the vocabulary that is there is larger, or the folder's
            name may be one of the hub.
    """
    size, folder = corpus.vocabulary_size, corpus.tokenizer
    if size is None:
        return
    remedy = "set it to null"
    require(folder != BYTES, "corpus.vocabulary_size", "must be null for bytes", size, remedy)
    if Path(folder).exists():
        there = len(load_tokenizer(folder))
        rule, remedy = (
            f"must be at least the {there} pieces in {folder}",
            "set it to null to take that one",
        )
        require(there <= size, "corpus.vocabulary_size", rule, size, remedy)
        return
    rule, remedy = (
        "must name a folder to learn a vocabulary into",
        f"write ./{folder}, or set corpus.vocabulary_size to null to take the one of a hub id",
    )
    require(not _may_be_a_hub_id(corpus), "corpus.tokenizer", rule, repr(folder), remedy)
    require(size >= 100, "corpus.vocabulary_size", "must be at least 100", size, "8192 is small")
    print(f"learning a vocabulary of {size} pieces into {folder}")
    save_tokenizer(train_wordpiece(lambda: read_documents(corpus, "train"), size), folder)


def _may_be_a_hub_id(corpus: CorpusSettings) -> bool:
    """Whether a name that is not there is NAME or OWNER/NAME, and its folder is not there either.

    A vocabulary learned into such a folder would be taken for the hub's from then on.
    """
    path = Path(corpus.tokenizer)
    if corpus.tokenizer.startswith((".", "~")) or path.is_absolute() or len(path.parts) > 2:
        return False
    owner = path.parent  # `runs`, which the text's cache will make, is no owner
    return len(path.parts) == 1 or not (owner.is_dir() or owner in Path(corpus.cache).parents)


def byte_tokenizer() -> PreTrainedTokenizerBase:
    """One piece for each of the 256 bytes of UTF-8, after the special tokens."""
    signs = sorted(pre_tokenizers.ByteLevel.alphabet())
    pieces = {piece: number for number, piece in enumerate([*SPECIAL_TOKENS, *signs])}
    made = Tokenizer(models.BPE(vocab=pieces, merges=[]))
    made.pre_tokenizer = pre_tokenizers.ByteLevel(add_prefix_space=False, use_regex=False)
    made.decoder = decoders.ByteLevel()
    first = "[CLS]"  # and no end: a decoder goes on from a prompt
    ids = [(first, pieces[first])]
    ids.append(("[SEP]", pieces["[SEP]"]))
    made.post_processor = processors.TemplateProcessing(
        single=f"{first} $A", pair=f"{first} $A [SEP] $B:1", special_tokens=ids
    )
    names = ("pad_token", "unk_token", "cls_token", "sep_token", "mask_token")
    return PreTrainedTokenizerFast(tokenizer_object=made, **dict(zip(names, SPECIAL_TOKENS)))


def load_tokenizer(name: str, key: str = "corpus.tokenizer") -> PreTrainedTokenizerBase:
    """A fast tokenizer from a folder, a vocab.txt or the hub, without truncation or padding.

    Raises:
        InputError: There is none, or it is a slow one; `key` is what the message names.
    """
    bare = _bare_vocabulary(Path(name))
    try:
        if name == BYTES:
            tokenizer = byte_tokenizer()
        elif bare is not None:
            tokenizer = BertTokenizer(vocab=str(bare), do_lower_case=not _has_capitals(bare))
        else:
            tokenizer = AutoTokenizer.from_pretrained(name)
    except Exception as error:  # of many kinds, and the Rust library's is bare
        rule, remedy = "must be a folder, vocab.txt or hub id of a tokenizer", "check the path"
        if Path(name).exists():
            remedy = "save it there with save_pretrained"
        elif key == "corpus.tokenizer":
            remedy += ", or give corpus.vocabulary_size to learn one there"
        raise InputError(f"{key} {rule}, got {name!r}; {remedy}") from error
    require(tokenizer.is_fast, key, "must be a fast tokenizer", name, "use a BERT tokenizer")
    # a tokenizer.json may carry both from its last use, and would cut whole documents
    tokenizer.backend_tokenizer.no_truncation()
    tokenizer.backend_tokenizer.no_padding()
    return tokenizer


def _bare_vocabulary(path: Path) -> Path | None:
    """A vocab.txt without any other file of a tokenizer beside it in the folder, if it is one."""
    if path.is_file():
        return path
    others = ("tokenizer.json", "tokenizer_config.json", "config.json")
    alone = not any((path / name).exists() for name in others)
    return path / "vocab.txt" if alone and (path / "vocab.txt").is_file() else None


def _has_capitals(file: Path) -> bool:
    """Whether more than one piece in a hundred does, which no lower-cased text would need."""
    pieces = file.read_text(encoding="utf-8").split("\n")
    words = [piece for piece in pieces if not piece.startswith(("[", "<"))]  # no special ones
    return 100 * sum(bool(re.search("[A-Z]", word)) for word in words) > len(words)


def tokenizer_state(tokenizer: PreTrainedTokenizerBase) -> str:
    """What decides the ids of a text, as JSON; not what the last call cut or padded."""
    try:
        backend = tokenizer.backend_tokenizer
        backend.no_truncation()
        backend.no_padding()
        return backend.to_str()
    except AttributeError:  # it has none
        pass
    except Exception as error:  # the Rust library raises this bare
        if "Custom" not in str(error):
            raise
    # words cut by Python code, as in transformers' Chinese RoFormerTokenizer
    pieces, options = sorted(tokenizer.get_vocab().items()), dict(tokenizer.init_kwargs)
    for place in ("name_or_path", "vocab", "vocab_file", "tokenizer_file"):
        options.pop(place, None)
    return json.dumps([type(tokenizer).__name__, pieces, options], sort_keys=True, default=str)


def main(settings: VocabularySettings) -> None:
    """Learn and save; says where."""
    train_if_missing(settings.corpus)
    print(f"{len(load_tokenizer(settings.corpus.tokenizer))} pieces in {settings.corpus.tokenizer}")


if __name__ == "__main__":
    run_command(main, VocabularySettings)
