"""Documents to token ids on disk: read, tokenised once, kept in shards, found again.

    python -m train.data.corpus --corpus.train TEXT --corpus.validation TEXT --corpus.tokenizer DIR

A source is a file or a hub data set. Its shards are named by the hash of everything that decides
their bytes (text, column, tokenizer, format), so a change of any makes others, nothing stale can be
read, and a build that was killed goes on with the first shard that is missing:

    <cache>/<source>-<n>/tokens.bin      ids of its documents in a row, uint16 or uint32; no [CLS]
                         documents.bin   int64 ends: document i is tokens[ends[i-1]:ends[i]]
                         manifest.json   what it was made from, counts, whether it is the last
    <cache>/<corpus>/    documents.bin   int64 ends of all documents of all its shards
                         manifest.json   which shards, counts
    <cache>/hashes/                      of files, so that one that did not change is not read again
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

from train.data import vocabulary
from train.data.documents import (
    Source,
    check_disjoint_files,
    find_files,
    known_suffix,
    read_source,
    sources,
    wrap_read_errors,
)
from train.data.token_store import TokenStore
from train.loop.atomic_dir import check_writable, report_full_disk, write_dir_atomically
from train.loop.launch import progress_interval, run_command
from train.loop.run_metadata import peak_memory
from train.settings import CorpusSettings, HeldOutSettings, require

FORMAT = 2
CHARACTERS_A_BATCH = 1_000_000
"""Text tokenised at once, and so held in memory."""

BATCHES_A_SHARD = 64
"""What a kill can cost: 64 MB of text, about ten seconds."""

LONGEST_SHARD = 3600
"""Seconds after which a shard that is still unfinished belongs to a build that was killed."""


def tokenize_corpus(
    corpus: HeldOutSettings, part: str, tokenizer: PreTrainedTokenizerBase
) -> TokenStore:
    """The store of a part under a tokenizer; what is not there yet is made.

    Args:
        corpus: The corpus section; for "validation" the held-out text will do.
        part: "train" or "validation".
        tokenizer: A fast tokenizer; its special tokens are left out here.

    Raises:
        InputError: The source is missing, unreadable or empty.
    """
    shards: list[Path] = []
    counts: list[int] = []
    often = {"delay": 1, "mininterval": progress_interval()}
    bar = tqdm(desc=f"tokenising {part}", unit=" documents", **often)
    with bar, report_full_disk(Path(corpus.cache), "corpus.cache"):
        rules = hashlib.sha256(vocabulary.tokenizer_state(tokenizer).encode()).hexdigest()
        builder = _Builder(corpus, part, tokenizer, rules, bar)
        for files in find_files(corpus, part):
            found = [shard for source in files for shard in builder.shards(source)]
            shards += found
            counts.append(sum(_manifest(shard)["documents"] for shard in found))
        return _open_store(corpus, part, shards, tuple(counts))


@dataclass(frozen=True)
class _Builder:
    """Finds or makes the shards of sources.

    Attributes:
        corpus: The corpus section.
        part: Which of its two sources.
        tokenizer: What makes ids.
        rules: Its hash.
        bar: Counts the documents that are tokenised.
    """

    corpus: HeldOutSettings
    part: str
    tokenizer: PreTrainedTokenizerBase
    rules: str
    bar: tqdm

    def shards(self, source: Source) -> list[Path]:
        """Folders of all shards of a source; only those that are missing cost work."""
        cache, column = Path(self.corpus.cache), self.corpus.text_column
        facts = {"format": FORMAT, "text": self._text(source), "tokenizer": self.rules}
        name = _hash(*facts.values())
        found = _found(cache, name)
        if found and _manifest(found[-1])["last"]:
            return found
        _sweep(cache, name)
        known = sum(_manifest(shard)["documents"] for shard in found)
        texts = itertools.islice(read_source(source, self.part, column), known, None)
        folders = _shards(cache, name, len(found))
        return found + list(self._make(source, _batches(texts), folders, facts))

    def _text(self, source: Source) -> str:
        """A hash of what a source holds and how it is read."""
        column, key = self.corpus.text_column, f"corpus.{self.part}"
        if isinstance(source, str):  # the hub's may change: the cache holds what it was
            return _hash(source, self.part, column)
        with wrap_read_errors(source, key):
            return _hash(_file_hash(source, Path(self.corpus.cache)), known_suffix(source), column)

    def _make(
        self,
        source: Source,
        batches: Iterator[list[str]],
        folders: Iterator[Path],
        facts: dict[str, Any],
    ) -> Iterator[Path]:
        """Write batches to shards, as many as it takes."""
        rule = "must not change while it is read"
        batch = next(batches, None)
        while batch is not None:
            folder = next(folders)
            with write_dir_atomically(folder) as unfinished:
                ours = itertools.chain([batch], itertools.islice(batches, BATCHES_A_SHARD - 1))
                counts = self._write(ours, unfinished)
                batch = next(batches, None)
                same = self._text(source) == facts["text"]
                require(same, f"corpus.{self.part}", rule, source, "start again when it is whole")
                manifest = facts | counts | {"last": batch is None}
                (unfinished / "manifest.json").write_text(json.dumps(manifest, indent=2))
            yield folder

    def _write(self, batches: Iterator[list[str]], folder: Path) -> dict[str, Any]:
        """Write tokens and ends of one shard; returns their counts."""
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
    corpus: HeldOutSettings, part: str, shards: list[Path], parts: tuple[int, ...]
) -> TokenStore:
    """Join shards: the ends of their documents become one file, which every process maps."""
    manifests = [_manifest(shard) for shard in shards]
    sizes = [manifest["tokens"] for manifest in manifests]
    found = f"{', '.join(sources(corpus, part))} with none"
    require(sum(sizes) > 0, f"corpus.{part}", "must hold text", found, "check the files")
    known = sum(sizes) - sum(manifest.get("unknown", 0) for manifest in manifests)
    rule, remedy = f"must know the text of corpus.{part}", "learn one from it"
    require(known > 0, "corpus.tokenizer", rule, "unknown tokens alone", remedy)
    starts = np.cumsum([0, *sizes[:-1]], dtype=np.int64)
    # with weights it also matters which shards belong to which name
    groups = parts if isinstance(corpus, CorpusSettings) and corpus.weights else None
    folder = Path(corpus.cache) / _hash([shard.name for shard in shards], groups)
    counts = {"documents": sum(m["documents"] for m in manifests), "tokens": sum(sizes)}
    if not _has_sizes(folder, {"documents.bin": counts["documents"] * 8}):
        with write_dir_atomically(folder) as unfinished:
            with (unfinished / "documents.bin").open("wb") as stream:
                for shard, start in zip(shards, starts):
                    ends = np.fromfile(shard / "documents.bin", np.int64) + start
                    stream.write(ends.tobytes())
            manifest = counts | {"shards": [shard.name for shard in shards]}
            (unfinished / "manifest.json").write_text(json.dumps(manifest, indent=2))
    ends = np.memmap(folder / "documents.bin", np.int64, "r")
    return TokenStore(ends, tuple(shards), starts, np.dtype(manifests[0]["dtype"]), parts, folder)


def describe_store(part: str, store: TokenStore) -> str:
    """How much a part holds, in words, and a warning where its tokenizer does not know the text."""
    tokens = int(store.document_ends[-1])
    share = sum(_manifest(shard).get("unknown", 0) for shard in store.shards) / tokens
    line = f"{part}: {len(store.document_ends):,} documents, {tokens:,} tokens"
    warning = f"; warning: {share:.1%} of them are unknown to corpus.tokenizer, and not predicted"
    return line + warning * (share > 0.05)


def check_disjoint_contents(train: TokenStore, held_out: TokenStore) -> None:
    """Refuse held-out text that is also in the training text under another name.

    Raises:
        InputError: A file has the same bytes as one of the other part.
    """
    shared = set(train.shards) & set(held_out.shards)
    documents = sum(_manifest(shard)["documents"] for shard in shared)
    rule, found = "must hold no file of corpus.train", f"copies, of {documents:,} documents"
    require(not documents, "corpus.validation", rule, found, "take them out of the training text")


def _manifest(folder: Path) -> dict[str, Any]:
    return json.loads((folder / "manifest.json").read_text())


def _shards(cache: Path, source: str, number: int) -> Iterator[Path]:
    """Names of the shards of a source, from a number on."""
    return (cache / f"{source}-{i:05d}" for i in itertools.count(number))


def _found(cache: Path, source: str) -> list[Path]:
    """The shards of a source that are there, up to the last or the first that is missing."""
    found: list[Path] = []
    for folder in _shards(cache, source, 0):
        if not _has_sizes(folder, _sizes(folder)):
            break
        found.append(folder)
        if _manifest(folder)["last"]:
            break
    return found


def _sizes(shard: Path) -> dict[str, int]:
    """Bytes of each file of a shard, from its manifest; that it must have one, if there is none."""
    try:
        manifest = _manifest(shard)
        width = np.dtype(manifest["dtype"]).itemsize
        return {
            "tokens.bin": manifest["tokens"] * width,
            "documents.bin": manifest["documents"] * 8,
        }
    except (OSError, ValueError):
        return {"manifest.json": -1}


def _has_sizes(folder: Path, sizes: dict[str, int]) -> bool:
    """Whether a folder is there with its bytes; one that a power cut left short is taken away."""
    if not folder.exists():
        return False
    files = {name: folder / name for name in sizes}
    if all(f.exists() and f.stat().st_size == sizes[name] for name, f in files.items()):
        return True
    shutil.rmtree(folder)
    return False


def _sweep(cache: Path, source: str) -> None:
    """Remove what killed builds left; anything younger may be a build on another machine."""
    for left in cache.glob(f".{source}-*"):
        with suppress(OSError):  # another process removed it first
            if time.time() - left.stat().st_mtime > LONGEST_SHARD:
                shutil.rmtree(left)


def _hash(*facts: object) -> str:
    return hashlib.sha256(json.dumps(facts).encode()).hexdigest()[:16]


def _file_hash(file: Path, cache: Path) -> str:
    """SHA-256 of a file's bytes, remembered while its path, size and time of change stay."""
    state = file.stat()
    memory = cache / "hashes" / _hash(str(file.resolve()), state.st_size, state.st_mtime_ns)
    if memory.exists():
        return memory.read_text()
    with file.open("rb") as stream:
        found = hashlib.file_digest(stream, "sha256").hexdigest()
    memory.parent.mkdir(parents=True, exist_ok=True)
    unfinished = memory.with_suffix(f".{os.getpid()}")
    unfinished.write_text(found)
    unfinished.replace(memory)
    return found


def _encode(texts: list[str], tokenizer: PreTrainedTokenizerBase) -> Iterator[list[int]]:
    # the fast path of the Rust tokenizer: no offsets, all cores
    encodings = tokenizer.backend_tokenizer.encode_batch_fast(texts, add_special_tokens=False)
    return (encoding.ids for encoding in encodings)


def _batches(texts: Iterator[str]) -> Iterator[list[str]]:
    batch: list[str] = []
    length = 0
    for text in texts:
        batch.append(text)
        length += len(text)
        if length > CHARACTERS_A_BATCH:
            yield batch
            batch, length = [], 0
    if batch:
        yield batch


@dataclass(frozen=True)
class TokenizeSettings:
    """Tokenise text ahead of a run, which then finds it in `corpus.cache`."""

    corpus: CorpusSettings = field(default_factory=CorpusSettings)


def main(settings: TokenizeSettings) -> None:
    """Tokenise both parts; says how much, how fast and in how much memory."""
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
        size = sum(_manifest(shard)["text_bytes"] for shard in new) / 1e6
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
