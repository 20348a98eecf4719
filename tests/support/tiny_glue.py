"""Tiny models, a tiny tokenizer and tiny task folders for the tests of finetune/."""

from pathlib import Path

import numpy as np
import pyarrow
from numpy.typing import NDArray
from pyarrow import parquet
from scipy import stats
from sklearn import metrics
from transformers import AutoConfig, AutoModelForMaskedLM, BertTokenizerFast

import roformer
from finetune import glue
from finetune.data import Examples, make_examples, read_split_columns
from finetune.results import Result, prediction_file, read_predictions
from finetune.settings import GlueSettings
from finetune.tasks import TASKS
from tiny import TINY_MODEL
from train.loop.launch import start_accelerator

WORDS = ("good", "great", "fine", "bad", "poor", "sad", "film", "book", "play", "day", "the", "a")
SPECIAL = ("[PAD]", "[UNK]", "[CLS]", "[SEP]", "[MASK]")
SIZES = {"hidden_size": 16, "num_hidden_layers": 1, "intermediate_size": 32}
SHAPE = TINY_MODEL | SIZES | {"vocab_size": len(WORDS) + len(SPECIAL)}
OTHER_NAMES = {
    "dim": 16, "hidden_dim": 32, "n_heads": 2, "n_layers": 1, "embedding_size": 16,
    "global_attn_every_n_layers": 1, "pad_token_id": 0, "cls_token_id": 2, "sep_token_id": 3,
    "bos_token_id": 2, "eos_token_id": 3,
}  # fmt: skip
"""What DistilBERT, ELECTRA and ModernBERT call these, or need beside them."""
SCORERS = {
    "accuracy": metrics.accuracy_score,
    "f1": metrics.f1_score,
    "matthews": metrics.matthews_corrcoef,
    "pearson": lambda *values: stats.pearsonr(*values).statistic,
    "spearman": lambda *values: stats.spearmanr(*values).statistic,
}
RECIPE = {"length": 32, "batch_size": 16, "epochs": 1}
RATE = 5e-3


def tiny_tokenizer() -> BertTokenizerFast:
    vocabulary = {word: index for index, word in enumerate((*SPECIAL, *WORDS))}
    return BertTokenizerFast(vocab=vocabulary)


def tiny_model(folder: Path, kind: str, **changes) -> str:
    """A folder with an untrained model of a type of ours or transformers', and the tokenizer."""
    roformer.use_for_auto_classes()
    others = {} if kind in ("roformer", "bert") else OTHER_NAMES
    config = AutoConfig.for_model(kind, **SHAPE | others | changes)
    AutoModelForMaskedLM.from_config(config).save_pretrained(folder)
    tokenizer = tiny_tokenizer()
    if kind in ("roberta", "modernbert", "distilbert"):  # they have no segments
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
        place = draw.integers(0, len(words) + 1)
        words.insert(place, draw.choice(WORDS[:3] if label else WORDS[3:6]))
        texts.append(" ".join(words))
    return texts, labels.tolist()


def write_split(folder: Path, task: str, split: str, columns: dict[str, list]) -> None:
    file = folder / task / f"{split}.parquet"
    file.parent.mkdir(parents=True, exist_ok=True)
    parquet.write_table(pyarrow.table(columns), file)


def load_examples(
    glue_dir, task, split="train", length=32, tokenizer=None, pair_encoding="joint"
) -> Examples:
    """Read and tokenize a split; its tokens are cached in `glue_dir/tokens`."""
    columns = read_split_columns(TASKS[task], split, str(glue_dir))
    tokenizer, cache = tokenizer or tiny_tokenizer(), str(glue_dir / "tokens")
    return make_examples(TASKS[task], columns, tokenizer, length, cache, pair_encoding)


def run_paths(folder: Path) -> dict[str, str]:
    """Settings of runs that read data of `folder` and write into it."""
    names = {"glue_dir": "glue", "output": "results.jsonl", "cache": "tokens"}
    return {key: str(folder / name) for key, name in names.items()}


def run_settings(folder: Path, task: str = "sst2", **changes) -> GlueSettings:
    """A run of the model of `folder`, which writes into it."""
    values = {**run_paths(folder), **RECIPE, "learning_rate": RATE}
    values |= {"model": str(folder / "model"), "task": task}
    return GlueSettings(**values | changes)


def glue_run(settings: GlueSettings) -> Result:
    return glue.run(settings, start_accelerator())


def predictions_of(run, line: dict, split: str = "validation") -> tuple[NDArray, NDArray]:
    """Labels and logits that a run has written."""
    return read_predictions(prediction_file(run.output, line, split))


PAIR = {"premise": ["good"] * 9, "hypothesis": ["bad film"] * 9}


def write_mnli(folder: Path, tests: tuple[str, ...] = ()) -> None:
    """Nine rows in each split, of class 1 most often."""
    for split in ("train", "validation_matched", "validation_mismatched", *tests):
        labels = [-1] * 9 if split in tests else [0, 1, 1] * 3
        write_split(folder, "mnli", split, {**PAIR, "label": labels})


def write_sst2(folder: Path, train: int = 192, validation: int = 37) -> None:
    for split, rows, seed in (("train", train, 0), ("validation", validation, 1)):
        texts, labels = sentences(rows, seed)
        write_split(folder, "sst2", split, {"sentence": texts, "label": labels})


def write_stsb(folder: Path, train: int = 41, validation: int = 19) -> None:
    """The value is how positive the two sentences are together: 0, 2.5 or 5."""
    for split, rows, seed in (("train", train, 0), ("validation", validation, 1)):
        (first, a), (second, b) = sentences(rows, seed), sentences(rows, seed + 10)
        columns = {"sentence1": first, "sentence2": second}
        values = [2.5 * (x + y) for x, y in zip(a, b)]
        write_split(folder, "stsb", split, {**columns, "label": values})
