"""Every setting of pretraining, with its default, its help text and the rule that it must obey.

The string under a field is its `--help` text. Defaults are given here and nowhere else: a YAML file
under configs/ lists what an experiment decides. `train.command_line` reads YAML files and flags.
"""

import dataclasses
import math
import re
from collections.abc import Callable, Iterator
from contextlib import contextmanager
from dataclasses import dataclass, field
from typing import Any

OPTIMIZERS = ("adamw", "muon")
"""Values of optim.name."""

SCHEDULES = ("linear", "cosine", "constant")
"""Learning rate after the warm-up."""


class InputError(ValueError):
    """Unusable input of a user; commands print it as one line and exit with code 2.

    The message is "KEY RULE, got FOUND; REMEDY": the setting or file that holds a value, a rule
    that begins with "must", the value, and what the user can do. Functions called `check_...` raise
    it if what they check does not hold.
    """


def first_line(error: BaseException) -> str:
    """First line of an error's message, or the name of its type if the message is empty."""
    return (str(error).splitlines() or [type(error).__name__])[0]


def check_seed(seed: int, key: str) -> None:
    """Check that a seed is one that torch accepts."""
    if not 0 <= seed < 2**64:
        raise InputError(f"{key} must be from 0 to 2^64 - 1, got {seed}; use 0, 1, 2, ...")


def check_fields(settings: Any, accept: Callable[[Any], bool], rule: str, *keys: str) -> None:
    """Apply one rule to several fields of a section; None, an option not used, is accepted.

    Keys are as messages have them: "optim.steps", or "steps" of settings without sections.
    """
    for key in keys:
        value = getattr(settings, key.rpartition(".")[2])
        if value is not None and not accept(value):
            raise InputError(f"{key} {rule}, got {value}; see --help")


def check_warmup(warmup_steps: int, total: int) -> None:
    """Check that the warm-up is shorter than the run of `total` steps."""
    if warmup_steps >= total:
        raise InputError(
            f"optim.warmup_steps must be fewer than the {total} steps of the run, "
            f"got {warmup_steps}; shorten it or train longer"
        )


@dataclass(frozen=True)
class ModelSettings:
    """The model that is trained."""

    type: str = "roformer"
    """Model type of transformers: roformer, bert, or another one with BERT's LM head."""
    config: dict[str, Any] = field(default_factory=dict)
    """Fields of the type's configuration class; the tokenizer gives the vocabulary size."""
    init: str | None = None
    """Folder or hub id of weights to start from (BERT's fit a RoFormer); null means random."""
    attention: str | None = None
    """Attention implementation: null is the model's own default, for a RoFormer the fastest for
    each call; or transformers' eager, sdpa or flex_attention, or this project's unpadded."""
    gradient_checkpointing: bool = False
    """Recompute each layer in the backward pass: slower, but longer sequences or larger
    micro-batches fit in the same memory."""


@dataclass(frozen=True)
class TextSettings:
    """Training and held-out text, and how text is read."""

    train: str | list[str] = "embedded"
    """Training text, in the same forms as held-out text; a name given twice is read twice. A
    command that evaluates a model reads it only where `validation` is a share."""
    validation: str | list[str] = "embedded"
    """Held-out text: folders, globs or files of parquet, jsonl or txt (the last two also .gz or
    .zst); hub data sets; `embedded`, the built-in text: documentation of installed packages; or a
    share, such as 2%, of the documents of local training files."""
    text_column: str = "text"
    """Column of parquet and jsonl that holds the text."""
    cache: str = "runs/tokens"
    """Folder of the token cache."""

    def __post_init__(self) -> None:
        share = self.held_out_share
        # a number without % would be read as the name of a hub data set
        is_number = re.fullmatch(r"[\d.]+", str(self.validation)) is not None
        if is_number or (share is not None and not 0 < share < 1):
            raise InputError(
                "corpus.validation must be text, or a share above 0% and below 100%, "
                f"got {self.validation}; 2% is usual"
            )
        if share is not None and self.train == "embedded":
            raise InputError(
                "corpus.train must name the text that corpus.validation is a share of, "
                f"got the default; give the files {self.validation} of which are held out"
            )

    @property
    def held_out_share(self) -> float | None:
        """Share of the training documents that is held out, or None if text is named."""
        match = re.fullmatch(r"(\d+(?:\.\d+)?)\s*%", str(self.validation))
        return float(match[1]) / 100 if match else None


