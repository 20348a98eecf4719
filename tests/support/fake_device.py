"""A device that is none: its tensors are on the CPU, and say that they are elsewhere.

What mixes devices fails, as it would on a GPU, and what makes the host wait is counted. `python
tests/support/fake_device.py` needs a process of its own, for torch takes one such device for good.
"""

import os
import sys
from collections.abc import Callable, Iterator
from typing import Any

import torch
from torch import Tensor
from torch.utils._python_dispatch import TorchDispatchMode, return_and_correct_aliasing
from torch.utils._pytree import tree_leaves, tree_map
from torch.utils.backend_registration import (
    _DummyBackendModule,
    _setup_privateuseone_for_python_backend,
)
from transformers import BertConfig, BertForMaskedLM

import roformer
from roformer.configuration_rules import POSITION_BIASES, POSITION_ENCODINGS
from tiny import TINY_MODEL, enlarge
from train.data.batching import IGNORE_INDEX
from train.loop.objective import LanguageModel

LOOKS = ("aten::_local_scalar_dense", "aten::nonzero", "aten::masked_select", "aten::equal")
BETWEEN = ("aten::_to_copy", "aten::copy_", "aten::_local_scalar_dense")
waits: list[str] = []


class Module(_DummyBackendModule):
    """What torch.autocast asks of a device."""

    def get_amp_supported_dtype(self) -> list[torch.dtype]:
        return [torch.bfloat16]


class Elsewhere(Tensor):
    """`meant` by another device's name."""

    meant: Tensor

    @staticmethod
    def __new__(cls, real: Tensor) -> "Elsewhere":
        layout = {"strides": real.stride(), "storage_offset": real.storage_offset()}
        made = Tensor._make_wrapper_subclass(
            cls, real.size(), dtype=real.dtype, device="pretended:0", **layout
        )
        made.meant = real
        return made

    @classmethod
    def __torch_dispatch__(cls, func: Any, types: Any, args: Any = (), kwargs: Any = None) -> Any:
        return compute(func, args, kwargs or {})

    def tolist(self) -> Any:
        waits.append("tolist")
        return self.meant.tolist()


class There(TorchDispatchMode):
    """Where tensors can be made on the device."""

    def __torch_dispatch__(self, func: Any, types: Any, args: Any = (), kwargs: Any = None) -> Any:
        return compute(func, args, kwargs or {})


def compute(func: Any, args: Any, kwargs: dict[str, Any]) -> Any:
    """An operation on the tensors that are meant, if they are all in one place.

    A number in a tensor may come from the CPU, as on a GPU.
    """
    name = func._schema.name
    tensors = [x for x in tree_leaves((args, kwargs)) if isinstance(x, Tensor)]
    there = any(isinstance(x, Elsewhere) for x in tensors)
    here = [tuple(x.shape) for x in tensors if x.dim() and not isinstance(x, Elsewhere)]
    if there and here and name not in BETWEEN:
        raise RuntimeError(f"{name} of tensors on two devices; {here} are on the CPU")
    if there and name in LOOKS:
        waits.append(name)
    values, options = tree_map(lambda x: x.meant if isinstance(x, Elsewhere) else x, (args, kwargs))
    to = there
    if options.get("device") is not None:
        to = torch.device(options["device"]).type == "pretended"
        options["device"] = "cpu"
    if there and name == "aten::_conj":  # puts it off with a mark that nobody would heed here
        return Elsewhere(values[0].conj_physical())
    result = func(*values, **options)
    result = tree_map(lambda x: Elsewhere(x) if to and type(x) is Tensor else x, result)
    return return_and_correct_aliasing(func, args, kwargs, result) if there and to else result


def elsewhere(values: dict[str, Any]) -> dict[str, Any]:
    """The tensors among them on the device."""
    return {k: v.to("pretended:0") if isinstance(v, Tensor) else v for k, v in values.items()}


def text(rows: int = 3, length: int = 20) -> dict[str, Tensor]:
    """Rows with padding on the right."""
    torch.manual_seed(0)
    ids = torch.randint(5, 60, (rows, length))
    mask = (torch.arange(length) < torch.tensor([[length], [12], [5]])).long()
    return {"input_ids": ids * mask, "attention_mask": mask}


