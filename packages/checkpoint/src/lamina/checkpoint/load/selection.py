"""What a restore takes of a checkpoint."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass
from fnmatch import fnmatchcase

__all__ = ["Selection", "matches"]


@dataclass(frozen=True)
class Selection:
    """What a restore takes of a checkpoint.

    Attributes:
        strict: names on one side only are an error; without it they are left alone.
        include: patterns of names (`fnmatch`; a name selects all beneath it); empty is all.
        exclude: patterns that are left alone.
        allow_cast: a tensor may be loaded into one of another dtype.
    """

    strict: bool = True
    include: tuple[str, ...] = ()
    exclude: tuple[str, ...] = ()
    allow_cast: bool = False

    def takes(self, name: str) -> bool:
        """Whether a tensor or entry is selected."""

        def among(patterns: Sequence[str]) -> bool:
            return any(matches(name, pattern) for pattern in patterns)

        return (not self.include or among(self.include)) and not among(self.exclude)


def matches(name: str, pattern: str) -> bool:
    """Whether a pattern selects a name: itself, or something above it."""
    return fnmatchcase(name, pattern) or name.startswith(f"{pattern}.")
