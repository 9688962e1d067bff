"""Plain values as JSON: what a state holds besides tensors.

A state dict is a tree. Its tensors go to torch.distributed.checkpoint; everything else becomes
JSON, because reading JSON can't run code, as reading a pickle can. JSON knows neither tuples nor
keys that are not strings nor NaN, so these are written as an object with one `$` key, and every
value comes back with the type and the bits it had. Classes that are made from plain ones (enums
that are strings, named tuples, default dictionaries) would come back without what makes them
different, so they are refused; but for strings, which are stored as what they say.

The first rank's values are what is stored, with two additions that other ranks contribute: what
each rank has for itself (`PerRank`), and names. Where pipeline stages hold different layers, no
rank knows all names of the model; the coordinator joins what the ranks know.
"""

import base64
import json
import math
import zlib
from collections import Counter, OrderedDict
from collections.abc import Callable, Iterator, Mapping
from enum import Enum
from typing import Any

import numpy as np
import torch

from lamina.checkpoint.errors import CheckpointError

Json = Any  # what json.dumps takes: None, bool, int, float, str, list, dict with string keys

_DTYPES = {
    str(value).removeprefix("torch."): value
    for value in vars(torch).values()
    if isinstance(value, torch.dtype)
}
_SEQUENCES: dict[type, str] = {tuple: "$tuple", set: "$set", frozenset: "$frozenset"}
_MAPPINGS: dict[type, str] = {dict: "$dict", OrderedDict: "$ordered", Counter: "$counter"}
PAIRS = tuple(_MAPPINGS.values())
"""Kinds that hold a list of [key, value]."""


def encode(value: Any, path: tuple[str, ...], tensors: dict[tuple[str, ...], torch.Tensor]) -> Json:
    """Turn a tree into JSON, moving its tensors into `tensors`, by path.

    The tree is made of None, bool, int, float, complex, str, bytes, tensor, dtype, device, numbers
    of NumPy's, and lists, tuples, sets and dicts (OrderedDict, Counter) of these. `path` is where
    it stands in the state.

    TypeError names the path of a value of another type, CheckpointError two tensors that would be
    stored under one name.
    """
    kind = type(value)
    if value is None or kind in (bool, str, int):
        return value
    if isinstance(value, torch.Tensor):
        if path in tensors:
            raise CheckpointError(
                f"two tensors are called '{'.'.join(path)}': keys such as 1 and '1' look alike in "
                "a name; rename one"
            )
        _check_form(value, path)
        tensors[path] = value
        return {"$tensor": ".".join(path)}
    if kind is float:
        return value if math.isfinite(value) else {"$float": repr(value)}
    if kind is torch.Size:
        return {"$size": list(value)}
    if kind in _MAPPINGS:
        return _encode_mapping(value, path, tensors)
    if kind is list:
        return [encode(item, (*path, str(i)), tensors) for i, item in enumerate(value)]
    if kind in _SEQUENCES:
        items = value if kind is tuple else sorted(value, key=repr)
        return {_SEQUENCES[kind]: encode(list(items), path, tensors)}
    return _encode_rare(value, path)


def _check_form(tensor: torch.Tensor, path: tuple[str, ...]) -> None:
    """Refuse tensors of which torch.distributed.checkpoint stores no boxes, or can't read them."""
    form = "quantized" if tensor.is_quantized else str(tensor.layout).removeprefix("torch.")
    if tensor.is_nested or form != "strided":
        form = "nested" if tensor.is_nested else form
        raise TypeError(
            f"'{'.'.join(path)}' is a {form} tensor, which a checkpoint can't hold: save the plain "
            "tensors that it is made of (such as indices and values, or codes and scales), or "
            "give what holds it a state_dict() and a load_state_dict() that do"
        )


def _encode_mapping(
    value: Mapping[Any, Any], path: tuple[str, ...], tensors: dict[tuple[str, ...], torch.Tensor]
) -> Json:
    plain = all(type(key) is str and not key.startswith("$") for key in value)
    if plain and type(value) is dict:
        return {key: encode(item, (*path, key), tensors) for key, item in value.items()}
    in_keys: dict[tuple[str, ...], torch.Tensor] = {}
    pairs = [
        [encode(key, path, in_keys), encode(item, (*path, str(key)), tensors)]
        for key, item in value.items()
    ]
    if in_keys:
        raise TypeError(
            f"'{'.'.join(path)}' has a tensor for a key: give it names or numbers for keys"
        )
    return {_MAPPINGS[type(value)]: pairs}


