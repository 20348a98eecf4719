"""results.jsonl: one line a run, appended in one write, and what makes two lines the same run.

A line that a crash tore is skipped with a warning; the next append starts on a line of its own.
"""

import json
import os
import sys
from collections.abc import Mapping
from pathlib import Path
from typing import Any

from train.settings import InputError

KEY = ("model", "random_weights", "task", "learning_rate", "seed", "epochs", "batch_size", "length")


def result_key(values: Mapping[str, Any]) -> tuple:
    """What tells runs apart, from a results line or from the settings of a run."""
    return tuple(values[name] for name in KEY)


def append_result(path: str, result: Mapping[str, Any]) -> None:
    """Add one line in a single write, on disk when this returns; several processes may append."""
    Path(path).parent.mkdir(parents=True, exist_ok=True)
    line = json.dumps(result, allow_nan=False) + "\n"
    file = os.open(path, os.O_RDWR | os.O_CREAT | os.O_APPEND, 0o644)
    try:
        size = os.fstat(file).st_size
        torn = size > 0 and os.pread(file, 1, size - 1) != b"\n"
        os.write(file, ("\n" * torn + line).encode())
        os.fsync(file)
    finally:
        os.close(file)


def read_results(path: str) -> list[dict[str, Any]]:
    """The lines of a results file; one warning for each that a crash tore.

    Raises:
        InputError: There is no such file.
    """
    if not Path(path).is_file():
        raise InputError(
            f"results must be a file written by finetune/glue.py, got {path}; check the path"
        )
    results = []
    for number, line in enumerate(
        Path(path).read_text(encoding="utf-8", errors="replace").split("\n"), 1
    ):
        if line.strip():
            try:
                result = json.loads(line)
                result_key(result)
                results.append(result)
            except (ValueError, KeyError, TypeError):
                print(f"warning: {path} line {number} is torn and was ignored", file=sys.stderr)
    return results
