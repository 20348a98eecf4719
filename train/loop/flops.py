"""Arithmetic of a masked-LM step, counted on paper, and what the machine could do.

Only what learning needs is counted: real tokens, and the vocabulary layer at predicted ones. A
multiplication and an addition are two operations; forward and backward together cost three times
the forward pass.
"""

import time

import torch
from transformers import PreTrainedConfig

from roformer.kernels.linear import dense


def step_flops(config: PreTrainedConfig, tokens: float, squares: float, predicted: float) -> float:
    """Floating-point operations of training on some sequences.

    6 L (4 E^2 + 2 E F) a token, 12 L E a pair of tokens in one sequence, 6 (E^2 + V E) a predicted
    token; L layers, E width, F feed-forward width, V vocabulary. In linear attention 12 L E M a
    token take the place of the pairs, with M features of a head, or 20 L E M where these are random
    products, too. A decoder is charged all pairs.

    Args:
        config: Of the encoder.
        tokens: Real tokens.
        squares: Sum of the squared lengths of the sequences.
        predicted: Predicted tokens.
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


def measure_peak_flops(device: torch.device, dtype: torch.dtype) -> float:
    """Operations a second of a large dense layer here: what 100 % would be."""
    size = 8192 if device.type == "cuda" else 1024
    layer = torch.nn.Linear(size, size, bias=False, device=device, dtype=dtype)
    rows = torch.randn(size, size, device=device, dtype=dtype)
    seconds = []
    for _ in range(6):
        _wait(device)
        started = time.perf_counter()
        with torch.no_grad():
            dense(layer, rows)
        _wait(device)
        seconds.append(time.perf_counter() - started)
    return 2 * size**3 / min(seconds)


def _wait(device: torch.device) -> None:
    if device.type == "cuda":
        torch.cuda.synchronize(device)
