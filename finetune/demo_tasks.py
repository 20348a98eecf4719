"""Three small tasks made from the embedded corpus, in GLUE's schemas. They are not GLUE.

    python -m finetune.demo_tasks --output runs/demo-tasks

What each asks, by rule:

- demo-order (single sentence): a sentence of the documentation as it stands ("natural"), or with
  `SHUFFLED` of its neighbouring words in another order ("shuffled").
- demo-next (pair): the second sentence follows the first in its docstring ("next"), or comes from
  another docstring ("other").
- demo-overlap (pair, regression): the second sentence is the first with some words replaced by
  another sentence's; the label is 5 times the share that was kept.

Training rows come from the training part of the corpus, validation rows from its held-out part.
"""

import json
import re
from collections.abc import Iterator
from dataclasses import dataclass
from itertools import pairwise
from pathlib import Path
from typing import Any

import numpy as np

from train.data import demo_corpus
from train.loop.atomic_dir import write_dir_atomically
from train.loop.launch import run_command
from train.settings import require

SHUFFLED = 4
WORDS = range(6, 41)
"""Sentences with as many words serve: long enough to be shuffled, short enough to be quick."""

SENTENCE_END = re.compile(r"(?<=[a-z)`]\.)\s+(?=[A-Z])")
PROSE = re.compile(r"[A-Z][A-Za-z0-9 ,;'\"`_()/-]+\.")

Row = dict[str, Any]


@dataclass(frozen=True)
class DemoTasksSettings:
    """Write the demo tasks."""

    output: str = "runs/demo-tasks"
    """Folder for <task>/<split>.jsonl, as `finetune/glue.py --glue_dir` reads it."""
    cache: str = "runs/tokens"
    """Where the embedded corpus is kept (`corpus.cache` of pretraining)."""
    train_rows: int = 4000
    """Most training rows a task."""
    validation_rows: int = 1000
    """Most validation rows a task."""


def paragraphs_of_sentences(part: str, cache: str) -> Iterator[list[str]]:
    """Runs of sentences that follow each other, in prose paragraphs of one docstring."""
    with demo_corpus.written(part, cache).open(encoding="utf-8") as stream:
        for line in stream:
            for paragraph in re.split(r"\n\s*\n", json.loads(line)["text"]):
                run: list[str] = []
                for sentence in SENTENCE_END.split(" ".join(paragraph.split())):
                    if PROSE.fullmatch(sentence) and len(sentence.split()) in WORDS:
                        run.append(sentence)
                    else:  # what was left out stood between: the next one follows nothing
                        yield run
                        run = []
                yield run


def unseen(run: list[str], seen: set[str]) -> bool:
    """Whether a run holds sentences and none that was seen; they have been seen after that."""
    fresh = bool(run) and not seen.intersection(run)
    seen.update(run)
    return fresh


def order_rows(runs: list[list[str]], random: np.random.Generator) -> Iterator[Row]:
    """Sentences, half of them with a stretch of words shuffled."""
    for number, sentence in enumerate(s for run in runs for s in run):
        label = number % 2
        yield {"sentence": _shuffled(sentence, random) if label else sentence, "label": label}


def _shuffled(sentence: str, random: np.random.Generator) -> str:
    words = sentence.removesuffix(".").split()
    start = int(random.integers(len(words) - SHUFFLED + 1))
    old = words[start : start + SHUFFLED]
    new = old
    while new == old and len(set(old)) > 1:
        new = list(random.permutation(old))
    words[start : start + SHUFFLED] = new
    return " ".join(words) + "."


def next_rows(runs: list[list[str]], random: np.random.Generator) -> Iterator[Row]:
    """Neighbouring sentences, half of them with the second taken from another paragraph."""
    pairs = [(number, pair) for number, run in enumerate(runs) for pair in pairwise(run)]
    for row, (number, (first, second)) in enumerate(pairs):
        label = row % 2
        if not label:
            elsewhere = number
            while elsewhere == number or not runs[elsewhere]:
                elsewhere = int(random.integers(len(runs)))
            second = runs[elsewhere][int(random.integers(len(runs[elsewhere])))]
        yield {"sentence1": first, "sentence2": second, "label": label}


def overlap_rows(runs: list[list[str]], random: np.random.Generator) -> Iterator[Row]:
    """Sentences beside themselves with a share of words replaced."""
    sentences = [s.removesuffix(".").split() for run in runs for s in run]
    for words, other in pairwise(sentences):
        kept = random.random(len(words)) < random.random()
        mixed = [
            a if keep else other[i % len(other)] for i, (a, keep) in enumerate(zip(words, kept))
        ]
        label = 5 * sum(a == b for a, b in zip(words, mixed)) / len(words)
        first, second = " ".join(words) + ".", " ".join(mixed) + "."
        yield {"sentence1": first, "sentence2": second, "label": round(label, 3)}


def require_ours(target: Path) -> None:
    """Refuse to replace anything but tasks that were made here.

    Raises:
        InputError: It is a file, or holds one that is none of theirs.
    """
    files = {target / name / f"{part}.jsonl" for name in MAKERS for part in ("train", "validation")}
    known = files | {file.parent for file in files}
    foreign = [target] if target.is_file() else sorted({*target.rglob("*")} - known)
    rule = "must name a new folder or one of demo tasks alone"
    require(not foreign, "output", rule, f"{foreign[0]}" if foreign else "", "choose another")


MAKERS = {"demo-order": order_rows, "demo-next": next_rows, "demo-overlap": overlap_rows}


def main(settings: DemoTasksSettings) -> None:
    """Write all tasks, whole or not at all; the same rows every time.

    Raises:
        InputError: Something else is in the folder.
    """
    target = Path(settings.output)
    require_ours(target)
    seen: set[str] = set()
    with write_dir_atomically(target, replace=True) as unfinished:
        for part, most in (
            ("validation", settings.validation_rows),
            ("train", settings.train_rows),
        ):
            # stock phrases stand in many docstrings: each serves once, and not in both parts
            runs = [r for r in paragraphs_of_sentences(part, settings.cache) if unseen(r, seen)]
            np.random.default_rng(0).shuffle(runs)
            for name, make in MAKERS.items():
                rows = list(make(runs, np.random.default_rng(1)))[:most]
                file = unfinished / name / f"{part}.jsonl"
                file.parent.mkdir(exist_ok=True)
                lines = (json.dumps({"idx": i} | row) + "\n" for i, row in enumerate(rows))
                file.write_text("".join(lines), encoding="utf-8")
                print(f"{name} {part}: {len(rows)} rows")


if __name__ == "__main__":
    run_command(main, DemoTasksSettings)
