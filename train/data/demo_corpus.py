"""The embedded corpus: English documentation of the Python packages installed on this machine.

It consists of the docstrings of the standard library and of some dependencies of this project,
read with `ast` (no code is imported or run). The demo and the tests need no download with it; it
does not replace real text.
"""

import ast
import hashlib
import json
import sysconfig
import warnings
from collections.abc import Iterator
from pathlib import Path

from train.atomic_dir import write_dir_atomically

PACKAGES = (
    "accelerate", "datasets", "evaluate", "fsspec", "huggingface_hub", "jsonargparse", "matplotlib",
    "numpy", "pandas", "scipy", "sklearn", "sympy", "torch", "transformers",
)  # fmt: skip
"""Packages that are read after the standard library, in this order."""

MEGABYTES = 10
"""Size of the corpus; reading more would take too long for the demo."""

MIN_CHARACTERS = 200
"""Shorter docstrings are titles, not text."""

HELD_OUT_EVERY = 20
"""Every 20th source file is held out for validation."""


def corpus_file(part: str, cache: str | Path) -> Path:
    """Return the jsonl file of a part in a cache; it is written if it is missing.

    Its name is a hash of the installed files, which alone decide the order of the documents. The
    parts, "train" and "validation", share no source file.
    """
    rules = f"{MEGABYTES} {MIN_CHARACTERS} {HELD_OUT_EVERY}"
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
    """Yield each docstring once, and whether its source file is held out for validation."""
    seen: set[str] = set()
    parts: dict[str, bool] = {}
    left = MEGABYTES * 1_000_000
    for number, path in enumerate(source_files()):
        held_out = number % HELD_OUT_EVERY == HELD_OUT_EVERY - 1
        for text in docstrings(path):
            if len(text) < MIN_CHARACTERS or text in seen:
                continue
            # the parts share no text either, however its lines are broken
            if parts.setdefault("".join(text.split()).lower(), held_out) != held_out:
                continue
            seen.add(text)
            left -= len(text)
            if left < 0:
                return
            yield text, held_out


def source_files() -> Iterator[Path]:
    """Yield the Python files of the standard library, then of `PACKAGES`, sorted."""
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
    """Yield the docstrings of a file in reading order; one that is not valid Python has none."""
    source = path.read_bytes()
    if b'"""' not in source and b"'''" not in source:
        return
    try:
        with warnings.catch_warnings():
            warnings.simplefilter("ignore")  # invalid escapes in the packages
            tree = ast.parse(source)
    except (SyntaxError, ValueError):
        return
    stack: list[ast.AST] = [tree]
    while stack:
        node = stack.pop()
        text = ast.get_docstring(node)  # type: ignore[arg-type]
        if text:
            yield text
        # only definitions have docstrings: expressions are not walked
        kinds = (ast.ClassDef, ast.FunctionDef, ast.AsyncFunctionDef)
        stack.extend(n for n in reversed(getattr(node, "body", [])) if isinstance(n, kinds))
