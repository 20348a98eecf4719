"""The benchmark: turns are interleaved and the first round does not count."""

import pytest

from train.bench import BenchSettings, main, measure
from train.settings import InputError


def test_peers_take_turns_and_the_first_round_is_dropped():
    calls = []
    steps = {name: lambda name=name: calls.append(name) for name in ("a", "b")}
    seconds = measure(steps, 3)
    assert calls == ["a", "b"] * 4
    assert [len(values) for values in seconds.values()] == [3, 3]


def test_an_unknown_size_is_refused():
    with pytest.raises(InputError, match="size must be one of small, base, got huge; take small"):
        main(BenchSettings(size="huge"))