def _encode_rare(value: Any, path: tuple[str, ...]) -> Json:
    if isinstance(value, str) and not isinstance(value, Enum):
        return str.__str__(value)  # torch.__version__ is of a class of its own
    if isinstance(value, np.generic) and value.dtype.kind in "biufc":
        number = value.item()
        if not isinstance(number, np.generic):  # longdouble has no other form
            return {"$numpy": [value.dtype.name, encode(number, path, {})]}
    if type(value) in (bytes, bytearray):
        tag = "$bytes" if type(value) is bytes else "$bytearray"
        return {tag: base64.b64encode(value).decode("ascii")}
    if type(value) is complex:
        return {"$complex": [repr(value.real), repr(value.imag)]}
    if isinstance(value, torch.dtype):
        return {"$dtype": str(value).removeprefix("torch.")}
    if isinstance(value, torch.device):
        return {"$device": str(value)}
    if callable(getattr(value, "state_dict", None)):
        raise TypeError(
            f"'{'.'.join(path)}' is a {type(value).__module__}.{type(value).__qualname__} inside a "
            "plain value. Objects with state_dict() are entries of the state themselves: "
            f'{{"{".".join(path)}": ...}}, say, beside the others'
        )
    raise TypeError(
        f"'{'.'.join(path)}' is a {type(value).__module__}.{type(value).__qualname__}, which a "
        "checkpoint can't hold without pickle: save tensors, numbers, strings, bytes and lists, "
        "tuples, sets and dicts of them (of classes derived from these the plain value, such as "
        "dict(value)), or give it state_dict() and load_state_dict()"
    )


def decode(value: Json, tensor: Callable[[str], Any]) -> Any:
    """Turn JSON made by `encode` back into the tree; `tensor` gives what a stored tensor becomes.

    CheckpointError names a `$` key that `encode` never writes.
    """
    if isinstance(value, list):
        return [decode(item, tensor) for item in value]
    if not isinstance(value, dict):
        return value
    if len(value) != 1 or not next(iter(value)).startswith("$"):
        return {key: decode(item, tensor) for key, item in value.items()}
    ((tag, body),) = value.items()
    if tag == "$tensor":
        return tensor(body)
    decoder = _DECODERS.get(tag)
    if decoder is None:
        raise CheckpointError(
            f"unknown kind of value {tag!r}: the checkpoint was written by a newer "
            f"lamina-checkpoint, or damaged; known kinds: {', '.join(sorted(_DECODERS))}"
        )
    return decoder(body, tensor)


def _decode_pairs(body: Json, tensor: Callable[[str], Any]) -> dict[Any, Any]:
    return {decode(key, tensor): decode(item, tensor) for key, item in body}


_DECODERS: dict[str, Callable[[Json, Callable[[str], Any]], Any]] = {
    "$dict": _decode_pairs,
    "$ordered": lambda body, tensor: OrderedDict(_decode_pairs(body, tensor)),
    "$counter": lambda body, tensor: Counter(_decode_pairs(body, tensor)),
    "$tuple": lambda body, tensor: tuple(decode(item, tensor) for item in body),
    "$set": lambda body, tensor: {decode(item, tensor) for item in body},
    "$frozenset": lambda body, tensor: frozenset(decode(item, tensor) for item in body),
    "$size": lambda body, _: torch.Size(body),
    "$float": lambda body, _: float(body),
    "$numpy": lambda body, tensor: np.dtype(body[0]).type(decode(body[1], tensor)),
    "$complex": lambda body, _: complex(float(body[0]), float(body[1])),
    "$bytes": lambda body, _: base64.b64decode(body, validate=True),
    "$bytearray": lambda body, _: bytearray(base64.b64decode(body, validate=True)),
    "$dtype": lambda body, _: _DTYPES[body],
    "$ranks": lambda body, _: body,  # of PerRank: a list with each rank's own
    "$device": lambda body, _: torch.device(body),
}


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
    for number, (group, other_group) in enumerate(zip(*groups, strict=True)):
        for key in sorted({*group, *other_group} - {"params"}):
            if group.get(key) != other_group.get(key):
                raise CheckpointError(
                    f"'{entry}' has {key}={group.get(key)} in parameter group {number} on rank 0 "
                    f"and {other_group.get(key)} on rank {rank}; {remedy}"
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
