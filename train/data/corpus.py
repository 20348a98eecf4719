"""Step 3 of the data path: documents to token ids on disk, and reading of the ids.

    python -m train.data.corpus --corpus.train TEXT --corpus.validation TEXT --corpus.tokenizer DIR

A hub data set counts as a file, and small neighbouring files as one. The shards of a file are named
by a hash of everything that decides their bytes (text, column, tokenizer, format): a change of any
of them gives other shards, a stale one cannot be read, and an interrupted build continues with the
first missing shard.

    <cache>/<hash>-<n>/tokens.bin        ids of the shard's documents, uint16 or uint32; no [CLS]
                       documents.bin     int64 ends: document i is tokens[ends[i-1]:ends[i]]
                       hashes.bin        uint64 hash of each document's tokens
                       manifest.json     what it was made from, counts, whether it is the last
    <cache>/hashes/                      hashes of large files: unchanged, they are not read again

A manifest also holds the size and a hash of each file of its shard. The hash is of 16 pages: it
notices a file that was cut, swapped, emptied or overwritten, and costs 64 KB of reading; it does
not notice a change between those pages.
"""

import hashlib
import itertools
import json
import shutil
from collections import Counter
from collections.abc import Iterator
from contextlib import suppress
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any

import numpy as np
from numpy.typing import NDArray
from tqdm import tqdm
from transformers import PreTrainedTokenizerBase

from train.atomic_dir import check_writable, report_full_disk, write_dir_atomically
from train.command_line import progress_interval, run_command
from train.data import vocabulary
from train.data.documents import (
    TextFile,
    check_text_files,
    find_files,
    group_files,
    hash_file,
    read_file,
    short_hash,
    source_names,
)
from train.settings import CorpusSettings, InputError, TextSettings

FORMAT = 4
"""Version of the files, part of the hash."""

BATCH_CHARACTERS = 1_000_000
"""Characters that are tokenized at once, and so held in memory."""

BATCHES_PER_SHARD = 64
"""Batches per shard: an interruption costs at most 64 MB of text, about ten seconds."""

COUNTS = ("documents", "tokens", "continuations", "unknown")
"""Counts in the manifest of a shard."""

PAGE, PAGES = 4096, 16
"""Bytes of a page, and pages of a file that are hashed; smaller files are hashed as a whole."""

MAX_UNKNOWN, MAX_PIECES = 0.05, 2.5
"""Share of unknown tokens and pieces a word above which a text gets a warning. bert-base-uncased
cuts English words into 1.0 pieces, French into 1.6, German into 2.4 and Russian into 6.4."""

MAX_SHARED = 0.1
"""Share of held-out tokens in documents of the training text above which a run is refused."""

MIN_HELD_OUT = 10_000
"""Held-out tokens below which there is a warning."""


@dataclass(frozen=True)
class TokenStore:
    """Token ids of a corpus, in shards; each document lies in one shard.

    Attributes:
        document_ends: End of each document in the tokens of all shards, [documents], int64.
        shards: Folders of the shards, in order.
        shard_starts: Start of each shard in the tokens of all shards, [shards], int64.
        dtype: dtype of the ids on disk, uint16 or uint32.
        name: Hash of what decides the tokens and their order.
        tokenizer: Hash of the tokenizer.
    """

    document_ends: NDArray[np.int64]
    shards: tuple[Path, ...]
    shard_starts: NDArray[np.int64]
    dtype: np.dtype
    name: str
    tokenizer: str

    def document_hashes(self) -> Iterator[NDArray[np.uint64]]:
        """Read a hash of the tokens of each document, shard by shard."""
        for shard in self.shards:
            yield np.fromfile(shard / "hashes.bin", np.uint64)

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


def tokenize_corpus(
    corpus: TextSettings, part: str, tokenizer: PreTrainedTokenizerBase
) -> TokenStore:
    """Return the token store of a part, without special tokens; missing shards are made."""
    tokenizer_hash = hashlib.sha256(vocabulary.tokenizer_state(tokenizer).encode()).hexdigest()
    bar = tqdm(
        desc=f"tokenizing {part}", unit=" documents", delay=1, mininterval=progress_interval()
    )
    with bar, report_full_disk(Path(corpus.cache), "corpus.cache"):
        shards: list[Path] = []
        for files in group_files(find_files(corpus, part), f"corpus.{part}"):
            shards += _make_shards(files, corpus, part, tokenizer, tokenizer_hash, bar)
    return _open_store(corpus, part, shards)


