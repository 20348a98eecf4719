"""RoFormer: the transformer encoder with rotary position embedding, compatible with Hugging Face.

    from roformer import RoFormerForMaskedLM
    model = RoFormerForMaskedLM.from_pretrained("junnyu/roformer_chinese_base")

Class names, parameter names and `config.json` are those of transformers' own RoFormer: a folder
saved by one loads in the other, and the outputs agree. What stock cannot express (other rope
settings, no biases, RMSNorm, no token types) is saved as `roformer_plus`, which this package
teaches the Auto classes on import. For `model_type: roformer` they go on building transformers' own
classes until `use_for_auto_classes` is called.
"""

from typing import Any

from transformers import (
    AutoConfig,
    AutoModel,
    AutoModelForCausalLM,
    AutoModelForMaskedLM,
    AutoModelForMultipleChoice,
    AutoModelForQuestionAnswering,
    AutoModelForSequenceClassification,
    AutoModelForTokenClassification,
)

from .configuration_roformer import PLUS, RoFormerConfig, RoFormerPlusConfig
from .modeling_roformer import (
    RoFormerForCausalLM,
    RoFormerForMaskedLM,
    RoFormerForMultipleChoice,
    RoFormerForQuestionAnswering,
    RoFormerForSequenceClassification,
    RoFormerForTokenClassification,
    RoFormerModel,
    RoFormerPreTrainedModel,
)

__all__ = [
    "RoFormerConfig",
    "RoFormerForCausalLM",
    "RoFormerForMaskedLM",
    "RoFormerForMultipleChoice",
    "RoFormerForQuestionAnswering",
    "RoFormerForSequenceClassification",
    "RoFormerForTokenClassification",
    "RoFormerModel",
    "RoFormerPreTrainedModel",
    "use_for_auto_classes",
]

_HEADS: dict[Any, type[RoFormerPreTrainedModel]] = {
    AutoModel: RoFormerModel,
    AutoModelForCausalLM: RoFormerForCausalLM,
    AutoModelForMaskedLM: RoFormerForMaskedLM,
    AutoModelForMultipleChoice: RoFormerForMultipleChoice,
    AutoModelForQuestionAnswering: RoFormerForQuestionAnswering,
    AutoModelForSequenceClassification: RoFormerForSequenceClassification,
    AutoModelForTokenClassification: RoFormerForTokenClassification,
}

# only our own configuration class and model type: what stock calls `roformer` is left alone
AutoConfig.register(PLUS, RoFormerPlusConfig, exist_ok=True)
for _auto, _model in _HEADS.items():
    _auto.register(RoFormerConfig, _model, exist_ok=True)


def use_for_auto_classes() -> None:
    """Let transformers' Auto classes build this RoFormer wherever `model_type` is `roformer`.

    One call a process; all other model types are left as they are. Without it
    `AutoModel.from_pretrained` builds transformers' own RoFormer from the same folder.
    """
    AutoConfig.register("roformer", RoFormerConfig, exist_ok=True)
