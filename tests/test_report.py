import re
from pathlib import Path

import numpy as np
import pytest
from scipy import stats

from finetune import results
from finetune.comparison import bootstrap
from finetune.report import (
    ReportSettings,
    control_grid,
    latex,
    main,
    pair_grid,
    paper_grid,
    pipe_table,
    score_grid,
    trouble_grid,
    untested,
)
from finetune.rows import NINE, build_tables
from finetune.verdict import verdicts
from tiny_results import BERT, RECIPE, ROFORMER, SKILL, diverged, failed, line, write
from train.settings import InputError

MINUS, DASH = "−", "–"  # noqa: RUF001


def table(lines, group: str = "official", pair=None):
    (found,) = (x for x in build_tables(lines, pair) if x.group == group)
    return found


def texts(grid) -> dict[str, dict[str, str]]:
    """Row's name -> column -> text."""
    rows = {row[0].text: [entry.text for entry in row[1:]] for row in grid.rows}
    assert len(rows) == len(grid.rows)
    return {name: dict(zip(grid.heads[1:], cells)) for name, cells in rows.items()}


def scores(lines, **options) -> dict[str, dict[str, str]]:
    return texts(score_grid(table(lines, **options)))


def seeds(model: str, task: str, values, **changes) -> list[dict]:
    return [line(model, task, value, seed=seed, **changes) for seed, value in enumerate(values)]


def test_cells_are_means_with_spread_and_count():
    rows = scores(seeds(BERT, "rte", (0.5, 0.6, 0.7)))
    assert rows["small-bert (bert)"] == {"RTE, accuracy": "60.0 ± 10.0 (3)"}
    assert rows["majority baseline"] == {"RTE, accuracy": "50.0"}


def test_the_average_is_glues_the_metrics_of_a_task_first():
    lines = [*seeds(BERT, "mrpc", (0.9, 0.8)), *seeds(BERT, "mnli", (0.6, 0.5))]
    found = table([*lines, *seeds(BERT, "stsb", (0.4, 0.2))]).rows[0]
    # beside the headline metric the other one is 0.02 less, and MNLI's second split 0.01
    tasks = np.array([[89.0, 79.0], [39.0, 19.0], [59.5, 49.5]])
    mean, by_seed = found.average(["mrpc", "stsb", "mnli"])
    assert mean == pytest.approx(tasks.mean())
    assert list(by_seed.values()) == pytest.approx(tasks.mean(axis=0))


def test_only_all_nine_official_tasks_make_the_glue_average():
    lines = [line(BERT, task, 0.6) for task in SKILL]
    assert set(SKILL) == NINE
    assert list(scores(lines)["small-bert (bert)"])[-1] == "GLUE average"
    missing = list(scores(lines[1:])["small-bert (bert)"])
    assert missing[-1] == "mean of these 8 tasks, not the GLUE average"
    reduced = {"official": False, "label": "cola (9k)"}
    both = [*lines[1:], line(BERT, "cola", 0.9, **reduced)]
    assert list(scores(both)["small-bert (bert)"])[-1] == missing[-1]


def test_the_remark_names_the_tasks_of_the_average():
    grid = score_grid(table([line(BERT, "rte", 0.6), line(BERT, "cola", 0.1)]))
    assert "the mean over cola, rte" in grid.remarks[0]


def test_a_row_with_a_task_missing_has_no_average():
    rows = scores([line(BERT, "rte", 0.6), line(BERT, "cola", 0.1), line(ROFORMER, "rte", 0.7)])
    assert list(rows["small-roformer (roformer)"].values()) == [DASH, "70.0 (1)", DASH]


def test_the_average_has_a_spread_only_where_all_tasks_have_the_same_seeds():
    lines = [*seeds(BERT, "rte", (0.6, 0.8)), *seeds(BERT, "wnli", (0.2, 0.4))]
    assert scores(lines)["small-bert (bert)"].popitem()[1] == "50.0 ± 14.1 (2)"
    assert scores(lines[:-1])["small-bert (bert)"].popitem()[1] == "45.0"


def test_mnli_shows_both_splits():
    row = scores([line(BERT, "mnli", 0.8)])["small-bert (bert)"]
    assert row == {"MNLI m/mm, accuracy": "80.0/79.0 (1)"}


