"""How a command starts and ends: processes as asked for, errors in one line, exit codes."""

import dataclasses
import os
import sys
from collections.abc import Callable, Sequence
from datetime import timedelta
from typing import Any, TypeVar

import torch
from accelerate import Accelerator
from accelerate.utils import (
    DistributedDataParallelKwargs,
    DistributedType,
    InitProcessGroupKwargs,
)

from train.command_line import parse_settings
from train.settings import InputError

SettingsT = TypeVar("SettingsT")


def run_command(
    main: Callable[[SettingsT], object],
    settings: type[SettingsT],
    argv: Sequence[str] | None = None,
    default_config: str | None = None,
) -> None:
    """Parse, run, and leave: exit code 2 and one line when what was given cannot be used.

    Args:
        main: The command, called with its settings.
        settings: Their dataclass.
        argv: Flags; None means the command line's.
        default_config: YAML read when no `--config` is given.
    """
    try:
        main(parse_settings(settings, argv, default_config))
    except InputError as error:
        if os.environ.get("LOCAL_RANK", "0") == "0":
            print(f"error: {error}", file=sys.stderr)
        if torch.distributed.is_initialized():
            sys.stdout.flush()
            sys.stderr.flush()
            os._exit(2)  # a thread of torch's own now and then aborts an orderly end
        sys.exit(2)


def launcher_pid() -> int | None:
    """The process that launched this one, whose end is this one's; None where a user did.

    What `nohup python train/pretrain.py &` starts must outlive its shell.
    """
    told = ("ACCELERATE_MIXED_PRECISION", "TORCHELASTIC_RUN_ID")
    return os.getppid() if any(name in os.environ for name in told) else None


def progress_interval() -> float:
    """Least seconds between two drawings of a progress bar: few where they would fill a file."""
    return 0.1 if sys.stderr.isatty() else 30.0


def start_accelerator(tracker: str | None = None, folder: str | None = None) -> Accelerator:
    """The Accelerator of this process, as the launcher was asked for it.

    Args:
        tracker: Accelerate tracker by name, or None.
        folder: Where the tracker writes.

    Returns:
        It. Accumulation, data and loss scaling stay with the loop, which is why none is set here.

    Raises:
        InputError: The launcher started fewer processes, or another kind of distribution, than its
            flags or configuration say: what `accelerate launch --cpu --num_processes 2` does.
    """
    environment = os.environ
    # Accelerate's launcher of a single process sets these only when several were asked for
    address = {"ACCELERATE_MIXED_PRECISION", "MASTER_ADDR", "MASTER_PORT"}
    if address <= environment.keys() and "WORLD_SIZE" not in environment:
        raise InputError(
            "launch must start the processes that were asked for, got 1 process for several; start "
            "them with `torchrun --nproc_per_node N` and the script, on a CPU with "
            "ACCELERATE_USE_CPU=1 before it; for one process unset MASTER_ADDR"
        )
    handlers = [
        # other processes wait while one tokenises: an hour on a large corpus, not a fault
        InitProcessGroupKwargs(timeout=timedelta(hours=12)),
        # buffers are constants here; without this an evaluation with fewer batches than processes
        # would wait for a broadcast that the others never join
        DistributedDataParallelKwargs(broadcast_buffers=False),
    ]
    try:
        accelerator = Accelerator(log_with=tracker, project_dir=folder, kwargs_handlers=handlers)
    except (ValueError, ImportError) as error:
        line = " ".join(str(error).split())
        raise InputError(
            f"launch must be one Accelerate can make, got {line}; change it"
        ) from error
    wanted = int(environment.get("WORLD_SIZE", "1"))
    if accelerator.num_processes != wanted:
        raise InputError(
            f"launch must join all {wanted} processes, got a world of {accelerator.num_processes}; "
            "put ACCELERATE_USE_CPU=1 before torchrun on a CPU, or check num_processes and "
            "num_machines in the accelerate configuration"
        )
    sharded = environment.get("ACCELERATE_USE_FSDP", "false").lower() in ("true", "1")
    if sharded and accelerator.distributed_type != DistributedType.FSDP:
        raise InputError(
            f"launch must shard (FSDP) as asked, got {accelerator.distributed_type.value}; "
            "FSDP needs several GPUs, use configs/accelerate/cpu.yaml or one_gpu.yaml here"
        )
    if accelerator.device.type == "mps":
        raise InputError(
            "launch must be for a CPU or CUDA, got mps, which has no float64; use "
            "configs/accelerate/cpu.yaml"
        )
    if accelerator.is_fsdp2:
        keep_float32(accelerator.state.fsdp_plugin)
    return accelerator


def keep_float32(plugin: Any) -> None:
    """Shards in half precision that leave in float32 what is: a rotation's angles, sums of losses.

    Accelerate's policy casts what goes into each layer and what comes out of the model.

    Args:
        plugin: Accelerate's FullyShardedDataParallelPlugin, for FSDP2; changed in place.
    """
    policy = plugin.mixed_precision_policy
    if policy is not None:
        plugin.mixed_precision_policy = dataclasses.replace(
            policy, reduce_dtype=torch.float32, output_dtype=None, cast_forward_inputs=False
        )
