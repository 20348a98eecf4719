"""AdamW with decay groups, and the learning rate as a function of the step."""

from collections.abc import Callable

import torch
from torch import nn
from transformers import get_scheduler


def decay_groups(model: nn.Module, weight_decay: float) -> list[dict]:
    """Parameters in two groups: matrices decay; biases and LayerNorm gains do not."""
    trained = [p for p in model.parameters() if p.requires_grad]
    return [
        {"params": [p for p in trained if p.ndim >= 2], "weight_decay": weight_decay},
        {"params": [p for p in trained if p.ndim < 2], "weight_decay": 0.0},
    ]


def adamw(
    model: nn.Module,
    learning_rate: float,
    weight_decay: float,
    betas: tuple[float, float] = (0.9, 0.999),
    epsilon: float = 1e-8,
) -> torch.optim.AdamW:
    """Fused AdamW over `decay_groups`."""
    groups = decay_groups(model, weight_decay)
    return torch.optim.AdamW(groups, lr=learning_rate, betas=betas, eps=epsilon, fused=True)


def rate_factor(schedule: str, warmup_steps: int, steps: int) -> Callable[[int], float]:
    """The learning rate's factor at a step, by the name of transformers' schedule.

    A function of the step alone, so a checkpoint need not hold a scheduler.
    """
    optimizer = torch.optim.SGD([nn.Parameter(torch.zeros(1))], lr=1.0)
    return get_scheduler(schedule, optimizer, warmup_steps, steps).lr_lambdas[0]


def set_rate(optimizer: torch.optim.Optimizer, rate: float) -> None:
    """Give every parameter group this learning rate."""
    for group in optimizer.param_groups:
        group["lr"] = rate
