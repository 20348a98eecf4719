"""The model of a run: configuration, initial weights, and the loss of the labelled tokens.

An encoder predicts masked tokens, a decoder (`is_decoder` in its configuration) every next token.
The vocabulary layer is most of a small model's arithmetic: without the 85 % of tokens that have
no label, the head is 6 times faster, and a whole step 3 times (4 x 256 tokens, V = 30,522).
Initial weights are random, from a checkpoint, or from a BERT.
"""

import dataclasses
import difflib
from collections.abc import Collection, Iterator
from contextlib import contextmanager
from typing import Any

import torch
from accelerate import Accelerator
from torch import Tensor, nn
from transformers import (
    CONFIG_MAPPING,
    AutoConfig,
    AutoModelForCausalLM,
    AutoModelForMaskedLM,
    AutoTokenizer,
    PreTrainedConfig,
    PreTrainedModel,
    PreTrainedTokenizerBase,
)

from roformer.configuration_roformer import RoFormerConfig
from roformer.kernels.attention import AUTO, UNPADDED, has_varlen_kernel
from roformer.kernels.cross_entropy import cross_entropy
from roformer.modeling_roformer import RoFormerPreTrainedModel
from train.data.masking import IGNORE_INDEX
from train.data.vocabulary import count_ids
from train.loop.launch import compute_dtype
from train.settings import InputError, ModelSettings


class LanguageModel(nn.Module):
    """A model with a language-model head, as one module from batch to loss.

    Args:
        model: A model whose head is at `cls`, as in transformers' BERT and RoFormer.

    Raises:
        InputError: The model has no such head, or does not know its attention implementation.
    """

    def __init__(self, model: PreTrainedModel) -> None:
        super().__init__()
        kind = repr(model.config.model_type)
        if not hasattr(model, "cls"):
            raise InputError(
                "model.type must keep its language-model head under `cls`, as roformer and bert "
                f"do, got {kind}; use one of those"
            )
        self.model = model
        self.cross_entropy = CrossEntropy()
        if self.packed and not isinstance(model, RoFormerPreTrainedModel):
            raise InputError(
                "model.attention must be an implementation that model.type knows, "
                f"got {UNPADDED!r} for {kind}; use sdpa or train a roformer"
            )
        head = getattr(model.cls, "predictions", None)
        if head is not None and getattr(head, "bias", None) is not None:
            # without tied weights this bias is unused, also in transformers' models
            head.bias.requires_grad_(head.bias is head.decoder.bias)
        # modules that FSDP shards: layers, but not embeddings, whose weights the output layer uses
        names = model._no_split_modules or ()
        self._no_split_modules = [name for name in names if not name.endswith("Embeddings")]

    @property
    def description(self) -> str:
        """Type, size and number of parameters of the model, as one line."""
        config, parameters = self.model.config, sum(p.numel() for p in self.model.parameters())
        size = f"{config.num_hidden_layers} layers x {config.hidden_size}"
        return f"{config.model_type}, {size}, {parameters:,} parameters"

    @property
    def packed(self) -> bool:
        """Whether batches have to be packed rows: with the implementation `unpadded`.

        Position encodings that add a bias to the attention scores still need padded rows.
        """
        biased = getattr(self.model.config, "has_position_bias", False)
        return self.model.config._attn_implementation == UNPADDED and not biased

    @property
    def causal(self) -> bool:
        """Whether the model predicts every next token instead of masked ones."""
        return bool(getattr(self.model.config, "is_decoder", False))

    def choose_attention(self, accelerator: Accelerator) -> None:
        """Change the attention implementation from "auto" to "unpadded" where a GPU is faster so.

        "auto" computes padding on a GPU: to find it, the host would synchronise with the device in
        each call. A packed batch brings its lengths. The GPU needs a kernel for documents of
        different lengths; the model may have no bias on the scores and no linear attention.
        """
        config = self.model.config
        if not isinstance(self.model, RoFormerPreTrainedModel):
            return
        needs_padded_rows = config.has_position_bias or config.linear_attention is not None
        dtype, head_dim = compute_dtype(accelerator), config.attention_head_size
        has_kernel = has_varlen_kernel(accelerator.device, dtype, head_dim)
        if config._attn_implementation == AUTO and has_kernel and not needs_padded_rows:
            self.model.set_attn_implementation(UNPADDED)

    def tie_weights(self) -> None:
        """Tie the output layer to the embeddings; called by Accelerate after sharding."""
        self.model.tie_weights()

    def forward(
        self, input_ids: Tensor, label_indices: Tensor, labels: Tensor, **model_inputs: Any
    ) -> tuple[Tensor, Tensor | None]:
        """Compute the summed cross-entropy and, in evaluation, the number of correct predictions.

        The same as `RoFormerForMaskedLM` with `sparse_prediction`, for BERT and decoders too, but
        with indices in place of a mask, which needs no synchronisation of a GPU, and as a sum: the
        mean is over the labelled tokens of all micro-batches and processes of a step.

        Args:
            input_ids: [B, L], or packed [1, T].
            label_indices: [n] positions in the flattened `input_ids` whose hidden states predict.
            labels: [n] token ids to predict; -100 is ignored.
            **model_inputs: `attention_mask` [B, L], or for a packed row `position_ids` [1, T],
                `cu_seq_lens_q` [B + 1] and `max_length_q`; as from `batching.make_batch`.

        Returns:
            Loss in nats, float32 scalar, and a count, scalar, or None in training.
        """
        if self.causal:
            model_inputs["use_cache"] = False
        if isinstance(self.model, RoFormerPreTrainedModel):
            model_inputs["unpad"] = True  # padding has no labels
        model_inputs["return_dict"] = True
        hidden = self.model.base_model(input_ids=input_ids, **model_inputs).last_hidden_state
        logits = self.model.cls(hidden.flatten(0, 1).index_select(0, label_indices))  # [n, V]
        return self.cross_entropy(logits, labels)


