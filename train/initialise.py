"""What a run starts from: fresh weights of a configuration, a checkpoint, or a BERT's weights."""

import dataclasses

import torch
from transformers import (
    CONFIG_MAPPING,
    AutoConfig,
    AutoModelForMaskedLM,
    PreTrainedConfig,
    PreTrainedModel,
    PreTrainedTokenizerBase,
)

from train.settings import InputError, ModelSettings, require


def model_config(
    settings: ModelSettings, length: int, tokenizer: PreTrainedTokenizerBase | None = None
) -> PreTrainedConfig:
    """The configuration of the model to train, checked against length and tokenizer.

    Args:
        settings: The model section.
        length: Longest training sequence.
        tokenizer: Decides the vocabulary size of a fresh model; None checks all that can be checked
            before there is one.

    Raises:
        InputError: The type or a field is unknown, a value is refused, the vocabulary does not fit,
            or the length exceeds a table of positions.
    """
    fresh = settings.init is None
    config = _fresh_config(settings, tokenizer) if fresh else _saved_config(settings)
    if tokenizer is not None:
        rule = f"must fit the model's vocabulary of {config.vocab_size}"
        found = f"{len(tokenizer)} pieces in {tokenizer.name_or_path or 'the tokenizer'}"
        fits = config.vocab_size >= len(tokenizer)
        require(fits, "corpus.tokenizer", rule, found, "use the model's own tokenizer")
    limit = getattr(config, "max_position_embeddings", None)
    if limit is not None and getattr(config, "has_position_limit", True):
        rule = f"must be at most the {limit} positions of the {config.model_type} table"
        remedy = "shorten it or train a roformer, which has no limit"
        require(length <= limit, "corpus.length", rule, length, remedy)
    return config


def _fresh_config(
    settings: ModelSettings, tokenizer: PreTrainedTokenizerBase | None
) -> PreTrainedConfig:
    known = settings.type in CONFIG_MAPPING
    require(
        known,
        "model.type",
        "must be a transformers model type",
        settings.type,
        "use roformer or bert",
    )
    fields = {f.name for f in dataclasses.fields(CONFIG_MAPPING[settings.type])}
    for name in settings.config:
        rule = f"must be a field of the {settings.type} configuration"
        require(name in fields, "model.config", rule, repr(name), "check the spelling")
    special = {}
    if tokenizer is not None:
        special = {"vocab_size": len(tokenizer), "pad_token_id": tokenizer.pad_token_id}
    try:
        return AutoConfig.for_model(settings.type, **(special | settings.config))
    except (ValueError, TypeError) as error:
        raise InputError(f"model.config: {' '.join(str(error).split())}") from error


def _saved_config(settings: ModelSettings) -> PreTrainedConfig:
    try:
        config = AutoConfig.from_pretrained(settings.init)
    except (OSError, ValueError) as error:
        raise InputError(
            f"model.init must be a folder or hub id with a config.json, got {settings.init!r}; "
            "check the path"
        ) from error
    if config.model_type == settings.type:
        return config
    pair = f"{config.model_type} into {settings.type}"
    convertible = (config.model_type, settings.type) == ("bert", "roformer")
    remedy = f"set model.type to {config.model_type}"
    require(convertible, "model.init", "must be of model.type, or bert into roformer", pair, remedy)
    shared = {f.name for f in dataclasses.fields(CONFIG_MAPPING["roformer"])} & set(
        config.to_dict()
    )
    kept = {name: getattr(config, name) for name in shared if name != "transformers_version"}
    return AutoConfig.for_model("roformer", **(kept | settings.config))


def build(settings: ModelSettings, config: PreTrainedConfig, seed: int) -> PreTrainedModel:
    """The model to train, in float32.

    Args:
        settings: The model section.
        config: From `model_config`.
        seed: Decides fresh weights, and those a checkpoint lacks.
    """
    torch.manual_seed(seed)
    options = {"attn_implementation": settings.attention, "dtype": torch.float32}
    if settings.init is None:
        return AutoModelForMaskedLM.from_config(config, **options)
    if AutoConfig.from_pretrained(settings.init).model_type == config.model_type:
        return AutoModelForMaskedLM.from_pretrained(settings.init, config=config, **options)
    model = AutoModelForMaskedLM.from_config(config, **options)
    donor = AutoModelForMaskedLM.from_pretrained(settings.init, dtype=torch.float32)
    adopt_bert(model, donor)
    return model


def adopt_bert(model: PreTrainedModel, bert: PreTrainedModel) -> None:
    """Copy a BERT's weights into a RoFormer of the same sizes.

    The position embeddings are left behind: a RoFormer's positions are rotations, not weights.
    """
    weights = {
        name.replace("bert.", "roformer.", 1) if name.startswith("bert.") else name: value
        for name, value in bert.state_dict().items()
        if "position_embeddings" not in name and "pooler" not in name
    }
    model.load_state_dict(weights)
