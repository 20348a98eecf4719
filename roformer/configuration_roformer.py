"""Configuration of RoFormer models, with the field names of transformers' own `config.json`.

A configuration that transformers' RoFormer can express is saved as `model_type: roformer`, so that
either library loads what the other saved. All others are saved as `roformer_plus`, a type unknown
to transformers: its Auto classes refuse them instead of ignoring fields and computing something
else (its RoFormer classes warn only). The type follows from the fields at the time of saving.

The rules that fields must obey are below the class, as functions that yield (is_valid, key, rule).
"""

import math
from collections.abc import Callable, Iterator
from typing import Any

from transformers import PreTrainedConfig
from transformers.activations import ACT2CLS

PLUS_MODEL_TYPE = "roformer_plus"

POSITION_BIASES = ("transformer_xl", "t5", "alibi")
"""Position encodings that are added to the attention scores."""

POSITION_ENCODINGS = ("rope", "learned", "sinusoidal", *POSITION_BIASES, "none")
FEATURE_MAPS = ("elu", "relu", "favor")

DEFAULT_ROPE = {"rope_type": "default", "rope_theta": 10000.0, "partial_rotary_factor": 1.0}

# a model with another value than the default in one of these fields is a `roformer_plus`
_PLUS_FIELDS = (
    "rope_interleave", "use_bias", "norm_type", "position_encoding", "linear_attention",
    "random_features",
)  # fmt: skip


