"""Reads pytest's `parametrize` marks."""

from __future__ import annotations

from typing import Any

import pytest


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
