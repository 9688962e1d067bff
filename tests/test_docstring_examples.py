"""Examples in the docstrings of the users' faces run, in a world of one rank.

An example sees torch, tempfile, and the names that users have of its layer and of those beneath.
"""

from __future__ import annotations

import doctest
import importlib
import inspect
import tempfile
import warnings

import pytest
import torch
import torch.distributed as dist
from tasks.bootstrap import LAYERS

from lamina.mesh import init_distributed

GIVEN = set(
    "AttentionContext Difference Handle MemoryPlan PipelineRunner Record ReduceHandle Role "
    "RoutingContext SaveReport RestoreReport ShardedModule UnitPlan WeightLink".split()
)
"""What users get from functions, and do not make."""

NOT_YET = {"TokenDispatcher", "from_huggingface", "register_pool"}
"""Names without an example. Take out what gets one; nothing is added."""


def names_of(layer: str) -> dict[str, object]:
    face = importlib.import_module(f"lamina.{layer}")
    return {name: getattr(face, name) for name in face.__all__}


def examples_of(value: object) -> list[doctest.Example]:
    return doctest.DocTestParser().get_examples(inspect.getdoc(value) or "")


def globals_of(layer: str) -> dict[str, object]:
    known: dict[str, object] = {"torch": torch, "tempfile": tempfile}
    beneath = LAYERS[: LAYERS.index(layer) + 1]
    return known | {name: value for each in beneath for name, value in names_of(each).items()}


@pytest.fixture(scope="module")
def alone():
    """A world of one, whose process groups the examples may use."""
    there = dist.is_initialized()
    runtime = init_distributed()
    yield
    if not there:
        runtime.close()


WITH = [
    pytest.param(layer, name, id=f"{layer}.{name}")
    for layer in LAYERS
    for name, value in names_of(layer).items()
    if examples_of(value)
]


@pytest.mark.parametrize(("layer", "name"), WITH)
def test_an_example_of_a_docstring_runs_and_gives_what_it_shows(layer, name, alone):
    examples = examples_of(names_of(layer)[name])
    case = doctest.DocTest(examples, globals_of(layer), name, None, 0, None)
    said: list[str] = []
    with warnings.catch_warnings():
        warnings.simplefilter("ignore", UserWarning)
        failed, _ = doctest.DocTestRunner().run(case, out=said.append)
    assert not failed, "".join(said)


def test_an_example_that_gives_something_else_fails(alone):
    wrong = doctest.DocTestParser().get_examples(">>> 1 + 1\n3\n")
    case = doctest.DocTest(wrong, {}, "", None, 0, "")
    assert doctest.DocTestRunner().run(case, out=str).failed == 1


@pytest.mark.parametrize("layer", LAYERS)
def test_what_users_call_has_an_example(layer):
    called = {
        name: value
        for name, value in names_of(layer).items()
        if inspect.isroutine(value) or (inspect.isclass(value) and is_made_by_users(value))
    }
    without = {name for name, value in called.items() if not examples_of(value)} - GIVEN
    assert without == NOT_YET & set(called)


def is_made_by_users(kind: type) -> bool:
    """Whether users make one: not errors, nor protocols and enums."""
    mro = {base.__name__ for base in kind.__mro__}
    return not mro & {"BaseException", "Protocol", "Enum", "ABC"}
