"""The embedded corpus: English documentation that is already on the machine.

Docstrings of the standard library and of a fixed list of this project's dependencies, read with
`ast` (nothing is imported or run). It lets the demo and the tests run with no download; it is no
substitute for real text.
"""

import ast
import hashlib
import json
import sysconfig
import warnings
from collections.abc import Iterator
from pathlib import Path

from train.loop.atomic_dir import write_dir_atomically

PACKAGES = (
    "accelerate", "datasets", "evaluate", "fsspec", "huggingface_hub", "jsonargparse", "matplotlib",
    "numpy", "pandas", "scipy", "sklearn", "sympy", "torch", "transformers",
)  # fmt: skip
"""Installed packages whose documentation is read, after the standard library, in this order."""

MEGABYTES = 10
"""How much of it serves, from the start: more takes longer to read than the demo has time for."""

SHORTEST = 200
"""Docstrings of fewer characters are titles, not text."""

HELD_OUT_EVERY = 20
"""One source file in so many goes to the validation text, whole, so that no docstring is split."""


def corpus_file(part: str, cache: str | Path) -> Path:
    """The corpus as a jsonl file in `cache`, made when it is not there or the packages changed.

    Args:
        part: "train" or "validation"; no source file serves both.
        cache: Folder for the two files.

    Returns:
        The file of that part, a document a line, in an order the installed files alone decide.
    """
    rules = f"{MEGABYTES} {SHORTEST} {HELD_OUT_EVERY}"
    files = (f"{path.name} {path.stat().st_size}" for path in source_files())
    name = hashlib.sha256("\n".join([rules, *files]).encode()).hexdigest()[:16]
    folder = Path(cache) / f"embedded-{name}"
    if not folder.exists():
        with (
            write_dir_atomically(folder) as unfinished,
            (unfinished / "train.jsonl").open("w", encoding="utf-8") as train,
            (unfinished / "validation.jsonl").open("w", encoding="utf-8") as validation,
        ):
            for text, held_out in read_docstrings():
                (validation if held_out else train).write(json.dumps({"text": text}) + "\n")
    return folder / f"{part}.jsonl"


def read_docstrings() -> Iterator[tuple[str, bool]]:
    """Docstrings, each once, with whether its source file is held out for validation."""
    seen: set[str] = set()
    left = MEGABYTES * 1_000_000
    for number, path in enumerate(source_files()):
        for text in docstrings(path):
            if len(text) < SHORTEST or text in seen:
                continue
            seen.add(text)
            left -= len(text)
            if left < 0:
                return
            yield text, number % HELD_OUT_EVERY == HELD_OUT_EVERY - 1


def source_files() -> Iterator[Path]:
    """Python files of the standard library, then of `PACKAGES`, each in sorted order."""
    standard = Path(sysconfig.get_path("stdlib"))
    site = Path(sysconfig.get_path("purelib"))
    outside = ("site-packages", "test", "tests", "idlelib", "lib2to3", "pydoc_data")
    for path in sorted(standard.rglob("*.py")):
        if not set(path.relative_to(standard).parts) & set(outside):
            yield path
    for package in PACKAGES:
        for path in sorted((site / package).rglob("*.py")):
            if not {"test", "tests"} & set(path.relative_to(site).parts):
                yield path


def docstrings(path: Path) -> Iterator[str]:
    """Docstrings of one file, in reading order; a file that is no valid Python has none."""
    source = path.read_bytes()
    if b'"""' not in source and b"'''" not in source:
        return
    try:
        with warnings.catch_warnings():
            warnings.simplefilter("ignore")  # other people's invalid escapes
            tree = ast.parse(source)
    except (SyntaxError, ValueError):
        return
    stack: list[ast.AST] = [tree]
    while stack:
        node = stack.pop()
        text = ast.get_docstring(node)  # type: ignore[arg-type]
        if text:
            yield text
        # only definitions hold docstrings, so expressions need not be walked
        kinds = (ast.ClassDef, ast.FunctionDef, ast.AsyncFunctionDef)
        stack.extend(n for n in reversed(getattr(node, "body", [])) if isinstance(n, kinds))