class RoFormerConfig(PreTrainedConfig):
    """Configuration of every RoFormer model.

    The defaults are those of transformers' `RoFormerConfig`. A value of `rope_parameters`,
    `type_vocab_size` or a field of `_PLUS_FIELDS` that transformers' RoFormer cannot express makes
    the model a `roformer_plus` when it is saved; `sparse_prediction` and `summary_type` do not. A
    checkpoint that both classes load is
    [junnyu/roformer_chinese_base](https://huggingface.co/junnyu/roformer_chinese_base).

    Attributes:
        vocab_size: Number of token ids, V.
        embedding_size: Size of the word embeddings; None means `hidden_size`. If the two differ,
            the linear layer `embeddings_project` maps one to the other.
        hidden_size: Size of the encoder's hidden states, E.
        num_hidden_layers: Number of layers.
        num_attention_heads: Number of attention heads of each layer, H. The size of a head,
            D = E / H, must be even, because coordinates are rotated in pairs.
        intermediate_size: Size of the hidden layer of the feed-forward block.
        hidden_act: Name of the activation function in `transformers.activations`.
        hidden_dropout_prob: Dropout after embeddings and projections, and in classification heads.
        attention_probs_dropout_prob: Dropout of the attention probabilities.
        max_position_embeddings: Sequence length the model is intended for. RoPE has no table, so
            longer inputs are accepted. transformers' RoFormer builds a table of this many rows,
            and the rope type "dynamic" changes the frequencies of rows longer than this.
        type_vocab_size: Number of token types (segments). 0 leaves the token-type embeddings out,
            which makes the model a `roformer_plus`.
        initializer_range: Standard deviation of the initial weights.
        layer_norm_eps: Epsilon of the normalisation layers.
        pad_token_id: Id of the padding token, or None.
        bos_token_id: Id that begins a generated text, or None.
        eos_token_id: Id, or ids, that end a generated text, or None.
        rotary_value: Rotate the values as well as queries and keys.
        summary_type: Token that `RoFormerForMultipleChoice` reads, "first" or "last" (of those that
            are not padding). `RoFormerForSequenceClassification` always reads the first.
        use_cache: Whether a decoder returns a cache of keys and values. Linear attention and the
            rope type "dynamic" have none.
        is_decoder: Causal attention.
        add_cross_attention: Add cross-attention to the layers of a decoder.
        tie_word_embeddings: Share the word embeddings with the language-model decoder.
        sparse_prediction: In training, `RoFormerForMaskedLM` computes logits at labelled tokens
            only, as ModernBERT does; loss and gradients are the same. transformers ignores it.
        rope_parameters: Rotation settings as in transformers: `rope_type` (default, linear,
            dynamic, yarn or llama3), `rope_theta`, `partial_rotary_factor` (the share of
            each head that is rotated) and the keys of the type. None means the paper's: default,
            10,000, all of it. When they are replaced, by assignment or by an argument of
            `from_pretrained`, theta and share keep their values unless given. Keys are
            checked when they are replaced, values when a model is built.
        rope_interleave: Pair adjacent coordinates, as the paper does; False pairs i with
            i + rotary_dim/2, as Llama does. `convert_rope_layout` converts weights.
        use_bias: Biases in linear layers and normalisations of the encoder and language-model head.
        norm_type: "layer_norm", or "rms_norm" without a gain; both as in RoFormerV2.
        position_encoding: "rope", or one of those it is compared with: "learned", "sinusoidal",
            "transformer_xl", "t5", "alibi", "none"; see `position_encodings`. "learned" has a table
            of `max_position_embeddings` rows and accepts no further positions.
        linear_attention: None for softmax attention, or the feature map of attention in O(L):
            "elu", "relu" or "favor" (Performer's random features); see `linear_attention`.
        random_features: Number of features of "favor", even.

    Raises:
        ValueError: A field breaks its rule. The message gives key, rule and value.
    """

    model_type = "roformer"

    vocab_size: int = 50000
    embedding_size: int | None = None
    hidden_size: int = 768
    num_hidden_layers: int = 12
    num_attention_heads: int = 12
    intermediate_size: int = 3072
    hidden_act: str = "gelu"
    hidden_dropout_prob: float | int = 0.1
    attention_probs_dropout_prob: float | int = 0.1
    max_position_embeddings: int = 1536
    type_vocab_size: int = 2
    initializer_range: float = 0.02
    layer_norm_eps: float = 1e-12
    pad_token_id: int | None = 0
    bos_token_id: int | None = None
    eos_token_id: int | list[int] | None = None
    rotary_value: bool = False
    summary_type: str = "last"
    use_cache: bool = True
    is_decoder: bool = False
    add_cross_attention: bool = False
    tie_word_embeddings: bool = True
    sparse_prediction: bool = False
    rope_parameters: dict[str, Any] | None = None
    rope_interleave: bool = True
    use_bias: bool = True
    norm_type: str = "layer_norm"
    position_encoding: str = "rope"
    linear_attention: str | None = None
    random_features: int = 256

    def __post_init__(self, **kwargs: Any) -> None:
        kwargs.pop("model_type", None)  # fixed by the class; the saved one follows from the fields
        if self.embedding_size is None:
            self.embedding_size = self.hidden_size
        # a copy, because transformers adds fields to it
        self.rope_parameters = dict(self.rope_parameters or {})
        super().__post_init__(**kwargs)
        self._rope.pop("type", None)  # of `rope_scaling`; transformers has copied it
        check_rules(self, _field_rules)
        # transformers' own code constructs configurations of sizes that fit no model, as in its
        # tests: those are refused when a model is built
        if self.hidden_size % (2 * self.num_attention_heads) == 0:
            self.check()

    def __setattr__(self, name: str, value: Any) -> None:
        before = self.__dict__.get("rope_parameters") or {}
        # an edit after construction, when transformers has completed them
        if before.keys() >= {"rope_type", "rope_theta"}:
            if name in ("rope_theta", "partial_rotary_factor"):
                name, value = "rope_parameters", before | {name: value}
            if name == "rope_parameters":
                # replaced, also by an argument of `from_pretrained`: the weights were trained with
                # the angles from before
                kept = {x: before[x] for x in DEFAULT_ROPE if x in before and x != "rope_type"}
                value = {"rope_type": "default"} | kept | _rename_type(value or {})
                super().__setattr__(name, value)
                try:  # now, because a model reads it in its next call
                    check_rules(self, _rope_key_rules)
                except ValueError:
                    super().__setattr__(name, before)
                    raise
                return
        super().__setattr__(name, value)

    @property
    def embedding_dim(self) -> int:
        """`embedding_size`, in a form that tells the type checker that it is never None."""
        return self.embedding_size or self.hidden_size

    @property
    def attention_head_size(self) -> int:
        """Size of an attention head, D."""
        return self.hidden_size // self.num_attention_heads

    @property
    def feature_dim(self) -> int:
        """Number of coordinates of a head, or of random features, rotated or not."""
        is_favor = self.linear_attention == "favor"
        return self.random_features if is_favor else self.attention_head_size

    @property
    def rotary_dim(self) -> int:
        """Number of coordinates of a head, or of random features, that are rotated."""
        return int(self.feature_dim * self._rope.get("partial_rotary_factor", 1.0))

    @property
    def _rope(self) -> dict[str, Any]:  # never None, as above
        return self.rope_parameters or {}

    @property
    def has_position_limit(self) -> bool:
        """Whether `max_position_embeddings` limits the length of inputs."""
        return self.position_encoding == "learned"

    @property
    def has_position_bias(self) -> bool:
        """Whether positions are added to the attention scores."""
        return self.position_encoding in POSITION_BIASES

    @property
    def has_dynamic_rope(self) -> bool:
        """Whether the frequencies of the rotation depend on the length of the row."""
        return self._rope["rope_type"] == "dynamic"

    @property
    def has_cache(self) -> bool:
        """Whether a decoder can keep keys and values for later calls.

        Linear attention has none. With dynamic frequencies, cached keys were rotated by those of a
        shorter row.
        """
        return self.linear_attention is None and not self.has_dynamic_rope

    def _unsupported_fields(self) -> set[str]:
        """Names of the fields with a value that transformers' RoFormer does not support."""
        rope = DEFAULT_ROPE | self._rope
        rope.pop("original_max_position_embeddings", None)  # no part of the default rotation
        changed = {n for n in _PLUS_FIELDS if getattr(self, n) != getattr(RoFormerConfig, n)}
        changed |= {"rope_parameters"} if rope != DEFAULT_ROPE else set()
        return changed | ({"type_vocab_size"} if self.type_vocab_size == 0 else set())

    def to_dict(self) -> dict[str, Any]:
        """Return all fields as JSON types, with the model type that follows from them."""
        fields = super().to_dict()
        unsupported = self._unsupported_fields()
        for name in {"rope_parameters", *_PLUS_FIELDS} - unsupported:
            fields.pop(name, None)
        if not self.sparse_prediction:
            fields.pop("sparse_prediction", None)
        return fields | {"model_type": PLUS_MODEL_TYPE if unsupported else self.model_type}

    @classmethod
    def get_config_dict(cls, *args: Any, **kwargs: Any) -> tuple[dict[str, Any], dict[str, Any]]:
        """Read a saved `config.json`; see `PreTrainedConfig.get_config_dict`."""
        fields, unused_kwargs = super().get_config_dict(*args, **kwargs)
        if fields.get("model_type") == PLUS_MODEL_TYPE:  # transformers warns of another name
            fields["model_type"] = cls.model_type
        return fields, unused_kwargs

    def check(self) -> None:
        """Check all rules; called when a model is built, and at construction if the head size fits.

        It raises what the constructor raises.
        """
        check_rules(self, _field_rules, _architecture_rules, _rope_rules)


