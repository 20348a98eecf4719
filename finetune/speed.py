"""Time of a fine-tuning epoch against the example of transformers: `python -m finetune.speed`.

The example (run_glue.py) is transformers' `Trainer`: random batches padded to `length`, its
default, or to their longest row. Both loops train the same model from the same weights on the same
rows and then score the validation rows, alternating in one process; the results are ratios within a
round.
"""

import json
import statistics
import tempfile
import time
from collections.abc import Callable
from dataclasses import dataclass, field, replace
from pathlib import Path
from typing import Any, cast

import pandas as pd
import torch
from accelerate import Accelerator
from accelerate.state import AcceleratorState
from torch.utils.data import Dataset
from transformers import (
    AutoModelForSequenceClassification,
    DataCollatorWithPadding,
    PrinterCallback,
    Trainer,
    TrainingArguments,
)

from finetune import glue
from finetune.data import Examples
from finetune.report.markdown_table import markdown_table
from finetune.settings import GlueSettings
from finetune.tasks import TASKS
from train.atomic_dir import check_writable
from train.command_line import run_command
from train.environment import collect_environment
from train.settings import require

Epoch = Callable[[], float]
"""Trains and scores one epoch, returns its seconds."""

COLUMNS = ("task, rows", "loop", "seconds per epoch", "speed-up of ours in bf16 (range of rounds)")


@dataclass(frozen=True)
class BenchSettings:
    """Measure an epoch of this project's loop and of the example's."""

    model: str
    """Model folder; a model with its configuration and random weights is trained."""
    glue_dir: str
    """Folder of TASK/SPLIT.parquet."""
    tasks: list[str] = field(default_factory=lambda: ["mrpc", "sst2"])
    """Tasks by name."""
    train_rows: int = 512
    """Rows of the training split in an epoch; 0 means all."""
    batch_size: int = 32
    """Examples per step."""
    length: int = 128
    """Longest input in tokens."""
    rounds: int = 3
    """Epochs of every loop."""
    output: str = "results/glue-bench-cpu.json"
    """JSON file to write; the table (.md) is written beside it."""

    def __post_init__(self) -> None:
        unknown = [task for task in self.tasks if task not in TASKS]
        require(not unknown, "tasks", f"must be of {', '.join(TASKS)}", unknown, "see --help")
        require(self.rounds >= 1, "rounds", "must be at least 1", self.rounds, "3 is usual")
        check_writable(Path(self.output).parent, "output")


def first_rows(examples: Examples, count: int) -> Examples:
    """Return the first rows of a split, all if `count` is 0."""
    count = min(count or len(examples), len(examples))
    tokens = int(examples.text_lengths[:count].sum())
    inputs = {name: values[:tokens] for name, values in examples.inputs.items()}
    return replace(
        examples,
        inputs=inputs,
        text_lengths=examples.text_lengths[:count],
        labels=examples.labels[:count],
    )


def project_epoch(run: GlueSettings, data: glue.Data, config: Any, precision: str) -> Epoch:
    """Return an epoch of this project's loop."""

    def epoch() -> float:
        model, accelerator = glue.load_model(run, config), reset_accelerator(precision)
        started = time.perf_counter()
        glue.fine_tune(run, model, data, accelerator, lambda *progress: None)
        return time.perf_counter() - started

    return epoch


def example_epoch(
    run: GlueSettings, data: glue.Data, config: Any, tokenizer: Any, precision: str, padding: str
) -> Epoch:
    """Return an epoch of the example's loop; `padding` is "longest" or "max_length"."""
    collate = DataCollatorWithPadding(tokenizer, padding=padding, max_length=run.length)
    rows = {split: to_features(examples) for split, examples in data.items()}
    reset_accelerator(precision)  # read by the arguments
    arguments = TrainingArguments(
        output_dir=tempfile.gettempdir(),
        num_train_epochs=1,
        per_device_train_batch_size=run.batch_size,
        per_device_eval_batch_size=run.batch_size,
        learning_rate=run.learning_rate,
        weight_decay=run.weight_decay,
        bf16=precision == "bf16",
        use_cpu=not torch.cuda.is_available(),
        save_strategy="no",
        logging_strategy="no",
        report_to=[],
        disable_tqdm=True,
    )

    def epoch() -> float:
        torch.manual_seed(run.seed)
        model = AutoModelForSequenceClassification.from_config(config)
        AcceleratorState._reset_state()
        training = cast(Dataset, rows["train"])
        trainer = Trainer(model, arguments, data_collator=collate, train_dataset=training)
        trainer.remove_callback(PrinterCallback)
        started = time.perf_counter()
        trainer.train()
        for split in rows.keys() - {"train"}:
            trainer.predict(cast(Dataset, rows[split]))
        return time.perf_counter() - started

    return epoch


