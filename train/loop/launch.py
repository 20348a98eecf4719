"""The Accelerator of a process, checked against the launcher's request, and its environment."""

import dataclasses
import functools
import os
import platform
import subprocess
import warnings
from datetime import timedelta
from pathlib import Path
from typing import Any

import accelerate
import torch
import transformers
from accelerate import Accelerator
from accelerate.tracking import get_available_trackers
from accelerate.utils import (
    DistributedDataParallelKwargs,
    DistributedType,
    DynamoBackend,
    GradientAccumulationPlugin,
    InitProcessGroupKwargs,
    parse_flag_from_env,
)

import roformer
from roformer.kernels.conditions import bfloat16_is_emulated, kernels_enabled
from train.settings import InputError


def launcher_pid() -> int | None:
    """Return the process id of the launcher (accelerate or torchrun); None without a launcher.

    A process started from a shell, as by `nohup python train/pretrain.py &`, outlives its parent.
    """
    variables = ("ACCELERATE_DYNAMO_MODE", "TORCHELASTIC_RUN_ID")  # which only launchers set
    return os.getppid() if any(name in os.environ for name in variables) else None


def compute_dtype(accelerator: Accelerator) -> torch.dtype:
    """Return the dtype of matrix products under the mixed precision of the launch."""
    dtypes = {"bf16": torch.bfloat16, "fp16": torch.float16}
    return dtypes.get(accelerator.mixed_precision, torch.float32)


def replace_emulated_bfloat16() -> None:
    """Compute in float32 where the launch asks for bfloat16 on a CPU without instructions for it.

    Accelerate reads the precision from the environment, which worker processes inherit.
    """
    is_on_cpu = parse_flag_from_env("ACCELERATE_USE_CPU") or not torch.accelerator.is_available()
    is_bf16 = os.environ.get("ACCELERATE_MIXED_PRECISION") == "bf16"
    if is_bf16 and is_on_cpu and kernels_enabled() and bfloat16_is_emulated():
        os.environ["ACCELERATE_MIXED_PRECISION"] = "no"
        if os.environ.get("RANK", "0") == "0":
            print(
                "precision: float32, since this CPU has no bfloat16 instructions; "
                "ROFORMER_KERNELS=0 before the command keeps bfloat16"
            )


def start_accelerator(tracker: str | None = None, folder: str | None = None) -> Accelerator:
    """Build the Accelerator of this process and check it against the launcher's request.

    Gradient accumulation and data loading are the loop's, so none is configured here. Also makes
    the Auto classes build this project's RoFormer, and hides transformers' progress bars. The
    Accelerate tracker of that name, if any, writes to the folder.

    Raises:
        InputError: The launcher started fewer processes, or another kind of distribution, than its
            flags or configuration say, as `accelerate launch --cpu --num_processes 2` does.
    """
    roformer.use_for_auto_classes()
    transformers.utils.logging.disable_progress_bar()
    _check_request(tracker)
    replace_emulated_bfloat16()
    handlers = [
        # the other processes wait while one tokenizes, for hours on a large corpus
        InitProcessGroupKwargs(timeout=timedelta(hours=12)),
        # buffers never change: a broadcast only costs time
        DistributedDataParallelKwargs(broadcast_buffers=False, gradient_as_bucket_view=True),
    ]
    try:
        accelerator = Accelerator(
            log_with=tracker,
            project_dir=folder,
            kwargs_handlers=handlers,
            # not the number in the environment, by which Accelerate would divide the gradients
            gradient_accumulation_plugin=GradientAccumulationPlugin(num_steps=1),
        )
    except (ValueError, ImportError) as error:
        line = " ".join(str(error).split())
        raise InputError(
            f"launch must be one Accelerate can make, got {line}; change it"
        ) from error
    _check_launch(accelerator)
    # cuDNN makes a plan for every new shape of a batch
    torch.backends.cuda.enable_cudnn_sdp(False)
    # Inductor, on the softmax over the vocabulary; torch 2.13, on what Accelerate passes
    warnings.filterwarnings("ignore", r"\s*Online softmax is disabled")
    warnings.filterwarnings("ignore", "`broadcast_buffers` is deprecated")
    if accelerator.is_fsdp2:
        keep_float32(accelerator.state.fsdp_plugin)
    return accelerator


def _check_request(tracker: str | None) -> None:
    """Check the launcher's variables and the tracker before Accelerate reads them."""
    # Accelerate's launcher of a single process sets these only when several were asked for
    address = {"ACCELERATE_MIXED_PRECISION", "MASTER_ADDR", "MASTER_PORT"}
    if address <= os.environ.keys() and "WORLD_SIZE" not in os.environ:
        raise InputError(
            "launch must start the processes that were asked for, got 1 process for several; start "
            "them with `torchrun --nproc_per_node N` and the script, on a CPU with "
            "ACCELERATE_USE_CPU=1 before it; for one process unset MASTER_ADDR"
        )
    trackers = ["all", *map(str, get_available_trackers())]
    if tracker not in (None, *trackers):
        raise InputError(
            "run.tracker must be null or an installed tracker of Accelerate, "
            f"{', '.join(trackers)}, got {tracker}; install it, or set null"
        )


