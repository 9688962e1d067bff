"""Which parameters somebody has written outside of an optimizer's step, by version counters.

Note [Writes on some ranks only]
    A replica stays one as long as all ranks write the same. A rank sees its own writes wherever the
    engine looks anyway, and notes them until the ranks compare them, in a message that is sent in
    any case: the digest at the end of a step's last backward. So a write that some ranks have not
    made is an error before the step that would follow. Where a rank holds a parameter whole, the
    values decide: a write that has left equal bits on all ranks (an average that one rank swaps in,
    evaluates and swaps back) is none. See docs/decisions/0426.
"""

from __future__ import annotations

from collections.abc import Sequence
from operator import attrgetter

import torch

__all__ = ["Writes"]

_VERSION = attrgetter("_version")


class Writes:
    """What was written to the parameters of one group.

    Args:
        mains: what the optimizer updates.
        computes: what modules compute with; the same objects where main weights are not apart.
    """

    def __init__(self, mains: Sequence[torch.Tensor], computes: Sequence[torch.Tensor]) -> None:
        self._mains, self._computes = mains, computes
        self._known = [*map(_VERSION, mains)]
        self._in_use: list[int] = []  # versions when modules began to hold compute parameters
        self._news: set[int] = set()
        self.uncompared: set[tuple[int, bool]] = set()
        """Which parameters this rank has written since ranks compared that: their indices, and
        whether it was the compute parameter, which each rank holds whole, and not the main one."""

    @property
    def count(self) -> int:
        """How often main parameters were written, as far as their version counters tell."""
        return sum(map(_VERSION, self._mains))

    def look(self, *, told: bool) -> None:
        """Note what was written since the last look.

        Args:
            told: whether whoever steps the main parameters says so (`forget`). Nobody can tell a
                step from another write otherwise.
        """
        now = [*map(_VERSION, self._mains)]
        if now != self._known:
            self._news.update(index for index, new in enumerate(now) if new != self._known[index])
            if told:
                self._note(now, self._known, whole=False)
            self._known = now
        if self._in_use and (now := [*map(_VERSION, self._computes)]) != self._in_use:
            self._note(now, self._in_use, whole=True)

    def news(self) -> list[int]:
        """Main parameters that a look has found written since this was asked last."""
        news, self._news = sorted(self._news), set()
        return news

    def forget(self) -> None:
        """What was written since the last look was a step, which all ranks install."""
        self._known, self._news = [*map(_VERSION, self._mains)], set()

    # -- modules hold compute parameters for a while ------------------------------------------

    @property
    def in_use(self) -> bool:
        """Whether modules hold the compute parameters, where these are others."""
        return bool(self._in_use)

    def begin_use(self) -> None:
        """Modules hold the compute parameters from now on."""
        self._in_use = [*map(_VERSION, self._computes)]

    def end_use(self) -> bool:
        """They do no more: whether modules have written to them meanwhile."""
        now, before = [*map(_VERSION, self._computes)], self._in_use
        self._in_use = []
        if now != before:
            self._note(now, before, whole=True)
        return now != before

    def _note(self, now: list[int], before: list[int], *, whole: bool) -> None:
        pairs = enumerate(zip(now, before, strict=True))
        self.uncompared.update((index, whole) for index, (new, old) in pairs if new != old)
