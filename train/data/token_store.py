"""Step 4 of the data path: reads the token ids that `train.data.corpus` has written to disk.

Needs neither a tokenizer nor the text, so that worker processes that make batches start quickly.

A folder of the cache is sealed by a manifest with the size and a hash of each file. The hash is of
16 pages: it notices a file that was cut, swapped, emptied or overwritten, and costs 64 KB of
reading; it does not notice a change between those pages.
"""

import hashlib
import json
import shutil
from collections import Counter
from contextlib import suppress
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import numpy as np
from numpy.typing import NDArray

COUNTS = ("documents", "tokens", "continuations", "unknown", "text_bytes")
"""Counts in the manifest of a shard."""

PAGE, PAGES = 4096, 16
"""Bytes of a page, and pages of a file that are hashed; smaller files are hashed as a whole."""


def read_manifest(folder: Path) -> dict[str, Any]:
    """Return the manifest of a folder of the cache."""
    return json.loads((folder / "manifest.json").read_text())


def seal(folder: Path, manifest: dict[str, Any]) -> None:
    """Write the manifest of a folder, with the size and hash of each of its files."""
    files = {file.name: _fingerprint(file) for file in sorted(folder.glob("*.bin"))}
    text = json.dumps(manifest | {"files": files}, indent=2)
    (folder / "manifest.json").write_text(text)


def is_intact(folder: Path) -> bool:
    """Return whether a folder is as it was sealed; one that is not is removed."""
    if not folder.exists():
        return False
    try:
        files = read_manifest(folder)["files"].items()
        if all(_fingerprint(folder / name) == found for name, found in files):
            return True
    except (OSError, ValueError, LookupError):  # no manifest, or one of an earlier version
        pass
    with suppress(FileNotFoundError):  # another process removed it first
        shutil.rmtree(folder)
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


@dataclass(frozen=True)
class TokenStore:
    """Token ids of a corpus, in shards; each document lies in one shard.

    Attributes:
        document_ends: End of each document in the tokens of all shards, [documents], int64,
            memory-mapped.
        shards: Folders of the shards, in order.
        shard_starts: Start of each shard in the tokens of all shards, [shards], int64.
        dtype: dtype of the ids on disk, uint16 or uint32.
        source_documents: Number of documents of each name in `corpus.train`, in order.
        folder: Folder of the joined corpus; its name is a hash of what decides the tokens.
    """

    document_ends: NDArray[np.int64]
    shards: tuple[Path, ...]
    shard_starts: NDArray[np.int64]
    dtype: np.dtype
    source_documents: tuple[int, ...]
    folder: Path

    def totals(self) -> Counter[str]:
        """Add up the counts in the manifests of all shards, by their names."""
        counts: Counter[str] = Counter()
        for shard in self.shards:
            manifest = read_manifest(shard)
            counts.update({name: manifest[name] for name in COUNTS})
        return counts

    def document_hashes(self) -> NDArray[np.uint64]:
        """Read a hash of the tokens of each document, [documents]."""
        hashes = [np.fromfile(shard / "hashes.bin", np.uint64) for shard in self.shards]
        return np.concatenate(hashes)

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
