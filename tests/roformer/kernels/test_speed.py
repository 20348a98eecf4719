"""What makes a step fast is still there: operations are counted, not timed."""

from collections import defaultdict

import numpy as np
import pytest
import torch
import transformers
from torch.utils._python_dispatch import TorchDispatchMode
from torch.utils.flop_counter import FlopCounterMode

from roformer import RoFormerConfig, RoFormerForMaskedLM
from roformer.kernels import attention
from train.data.batching import packed_layout
from train.loop.language_model import LanguageModel
from train.loop.run_log import step_flops

LENGTHS = np.array([64, 40, 21, 3])  # 128 tokens, a length that is not rounded
TOKENS, SQUARES = float(LENGTHS.sum()), float((LENGTHS**2).sum())
FIELDS = {"vocab_size": 500, "hidden_size": 64, "num_hidden_layers": 3, "num_attention_heads": 4,
          "intermediate_size": 256, "max_position_embeddings": 64}  # fmt: skip


class Calls(TorchDispatchMode):
    """The number of elements that each operation returns, call by call."""

    def __init__(self) -> None:
        super().__init__()
        self.sizes: dict[str, list[int]] = defaultdict(list)

    def __torch_dispatch__(self, func, types, args=(), kwargs=None):
        result = func(*args, **(kwargs or {}))
        size = result.numel() if isinstance(result, torch.Tensor) else 0
        self.sizes[func.overloadpacket.__name__].append(size)
        return result


@pytest.fixture
def batch(monkeypatch):
    """Padded rows, their packed row, and every seventh token predicted."""
    monkeypatch.setattr(attention, "CALL_COST", 0)  # so that each length is a call of its own
    ids = torch.randint(5, 500, (4, 64))
    mask = torch.arange(64) < torch.from_numpy(LENGTHS)[:, None]
    row = ids[mask]
    label_indices = torch.arange(0, len(row), 7)
    packed = packed_layout(LENGTHS) | {"input_ids": row[None]}
    padded = {"input_ids": ids, "attention_mask": mask.long()}
    return padded, packed, {"label_indices": label_indices, "labels": row[label_indices]}


def objective(kernel: str = "unpadded", dropout: float = 0.1) -> LanguageModel:
    dropouts = dict.fromkeys(("hidden_dropout_prob", "attention_probs_dropout_prob"), dropout)
    config = RoFormerConfig(**FIELDS, **dropouts)
    model = RoFormerForMaskedLM._from_config(config, attn_implementation=kernel)
    return LanguageModel(model).train()


def test_a_step_does_the_arithmetic_of_the_formula_and_no_more(batch):
    """Nothing for padding, and the vocabulary layer at predicted tokens only."""
    _, packed, labels = batch
    model = objective()
    with FlopCounterMode(display=False) as counted:
        loss, _ = model(**packed, **labels)
        loss.backward()
    formula = step_flops(model.model.config, TOKENS, SQUARES, len(labels["labels"]))
    assert counted.get_total_flops() == pytest.approx(formula, rel=1e-6)


@pytest.mark.parametrize("layers", [1, 3])
def test_sines_are_computed_once_for_all_layers(layers):
    model = RoFormerForMaskedLM(RoFormerConfig(**FIELDS | {"num_hidden_layers": layers}))
    with Calls() as calls:
        model(torch.randint(5, 500, (2, 16)))
    assert calls.sizes["cos"] == calls.sizes["sin"] == [16 * 16 // 2]  # positions x half a head


def test_dropout_draws_four_numbers_at_a_time(batch):
    padded, _, labels = batch
    model = objective("eager")
    with Calls() as calls:
        model(**padded, **labels)
    assert not {"bernoulli", "bernoulli_", "native_dropout"} & calls.sizes.keys()
    assert max(calls.sizes["random_"]) == 4 * 4 * 64 * 64 // 4  # the weights of a layer


@pytest.mark.parametrize("training", [False, True])
def test_by_default_padding_costs_nothing_and_unlabelled_tokens_no_backward_pass(training, batch):
    padded, ids = batch[0], batch[0]["input_ids"]
    is_unlabelled = (padded["attention_mask"] == 0) | (torch.rand(ids.shape) > 0.15)
    labels = ids.masked_fill(is_unlabelled, -100)
    flops = {}
    for sparse in (False, True):
        config = RoFormerConfig(**FIELDS, sparse_prediction=sparse)
        model = RoFormerForMaskedLM(config).train(training)
        with FlopCounterMode(display=False) as counted, torch.set_grad_enabled(training):
            loss = model(**padded, labels=labels).loss
            if training:
                loss.backward()
        flops[sparse] = counted.get_total_flops()
    step = step_flops(config, TOKENS, SQUARES, int((labels != -100).sum()))
    every_logit = 2 * (64**2 + 500 * 64) * ids.numel()
    if training:
        assert flops[True] == pytest.approx(step, rel=1e-6)
        assert flops[False] == pytest.approx(step + every_logit, rel=1e-6)
    else:
        encoder = step_flops(config, TOKENS, 0, 0) / 3  # sdpa is not counted
        assert flops[False] == flops[True] == pytest.approx(encoder + every_logit, rel=1e-6)


def test_stock_does_what_is_counted_here_so_the_counters_can_fail(batch):
    padded, _, _ = batch
    stock = transformers.RoFormerForMaskedLM(transformers.RoFormerConfig(**FIELDS)).train()
    with Calls() as calls, FlopCounterMode(display=False) as counted:
        stock(**padded, labels=padded["input_ids"]).loss.backward()
    formula = step_flops(stock.config, 4 * 64, 4 * 64**2, 4 * 64)
    assert counted.get_total_flops() == pytest.approx(formula, rel=1e-6)
    assert calls.sizes["bernoulli_"]
