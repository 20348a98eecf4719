"""Decay groups, learning-rate schedules, and steps that must not move."""

import pytest
import torch
from accelerate import Accelerator
from transformers import get_scheduler

import roformer
from tiny import TINY_MODEL
from train.loop.optim import (
    NonFiniteGuard,
    adamw,
    decay_groups,
    learning_rate_schedule,
    schedule_factor,
)
from train.settings import SCHEDULES, InputError, OptimSettings


def test_matrices_decay_and_vectors_do_not():
    model = roformer.RoFormerForMaskedLM(roformer.RoFormerConfig(vocab_size=60, **TINY_MODEL))
    decayed, exempt = decay_groups(model, 0.1)
    assert (decayed["weight_decay"], exempt["weight_decay"]) == (0.1, 0.0)
    names = {id(p): name for name, p in model.named_parameters()}
    assert all(names[id(p)].endswith("weight") for p in decayed["params"])
    assert all(
        n.endswith("bias") or "LayerNorm" in n for n in (names[id(p)] for p in exempt["params"])
    )
    assert len(decayed["params"]) + len(exempt["params"]) == len(names)


@pytest.mark.parametrize(
    ("schedule", "theirs"),
    [("linear", "linear"), ("cosine", "cosine"), ("constant", "constant_with_warmup")],
)
def test_rate_at_a_step_is_that_of_transformers_scheduler(schedule, theirs):
    rate = schedule_factor(schedule, 5, 20)
    optimizer = torch.optim.SGD([torch.nn.Parameter(torch.zeros(1))], lr=1.0)
    scheduler = get_scheduler(theirs, optimizer, 5, 20)
    for step in range(20):
        assert rate(step) == pytest.approx(scheduler.get_last_lr()[0])
        optimizer.step()
        scheduler.step()


@pytest.mark.parametrize("budget", [{"steps": 50}, {"hours": 2.0}])
def test_every_schedule_warms_up_over_steps_and_over_hours_and_no_two_are_one(budget):
    curves = {}
    for schedule in SCHEDULES:
        settings = OptimSettings(schedule=schedule, warmup_steps=10, **budget)
        rate = learning_rate_schedule(settings, settings.steps)
        warm = [rate(step, 0.0) for step in range(10)]
        assert warm == pytest.approx([settings.learning_rate * n / 10 for n in range(1, 11)])
        curves[schedule] = [rate(step, 2.0 * step / 50) for step in range(12, 50)]
    assert set(curves["constant"]) == {settings.learning_rate}
    assert len(set(map(tuple, curves.values()))) == len(SCHEDULES)
    for name in ("linear", "cosine"):
        assert curves[name][-1] < 0.1 * settings.learning_rate


def finite_steps(folder, scaler=None):
    """A small model with its optimizer, and what the steps of it report."""
    torch.manual_seed(0)
    accelerator, reports = Accelerator(cpu=True), []
    accelerator.scaler = scaler
    model = torch.nn.Linear(3, 3)
    optimizer = accelerator.prepare(adamw(model, 0.1, 0.01))
    steps = NonFiniteGuard(optimizer, lambda *told: reports.append(told), folder)

    def move(number, factor):
        for part in (1.0, factor):  # two micro-batches
            loss = model(torch.ones(2, 3)).square().sum() * part
            accelerator.backward(loss)
            steps.record_loss(loss)
        steps.step(number, accelerator.clip_grad_norm_(model.parameters(), 1.0))

    def held():
        moments = optimizer.optimizer.state_dict()["state"].values()
        tensors = [*model.parameters(), *(value for state in moments for value in state.values())]
        return [tensor.detach().clone() for tensor in tensors]

    return steps, move, held, reports


@pytest.mark.parametrize("bad", [torch.nan, torch.inf])
def test_a_step_without_a_finite_gradient_changes_no_weight_and_no_moment(bad, tmp_path):
    steps, move, held, reports = finite_steps(tmp_path)
    move(0, 1.0)
    before = held()
    assert len(before) == 2 + 2 * 3  # weight and bias, each with its step and two moments
    move(1, bad)
    assert all(map(torch.equal, held(), before))
    assert not reports  # the host has not looked yet
    move(2, 1.0)
    assert not any(map(torch.equal, held(), before))
    ((number, in_a_row, lost),) = reports
    assert (number, in_a_row, lost.tolist()) == (1, 1, [False, True])
    assert steps.check_last_step()
    assert len(reports) == 1
    move(3, bad)
    assert not steps.check_last_step()  # and nothing is saved


def test_three_steps_in_a_row_end_the_run_and_name_the_last_good_checkpoint(tmp_path):
    for name in ("step-00000003", "step-00000004", "step-00000005.tmp", "damaged-step-00000009"):
        (tmp_path / name).mkdir()
    steps, move, held, reports = finite_steps(tmp_path)
    before = held()
    for number, factor in enumerate([torch.nan, torch.nan, 1.0, torch.inf, torch.nan, torch.nan]):
        move(number, factor)  # a good one between them: the count begins again
        before = held() if factor == 1.0 else before
    with pytest.raises(
        InputError, match=f"3 steps in a row, the last 6, .* {tmp_path}/step-00000004$"
    ):
        steps.check_last_step()
    assert [told[:2] for told in reports] == [(0, 1), (1, 2), (3, 1), (4, 2), (5, 3)]
    assert all(map(torch.equal, held(), before))


def test_a_loss_scaler_that_finds_no_scale_ends_the_run(tmp_path):
    """By itself it leaves every step out for ever; a few in a row are how it finds its scale."""
    steps, move, _, reports = finite_steps(tmp_path, torch.amp.GradScaler("cpu"))
    for number in range(71):
        move(number, 1.0 if number < 31 and number % 10 == 0 else torch.nan)
    assert not reports
    with pytest.raises(InputError, match="40 steps in a row, the last 71, .* begins again"):
        steps.check_last_step()
    assert reports[-1][:2] == (70, 40)
