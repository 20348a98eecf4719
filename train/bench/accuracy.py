"""What the benchmark compares with float64 before anything is timed."""

from collections.abc import Callable, Iterator, Sequence
from functools import partial
from typing import Any

import torch
from torch.nn import functional as F

import roformer
from roformer.kernels.attention import UNPADDED
from train.loop.objective import cross_entropy
from train.settings import InputError


def differences(device: torch.device) -> Iterator[tuple[str, float, float]]:
    """Each kernel and the loss on the device: name, largest relative difference, and its limit.

    Raises:
        InputError: They differ by more than the precision explains.
    """
    torch.manual_seed(0)
    fields = {"vocab_size": 100, "hidden_size": 64, "num_hidden_layers": 2,
              "num_attention_heads": 2, "intermediate_size": 128, "hidden_act": "tanh"}  # fmt: skip
    config = roformer.RoFormerConfig(**fields, initializer_range=0.2)
    exact = roformer.RoFormerModel._from_config(config, attn_implementation="eager").eval()
    weights = exact.state_dict()
    ids = torch.randint(5, 100, (3, 48))
    mask = (torch.arange(48) < torch.tensor([[48], [31], [5]])).long()
    weigh = torch.randn(64, dtype=torch.float64)  # a plain mean of normed outputs has no gradient
    expected = outputs_and_gradients(exact.double(), ids, mask, weigh)
    for bf16, limit in ((False, 1e-4), (True, 0.05)):
        dtype = torch.bfloat16 if bf16 else torch.float32
        for name in ("eager", "sdpa", UNPADDED):
            model = roformer.RoFormerModel._from_config(config, attn_implementation=name).eval()
            model.load_state_dict(weights)
            found = outputs_and_gradients(model.to(device, dtype), ids, mask, weigh)
            yield compare(name, bf16, found, expected, limit)
        scores = torch.randn(64, 3000, dtype=torch.float64)
        targets = torch.randint(0, 3000, (64,))
        found = loss_and_gradient(cross_entropy, scores.to(device, dtype), targets)
        exact_loss = partial(F.cross_entropy, reduction="sum")
        yield compare("loss", bf16, found, loss_and_gradient(exact_loss, scores, targets), limit)


def compare(
    name: str,
    bf16: bool,
    found: Sequence[torch.Tensor],
    expected: Sequence[torch.Tensor],
    limit: float,
) -> tuple[str, float, float]:
    """Name with its precision, largest relative difference of norms, and the limit.

    Raises:
        InputError: It is above the limit, or no number.
    """
    worst = max(float((a - b).norm() / b.norm()) for a, b in zip(found, expected))
    name = f"{name} in {'bf16' if bf16 else 'fp32'}"
    if not worst <= limit:
        raise InputError(f"{name} must agree with float64 to {limit}, got {worst:.2g}")
    return name, worst, limit


def loss_and_gradient(
    function: Callable[..., Any], scores: torch.Tensor, targets: torch.Tensor
) -> list[torch.Tensor]:
    """Of a cross-entropy, in float64 on a CPU."""
    scores = scores.detach().requires_grad_()
    result = function(scores, targets.to(scores.device))
    loss = result[0] if isinstance(result, tuple) else result
    loss.backward()
    assert scores.grad is not None
    return [x.detach().cpu().double() for x in (loss, scores.grad)]


def outputs_and_gradients(
    model: torch.nn.Module, ids: torch.Tensor, mask: torch.Tensor, weigh: torch.Tensor
) -> list[torch.Tensor]:
    """Real tokens' states and the gradients of a sum of them, in float64 on a CPU."""
    device, dtype = next(model.parameters()).device, next(model.parameters()).dtype
    states = model(ids.to(device), attention_mask=mask.to(device)).last_hidden_state
    real = states[mask.bool().to(device)]
    (real * weigh.to(device, dtype)).square().mean().backward()
    # the bias of keys has no gradient: softmax cancels it
    wanted = [p for name, p in model.named_parameters() if not name.endswith("key.bias")]
    gradients = [torch.zeros_like(p) if p.grad is None else p.grad for p in wanted]
    return [x.detach().cpu().double() for x in (real, *gradients)]
