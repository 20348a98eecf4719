"""RoFormer: the transformer encoder with rotary position embedding, compatible with Hugging Face.

    from roformer import RoFormerForMaskedLM
    model = RoFormerForMaskedLM.from_pretrained("junnyu/roformer_chinese_base")

Importing changes nothing in transformers; `use_for_auto_classes` does, when called.
"""

from transformers import (
    AutoConfig,
    AutoModel,
    AutoModelForMaskedLM,
    AutoModelForSequenceClassification,
)

from .configuration_roformer import RoFormerConfig
from .modeling_roformer import (
    RoFormerForMaskedLM,
    RoFormerForSequenceClassification,
    RoFormerModel,
    RoFormerPreTrainedModel,
)

__all__ = [
    "RoFormerConfig",
    "RoFormerForMaskedLM",
    "RoFormerForSequenceClassification",
    "RoFormerModel",
    "RoFormerPreTrainedModel",
    "use_for_auto_classes",
]


def use_for_auto_classes() -> None:
    """Let transformers' Auto classes build this RoFormer wherever `model_type` is `roformer`.

    One call a process; all other model types are left as they are. Without it
    `AutoModel.from_pretrained` builds transformers' own RoFormer from the same folder.
    """
    AutoConfig.register("roformer", RoFormerConfig, exist_ok=True)
    AutoModel.register(RoFormerConfig, RoFormerModel, exist_ok=True)
    AutoModelForMaskedLM.register(RoFormerConfig, RoFormerForMaskedLM, exist_ok=True)
    AutoModelForSequenceClassification.register(
        RoFormerConfig, RoFormerForSequenceClassification, exist_ok=True
    )
