"""Every attention kernel gives the eager one's numbers, for masks of all kinds and packed rows."""

import itertools

import pytest
import torch
from torch.nn import functional as F
from torch.nn.attention.flex_attention import create_block_mask
from transformers import AttentionInterface, AttentionMaskInterface, DataCollatorWithFlattening
from transformers.masking_utils import flash_attention_mask

from roformer import RoFormerForMaskedLM, RoFormerForMultipleChoice, RoFormerModel
from roformer.batch import remove_padding
from roformer.kernels import attention
from roformer.modeling_roformer import eager_attention_forward
from tiny import POOLED, assert_near, build, rope_config

KERNELS = ["eager", "sdpa", "unpadded", "cu_seqlens"]


def cu_seqlens_attention(module, query, key, value, attention_mask, scaling, **kwargs):
    """As flash_attention_2 is called: a row of tokens and cumulative lengths, without a mask."""
    assert attention_mask is None
    seen = torch.ones(query.shape[2], key.shape[2], dtype=torch.bool)  # whole rows
    if "cu_seq_lens_q" in kwargs:
        edges = kwargs["cu_seq_lens_q"].tolist()
        assert kwargs["cu_seq_lens_k"].tolist() == edges
        assert kwargs["max_length_q"] == max(b - a for a, b in itertools.pairwise(edges))
        owner = torch.bucketize(torch.arange(query.shape[2]), torch.tensor(edges[1:]), right=True)
        seen = owner[:, None] == owner
    if module.is_causal:
        seen = seen.tril()
    mask = torch.zeros(seen.shape).masked_fill(~seen, -1e30)
    return eager_attention_forward(module, query, key, value, mask, scaling)[0], None


AttentionInterface.register("flash_stand_in", cu_seqlens_attention)
AttentionMaskInterface.register("flash_stand_in", flash_attention_mask)


def model_with(config, kernel: str, head: type = RoFormerModel) -> torch.nn.Module:
    """The same weights under each kernel."""
    model = build(head, config, "eager")
    # not through `set_attn_implementation`, which looks for an installed library
    model.config._attn_implementation = "flash_stand_in" if kernel == "cu_seqlens" else kernel
    return model


def padded(kind: str) -> tuple[torch.Tensor, torch.Tensor]:
    ids = torch.randint(0, 60, (4, 24))
    mask = torch.arange(24) < torch.tensor([[24], [24], [18], [1]])  # 67: their row has 68
    if kind == "left":
        mask = mask.flip(1)
    if kind == "holes":
        mask = torch.rand(4, 24) < 0.5
        mask[:, 3] = True
    return ids, mask.long()


@pytest.mark.parametrize("kernel", ["sdpa", "unpadded", "auto"])
def test_labels_at_padding_are_scored_as_by_eager_attention(kernel, config):
    ids, mask = padded("right")
    models = (model_with(config, name, RoFormerForMaskedLM) for name in ("eager", kernel))
    expected, found = (model(ids, attention_mask=mask, labels=ids).loss for model in models)
    assert_near(found, expected, 1e-5)


@pytest.mark.parametrize("decoder", [False, True], ids=["encoder", "decoder"])
@pytest.mark.parametrize("kind", ["right", "left", "holes"])
@pytest.mark.parametrize("kernel", KERNELS[1:])
def test_padding_masks_give_eager_outputs_and_gradients(kernel, kind, decoder, config):
    config.is_decoder, config.use_cache = decoder, False
    ids, mask = padded(kind)
    results = []
    for name in ("eager", kernel):
        model = model_with(config, name)
        output = model(ids, attention_mask=mask).last_hidden_state[mask.bool()]
        output.square().sum().backward()
        results.append((output, [p.grad for p in model.parameters()]))
    assert_near(results[1][0], results[0][0], 1e-4)
    for a, b in zip(results[0][1], results[1][1]):
        largest = max(1.0, a.abs().max().item())
        torch.testing.assert_close(a, b, atol=1e-5 * largest, rtol=1e-3)


@pytest.mark.parametrize("form", ["bool", "int", "float", "bfloat16", "one row", "one query"])
def test_ready_made_masks_mean_the_same_everywhere(kernel, form, config):
    ids, mask = padded("right")
    seen = mask.bool()[:, None, None, :].expand(4, 1, 24, 24)
    if form == "one row":
        seen, mask = seen[2:3], mask[2:3].expand(4, -1)
    if form == "one query":  # the same for all, as transformers' extended masks have it
        seen = seen[:, :, :1]
    ready = {
        "int": seen.long(),
        "bfloat16": torch.zeros(seen.shape, dtype=torch.bfloat16).masked_fill(~seen, -3e38),
        "float": torch.zeros(seen.shape).masked_fill(~seen, torch.finfo(torch.float32).min),
    }.get(form, seen)
    model = model_with(config, kernel)
    expected = model_with(config, "eager")(ids, attention_mask=mask).last_hidden_state
    result = model(ids, attention_mask=ready).last_hidden_state
    assert_near(result[mask.bool()], expected[mask.bool()])


