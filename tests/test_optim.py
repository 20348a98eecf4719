"""Decay groups and learning-rate schedules."""

import pytest
import torch
from transformers import get_scheduler

import roformer
from conftest import TINY_MODEL
from train.optim import adamw, decay_groups, rate_factor
from train.settings import SCHEDULES


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


@pytest.mark.parametrize("schedule", SCHEDULES)
def test_rate_at_a_step_is_that_of_transformers_scheduler(schedule):
    rate = rate_factor(schedule, 5, 20)
    optimizer = torch.optim.SGD([torch.nn.Parameter(torch.zeros(1))], lr=1.0)
    scheduler = get_scheduler(schedule, optimizer, 5, 20)
    for step in range(20):
        assert rate(step) == pytest.approx(scheduler.get_last_lr()[0])
        optimizer.step()
        scheduler.step()


def test_one_step_moves_as_torch_says():
    torch.manual_seed(0)
    ours, theirs = (torch.nn.Linear(3, 3) for _ in range(2))
    theirs.load_state_dict(ours.state_dict())
    first = adamw(ours, 0.1, 0.0)
    second = torch.optim.AdamW(theirs.parameters(), lr=0.1, weight_decay=0.0, fused=False)
    for model, optimizer in ((ours, first), (theirs, second)):
        model(torch.ones(2, 3)).square().sum().backward()
        optimizer.step()
    torch.testing.assert_close(ours.weight, theirs.weight)
