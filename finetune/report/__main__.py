"""`python -m finetune.report results.jsonl`: see `finetune.report.report`."""

import sys

from finetune.report.report import ReportSettings, main
from train.command_line import run_command

if __name__ == "__main__":
    flags = sys.argv[1:]
    is_path = flags and not flags[0].startswith("-")
    run_command(main, ReportSettings, ["--results", *flags] if is_path else flags)
