"""The zip for gluebenchmark.com, built from the saved test predictions of one model's runs.

    python -m finetune.publish.submission --results runs/results.jsonl --model MODEL --output s.zip

Eleven files of `index<TAB>prediction`, one for each test split; AX is predicted by the run on MNLI.
The format is that of jiant, by the benchmark's authors: class names for MNLI, AX, QNLI and RTE,
class ids for the others, three decimals for STS-B. No zip was sent to the server by this project.
Of several runs of a task the best on validation is used, as by Devlin et al. 2019
(arXiv:1810.04805, section 4.1).
"""

import sys
import zipfile
from dataclasses import dataclass
from pathlib import Path

import numpy as np
import pandas as pd

from finetune.results import (
    SIMPLE_FEATURES,
    Result,
    inputs_differ,
    prediction_file,
    read_predictions,
    read_results,
    run_name,
)
from finetune.run_info import hash_weights
from finetune.settings import normalize_paths
from finetune.tasks import TASKS
from train.atomic_dir import check_writable, report_full_disk, write_file_atomically
from train.command_line import run_command
from train.settings import InputError


@dataclass(frozen=True)
class ServerFile:
    """One file of the zip, and the task and split of the predictions in it.

    `labels` are the server's names of the classes in the order of their ids; None for a value.
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

    results: str = "runs/results.jsonl"
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
        if not self.output.endswith(".zip") or Path(self.output).is_dir():
            raise InputError(
                f"output must name a file that ends in .zip, got {self.output}; choose another name"
            )
        check_writable(Path(self.output).parent, "output")


def main(settings: SubmissionSettings) -> None:
    """Write the zip, completely or not at all; print what is in it.

    Raises:
        InputError: Predictions are missing or do not fit.
    """
    runs = choose_runs(settings)
    missing = [file for file, run in runs.items() if run is None]
    if len(missing) == len(FILES) or (missing and not settings.placeholders):
        needed = "at least one file" if settings.placeholders else "every file"
        raise InputError(
            f"{settings.results} must have runs of one set of weights of {settings.model}, on "
            f"official data and with --test true, for {needed}, "
            f"got none for {', '.join(file.name for file in missing)}; "
            "run finetune.grid with --test true, or give --placeholders true"
        )
    texts = {file.name: tsv(settings.results, file, run) for file, run in runs.items()}
    output = Path(settings.output)
    with (
        report_full_disk(output.parent, "output"),
        write_file_atomically(output) as unfinished,
        zipfile.ZipFile(unfinished, "w", zipfile.ZIP_DEFLATED) as archive,
    ):
        for name, text in texts.items():
            archive.writestr(name, text)
    for file, run in runs.items():
        source = "PLACEHOLDER, one answer for all rows"
        if run is not None:
            score = f"{run['headline_metric']} {100 * run['headline']:.1f}"
            source = f"{run_name(run)}, seed {run['seed']}, {score} on validation"
        print(f"{file.name:<12} {source}")
    print(f"written: {output}")
    if missing:
        warning = "the server's scores of placeholders and its average mean nothing"
        print(f"warning: {warning}", file=sys.stderr)


def choose_runs(settings: SubmissionSettings) -> dict[ServerFile, Result | None]:
    """Choose the run that predicts each file, None if there is none.

    It is the best one on validation. All files of a task are predicted by one run, never by one of
    random weights. Only runs of the weights that the model's folder holds now are used; if the
    folder is gone, of those of its last run.

    Raises:
        InputError: The results have no run of this model.
    """
    pretrained = [
        x
        for x in read_results(settings.results)
        if not x["random_weights"] and x["model"] != SIMPLE_FEATURES
    ]
    results = [x for x in pretrained if x["model"] == settings.model]
    if not results:
        models = ", ".join(sorted({x["model"] for x in pretrained})) or "no runs"
        raise InputError(
            f"model must be one of those in {settings.results}, got {settings.model}; "
            f"there: {models}"
        )
    recorded = [x["weights"] for x in results if x.get("weights")]
    weights = hash_weights(settings.model) or (recorded[-1] if recorded else None)
    usable = [
        x
        for x in results
        if x["status"] == "done"
        and x["official"]
        and x["settings"]["test"]
        and not inputs_differ({"weights": weights}, x)
    ]

    def is_predicted(run: Result, split: str) -> bool:
        return prediction_file(settings.results, run, split).is_file()

    # data without AX still give the files of MNLI; names are for equal scores
    usable.sort(key=lambda x: (not is_predicted(x, "ax"), -x["headline"], run_name(x)))
    runs: dict[ServerFile, Result | None] = {}
    for file in FILES:
        splits = {x.split for x in FILES if x.task == file.task} - {"ax"}
        of_task = (run for run in usable if run["task"] == file.task)
        best = next((x for x in of_task if all(is_predicted(x, split) for split in splits)), None)
        runs[file] = best if best and is_predicted(best, file.split) else None
    return runs


def tsv(results: str, file: ServerFile, run: Result | None) -> str:
    """One file of the zip; without predictions, the same answer in every row.

    Raises:
        InputError: The predictions are not those of the official split.
    """
    shape = (file.rows, 1 if file.labels is None else len(file.labels))
    logits = np.zeros(shape, np.float32)
    if run is not None:
        path = prediction_file(results, run, file.split)
        _, logits = read_predictions(path)
        if logits.shape != shape:
            raise InputError(
                f"{path} must be {shape[0]} rows of {shape[1]}, as of GLUE's own split, "
                f"got {logits.shape}; make the run again on the official data"
            )
    if file.labels is None:  # adding 0 turns -0.0 into 0.0
        answers = [f"{value:.3f}" for value in np.clip(logits[:, 0], 0, 5) + 0.0]
    else:
        answers = np.array(file.labels)[logits.argmax(axis=1)].tolist()
    return pd.Series(answers, name="prediction").to_csv(sep="\t", index_label="index")


if __name__ == "__main__":
    run_command(main, SubmissionSettings)
