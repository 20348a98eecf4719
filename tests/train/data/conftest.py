"""Fixture: small files of text in every format."""

import json

import pyarrow as pa
import pyarrow.parquet as pq
import pytest
from small_files import TEXTS


@pytest.fixture
def written(tmp_path):
    folder = tmp_path / "text"
    folder.mkdir()
    pq.write_table(pa.table({"id": [0, 1, 2], "text": TEXTS}), folder / "a.parquet")
    lines = [json.dumps({"text": text, "other": 1}) + "\n" for text in TEXTS]
    (folder / "b.jsonl").write_text("".join(lines))
    (folder / "c.txt").write_text("\n\n".join(TEXTS) + "\n")
    return folder
