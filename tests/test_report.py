import json

import pytest

from finetune.report import ReportSettings, main
from finetune.results import append_result
from finetune.tasks import TASKS
from train.settings import InputError

BERT, ROFORMER = "runs/b/model", "runs/r/model"


def line(model: str, task: str, score: float, **changes) -> dict:
    row = TASKS[task]
    splits = row.validations
    scores = {split: {row.headline: score - 0.01 * n} for n, split in enumerate(splits)}
    return {
        "model": model,
        "model_type": "bert" if model == BERT else "roformer",
        "random_weights": False,
        "task": task,
        "label": task,
        "official": row.official,
        "seed": 0,
        "learning_rate": 1e-4,
        "epochs": 3,
        "batch_size": 32,
        "length": 128,
        "headline_metric": row.headline,
        "metrics": scores,
        "majority_metrics": {split: {row.headline: 0.5} for split in splits},
        **changes,
    }


def report(folder, lines) -> str:
    for values in lines:
        append_result(str(folder / "results.jsonl"), values)
    return main(ReportSettings(str(folder / "results.jsonl")))


def row_of(text: str, name: str, heading: str = "GLUE, development set") -> list[str]:
    """The cells of a row, by its name, in the table under a heading."""
    section = text.split(f"### {heading}")[1].split("###")[0]
    (found,) = (x for x in section.splitlines() if x.startswith(f"| {name} |"))
    return [cell.strip() for cell in found.split("|")[2:-1]]


def test_cells_are_means_with_spread_and_count(tmp_path):
    lines = [line(BERT, "rte", 0.5 + 0.1 * seed, seed=seed) for seed in range(3)]
    text = report(tmp_path, lines)
    assert row_of(text, "b (bert)") == ["60.0 ± 10.0 (3)", "60.0"]
    assert row_of(text, "majority baseline") == ["50.0", "50.0"]


def test_mnli_shows_both_splits_and_counts_once_in_the_average(tmp_path):
    text = report(tmp_path, [line(BERT, "mnli", 0.8), line(BERT, "cola", 0.1)])
    assert row_of(text, "b (bert)") == ["10.0 (1)", "80.0/79.0 (1)", f"{(10 + 79.5) / 2:.1f}"]


def test_a_row_with_a_task_missing_has_no_average(tmp_path):
    lines = [line(BERT, "rte", 0.6), line(BERT, "cola", 0.1), line(ROFORMER, "rte", 0.7)]
    text = report(tmp_path, lines)
    assert row_of(text, "r (roformer)") == ["–", "70.0 (1)", "–"]  # noqa: RUF001


def test_the_difference_is_taken_seed_by_seed(tmp_path):
    lines = [line(BERT, "rte", value, seed=seed) for seed, value in enumerate((0.5, 0.6, 0.9))]
    lines += [line(ROFORMER, "rte", value, seed=seed) for seed, value in enumerate((0.52, 0.62))]
    text = report(tmp_path, lines)
    assert row_of(text, "RoFormer − BERT") == ["+2.0 ± 0.0 (2)", "+2.0"]  # noqa: RUF001


def test_there_is_no_difference_between_more_than_one_pair(tmp_path):
    lines = [line(BERT, "rte", 0.6), line(ROFORMER, "rte", 0.7)]
    text = report(tmp_path, [*lines, line("other", "rte", 0.7)])
    assert "BERT |" not in text


def test_controls_have_their_own_row_and_do_not_enter_the_difference(tmp_path):
    lines = [line(model, "rte", 0.6) for model in (BERT, ROFORMER)]
    lines += [line(model, "rte", 0.4, random_weights=True) for model in (BERT, ROFORMER)]
    text = report(tmp_path, lines)
    assert row_of(text, "r (roformer), random weights") == ["40.0 (1)", "40.0"]
    assert row_of(text, "RoFormer − BERT") == ["+0.0 (1)", "+0.0"]  # noqa: RUF001


def test_reduced_and_demo_tasks_never_enter_the_official_table(tmp_path):
    reduced = line(BERT, "qnli", 0.9, label="qnli (9k)", official=False)
    text = report(tmp_path, [line(BERT, "rte", 0.6), reduced, line(BERT, "demo-next", 0.8)])
    assert row_of(text, "b (bert)") == ["60.0 (1)", "60.0"]
    missing = "GLUE tasks with rows missing (not the official splits, not a GLUE score)"
    assert "qnli (9k)" in text.split(missing)[1]
    assert row_of(text, "b (bert)", missing) == ["90.0 (1)", "90.0"]
    assert row_of(text, "b (bert)", "demo tasks (not GLUE)") == ["80.0 (1)", "80.0"]


def test_recipes_are_not_mixed(tmp_path):
    lines = [line(BERT, "rte", rate * 1e4, learning_rate=rate) for rate in (2e-5, 3e-5)]
    text = report(tmp_path, lines)
    name = "b (bert), rate 2e-05, 3 epochs, batch 32, length 128"
    assert row_of(text, name) == ["20.0 (1)", "20.0"]


def test_a_run_made_twice_counts_once_and_as_made_last(tmp_path):
    text = report(tmp_path, [line(BERT, "rte", 0.6), line(BERT, "rte", 0.7)])
    assert row_of(text, "b (bert)") == ["70.0 (1)", "70.0"]


def test_models_of_one_name_keep_their_paths(tmp_path):
    text = report(tmp_path, [line(BERT, "rte", 0.6), line("old/b", "rte", 0.7)])
    assert row_of(text, "old/b (roformer)") == ["70.0 (1)", "70.0"]
    assert row_of(text, "runs/b/model (bert)") == ["60.0 (1)", "60.0"]


def test_all_files_are_written_and_say_the_same(tmp_path, capsys):
    lines = [line(BERT, task, 0.6, seed=seed) for task in ("rte", "mnli") for seed in (0, 1)]
    text = report(tmp_path, [*lines, line(BERT, "demo-order", 0.6)])
    assert capsys.readouterr().out.strip() == text.strip()
    assert (tmp_path / "report.md").read_text() == text
    tables = json.loads((tmp_path / "report.json").read_text())["tables"]
    assert tables[0]["rows"][0]["cells"]["rte"]["seeds"] == {"0": [60.0], "1": [60.0]}
    assert (tmp_path / "report.png").read_bytes().startswith(b"\x89PNG")


def test_a_torn_last_line_is_one_warning(tmp_path, capsys):
    report(tmp_path, [line(BERT, "rte", 0.6)])
    with (tmp_path / "results.jsonl").open("a") as stream:
        stream.write('{"model": "b')
    text = main(ReportSettings(str(tmp_path / "results.jsonl"), output=str(tmp_path / "out")))
    assert row_of(text, "b (bert)") == ["60.0 (1)", "60.0"]
    assert len(capsys.readouterr().err.splitlines()) == 1


def test_no_results_are_refused(tmp_path):
    with pytest.raises(InputError, match="results must be a file"):
        main(ReportSettings(str(tmp_path / "results.jsonl")))
    (tmp_path / "results.jsonl").write_text("")
    with pytest.raises(InputError, match="results must hold a complete line"):
        main(ReportSettings(str(tmp_path / "results.jsonl")))
