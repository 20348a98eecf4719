"""Loss of a language model on held-out text, at any length.

    python -m train.loop.evaluate --model runs/NAME/model --corpus.validation TEXT --length 512

15 % of the tokens are masked, with a fixed seed and whatever the training masks, so that losses of
different runs are comparable. A decoder predicts every next token.
"""

import json
import sys
from collections.abc import Callable
from dataclasses import dataclass, field
from typing import Any

import numpy as np
import torch
from accelerate import Accelerator
from accelerate.utils import send_to_device
from numpy.typing import NDArray
from torch import nn
from transformers import PreTrainedTokenizerBase

from train.command_line import run_command
from train.data import vocabulary
from train.data.batching import BatchFormat, SequenceIndex, make_batch
from train.data.corpus import describe_stores, tokenize_corpus
from train.data.vocabulary import Vocab
from train.loop.language_model import LanguageModel, build_config, build_model, load_config
from train.loop.launch import start_accelerator
from train.settings import InputError, ModelSettings, TextSettings, check_fields

MASK_RATE = 0.15
MASK_SEED = 0


@dataclass(frozen=True)
class EvaluateSettings:
    """Measure the language-model loss of a saved model."""

    model: str
    """Folder or hub id of the model and its tokenizer."""
    corpus: TextSettings = field(default_factory=TextSettings)
    length: int = 128
    """Longest sequence in tokens."""
    sequences: int | None = None
    """Number of sequences to read, from the first; null means all."""
    batch: int = 32
    """Sequences per forward pass of each process."""
    attention: str | None = None
    """Attention implementation by transformers' name; null is the model's own default."""

    def __post_init__(self) -> None:
        check_fields(self, lambda x: x >= 8, "must be at least 8", "length")
        check_fields(self, lambda x: x >= 1, "must be at least 1", "batch", "sequences")


@torch.no_grad()
def evaluate(
    model: nn.Module,
    sequences: SequenceIndex,
    vocab: Vocab,
    accelerator: Accelerator,
    batch_size: int,
    sequence_ids: NDArray[np.int64],
    heartbeat: Callable[[], None] = lambda: None,
) -> dict[str, float]:
    """Compute loss and accuracy per labelled token, exact for any number of processes.

    The model is a `LanguageModel`, prepared by Accelerate. `sequence_ids` are those to read;
    `heartbeat` is called before each batch.

    Returns:
        `validation_loss` in nats, `validation_accuracy` in [0, 1], `validation_tokens` labelled.
    """
    by_length = sequence_ids[np.argsort(sequences.locate(sequence_ids)[1], kind="stable")]
    batches = [by_length[i : i + batch_size] for i in range(0, len(by_length), batch_size)]
    sums = torch.zeros(3, dtype=torch.float64, device=accelerator.device)
    language_model = accelerator.unwrap_model(model, keep_torch_compile=False)
    batch_format = BatchFormat(
        vocab, MASK_RATE, MASK_SEED, causal=language_model.causal, packed=language_model.packed
    )
    was_training = model.training
    model.eval()
    for start in range(0, len(batches), accelerator.num_processes):
        heartbeat()
        number = start + accelerator.process_index
        # with sharded weights all processes must call the model; extra batches are not counted
        rows = batches[min(number, len(batches) - 1)]
        tensors = make_batch(sequences, rows, np.zeros_like(rows), batch_format)
        loss, correct = model(**send_to_device(tensors, accelerator.device))
        if number < len(batches):
            labelled = torch.full_like(sums[0], len(tensors["labels"]))
            sums += torch.stack((loss.double(), correct.double(), labelled))
    model.train(was_training)
    loss, correct, labelled = accelerator.reduce(sums).tolist()
    if labelled == 0:
        raise InputError(
            "corpus.validation must hold a token to predict, got 0; "
            "give more text, or a tokenizer that knows it"
        )
    return {
        "validation_loss": loss / labelled,
        "validation_accuracy": correct / labelled,
        "validation_tokens": int(labelled),
    }


def load_language_model(
    folder: str,
    tokenizer: PreTrainedTokenizerBase,
    length: int,
    attention: str | None,
    changes: dict[str, Any] | None = None,
) -> LanguageModel:
    """Load a saved model with its loss, in float32; `changes` replace fields of its configuration.

    Raises:
        InputError: There is no model, it has no head, or its position table is too short.
    """
    kind = load_config(folder, key="model").model_type
    wanted = ModelSettings(type=kind, init=folder, attention=attention, config=changes or {})
    config = build_config(wanted, length, tokenizer, key="length")
    return LanguageModel(build_model(wanted, config, seed=0, require_all_weights=True))


def main(settings: EvaluateSettings) -> dict[str, float]:
    """Evaluate a saved model and print its scores as one line of JSON."""
    accelerator = start_accelerator()
    tokenizer = vocabulary.load_tokenizer(settings.model, key="model")
    language_model = load_language_model(
        settings.model, tokenizer, settings.length, settings.attention
    )
    with accelerator.local_main_process_first():
        store = tokenize_corpus(settings.corpus, "validation", tokenizer)
    accelerator.print(*describe_stores([], store), sep="\n", file=sys.stderr)
    language_model = accelerator.prepare_model(language_model, evaluation_mode=True)
    sequences, vocab = SequenceIndex(store, settings.length), Vocab.from_tokenizer(tokenizer)
    sequence_ids = np.arange(len(sequences))[: settings.sequences]
    scores = evaluate(language_model, sequences, vocab, accelerator, settings.batch, sequence_ids)
    if accelerator.is_main_process:
        print(json.dumps({"model": settings.model, "length": settings.length} | scores))
    return scores


if __name__ == "__main__":
    run_command(main, EvaluateSettings)
