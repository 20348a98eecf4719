"""Documents to token ids on disk: read, tokenised once, memory-mapped, reused.

A store is a folder named by the hash of everything that decides its bytes (sources, tokenizer,
format), so a change of any makes another folder and nothing stale can be read:

    <cache>/<hash>/tokens.bin      ids of all documents in a row, uint16 or uint32; no [CLS]
                   documents.bin   int64 ends: document i is tokens[ends[i-1]:ends[i]]
                   manifest.json   what it was made from, counts
"""

import glob
import hashlib
import json
import os
import shutil
from collections.abc import Iterator
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import datasets
import numpy as np
from numpy.typing import NDArray
from tqdm import tqdm
from transformers import PreTrainedTokenizerBase

from train import docstrings
from train.settings import CorpusSettings, InputError, require

EMBEDDED = "embedded"
FORMAT = 1
READERS = {".parquet": "parquet", ".jsonl": "json", ".json": "json", ".txt": "text"}
"""File endings and the `datasets` builder that reads them."""

DOCUMENTS_A_BATCH = 512


@dataclass(frozen=True)
class TokenStore:
    """Tokenised documents.

    Attributes:
        tokens: All ids in a row, [n], memory-mapped, read-only.
        ends: End of each document in `tokens`, [documents], int64.
        folder: Where it lies.
    """

    tokens: NDArray[Any]
    ends: NDArray[np.int64]
    folder: Path


def find_files(corpus: CorpusSettings, part: str) -> list[Path]:
    """Data files of a part, sorted within each name given; empty for a hub data set.

    Args:
        corpus: The corpus section.
        part: "train" or "validation": which of its two sources, and the key in error messages.

    Raises:
        InputError: Nothing usable is there.
    """
    source, key = getattr(corpus, part), f"corpus.{part}"
    if source == EMBEDDED:
        return [docstrings.written(part, corpus.cache)]
    names = [source] if isinstance(source, str) else source
    files = []
    for name in names:
        found = _named_files(name, key)
        alone = len(names) == 1 and not _looks_like_path(name)
        require(bool(found) or alone, key, "must exist", repr(name), "check the path")
        files += found
    return files


def _named_files(name: str, key: str) -> list[Path]:
    path = Path(name)
    endings = ", ".join(READERS)
    if path.is_dir():
        found = [p for p in sorted(path.rglob("*")) if p.suffix in READERS]
        require(
            bool(found), key, f"must hold {endings} files", f"none in {name!r}", "put text there"
        )
        return found
    matches = [path] if path.is_file() else sorted(map(Path, glob.glob(name, recursive=True)))
    if glob.has_magic(name):
        require(bool(matches), key, "must match a file", f"none for {name!r}", "check the pattern")
    for match in matches:
        rule, remedy = f"must be {endings} files", "convert or rename the file"
        require(match.suffix in READERS, key, rule, str(match), remedy)
    return matches


def _looks_like_path(name: str) -> bool:
    """Whether no hub data set can have that name: those are NAME or OWNER/NAME."""
    return name.startswith((".", "/", "~")) or name.count("/") > 1 or Path(name).suffix in READERS


def documents(corpus: CorpusSettings, part: str) -> Iterator[str]:
    """The documents of a part, in order.

    A txt file holds documents separated by blank lines, as BERT's own pretraining input did; a row
    of parquet or jsonl is one document.

    Raises:
        InputError: A file cannot be read, or lacks the column.
    """
    files = find_files(corpus, part)
    if not files:
        yield from _hub_documents(getattr(corpus, part), part, corpus.text_column)
    for file in files:
        reader = _paragraphs if READERS[file.suffix] == "text" else _rows
        try:
            yield from reader(file, f"corpus.{part}", corpus.text_column)
        except UnicodeDecodeError as error:
            rule, found = "must be UTF-8", f"byte {error.start} of {file} that is not"
            raise InputError(f"corpus.{part} {rule}, got {found}; convert the file") from error


def _rows(file: Path, key: str, column: str) -> Iterator[str]:
    """Texts of a parquet or jsonl file."""
    builder = READERS[file.suffix]
    try:
        rows = datasets.load_dataset(builder, data_files=str(file), split="train", streaming=True)
        columns = rows.column_names or list(next(iter(rows), {}))
        if column in columns:
            yield from (str(row[column] or "") for row in rows.select_columns([column]))
            return
    except (OSError, ValueError, datasets.exceptions.DatasetGenerationError) as error:
        cause = error.__cause__ or error
        if isinstance(cause, UnicodeDecodeError):
            raise cause from error
        found = f"{file}: {_first_line(cause)}"
        raise InputError(
            f"{key} must be readable {builder}, got {found}; repair the file"
        ) from error
    has = f"it has {', '.join(columns)}" if columns else "it has no columns"
    raise InputError(f"corpus.text_column must name a column of {file}, got {column!r}; {has}")


def _first_line(error: BaseException) -> str:
    return (str(error).splitlines() or [type(error).__name__])[0]


