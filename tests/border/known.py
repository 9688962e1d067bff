"""Cells that are still wrong, in one place: why, and which.

A cell that has become right must leave the list. Until then the tests fail.
"""

from __future__ import annotations

from border.case import OURS

_WRONG: dict[str, dict[str, str]] = {
    "a write through `.data` of a plain main parameter leaves no trace, and no step follows it": {
        "one_model_follows_another": "0: bf16"
    },
}
"""Reason -> use -> "columns: dtypes; columns: dtypes", where * is all columns of ours."""


def _cells() -> dict[tuple[str, str, str], str]:
    found = {}
    for reason, uses in _WRONG.items():
        for use, text in uses.items():
            for part in text.split("; "):
                columns, _, dtypes = part.partition(": ")
                names = OURS if columns == "*" else columns.split()
                cells = [(use, c, d) for c in names for d in dtypes.split()]
                found.update(dict.fromkeys(cells, reason))
    return found


KNOWN = _cells()
"""(use, column, dtype) -> why it is still wrong."""
