"""The zip that gluebenchmark.com scores, from the saved test predictions of one model's runs.

    python -m finetune.publish.submission --results results.jsonl --model MODEL --output s.zip
    python -m finetune.publish.submission --check submission.zip

Eleven files of `index<TAB>prediction`, one a test split; AX is predicted by the run on MNLI. The
form is that of jiant, whose authors made the benchmark: names of classes for MNLI, AX, QNLI and
RTE, ids for the others (WNLI too), three decimals for STS-B. Nothing was sent to the server from
here. Of several runs of a task the best on validation serves, as in BERT's protocol (Devlin et al.
2019, arXiv:1810.04805, section 4.1); the table that is printed names each.
"""

import io
import os
import re
import shlex
import sys
import zipfile
import zlib
from collections.abc import Mapping, Sequence
from dataclasses import dataclass, fields
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
from finetune.settings import Recipe, normalize_paths
from finetune.tasks import TASKS
from train.loop.launch import run_command
from train.settings import InputError, require

Line = dict[str, Any]

HEADER = "index\tprediction"
NUMBER = re.compile(r"[0-9]+(\.[0-9]*)?([eE][+-]?[0-9]+)?")
"""A score; float() takes more (nan, inf, 1_0, blanks)."""
PINS = ("seed", "learning_rate")
"""Settings that narrow the choice of runs."""
LINE_BYTES = 64
"""More than a line needs: a file may unpack to so much for each of its rows, no further."""
UNREADABLE = (
    EOFError, ValueError, OverflowError, RuntimeError, zlib.error, zipfile.BadZipFile,
)  # fmt: skip
"""What zipfile raises at a file that is no zip, or is damaged, encrypted or of an unknown kind."""


@dataclass(frozen=True)
class Member:
    """One file of the zip.

    Attributes:
        name: As the server expects it.
        task: Whose runs predict it.
        split: The name of those predictions.
        labels: What the server calls the classes, in the order of their ids; None for a value.
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
MEMBERS = (
    Member("CoLA.tsv", "cola", "test", _IDS),
    Member("SST-2.tsv", "sst2", "test", _IDS),
    Member("MRPC.tsv", "mrpc", "test", _IDS),
    Member("STS-B.tsv", "stsb", "test", None),
    Member("QQP.tsv", "qqp", "test", _IDS),
    Member("MNLI-m.tsv", "mnli", "test_matched", _NLI),
    Member("MNLI-mm.tsv", "mnli", "test_mismatched", _NLI),
    Member("QNLI.tsv", "qnli", "test", TASKS["qnli"].labels),
    Member("RTE.tsv", "rte", "test", TASKS["rte"].labels),
    Member("WNLI.tsv", "wnli", "test", _IDS),
    Member("AX.tsv", "mnli", "ax", _NLI),
)


@dataclass(frozen=True)
class SubmissionSettings:
    """Write the zip for GLUE's test server, or check one."""

    results: str = "results.jsonl"
    """File of runs made with `--test true`; their predictions lie beside it."""
    model: str | None = None
    """The model, as it is named there; of its runs of a task the best on validation serves."""
    output: str = "submission.zip"
    """The zip."""
    seed: int | None = None
    """Look only at runs with this seed."""
    learning_rate: float | None = None
    """Look only at runs with this peak rate."""
    placeholders: bool = False
    """Give files without predictions the first class in every row, because the server wants all
    files; what it says of those, and its average, mean nothing."""
    check: str | None = None
    """Check this zip, wherever it was made, and write none."""

    def __post_init__(self) -> None:
        normalize_paths(self, "model")
        given = [name for name in ("model", "check") if getattr(self, name) is not None]
        found, remedy = " and ".join(given) or "neither", "model writes a zip, check reads one"
        require(len(given) == 1, "submission", "needs one of model and check", found, remedy)
        usable = self.output.endswith(".zip") and not os.path.isdir(self.output)
        remedy = "choose another name"
        require(usable, "output", "must name a file that ends in .zip", self.output, remedy)


@dataclass(frozen=True)
class Choice:
    """The run that predicts a task.

    Attributes:
        line: Its line in the results.
        runs: How many it is the best of.
        better: How many runs score better, but made no test predictions.
    """

    line: Line
    runs: int
    better: int


Sources = dict[Member, Choice | str]  # the run whose predictions serve, or why there are none


