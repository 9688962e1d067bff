"""Reads pytest's `parametrize` marks, and makes marks that depend on the torch that is there."""

from __future__ import annotations

from importlib.metadata import version
from typing import Any

import pytest


def needs_torch(major: int, minor: int, reason: str) -> pytest.MarkDecorator:
    """Leave a test out with older versions of torch; `reason` says what they do otherwise."""
    older = tuple(map(int, version("torch").split(".")[:2])) < (major, minor)
    return pytest.mark.skipif(older, reason=f"torch before {major}.{minor}: {reason}")


def parametrization(mark: pytest.Mark) -> tuple[list[str], list[tuple[Any, ...]]]:
    """Split a `parametrize` mark into argument names and a tuple of values per case."""
    parameters = dict(zip(("argnames", "argvalues"), mark.args, strict=False)) | dict(mark.kwargs)
    names = parameters["argnames"]
    if isinstance(names, str):
        names = [name.strip() for name in names.split(",") if name.strip()]
    case_type = type(pytest.param(0))
    cases: list[tuple[Any, ...]] = []
    for case in parameters["argvalues"]:
        if isinstance(case, case_type):
            cases.append(tuple(case.values))
        else:
            cases.append((case,) if len(names) == 1 else tuple(case))
    return list(names), cases
