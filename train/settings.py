"""Every knob of pretraining, and the one way from YAML and flags to settings.

Defaults stand here and nowhere else. A YAML under configs/ lists what an experiment decides;
several `--config` files are merged, later ones win, flags win over all (`--optim.steps 100`).
"""

import dataclasses
import math
from dataclasses import dataclass, field
from typing import Any

SCHEDULES = ("linear", "cosine", "constant")
"""What the rate does after the warm-up; the first two end at 0."""


class InputError(ValueError):
    """What a user gave cannot be used: said in one line (key, rule, found, remedy), exit code 2."""


def require(holds: bool, key: str, rule: str, found: object, remedy: str) -> None:
    """Refuse a value in one line.

    Raises:
        InputError: `holds` is false.
    """
    if not holds:
        raise InputError(f"{key} {rule}, got {found}; {remedy}")


def first_line(error: Exception) -> str:
    """The first line of what an error says, or its kind where it says nothing."""
    return str(error).splitlines()[0] if str(error) else type(error).__name__


def check_seed(seed: int, key: str) -> None:
    """Refuse a seed that torch would not take.

    Raises:
        InputError: It is negative or has more than 64 bits.
    """
    fits = 0 <= seed < 2**64
    require(fits, key, "must be from 0 to 2^64 - 1", seed, "use 0, 1, 2, ...")


@dataclass(frozen=True)
class ModelSettings:
    """The encoder that is trained."""

    type: str = "roformer"
    """transformers' model type: roformer, bert, or another whose language-model head is BERT's."""
    config: dict[str, Any] = field(default_factory=dict)
    """Fields of that type's configuration class; the vocabulary size comes from the tokenizer."""
    init: str | None = None
    """Folder or hub id to continue from instead of random weights; BERT's fit a RoFormer."""
    attention: str = "sdpa"
    """Attention kernel by transformers' name: eager (fastest on CPU in bf16), sdpa, or this
    project's `unpadded`."""
    gradient_checkpointing: bool = False
    """Compute each layer again in the backward pass: slower, for longer sequences or a larger
    micro-batch in the same memory."""


@dataclass(frozen=True)
class HeldOutSettings:
    """Held-out text, for commands that measure a model on it."""

    validation: str | list[str] = "embedded"
    """Folders, globs or files of held-out parquet, jsonl or txt (the last two also .gz or .zst);
    hub data sets; or `embedded`, the documentation installed on this machine."""
    text_column: str = "text"
    """Column of parquet and jsonl that holds the text."""
    cache: str = "runs/tokens"
    """Folder where tokenised text is kept and found again."""


@dataclass(frozen=True)
class CorpusSettings(HeldOutSettings):
    """The text, and how it becomes sequences."""

    train: str | list[str] = "embedded"
    """Training text, given in the same ways as held-out text."""
    weights: list[float] | None = None
    """How often an epoch takes each name of `train`: 2 twice, 0.5 one half now and the other in the
    next; null takes everything once."""
    tokenizer: str = "runs/vocabulary"
    """Folder, hub id or vocab.txt of the tokenizer; `bytes` is one piece a byte of UTF-8. A bare
    vocab.txt is BERT's, lower-cased unless it has capitals."""
    vocabulary_size: int | None = None
    """Learn a WordPiece vocabulary of this size into `corpus.tokenizer` where there is none yet,
    lower-cased and without accents; null takes what is there."""
    length: int = 128
    """Longest sequence in tokens, [CLS] and [SEP] included; longer documents are cut."""
    mask_rate: float = 0.15
    """Share of tokens to predict: 80 % become [MASK], 10 % a random token, 10 % stay. A decoder
    (model.config.is_decoder) predicts every next token instead."""
    whole_word: bool = False
    """Choose words instead of tokens; what becomes of each of their tokens is decided alone."""

    def __post_init__(self) -> None:
        require(
            self.length >= 8,
            "corpus.length",
            "must be at least 8",
            self.length,
            "128 and 512 are usual",
        )
        require(
            0 < self.mask_rate < 1,
            "corpus.mask_rate",
            "must lie between 0 and 1",
            self.mask_rate,
            "BERT and the paper use 0.15",
        )
        if self.weights is not None:
            names = 1 if isinstance(self.train, str) else len(self.train)
            fits = len(self.weights) == names and all(0 < w < math.inf for w in self.weights)
            rule = f"must be a positive number for each of the {names} names of corpus.train"
            require(fits, "corpus.weights", rule, self.weights, "give 1.0 where nothing changes")


