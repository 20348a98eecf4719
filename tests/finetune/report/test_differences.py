"""Which models are subtracted from which, over which seeds, and whether that counts."""

from pathlib import Path

import numpy as np
import pytest
from scipy import stats

from finetune.report.differences import MINUS
from finetune.report.differences import verdicts as group_verdicts
from finetune.report.statistics import t_interval
from finetune.report.tables import Table, control_table, group_tables
from tiny_results import BERT, ROFORMER, line, report, seeds, texts


def verdicts(lines) -> list[str]:
    found = report(lines)
    return group_verdicts(found.group, found.pairs, found.controls)


def pairs_shown(lines) -> Table:
    """The table of the differences between two models."""
    found = report(lines)
    return group_tables(found.group, found.pairs, found.controls, found.no_pairs)[1]


def test_differences_are_scipys_on_the_scores_of_shared_seeds():
    draw = np.random.default_rng(0)
    ours, theirs = draw.normal(0.7, 0.02, (2, 5)), draw.normal(0.68, 0.02, (2, 5))
    lines = [x for i, task in enumerate(("cola", "mnli")) for x in seeds(ROFORMER, task, ours[i])]
    lines += [x for i, task in enumerate(("cola", "mnli")) for x in seeds(BERT, task, theirs[i])]
    lines += [line(BERT, "cola", 0.1, seed=9)]
    (found,) = report(lines).pairs
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
    shown = pairs_shown(lines)
    assert shown.frame["task"].tolist() == ["CoLA, Matthews"]
    assert any("rte: no seed with a score on both sides" in remark for remark in shown.remarks)


def test_one_seed_has_a_difference_but_no_empty_columns():
    shown = pairs_shown([line(BERT, "rte", 0.6), line(ROFORMER, "rte", 0.7)])
    assert list(shown.frame) == ["difference", "task", "seeds", "mean"]
    assert shown.frame.iloc[0].tolist()[1:] == ["RTE, accuracy", "1", "+10.00"]


def test_several_models_of_a_kind_have_no_difference_until_a_pair_is_named():
    lines = [line(BERT, "rte", 0.6), line(ROFORMER, "rte", 0.7), line("new", "rte", 0.9)]
    found = report(lines)
    assert found.pairs == []
    assert "2 RoFormer and 1 BERT; name two models with --pair" in pairs_shown(lines).remarks[0]
    (named,) = report(lines, pair=["new", "small-roformer"]).pairs
    assert (named.title, named.tasks["rte"].mean) == (f"new {MINUS} small-roformer", 20.0)


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
    lines = [
        line(f"runs/{name}/model", "rte", 0.6, model_type=name.split("-")[0])
        | {"parameters": sizes.get(name, 1)}
        for name in names
    ]
    found = report(lines)
    assert found.pairs == []
    assert "2 RoFormer and 2 BERT; name two models" in found.no_pairs


def test_pretraining_seeds_make_pairs_and_a_difference_of_means_over_them():
    """Fine-tuning seeds do not count as pretraining runs; the tasks are corrected by Holm."""
    lines = []
    for seed, gain in ((0, 0.02), (1, 0.06), (2, 0.05)):
        bert, rope = (f"runs/{name}-{seed}/model" for name in ("bert", "roformer"))
        for task, more in (("rte", 0.0), ("cola", 0.03)):
            lines += seeds(bert, task, (0.5, 0.5, 0.5), model_type="bert")
            score = 0.5 + gain + more
            lines += seeds(rope, task, (score, score, score + 0.03))
    pairs = {pair.title: pair.tasks for pair in report(lines).pairs}
    title = f"RoFormer {MINUS} BERT"
    assert list(pairs) == [
        *(f"{title}, pretraining seed {seed}" for seed in range(3)),
        f"{title}, over 3 pretraining seeds",
    ]
    assert pairs[f"{title}, pretraining seed 1"]["rte"].mean == pytest.approx(7.0)
    over_seeds = pairs[f"{title}, over 3 pretraining seeds"]
    assert over_seeds["rte"].differences == pytest.approx({0: 3.0, 1: 7.0, 2: 6.0})
    assert over_seeds["rte"].p == pytest.approx(stats.ttest_1samp((3.0, 7.0, 6.0), 0).pvalue)
    smaller, larger = sorted(over_seeds.values(), key=lambda found: found.p)
    assert smaller.p_holm == pytest.approx(2 * smaller.p)
    assert larger.p_holm == pytest.approx(max(2 * smaller.p, larger.p))


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
    assert "counts: " in verdicts(lines)[-1]
    for row in lines:  # with another tokenizer random weights are other ones
        row["tokenizer"] = "other" if "-1/" in row["model"] else None
    last = verdicts(lines)[-1]
    assert "pretraining seed 1: no random weights beside both" in last


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
    assert verdicts(learned({})) == [
        f"RoFormer {MINUS} BERT counts: both models stand above their random weights by more than "
        "the larger sample standard deviation over seeds on SST-2, accuracy; CoLA, Matthews; "
        "STS-B, Spearman."
    ]
    spread = np.std((50, 54), ddof=1)  # 2.83
    (found,) = verdicts(learned({"cola": (spread - 0.1) / 100, "stsb": -0.01}))
    assert found == (
        f"RoFormer {MINUS} BERT does not count yet: small-bert, CoLA, Matthews: +2.7 over random "
        "weights, spread 2.8; small-bert, STS-B, Spearman: -1.0 over random weights, spread 2.8."
    )
    assert found in pairs_shown(learned({"cola": 0.0273, "stsb": -0.01})).remarks


