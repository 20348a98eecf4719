"""Files and hub data sets to documents, one text after the other.

Files are read here and not by `datasets`, which would turn numbers into text and refuse empty ones.
"""

import glob
import io
import itertools
import json
from collections.abc import Callable, Iterable, Iterator
from contextlib import contextmanager
from pathlib import Path

import datasets
import pyarrow
from pyarrow import parquet

from train.data import demo_corpus
from train.settings import CorpusSettings, HeldOutSettings, InputError, first_line, require

Source = Path | str
"""A file, or the name of a hub data set."""

EMBEDDED = "embedded"

HELD_OUT = 2000
"""Documents that are held out, the first, where a hub data set has no validation split."""

LONGEST_PARAGRAPH = 1_000_000
"""Characters after which a txt without blank lines is cut, at the end of a line."""


def sources(corpus: HeldOutSettings, part: str) -> list[str]:
    """What the setting of a part names, as a list."""
    value = getattr(corpus, part)
    return [value] if isinstance(value, str) else value


def find_files(corpus: HeldOutSettings, part: str) -> list[list[Source]]:
    """Data files of each name that a part gives, sorted; a hub data set stands for itself.

    Args:
        corpus: The corpus section.
        part: "train" or "validation": which of its two sources, and the key in error messages.

    Raises:
        InputError: Nothing usable is there.
    """
    key, names = f"corpus.{part}", sources(corpus, part)
    require(bool(names), key, "must name a source", "an empty list", "give a folder or files")
    files: list[list[Source]] = []
    for name in names:
        if name == EMBEDDED:
            files.append([demo_corpus.corpus_file(part, corpus.cache)])
            continue
        found = _named_files(name, key)
        there = bool(found) or not _looks_like_path(name)
        require(there, key, "must exist", repr(name), "check the path")
        files.append([*found] or [name])
    return files


def _named_files(name: str, key: str) -> list[Path]:
    path = Path(name)
    endings = ", ".join(READERS)
    if path.is_dir():
        # rglob would leave out what is linked, and a link to nothing
        inside = map(Path, glob.iglob(f"{glob.escape(name)}/**/*", recursive=True))
        found = sorted(p for p in inside if known_suffix(p) and not p.is_dir())
        once = {p.resolve(): p for p in reversed(found)}  # a folder may be linked into itself
        rule, nothing = f"must hold {endings} files", f"none in {name!r}"
        require(bool(found), key, rule, nothing, "put text there")
        return sorted(once.values())
    matches = [path] if path.is_file() else sorted(map(Path, glob.glob(name, recursive=True)))
    if glob.has_magic(name):
        require(bool(matches), key, "must match a file", f"none for {name!r}", "check the pattern")
    found = []
    for match in matches:
        rule, remedy = f"must be {endings} files", "convert or rename the file"
        require(bool(known_suffix(match)), key, rule, str(match), remedy)
        found += _named_files(str(match), key) if match.is_dir() else [match]
    return found


def _looks_like_path(name: str) -> bool:
    """Whether no hub data set can have that name: those are NAME or OWNER/NAME."""
    return name.startswith((".", "/", "~")) or name.count("/") > 1 or bool(known_suffix(Path(name)))


def known_suffix(path: Path) -> str:
    """The ending that says what reads a file; empty when nothing does."""
    return next((name for name in READERS if path.name.endswith(name)), "")


def read_documents(corpus: HeldOutSettings, part: str) -> Iterator[str]:
    """The documents of a part, in order.

    A txt file holds documents separated by blank lines, as BERT's own pretraining input did; a row
    of parquet or jsonl is one document.

    Raises:
        InputError: A file cannot be read, lacks the column, or holds no text there.
    """
    for files in find_files(corpus, part):
        for source in files:
            yield from read_source(source, part, corpus.text_column)


def read_source(source: Source, part: str, column: str) -> Iterator[str]:
    """The documents of one file or hub data set."""
    if isinstance(source, str):
        return _hub_documents(source, part, column)
    return READERS[known_suffix(source)](source, f"corpus.{part}", column)