@dataclass(frozen=True)
class OptimSettings:
    """How the weights move."""

    learning_rate: float = 1e-3
    """Peak learning rate, reached after `warmup_steps`."""
    schedule: str = "linear"
    """linear or cosine decay to 0 at the end, or constant, each after the warm-up."""
    warmup_steps: int = 100
    """Optimiser steps over which the rate rises from 0 to its peak."""
    betas: tuple[float, float] = (0.9, 0.98)
    """AdamW's decay of the first and second moment."""
    epsilon: float = 1e-6
    """AdamW's addition to the denominator."""
    weight_decay: float = 0.01
    """Decoupled decay of matrices; biases and LayerNorms are exempt."""
    clip_norm: float = 1.0
    """Largest gradient norm; larger gradients are scaled down to it."""
    batch_size: int = 32
    """Sequences an optimiser step, over all processes and accumulated micro-batches."""
    micro_batch: int = 32
    """Sequences a process takes at once; the rest of its share is accumulated."""
    steps: int | None = None
    """Optimiser steps; give this, `tokens`, `hours` or stages."""
    tokens: int | None = None
    """Training tokens, turned into steps by the corpus's mean sequence."""
    hours: float | None = None
    """Hours of training, over all launches of the run; the schedule follows the clock."""

    def __post_init__(self) -> None:
        for name in ("learning_rate", "epsilon", "clip_norm", "batch_size", "micro_batch"):
            value = getattr(self, name)
            finite = 0 < value < math.inf
            remedy = "leave it out for the default"
            require(finite, f"optim.{name}", "must be positive and finite", value, remedy)
        inside = all(0 <= beta < 1 for beta in self.betas)
        require(
            inside, "optim.betas", "must be at least 0 and below 1", self.betas, "0.9, 0.98 work"
        )
        for name in ("warmup_steps", "weight_decay"):
            value = getattr(self, name)
            require(value >= 0, f"optim.{name}", "must not be negative", value, "0 turns it off")
        named = f"must be one of {', '.join(SCHEDULES)}"
        found = repr(self.schedule)
        require(self.schedule in SCHEDULES, "optim.schedule", named, found, "linear is BERT's")
        for name in ("steps", "tokens", "hours"):
            value = getattr(self, name)
            fits = value is None or value > 0
            require(fits, f"optim.{name}", "must be positive", value, "raise it")


