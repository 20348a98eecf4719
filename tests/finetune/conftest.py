"""Fixture: what a fine-tuning run needs."""

from pathlib import Path

import pytest

from tiny_glue import tiny_model, write_mnli, write_sst2, write_stsb


@pytest.fixture
def folder(tmp_path: Path) -> Path:
    """A folder with an untrained RoFormer in model/, and SST-2, STS-B and MNLI in glue/."""
    tiny_model(tmp_path / "model", "roformer")
    for write in (write_sst2, write_stsb, write_mnli):
        write(tmp_path / "glue")
    return tmp_path
