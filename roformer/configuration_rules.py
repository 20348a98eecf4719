"""Rules that the fields of a `RoFormerConfig` must obey.

Each function below yields rules as (is_valid, key, rule) in the order in which they are checked.
The first invalid one is reported as "key must rule, got value".
"""

import math
from collections.abc import Callable, Iterator
from typing import Any

from transformers import PreTrainedConfig
from transformers.activations import ACT2CLS
from transformers.utils import logging

logger = logging.get_logger(__name__)

POSITION_BIASES = ("transformer_xl", "t5", "alibi")
"""Position encodings that are added to the attention scores."""

POSITION_ENCODINGS = ("rope", "learned", "sinusoidal", *POSITION_BIASES, "none")
FEATURE_MAPS = ("elu", "relu", "favor")

DEFAULT_ROPE = {"rope_type": "default", "rope_theta": 10000.0, "partial_rotary_factor": 1.0}

# keys of `rope_parameters` beside those of DEFAULT_ROPE and original_max_position_embeddings, which
# every type may have: (required, optional)
_ROPE_KEYS: dict[str, tuple[tuple[str, ...], tuple[str, ...]]] = {
    "default": ((), ()),
    "linear": (("factor",), ()),
    "dynamic": (("factor",), ()),
    "yarn": (
        ("factor", "original_max_position_embeddings"),
        ("attention_factor", "beta_fast", "beta_slow", "mscale", "mscale_all_dim", "truncate"),
    ),
    "longrope": (
        ("short_factor", "long_factor", "original_max_position_embeddings"),
        ("factor", "attention_factor"),
    ),
    "llama3": (
        ("factor", "low_freq_factor", "high_freq_factor", "original_max_position_embeddings"),
        (),
    ),
}
# types that multiply cos and sin by a factor: it scales scores, but would also scale values
_SCALED_ROPE_TYPES = ("yarn", "longrope")

_ROPE_MINIMA = {"factor": 1, "mscale": 0, "mscale_all_dim": 0}
_ROPE_BOUNDS = {  # which a value must exceed
    "rope_theta": 1, "original_max_position_embeddings": 1, "attention_factor": 0, "beta_fast": 0,
    "beta_slow": 0, "low_freq_factor": 0, "high_freq_factor": 0,
}  # fmt: skip
_INTEGERS = {  # and their minimum
    "vocab_size": 1, "hidden_size": 1, "embedding_size": 1, "num_hidden_layers": 1,
    "num_attention_heads": 1, "intermediate_size": 1, "max_position_embeddings": 1,
    "type_vocab_size": 0, "random_features": 4, "redraw_features": 0,
}  # fmt: skip
_BOOLEANS = (
    "rotary_value", "use_cache", "is_decoder", "add_cross_attention", "tie_word_embeddings",
    "rope_interleave", "use_bias", "sparse_prediction",
)  # fmt: skip
_CHOICES: dict[str, tuple[str | None, ...]] = {
    "norm_type": ("layer_norm", "rms_norm"),
    "position_encoding": POSITION_ENCODINGS,
    "linear_attention": (None, *FEATURE_MAPS),
}

Rule = tuple[bool, str, str]


def check_rules(
    config: PreTrainedConfig, *rule_sets: Callable[[PreTrainedConfig], Iterator[Rule]]
) -> None:
    """Check a `RoFormerConfig` by the functions below, in the given order.

    Raises:
        ValueError: A field breaks its rule. The message gives key, rule and value.
    """
    for rule_set in rule_sets:
        for is_valid, key, rule in rule_set(config):
            if not is_valid:
                section, _, name = key.rpartition(".")
                value = config.rope_parameters.get(name) if section else getattr(config, name, None)
                raise ValueError(f"{key} must {rule}, got {value!r}")


