"""`python -m train.bench`: see `train.bench.speed`."""

from train.bench.speed import main
from train.bench.timing import BenchSettings
from train.command_line import run_command

if __name__ == "__main__":
    run_command(main, BenchSettings)