def test_reduced_and_demo_tasks_are_never_in_the_official_table():
    lines = [line(BERT, "rte", 0.6), line(BERT, "demo-next", 0.8)]
    lines.append(line(BERT, "qnli", 0.9, label="qnli (9k)", official=False))
    lines.append(line(ROFORMER, "qnli", 0.7))
    groups = {x.group: list(x.labels.values()) for x in build_tables(lines)}
    assert groups == {
        "official": ["QNLI, accuracy", "RTE, accuracy"],
        "reduced": ["qnli (9k), accuracy"],
        "demo": ["demo-next, accuracy"],
    }
    assert scores(lines)["small-bert (bert)"]["QNLI, accuracy"] == DASH


def test_pretrained_models_come_first_then_controls_then_the_baseline():
    models = [line(model, "rte", 0.6) for model in (ROFORMER, BERT)]
    controls = [x | {"random_weights": True} for x in models]
    assert list(scores([*controls, *models])) == [
        "small-bert (bert)",
        "small-roformer (roformer)",
        "small-bert (bert), random weights",
        "small-roformer (roformer), random weights",
        "majority baseline",
    ]


def test_a_row_names_what_differs_between_recipes_and_no_more():
    lines = [line(BERT, "rte", rate * 1e4, learning_rate=rate) for rate in (2e-5, 3e-5)]
    lines.append(line(BERT, "rte", 0.6, weight_decay=0.0, tokenizer="words"))
    names = list(scores(lines))
    assert "small-bert (bert), rate 2e-5, decay 0.01" in names
    assert "small-bert (bert), tokenizer words, rate 2e-4, decay 0" in names


def test_models_of_one_name_keep_their_paths():
    rows = scores([line(BERT, "rte", 0.6), line("old/small-bert", "rte", 0.7)])
    assert list(rows)[:2] == ["old/small-bert (roformer)", "runs/small-bert/model (bert)"]


def test_starts_from_mnli_are_rows_of_their_own_whatever_folder_each_seed_has():
    lines = seeds(BERT, "rte", (0.6, 0.6))
    lines += [line(BERT, "rte", 0.7 + s / 10, seed=s, mnli=f"mnli/{s}") for s in (0, 1)]
    rows = scores(lines)
    assert rows["small-bert (bert)"]["RTE, accuracy"] == "60.0 ± 0.0 (2)"
    assert rows["small-bert (bert), started from MNLI"]["RTE, accuracy"] == "75.0 ± 7.1 (2)"
    few = scores([*lines, line(BERT, "mnli", 0.5, label="mnli (9k)", official=False)])
    assert few["small-bert (bert), started from MNLI (9k)"]["RTE, accuracy"] == "75.0 ± 7.1 (2)"
    twice = scores([*lines, line(BERT, "rte", 0.1, seed=0, mnli="other")])
    assert twice["small-bert (bert), started from other"]["RTE, accuracy"] == "10.0 (1)"


@pytest.mark.parametrize("turn", [1, -1])
def test_runs_on_different_data_share_no_cell(turn):
    """A label says how many rows there are, not which."""
    made = [line(ROFORMER, "rte", score, seed=seed, glue_dir=data)
            for score, seed, data in ((0.6, 0, "a"), (0.9, 0, "b"), (0.7, 1, "a"))]  # fmt: skip
    made.append(line(ROFORMER, "cola", 0.3))
    (table,) = build_tables(made[::turn])
    rows = {row.name: row for row in table.rows if row.kind == "model"}
    found = {name: row.cells["rte"].headlines for name, row in rows.items() if "rte" in row.cells}
    assert {name.split(", ")[-1]: sorted(x.values()) for name, x in found.items()} == {
        "data of a": [60, 70],
        "data of b": [90],
    }
    assert [row.name for row in rows.values() if "cola" in row.cells] == [
        "small-roformer (roformer)"
    ]


def test_what_collapsed_diverged_or_failed_is_counted_and_listed():
    lines = seeds(BERT, "rte", (0.5, 0.6, 0.7))
    lines[1]["collapsed"] = True
    lines += [diverged(BERT, "rte", seed=3), failed(BERT, "rte", seed=4)]
    found = table(lines)
    text = "60.0 ± 10.0 (3 of 5; 1 collapsed, 1 diverged, 1 failed)"
    assert texts(score_grid(found))["small-bert (bert)"]["RTE, accuracy"] == text
    (grid,) = trouble_grid(found)
    assert [[entry.text for entry in row[2:]] for row in grid.rows] == [
        ["1", "collapsed", "one answer for every example"],
        ["3", "diverged", "gradient not finite (41)"],
        ["4", "failed", "worker died: SIGKILL"],
    ]


