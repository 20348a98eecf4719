"""Accuracy of the attention kernels against float64, checked before anything is timed."""

from collections.abc import Iterator

import torch

import roformer
from roformer.kernels.attention import UNPADDED
from train.settings import require

KERNELS = ("eager", "sdpa", UNPADDED)


def relative_errors(device: torch.device) -> Iterator[tuple[str, float, float]]:
    """Compare outputs and gradients of every kernel with those of `eager` in float64 on the CPU.

    Yields:
        Kernel and precision, largest relative error of a tensor's norm, and its limit.

    Raises:
        InputError: An error is above the limit.
    """
    torch.manual_seed(0)
    fields = {"vocab_size": 100, "hidden_size": 64, "num_hidden_layers": 2,
              "num_attention_heads": 2, "intermediate_size": 128, "hidden_act": "tanh"}  # fmt: skip
    config = roformer.RoFormerConfig(**fields, initializer_range=0.2)
    reference = roformer.RoFormerModel._from_config(config, attn_implementation="eager").eval()
    weights = reference.state_dict()
    ids = torch.randint(5, 100, (3, 48))
    mask = (torch.arange(48) < torch.tensor([[48], [31], [5]])).long()
    # the mean of LayerNorm's output has no gradient, so coordinates are weighted
    weight = torch.randn(64, dtype=torch.float64)
    expected = outputs_and_gradients(reference.double(), ids, mask, weight)
    for dtype, limit in ((torch.float32, 1e-4), (torch.bfloat16, 0.05)):
        for kernel in KERNELS:
            model = roformer.RoFormerModel._from_config(config, attn_implementation=kernel).eval()
            model.load_state_dict(weights)
            found = outputs_and_gradients(model.to(device, dtype), ids, mask, weight)
            error = max(float((a - b).norm() / b.norm()) for a, b in zip(found, expected))
            name = f"{kernel} in {'bf16' if dtype == torch.bfloat16 else 'fp32'}"
            rule = f"must agree with float64 to {limit}"
            require(error <= limit, name, rule, f"{error:.2g}", "report a bug in roformer.kernels")
            yield name, error, limit


def outputs_and_gradients(
    model: torch.nn.Module, ids: torch.Tensor, mask: torch.Tensor, weight: torch.Tensor
) -> list[torch.Tensor]:
    """Return hidden states without padding and parameter gradients, float64 on the CPU.

    Args:
        model: Encoder.
        ids: Tokens, [B, L].
        mask: Padding mask, [B, L].
        weight: Weight of each coordinate in the loss, [hidden_size].
    """
    device, dtype = next(model.parameters()).device, next(model.parameters()).dtype
    states = model(ids.to(device), attention_mask=mask.to(device)).last_hidden_state
    states = states[mask.bool().to(device)]
    (states * weight.to(device, dtype)).square().mean().backward()
    # the bias of keys has no gradient, because softmax is invariant to it
    parameters = [p for name, p in model.named_parameters() if not name.endswith("key.bias")]
    gradients = [torch.zeros_like(p) if p.grad is None else p.grad for p in parameters]
    return [x.detach().cpu().double() for x in (states, *gradients)]