class CrossEntropy(nn.Module):
    """Summed cross-entropy in float32; a module, because modules are what Accelerate compiles."""

    def forward(self, logits: Tensor, labels: Tensor) -> tuple[Tensor, Tensor | None]:
        """Compute the loss of logits [n, V] and labels [n], and in evaluation the count."""
        correct = None
        if not self.training:
            # on a CPU twice as fast as argmax
            correct = (logits.max(dim=-1).indices == labels).sum()
        return cross_entropy(logits, labels, IGNORE_INDEX), correct


def build_language_model(
    settings: ModelSettings, config: PreTrainedConfig, seed: int
) -> LanguageModel:
    """Build the model of a configuration with its loss, in float32."""
    model = build_model(settings, config, seed)
    if settings.gradient_checkpointing:
        # renamed in transformers after 5.17
        enable = getattr(model, "activation_checkpointing_enable", None)
        (enable or model.gradient_checkpointing_enable)()
    return LanguageModel(model)


def check_model(settings: ModelSettings, length: int) -> None:
    """Check type, configuration, attention kernel and head by building the model without memory."""
    config = build_config(settings, length)
    with torch.device("meta"):
        LanguageModel(build_model(dataclasses.replace(settings, init=None), config, seed=0))


def build_config(
    settings: ModelSettings,
    length: int,
    tokenizer: PreTrainedTokenizerBase | None = None,
    key: str = "corpus.length",
) -> PreTrainedConfig:
    """Build the configuration of a model, checked against length and tokenizer.

    The tokenizer sets the vocabulary size of a model with random weights; without one everything
    else is checked.

    Raises:
        InputError: The type, a field or a value is invalid, the vocabulary does not fit, or the
            length, which the message calls `key`, exceeds a table of position embeddings.
    """
    if settings.type not in CONFIG_MAPPING:
        raise InputError(
            f"model.type must be a transformers model type, got {settings.type}; "
            "use roformer or bert"
        )
    names = _field_names(settings.type)
    if unknown := settings.config.keys() - names:
        similar = difflib.get_close_matches(min(unknown), names, n=1)
        remedy = f"did you mean {similar[0]}?" if similar else "check the spelling"
        raise InputError(
            f"model.config must be a field of the {settings.type} configuration, "
            f"got {min(unknown)!r}; {remedy}"
        )
    with input_errors("model.config"):
        config = _config_of_settings(settings, tokenizer)
    if tokenizer is not None:
        _check_vocabulary(settings, config, tokenizer)
    check_length(config, length, key)
    return config


