"""A fake device, whose tensors are stored on the CPU, to test device handling without a GPU.

Operations on tensors of two devices fail, as on a GPU, and operations that synchronise with the
host are counted. It runs in a process of its own (`python tests/support/fake_device.py`), because
torch registers such a device for the life of the process.
"""

import os
import sys
from collections.abc import Callable, Iterator
from functools import partial
from itertools import product
from typing import Any

import torch
from torch import Tensor
from torch.utils import backend_registration
from torch.utils._python_dispatch import TorchDispatchMode, return_and_correct_aliasing
from torch.utils._pytree import tree_leaves, tree_map
from transformers import BertConfig, BertForMaskedLM

from roformer import RoFormerForCausalLM, RoFormerForMaskedLM
from roformer.configuration_roformer import FEATURE_MAPS, POSITION_BIASES, POSITION_ENCODINGS
from tiny import HEADS, TINY_MODEL, build, inputs_with_labels, tiny_config
from train.data.batching import IGNORE_INDEX
from train.loop.language_model import LanguageModel

SYNCHRONISING = ("aten::_local_scalar_dense", "aten::nonzero", "aten::masked_select", "aten::equal")
ACROSS_DEVICES = ("aten::_to_copy", "aten::copy_", "aten::_local_scalar_dense")
syncs: list[str] = []


class Module(backend_registration._DummyBackendModule):
    """What torch.autocast asks of a device."""

    def get_amp_supported_dtype(self) -> list[torch.dtype]:
        return [torch.bfloat16]


def compute(_: Any, func: Any, types: Any, args: Any = (), kwargs: Any = None) -> Any:
    """Run an operation on the stored tensors, if all of them are on one device."""
    name = func._schema.name
    tensors = [x for x in tree_leaves((args, kwargs)) if isinstance(x, Tensor)]
    on_fake = any(isinstance(x, FakeTensor) for x in tensors)
    # as on a GPU, tensors without dimensions may come from the CPU
    on_cpu = [tuple(x.shape) for x in tensors if x.dim() and not isinstance(x, FakeTensor)]
    if on_fake and on_cpu and name not in ACROSS_DEVICES:
        raise RuntimeError(f"{name} of tensors on two devices; {on_cpu} are on the CPU")
    if on_fake and name in SYNCHRONISING:
        syncs.append(name)
    given = (args, kwargs or {})
    values, options = tree_map(lambda x: x.stored if isinstance(x, FakeTensor) else x, given)
    returns_fake = on_fake
    if options.get("device") is not None:
        returns_fake = torch.device(options["device"]).type == "fake"
        options["device"] = "cpu"
    result = func(*values, **options)
    result = tree_map(lambda x: FakeTensor(x) if returns_fake and type(x) is Tensor else x, result)
    if on_fake and returns_fake:
        return return_and_correct_aliasing(func, args, kwargs or {}, result)
    return result


class FakeTensor(Tensor):
    """A CPU tensor that reports the fake device."""

    stored: Tensor

    @staticmethod
    def __new__(cls, real: Tensor) -> "FakeTensor":
        layout = {"strides": real.stride(), "storage_offset": real.storage_offset()}
        layout |= {"dtype": real.dtype, "device": "fake:0"}
        made = Tensor._make_wrapper_subclass(cls, real.size(), **layout)
        made.stored = real
        return made

    __torch_dispatch__ = classmethod(compute)

    def tolist(self) -> Any:
        syncs.append("tolist")
        return self.stored.tolist()


class FakeDeviceMode(TorchDispatchMode):
    """Lets tensors be created on the fake device."""

    __torch_dispatch__ = compute


def to_fake_device(values: dict[str, Any]) -> dict[str, Any]:
    return {k: v.to("fake:0") if isinstance(v, Tensor) else v for k, v in values.items()}


def text(rows: int = 3, length: int = 20) -> dict[str, Tensor]:
    """Rows with padding on the right."""
    torch.manual_seed(0)
    ids = torch.randint(5, 60, (rows, length))
    mask = (torch.arange(length) < torch.tensor([[length], [12], [5]])).long()
    return {"input_ids": ids * mask, "attention_mask": mask}