def calls() -> Iterator[tuple[str, Callable[[], torch.nn.Module], dict[str, Any]]]:
    """(What it is, how its model is made, what that is given)."""

    def model(head: str, kernel: str, **fields: Any) -> Callable[[], torch.nn.Module]:
        def make() -> torch.nn.Module:
            config = roformer.RoFormerConfig(vocab_size=60, **TINY_MODEL | fields)
            made = enlarge(getattr(roformer, f"RoFormerFor{head}")(config))
            made.set_attn_implementation(kernel)
            return made

        return make

    masked = text()
    masked["labels"] = masked["input_ids"].masked_fill(masked["attention_mask"] == 0, IGNORE_INDEX)
    kernels = "eager", "sdpa", "unpadded"
    for kernel in kernels:
        for encoding in POSITION_ENCODINGS:
            if kernel == "unpadded" and encoding in POSITION_BIASES:
                continue  # refused
            options = {"position_encoding": encoding}
            yield f"{encoding}, {kernel}", model("MaskedLM", kernel, **options), masked
        packed = {"input_ids": masked["input_ids"], "labels": masked["labels"]}
        packed["position_ids"] = torch.cat([torch.arange(8), torch.arange(12)]).expand(3, -1)
        yield f"packed rows, {kernel}", model("MaskedLM", kernel), packed
        borders = {"cu_seq_lens_q": torch.tensor([0, 20, 40, 48, 60], dtype=torch.int32)}
        borders |= {name: x for name, x in packed.items() if name != "position_ids"}
        yield f"borders, {kernel}", model("MaskedLM", kernel), borders
        left = {name: x.flip(1) for name, x in masked.items()}
        yield f"padding on the left, {kernel}", model("MaskedLM", kernel), left
        sparse = masked | {"sparse_prediction": True}
        yield f"sparse prediction, {kernel}", model("MaskedLM", kernel), sparse
        decoder = model("CausalLM", kernel, is_decoder=True)
        yield f"decoder, {kernel}", decoder, masked | {"use_cache": False}
        classes = text() | {"labels": torch.tensor([0, 1, 1])}
        yield f"sequences, {kernel}", model("SequenceClassification", kernel), classes
    for features in ("elu", "relu", "favor"):
        linear = model("MaskedLM", "eager", linear_attention=features)
        yield features, linear, masked
        yield f"packed rows, {features}", linear, packed
    tokens = text() | {"labels": masked["input_ids"] % 2}
    yield "tokens", model("TokenClassification", "sdpa"), tokens
    spans = {"start_positions": torch.tensor([1, 2, 3]), "end_positions": torch.tensor([4, 50, 4])}
    yield "spans", model("QuestionAnswering", "sdpa"), text() | spans
    choices = {name: x[None] for name, x in text().items()} | {"labels": torch.tensor([1])}
    yield "choices", model("MultipleChoice", "sdpa"), choices
    bert = BertConfig(vocab_size=60, **TINY_MODEL)
    wanted = masked["labels"].flatten().ne(IGNORE_INDEX).nonzero()[::3, 0]
    step = text() | {"label_positions": wanted, "labels": masked["input_ids"].flatten()[wanted]}
    yield "a step of RoFormer", lambda: LanguageModel(model("MaskedLM", "sdpa")()), step
    yield "a step of BERT", lambda: LanguageModel(BertForMaskedLM(bert)), step


def check_gradients() -> int:
    """Losses and gradients of all these there and here; how many there were."""
    cases = list(calls())
    for name, make, inputs in cases:
        torch.manual_seed(0)
        here = make().eval()
        found = []
        for there in (False, True):
            torch.manual_seed(1)
            with There():
                model = make().eval()
                model.load_state_dict(here.state_dict())
                model = model.to("pretended:0") if there else model
                loss = model(**(elsewhere(inputs) if there else inputs))[0]
                loss.backward()
                found.append([loss.detach(), *(p.grad for p in model.parameters())])
        assert all(type(x) is Elsewhere for x in found[1] if x is not None), name
        pairs = [(a, b) for a, b in zip(*found) if a is not None]
        for a, b in pairs:
            torch.testing.assert_close(
                b.meant, a, rtol=1e-3, atol=1e-4, msg=lambda m, name=name: f"{name}: {m}"
            )
    return len(cases)


def check_generation() -> int:
    """The same words there and here."""
    number = 0
    for cache in ("dynamic", "static"):
        for features in (None, "elu"):
            config = roformer.RoFormerConfig(
                vocab_size=60, is_decoder=True, linear_attention=features, **TINY_MODEL
            )
            model = enlarge(roformer.RoFormerForCausalLM(config)).eval()
            inputs = {name: x.flip(1) for name, x in text(length=7).items()}
            options = {"max_new_tokens": 4, "do_sample": False, "cache_implementation": cache}
            options["disable_compile"] = True
            here = model.generate(**inputs, **options)
            with torch.no_grad(), There():
                there = model.to("pretended:0").generate(**elsewhere(inputs), **options)
            assert torch.equal(there.meant, here)
            number += 1
    return number


def check_waits() -> None:
    """Without a mask nothing is looked at in a step; with one transformers does it once."""
    torch.manual_seed(0)
    config = roformer.RoFormerConfig(vocab_size=60, **TINY_MODEL)
    objective = LanguageModel(roformer.RoFormerForMaskedLM(config))
    step = text() | {"label_positions": torch.arange(9), "labels": torch.arange(9)}
    with There():
        objective, step = objective.to("pretended:0"), elsewhere(step)
        for count in (1, 0):
            waits.clear()
            objective(**step)[0].backward()
            assert len(waits) == count, waits
            step.pop("attention_mask", None)


def main() -> None:
    """Everything, and how much it was."""
    _setup_privateuseone_for_python_backend("pretended", Module())
    torch.__future__.set_swap_module_params_on_conversion(True)  # tied weights stay tied
    tensor = torch.tensor

    def made(data: Any, *args: Any, device: Any = None, **options: Any) -> Tensor:
        """torch.tensor, which asks no mode where its tensor is to be."""
        result = tensor(data, *args, **options)
        return result if device is None else result.to(device)

    torch.tensor = made
    losses, generations = check_gradients(), check_generation()
    check_waits()
    sys.stdout.write(f"{losses} losses with gradients, {generations} generations\n")


if __name__ == "__main__":
    main()
    sys.stdout.flush()
    os._exit(0)  # torch's thread for the gradients of such a device may abort the end of Python
