"""Loss of any saved language model on held-out text, at any length.

    python -m train.loop.evaluate --model runs/NAME/model --corpus.validation TEXT --length 512

Masks are fixed: 15 % of the tokens, the same for every model and every evaluation, whatever a run
masks in training, so that losses compare. A decoder predicts every next token.
"""

import dataclasses
import json
from collections.abc import Callable
from dataclasses import dataclass, field
from typing import Any

import numpy as np
import torch
import transformers
from accelerate import Accelerator
from accelerate.utils import send_to_device
from numpy.typing import NDArray
from torch import nn
from transformers import PreTrainedTokenizerBase

import roformer
from train.data import vocabulary
from train.data.batching import SequenceIndex, make_batch
from train.data.corpus import tokenize_corpus
from train.data.masking import Vocab
from train.loop.launch import run_command, start_accelerator
from train.loop.model_init import build_config, build_model, load_config
from train.loop.objective import LanguageModel
from train.settings import HeldOutSettings, ModelSettings, require

MASK_RATE = 0.15
MASK_SEED = 0


@dataclass(frozen=True)
class EvaluateSettings:
    """Measure the masked-LM loss of a saved model."""

    model: str
    """Folder or hub id of the model and its tokenizer."""
    corpus: HeldOutSettings = field(default_factory=HeldOutSettings)
    length: int = 128
    """Longest sequence in tokens."""
    sequences: int | None = None
    """Most sequences to read, the first; null means all."""
    batch: int = 32
    """Sequences a forward pass, in each process."""
    attention: str = "sdpa"
    """Attention kernel by transformers' name."""

    def __post_init__(self) -> None:
        require(self.length >= 8, "length", "must be at least 8", self.length, "128 is usual")
        require(self.batch >= 1, "batch", "must be at least 1", self.batch, "32 is usual")
        some = self.sequences is None or self.sequences >= 1
        require(some, "sequences", "must be at least 1", self.sequences, "leave it out for all")


@torch.no_grad()
def evaluate(
    model: nn.Module,
    sequences: SequenceIndex,
    vocab: Vocab,
    accelerator: Accelerator,
    batch: int = 32,
    chosen: NDArray[np.int64] | None = None,
    heartbeat: Callable[[], None] = lambda: None,
) -> dict[str, float]:
    """Loss and accuracy per predicted token, exact over processes.

    Args:
        model: A `LanguageModel`, prepared by Accelerate.
        sequences: Held-out text.
        vocab: The tokenizer's ids.
        accelerator: Shares the batches out and adds the sums up.
        batch: Sequences a forward pass.
        chosen: Numbers of the sequences to read; None means all.
        heartbeat: Called before each batch.

    Returns:
        validation_loss in nats, validation_accuracy in [0, 1], validation_tokens predicted.
    """
    index = np.arange(len(sequences)) if chosen is None else chosen
    by_length = index[np.argsort(sequences.spans(index)[1], kind="stable")]
    batches = [by_length[i : i + batch] for i in range(0, len(index), batch)]
    sums = torch.zeros(3, dtype=torch.float64, device=accelerator.device)
    objective = accelerator.unwrap_model(model)
    rate = None if objective.causal else MASK_RATE
    tokens = dataclasses.replace(vocab, is_continuation=None)
    was_training = model.training
    model.eval()
    for turn in range(0, len(batches), accelerator.num_processes):
        heartbeat()
        place = turn + accelerator.process_index
        # where weights are sharded every process must take part; what is left over does not count
        rows = batches[min(place, len(batches) - 1)]
        first = np.zeros_like(rows)
        tensors = make_batch(sequences, rows, first, tokens, rate, MASK_SEED, objective.packed)
        loss, right = model(**send_to_device(tensors, accelerator.device))
        found = (loss.double(), right.double(), right.new_tensor(len(tensors["labels"])).double())
        sums += torch.stack(found) * (place < len(batches))
    model.train(was_training)
    loss, right, predicted = accelerator.reduce(sums).tolist()
    rule, remedy = "must hold a token to predict", "give more text, or a tokenizer that knows it"
    require(predicted > 0, "corpus.validation", rule, 0, remedy)
    return {
        "validation_loss": loss / predicted,
        "validation_accuracy": right / predicted,
        "validation_tokens": int(predicted),
    }


def first_indices(sequences: SequenceIndex, limit: int | None) -> NDArray[np.int64]:
    """Numbers of the first sequences, at most `limit`."""
    return np.arange(len(sequences) if limit is None else min(limit, len(sequences)))


def load_language_model(
    folder: str,
    tokenizer: PreTrainedTokenizerBase,
    length: int,
    attention: str,
    changes: dict[str, Any] | None = None,
) -> LanguageModel:
    """A saved model with its loss, in float32.

    Args:
        folder: Of the model, or a hub id.
        tokenizer: Its tokenizer.
        length: Longest sequence it is to read.
        attention: Kernel by transformers' name.
        changes: Fields of its configuration to replace.

    Raises:
        InputError: There is no model, it lacks a head, or its positions end before the length.
    """
    kind = load_config(folder, key="model").model_type
    wanted = ModelSettings(type=kind, init=folder, attention=attention, config=changes or {})
    config = build_config(wanted, length, tokenizer, key="length")
    return LanguageModel(build_model(wanted, config, seed=0, whole=True))


def main(settings: EvaluateSettings) -> dict[str, float]:
    """Load, measure, print one line of JSON."""
    roformer.use_for_auto_classes()
    transformers.utils.logging.disable_progress_bar()
    accelerator = start_accelerator()
    tokenizer = vocabulary.load_tokenizer(settings.model, key="model")
    objective = load_language_model(settings.model, tokenizer, settings.length, settings.attention)
    with accelerator.local_main_process_first():
        store = tokenize_corpus(settings.corpus, "validation", tokenizer)
    objective = accelerator.prepare_model(objective, evaluation_mode=True)
    sequences, vocab = SequenceIndex(store, settings.length), Vocab.from_tokenizer(tokenizer)
    chosen = first_indices(sequences, settings.sequences)
    scores = evaluate(objective, sequences, vocab, accelerator, settings.batch, chosen)
    if accelerator.is_main_process:
        print(json.dumps({"model": settings.model, "length": settings.length} | scores))
    return scores


if __name__ == "__main__":
    run_command(main, EvaluateSettings)
