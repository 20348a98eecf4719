"""One classification head for every encoder, so that a comparison is one of encoders.

`AutoModelForSequenceClassification` gives each architecture a head of its own: RoFormer's has a
GELU where BERT's has a tanh, and both read the first token, which masked language modelling never
trains. Here pooling, layers, activation, dropout and initial values are the same for every encoder.
`finetune.models` loads the model of a run, with this head or with its own.

A saved model is a folder with `encoder/`, which `AutoModel` loads, and the head in `head.json` and
`head.safetensors`. transformers' pipeline finds no config.json there and refuses the folder.

Shapes: B rows, K texts a row (1, or 2 for pairs encoded separately), L tokens, E hidden size.
"""

import json
from pathlib import Path
from typing import Any

import torch
from safetensors.torch import load_file, save_file
from torch import Tensor, nn
from torch.nn import functional as F
from transformers import AutoModel, PreTrainedModel
from transformers.modeling_outputs import SequenceClassifierOutput

import roformer

ENCODER = "encoder"
"""Subfolder of a saved model."""
HEAD_FILES = ("head.json", "head.safetensors")
DROPOUT = 0.1
INITIALIZER_RANGE = 0.02


class SharedHead(nn.Module):
    """Pooling, dense layer, GELU and projection to the labels, with dropout before both layers.

    Of two texts with pooled states u and v the dense layer reads [u; v; abs(u - v); u * v]
    (Conneau et al. 2017, arXiv:1705.02364, section 3.1).

    Args:
        hidden_size: E, of the encoder.
        num_labels: Number of outputs.
        pooling: State of a text: "first" token, or "mean" of its tokens.
        texts: Number of texts of a row, K.
    """

    def __init__(self, hidden_size: int, num_labels: int, pooling: str, texts: int) -> None:
        super().__init__()
        self.pooling, self.texts = pooling, texts
        self.dense = nn.Linear(hidden_size * (1 if texts == 1 else 4), hidden_size)
        self.out_proj = nn.Linear(hidden_size, num_labels)
        self.dropout = nn.Dropout(DROPOUT)
        for layer in (self.dense, self.out_proj):
            nn.init.normal_(layer.weight, std=INITIALIZER_RANGE)
            nn.init.zeros_(layer.bias)

    def forward(self, hidden_states: Tensor, attention_mask: Tensor) -> Tensor:
        """Compute logits [B, num_labels] from the states [B * K, L, E] and mask [B * K, L]."""
        if self.pooling == "first":
            first = attention_mask.argmax(-1)  # of equal values the first; padding may be left
            features = hidden_states[torch.arange(len(first), device=first.device), first]
        else:
            mask = attention_mask.unsqueeze(-1).to(hidden_states.dtype)
            features = (hidden_states * mask).sum(1) / mask.sum(1)
        if self.texts == 2:
            u, v = features.unflatten(0, (-1, 2)).unbind(1)
            features = torch.cat((u, v, (u - v).abs(), u * v), dim=-1)
        return self.out_proj(self.dropout(F.gelu(self.dense(self.dropout(features)))))


class SharedHeadClassifier(nn.Module):
    """An encoder with the shared head; called like a sequence-classification model.

    The encoder is any model of `AutoModel` that returns `last_hidden_state`.
    """

    def __init__(self, encoder: PreTrainedModel, head: SharedHead) -> None:
        super().__init__()
        if getattr(encoder, "pooler", None) is not None:
            encoder.pooler = None  # never read: its weights would have no gradient
        self.encoder, self.head = encoder, head
        # the head reads no padding
        self.options = {"unpad": True} if isinstance(encoder, roformer.RoFormerModel) else {}

    def forward(self, attention_mask: Tensor, **inputs: Tensor) -> SequenceClassifierOutput:
        """Compute `logits` [B, num_labels] from mask, ids and token types, [B * K, L] each.

        The K texts of a row are neighbours.
        """
        outputs = self.encoder(attention_mask=attention_mask, **inputs, **self.options)
        return SequenceClassifierOutput(logits=self.head(outputs.last_hidden_state, attention_mask))

    def save_pretrained(self, folder: str | Path) -> None:
        """Write encoder and head."""
        head, path = self.head, Path(folder)
        self.encoder.save_pretrained(path / ENCODER)
        arguments = {
            "hidden_size": head.out_proj.in_features,
            "num_labels": head.out_proj.out_features,
            "pooling": head.pooling,
            "texts": head.texts,
        }
        (path / HEAD_FILES[0]).write_text(json.dumps(arguments, indent=1) + "\n")
        save_file(head.state_dict(), path / HEAD_FILES[1])

    @classmethod
    def from_pretrained(cls, folder: str | Path, **options: Any) -> "SharedHeadClassifier":
        """Load a saved model; `options` are those of `AutoModel.from_pretrained`."""
        roformer.use_for_auto_classes()
        path = Path(folder)
        head = SharedHead(**json.loads((path / HEAD_FILES[0]).read_text()))
        head.load_state_dict(load_file(path / HEAD_FILES[1]))
        return cls(AutoModel.from_pretrained(path / ENCODER, **options), head).eval()
