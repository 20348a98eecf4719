"""A tiny language, tiny models, and the project's commands run as a user would run them."""

import copy
import json
import os
import random
import resource
import subprocess
import sys
from collections.abc import Callable, Iterator
from contextlib import contextmanager
from pathlib import Path

import pytest
import torch
import transformers
from packaging.version import Version
from torch import Tensor, nn

import roformer
from roformer.configuration_roformer import FEATURE_MAPS, POSITION_ENCODINGS
from train.settings import InputError

ROOT = Path(__file__).parents[2]

SUBJECTS = ("the cat", "a dog", "the old king", "my sister", "the red bird")
VERBS = ("sees", "likes", "follows", "hears", "finds")
OBJECTS = ("the moon", "a river", "the small house", "her friend", "the song")

# transformers' causal model leaked the future until about 5.18
STOCK_IS_CAUSAL = Version(transformers.__version__) >= Version("5.23")

TINY_MODEL = {
    "num_hidden_layers": 2,
    "hidden_size": 32,
    "num_attention_heads": 2,
    "intermediate_size": 64,
    "max_position_embeddings": 64,
}

YARN = {"original_max_position_embeddings": 16}
LLAMA3 = YARN | {"low_freq_factor": 1.0, "high_freq_factor": 4.0}
ROPES = {
    name: {"rope_type": name, "factor": 4.0} | more
    for name, more in {"linear": {}, "dynamic": {}, "yarn": YARN, "llama3": LLAMA3}.items()
}

VARIANTS: dict[str, dict[str, object]] = {
    **{name: {"position_encoding": name} for name in POSITION_ENCODINGS},
    **{name: {"linear_attention": name, "random_features": 32} for name in FEATURE_MAPS},
}
"""Fields of a configuration for each way in which positions and scores are computed."""

HEADS = [getattr(roformer, name) for name in roformer.__all__ if name.startswith("RoFormerFor")]
POOLED = [roformer.RoFormerForSequenceClassification, roformer.RoFormerForMultipleChoice]
"""Heads that read one token of each row, and therefore take no packed documents."""


def name_of(path: Path) -> str:
    """A file of the tree as the name of a test's case."""
    return path.relative_to(ROOT).as_posix()


def tiny_config(**fields: object) -> roformer.RoFormerConfig:
    return roformer.RoFormerConfig(**{"vocab_size": 60} | TINY_MODEL | fields)


def rope_config(rope: str, **settings: object) -> roformer.RoFormerConfig:
    """Heads of 16 coordinates, made for 64 positions."""
    return tiny_config(rope_parameters=ROPES.get(rope, {"rope_type": rope}) | settings)


def sentences(number: int, seed: int) -> list[str]:
    draw = random.Random(seed)
    parts = (SUBJECTS, VERBS, OBJECTS)
    return [" ".join(draw.choice(part) for part in parts) + " ." for _ in range(number)]


def enlarge(model: nn.Module) -> nn.Module:
    """Weights large enough for attention to matter: at 0.02 any mistake hides below 1e-5."""
    torch.manual_seed(0)
    with torch.no_grad():
        for name, p in model.named_parameters():
            if p.ndim >= 2 and "embed_positions" not in name:
                p.normal_(std=0.4)
            elif p.ndim == 1:
                p.add_(torch.randn_like(p), alpha=0.1)
    return model.eval()


def build(head: type, config: roformer.RoFormerConfig, kernel: str | None = None) -> nn.Module:
    """A model with the same large weights under each attention implementation."""
    torch.manual_seed(0)  # for random features
    # a copy: models made from one configuration share it, and with it the implementation
    return enlarge(head._from_config(copy.deepcopy(config), attn_implementation=kernel))


def model_of(variant: str, kernel: str | None = "eager", **fields: object) -> nn.Module:
    return build(roformer.RoFormerModel, tiny_config(**VARIANTS[variant] | fields), kernel)


def inputs_with_labels(head: type, ids: Tensor, mask: Tensor | None = None) -> dict[str, Tensor]:
    """Arguments of a head for [B, L] ids; tokens of padding have no label."""
    mask = torch.ones_like(ids) if mask is None else mask
    inputs = {"input_ids": ids, "attention_mask": mask}
    classes = ids[:, 0] % 2
    match head.__name__.removeprefix("RoFormerFor"):
        case "MaskedLM" | "CausalLM":
            return inputs | {"labels": ids.masked_fill(mask == 0, -100)}
        case "TokenClassification":
            return inputs | {"labels": (ids % 2).masked_fill(mask == 0, -100)}
        case "SequenceClassification":
            return inputs | {"labels": classes}
        case "QuestionAnswering":
            ends = ids[:, 1] % ids.shape[1]
            ends[-1] = 99  # beyond the text: left out of the loss
            return inputs | {"start_positions": ids[:, 0] % ids.shape[1], "end_positions": ends}
        case "MultipleChoice":
            choices = {name: torch.stack((x, x.flip(0)), dim=1) for name, x in inputs.items()}
            return choices | {"labels": classes}
    return inputs


def hidden(model: nn.Module, *arguments: Tensor, **options: object) -> Tensor:
    with torch.no_grad():
        return model(*arguments, **options).last_hidden_state


def assert_near(found: Tensor, expected: Tensor, tolerance: float = 5e-5) -> None:
    torch.testing.assert_close(found, expected, rtol=tolerance, atol=tolerance)


def rotation_matrices(positions: Tensor, width: int) -> Tensor:
    """Equations 14 and 15 of the paper written down: [L, D, D], block-diagonal, float64."""
    theta = 10000.0 ** (-2 * torch.arange(width // 2).double() / width)
    angles = positions[:, None] * theta
    cos, sin = angles.cos(), angles.sin()
    blocks = torch.stack((cos, -sin, sin, cos), dim=-1).unflatten(-1, (2, 2))
    return torch.stack([torch.block_diag(*row) for row in blocks])


def command(
    *arguments: str | Path, fails: bool | None = False, **environment: str
) -> subprocess.CompletedProcess[str]:
    """Run a command as its user would, from the root; it must fail or not, or may with None."""
    settings = {"OMP_NUM_THREADS": "1", "PYTHONWARNINGS": "default"} | environment
    program = [sys.executable, *map(str, arguments)]
    options = {"capture_output": True, "text": True, "timeout": 300}
    done = subprocess.run(program, cwd=ROOT, env=os.environ | settings, **options)
    assert fails in (None, done.returncode != 0), done.stderr
    return done


@contextmanager
def soft_limit(kind: int, size: int) -> Iterator[None]:
    """Limit this process: RLIMIT_FSIZE, for example, lets no file grow beyond `size` bytes."""
    limits = resource.getrlimit(kind)
    resource.setrlimit(kind, (size, limits[1]))
    try:
        yield
    finally:
        resource.setrlimit(kind, limits)


def log_rows(run: Path, key: str = "loss") -> dict[int, float]:
    """step -> value of the rows of log.jsonl that hold the key."""
    rows = map(json.loads, (run / "log.jsonl").read_text().splitlines())
    return {row["step"]: row[key] for row in rows if key in row}


def refused(call: Callable[[], object], *words: str) -> None:
    """Check that a call is refused in one line that has the words."""
    with pytest.raises(InputError) as caught:
        call()
    message = str(caught.value)
    assert "\n" not in message
    assert [word for word in words if word not in message] == []
