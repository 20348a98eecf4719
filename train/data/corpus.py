"""Step 3 of the data path: documents to token ids on disk, tokenized once and cached.

    python -m train.data.corpus --corpus.train TEXT --corpus.validation TEXT --corpus.tokenizer DIR

A source is a file or a hub data set. Its shards are named by a hash of everything that decides
their bytes (text, column, tokenizer, format): a change of any of them gives other shards, a stale
one cannot be read, and an interrupted build continues with the first missing shard.

    <cache>/<source>-<n>/tokens.bin      ids of the shard's documents, uint16 or uint32; no [CLS]
                         documents.bin   int64 ends: document i is tokens[ends[i-1]:ends[i]]
                         manifest.json   what it was made from, counts, whether it is the last
    <cache>/<corpus>/    documents.bin   int64 ends of all documents of all shards
                         manifest.json   names of the shards, counts
    <cache>/hashes/                      hashes of files, so that unchanged files are not read again
"""

import hashlib
import itertools
import json
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
    known_suffix,
    read_source,
    source_names,
    wrap_read_errors,
)
from train.data.token_store import TokenStore
from train.environment import peak_memory
from train.settings import CorpusSettings, HeldOutSettings, require

FORMAT = 2
"""Version of the files, part of the hash."""

BATCH_CHARACTERS = 1_000_000
"""Characters that are tokenized at once, and so held in memory."""

BATCHES_PER_SHARD = 64
"""Batches per shard: an interruption costs at most 64 MB of text, about ten seconds."""

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
            documents.append(sum(_read_manifest(shard)["documents"] for shard in found))
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
        cache, column = Path(self.corpus.cache), self.corpus.text_column
        facts = {
            "format": FORMAT,
            "text": self._text_hash(source),
            "tokenizer": self.tokenizer_hash,
        }
        name = _hash(*facts.values())
        found = _find_shards(cache, name)
        if found and _read_manifest(found[-1])["last"]:
            return found
        _remove_stale(cache, name)
        done = sum(_read_manifest(shard)["documents"] for shard in found)
        texts = itertools.islice(read_source(source, self.part, column), done, None)
        folders = _shard_folders(cache, name, len(found))
        return found + list(self._make_shards(source, _split_batches(texts), folders, facts))

    def _text_hash(self, source: Source) -> str:
        """Hash of the text of a source and of how it is read."""
        column = self.corpus.text_column
        if isinstance(source, str):  # a hub data set may change: its first state is cached
            return _hash(source, self.part, column)
        with wrap_read_errors(source, f"corpus.{self.part}"):
            return _hash(_file_hash(source, Path(self.corpus.cache)), known_suffix(source), column)

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
                unchanged = self._text_hash(source) == facts["text"]
                remedy = "start again when it is whole"
                require(unchanged, f"corpus.{self.part}", rule, source, remedy)
                _write_manifest(unfinished, facts | counts | {"last": batch is None})
            yield folder

    def _write_shard(self, batches: Iterator[list[str]], folder: Path) -> dict[str, Any]:
        """Write tokens and document ends of one shard; returns their counts."""
        dtype = np.dtype(np.uint16 if len(self.tokenizer) <= 2**16 else np.uint32)
        ends: list[int] = [0]
        size = unknown = 0
        with (folder / "tokens.bin").open("wb") as stream:
            for batch in batches:
                for ids in _encode(batch, self.tokenizer):
                    stream.write(np.asarray(ids, dtype).tobytes())
                    unknown += ids.count(self.tokenizer.unk_token_id)
                    ends.append(ends[-1] + len(ids))
                size += sum(len(text.encode()) for text in batch)
                self.bar.update(len(batch))
        np.asarray(ends[1:], np.int64).tofile(folder / "documents.bin")
        counts = {"documents": len(ends) - 1, "tokens": ends[-1], "text_bytes": size}
        return counts | {"unknown": unknown, "dtype": dtype.name}


def _open_store(
    corpus: HeldOutSettings, part: str, shards: list[Path], source_documents: tuple[int, ...]
) -> TokenStore:
    """Join shards: the ends of their documents become one file, which all processes map."""
    manifests = [_read_manifest(shard) for shard in shards]
    sizes = [manifest["tokens"] for manifest in manifests]
    found = f"{', '.join(source_names(corpus, part))} with none"
    require(sum(sizes) > 0, f"corpus.{part}", "must hold text", found, "check the files")
    known = sum(sizes) - sum(manifest.get("unknown", 0) for manifest in manifests)
    rule, remedy = f"must know the text of corpus.{part}", "learn one from it"
    require(known > 0, "corpus.tokenizer", rule, "unknown tokens alone", remedy)
    starts = np.cumsum([0, *sizes[:-1]], dtype=np.int64)
    # with weights, the order also depends on which shards belong to which source
    weighted = isinstance(corpus, CorpusSettings) and corpus.weights
    names = [shard.name for shard in shards]
    folder = Path(corpus.cache) / _hash(names, source_documents if weighted else None)
    documents = sum(source_documents)
    if not _is_complete(folder, {"documents.bin": documents * 8}):
        with write_dir_atomically(folder) as unfinished:
            with (unfinished / "documents.bin").open("wb") as stream:
                for shard, start in zip(shards, starts):
                    ends = np.fromfile(shard / "documents.bin", np.int64) + start
                    stream.write(ends.tobytes())
            counts = {"documents": documents, "tokens": sum(sizes)}
            _write_manifest(unfinished, counts | {"shards": names})
    ends = np.memmap(folder / "documents.bin", np.int64, "r")
    dtype = np.dtype(manifests[0]["dtype"])
    return TokenStore(ends, tuple(shards), starts, dtype, source_documents, folder)