def check_disjoint_files(corpus: CorpusSettings) -> None:
    """Refuse to measure a model on the text it learns from, or on none of the user's own.

    Raises:
        InputError: A file is in both parts, or only one of them is embedded.
    """
    rule, remedy = f"must be {EMBEDDED!r} for both parts or neither", "name held-out text of yours"
    alike = len({getattr(corpus, part) == EMBEDDED for part in ("train", "validation")}) == 1
    found = f"train {corpus.train!r} and validation {corpus.validation!r}"
    require(alike, "corpus.validation", rule, found, remedy)
    if corpus.train != EMBEDDED:
        shared = sorted(map(str, _paths(corpus, "train") & _paths(corpus, "validation")))
        rule, remedy = "must hold no file of corpus.train", "move it out of the training text"
        require(not shared, "corpus.validation", rule, ", ".join(shared[:3]), remedy)


def _paths(corpus: CorpusSettings, part: str) -> set[Path]:
    """The files of a part, wherever links lead."""
    found = itertools.chain.from_iterable(find_files(corpus, part))
    return {source.resolve() for source in found if isinstance(source, Path)}


@contextmanager
def wrap_read_errors(file: Path, key: str) -> Iterator[None]:
    """Say of a damaged file which one it is."""
    try:
        yield
    except (pyarrow.ArrowException, OSError) as error:
        found = f"{file}: {first_line(error)}"
        raise InputError(f"{key} must be a readable file, got {found}; mend the file") from error


def _parquet_rows(file: Path, key: str, column: str) -> Iterator[str]:
    with wrap_read_errors(file, key), parquet.ParquetFile(file) as table:
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
            if "\\u" in line:  # half of a pair is JSON, but no text that can be encoded
                json.dumps(row, ensure_ascii=False).encode()
        except (ValueError, RecursionError) as error:
            found = f"line {number} of {file}: {error}"
            raise InputError(
                f"{key} must hold one JSON object a line, got {found}; mend it"
            ) from error
        place = f"line {number} of {file}"
        _require_column(column, row if isinstance(row, dict) else {}, place)
        yield _text(row[column], column, place)


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
    **{f".jsonl{packed}": _jsonl_rows for packed in ("", ".gz", ".zst")},
    **{f".txt{packed}": _paragraphs for packed in ("", ".gz", ".zst")},
}
"""What reads a file, by ending."""


def _lines(file: Path, key: str) -> Iterator[tuple[int, str]]:
    """Numbered lines of a text file; pyarrow unpacks it when its ending says so."""
    with (
        wrap_read_errors(file, key),
        io.BufferedReader(pyarrow.input_stream(str(file)), 2**20) as stream,
    ):
        for number, line in enumerate(stream, start=1):
            try:
                yield number, line.decode("utf-8")
            except UnicodeDecodeError as error:
                found = f"line {number} of {file} that is not"
                raise InputError(f"{key} must be UTF-8, got {found}; convert the file") from error


def _require_column(column: str, columns: Iterable[str], place: object) -> None:
    found = f"{column!r}; it has {', '.join(columns) or 'none'}"
    if column not in columns:
        raise InputError(f"corpus.text_column must name a column of {place}, got {found}")


def _text(value: object, column: str, place: object) -> str:
    if value is None:
        return ""
    rule = f"must name a column of text in {place}"
    require(
        isinstance(value, str),
        "corpus.text_column",
        rule,
        f"{column!r} with {value!r:.40}",
        "name another",
    )
    return str(value)


def _hub_documents(name: str, part: str, column: str) -> Iterator[str]:
    """Texts of a hub data set, OWNER/NAME or OWNER/NAME:CONFIGURATION, read as a stream."""
    dataset, _, configuration = name.partition(":")
    try:
        splits = datasets.load_dataset(dataset, configuration or None, streaming=True)
        rows = splits[part if "validation" in splits else "train"]
        if "validation" not in splits:
            rows = rows.take(HELD_OUT) if part == "validation" else rows.skip(HELD_OUT)
        for row in rows:
            _require_column(column, row, name)
            yield _text(row[column], column, name)
    except InputError:
        raise
    except (
        OSError,
        RuntimeError,
        LookupError,
        ValueError,
        datasets.exceptions.DatasetsError,
    ) as error:
        raise InputError(
            f"corpus.{part} must be a folder, file, glob or hub data set with a {part} split, "
            f"got {name!r} ({first_line(error)}); check the spelling and the network"
        ) from error
