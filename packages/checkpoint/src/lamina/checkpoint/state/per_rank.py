"""State that differs from rank to rank."""

import base64
import warnings
from collections.abc import Mapping, Sequence
from typing import Any, Literal

import torch

from lamina.checkpoint.errors import CheckpointMismatchError
from lamina.checkpoint.state.json_values import Json, decode, encode
from lamina.checkpoint.storage.streams import memory_of, own_memory
from lamina.mesh import rng_state, set_rng_state

Coordinates = Mapping[str, Sequence[int]]
"""Axis -> this rank's place on it, and its size, of axes of more than one rank."""


class PerRank:
    """Wraps a value or stateful object of which every rank saves its own, and gets its own back.

    Other values of a state are taken from the first rank. This is for what is small and belongs to
    one rank, such as random number generators; its tensors are stored beside the plain values.

    Args:
        value: an object with `state_dict` and `load_state_dict`, or a plain value.
        on_change: what a restore does on another number of ranks, or where a rank has another place
            along pp, cp or tp, so that "its own" has no meaning: "keep" what each rank has (with a
            warning), give all ranks the "first" rank's, or "raise". Places are known from the
            modules in the state, and for certain from `CheckpointManager(mesh=...)`.

    Examples:
        >>> state = {"losses": PerRank([0.5])}
    """

    def __init__(
        self, value: Any, *, on_change: Literal["keep", "first", "raise"] = "keep"
    ) -> None:
        self.value = value
        self.on_change = on_change

    def encoded(self, entry: str, here: Coordinates) -> Json:
        """Return this rank's state as JSON, its tensors and its place included."""
        stateful = hasattr(self.value, "state_dict") and hasattr(self.value, "load_state_dict")
        tensors: dict[tuple[str, ...], torch.Tensor] = {}
        tree = encode(self.value.state_dict() if stateful else self.value, (entry,), tensors)
        inlined = {".".join(k): _inline(t) for k, t in tensors.items()}
        return {"tree": tree, "tensors": inlined, "place": {n: list(p) for n, p in here.items()}}

    def change(
        self, entry: str, ranks: list[Json], rank: int, world_size: int, here: Coordinates
    ) -> str | None:
        """Say why no rank's state is this rank's own; None where one is.

        Raises:
            CheckpointMismatchError: another number of ranks or another place of this one, and
                `on_change` is "raise".
        """
        message = None
        if len(ranks) != world_size:
            message = f"by {len(ranks)} ranks, each with its own; here are {world_size}"
        else:
            there = ranks[rank].get("place")  # older checkpoints have none
            if there is not None and there != {name: list(at) for name, at in here.items()}:
                message = f"by rank {rank} at {_said(there)}, and here it is at {_said(here)}"
        if message is not None:
            message = f"'{entry}' was saved {message}"
        if message is not None and self.on_change == "raise":
            raise CheckpointMismatchError(f"{message}: on_change='keep' or 'first' allows it")
        return message

    def load(
        self, entry: str, ranks: list[Json], rank: int, world_size: int, here: Coordinates
    ) -> None:
        """Take this rank's state from those of all ranks.

        Raises:
            CheckpointMismatchError: see `change`.
        """
        message = self.change(entry, ranks, rank, world_size, here)
        if message is not None:
            if self.on_change == "keep":
                warnings.warn(f"{message}: every rank keeps what it has", stacklevel=2)
                return
            rank = 0
        stored: Mapping[str, Json] = ranks[rank]
        tensors = stored["tensors"]
        tree = decode(stored["tree"], lambda name: _outline(tensors[name]))
        if hasattr(self.value, "load_state_dict"):
            self.value.load_state_dict(tree)
        else:
            self.value = tree


class RngState:
    """This rank's random number generators, for `PerRank(RngState())` in a state.

    Examples:
        >>> state = {"model": torch.nn.Linear(4, 1), "rng": RngState()}
    """

    def state_dict(self) -> dict[str, Any]:
        """Return Python's, NumPy's, torch's and `lamina.mesh`'s named generators."""
        return rng_state()

    def load_state_dict(self, state: Mapping[str, Any]) -> None:
        """Set them; those that this process does not have are left out."""
        set_rng_state(state, strict=False)


def _said(at: Mapping[str, Sequence[int]]) -> str:
    said = ", ".join(f"{name} {rank} of {size}" for name, (rank, size) in at.items())
    return said or "no place along pp, cp or tp"


def _inline(tensor: torch.Tensor) -> Json:
    tensor = own_memory(tensor)
    raw = bytes(memory_of(tensor))
    dtype = str(tensor.dtype).removeprefix("torch.")
    return [dtype, list(tensor.shape), base64.b64encode(raw).decode("ascii")]


def _outline(stored: Json) -> torch.Tensor:
    dtype: torch.dtype = decode({"$dtype": stored[0]}, str)
    raw = bytearray(base64.b64decode(stored[2], validate=True))
    if not raw:
        return torch.empty(stored[1], dtype=dtype)
    return torch.frombuffer(raw, dtype=dtype).view(stored[1])
