"""Pretrain a grid of variants and seeds, several runs at a time.

    python -m train.sweep --config configs/sweeps/encodings-small.yaml --text '[wikipedia]'

Every run is a subprocess `accelerate launch --quiet train/pretrain.py ...`, named VARIANT-SEED.
Finished runs are skipped and interrupted ones continue: the same command can be repeated at any
time.
"""

import os
import shlex
import signal
import subprocess
import sys
import time
from concurrent.futures import ThreadPoolExecutor
from dataclasses import dataclass, field
from pathlib import Path

import torch

from train.atomic_dir import check_writable
from train.command_line import parse_settings, run_command
from train.settings import InputError, PretrainSettings, require


@dataclass(frozen=True)
class SweepSettings:
    """Pretrain a grid of variants and seeds."""

    pretrain: str
    """YAML of pretraining settings that all runs share."""
    variants: dict[str, str]
    """Name of each variant and its further flags of train/pretrain.py, as on a command line."""
    folder: str
    """Folder of the runs; output of a run goes to FOLDER/VARIANT-SEED.log."""
    text: list[str]
    """Folders with train* and validation* files (validation* is read from the first), or
    [embedded]: the documentation installed on this machine."""
    seeds: list[int] = field(default_factory=lambda: [0])
    """Values of run.seed."""
    workers: int = 1
    """Runs at the same time; they share the threads of the processor."""
    accelerate: str = "configs/accelerate/cpu.yaml"
    """YAML for `accelerate launch`."""
    dry: bool = False
    """Print the commands and start nothing."""

    def __post_init__(self) -> None:
        require(self.workers >= 1, "workers", "must be at least 1", self.workers, "use 2")
        require(len(self.text) > 0, "text", "must name a folder", "none", "use [embedded]")


def text_flags(folders: list[str]) -> list[str]:
    """Return the flags `--corpus.train` and `--corpus.validation` for folders of text.

    Raises:
        InputError: A folder has no train* file, or the first one no validation* file.
    """
    if folders == ["embedded"]:
        return ["--corpus.train", "embedded", "--corpus.validation", "embedded"]
    flags = []
    for part, searched in (("train", folders), ("validation", folders[:1])):
        files = []
        for folder in searched:
            matches = sorted(map(str, Path(folder).glob(f"{part}*")))
            require(len(matches) > 0, "text", f"must hold {part}* files", folder, "add them")
            files += matches
        flags += [f"--corpus.{part}", f"[{','.join(files)}]"]
    return flags


def pretrain_commands(settings: SweepSettings) -> dict[str, list[str]]:
    """Return the command of every run by its name, all variants of a seed before the next seed.

    Raises:
        InputError: `train/pretrain.py` would refuse the settings of a run.
    """
    launcher = [sys.executable, "-m", "accelerate.commands.launch", "--quiet"]
    launcher += ["--config_file", settings.accelerate, str(Path(__file__).parent / "pretrain.py")]
    shared, corpus = ["--config", settings.pretrain], text_flags(settings.text)
    commands = {}
    for seed in settings.seeds:
        for variant, flags in settings.variants.items():
            name = f"{variant}-{seed}"
            run = ["--run.folder", settings.folder, "--run.name", name, "--run.seed", str(seed)]
            settings_flags = [*shared, *shlex.split(flags), *run, *corpus]
            parse_settings(PretrainSettings, settings_flags)
            commands[name] = [*launcher, *settings_flags]
    return commands


def is_finished(run: Path) -> bool:
    """Whether a run has saved its final model, tokenizer included."""
    return (run / "model" / "tokenizer_config.json").is_file()


def run_commands(commands: dict[str, list[str]], folder: Path, workers: int) -> list[bool]:
    """Run the command of every run as a subprocess, `workers` at a time, and report each.

    Returns:
        Whether each run finished.

    Raises:
        InputError: SIGINT or SIGTERM, which is passed on: the runs save a checkpoint.
    """
    env = os.environ | {"OMP_NUM_THREADS": str(max(1, torch.get_num_threads() // workers))}
    processes = []

    def run(name: str) -> bool:
        log, started = folder / f"{name}.log", time.monotonic()
        print(f"{name}: started, output in {log}", flush=True)
        with log.open("a") as output:
            process = subprocess.Popen(commands[name], stdout=output, stderr=output, env=env)
            processes.append(process)
            finished = process.wait() == 0 and is_finished(folder / name)
        outcome = "finished" if finished else f"not finished (exit code {process.returncode})"
        print(f"{name}: {outcome}, {(time.monotonic() - started) / 60:.1f} min", flush=True)
        return finished

    signal.signal(signal.SIGTERM, signal.default_int_handler)
    with ThreadPoolExecutor(workers) as pool:
        try:
            return list(pool.map(run, commands))
        except KeyboardInterrupt:
            pool.shutdown(wait=False, cancel_futures=True)
            for process in processes:
                process.terminate()
            message = "sweep must run to its end, got an interrupt; the same command continues"
            raise InputError(message) from None


def main(settings: SweepSettings) -> None:
    """Run every run that is not finished.

    Raises:
        InputError: Some did not finish; the others did.
    """
    commands, folder = pretrain_commands(settings), Path(settings.folder)
    missing = {name: x for name, x in commands.items() if not is_finished(folder / name)}
    print(f"{len(missing)} of {len(commands)} runs to make in {folder}", flush=True)
    if settings.dry:
        print("\n".join(shlex.join(command) for command in missing.values()))
        return
    check_writable(folder, "folder")
    folder.mkdir(parents=True, exist_ok=True)
    failures = run_commands(missing, folder, settings.workers).count(False)
    remedy = f"see {folder}/NAME.log, then start the same command again"
    require(failures == 0, "sweep", "must finish every run", f"{failures} that did not", remedy)


if __name__ == "__main__":
    run_command(main, SweepSettings)
