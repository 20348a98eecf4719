"""AdamW with decay groups, the learning rate as a function of progress, and finite steps."""

from collections.abc import Callable
from pathlib import Path

import torch
from accelerate.optimizer import AcceleratedOptimizer
from torch import Tensor, nn
from transformers import get_scheduler

from train.loop.preemption import AsyncScalars
from train.settings import InputError, OptimSettings

PATIENCE = 3
"""Steps in a row without a finite gradient after which a run ends: it will not mend itself."""

SCALES = 40
"""The same with a loss scaler, which halves its scale at each of them."""

MIN_LOSS_SCALE = 65_536 / 2**SCALES
"""What then is left of the scale that it begins with."""

TIMED_STEPS = 1_000_000
"""Parts into which a schedule over hours divides them."""


def decay_groups(model: nn.Module, weight_decay: float) -> list[dict]:
    """Two groups: what has two dimensions or more decays; biases and LayerNorm gains do not."""
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


def schedule_factor(schedule: str, warmup_steps: int, steps: int) -> Callable[[int], float]:
    """The learning rate's factor at a step, as transformers' schedules have it.

    A function of the step alone, so a checkpoint need not hold a scheduler.
    """
    optimizer = torch.optim.SGD([nn.Parameter(torch.zeros(1))], lr=1.0)
    name = "constant_with_warmup" if schedule == "constant" else schedule  # whose plain has none
    return get_scheduler(name, optimizer, warmup_steps, steps).lr_lambdas[0]


def learning_rate(settings: OptimSettings, total: int | None) -> Callable[[int, float], float]:
    """The learning rate of a step, given its number (from 0) and the hours trained before it.

    Args:
        settings: The optim section.
        total: Steps of the run; None where `settings.hours` is the budget: then the schedule
            follows the clock, and only the warm-up the steps.
    """
    peak, warmup = settings.learning_rate, settings.warmup_steps
    if total is not None:
        factor = schedule_factor(settings.schedule, warmup, total + 1)  # the last step still moves
        return lambda step, hours: peak * factor(step + 1)
    assert settings.hours is not None
    budget, factor = settings.hours, schedule_factor(settings.schedule, 0, TIMED_STEPS + 1)

    def timed(step: int, hours: float) -> float:
        part = factor(int(TIMED_STEPS * min(1.0, hours / budget)))
        return peak * min(1.0, (step + 1) / max(1, warmup)) * part

    return timed


def set_learning_rate(optimizer: torch.optim.Optimizer, rate: float) -> None:
    """Give every parameter group this learning rate."""
    for group in optimizer.param_groups:
        group["lr"] = rate


class NonFiniteGuard:
    """An optimizer that leaves the weights alone where the gradient is not finite.

    Gradients are added up over processes before their norm is taken, so every process sees the same
    norm, and none moves. The decision stays on the device, as fused AdamW's `found_inf`; the host
    reads it a step later, and so waits for nothing.

    Args:
        optimizer: As prepared by Accelerate. One with a loss scaler (fp16) leaves steps out by
            itself while it looks for its scale: that is told only when it finds none.
        report: Called in every process with the step that was skipped, how many have been in a row,
            and for each micro-batch of this process whether its own loss was not finite, [n], on
            the device.
        checkpoints: Folder of the run's checkpoints, for the message.
    """

    def __init__(
        self,
        optimizer: AcceleratedOptimizer,
        report: Callable[[int, int, Tensor], None],
        checkpoints: Path,
    ) -> None:
        self.optimizer = optimizer
        self.report = report
        self.checkpoints = checkpoints
        self.lost: list[Tensor] = []
        self.pending: tuple[int, AsyncScalars, Tensor] | None = None
        self.in_a_row = 0
        self.patience = PATIENCE if optimizer.scaler is None else SCALES

    def record_loss(self, loss: Tensor) -> None:
        """Remember whether the loss of a micro-batch is finite."""
        self.lost.append(loss.detach().isfinite().logical_not())

    def step(self, number: int, norm: Tensor) -> None:
        """Move the weights unless the norm of the gradient is not finite.

        Raises:
            InputError: As `check_last_step`.
        """
        self.check_last_step()
        skipped = norm.isfinite().logical_not().float()
        if self.optimizer.scaler is None:
            self.optimizer.optimizer.found_inf = skipped
        self.pending = number, AsyncScalars(skipped[None]), torch.stack(self.lost)
        self.lost = []
        self.optimizer.step()
        self.optimizer.zero_grad()

    def check_last_step(self) -> bool:
        """Look at the step before, if it has not been looked at.

        Returns:
            Whether to save: nobody should have to go on from weights whose gradients are not finite
            (but for a loss scaler, which leaves a step out now and then).

        Raises:
            InputError: It was one of several in a row without a finite gradient.
        """
        if self.pending is not None:
            self._look(*self.pending)
        return self.in_a_row == 0 or self.optimizer.scaler is not None

    def _look(self, number: int, told: AsyncScalars, lost: Tensor) -> None:
        self.pending = None
        self.in_a_row = self.in_a_row + 1 if told.result()[0] else 0
        if not self.in_a_row:
            return
        if self.optimizer.scaler is None or self.in_a_row >= self.patience:
            self.report(number, self.in_a_row, lost)
        if self.in_a_row >= self.patience:
            good = max(self.checkpoints.glob("step-*[0-9]"), default=None)
            where = f"goes on from {good}" if good else "begins again"
            raise InputError(
                f"optim must keep gradients finite, got {self.patience} steps in a row, the last "
                f"{number + 1}, with infinite ones; the same command with a lower "
                f"optim.learning_rate and run.allow_drift true {where}"
            )