@pytest.mark.parametrize("dtype", [torch.bfloat16, torch.float16, torch.float32])
def test_rows_that_a_ready_made_mask_closes_leave_the_others_finite(kernel, dtype, config):
    """Padding on the left of a causal row sees nothing at all."""
    least = -torch.inf if dtype == torch.float32 else torch.finfo(torch.float32).min
    model = model_with(config, kernel).to(dtype)
    closed = ~torch.ones(6, 6).tril().bool()
    closed[:, :2] = True
    mask = torch.zeros(1, 1, 6, 6).masked_fill(closed, least)
    output = model(torch.arange(6)[None], attention_mask=mask).last_hidden_state
    assert output[0, 2:].isfinite().all()


@pytest.mark.parametrize("kernel", ["cu_seqlens", "flex_attention"])
def test_a_ready_made_mask_is_refused_by_kernels_that_cannot_take_it(kernel, config):
    model = model_with(config, kernel)
    with pytest.raises(ValueError, match="attention_mask must be .* use sdpa"):
        model(torch.zeros(1, 3, dtype=torch.long), attention_mask=torch.ones(1, 1, 3, 3).bool())


@pytest.mark.parametrize("rope", ["default", "dynamic"])
@pytest.mark.parametrize("decoder", [False, True], ids=["encoder", "decoder"])
@pytest.mark.parametrize(
    "given",
    ["position_ids", "cu_seq_lens_q", "both", "padded row", "padded rows", "empty documents"],
)
@pytest.mark.parametrize("kernel", KERNELS)
def test_packed_documents_come_out_as_they_would_alone(kernel, given, decoder, rope):
    config = rope_config(rope)
    config.is_decoder, config.use_cache, config.max_position_embeddings = decoder, False, 10
    config.hidden_act = "tanh"  # bounded, so that errors do not grow with these large weights
    model = model_with(config, kernel)
    parts = [torch.randint(0, 60, (1, n)) for n in (7, 1, 20, 20, 3)]
    collate = DataCollatorWithFlattening(return_tensors="pt")  # transformers' own packed rows
    row = collate([{"input_ids": part[0].tolist()} for part in parts])
    ids, positions = row["input_ids"], row["position_ids"]
    cu_seqlens = torch.tensor([0, 7, 8, 28, 48, 51], dtype=torch.int32)
    arguments = {"position_ids": positions, "cu_seq_lens_q": cu_seqlens}
    if given.startswith("padded"):  # the positions of padding mean nothing
        ids, positions = (F.pad(x, (0, 5)) for x in (ids, positions))
        inputs = {"attention_mask": torch.arange(56)[None] < 51, "position_ids": positions}
        if given == "padded rows":  # two, which only lengths can describe
            inputs = {name: x.view(2, 28) for name, x in inputs.items()}
            inputs["cu_seq_lens_q"] = torch.cat((cu_seqlens, torch.tensor([56])))
        output = model(ids.view(inputs["position_ids"].shape), **inputs)[0].view(1, 56, -1)[:, :51]
    elif given == "empty documents":  # more of them than tokens
        output = model(ids, cu_seq_lens_q=cu_seqlens.repeat_interleave(20))[0]
    else:
        output = model(ids, **{k: v for k, v in arguments.items() if given in (k, "both")})[0]
    assert_near(output, torch.cat([model(part)[0] for part in parts], dim=1))


@pytest.mark.parametrize("option", ["use_cache", "output_hidden_states", "encoder_hidden_states"])
@pytest.mark.parametrize("kernel", KERNELS)
def test_packed_documents_stay_apart_whatever_else_is_asked_for(kernel, option, config):
    config.is_decoder, config.add_cross_attention = True, option == "encoder_hidden_states"
    config.hidden_act = "tanh"
    model = model_with(config, kernel)
    parts = [torch.randint(0, 60, (1, n)) for n in (4, 6)]
    more = {option: torch.randn(1, 5, 32) if config.add_cross_attention else True}
    positions = torch.cat((torch.arange(4), torch.arange(6)))
    output = model(torch.cat(parts, dim=1), position_ids=positions, **more)
    assert output.past_key_values is None  # nothing can follow such a row
    assert_near(output[0], torch.cat([model(part, **more)[0] for part in parts], dim=1))


