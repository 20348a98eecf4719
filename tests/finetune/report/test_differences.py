"""Which models are subtracted from which, over which seeds, and which are above all controls."""

import re
from itertools import product

import numpy as np
import pytest
from scipy import stats

from finetune.report.differences import AVERAGE, MINUS, control_gains
from finetune.report.runs import GLUE_TASKS
from finetune.report.tables import DASH, Table, group_tables, verdicts
from finetune.results import SIMPLE_FEATURES
from tiny_results import BERT, ROFORMER, diverged, line, report, seeds, simple_features, texts


def judge(lines) -> list[str]:
    found = report(lines)
    return verdicts(found.group, found.differences)


def pairs_shown(lines) -> Table:
    found = report(lines)
    return group_tables(found.group, found.differences)[0]


def gains_of(lines) -> dict[tuple[str, str], tuple]:
    """Configuration and task -> control, gain, spread, what is absent, whether it is enough."""
    rows = control_gains(report(lines).group).itertuples(index=False)
    return {tuple(row[:2]): tuple(row[2:7]) for row in rows}


def test_differences_are_scipys_on_the_scores_of_shared_seeds():
    draw = np.random.default_rng(0)
    ours, theirs = draw.normal(0.7, 0.02, (2, 5)), draw.normal(0.68, 0.02, (2, 5))
    lines = [line(BERT, "cola", 0.1, seed=9)]
    for i, task in enumerate(("cola", "mnli")):
        lines += [*seeds(ROFORMER, task, ours[i]), *seeds(BERT, task, theirs[i])]
    (found,) = report(lines).differences
    for i, task in enumerate(("cola", "mnli")):
        test = stats.ttest_rel(100 * ours[i], 100 * theirs[i])
        assert found.tasks[task].p == pytest.approx(test.pvalue)
        assert found.tasks[task].mean == pytest.approx(100 * (ours[i] - theirs[i]).mean())
    assert found.tasks["cola"].tried == 6
    test = stats.ttest_rel(ours.mean(axis=0), theirs.mean(axis=0))
    assert found.tasks[AVERAGE].p == pytest.approx(test.pvalue)
    smaller, larger = sorted((found.tasks[x] for x in ("cola", "mnli")), key=lambda c: c.p)
    assert smaller.p_holm == pytest.approx(2 * smaller.p)
    assert larger.p_holm == pytest.approx(max(2 * smaller.p, larger.p))


def test_few_seeds_are_shown_one_by_one_and_four_have_an_interval():
    def text(scores) -> str:
        lines = [*seeds(BERT, "rte", [0.6] * len(scores)), *seeds(ROFORMER, "rte", scores)]
        return pairs_shown(lines).frame["difference"].iloc[0]

    assert text([0.7]) == "+10.00"
    assert text([0.7, 0.71, 0.72]) == "+11.00 (+10.00, +11.00, +12.00)"
    low, high = stats.t.interval(0.95, 3, loc=11.0, scale=stats.sem([10, 11, 12, 11]))
    p = stats.ttest_1samp([10, 11, 12, 11], 0).pvalue
    assert p < 0.0005
    assert text([0.7, 0.71, 0.72, 0.71]) == f"+11.00 [{low:+.2f}, {high:+.2f}], p < 0.001"


def test_several_models_of_a_kind_have_no_difference_until_a_pair_is_named():
    lines = [line(BERT, "rte", 0.6), line(ROFORMER, "rte", 0.7), line("new", "rte", 0.9)]
    found = report(lines)
    assert found.differences == []
    assert "2 RoFormer and 1 BERT; name two models with --pair" in found.no_pairs
    assert "1 new and 0 x" in report(lines, pair=["new", "x"]).no_pairs
    (named,) = report(lines, pair=["new", "small-roformer"]).differences
    assert named.title(with_seeds=True) == f"new {MINUS} small-roformer"
    assert named.tasks["rte"].mean == 20.0


