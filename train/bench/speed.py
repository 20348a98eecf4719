"""Speed of training and inference against other models: `python -m train.bench`.

Every comparison is a process of its own, in which the models alternate; the results are ratios
within a turn, because absolute times depend on the machine. Padding tokens are not counted.
"""

import json
import time
from collections.abc import Callable, Iterable
from dataclasses import asdict
from pathlib import Path
from typing import Any

import torch
from accelerate import Accelerator

from train.bench.baselines import STOCK
from train.bench.parts import PARTS
from train.bench.tables import Measurement, markdown_page, plot
from train.bench.timing import Benchmark, BenchSettings
from train.environment import collect_environment, git_commit
from train.settings import require


def main(settings: BenchSettings) -> None:
    """Run the parts in their order; write numbers, tables and figure after each.

    Raises:
        InputError: A setting is wrong.
    """
    parts = select_parts(settings)
    captions = {name: run_part.__doc__ or "" for name, run_part in parts.items()}
    benchmark, measured = Benchmark(settings), dict[str, dict[str, Any]]()
    earlier = read_earlier(settings, parts)
    for name, run_part in parts.items():
        started = time.monotonic()
        print(f"== {name}: {captions[name]}", flush=True)
        run_part(benchmark)
        seconds = round(time.monotonic() - started, 1)
        measured[name] = {"caption": captions[name], "seconds": seconds, "commit": git_commit()}
        write(benchmark, measured, earlier)
    with_target = [row for row in benchmark.rows if row.reached is not None]
    reached = sum(row.reached or False for row in with_target)
    total = sum(about["seconds"] for about in measured.values())
    print(f"== {reached} of {len(with_target)} targets reached, {total:.0f} s")
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


def read_earlier(settings: BenchSettings, parts: Iterable[str]) -> dict[str, Any]:
    """Read the other parts of the file that will be written: a part can be measured alone.

    Returns:
        `parts` and `rows` without those that are measured now; empty without a file.
    """
    file = Path(settings.output)
    earlier = json.loads(file.read_text()) if file.exists() else {}
    kept = {name: x for name, x in earlier.get("parts", {}).items() if name not in parts}
    rows = [Measurement(**row) for row in earlier.get("rows", []) if row["part"] in kept]
    return {"parts": kept, "rows": rows}


def write(benchmark: Benchmark, measured: dict[str, Any], earlier: dict[str, Any]) -> None:
    """Write numbers, tables and figure of the measurements so far and of earlier ones."""
    settings = benchmark.settings
    known = earlier["parts"] | measured
    parts = {name: known[name] for name in PARTS[settings.device] if name in known}
    rows = [row for name in parts for row in earlier["rows"] + benchmark.rows if row.part == name]
    environment = collect_environment(Accelerator(cpu=settings.device == "cpu")) | {
        "settings": asdict(settings),
        "peak_tflops": {
            "bf16" if bf16 else "fp32": flops / 1e12 for bf16, flops in benchmark.peak_flops.items()
        },
        "parts": parts,
    }
    output = Path(settings.output)
    output.parent.mkdir(parents=True, exist_ok=True)
    numbers = environment | {"rows": [asdict(row) for row in rows]}
    output.write_text(json.dumps(numbers, indent=1) + "\n")
    output.with_suffix(".md").write_text(markdown_page(environment, rows))
    plot(rows, STOCK, output.with_suffix(".png"))