def field_rules(config: PreTrainedConfig) -> Iterator[Rule]:
    """Yield the rules on single fields."""
    for name, minimum in _INTEGERS.items():
        value = getattr(config, name)
        is_valid = isinstance(value, int) and not isinstance(value, bool) and value >= minimum
        yield is_valid, name, f"be an integer >= {minimum}"
    yield config.random_features % 2 == 0, "random_features", "be even"
    for name in ("initializer_range", "layer_norm_eps"):
        value = getattr(config, name)
        yield _is_number(value) and value >= 0, name, "be a number >= 0"
    for name in ("hidden_dropout_prob", "attention_probs_dropout_prob"):
        value = getattr(config, name)
        yield _is_number(value) and 0 <= value < 1, name, "be a number >= 0 and < 1"
    for name in _BOOLEANS:
        yield isinstance(getattr(config, name), bool), name, "be True or False"
    for name, choices in _CHOICES.items():
        rule = f"be one of {', '.join(map(str, choices))}"
        yield getattr(config, name) in choices, name, rule
    rule = "be an activation of transformers.activations"
    yield config.hidden_act in ACT2CLS, "hidden_act", rule


def summary_rules(config: PreTrainedConfig) -> Iterator[Rule]:
    """Yield the rules on the fields that only `RoFormerForMultipleChoice` reads."""
    yield config.summary_type in ("first", "last"), "summary_type", "be one of first, last"
    for name in ("summary_use_proj", "summary_activation"):
        rule = "be absent, because this model has no such layer"
        yield not getattr(config, name, None), name, rule


def architecture_rules(config: PreTrainedConfig) -> Iterator[Rule]:
    """Yield the rules on combinations of fields."""
    multiple = 2 * config.num_attention_heads
    rule = f"be a multiple of 2 * num_attention_heads = {multiple}, for an even head size"
    yield config.hidden_size % multiple == 0, "hidden_size", rule
    rule = f"be None or an integer from 0 to vocab_size - 1 = {config.vocab_size - 1}"
    is_valid = config.pad_token_id is None or config.pad_token_id in range(config.vocab_size)
    yield is_valid, "pad_token_id", rule
    head_dim = config.attention_head_size
    rule = f"be absent, or hidden_size / num_attention_heads = {head_dim}"
    yield getattr(config, "head_dim", head_dim) == head_dim, "head_dim", rule
    is_valid = config.is_decoder or not config.add_cross_attention
    yield is_valid, "add_cross_attention", "be False in an encoder; set is_decoder=True"

    encoding = f"with position_encoding {config.position_encoding}"
    if config.position_encoding != "rope":
        yield not config.rotary_value, "rotary_value", f"be False {encoding}"
        yield config.rope_interleave, "rope_interleave", f"be True {encoding}"
    if config.position_encoding == "sinusoidal":
        yield config.embedding_size % 2 == 0, "embedding_size", f"be even {encoding}"

    if config.linear_attention is not None:
        attention = f"with linear_attention {config.linear_attention}"
        rule = f"not be a position bias {attention}, which computes no scores"
        yield not config.has_position_bias, "position_encoding", rule
        for name in ("rotary_value", "add_cross_attention"):
            yield not getattr(config, name), name, f"be False {attention}"
        rope_type = config.rope_parameters["rope_type"]
        rule = f"have no factor on cos and sin {attention}"
        yield rope_type not in _SCALED_ROPE_TYPES, "rope_parameters.rope_type", rule
    if config.linear_attention == "favor":
        # other types are defined for the coordinates of a head, and random features have no order
        yield rope_type == "default", "rope_parameters.rope_type", f"be default {attention}"
        yield config.rope_interleave, "rope_interleave", f"be True {attention}"


def rope_rules(config: PreTrainedConfig) -> Iterator[Rule]:
    """Yield the rules on `rope_parameters`, alone and together with other fields."""
    yield from _rope_key_rules(config.rope_parameters)
    yield from _rope_value_rules(config.rope_parameters)
    yield from _rotary_dim_rules(config)
    rope_type = config.rope_parameters["rope_type"]
    is_default = DEFAULT_ROPE | config.rope_parameters == DEFAULT_ROPE
    rule = f"be absent with position_encoding {config.position_encoding}"
    yield config.position_encoding == "rope" or is_default, "rope_parameters", rule
    is_scaled = rope_type in _SCALED_ROPE_TYPES
    rule = f"be False with rope_type {rope_type}, which would scale the values"
    yield not (config.rotary_value and is_scaled), "rotary_value", rule
    uses_cache = config.is_decoder and config.use_cache
    rule = f"be False in a decoder with rope_type {rope_type}, whose frequencies change with length"
    yield not (uses_cache and config.has_dynamic_rope), "use_cache", rule


