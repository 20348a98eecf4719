"""Step 1 of the data path: files and hub data sets to documents, one string each.

Local files are read here and not by `datasets`, which would convert numbers to text and refuse
empty files.
"""

import glob
import hashlib
import io
import json
from collections.abc import Callable, Iterable, Iterator
from contextlib import contextmanager
from pathlib import Path

import pyarrow
from pyarrow import parquet

from train.atomic_dir import write_text_atomically
from train.data import demo_corpus
from train.settings import CorpusSettings, InputError, TextSettings, first_line

TextFile = Path | str
"""A file, or the name of a hub data set, which counts as one file."""

EMBEDDED = "embedded"

HELD_OUT_DOCUMENTS = 2000
"""First documents of a hub data set without a validation split, which are held out."""

CACHED_BYTES = 2**20
"""Size from which the hash of a file is cached; smaller files are read as fast as their entry."""

GROUP_BYTES = 2**26
"""Most bytes of small files that are tokenized as one."""

MAX_PARAGRAPH = 1_000_000
"""Characters after which a txt without blank lines is split, at the end of a line."""


def source_names(corpus: TextSettings, part: str) -> list[str]:
    """Return the names in the setting of a part, its sources, as a list."""
    value = getattr(corpus, part)
    return [value] if isinstance(value, str) else value


def find_files(corpus: TextSettings, part: str) -> list[TextFile]:
    """Return the files of a part: those of its first source, sorted, then those of the next."""
    is_share = part == "validation" and corpus.held_out_share
    setting = "train" if is_share else part  # of a share, `read_file` draws the documents
    key, names = f"corpus.{setting}", source_names(corpus, setting)
    if not names or not all(names):  # "" would be every file below the working folder
        raise InputError(f"{key} must name a source, got {names!r}; give a folder or files")
    found: list[TextFile] = []
    for name in names:
        if name == EMBEDDED:
            found.append(demo_corpus.corpus_file(setting, corpus.cache))
            continue
        files = _match_files(name, key)
        if not files and looks_like_path(name):
            raise InputError(f"{key} must exist, got {name!r}; check the path; a list is [A, B]")
        if not files and corpus.held_out_share:
            raise InputError(
                f"{key} must be files if corpus.validation is a share, got {name!r}, which does "
                "not exist here; check the path, or name a hub data set for both parts"
            )
        found += files or [name]
    if is_share:  # a document is held out once
        found = list({x if isinstance(x, str) else x.resolve(): x for x in found}.values())
    return found


def group_files(files: list[TextFile], key: str) -> Iterator[list[TextFile]]:
    """Divide files into groups of neighbours, as a folder may hold thousands of small ones.

    A group has less than `GROUP_BYTES`, or is one file or hub data set. A new file can move the
    borders of the groups after it, which are then tokenized again.
    """
    group, size = list[TextFile](), 0
    for file in files:
        more = GROUP_BYTES
        if isinstance(file, Path):
            with wrap_read_errors(file, key):
                more = file.stat().st_size
        if group and size + more >= GROUP_BYTES:
            yield group
            group, size = [], 0
        group.append(file)
        size += more
    if group:
        yield group


def _match_files(name: str, key: str) -> list[Path]:
    """Data files of a file name, folder or glob; empty if it is none of them."""
    path = Path(name)
    suffixes = ", ".join(READERS)
    if path.is_dir():
        # rglob would skip linked folders and list broken links
        inside = map(Path, glob.iglob(f"{glob.escape(name)}/**/*", recursive=True))
        files = sorted(p for p in inside if known_suffix(p) and not p.is_dir())
        unique = {p.resolve(): p for p in reversed(files)}  # a folder may be linked into itself
        if not files:
            raise InputError(
                f"{key} must hold {suffixes} files, got none in {name!r}; put text there"
            )
        return sorted(unique.values())
    files = [path] if path.is_file() else sorted(map(Path, glob.glob(name, recursive=True)))
    unknown = [str(file) for file in files if not known_suffix(file)]
    if unknown:
        raise InputError(
            f"{key} must be {suffixes} files, got {', '.join(unknown[:3])}; "
            "convert or rename the file"
        )
    return files


