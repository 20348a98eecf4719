"""Many runs in one process: `python -m finetune.grid --models '[a, b]' --tasks '[cola]'`.

Runs that have a line in the results are left out, so that the same command goes on after a stop.
"""

import sys
from dataclasses import asdict, fields
from itertools import product
from pathlib import Path

from accelerate import Accelerator

from finetune import glue
from finetune.results import read_results, result_key
from finetune.settings import GlueSettings, GridSettings, Recipe
from train.launch import run_command, start_accelerator
from train.settings import InputError


def main(settings: GridSettings) -> None:
    """Make every run that has no line in the results yet, and print a line for each.

    Raises:
        InputError: A run cannot be made (said before any is), or some failed (after the rest).
    """
    runs = {result_key(asdict(run)): run for run in all_runs(settings)}
    done = set()
    if Path(settings.output).is_file():
        done = {result_key(line) for line in read_results(settings.output)}
    missing = [run for key, run in runs.items() if key not in done]
    accelerator = start_accelerator()
    accelerator.print(f"{len(missing)} runs to make, {len(runs) - len(missing)} done already")
    failures = 0
    for number, run in enumerate(missing, 1):
        failures += not _make(run, f"{number}/{len(missing)}", accelerator)
    if failures:
        raise InputError(
            f"grid must finish every run, got {failures} of {len(missing)} that failed (above); "
            "mend them and start the same command again"
        )


def all_runs(settings: GridSettings) -> list[GlueSettings]:
    """Every combination, checked; all models meet a task before the next task begins.

    Raises:
        InputError: One of them cannot be run.
    """
    recipe = {field.name: getattr(settings, field.name) for field in fields(Recipe)}
    rates = settings.learning_rates or [settings.learning_rate]
    controls = (False, True) if settings.random_control else (False,)
    return [
        GlueSettings(
            **{**recipe, "learning_rate": rate},
            model=model,
            task=task,
            seed=seed,
            random_weights=control,
        )
        for seed, task, rate, model, control in product(
            settings.seeds, settings.tasks, rates, settings.models, controls
        )
    ]


def _make(run: GlueSettings, count: str, accelerator: Accelerator) -> bool:
    """Make one run; one that cannot be made is said and does not stop the others."""
    try:
        accelerator.print(f"[{count}] {glue.summary(glue.main(run, accelerator))}")
    except InputError as error:
        if accelerator.is_main_process:
            print(f"[{count}] {run.task} {run.model}: error: {error}", file=sys.stderr)
        return False
    finally:
        accelerator.free_memory()
    return True


if __name__ == "__main__":
    run_command(main, GridSettings)
