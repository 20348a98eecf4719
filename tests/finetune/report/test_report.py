"""The tables of a report: which runs share a cell, and what it says of them."""

import functools
import re
from pathlib import Path

import numpy as np
import pytest

from finetune.report.__main__ import ReportSettings, latex_tables, main
from finetune.report.runs import GLUE_TASKS, average, build_groups
from finetune.report.tables import DASH, group_tables, paper_table, problem_table, score_table
from tiny import refused
from tiny_results import BERT, ROFORMER, diverged, failed, line, report, seeds, texts, write
from train.tables import escape_cell, markdown_table


def scores(lines, **options) -> dict[str, dict[str, str]]:
    return texts(score_table(report(lines, **options).group))


def test_the_average_is_glues_the_metrics_of_a_task_first():
    lines = [*seeds(BERT, "mrpc", (0.9, 0.8)), *seeds(BERT, "mnli", (0.6, 0.5))]
    lines += seeds(BERT, "stsb", (0.4, 0.2))
    assert scores(lines)["small-bert"]["MNLI m/mm, accuracy"] == "55.0 ± 7.1/54.0 ± 7.1 (2)"
    runs = report(lines).group.rows
    runs = runs[runs["kind"] == "model"]
    # beside the headline metric the other one is 0.02 less, and MNLI's second split 0.01
    tasks = np.array([[89.0, 79.0], [39.0, 19.0], [59.5, 49.5]])
    mean, by_seed = average(runs, ["mrpc", "stsb", "mnli"])
    assert mean == pytest.approx(tasks.mean())
    assert list(by_seed.values()) == pytest.approx(tasks.mean(axis=0))


def test_only_all_nine_official_tasks_make_the_glue_average():
    tasks = ("cola", "sst2", "mrpc", "stsb", "qqp", "mnli", "qnli", "rte", "wnli")
    lines = [line(BERT, task, 0.6) for task in tasks]
    assert set(tasks) == GLUE_TASKS
    assert list(scores(lines)["small-bert"])[-1] == "GLUE average"
    missing = list(scores(lines[1:])["small-bert"])
    assert missing[-1] == "mean of these 8 tasks, not the GLUE average"
    reduced = {"official": False, "dataset": "cola (9k)"}
    both = [*lines[1:], line(BERT, "cola", 0.9, **reduced)]
    assert list(scores(both)["small-bert"])[-1] == missing[-1]


def test_the_average_needs_every_task_and_has_a_spread_where_all_have_the_same_seeds():
    lines = [*seeds(BERT, "rte", (0.6, 0.8)), *seeds(BERT, "wnli", (0.2, 0.4))]
    assert scores(lines)["small-bert"].popitem()[1] == "50.0 ± 14.1 (2)"
    assert scores(lines[:-1])["small-bert"].popitem()[1] == "45.0"
    lines.append(line(ROFORMER, "rte", 0.7))
    assert list(scores(lines)["small-roformer"].values()) == ["70.0 (1)", DASH, DASH]


def test_reduced_and_demo_tasks_are_never_in_the_official_table():
    lines = [line(BERT, "rte", 0.6), line(BERT, "demo-order", 0.8)]
    lines.append(line(BERT, "qnli", 0.9, dataset="qnli (9k)", official=False))
    lines.append(line(ROFORMER, "qnli", 0.7))
    groups = {group.name: list(group.titles.values()) for group in build_groups(lines)}
    assert groups == {
        "official": ["QNLI, accuracy", "RTE, accuracy"],
        "reduced": ["qnli (9k), accuracy"],
        "demo": ["demo-order, accuracy"],
    }
    assert scores(lines)["small-bert"]["QNLI, accuracy"] == DASH


def test_a_row_names_what_differs_between_protocols_and_no_more():
    lines = [line(BERT, "rte", rate * 1e4, learning_rate=rate) for rate in (2e-5, 3e-5)]
    lines.append(line(BERT, "rte", 0.6, weight_decay=0.0, tokenizer="words"))
    names = list(scores(lines))
    assert "small-bert, rate 2e-05, decay 0.01" in names
    assert "small-bert, tokenizer words, rate 0.0002, decay 0" in names


