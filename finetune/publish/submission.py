"""The zip for gluebenchmark.com, built from the saved test predictions of one model's runs.

    python -m finetune.publish.submission --results results.jsonl --model MODEL --output s.zip

Eleven files of `index<TAB>prediction`, one for each test split; AX is predicted by the run on MNLI.
The format is that of jiant, by the benchmark's authors: class names for MNLI, AX, QNLI and RTE,
class ids for the others, three decimals for STS-B. No zip was sent to the server by this project.
Of several runs of a task the best on validation is used, as by Devlin et al. 2019
(arXiv:1810.04805, section 4.1).
"""

import io
import os
import sys
import zipfile
from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import numpy as np

from finetune.results import (
    hash_differs,
    hash_weights,
    prediction_file,
    read_predictions,
    read_results,
    run_name,
)
from finetune.settings import normalize_paths
from finetune.tasks import TASKS
from train.atomic_dir import check_writable, report_full_disk
from train.command_line import run_command
from train.settings import InputError, require

Result = dict[str, Any]

HEADER = "index\tprediction"


@dataclass(frozen=True)
class ServerFile:
    """One file of the zip.

    Attributes:
        name: As the server expects it.
        task: Task whose runs predict it.
        split: Name of those predictions.
        labels: The server's names of the classes, in the order of their ids; None for a value.
    """

    name: str
    task: str
    split: str
    labels: tuple[str, ...] | None

    @property
    def rows(self) -> int:
        """Rows of the official split."""
        task, split = ("ax", "test") if self.split == "ax" else (self.task, self.split)
        return TASKS[task].splits[split] or 0


_IDS, _NLI = ("0", "1"), TASKS["mnli"].labels
FILES = (
    ServerFile("CoLA.tsv", "cola", "test", _IDS),
    ServerFile("SST-2.tsv", "sst2", "test", _IDS),
    ServerFile("MRPC.tsv", "mrpc", "test", _IDS),
    ServerFile("STS-B.tsv", "stsb", "test", None),
    ServerFile("QQP.tsv", "qqp", "test", _IDS),
    ServerFile("MNLI-m.tsv", "mnli", "test_matched", _NLI),
    ServerFile("MNLI-mm.tsv", "mnli", "test_mismatched", _NLI),
    ServerFile("QNLI.tsv", "qnli", "test", TASKS["qnli"].labels),
    ServerFile("RTE.tsv", "rte", "test", TASKS["rte"].labels),
    ServerFile("WNLI.tsv", "wnli", "test", _IDS),
    ServerFile("AX.tsv", "mnli", "ax", _NLI),
)


@dataclass(frozen=True, kw_only=True)
class SubmissionSettings:
    """Write the zip for GLUE's test server."""

    results: str = "results.jsonl"
    """File of runs made with `--test true`; their predictions lie beside it."""
    model: str
    """The model, as it is named there; of its runs of a task the best on validation is used."""
    output: str = "submission.zip"
    """The zip."""
    placeholders: bool = False
    """Fill files without predictions with the first class, because the server requires all files;
    its scores for those and its average are then meaningless."""

    def __post_init__(self) -> None:
        normalize_paths(self, "model")
        usable = self.output.endswith(".zip") and not os.path.isdir(self.output)
        rule = "must name a file that ends in .zip"
        require(usable, "output", rule, self.output, "choose another name")
        check_writable(Path(self.output).parent, "output")


@dataclass(frozen=True)
class Source:
    """What predicts a task or a file of the zip.

    Attributes:
        result: The run's line in results.jsonl; None if there is no usable run.
        note: Why there is none, or the number of runs that it is the best of.
    """

    result: Result | None
    note: str


def main(settings: SubmissionSettings) -> None:
    """Write the zip, completely or not at all; print what is in it.

    Raises:
        InputError: Predictions are missing or do not fit.
    """
    sources = choose_runs(settings)
    missing = {file: source.note for file, source in sources.items() if source.result is None}
    if missing and not settings.placeholders:
        named = ", ".join(f"{file.name} ({why})" for file, why in missing.items())
        tasks = ", ".join(dict.fromkeys(file.task for file in missing))
        raise InputError(
            f"{settings.results} must have test predictions of {settings.model} for all "
            f"{len(FILES)} files, got none for {named}; run finetune.grid with "
            f"--tasks '[{tasks}]' --test true, or give --placeholders true"
        )
    reasons = ", ".join(dict.fromkeys(missing.values()))
    rule = f"needs test predictions of {settings.model} for at least one file"
    remedy = f"run finetune.grid with --test true and --output {settings.results}"
    require(len(missing) < len(FILES), "placeholders", rule, f"none ({reasons})", remedy)
    packed = pack({file.name: tsv(settings.results, file, sources[file]) for file in FILES})
    output = Path(settings.output)
    unfinished = output.with_name(f"{output.name}.tmp")
    with report_full_disk(output.parent, "output"):
        output.parent.mkdir(parents=True, exist_ok=True)
        unfinished.write_bytes(packed)
        unfinished.replace(output)
    _print_sources(settings.output, sources)


