"""Compares what two recordings have queued: what is in one and not in the other, in words.

`OrderGraph` is what one run has queued, without what may differ from run to run: streams are
numbered by their first use, memory has no number, and nothing has a time. It has two parts:

- `order`: for each stream its collectives, its waits that order something, and the memory that it
  allocates and frees, as far as several streams touch it or the engine gives it back by itself. A
  wait names the stream that is waited for, and how many collectives had been queued when its event
  was recorded. So one wait that is missing does not change those behind it.
- `kernels`: how often each stream ran each operator, allocated and freed anything else. A GPU has
  other kernels than a CPU here (its optimizer takes many tensors at once, its sum is one of
  Triton's), so a difference in it says nothing about the order.
"""

from __future__ import annotations

import difflib
import re
from collections import Counter, defaultdict
from collections.abc import Iterator
from dataclasses import dataclass, field
from typing import Any

from lamina_testing.recording import COLLECTIVES, Entry, Recording

ALLOCATOR = "allocator for "


@dataclass
class OrderGraph:
    """What one run has queued, up to names.

    Attributes:
        order: stream -> what it was given, in order.
        kernels: (stream, what) -> how often, of all that is not in `order`.
    """

    order: dict[str, list[str]] = field(default_factory=lambda: defaultdict(list))
    kernels: Counter[tuple[str, str]] = field(default_factory=Counter)

    @classmethod
    def of(cls, recording: Recording) -> OrderGraph:
        """Return the graph of a recording."""
        graph, names = cls(), Names()
        for entry in recording.graph:
            stream, words = names.of(entry.stream), entry.words
            if entry.kind == "wait":
                awaited, _, rest = words.partition(" as of ")
                words = f"{names.of(awaited)} as of {rest}"
            what = f"{entry.kind}: {words}"
            if is_order(entry, recording):
                graph.order[stream].append(what)
            else:
                graph.kernels[stream, what] += 1
        return graph

    def as_json(self) -> dict[str, Any]:
        """Return what `from_json` reads."""
        kernels = [[*key, times] for key, times in sorted(self.kernels.items())]
        return {"order": self.order, "kernels": kernels}

    @classmethod
    def from_json(cls, values: dict[str, Any]) -> OrderGraph:
        """Return the graph that `as_json` has written."""
        kernels = {(stream, what): times for stream, what, times in values["kernels"]}
        return cls(values["order"], Counter(kernels))


class Names:
    """Numbers streams of a kind by their first use."""

    def __init__(self) -> None:
        self._known: dict[str, str] = {}

    def of(self, stream: str) -> str:
        """Return the name of a stream that any run would give it."""
        if stream.startswith(ALLOCATOR):
            return ALLOCATOR + self.of(stream.removeprefix(ALLOCATOR))
        if stream not in self._known:
            kind = stream
            if stream.startswith(COLLECTIVES):  # the last word is the group's own name
                kind = stream.rpartition(" ")[0]
            elif re.fullmatch(r"side \d+", stream):
                kind = "side"
            alike = sum(name.rpartition(" ")[0] == kind for name in self._known.values())
            self._known[stream] = stream if kind == stream else f"{kind} {alike + 1}"
        return self._known[stream]


def is_order(entry: Entry, recording: Recording) -> bool:
    """Whether an entry belongs to the order, and not to the kernels."""
    if entry.kind in ("alloc", "free"):
        shared = any(len(recording.users[memory]) > 1 for memory in entry.memory)
        return shared or entry.words.endswith("given back")
    return entry.kind in ("collective", "wait")


def differences(first: OrderGraph, second: OrderGraph, names: tuple[str, str]) -> list[str]:
    """Return what the order of one has and that of the other lacks, in words.

    Args:
        first: one graph.
        second: the other.
        names: what to call them.
    """
    found: list[str] = []
    for stream in sorted({*first.order, *second.order}):
        found += on_stream(stream, first.order.get(stream, []), second.order.get(stream, []), names)
    return found


def on_stream(
    stream: str, first: list[str], second: list[str], names: tuple[str, str]
) -> Iterator[str]:
    """Yield what one of two sequences has and the other lacks."""
    for what, i, j, k, m in difflib.SequenceMatcher(None, first, second, False).get_opcodes():
        if what == "equal":
            continue
        sides = (names[0], names[1], first, i, j), (names[1], names[0], second, k, m)
        for one, other, sequence, start, stop in sides:
            before = f"after {sequence[start - 1]}" if start else "at the beginning"
            for left in sequence[start:stop]:
                yield f"{stream}, {before}: {one} has {left}; {other} does not"


def other_kernels(first: OrderGraph, second: OrderGraph, names: tuple[str, str]) -> list[str]:
    """Return which operators ran more often in one of two runs, in words."""
    both = sorted({*first.kernels, *second.kernels})
    return [
        f"{stream}: {what}: {first.kernels[stream, what]} times on {names[0]}, "
        f"{second.kernels[stream, what]} on {names[1]}"
        for stream, what in both
        if first.kernels[stream, what] != second.kernels[stream, what]
    ]