def _paragraphs(file: Path, key: str, column: str) -> Iterator[str]:
    """Texts of a txt file: runs of lines between blank ones."""
    lines: list[str] = []
    with file.open(encoding="utf-8") as stream:
        for line in stream:
            if line.strip():
                lines.append(line)
            elif lines:
                yield "".join(lines)
                lines = []
    if lines:
        yield "".join(lines)


def _hub_documents(name: str, part: str, column: str) -> Iterator[str]:
    """Texts of a hub data set, read as a stream: only its tokens reach the disk."""
    try:
        rows = datasets.load_dataset(name, split=part, streaming=True)
        yield from (str(row[column]) for row in rows)
    except KeyError as error:
        raise InputError(
            f"corpus.text_column must name a column of {name}, got {column!r}; see its page"
        ) from error
    except (OSError, ValueError, RuntimeError) as error:
        raise InputError(
            f"corpus.{part} must be a folder, file, glob or hub data set with a {part} split, "
            f"got {name!r} ({_first_line(error)}); check the spelling and the network"
        ) from error


def source_hash(corpus: CorpusSettings, part: str) -> str:
    """Hash of what decides the documents: the bytes of files, the name of a hub data set."""
    digest = hashlib.sha256(f"{FORMAT} {corpus.text_column}".encode())
    files = find_files(corpus, part)
    for file in files:
        with file.open("rb") as stream:
            digest.update(hashlib.file_digest(stream, "sha256").digest())
    if not files:
        digest.update(f"{getattr(corpus, part)} {part}".encode())
    return digest.hexdigest()


def tokenise(corpus: CorpusSettings, part: str, tokenizer: PreTrainedTokenizerBase) -> TokenStore:
    """The store of a part under a tokenizer, made when it is not there yet.

    Args:
        corpus: The corpus section.
        part: "train" or "validation".
        tokenizer: A fast tokenizer; its special tokens are left out here.

    Raises:
        InputError: The source is missing, unreadable or empty.
    """
    text = source_hash(corpus, part)
    rules = hashlib.sha256(tokenizer.backend_tokenizer.to_str().encode()).hexdigest()
    folder = Path(corpus.cache) / hashlib.sha256((text + rules).encode()).hexdigest()[:16]
    if not folder.exists():
        source = getattr(corpus, part)
        manifest = {"format": FORMAT, "source": source, "text": text, "tokenizer": rules}
        _write_store(documents(corpus, part), tokenizer, folder, manifest, part)
    return open_store(folder)


def open_store(folder: Path) -> TokenStore:
    """Memory-map a store that `tokenise` wrote."""
    manifest = json.loads((folder / "manifest.json").read_text())
    tokens = np.memmap(folder / "tokens.bin", dtype=manifest["dtype"], mode="r")
    return TokenStore(tokens, np.fromfile(folder / "documents.bin", dtype=np.int64), folder)


def _write_store(
    texts: Iterator[str],
    tokenizer: PreTrainedTokenizerBase,
    folder: Path,
    manifest: dict,
    part: str,
) -> None:
    """Write into a temporary folder and rename it: a store is there whole or not at all."""
    dtype = np.dtype(np.uint16 if len(tokenizer) <= 2**16 else np.uint32)
    folder.parent.mkdir(parents=True, exist_ok=True)
    unfinished = folder.with_name(f"{folder.name}.{os.getpid()}.tmp")
    unfinished.mkdir()
    ends: list[int] = [0]
    try:
        with (
            (unfinished / "tokens.bin").open("wb") as stream,
            tqdm(desc=f"tokenising {part}", unit=" documents") as bar,
        ):
            for batch in _batches(texts):
                for ids in _encode(batch, tokenizer):
                    stream.write(np.asarray(ids, dtype).tobytes())
                    ends.append(ends[-1] + len(ids))
                bar.update(len(batch))
        if ends[-1] == 0:
            raise InputError(
                f"corpus.{part} must hold text, got {manifest['source']!r} with none; check it"
            )
        np.asarray(ends[1:], np.int64).tofile(unfinished / "documents.bin")
        manifest |= {"dtype": dtype.name, "documents": len(ends) - 1, "tokens": ends[-1]}
        (unfinished / "manifest.json").write_text(json.dumps(manifest, indent=2))
        if not folder.exists():  # another machine may have made it meanwhile on a shared disk
            unfinished.rename(folder)
    finally:
        shutil.rmtree(unfinished, ignore_errors=True)


def _encode(texts: list[str], tokenizer: PreTrainedTokenizerBase) -> Iterator[list[int]]:
    # the fast path of the Rust tokenizer: no offsets, all cores
    encodings = tokenizer.backend_tokenizer.encode_batch_fast(texts, add_special_tokens=False)
    return (encoding.ids for encoding in encodings)


def _batches(texts: Iterator[str]) -> Iterator[list[str]]:
    batch: list[str] = []
    for text in texts:
        batch.append(text)
        if len(batch) == DOCUMENTS_A_BATCH:
            yield batch
            batch = []
    if batch:
        yield batch