def test_a_task_of_which_every_run_failed_still_stands_somewhere():
    lines = [line(BERT, "rte", 0.6), failed(BERT, "cola"), diverged(BERT, "mrpc")]
    assert scores(lines, group="unplaced") == {
        "small-bert (bert)": {"CoLA, Matthews": f"{DASH} (0 of 1; 1 failed)"}
    }
    assert scores(lines)["small-bert (bert)"]["MRPC, F1"] == f"{DASH} (0 of 1; 1 diverged)"


def test_a_failed_run_goes_to_the_data_it_was_meant_for():
    nine = {"label": "qnli (9k)", "official": False, "glue_dir": "nine"}
    lines = [line(ROFORMER, "qnli", 0.6, **nine), line(BERT, "qnli", 0.6)]
    lines += [failed(ROFORMER, "qnli", seed=1, glue_dir="nine")]
    rows = scores(lines, group="reduced")
    assert rows["small-roformer (roformer)"]["qnli (9k), accuracy"] == "60.0 (1 of 2; 1 failed)"


RATES = (2e-5, 3e-5, 4e-5)


def sweep(model: str, task: str, means) -> list[dict]:
    return [
        line(model, task, mean + 0.01 * seed, seed=seed, learning_rate=rate)
        for rate, mean in zip(RATES, means)
        for seed in (0, 1)
    ]


BEST = "best of 3 rates by the reported split (the paper's selection)"


def test_the_best_rate_is_chosen_for_each_task_by_its_mean_and_said_to_be():
    lines = [*sweep(BERT, "rte", (0.5, 0.7, 0.6)), *sweep(BERT, "mrpc", (0.9, 0.7, 0.8))]
    rows = scores(lines)
    row = rows[f"small-bert (bert), {BEST}"]
    assert row["RTE, accuracy"] == "70.5 ± 0.7 (2) at 3e-5"
    assert row["MRPC, F1"] == "90.5 ± 0.7 (2) at 2e-5"
    assert rows["small-bert (bert), rate 4e-5"]["RTE, accuracy"] == "60.5 ± 0.7 (2)"
    assert table(lines).rows[3].key.rates == "3"


def test_a_rate_with_fewer_scored_seeds_cannot_win():
    lines = sweep(BERT, "rte", (0.5, 0.7, 0.6))
    lines[3] = diverged(BERT, "rte", seed=1, learning_rate=3e-5)
    assert scores(lines)[f"small-bert (bert), {BEST}"]["RTE, accuracy"] == "60.5 ± 0.7 (2) at 4e-5"


def test_a_task_with_one_rate_has_no_selection():
    lines = [*sweep(BERT, "rte", (0.5, 0.7, 0.6)), line(BERT, "cola", 0.1, learning_rate=2e-5)]
    row = scores(lines)[f"small-bert (bert), {BEST}"]
    assert (row["CoLA, Matthews"], row.popitem()[1]) == (DASH, DASH)


def test_selected_scores_are_only_subtracted_from_selected_ones():
    lines = [*sweep(BERT, "rte", (0.5, 0.7, 0.6)), *sweep(ROFORMER, "rte", (0.62, 0.6, 0.6))]
    found = {pair.first.way: pair.tasks["rte"].mean for pair in table(lines).pairs}
    expected = {"rate 2e-5": 12.0, "rate 3e-5": -10.0, "rate 4e-5": 0.0, BEST: -8.0}
    assert found == pytest.approx(expected)
    # three rates against two would favour the three
    fewer = [x for x in lines if x["model"] == BERT or x["learning_rate"] < 4e-5]
    assert [pair.first.way for pair in table(fewer).pairs] == ["rate 2e-5", "rate 3e-5"]


def test_differences_are_scipys_on_the_scores_of_shared_seeds():
    draw = np.random.default_rng(0)
    ours, theirs = draw.normal(0.7, 0.02, (2, 5)), draw.normal(0.68, 0.02, (2, 5))
    lines = [x for i, task in enumerate(("cola", "mnli")) for x in seeds(ROFORMER, task, ours[i])]
    lines += [x for i, task in enumerate(("cola", "mnli")) for x in seeds(BERT, task, theirs[i])]
    lines += [line(BERT, "cola", 0.1, seed=9)]
    (found,) = table(lines).pairs
    for i, task in enumerate(("cola", "mnli")):
        test = stats.ttest_rel(100 * ours[i], 100 * theirs[i])
        assert found.tasks[task].p == pytest.approx(test.pvalue)
        assert found.tasks[task].mean == pytest.approx(100 * (ours[i] - theirs[i]).mean())
        assert found.tasks[task].cohen_dz == pytest.approx(test.statistic / np.sqrt(5))
    assert found.tasks["cola"].tried == 6
    test = stats.ttest_rel(ours.mean(axis=0), theirs.mean(axis=0))
    assert found.average.p == pytest.approx(test.pvalue)
    smaller, larger = sorted(found.tasks.values(), key=lambda comparison: comparison.p)
    assert smaller.p_holm == pytest.approx(2 * smaller.p)
    assert larger.p_holm == pytest.approx(max(2 * smaller.p, larger.p))


