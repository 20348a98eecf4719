"""The architecture of a RoFormer as typed fields, named as in transformers' own `config.json`.

A folder saved as `model_type: roformer` loads in stock transformers and the other way round. A
setting that stock would ignore, and so compute something else, is saved as `roformer_plus`, which
stock Auto classes refuse: which of the two it is gets decided from the fields when it is saved.
"""

import math
from typing import Any

from transformers import PreTrainedConfig
from transformers.activations import ACT2CLS

PLUS = "roformer_plus"

ADDED = ("transformer_xl", "t5", "alibi")
"""Encodings that are added to the scores."""

ENCODINGS = ("rope", "learned", "sinusoidal", *ADDED, "none")
FEATURES = ("elu", "relu", "favor")
_PLUS_FIELDS = (
    "rope_interleave", "use_bias", "norm_type", "position_encoding", "linear_attention",
    "random_features", "redraw_features",
)  # fmt: skip

# keys of `rope_parameters` by type, beside the four that every type may have
_ROPE_KEYS: dict[str, tuple[tuple[str, ...], tuple[str, ...]]] = {  # required, optional
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
# their factor on sine and cosine is a temperature of softmax, and elsewhere a factor on the output
_SCALING = ("yarn", "longrope")
_PLAIN_ROPE = {"rope_type": "default", "rope_theta": 10000.0}
_WHOLE = {"partial_rotary_factor": 1.0}
_LEAST = {  # and whether only more than that will do
    "rope_theta": (1, True), "factor": (1, False), "original_max_position_embeddings": (1, True),
    "attention_factor": (0, True), "beta_fast": (0, True), "beta_slow": (0, True),
    "low_freq_factor": (0, True), "high_freq_factor": (0, True), "mscale": (0, False),
    "mscale_all_dim": (0, False),
}  # fmt: skip
_SIZES = (
    "vocab_size", "hidden_size", "embedding_size", "intermediate_size", "type_vocab_size",
    "num_hidden_layers", "num_attention_heads", "max_position_embeddings",
)  # fmt: skip
_SWITCHES = (
    "rotary_value", "use_cache", "is_decoder", "add_cross_attention", "tie_word_embeddings",
    "rope_interleave", "use_bias",
)  # fmt: skip


class RoFormerConfig(PreTrainedConfig):
    """Configuration of every RoFormer model.

    The defaults are transformers' RoFormer's, apart from `summary_type`: ours says "first", while a
    `config.json` without it means "last", as in stock. The fields after `tie_word_embeddings` are
    unknown to stock: away from their defaults the model is saved as `roformer_plus`.

    Attributes:
        vocab_size: Number of token ids, V.
        embedding_size: Width of the word embeddings; None means `hidden_size`. When the two
            differ a linear layer, `embeddings_project`, joins them.
        hidden_size: Width of the encoder, E.
        num_hidden_layers: Number of layers.
        num_attention_heads: Heads a layer, H; the head width D = E / H must be even, because the
            rotation turns pairs of coordinates.
        intermediate_size: Width inside the feed-forward block.
        hidden_act: Activation by its transformers name.
        hidden_dropout_prob: Dropout after embeddings, projections and in classification heads.
        attention_probs_dropout_prob: Dropout of the attention probabilities.
        max_position_embeddings: The length the model is made for, at least that of its training.
            Nothing here is cut off by it: a rotation has no table to run out of. Stock builds a
            table of this many rows, and the dynamic rope type changes rows longer than it.
        type_vocab_size: Number of token types (segments); 0 leaves them out and is not stock's.
        initializer_range: Standard deviation of the initial weights.
        layer_norm_eps: Added to the variance in every normalisation.
        pad_token_id: Id of the padding token; `bos_token_id` and `eos_token_id`, of the first and
            last of a generated text, are None.
        rotary_value: Rotate the values as well as queries and keys.
        summary_type: Token read by `RoFormerForMultipleChoice`: the "first" or the "last" unmasked
            one. Sequence classification reads the first unmasked one always; stock, the first.
        use_cache: Whether a decoder keeps keys and values between calls.
        is_decoder: Attend to earlier tokens only.
        add_cross_attention: Let a decoder attend to an encoder's output as well.
        tie_word_embeddings: Share the word embeddings with the language-model decoder.
        rope_parameters: transformers' rope settings: `rope_type` (default, linear, dynamic, yarn,
            llama3 or longrope), `rope_theta`, `partial_rotary_factor` (share of the head width that
            is rotated) and the type's own keys. None means the paper's: default, 10,000, all of it.
            Given again, by hand or to `from_pretrained`, theta and share stay where none is said.
        rope_interleave: Pair adjacent coordinates, as the paper does; False pairs i with i + D/2,
            as Llama does. `RoFormerPreTrainedModel.set_rope_interleave` converts weights.
        use_bias: Biases in linear layers and normalisations of the encoder and language-model head.
        norm_type: "layer_norm", or "rms_norm" without a gain; both as in RoFormerV2.
        position_encoding: How tokens know their place: "rope", or one of those it is compared with,
            "learned", "sinusoidal", "transformer_xl", "t5", "alibi", "none"; see `positions`.
            "learned" has a table of `max_position_embeddings` rows, and no more positions.
        linear_attention: None for softmax; or attention in O(L) by features of queries and keys,
            "elu", "relu" or "favor" (Performer's random ones); see `linear`.
        random_features: How many "favor" has, even.
        redraw_features: Forward passes of training between two draws of them; 0 draws once.

    Raises:
        ValueError: A field breaks its rule; the message names it, the rule, the value found and,
            where it is not plain, the remedy.
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
    rope_parameters: dict[str, Any] | None = None
    rope_interleave: bool = True
    use_bias: bool = True
    norm_type: str = "layer_norm"
    position_encoding: str = "rope"
    linear_attention: str | None = None
    random_features: int = 256
    redraw_features: int = 1000

    def __post_init__(self, **kwargs: Any) -> None:
        # the class says it, and the saved one follows from the fields
        kwargs.pop("model_type", None)
        if self.embedding_size is None:
            self.embedding_size = self.hidden_size
        self.rope_parameters = dict(self.rope_parameters or {})  # completed below: not the caller's
        super().__post_init__(**kwargs)
        self._rope.pop("type", None)  # an old spelling of rope_type, already taken over
        self.check()

    def __setattr__(self, name: str, value: Any) -> None:
        if self._is_made and name in ("rope_theta", "partial_rotary_factor"):
            name, value = "rope_parameters", self._rope | {name: value}
        if name != "rope_parameters" or not self._is_made:
            return super().__setattr__(name, value)
        # settings given later, by hand or to `from_pretrained`, are completed and checked at once;
        # the angles that the weights were trained with stay, whatever is done to them for length
        before, given = self._rope, dict(value or {})
        if "type" in given:
            given.setdefault("rope_type", given.pop("type"))
        angles = ("rope_theta", "partial_rotary_factor")
        kept = {} if value is None else {key: before[key] for key in angles if key in before}
        super().__setattr__(name, _PLAIN_ROPE | kept | given)
        try:
            self.check_rope()
        except ValueError:
            super().__setattr__(name, before)
            raise

    @property
    def word_width(self) -> int:
        """Width of the word embeddings."""
        return self.embedding_size or self.hidden_size

    @property
    def head_width(self) -> int:
        """Width of one attention head, D."""
        return self.hidden_size // self.num_attention_heads

    @property
    def _is_made(self) -> bool:
        """Whether transformers has set all fields; this one is its last."""
        return "_name_or_path" in self.__dict__

    @property
    def _rope(self) -> dict[str, Any]:
        return self.rope_parameters or {}

    @property
    def rope_theta(self) -> float:
        """Base of the angles, as `rope_parameters` has it; may be set by this name too."""
        if "rope_theta" not in self._rope:  # while transformers completes them, it has none
            raise AttributeError("rope_theta")
        return self._rope["rope_theta"]

    @property
    def partial_rotary_factor(self) -> float:
        """Share of a head that turns, as `rope_parameters` has it; may be set by this name too."""
        if not self._is_made:  # or transformers would write it down for all
            raise AttributeError("partial_rotary_factor")
        return self._rope.get("partial_rotary_factor", 1.0)

    @property
    def rotated_width(self) -> int:
        """Coordinates of a head that the rotation turns: D, or less with a partial rotation; with
        FAVOR+ they are random features.
        """  # noqa: D205 one sentence
        favor = self.linear_attention == "favor"
        width = self.random_features if favor else self.head_width
        return int(width * self.partial_rotary_factor)

    @property
    def has_position_limit(self) -> bool:
        """Whether a text may be longer than a table; read by whoever must refuse it."""
        return self.position_encoding == "learned"

    @property
    def biases_scores(self) -> bool:
        """Whether positions are added to the scores, which not every kernel can do."""
        return self.position_encoding in ADDED

    @property
    def depends_on_length(self) -> bool:
        """Whether the frequencies change with the length of the row."""
        return self._rope["rope_type"] in ("dynamic", "longrope")

    @property
    def is_stock(self) -> bool:
        """Whether transformers' own RoFormer computes the same from the fields it knows."""
        return self.type_vocab_size > 0 and not self._foreign()

    def _foreign(self) -> set[str]:
        """Names of fields unknown to stock that do not hold their default."""
        rope = _WHOLE | self._rope
        if rope["rope_type"] in ("default", "dynamic", "linear"):
            rope.pop("original_max_position_embeddings", None)  # said, but not read
        changed = {n for n in _PLUS_FIELDS if getattr(self, n) != getattr(RoFormerConfig, n)}
        return changed | ({"rope_parameters"} if rope != _WHOLE | _PLAIN_ROPE else set())

    def to_dict(self) -> dict[str, Any]:
        """All fields as JSON can hold them, under the model type that they amount to now."""
        fields = super().to_dict()
        for name in {"rope_parameters", *_PLUS_FIELDS} - self._foreign():
            fields.pop(name, None)
        return fields | {"model_type": self.model_type if self.is_stock else PLUS}

    @classmethod
    def from_dict(cls, config_dict: dict[str, Any], **kwargs: Any) -> Any:
        """A configuration from the fields of a `config.json`; see `PreTrainedConfig.from_dict`."""
        return super().from_dict({"summary_type": "last"} | config_dict, **kwargs)

    @classmethod
    def from_json_file(cls, json_file: Any) -> Any:
        """A configuration from a `config.json`; see `PreTrainedConfig.from_json_file`."""
        return cls.from_dict(cls._dict_from_json_file(json_file))

    @classmethod
    def get_config_dict(cls, *args: Any, **kwargs: Any) -> tuple[dict[str, Any], dict[str, Any]]:
        """The fields of a saved `config.json`; see `PreTrainedConfig.get_config_dict`."""
        fields, rest = super().get_config_dict(*args, **kwargs)
        if fields.get("model_type") == PLUS:  # both types are this class: nothing to warn of
            fields["model_type"] = cls.model_type
        return fields, rest

    def check(self) -> None:
        """Refuse values that no RoFormer can have; also run when a model is built.

        Raises:
            ValueError: As the class says.
        """
        self._check_sizes()
        self._check_choices()
        self.check_rope()

    def _check_sizes(self) -> None:
        for name in _SIZES:
            value = getattr(self, name)
            least = 0 if name == "type_vocab_size" else 1
            fits = isinstance(value, int) and not isinstance(value, bool) and value >= least
            _require(fits, name, f"must be an integer of at least {least}", repr(value))
        for name in ("initializer_range", "layer_norm_eps"):
            value = getattr(self, name)
            _require(_is_number(value) and value >= 0, name, "must be a number >= 0", repr(value))
        for name in ("hidden_dropout_prob", "attention_probs_dropout_prob"):
            value = getattr(self, name)
            fits = _is_number(value) and 0 <= value < 1
            _require(fits, name, "must be a number of at least 0 and below 1", repr(value))
        E, H = self.hidden_size, self.num_attention_heads  # noqa: N806 the legend's letters
        rule = f"must be a multiple of 2 * num_attention_heads = {2 * H}, so that heads hold pairs"
        _require(E % (2 * H) == 0, "hidden_size", rule, E)
        rule = f"must be None or an integer from 0 to vocab_size - 1 = {self.vocab_size - 1}"
        fits = self.pad_token_id is None or self.pad_token_id in range(self.vocab_size)
        _require(fits, "pad_token_id", rule, repr(self.pad_token_id))

    def _check_choices(self) -> None:
        choices: dict[str, tuple[str, ...]] = {
            "norm_type": ("layer_norm", "rms_norm"),
            "position_encoding": ENCODINGS,
        }
        for name, known in choices.items():
            value = getattr(self, name)
            _require(value in known, name, f"must be one of {', '.join(known)}", repr(value))
        for name in _SWITCHES:
            value = getattr(self, name)
            _require(isinstance(value, bool), name, "must be True or False", repr(value))
        self._check_linear()
        rotates = self.position_encoding == "rope"
        rule = f"must be False with position_encoding {self.position_encoding}"
        _require(rotates or not self.rotary_value, "rotary_value", rule, "True")
        rule = f"must be True with position_encoding {self.position_encoding}"
        _require(rotates or self.rope_interleave, "rope_interleave", rule, "False")
        odd = self.position_encoding == "sinusoidal" and self.word_width % 2 == 1
        _require(not odd, "embedding_size", "must be even for sinusoids", self.word_width)
        width = getattr(self, "head_dim", None)
        rule = f"must be absent, or hidden_size / num_attention_heads = {self.head_width}"
        _require(width in (None, self.head_width), "head_dim", rule, width)
        act = self.hidden_act
        rule = "must be an activation of transformers"
        _require(act in ACT2CLS, "hidden_act", rule, f"{act!r}; see transformers.activations")
        _require(
            self.is_decoder or not self.add_cross_attention,
            "add_cross_attention",
            "must be False in an encoder",
            "True with is_decoder False; set is_decoder=True",
        )

    def check_summary(self) -> None:
        """Refuse what stock's head over choices has and ours has not; other heads read none of it.

        Raises:
            ValueError: As `check`.
        """
        which, rule = self.summary_type, "must be one of first, last"
        _require(which in ("first", "last"), "summary_type", rule, repr(which))
        for name in ("summary_use_proj", "summary_activation"):
            found = getattr(self, name, None)
            _require(not found, name, "must be absent, this model has no such layer", found)

    def _check_linear(self) -> None:
        kind = self.linear_attention
        rule = f"must be None or one of {', '.join(FEATURES)}"
        _require(kind is None or kind in FEATURES, "linear_attention", rule, repr(kind))
        number, every = self.random_features, self.redraw_features
        fits = isinstance(number, int) and number >= 4 and number % 2 == 0
        _require(fits, "random_features", "must be even and at least 4", repr(number))
        fits = isinstance(every, int) and every >= 0
        _require(fits, "redraw_features", "must be an integer of at least 0", repr(every))
        if kind is None:
            return
        # a summand b(m - n) belongs to a pair, and linear attention visits no pairs
        rule = f"must add nothing to scores with linear_attention {kind}, which has none"
        _require(not self.biases_scores, "position_encoding", rule, self.position_encoding)
        for name in ("rotary_value", "add_cross_attention"):
            rule = f"must be False with linear_attention {kind}"
            _require(not getattr(self, name), name, rule, "True")
        rope_type = self._rope["rope_type"]
        rule = f"must have no factor with linear_attention {kind}"
        _require(rope_type not in _SCALING, "rope_parameters.rope_type", rule, repr(rope_type))
        # the rules of other types are for the coordinates of a head, and these are random features
        plain, rule = rope_type == "default", "must be 'default' with linear_attention favor"
        _require(kind != "favor" or plain, "rope_parameters.rope_type", rule, repr(rope_type))
        rule = "must be True with linear_attention favor, whose features have no order"
        _require(kind != "favor" or self.rope_interleave, "rope_interleave", rule, "False")

    def check_rope(self) -> None:
        """Refuse settings of the rotation that fit no rope type, or not this model.

        Raises:
            ValueError: As the class says.
        """
        rope = self._rope
        kind = rope["rope_type"]
        rule = f"must be one of {', '.join(_ROPE_KEYS)}"
        known = isinstance(kind, str) and kind in _ROPE_KEYS
        _require(known, "rope_parameters.rope_type", rule, repr(kind))
        required, optional = _ROPE_KEYS[kind]
        every = {*_PLAIN_ROPE, *_WHOLE, "original_max_position_embeddings"}
        allowed = {*every, *required, *optional}
        for name in ("rope_theta", *required):
            found = rope.get(name)
            rule = f"must be given with rope_type {kind}"
            _require(found is not None, f"rope_parameters.{name}", rule, found)
        for name in sorted(set(rope) - allowed):
            rule = f"must be absent with rope_type {kind}"
            raise ValueError(f"rope_parameters.{name} {rule}, got {rope[name]}; check the spelling")
        for name, (least, more) in _LEAST.items():
            value = rope.get(name)
            inside = value is None or _is_number(value)
            if inside and value is not None:
                inside = value > least if more else value >= least
            rule = f"must be a number {'>' if more else '>='} {least}"
            _require(inside, f"rope_parameters.{name}", rule, repr(value))
        truncate = rope.get("truncate", True)
        rule = "must be True or False"
        _require(isinstance(truncate, bool), "rope_parameters.truncate", rule, repr(truncate))
        self._check_rotated_width()
        fast, slow = rope.get("beta_fast") or 32, rope.get("beta_slow") or 1  # transformers' own
        rule = f"must be above beta_slow = {slow}"
        _require(fast > slow, "rope_parameters.beta_fast", rule, fast)
        if kind == "llama3":
            low, high = rope["low_freq_factor"], rope["high_freq_factor"]
            rule = f"must be above low_freq_factor = {low}"
            _require(high > low, "rope_parameters.high_freq_factor", rule, high)
        plain = _WHOLE | rope == _WHOLE | _PLAIN_ROPE
        rule = f"must be left out with position_encoding {self.position_encoding}"
        _require(self.position_encoding == "rope" or plain, "rope_parameters", rule, rope)
        rule = f"must be False with rope_type {kind}, whose factor is no rotation"
        _require(not (self.rotary_value and kind in _SCALING), "rotary_value", rule, "True")
        cached = self.is_decoder and self.use_cache and self.depends_on_length
        rule = f"must be False in a decoder with rope_type {kind}, because cached keys were turned"
        rule += " for a shorter row"
        _require(not cached, "use_cache", rule, "True; set use_cache=False")

    def _check_rotated_width(self) -> None:
        rope, D = self._rope, self.head_width  # noqa: N806
        share = rope.get("partial_rotary_factor", 1.0)
        least = 4 if rope["rope_type"] == "dynamic" else 2  # its exponent is d / (d - 2)
        fits = _is_number(share) and 0 < share <= 1
        if self.linear_attention == "favor":
            D = self.random_features  # noqa: N806
        fits = fits and int(D * share) % 2 == 0 and int(D * share) >= least
        rule = f"must leave an even number of at least {least} of the {D} coordinates of a head"
        _require(fits, "rope_parameters.partial_rotary_factor", rule, repr(share))
        for name in ("short_factor", "long_factor"):
            values = rope.get(name)
            pairs = self.rotated_width // 2
            fits = values is None or (
                isinstance(values, list | tuple)
                and len(values) == pairs
                and all(_is_number(v) and v > 0 for v in values)
            )
            rule = f"must be a list of {pairs} positive numbers, one a pair"
            _require(fits, f"rope_parameters.{name}", rule, values)


class RoFormerPlusConfig(RoFormerConfig):
    """The key under which AutoConfig finds `roformer_plus`; making one makes a `RoFormerConfig`.

    There is one configuration class, so that a configuration edited from one type to the other is
    still of the right class, also after deepcopy and pickle.
    """

    model_type = PLUS

    def __new__(cls, **kwargs: Any) -> RoFormerConfig:
        """A `RoFormerConfig` of those fields."""
        return RoFormerConfig(**kwargs)


def _is_number(value: object) -> bool:
    return isinstance(value, int | float) and not isinstance(value, bool) and math.isfinite(value)


def _require(holds: bool, name: str, rule: str, found: object) -> None:
    if not holds:
        raise ValueError(f"{name} {rule}, got {found}")
