"""Checks that every rank's state has the same entries, of the same kind."""

import json
from collections.abc import Mapping
from typing import Any

import torch

from lamina.checkpoint.errors import CheckpointError
from lamina.checkpoint.ranks import Ranks
from lamina.checkpoint.state.optimizer_names import is_optimizer, unwrapped
from lamina.checkpoint.state.per_rank import PerRank
from lamina.checkpoint.state.state import is_stateful

__all__ = ["check_entries"]

_OBJECT = "an object with state_dict"
_PLAIN = "a plain value"


def check_entries(state: Mapping[str, Any], ranks: Ranks) -> None:
    """Compare names and kinds of entries between ranks (collective).

    What only some ranks hold would be lost: of plain values and of objects that are neither modules
    nor optimizers the first rank's are stored. So an object such as a loader may be there on the
    first rank alone, with a plain value (None) in its place on others.

    Raises:
        CheckpointError: they differ, the same on every rank.
    """
    own = ranks.together(
        lambda: [f"{entry}\n{_kind(unwrapped(value))}" for entry, value in sorted(state.items())]
    )
    if ranks.agree(json.dumps(own).encode()):
        return
    of_ranks = [dict(text.rsplit("\n", 1) for text in of) for of in ranks.lists(own)]
    for entry in sorted({entry for of in of_ranks for entry in of}):
        kinds = [of.get(entry, "missing") for of in of_ranks]
        same = {kinds[0], _PLAIN} if kinds[0] == _OBJECT else {kinds[0]}  # only rank 0's is stored
        other = next((rank for rank, kind in enumerate(kinds) if kind not in same), None)
        if other is not None:
            remedy = "give every rank the same entries, and wrap in PerRank what differs"
            if (kinds[0], kinds[other]) == (_PLAIN, _OBJECT):
                remedy = "rank 0's state is what is stored: give rank 0 the object"
            raise CheckpointError(
                f"entry '{entry}' of the state is {kinds[0]} on rank 0 and {kinds[other]} on rank "
                f"{other}: {remedy}"
            )


def _kind(value: Any) -> str:
    if isinstance(value, PerRank):
        return "a PerRank"
    if isinstance(value, torch.nn.Module):
        return "a module"
    if is_optimizer(value):
        return "an optimizer"
    return _OBJECT if is_stateful(value) else _PLAIN