def test_a_task_with_a_protocol_of_its_own_says_so_in_its_column_and_splits_no_row():
    lines = [line(model, "stsb", 0.5, epochs=10) for model in (BERT, ROFORMER)]
    lines += [line(model, task, 0.6) for model in (BERT, ROFORMER) for task in ("cola", "mrpc")]
    own = "STS-B, Spearman, epochs 10"
    shared = {"CoLA, Matthews": "60.0 (1)", "MRPC, F1": "60.0 (1)", own: "50.0 (1)"}
    rows = scores(lines)
    assert list(rows) == ["small-bert", "small-roformer", "majority class"]
    assert list(rows["small-bert"].items())[:3] == list(shared.items())
    assert len(report(lines).differences[0].tasks) == 4  # with the average
    printed = texts(paper_table(report(lines).group))["small-bert"]
    assert (printed["MRPC, F1"], printed["STS-B, Spearman"]) == ("60.0 (1)", "50.0 (1)")
    twice = scores([*lines, line(BERT, "stsb", 0.3)])  # which run of it would the row have?
    assert "STS-B, Spearman" in twice["small-bert, epochs 10"]
    assert twice["small-bert, epochs 3"]["STS-B, Spearman"] == "30.0 (1)"


def test_models_of_one_name_keep_their_paths():
    rows = scores([line(BERT, "rte", 0.6), line("old/small-bert", "rte", 0.7)])
    assert list(rows)[:2] == ["old/small-bert", "runs/small-bert"]


def test_runs_on_different_data_share_no_cell():
    """The name of a data set says how many rows there are, not which."""
    made = [line(ROFORMER, "rte", score, seed=seed, glue_dir=data)
            for score, seed, data in ((0.6, 0, "a"), (0.9, 0, "b"), (0.7, 1, "a"))]  # fmt: skip
    rows = scores([*made, line(ROFORMER, "cola", 0.3)])
    assert rows["small-roformer, data a"]["RTE, accuracy"] == "65.0 ± 7.1 (2)"
    assert rows["small-roformer, data b"]["RTE, accuracy"] == "90.0 (1)"
    assert rows["small-roformer"]["CoLA, Matthews"] == "30.0 (1)"
    assert rows["small-roformer"]["RTE, accuracy"] == DASH


def test_what_collapsed_diverged_or_failed_is_counted_and_listed():
    lines = seeds(BERT, "rte", (0.5, 0.6, 0.7))
    lines[1]["collapsed"] = True
    lines += [diverged(BERT, "rte", seed=3), failed(BERT, "rte", seed=4)]
    text = "60.0 ± 10.0 (3 of 5; 1 collapsed, 1 diverged, 1 failed)"
    assert scores(lines)["small-bert"]["RTE, accuracy"] == text
    problems = problem_table(report(lines).group).frame
    assert problems[["seed", "outcome", "reason"]].to_numpy().tolist() == [
        ["3", "diverged", "gradient not finite (41)"],
        ["4", "failed", "worker died: SIGKILL"],
    ]


def test_a_task_of_which_every_run_failed_still_stands_somewhere():
    lines = [line(BERT, "rte", 0.6), failed(BERT, "cola"), diverged(BERT, "mrpc")]
    only_failed = {"small-bert": {"CoLA, Matthews": f"{DASH} (0 of 1; 1 failed)"}}
    for found in (lines, [failed(BERT, "cola")]):
        assert scores(found, group="failed") == only_failed
    assert scores(lines)["small-bert"]["MRPC, F1"] == f"{DASH} (0 of 1; 1 diverged)"
    only = report(lines, group="failed")
    titles = [table.title for table in group_tables(only.group, only.differences)]
    assert titles == ["tasks of which every run failed: scores", "Runs that diverged or failed: 1"]


def test_a_failed_run_goes_to_the_data_it_was_meant_for():
    nine = {"dataset": "qnli (9k)", "official": False, "glue_dir": "nine"}
    lines = [line(ROFORMER, "qnli", 0.6, **nine), line(BERT, "qnli", 0.6)]
    lines += [failed(ROFORMER, "qnli", seed=1, glue_dir="nine")]
    rows = scores(lines, group="reduced")
    assert rows["small-roformer"]["qnli (9k), accuracy"] == "60.0 (1 of 2; 1 failed)"


