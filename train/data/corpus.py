"""Step 3 of the data path: documents to token ids on disk, tokenized once and cached.

    python -m train.data.corpus --corpus.train TEXT --corpus.validation TEXT --corpus.tokenizer DIR

A source is a file or a hub data set. Its shards are named by a hash of everything that decides
their bytes (text, column, tokenizer, format): a change of any of them gives other shards, a stale
one cannot be read, and an interrupted build continues with the first missing shard.

    <cache>/<source>-<n>/tokens.bin      ids of the shard's documents, uint16 or uint32; no [CLS]
                         documents.bin   int64 ends: document i is tokens[ends[i-1]:ends[i]]
                         hashes.bin      uint64 hash of each document's tokens
                         manifest.json   what it was made from, counts, whether it is the last
    <cache>/<corpus>/    documents.bin   int64 ends of all documents of all shards
                         manifest.json   names of the shards, counts
    <cache>/hashes/                      hashes of files, so that unchanged files are not read again
"""

import hashlib
import itertools
import os
import shutil
import time
from collections.abc import Iterator
from contextlib import suppress
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any

import numpy as np
import torch
from tqdm import tqdm
from transformers import PreTrainedTokenizerBase

from train.atomic_dir import check_writable, report_full_disk, write_dir_atomically
from train.command_line import progress_interval, run_command
from train.data import vocabulary
from train.data.documents import (
    Source,
    check_disjoint_files,
    find_files,
    hash_source,
    read_source,
    short_hash,
    source_names,
)
from train.data.token_store import COUNTS, TokenStore, is_intact, read_manifest, seal
from train.environment import peak_memory
from train.settings import CorpusSettings, HeldOutSettings, require

FORMAT = 2
"""Version of the files, part of the hash."""

BATCH_CHARACTERS = 1_000_000
"""Characters that are tokenized at once, and so held in memory."""

BATCHES_PER_SHARD = 64
"""Batches per shard: an interruption costs at most 64 MB of text, about ten seconds."""

MAX_UNKNOWN, MAX_PIECES = 0.05, 2.5
"""Share of unknown tokens and pieces a word above which a text gets a warning. bert-base-uncased
cuts English words into 1.0 pieces, French into 1.6, German into 2.4 and Russian into 6.4."""

MAX_SHARED = 0.1
"""Share of held-out tokens in documents of the training text above which a run is refused."""

MIN_HELD_OUT = 10_000
"""Held-out tokens below which there is a warning."""

STALE_SECONDS = 3600
"""Age at which an unfinished shard is taken to be left by a build that was killed."""


def tokenize_corpus(
    corpus: HeldOutSettings, part: str, tokenizer: PreTrainedTokenizerBase
) -> TokenStore:
    """Return the token store of a part; shards that are not in the cache are made.

    Args:
        corpus: The corpus section.
        part: "train" or "validation".
        tokenizer: A fast tokenizer; no special tokens are added.

    Raises:
        InputError: The source is missing, unreadable or empty.
    """
    shards: list[Path] = []
    documents: list[int] = []
    bar = tqdm(
        desc=f"tokenising {part}", unit=" documents", delay=1, mininterval=progress_interval()
    )
    with bar, report_full_disk(Path(corpus.cache), "corpus.cache"):
        state = hashlib.sha256(vocabulary.tokenizer_state(tokenizer).encode()).hexdigest()
        builder = _ShardBuilder(corpus, part, tokenizer, state, bar)
        for files in find_files(corpus, part):
            found = [shard for source in files for shard in builder.shards(source)]
            shards += found
            documents.append(sum(read_manifest(shard)["documents"] for shard in found))
        return _open_store(corpus, part, shards, tuple(documents))