def to_features(examples: Examples) -> list[dict[str, Any]]:
    """Return rows in the form of a tokenizer's output, for the collator."""
    ends = examples.starts + examples.lengths
    return [
        {name: values[start:end].tolist() for name, values in examples.inputs.items()}
        | {"labels": label}
        for start, end, label in zip(examples.starts, ends, examples.labels.tolist())
    ]


def reset_accelerator(precision: str) -> Accelerator:
    """Return an Accelerator with this precision; Accelerate allows only one per process."""
    AcceleratorState._reset_state(reset_partial_state=True)
    return Accelerator(mixed_precision=precision)


def make_epochs(settings: BenchSettings, task: str) -> tuple[dict[str, Epoch], int]:
    """Return the epoch of every loop by its name, this project's first, and the number of rows."""
    run = GlueSettings(
        model=settings.model,
        task=task,
        random_weights=True,
        glue_dir=settings.glue_dir,
        batch_size=settings.batch_size,
        length=settings.length,
        epochs=1,
    )
    config, tokenizer = glue.load_config_and_tokenizer(run, TASKS[task])
    data = glue.load_data(run, TASKS[task], tokenizer)
    data["train"] = first_rows(data["train"], settings.train_rows)
    # the faster kernel in bf16 on a CPU
    fast = run if torch.cuda.is_available() else replace(run, attention="eager")
    example = (run, data, config, tokenizer)
    return {
        "this project, bf16": project_epoch(fast, data, config, "bf16"),
        "this project, fp32": project_epoch(run, data, config, "no"),
        "example, padded to the longest, bf16": example_epoch(*example, "bf16", "longest"),
        "example, padded to the longest, fp32": example_epoch(*example, "no", "longest"),
        "example, padded to the length, fp32": example_epoch(*example, "no", "max_length"),
    }, len(data["train"])


def main(settings: BenchSettings) -> None:
    """Measure every task, print the table, write it and the numbers."""
    rows, numbers = [], {}
    for task in settings.tasks:
        epochs, count = make_epochs(settings, task)
        seconds: dict[str, list[float]] = {name: [] for name in epochs}
        for _ in range(settings.rounds):
            for name, epoch in epochs.items():
                seconds[name].append(epoch())
        numbers[task] = seconds
        ours = next(iter(seconds.values()))
        for name, values in seconds.items():
            ratios = sorted(a / b for a, b in zip(values, ours))
            speedup = f"{statistics.median(ratios):.2f} ({ratios[0]:.2f} to {ratios[-1]:.2f})"
            row = (f"{task}, {count:,}", name, f"{statistics.median(values):.1f}", speedup)
            rows.append(dict(zip(COLUMNS, row)))
    about = {"settings": vars(settings)} | collect_environment(reset_accelerator("no"))
    named = ("machine", "threads", "torch", "transformers", "commit")
    head = (
        "# An epoch of fine-tuning, against the loop of transformers' example\n\n"
        f"`python -m finetune.speed --model {settings.model} --glue_dir {settings.glue_dir}`: "
        f"{', '.join(f'{key} {about[key]}' for key in named)}; medians of {settings.rounds} rounds "
        "in one process. Other sizes, machines and lengths of text give other ratios.\n\n"
    )
    table = markdown_table(pd.DataFrame(rows))
    print(table)
    output = Path(settings.output)
    output.parent.mkdir(parents=True, exist_ok=True)
    output.write_text(json.dumps(about | {"seconds": numbers}, indent=1) + "\n")
    output.with_suffix(".md").write_text(head + table + "\n")


if __name__ == "__main__":
    run_command(main, BenchSettings)
