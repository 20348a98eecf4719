"""What makes a step fast is still there: operations are counted, not timed."""

from collections import Counter

import numpy as np
import pytest
import torch
import transformers
from torch.utils._python_dispatch import TorchDispatchMode
from torch.utils.flop_counter import FlopCounterMode

from roformer import RoFormerConfig, RoFormerForMaskedLM
from roformer.kernels import attention
from train.data.batching import packed_layout
from train.loop.flops import step_flops
from train.loop.objective import LanguageModel

LENGTHS = np.array([64, 40, 24, 3])
FIELDS = {"vocab_size": 500, "hidden_size": 64, "num_hidden_layers": 3, "num_attention_heads": 4,
          "intermediate_size": 256, "max_position_embeddings": 64}  # fmt: skip


class Calls(TorchDispatchMode):
    """How often each operation runs, and the most elements of what it returns."""

    def __init__(self) -> None:
        super().__init__()
        self.number: Counter[str] = Counter()
        self.largest: Counter[str] = Counter()

    def __torch_dispatch__(self, func, types, args=(), kwargs=None):
        result = func(*args, **(kwargs or {}))
        name = func.overloadpacket.__name__
        self.number[name] += 1
        if isinstance(result, torch.Tensor):
            self.largest[name] = max(self.largest[name], result.numel())
        return result


@pytest.fixture
def batch():
    """Padded rows, their packed row, and every seventh token predicted."""
    torch.manual_seed(0)
    ids = torch.randint(5, 500, (4, 64))
    mask = torch.arange(64) < torch.from_numpy(LENGTHS)[:, None]
    row = ids[mask]
    places = torch.arange(0, len(row), 7)
    packed = packed_layout(LENGTHS) | {"input_ids": row[None]}
    return {"input_ids": ids, "attention_mask": mask.long()}, packed, places, row[places]


def objective(kernel: str = "unpadded", dropout: float = 0.1) -> LanguageModel:
    dropouts = dict.fromkeys(("hidden_dropout_prob", "attention_probs_dropout_prob"), dropout)
    config = RoFormerConfig(**FIELDS, **dropouts)
    model = RoFormerForMaskedLM._from_config(config, attn_implementation=kernel)
    return LanguageModel(model).train()


def test_a_step_does_the_arithmetic_of_the_formula_and_no_more(batch):
    """Nothing for padding, and the vocabulary layer at predicted tokens only."""
    _, packed, places, targets = batch
    model = objective()
    with FlopCounterMode(display=False) as counted:
        loss, _ = model(label_positions=places, labels=targets, **packed)
        loss.backward()
    squares = float((LENGTHS**2).sum())
    formula = step_flops(model.model.config, float(LENGTHS.sum()), squares, len(places))
    assert counted.get_total_flops() == pytest.approx(formula, rel=1e-6)


def test_padded_rows_cost_what_their_tokens_cost(batch):
    """The unpadded path is there for who calls the model with a mask, too."""
    padded, packed, _, _ = batch
    encoder = objective().model.roformer
    totals = []
    for layout in (packed, padded):
        with FlopCounterMode(display=False) as counted:
            encoder(**layout)
        totals.append(counted.get_total_flops())
    assert totals[0] == totals[1]


@pytest.mark.parametrize("layers", [1, 3])
def test_sines_are_computed_once_for_all_layers(layers):
    model = RoFormerForMaskedLM(RoFormerConfig(**FIELDS | {"num_hidden_layers": layers}))
    with Calls() as calls:
        model(torch.randint(5, 500, (2, 16)))
    assert (calls.number["cos"], calls.number["sin"]) == (1, 1)
    assert calls.largest["cos"] == 16 * 16 // 2  # positions x half a head


def test_dropout_draws_four_numbers_at_a_time(batch):
    padded, _, places, targets = batch
    model = objective("eager")
    with Calls() as calls:
        model(label_positions=places, labels=targets, **padded)
    assert not {"bernoulli", "bernoulli_", "native_dropout"} & set(calls.number)
    assert calls.largest["random_"] == 4 * 4 * 64 * 64 // 4  # the weights of a layer


@pytest.mark.parametrize(
    ("dtype", "dropout", "length", "training", "way"),
    [
        (torch.float32, 0.0, 600, True, "scaled_dot_product_attention"),
        (torch.float32, 0.1, 512, True, "_full_attention"),
        (torch.bfloat16, 0.0, 512, True, "_full_attention"),
        (torch.bfloat16, 0.0, 64, False, "_chunked_attention"),
    ],
)
def test_attention_on_a_cpu_takes_the_fastest_way(
    monkeypatch, dtype, dropout, length, training, way
):
    """torch's kernel, or the product written out where that one is slower."""
    taken = []
    for holder, name in (
        (attention, "_full_attention"),
        (attention, "_chunked_attention"),
        (attention.F, "scaled_dot_product_attention"),
    ):
        spy = spy_on(getattr(holder, name), name, taken)
        monkeypatch.setattr(holder, name, spy)
    fields = FIELDS | {"num_hidden_layers": 1, "attention_probs_dropout_prob": dropout}
    model = RoFormerForMaskedLM._from_config(
        RoFormerConfig(**fields), attn_implementation="unpadded"
    )
    model.train(training).to(dtype)
    with torch.set_grad_enabled(training):
        model(torch.randint(5, 500, (1, length)))
    assert taken[0] == way


def spy_on(function, name, taken):
    def spy(*arguments, **options):
        taken.append(name)
        return function(*arguments, **options)

    return spy


def test_stock_does_what_is_counted_here_so_the_counters_can_fail(batch):
    padded, _, _, _ = batch
    stock = transformers.RoFormerForMaskedLM(transformers.RoFormerConfig(**FIELDS)).train()
    with Calls() as calls, FlopCounterMode(display=False) as counted:
        stock(**padded, labels=padded["input_ids"]).loss.backward()
    formula = step_flops(stock.config, 4 * 64, 4 * 64**2, 4 * 64)
    assert counted.get_total_flops() == pytest.approx(formula, rel=1e-6)
    assert calls.number["bernoulli_"] > 0
    assert calls.number["_log_softmax"] > 0