def sweep(model: str, task: str, means) -> list[dict]:
    runs = []
    for rate, mean in zip((2e-5, 3e-5, 4e-5), means):
        runs += seeds(model, task, (mean, mean + 0.01), learning_rate=rate)
    return runs


BEST = "best of 3 rates by the reported split (the paper's selection)"


def test_the_best_rate_is_chosen_for_each_task_by_its_mean_and_said_to_be():
    lines = [*sweep(BERT, "rte", (0.5, 0.7, 0.6)), *sweep(BERT, "mrpc", (0.9, 0.7, 0.8))]
    lines[-1]["metrics"]["validation"]["accuracy"] = 2.0  # the headline metric alone counts
    rows = scores(lines)
    row = rows[f"small-bert, {BEST}"]
    assert row["RTE, accuracy"] == "70.5 ± 0.7 (2) at 3e-05"
    assert row["MRPC, F1"] == "90.5 ± 0.7 (2) at 2e-05"
    assert rows["small-bert, rate 4e-05"]["RTE, accuracy"] == "60.5 ± 0.7 (2)"
    assert set(report(lines).group.rows["best_of"]) == {"", "3"}
    lines[1]["metrics"]["validation"]["accuracy"] = 0.8  # a lucky seed of the rate of 0.5
    assert scores(lines)[f"small-bert, {BEST}"]["RTE, accuracy"].endswith("at 3e-05")


def test_among_rates_most_scored_seeds_then_the_smallest_rate_wins():
    equal = sweep(BERT, "rte", (0.5, 0.7, 0.7))
    for turned in (equal, equal[::-1]):
        assert scores(turned)[f"small-bert, {BEST}"]["RTE, accuracy"].endswith("at 3e-05")
    lines = sweep(BERT, "rte", (0.5, 0.7, 0.6))
    lines[3] = diverged(BERT, "rte", seed=1, learning_rate=3e-5)
    lines.append(line(BERT, "cola", 0.1, learning_rate=2e-5))  # one rate: no selection
    row = scores(lines)[f"small-bert, {BEST}"]
    assert row["RTE, accuracy"] == "60.5 ± 0.7 (2) at 4e-05"
    assert (row["CoLA, Matthews"], row.popitem()[1]) == (DASH, DASH)


def test_selected_scores_are_only_subtracted_from_selected_ones():
    lines = [*sweep(BERT, "rte", (0.5, 0.7, 0.6)), *sweep(ROFORMER, "rte", (0.62, 0.6, 0.6))]
    found = {pair.conditions: pair.tasks["rte"].mean for pair in report(lines).differences}
    expected = {"rate 2e-05": 12.0, "rate 3e-05": -10.0, "rate 4e-05": 0.0, BEST: -8.0}
    assert found == pytest.approx(expected)
    # three rates against two would favour the three
    fewer = [x for x in lines if x["model"] == BERT or x["learning_rate"] < 4e-5]
    assert [pair.conditions for pair in report(fewer).differences] == ["rate 2e-05", "rate 3e-05"]


def test_runs_of_another_precision_share_no_cell_and_are_not_subtracted():
    lines = [line(BERT, "rte", 0.5, precision="no"), line(ROFORMER, "rte", 0.6)]
    lines.append(line(ROFORMER, "rte", 0.7, precision="no", seed=1))
    assert {name: row["RTE, accuracy"] for name, row in scores(lines).items()} == {
        "small-bert, precision no": "50.0 (1)",
        "small-roformer, precision bf16": "60.0 (1)",
        "small-roformer, precision no": "70.0 (1)",
        "majority class": "50.0",
    }
    (pair,) = report(lines).differences
    assert (pair.conditions, pair.tasks) == ("precision no", {})  # no seed of both


def test_a_table_needs_neither_a_roformer_nor_a_bert():
    models = [f"runs/{name}/model" for name in ("distilled", "electra")]
    made = report([line(model, "sst2", 0.8, model_type="distilbert") for model in models])
    assert len(score_table(made.group).frame) == 3
    assert made.no_pairs.startswith("No RoFormer − BERT: it takes one model of each, here are")  # noqa: RUF001