class RoFormerPlusConfig(RoFormerConfig):
    """Registers `roformer_plus` with AutoConfig; its constructor returns a `RoFormerConfig`.

    There is only one configuration class, so that an edit which changes the model type does not
    have to change the class, also after deepcopy and pickle.
    """

    model_type = PLUS_MODEL_TYPE

    def __new__(cls, **kwargs: Any) -> RoFormerConfig:
        """Return a `RoFormerConfig` with these fields."""
        return RoFormerConfig(**kwargs)


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
    "llama3": (
        ("factor", "low_freq_factor", "high_freq_factor", "original_max_position_embeddings"),
        (),
    ),
}
# multiplies cos and sin by a factor that is meant for the scores of softmax: refused where values
# are rotated, and with linear attention
_SCALED_ROPE_TYPES = ("yarn",)

_INTEGERS = {  # and their minimum
    "vocab_size": 1, "hidden_size": 1, "embedding_size": 1, "num_hidden_layers": 1,
    "num_attention_heads": 1, "intermediate_size": 1, "max_position_embeddings": 1,
    "type_vocab_size": 0, "random_features": 4,
}  # fmt: skip
_CHOICES: dict[str, tuple[str | None, ...]] = {
    "norm_type": ("layer_norm", "rms_norm"),
    "position_encoding": POSITION_ENCODINGS,
    "linear_attention": (None, *FEATURE_MAPS),
}