@pytest.mark.parametrize(
    "positions",
    [
        [[0] * 6],  # positions switched off
        [[0, 1, 2, 10, 11, 12]],
        [[0, 2, 4, 0, 2, 4]],
        [[1, 2, 3, 1, 2, 3]],
        [[5, 6, 7, 0, 1, 2]],
        [[0, 1, 2, 0, 1, 2]] * 2,
    ],
)
def test_other_positions_are_one_document(positions, config):
    model, position_ids = model_with(config, "sdpa"), torch.tensor(positions)
    ids = torch.randint(0, 60, position_ids.shape)
    changed = ids.clone()
    changed[0, 5] = (ids[0, 5] + 1) % 60
    first, second = (model(x, position_ids=position_ids)[0][0, 0] for x in (ids, changed))
    assert not torch.equal(first, second)


def test_lengths_make_one_document_of_positions_that_start_again(config):
    model, ids = model_with(config, "sdpa"), torch.randint(0, 60, (1, 6))
    position_ids, lengths = torch.tensor([[0, 1, 2, 0, 1, 2]]), torch.tensor([0, 6])
    single = model(ids.expand(2, -1), position_ids=position_ids)[0][:1]  # never packed
    assert not torch.allclose(model(ids, position_ids=position_ids)[0], single, atol=1e-3)
    assert_near(model(ids, position_ids=position_ids, cu_seq_lens_q=lengths)[0], single)


def test_flash_kernels_of_the_hub_know_the_lengths_and_unknown_kernels_are_refused(config):
    for name in ("an-org/flash-attn9", "maskless"):
        AttentionInterface.register(name, cu_seqlens_attention)
    AttentionMaskInterface.register("an-org/flash-attn9", flash_attention_mask)
    ids, positions = torch.randint(1, 60, (1, 5)), torch.tensor([[0, 1, 2, 0, 1]])
    expected = model_with(config, "eager")(ids, position_ids=positions)[0]
    model = model_with(config, "an-org/flash-attn9")
    torch.testing.assert_close(model(ids, position_ids=positions)[0], expected)
    with pytest.raises(ValueError, match="attn_implementation must take a mask for packed rows"):
        model_with(config, "maskless")(ids, position_ids=positions)


def test_only_padding_is_warned_of_where_it_is_left_out(config, warnings_once):
    model, ids = build(RoFormerModel, config), torch.arange(1, 11).view(2, 5)
    model(ids, attention_mask=torch.ones(2, 5))
    model(ids, cu_seq_lens_q=torch.tensor([0, 3, 5, 10]))
    model(ids[:1], position_ids=torch.tensor([[0, 1, 0, 1, 2]]))  # packed
    assert not warnings_once.records
    for _ in range(2):
        model(ids, attention_mask=torch.arange(5) < torch.tensor([[5], [3]]))
    assert len(warnings_once.records) == 1
    assert "0 at padding" in warnings_once.text


def test_attention_probabilities_come_from_the_eager_kernel_with_one_warning(config, warnings_once):
    ids, mask = padded("right")
    inputs = {"input_ids": ids, "attention_mask": mask, "output_attentions": True}
    model = model_with(config, "sdpa")
    expected = model_with(config, "eager")(**inputs, output_hidden_states=True)
    assert len(expected.hidden_states) == config.num_hidden_layers + 1
    for _ in range(2):
        output = model(**inputs)
    assert warnings_once.text.count("computed by eager attention") == 1
    assert model.config._attn_implementation == "sdpa"
    assert len(output[-1]) == config.num_hidden_layers  # no empty cross_attentions behind it
    for a, b in zip(output.attentions, expected.attentions):
        assert_near(a, b)
        assert_near(a.sum(-1), torch.ones(4, 2, 24))


def test_padding_makes_no_nan_of_large_scores_in_float16(config):
    config.is_decoder = True  # a padded query sees nothing; its scores are far below zero
    model = model_with(config, "eager")
    with torch.no_grad():
        for layer in model.encoder.layer:
            attention = layer.attention.self
            for part, value in ((attention.query, 8.0), (attention.key, -8.0)):
                part.weight.zero_()
                part.bias.fill_(value)
    mask = torch.ones(2, 9, dtype=torch.long)
    mask[0, :4] = 0
    ids = torch.randint(5, 60, (2, 9))
    assert model.half()(ids, mask).last_hidden_state.isfinite().all()


