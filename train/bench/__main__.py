"""Speed of training and inference against other models: `python -m train.bench`.

Every comparison is a process of its own, in which the models alternate; the results are ratios
within a turn, because absolute times depend on the machine. Padding tokens are not counted.
"""

import json
import time
from collections.abc import Mapping
from dataclasses import asdict
from pathlib import Path
from typing import Any

import pandas as pd
from accelerate import Accelerator

from train.bench.parts import PARTS, Benchmark, BenchSettings, cells
from train.command_line import run_command
from train.loop.launch import collect_environment
from train.settings import InputError
from train.tables import markdown_table


def main(settings: BenchSettings) -> None:
    """Run the parts in their order; write numbers and tables after each."""
    parts, output = PARTS[settings.device], Path(settings.output)
    unknown = [name for name in settings.parts if name not in parts]
    if unknown:
        raise InputError(
            f"parts must be of {', '.join(parts)}, got {', '.join(unknown)}; leave it out for all"
        )
    page = json.loads(output.read_text()) if output.exists() else {"parts": {}}
    environment = collect_environment(Accelerator(cpu=settings.device == "cpu"))
    for name in settings.parts or parts:
        benchmark, started = Benchmark(settings), time.monotonic()
        caption = parts[name].__doc__
        print(f"== {name}: {caption}", flush=True)
        parts[name](benchmark)
        seconds = round(time.monotonic() - started, 1)
        about = environment | {"settings": asdict(settings), "caption": caption, "seconds": seconds}
        page["parts"][name] = about | {"rows": benchmark.rows}
        output.parent.mkdir(parents=True, exist_ok=True)
        output.write_text(json.dumps(page, indent=1) + "\n")
        output.with_suffix(".md").write_text(markdown_page(page))


def markdown_page(page: Mapping[str, Any]) -> str:
    """Format the contents of the JSON file as a table with a caption for each part."""
    keys = ("machine", "threads", "torch", "transformers", "commit")
    lines = [
        "# Speed\n",
        "2 x is twice as fast. Ratios are between models that alternate in one process, a new one "
        "for each case; other machines, thread counts and memory allocators give others.\n",
    ]
    for name, part in page["parts"].items():
        rows = [cells(row) for row in part["rows"]]
        table = markdown_table(pd.DataFrame(rows, columns=["case", "model", "measured (range)"]))
        command = f"`python -m train.bench --device {part['settings']['device']} --parts [{name}]`"
        measured = f"{', '.join(f'{key} {part[key]}' for key in keys)}; {part['seconds']} s"
        measured = f"{command}: {measured}, medians of {part['settings']['rounds']} turns."
        lines += [f"## {name}\n", f"{part['caption']} {measured}\n", f"{table}\n"]
    return "\n".join(lines)


if __name__ == "__main__":
    run_command(main, BenchSettings)
