"""AdamW and Muon, learning-rate schedules, and skipping of non-finite gradients."""

import math
from collections.abc import Callable, Collection
from contextlib import nullcontext
from pathlib import Path
from typing import Any

import torch
from accelerate.optimizer import AcceleratedOptimizer
from torch import Tensor, nn
from torch.overrides import TorchFunctionMode
from transformers import get_scheduler

from roformer.kernels.conditions import bfloat16_is_emulated
from train.loop.language_model import LanguageModel
from train.settings import InputError, OptimSettings

MAX_SKIPPED_STEPS = 3
"""Consecutive skipped steps after which a run ends."""

MAX_SKIPPED_STEPS_SCALED = 40
"""The same with a loss scaler (fp16), which halves its scale at each skipped step."""

MIN_LOSS_SCALE = 65_536 / 2**MAX_SKIPPED_STEPS_SCALED
"""The loss scale after so many skipped steps, from the initial scale of `GradScaler`."""


def adamw(
    model: nn.Module,
    learning_rate: float,
    weight_decay: float,
    betas: tuple[float, float] = (0.9, 0.999),
    epsilon: float = 1e-8,
    exclude: Collection[Tensor] = (),
) -> torch.optim.AdamW:
    """Build a fused AdamW over trained parameters: matrices with weight decay, vectors without."""
    excluded = set(exclude)
    trained = [p for p in model.parameters() if p.requires_grad and p not in excluded]
    groups = [
        {"params": [p for p in trained if p.ndim >= 2], "weight_decay": weight_decay},
        {"params": [p for p in trained if p.ndim < 2], "weight_decay": 0.0},
    ]
    return torch.optim.AdamW(groups, lr=learning_rate, betas=betas, eps=epsilon, fused=True)


def build_optimizer(language_model: LanguageModel, optim: OptimSettings) -> torch.optim.Optimizer:
    """Build the optimizer that `optim.name` names.

    Its `step` obeys GradScaler's protocol, by which `NonFiniteGuard` skips steps: it changes
    nothing if the tensor `self.found_inf` is 1, as fused AdamW's and `MuonWithAdamW`'s.
    """
    hidden: list[Tensor] = []
    if optim.name == "muon":  # for the linear layers between embeddings and head
        modules = language_model.model.base_model.modules()
        hidden = [layer.weight for layer in modules if isinstance(layer, nn.Linear)]
    rate, decay = optim.learning_rate, optim.weight_decay
    rest = adamw(language_model, rate, decay, optim.betas, optim.epsilon, exclude=hidden)
    return MuonWithAdamW(hidden, rest, rate, decay, optim.muon_scale) if hidden else rest


class _Bfloat16AsFloat32(TorchFunctionMode):
    """Turns calls of `Tensor.bfloat16` into copies in float32.

    On a CPU without bfloat16 instructions a Muon step of the demo's model takes 0.05 s instead of
    1.06 s.
    """

    def __torch_function__(
        self, function: Any, types: Any, args: Any = (), kwargs: Any = None
    ) -> Any:
        if function is Tensor.bfloat16:
            return args[0].to(torch.float32, copy=True)
        return function(*args, **(kwargs or {}))


class MuonWithAdamW(torch.optim.Optimizer):
    """torch's Muon for hidden matrices and AdamW for all other parameters, as one optimizer.

    Muon (Jordan et al. 2024, https://kellerjordan.github.io/posts/muon) orthogonalises the momentum
    of a matrix. One list of groups and one state, so that schedule, checkpoints and sharding need
    not know of it. `found_inf` is obeyed as by fused AdamW, but the host waits for it. torch
    orthogonalises in bfloat16; a CPU that would emulate it does so in float32.
    """

    def __init__(
        self,
        hidden: list[Tensor],
        adamw: torch.optim.AdamW,
        learning_rate: float,
        weight_decay: float,
        scale: float,
    ) -> None:
        factor = scale / 0.2  # match_rms_adamw gives updates a root mean square of 0.2
        self.adamw = adamw
        self.muon = torch.optim.Muon(
            hidden,
            lr=factor * learning_rate,
            weight_decay=weight_decay / factor,
            adjust_lr_fn="match_rms_adamw",
        )
        self.muon.param_groups[0]["lr_factor"] = factor
        super().__init__([*self.muon.param_groups, *adamw.param_groups], {})

    def step(self, closure: None = None) -> None:  # type: ignore[override]
        """Update all parameters, or none if `found_inf` is set."""
        found_inf: Tensor | None = getattr(self, "found_inf", None)
        if found_inf is not None and found_inf.item():
            return
        parts = ((self.muon, self.param_groups[:1]), (self.adamw, self.param_groups[1:]))
        is_emulated = self.param_groups[0]["params"][0].is_cpu and bfloat16_is_emulated()
        with _Bfloat16AsFloat32() if is_emulated else nullcontext():
            for part, groups in parts:
                part.param_groups, part.state = groups, self.state  # load_state_dict replaces both
                part.step()