@dataclass(frozen=True)
class CorpusSettings(TextSettings):
    """Text, tokenizer, sequence length and masking."""

    tokenizer: str | None = None
    """Folder, hub id or vocab.txt of the tokenizer, or `bytes` for one token per byte of UTF-8. A
    vocab.txt alone is read as BERT's, lower-cased unless it holds capitals. null names a folder of
    the cache by the training text (of the first stage) and `vocabulary_size`."""
    vocabulary_size: int | None = None
    """Train a WordPiece vocabulary of this size, lower-cased and without accents, into the folder
    of the tokenizer if that does not exist; null uses the tokenizer that is there."""
    length: int = 128
    """Longest sequence in tokens, with [CLS] and [SEP]; longer documents are cut into several."""
    mask_rate: float = 0.15
    """Share of tokens to predict in training (transformers' `mlm_probability`): 80 % become [MASK],
    10 % a random token, 10 % stay; the held-out loss is always with 15 % single tokens. Unused by a
    decoder (model.config.is_decoder), which predicts every next token."""
    whole_word: bool = False
    """Choose whole words instead of single tokens; the 80/10/10 action is still drawn per token.
    Unused by a decoder."""

    def __post_init__(self) -> None:
        super().__post_init__()
        check_fields(self, lambda x: x >= 8, "must be at least 8", "corpus.length")
        check_fields(self, lambda x: 0 < x < 1, "must lie between 0 and 1", "corpus.mask_rate")


@dataclass(frozen=True)
class OptimSettings:
    """Optimizer, learning rate schedule, batch size and length of training."""

    name: str = "adamw"
    """adamw, or muon: torch's Muon for the matrices between embeddings and head, AdamW for all
    other parameters."""
    muon_scale: float = 0.2
    """Root mean square of Muon's updates, relative to the learning rate; 0.2 is `match_rms_adamw`
    of `torch.optim.Muon`."""
    learning_rate: float = 1e-3
    """Peak learning rate, reached after `warmup_steps`."""
    schedule: str = "linear"
    """linear or cosine decay, which reach 0 one step after the last, or constant; each after the
    warm-up."""
    warmup_steps: int = 100
    """Optimizer steps over which the learning rate rises from 0 to its peak."""
    betas: tuple[float, float] = (0.9, 0.98)
    """AdamW's decay rates of the first and second moment."""
    epsilon: float = 1e-6
    """AdamW's term added to the denominator."""
    weight_decay: float = 0.01
    """Decoupled weight decay of matrices, Transformer-XL's u and v among them; biases and
    LayerNorms have none."""
    clip_norm: float = 1.0
    """Gradients with a larger norm are scaled down to this norm."""
    batch_size: int = 32
    """Sequences per optimizer step, over all processes and accumulated micro-batches."""
    micro_batch: int = 32
    """Sequences per forward pass of a process; gradients of several are accumulated."""
    steps: int | None = None
    """Optimizer steps; give this, `tokens` or stages."""
    tokens: int | None = None
    """Training tokens, converted to steps by the mean sequence length of the corpus."""

    def __post_init__(self) -> None:
        rates = ("optim.learning_rate", "optim.muon_scale", "optim.epsilon", "optim.clip_norm")
        counts = ("optim.batch_size", "optim.micro_batch", "optim.steps", "optim.tokens")
        rule = "must be positive and finite"
        check_fields(self, lambda x: 0 < x < math.inf, rule, *rates, *counts)
        rule = "must not be negative, and finite"
        keys = ("optim.warmup_steps", "optim.weight_decay")
        check_fields(self, lambda x: 0 <= x < math.inf, rule, *keys)
        rule = "must be at least 0 and below 1"
        check_fields(self, lambda x: 0 <= min(x) <= max(x) < 1, rule, "optim.betas")
        rule = f"must be one of {', '.join(OPTIMIZERS)}"
        check_fields(self, lambda x: x in OPTIMIZERS, rule, "optim.name")
        rule = f"must be one of {', '.join(SCHEDULES)}"
        check_fields(self, lambda x: x in SCHEDULES, rule, "optim.schedule")


@dataclass(frozen=True)
class RunSettings:
    """Folder, seed, logging, evaluation and checkpoints of a run."""

    name: str = "demo-roformer"
    """Folder of the run under `run.folder`; starting the same name again resumes the run."""
    folder: str = "runs"
    """Folder that holds the runs."""
    seed: int = 0
    """Seed of initial weights, order of the text, masks and dropout."""
    log_every: int = 20
    """Optimizer steps between two records in log.jsonl."""
    validate_every: int = 200
    """Optimizer steps between two evaluations on the held-out text."""
    validation_sequences: int = 2048
    """Number of held-out sequences, from the first, that an evaluation reads at most."""
    save_every: int = 500
    """Optimizer steps between two checkpoints."""
    keep: int = 2
    """Number of newest checkpoints to keep; one is deleted only after a newer one is complete."""
    max_hours: float | None = None
    """Hours after which this launch saves a checkpoint and ends, for machines with a time limit;
    the same command continues the run."""
    peak_tflops: float | None = None
    """Peak of the accelerator in 10^12 operations per second, for MFU in the log;
    null measures it with a large matrix product."""
    allow_drift: bool = False
    """Go on although settings or data changed since the run started;
    settings.yaml then holds the new ones and a note on what changed."""
    dry: bool = False
    """Print what the run needs (parameters, steps, time, memory, disk) without starting it."""
    tracker: str | None = "tensorboard"
    """Accelerate tracker besides log.jsonl, or null."""

    def __post_init__(self) -> None:
        names = ("log_every", "validate_every", "validation_sequences", "save_every", "keep")
        counts = [f"run.{name}" for name in names]
        check_fields(self, lambda x: x >= 1, "must be at least 1", *counts)
        check_fields(self, lambda x: x > 0, "must be positive", "run.max_hours", "run.peak_tflops")
        if self.name in ("", ".", "..") or "/" in self.name:
            raise InputError(
                f"run.name must be a plain folder name, got {self.name!r}; "
                "put the path in run.folder"
            )
        check_seed(self.seed, "run.seed")