def test_a_task_without_a_shared_seed_is_said_and_not_subtracted():
    lines = [line(BERT, "rte", 0.6), line(ROFORMER, "rte", 0.7, seed=1)]
    lines += [line(BERT, "cola", 0.1), line(ROFORMER, "cola", 0.2)]
    (grid,) = pair_grid(table(lines))
    assert [row[1].text for row in grid.rows] == ["CoLA, Matthews"]
    assert any("rte: no seed with a score on both sides" in remark for remark in grid.remarks)


def test_one_seed_has_a_difference_but_no_empty_columns_and_says_why():
    (grid,) = pair_grid(table([line(BERT, "rte", 0.6), line(ROFORMER, "rte", 0.7)]))
    assert grid.heads == ["difference", "task", "seeds", "mean"]
    assert [entry.text for entry in grid.rows[0]][1:] == ["RTE, accuracy", "1", "+10.00"]
    assert grid.remarks == ["No interval and no test where there is one pair."]


def test_where_there_is_no_test_is_said_by_name_among_others_that_have_one():
    lines = [*seeds(BERT, "rte", (0.5, 0.6)), *seeds(ROFORMER, "rte", (0.6, 0.8))]
    lines += [*seeds(BERT, "wnli", (0.5, 0.6)), *seeds(ROFORMER, "wnli", (0.5, 0.6))]
    title = f"RoFormer {MINUS} BERT, wnli"
    why = "No interval and no test where all pairs differ by the same"
    assert untested(table(lines).pairs) == [f"{why}: {title}."]


def test_several_models_of_a_kind_have_no_difference_until_a_pair_is_named():
    lines = [line(BERT, "rte", 0.6), line(ROFORMER, "rte", 0.7), line("new", "rte", 0.9)]
    found = table(lines)
    assert found.pairs == []
    (grid,) = pair_grid(found)
    assert "2 RoFormer and 1 BERT; name two models with --pair" in grid.remarks[0]
    (named,) = table(lines, pair=["new", "small-roformer"]).pairs
    assert (named.title, named.tasks["rte"].mean) == (f"new {MINUS} small-roformer", 20.0)


def test_the_data_are_what_is_in_them_wherever_they_are():
    lines = [
        line(BERT, "rte", 0.5 + 0.1 * seed, seed=seed, glue_dir=f"{seed}") for seed in range(3)
    ]
    for row, found in zip(lines, ("a" * 16, "b" * 16, "a" * 16)):
        row["data"] = found
    found = scores(lines)
    assert found["small-bert (bert), data aaaaaaaa"]["RTE, accuracy"] == "60.0 ± 14.1 (2)"
    assert found["small-bert (bert), data bbbbbbbb"]["RTE, accuracy"] == "60.0 (1)"


def test_runs_of_another_precision_share_no_cell_and_are_not_subtracted():
    lines = [line(BERT, "rte", 0.5, precision="no"), line(ROFORMER, "rte", 0.6)]
    lines.append(line(ROFORMER, "rte", 0.7, precision="no", seed=1))
    assert {name: row["RTE, accuracy"] for name, row in scores(lines).items()} == {
        "small-bert (bert), precision no": "50.0 (1)",
        "small-roformer (roformer), precision bf16": "60.0 (1)",
        "small-roformer (roformer), precision no": "70.0 (1)",
        "majority baseline": "50.0",
    }
    (pair,) = table(lines).pairs
    assert (pair.first.way, pair.tasks) == ("precision no", {})  # no seed of both


@pytest.mark.parametrize("control", [False, True])
def test_a_table_needs_neither_a_roformer_nor_a_bert(control):
    kind = {"model_type": "distilbert", "random_weights": control}
    made = table([line("runs/distilled/model", "sst2", 0.8, **kind)])
    assert len(made.rows) == 2
    assert made.remark.startswith(f"No RoFormer {MINUS} BERT: it takes one model of each, here are")


def test_millions_of_tokens_are_not_taken_for_pretraining_seeds():
    lines = []
    for name in ("roformer", "bert"):
        for tokens in (50, 100):
            lines.append(line(f"runs/{name}-{tokens}/model", "rte", 0.6, model_type=name))
    assert "2 RoFormer and 2 BERT; name two models" in table(lines).remark


