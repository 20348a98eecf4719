"""Floating-point operations of a training step, and the peak rate of the device.

The vocabulary layer is counted at predicted positions only. A multiplication and an addition are
two operations; forward and backward pass together cost three times the forward pass.
"""

import time

import torch
from accelerate import Accelerator
from transformers import PreTrainedConfig

from roformer.kernels import Linear
from train.loop.launch import compute_dtype


def step_flops(config: PreTrainedConfig, tokens: float, squares: float, predicted: float) -> float:
    """Return the floating-point operations of a forward and backward pass.

    6 L (4 E^2 + 2 E F) per token, 12 L E per pair of tokens of a sequence and 6 (E^2 + V E) per
    predicted token, with L layers, hidden size E, intermediate size F and V vocabulary entries.
    Linear attention with M features per head costs 12 L E M per token instead of the pairs; FAVOR+,
    which also computes its random projections, 20 L E M. Causal attention counts all pairs.
    Padding is not counted; `squares` is the sum of the squared lengths of the sequences.
    """
    E, F = config.hidden_size, config.intermediate_size  # noqa: N806
    layers, V = config.num_hidden_layers, config.vocab_size  # noqa: N806
    weights = 6 * layers * (4 * E**2 + 2 * E * F) * tokens
    kind, pairs = getattr(config, "linear_attention", None), 12 * squares
    if kind is not None:
        pairs = 12 * tokens * E // config.num_attention_heads
    if kind == "favor":
        pairs = 20 * tokens * config.random_features
    return weights + layers * E * pairs + 6 * (E**2 + V * E) * predicted


def peak_flops(peak_tflops: float | None, accelerator: Accelerator) -> float:
    """Return the operations per second of one device: as given, or measured in its precision."""
    if peak_tflops is not None:
        return peak_tflops * 1e12
    return measure_peak_flops(accelerator.device, compute_dtype(accelerator))


def measure_peak_flops(device: torch.device, dtype: torch.dtype) -> float:
    """Measure the operations per second of a large matrix product, the best of six."""
    size = 8192 if device.type == "cuda" else 1024
    layer = Linear(size, size, bias=False, device=device, dtype=dtype)
    rows = torch.randn(size, size, device=device, dtype=dtype)
    seconds = []
    synchronize = torch.get_device_module(device).synchronize
    for _ in range(6):
        synchronize(device)
        started = time.perf_counter()
        with torch.no_grad():
            layer(rows)
        synchronize(device)
        seconds.append(time.perf_counter() - started)
    return 2 * size**3 / min(seconds)