@pytest.mark.parametrize("name", ["weights", "config", "tokenizer_files", "data"])
def test_runs_of_what_was_changed_in_place_share_no_cell(name):
    lines = [line(BERT, "rte", 0.5 + 0.1 * seed, seed=seed) for seed in range(4)]
    for number, (row, found) in enumerate(zip(lines, ("a", "a", "b", None))):
        row[name] = found
        row["glue_dir"] = str(number) if name == "data" else "glue"  # wherever the data are
    found = scores(lines)
    assert found[f"small-bert, {name} a"]["RTE, accuracy"] == "55.0 ± 7.1 (2)"
    assert found[f"small-bert, {name} b"]["RTE, accuracy"] == "70.0 (1)"
    assert found["small-bert"]["RTE, accuracy"] == "80.0 (1)"


def test_a_seed_counts_once_however_its_data_were_named():
    lines = [line(BERT, "rte", 0.5 + 0.1 * seed, seed=seed, data="a") for seed in range(2)]
    lines += [x | {"glue_dir": None, "data": None} for x in lines]
    lines.append(failed(BERT, "rte", seed=1, glue_dir="elsewhere"))
    assert scores(lines)["small-bert"]["RTE, accuracy"] == "55.0 ± 7.1 (2)"


def test_the_printed_table_names_the_split_of_every_row():
    rows = texts(paper_table(report([line(BERT, "mrpc", 0.8), line(BERT, "qnli", 0.7)]).group))
    assert rows["BERT, as printed"]["split"] == "test server"
    assert rows["RoFormer, as printed"]["split"] == "validation"
    assert rows["RoFormer, as printed"]["MNLI m/mm, accuracy"] == "80.2/79.8"
    ours = rows["small-bert"]
    assert ours["MRPC, F1"] == "80.0 (1)"
    assert ours["split"] == "validation"


def test_markdown_and_latex_survive_any_name_of_a_model():
    name = "a|b_c%d$e#f{g}~h^i\\j&k<l>[m]*n`o"
    found = score_table(report([line(name, "rte", 0.6)]).group)
    rows = markdown_table(found.frame.map(escape_cell)).splitlines()
    columns = [re.findall(r"(?<!\\)\|", row) for row in rows]
    assert {len(bars) for bars in columns} == {3}
    body = latex_tables([found]).split(r"\midrule")[1].split(r"\bottomrule")[0].strip().splitlines()
    assert all(len(re.findall(r"(?<!\\)&", row)) == 1 and row.endswith(r" \\") for row in body)
    assert not set("_#^~%$") & set(re.sub(r"\\[_#%$]|\\text\w+", "", "".join(body)))


def test_latex_prints_minus_signs():
    found = report([line(BERT, "rte", 0.6), line(ROFORMER, "rte", 0.5)])
    text = latex_tables(group_tables(found.group, found.differences))
    assert r"RTE, accuracy & $-$10.00 & not judged \\" in text


def test_no_results_old_results_or_a_wrong_pair_are_one_line(tmp_path, capsys):
    file = str(tmp_path / "results.jsonl")
    refused(lambda: main(ReportSettings(file)), "results must")
    Path(file).write_text('{"model": "b", "task": "rte", "seed": 0}\n')  # of an earlier format
    refused(lambda: main(ReportSettings(file)), "results must")
    assert len(capsys.readouterr().err.splitlines()) == 1
    for pair in ([BERT, BERT], [BERT, BERT, "x"]):
        refused(functools.partial(ReportSettings, file, pair=pair), "pair must")
    write(tmp_path, [line(BERT, "rte", 0.6)])
    refused(lambda: main(ReportSettings(file, output=file)), "output must")
    refused(lambda: main(ReportSettings(file, pair=["x", "y"])), "pair must", "got x, y;")
    refused(lambda: main(ReportSettings(file, pair=["small-bert", BERT])), "pair must")  # one model
    assert not (tmp_path / "report.md").exists()
