"""A state's values that are no tensors: this rank's, and those of all ranks merged.

The first rank's values are what is stored, with two additions that other ranks contribute: what
each rank has for itself (`PerRank`), and names. Where pipeline stages hold different layers, no
rank knows all names of the model; the coordinator joins what the ranks know.
"""

import json
import zlib
from collections.abc import Iterator, Mapping
from typing import Any

from lamina.checkpoint.errors import CheckpointError
from lamina.checkpoint.state.json_values import PAIRS, Json, decode

__all__ = ["RANKS", "RankValues", "names_in"]

RANKS = "$ranks"


class RankValues:
    """This rank's values that are no tensors: those shared by all ranks, and its own, by entry.

    `joined` are entries of modules and optimizers, whose names are joined over ranks.
    """

    def __init__(
        self, shared: Mapping[str, Json], joined: frozenset[str], own: Mapping[str, Json]
    ) -> None:
        self._shared, self._own = dict(shared), dict(own)
        self._joined = {entry: self._shared[entry] for entry in sorted(joined)}
        self.crc32 = zlib.crc32(json.dumps(self._joined, sort_keys=True).encode())

    def for_coordinator(self, differs: bool) -> bytes | None:
        """Return what the coordinator does not know: nothing, for most ranks of most states.

        `differs` says that the coordinator's `crc32` is another one than this rank's.
        """
        if not differs and not self._own:
            return None
        return json.dumps({"joined": self._joined if differs else {}, "own": self._own}).encode()

    def merged(self, of_ranks: list[bytes | None]) -> bytes:
        """Return the text of `values.json`, given what `for_coordinator` gave on each rank.

        CheckpointError says that an optimizer's groups differ between ranks.
        """
        merged = dict(self._shared)
        own: dict[str, list[Json]] = {entry: [] for entry in self._own}
        for rank, text in enumerate(of_ranks):
            parsed = {"joined": {}, "own": {}} if text is None else json.loads(text)
            for entry, tree in parsed["joined"].items():
                _check_groups(entry, rank, merged[entry], tree)
                merged[entry] = _join(merged.get(entry), tree)
            for entry, values in own.items():
                values.append(parsed["own"].get(entry))
        merged.update({entry: {RANKS: values} for entry, values in own.items()})
        return json.dumps(merged, allow_nan=False).encode()


def _check_groups(entry: str, rank: int, first: Any, other: Any) -> None:
    """Refuse hyperparameters that differ: only the first rank's would be stored, for all ranks."""
    if not isinstance(first, dict) or not isinstance(first.get("param_groups"), list):
        return
    groups = first["param_groups"], other.get("param_groups", [])
    remedy = (
        "one rank's are stored for all: give every rank the same groups in the same order, with "
        "an empty one where a pipeline stage has none of its parameters"
    )
    if len(groups[0]) != len(groups[1]):
        raise CheckpointError(
            f"'{entry}' has {len(groups[0])} parameter groups on rank 0 and {len(groups[1])} on "
            f"rank {rank}; {remedy}"
        )
    for number, (one, two) in enumerate(zip(*groups, strict=True)):
        for key in sorted({*one, *two} - {"params"}):
            if one.get(key) != two.get(key):
                raise CheckpointError(
                    f"'{entry}' has {key}={one.get(key)} in parameter group {number} on rank 0 and "
                    f"{two.get(key)} on rank {rank}; {remedy}"
                )


def _join(first: Any, other: Any) -> Any:
    """Join two trees: all keys of both, all names of both lists of names, else the first."""
    if first is None:
        return other
    if isinstance(first, dict) and isinstance(other, dict):
        return _join_mappings(first, other)
    if isinstance(first, list) and isinstance(other, list):
        if all(isinstance(item, str) for item in (*first, *other)):
            known = set(first)
            return first + [item for item in other if item not in known]
        if len(first) == len(other):
            return [_join(a, b) for a, b in zip(first, other, strict=True)]
    return first


def _join_mappings(first: dict[str, Any], other: dict[str, Any]) -> dict[str, Any]:
    """Join by keys what are mappings of one class; of anything else the first is stored."""
    (tag, pairs), (other_tag, other_pairs) = _pairs(first), _pairs(other)
    if tag != other_tag or tag not in PAIRS:
        return first
    left = {json.dumps(key): item for key, item in other_pairs}
    joined = [[key, _join(item, left.pop(json.dumps(key), None))] for key, item in pairs]
    joined += [[json.loads(key), item] for key, item in left.items()]
    plain = tag not in first and tag not in other
    return dict(joined) if plain else {tag: joined}


def _pairs(tree: dict[str, Any]) -> tuple[str, Any]:
    """Return the tag of an object in `values.json`, and what stands under it."""
    tag = next(iter(tree), "")
    return (tag, tree[tag]) if tag.startswith("$") else ("$dict", list(tree.items()))


def names_in(tree: Any, path: str) -> Iterator[str]:
    """Yield the name of every place in a tree of `values.json`, `path` of the tree itself first."""
    yield path
    children: list[tuple[str, Any]] = []
    if isinstance(tree, list):
        children = [(str(number), item) for number, item in enumerate(tree)]
    elif isinstance(tree, dict) and (pairs := next((tree[t] for t in PAIRS if t in tree), None)):
        children = [(str(decode(key, str)), item) for key, item in pairs]
    elif isinstance(tree, dict):
        children = [(key, item) for key, item in tree.items() if not key.startswith("$")]
        for tag in ("$tuple", "$set", "$frozenset"):
            yield from list(names_in(tree.get(tag), path))[1:]
    for key, item in children:
        yield from names_in(item, f"{path}.{key}")
