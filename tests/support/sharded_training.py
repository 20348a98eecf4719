"""Script for torchrun with two processes: sharded models train and are saved as whole ones."""

import dataclasses
import os
import sys
import weakref
from pathlib import Path
from types import SimpleNamespace

import torch
import torch.distributed as dist
import transformers
from accelerate import Accelerator
from accelerate.utils import DynamoBackend, FullyShardedDataParallelPlugin
from torch.distributed.fsdp import fully_shard
from torch.distributed.tensor import DTensor
from torch.nn.parallel import DistributedDataParallel

from launched_runs import NO_DROPOUT
from roformer import RoFormerConfig, RoFormerForMaskedLM
from tiny import TINY_MODEL, enlarge
from train.loop import checkpoint
from train.loop.language_model import LanguageModel
from train.loop.launch import keep_float32
from train.loop.memory import fit_micro_batch
from train.loop.optim import adamw, build_optimizer
from train.settings import OptimSettings

OPTIM = OptimSettings(learning_rate=1e-3, weight_decay=0.01, betas=(0.9, 0.999), epsilon=1e-8)
FIELDS = TINY_MODEL | NO_DROPOUT | {"vocab_size": 60}


def build(mesh=None, parallel=False, name="adamw"):
    """A model, sharded over a mesh or replicated by DistributedDataParallel, and its optimizer."""
    model = enlarge(RoFormerForMaskedLM(RoFormerConfig(**FIELDS))).train()
    if mesh is not None:
        for part in (*model.roformer.encoder.layer, model):
            fully_shard(part, mesh=mesh)
    if parallel:
        model = DistributedDataParallel(model)
    inner = model.module if parallel else model
    return model, build_optimizer(LanguageModel(inner), dataclasses.replace(OPTIM, name=name))


def train(model, optimizer, batches, factor=1.0):
    """Gradient norm of each step; the loss is multiplied by a factor."""
    norms = []
    is_whole = isinstance(model, RoFormerForMaskedLM) and not hasattr(model, "reshard")
    for ids in batches:
        part = ids if is_whole else ids[dist.get_rank() :: 2].contiguous()
        (model(part, labels=part).loss * factor).backward()
        norm = checkpoint.full_tensor(torch.nn.utils.clip_grad_norm_(model.parameters(), 1.0))
        optimizer.found_inf = norm.isfinite().logical_not().float()
        optimizer.step()
        optimizer.zero_grad()
        norms.append(norm)
    return torch.stack(norms)


def most_gathered_at_once(model, optimizer):
    """Largest number of gathered tensors that are alive while a checkpoint is gathered."""
    counts, alive, gather = [0], weakref.WeakSet(), DTensor.full_tensor

    def counted(tensor):
        full = gather(tensor)
        alive.add(full)
        counts.append(len(alive))
        return full

    DTensor.full_tensor = counted
    checkpoint.gather_tensors(model, optimizer)
    DTensor.full_tensor = gather
    return max(counts)


def check_checkpoints(folder, name, tolerance):
    """What is saved of a sharded model can be loaded into a sharded and into a whole one."""
    mesh = torch.distributed.init_device_mesh("cpu", (2,))
    torch.manual_seed(1)
    batches = [torch.randint(5, 60, (4, 24)) for _ in range(6)]
    sharded = build(mesh, name=name)
    train(*sharded, batches[:3])
    before = checkpoint.gather_tensors(*sharded)
    train(*sharded, batches[:1], factor=torch.nan)  # moves neither weights nor moments
    is_main = dist.get_rank() == 0
    for a, b in zip(before, checkpoint.gather_tensors(*sharded)):
        assert bool(a) == is_main  # all gather, one keeps
        assert all(torch.equal(a[key], b[key]) for key in a)
    most = most_gathered_at_once(*sharded)
    assert most > 20 if is_main else most <= 2
    if is_main:
        checkpoint.write_checkpoint(folder, 3, before, {})
    dist.barrier()
    expected = train(*sharded, batches[3:])
    for resumed in (build(mesh, name=name), build(name=name)):
        checkpoint.load_tensors(checkpoint.recover_latest(folder), *resumed)
        norms = train(*resumed, batches[3:])
        if hasattr(resumed[0], "reshard"):
            assert torch.equal(norms, expected)
        torch.testing.assert_close(norms, expected, rtol=tolerance, atol=0)
    replicated = build(parallel=True, name=name)
    for other in (build(name=name), replicated):
        norms = train(*other, batches)[3:]
        torch.testing.assert_close(norms, expected, rtol=tolerance, atol=0)
    whole = checkpoint.gather_weights(replicated[0].module)
    for key, weight in checkpoint.gather_weights(sharded[0]).items():
        torch.testing.assert_close(weight, whole[key], rtol=0, atol=tolerance)


