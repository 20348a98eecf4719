"""The commands on real text and real GLUE, from the folder named by ROFORMER_DATA."""

import json
import shutil

import numpy as np
import pytest

from launched_runs import LAUNCH
from tiny import command, log_rows

pytestmark = pytest.mark.slow


def test_wikipedia_to_rte_by_the_readmes_commands(real_data, tmp_path):
    (tmp_path / "text").mkdir()
    shutil.copy(real_data / "corpus" / "wikipedia" / "validation.parquet", tmp_path / "text")
    command(
        *LAUNCH, "--quiet", "train/pretrain.py", "--config", "configs/pretrain/fast-small.yaml",
        "--config", "configs/model/roformer-tiny.yaml", "--corpus.train", tmp_path / "text",
        "--corpus.validation", "2%", "--run.name", "tiny", "--run.folder", tmp_path,
        "--corpus.cache", tmp_path / "tokens", "--stages", "[]", "--optim.steps", "60",
        "--optim.warmup_steps", "10", "--run.log_every", "20",
    )  # fmt: skip
    losses = log_rows(tmp_path / "tiny")
    assert losses[60] < losses[20] - 0.5
    command(
        *LAUNCH, "--quiet", "finetune/glue.py", "--model", tmp_path / "tiny" / "model",
        "--task", "rte", "--epochs", "1", "--glue_dir", real_data / "glue",
        "--output", tmp_path / "results.jsonl", "--cache", tmp_path / "tokens",
    )  # fmt: skip
    (line,) = map(json.loads, (tmp_path / "results.jsonl").read_text().splitlines())
    assert line["official"]
    assert np.isfinite(line["headline"])
    assert "RTE" in command("-m", "finetune.report", tmp_path / "results.jsonl").stdout