def schedule_factor(schedule: str, warmup_steps: int, steps: int) -> Callable[[int], float]:
    """Return one of transformers' schedules as a function from step to learning-rate factor.

    A function of the step alone: a checkpoint does not need to hold a scheduler.
    """
    optimizer = torch.optim.SGD([nn.Parameter(torch.zeros(1))], lr=1.0)
    # transformers' "constant" has no warm-up
    name = "constant_with_warmup" if schedule == "constant" else schedule
    return get_scheduler(name, optimizer, warmup_steps, steps).lr_lambdas[0]


def learning_rate_schedule(optim: OptimSettings, total: int) -> Callable[[int], float]:
    """Return the learning rate as a function of the step, from 0 to `total` - 1."""
    factor = schedule_factor(optim.schedule, optim.warmup_steps, total + 1)  # 0 after the last step
    return lambda step: optim.learning_rate * factor(step + 1)


def count_steps(optim: OptimSettings, mean_length: float) -> int:
    """Return the optimizer steps of a budget of steps or tokens."""
    if optim.steps is not None:
        return optim.steps
    assert optim.tokens is not None  # as `PretrainSettings` has checked
    return math.ceil(optim.tokens / (optim.batch_size * mean_length))


def set_learning_rate(optimizer: torch.optim.Optimizer, learning_rate: float) -> None:
    """Set the learning rate of every parameter group, times the factor of a Muon group."""
    for group in optimizer.param_groups:
        group["lr"] = learning_rate * group.get("lr_factor", 1.0)


class AsyncScalars:
    """A small tensor [n], copied to the host now and read later, without waiting for a GPU."""

    def __init__(self, tensor: Tensor) -> None:
        self.host = tensor.to("cpu", non_blocking=tensor.is_cuda)  # then to pinned memory
        self.event = torch.cuda.Event() if tensor.is_cuda else None
        if self.event is not None:
            self.event.record()

    def wait(self) -> list[float]:
        """Return the values; waits only for work queued on the device before the copy."""
        if self.event is not None:
            self.event.synchronize()
        return self.host.tolist()


class NonFiniteGuard:
    """Skips the optimizer step on all ranks when the gradient norm is not finite.

    Ends the run after `MAX_SKIPPED_STEPS` in a row. Every rank sees the same norm, because it is
    computed from reduced gradients. By GradScaler's protocol a fused optimizer skips its update on
    the device if `found_inf` is 1; the host reads it one step later, and so never waits for it. A
    loss scaler (fp16) skips steps itself while it looks for its scale: its failure is reported.
    """

    def __init__(
        self, optimizer: AcceleratedOptimizer, warn: Callable[[str], None], checkpoints: Path
    ) -> None:
        self.optimizer = optimizer
        self.warn = warn
        self.checkpoints = checkpoints
        self.scaled = optimizer.scaler is not None
        self.max_skipped = MAX_SKIPPED_STEPS_SCALED if self.scaled else MAX_SKIPPED_STEPS
        self.skipped_in_a_row = 0
        self.unchecked: tuple[int, AsyncScalars] | None = None

    def optimizer_step(self, step: int, norm: Tensor) -> None:
        """Check the step before, then update the weights unless the gradient norm is not finite."""
        self.check_last_step()
        skip = norm.isfinite().logical_not().float()
        if not self.scaled:
            self.optimizer.optimizer.found_inf = skip
        self.unchecked = step, AsyncScalars(skip[None])
        self.optimizer.step()
        self.optimizer.zero_grad()

    def check_last_step(self) -> bool:
        """Warn if the newest step was skipped, once; waits for the device.

        Returns:
            Whether a checkpoint may be saved now: not after a skipped step, because a restart would
            begin where gradients are not finite, except at the end of a launch. A loss scaler's
            skips are normal.

        Raises:
            InputError: Too many steps in a row were skipped.
        """
        if self.unchecked is not None:
            (step, skipped), self.unchecked = self.unchecked, None
            self.skipped_in_a_row = self.skipped_in_a_row + 1 if skipped.wait()[0] else 0
            failed = self.skipped_in_a_row >= self.max_skipped
            if failed or (self.skipped_in_a_row and not self.scaled):
                self.warn(
                    f"step {step + 1} changed no weight, its gradient is not finite "
                    f"({self.skipped_in_a_row} in a row)"
                )
            if failed:
                newest = max(self.checkpoints.glob("step-*[0-9]"), default=None)
                outcome = f"goes on from {newest}" if newest else "begins again"
                raise InputError(
                    f"optim must keep gradients finite, got {self.max_skipped} steps in a row, the "
                    f"last {step + 1}, with infinite ones; the same command with a lower "
                    f"optim.learning_rate and run.allow_drift true {outcome}"
                )
        return self.skipped_in_a_row == 0 or self.scaled
