"""The results files of this repository: read by the report, and their scores recomputed."""

import collections
import re

import numpy as np
import pytest
from pyarrow import parquet

from finetune.report.runs import build_groups
from finetune.results import prediction_file, read_results
from finetune.tasks import TASKS
from tiny import ROOT, name_of
from tiny_glue import SCORERS
from train.intervals import compare, holm_corrected
from train.run_names import model_name

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


def test_the_tables_over_two_files_of_the_pair_follow_from_them():
    folder, scores = ROOT / "results" / "pair", collections.defaultdict(dict)
    for file in ("results.jsonl", "results-float32.jsonl"):
        for run in read_results(str(folder / file)):
            if run["learning_rate"] and not run["random_weights"]:
                key = TASKS[run["task"]].title.split()[0], file, model_name(run["model"])
                scores[key][run["seed"]] = 100 * run["headline"]
    page = (folder / "README.md").read_text().translate(str.maketrans("−", "-", "*"))  # noqa: RUF001
    row = r"^\| (\S+)[^|]*\| ([01]) \| (.*) \| (.*) \| (.*) \| (\S+) \| (\S+) \|"
    rows = re.findall(row, page, re.MULTILINE)
    means = dict(
        re.findall(r"^\| ([^\s,]+)[^|]*\| ([^|]*±[^|]* \| [^|]*±[^|]*) \|", page, re.MULTILINE)
    )
    assert means.keys() == {task for task, *_ in rows}
    assert len(means) == 9
    for seed, suffix in enumerate(("", "-1")):
        printed = {task: found for task, number, *found in rows if number == str(seed)}
        pairs = {task: {} for task in printed}
        for (task, file, model), runs in scores.items():
            if task in printed and model == f"roformer-small{suffix}":
                others = scores[task, file, f"bert-small{suffix}"]
                found = {s: (runs[s], others[s]) for s in runs.keys() & others.keys()}
                pairs[task] = found | pairs[task]  # of two devices the GPU's
        tests = {}
        for task, found in pairs.items():
            both = [{s: pair[i] for s, pair in found.items()} for i in range(2)]
            tests[task] = compare(*both, len(found))
            for cell, runs in zip(means[task].split(" | "), both):
                mean, spread = np.mean([*runs.values()]), np.std([*runs.values()], ddof=1)
                assert cell.split(", ")[seed] == f"{mean:.1f} ± {spread:.1f}"
        for task, c in holm_corrected(tests).items():
            values = ", ".join(f"{c.differences[s]:+.2f}" for s in sorted(c.differences))
            low, high = c.t_interval
            cells = [values, f"{c.mean:+.2f}", f"{low:+.2f} to {high:+.2f}", f"{c.p:.3f}"]
            assert printed[task][:-1] == cells
            assert float(printed[task][-1]) == pytest.approx(c.p_holm, rel=0.05)