def choose_runs(settings: SubmissionSettings) -> dict[ServerFile, Source]:
    """Choose the run that predicts each file, or give the reason that there is none.

    All files of a task are predicted by one run, never by one of random weights. Only runs of the
    weights that the model's folder holds now are used; if the folder is gone, of those of its last
    run.

    Raises:
        InputError: The results have no run of this model.
    """
    pretrained = [x for x in read_results(settings.results) if not x["random_weights"]]
    results = [x for x in pretrained if x["model"] == settings.model]
    models = ", ".join(sorted({x["model"] for x in pretrained})) or "no runs"
    rule = f"must be one of those in {settings.results}"
    require(bool(results), "model", rule, settings.model, f"there: {models}")
    direct = [x for x in results if x["mnli"] is None and x.get("weights")]
    last = direct[-1]["weights"] if direct else None
    weights = hash_weights(settings.model) or last
    sources = {file: best_run(settings.results, results, file.task, weights) for file in FILES}
    for file, source in sources.items():
        run = source.result
        if run is not None and not prediction_file(settings.results, run, file.split).is_file():
            sources[file] = Source(None, "not predicted by the run on MNLI")
    return sources


def best_run(file: str, results: Sequence[Result], task: str, weights: str | None) -> Source:
    """The best run of a task on validation, of those that predicted its test splits.

    Runs that start from MNLI have the weights of a model of MNLI, another one for each seed.
    """
    splits = [split for split in TASKS[task].splits if split.startswith("test")]

    def is_predicted(x: Result) -> bool:
        return all(prediction_file(file, x, split).is_file() for split in splits)

    steps = {
        "no run": lambda x: x["task"] == task,
        "only runs of other weights of the model": lambda x: (
            x["mnli"] is not None or not hash_differs(weights, x, "weights")
        ),
        "no run that ended well": lambda x: x.get("status") == "done",
        "only runs on data with rows missing": lambda x: x["official"],
        "only runs without --test true": lambda x: x["settings"]["test"] and is_predicted(x),
    }
    for why, is_usable in steps.items():
        results = [x for x in results if is_usable(x)]
        if not results:
            return Source(None, why)
    # a tie is broken by the name, whatever the order of the lines
    best = min(results, key=lambda x: (-x["headline"], run_name(x)))
    return Source(best, f"best of {len(results)}" if len(results) > 1 else "the only run")


def tsv(results: str, file: ServerFile, source: Source) -> bytes:
    """One file of the zip; without predictions, the same answer in every row.

    Raises:
        InputError: The predictions are not those of the official split.
    """
    if source.result is None:
        answers = [file.labels[0] if file.labels else "0.000"] * file.rows
    else:
        path = prediction_file(results, source.result, file.split)
        _, logits = read_predictions(path)
        shape = (file.rows, len(file.labels or "1"))
        rule = f"must be {shape[0]} rows of {shape[1]}, as of GLUE's own split"
        remedy = "make the run again on the official data"
        require(logits.shape == shape, str(path), rule, str(logits.shape), remedy)
        finite = bool(np.isfinite(logits).all())
        require(finite, str(path), "must hold finite numbers", "others", "make the run again")
        if file.labels is None:  # adding 0 turns -0.0 into 0.0
            answers = [f"{value:.3f}" for value in np.clip(logits[:, 0], 0, 5) + 0.0]
        else:
            answers = np.array(file.labels)[logits.argmax(axis=1)].tolist()
    lines = (f"{row}\t{answer}\n" for row, answer in enumerate(answers))
    return f"{HEADER}\n{''.join(lines)}".encode()


def pack(files: Mapping[str, bytes]) -> bytes:
    """Zip files without folders and dates, so that the same files give the same bytes."""
    stream = io.BytesIO()
    with zipfile.ZipFile(stream, "w") as archive:
        for name, content in files.items():
            info = zipfile.ZipInfo(name)  # dated 1980
            info.external_attr = 0o644 << 16
            archive.writestr(info, content, zipfile.ZIP_DEFLATED, compresslevel=6)
    return stream.getvalue()


def _print_sources(output: str, sources: Mapping[ServerFile, Source]) -> None:
    """Print for each file the run that predicted it and its score on validation."""
    print(f"{'file':<12} {'validation':<14} run")
    for file, source in sources.items():
        result = source.result
        if result is None:
            score, facts = "PLACEHOLDER", [f"{source.note}: one answer for all rows"]
        else:
            score = f"{result['headline_metric']} {100 * result['headline']:.1f}"
            facts = [run_name(result), f"seed {result['seed']}", source.note]
            facts += ["one answer for every validation row"] * bool(result.get("collapsed"))
        print(f"{file.name:<12} {score:<14} {', '.join(facts)}")
    print(f"written: {output}")
    gaps = [file.name for file, source in sources.items() if source.result is None]
    if gaps:
        print(
            f"warning: {', '.join(gaps)} hold placeholders, not predictions: the server's scores "
            "for them and its average mean nothing",
            file=sys.stderr,
        )


if __name__ == "__main__":
    run_command(main, SubmissionSettings)
