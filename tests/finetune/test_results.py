"""Results files: appending, reading, and what identifies a run."""

import json
import resource
from dataclasses import asdict
from functools import partial

import numpy as np

from finetune import results
from finetune.results import append_result, prediction_file, read_results, run_key
from finetune.settings import GlueSettings
from tiny import refused, soft_limit

RUN = asdict(GlueSettings(model="m", task="rte", glue_dir="d")) | {"status": "done"}


def test_each_results_file_has_predictions_of_its_own():
    files = {prediction_file(f"out/{name}.jsonl", RUN, "x") for name in ("results", "one", "two")}
    folders = {str(file.parent.parent) for file in files}
    assert folders == {"out/predictions", "out/one-predictions", "out/two-predictions"}


def test_a_torn_line_is_cut_off_and_the_next_line_stands_alone(tmp_path, capsys):
    file = tmp_path / "results.jsonl"
    append_result(str(file), RUN)
    with file.open("a") as stream:
        stream.write(json.dumps({**RUN, "model": ["m"]}) + '\n{"step": 1}\n[]\n{"model": "x", "ta')
    before = file.read_bytes()
    assert read_results(str(file)) == [RUN]
    assert file.read_bytes() == before  # another grid may be writing
    assert capsys.readouterr().err.count("is torn at line 2, 3, 4, 5; ignored") == 1
    append_result(str(file), {**RUN, "seed": 1})
    assert [line["seed"] for line in read_results(str(file))] == [0, 1]
    assert file.read_text().count("\n") == 5
    assert capsys.readouterr().err.count("ended in a torn line") == 1


def test_a_line_that_the_disk_has_no_room_for_is_an_error_and_none_is_lost(tmp_path, capsys):
    """The kernel writes what fits of a line, and says so only by how much it wrote."""
    file = tmp_path / "results.jsonl"
    append_result(str(file), RUN)
    size = file.stat().st_size
    append = partial(append_result, str(file), {**RUN, "seed": 1})
    for room in (20, 0):  # a part of it fits, nothing does
        with soft_limit(resource.RLIMIT_FSIZE, size + room):
            refused(append, "output must have room, got ", f" in {tmp_path}; make some")
        assert [line["seed"] for line in read_results(str(file))] == [0]
        assert file.stat().st_size == size + room
    append()
    assert [line["seed"] for line in read_results(str(file))] == [0, 1]
    assert file.read_text().count("\n") == 2
    with soft_limit(resource.RLIMIT_FSIZE, 100):
        write = partial(results.write_predictions, file, np.zeros(9), np.zeros((9, 2)))
        refused(write, "output must have room")


def test_a_failure_with_other_weights_takes_the_place_of_the_score_of_the_old(tmp_path):
    file = str(tmp_path / "results.jsonl")
    for status, weights, left in (
        ("failed", "a", "failed"), ("done", "a", "done"), ("failed", "a", "done"),
        ("failed", "b", "failed"), ("done", "b", "done"), ("failed", None, "done"),
    ):  # fmt: skip
        append_result(file, {**RUN, "status": status, "weights": weights})
        assert [line["status"] for line in read_results(file)] == [left]
    for error in ("old", "new"):
        append_result(file, {**RUN, "seed": 1, "status": "failed", "error": error})
    assert read_results(file)[-1]["error"] == "new"


def test_what_tells_runs_apart_is_the_protocol_and_not_where_things_are():
    others = {"output", "cache", "test", "attention", "micro_batch_tokens", "save", "status"}
    for name in RUN:
        assert (run_key({**RUN, name: "other"}) == run_key(RUN)) == (name in others), name
