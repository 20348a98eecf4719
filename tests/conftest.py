"""A tiny language, its tokenizer, and tiny models: what most tests stand on."""

import os

os.environ["HF_HUB_OFFLINE"] = "1"  # read when huggingface_hub is imported
os.environ["TOKENIZERS_PARALLELISM"] = "false"

import json
import random
import subprocess
import sys
from collections.abc import Callable, Iterator
from pathlib import Path

import pytest
import torch
import transformers
import yaml
from packaging.version import Version

import roformer
from train import vocabulary

ROOT = Path(__file__).parent.parent

transformers.utils.logging.disable_progress_bar()
torch.set_num_threads(1)  # tiny models: a second thread costs more than it brings

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


@pytest.fixture(scope="session")
def corpus_folder(tmp_path_factory: pytest.TempPathFactory) -> Path:
    """train.jsonl and validation.jsonl: documents of 1 to 12 sentences each."""
    folder = tmp_path_factory.mktemp("corpus")
    for part, number, seed in (("train", 300, 1), ("validation", 40, 2)):
        draw = random.Random(seed)
        texts = [" ".join(sentences(draw.randint(1, 12), seed * 1000 + i)) for i in range(number)]
        lines = (json.dumps({"text": text}) + "\n" for text in texts)
        (folder / f"{part}.jsonl").write_text("".join(lines))
    return folder


@pytest.fixture
def other_text(tmp_path: Path) -> Path:
    """A jsonl of 40 documents that are in neither part of `corpus_folder`."""
    texts = (" ".join(sentences(5, 9000 + i)) for i in range(40))
    (tmp_path / "other.jsonl").write_text("".join(json.dumps({"text": x}) + "\n" for x in texts))
    return tmp_path / "other.jsonl"


@pytest.fixture(scope="session")
def real_data() -> Path:
    """The folder of real texts and GLUE, absolute: runs change folder and link to it."""
    folder = Path(os.environ.get("ROFORMER_DATA", ""))
    assert (folder / "corpus").is_dir(), "ROFORMER_DATA must name the folder of the real data"
    return folder.resolve()


@pytest.fixture(scope="session")
def tokenizer_folder(tmp_path_factory: pytest.TempPathFactory) -> Path:
    words = sorted({w for s in sentences(400, 3) for w in s.split()})
    folder = tmp_path_factory.mktemp("tokenizer") / "tiny"
    vocabulary.save([*vocabulary.SPECIAL, *words], folder)
    return folder


@pytest.fixture(scope="session")
def tokenizer(tokenizer_folder: Path) -> transformers.PreTrainedTokenizerBase:
    return vocabulary.load(str(tokenizer_folder))


@pytest.fixture
def config() -> roformer.RoFormerConfig:
    return roformer.RoFormerConfig(vocab_size=60, **TINY_MODEL)


@pytest.fixture
def pretrain_flags(corpus_folder: Path, tokenizer_folder: Path, tmp_path: Path) -> list[str]:
    """The `--config` of a tiny pretraining run of 12 steps in `tmp_path`."""
    settings = {
        "model": {"config": TINY_MODEL},
        "corpus": {
            "train": str(corpus_folder / "train.jsonl"),
            "validation": str(corpus_folder / "validation.jsonl"),
            "tokenizer": str(tokenizer_folder),
            "length": 32,
            "cache": str(tmp_path / "tokens"),
        },
        "optim": {"steps": 12, "warmup_steps": 2, "batch_size": 16, "micro_batch": 16},
        "run": {
            "name": "tiny",
            "folder": str(tmp_path / "runs"),
            "log_every": 1,
            "validate_every": 6,
            "save_every": 4,
            "tracker": None,
        },
    }
    (tmp_path / "tiny.yaml").write_text(yaml.safe_dump(settings))
    return [f"--config={tmp_path / 'tiny.yaml'}"]


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


@pytest.fixture
def start(tmp_path: Path) -> Iterator[Callable]:
    """Starts a command; whatever is started is gone when the test ends."""
    from real_runs import starting  # which needs this file

    with starting(tmp_path) as begin:
        yield begin
