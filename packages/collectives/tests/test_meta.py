"""Meta tensors: plans of any world are made without data, and nothing travels."""

from __future__ import annotations

import pytest
import torch
import torch.distributed as dist
from torch.utils._python_dispatch import TorchDispatchMode

from lamina.collectives import (
    all_gather_into,
    all_reduce_fp32,
    all_to_all,
    all_to_all_tokens,
    copy_to,
    gather_from,
    reduce_from,
    reduce_scatter_fp32,
    reduce_scatter_to,
    scatter_to,
    send_recv,
)
from lamina.collectives.engine import broadcast, ring

WORLD = 64
REGIONS = {
    copy_to: (WORLD, 3),
    reduce_from: (WORLD, 3),
    scatter_to: (1, 3),
    gather_from: (WORLD * WORLD, 3),
    reduce_scatter_to: (1, 3),
    all_to_all_tokens: (WORLD, 3),
}


@pytest.mark.ranks(WORLD, backend="fake")
def test_collectives_plan_for_worlds_that_do_not_run_here():
    group, one, all_of_them = dist.group.WORLD, meta(4), meta(4 * WORLD)
    for each in (
        all_gather_into(all_of_them, one, group, async_op=True),
        reduce_scatter_fp32(one, all_of_them, group, async_op=True),
        all_reduce_fp32(all_of_them, all_of_them, group, async_op=True),
        all_to_all(meta(WORLD, 3), meta(WORLD, 3), group, async_op=True),
        broadcast(one, group, async_op=True),
    ):
        each.wait()
    (received,) = send_recv([meta(2, 3)], group, 1).wait()
    assert (received.shape, received.is_meta) == ((2, 3), True)
    origins = [origin for origin, (held,) in ring([meta(2, 3)], group) if held.is_meta]
    assert sorted(origins) == list(range(WORLD))


@pytest.mark.ranks(WORLD, backend="fake")
@pytest.mark.parametrize("region", REGIONS, ids=lambda region: region.__name__)
def test_regions_plan_both_ways_for_worlds_that_do_not_run_here(region):
    tensor = meta(WORLD, 3).requires_grad_()
    result = region(tensor, dist.group.WORLD)
    assert (result.shape, result.is_meta) == (REGIONS[region], True)
    result.backward(torch.ones_like(result))
    assert tensor.grad is not None
    assert tensor.grad.is_meta


class Made(TorchDispatchMode):
    """Counts the elements of the tensors that are made."""

    def __init__(self) -> None:
        super().__init__()
        self.numel = 0

    def __torch_dispatch__(self, function, types, args=(), kwargs=None):
        result = function(*args, **(kwargs or {}))
        if function.overloadpacket is torch.ops.aten.empty:
            self.numel += result.numel()
        return result


class Called(TorchDispatchMode):
    """Keeps which operators were called."""

    def __init__(self) -> None:
        super().__init__()
        self.operators = set()

    def __torch_dispatch__(self, function, types, args=(), kwargs=None):
        self.operators.add(function.overloadpacket)
        return function(*args, **(kwargs or {}))


@pytest.mark.ranks(WORLD, backend="fake")
def test_a_sum_is_planned_with_the_memory_for_what_would_come():
    with Made() as made:
        reduce_scatter_fp32(meta(4), meta(4 * WORLD), dist.group.WORLD, statistics=False).wait()
    assert made.numel == (4 + 4 * WORLD) + 4 * WORLD  # its buffers, and as much for the terms


@pytest.mark.ranks(WORLD, backend="fake")
def test_an_all_to_all_is_planned_without_a_copy_that_no_backend_makes():
    with Called() as called:
        all_to_all(meta(WORLD, 3), meta(WORLD, 3), dist.group.WORLD)
    assert torch.ops.aten.copy_ not in called.operators


@pytest.mark.ranks(2, backend="gloo")
def test_over_gloo_what_comes_is_the_transports_own():
    with Made() as made:
        reduce_scatter_fp32(meta(4), meta(8), dist.group.WORLD, statistics=False).wait()
    assert made.numel == 4 + 8


def meta(*shape: int) -> torch.Tensor:
    return torch.empty(shape, device="meta")
