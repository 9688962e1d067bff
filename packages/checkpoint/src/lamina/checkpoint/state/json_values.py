"""Plain values as JSON: what a state holds besides tensors.

A state dict is a tree. Its tensors go to torch.distributed.checkpoint; everything else becomes
JSON, because reading JSON can't run code, as reading a pickle can. JSON knows neither tuples nor
keys that are not strings nor NaN, so these are written as an object with one `$` key, and every
value comes back with the type and the bits it had. Classes that are made from plain ones (enums
that are strings, named tuples, default dictionaries) would come back without what makes them
different, so they are refused; but for strings, which are stored as what they say.
"""

import base64
import math
from collections import Counter, OrderedDict
from collections.abc import Callable, Mapping
from enum import Enum
from typing import Any

import numpy as np
import torch

from lamina.checkpoint.errors import CheckpointError

__all__ = ["PAIRS", "Json", "decode", "encode"]

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

    Raises:
        TypeError: a value of another type, with its path.
        CheckpointError: two tensors would be stored under one name.
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