def _check_launch(accelerator: Accelerator) -> None:
    """Check that an Accelerator is what the launcher was asked for, and its device usable."""
    world_size = int(os.environ.get("WORLD_SIZE", "1"))
    if accelerator.num_processes != world_size:
        raise InputError(
            f"launch must join all {world_size} processes, got a world of "
            f"{accelerator.num_processes}; put ACCELERATE_USE_CPU=1 before torchrun on a CPU, or "
            "check num_processes and num_machines in the accelerate configuration"
        )
    sharded = os.environ.get("ACCELERATE_USE_FSDP", "false").lower() in ("true", "1")
    if sharded and accelerator.distributed_type != DistributedType.FSDP:
        raise InputError(
            f"launch must shard (FSDP) as asked, got {accelerator.distributed_type.value}; "
            "FSDP needs several GPUs, use configs/accelerate/cpu.yaml or one_gpu.yaml here"
        )
    kind = accelerator.distributed_type
    is_fsdp1 = kind == DistributedType.FSDP and not accelerator.is_fsdp2
    if is_fsdp1 or kind in (DistributedType.DEEPSPEED, DistributedType.MEGATRON_LM):
        found = "fsdp_version: 1, Accelerate's default" if is_fsdp1 else kind.value
        raise InputError(
            f"launch must be data-parallel or have fsdp_version: 2, got {found}; "
            "use configs/accelerate/fsdp.yaml"
        )
    if accelerator.is_fsdp2 and accelerator.state.fsdp_plugin.activation_checkpointing:
        raise InputError(
            "fsdp_activation_checkpointing must be false, got true, which renames weights; set "
            "model.gradient_checkpointing"
        )
    if accelerator.device.type == "mps":
        raise InputError(
            "launch must be for a CPU or CUDA, got mps, which has no float64; "
            "use configs/accelerate/cpu.yaml"
        )


def any_process(condition: bool, accelerator: Accelerator) -> bool:
    """Return whether the condition holds on any process; a collective call."""
    value = torch.tensor(float(condition), device=accelerator.device)
    return bool(accelerator.reduce(value).item())


def is_compiled(accelerator: Accelerator) -> bool:
    """Return whether Accelerate compiles the model."""
    return accelerator.state.dynamo_plugin.backend != DynamoBackend.NO


def keep_float32(plugin: Any) -> None:
    """Keep float32 inputs and outputs of layers in float32 under FSDP2 with half precision.

    Accelerate's policy, which is changed in place, casts the inputs of each layer and the outputs
    of the model, among them the cos and sin of the rotary embedding and the sums of losses.
    """
    policy = plugin.mixed_precision_policy
    if policy is not None:
        plugin.mixed_precision_policy = dataclasses.replace(
            policy, reduce_dtype=torch.float32, output_dtype=None, cast_forward_inputs=False
        )


def collect_environment(accelerator: Accelerator) -> dict[str, Any]:
    """Return versions, machine, launch and git commit, as environment.json holds them."""
    cuda = accelerator.device.type == "cuda"
    is_regional = accelerator.state.dynamo_plugin.use_regional_compilation
    compiled = ("regional" if is_regional else "full") if is_compiled(accelerator) else "no"
    return {
        "python": platform.python_version(),
        "torch": torch.__version__,
        "transformers": transformers.__version__,
        "accelerate": accelerate.__version__,
        "machine": torch.cuda.get_device_name() if cuda else _processor(),
        "threads": torch.get_num_threads(),
        "processes": accelerator.num_processes,
        "precision": accelerator.mixed_precision,
        "compiled": compiled,
        "commit": git_commit(),
    }


def _processor() -> str:
    info = Path("/proc/cpuinfo")
    lines = info.read_text().splitlines() if info.exists() else []
    names = [line.split(":", 1)[1].strip() for line in lines if line.startswith("model name")]
    return f"{names[0]} ({len(names)} cores)" if names else platform.processor()


@functools.cache
def git_commit() -> str:
    """Return the commit of this clone, with "-dirty" if code has changed, or "unknown".

    Files that runs write into the clone, such as results, do not count as changes.
    """
    root = Path(__file__).parents[2]
    code = [str(root / name) for name in ("roformer", "train", "finetune", "configs")]
    try:
        changed = _git(root, "status", "--porcelain", *code)
        return _git(root, "describe", "--always", "--abbrev=12") + ("-dirty" if changed else "")
    except (OSError, subprocess.CalledProcessError):
        return "unknown"


def _git(clone: Path, *command: str) -> str:
    git = ["git", "-C", str(clone), *command]
    return subprocess.run(git, capture_output=True, text=True, check=True).stdout.strip()
