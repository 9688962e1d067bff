"""The classes of faults between streams that training systems have shipped, planted in Lamina.

Each is a context: inside, the code that it changes is wrong as it once was somewhere. Two of the
five classes are a wait that is not there. `WAITS` names the function that waits.
"""

from __future__ import annotations

import contextlib
from collections.abc import Callable, Iterator
from contextlib import AbstractContextManager
from typing import Any
from unittest import mock

import torch

from lamina.buffers.pool import pool as pools
from lamina.collectives.reduction.ordered import OrderedReduction
from lamina.fsdp.weights.sharded import ShardedWeights

Elsewhere = Callable[[], AbstractContextManager[Any]]


@contextlib.contextmanager
def storage_is_reused_before_its_collective_ends(_: Elsewhere) -> Iterator[None]:
    """The first unit's storage goes back while its gather writes it, and another tensor gets it."""
    start = ShardedWeights.start
    done: list[torch.Tensor] = []

    def start_twice(weights: ShardedWeights) -> None:
        start(weights)
        if not done:
            whole = weights._pool.tensor(weights.key)
            bytes = whole.untyped_storage().nbytes()
            weights._pool.release(weights.key)
            done.append(torch.zeros(bytes, dtype=torch.uint8, device=whole.device))
            weights._leave()  # waits for the gather, too late
            start(weights)

    with mock.patch.object(ShardedWeights, "start", start_twice):
        yield


@contextlib.contextmanager
def a_prefetch_goes_into_a_slot_in_use(_: Elsewhere) -> Iterator[None]:
    """All units get one slot, and nobody asks who lives there."""
    color = pools.color_slots

    def same_slot(sizes: Any, conflicts: Any, **options: Any) -> Any:
        return color(sizes, {}, **options)

    def move_in(pool: Any, entry: Any, epoch: Any) -> Any:
        return entry.block

    with (
        mock.patch.object(pools, "color_slots", same_slot),
        mock.patch.object(pools.StoragePool, "_fall_back", move_in),
    ):
        yield


@contextlib.contextmanager
def memory_is_freed_on_the_wrong_stream(elsewhere: Elsewhere) -> Iterator[None]:
    """Scratch that is allocated on a stream of its own goes back to it, whoever still writes."""
    memory = OrderedReduction._ready

    def ready(*arguments: Any) -> Any:
        with elsewhere():
            return memory(*arguments)

    with mock.patch.object(OrderedReduction, "_ready", ready):
        yield


# A class: the scenario that it is planted in, and what plants it.
PLANTS: dict[str, tuple[str, Callable[[Elsewhere], AbstractContextManager[None]]]] = {
    "reuse": ("strategy 3", storage_is_reused_before_its_collective_ends),
    "prefetch": ("slots", a_prefetch_goes_into_a_slot_in_use),
    "free": ("strategy 2", memory_is_freed_on_the_wrong_stream),
}
# A class: the scenario, and the function whose wait is left out.
WAITS: dict[str, tuple[str, str]] = {
    "optimizer": ("strategy 2", "ReductionQueue.drain"),
    "host copy": ("offload", "OffloadedSum.run"),
}