def test_unpadded_attention_computes_no_padding_once_it_is_chosen(config):
    seen = []
    model = model_with(config, "eager", POOLED[0])
    layer = model.roformer.encoder.layer[0]
    layer.register_forward_pre_hook(lambda m, args: seen.append(args[0].shape))
    ids, mask = padded("right")
    for kernel in ("eager", "unpadded"):
        model.set_attn_implementation(kernel)
        output = model.roformer(ids, attention_mask=mask).last_hidden_state
    assert seen == [(4, 24, 32), (1, 68, 32)]
    assert not output[mask == 0].any()


def test_rows_without_padding_have_few_lengths():
    """With oneDNN, memory grows with their number."""
    lengths = set()
    for tokens in range(1, 4097):
        layout, cu_seqlens = remove_padding(torch.arange(4096)[None] < tokens, None)
        length = layout.shape[1]
        assert tokens <= length <= tokens * 33 / 32
        assert cu_seqlens.tolist() == [0, tokens, length][: 2 + (length > tokens)]
        lengths.add(length)
    assert len(lengths) < 32 * 9


@pytest.mark.usefixtures("flex_without_inductor")
def test_heads_that_look_for_a_token_take_a_mask_of_flex_attention(config):
    config.summary_type = "first"  # of a mask of that kind the last token is not known
    ids, mask = padded("right")
    block_mask = create_block_mask(lambda b, h, q, k: mask[b, k].bool(), 4, None, 24, 24, "cpu")
    for head in POOLED:
        model = model_with(config, "flex_attention", head)
        input_ids = ids[:, None] if head is RoFormerForMultipleChoice else ids
        choices = mask[:, None] if head is RoFormerForMultipleChoice else mask
        with torch.no_grad():
            a, b = (model(input_ids, attention_mask=m).logits for m in (choices, block_mask))
        assert_near(b, a)


def test_torchs_kernel_for_documents_is_called_where_it_does_not_refuse(monkeypatch):
    """Without a GPU: what the kernel takes is checked by itself on a real one."""
    cuda, half = torch.device("cuda"), torch.bfloat16
    monkeypatch.setattr(torch.cuda, "get_device_capability", lambda device: (8, 0))
    assert attention.has_varlen_kernel(cuda, half, 64)
    for dtype, width in ((torch.float32, 64), (half, 20), (half, 264)):
        assert not attention.has_varlen_kernel(cuda, dtype, width)
    with monkeypatch.context() as patch:
        patch.setattr(attention, "_flash_attention", None)  # a torch without the operator
        assert not attention.has_varlen_kernel(cuda, half, 64)
    monkeypatch.setattr(torch.cuda, "get_device_capability", lambda device: (7, 5))
    assert not attention.has_varlen_kernel(cuda, half, 64)


@pytest.mark.parametrize("decoder", [False, True])
def test_torchs_kernel_for_documents_is_called_with_their_lengths(decoder, config, monkeypatch):
    """The operator exists on CUDA only; this one takes the same arguments."""

    def flash(q, k, v, cu_q, cu_k, max_q, max_k, dropout, is_causal, return_debug_mask, *, scale):
        assert (max_q, max_k, dropout, return_debug_mask) == (9, 9, 0.0, False)
        parts = [
            F.scaled_dot_product_attention(*x, is_causal=is_causal, scale=scale).transpose(0, 1)
            for x in zip(*(y.transpose(0, 1).split(cu_q.diff().tolist(), 1) for y in (q, k, v)))
        ]
        return torch.cat(parts), None, None, None, None

    config.is_decoder, config.use_cache = decoder, False
    model = model_with(config, "unpadded").eval()
    ids, lengths = torch.randint(5, 60, (1, 21)), torch.tensor([0, 9, 13, 21], dtype=torch.int32)
    expected = model(ids, cu_seq_lens_q=lengths)[0]
    monkeypatch.setattr(attention, "_flash_attention", flash)
    monkeypatch.setattr(attention, "has_varlen_kernel", lambda *case: True)
    torch.testing.assert_close(model(ids, cu_seq_lens_q=lengths)[0], expected)


@pytest.mark.parametrize("length", [7, 600])
def test_inference_in_bfloat16_is_as_exact_for_long_rows_as_the_eager_kernel(length, config):
    """Scores are computed some queries at a time, with the same arithmetic."""
    ids = torch.randint(5, 60, (2, length))
    with torch.no_grad():
        exact = model_with(config, "eager").double()(ids)[0]
        models = (model_with(config, kernel).bfloat16() for kernel in ("eager", "unpadded"))
        eager, unpadded = ((model(ids)[0].double() - exact).norm() for model in models)
    assert unpadded < 1.2 * eager