@dataclass(frozen=True)
class _ShardBuilder:
    """Finds or makes the shards of sources.

    Attributes:
        corpus: The corpus section.
        part: "train" or "validation".
        tokenizer: A fast tokenizer.
        tokenizer_hash: Hash of its state.
        bar: Progress bar, in documents.
    """

    corpus: HeldOutSettings
    part: str
    tokenizer: PreTrainedTokenizerBase
    tokenizer_hash: str
    bar: tqdm

    def shards(self, source: Source) -> list[Path]:
        """Return the folders of all shards of a source; missing ones are made."""
        cache = Path(self.corpus.cache)
        facts = {
            "format": FORMAT,
            "text": hash_source(source, self.part, self.corpus),
            "tokenizer": self.tokenizer_hash,
        }
        name = short_hash(*facts.values())
        found = _find_shards(cache, name)
        if found and read_manifest(found[-1])["last"]:
            return found
        _remove_stale(cache, name)
        done = sum(read_manifest(shard)["documents"] for shard in found)
        texts = itertools.islice(read_source(source, self.part, self.corpus), done, None)
        folders = _shard_folders(cache, name, len(found))
        return found + list(self._make_shards(source, _split_batches(texts), folders, facts))

    def _make_shards(
        self,
        source: Source,
        batches: Iterator[list[str]],
        folders: Iterator[Path],
        facts: dict[str, Any],
    ) -> Iterator[Path]:
        """Write batches to as many shards as needed."""
        rule = "must not change while it is read"
        batch = next(batches, None)
        while batch is not None:
            folder = next(folders)
            with write_dir_atomically(folder) as unfinished:
                shard = itertools.chain([batch], itertools.islice(batches, BATCHES_PER_SHARD - 1))
                counts = self._write_shard(shard, unfinished)
                batch = next(batches, None)
                unchanged = hash_source(source, self.part, self.corpus) == facts["text"]
                remedy = "start again when it is whole"
                require(unchanged, f"corpus.{self.part}", rule, source, remedy)
                seal(unfinished, facts | counts | {"last": batch is None})
            yield folder

    def _write_shard(self, batches: Iterator[list[str]], folder: Path) -> dict[str, Any]:
        """Write tokens, document ends and document hashes of one shard; returns their counts."""
        dtype = np.dtype(np.uint16 if len(self.tokenizer) <= 2**16 else np.uint32)
        is_continuation = vocabulary.find_continuations(self.tokenizer)
        ends: list[int] = [0]
        hashes: list[bytes] = []
        counts = dict.fromkeys(COUNTS, 0)
        with (folder / "tokens.bin").open("wb") as stream:
            for batch in batches:
                for document in _encode(batch, self.tokenizer):
                    ids = np.asarray(document, dtype)
                    stream.write(ids.tobytes())
                    ends.append(ends[-1] + len(ids))
                    hashes.append(hashlib.blake2b(ids.tobytes(), digest_size=8).digest())
                    counts["unknown"] += document.count(self.tokenizer.unk_token_id)
                    if is_continuation is not None:
                        counts["continuations"] += int(is_continuation[ids].sum())
                counts["text_bytes"] += sum(len(text.encode()) for text in batch)
                self.bar.update(len(batch))
        np.asarray(ends[1:], np.int64).tofile(folder / "documents.bin")
        (folder / "hashes.bin").write_bytes(b"".join(hashes))
        return counts | {"documents": len(hashes), "tokens": ends[-1], "dtype": dtype.name}


def _open_store(
    corpus: HeldOutSettings, part: str, shards: list[Path], source_documents: tuple[int, ...]
) -> TokenStore:
    """Join shards: the ends of their documents become one file, which all processes map."""
    manifests = [read_manifest(shard) for shard in shards]
    sizes = [manifest["tokens"] for manifest in manifests]
    found = f"{', '.join(source_names(corpus, part))} with none"
    remedy = "raise the share" if corpus.held_out_share else "check the files"
    require(sum(sizes) > 0, f"corpus.{part}", "must hold text", found, remedy)
    unknown = sum(manifest["unknown"] for manifest in manifests) / sum(sizes)
    rule, remedy = f"must know at least half of corpus.{part}", "learn one from this text"
    require(unknown <= 0.5, "corpus.tokenizer", rule, f"{unknown:.0%} unknown tokens", remedy)
    starts = np.cumsum([0, *sizes[:-1]], dtype=np.int64)
    # with weights, the order also depends on which shards belong to which source
    weighted = isinstance(corpus, CorpusSettings) and corpus.weights
    names = [shard.name for shard in shards]
    folder = Path(corpus.cache) / short_hash(names, source_documents if weighted else None)
    documents = sum(source_documents)
    if not is_intact(folder):
        with write_dir_atomically(folder) as unfinished:
            with (unfinished / "documents.bin").open("wb") as stream:
                for shard, start in zip(shards, starts):
                    ends = np.fromfile(shard / "documents.bin", np.int64) + start
                    stream.write(ends.tobytes())
            counts = {"documents": documents, "tokens": sum(sizes)}
            seal(unfinished, counts | {"shards": names})
    ends = np.memmap(folder / "documents.bin", np.int64, "r")
    dtype = np.dtype(manifests[0]["dtype"])
    return TokenStore(ends, tuple(shards), starts, dtype, source_documents, folder)


def describe_stores(train: list[TokenStore], held_out: TokenStore) -> Iterator[str]:
    """Yield the size of each part, and warnings about its text, one a line.

    Raises:
        InputError: Much of the held-out text is also training text.
    """
    for store in train:
        yield from _describe_store("train", store)
        yield from _check_disjoint(store, held_out)
    yield from _describe_store("validation", held_out)


