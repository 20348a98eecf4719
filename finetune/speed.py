"""Time of a fine-tuning epoch against the example of transformers: `python -m finetune.speed`.

The loop of examples/pytorch/text-classification is reproduced here: random batches padded to their
longest row (run_glue_no_trainer.py) or to `length` (run_glue.py, by default), AdamW, a linear
schedule, float32. Both loops train the same model from the same weights on the same rows and then
score the validation rows, alternating in one process; the results are ratios within a round.
"""

import json
import statistics
import time
from collections.abc import Callable
from dataclasses import dataclass, field, replace
from pathlib import Path
from typing import Any, cast

import pandas as pd
import torch
from accelerate import Accelerator
from accelerate.state import AcceleratorState
from torch.utils.data import DataLoader, Dataset
from transformers import AutoModelForSequenceClassification, DataCollatorWithPadding, get_scheduler

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
    tokens = int(examples.lengths[:count].sum())
    inputs = {name: values[:tokens] for name, values in examples.inputs.items()}
    return replace(
        examples, inputs=inputs, lengths=examples.lengths[:count], labels=examples.labels[:count]
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
    steps = -(-len(rows["train"]) // run.batch_size)

    def epoch() -> float:
        torch.manual_seed(run.seed)
        model = AutoModelForSequenceClassification.from_config(config)
        accelerator = reset_accelerator(precision)
        started = time.perf_counter()
        groups: dict[float, list[Any]] = {run.weight_decay: [], 0.0: []}
        for name, parameter in model.named_parameters():
            excluded = "bias" in name or "LayerNorm.weight" in name
            groups[0.0 if excluded else run.weight_decay].append(parameter)
        optimizer = torch.optim.AdamW(
            [{"params": params, "weight_decay": decay} for decay, params in groups.items()],
            lr=run.learning_rate,
        )
        schedule = get_scheduler("linear", optimizer, 0, steps)
        batches: dict[str, DataLoader] = {
            split: DataLoader(
                cast(Dataset, part), run.batch_size, shuffle=split == "train", collate_fn=collate
            )
            for split, part in rows.items()
        }
        model, optimizer = accelerator.prepare(model, optimizer)
        model.train()
        for batch in batches["train"]:
            accelerator.backward(model(**batch).loss)
            optimizer.step()
            schedule.step()
            optimizer.zero_grad()
        model.eval()
        with torch.no_grad():
            for batch in (x for split, part in batches.items() if split != "train" for x in part):
                model(**batch).logits.argmax(dim=-1)
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
        "example without trainer, bf16": example_epoch(*example, "bf16", "longest"),
        "example without trainer, fp32": example_epoch(*example, "no", "longest"),
        "example, every row at the length, fp32": example_epoch(*example, "no", "max_length"),
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
