"""What numbers of a run have to be read with: versions, machine, git commit, peak memory."""

import functools
import platform
import resource
import subprocess
import sys
from pathlib import Path
from typing import Any

import accelerate
import torch
import transformers
from accelerate import Accelerator
from accelerate.utils import DynamoBackend


def collect_environment(accelerator: Accelerator) -> dict[str, Any]:
    """Return versions, machine, launch and git commit, as environment.json holds them."""
    cuda = accelerator.device.type == "cuda"
    return {
        "python": platform.python_version(),
        "torch": torch.__version__,
        "transformers": transformers.__version__,
        "accelerate": accelerate.__version__,
        "machine": torch.cuda.get_device_name() if cuda else _processor(),
        "threads": torch.get_num_threads(),
        "processes": accelerator.num_processes,
        "precision": accelerator.mixed_precision,
        "compiled": _compilation(accelerator),
        "commit": git_commit(),
    }


def _compilation(accelerator: Accelerator) -> str:
    plugin = accelerator.state.dynamo_plugin
    if plugin.backend == DynamoBackend.NO:
        return "no"
    return "regional" if plugin.use_regional_compilation else "full"


def _processor() -> str:
    info = Path("/proc/cpuinfo")
    lines = info.read_text().splitlines() if info.exists() else []
    names = [line.split(":", 1)[1].strip() for line in lines if line.startswith("model name")]
    return f"{len(names)} x {names[0]}" if names else platform.processor()


@functools.cache
def git_commit() -> str:
    """Return the commit of this clone, with "-dirty" if code has changed, or "unknown".

    Files that runs write into the clone, such as results, do not count as changes.
    """
    root = Path(__file__).parents[1]
    code = [str(root / name) for name in ("roformer", "train", "finetune", "configs")]
    try:
        changed = _git(root, "status", "--porcelain", *code)
        return _git(root, "describe", "--always", "--abbrev=12") + ("-dirty" if changed else "")
    except (OSError, subprocess.CalledProcessError):
        return "unknown"


def _git(clone: Path, *command: str) -> str:
    git = ["git", "-C", str(clone), *command]
    return subprocess.run(git, capture_output=True, text=True, check=True).stdout.strip()


def is_out_of_memory(error: MemoryError | RuntimeError) -> bool:
    """Return whether an error of a forward or backward pass means too little memory."""
    # torch's allocators and mmap; cuBLAS and cuDNN
    messages = (
        "can't allocate memory", "cannot allocate memory", "not enough memory", "out of memory",
        "status_alloc_failed",
    )  # fmt: skip
    is_known = isinstance(error, MemoryError | torch.OutOfMemoryError)
    return is_known or any(message in str(error).lower() for message in messages)


def peak_memory(device: torch.device) -> int:
    """Return the peak memory in bytes: of a GPU, or of the process on a CPU."""
    if device.type == "cuda":
        return torch.cuda.max_memory_allocated(device)
    peak = resource.getrusage(resource.RUSAGE_SELF).ru_maxrss
    return peak if sys.platform == "darwin" else peak * 1024  # macOS: bytes, Linux: KiB