_Rule = tuple[bool, str, str]


def check_rules(
    config: RoFormerConfig, *rule_sets: Callable[[RoFormerConfig], Iterator[_Rule]]
) -> None:
    """Check a configuration by the functions below, in the given order.

    Raises:
        ValueError: A field breaks its rule. The message gives key, rule and value.
    """
    for rule_set in rule_sets:
        for is_valid, key, rule in rule_set(config):
            if not is_valid:
                section, _, name = key.rpartition(".")
                value = config._rope.get(name) if section else getattr(config, name)
                raise ValueError(f"{key} must {rule}, got {value!r}")


def _field_rules(config: RoFormerConfig) -> Iterator[_Rule]:
    """Rules on single fields; torch checks dropouts."""
    for name, minimum in _INTEGERS.items():
        value = getattr(config, name)
        yield isinstance(value, int) and value >= minimum, name, f"be an integer >= {minimum}"
    pad, size = config.pad_token_id, config.vocab_size
    is_valid = pad is None or (isinstance(pad, int) and -size <= pad < size)  # as in nn.Embedding
    yield is_valid, "pad_token_id", f"be None or an integer below vocab_size = {size}"
    yield config.random_features % 2 == 0, "random_features", "be even"
    for name, choices in _CHOICES.items():
        rule = f"be one of {', '.join(map(str, choices))}"
        yield getattr(config, name) in choices, name, rule
    rule = "be an activation of transformers.activations"
    yield config.hidden_act in ACT2CLS, "hidden_act", rule
    is_valid = _is_number(config.layer_norm_eps) and config.layer_norm_eps > 0
    yield is_valid, "layer_norm_eps", "be a number > 0"
    for name, kind in RoFormerConfig.__annotations__.items():
        if kind is bool:
            yield isinstance(getattr(config, name), bool), name, "be True or False"


def _architecture_rules(config: RoFormerConfig) -> Iterator[_Rule]:
    """Rules on combinations of fields."""
    multiple = 2 * config.num_attention_heads
    rule = f"be a multiple of 2 * num_attention_heads = {multiple}, for an even head size"
    yield config.hidden_size % multiple == 0, "hidden_size", rule
    is_valid = config.is_decoder or not config.add_cross_attention
    yield is_valid, "add_cross_attention", "be False in an encoder; set is_decoder=True"
    is_valid = config.position_encoding == "rope" or not config.rotary_value
    yield is_valid, "rotary_value", f"be False with position_encoding {config.position_encoding}"
    is_valid = config.position_encoding != "sinusoidal" or config.embedding_dim % 2 == 0
    yield is_valid, "embedding_size", "be even with position_encoding sinusoidal"

    if config.linear_attention is not None:
        attention = f"with linear_attention {config.linear_attention}"
        rule = f"not be a position bias {attention}, which computes no scores"
        yield not config.has_position_bias, "position_encoding", rule
        for name in ("rotary_value", "add_cross_attention"):
            yield not getattr(config, name), name, f"be False {attention}"
        rope_type = config._rope["rope_type"]
        rule = f"have no factor on cos and sin {attention}"
        yield rope_type not in _SCALED_ROPE_TYPES, "rope_parameters.rope_type", rule
        if config.linear_attention == "favor":
            # other types are defined for the coordinates of a head; random features have no order
            yield rope_type == "default", "rope_parameters.rope_type", f"be default {attention}"