def _rope_key_rules(rope: dict[str, Any]) -> Iterator[Rule]:
    rope_type = rope["rope_type"]
    is_valid = isinstance(rope_type, str) and rope_type in _ROPE_KEYS
    yield is_valid, "rope_parameters.rope_type", f"be one of {', '.join(_ROPE_KEYS)}"
    required, optional = _ROPE_KEYS[rope_type]
    for name in ("rope_theta", *required):
        rule = f"be given with rope_type {rope_type}"
        yield rope.get(name) is not None, f"rope_parameters.{name}", rule
    allowed = {*DEFAULT_ROPE, "original_max_position_embeddings", *required, *optional}
    for name in sorted(set(rope) - allowed):
        rule = f"be absent with rope_type {rope_type} (check the spelling)"
        yield False, f"rope_parameters.{name}", rule


def _rope_value_rules(rope: dict[str, Any]) -> Iterator[Rule]:
    given = {name: value for name, value in rope.items() if value is not None}
    for name in sorted(set(given) & set(_ROPE_MINIMA)):
        is_valid = _is_number(given[name]) and given[name] >= _ROPE_MINIMA[name]
        yield is_valid, f"rope_parameters.{name}", f"be a number >= {_ROPE_MINIMA[name]}"
    for name in sorted(set(given) & set(_ROPE_BOUNDS)):
        is_valid = _is_number(given[name]) and given[name] > _ROPE_BOUNDS[name]
        yield is_valid, f"rope_parameters.{name}", f"be a number > {_ROPE_BOUNDS[name]}"
    is_valid = isinstance(given.get("truncate", True), bool)
    yield is_valid, "rope_parameters.truncate", "be True or False"
    fast, slow = given.get("beta_fast", 32), given.get("beta_slow", 1)  # transformers' defaults
    yield fast > slow, "rope_parameters.beta_fast", f"be above beta_slow = {slow}"
    if rope["rope_type"] == "llama3":
        low, high = rope["low_freq_factor"], rope["high_freq_factor"]
        yield high > low, "rope_parameters.high_freq_factor", f"be above low_freq_factor = {low}"


def _rotary_dim_rules(config: PreTrainedConfig) -> Iterator[Rule]:
    rope, dim = config.rope_parameters, config.rotatable_dim
    share = rope.get("partial_rotary_factor", 1.0)
    minimum = 4 if rope["rope_type"] == "dynamic" else 2  # its exponent is d / (d - 2)
    is_valid = _is_number(share) and 0 < share <= 1
    is_valid = is_valid and int(dim * share) % 2 == 0 and int(dim * share) >= minimum
    rule = f"leave an even number >= {minimum} of the {dim} coordinates of a head"
    yield is_valid, "rope_parameters.partial_rotary_factor", rule
    pairs = config.rotary_dim // 2
    for name in ("short_factor", "long_factor"):
        factors = rope.get(name)
        is_valid = factors is None or (
            isinstance(factors, list | tuple)
            and len(factors) == pairs
            and all(_is_number(factor) and factor > 0 for factor in factors)
        )
        rule = f"be a list of {pairs} positive numbers, one for each pair"
        yield is_valid, f"rope_parameters.{name}", rule


def _is_number(value: object) -> bool:
    return isinstance(value, int | float) and not isinstance(value, bool) and math.isfinite(value)


def warn_if_causal(config: PreTrainedConfig) -> None:
    """Warn of a head that cannot work, or not well, with tokens that see earlier ones only."""
    if config.is_decoder:
        logger.warning(
            "config.is_decoder is True, so every token attends to earlier ones only, and the first "
            "one to itself alone; load the model with is_decoder=False to attend to both sides"
        )