def test_random_weights_stand_for_every_pretraining_seed():
    lines = []
    for seed in (0, 1):
        for name in ("bert", "roformer"):
            model, of = f"runs/{name}-{seed}/model", {"model_type": name}
            for task in ("sst2", "cola", "stsb"):
                lines += seeds(model, task, (0.6, 0.64), **of)
                if seed == 0:
                    lines += seeds(model, task, (0.5, 0.54), random_weights=True, **of)
    found = report(lines)
    assert [round(x.tasks["cola"].mean) for x in found.controls] == [10] * 4
    title = f"RoFormer {MINUS} BERT"
    titles = [f"{title}, pretraining seed 0", f"{title}, pretraining seed 1",
              f"{title}, over 2 pretraining seeds"]  # fmt: skip
    assert [x.split(" counts: ")[0] for x in verdicts(lines)] == titles
    for run in lines:
        if run["model"] == "runs/bert-1/model" and run["task"] == "cola":
            run["metrics"]["validation"]["matthews"] -= 0.2
    last = verdicts(lines)[-1]  # over seeds it counts when each of them does
    assert last.startswith(f"{titles[2]} does not count yet: bert-1, CoLA")


def test_a_pair_without_controls_or_tasks_does_not_count():
    lines = learned({})
    pretrained = [x for x in lines if not x["random_weights"]]
    (found,) = verdicts(pretrained)
    assert "cannot be said: no random weights" in found
    (found,) = verdicts([x for x in lines if x["task"] != "cola"])
    assert "small-roformer, cola: not run" in found
    (found,) = verdicts([x for x in lines if x["seed"] == 0])
    assert "one seed, so the spread is not known" in found
    assert verdicts(seeds(BERT, "rte", (0.5, 0.6))) == []


def test_models_without_a_recipe_in_common_are_not_compared():
    lines = [line(BERT, "rte", 0.6), line(ROFORMER, "rte", 0.7, epochs=5)]
    assert "no two rows have recipe, start" in report(lines).no_pairs


def test_a_model_is_compared_with_its_random_control():
    lines = [*seeds(BERT, "rte", (0.7, 0.8)), *seeds(BERT, "rte", (0.5, 0.5), random_weights=True)]
    lines += seeds(ROFORMER, "rte", (0.7, 0.8))
    found = report(lines)
    test = stats.ttest_rel((70, 80), (50, 50))
    low, high = t_interval([20, 30])
    text = f"+25.0 [{low:+.1f}, {high:+.1f}] p {test.pvalue:.3f}"
    shown = texts(control_table(found.group, found.controls))
    assert shown == {f"small-bert (bert) {MINUS} random weights": {"RTE, accuracy": text}}
    pair = found.pairs[0]
    assert pair.tasks["rte"].mean == 0.0  # the control has no part in it


def test_random_weights_are_borrowed_from_a_model_of_the_same_name_in_another_folder():
    """A run that went on is published under its name, and its random weights were run before."""
    lines = []
    for model, kind in ((BERT, "bert"), (ROFORMER, "roformer")):
        later = f"later/{Path(model).parent.name}/model"
        for task in ("sst2", "cola", "stsb"):
            lines += seeds(later, task, (0.6, 0.64), model_type=kind)
            lines += seeds(model, task, (0.5, 0.54), random_weights=True, model_type=kind)
    assert verdicts(lines)[0].startswith(f"RoFormer {MINUS} BERT counts: ")


