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

Models: `RoFormerModel` (no head), `RoFormerForMaskedLM`, `RoFormerForCausalLM` (with `generate`),
`RoFormerForSequenceClassification`, `RoFormerForTokenClassification`,
`RoFormerForQuestionAnswering`, `RoFormerForMultipleChoice`. With `is_decoder` and
`add_cross_attention` the model is the decoder of transformers' `EncoderDecoderModel`.

Other encodings are fields of the configuration: `position_encoding` (learned, sinusoidal,
transformer_xl, t5, alibi, none) and `linear_attention` (elu, relu, favor).

Model types: class names, parameter names and `config.json` are those of transformers' own RoFormer,
so that a folder saved by one loads in the other. What transformers' class cannot express (other
rope settings or encodings, linear attention, no biases, RMSNorm, no token types) is saved as
`roformer_plus`, which transformers' Auto classes load after `import roformer`. For `roformer` they
build transformers' classes until `use_for_auto_classes` is called.

Positions come from `position_ids`, with any start, order and gaps and without a maximum.
`rope_parameters` in `RoFormerConfig` are transformers' own, for texts longer than in training:

```python
RoFormerModel.from_pretrained("folder", rope_parameters={"rope_type": "dynamic", "factor": 2.0})
```

Documents packed into one row do not attend to each other with `cu_seq_lens_q`, or in the rows of
transformers' `DataCollatorWithFlattening`, under every `attn_implementation`: eager, sdpa,
flex_attention, flash_attention_2 (not run yet), and `unpadded`, which packs tokens without padding
and needs no other library.
"""

from typing import Any

import transformers
from transformers import (
    AutoConfig,
    AutoModel,
    AutoModelForCausalLM,
    AutoModelForMaskedLM,
    AutoModelForMultipleChoice,
    AutoModelForQuestionAnswering,
    AutoModelForSequenceClassification,
    AutoModelForTextEncoding,
    AutoModelForTokenClassification,
)

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
    AutoModelForTextEncoding: RoFormerModel,
    AutoModelForTokenClassification: RoFormerForTokenClassification,
}

# only this package's configuration and model type; `roformer` stays transformers' own
AutoConfig.register(PLUS_MODEL_TYPE, RoFormerPlusConfig, exist_ok=True)
for _auto, _model in _HEADS.items():
    _auto.register(RoFormerConfig, _model, exist_ok=True)


def use_for_auto_classes() -> None:
    """Let transformers' Auto classes build this RoFormer wherever `model_type` is `roformer`.

    One call a process; all other model types are left as they are. Without it
    `AutoModel.from_pretrained` builds transformers' own RoFormer from the same folder.

    `AutoModel.from_config` with a configuration of transformers' own class builds this RoFormer,
    too, except in transformers 5.17, which ignores such registrations.
    """
    AutoConfig.register("roformer", RoFormerConfig, exist_ok=True)
    for auto, model in _HEADS.items():  # also for configurations of transformers' own class
        auto.register(transformers.RoFormerConfig, model, exist_ok=True)