def test_pretraining_seeds_make_pairs_and_a_difference_over_them():
    lines = []
    for seed, gain in ((0, 0.02), (1, 0.06)):
        for tuned in range(3):
            # fine-tuning seeds differ by nothing but themselves: they are not more pretraining runs
            noise = 0.001 * tuned
            bert = {"model_type": "bert", "seed": tuned}
            lines.append(line(f"runs/bert-{seed}/model", "rte", 0.5, **bert))
            rope = f"runs/roformer-{seed}/model"
            lines.append(line(rope, "rte", 0.5 + gain + noise, seed=tuned))
    pairs = {pair.title: pair.tasks["rte"] for pair in table(lines).pairs}
    title = f"RoFormer {MINUS} BERT"
    assert list(pairs) == [f"{title}, pretraining seed 0", f"{title}, pretraining seed 1",
                           f"{title}, over 2 pretraining seeds"]  # fmt: skip
    assert pairs[f"{title}, pretraining seed 1"].mean == pytest.approx(6.1)
    whole = pairs[f"{title}, over 2 pretraining seeds"]
    assert whole.differences == {0: pytest.approx(2.1), 1: pytest.approx(6.1)}
    assert whole.p == pytest.approx(stats.ttest_1samp((2.1, 6.1), 0).pvalue)


def test_models_of_other_pretraining_seeds_are_not_paired():
    lines = [line(f"runs/roformer-{seed}/model", "rte", 0.6) for seed in (0, 1)]
    lines += [line(f"runs/bert-{seed}/model", "rte", 0.5, model_type="bert") for seed in (0, 2)]
    assert "2 RoFormer and 2 BERT; name two models" in table(lines).remark


def test_widths_that_look_like_pretraining_seeds_are_not_taken_for_them():
    lines = []
    for name, kind in (("roformer", "roformer"), ("bert", "bert")):
        for width in (128, 768):
            changes = {"model_type": kind, "parameters": width}
            lines += seeds(f"runs/{name}-{width}/model", "rte", (0.5, 0.6), **changes)
    assert table(lines).pairs == []
    assert "2 RoFormer and 2 BERT; name two models" in table(lines).remark


def test_a_pretraining_seed_without_random_weights_is_a_doubt():
    lines = []
    for seed in (0, 1):
        for name in ("roformer", "bert"):
            of = {"model_type": name}
            for task in ("sst2", "cola", "stsb"):
                model = f"runs/{name}-{seed}/model"
                lines += seeds(model, task, (0.6, 0.62), **of)
                if seed == 0:
                    lines += seeds(model, task, (0.4, 0.42), random_weights=True, **of)
    assert "counts: " in verdicts(table(lines))[-1]
    for row in lines:  # with another tokenizer random weights are other ones
        row["tokenizer"] = "other" if "-1/" in row["model"] else None
    last = verdicts(table(lines))[-1]
    assert "pretraining seed 1: no random weights beside both" in last


@pytest.mark.parametrize("name", ["weights", "data"])
def test_runs_of_what_was_changed_in_place_share_no_cell(name):
    lines = [line(BERT, "rte", 0.5 + 0.1 * seed, seed=seed) for seed in range(4)]
    for row, found in zip(lines, ("a" * 16, "a" * 16, "b" * 16, None)):
        row[name] = found
    found = scores(lines)
    assert found[f"small-bert (bert), {name} aaaaaaaa"]["RTE, accuracy"] == "55.0 ± 7.1 (2)"
    assert found[f"small-bert (bert), {name} bbbbbbbb"]["RTE, accuracy"] == "70.0 (1)"
    assert found["small-bert (bert)"]["RTE, accuracy"] == "80.0 (1)"


def test_each_seeds_model_of_mnli_has_weights_of_its_own():
    lines = [line(BERT, "rte", 0.5, seed=seed, mnli=f"mnli/{seed}") for seed in (0, 1)]
    for number, row in enumerate(lines):
        row["weights"] = str(number) * 16
    assert list(scores(lines)) == ["small-bert (bert), started from MNLI", "majority baseline"]


def learned(gains: dict[str, float]) -> list[dict]:
    """Both models above their random weights by 10 points, or as `gains` says of a task of BERT."""
    lines = []
    for model in (ROFORMER, BERT):
        for task in ("sst2", "cola", "stsb"):
            gain = gains.get(task, 0.1) if model == BERT else 0.1
            random = [{**x, "random_weights": True} for x in seeds(model, task, (0.50, 0.54))]
            lines += [*seeds(model, task, (0.5 + gain, 0.54 + gain)), *random]
    return lines


