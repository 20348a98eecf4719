"""The results files of this repository: read by the report, and their scores recomputed."""

import collections

import numpy as np
import pytest
from pyarrow import parquet

from finetune.report.runs import build_groups
from finetune.results import prediction_file, read_results
from finetune.tasks import TASKS
from tiny import ROOT, name_of
from tiny_glue import SCORERS

ELSEWHERE = ("long", "pair-50m", "pair-100m")  # their predictions are not in the tree
FOUND = [x for x in (ROOT / "results").rglob("*.jsonl") if x.parent.name not in ELSEWHERE]
FILES = sorted(file for file in FOUND if '"headline_metric"' in file.read_text()[:5000])


@pytest.mark.parametrize("file", FILES, ids=name_of)
def test_every_score_of_a_published_file_follows_from_its_predictions(file, capsys):
    lines = read_results(str(file))
    reported = collections.Counter()
    for group in build_groups(lines):
        for run in group.recorded().itertuples():
            reported[run.run_id] += 1
            values = []
            for split in TASKS[run.task].validation_splits:
                table = parquet.read_table(prediction_file(str(file), run.result, split))
                labels, logits = table["label"].to_numpy(), np.stack(table["logits"].to_numpy())
                is_value = TASKS[run.task].is_regression
                answers = logits[:, 0].astype(float) if is_value else logits.argmax(axis=1)
                for metric, score in run.metrics[split].items():
                    assert SCORERS[metric](labels, answers) == pytest.approx(score, abs=2e-6)
                values.append(run.metrics[split][TASKS[run.task].headline])
            assert run.score == pytest.approx(100 * np.mean(values))
    assert len(reported) == len(lines)
    assert set(reported.values()) == {1}
    assert capsys.readouterr().err == ""
