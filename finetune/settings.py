"""Every knob of fine-tuning; a YAML under configs/glue/ lists what a protocol decides.

Keys are flat. `Recipe` is what a protocol fixes for all its runs; `GlueSettings` adds which run,
`GridSettings` which runs. Defaults stand here and nowhere else.
"""

import math
from dataclasses import dataclass, field
from os.path import normpath
from pathlib import Path
from typing import Any

from finetune.tasks import TASKS
from train.loop.atomic_dir import check_writable
from train.settings import SCHEDULES, require, require_seed


def normalize_paths(settings: Any, *names: str) -> None:
    """Write the places that settings name in one way: `runs/a/` is `runs/a`, as are its runs."""
    for name in names:
        value = getattr(settings, name)
        alike = list(map(normpath, value)) if isinstance(value, list) else value and normpath(value)
        object.__setattr__(settings, name, alike)


@dataclass(frozen=True)
class Recipe:
    """How a model is fine-tuned, whichever model and task."""

    glue_dir: str | None = None
    """Folder of TASK/SPLIT.parquet (or .jsonl, .tsv); null reads `nyu-mll/glue` from the hub."""
    output: str = "results.jsonl"
    """File to which each run appends its line; predictions go to a folder beside it."""
    cache: str = "runs/tokens"
    """Folder where tokens are kept, for all runs."""
    test: bool = False
    """Also predict the test splits that are there, and AX after MNLI, for the submission."""
    length: int = 128
    """Longest input in tokens, special ones included; of a longer pair the longer text is cut."""
    batch_size: int = 32
    """Examples an optimiser step, over all processes."""
    learning_rate: float = 2e-5
    """Peak learning rate."""
    epochs: int = 3
    """Passes over the training split; the score is that of the last one."""
    schedule: str = "linear"
    """linear or cosine decay to 0 at the end, or constant, each after the warm-up."""
    warmup_share: float = 0.1
    """Share of the steps over which the rate rises from 0 to its peak."""
    weight_decay: float = 0.01
    """Decoupled decay of matrices; biases and LayerNorms are exempt."""
    clip_norm: float = 1.0
    """Largest gradient norm; larger gradients are scaled down to it."""
    attention: str = "sdpa"
    """Attention kernel by transformers' name: eager (fastest on CPU in bf16) or sdpa;
    a RoFormer also has unpadded."""

    def __post_init__(self) -> None:
        for name in ("batch_size", "learning_rate", "epochs", "clip_norm"):
            value, remedy = getattr(self, name), "leave it out for the default"
            require(0 < value < math.inf, name, "must be positive and finite", value, remedy)
        require(
            self.length >= 8, "length", "must be at least 8", self.length, "128 and 512 are usual"
        )
        decay = self.weight_decay
        require(decay >= 0, "weight_decay", "must not be negative", decay, "0 turns it off")
        share = self.warmup_share
        require(
            0 <= share < 1, "warmup_share", "must be at least 0 and below 1", share, "0.1 is usual"
        )
        listed = ", ".join(SCHEDULES)
        require(
            self.schedule in SCHEDULES,
            "schedule",
            f"must be one of {listed}",
            repr(self.schedule),
            "linear is BERT's",
        )
        folder = Path(self.output).is_dir()
        require(
            not folder,
            "output",
            "must name a file",
            f"the folder {self.output}",
            "add /results.jsonl",
        )
        check_writable(Path(self.output).parent, "output")
        check_writable(Path(self.cache), "cache")
        normalize_paths(self, "glue_dir")


@dataclass(frozen=True, kw_only=True)
class GlueSettings(Recipe):
    """Fine-tune one model on one task with one seed and append a line to the results."""

    model: str
    """Folder or hub id of a model that can carry a sequence-classification head."""
    task: str
    """Task by the name of its folder: cola, sst2, mrpc, stsb, qqp, mnli, qnli, rte, wnli, ..."""
    tokenizer: str | None = None
    """Folder or hub id of the tokenizer; null means the model's own."""
    seed: int = 0
    """Decides the new head, the order of examples and dropout, each as a pure function."""
    random_weights: bool = False
    """Control: the same architecture and tokenizer with weights that were never pretrained."""
    mnli: str | None = None
    """Folder of this model fine-tuned on MNLI, which the run begins from instead; RoBERTa and
    ModernBERT do so for RTE, MRPC and STS-B. Tables label it."""
    save: str | None = None
    """Folder for the fine-tuned model, its tokenizer and a model card."""

    def __post_init__(self) -> None:
        super().__post_init__()
        normalize_paths(self, "model", "tokenizer", "mnli")
        known = [name for name, task in TASKS.items() if "train" in task.splits]
        remedy = (
            "ax has no training rows: fine-tune mnli" if self.task == "ax" else "take one of them"
        )
        require(
            self.task in known,
            "task",
            f"must be one of {', '.join(known)}",
            repr(self.task),
            remedy,
        )
        require_seed(self.seed, "seed")
        local = self.glue_dir is not None or TASKS[self.task].official
        require(
            local,
            "glue_dir",
            "must name the folder of a demo task",
            "null",
            "the hub has GLUE only",
        )
        twice = self.mnli is not None and self.random_weights
        remedy = "leave one of them out"
        require(not twice, "mnli", "needs pretrained weights", "random_weights true", remedy)


@dataclass(frozen=True, kw_only=True)
class GridSettings(Recipe):
    """Fine-tune every model on every task with every rate and seed, leaving out what is done."""

    models: list[str]
    """Folders or hub ids, as `model` of a single run."""
    tasks: list[str]
    """Tasks by name."""
    seeds: list[int] = field(default_factory=lambda: [0])
    """Seeds."""
    learning_rates: list[float] | None = None
    """Peak learning rates; null means `learning_rate` alone."""
    random_control: bool = False
    """Run each model a second time from random weights."""
    from_mnli: bool = False
    """Run RTE, MRPC and STS-B a second time from the model fine-tuned on MNLI with the same rate
    and seed, which must be among the tasks."""
    workers: int = 1
    """Processes that make runs side by side; each has a GPU where there is one."""

    def __post_init__(self) -> None:
        super().__post_init__()
        for name in ("models", "tasks", "seeds"):
            require(bool(getattr(self, name)), name, "must name at least one", "none", "name some")
        normalize_paths(self, "models")
        require(self.workers >= 1, "workers", "must be at least 1", self.workers, "leave it out")
        there = not self.from_mnli or "mnli" in self.tasks
        require(there, "tasks", "must hold mnli for from_mnli", self.tasks, "add mnli")
