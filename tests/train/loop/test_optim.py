"""Decay groups, learning-rate schedules, and steps that must not move."""

import dataclasses
import re

import pytest
import torch
from accelerate import Accelerator

import roformer
from tiny import TINY_MODEL, refused, tiny_config
from train.loop import optim
from train.loop.language_model import LanguageModel
from train.settings import SCHEDULES, OptimSettings


def test_every_schedule_warms_up_and_no_two_are_one():
    curves = {}
    for schedule in SCHEDULES:
        settings = OptimSettings(schedule=schedule, warmup_steps=10)
        rate = optim.learning_rate_schedule(settings, 50)
        warm = [rate(step) for step in range(10)]
        assert warm == pytest.approx([settings.learning_rate * n / 10 for n in range(1, 11)])
        curves[schedule] = [rate(step) for step in range(12, 50)]
    assert set(curves["constant"]) == {settings.learning_rate}
    assert len(set(map(tuple, curves.values()))) == len(SCHEDULES)
    for name in ("linear", "cosine"):
        assert curves[name][-1] < 0.1 * settings.learning_rate


MUON = OptimSettings(name="muon", muon_scale=0.3, learning_rate=1e-2, weight_decay=0.0, steps=1)


def test_muon_trains_the_matrices_of_the_encoder_and_adamw_the_rest():
    model = roformer.RoFormerForMaskedLM(tiny_config())
    optimizer = optim.build_optimizer(LanguageModel(model), MUON)
    names = {id(p): name for name, p in model.named_parameters()}
    hidden, *rest = ([names[id(p)] for p in group["params"]] for group in optimizer.param_groups)
    assert len(hidden) == 6 * TINY_MODEL["num_hidden_layers"]
    assert all(".layer." in name and name.endswith("weight") for name in hidden)
    assert sorted([*hidden, *rest[0], *rest[1]]) == sorted(names.values())
    before = {name: p.detach().clone() for name, p in model.named_parameters()}
    for parameter in model.parameters():
        parameter.grad = torch.randn_like(parameter)
    optim.set_learning_rate(optimizer, 1e-2)
    optimizer.step()
    for name, parameter in model.named_parameters():
        update = (parameter.detach() - before[name]).double() / 1e-2
        if name in hidden:  # close to orthogonal, whose root mean square is the scale
            rows = torch.linalg.svdvals(update) / (0.3 * max(update.shape) ** 0.5)
            assert 0.6 < rows.median() <= rows.max() < 1.3
        else:  # Adam's first step is the sign of the gradient
            torch.testing.assert_close(update, -parameter.grad.sign().double(), atol=0.1, rtol=0)


def test_weight_decay_of_a_muon_matrix_is_that_of_adamw():
    model = roformer.RoFormerForMaskedLM(tiny_config())
    decaying = dataclasses.replace(MUON, weight_decay=0.1)
    optimizer = optim.build_optimizer(LanguageModel(model), decaying)
    matrix, table = (optimizer.param_groups[i]["params"][0] for i in (0, 1))
    expected = [parameter.detach() * (1 - 1e-2 * 0.1) for parameter in (matrix, table)]
    for parameter in (matrix, table):
        parameter.grad = torch.zeros_like(parameter)
    optimizer.step()
    torch.testing.assert_close([matrix.detach(), table.detach()], expected)


def adamw_only(model):
    return optim.adamw(model, 0.1, 0.01)


def with_muon(model):
    rest = optim.adamw(model, 0.1, 0.01, exclude=[model.weight])
    return optim.MuonWithAdamW([model.weight], rest, 0.1, 0.01, 0.8)


@pytest.mark.parametrize("is_emulated", [True, False])
def test_muon_orthogonalises_in_float32_where_bfloat16_is_emulated(is_emulated, monkeypatch):
    monkeypatch.setattr(optim, "bfloat16_is_emulated", lambda: is_emulated)
    model = torch.nn.Linear(24, 16)
    gradient = model.weight.grad = torch.randn(16, 24)
    kept, x = gradient.clone(), gradient.double() / gradient.double().norm()
    decayed = model.weight.detach().double() * (1 - 0.1 * 0.01)
    with_muon(model).step()
    for _ in range(5):  # Newton and Schulz, as Jordan et al. have it
        gram = x @ x.T
        x = 3.4445 * x + (-4.775 * gram + 2.0315 * gram @ gram) @ x
    update = (decayed - model.weight.detach()) / (0.1 * 0.8 * 24**0.5)
    assert ((update - x).norm() / x.norm() < 1e-4) == is_emulated
    assert torch.equal(gradient, kept)


def finite_steps(folder, scaler=None, build=adamw_only):
    """A small model with its optimizer, and what the steps of it report."""
    accelerator, reports = Accelerator(cpu=True), []
    accelerator.scaler = scaler
    model = torch.nn.Linear(3, 3)
    optimizer = accelerator.prepare(build(model))
    steps = optim.NonFiniteGuard(optimizer, reports.append, folder)

    def move(number, factor):
        for part in (1.0, factor):  # two micro-batches
            loss = model(torch.ones(2, 3)).square().sum() * part
            accelerator.backward(loss)
        steps.optimizer_step(number, accelerator.clip_grad_norm_(model.parameters(), 1.0))

    def held():
        moments = optimizer.optimizer.state_dict()["state"].values()
        tensors = [*model.parameters(), *(value for state in moments for value in state.values())]
        return [tensor.detach().clone() for tensor in tensors]

    return steps, move, held, reports


@pytest.mark.parametrize(
    ("bad", "build", "moments"),  # of weight and bias: step and two moments, or Muon's one
    [(torch.nan, adamw_only, 6), (torch.inf, adamw_only, 6), (torch.nan, with_muon, 4)],
)
def test_a_step_without_finite_gradient_changes_no_weight_nor_moment(bad, build, moments, tmp_path):
    steps, move, held, reports = finite_steps(tmp_path, build=build)
    move(0, 1.0)
    before = held()
    assert len(before) == 2 + moments
    move(1, bad)
    assert all(map(torch.equal, held(), before))
    assert not reports  # the host has not looked yet
    move(2, 1.0)
    assert not any(map(torch.equal, held(), before))
    assert reports == ["step 2 changed no weight, its gradient is not finite (1 in a row)"]
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
    last_good = f"goes on from {tmp_path}/step-00000004"
    refused(steps.check_last_step, "optim", "3 steps in a row, the last 6", last_good)
    found = [re.findall(r"step (\d+) .* \((\d+) in a row", line)[0] for line in reports]
    assert found == [("1", "1"), ("2", "2"), ("4", "1"), ("5", "2"), ("6", "3")]
    assert all(map(torch.equal, held(), before))


def test_a_loss_scaler_that_finds_no_scale_ends_the_run(tmp_path):
    """By itself it leaves every step out for ever; a few in a row are how it finds its scale."""
    steps, move, _, reports = finite_steps(tmp_path, torch.amp.GradScaler("cpu"))
    for number in range(71):
        move(number, 1.0 if number < 31 and number % 10 == 0 else torch.nan)
    assert not reports
    refused(steps.check_last_step, "40 steps in a row, the last 71", "begins again")
    assert reports[-1].startswith("step 71 changed no weight")
