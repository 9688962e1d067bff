"""Uses, and what is said of a cell: right, refused, different or crash."""

from __future__ import annotations

import re
import traceback
import warnings
from collections.abc import Callable
from dataclasses import dataclass
from typing import Any

import torch
from border.case import BF16, OURS, TORCH, Case
from torch import Tensor

from lamina_testing.walk import path_in_lamina

TOLERANCE = {"fp32": 1e-3, "bf16": 0.06}
"""Of a tensor's norm. What went wrong in silence was off by a tenth and more."""
BUGS = (AssertionError, KeyError, IndexError, NameError)
"""What an error that was meant for the user is not."""


@dataclass(frozen=True)
class Use:
    """One thing that a user does.

    Attributes:
        run: does it, and returns what is to be compared with one process of plain PyTorch.
        chapter: the part of the page that it is in.
        says: patterns that the first two lines of a refusal hold, ignoring case. Without any, the
            error has to come from Lamina's own code.
        refused: the use is wrong anywhere: an error is the only right answer.
        warns: a warning with these words is an answer as well.
        columns: where it applies.
        dtypes: in which it applies.
        slow: it compiles, or imports other libraries: only the whole product runs it.
    """

    run: Callable[[Case], dict[str, Any]]
    chapter: str
    says: tuple[str, ...]
    refused: bool
    warns: str
    columns: tuple[str, ...]
    dtypes: tuple[str, ...]
    slow: bool

    @property
    def name(self) -> str:
        return self.run.__name__

    @property
    def text(self) -> str:
        return " ".join((self.run.__doc__ or self.name).split()).rstrip(".")

    def cells(self, columns: tuple[str, ...] = OURS) -> list[tuple[str, str, str]]:
        """(use, column, dtype) of all cells that exist."""
        return [
            (self.name, column, dtype)
            for column in columns
            for dtype in self.dtypes
            if column in self.columns and (dtype == "fp32" or column in BF16)
        ]


USES: dict[str, Use] = {}


def use(
    chapter: str,
    *,
    says: tuple[str, ...] = (),
    refused: bool = False,
    warns: str = "",
    columns: tuple[str, ...] = (*OURS, *TORCH),
    dtypes: tuple[str, ...] = ("fp32", "bf16"),
    slow: bool = False,
) -> Callable[[Callable[[Case], dict[str, Any]]], Callable[[Case], dict[str, Any]]]:
    """Add a function to the table."""

    def add(run: Callable[[Case], dict[str, Any]]) -> Callable[[Case], dict[str, Any]]:
        if run.__name__ in USES:
            raise ValueError(f"two uses are called {run.__name__}")
        USES[run.__name__] = Use(run, chapter, says, refused, warns, columns, dtypes, slow)
        return run

    return add


def judge(chosen: Use, case: Case, oracle: Case) -> tuple[str, str]:
    """The verdict on one cell on this rank, and why."""
    expected = None
    if not chosen.refused:
        torch.manual_seed(0)
        expected = chosen.run(oracle)
    torch.manual_seed(0)
    try:
        with warnings.catch_warnings(record=True) as caught:
            warnings.simplefilter("always")
            found = chosen.run(case)
    except Exception as error:
        return _of_error(chosen, case, error)
    finally:
        torch._dynamo.reset()
    if chosen.warns and any(re.search(chosen.warns, str(w.message)) for w in caught):
        return "refused", "with a warning"
    if expected is None:
        return "different", "no error"
    difference = differs(expected, found, TOLERANCE[case.dtype])
    return ("different", difference) if difference else ("right", "")


def _of_error(chosen: Use, case: Case, error: Exception) -> tuple[str, str]:
    lines = [line for line in str(error).splitlines() if line.strip()]
    head = " ".join(lines[:2])
    detail = f"{type(error).__name__}: {head[:400]}"
    if case.column in TORCH:
        return "error", detail
    frames = traceback.extract_tb(error.__traceback__)
    detail += f" ({frames[-1].filename.rsplit('/', 2)[-1]}:{frames[-1].lineno})"
    if chosen.says:
        missing = [w for w in chosen.says if not re.search(w, head, re.IGNORECASE)]
        if not missing:
            return "refused", detail
        return "crash", f"{detail} [does not say {missing}]"
    own = path_in_lamina(frames[-1].filename)
    if own and not isinstance(error, BUGS) and len(head) > 40:
        return "refused", detail
    return "crash", detail


def differs(expected: dict[str, Any], found: dict[str, Any], tolerance: float) -> str:
    """The first difference; an empty string if there is none."""
    if expected.keys() != found.keys():
        odd = sorted(map(str, expected.keys() ^ found.keys()))
        return f"results differ: {', '.join(odd)[:200]}"
    tensors = {key: value for key, value in expected.items() if isinstance(value, Tensor)}
    sizes = [value.double().norm().item() for value in tensors.values()]
    floor = 0.02 * max(sizes, default=0.0)
    worst = ("", 0.0)
    for key, value in expected.items():
        other = found[key]
        if not isinstance(value, Tensor):
            if value != other:
                return f"{key} is {other!r}, and in one process {value!r}"
            continue
        if other.shape != value.shape:
            return f"{key} has shape {tuple(other.shape)}, and in one process {tuple(value.shape)}"
        off = (other.double() - value.double()).norm().item()
        relative = off / (value.double().norm().item() + floor + 1e-7)
        if not relative <= worst[1]:  # NaN too
            worst = (key, relative)
    if worst[1] <= tolerance:
        return ""
    return f"{worst[0]} is off by {worst[1]:.2g} of its size"
