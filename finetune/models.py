"""The model and the tokenizer of a run, loaded and checked.

A model has its own head, that of `AutoModelForSequenceClassification`, or the shared one
(`finetune.shared_head`), as `pooling` says.
"""

from typing import Any

import torch
import transformers
from torch import nn
from transformers import (
    AutoConfig,
    AutoModel,
    AutoModelForSequenceClassification,
    AutoTokenizer,
    PreTrainedModel,
)

import roformer
from finetune.data import check_tokenizer
from finetune.settings import GlueSettings
from finetune.shared_head import SharedHead, SharedHeadClassifier
from finetune.tasks import Task, load_task
from roformer.kernels.attention import OWN_IMPLEMENTATIONS
from train.data.vocabulary import check_has_vocabulary
from train.loop.language_model import input_errors
from train.settings import InputError


def load_config_and_tokenizer(settings: GlueSettings, task: Task) -> tuple[Any, Any]:
    """Load the configuration with the task's head, and the tokenizer; check that they fit.

    Raises:
        InputError: One of them cannot be read, or the length or the vocabulary does not fit.
    """
    roformer.use_for_auto_classes()
    transformers.utils.logging.disable_progress_bar()
    transformers.utils.logging.set_verbosity_error()
    names = task.labels or ("value",)
    with input_errors(f"model {settings.model}"):
        config = AutoConfig.from_pretrained(
            settings.model,
            id2label=dict(enumerate(names)),
            label2id={name: index for index, name in enumerate(names)},
            problem_type="single_label_classification" if task.labels else "regression",
        )
    path = settings.tokenizer or settings.model
    with input_errors(f"tokenizer {path}"):
        tokenizer = AutoTokenizer.from_pretrained(path)
        check_has_vocabulary(tokenizer)
    check_tokenizer(config, tokenizer, settings.length)
    inputs = tokenizer.model_input_names
    if getattr(config, "type_vocab_size", 0) > 1 and "token_type_ids" not in inputs:
        # transformers' RoFormerTokenizer (Chinese) omits them, though its models have segments
        tokenizer.model_input_names = [*inputs, "token_type_ids"]
    if getattr(config, "type_vocab_size", None) == 0:
        tokenizer.model_input_names = [name for name in inputs if name != "token_type_ids"]
    return config, tokenizer


def load_model(settings: GlueSettings, config: Any) -> nn.Module:
    """Load the model in float32.

    Head layers that the checkpoint lacks, or has in another shape, are drawn from the seed.
    `random_weights` draws all weights. From a model fine-tuned on another task the layers of its
    own head that have the same shape are kept, such as BERT's pooler.

    Raises:
        InputError: The folder lacks weights of the encoder or has those of another architecture,
            or the model has no such head or attention kernel.
    """
    is_ours = isinstance(config, roformer.RoFormerConfig)
    if settings.attention in OWN_IMPLEMENTATIONS and not is_ours:
        raise InputError(  # transformers would compute sdpa
            "attention must be transformers' for a model that is no RoFormer, got "
            f"{settings.attention}; take sdpa or eager, or leave it out"
        )
    torch.manual_seed(settings.seed)
    if settings.pooling == "own":
        return load_weights(AutoModelForSequenceClassification, settings, config)
    if settings.pooling == "first" and getattr(config, "is_decoder", False):
        raise InputError(
            "pooling must not be first for a decoder, whose first token sees itself alone, got "
            "first; set pooling to mean"
        )
    encoder = load_weights(AutoModel, settings, config)
    torch.manual_seed(settings.seed)  # the same head whatever the encoder has drawn
    task = load_task(settings.task)
    texts = len(task.columns) if settings.pair_encoding == "separate" else 1
    head = SharedHead(config.hidden_size, task.num_labels, settings.pooling, texts)
    return SharedHeadClassifier(encoder, head)


def load_weights(auto_class: Any, settings: GlueSettings, config: Any) -> PreTrainedModel:
    """Load the weights of a run into a model of an Auto class, or draw them."""
    options = {"attn_implementation": settings.attention, "dtype": torch.float32}
    with input_errors(f"model {settings.model}"):
        if settings.random_weights:
            return auto_class.from_config(config, **options)
        model, loading = auto_class.from_pretrained(
            settings.model,
            config=config,
            ignore_mismatched_sizes=True,  # replaces the head of another task
            output_loading_info=True,
            **options,
        )
    new = {*loading["missing_keys"], *(name for name, *_ in loading["mismatched_keys"])}
    prefix = "" if model.base_model is model else f"{model.base_model_prefix}."
    # BERT's pooler is part of its head: a masked-LM model has none
    lost = sorted(x for x in new if x.startswith(prefix) and "pooler." not in x)
    if lost:
        raise InputError(
            "model must hold every encoder weight of its config.json in its shape, got "
            f"{settings.model} without {lost[:1]}; save all weights, or train from "
            "--random_weights true"
        )
    return model
