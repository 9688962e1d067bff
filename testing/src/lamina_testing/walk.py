"""Counts the Python functions that a program enters, by file, through a profile hook.

A hook sees each call of a Python function, each time a generator goes on, and (before Python 3.12,
which compiles them into the function around them) each list, dict and set comprehension. It
does not see calls of functions that are written in C.
"""

from __future__ import annotations

import contextlib
import functools
import gc
import importlib
import operator
import sys
import threading
from collections import Counter
from collections.abc import Callable, Iterator, Sequence
from dataclasses import dataclass, field
from pathlib import Path
from types import CodeType, FrameType
from typing import ClassVar, NamedTuple


@functools.cache
def path_in_lamina(file: str) -> str:
    """Return a source's path from its layer on, such as "fsdp/unit.py"; "" if it is no layer's.

    The directories are those that `import lamina` searches. The words in a path say nothing: a
    clone is called "lamina", and so its torch lies below a directory of this name too.
    """
    for place in importlib.import_module("lamina").__path__:
        if Path(file).is_relative_to(place):
            return Path(file).relative_to(place).as_posix()
    return ""


class Function(NamedTuple):
    """A function by its place in the source, as a stack trace would show it."""

    file: str
    line: int
    name: str


@dataclass
class Walk:
    """The `calls` of each function; those that came from another file are in `moves` too."""

    calls: Counter[Function] = field(default_factory=Counter)
    moves: Counter[Function] = field(default_factory=Counter)

    @property
    def files(self) -> list[str]:
        """The files that were entered, in the order of their names."""
        return sorted({function.file for function in self.calls})

    def within(self, belongs: Callable[[str], bool]) -> Walk:
        """Return the part of the walk that lies in the files for which `belongs(path)` holds."""
        parts = (
            Counter({function: n for function, n in counts.items() if belongs(function.file)})
            for counts in (self.calls, self.moves)
        )
        return Walk(*parts)


class Profile:
    """Watches this thread, and all threads that start while it is entered.

    Enter it before the program starts threads of its own: before Python 3.12 nothing can watch a
    thread that runs already. Threads that an earlier profile has watched go on with this one. What
    is entered is kept only inside `walk()`.

    Args:
        belongs: whether functions of the file with this path are to be seen.
    """

    _watching: ClassVar[Profile | None] = None

    def __init__(self, belongs: Callable[[str], bool]) -> None:
        self._belongs = functools.cache(belongs)
        self._entered: list[tuple[CodeType, CodeType | None]] | None = None

    def __enter__(self) -> Profile:
        Profile._watching = self
        threading.setprofile(self._see_for_all)
        sys.setprofile(self._see_for_all)
        return self

    def __exit__(self, *problem: object) -> None:
        sys.setprofile(None)
        threading.setprofile(None)
        Profile._watching = None

    @staticmethod
    def _see_for_all(frame: FrameType, event: str, arg: object) -> None:
        # A thread keeps what it has begun with, and threads of lanes are used again.
        if Profile._watching is not None:
            Profile._watching._see(frame, event, arg)

    def _see(self, frame: FrameType, event: str, arg: object) -> None:
        # Several threads come here. Appending to a list is atomic; counting would not be.
        if (
            event == "call"
            and self._entered is not None
            and self._belongs(frame.f_code.co_filename)
        ):
            self._entered.append((frame.f_code, frame.f_back.f_code if frame.f_back else None))

    @contextlib.contextmanager
    def walk(self) -> Iterator[Walk]:
        """Fill the walk that is yielded with what the block enters; it is complete at the end.

        The garbage collector is off inside, so that no finaliser of earlier objects is counted.
        """
        made = Walk()
        gc.collect()
        gc.disable()
        self._entered = []
        try:
            yield made
        finally:
            entered, self._entered = self._entered, None
            gc.enable()
        for code, caller in entered:
            name = getattr(code, "co_qualname", code.co_name)  # Python 3.10 has no qualified names
            function = Function(code.co_filename, code.co_firstlineno, name)
            made.calls[function] += 1
            if caller is not None and caller.co_filename != code.co_filename:
                made.moves[function] += 1


def least(walks: Sequence[Walk]) -> Walk:
    """Return the smallest count of each function over walks along the same way.

    Threads that wait for each other enter a few functions more or fewer each time; the smallest
    counts are those that repeat.
    """
    calls, moves = ([getattr(walk, name) for walk in walks] for name in ("calls", "moves"))
    return Walk(functools.reduce(operator.and_, calls), functools.reduce(operator.and_, moves))