def calls() -> Iterator[tuple[str, Callable[[], torch.nn.Module], dict[str, Any]]]:
    """Yield (name, function that builds the model, inputs)."""

    def model(kernel: str, head: type = RoFormerForMaskedLM, **fields: Any) -> Callable:
        return partial(build, head, tiny_config(num_hidden_layers=1, **fields), kernel)

    masked = inputs_with_labels(RoFormerForMaskedLM, *text().values())
    packed = {name: masked[name][:1] for name in ("input_ids", "labels")}
    packed["position_ids"] = torch.cat([torch.arange(8), torch.arange(12)])[None]
    borders = {name: masked[name] for name in ("input_ids", "labels")}
    borders["cu_seq_lens_q"] = torch.tensor([0, 20, 40, 48, 60], dtype=torch.int32)
    left = {name: x.flip(1) for name, x in masked.items()}
    for kernel in ("eager", "sdpa", "unpadded"):
        for encoding in POSITION_ENCODINGS:
            if kernel == "unpadded" and encoding in POSITION_BIASES:
                continue  # computed by sdpa
            yield f"{encoding}, {kernel}", model(kernel, position_encoding=encoding), masked
        yield f"packed rows, {kernel}", model(kernel), packed
        yield f"borders, {kernel}", model(kernel), borders
        yield f"padding on the left, {kernel}", model(kernel), left
        yield f"sparse prediction, {kernel}", model(kernel, sparse_prediction=True), masked
        for head in HEADS:
            inputs = inputs_with_labels(head, *text().values())
            yield f"{head.__name__}, {kernel}", model(kernel, head, use_cache=False), inputs
    for features in FEATURE_MAPS:
        linear = model("eager", linear_attention=features)
        yield features, linear, masked
        yield f"packed rows, {features}", linear, packed
    bert = BertConfig(vocab_size=60, **TINY_MODEL | {"num_hidden_layers": 1})
    wanted = masked["labels"].flatten().ne(IGNORE_INDEX).nonzero()[::3, 0]
    step = text() | {"label_indices": wanted, "labels": masked["input_ids"].flatten()[wanted]}
    yield "a step of RoFormer", lambda: LanguageModel(model("sdpa")()), step
    yield "a step of BERT", lambda: LanguageModel(BertForMaskedLM(bert)), step


def check_gradients() -> int:
    """Compare losses and gradients of all cases on both devices; return the number of cases."""
    cases = list(calls())
    for name, make, inputs in cases:
        torch.manual_seed(0)
        on_cpu = make().eval()
        results = []
        for on_fake in (False, True):
            torch.manual_seed(1)
            with FakeDeviceMode():
                model = make().eval()
                model.load_state_dict(on_cpu.state_dict())
                model = model.to("fake:0") if on_fake else model
                loss = model(**(to_fake_device(inputs) if on_fake else inputs))[0]
                loss.backward()
                results.append([loss.detach(), *(p.grad for p in model.parameters())])
        assert all(type(x) is FakeTensor for x in results[1] if x is not None), name
        pairs = [(a, b) for a, b in zip(*results) if a is not None]
        for a, b in pairs:
            torch.testing.assert_close(
                b.stored, a, rtol=1e-3, atol=1e-4, msg=lambda m, name=name: f"{name}: {m}"
            )
    return len(cases)


def check_generation() -> int:
    """Compare generated tokens on both devices; return the number of cases."""
    cases = list(product(("dynamic", "static"), (None, "elu")))
    for cache, features in cases:
        config = tiny_config(num_hidden_layers=1, linear_attention=features)
        model = build(RoFormerForCausalLM, config)
        inputs = {name: x.flip(1) for name, x in text(length=7).items()}
        options = {"max_new_tokens": 4, "do_sample": False, "cache_implementation": cache}
        options["disable_compile"] = True
        on_cpu = model.generate(**inputs, **options)
        with torch.no_grad(), FakeDeviceMode():
            on_fake = model.to("fake:0").generate(**to_fake_device(inputs), **options)
        assert torch.equal(on_fake.stored, on_cpu)
    return len(cases)


def check_syncs() -> None:
    """A step never synchronises, neither with a mask nor without."""
    torch.manual_seed(0)
    objective = LanguageModel(RoFormerForMaskedLM(tiny_config(num_hidden_layers=1)))
    step = text() | {"label_indices": torch.arange(9), "labels": torch.arange(9)}
    with FakeDeviceMode():
        objective, step = objective.to("fake:0"), to_fake_device(step)
        for _ in range(2):
            syncs.clear()
            objective(**step)[0].backward()
            assert not syncs
            step.pop("attention_mask", None)


def main() -> None:
    backend_registration._setup_privateuseone_for_python_backend("fake", Module())
    torch.__future__.set_swap_module_params_on_conversion(True)  # tied weights stay tied
    tensor = torch.tensor

    def made(data: Any, *args: Any, device: Any = None, **options: Any) -> Tensor:
        """torch.tensor, which ignores the device mode."""
        result = tensor(data, *args, **options)
        return result if device is None else result.to(device)

    torch.tensor = made
    losses, generations = check_gradients(), check_generation()
    check_syncs()
    sys.stdout.write(f"{losses} losses with gradients, {generations} generations\n")


if __name__ == "__main__":
    main()
    sys.stdout.flush()
    os._exit(0)  # the autograd thread of such a device may abort at exit
