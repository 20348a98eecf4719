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
from collections.abc import Callable, Iterable, Iterator
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import datasets
import numpy as np
import pyarrow
from numpy.typing import NDArray
from pyarrow import parquet
from tqdm import tqdm
from transformers import PreTrainedTokenizerBase

from train import docstrings
from train.folders import whole_folder
from train.settings import CorpusSettings, InputError, require

EMBEDDED = "embedded"
FORMAT = 1
CHARACTERS_A_BATCH = 1_000_000
"""Text tokenised at once, and so held in memory."""

LONGEST_PARAGRAPH = 1_000_000
"""Characters after which a txt without blank lines is cut, at the end of a line."""


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
    key, names = f"corpus.{part}", sources(corpus, part)
    require(bool(names), key, "must name a source", "an empty list", "give a folder or files")
    if names == [EMBEDDED]:
        return [docstrings.written(part, corpus.cache)]
    files = []
    for name in names:
        found = _named_files(name, key)
        alone = len(names) == 1 and not _looks_like_path(name)
        require(bool(found) or alone, key, "must exist", repr(name), "check the path")
        files += found
    return files


def sources(corpus: CorpusSettings, part: str) -> list[str]:
    """What the setting of a part names, as a list."""
    value = getattr(corpus, part)
    return [value] if isinstance(value, str) else value


def _named_files(name: str, key: str) -> list[Path]:
    path = Path(name)
    endings = ", ".join(READERS)
    if path.is_dir():
        found = [p for p in sorted(path.rglob("*")) if p.suffix in READERS and p.is_file()]
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
        InputError: A file cannot be read, lacks the column, or holds no text there.
    """
    files = find_files(corpus, part)
    if not files:
        yield from _hub_documents(sources(corpus, part)[0], part, corpus.text_column)
    for file in files:
        yield from READERS[file.suffix](file, f"corpus.{part}", corpus.text_column)


def _parquet_rows(file: Path, key: str, column: str) -> Iterator[str]:
    try:
        table = parquet.ParquetFile(file)
    except (pyarrow.ArrowException, OSError) as error:
        found = f"{file}: {_first_line(error)}"
        raise InputError(f"{key} must be readable parquet, got {found}; mend the file") from error
    with table:
        kinds = {field.name: field.type for field in table.schema_arrow}
        _require_column(column, kinds, file)
        for batch in table.iter_batches(batch_size=256, columns=[column]):
            yield from (_text(value, column, file) for value in batch.column(0).to_pylist())


def _jsonl_rows(file: Path, key: str, column: str) -> Iterator[str]:
    for number, line in _lines(file, key):
        if not line.strip():
            continue
        try:
            row = json.loads(line)
        except ValueError as error:
            found = f"line {number} of {file}: {error}"
            raise InputError(
                f"{key} must hold one JSON object a line, got {found}; mend it"
            ) from error
        _require_column(column, row if isinstance(row, dict) else {}, file)
        yield _text(row[column], column, file)


def _paragraphs(file: Path, key: str, column: str) -> Iterator[str]:
    lines: list[str] = []
    length = 0
    for _, line in _lines(file, key):
        if line.strip():
            lines.append(line)
            length += len(line)
        if lines and (not line.strip() or length > LONGEST_PARAGRAPH):
            yield "".join(lines)
            lines, length = [], 0
    if lines:
        yield "".join(lines)


READERS: dict[str, Callable[[Path, str, str], Iterator[str]]] = {
    ".parquet": _parquet_rows,
    ".jsonl": _jsonl_rows,
    ".txt": _paragraphs,
}
"""What reads a file, by ending; `datasets` would turn numbers into text and refuse empty files."""


def _lines(file: Path, key: str) -> Iterator[tuple[int, str]]:
    """Numbered lines of a text file."""
    with file.open("rb") as stream:
        for number, line in enumerate(stream, start=1):
            try:
                yield number, line.decode("utf-8")
            except UnicodeDecodeError as error:
                found = f"line {number} of {file} that is not"
                raise InputError(f"{key} must be UTF-8, got {found}; convert the file") from error


def _require_column(column: str, columns: Iterable[str], file: Path) -> None:
    found = f"{column!r}; it has {', '.join(columns) or 'none'}"
    if column not in columns:
        raise InputError(f"corpus.text_column must name a column of {file}, got {found}")


def _text(value: object, column: str, file: Path) -> str:
    if value is None:
        return ""
    rule = f"must name a column of text in {file}"
    require(
        isinstance(value, str),
        "corpus.text_column",
        rule,
        f"{column!r} with {value!r:.40}",
        "name another",
    )
    return str(value)


def _first_line(error: BaseException) -> str:
    return (str(error).splitlines() or [type(error).__name__])[0]


def _hub_documents(name: str, part: str, column: str) -> Iterator[str]:
    """Texts of a hub data set, OWNER/NAME or OWNER/NAME:CONFIGURATION, read as a stream."""
    dataset, _, configuration = name.partition(":")
    try:
        rows = datasets.load_dataset(dataset, configuration or None, split=part, streaming=True)
        for row in rows:
            _require_column(column, row, Path(name))
            yield _text(row[column], column, Path(name))
    except (OSError, RuntimeError, datasets.exceptions.DatasetsError) as error:
        raise _unreadable_hub(name, part, error) from error
    except ValueError as error:
        if isinstance(error, InputError):
            raise
        raise _unreadable_hub(name, part, error) from error


def _unreadable_hub(name: str, part: str, error: BaseException) -> InputError:
    return InputError(
        f"corpus.{part} must be a folder, file, glob or hub data set with a {part} split, "
        f"got {name!r} ({_first_line(error)}); check the spelling and the network"
    )


def source_hash(corpus: CorpusSettings, part: str) -> str:
    """Hash of what decides the documents: the bytes of files, the name of a hub data set."""
    digest = hashlib.sha256(f"{FORMAT} {corpus.text_column}".encode())
    files = find_files(corpus, part)
    for file in files:
        with file.open("rb") as stream:
            digest.update(hashlib.file_digest(stream, "sha256").digest())
    if not files:
        digest.update(f"{sources(corpus, part)} {part}".encode())
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
        source = sources(corpus, part)
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
    """Write the three files of a store."""
    dtype = np.dtype(np.uint16 if len(tokenizer) <= 2**16 else np.uint32)
    ends: list[int] = [0]
    with whole_folder(folder) as unfinished:
        with (
            (unfinished / "tokens.bin").open("wb") as stream,
            tqdm(desc=f"tokenising {part}", unit=" documents") as bar,
        ):
            for batch in _batches(texts):
                for ids in _encode(batch, tokenizer):
                    stream.write(np.asarray(ids, dtype).tobytes())
                    ends.append(ends[-1] + len(ids))
                bar.update(len(batch))
        found = f"{', '.join(manifest['source'])} with none"
        require(ends[-1] > 0, f"corpus.{part}", "must hold text", found, "check the files")
        np.asarray(ends[1:], np.int64).tofile(unfinished / "documents.bin")
        manifest |= {"dtype": dtype.name, "documents": len(ends) - 1, "tokens": ends[-1]}
        (unfinished / "manifest.json").write_text(json.dumps(manifest, indent=2))


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
