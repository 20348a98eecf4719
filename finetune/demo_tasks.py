"""A small task made from the embedded corpus, in GLUE's schema. It is not GLUE.

    python -m finetune.demo_tasks --output runs/demo-tasks

demo-order: the words of a sentence of the documentation are in their order ("natural") or backwards
("reversed"). Which words occur says nothing, so that a model must know in which order they follow.

Training rows come from the training part of the corpus, validation rows from its held-out part.
"""

import json
import re
from collections.abc import Iterator
from dataclasses import dataclass
from pathlib import Path

import numpy as np

from train.atomic_dir import check_writable, write_text_atomically
from train.command_line import run_command
from train.data import demo_corpus
from train.settings import check_fields

TASK = "demo-order"
WORDS = range(6, 41)
"""Numbers of words of a usable sentence: long enough to have an order, short enough to train on."""

SENTENCE_END = re.compile(r"(?<=[a-z)`]\.)\s+(?=[A-Z])")
PROSE = re.compile(r"[A-Z][A-Za-z0-9 ,;'\"`_()/-]+\.")


@dataclass(frozen=True)
class DemoTasksSettings:
    """Write the demo task."""

    output: str = "runs/demo-tasks"
    """Folder for <task>/<split>.jsonl, as `finetune/glue.py --glue_dir` reads it."""
    cache: str = "runs/tokens"
    """Folder of the embedded corpus (`corpus.cache` of pretraining)."""
    train_rows: int = 400
    """Maximum number of training rows."""
    validation_rows: int = 600
    """Maximum number of validation rows."""

    def __post_init__(self) -> None:
        check_fields(self, lambda x: x >= 1, "must be at least 1", "train_rows", "validation_rows")


def read_sentences(part: str, cache: str) -> Iterator[str]:
    """Read the sentences of the prose paragraphs of a corpus part."""
    with demo_corpus.corpus_file(part, cache).open(encoding="utf-8") as stream:
        for line in stream:
            for paragraph in re.split(r"\n\s*\n", json.loads(line)["text"]):
                for sentence in SENTENCE_END.split(" ".join(paragraph.split())):
                    if PROSE.fullmatch(sentence) and len(sentence.split()) in WORDS:
                        yield sentence


def main(settings: DemoTasksSettings) -> None:
    """Write the files of the task; the rows are the same every time."""
    folder = Path(settings.output) / TASK
    check_writable(folder, "output")
    limits = {"validation": settings.validation_rows, "train": settings.train_rows}
    seen: set[str] = set()
    for part, limit in limits.items():
        # stock phrases occur in many docstrings: each is used once, in one part only
        found = dict.fromkeys(read_sentences(part, settings.cache))
        sentences = [sentence for sentence in found if sentence not in seen]
        seen.update(sentences)
        np.random.default_rng(0).shuffle(sentences)
        lines = []
        for number, sentence in enumerate(sentences[:limit]):
            label = number % 2  # every second sentence is backwards
            words = sentence.removesuffix(".").split()
            text = " ".join(reversed(words) if label else words) + "."
            lines.append(json.dumps({"idx": number, "sentence": text, "label": label}) + "\n")
        write_text_atomically(folder / f"{part}.jsonl", "".join(lines))
        print(f"{TASK} {part}: {len(lines)} rows")


if __name__ == "__main__":
    run_command(main, DemoTasksSettings)