@pytest.mark.parametrize(
    ("names", "sizes"),
    [
        (("roformer-50", "roformer-100", "bert-50", "bert-100"), {}),
        (("roformer-0", "roformer-1", "bert-0", "bert-2"), {}),
        (("roformer-0", "roformer-1", "bert-0", "bert-1"), {"roformer-1": 9, "bert-1": 9}),
    ],
    ids=["millions of tokens", "other seeds", "other widths"],
)
def test_numbers_in_names_are_pretraining_seeds_only_if_they_pair_up(names, sizes):
    parameters = {f"runs/{name}/model": sizes.get(name, 1) for name in names}
    found = report([line(model, "rte", 0.6, parameters=n) for model, n in parameters.items()])
    assert found.differences == []
    assert "2 RoFormer and 2 BERT; name two models" in found.no_pairs


def test_one_model_is_compared_with_its_controls_only():
    alone = [x for x in learned() if x["model"] != ROFORMER]
    verdict = "above all controls by more than the spread on 1 of 1 tasks: CoLA, Matthews."
    assert judge(alone)[0] == f"small-bert: {verdict}"
    found = report(seeds("runs/mine/model", "rte", (0.6, 0.7)))
    assert found.differences == []
    assert found.no_pairs == "One model, no comparison."
    titles = [table.title for table in group_tables(found.group, [])]
    assert titles[0] == "GLUE, validation split: scores"
    assert not any("as printed" in title for title in titles)  # with two of its tasks


def test_pretraining_seeds_make_pairs_and_a_difference_of_means_over_them():
    """Fine-tuning seeds do not count as pretraining runs; the tasks are corrected by Holm."""
    lines = []
    for seed, gain in ((0, 0.02), (1, 0.06), (2, 0.05), (3, 0.02)):
        bert, rope = (f"runs/{name}-{seed}/model" for name in ("bert", "roformer"))
        for task, more in (("rte", 0.0), ("cola", 0.03)):
            lines += seeds(bert, task, (0.5, 0.5, 0.5))
            score = 0.5 + gain + more
            lines += seeds(rope, task, (score, score, score + 0.03))
    pairs = {pair.title(with_seeds=True): pair.tasks for pair in report(lines).differences}
    title = f"RoFormer {MINUS} BERT"
    assert list(pairs) == [
        *(f"{title}, pretraining seed {seed}" for seed in range(4)),
        f"{title}, over 4 pretraining seeds",
    ]
    assert pairs[f"{title}, pretraining seed 1"]["rte"].mean == pytest.approx(7.0)
    over_seeds = pairs[f"{title}, over 4 pretraining seeds"]
    assert over_seeds["rte"].differences == pytest.approx({0: 3.0, 1: 7.0, 2: 6.0, 3: 3.0})
    assert over_seeds["rte"].p == pytest.approx(stats.ttest_1samp((3, 7, 6, 3), 0).pvalue)
    smaller, larger = sorted(over_seeds.values(), key=lambda found: found.p)
    assert smaller.p_holm == pytest.approx(2 * smaller.p)
    assert larger.p_holm == pytest.approx(max(2 * smaller.p, larger.p))


def test_models_without_a_protocol_in_common_are_not_compared():
    lines = [line(BERT, "rte", 0.6), line(ROFORMER, "rte", 0.7, epochs=5)]
    assert "no two rows have protocol, data" in report(lines).no_pairs


def test_over_pretraining_seeds_only_what_all_of_them_ran_is_compared():
    lines = []
    for seed in range(3):
        for name, score in (("bert", 0.5), ("roformer", 0.6)):
            model = f"runs/{name}-{seed}/model"
            lines += seeds(model, "rte", (score, score + 0.01))
            lines += seeds(model, "cola", (score, score)) * (seed != 2)
            lines += seeds(model, "rte", (score, score), epochs=5) * (seed == 0)
    (over_seeds,) = (pair for pair in report(lines).differences if pair.is_over_pretraining_seeds)
    assert list(over_seeds.tasks) == ["rte"]


def test_the_difference_of_averages_is_over_the_tasks_of_both_and_named_after_them():
    lines = []
    for seed, task in product((0, 1), sorted(GLUE_TASKS)):
        lines.append(line(f"runs/roformer-{seed}/model", task, 0.6 if task != "wnli" else 0.1))
        lines += [line(f"runs/bert-{seed}/model", task, 0.5)] * ((seed, task) != (1, "wnli"))
    *_, (all_nine, first), (eight, second) = texts(pairs_shown(lines)).items()
    assert (all_nine, eight) == ("GLUE average", "mean of these 8 tasks, not the GLUE average")
    assert [[*row.values()][:2] for row in (first, second)] == [["+4.44", DASH], [DASH, "+10.00"]]


