"""Three small tasks made from the embedded corpus, in GLUE's schemas. They are not GLUE.

    python -m finetune.demo_tasks --output runs/demo-tasks

- demo-order (single sentence): a sentence of the documentation is unchanged ("natural") or has
  `SHUFFLED` neighbouring words in another order ("shuffled").
- demo-next (pair): the second sentence follows the first in its docstring ("next") or comes from
  another docstring ("other").
- demo-overlap (pair, regression): the second sentence is the first with some words replaced by
  words of another sentence; the label is 5 times the share of words kept.

Training rows come from the training part of the corpus, validation rows from its held-out part.
"""

import json
import re
from collections.abc import Callable, Iterator
from dataclasses import dataclass
from itertools import chain, pairwise
from pathlib import Path
from typing import Any

import numpy as np

from train.atomic_dir import write_dir_atomically
from train.command_line import run_command
from train.data import demo_corpus
from train.settings import require

SHUFFLED = 4
WORDS = range(6, 41)
"""Numbers of words of a usable sentence: long enough to shuffle, short enough to train on."""

SENTENCE_END = re.compile(r"(?<=[a-z)`]\.)\s+(?=[A-Z])")
PROSE = re.compile(r"[A-Z][A-Za-z0-9 ,;'\"`_()/-]+\.")

Sequences = list[list[str]]
"""Sentences that follow each other in one paragraph, for each paragraph."""
Row = dict[str, Any]


@dataclass(frozen=True)
class DemoTasksSettings:
    """Write the demo tasks."""

    output: str = "runs/demo-tasks"
    """Folder for <task>/<split>.jsonl, as `finetune/glue.py --glue_dir` reads it."""
    cache: str = "runs/tokens"
    """Folder of the embedded corpus (`corpus.cache` of pretraining)."""
    train_rows: int = 4000
    """Maximum number of training rows of a task."""
    validation_rows: int = 1000
    """Maximum number of validation rows of a task."""


def read_sequences(part: str, cache: str) -> Iterator[list[str]]:
    """Read sequences of consecutive sentences from the prose paragraphs of a corpus part."""
    with demo_corpus.corpus_file(part, cache).open(encoding="utf-8") as stream:
        for line in stream:
            for paragraph in re.split(r"\n\s*\n", json.loads(line)["text"]):
                sequence: list[str] = []
                for sentence in SENTENCE_END.split(" ".join(paragraph.split())):
                    if PROSE.fullmatch(sentence) and len(sentence.split()) in WORDS:
                        sequence.append(sentence)
                    else:  # a skipped sentence ends the sequence
                        yield sequence
                        sequence = []
                yield sequence


def order_rows(sequences: Sequences, rng: np.random.Generator) -> Iterator[Row]:
    """Make rows of sentences, every second one with shuffled words."""
    for number, sentence in enumerate(chain.from_iterable(sequences)):
        label = number % 2
        yield {"sentence": _shuffle(sentence, rng) if label else sentence, "label": label}


def _shuffle(sentence: str, rng: np.random.Generator) -> str:
    words = sentence.removesuffix(".").split()
    start = int(rng.integers(len(words) - SHUFFLED + 1))
    old = words[start : start + SHUFFLED]
    new = old
    while new == old and len(set(old)) > 1:
        new = list(rng.permutation(old))
    words[start : start + SHUFFLED] = new
    return " ".join(words) + "."


def next_rows(sequences: Sequences, rng: np.random.Generator) -> Iterator[Row]:
    """Make rows of neighbouring sentences, every second one with a second from elsewhere."""
    pairs = [(i, pair) for i, sentences in enumerate(sequences) for pair in pairwise(sentences)]
    for row, (index, (first, second)) in enumerate(pairs):
        label = row % 2
        if not label:
            other = index
            while other == index or not sequences[other]:
                other = int(rng.integers(len(sequences)))
            second = sequences[other][int(rng.integers(len(sequences[other])))]
        yield {"sentence1": first, "sentence2": second, "label": label}


def overlap_rows(sequences: Sequences, rng: np.random.Generator) -> Iterator[Row]:
    """Make rows of a sentence and the same sentence with a share of its words replaced."""
    sentences = [s.removesuffix(".").split() for s in chain.from_iterable(sequences)]
    for words, other in pairwise(sentences):
        kept = rng.random(len(words)) < rng.random()
        mixed = [
            word if keep else other[i % len(other)]
            for i, (word, keep) in enumerate(zip(words, kept))
        ]
        label = 5 * sum(a == b for a, b in zip(words, mixed)) / len(words)
        first, second = " ".join(words) + ".", " ".join(mixed) + "."
        yield {"sentence1": first, "sentence2": second, "label": round(label, 3)}


TASK_ROWS: dict[str, Callable[[Sequences, np.random.Generator], Iterator[Row]]] = {
    "demo-order": order_rows,
    "demo-next": next_rows,
    "demo-overlap": overlap_rows,
}


def check_output(output: Path) -> None:
    """Refuse to replace a folder that holds anything but demo tasks.

    Raises:
        InputError: It does, or it is a file.
    """
    parts = ("train", "validation")
    files = {output / task / f"{part}.jsonl" for task in TASK_ROWS for part in parts}
    known = files | {file.parent for file in files}
    foreign = [output] if output.is_file() else sorted({*output.rglob("*")} - known)
    rule = "must name a new folder or one of demo tasks alone"
    require(not foreign, "output", rule, str(foreign[0]) if foreign else "", "choose another")


def main(settings: DemoTasksSettings) -> None:
    """Write all tasks atomically; the rows are the same every time.

    Raises:
        InputError: The output folder holds something else.
    """
    check_output(Path(settings.output))
    limits = {"validation": settings.validation_rows, "train": settings.train_rows}
    seen: set[str] = set()
    with write_dir_atomically(Path(settings.output), replace=True) as folder:
        for part, limit in limits.items():
            sequences = []
            for sequence in read_sequences(part, settings.cache):
                # stock phrases occur in many docstrings: each is used once, in one part only
                if sequence and not seen.intersection(sequence):
                    sequences.append(sequence)
                seen.update(sequence)
            np.random.default_rng(0).shuffle(sequences)
            for name, make_rows in TASK_ROWS.items():
                rows = list(make_rows(sequences, np.random.default_rng(1)))[:limit]
                file = folder / name / f"{part}.jsonl"
                file.parent.mkdir(exist_ok=True)
                lines = (json.dumps({"idx": i} | row) + "\n" for i, row in enumerate(rows))
                file.write_text("".join(lines), encoding="utf-8")
                print(f"{name} {part}: {len(rows)} rows")


if __name__ == "__main__":
    run_command(main, DemoTasksSettings)