def test_a_pair_counts_when_both_models_are_above_their_random_weights():
    assert verdicts(table(learned({}))) == [
        f"RoFormer {MINUS} BERT counts: both models stand above their random weights by more than "
        "the larger sample standard deviation over seeds on SST-2, accuracy, CoLA, Matthews, "
        "STS-B, Spearman."
    ]
    spread = np.std((50, 54), ddof=1)  # 2.83
    (found,) = verdicts(table(learned({"cola": (spread - 0.1) / 100, "stsb": -0.01})))
    assert found == (
        f"RoFormer {MINUS} BERT does not count yet: small-bert, CoLA, Matthews: +2.7 over random "
        "weights, spread 2.8; small-bert, STS-B, Spearman: -1.0 over random weights, spread 2.8."
    )
    assert found in pair_grid(table(learned({"cola": 0.0273, "stsb": -0.01})))[0].remarks


def test_random_weights_stand_for_every_pretraining_seed():
    lines = []
    for seed in (0, 1):
        for name, kind in (("bert", "bert"), ("roformer", "roformer")):
            model = f"runs/{name}-{seed}/model"
            for task in ("sst2", "cola", "stsb"):
                lines += seeds(model, task, (0.6, 0.64), model_type=kind)
                if seed == 0:
                    random = {"random_weights": True, "model_type": kind}
                    lines += seeds(model, task, (0.5, 0.54), **random)
    found = table(lines)
    assert [round(x.tasks["cola"].mean) for x in found.controls] == [10] * 4
    title = f"RoFormer {MINUS} BERT"
    titles = [f"{title}, pretraining seed 0", f"{title}, pretraining seed 1",
              f"{title}, over 2 pretraining seeds"]  # fmt: skip
    assert [x.split(" counts: ")[0] for x in verdicts(found)] == titles
    for run in lines:
        if run["model"] == "runs/bert-1/model" and run["task"] == "cola":
            run["metrics"]["validation"]["matthews"] -= 0.2
    last = verdicts(table(lines))[-1]  # over seeds it counts when each of them does
    assert last.startswith(f"{titles[2]} does not count yet: bert-1, CoLA")


def test_a_pair_without_controls_or_tasks_does_not_count():
    lines = learned({})
    pretrained = [x for x in lines if not x["random_weights"]]
    (found,) = verdicts(table(pretrained))
    assert "cannot be said: no random weights" in found
    (found,) = verdicts(table([x for x in lines if x["task"] != "cola"]))
    assert "small-roformer, cola: not run" in found
    (found,) = verdicts(table([x for x in lines if x["seed"] == 0]))
    assert "one seed, so the spread is not known" in found
    assert verdicts(table(seeds(BERT, "rte", (0.5, 0.6)))) == []


def test_models_without_a_recipe_in_common_are_not_compared():
    lines = [line(BERT, "rte", 0.6), line(ROFORMER, "rte", 0.7, epochs=5)]
    assert "nothing was run with the same recipe" in table(lines).remark


def test_a_model_is_compared_with_its_random_control():
    lines = [*seeds(BERT, "rte", (0.7, 0.8)), *seeds(BERT, "rte", (0.5, 0.5), random_weights=True)]
    lines += seeds(ROFORMER, "rte", (0.7, 0.8))
    (grid,) = control_grid(table(lines))
    test = stats.ttest_rel((70, 80), (50, 50))
    low, high = bootstrap([20, 30])
    text = f"+25.0 [{low:+.1f}, {high:+.1f}] p {test.pvalue:.3f}"
    assert texts(grid) == {f"small-bert (bert) {MINUS} random weights": {"RTE, accuracy": text}}
    pair = table(lines).pairs[0]
    assert pair.tasks["rte"].mean == 0.0  # the control has no part in it


def test_random_weights_are_borrowed_from_a_model_of_the_same_name_in_another_folder():
    """A run that went on is published under its name, and its random weights were run before."""
    lines = []
    for model, kind in ((BERT, "bert"), (ROFORMER, "roformer")):
        later = f"later/{Path(model).parent.name}/model"
        for task in ("sst2", "cola", "stsb"):
            lines += seeds(later, task, (0.6, 0.64), model_type=kind)
            lines += seeds(model, task, (0.5, 0.54), random_weights=True, model_type=kind)
    assert verdicts(table(lines))[0].startswith(f"RoFormer {MINUS} BERT counts: ")


