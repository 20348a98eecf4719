"""Settings of fine-tuning; a YAML under configs/glue/ lists what a protocol decides.

Keys are flat. `CommonSettings` is what a run and a grid share; `GlueSettings` adds which run,
`GridSettings` which runs. This file is the only place of defaults.
"""

import math
from dataclasses import dataclass, field
from os.path import normpath
from pathlib import Path
from typing import Any

from finetune.results import run_key
from finetune.tasks import load_task
from train.atomic_dir import check_writable
from train.settings import SCHEDULES, InputError, check_fields, check_seed


def normalize_paths(settings: Any, *names: str) -> None:
    """Normalize paths of frozen settings: `runs/a/` and `runs/a` name the same run."""
    for name in names:
        value = getattr(settings, name)
        is_list = isinstance(value, list)
        normal = [normpath(path) for path in value] if is_list else value and normpath(value)
        object.__setattr__(settings, name, normal)


def check_output(output: str) -> None:
    """Check the path of a results file."""
    if Path(output).is_dir():
        raise InputError(f"output must name a file, got the folder {output}; add /results.jsonl")
    if Path(output).suffix != ".jsonl":  # rows would be appended to a file of another kind
        raise InputError(f"output must be a .jsonl file, got {output}; add .jsonl")
    check_writable(Path(output).parent, "output")


@dataclass(frozen=True)
class CommonSettings:
    """What a single run and a grid share: paths, and how a model is fine-tuned."""

    glue_dir: str | None = None
    """Folder of TASK/SPLIT.parquet (.jsonl, .tsv, .csv); null reads `nyu-mll/glue` of the hub."""
    output: str = "runs/results.jsonl"
    """Results file, .jsonl, to which each run appends a result; predictions lie in a folder beside
    it."""
    cache: str = "runs/tokens"
    """Folder of cached tokens, shared by all runs."""
    test: bool = False
    """Also predict the test split, which must exist: for a submission, with AX after MNLI, or the
    test rows of your own task."""
    length: int = 128
    """Longest input in tokens, special tokens included; of a pair the longer text is truncated."""
    batch_size: int = 32
    """Examples per optimizer step, over all processes."""
    micro_batch_tokens: int = 16384
    """Most tokens of a forward pass of a process, padding included; the gradients of several are
    accumulated, so that long texts need no more memory."""
    epochs: int = 3
    """Passes over the training split; the weights after the last one are scored."""
    schedule: str = "linear"
    """linear or cosine decay to 0 at the end, or constant, each after the warm-up."""
    warmup_share: float = 0.1
    """Share of the steps, rounded up, over which the learning rate rises from 0 to its peak."""
    weight_decay: float = 0.01
    """Decoupled weight decay of matrices; biases and LayerNorms are exempt."""
    clip_norm: float = 1.0
    """Largest gradient norm; larger gradients are scaled down to it."""
    pooling: str = "own"
    """Head: own is that of the model's class, as in `AutoModelForSequenceClassification`; first or
    mean is the shared head (`finetune.shared_head`) on the first token or the mean of the tokens.
    """
    pair_encoding: str = "joint"
    """joint: two texts are one input (a cross-encoder); separate: each is encoded alone (a
    bi-encoder), for the shared head."""
    attention: str | None = None
    """Attention implementation: null is the model's own default, for a RoFormer the fastest for
    each call; or transformers' eager or sdpa, or for a RoFormer unpadded."""

    def __post_init__(self) -> None:
        numbers = ("batch_size", "micro_batch_tokens", "epochs", "clip_norm")
        check_fields(self, lambda x: 0 < x < math.inf, "must be positive and finite", *numbers)
        check_fields(self, lambda x: x >= 8, "must be at least 8", "length")
        check_fields(self, lambda x: x >= 0, "must not be negative", "weight_decay")
        rule = "must be at least 0 and below 1"
        check_fields(self, lambda x: 0 <= x < 1, rule, "warmup_share")
        rule = f"must be one of {', '.join(SCHEDULES)}"
        check_fields(self, lambda x: x in SCHEDULES, rule, "schedule")
        rule = "must be own, first or mean"
        check_fields(self, lambda x: x in ("own", "first", "mean"), rule, "pooling")
        rule = "must be joint or separate"
        check_fields(self, lambda x: x in ("joint", "separate"), rule, "pair_encoding")
        if self.pooling == "own" and self.pair_encoding != "joint":
            raise InputError(
                f"pair_encoding must be joint for a model's own head, got {self.pair_encoding}; "
                "set pooling to first or mean"
            )
        check_output(self.output)
        check_writable(Path(self.cache), "cache")
        normalize_paths(self, "glue_dir")


@dataclass(frozen=True, kw_only=True)
class GlueSettings(CommonSettings):
    """Fine-tune one model on one task with one seed and append a result to the file."""

    model: str
    """Folder or hub id of a model that has a sequence-classification class."""
    task: str
    """cola, sst2, mrpc, stsb, qqp, mnli, qnli, rte, wnli, a demo task, or the YAML file of a task
    of your own (`finetune.describe_task` writes one)."""
    tokenizer: str | None = None
    """Folder or hub id of the tokenizer; null means the model's own."""
    learning_rate: float = 2e-5
    """Peak learning rate."""
    seed: int = 0
    """Seed of the new head, the order of examples and dropout."""
    random_weights: bool = False
    """Control: the same architecture and tokenizer, trained from random initialisation."""
    save: str | None = None
    """New folder for the fine-tuned model, its tokenizer and a model card."""

    def __post_init__(self) -> None:
        super().__post_init__()
        normalize_paths(self, "model", "tokenizer", "task")
        load_task(self.task)
        rule = "must be positive and finite"
        check_fields(self, lambda x: 0 < x < math.inf, rule, "learning_rate")
        check_seed(self.seed, "seed")
        if self.save is not None:
            if Path(self.save).exists():
                raise InputError(f"save must be new, got {self.save}; delete it or choose another")
            check_writable(Path(self.save).parent, "save")

    @property
    def key(self) -> tuple:
        """What identifies the run: runs whose keys are equal are the same run."""
        return run_key(vars(self))


@dataclass(frozen=True, kw_only=True)
class GridSettings(CommonSettings):
    """Fine-tune models x tasks x learning rates x seeds, except for finished runs."""

    models: list[str]
    """Folders or hub ids, like `model` of a single run."""
    tasks: list[str]
    """Tasks by name, or YAML files of your own tasks."""
    seeds: list[int] = field(default_factory=lambda: [0])
    """Seeds of fine-tuning, one run each."""
    learning_rates: list[float] = field(default_factory=lambda: [2e-5])
    """Peak learning rates, each with every seed."""
    controls: bool = False
    """Also make the controls without pretraining: each model from random initialisation, and
    simple features of the words (`finetune.simple_features`)."""
    workers: int = 1
    """Runs at the same time, spread over the GPUs; more workers than GPUs share them."""

    def __post_init__(self) -> None:
        super().__post_init__()
        normalize_paths(self, "models", "tasks")
        check_fields(self, bool, "must not be empty", "models", "tasks", "seeds")
        rates, rule = "learning_rates", "must be positive and finite"
        check_fields(self, lambda x: x and all(0 < y < math.inf for y in x), rule, rates)
        check_fields(self, lambda x: x >= 1, "must be at least 1", "workers")
