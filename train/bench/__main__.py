"""`python -m train.bench`: see `train.bench.speed`."""

from train.bench.speed import BenchSettings, main
from train.loop.launch import run_command

if __name__ == "__main__":
    run_command(main, BenchSettings)