@dataclass(frozen=True)
class StageSettings:
    """A stage of a run with its own length, text, masks or batch size; null keeps the run's."""

    steps: int
    """Optimizer steps of the stage."""
    length: int | None = None
    """Replaces corpus.length."""
    train: str | list[str] | None = None
    """Replaces corpus.train."""
    mask_rate: float | None = None
    """Replaces corpus.mask_rate."""
    batch_size: int | None = None
    """Replaces optim.batch_size."""
    micro_batch: int | None = None
    """Replaces optim.micro_batch."""


@dataclass(frozen=True)
class PretrainSettings:
    """Pretrain an encoder or decoder; without any --config, configs/pretrain/demo.yaml is read."""

    optim: OptimSettings = field(default_factory=OptimSettings)
    model: ModelSettings = field(default_factory=ModelSettings)
    corpus: CorpusSettings = field(default_factory=CorpusSettings)
    run: RunSettings = field(default_factory=RunSettings)
    stages: list[StageSettings] = field(default_factory=list)
    """Consecutive stages, instead of optim.steps; the schedule spans all of them."""

    def __post_init__(self) -> None:
        optim = self.optim
        budgets = {"optim.steps": optim.steps, "optim.tokens": optim.tokens, "stages": self.stages}
        given = [name for name, value in budgets.items() if value]
        if len(given) != 1:
            raise InputError(
                f"optim needs one of {', '.join(budgets)}, got {', '.join(given) or 'none'}; "
                "set one, and the others to null or stages to []"
            )
        # checks each stage as a run without stages, so the recursion ends there
        stages = split_stages(self)
        if self.corpus.held_out_share and any(x.corpus.train != self.corpus.train for x in stages):
            raise InputError(
                "corpus.validation must name text where stages have their own, "
                f"got {self.corpus.validation}; divide the text into files"
            )
        total = sum(stage.steps for stage in self.stages) or optim.steps
        if total is not None:  # that of a budget of tokens is known after tokenizing
            check_warmup(optim.warmup_steps, total)


CHANGEABLE = {
    "corpus": {"cache", "train", "validation", "tokenizer"},
    "model": {"gradient_checkpointing"},
    "optim": {"micro_batch"},
    "run": {
        "folder", "name", "log_every", "validate_every", "validation_sequences", "save_every",
        "keep", "tracker", "max_hours", "peak_tflops", "allow_drift", "dry",
    },
}  # fmt: skip
"""Keys that may change when a run is resumed: trained weights do not depend on them, except on the
contents of text and tokenizer, which are compared instead, and with dropout on `micro_batch`."""


@contextmanager
def name_stage(index: int | None) -> Iterator[None]:
    """Begin the message of an `InputError` with the stage that it is about, if there are stages."""
    try:
        yield
    except InputError as error:
        if index is None:
            raise
        raise InputError(f"stages[{index}]: {error}") from error


def split_stages(settings: PretrainSettings) -> list[PretrainSettings]:
    """Return the settings of each stage, as those of a run without stages.

    Raises:
        InputError: A setting of a stage breaks the rule of the one that it replaces.
    """

    def replace(section: Any, stage: StageSettings, *names: str) -> Any:
        values = {name: getattr(stage, name) for name in names}
        return dataclasses.replace(section, **{k: v for k, v in values.items() if v is not None})

    stages = []
    # the warm-up is the run's, and may be longer than a stage
    run_optim = dataclasses.replace(settings.optim, warmup_steps=0)
    for index, stage in enumerate(settings.stages):
        with name_stage(index):
            corpus = replace(settings.corpus, stage, "length", "train", "mask_rate")
            optim = replace(run_optim, stage, "batch_size", "micro_batch", "steps")
        stages.append(dataclasses.replace(settings, stages=[], corpus=corpus, optim=optim))
    return stages or [settings]
