"""Step 2 of the data path: training and loading of tokenizers, and what batches need of them.

The same text gives the same vocabulary, byte for byte, in every process and on every machine.
"""

import json
import re
from collections import Counter
from collections.abc import Callable, Iterator
from dataclasses import dataclass
from pathlib import Path

import numpy as np
import tokenizers
from numpy.typing import NDArray
from transformers import (
    AutoTokenizer,
    BertTokenizer,
    PreTrainedTokenizerBase,
    PreTrainedTokenizerFast,
)

from train.atomic_dir import check_writable, report_full_disk, write_dir_atomically
from train.data.documents import find_files, hash_file, looks_like_path, read_documents, short_hash
from train.settings import CorpusSettings, InputError, first_line

MAX_ALPHABET = 1000
"""Most characters that become tokens of their own, as in bert-base-uncased."""

BYTES = "bytes"
"""Name of the tokenizer whose tokens are the 256 bytes of UTF-8."""

SPECIAL_TOKENS = ("[PAD]", "[UNK]", "[CLS]", "[SEP]", "[MASK]")


def train_wordpiece(texts: Callable[[], Iterator[str]], size: int) -> list[str]:
    """Train a lower-cased WordPiece vocabulary of at most `size` tokens, special ones included.

    The trainer of `tokenizers` breaks ties between equally frequent pairs by their ids, and assigns
    ids in the order of a hash map. Giving it the alphabet and its continuations in sorted order
    leaves it no choice, so that the same text gives the same tokens.

    Returns:
        Special tokens, then beginnings of words, then continuations (##), each sorted.
    """
    tokenizer = tokenizers.BertWordPieceTokenizer(lowercase=True)
    normalize = tokenizer.normalizer.normalize_str
    counts: Counter[str] = Counter()
    for text in texts():
        counts.update(normalize(text))
    if not counts:
        raise InputError(
            "corpus.train must hold text to learn from, got none; check the files, and the share "
            "that corpus.validation holds out"
        )
    frequent = sorted((c for c in counts if not c.isspace()), key=lambda c: (-counts[c], c))
    # a character needs two tokens, beginning and continuation: leave at least half for words
    alphabet = sorted(frequent[: min(MAX_ALPHABET, (size - len(SPECIAL_TOKENS)) // 4)])
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
    """Write a BERT tokenizer without a maximum length, and vocab.txt, as one atomic folder."""
    tokenizer = BertTokenizer(vocab={piece: i for i, piece in enumerate(pieces)})
    with write_dir_atomically(Path(folder)) as unfinished:
        tokenizer.save_pretrained(unfinished)
        (unfinished / "vocab.txt").write_text("\n".join(pieces) + "\n", encoding="utf-8")


def train_if_missing(corpus: CorpusSettings) -> str:
    """Return the tokenizer's folder, file or hub id; train a missing folder if a size is given.

    Raises:
        InputError: The size is missing or too small, the existing vocabulary is larger, or the name
            of the folder could be a hub id.
    """
    check_tokenizer_settings(corpus)
    size = corpus.vocabulary_size
    folder = _folder_of_text(corpus) if corpus.tokenizer is None else corpus.tokenizer
    if size is None:
        return folder
    if Path(folder).exists():
        tokens = len(load_tokenizer(folder))
        if tokens > size:
            raise InputError(
                f"corpus.vocabulary_size must be at least the {tokens} pieces in {folder}, "
                f"got {size}; set it to null to take that one"
            )
        return folder
    if corpus.tokenizer is not None and _may_be_hub_id(folder, corpus.cache):
        raise InputError(
            f"corpus.tokenizer must name a folder to learn a vocabulary into, got {folder!r}; "
            f"write ./{folder}, or set corpus.vocabulary_size to null to take the one of a hub id"
        )
    check_writable(Path(folder), "corpus.tokenizer")
    print(f"learning a vocabulary of {size} pieces into {folder}")
    pieces = train_wordpiece(lambda: read_documents(corpus, "train"), size)
    with report_full_disk(Path(folder), "corpus.tokenizer"):
        save_tokenizer(pieces, folder)
    return folder


def check_tokenizer_settings(corpus: CorpusSettings) -> None:
    """Check that a tokenizer is named, or a possible size of one to learn."""
    size = corpus.vocabulary_size
    if size is not None and corpus.tokenizer == BYTES:
        raise InputError(
            f"corpus.vocabulary_size must be null for bytes, got {size}; set it to null"
        )
    if size is not None and size < 100:
        raise InputError(f"corpus.vocabulary_size must be at least 100, got {size}; 8192 is small")
    if corpus.tokenizer is None and size is None:
        raise InputError(
            "corpus.tokenizer must be given, or corpus.vocabulary_size to learn one, "
            "got null for both; 8192 is a small size"
        )


def _folder_of_text(corpus: CorpusSettings) -> str:
    """Folder in the cache of the vocabulary of this size that is learned from this text."""
    text = [hash_file(file, "train", corpus) for file in find_files(corpus, "train")]
    return str(Path(corpus.cache) / f"vocabulary-{short_hash(text, corpus.vocabulary_size)}")


def _may_be_hub_id(folder: str, cache: str) -> bool:
    """Whether a missing folder has the form NAME or OWNER/NAME, and OWNER is no folder either.

    A vocabulary saved there would from then on be loaded in place of the hub's.
    """
    owner = Path(folder).parent  # a parent of the token cache, such as `runs`, will be a folder
    is_owner_local = "/" in folder and (owner.is_dir() or owner in Path(cache).parents)
    return not (is_owner_local or looks_like_path(folder))


def byte_tokenizer() -> PreTrainedTokenizerBase:
    """Create a tokenizer of the 256 bytes of UTF-8, after the special tokens."""
    characters = sorted(tokenizers.pre_tokenizers.ByteLevel.alphabet())
    vocab = {token: number for number, token in enumerate([*SPECIAL_TOKENS, *characters])}
    tokenizer = tokenizers.Tokenizer(tokenizers.models.BPE(vocab=vocab, merges=[]))
    tokenizer.pre_tokenizer = tokenizers.pre_tokenizers.ByteLevel(
        add_prefix_space=False, use_regex=False
    )
    tokenizer.decoder = tokenizers.decoders.ByteLevel()
    # no [SEP] at the end of a single text: a decoder continues a prompt
    tokenizer.post_processor = tokenizers.processors.TemplateProcessing(
        single="[CLS] $A",
        pair="[CLS] $A [SEP] $B:1",
        special_tokens=[(token, vocab[token]) for token in ("[CLS]", "[SEP]")],
    )
    names = ("pad_token", "unk_token", "cls_token", "sep_token", "mask_token")
    return PreTrainedTokenizerFast(tokenizer_object=tokenizer, **dict(zip(names, SPECIAL_TOKENS)))


def load_tokenizer(name: str, key: str = "corpus.tokenizer") -> PreTrainedTokenizerBase:
    """Load a fast tokenizer: `bytes`, a folder, a vocab.txt or a hub id; errors name `key`.

    Its truncation and padding are switched off.
    """
    try:
        if name == BYTES:
            tokenizer = byte_tokenizer()
        elif Path(name).is_file():
            tokenizer = BertTokenizer(vocab=name, do_lower_case=not _has_capitals(Path(name)))
        else:
            tokenizer = AutoTokenizer.from_pretrained(name)
        check_has_vocabulary(tokenizer)
    except Exception as error:  # of many kinds, and the Rust library's is bare
        of_run = Path(name) / "model"
        remedy = f"name {of_run}" if of_run.is_dir() else "check path, files and network"
        raise InputError(
            f"{key} must be a folder, vocab.txt or hub id of a tokenizer, got {name!r} "
            f"({first_line(error)}); {remedy}"
        ) from error
    if not tokenizer.is_fast:
        raise InputError(f"{key} must be a fast tokenizer, got {name}; use a BERT tokenizer")
    # a tokenizer.json may hold both from its last use, and would then cut documents
    tokenizer.backend_tokenizer.no_truncation()
    tokenizer.backend_tokenizer.no_padding()
    return tokenizer


def check_has_vocabulary(tokenizer: PreTrainedTokenizerBase) -> None:
    """Raise ValueError for special tokens alone, as from a folder without tokenizer.json.

    The library raises where it cannot encode at all, or has no [UNK] for an unknown character.
    """
    tokenizer("a \uffff")
    if len(tokenizer) <= len(tokenizer.all_special_ids):
        raise ValueError(f"{len(tokenizer)} special tokens alone")


def _has_capitals(file: Path) -> bool:
    """Whether more than 1 % of the tokens hold capitals, which lower-cased text never needs."""
    lines = file.read_text(encoding="utf-8").split("\n")
    tokens = [line for line in lines if not line.startswith(("[", "<"))]  # without special tokens
    return 100 * sum(bool(re.search("[A-Z]", token)) for token in tokens) > len(tokens)


def find_continuations(tokenizer: PreTrainedTokenizerBase) -> NDArray[np.bool_] | None:
    """Return whether each id continues a word (##ing), [V]; None if tokens do not show it."""
    prefix = getattr(tokenizer.backend_tokenizer.model, "continuing_subword_prefix", None)
    if not prefix:
        return None
    ids = tokenizer.get_vocab()
    is_continuation = np.zeros(count_ids(tokenizer), bool)
    is_continuation[[ids[token] for token in ids if token.startswith(prefix)]] = True
    return is_continuation


def count_ids(tokenizer: PreTrainedTokenizerBase) -> int:
    """Return the largest id of a tokenizer plus one; its number of tokens may be smaller."""
    return max(tokenizer.get_vocab().values()) + 1


@dataclass(frozen=True)
class Vocab:
    """What batching and masking need to know of a tokenizer.

    Attributes:
        cls_id, sep_id, pad_id, mask_id: Ids of [CLS], [SEP], [PAD] and [MASK].
        size: Number of ids, V.
        special_ids: Ids of all special tokens, which are never masked.
        is_continuation: [V] bool, whether an id continues a word (##ing); None if tokens do not
            show it.
    """

    cls_id: int
    sep_id: int
    pad_id: int
    mask_id: int
    size: int
    special_ids: tuple[int, ...]
    is_continuation: NDArray[np.bool_] | None = None

    @classmethod
    def from_tokenizer(cls, tokenizer: PreTrainedTokenizerBase) -> "Vocab":
        """Read the ids of a tokenizer, which must have the tokens that masking needs."""
        names = ("cls_token_id", "sep_token_id", "pad_token_id", "mask_token_id")
        ids = [getattr(tokenizer, name) for name in names]
        missing = [name for name, value in zip(names, ids) if value is None]
        if missing:
            raise InputError(
                "corpus.tokenizer must have [CLS], [SEP], [PAD] and [MASK], "
                f"got none for {missing}; use a BERT tokenizer"
            )
        cls_id, sep_id, pad_id, mask_id = ids
        special_ids = tuple(sorted(tokenizer.all_special_ids))
        continuation = find_continuations(tokenizer)
        return cls(cls_id, sep_id, pad_id, mask_id, count_ids(tokenizer), special_ids, continuation)

    def check_whole_word(self, whole_word: bool) -> None:
        """Check that tokens show where words begin if whole words are to be masked."""
        if whole_word and self.is_continuation is None:
            raise InputError(
                "corpus.whole_word must be false unless tokens are WordPiece's (##ing), got true; "
                "use a BERT tokenizer"
            )


def tokenizer_state(tokenizer: PreTrainedTokenizerBase) -> str:
    """Return everything that decides the ids of a text, as JSON, for hashes of token caches.

    Truncation and padding of the last call are not part of it.
    """
    try:
        backend = tokenizer.backend_tokenizer
        backend.no_truncation()
        backend.no_padding()
        return backend.to_str()
    except AttributeError:  # a slow tokenizer, which fine-tuning accepts
        pass
    except Exception as error:  # the Rust library raises this bare
        if "Custom" not in str(error):
            raise
    # words are split by Python code, as in transformers' Chinese RoFormerTokenizer
    vocab, options = sorted(tokenizer.get_vocab().items()), dict(tokenizer.init_kwargs)
    for path in ("name_or_path", "vocab", "vocab_file", "tokenizer_file"):
        options.pop(path, None)
    return json.dumps([type(tokenizer).__name__, vocab, options], sort_keys=True, default=str)