@pytest.mark.parametrize(("sizes", "found"), [((1, 9), 1), ((9, 9), 2), ((None, 9), 2)])
def test_random_weights_are_borrowed_from_a_model_of_the_same_size_alone(sizes, found):
    """By their names roformer-128 and roformer-768 could be seeds of one model."""
    lines = []
    for size, width in zip(sizes, (128, 768)):
        known = {} if size is None else {"parameters": size}
        lines.append(line(f"runs/roformer-{width}/model", "rte", 0.7) | known)
    lines.append(lines[1] | {"random_weights": True})
    controls = table(lines).controls
    assert [x.second.key.control for x in controls] == [True] * found
    assert "roformer-768" in {x.first.short for x in controls}


def test_random_weights_of_the_model_that_a_folder_held_before_are_none_of_its_own():
    lines = [line(BERT, "rte", 0.7) | {"parameters": 9}]
    lines.append(line(BERT, "rte", 0.5, random_weights=True) | {"parameters": 1})
    assert table(lines).controls == []


def test_the_printed_table_names_the_split_of_every_row():
    rows = texts(paper_grid(table([line(BERT, "mrpc", 0.8), line(BERT, "qnli", 0.7)])))
    assert rows["BERT, as printed"]["split of its numbers"] == "test server"
    assert rows["RoFormer, as printed"]["split of its numbers"] == "validation"
    assert rows["RoFormer, as printed"]["MNLI m/mm, accuracy"] == "80.2/79.8"
    ours = rows["small-bert (bert), ours"]
    assert ours["MRPC, F1"] == "80.0 (1)"
    assert ours["split of its numbers"] == "validation (development set)"


def test_markdown_and_latex_survive_any_name_of_a_model():
    name = "a|b_c%d$e#f{g}~h^i\\j&k<l>[m]*n`o"
    grid = score_grid(table([line(name, "rte", 0.6)]))
    columns = [re.findall(r"(?<!\\)\|", row) for row in pipe_table(grid).splitlines()]
    assert {len(bars) for bars in columns} == {3}
    text = latex(grid)
    plain = re.sub(r"\\[\\&%$#_{}]", "", text)
    assert plain.count("{") == plain.count("}")
    assert plain.count("$") % 2 == 0
    body = text.split(r"\midrule")[1].split(r"\bottomrule")[0].strip().splitlines()
    assert all(len(re.findall(r"(?<!\\)&", row)) == 1 and row.endswith(r" \\") for row in body)
    assert not set("_#^~%") & set(re.sub(r"\\[_#%]|\\text\w+{}", "", "".join(body)))


def test_latex_prints_signs_and_exponents_as_they_are_meant():
    lines = [line(BERT, "rte", 0.6, learning_rate=x) for x in (2e-5, 3e-5)]
    lines += [line(ROFORMER, "rte", 0.5, learning_rate=2e-5)]
    text = latex(pair_grid(table(lines))[0])
    assert r"RoFormer $-$ BERT, rate 2e-5 & RTE, accuracy & 1 & $-$10.00 \\" in text


@pytest.mark.parametrize(
    ("broken", "why"),
    [
        ({"metrics": {}}, "scores missing"),
        ({"task": "unheard"}, "no such task"),
        ({"status": "new"}, "no such status"),
        ({"label": None, "metrics": None}, "no metrics"),
    ],
    ids=lambda value: value if isinstance(value, str) else "",
)
def test_a_line_that_lacks_something_is_one_warning(broken, why, capsys):
    found = scores([line(BERT, "rte", 0.6), {**line(BERT, "rte", 0.7, seed=1), **broken}])
    assert found["small-bert (bert)"]["RTE, accuracy"] == "60.0 (1)"
    assert len(capsys.readouterr().err.splitlines()) == 1


def test_no_results_old_results_or_a_wrong_pair_are_one_line(tmp_path, capsys):
    file = tmp_path / "results.jsonl"
    with pytest.raises(InputError, match="results must be a file"):
        main(ReportSettings(str(file)))
    file.write_text('{"model": "b", "task": "rte", "seed": 0}\n')  # of an earlier format
    with pytest.raises(InputError, match="results must hold a complete line"):
        main(ReportSettings(str(file)))
    assert len(capsys.readouterr().err.splitlines()) == 1
    with pytest.raises(InputError, match="pair must be two models"):
        ReportSettings(str(file), pair=[BERT, BERT])
    with pytest.raises(InputError, match="output must name a folder"):
        ReportSettings(str(file), output=str(file))
    write(tmp_path, [line(BERT, "rte", 0.6)])
    with pytest.raises(InputError, match="pair must name models of the results, got x; they have"):
        main(ReportSettings(str(file), pair=["small-bert", "x"]))
    with pytest.raises(InputError, match="pair must be two models"):
        main(ReportSettings(str(file), pair=["small-bert", BERT]))
    assert not (tmp_path / "report.md").exists()