@dataclass(frozen=True)
class RunSettings:
    """Where a run lives and how often it reports."""

    name: str = "demo-roformer"
    """Folder of the run under `folder`; starting the same name again resumes it."""
    folder: str = "runs"
    """Parent of all runs."""
    seed: int = 0
    """Decides initial weights, order, masks and dropout, each as a pure function."""
    log_every: int = 20
    """Optimiser steps between two lines of log.jsonl."""
    validate_every: int = 200
    """Optimiser steps between two evaluations on the held-out text."""
    validation_sequences: int = 2048
    """Most held-out sequences an evaluation reads: the first, whatever they are of."""
    save_every: int = 500
    """Optimiser steps between two checkpoints."""
    keep: int = 2
    """Newest checkpoints kept, beside the best of those saved right after an evaluation (let
    `save_every` be a multiple of `validate_every`); an older one goes only after a newer one is
    complete."""
    workers: int = 0
    """Processes beside each training process that make its batches ahead of time."""
    max_hours: float | None = None
    """Hours after which this launch saves and ends, for machines with a time limit; the same
    command continues the run."""
    peak_tflops: float | None = None
    """What the accelerator can do in 10^12 operations a second, for the log's share of it (mfu);
    null measures a large matrix product."""
    allow_drift: bool = False
    """Go on although settings or data are not those the run began with; settings.yaml then holds
    the new ones, and says what has changed."""
    dry: bool = False
    """Say what the run would take (parameters, steps, time, memory, disk) and start nothing."""
    tracker: str | None = "tensorboard"
    """Accelerate tracker by name beside log.jsonl, or null."""

    def __post_init__(self) -> None:
        names = ("log_every", "validate_every", "validation_sequences", "save_every", "keep")
        for name in names:
            value = getattr(self, name)
            require(
                value >= 1,
                f"run.{name}",
                "must be at least 1",
                value,
                "leave it out for the default",
            )
        require(self.workers >= 0, "run.workers", "must not be negative", self.workers, "use 0")
        for name in ("max_hours", "peak_tflops"):
            value = getattr(self, name)
            fits = value is None or value > 0
            require(fits, f"run.{name}", "must be positive", value, "leave it out")
        usable = bool(self.name) and self.name not in (".", "..") and "/" not in self.name
        require(
            usable,
            "run.name",
            "must be a plain folder name",
            repr(self.name),
            "put the path in run.folder",
        )
        check_seed(self.seed, "run.seed")


@dataclass(frozen=True)
class StageSettings:
    """A part of a run with a length, batch or text of its own."""

    steps: int
    """Optimiser steps of the stage."""
    length: int | None = None
    """As corpus.length, which it replaces; null keeps that."""
    train: str | list[str] | None = None
    """As corpus.train."""
    batch_size: int | None = None
    """As optim.batch_size."""
    micro_batch: int | None = None
    """As optim.micro_batch."""


@dataclass(frozen=True)
class PretrainSettings:
    """Pretrain an encoder with masked language modelling, or a decoder with the next token."""

    optim: OptimSettings = field(default_factory=OptimSettings)
    model: ModelSettings = field(default_factory=ModelSettings)
    corpus: CorpusSettings = field(default_factory=CorpusSettings)
    run: RunSettings = field(default_factory=RunSettings)
    stages: list[StageSettings] = field(default_factory=list)
    """Stages one after the other, in place of optim.steps; the schedule spans them all."""

    def __post_init__(self) -> None:
        optim = self.optim
        budgets: dict[str, object] = {"optim.steps": optim.steps, "optim.tokens": optim.tokens}
        budgets |= {"optim.hours": optim.hours, "stages": self.stages or None}
        given = [name for name, value in budgets.items() if value is not None]
        found, remedy = ", ".join(given) or "none", "set one and null the others"
        require(len(given) == 1, "optim", f"needs one of {', '.join(budgets)}", found, remedy)
        for number in range(len(self.stages)):  # each is checked as a run of its own would be
            stage_settings(self, number)


def stage_settings(settings: PretrainSettings, number: int) -> PretrainSettings:
    """The settings of one stage, as those of a run without stages.

    Raises:
        InputError: The stage breaks a rule of the settings it replaces.
    """
    chosen = settings.stages[number]
    corpus = {"length": chosen.length, "train": chosen.train}
    optim = {"batch_size": chosen.batch_size, "micro_batch": chosen.micro_batch}
    optim["steps"] = chosen.steps
    try:
        return dataclasses.replace(
            settings,
            stages=[],
            corpus=dataclasses.replace(settings.corpus, **_given(corpus)),
            optim=dataclasses.replace(settings.optim, **_given(optim)),
        )
    except InputError as error:
        raise InputError(f"stages[{number}]: {error}") from error


def _given(values: dict[str, Any]) -> dict[str, Any]:
    return {name: value for name, value in values.items() if value is not None}