def _make_shards(
    files: list[TextFile],
    corpus: TextSettings,
    part: str,
    tokenizer: PreTrainedTokenizerBase,
    tokenizer_hash: str,
    bar: tqdm,
) -> list[Path]:
    """Return the folders of all shards of a group of files; made from the first missing one on."""
    hashes = [hash_file(file, part, corpus) for file in files]
    facts = {"format": FORMAT, "text": hashes, "tokenizer": tokenizer_hash}
    prefix = Path(corpus.cache) / short_hash(*facts.values())
    folders = (Path(f"{prefix}-{number:05d}") for number in itertools.count())
    shards = list(itertools.takewhile(_is_intact, folders))  # before the first missing or damaged
    manifests = [_read_manifest(shard) for shard in shards]
    if manifests and manifests[-1]["last"]:
        return shards
    done = sum(manifest["documents"] for manifest in manifests)
    documents = itertools.chain.from_iterable(read_file(file, part, corpus) for file in files)
    batches = _split_batches(itertools.islice(documents, done, None))
    batch = next(batches, None)
    while batch is not None:
        folder = Path(f"{prefix}-{len(shards):05d}")
        if folder.exists() and not _is_intact(folder):  # the writer below keeps what is there
            with suppress(FileNotFoundError):  # or another process removed it first
                shutil.rmtree(folder)
        with write_dir_atomically(folder) as unfinished:
            rest = itertools.islice(batches, BATCHES_PER_SHARD - 1)
            counts = _write_shard(itertools.chain([batch], rest), unfinished, tokenizer, bar)
            batch = next(batches, None)
            _write_manifest(unfinished, facts | counts | {"last": batch is None})
        shards.append(folder)
    return shards


def _write_shard(
    batches: Iterator[list[str]], folder: Path, tokenizer: PreTrainedTokenizerBase, bar: tqdm
) -> dict[str, Any]:
    """Write tokens, document ends and document hashes of one shard; returns their counts."""
    dtype = np.dtype(np.uint16 if vocabulary.count_ids(tokenizer) <= 2**16 else np.uint32)
    is_continuation = vocabulary.find_continuations(tokenizer)
    ends: list[int] = [0]
    hashes: list[bytes] = []
    counts = dict.fromkeys(COUNTS, 0)
    with (folder / "tokens.bin").open("wb") as stream:
        for batch in batches:
            for document in _encode(batch, tokenizer):
                ids = np.asarray(document, dtype)
                stream.write(ids.tobytes())
                ends.append(ends[-1] + len(ids))
                hashes.append(hashlib.blake2b(ids.tobytes(), digest_size=8).digest())
                counts["unknown"] += document.count(tokenizer.unk_token_id)
                if is_continuation is not None:
                    counts["continuations"] += int(is_continuation[ids].sum())
            bar.update(len(batch))
    np.asarray(ends[1:], np.int64).tofile(folder / "documents.bin")
    (folder / "hashes.bin").write_bytes(b"".join(hashes))
    return counts | {"documents": len(hashes), "tokens": ends[-1], "dtype": dtype.name}


def _encode(texts: list[str], tokenizer: PreTrainedTokenizerBase) -> Iterator[list[int]]:
    backend = tokenizer.backend_tokenizer
    backend.encode_special_tokens = True  # a text about BERT holds the characters [MASK]
    # the fast path of the Rust tokenizer: no offsets, all cores
    encodings = backend.encode_batch_fast(texts, add_special_tokens=False)
    return (encoding.ids for encoding in encodings)


def _split_batches(texts: Iterator[str]) -> Iterator[list[str]]:
    """Group texts into batches of a little more than `BATCH_CHARACTERS`."""
    batch: list[str] = []
    length = 0
    for text in texts:
        batch.append(text)
        length += len(text)
        if length > BATCH_CHARACTERS:
            yield batch
            batch, length = [], 0
    if batch:
        yield batch


def _open_store(corpus: TextSettings, part: str, shards: list[Path]) -> TokenStore:
    """Join shards, and check that they hold text that the tokenizer knows."""
    manifests = {shard: _read_manifest(shard) for shard in shards}  # copies share them
    sizes = [manifests[x]["tokens"] for x in shards]
    if sum(sizes) == 0:
        names = ", ".join(source_names(corpus, part))
        remedy = "check the files"
        if corpus.held_out_share:
            remedy = f"{'raise' if part == 'validation' else 'lower'} the share, or separate "
            remedy += "documents by blank lines: each is held out whole"
        raise InputError(f"corpus.{part} must hold text, got {names} with none; {remedy}")
    unknown = sum(manifests[x]["unknown"] for x in shards) / sum(sizes)
    if unknown > 0.5:
        raise InputError(
            f"corpus.tokenizer must know at least half of corpus.{part}, "
            f"got {unknown:.0%} unknown tokens; learn one from this text"
        )
    starts = np.cumsum([0, *sizes[:-1]], dtype=np.int64)
    # the ends in each shard's own tokens -> in the tokens of all shards
    ends = [np.fromfile(x / "documents.bin", np.int64) + start for x, start in zip(shards, starts)]
    first, name = manifests[shards[0]], short_hash([x.name for x in shards])
    dtype, tokenizer = np.dtype(first["dtype"]), first["tokenizer"]
    return TokenStore(np.concatenate(ends), tuple(shards), starts, dtype, name, tokenizer)