def looks_like_path(name: str) -> bool:
    """Return whether a name cannot be one of the hub, which is NAME or OWNER/NAME."""
    is_path = name.startswith((".", "/", "~")) or name.count("/") > 1
    return is_path or glob.has_magic(name) or bool(known_suffix(Path(name)))


def known_suffix(path: Path) -> str:
    """Return the suffix of a file that has a reader, or an empty string."""
    return next((suffix for suffix in READERS if path.name.endswith(suffix)), "")


def read_documents(corpus: TextSettings, part: str) -> Iterator[str]:
    """Yield the documents of a part, in order.

    A row of parquet or jsonl is a document. A txt file holds documents separated by blank lines, as
    in BERT's own pretraining input.
    """
    for file in find_files(corpus, part):
        yield from read_file(file, part, corpus)


def read_file(file: TextFile, part: str, corpus: TextSettings) -> Iterator[str]:
    """Yield the documents of one file or hub data set that belong to a part."""
    column, share = corpus.text_column, corpus.held_out_share
    if isinstance(file, str):
        yield from _read_hub(file, part, column)
        return
    for text in READERS[known_suffix(file)](file, f"corpus.{part}", column):
        if not share or _is_held_out(text, share) == (part == "validation"):
            yield text


def _is_held_out(text: str, share: float) -> bool:
    """Draw a document by its words, so that copies, and runs of all seeds, have the same draw."""
    words = " ".join(text.lower().split()).encode()
    draw = int.from_bytes(hashlib.blake2b(words, digest_size=8).digest(), "little")
    return draw < share * 2**64


def hash_file(file: TextFile, part: str, corpus: TextSettings) -> str:
    """Hash the text of a file and how it is read."""
    if isinstance(file, str):  # a hub data set may change: its first state is cached
        return short_hash(file, part, corpus.text_column)
    digest = _content_hash(file, f"corpus.{part}", Path(corpus.cache))
    draw = [part, corpus.held_out_share] if corpus.held_out_share else []
    return short_hash(digest, known_suffix(file), corpus.text_column, *draw)


def short_hash(*facts: object) -> str:
    """Hash JSON values to 16 hexadecimal digits, for the names of files."""
    return hashlib.sha256(json.dumps(facts).encode()).hexdigest()[:16]


def _content_hash(file: Path, key: str, cache: Path) -> str:
    """SHA-256 of a file's bytes, of large ones cached while path, size and time of change stay."""
    with wrap_read_errors(file, key):
        stat = file.stat()
    is_cached = stat.st_size >= CACHED_BYTES
    entry = cache / "hashes" / short_hash(str(file.resolve()), stat.st_size, stat.st_mtime_ns)
    if is_cached and entry.exists():
        return entry.read_text()
    with wrap_read_errors(file, key), file.open("rb") as stream:
        digest = hashlib.file_digest(stream, "sha256").hexdigest()
    if is_cached:
        write_text_atomically(entry, digest)
    return digest


def check_text_files(corpus: CorpusSettings) -> None:
    """Check that files exist and none is in both parts, and that both or none are embedded."""
    if (corpus.train == EMBEDDED) != (corpus.validation == EMBEDDED):
        raise InputError(
            f"corpus.validation must be {EMBEDDED!r} for both parts or neither, got train "
            f"{corpus.train!r} and validation {corpus.validation!r}; beside text of yours give "
            "--corpus.validation 2%, or files"
        )
    if corpus.train == EMBEDDED:
        return
    train, held_out = (
        {file.resolve() for file in find_files(corpus, part) if isinstance(file, Path)}
        for part in ("train", "validation")
    )
    shared = sorted(map(str, train & held_out))
    if shared and not corpus.held_out_share:
        raise InputError(
            "corpus.validation must hold no file of corpus.train, "
            f"got {', '.join(shared[:3])}; move it out of the training text"
        )


