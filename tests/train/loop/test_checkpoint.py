"""Checkpoints: exact, atomic, and distrustful of what lies on the disk."""

import errno
import fcntl
import os
import platform
import signal
import subprocess
import sys

import pytest
import torch
from safetensors.torch import load_file

from tiny import TINY_MODEL, command
from train.loop import checkpoint, run_dir
from train.settings import InputError


def trained(steps: int = 3):
    torch.manual_seed(0)
    model = torch.nn.Sequential(torch.nn.Linear(4, 4), torch.nn.Linear(4, 4))
    optimizer = torch.optim.AdamW(model.parameters(), lr=0.1)
    for _ in range(steps):
        move(model, optimizer)
    return model, optimizer


def move(model, optimizer):
    optimizer.zero_grad()
    model(torch.ones(2, 4)).square().sum().backward()
    optimizer.step()


def test_going_on_from_a_checkpoint_is_bit_identical(tmp_path):
    model, optimizer = trained()
    checkpoint.save(tmp_path, 3, checkpoint.gather_state(model, optimizer), {"tokens": 7})
    move(model, optimizer)
    other, other_optimizer = trained(steps=0)
    state = checkpoint.load(checkpoint.latest(tmp_path), other, other_optimizer)
    assert state == {"step": 3, "tokens": 7}
    move(other, other_optimizer)
    for a, b in zip(model.parameters(), other.parameters()):
        assert torch.equal(a, b)