def test_a_roformer_that_stock_does_not_know_is_one_too():
    lines = [line(BERT, "rte", 0.5), line("plus", "rte", 0.6, model_type="roformer_plus")]
    assert [pair.tasks["rte"].mean for pair in report(lines).differences] == pytest.approx([10.0])


def learned(gain: float = 0.2, random: float = 0.5, features: float = 0.6) -> list[dict]:
    """Both models above random weights by 20 points, BERT by `gain`, on CoLA (majority: 0)."""
    lines = [simple_features("cola", features)]
    for model, more in ((ROFORMER, 0.2), (BERT, gain)):
        lines += seeds(model, "cola", (0.5 + more, 0.54 + more))
        lines += seeds(model, "cola", (random, random + 0.04), random_weights=True)
    return lines


def test_a_task_counts_where_both_are_above_the_best_control_by_the_spread():
    spread = float(np.std((50, 54), ddof=1))  # 2.83
    title = f"RoFormer {MINUS} BERT: both models above all controls by more than the spread on"
    rest = "Where this is not shown, a model may be no better than a control."
    models = "RoFormer: small-roformer; BERT: small-bert."
    *verdict, protocol = judge(learned())
    assert verdict == [f"{title} 1 of 1 tasks: CoLA, Matthews.", models]
    assert protocol.startswith("All runs: rate ")
    assert pairs_shown(learned()).frame["both above all controls"].tolist() == ["yes"]
    one = "RoFormer alone on: CoLA, Matthews. "
    for lines, alone in (
        (learned(gain=0.1), one),  # 2 above simple features
        (learned(random=0.69), ""),  # 1 above random weights
        (learned(features=0.72 - (spread - 0.01) / 100), ""),
    ):
        assert judge(lines) == [f"{title} 0 of 1 tasks. {alone}{rest}", models, protocol]
        assert pairs_shown(lines).frame["both above all controls"].tolist() == ["not shown"]
    assert judge(learned(features=0.72 - (spread + 0.01) / 100))[0].endswith("CoLA, Matthews.")
    found = gains_of(learned())["small-bert", "cola"]
    assert found == pytest.approx(("features", 12.0, spread, "", True))


def test_the_majority_class_is_a_control_too():
    lines = [simple_features("mrpc", 0.5), *seeds(BERT, "mrpc", (0.8, 0.82))]
    lines += seeds(BERT, "mrpc", (0.5, 0.5), random_weights=True)
    assert gains_of(lines)["small-bert", "mrpc"][:2] == ("majority", pytest.approx(0.0))


def test_the_larger_spread_of_the_two_must_be_exceeded():
    lines = [simple_features("cola", 0.1), *seeds(ROFORMER, "cola", (0.60, 0.62))]
    lines.append(diverged(ROFORMER, "cola", seed=2))
    lines += seeds(ROFORMER, "cola", (0.3, 0.6), random_weights=True)  # scatters more than it gains
    control, gain, spread, absent, is_above = gains_of(lines)["small-roformer", "cola"]
    gains = texts(group_tables(report(lines).group, [])[1])["small-roformer"]
    assert gains == {"CoLA, Matthews": "+16.0 against random weights (21.2, n = 2 and 2)"}
    assert (control, absent, is_above) == ("random", "", False)
    assert (gain, spread) == pytest.approx((16.0, np.std((30, 60), ddof=1)))


def test_without_a_control_or_a_second_seed_no_task_counts_and_the_report_says_why():
    lines = learned(features=0.1)  # random weights are the best control
    for left, absent in (
        ([x for x in lines if not x["random_weights"]], "no random weights"),
        ([x for x in lines if x["model"] != SIMPLE_FEATURES], "no simple features"),
        ([x for x in lines if x["random_weights"] or x["seed"] == 0], "no second seed"),
        ([x for x in lines if not x["random_weights"] or x["seed"] == 0], "no second seed"),
    ):
        assert judge(left)[0] == f"RoFormer {MINUS} BERT: both models not judged on any task."
        pattern = rf"Not judged: small-.* \({absent}; finetune.grid .*\) on CoLA, Matthews\."
        assert re.fullmatch(pattern, judge(left)[-2])
        assert pairs_shown(left).frame["both above all controls"].tolist() == ["not judged"]


