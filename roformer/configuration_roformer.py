"""Configuration of RoFormer models, with the field names of transformers' own `config.json`.

A configuration that transformers' RoFormer can express is saved as `model_type: roformer`, so that
either library loads what the other saved. All others are saved as `roformer_plus`, a type unknown
to transformers: its Auto classes refuse them instead of ignoring fields and computing something
else (its RoFormer classes warn only). The type follows from the fields at the time of saving.
"""

from typing import Any

from transformers import PreTrainedConfig

from .configuration_rules import (
    DEFAULT_ROPE,
    POSITION_BIASES,
    architecture_rules,
    check_rules,
    field_rules,
    rope_rules,
)

PLUS_MODEL_TYPE = "roformer_plus"

# a model with other than the defaults of these fields is a `roformer_plus`
_PLUS_FIELDS = (
    "rope_interleave", "use_bias", "norm_type", "position_encoding", "linear_attention",
    "random_features", "redraw_features",
)  # fmt: skip


class RoFormerConfig(PreTrainedConfig):
    """Configuration of every RoFormer model.

    The defaults are those of transformers' `RoFormerConfig`, except `summary_type`: its default
    here is "first", whereas a `config.json` without it means "last", as in transformers. The fields
    after `sparse_prediction` are unknown to transformers' RoFormer: with any of them
    changed a model is saved as `roformer_plus`. A checkpoint with the fields of both is
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
        use_cache: Whether a decoder returns a cache of keys and values.
        is_decoder: Causal attention.
        add_cross_attention: Add cross-attention to the layers of a decoder.
        tie_word_embeddings: Share the word embeddings with the language-model decoder.
        sparse_prediction: In training, `RoFormerForMaskedLM` computes logits at labelled tokens
            only, as ModernBERT does; loss and gradients are the same. transformers ignores it.
        rope_parameters: Rotation settings as in transformers: `rope_type` (default, linear,
            dynamic, yarn, llama3 or longrope), `rope_theta`, `partial_rotary_factor` (the share of
            each head that is rotated) and the keys of the type. None means the paper's: default,
            10,000, all of it. When they are replaced, by assignment or by an argument of
            `from_pretrained`, theta and share keep their values unless given.
        rope_interleave: Pair adjacent coordinates, as the paper does; False pairs i with i + R/2
            of R rotated coordinates, as Llama does. `convert_rope_layout` converts weights.
        use_bias: Biases in linear layers and normalisations of the encoder and language-model head.
        norm_type: "layer_norm", or "rms_norm" without a gain; both as in RoFormerV2.
        position_encoding: "rope", or one of those it is compared with: "learned", "sinusoidal",
            "transformer_xl", "t5", "alibi", "none"; see `position_encodings`. "learned" has a table
            of `max_position_embeddings` rows and accepts no further positions.
        linear_attention: None for softmax attention, or the feature map of attention in O(L):
            "elu", "relu" or "favor" (Performer's random features); see `linear_attention`.
        random_features: Number of features of "favor", even.
        redraw_features: Forward passes in training between two draws of the random features;
            0 draws them once.

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
    summary_type: str = "first"
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
    redraw_features: int = 1000

    def __post_init__(self, **kwargs: Any) -> None:
        kwargs.pop("model_type", None)  # fixed by the class; the saved one follows from the fields
        if kwargs.get("head_dim", 0) is None:  # transformers' types of rotation want a number
            kwargs.pop("head_dim")
        if self.embedding_size is None:
            self.embedding_size = self.hidden_size
        self.rope_parameters = dict(self.rope_parameters or {})  # completed by transformers: a copy
        super().__post_init__(**kwargs)
        self._rope.pop("type", None)  # older name of rope_type; transformers has copied it
        check_rules(self, field_rules)
        # like transformers', a configuration takes any hidden size; building a model checks all
        if self.hidden_size % (2 * self.num_attention_heads) == 0:
            self.check()

    def __setattr__(self, name: str, value: Any) -> None:
        if self._is_initialized and name in ("rope_theta", "partial_rotary_factor"):
            name, value = "rope_parameters", self._rope | {name: value}
        if name != "rope_parameters" or not self._is_initialized:
            return super().__setattr__(name, value)
        # replaced after construction, also by an argument of `from_pretrained`: keep the angles
        # that the weights were trained with, complete the rest and check it
        previous, new = self._rope, dict(value or {})
        if "type" in new:
            new.setdefault("rope_type", new.pop("type"))
        angles = ("rope_theta", "partial_rotary_factor")
        kept = {} if value is None else {key: previous[key] for key in angles if key in previous}
        default = {"rope_type": "default", "rope_theta": 10000.0}
        super().__setattr__(name, default | kept | new)
        try:
            self.check_rope()
        except ValueError:
            super().__setattr__(name, previous)
            raise

    @property
    def embedding_dim(self) -> int:
        """Size of the word embeddings."""
        return self.embedding_size or self.hidden_size

    @property
    def attention_head_size(self) -> int:
        """Size of an attention head, D."""
        return self.hidden_size // self.num_attention_heads

    @property
    def rotatable_dim(self) -> int:
        """Number of coordinates of a head, or of random features, before the partial rotation."""
        is_favor = self.linear_attention == "favor"
        return self.random_features if is_favor else self.attention_head_size

    @property
    def rotary_dim(self) -> int:
        """Number of coordinates of a head, or of random features, that are rotated."""
        return int(self.rotatable_dim * self.partial_rotary_factor)

    @property
    def _is_initialized(self) -> bool:
        return "_name_or_path" in self.__dict__  # the last attribute that transformers sets

    @property
    def _rope(self) -> dict[str, Any]:
        return self.rope_parameters or {}

    @property
    def rope_theta(self) -> float:
        """Base of the angles, stored in `rope_parameters`; can be assigned."""
        if "rope_theta" not in self._rope:  # transformers probes for it during construction
            raise AttributeError("rope_theta")
        return self._rope["rope_theta"]

    @property
    def partial_rotary_factor(self) -> float:
        """Share of each head that is rotated, stored in `rope_parameters`; can be assigned."""
        if not self._is_initialized:  # otherwise transformers would add it to every configuration
            raise AttributeError("partial_rotary_factor")
        return self._rope.get("partial_rotary_factor", 1.0)

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
        return self._rope["rope_type"] in ("dynamic", "longrope")

    @property
    def is_transformers_compatible(self) -> bool:
        """Whether transformers' own RoFormer computes the same from this configuration."""
        return self.type_vocab_size > 0 and not self._unsupported_fields()

    def _unsupported_fields(self) -> set[str]:
        """Names of the fields with a value that transformers' RoFormer does not support."""
        rope = DEFAULT_ROPE | self._rope
        if rope["rope_type"] in ("default", "dynamic", "linear"):
            rope.pop("original_max_position_embeddings", None)  # allowed, but not used
        changed = {n for n in _PLUS_FIELDS if getattr(self, n) != getattr(RoFormerConfig, n)}
        return changed | ({"rope_parameters"} if rope != DEFAULT_ROPE else set())

    def to_dict(self) -> dict[str, Any]:
        """Return all fields as JSON types, with the model type that follows from them."""
        fields = super().to_dict()
        for name in {"rope_parameters", *_PLUS_FIELDS} - self._unsupported_fields():
            fields.pop(name, None)
        if not self.sparse_prediction:
            fields.pop("sparse_prediction", None)
        is_compatible = self.is_transformers_compatible
        return fields | {"model_type": self.model_type if is_compatible else PLUS_MODEL_TYPE}

    @classmethod
    def from_dict(cls, config_dict: dict[str, Any], **kwargs: Any) -> Any:
        """Create a configuration from a dictionary; see `PreTrainedConfig.from_dict`."""
        return super().from_dict({"summary_type": "last"} | config_dict, **kwargs)

    @classmethod
    def from_json_file(cls, json_file: Any) -> Any:
        """Create a configuration from a file; see `PreTrainedConfig.from_json_file`."""
        return cls.from_dict(cls._dict_from_json_file(json_file))

    @classmethod
    def get_config_dict(cls, *args: Any, **kwargs: Any) -> tuple[dict[str, Any], dict[str, Any]]:
        """Read a saved `config.json`; see `PreTrainedConfig.get_config_dict`."""
        fields, unused_kwargs = super().get_config_dict(*args, **kwargs)
        if fields.get("model_type") == PLUS_MODEL_TYPE:  # this class too: avoids a warning
            fields["model_type"] = cls.model_type
        return fields, unused_kwargs

    def check(self) -> None:
        """Check all rules; called when a model is built, and at construction if the head size fits.

        It raises what the constructor raises.
        """
        check_rules(self, field_rules, architecture_rules, rope_rules)

    def check_rope(self) -> None:
        """Check `rope_parameters` alone, a dictionary that can be edited without notice."""
        check_rules(self, rope_rules)


class RoFormerPlusConfig(RoFormerConfig):
    """Registers `roformer_plus` with AutoConfig; its constructor returns a `RoFormerConfig`.

    There is only one configuration class, so that an edit which changes the model type does not
    have to change the class, also after deepcopy and pickle.
    """

    model_type = PLUS_MODEL_TYPE

    def __new__(cls, **kwargs: Any) -> RoFormerConfig:
        """Return a `RoFormerConfig` with these fields."""
        return RoFormerConfig(**kwargs)
