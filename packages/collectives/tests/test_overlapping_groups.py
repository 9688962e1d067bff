"""Groups that share ranks: in flight together, issued in different orders, without deadlock."""

from __future__ import annotations

import time

import pytest
import torch
import torch.distributed as dist

from lamina.collectives import Ledger, reduce_from, send_recv
from lamina.collectives.engine import start_all_gather, start_all_reduce, start_reduce_scatter
from lamina.mesh import ParallelLayout
from lamina_testing import device_type


def axes():
    mesh = ParallelLayout(dp_shard=2, tp=2).build(device_type())
    return mesh.axis("tp"), mesh.axis("dp_shard")


@pytest.mark.ranks(4, backend="gloo")  # NCCL's first call of a group waits for all its ranks
@pytest.mark.parametrize("numel", [6, 1 << 19])
def test_two_in_flight_may_be_issued_and_awaited_in_different_orders(numel):
    tp, dp = axes()
    rank = dist.get_rank()
    # Along each axis one rank issues tp first and its peer dp first: a cycle of four waits, if
    # issuing waited.
    order = [tp, dp] if rank in (0, 3) else [dp, tp]
    for turn in range(5):
        tensor = torch.full((numel,), float(10 * turn + rank))
        pending = {axis.name: start_all_reduce(tensor, axis.group) for axis in order}
        for axis in (order[0], order[1]) if turn % 2 else (order[1], order[0]):
            total = sum(10.0 * turn + other for other in axis.ranks)
            assert torch.all(pending[axis.name].wait() == total)


@pytest.mark.ranks(4)
@pytest.mark.parametrize("seed", range(3))
def test_streams_of_collectives_on_two_axes_never_wait_for_each_other(seed):
    tp, dp = axes()
    rank = dist.get_rank()
    generator = torch.Generator().manual_seed(10 * seed + rank)
    pending: dict[str, list] = {tp.name: [], dp.name: []}
    remaining = {tp.name: 12, dp.name: 12}
    while any(remaining.values()):  # each rank mixes the two streams in an order of its own
        pick = int(torch.randint(2, (), generator=generator))
        axis = (tp, dp)[pick] if remaining[(tp, dp)[pick].name] else (tp, dp)[1 - pick]
        number = 12 - remaining[axis.name]
        start = (start_all_reduce, start_all_gather, start_reduce_scatter)[number % 3]
        pending[axis.name].append(start(torch.full((4,), 100.0 * number + rank), axis.group))
        remaining[axis.name] -= 1
        time.sleep(0.002 * float(torch.rand((), generator=generator)))
    for axis in (tp, dp):
        ranks = torch.tensor(axis.ranks, dtype=torch.float32)
        for number, one in enumerate(pending[axis.name]):
            values = 100.0 * number + ranks
            expected = (
                values.sum().expand(4),
                values.repeat_interleave(4),
                values.sum().expand(2),
            )[number % 3]
            assert torch.equal(one.wait(), expected), (axis.name, number)


@pytest.mark.ranks(4)
def test_a_synchronous_collective_passes_an_asynchronous_one_of_another_axis():
    # The rest of the dp axis joins only after tp's synchronous sum, which must not queue behind it.
    tp, dp = axes()
    rank = dist.get_rank()
    tensor = torch.full((3,), float(rank))
    if dp.rank == 0:
        pending = start_all_reduce(tensor, dp.group)
        total = reduce_from(tensor, tp.group)
    else:
        total = reduce_from(tensor, tp.group)
        time.sleep(0.05)
        pending = start_all_reduce(tensor, dp.group)
    assert torch.all(total == sum(tp.ranks))
    assert torch.all(pending.wait() == sum(dp.ranks))


@pytest.mark.ranks(4, backend="gloo")  # NCCL makes a communicator at its first call, with all ranks
def test_a_ring_on_one_axis_runs_beside_reductions_on_the_other():
    tp, dp = axes()
    rank = dist.get_rank()
    with Ledger() as ledger:
        for turn in range(4):
            tensor = torch.full((5,), float(10 * turn + rank))
            steps = [
                lambda tensor=tensor: send_recv([tensor], dp.group),
                lambda tensor=tensor: start_all_reduce(tensor, tp.group),
            ]
            if rank in (1, 2):
                steps.reverse()
            pending = [step() for step in steps]
            results = [one.wait() for one in pending]
            if rank in (1, 2):
                results.reverse()
            (received,), total = results
            assert torch.all(received == 10 * turn + dp.ranks[1 - dp.rank])
            assert torch.all(total == sum(10 * turn + other for other in tp.ranks))
    assert ledger.bytes(axis="dp_shard", op="send_recv") == 4 * 5 * 4
    # Five elements in pieces of three and two: a rank sends the other's piece, then its own sum.
    assert ledger.bytes(axis="tp", op="all_reduce_fp32") == 4 * 5 * 4
