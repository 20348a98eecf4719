"""Tiny models, a tiny tokenizer and tiny task folders for the tests of finetune/."""

from collections.abc import Callable
from pathlib import Path

import numpy as np
import pyarrow
import pytest
from pyarrow import parquet
from transformers import (
    AutoConfig,
    AutoModelForMaskedLM,
    BertConfig,
    BertForMaskedLM,
    BertTokenizerFast,
)

import roformer
from finetune.data import Examples, make_examples
from finetune.task_data import read_split_columns
from finetune.tasks import Task
from train.settings import InputError

WORDS = ("good", "great", "fine", "bad", "poor", "sad", "film", "book", "play", "day", "the", "a")
SPECIAL = ("[PAD]", "[UNK]", "[CLS]", "[SEP]", "[MASK]")
SHAPE = {
    "vocab_size": len(WORDS) + len(SPECIAL),
    "hidden_size": 16,
    "num_hidden_layers": 1,
    "num_attention_heads": 2,
    "intermediate_size": 32,
    "max_position_embeddings": 64,
}


def tiny_tokenizer() -> BertTokenizerFast:
    vocabulary = {word: index for index, word in enumerate((*SPECIAL, *WORDS))}
    return BertTokenizerFast(vocab=vocabulary)


def tiny_model(folder: Path, kind: str, **changes) -> str:
    """A folder with an untrained model and the tokenizer; `kind` is roformer or bert."""
    classes = {
        "roformer": (roformer.RoFormerConfig, roformer.RoFormerForMaskedLM),
        "bert": (BertConfig, BertForMaskedLM),
    }
    config, model = classes[kind]
    model(config(**{**SHAPE, **changes})).save_pretrained(folder)
    tiny_tokenizer().save_pretrained(folder)
    return str(folder)


def other_model(folder: Path, kind: str, **changes) -> str:
    """An untrained encoder of any type of transformers', by the names most of them share."""
    shape = {**SHAPE, "pad_token_id": 0, "hidden_size": 16, "dim": 16, "hidden_dim": 32}
    shape |= {"n_heads": 2, "n_layers": 1, "embedding_size": 16, "global_attn_every_n_layers": 1}
    shape |= {"cls_token_id": 2, "sep_token_id": 3, "bos_token_id": 2, "eos_token_id": 3, **changes}
    config = AutoConfig.for_model(kind, **shape)
    AutoModelForMaskedLM.from_config(config).save_pretrained(folder)
    tokenizer = tiny_tokenizer()
    if kind != "electra":
        tokenizer.model_input_names = ["input_ids", "attention_mask"]
    tokenizer.save_pretrained(folder)
    return str(folder)


def sentences(rows: int, seed: int) -> tuple[list[str], list[int]]:
    """Two to nine words around one that tells the class: good, great, fine or bad, poor, sad."""
    draw = np.random.default_rng(seed)
    labels = draw.integers(0, 2, rows)
    texts = []
    for label in labels:
        words = list(draw.choice(WORDS[6:], draw.integers(1, 9)))
        words.insert(
            draw.integers(0, len(words) + 1), draw.choice(WORDS[:3] if label else WORDS[3:6])
        )
        texts.append(" ".join(words))
    return texts, labels.tolist()


def write_split(folder: Path, task: str, split: str, columns: dict[str, list]) -> Path:
    file = folder / task / f"{split}.parquet"
    file.parent.mkdir(parents=True, exist_ok=True)
    parquet.write_table(pyarrow.table(columns), file)
    return file


def load_examples(task: Task, split: str, glue_dir: str | None, *options) -> Examples:
    """Read and tokenize a split; `options` are those of `make_examples`."""
    return make_examples(task, read_split_columns(task, split, glue_dir), *options)


def refused(call: Callable[[], object], *words: str) -> None:
    """Check that a call is refused in one line that has the words."""
    with pytest.raises(InputError) as caught:
        call()
    message = str(caught.value)
    assert "\n" not in message
    assert [word for word in words if word not in message] == []


PAIR = {"premise": ["good"] * 9, "hypothesis": ["bad film"] * 9}


def write_mnli(folder: Path, tests: tuple[str, ...] = ()) -> None:
    """Nine rows in each split, of class 1 most often."""
    for split in ("train", "validation_matched", "validation_mismatched", *tests):
        labels = [-1] * 9 if split in tests else [0, 1, 1] * 3
        write_split(folder, "mnli", split, {**PAIR, "label": labels})


def write_sst2(folder: Path, train: int = 192, validation: int = 37) -> str:
    for split, rows, seed in (("train", train, 0), ("validation", validation, 1)):
        texts, labels = sentences(rows, seed)
        write_split(folder, "sst2", split, {"sentence": texts, "label": labels})
    return str(folder)


def write_stsb(folder: Path, train: int = 41, validation: int = 19) -> str:
    """The value is how positive the two sentences are together: 0, 2.5 or 5."""
    for split, rows, seed in (("train", train, 0), ("validation", validation, 1)):
        first, a = sentences(rows, seed)
        second, b = sentences(rows, seed + 10)
        values = [2.5 * (x + y) for x, y in zip(a, b)]
        write_split(
            folder, "stsb", split, {"sentence1": first, "sentence2": second, "label": values}
        )
    return str(folder)
