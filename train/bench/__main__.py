"""Speed of training and inference against other models: `python -m train.bench`.

Every comparison is a process of its own, in which the models alternate; the results are ratios
within a turn, because absolute times depend on the machine. Padding tokens are not counted.
"""

import inspect
import json
import time
from collections.abc import Callable, Mapping
from dataclasses import asdict
from pathlib import Path
from typing import Any

import pandas as pd
import torch
from accelerate import Accelerator

from train.bench.parts import PARTS
from train.bench.timing import Benchmark, BenchSettings, cells
from train.command_line import run_command
from train.environment import collect_environment, git_commit
from train.settings import require
from train.tables import markdown_table


def main(settings: BenchSettings) -> None:
    """Run the parts in their order; write numbers and tables after each.

    Raises:
        InputError: A setting is wrong.
    """
    parts, output = select_parts(settings), Path(settings.output)
    benchmark = Benchmark(settings)
    page = json.loads(output.read_text()) if output.exists() else {}
    # other parts in the file are kept: a part can be measured alone
    measured = {name: x for name, x in page.get("parts", {}).items() if name not in parts}
    earlier = [row for row in page.get("rows", []) if row["part"] in measured]
    page = collect_environment(Accelerator(cpu=settings.device == "cpu"))
    page |= {"settings": asdict(settings)}
    page["peak_tflops"] = {
        "bf16" if bf16 else "fp32": flops / 1e12 for bf16, flops in benchmark.peak_flops.items()
    }
    for name, run_part in parts.items():
        started, benchmark.part = time.monotonic(), name
        caption = " ".join(inspect.cleandoc(run_part.__doc__ or "").split())
        print(f"== {name}: {caption}", flush=True)
        run_part(benchmark)
        seconds = round(time.monotonic() - started, 1)
        measured[name] = {"caption": caption, "seconds": seconds, "commit": git_commit()}
        page |= {"parts": measured, "rows": earlier + benchmark.rows}
        output.parent.mkdir(parents=True, exist_ok=True)
        output.write_text(json.dumps(page, indent=1) + "\n")
        output.with_suffix(".md").write_text(markdown_page(page))
    with_target = [row for row in benchmark.rows if row["asked"]]
    reached = sum(row["reached"] for row in with_target)
    print(f"== {reached} of {len(with_target)} targets reached")
    for row in with_target:
        print(" | ".join(cells(row)))


def select_parts(settings: BenchSettings) -> dict[str, Callable[[Benchmark], None]]:
    """Return the chosen parts of the device in the order in which they must run.

    Raises:
        InputError: The device or a part cannot be used.
    """
    usable = {"cpu"} | ({"cuda"} if torch.cuda.is_available() else set())
    rule = "must be cpu, or cuda if available"
    require(settings.device in usable, "device", rule, settings.device, "use cpu")
    parts = PARTS[settings.device]
    unknown = [part for part in settings.parts if part not in parts]
    rule = f"must be of {', '.join(parts)}"
    require(not unknown, "parts", rule, ", ".join(unknown), "leave it out for all")
    return {name: x for name, x in parts.items() if not settings.parts or name in settings.parts}


def markdown_page(page: Mapping[str, Any]) -> str:
    """Format the contents of the JSON file as a table with a caption for each part."""
    settings = page["settings"]
    keys = ("machine", "threads", "torch", "transformers")
    lines = [
        "# Speed\n",
        f"`python -m train.bench --device {settings['device']}`: "
        f"{', '.join(f'{key} {page[key]}' for key in keys)}; "
        f"medians of {settings['rounds']} turns. Ratios are between models that alternate in one "
        "process, a new one for each case; other machines, thread counts and memory allocators "
        "give others.\n",
    ]
    header = ["case", "model", "measured (range)", "target"]
    for part, about in page["parts"].items():
        rows = [cells(row) for row in page["rows"] if row["part"] == part]
        table = markdown_table(pd.DataFrame(rows, columns=header))
        measured = f"Measured in {about['seconds']:.0f} s at commit {about['commit']}."
        lines += [f"## {part}\n", f"{about['caption']} {measured}\n", f"{table}\n"]
    return "\n".join(lines)


if __name__ == "__main__":
    run_command(main, BenchSettings)