def main(settings: SubmissionSettings) -> None:
    """Write the zip, whole or not at all, or check one; say what is in it.

    Raises:
        InputError: Predictions are missing or do not fit, or the zip is not what the server takes.
    """
    if settings.check is not None:
        check_zip(_content(settings.check), settings.check)
        print(f"{settings.check}: all {len(MEMBERS)} files are as the server takes them")
        return
    lines = model_lines(settings)
    found = sources(settings, lines)
    if not settings.placeholders and any(isinstance(source, str) for source in found.values()):
        raise _incomplete(settings, lines, found)
    files = {member.name: tsv(settings.results, member, found[member]) for member in MEMBERS}
    packed = pack(files)
    check_zip(packed, settings.output)
    _write(Path(settings.output), packed)
    _tell(settings.output, found)


def model_lines(settings: SubmissionSettings) -> list[Line]:
    """The model's lines, those of the control from random weights left out.

    Raises:
        InputError: The results have none of this model.
    """
    every = [line for line in read_results(settings.results) if not line["random_weights"]]
    lines = [line for line in every if line["model"] == settings.model]
    models = ", ".join(sorted({line["model"] for line in every})) or "no runs"
    rule, remedy = f"must be one of those in {settings.results}", f"there: {models}"
    require(bool(lines), "model", rule, settings.model, remedy)
    return lines


def sources(settings: SubmissionSettings, lines: Sequence[Line]) -> Sources:
    """Where the predictions of each file come from; those of one task are all by one run."""
    results, pins = settings.results, {name: getattr(settings, name) for name in PINS}
    lines = [line for line in lines if all(pins[name] in (None, line[name]) for name in PINS)]
    # those of the folder now; where it is gone, of its last run
    direct = [line for line in lines if line["mnli"] is None]
    last = next((line["weights"] for line in reversed(direct) if line.get("weights")), None)
    weights = hash_weights(str(settings.model)) or last
    chosen = {
        task: choose(results, lines, task, weights) for task in {m.task: None for m in MEMBERS}
    }
    found: Sources = {}
    for member in MEMBERS:
        choice = chosen[member.task]
        if isinstance(choice, Choice):
            file = prediction_file(results, choice.line, member.split)
            found[member] = choice if file.is_file() else "not predicted by the run on MNLI"
        else:
            found[member] = choice
    return found


def choose(results: str, lines: Sequence[Line], task: str, weights: str | None) -> Choice | str:
    """The best run of a task on validation, of those that predicted its test splits.

    Only runs of these weights serve: a folder's model may have been replaced between two of them.
    (Runs that start from MNLI have those of a model of MNLI, one for each seed.)

    Returns:
        It, or why there is none.
    """
    splits = [split for split in TASKS[task].splits if split.startswith("test")]
    steps = (
        ("no run", lambda line: line["task"] == task),
        (
            "only runs of other weights of the model",
            lambda line: line["mnli"] is not None or not hash_differs(weights, line, "weights"),
        ),
        ("no run that ended well", lambda line: line.get("status") == "done"),
        ("only runs on data with rows missing", lambda line: line["official"]),
        (
            "only runs without --test true",
            lambda line: (
                line["settings"]["test"]
                and all(prediction_file(results, line, split).is_file() for split in splits)
            ),
        ),
    )
    kept = scored = list(lines)
    for reason, serves in steps:
        scored, kept = kept, [line for line in kept if serves(line)]
        if not kept:
            return reason
    # ties: the same run whatever the order in which the lines were appended
    best = min(kept, key=lambda line: (-line["headline"], run_name(line)))
    better = sum(line["headline"] > best["headline"] for line in scored)
    return Choice(best, len(kept), better)


def tsv(results: str, member: Member, source: Choice | str) -> bytes:
    """One file of the zip; without predictions, one answer for every row.

    Raises:
        InputError: The predictions are not those of the official split.
    """
    if isinstance(source, str):
        answers = [member.labels[0] if member.labels else "0.000"] * member.rows
    else:
        answers = _answers(prediction_file(results, source.line, member.split), member)
    lines = (f"{row}\t{answer}\n" for row, answer in enumerate(answers))
    return f"{HEADER}\n{''.join(lines)}".encode()


