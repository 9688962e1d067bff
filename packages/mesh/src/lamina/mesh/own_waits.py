"""What this rank waits for: in Lamina's collectives, in torch's own, in the making of a group."""

from __future__ import annotations

import contextlib
import os
import sys
import threading
import time
import traceback
from collections.abc import Callable, Iterator, Sequence
from dataclasses import dataclass, replace
from pathlib import Path
from types import FrameType

import torch
import torch.distributed as dist
from torch.distributed import distributed_c10d as c10d

__all__ = ["Activity", "OwnWaits", "Wait"]

_SLOW_NETWORK = 10e6  # bytes per second
_POINT_TO_POINT = ("send", "recv", "send_object_list", "recv_object_list", "batch_isend_irecv")
"""Functions of torch's in which a rank waits for one other, and not for a group."""
# Files that are not the user's program. The user's own directory may be called "lamina" or "torch",
# so words in a path say nothing.
_FOREIGN = (
    *(os.path.join(place, "") for place in sys.modules["lamina"].__path__),
    os.path.join(os.path.dirname(torch.__file__), ""),
    threading.__file__,
)


@dataclass(frozen=True)
class Wait:
    """A collective that has begun on a rank and not ended there.

    Attributes:
        what: its operation, and the unit or bucket it is for.
        group: the group's description, such as "dp_shard:gather".
        number: how many collectives this rank has begun in that group, this one included; 0 while
            the group is made.
        seconds: since when it waits.
        ranks: the group's members.
    """

    what: str
    group: str
    number: int
    seconds: float
    ranks: tuple[int, ...] = ()

    def __str__(self) -> str:
        which = f"collective {self.number} of " if self.number else ""
        return f"{self.what} ({which}{self.group})"


@dataclass(frozen=True)
class Activity:
    """What a rank does in collectives: those that have not ended, and the last ones in words."""

    waits: Sequence[Wait] = ()
    recent: Sequence[str] = ()
    idle: float = 0.0
    """Seconds since the last collective was issued."""


class OwnWaits:
    """Knows what this rank waits for. `source` says what it does in Lamina's collectives."""

    def __init__(self) -> None:
        self.source: Callable[[], Activity] = Activity
        self._making: tuple[str, tuple[int, ...], float] | None = None
        self._main = threading.main_thread().ident
        self._spot: tuple[object, float] = (None, 0.0)

    @contextlib.contextmanager
    def making(self, group: str, ranks: tuple[int, ...]) -> Iterator[None]:
        """The body makes a process group, and waits for its members."""
        self._making = group, ranks, time.monotonic()
        try:
            yield
        finally:
            self._making = None

    def activity(self) -> Activity:
        """What this rank does in collectives, the making of a group and torch's own included."""
        activity, now = self.source(), time.monotonic()
        if (making := self._making) is not None:
            group, ranks, since = making
            wait: Wait | None = Wait("the making of a group", group, 0, now - since, ranks)
        else:
            wait = None if activity.waits else self.in_torch()
        return activity if wait is None else replace(activity, waits=[wait, *activity.waits])

    def longest(self) -> float:
        """Seconds of the longest wait."""
        return max((wait.seconds for wait in self.activity().waits), default=0.0)

    def main_thread(self) -> tuple[FrameType | None, float]:
        """Where the main thread is, and since when it was seen there at each look."""
        # At the same instruction of the same frame at two looks, it is taken not to have moved.
        frame = sys._current_frames().get(self._main or 0)
        spot = None if frame is None else (id(frame), frame.f_lasti)
        if spot != self._spot[0]:
            self._spot = spot, time.monotonic()
        return frame, self._spot[1]

    def stuck_since(self) -> tuple[FrameType, float] | None:
        """Where the main thread is in code of others, and since when; None where it is not."""
        frame, since = self.main_thread()
        inside = frame is not None and frame.f_code.co_filename.startswith(_FOREIGN)
        return (frame, since) if frame is not None and inside else None

    def program_line(self) -> tuple[str, list[str]]:
        """The line of the user's program that the main thread has come to, and its stack."""
        frame, _ = self.main_thread()
        stack = [] if frame is None else traceback.extract_stack(frame)
        own = [line for line in stack if not line.filename.startswith(_FOREIGN)] or stack
        at = f"{Path(own[-1].filename).name}:{own[-1].lineno} in {own[-1].name}" if own else "?"
        return at, traceback.format_list(stack)

    def in_torch(self) -> Wait | None:
        """The collective of torch's own that the main thread waits in, where that is to be seen.

        Torch tells nobody of these, but its function stands on the stack, with its group and its
        tensors. A wait for a handle (`work.wait()`) has no such function.

        Note [Who has left a broadcast]
        The source of a broadcast may have gone on while others still receive. So a wait counts
        from when the bytes would have come on a slow network.
        """
        (frame, since), call = self.main_thread(), None
        while frame is not None and frame.f_code.co_filename.startswith(_FOREIGN):
            if frame.f_code.co_filename == c10d.__file__ and "group" in frame.f_code.co_varnames:
                call = frame  # the outermost one is what the program has called
            frame = frame.f_back
        if call is None or call.f_code.co_name in _POINT_TO_POINT or not dist.is_initialized():
            return None
        group = call.f_locals.get("group") or dist.group.WORLD
        if not isinstance(group, dist.ProcessGroup):
            return None
        members, nbytes = tuple(dist.get_process_group_ranks(group)), 0
        for each in call.f_locals.values():
            values = each if isinstance(each, list) else [each]
            nbytes += sum(value.nbytes for value in values if isinstance(value, torch.Tensor))
        transfer = nbytes * len(members) / _SLOW_NETWORK
        seconds = time.monotonic() - since - transfer
        what = f"torch's {call.f_code.co_name}"
        return Wait(what, str(group.group_desc), 0, seconds, members) if seconds > 0 else None
