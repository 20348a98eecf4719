"""Fixtures: small files of text in every format, and their token stores."""

import json

import pyarrow as pa
import pyarrow.parquet as pq
import pytest

from tiny_tokens import TEXTS, corpus
from train.data.corpus import tokenize_corpus


@pytest.fixture
def written(tmp_path):
    folder = tmp_path / "text"
    folder.mkdir()
    pq.write_table(pa.table({"id": [0, 1, 2], "text": TEXTS}), folder / "a.parquet")
    lines = [json.dumps({"text": text, "other": 1}) + "\n" for text in TEXTS]
    (folder / "b.jsonl").write_text("".join(lines))
    (folder / "c.txt").write_text("\n\n".join(TEXTS) + "\n")
    return folder


@pytest.fixture
def tokenize(tmp_path, tokenizer):
    def tokenize(source, tokenizer=tokenizer, part="train", **changes):
        return tokenize_corpus(corpus(source, tmp_path, **changes), part, tokenizer)

    return tokenize