class CpuAccelerator(Accelerator):
    """Accelerate's own code for FSDP2, which it runs on GPUs only, on a CPU."""

    mixed_precision, device, is_fsdp2, fp8_backend = "no", torch.device("cpu"), True, None
    parallelism_config = SimpleNamespace(fsdp_dim_names=("dp",))
    is_main_process = property(lambda self: dist.get_rank() == 0)
    torch_device_mesh = property(lambda self: self.mesh)

    def __init__(self, efficient, precision):
        plugin = FullyShardedDataParallelPlugin(
            fsdp_version=2, auto_wrap_policy="transformer_based_wrap", reshard_after_forward=True,
            cpu_ram_efficient_loading=efficient,
        )  # fmt: skip
        if precision != "no":
            plugin.set_mixed_precision(precision)  # as Accelerate's own state does
        keep_float32(plugin)
        self.state = SimpleNamespace(fsdp_plugin=plugin, mixed_precision=precision)
        self.state.dynamo_plugin = SimpleNamespace(backend=DynamoBackend.NO)
        self._models = []
        self.mesh = torch.distributed.init_device_mesh("cpu", (2,), mesh_dim_names=("dp",))

    def _prepare_one(self, thing, first_pass=False, device_placement=None):
        return thing

    def backward(self, loss):
        loss.backward()

    def reduce(self, tensor):
        return tensor


def train_objective(kind, efficient=None, precision="no", **fields):
    """First loss and weights after three steps; `efficient` None trains a whole model."""
    torch.manual_seed(1)
    if kind == "bert":
        model = transformers.BertForMaskedLM(transformers.BertConfig(**FIELDS))
    else:
        model = enlarge(RoFormerForMaskedLM(RoFormerConfig(**FIELDS, **fields)))
    objective = LanguageModel(model).train()
    optimizer = adamw(objective, 1e-2, 0.01)
    if efficient is not None:
        accelerator = CpuAccelerator(efficient, precision)
        objective, optimizer = accelerator._prepare_fsdp2(objective, optimizer)
        # leaves no trace
        assert fit_micro_batch(objective, False, 24, 2, 0.15, accelerator) == 2
    ids, positions = torch.arange(5, 53).view(2, 24), torch.arange(0, 48, 3)
    labels, mask, losses = ids.flatten()[positions], torch.ones_like(ids), []
    for _ in range(3):
        loss, _ = objective(ids, positions, labels, attention_mask=mask)
        assert loss.dtype == torch.float32
        losses.append(loss.item())
        loss.backward()
        optimizer.step()
        optimizer.zero_grad()
    return losses[0], checkpoint.gather_weights(model)


def check_accelerate():
    """What Accelerate shards trains every weight as a whole model does."""
    for kind in ("roformer", "bert"):
        _, expected = train_objective(kind)
        for efficient in (False, True):
            for name, weight in train_objective(kind, efficient)[1].items():
                if kind == "bert" and name.endswith("key.bias"):
                    continue  # its gradient is 0 but for rounding, which Adam makes a whole step
                torch.testing.assert_close(weight, expected[name], rtol=0, atol=1e-5, msg=name)
    for fields in ({}, {"rope_interleave": False}, {"linear_attention": "elu"}):
        whole, _ = train_objective("roformer", **fields)
        # angles in bfloat16 have no complex product
        sharded, _ = train_objective("roformer", False, "bf16", **fields)
        assert abs(sharded / whole - 1) < 0.01, fields


if __name__ == "__main__":
    dist.init_process_group("gloo")
    torch.set_num_threads(1)
    check_checkpoints(Path(sys.argv[1]) / "adamw", "adamw", 1e-5)
    # Muon orthogonalises in bfloat16, whose sums depend on the sharding
    check_checkpoints(Path(sys.argv[1]) / "muon", "muon", 2e-3)
    check_accelerate()
    sys.stdout.write("equal\n")
    sys.stdout.flush()
    dist.barrier()
    os._exit(0)  # now and then a thread of torch's own aborts an orderly end