@pytest.mark.parametrize(
    "name", ["weights.safetensors", "optimizer.safetensors", "state.json", "manifest.json"]
)
@pytest.mark.parametrize("damage", ["bit", "truncated", "deleted"])
def test_damage_to_any_file_is_noticed_and_the_checkpoint_before_it_used(
    tmp_path, name, damage, capsys
):
    for step in (3, 6):
        checkpoint.save(tmp_path, step, checkpoint.gather_state(*trained(step)), {})
    file = tmp_path / "checkpoints" / "step-00000006" / name
    content = bytearray(file.read_bytes())
    if damage == "deleted":
        file.unlink()
    else:
        content[len(content) // 2] ^= 1
        file.write_bytes(content if damage == "bit" else content[: len(content) // 2])
    assert checkpoint.latest(tmp_path).name == "step-00000003"
    (line,) = capsys.readouterr().out.splitlines()
    assert "step-00000006 is damaged" in line
    assert name in line or name == "manifest.json"
    checkpoint.save(tmp_path, 5, checkpoint.gather_state(*trained(5)), {})
    checkpoint.prune(tmp_path, 1)  # the damaged one does not count as kept
    assert checkpoint.latest(tmp_path).name == "step-00000005"


def test_a_folder_without_checkpoint_has_none(tmp_path):
    assert checkpoint.latest(tmp_path) is None
    (tmp_path / "checkpoints" / "step-00000001").mkdir(parents=True)
    for content in (None, "{}", "[]"):
        if content is not None:
            (tmp_path / "checkpoints" / "step-00000001" / "manifest.json").write_text(content)
        with pytest.raises(
            InputError, match="must hold a complete checkpoint, got .*step-00000001"
        ):
            checkpoint.latest(tmp_path)


def test_only_the_newest_are_kept_and_debris_is_removed(tmp_path):
    for step in (1, 2, 3):
        checkpoint.save(tmp_path, step, checkpoint.gather_state(*trained(1)), {})
    (tmp_path / "checkpoints" / "step-00000009.tmp").mkdir()
    checkpoint.prune(tmp_path, 2)
    names = sorted(path.name for path in (tmp_path / "checkpoints").iterdir())
    assert names == ["step-00000002", "step-00000003"]


def test_the_best_is_kept_beside_the_newest(tmp_path):
    for step, loss in ((1, 3.0), (2, 1.0), (3, 2.0), (4, None)):
        held = checkpoint.gather_state(*trained(1))
        checkpoint.save(tmp_path, step, held, {"validation_loss": loss})
        checkpoint.prune(tmp_path, 1)
    names = sorted(path.name for path in (tmp_path / "checkpoints").iterdir())
    assert names == ["step-00000002", "step-00000004"]


HOLDER = """
import os, pathlib, sys, time
from train.loop import run_dir
with run_dir.lock_dir(pathlib.Path(sys.argv[1])):
    if os.fork():  # what is left, like a data worker, must not keep the run from going on
        print(flush=True)
    time.sleep(600)
"""


def test_a_run_folder_belongs_to_one_process_until_that_is_killed(tmp_path, monkeypatch, capsys):
    monkeypatch.setattr(run_dir, "LOCK_TIMEOUT", 1.0)
    holder = subprocess.Popen(
        [sys.executable, "-c", HOLDER, tmp_path], stdout=subprocess.PIPE, start_new_session=True
    )
    with holder:
        try:
            holder.stdout.readline()
            found = f"got {tmp_path} in use by process {holder.pid} on {platform.node()}"
            with (
                pytest.raises(InputError, match=f"run.folder must be free, {found}; end it"),
                run_dir.lock_dir(tmp_path),
            ):
                pass
            assert capsys.readouterr().out.count("waiting up to 1 s: ") == 1
            holder.kill()
            holder.wait()
            with run_dir.lock_dir(tmp_path):
                assert (tmp_path / "lock").read_text().startswith(f"process {os.getpid()} ")
            assert not capsys.readouterr().out
        finally:
            os.killpg(holder.pid, signal.SIGKILL)


def test_a_file_system_without_locks_is_a_warning(tmp_path, monkeypatch, capsys):
    def refuse(*arguments):
        raise OSError(errno.ENOLCK, "No locks available")

    monkeypatch.setattr(fcntl, "lockf", refuse)
    with run_dir.lock_dir(tmp_path):
        pass
    assert "lock: No locks available; start a run only once" in capsys.readouterr().out


def test_tied_weights_are_saved_once(tmp_path):
    model = torch.nn.ModuleDict({"a": torch.nn.Linear(2, 2), "b": torch.nn.Linear(2, 2)})
    model["b"].weight = model["a"].weight
    held = checkpoint.gather_state(model, torch.optim.AdamW(model.parameters()))
    path = checkpoint.save(tmp_path, 1, held, {})
    assert sorted(load_file(path / "weights.safetensors")) == ["a.bias", "a.weight", "b.bias"]


def test_another_models_checkpoint_is_refused(tmp_path):
    path = checkpoint.save(tmp_path, 1, checkpoint.gather_state(*trained(1)), {})
    other = torch.nn.Linear(4, 4)
    with pytest.raises(InputError, match="must hold this model, got another's"):
        checkpoint.load(path, other, torch.optim.AdamW(other.parameters()))


SHARDED = f"""
import copy, os, pathlib, sys, torch, weakref
import torch.distributed as dist
from torch.distributed.fsdp import fully_shard
from torch.nn.parallel import DistributedDataParallel
from tiny import enlarge
from roformer import RoFormerConfig, RoFormerForMaskedLM
from train.loop import checkpoint, run_dir
from train.loop.optim import adamw
dist.init_process_group("gloo")
torch.set_num_threads(1)
folder = pathlib.Path(sys.argv[1])
config = RoFormerConfig(vocab_size=60, **{TINY_MODEL}, hidden_dropout_prob=0.0,
                        attention_probs_dropout_prob=0.0)
mesh = torch.distributed.init_device_mesh("cpu", (2,))
torch.manual_seed(1)
batches = [torch.randint(5, 60, (4, 24)) for _ in range(6)]

def fresh(sharded, copied=False):
    model = enlarge(RoFormerForMaskedLM(config)).train()
    if sharded:
        for part in (*model.roformer.encoder.layer, model):
            fully_shard(part, mesh=mesh)
    if copied:
        model = DistributedDataParallel(model)
    return model, adamw(model, 1e-3, 0.01)

def go(model, optimizer, batches, broken=()):
    norms = []
    alone = isinstance(model, RoFormerForMaskedLM) and not hasattr(model, "reshard")
    for number, ids in enumerate(batches):
        part = ids if alone else ids[dist.get_rank()::2].contiguous()
        (model(part, labels=part).loss * (torch.nan if number in broken else 1)).backward()
        norm = checkpoint.full_tensor(torch.nn.utils.clip_grad_norm_(model.parameters(), 1.0))
        optimizer.found_inf = norm.isfinite().logical_not().float()
        optimizer.step()
        optimizer.zero_grad()
        norms.append(norm)
    return torch.stack(norms)

first = fresh(sharded=True)
go(*first, batches[:3])
before = checkpoint.gather_state(*first)
go(*first, batches[:1], broken=[0])  # infinite gradients move neither weights nor moments
for a, b in zip(before, checkpoint.gather_state(*first)):
    assert a and all(torch.equal(a[name], b[name]) for name in a)
mine = checkpoint.gather_state(*first, keep=dist.get_rank() == 0)  # all gather, one keeps
assert all(bool(part) == (dist.get_rank() == 0) for part in mine)
most, alive = 0, weakref.WeakSet()  # gathered tensors at once, of a process that keeps none
gather = torch.distributed.tensor.DTensor.full_tensor
def counted(tensor):
    global most
    found = gather(tensor)
    alive.add(found)
    most = max(most, len(alive))
    return found
torch.distributed.tensor.DTensor.full_tensor = counted
checkpoint.gather_state(*first, keep=False)
assert most <= 2, most
checkpoint.gather_state(*first)
assert most > 20, most
torch.distributed.tensor.DTensor.full_tensor = gather
if dist.get_rank() == 0:
    checkpoint.save(folder, 3, before, {{}})
dist.barrier()
unbroken = go(*first, batches[3:])
path = checkpoint.latest(folder)
for sharded in (True, False):
    again = fresh(sharded)
    checkpoint.load(path, *again)
    norms = go(*again, batches[3:])
    if sharded:
        assert torch.equal(norms, unbroken)
    torch.testing.assert_close(norms, unbroken, rtol=1e-5, atol=0)
torch.testing.assert_close(go(*fresh(False), batches)[3:], unbroken, rtol=1e-5, atol=0)
copied = fresh(False, copied=True)
torch.testing.assert_close(go(*copied, batches)[3:], unbroken, rtol=1e-6, atol=0)
whole = checkpoint.gather_weights(copied[0].module)
for name, weight in checkpoint.gather_weights(first[0]).items():
    torch.testing.assert_close(weight, whole[name], rtol=0, atol=1e-6)
print("equal", flush=True)
dist.barrier()
os._exit(0)  # now and then a thread of torch's own aborts an orderly end
"""


AS_ACCELERATE_SHARDS = f"""
import os, sys, torch
import torch.distributed as dist
import transformers
from types import SimpleNamespace
from accelerate import Accelerator
from accelerate.utils import DynamoBackend, FullyShardedDataParallelPlugin
from tiny import enlarge
from roformer import RoFormerConfig, RoFormerForMaskedLM
from train.loop import checkpoint, run_dir
from train.loop.memory import fit_micro_batch
from train.loop.launch import keep_float32
from train.loop.objective import LanguageModel
from train.loop.optim import adamw
dist.init_process_group("gloo")
torch.set_num_threads(1)
fields = dict(vocab_size=60, **{TINY_MODEL}, hidden_dropout_prob=0.0,
              attention_probs_dropout_prob=0.0)
ids = torch.arange(5, 53).view(2, 24)
places = torch.arange(0, 48, 3)

class OnCpu(Accelerator):  # Accelerate shards on GPUs alone: this is its own code, on a CPU
    def __init__(self, efficient, precision):
        plugin = FullyShardedDataParallelPlugin(
            fsdp_version=2, auto_wrap_policy="transformer_based_wrap", reshard_after_forward=True,
            cpu_ram_efficient_loading=efficient)
        if precision != "no":
            plugin.set_mixed_precision(precision)  # as Accelerate's own state does
        keep_float32(plugin)
        self.state = SimpleNamespace(fsdp_plugin=plugin, mixed_precision=precision,
                                     dynamo_plugin=SimpleNamespace(backend=DynamoBackend.NO))
        self._models = []
    torch_device_mesh = torch.distributed.init_device_mesh("cpu", (2,), mesh_dim_names=("dp",))
    parallelism_config = SimpleNamespace(fsdp_dim_names=("dp",))
    mixed_precision, device, is_fsdp2 = "no", torch.device("cpu"), True
    is_main_process = property(lambda self: dist.get_rank() == 0)
    process_index = property(lambda self: dist.get_rank())
    fp8_backend = None
    def _prepare_one(self, thing, first_pass=False, device_placement=None):
        return thing
    def backward(self, loss):
        loss.backward()
    def reduce(self, tensor):
        return tensor

def trained(kind, efficient, precision="no", **more):
    torch.manual_seed(1)
    if kind == "bert":
        model = transformers.BertForMaskedLM(transformers.BertConfig(**fields))
    else:
        model = enlarge(RoFormerForMaskedLM(RoFormerConfig(**fields, **more)))
    objective = LanguageModel(model).train()
    optimizer = adamw(objective, 1e-2, 0.01)
    if efficient is not None:
        accelerator, inner = OnCpu(efficient, precision), objective
        objective, optimizer = accelerator._prepare_fsdp2(objective, optimizer)
        assert fit_micro_batch(objective, inner, 24, 2, 0.15, accelerator) == 2  # leaves no trace
    for _ in range(3):
        loss, _ = objective(ids, places, ids.flatten()[places], attention_mask=torch.ones_like(ids))
        assert loss.dtype == torch.float32
        first.setdefault((kind, efficient is None, *more.values()), loss.item())
        loss.backward()
        optimizer.step()
        optimizer.zero_grad()
    return checkpoint.gather_weights(model)

first = {{}}
for kind in ("roformer", "bert"):
    expected = trained(kind, None)
    for efficient in (False, True):
        for name, weight in trained(kind, efficient).items():
            torch.testing.assert_close(weight, expected[name], rtol=0, atol=1e-5, msg=name)
first.clear()
for more in ({{}}, dict(rope_interleave=False), dict(linear_attention="elu")):
    trained("roformer", None, **more)
    trained("roformer", False, "bf16", **more)  # angles in bfloat16 have no complex product
    whole, sharded = first.values()
    assert abs(sharded / whole - 1) < 0.01, (more, first)
    first.clear()
print("equal", flush=True)
dist.barrier()
os._exit(0)  # now and then a thread of torch's own aborts an orderly end
"""


def test_what_accelerate_shards_trains_every_weight_as_whole_ones_are(tmp_path):
    (tmp_path / "sharded.py").write_text(AS_ACCELERATE_SHARDS)
    run = ("-m", "torch.distributed.run", "--nproc_per_node", "2", "--standalone")
    done = command(*run, tmp_path / "sharded.py", PYTHONPATH="tests/support")
    assert done.returncode == 0, done.stderr
    assert done.stdout.count("equal") == 2


def test_sharded_weights_and_moments_are_saved_whole_and_loaded_into_either_form(tmp_path):
    (tmp_path / "sharded.py").write_text(SHARDED)
    run = ("-m", "torch.distributed.run", "--nproc_per_node", "2", "--standalone")
    done = command(*run, tmp_path / "sharded.py", tmp_path / "run", PYTHONPATH="tests/support")
    assert done.returncode == 0, done.stderr
    assert done.stdout.count("equal") == 2


def test_tensors_that_are_not_sharded_are_not_copied():
    model, optimizer = trained()
    weights, moments = checkpoint.gather_state(model, optimizer)
    assert weights["0.weight"].data_ptr() == model[0].weight.data_ptr()
    state = optimizer.state[model[0].weight]
    assert {"exp_avg", "exp_avg_sq"} < state.keys()
    assert moments["0.exp_avg"].data_ptr() == state["exp_avg"].data_ptr()
    assert checkpoint.gather_state(model, optimizer, keep=False) == ({}, {})