def test_the_recipe_of_the_tests_is_the_whole_recipe():
    assert tuple(RECIPE) == results.RECIPE


def test_the_larger_spread_of_the_two_must_be_exceeded():
    lines = learned({})
    for run in lines:  # random weights that scatter by more than both models gain
        if run["random_weights"] and run["task"] == "cola":
            run["metrics"]["validation"]["matthews"] = (0.3, 0.6)[run["seed"]]
    (found,) = verdicts(table(lines))
    assert "does not count yet" in found
    assert "CoLA, Matthews: +17.0 over random weights, spread 21.2" in found


def test_over_pretraining_seeds_means_are_compared_and_tasks_corrected():
    lines = []
    for seed in range(3):
        for task, gain in (("rte", 0.02), ("cola", 0.05)):
            for tuned, noise in enumerate((0.0, 0.0, 0.03)):
                bert, rope = (f"runs/{name}-{seed}/model" for name in ("bert", "roformer"))
                lines.append(line(bert, task, 0.5, model_type="bert", seed=tuned))
                lines.append(line(rope, task, 0.5 + gain + seed / 100 + noise, seed=tuned))
    whole = table(lines).pairs[-1].tasks
    assert whole["rte"].differences[0] == pytest.approx(3.0)  # the median is 2.0
    smaller, larger = sorted(whole.values(), key=lambda found: found.p)
    assert smaller.p_holm == pytest.approx(2 * smaller.p)
    assert larger.p_holm == pytest.approx(max(2 * smaller.p, larger.p))


def test_over_pretraining_seeds_only_what_all_of_them_ran_is_compared():
    lines = []
    for seed in range(3):
        for model, score in (
            (f"runs/bert-{seed}/model", 0.5),
            (f"runs/roformer-{seed}/model", 0.6),
        ):
            of = {"model_type": model.split("/")[1].split("-")[0]}
            lines += seeds(model, "rte", (score, score + 0.01), **of)
            lines += seeds(model, "cola", (score, score), **of) * (seed != 2)
            lines += seeds(model, "rte", (score, score), epochs=5, **of) * (seed == 0)
    (whole,) = (pair for pair in table(lines).pairs if pair.over)
    assert (list(whole.tasks), whole.missing) == (["rte"], ["cola"])
    (grid,) = pair_grid(table(lines))
    assert f"{whole.title}, cola: not run with all of them." in grid.remarks


def test_the_difference_of_averages_is_over_the_tasks_of_both():
    lines = seeds(ROFORMER, "cola", (0.1, 0.1))  # which BERT was not run on
    for task in ("rte", "wnli"):
        lines += [*seeds(BERT, task, (0.5, 0.6)), *seeds(ROFORMER, task, (0.6, 0.7))]
    (pair,) = table(lines).pairs
    assert pair.average.mean == pytest.approx(10.0)


def test_a_model_is_compared_with_random_weights_of_its_own_where_it_has_them():
    lines = []
    for seed, floor in ((0, 0.5), (1, 0.4)):
        of = {"model_type": "bert"}
        lines += seeds(f"runs/bert-{seed}/model", "rte", (0.7, 0.8), **of)
        lines += seeds(f"runs/bert-{seed}/model", "rte", (floor,) * 2, random_weights=True, **of)
    assert [x.tasks["rte"].mean for x in table(lines).controls] == pytest.approx([25.0, 35.0])


def test_of_equal_means_the_smallest_rate_is_chosen():
    for turn in (1, -1):
        lines = sweep(BERT, "rte", (0.5, 0.7, 0.7))[::turn]
        assert scores(lines)[f"small-bert (bert), {BEST}"]["RTE, accuracy"].endswith("at 3e-5")


def test_a_rate_is_chosen_by_the_headline_metric_alone():
    lines = [line(BERT, "mrpc", f1, learning_rate=r) for r, f1 in ((2e-5, 0.8), (3e-5, 0.79))]
    lines[1]["metrics"]["validation"]["accuracy"] = 0.9
    (row,) = (x for name, x in scores(lines).items() if "best of 2 rates" in name)
    assert row["MRPC, F1"] == "80.0 (1) at 2e-5"


def test_a_roformer_that_stock_does_not_know_is_one_too():
    lines = [line(BERT, "rte", 0.5), line("plus", "rte", 0.6, model_type="roformer_plus")]
    assert [pair.tasks["rte"].mean for pair in table(lines).pairs] == pytest.approx([10.0])