def _rope_key_rules(config: RoFormerConfig) -> Iterator[_Rule]:
    """Rules on the keys of `rope_parameters`, whatever the other fields are."""
    rope, rope_type = config._rope, config._rope["rope_type"]
    yield rope_type in _ROPE_KEYS, "rope_parameters.rope_type", f"be one of {', '.join(_ROPE_KEYS)}"
    required, optional = _ROPE_KEYS[rope_type]  # a rule that is false has raised above
    for name in ("rope_theta", *required):
        rule = f"be given with rope_type {rope_type}"
        yield rope.get(name) is not None, f"rope_parameters.{name}", rule
    allowed = {*DEFAULT_ROPE, "original_max_position_embeddings", *required, *optional}
    for name in sorted(set(rope) - allowed):
        rule = f"be absent with rope_type {rope_type} (check the spelling)"
        yield False, f"rope_parameters.{name}", rule


def _rope_rules(config: RoFormerConfig) -> Iterator[_Rule]:
    """Rules on `rope_parameters`, alone and together with other fields."""
    yield from _rope_key_rules(config)
    yield from _rope_value_rules(config)
    rope_type = config._rope["rope_type"]
    is_default = DEFAULT_ROPE | config._rope == DEFAULT_ROPE
    rule = f"be absent with position_encoding {config.position_encoding}"
    yield config.position_encoding == "rope" or is_default, "rope_parameters", rule
    is_scaled = rope_type in _SCALED_ROPE_TYPES
    rule = f"be False with rope_type {rope_type}, which would scale the values"
    yield not (config.rotary_value and is_scaled), "rotary_value", rule


def _rope_value_rules(config: RoFormerConfig) -> Iterator[_Rule]:
    """Rules on the values without which a rotation is undefined; transformers warns of others."""
    rope, dim = config._rope, config.feature_dim
    rope = {name: value for name, value in rope.items() if value is not None}
    for name in sorted(rope.keys() - {"rope_type", "truncate"}):
        yield _is_number(rope[name]), f"rope_parameters.{name}", "be a number"
    yield rope["rope_theta"] > 1, "rope_parameters.rope_theta", "be > 1"
    yield rope.get("factor", 1) >= 1, "rope_parameters.factor", "be >= 1"
    name = "original_max_position_embeddings"
    yield rope.get(name, 1) > 0, f"rope_parameters.{name}", "be > 0"
    share = rope.get("partial_rotary_factor", 1.0)
    minimum = 4 if rope["rope_type"] == "dynamic" else 2  # its exponent is d / (d - 2)
    is_valid = _is_number(share) and 0 < share <= 1
    is_valid = is_valid and int(dim * share) % 2 == 0 and int(dim * share) >= minimum
    rule = f"leave an even number >= {minimum} of the {dim} coordinates that can be rotated"
    yield is_valid, "rope_parameters.partial_rotary_factor", rule


def _rename_type(rope_parameters: dict[str, Any]) -> dict[str, Any]:
    """Return a copy with `rope_type` in place of its older name, `type`."""
    rope = dict(rope_parameters)
    if "type" in rope:
        rope.setdefault("rope_type", rope.pop("type"))
    return rope


def _is_number(value: object) -> bool:
    return isinstance(value, int | float) and not isinstance(value, bool) and math.isfinite(value)