@contextmanager
def wrap_read_errors(file: Path, key: str) -> Iterator[None]:
    """Raise `InputError` with the name of the file in place of errors of reading it."""
    try:
        yield
    except (pyarrow.ArrowException, OSError, UnicodeDecodeError) as error:
        found = f"{file}: {first_line(error)}"
        raise InputError(
            f"{key} must be a readable file, got {found}; repair the file, or convert it to UTF-8"
        ) from error


def _read_parquet(file: Path, key: str, column: str) -> Iterator[str]:
    with wrap_read_errors(file, key), parquet.ParquetFile(file) as table:
        _check_column(column, table.schema_arrow.names, file)
        for batch in table.iter_batches(batch_size=256, columns=[column]):
            yield from (_check_text(value, column, file) for value in batch.column(0).to_pylist())


def _read_jsonl(file: Path, key: str, column: str) -> Iterator[str]:
    for number, line in enumerate(_read_lines(file, key), start=1):
        if not line.strip():
            continue
        place = f"line {number} of {file}"
        try:
            row = json.loads(line)
            if not isinstance(row, dict):
                raise ValueError(f"a {type(row).__name__} instead of an object")
            str(row.get(column)).encode()  # half of an emoji, which no tokenizer reads
        except (ValueError, RecursionError) as error:
            raise InputError(
                f"{key} must hold one JSON object a line, got {place}: {error}; correct it"
            ) from error
        _check_column(column, row, place)
        yield _check_text(row[column], column, place)


def _read_txt(file: Path, key: str, column: str) -> Iterator[str]:
    text = ""
    for line in _read_lines(file, key):
        is_blank = not line.strip()
        text += "" if is_blank else line
        if text and (is_blank or len(text) > MAX_PARAGRAPH):
            yield text
            text = ""
    if text:
        yield text


READERS: dict[str, Callable[[Path, str, str], Iterator[str]]] = {
    ".parquet": _read_parquet,
    **{f".jsonl{compression}": _read_jsonl for compression in ("", ".gz", ".zst")},
    **{f".txt{compression}": _read_txt for compression in ("", ".gz", ".zst")},
}
"""Reader of each file suffix: called with file, key of error messages and text column."""


def _read_lines(file: Path, key: str) -> Iterator[str]:
    """Lines of a text file; pyarrow decompresses it by its suffix."""
    with wrap_read_errors(file, key), pyarrow.input_stream(str(file)) as stream:
        # Windows programs begin a file with a byte order mark; \r stays in the text
        yield from io.TextIOWrapper(stream, encoding="utf-8-sig", newline="\n")


def _check_column(column: str, columns: Iterable[str], place: object) -> None:
    if column not in columns:
        found = f"{column!r}; it has {', '.join(columns) or 'none'}"
        raise InputError(f"corpus.text_column must name a column of {place}, got {found}")


def _check_text(value: object, column: str, place: object) -> str:
    """Return a value of the text column; null is an empty text."""
    if value is not None and not isinstance(value, str):
        raise InputError(
            f"corpus.text_column must name a column of text in {place}, got {column!r} with "
            f"{value!r:.40}; name another"
        )
    return value or ""


def _read_hub(name: str, part: str, column: str) -> Iterator[str]:
    """Texts of a hub data set, OWNER/NAME or OWNER/NAME:CONFIGURATION, read as a stream."""
    import datasets  # slow to import, and not needed for files

    dataset, _, configuration = name.partition(":")
    try:
        splits = datasets.load_dataset(dataset, configuration or None, streaming=True)
        rows = splits[part if "validation" in splits else "train"]
        if "validation" not in splits:
            held_out = HELD_OUT_DOCUMENTS
            rows = rows.take(held_out) if part == "validation" else rows.skip(held_out)
        for row in rows:
            _check_column(column, row, name)
            yield _check_text(row[column], column, name)
    except InputError:
        raise
    except Exception as error:  # of many kinds, of the network and of the readers of formats
        raise InputError(
            f"corpus.{part} must be a folder, file, glob or hub data set with a {part} split, "
            f"got {name!r} ({first_line(error)}); check the spelling and the network"
        ) from error
