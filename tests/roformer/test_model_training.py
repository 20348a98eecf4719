"""What training needs of the model: compilation, checkpointing, precision, sharding, memory."""

import copy

import pytest
import torch
import transformers
from torch import nn
from torch._subclasses import FakeTensorMode
from torch.nn.utils import parametrize, prune
from torch.profiler import ProfilerActivity, profile

import roformer
from roformer import RoFormerForMaskedLM, RoFormerForSequenceClassification, RoFormerModel
from tiny import HEADS, VARIANTS, assert_near, build, enlarge, inputs_with_labels, tiny_config


def example(length: int = 24, rows: int = 3) -> dict[str, torch.Tensor]:
    torch.manual_seed(1)
    ids = torch.randint(5, 60, (rows, length))
    mask = torch.ones(rows, length, dtype=torch.long)
    mask[0, length // 2 :] = 0
    labels = ids.masked_fill((torch.rand(ids.shape) > 0.3) | (mask == 0), -100)
    return {"input_ids": ids, "attention_mask": mask, "labels": labels}


def gradients(model: torch.nn.Module) -> list[torch.Tensor]:
    return [p.grad.clone() for p in model.parameters()]


@pytest.mark.parametrize("length", [24, 600])
def test_one_random_state_draws_the_same_with_gradients_and_without(kernel, length, config):
    # what computes a forward pass twice relies on it: reentrant checkpoints, losses in parts
    config.attention_probs_dropout_prob = 0.3
    model = build(RoFormerModel, config, kernel).train()
    ids, found = torch.randint(5, 60, (1, length)), []
    for learns in (False, True):
        torch.manual_seed(0)
        with torch.set_grad_enabled(learns):
            found.append(model(ids).last_hidden_state.detach())
    torch.testing.assert_close(*found, rtol=1e-4, atol=1e-4)


def test_weights_that_change_before_the_backward_pass_are_noticed(config):
    model = RoFormerForMaskedLM(config)
    loss = model(**example()).loss
    with torch.no_grad():
        model.roformer.encoder.layer[0].output.dense.weight.mul_(3)
    with pytest.raises(RuntimeError, match="modified by an inplace operation"):
        loss.backward()


def test_sparse_prediction_gives_the_same_loss_gradients_and_scores(kernel, config):
    batch, found = example(), []
    config.hidden_dropout_prob = config.attention_probs_dropout_prob = 0.0
    model = build(RoFormerForMaskedLM, config, kernel).train()
    for sparse in (False, True):
        model.zero_grad()
        model.config.sparse_prediction = sparse
        output = model(**batch)
        output.loss.backward()
        found.append((output, gradients(model)))
    torch.testing.assert_close(found[0][0].loss, found[1][0].loss)
    torch.testing.assert_close(found[0][1], found[1][1], atol=1e-6, rtol=1e-4)
    chosen = batch["labels"] != -100
    assert found[1][0].logits.shape == (int(chosen.sum()), 60)
    assert_near(found[1][0].logits, found[0][0].logits[chosen])
    model.eval()
    assert model(**batch).logits.shape == (*batch["labels"].shape, 60)


@pytest.mark.filterwarnings("ignore:.*torch.jit", "ignore:.*is_gradient_checkpointing",
                            "ignore::torch.jit.TracerWarning")  # fmt: skip
def test_torch_func_and_tracing_work_with_gradients_on(config):
    model = build(RoFormerForMaskedLM, config, "eager")  # torch's fused kernel has no derivative
    ids = example()["input_ids"]
    inputs_embeds = model.get_input_embeddings()(ids).detach()
    rows = torch.func.vmap(lambda x: model(inputs_embeds=x[None]).logits[0])(inputs_embeds)
    torch.testing.assert_close(rows, model(ids).logits, atol=1e-5, rtol=1e-4)
    counted = torch.arange(ids.shape[1]).repeat(len(ids), 1)
    position_ids = counted.clone()
    position_ids[0, 3:] -= 3  # a packed row
    compute = torch.func.vmap(lambda x, p: model(x[None], position_ids=p[None]).logits[0])
    rows = compute(ids, position_ids)
    expected = [model(x[None], position_ids=p[None]).logits for x, p in zip(ids, position_ids)]
    torch.testing.assert_close(rows, torch.cat(expected), atol=1e-5, rtol=1e-4)
    step = torch.randn_like(inputs_embeds)
    _, slope = torch.func.jvp(lambda x: model(inputs_embeds=x).logits, (inputs_embeds,), (step,))
    near = [model(inputs_embeds=inputs_embeds + e * step).logits for e in (1e-3, -1e-3)]
    torch.testing.assert_close(slope, (near[0] - near[1]) / 2e-3, atol=2e-2, rtol=2e-2)
    model.config.return_dict = False
    for given in ({"input_ids": ids}, {"input_ids": ids, "position_ids": counted}):
        traced = torch.jit.trace(model, example_kwarg_inputs=given, strict=False)
        torch.testing.assert_close(traced(**given)[0], model(**given)[0])


def test_a_model_runs_on_tensors_without_values(config):
    """As torch's tools make them that plan a run or record its operations."""
    model, batch = RoFormerForMaskedLM(config), example()
    batch["position_ids"] = torch.arange(batch["input_ids"].shape[1])[None]
    with FakeTensorMode(allow_non_fake_inputs=True) as mode:
        found = model(**{name: mode.from_tensor(x) for name, x in batch.items()}).logits
    assert found.shape == (*batch["input_ids"].shape, config.vocab_size)


@pytest.mark.parametrize(
    "fields",
    [
        *VARIANTS.values(),
        VARIANTS["relu"] | {"is_decoder": True},
        {"rotary_value": True},
        {"rope_interleave": False},
    ],
    ids=str,
)
def test_a_model_of_float64_computes_in_float64(fields):
    """Against differences of values: float32 anywhere inside would be off by 1e-2."""
    sizes = {"num_hidden_layers": 1, "hidden_size": 8, "intermediate_size": 8, "use_cache": False}
    model = build(RoFormerModel, tiny_config(**sizes | fields)).double()
    inputs_embeds = torch.randn(2, 3, 8, dtype=torch.float64, requires_grad=True)
    for kernel in ("eager", "sdpa", "unpadded"):
        model.set_attn_implementation(kernel)
        assert torch.autograd.gradcheck(lambda x: model(inputs_embeds=x)[0], inputs_embeds)


def test_torch_func_gives_the_gradient_of_each_row(config):
    model = build(RoFormerForMaskedLM, config, "eager")  # torch warns of sdpa's derivative
    ids = torch.randint(5, 60, (3, 9))
    weights = {name: p.detach() for name, p in model.named_parameters()}

    def loss(values: dict[str, torch.Tensor], row: torch.Tensor) -> torch.Tensor:
        batch = {"input_ids": row[None], "labels": row[None]}
        return torch.func.functional_call(model, values, (), batch).loss

    name = "roformer.encoder.layer.0.attention.self.query.weight"
    found = torch.func.vmap(torch.func.grad(loss), (None, 0))(weights, ids)[name]
    for row, one in zip(ids, found):
        model.zero_grad()
        loss(dict(model.named_parameters()), row).backward()
        torch.testing.assert_close(one, model.get_parameter(name).grad, atol=1e-5, rtol=1e-3)


@pytest.mark.parametrize(
    ("head", "kind", "count"),
    [
        (RoFormerForMaskedLM, None, 2),
        (roformer.RoFormerForTokenClassification, None, 2),
        (roformer.RoFormerForMultipleChoice, None, 2),
        (RoFormerForSequenceClassification, None, 2),
        (RoFormerForSequenceClassification, "regression", 1),
        (RoFormerForSequenceClassification, "regression", 3),
        (RoFormerForSequenceClassification, "multi_label_classification", 3),
    ],
)
def test_losses_of_accumulated_batches_add_up(head, kind, count, config):
    """As transformers' Trainer calls it: each part divided by the items of the whole."""
    config.problem_type, config.num_labels = kind, count
    model, ids = build(head, config), torch.randint(5, 60, (8, 12))
    inputs = inputs_with_labels(head, ids)
    if kind is not None:
        inputs["labels"] = (ids[:, :count] % 2).float().squeeze(-1)
    parts = [{name: x[i : i + 2] for name, x in inputs.items()} for i in range(0, 8, 2)]
    items = torch.tensor(inputs["labels"].numel())
    total = sum(model(**part, num_items_in_batch=items).loss for part in parts)
    assert_near(total, model(**inputs).loss, 1e-5)


@pytest.mark.parametrize("head", HEADS)
def test_a_head_by_another_name_has_the_same_loss(head, config):
    """transformers takes the loss from the name of the class."""
    inputs = inputs_with_labels(head, torch.randint(5, 60, (4, 12)))
    model, other = (build(x, config) for x in (head, type("Mine", (head,), {})))
    assert torch.equal(other(**inputs).loss, model(**inputs).loss)


@pytest.mark.parametrize("dtype", [torch.bfloat16, torch.float16])
def test_low_precision_and_autocast_stay_near_float32_and_train(dtype, config):
    exact = enlarge(RoFormerForMaskedLM(config))
    coarse = copy.deepcopy(exact).to(dtype)
    loss = coarse(**example()).loss
    with torch.autocast("cpu", dtype):
        autocast_loss = exact(**example()).loss
    for found in (loss, autocast_loss):  # in float32
        torch.testing.assert_close(found, exact(**example()).loss, rtol=0.02, atol=0)
    loss.backward()
    assert all(p.grad.dtype == dtype for p in coarse.parameters())
    assert all(g.isfinite().all() for g in gradients(coarse))


@pytest.mark.parametrize(
    ("given", "rows", "sparse"),
    [("attention_mask", 3, False), ("position_ids", 1, False), ("labels", 3, True)],
)
def test_a_compiled_step_has_no_graph_break_and_the_same_gradients(given, rows, sparse, config):
    config.hidden_dropout_prob = config.attention_probs_dropout_prob = 0.0
    config.sparse_prediction = sparse
    config.num_hidden_layers = 1  # compilation takes long
    model, batch, found = build(RoFormerForMaskedLM, config).train(), example(rows=rows), []
    # packed: documents are found without looking at a value
    batch["position_ids"] = torch.cat((torch.arange(9), torch.arange(15)))[None]
    inputs = {name: batch[name] for name in ("input_ids", "labels", given)}
    kept = batch["attention_mask"].bool() if given == "attention_mask" else slice(None)
    torch._dynamo.reset()  # `fullgraph` below raises at the first graph break
    compiled = torch.compile(model, fullgraph=True, backend="aot_eager", dynamic=False)
    for step in (model, compiled):
        model.zero_grad()
        output = step(**inputs)
        output.loss.backward()
        found.append([output.loss, output.logits[kept], *gradients(model)])
    torch.testing.assert_close(*found, atol=5e-5, rtol=1e-4)
    torch._dynamo.reset()


def test_a_hook_on_any_module_acts_in_training(config):
    """Linear layers whose inputs are set to zero have weights without gradients."""
    model, called = build(RoFormerForMaskedLM, config).train(), []
    layer = model.roformer.encoder.layer[0]
    for module in layer.modules():
        module.register_forward_pre_hook(lambda module, given: called.append(module))
    linears = [module for module in layer.modules() if isinstance(module, nn.Linear)]
    for linear in linears:
        linear.register_forward_pre_hook(lambda linear, given: given[0] * 0)
    model(**example()).loss.backward()
    assert set(called) >= {*layer.modules()} - {layer.attention.self.dropout}  # read, not called
    assert not any(linear.weight.grad.any() for linear in linears)


def test_replaced_pruned_and_parametrized_layers_act_as_in_stock(config):
    """A layer in another's place is what LoRA makes."""
    stock = transformers.RoFormerForMaskedLM(transformers.RoFormerConfig(**config.to_dict()))
    ours = RoFormerForMaskedLM(config).eval()
    ours.load_state_dict(enlarge(stock).state_dict())
    batch, found = example(), []
    for model in (ours, stock):
        torch.manual_seed(0)
        layer = model.roformer.encoder.layer[0]
        query = layer.attention.self.query
        layer.attention.self.query = nn.Sequential(query, nn.Linear(32, 32))
        prune.l1_unstructured(layer.intermediate.dense, "weight", 0.5)
        parametrize.register_parametrization(layer.output.dense, "weight", nn.Tanh())
        found.append(model(**batch).logits[batch["attention_mask"] == 1])
    assert_near(*found, 1e-4)


def step_bytes(model: torch.nn.Module) -> int:
    """Kept after the forward pass of one masked-LM step at 8 x 512, until its backward pass."""
    ids = torch.randint(5, 30522, (8, 512))
    labels = ids.masked_fill(torch.rand(ids.shape) > 0.15, -100)
    with profile(activities=[ProfilerActivity.CPU], profile_memory=True) as allocations:
        loss = model.train()(ids, labels=labels).loss
    assert loss.requires_grad
    return sum(event.self_cpu_memory_usage for event in allocations.key_averages())


@pytest.mark.slow
def test_backward_keeps_at_most_62_percent_of_the_bytes_of_stock():
    fields = {"vocab_size": 30522, "attention_probs_dropout_prob": 0.0}
    ours = RoFormerForMaskedLM(roformer.RoFormerConfig(**fields, sparse_prediction=True))
    stock = transformers.RoFormerForMaskedLM(transformers.RoFormerConfig(**fields))
    assert step_bytes(ours) <= 0.62 * step_bytes(stock)


def test_training_in_half_precision_is_warned_of_once(config, warnings_once):
    model = RoFormerForMaskedLM(config)
    model.train()
    model.bfloat16().eval()
    assert not warnings_once.records
    for _ in range(2):
        model.train()
    assert len(warnings_once.records) == 1
    assert "dtype=torch.float32" in warnings_once.text