def describe_store(part: str, store: TokenStore) -> str:
    """Return the size of a part in words, with a warning if many of its tokens are unknown."""
    tokens = int(store.document_ends[-1])
    share = sum(_read_manifest(shard).get("unknown", 0) for shard in store.shards) / tokens
    line = f"{part}: {len(store.document_ends):,} documents, {tokens:,} tokens"
    warning = f"; warning: {share:.1%} of them are unknown to corpus.tokenizer, and not predicted"
    return line + warning * (share > 0.05)


def check_disjoint_contents(train: TokenStore, held_out: TokenStore) -> None:
    """Check that no held-out file is a copy of a training file.

    Raises:
        InputError: A file has the same bytes as one of the other part.
    """
    shared = set(train.shards) & set(held_out.shards)
    documents = sum(_read_manifest(shard)["documents"] for shard in shared)
    rule, found = "must hold no file of corpus.train", f"copies, of {documents:,} documents"
    require(not documents, "corpus.validation", rule, found, "take them out of the training text")


def _read_manifest(folder: Path) -> dict[str, Any]:
    return json.loads((folder / "manifest.json").read_text())


def _write_manifest(folder: Path, manifest: dict[str, Any]) -> None:
    (folder / "manifest.json").write_text(json.dumps(manifest, indent=2))


def _shard_folders(cache: Path, source: str, first: int) -> Iterator[Path]:
    """Folders of the shards of a source, without end, from number `first`."""
    return (cache / f"{source}-{i:05d}" for i in itertools.count(first))


def _find_shards(cache: Path, source: str) -> list[Path]:
    """Shards of a source in the cache, up to the last or to the first that is missing."""
    found: list[Path] = []
    for folder in _shard_folders(cache, source, 0):
        if not _is_complete(folder, _file_sizes(folder)):
            break
        found.append(folder)
        if _read_manifest(folder)["last"]:
            break
    return found


def _file_sizes(shard: Path) -> dict[str, int]:
    """Bytes of each file of a shard by its manifest; without a readable one no size is right."""
    try:
        manifest = _read_manifest(shard)
        width = np.dtype(manifest["dtype"]).itemsize
        return {
            "tokens.bin": manifest["tokens"] * width,
            "documents.bin": manifest["documents"] * 8,
        }
    except (OSError, ValueError):
        return {"manifest.json": -1}


def _is_complete(folder: Path, sizes: dict[str, int]) -> bool:
    """Whether a folder holds files of these sizes; one cut short by a power failure is removed."""
    if not folder.exists():
        return False
    files = {folder / name: size for name, size in sizes.items()}
    if all(file.exists() and file.stat().st_size == size for file, size in files.items()):
        return True
    shutil.rmtree(folder)
    return False


def _remove_stale(cache: Path, source: str) -> None:
    """Remove what killed builds left; a younger folder may be a build on another machine."""
    for folder in cache.glob(f".{source}-*"):
        with suppress(OSError):  # another process removed it first
            if time.time() - folder.stat().st_mtime > STALE_SECONDS:
                shutil.rmtree(folder)


def _hash(*facts: object) -> str:
    return hashlib.sha256(json.dumps(facts).encode()).hexdigest()[:16]


def _file_hash(file: Path, cache: Path) -> str:
    """SHA-256 of a file's bytes, cached while its path, size and modification time stay."""
    state = file.stat()
    entry = cache / "hashes" / _hash(str(file.resolve()), state.st_size, state.st_mtime_ns)
    if entry.exists():
        return entry.read_text()
    with file.open("rb") as stream:
        digest = hashlib.file_digest(stream, "sha256").hexdigest()
    entry.parent.mkdir(parents=True, exist_ok=True)
    unfinished = entry.with_suffix(f".{os.getpid()}")
    unfinished.write_text(digest)
    unfinished.replace(entry)
    return digest


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
    vocabulary.train_if_missing(corpus)
    tokenizer = vocabulary.load_tokenizer(corpus.tokenizer)
    cores = len(os.sched_getaffinity(0)) if hasattr(os, "sched_getaffinity") else os.cpu_count()
    stores = []
    for part in ("train", "validation"):
        started, before = time.time(), time.perf_counter()
        store = tokenize_corpus(corpus, part, tokenizer)
        stores.append(store)
        seconds = time.perf_counter() - before
        new = [shard for shard in store.shards if shard.stat().st_mtime >= started]
        size = sum(_read_manifest(shard)["text_bytes"] for shard in new) / 1e6
        peak = peak_memory(torch.device("cpu")) / 1e9
        print(
            f"{describe_store(part, store)}; "
            f"in {store.folder}, {len(new)} of {len(store.shards)} shards "
            f"made from {size:.1f} MB of text in "
            f"{seconds:.1f} s, {size / seconds / cores:.2f} MB/s a core on {cores} cores; "
            f"peak memory {peak:.2f} GB"
        )
    check_disjoint_contents(*stores)


if __name__ == "__main__":
    run_command(main, TokenizeSettings)
