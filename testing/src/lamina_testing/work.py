"""Counts what Python executes, so that a test can limit the cost of a function without a clock."""

from __future__ import annotations

import sys
from collections.abc import Callable
from types import FrameType
from typing import Any, NamedTuple


class Executed(NamedTuple):
    """Python functions entered, and lines executed, by one thread."""

    calls: int
    lines: int


def executed_by(program: Callable[[], object]) -> Executed:
    """Run `program` and count the calls and lines of Python that it executes.

    Both counts are the same on a fast machine, a slow one and a loaded one. Work inside functions
    written in C counts as nothing; work on other threads is not seen. Python versions differ by a
    few per cent, so a limit should leave that much room.
    """
    calls = lines = 0

    def trace(frame: FrameType, event: str, argument: object) -> Any:
        nonlocal calls, lines
        calls += event == "call"
        lines += event == "line"
        return trace

    before = sys.gettrace()
    sys.settrace(trace)
    try:
        program()
    finally:
        sys.settrace(before)
    return Executed(calls, lines)
