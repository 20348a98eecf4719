"""A tiny language, tiny models, and the project's commands run as a user would run them."""

import json
import os
import random
import subprocess
import sys
from collections.abc import Callable
from pathlib import Path

import pytest
import torch
import transformers
from packaging.version import Version

import roformer
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


ROPES = {
    "linear": {"factor": 4.0},
    "dynamic": {"factor": 4.0},
    "yarn": {"factor": 4.0, "original_max_position_embeddings": 16},
    "longrope": {
        "short_factor": [1.0, 1.1, 1.2, 1.3, 1.4, 1.5, 1.6, 1.7],
        "long_factor": [2.0, 2.5, 3.0, 3.5, 4.0, 4.5, 5.0, 5.5],
        "original_max_position_embeddings": 16,
        "factor": 4.0,
    },
    "llama3": {
        "factor": 4.0,
        "low_freq_factor": 1.0,
        "high_freq_factor": 4.0,
        "original_max_position_embeddings": 16,
    },
}


def rope_config(rope: str, **settings: object) -> roformer.RoFormerConfig:
    """Heads of 16 coordinates, made for 64 positions."""
    given = {"rope_type": rope} | ROPES.get(rope, {}) | settings
    return roformer.RoFormerConfig(vocab_size=60, **TINY_MODEL, rope_parameters=given)


def sentences(number: int, seed: int) -> list[str]:
    draw = random.Random(seed)
    parts = (SUBJECTS, VERBS, OBJECTS)
    return [" ".join(draw.choice(part) for part in parts) + " ." for _ in range(number)]


def enlarge(model: torch.nn.Module) -> torch.nn.Module:
    """Weights large enough for attention to matter: at 0.02 any mistake hides below 1e-5."""
    torch.manual_seed(0)
    with torch.no_grad():
        for name, p in model.named_parameters():
            if p.ndim >= 2 and "embed_positions" not in name:
                p.normal_(std=0.4)
            elif p.ndim == 1:
                p.add_(torch.randn_like(p), alpha=0.1)
    return model.eval()


def command(*arguments: str | Path, **environment: str) -> subprocess.CompletedProcess[str]:
    """Run a command of the project as its user would, from the root."""
    settings = {"OMP_NUM_THREADS": "1", "PYTHONWARNINGS": "default"} | environment
    return subprocess.run(
        [sys.executable, *map(str, arguments)],
        cwd=ROOT,
        env=os.environ | settings,
        capture_output=True,
        text=True,
        timeout=300,
        check=False,
    )


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
