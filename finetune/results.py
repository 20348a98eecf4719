"""Results files and predictions: what a fine-tuning run leaves.

    results.jsonl                               one line a run
    predictions/TASK-MODEL-HASH/SPLIT.parquet   columns row (from 0 within the split, also one that
                                                was held out), label (none: -1 or nan), logits
    predictions/TASK-MODEL-HASH/test.csv        test rows of your own task with their predictions,
                                                except those of simple features
    NAME.jsonl, NAME-predictions/...            the same for a results file of another name

Lines are appended atomically, after their predictions. Several processes may append to one file;
`run_lock` keeps two grids from making the same run, and simple features from being scored twice.

A line is a JSON object. Scores are from 0 to 1 (correlations from -1 to 1). A line has

    model, tokenizer, random_weights,   the settings that identify the run, `RUN_KEY`; those of the
    task, glue_dir, seed,               protocol are null for simple features
    learning_rate, epochs, batch_size,
    length, schedule, warmup_share,
    weight_decay, clip_norm, pooling,
    pair_encoding
    weights, config, tokenizer_files    hashes of the model's and the tokenizer's files; null for
                                        the hub
    data, test_data                     hashes of the labelled splits, and of your own test rows
    description                         only of a task of your own: its fields, as in its YAML file
    status                              done, diverged or failed
    error                               only if it diverged or failed: why
    settings                            all settings
    command                             the shell command that repeats the run

and, unless it failed,

    dataset, official, rows             name of the task with its rows: mnli, or mnli (9k); whether
                                        the rows are GLUE's; split -> number of rows
    model_type, parameters              the model's type in transformers, and its size
    truncation                          split -> shares of texts and tokens that are cut off
    headline_metric                     the metric that tables show
    metrics, headline                   validation split -> metric -> score; mean over the splits
                                        of that metric's; both null if the run diverged
    majority_metrics, majority          the same of a constant answer
    test_metrics                        metric -> score, of your own test rows if all have labels
    precision, device, processes,       how it was computed
    threads, versions
    seconds                             how long it took
    collapsed                           whether every row got the same answer
    loss, losses                        mean training loss of the last epoch, and of each

The last two lines are there only if the run is done. Simple features lack config, tokenizer_files,
settings, parameters, truncation, the losses and, but for versions, how they were computed.
"""

import csv
import hashlib
import json
import os
import sys
from collections.abc import Mapping, Sequence
from pathlib import Path
from typing import Any

import numpy as np
import pandas as pd
import pyarrow
from filelock import FileLock
from numpy.typing import NDArray
from pyarrow import parquet
from scipy.special import softmax

from train.atomic_dir import report_full_disk, write_file_atomically
from train.run_names import model_name
from train.settings import InputError, first_line

Result = dict[str, Any]
"""A line of results.jsonl; the module's docstring has its fields."""

PROTOCOL_FIELDS = {
    "learning_rate": "rate {:g}",
    "epochs": "epochs {:g}",
    "batch_size": "batch {:g}",
    "length": "length {:g}",
    "schedule": "{} schedule",
    "warmup_share": "warm-up {:g}",
    "weight_decay": "decay {:g}",
    "clip_norm": "clipped at {:g}",
    "pooling": "{} pooling",
    "pair_encoding": "{} encoding of pairs",
}
"""Fields that a protocol fixes for all its models, tasks and seeds, as tables print them."""

RUN_KEY = (
    "model", "tokenizer", "random_weights", "task", "glue_dir", "seed", *PROTOCOL_FIELDS,
)  # fmt: skip
"""Fields that identify a run: runs that agree on all of them are the same run."""

SIMPLE_FEATURES = "simple-features"
"""`model` of the results of `finetune.simple_features`."""


def run_key(values: Mapping[str, Any]) -> tuple:
    """Get the key of a run from its result or its settings."""
    return tuple(values[name] for name in RUN_KEY)


def run_name(values: Mapping[str, Any]) -> str:
    """Name the folder of a run's predictions: readable, and unique to its key."""
    digest = hashlib.sha256(json.dumps(run_key(values)).encode()).hexdigest()[:10]
    return f"{Path(values['task']).stem}-{model_name(values['model'])}-{digest}"


def inputs_differ(hashes: Mapping[str, Any], result: Result) -> bool:
    """Whether a result has other hashes of its inputs; one that either lacks counts as equal."""
    names = ("weights", "config", "tokenizer_files", "data", "test_data")
    pairs = [(hashes.get(name), result.get(name)) for name in names]
    return any(None not in pair and pair[0] != pair[1] for pair in pairs)


def prediction_file(results: str, result: Result, split: str) -> Path:
    """Locate the predictions of a run on a split."""
    file = Path(results)
    folder = "predictions" if file.stem == "results" else f"{file.stem}-predictions"
    return file.parent / folder / run_name(result) / f"{split}.parquet"


