"""Agreeing over ranks on which parameters got a gradient anywhere."""

from __future__ import annotations

from collections.abc import Iterable, Sequence

import torch
from torch.distributed import ProcessGroup

from lamina.collectives import all_reduce_small, host_device
from lamina.ddp.group import ParameterGroup

__all__ = ["agree_on_seen"]


def agree_on_seen(groups: Sequence[ParameterGroup], over: Iterable[ProcessGroup | None]) -> None:
    """A parameter that got a gradient on one rank got one on all: one small collective per group.

    Args:
        groups: alike on all those ranks, one at least.
        over: the ranks, by process groups; None is one rank alone, which asks nobody.
    """
    several = [one for one in over if one is not None]
    if not several:
        return
    seen = [flag for group in groups for flag in group.trained.seen]
    flags = torch.tensor(seen, dtype=torch.int32, device=host_device(several, groups[0].device))
    for one in several:
        all_reduce_small([flags], one, op="max")
    merged = iter(flags.tolist())
    for group in groups:
        group.trained.seen = [bool(next(merged)) for _ in group.refs]