def _field_names(model_type: str) -> set[str]:
    return {field.name for field in dataclasses.fields(CONFIG_MAPPING[model_type])}


def check_length(config: PreTrainedConfig, length: int, key: str) -> None:
    """Check that the table of position embeddings, if a model has one, is as long as a sequence."""
    limit = getattr(config, "max_position_embeddings", None)
    if limit is not None and getattr(config, "has_position_limit", True) and length > limit:
        raise InputError(
            f"{key} must be at most the {limit} positions of the {config.model_type} table, "
            f"got {length}; shorten it or use a RoFormer with rope, which has no limit"
        )


def extend_max_positions(config: PreTrainedConfig, length: int) -> None:
    """Raise `max_position_embeddings` of a model without a position table to the longest sequence.

    transformers' RoFormer and tokenizers treat it as a limit. Rope types that scale longer
    sequences relative to it keep the configured value.
    """
    rope = getattr(config, "rope_parameters", None) or {}
    if not getattr(config, "has_position_limit", True) and rope.get("rope_type") == "default":
        config.max_position_embeddings = max(config.max_position_embeddings, length)


def has_plain_rope(config: PreTrainedConfig) -> bool:
    """Whether a model is a RoFormer with softmax attention and unscaled rotary embeddings."""
    return (
        isinstance(config, RoFormerConfig)
        and (config.position_encoding, config.linear_attention) == ("rope", None)
        and (config.rope_parameters or {}).get("rope_type") == "default"
    )


@contextmanager
def input_errors(key: str) -> Iterator[None]:
    """Turn errors of transformers about user input into an `InputError` for a key."""
    try:
        yield
    except InputError:
        raise
    except Exception as error:  # transformers raises many types
        line = " ".join(str(error).split())[:300] or type(error).__name__
        remedy = "change it"
        if "Repo id must" in line:
            line, remedy = "no such folder, and no id of the hub", "check the path"
        elif "`model_type`" in line:
            line = "no config.json with a model_type"
            remedy = "the model of a run is in its folder model; to an older file add the type"
        elif "couldn't connect" in line:
            line, remedy = "no connection to the hub, and no copy here", "name a local folder"
        raise InputError(f"{key} must be usable by transformers, got: {line}; {remedy}") from error


def _config_of_settings(
    settings: ModelSettings, tokenizer: PreTrainedTokenizerBase | None
) -> PreTrainedConfig:
    """Make the configuration of `model.type` and `model.config`, or of `model.init`.

    Of the fields of a checkpoint only those may change that leave its weights valid. A BERT's
    become those of a RoFormer.
    """
    if settings.init is None:
        special = {}
        if tokenizer is not None:
            special = {"vocab_size": count_ids(tokenizer), "pad_token_id": tokenizer.pad_token_id}
        return AutoConfig.for_model(settings.type, **(special | settings.config))
    saved = load_config(settings.init, "model.init")
    convertible = (saved.model_type, settings.type) == ("bert", "roformer")
    if saved.model_type != settings.type and not convertible:
        raise InputError(
            "model.init must be of model.type, or bert for roformer, "
            f"got {saved.model_type} for {settings.type}; set model.type"
        )
    for name, value in settings.config.items():
        # weights of another position encoding are initialised
        before = getattr(saved, name, value)
        free = name.endswith("dropout_prob") or name in ("rope_parameters", "position_encoding")
        if not free and before != value:
            raise InputError(
                f"model.config.{name} must stay {before} of model.init, got {value}; leave it out"
            )
        setattr(saved, name, value)  # the setter of a RoFormer completes rope_parameters
    # a new object, field by field: the saved class may be BERT's
    names = _field_names(settings.type) & saved.to_dict().keys()
    names -= {"transformers_version", "dtype"}
    kept = {name: getattr(saved, name) for name in names}
    return AutoConfig.for_model(settings.type, **kept)


