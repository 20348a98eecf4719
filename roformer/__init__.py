"""RoFormer: the transformer encoder with rotary position embedding, compatible with Hugging Face.

Source: Su et al. 2021, "RoFormer: Enhanced Transformer with Rotary Position Embedding",
arXiv:2104.09864. Queries and keys are rotated by an angle proportional to their position, so that
scores depend on the positions m and n of two tokens through m - n alone (equations 13 to 16).

```python
from roformer import RoFormerForMaskedLM

model = RoFormerForMaskedLM.from_pretrained("junnyu/roformer_chinese_base")
model(input_ids, attention_mask=mask).logits  # [B, L, V]
model.save_pretrained("folder")  # transformers loads it without this package
```

Class names, parameter names and `config.json` are those of transformers' own RoFormer, so that a
folder saved by one loads in the other. What transformers' class cannot express (other rope settings
or encodings, linear attention, no biases, RMSNorm, no token types) is saved as `roformer_plus`,
which transformers' Auto classes load after `import roformer`. For `roformer` they build
transformers' classes until `use_for_auto_classes` is called.

`RoFormerConfig` chooses the encoding of positions, `rope_parameters` for texts longer than in
training, and linear attention. `RoFormerModel.forward` documents positions, masks and packed
documents, which do not attend to each other under any `attn_implementation`: eager, sdpa,
flex_attention, flash_attention_2 (not run yet), `unpadded`, which needs no other library, and
`auto`, the default. With `is_decoder` and `add_cross_attention` a model is the decoder of
transformers' `EncoderDecoderModel`.
"""

from typing import Any

import transformers

from .configuration_roformer import PLUS_MODEL_TYPE, RoFormerConfig, RoFormerPlusConfig
from .heads import (
    RoFormerForCausalLM,
    RoFormerForMaskedLM,
    RoFormerForMultipleChoice,
    RoFormerForQuestionAnswering,
    RoFormerForSequenceClassification,
    RoFormerForTokenClassification,
)
from .modeling_roformer import RoFormerModel, RoFormerPreTrainedModel
from .rotary import convert_rope_layout

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
    "convert_rope_layout",
    "use_for_auto_classes",
]

_MODEL_OF_AUTO_CLASS: dict[Any, type[RoFormerPreTrainedModel]] = {
    transformers.AutoModel: RoFormerModel,
    transformers.AutoModelForCausalLM: RoFormerForCausalLM,
    transformers.AutoModelForMaskedLM: RoFormerForMaskedLM,
    transformers.AutoModelForMultipleChoice: RoFormerForMultipleChoice,
    transformers.AutoModelForQuestionAnswering: RoFormerForQuestionAnswering,
    transformers.AutoModelForSequenceClassification: RoFormerForSequenceClassification,
    transformers.AutoModelForTextEncoding: RoFormerModel,
    transformers.AutoModelForTokenClassification: RoFormerForTokenClassification,
}

# only this package's configuration and model type; `roformer` stays transformers' own
transformers.AutoConfig.register(PLUS_MODEL_TYPE, RoFormerPlusConfig, exist_ok=True)
for _auto, _model in _MODEL_OF_AUTO_CLASS.items():
    _auto.register(RoFormerConfig, _model, exist_ok=True)


def use_for_auto_classes() -> None:
    """Let transformers' Auto classes build this RoFormer wherever `model_type` is `roformer`.

    One call a process; all other model types are left as they are. Without it
    `AutoModel.from_pretrained` builds transformers' own RoFormer from the same folder.

    `AutoModel.from_config` with a configuration of transformers' own class builds this RoFormer,
    too, except in transformers 5.17, which ignores such registrations.
    """
    transformers.AutoConfig.register("roformer", RoFormerConfig, exist_ok=True)
    # also for configurations of transformers' own class
    for auto, model in _MODEL_OF_AUTO_CLASS.items():
        auto.register(transformers.RoFormerConfig, model, exist_ok=True)
