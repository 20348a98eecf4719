"""Speed of training and inference against other models: `python -m train.bench`.

All models run in one process, alternating in every round; the results are ratios within a round,
because absolute times depend on the machine. Padding tokens are not counted.
"""

import json
import time
from collections.abc import Callable
from dataclasses import asdict
from pathlib import Path

import torch
from accelerate import Accelerator

from train.bench.baselines import STOCK
from train.bench.parts import PARTS
from train.bench.tables import markdown_page, plot
from train.bench.timing import Benchmark, BenchSettings
from train.environment import collect_environment
from train.settings import require


def main(settings: BenchSettings) -> None:
    """Run the parts in their order; write numbers, tables and figure after each.

    Raises:
        InputError: A setting is wrong, or a kernel is not accurate.
    """
    parts = select_parts(settings)
    captions = {name: run_part.__doc__ or "" for name, run_part in parts.items()}
    benchmark, seconds = Benchmark(settings), {}
    for name, run_part in parts.items():
        started = time.monotonic()
        print(f"== {name}: {captions[name]}", flush=True)
        run_part(benchmark)
        seconds[name] = round(time.monotonic() - started, 1)
        write(benchmark, seconds, captions)
    with_target = [row for row in benchmark.rows if row.reached is not None]
    reached = sum(row.reached or False for row in with_target)
    print(f"== {reached} of {len(with_target)} targets reached, {sum(seconds.values()):.0f} s")
    for row in with_target:
        print(" | ".join(row.cells()))


def select_parts(settings: BenchSettings) -> dict[str, Callable[[Benchmark], None]]:
    """Return the chosen parts of the device in the order in which they must run.

    Raises:
        InputError: The device or a part cannot be used.
    """
    available = settings.device == "cpu" or (
        settings.device == "cuda" and torch.cuda.is_available()
    )
    found = f"{settings.device} with CUDA {torch.cuda.is_available()}"
    require(available, "device", "must be cpu, or cuda if available", found, "use cpu")
    parts = PARTS[settings.device]
    unknown = [part for part in settings.parts if part not in parts]
    rule = f"must be of {', '.join(parts)}"
    require(not unknown, "parts", rule, ", ".join(unknown), "leave it out for all")
    return {name: x for name, x in parts.items() if not settings.parts or name in settings.parts}


def write(benchmark: Benchmark, seconds: dict[str, float], captions: dict[str, str]) -> None:
    """Write numbers, tables and figure of the measurements so far."""
    settings = benchmark.settings
    environment = collect_environment(Accelerator(cpu=settings.device == "cpu")) | {
        "settings": asdict(settings),
        "peak_tflops": {
            "bf16" if bf16 else "fp32": flops / 1e12 for bf16, flops in benchmark.peak_flops.items()
        },
        "seconds": seconds,
    }
    output = Path(settings.output)
    output.parent.mkdir(parents=True, exist_ok=True)
    rows = [asdict(row) for row in benchmark.rows]
    output.write_text(json.dumps(environment | {"rows": rows}, indent=1) + "\n")
    output.with_suffix(".md").write_text(markdown_page(environment, benchmark.rows, captions))
    plot(benchmark.rows, STOCK, output.with_suffix(".png"))
