"""Plain values as JSON: what a state holds besides tensors.

A state dict is a tree. Its tensors go to torch.distributed.checkpoint; everything else becomes
JSON, because reading JSON can't run code, as reading a pickle can. JSON knows neither tuples nor
keys that are not strings nor NaN, so these are written as an object with one `$` key, and every
value comes back with the type and the bits it had.
"""

from __future__ import annotations

import base64
import math
from collections.abc import Callable, Mapping
from typing import Any

import torch

from lamina.checkpoint.errors import CheckpointError

Json = Any  # what json.dumps takes: None, bool, int, float, str, list, dict with string keys

_DTYPES = {
    str(value).removeprefix("torch."): value
    for value in vars(torch).values()
    if isinstance(value, torch.dtype)
}


def join(path: tuple[str, ...]) -> str:
    """Return the name of a place in the tree: its keys joined by dots, as DCP joins them."""
    return ".".join(path)


def encode(value: Any, path: tuple[str, ...], tensors: dict[tuple[str, ...], torch.Tensor]) -> Json:
    """Turn a tree into JSON, moving its tensors into `tensors`.

    Args:
        value: None, bool, int, float, complex, str, bytes, tensor, dtype, device, and lists,
            tuples, sets and mappings of these.
        path: where `value` stands in the state; a tensor is stored under it.
        tensors: receives path -> tensor for every tensor in the tree.

    Raises:
        TypeError: a value of another type, with its path.
        CheckpointError: two tensors would be stored under one name.

    """
    if value is None or isinstance(value, (bool, str)):
        return value
    if isinstance(value, torch.Tensor):
        if path in tensors:
            raise CheckpointError(
                f"two tensors are called '{join(path)}': keys such as 1 and '1' look alike in a "
                "name; rename one"
            )
        tensors[path] = value
        return {"$tensor": join(path)}
    if isinstance(value, int):
        return int(value)
    if isinstance(value, float):
        return float(value) if math.isfinite(value) else {"$float": repr(float(value))}
    if isinstance(value, Mapping):
        return _encode_mapping(value, path, tensors)
    if isinstance(value, torch.Size):
        return {"$size": list(value)}
    if isinstance(value, (list, tuple, set, frozenset)):
        items = sorted(value, key=repr) if isinstance(value, (set, frozenset)) else value
        encoded = [encode(item, (*path, str(i)), tensors) for i, item in enumerate(items)]
        if isinstance(value, list):
            return encoded
        return {"$tuple" if isinstance(value, tuple) else "$set": encoded}
    return _encode_rare(value, path)


def _encode_mapping(
    value: Mapping[Any, Any], path: tuple[str, ...], tensors: dict[tuple[str, ...], torch.Tensor]
) -> Json:
    plain = all(isinstance(key, str) and not key.startswith("$") for key in value)
    if plain:
        return {key: encode(item, (*path, key), tensors) for key, item in value.items()}
    return {
        "$dict": [
            [encode(key, path, {}), encode(item, (*path, str(key)), tensors)]
            for key, item in value.items()
        ]
    }


def _encode_rare(value: Any, path: tuple[str, ...]) -> Json:
    if isinstance(value, (bytes, bytearray)):
        return {"$bytes": base64.b64encode(value).decode("ascii")}
    if isinstance(value, complex):
        return {"$complex": [repr(value.real), repr(value.imag)]}
    if isinstance(value, torch.dtype):
        return {"$dtype": str(value).removeprefix("torch.")}
    if isinstance(value, torch.device):
        return {"$device": str(value)}
    raise TypeError(
        f"'{join(path)}' is a {type(value).__module__}.{type(value).__qualname__}, which a "
        "checkpoint can't hold without pickle: save tensors, numbers, strings, bytes and lists, "
        "tuples, sets and dicts of them, or give it state_dict() and load_state_dict()"
    )


def decode(value: Json, tensor: Callable[[str], Any]) -> Any:
    """Turn JSON made by `encode` back into the tree.

    Args:
        value: the JSON.
        tensor: maps the name of a stored tensor to the object to put in its place.

    Raises:
        CheckpointError: a `$` key that `encode` never writes.

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
    "$tuple": lambda body, tensor: tuple(decode(item, tensor) for item in body),
    "$set": lambda body, tensor: {decode(item, tensor) for item in body},
    "$size": lambda body, _: torch.Size(body),
    "$float": lambda body, _: float(body),
    "$complex": lambda body, _: complex(float(body[0]), float(body[1])),
    "$bytes": lambda body, _: base64.b64decode(body, validate=True),
    "$dtype": lambda body, _: _DTYPES[body],
    "$ranks": lambda body, _: body,  # of PerRank: a list with each rank's own
    "$device": lambda body, _: torch.device(body),
}