def load_config(folder: str, key: str) -> PreTrainedConfig:
    """Load the configuration of a model from a folder or the hub; errors name `key`."""
    with input_errors(f"{key} {folder}"):
        return AutoConfig.from_pretrained(folder)


def _check_vocabulary(
    settings: ModelSettings, config: PreTrainedConfig, tokenizer: PreTrainedTokenizerBase
) -> None:
    """Check that the model's weights were trained with the vocabulary of the tokenizer."""
    fits = config.vocab_size >= count_ids(tokenizer)
    if fits and settings.init is not None:
        pieces = tokenizer.get_vocab()
        try:
            own = AutoTokenizer.from_pretrained(settings.init).get_vocab()
        except (OSError, ValueError):
            own = {}
        if len(own) < len(pieces) // 2:  # it has no tokenizer: compare sizes, up to padding
            fits = config.vocab_size - len(pieces) < 128
        else:
            fits = own == pieces
    if not fits:
        name = tokenizer.name_or_path or "the tokenizer"
        raise InputError(
            f"corpus.tokenizer must fit the model's vocabulary of {config.vocab_size}, "
            f"got ids up to {count_ids(tokenizer) - 1} in {name}; use the model's own tokenizer"
        )


def build_model(
    settings: ModelSettings, config: PreTrainedConfig, seed: int, require_all_weights: bool = False
) -> PreTrainedModel:
    """Build the model in float32 and training mode.

    A head under `cls` that a checkpoint lacks is random, unless `require_all_weights`, and so are
    the weights of another position encoding than the checkpoint's.

    Raises:
        InputError: transformers cannot build the model, or the checkpoint lacks other weights.
    """
    torch.manual_seed(seed)
    options = {"attn_implementation": settings.attention, "dtype": torch.float32}
    auto_class = auto_model_class(config)
    with input_errors("model"):
        if settings.init is None:
            return auto_class.from_config(config, **options)
        saved = load_config(settings.init, "model.init")
        if saved.model_type == config.model_type:
            model, report = auto_class.from_pretrained(
                settings.init, config=config, output_loading_info=True, **options
            )
            _check_weights(settings.init, saved, report["missing_keys"], require_all_weights)
            return model.train()  # from_pretrained returns it in evaluation mode
        model = auto_class.from_config(config, **options)
        bert, report = AutoModelForMaskedLM.from_pretrained(
            settings.init, output_loading_info=True, dtype=torch.float32
        )
        _check_weights(settings.init, saved, report["missing_keys"], require_all_weights)
        load_bert_weights(model, bert)
    return model


def _check_weights(
    folder: str, saved: PreTrainedConfig, missing: Collection[str], require_all_weights: bool
) -> None:
    """Check that a checkpoint has all weights of its configuration, or all but the head's."""
    with torch.device("meta"):
        own = auto_model_class(saved).from_config(saved).state_dict()
    lost = sorted(own.keys() & missing)
    if not require_all_weights:
        lost = [name for name in lost if not name.startswith("cls.")]
    if lost:
        raise InputError(
            "model must hold all weights of its configuration, "
            f"got {folder} without {lost[:1]}; pretrain it first"
        )


def auto_model_class(config: PreTrainedConfig) -> Any:
    """Return the Auto class: of causal models for a decoder, of masked ones for an encoder."""
    return AutoModelForCausalLM if getattr(config, "is_decoder", False) else AutoModelForMaskedLM


def load_bert_weights(model: PreTrainedModel, bert: PreTrainedModel) -> None:
    """Copy a BERT's weights into a RoFormer of the same sizes.

    Its position embeddings are copied only for `position_encoding="learned"`.
    """
    learned = getattr(model.config, "position_encoding", "rope") == "learned"
    weights = {
        name.replace("bert.", "roformer.", 1) if name.startswith("bert.") else name: value
        for name, value in bert.state_dict().items()
        if (learned or "position_embeddings" not in name) and "pooler" not in name
    }
    missing = model.load_state_dict(weights, strict=False).missing_keys
    if missing:
        raise InputError(
            f"model.config must need no weights that a BERT lacks, got {missing[:1]}; "
            "train it from random weights"
        )
