"""The architecture of a RoFormer as typed fields, named as in transformers' own `config.json`.

A folder saved here loads in stock transformers and the other way round, so a field that stock would
ignore (and so compute something else) has no place under `model_type: roformer`.
"""

from typing import Any, ClassVar

from transformers import PreTrainedConfig


class RoFormerConfig(PreTrainedConfig):
    """Configuration of every RoFormer model.

    The defaults are transformers' RoFormer's, apart from `summary_type`: ours says "first".

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
        max_position_embeddings: The length the model was trained for. Nothing here is cut off by
            it: a rotation has no table to run out of. Stock builds a table of this many rows.
        type_vocab_size: Number of token types (segments).
        initializer_range: Standard deviation of the initial weights.
        layer_norm_eps: Added to the variance in every LayerNorm.
        pad_token_id: Id of the padding token.
        rotary_value: Rotate the values as well as queries and keys.
        summary_type: Token read by sequence heads in stock transformers: "first" or "last".
        tie_word_embeddings: Share the word embeddings with the masked-LM decoder.

    Raises:
        ValueError: A field breaks its rule; the message names it, the rule and the value found.
    """

    model_type = "roformer"
    has_position_limit: ClassVar[bool] = (
        False  # read by whoever must refuse a text longer than a table
    )

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

    def __post_init__(self, **kwargs: Any) -> None:
        if self.embedding_size is None:
            self.embedding_size = self.hidden_size
        self._check()
        super().__post_init__(**kwargs)

    def _check(self) -> None:
        sizes = (
            "vocab_size", "embedding_size", "hidden_size", "intermediate_size", "type_vocab_size",
            "num_hidden_layers", "num_attention_heads", "max_position_embeddings",
        )  # fmt: skip
        for name in sizes:
            _require(getattr(self, name) >= 1, name, "must be at least 1", getattr(self, name))
        for name in ("hidden_dropout_prob", "attention_probs_dropout_prob"):
            value = getattr(self, name)
            _require(0 <= value < 1, name, "must be at least 0 and below 1", value)
        E, H = self.hidden_size, self.num_attention_heads  # noqa: N806 the legend's letters
        _require(
            E % (2 * H) == 0,
            "hidden_size",
            f"must be a multiple of 2 * num_attention_heads = {2 * H}, so that heads hold pairs",
            E,
        )
        pad = self.pad_token_id
        _require(
            pad is None or 0 <= pad < self.vocab_size,
            "pad_token_id",
            f"must be below vocab_size = {self.vocab_size}",
            pad,
        )


def _require(holds: bool, name: str, rule: str, found: object) -> None:
    if not holds:
        raise ValueError(f"{name} {rule}, got {found}")