@pytest.mark.parametrize(("sizes", "found"), [((1, 9), 1), ((9, 9), 2), ((None, 9), 2)])
def test_random_weights_are_borrowed_from_a_model_of_the_same_size_alone(sizes, found):
    """By their names roformer-128 and roformer-768 could be seeds of one model."""
    lines = []
    for size, width in zip(sizes, (128, 768)):
        known = {} if size is None else {"parameters": size}
        lines.append(line(f"runs/roformer-{width}/model", "rte", 0.7) | known)
    lines.append(lines[1] | {"random_weights": True})
    controls = report(lines).controls
    assert [set(x.second["kind"]) for x in controls] == [{"random"}] * found
    assert "roformer-768" in {x.first["short_name"].iloc[0] for x in controls}


def test_random_weights_of_the_model_that_a_folder_held_before_are_none_of_its_own():
    lines = [line(BERT, "rte", 0.7) | {"parameters": 9}]
    lines.append(line(BERT, "rte", 0.5, random_weights=True) | {"parameters": 1})
    assert report(lines).controls == []


def test_the_larger_spread_of_the_two_must_be_exceeded():
    lines = learned({})
    for run in lines:  # random weights that scatter by more than both models gain
        if run["random_weights"] and run["task"] == "cola":
            run["metrics"]["validation"]["matthews"] = (0.3, 0.6)[run["seed"]]
    (found,) = verdicts(lines)
    assert "does not count yet" in found
    assert "CoLA, Matthews: +17.0 over random weights, spread 21.2" in found


def test_over_pretraining_seeds_only_what_all_of_them_ran_is_compared():
    lines = []
    for seed in range(3):
        for name, score in (("bert", 0.5), ("roformer", 0.6)):
            model, of = f"runs/{name}-{seed}/model", {"model_type": name}
            lines += seeds(model, "rte", (score, score + 0.01), **of)
            lines += seeds(model, "cola", (score, score), **of) * (seed != 2)
            lines += seeds(model, "rte", (score, score), epochs=5, **of) * (seed == 0)
    (over_seeds,) = (pair for pair in report(lines).pairs if pair.over)
    assert (list(over_seeds.tasks), over_seeds.missing) == (["rte"], ["cola"])
    assert f"{over_seeds.title}, cola: not run with all of them." in pairs_shown(lines).remarks


def test_the_difference_of_averages_is_over_the_tasks_of_both():
    lines = seeds(ROFORMER, "cola", (0.1, 0.1))  # which BERT was not run on
    for task in ("rte", "wnli"):
        lines += [*seeds(BERT, task, (0.5, 0.6)), *seeds(ROFORMER, task, (0.6, 0.7))]
    (pair,) = report(lines).pairs
    assert pair.average.mean == pytest.approx(10.0)


def test_a_model_is_compared_with_random_weights_of_its_own_where_it_has_them():
    lines = []
    for seed, floor in ((0, 0.5), (1, 0.4)):
        of = {"model_type": "bert"}
        lines += seeds(f"runs/bert-{seed}/model", "rte", (0.7, 0.8), **of)
        lines += seeds(f"runs/bert-{seed}/model", "rte", (floor,) * 2, random_weights=True, **of)
    assert [x.tasks["rte"].mean for x in report(lines).controls] == pytest.approx([25.0, 35.0])


def test_random_weights_are_borrowed_for_the_tasks_that_a_models_own_were_not_run_on():
    control = {"model_type": "bert", "random_weights": True}
    lines = [x for task in ("rte", "cola") for x in seeds("bert-0", task, (0.7, 0.8),
                                                          model_type="bert")]  # fmt: skip
    lines += seeds("bert-0", "rte", (0.5, 0.5), **control)
    for task in ("rte", "cola"):
        lines += seeds("bert-1", task, (0.3, 0.3), **control)
    (found,) = report(lines).controls
    gains = {task: comparison.mean for task, comparison in found.tasks.items()}
    assert gains == pytest.approx({"rte": 25.0, "cola": 45.0})


def test_a_roformer_that_stock_does_not_know_is_one_too():
    lines = [line(BERT, "rte", 0.5), line("plus", "rte", 0.6, model_type="roformer_plus")]
    assert [pair.tasks["rte"].mean for pair in report(lines).pairs] == pytest.approx([10.0])