def write_predictions(file: Path, labels: NDArray, logits: NDArray[np.float32]) -> None:
    """Write labels [N] and logits [N, num_labels] in the row order of the split."""
    columns = {"row": np.arange(len(labels)), "label": labels, "logits": list(logits)}
    with report_full_disk(file.parent, "output"), write_file_atomically(file) as unfinished:
        parquet.write_table(pyarrow.table(columns), unfinished, compression="zstd")


def write_answers(
    file: Path, rows: Mapping[str, list], names: Sequence[str] | None, logits: NDArray
) -> None:
    """Write N rows with predictions as .csv; `names` of classes are None for a regression.

    Logits are [N, num_labels].
    """
    columns: dict[str, Any] = dict(rows)
    if names is None:
        columns["prediction"] = logits[:, 0]
    else:
        columns["prediction"] = [names[index] for index in logits.argmax(axis=1)]
        columns["probability"] = softmax(logits.astype(np.float64), axis=1).max(axis=1).round(4)
    with report_full_disk(file.parent, "output"), write_file_atomically(file) as unfinished:
        # ids beside a missing one would become floats; a text with \r would end its row
        frame = pd.DataFrame(columns, dtype=object)
        frame.to_csv(unfinished, index=False, quoting=csv.QUOTE_NONNUMERIC)


def read_predictions(file: Path) -> tuple[NDArray, NDArray[np.float32]]:
    """Read labels [N] and logits [N, num_labels].

    Raises:
        InputError: The file is missing or damaged.
    """
    try:
        table = parquet.read_table(file)
    except (OSError, pyarrow.ArrowException) as error:
        raise InputError(
            f"predictions must be in {file}, got {first_line(error)}; make the run again"
        ) from error
    logits = np.stack(table["logits"].to_numpy()).astype(np.float32)
    return table["label"].to_numpy(), logits


def run_lock(results: str, values: Mapping[str, Any]) -> FileLock:
    """Make the lock that keeps two grids from making the same run.

    It lies beside the results. The kernel releases it when its process ends, however it ends.
    """
    file = Path(results)
    file.parent.mkdir(parents=True, exist_ok=True)
    return FileLock(file.parent / f".{file.stem}-{run_name(values)}.lock")


def write_result(
    results: str, result: Result, labels: Mapping[str, NDArray], logits: Mapping[str, NDArray]
) -> None:
    """Write the predictions of a run, then append its result.

    `labels` [N] and `logits` [N, num_labels] are those of each predicted split; predictions of
    other splits are those of an earlier run with the same key, and are deleted.
    """
    for file in prediction_file(results, result, "any").parent.glob("*.*"):
        if file.stem not in logits and file.suffix != ".tmp":  # which others may be writing
            file.unlink()
    for split, values in logits.items():
        write_predictions(prediction_file(results, result, split), labels[split], values)
    append_result(results, result)


def append_result(results: str, result: Result) -> None:
    """Append a result and flush it to disk; an incomplete last line is cut off first.

    Raises:
        InputError: The disk is full. What was written of the line is cut off by the next call.
    """
    with (
        report_full_disk(Path(results).parent, "output"),
        FileLock(f"{results}.lock"),
        open(results, "ab+") as stream,
    ):
        stream.seek(0)
        content = stream.read()
        end = content.rfind(b"\n") + 1
        if end < len(content):  # left by a crash or a full disk
            stream.truncate(end)
            rest = content[end:][:40].decode(errors="replace")
            print(f"warning: {results} ended in a torn line, cut off: {rest}", file=sys.stderr)
        stream.write((json.dumps(result, allow_nan=False) + "\n").encode())
        stream.flush()
        os.fsync(stream.fileno())


def read_results(path: str) -> list[Result]:
    """Read the results: for each run its last one; a failure replaces no score of the same inputs.

    Lines that cannot be parsed are ignored with one warning.

    Raises:
        InputError: The file is missing.
    """
    if not Path(path).is_file():
        raise InputError(
            f"results must be a file written by finetune/glue.py, got {path}; check the path"
        )
    results: dict[tuple, Result] = {}
    torn: list[str] = []
    content = Path(path).read_text(encoding="utf-8", errors="replace")
    for number, line in enumerate(content.split("\n"), 1):
        if not line.strip():
            continue
        try:
            result = json.loads(line)
            key, failed = run_key(result), result["status"] == "failed"
            earlier = results.get(key, {"status": "failed"})
        except (ValueError, KeyError, TypeError):
            torn.append(str(number))
            continue
        if not failed or earlier["status"] == "failed" or inputs_differ(result, earlier):
            results.pop(key, None)  # the last line is that of the last run
            results[key] = result
    if torn:
        print(f"warning: {path} is torn at line {', '.join(torn)}; ignored", file=sys.stderr)
    return list(results.values())


def read_finished(path: str) -> dict[tuple, Result]:
    """Read the results of runs that did not fail, by their key; none if there is no file yet."""
    results = read_results(path) if Path(path).is_file() else []
    return {run_key(result): result for result in results if result["status"] != "failed"}