def _answers(file: Path, member: Member) -> list[str]:
    _, logits = read_predictions(file)
    shape = (member.rows, len(member.labels or "1"))
    rule = f"must be {shape[0]} rows of {shape[1]}, as of GLUE's own split"
    fits = logits.shape == shape
    require(fits, str(file), rule, str(logits.shape), "make the run again on the official data")
    finite = bool(np.isfinite(logits).all())
    require(finite, str(file), "must hold finite numbers", "others", "make the run again")
    if member.labels is not None:
        return np.array(member.labels)[logits.argmax(axis=1)].tolist()
    # adding 0 turns -0.0, which would be written as -0.000, into 0.0
    return [f"{value:.3f}" for value in np.clip(logits[:, 0], 0, 5) + 0.0]


def pack(files: Mapping[str, bytes]) -> bytes:
    """A zip of these files: no folder, no times, so that the same files give the same bytes."""
    stream = io.BytesIO()
    with zipfile.ZipFile(stream, "w") as archive:
        for name, content in files.items():
            info = zipfile.ZipInfo(name)  # in 1980
            info.external_attr = 0o644 << 16  # who unpacks it may read it
            archive.writestr(info, content, zipfile.ZIP_DEFLATED, compresslevel=6)
    return stream.getvalue()


def check_zip(packed: bytes, where: str) -> None:
    """Refuse what the server would; nothing is written to disk.

    Args:
        packed: The zip.
        where: Its name in the error.

    Raises:
        InputError: It is no zip, other files are in it, or a line of one is wrong; says which.
    """
    try:
        with zipfile.ZipFile(io.BytesIO(packed)) as archive:
            infos = archive.infolist()
            _check_names([info.filename for info in infos], where)
            by_name = {info.filename: info for info in infos}
            for member in MEMBERS:
                _check_file(_unpacked(archive, by_name[member.name], member, where), member, where)
    except InputError:
        raise
    except UNREADABLE as error:
        reason = next(iter(str(error).splitlines()), "") or type(error).__name__
        raise InputError(f"{where} must be a whole zip, got {reason}; make it again") from error


def _check_names(names: Sequence[str], where: str) -> None:
    wanted = {member.name for member in MEMBERS}
    faults = [f"{name!a:.80}" for name in names if name not in wanted]
    faults += [f"{name} twice" for name in sorted(wanted) if names.count(name) > 1]
    faults += [f"no {name}" for name in sorted(wanted.difference(names))]
    rule = f"must hold {', '.join(member.name for member in MEMBERS)} and nothing else"
    more = f" and {len(faults) - 5} more" if len(faults) > 5 else ""
    remedy = "zip these files alone, without a folder"
    require(not faults, where, rule, ", ".join(faults[:5]) + more, remedy)


def _unpacked(archive: zipfile.ZipFile, info: zipfile.ZipInfo, member: Member, where: str) -> bytes:
    key = f"{where}: {member.name}"
    plain = info.compress_type in (zipfile.ZIP_STORED, zipfile.ZIP_DEFLATED)
    require(plain, key, "must be deflated or stored", f"method {info.compress_type}", "zip again")
    most = LINE_BYTES * (member.rows + 1)
    with archive.open(info) as stream:  # what the zip says of its sizes may be wrong
        content = stream.read(most + 1)
    rule = f"must be at most {most} bytes for its {member.rows} rows"
    require(len(content) <= most, key, rule, "more", "write an index and a prediction a line")
    return content


def _check_file(content: bytes, member: Member, where: str) -> None:
    lines = content.split(b"\n")
    if not lines[-1]:
        lines.pop()  # the last line may have an end, or none
    for number, line in enumerate(lines or [b""], 1):
        rule = _broken_rule(line, number, member)
        if rule:
            key = f"{where}: {member.name} line {number}"
            found = ascii(line[:LINE_BYTES].decode(errors="backslashreplace"))
            raise InputError(f"{key} must {rule}, got {found}; mend it")
    rows, key = len(lines) - 1, f"{where}: {member.name} line {len(lines) + 1}"
    rule = f"must follow: the test split has {member.rows} rows"
    require(rows == member.rows, key, rule, f"an end after {rows}", "predict the official split")


def _broken_rule(line: bytes, number: int, member: Member) -> str:
    """What a line, counted from 1, must do and does not; empty for a good one."""
    try:
        text = line.decode("utf-8")
    except UnicodeDecodeError:
        return "be UTF-8"
    if number == 1:
        return "" if text == HEADER else f"be {HEADER!r}"
    if number > member.rows + 1:
        return f"not be there: the test split has {member.rows} rows"
    index, tab, answer = text.partition("\t")
    if index != str(number - 2) or not tab:
        return f"begin with index {number - 2} and a tab"
    if member.labels is not None:
        return "" if answer in member.labels else f"predict one of {', '.join(member.labels)}"
    good = NUMBER.fullmatch(answer) and float(answer) <= 5
    return "" if good else "predict a number from 0 to 5"


