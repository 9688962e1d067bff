"""What `-s lines` counts, and that no class of the engine grows beyond what a reader can hold."""

from __future__ import annotations

import pytest
from tasks.lines import ENGINE, count, count_layer

# Each is to be cut up, and then leaves this list.
LARGE = {
    "DistributedDataParallel",
    "DistributedDataParallelConfig",
    "GradientReducer",
    "ParameterGroup",
    "ShardingEngine",
    "ShardingSettings",
    "StoragePool",
}

SOURCE = '''"""A docstring
of two lines."""

import math  # not inside a function

# A comment.
LONG = """a string
that is a value"""


class Small:
    """Documented."""

    size: int = 3
    """So is this."""

    def area(self) -> float:
        """So is this."""
        # Why.
        self.side = 2.0

        return self.side * self.size  # at the end of a line
'''


def test_comments_and_docstrings_are_free():
    found = count(SOURCE)
    assert (found.code, found.bodies, found.comments) == (8, 2, 2)
    assert found.per_hundred == 100
    assert found.large == []


@pytest.mark.parametrize(
    ("attributes", "methods", "large"),
    [(15, 25, []), (16, 25, [("Big", 16, 25)]), (15, 26, [("Big", 15, 26)])],
)
def test_a_class_is_large_by_attributes_or_methods(attributes, methods, large):
    stored = "".join(f"        self.a{at} = self.a{at} = 0\n" for at in range(attributes))
    others = "".join(f"    def f{at}(self):\n        self.x.y = 1\n" for at in range(methods - 1))
    assert count(f"class Big:\n    def __init__(self):\n{stored}{others}").large == large


def test_settings_without_methods_are_not_large():
    fields = "".join(f"    a{at}: int = 0\n" for at in range(40))
    assert count(f"class Settings:\n{fields}").large == []


def test_no_further_class_of_the_engine_is_large():
    files = [found for layer in ENGINE for found in count_layer(layer).values()]
    assert {name for found in files for name, _, _ in found.large} <= LARGE