def _read_manifest(folder: Path) -> dict[str, Any]:
    return json.loads((folder / "manifest.json").read_text())


def _write_manifest(folder: Path, manifest: dict[str, Any]) -> None:
    """Write the manifest of a shard, with the size and hash of each of its files."""
    files = {file.name: _fingerprint(file) for file in sorted(folder.glob("*.bin"))}
    text = json.dumps(manifest | {"files": files}, indent=2)
    (folder / "manifest.json").write_text(text)


def _is_intact(folder: Path) -> bool:
    """Return whether a shard is there as its manifest says."""
    try:
        files = _read_manifest(folder)["files"].items()
        return all(_fingerprint(folder / name) == found for name, found in files)
    except (OSError, ValueError, LookupError):  # no manifest, or a damaged one
        return False


def _fingerprint(file: Path) -> list[Any]:
    """Size of a file and hash of evenly spaced pages of it, the first and the last among them."""
    size, digest = file.stat().st_size, hashlib.sha256()
    starts = np.linspace(0, max(0, size - PAGE), PAGES).astype(np.int64)
    with file.open("rb") as stream:
        for start in starts.tolist() if size > PAGE * PAGES else [0]:
            stream.seek(start)
            digest.update(stream.read(PAGE if size > PAGE * PAGES else -1))
    return [size, digest.hexdigest()]


def describe_stores(train: list[TokenStore], held_out: TokenStore) -> list[str]:
    """Describe both parts in lines, with warnings; held-out text that is trained on is refused."""
    lines = list[str]()
    for store in train:
        lines += [*_describe_store("train", store), *_check_disjoint(store, held_out)]
    return [*lines, *_describe_store("validation", held_out)]


def _describe_store(part: str, store: TokenStore) -> Iterator[str]:
    warning, counts = f"warning: corpus.{part}", Counter[str]()
    for shard in store.shards:
        manifest = _read_manifest(shard)
        counts.update({name: manifest[name] for name in COUNTS})
    documents, tokens = counts["documents"], counts["tokens"]
    mean = f"{tokens / documents:,.0f} a document"
    yield f"{part}: {documents:,} documents, {tokens:,} tokens ({mean})"
    unknown = counts["unknown"] / tokens
    if unknown > MAX_UNKNOWN:
        yield f"{warning}: {unknown:.1%} of its tokens are unknown to corpus.tokenizer"
    pieces = tokens / max(1, tokens - counts["continuations"])
    if pieces > MAX_PIECES:
        remedy = "learn one from this text, or a larger one (corpus.vocabulary_size)"
        yield f"{warning}: corpus.tokenizer cuts words into {pieces:.1f} pieces; {remedy}"
    if part == "validation" and tokens < MIN_HELD_OUT:
        remedy = f"give {MIN_HELD_OUT:,}, or a larger share (--corpus.validation 5%)"
        yield f"{warning} has {tokens:,} tokens; the loss of so few is uncertain; {remedy}"


def _check_disjoint(train: TokenStore, held_out: TokenStore) -> Iterator[str]:
    """Compare hashes of documents; yields a warning if a few are in both parts."""
    hashes, number = np.unique(np.concatenate([*held_out.document_hashes()]), return_inverse=True)
    is_shared = np.zeros(len(hashes), dtype=bool)
    for others in train.document_hashes():  # of a large corpus, more than fits into memory
        nearest = np.searchsorted(hashes, others).clip(max=len(hashes) - 1)
        is_shared[nearest[hashes[nearest] == others]] = True
    shared = is_shared[number]
    tokens = np.diff(held_out.document_ends, prepend=0)
    share = tokens[shared].sum() / tokens.sum()
    if share > 0:
        count = np.count_nonzero(tokens[shared])
        message = (
            f"corpus.validation must not be training text, got {share:.1%} of its tokens, "
            f"in {count:,} of {len(tokens):,} documents; take them out of corpus.train"
        )
        if share > MAX_SHARED:
            raise InputError(message)
        yield f"warning: {message}"


@dataclass(frozen=True)
class TokenizeSettings:
    """Tokenize text before a run, which then finds it in `corpus.cache`."""

    corpus: CorpusSettings = field(default_factory=CorpusSettings)


def main(settings: TokenizeSettings) -> None:
    """Tokenize both parts and print their size."""
    corpus = settings.corpus
    check_writable(Path(corpus.cache), "corpus.cache")
    check_text_files(corpus)
    tokenizer = vocabulary.load_tokenizer(vocabulary.train_if_missing(corpus))
    train, held_out = (tokenize_corpus(corpus, part, tokenizer) for part in ("train", "validation"))
    print(*describe_stores([train], held_out), sep="\n")


if __name__ == "__main__":
    run_command(main, TokenizeSettings)
