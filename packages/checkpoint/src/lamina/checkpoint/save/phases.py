"""How far each rank is in a save, and words for a save that waits: in which phase, for which rank.

torch.distributed.checkpoint exchanges plans and results by collectives of its own, which cannot say
what they wait for. So each rank leaves word of the phase that it has come to, over the store of the
watchdog, and a rank that waits for long reads what the others have left.
"""

import enum
import threading
import warnings
import zlib
from collections.abc import Callable, Iterator
from contextlib import contextmanager, suppress

import torch.distributed as dist

from lamina.mesh.engine import running_watchdog

_LIMIT = 30.0  # seconds without progress after which a save is told of
_SPEAKERS = 4  # ranks that tell: the first one, and later the next ones, as the first may be stuck


class Phase(enum.IntEnum):
    """How far a rank is in a save."""

    BEGUN = 0
    PLANNED = 1
    WRITING = 2
    WRITTEN = 3
    ENDED = 4


_WORDS = {
    Phase.BEGUN: "is being planned on this rank",
    Phase.PLANNED: "waits for the plan of",
    Phase.WRITING: "is being written by this rank",
    Phase.WRITTEN: "waits for what is written by",
    Phase.ENDED: "has ended",
}
_ALL_CAME = {
    Phase.PLANNED: "waits for the first rank, which makes the directory",
    Phase.WRITTEN: "waits for the first rank, which commits",
}


class Phases:
    """Follows the saves of one manager.

    The ranks of the group save together, and no other manager uses it at that time; all of them
    make this before any of them saves. `directory` is that of the checkpoints.
    """

    def __init__(self, group: dist.ProcessGroup | None, directory: str) -> None:
        self._ranks = [0] if group is None else dist.get_process_group_ranks(group)
        self._rank = 0 if group is None else group.rank()
        description = "" if group is None else group.group_desc
        self._topic = f"save/{zlib.crc32(directory.encode()):08x}/{description}"
        self._watchdog = running_watchdog() if len(self._ranks) > 1 else None
        self._saves = self._step = 0
        self.reach(Phase.ENDED)  # an earlier manager of this directory has left its own count

    def reach(self, phase: Phase) -> None:
        """This rank has come to a phase of its save."""
        self._phase = phase
        if self._watchdog is not None:
            self._watchdog.say(self._topic, f"{self._saves} {phase.value}")

    def words(self) -> str:
        """What the save does, or waits for."""
        save, phase = f"the save of step {self._step}", self._phase
        if phase not in _ALL_CAME or self._watchdog is None:
            whose = " another rank" if phase in _ALL_CAME else ""
            return f"{save} {_WORDS[phase]}{whose}"
        texts = self._watchdog.said(self._topic, self._ranks)
        came = {rank: tuple(map(int, text.split())) for rank, text in texts.items()}
        mine = self._saves, phase.value
        # What this rank has said may not have come to the store yet.
        others = (rank for number, rank in enumerate(self._ranks) if number != self._rank)
        behind = [rank for rank in others if came.get(rank, (0, 0)) < mine]
        if not behind:
            first = f"rank {self._ranks[0]}" if self._rank else "this one"
            return f"{save} {_ALL_CAME[phase]} ({first})"
        shown = ", ".join(map(str, behind[:8])) + (", ..." if len(behind) > 8 else "")
        return f"{save} {_WORDS[phase]} rank{'s'[: len(behind) > 1]} {shown}"

    @contextmanager
    def watched(self, step: int, idle: Callable[[], float]) -> Iterator[None]:
        """Follow a save to its commit, and warn if it waits for long.

        `idle` gives the seconds since the save made progress.
        """
        self._saves, self._step = self._saves + 1, step
        self._phase, end = Phase.BEGUN, threading.Event()
        args = end, _LIMIT * (1 + self._rank), idle
        thread = threading.Thread(target=self._complain, args=args, name="save-watch", daemon=True)
        if self._watchdog is not None and self._rank < _SPEAKERS:
            # A program that has ended may start no thread any more, and its save goes on.
            with suppress(RuntimeError):
                thread.start()
        try:
            yield
        finally:
            end.set()
            self.reach(Phase.ENDED)

    def _complain(self, end: threading.Event, limit: float, idle: Callable[[], float]) -> None:
        after = limit
        while not end.wait(min(1.0, limit / 4)):
            waited = idle()
            after = limit if waited < limit else after
            if waited > after:
                after = 2 * waited
                warnings.warn(f"for {waited:.0f} s {self.words()}", stacklevel=2)