def _describe_store(part: str, store: TokenStore) -> Iterator[str]:
    counts, warning = store.totals(), f"warning: corpus.{part}"
    documents, tokens = counts["documents"], counts["tokens"]
    yield f"{part}: {documents:,} documents, {tokens:,} tokens"
    unknown = counts["unknown"] / tokens
    if unknown > MAX_UNKNOWN:
        yield f"{warning}: {unknown:.1%} of its tokens are unknown to corpus.tokenizer"
    pieces = tokens / max(1, tokens - counts["continuations"])
    if pieces > MAX_PIECES:
        remedy = "it was learned from other text; learn one from this"
        yield f"{warning}: corpus.tokenizer cuts words into {pieces:.1f} pieces; {remedy}"
    if part == "validation" and tokens < MIN_HELD_OUT:
        remedy = f"the loss of so few is uncertain; give {MIN_HELD_OUT:,}"
        yield f"{warning} has {tokens:,} tokens, of which 15 % are predicted; {remedy}"


def _check_disjoint(train: TokenStore, held_out: TokenStore) -> Iterator[str]:
    """Compare hashes of documents; yields a warning if a few are in both parts."""
    hashes = held_out.document_hashes()
    shared = np.isin(hashes, train.document_hashes())
    tokens = np.diff(held_out.document_ends, prepend=0)
    share = tokens[shared].sum() / tokens.sum()
    if share > 0:
        count = np.count_nonzero(tokens[shared])
        found = f"{share:.1%} of its tokens, in {count:,} of {len(tokens):,} documents"
        rule, remedy = "must not be training text", "take them out of corpus.train"
        require(share <= MAX_SHARED, "corpus.validation", rule, found, remedy)
        yield f"warning: corpus.validation {rule}, got {found}; {remedy}"


def _shard_folders(cache: Path, source: str, first: int) -> Iterator[Path]:
    """Folders of the shards of a source, without end, from number `first`."""
    return (cache / f"{source}-{i:05d}" for i in itertools.count(first))


def _find_shards(cache: Path, source: str) -> list[Path]:
    """Shards of a source in the cache, up to the last or to the first that is missing."""
    found: list[Path] = []
    for folder in _shard_folders(cache, source, 0):
        if not is_intact(folder):
            break
        found.append(folder)
        if read_manifest(folder)["last"]:
            break
    return found


def _remove_stale(cache: Path, source: str) -> None:
    """Remove what killed builds left; a younger folder may be a build on another machine."""
    for folder in cache.glob(f".{source}-*"):
        with suppress(OSError):  # another process removed it first
            if time.time() - folder.stat().st_mtime > STALE_SECONDS:
                shutil.rmtree(folder)


def _encode(texts: list[str], tokenizer: PreTrainedTokenizerBase) -> Iterator[list[int]]:
    # the fast path of the Rust tokenizer: no offsets, all cores
    encodings = tokenizer.backend_tokenizer.encode_batch_fast(texts, add_special_tokens=False)
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


@dataclass(frozen=True)
class TokenizeSettings:
    """Tokenize text before a run, which then finds it in `corpus.cache`."""

    corpus: CorpusSettings = field(default_factory=CorpusSettings)


def main(settings: TokenizeSettings) -> None:
    """Tokenize both parts and print their size, the speed and the peak memory."""
    corpus = settings.corpus
    check_writable(Path(corpus.cache), "corpus.cache")
    check_disjoint_files(corpus)
    tokenizer = vocabulary.load_tokenizer(vocabulary.train_if_missing(corpus))
    cores = len(os.sched_getaffinity(0)) if hasattr(os, "sched_getaffinity") else os.cpu_count()
    stores = []
    for part in ("train", "validation"):
        started, before = time.time(), time.perf_counter()
        store = tokenize_corpus(corpus, part, tokenizer)
        stores.append(store)
        seconds = time.perf_counter() - before
        new = [shard for shard in store.shards if shard.stat().st_mtime >= started]
        size = sum(read_manifest(shard)["text_bytes"] for shard in new) / 1e6
        peak = peak_memory(torch.device("cpu")) / 1e9
        print(
            f"{part}: {store.folder}, {len(new)} of {len(store.shards)} shards "
            f"made from {size:.1f} MB of text in "
            f"{seconds:.1f} s, {size / seconds / cores:.2f} MB/s a core on {cores} cores; "
            f"peak memory {peak:.2f} GB"
        )
    print(*describe_stores(stores[:1], stores[1]), sep="\n")


if __name__ == "__main__":
    run_command(main, TokenizeSettings)
