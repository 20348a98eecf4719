"""Which models are subtracted from which, over which seeds, and whether that counts."""

from pathlib import Path

import numpy as np
import pytest
from scipy import stats

from finetune.report.report import MINUS, control_grid, pair_grid, untested
from finetune.report.statistics import t_interval
from finetune.report.verdict import verdicts
from tiny_results import BERT, ROFORMER, line, seeds, table, texts


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
        "the larger sample standard deviation over seeds on SST-2, accuracy; CoLA, Matthews; "
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
    assert "no two rows have recipe, start" in table(lines).remark


def test_a_model_is_compared_with_its_random_control():
    lines = [*seeds(BERT, "rte", (0.7, 0.8)), *seeds(BERT, "rte", (0.5, 0.5), random_weights=True)]
    lines += seeds(ROFORMER, "rte", (0.7, 0.8))
    (grid,) = control_grid(table(lines))
    test = stats.ttest_rel((70, 80), (50, 50))
    low, high = t_interval([20, 30])
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


def test_random_weights_are_borrowed_for_the_tasks_that_a_models_own_were_not_run_on():
    control = {"model_type": "bert", "random_weights": True}
    lines = [x for task in ("rte", "cola") for x in seeds("bert-0", task, (0.7, 0.8),
                                                          model_type="bert")]  # fmt: skip
    lines += seeds("bert-0", "rte", (0.5, 0.5), **control)
    for task in ("rte", "cola"):
        lines += seeds("bert-1", task, (0.3, 0.3), **control)
    (found,) = table(lines).controls
    gains = {task: comparison.mean for task, comparison in found.tasks.items()}
    assert gains == pytest.approx({"rte": 25.0, "cola": 45.0})


def test_a_roformer_that_stock_does_not_know_is_one_too():
    lines = [line(BERT, "rte", 0.5), line("plus", "rte", 0.6, model_type="roformer_plus")]
    assert [pair.tasks["rte"].mean for pair in table(lines).pairs] == pytest.approx([10.0])
