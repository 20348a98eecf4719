"""The results files of this repository: read by the report, and their scores recomputed."""

import collections
from pathlib import Path

import numpy as np
import pytest
from pyarrow import parquet
from scipy import stats
from sklearn import metrics

from finetune.report.runs import build_groups
from finetune.results import prediction_file, read_results
from finetune.tasks import TASKS

ROOT = Path(__file__).parents[3]
FILES = [
    file
    for file in sorted((ROOT / "results").rglob("*.jsonl"))
    if '"headline_metric"' in file.read_text()[:5000]
    and file.parent.name != "long"  # their predictions were too large to keep
]


def recomputed(metric: str, labels: np.ndarray, logits: np.ndarray) -> float:
    """Score predictions by scikit-learn and scipy alone."""
    if metric in ("pearson", "spearman"):
        test = stats.pearsonr if metric == "pearson" else stats.spearmanr
        return float(test(labels, logits[:, 0].astype(float)).statistic)
    scorers = {"accuracy": metrics.accuracy_score, "matthews": metrics.matthews_corrcoef}
    return float({**scorers, "f1": metrics.f1_score}[metric](labels, logits.argmax(axis=1)))


@pytest.mark.parametrize("file", FILES, ids=lambda file: str(file.relative_to(ROOT / "results")))
def test_every_score_of_a_published_file_follows_from_its_predictions(file, capsys):
    lines = read_results(str(file))
    reported = collections.Counter()
    for group in build_groups(lines):
        for run in group.runs[group.runs["best_of"] == ""].itertuples():
            if run.kind == "majority":
                continue
            reported[run.run_id] += 1
            values = []
            for split in TASKS[run.task].validation_splits:
                table = parquet.read_table(prediction_file(str(file), run.result, split))
                labels, logits = table["label"].to_numpy(), np.stack(table["logits"].to_numpy())
                for metric, score in run.metrics[split].items():
                    assert recomputed(metric, labels, logits) == pytest.approx(score, abs=2e-6)
                values.append(run.metrics[split][TASKS[run.task].headline])
            assert run.score == pytest.approx(100 * np.mean(values))
    assert len(reported) == len(lines)
    assert set(reported.values()) == {1}
    assert capsys.readouterr().err == ""
