"""What a state holds beside tensors, on this rank and put together from all ranks.

The first rank's values are what is stored, with two additions that other ranks contribute: what
each rank has for itself (`PerRank`), and names. Where pipeline stages hold different layers, no
rank knows all names of the model; the coordinator joins what the ranks know.
"""

from __future__ import annotations

import json
import zlib
from collections.abc import Mapping
from typing import Any

from lamina.checkpoint.values import Json

RANKS = "$ranks"


class Trees:
    """This rank's values that are no tensors.

    Args:
        shared: entry -> JSON of what should be the same on all ranks.
        joined: entries of modules and optimizers, whose names are joined over ranks.
        own: entry -> JSON that belongs to this rank.

    """

    def __init__(
        self, shared: Mapping[str, Json], joined: frozenset[str], own: Mapping[str, Json]
    ) -> None:
        self._shared, self._own = dict(shared), dict(own)
        self._joined = {entry: self._shared[entry] for entry in sorted(joined)}
        self.crc32 = zlib.crc32(json.dumps(self._joined, sort_keys=True).encode())

    def for_coordinator(self, differs: bool) -> bytes | None:
        """Return what the coordinator does not know: nothing, for most ranks of most states.

        Args:
            differs: the coordinator's `crc32` is another one than this rank's.

        """
        if not differs and not self._own:
            return None
        return json.dumps({"joined": self._joined if differs else {}, "own": self._own}).encode()

    def merged(self, of_ranks: list[bytes | None]) -> bytes:
        """Return the text of `values.json`.

        Args:
            of_ranks: by rank, what `for_coordinator` gave there.

        """
        merged = dict(self._shared)
        own: dict[str, list[Json]] = {entry: [] for entry in self._own}
        for text in of_ranks:
            parsed = {"joined": {}, "own": {}} if text is None else json.loads(text)
            for entry, tree in parsed["joined"].items():
                merged[entry] = _join(merged.get(entry), tree)
            for entry, values in own.items():
                values.append(parsed["own"].get(entry))
        merged.update({entry: {RANKS: values} for entry, values in own.items()})
        return json.dumps(merged, allow_nan=False).encode()


def _join(first: Any, other: Any) -> Any:
    """Join two trees: all keys of both, all names of both lists of names, else the first."""
    if first is None:
        return other
    if isinstance(first, dict) and isinstance(other, dict):
        keys = [*first, *(key for key in other if key not in first)]
        return {key: _join(first.get(key), other.get(key)) for key in keys}
    if isinstance(first, list) and isinstance(other, list):
        if all(isinstance(item, str) for item in (*first, *other)):
            known = set(first)
            return first + [item for item in other if item not in known]
        if len(first) == len(other):
            return [_join(a, b) for a, b in zip(first, other, strict=True)]
    return first
