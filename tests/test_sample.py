"""A sample of the tests: enough of them, of many modules, the same for a seed, and all in turn."""

from __future__ import annotations

import re
from pathlib import Path

from hypothesis import given
from hypothesis import strategies as st
from sample import PER_MODULE, early, sample

SIZES = st.lists(st.integers(1, 200), min_size=1, max_size=30)


def names_of(sizes):
    return [f"tests/test_{m}.py::test[{n}]" for m, size in enumerate(sizes) for n in range(size)]


@given(SIZES, st.integers(1, 500), st.text(max_size=8))
def test_a_sample_has_at_least_so_many_and_hardly_more(sizes, count, seed):
    names = names_of(sizes)
    chosen = sample(names, count, seed)
    assert chosen <= set(names)
    assert min(count, len(names)) <= len(chosen) < count + PER_MODULE
    assert chosen == sample(names[::-1], count, seed)


def test_modules_that_are_looked_at_have_as_many_tests_as_are_asked_for():
    """By a lower bound on what modules have: functions that are tests, parameters left out."""
    root = Path(__file__).resolve().parents[1]
    folders = tuple(root / name for name in ("packages", "testing", "tests", "examples"))
    for seed in map(str, range(20)):
        chosen = early(root, folders, 400, seed)
        functions = [re.findall(r"(?m)^ *def test_", path.read_text()) for path in chosen]
        assert sum(min(len(names), PER_MODULE) for names in functions) > 500


def test_a_sample_is_of_many_modules_and_every_test_has_its_turn():
    names = names_of([100] * 20)
    samples = [sample(names, 100, f"commit {n}") for n in range(150)]
    assert min(len({name.partition("::")[0] for name in each}) for each in samples) >= 4
    assert set.union(*samples) == set(names)