def _content(path: str) -> bytes:
    """A file's bytes, if it can be a zip of these files at all."""
    most = sum(LINE_BYTES * (member.rows + 1) for member in MEMBERS)
    try:
        require(Path(path).is_file(), "check", "must name a zip", path, "check the path")
        size = Path(path).stat().st_size
        require(size <= most, path, f"must be at most {most} bytes", size, "zip the 11 files alone")
        return Path(path).read_bytes()
    except OSError as error:
        raise InputError(f"check must be readable, got {error}; check the path") from error


def _incomplete(settings: SubmissionSettings, lines: Sequence[Line], found: Sources) -> InputError:
    gaps = {member: reason for member, reason in found.items() if isinstance(reason, str)}
    named = ", ".join(f"{member.name} ({reason})" for member, reason in gaps.items())
    grid = _grid_command(settings, lines, list({member.task: None for member in gaps}))
    return InputError(
        f"{settings.results} must have test predictions of {settings.model} for all "
        f"{len(MEMBERS)} files, got none for {named}; make them with `{grid}`, or give "
        "--placeholders true"
    )


def _grid_command(settings: SubmissionSettings, lines: Sequence[Line], tasks: list[str]) -> str:
    """The grid that makes what is missing, by the recipe of a run that is there, if one is."""
    known: Line = next((line for line in lines if line.get("official")), {})
    values = {field.name: field.default for field in fields(Recipe)} | known.get("settings", {})
    values |= {"output": settings.results, "test": True}
    if settings.learning_rate is not None:
        values["learning_rate"] = settings.learning_rate
    parts = ["accelerate", "launch", "--num_processes", "1"]
    parts += ["--mixed_precision", known.get("precision", "no")]
    parts += ["-m", "finetune.grid", "--models", f"[{settings.model}]"]
    parts += ["--tasks", f"[{', '.join(tasks)}]"]
    if settings.seed is not None:
        parts += ["--seeds", f"[{settings.seed}]"]
    for field in fields(Recipe):
        value = values[field.name]
        if value != field.default:
            parts += [f"--{field.name}", "true" if value is True else str(value)]
    return shlex.join(parts)


def _write(output: Path, packed: bytes) -> None:
    unfinished = output.with_name(f".{output.name}.{os.getpid()}")
    try:
        output.parent.mkdir(parents=True, exist_ok=True)
        try:
            unfinished.write_bytes(packed)
            unfinished.replace(output)
        finally:
            unfinished.unlink(missing_ok=True)
    except OSError as error:
        raise InputError(f"output must be writable, got {error}; choose another") from error


def _tell(output: str, found: Sources) -> None:
    """One row a file: where its predictions come from and how that run scored on validation."""
    rows = [("file", "validation", "run")]
    for member, source in found.items():
        if isinstance(source, str):
            rows.append((member.name, "PLACEHOLDER", f"{source}: one answer for all rows"))
        else:
            line = source.line
            score = f"{line['headline_metric']} {100 * line['headline']:.1f}"
            rows.append((member.name, score, _described(source)))
    for name, score, run in rows:
        print(f"{name:<12} {score:<14} {run}")
    print(f"written and checked: {output}")
    gaps = [member.name for member, source in found.items() if isinstance(source, str)]
    if gaps:
        print(
            f"warning: {', '.join(gaps)} hold placeholders, not predictions: the server's scores "
            "for them and its average mean nothing",
            file=sys.stderr,
        )


def _described(choice: Choice) -> str:
    line = choice.line
    parts = [run_name(line), f"rate {line['learning_rate']:g}", f"seed {line['seed']}"]
    parts += ["from MNLI"] * (line["mnli"] is not None)
    parts += ["one answer for every validation row"] * bool(line.get("collapsed"))
    parts.append(f"best of {choice.runs}" if choice.runs > 1 else "the only run")
    if choice.better:
        parts.append(f"{choice.better} better without test predictions")
    return ", ".join(parts)


if __name__ == "__main__":
    run_command(main, SubmissionSettings)