def test_a_task_that_is_not_judged_does_not_count_among_the_tasks():
    one_seed = [line(model, "rte", 0.7) for model in (ROFORMER, BERT)]
    # of the other two one model has a seed too few, or no controls
    wnli = [*seeds(ROFORMER, "wnli", (0.7, 0.72)), line(BERT, "wnli", 0.7)]
    lines = [*learned(), *one_seed, *wnli]
    assert judge(lines)[0].endswith(" spread on 1 of 1 tasks: CoLA, Matthews.")
    of_bert = r"Not judged: small-bert \(.*, no second seed;.*\) on RTE, accuracy; WNLI, accuracy\."
    assert any(re.fullmatch(of_bert, sentence) for sentence in judge(lines))
    column = pairs_shown(lines).frame["both above all controls"]
    assert column.tolist() == ["yes", "not judged", "not judged", DASH]  # - of the mean of tasks


def test_over_pretraining_seeds_a_task_counts_when_it_does_for_each_of_them():
    lines = [simple_features("cola", 0.1)]
    for name in ("bert", "roformer"):
        for seed in (0, 1):
            lines += seeds(f"runs/{name}-{seed}/model", "cola", (0.6, 0.64))
        # random weights stand for every pretraining seed
        lines += seeds(f"runs/{name}-0/model", "cola", (0.5, 0.54), random_weights=True)
    assert {round(gain[1]) for gain in gains_of(lines).values()} == {10}
    assert " spread on 1 of 1 " in judge(lines)[0]
    for run in lines:
        if run["model"] == "runs/bert-1/model":
            run["metrics"]["validation"]["matthews"] -= 0.2
    assert " spread on 0 of 1 " in judge(lines)[0]


@pytest.mark.parametrize("model", ["runs/bert-0", "runs/bert-1"])
def test_controls_of_other_data_or_another_configuration_are_none(model):
    lines = seeds("runs/bert-0", "rte", (0.8, 0.8), data="a", config="a")
    lines += seeds(model, "rte", (0.7, 0.7), data="a", config="b", random_weights=True)
    lines += [simple_features("rte", 0.6, data="a"), simple_features("rte", 0.95, data="b")]
    (gain,) = gains_of(lines).values()
    assert gain[:2] == ("features", pytest.approx(20.0))


def test_random_weights_of_an_architecture_are_one_row_whoever_lent_them():
    """A run that went on is published under its name, and its random weights were run before."""
    lines = []
    for folder, task in (("old", "cola"), ("new", "rte")):
        lines += seeds(f"{folder}/bert/model", task, (0.5, 0.52), random_weights=True)
    for task in ("cola", "rte"):
        lines += seeds("new/bert/model", task, (0.7, 0.72))
    rows = texts(group_tables(report(lines).group, [])[0])
    assert list(rows) == ["new/bert", "bert, random weights", "majority class"]
    assert DASH not in rows["bert, random weights"].values()
    assert {gain[0] for gain in gains_of(lines).values()} == {"random"}


@pytest.mark.parametrize(("sizes", "found"), [((1, 9), 1), ((9, 9), 2), ((None, 9), 1)])
def test_random_weights_stand_for_models_of_the_same_size_alone(sizes, found):
    """By their names roformer-12 and roformer-76 could be seeds of one model."""
    lines = []
    for size, width in zip(sizes, (12, 76)):
        known = {} if size is None else {"parameters": size}
        lines.append(line(f"runs/roformer-{width}/model", "rte", 0.7, **known))
    lines.append(lines[1] | {"random_weights": True})
    absent = {name: gain[3] for (name, _), gain in gains_of(lines).items()}
    assert sum("random weights" not in text for text in absent.values()) == found
    assert "random weights" not in absent["roformer-76"]
    lines = [lines[1], lines[2] | {"parameters": 1}]  # of the model that the folder held before
    assert "no random weights" in gains_of(lines)["roformer-76", "rte"][3]
