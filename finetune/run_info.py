"""What a result says of a run beside its scores: settings, hashes of what it read, its command."""

import dataclasses
import functools
import hashlib
import shlex
from collections.abc import Iterable, Mapping
from pathlib import Path
from typing import Any

import torch
import transformers
from accelerate import Accelerator
from numpy.typing import NDArray

from finetune.data import find_split_file
from finetune.metrics import headline_score, score_majority
from finetune.results import RUN_KEY, Result
from finetune.settings import GlueSettings
from finetune.tasks import Task, description_field, load_task
from train.loop.launch import git_commit

TOKENIZER_FILES = (
    "tokenizer*", "vocab*", "merges.txt", "*.model", "added_tokens.json", "special_tokens_map.json",
)  # fmt: skip
"""Patterns of the files from which transformers' tokenizers are loaded."""


def run_fields(
    settings: GlueSettings,
    model_type: str,
    labels: Mapping[str, NDArray],
    accelerator: Accelerator,
) -> dict[str, Any]:
    """Make the fields of a result that are known before training."""
    task, values = load_task(settings.task), dataclasses.asdict(settings)
    precision, device = accelerator.mixed_precision, accelerator.device.type
    cpu_threads = torch.get_num_threads() if device == "cpu" else None
    return {
        **{name: values[name] for name in RUN_KEY},
        **hash_inputs(settings),
        "model_type": model_type,
        **data_fields(task, labels),
        "precision": precision,
        "device": device,
        "processes": accelerator.num_processes,
        "threads": torch.get_num_threads(),
        "versions": {
            "torch": torch.__version__,
            "transformers": transformers.__version__,
            "commit": git_commit(),
        },
        "settings": values,
        "command": rerun_command(settings, precision, cpu_threads, accelerator.num_processes),
    }


def data_fields(task: Task, labels: Mapping[str, NDArray]) -> dict[str, Any]:
    """Make the fields of a result that describe its data: name, rows, majority baseline.

    `labels` are those of train and the validation splits, [N] each; other splits are ignored.
    """
    validation = {split: labels[split] for split in task.validation_splits}
    rows = {split: len(labels[split]) for split in ("train", *validation)}
    majority = score_majority(task, labels["train"], validation)
    return {
        **description_field(task),
        "dataset": task.dataset_name(rows),
        "official": task.is_official(rows),
        "rows": rows,
        "headline_metric": task.headline,
        "majority_metrics": majority,
        "majority": headline_score(task, majority),
    }


def hash_inputs(settings: GlueSettings) -> dict[str, str | None]:
    """Hash weights, tokenizer and data of a run; None for what is on the hub or not read.

    Random weights are identified by the configuration they are drawn from.
    """
    config = hash_files([Path(settings.model) / "config.json"])
    folder = Path(settings.tokenizer or settings.model)
    tokenizer = {file for pattern in TOKENIZER_FILES for file in folder.glob(pattern)}
    return {
        "weights": config if settings.random_weights else hash_weights(settings.model),
        "config": config,
        "tokenizer_files": hash_files(sorted(tokenizer)),
        **hash_data(load_task(settings.task), settings.glue_dir, settings.test),
    }


def hash_data(task: Task, glue_dir: str | None, test: bool) -> dict[str, str | None]:
    """Hash the labelled splits of a task and, with `test`, the test rows of your own task."""
    test_file = find_split_file(task, "test", None) if test else None
    return {"data": hash_task_files(task, glue_dir), "test_data": hash_files([test_file])}


def hash_task_files(task: Task, glue_dir: str | None) -> str | None:
    """Hash the files of a task's labelled splits; None for GLUE on the hub.

    Of a task of your own the hash covers what decides how its rows are found, read and scored, too.
    """
    files = [find_split_file(task, x, glue_dir) for x in ("train", *task.validation_splits)]
    content = hash_files(files)
    if not task.is_own:
        return content
    others = ("name", "title", "test")
    source = {name: value for name, value in vars(task).items() if name not in others}
    return hashlib.sha256(repr((content, source)).encode()).hexdigest()[:16]


def hash_weights(model: str) -> str | None:
    """Hash the weights in a local folder; None for a hub id and for a folder without weights."""
    found = (sorted(Path(model).glob(pattern)) for pattern in ("*.safetensors", "*.bin"))
    return hash_files(next(filter(None, found), []))


def hash_files(files: Iterable[Path | None]) -> str | None:
    """Hash the contents of the files that exist to 16 hexadecimal digits; None if none does."""
    found = [file for file in files if file is not None and file.is_file()]
    stats = [(str(file), file.stat().st_size, file.stat().st_mtime_ns) for file in found]
    return _hash_contents(tuple(stats)) if found else None


@functools.cache  # one reading serves all runs of a process, until size or time of change differ
def _hash_contents(files: tuple[tuple[str, int, int], ...]) -> str:
    digest = hashlib.sha256()
    for name, *_ in files:
        with open(name, "rb") as stream:
            digest.update(hashlib.file_digest(stream, "sha256").digest())
    return digest.hexdigest()[:16]


def rerun_command(
    settings: GlueSettings, precision: str, cpu_threads: int | None, processes: int = 1
) -> str:
    """Compose the shell command that repeats a run, without the paths it writes to.

    On a CPU it sets the number of threads, on which the rounding of sums depends; None is a GPU.
    """
    cpu = cpu_threads is not None
    threads = [f"OMP_NUM_THREADS={cpu_threads}"] * cpu
    # without --num_processes accelerate uses every GPU
    launch = [*threads, "accelerate", "launch", "--num_processes", "1"]
    launch += ["--mixed_precision", precision, *["--cpu"] * cpu]
    if processes > 1:
        launch = [f"ACCELERATE_MIXED_PRECISION={precision}", f"ACCELERATE_USE_CPU={cpu}"]
        launch += [*threads, "torchrun", "--nproc_per_node", str(processes)]
    flags: list[str] = []
    for field in dataclasses.fields(settings):
        value = getattr(settings, field.name)
        if value != field.default and field.name not in ("output", "cache", "save"):
            text = str(value).lower() if isinstance(value, bool) else str(value)
            flags += [f"--{field.name}", text]
    return shlex.join([*launch, "finetune/glue.py", *flags])


def truncation_lines(length: int, truncation: Mapping[str, dict[str, float]]) -> list[str]:
    """Say how much of each split a length cuts off; no line if all texts fit."""
    return [
        f"{split}: {shares['texts']:.1%} of the texts are longer than {length} tokens; "
        f"{shares['tokens']:.1%} of all tokens are cut off"
        for split, shares in truncation.items()
        if shares["texts"]
    ]


def run_title(values: Mapping[str, Any]) -> str:
    """Name a run for the terminal, from its settings or its result."""
    suffix = ", random weights," if values["random_weights"] else ""
    rate = f"rate {values['learning_rate']:g}"
    return f"{values['task']} {values['model']}{suffix} {rate} seed {values['seed']}"


def format_result(result: Result) -> str:
    """Format a result for the terminal."""
    name = run_title(result)
    if result["status"] != "done":
        return f"{name}: {result['status']}: {result['error']}"
    collapsed = ", one answer for every row" if result["collapsed"] else ""
    metric = result["headline_metric"]
    test = f", test {100 * result['test_metrics'][metric]:.1f}" if "test_metrics" in result else ""
    return (
        f"{name}: {metric} {100 * result['headline']:.1f} "
        f"(majority {100 * result['majority']:.1f}{collapsed}){test}, {result['seconds']:.0f} s"
    )
