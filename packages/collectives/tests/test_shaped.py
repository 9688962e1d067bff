"""The asynchronous forms: right along every dimension, and truly in flight."""

from __future__ import annotations

import time
from pathlib import Path

import pytest
import torch
import torch.distributed as dist
import torch.nn.functional as F

from lamina.collectives import Ledger, copy_to
from lamina.collectives.engine import (
    start_all_gather,
    start_all_reduce,
    start_all_to_all,
    start_reduce_scatter,
)


def of_rank(rank: int, *shape: int) -> torch.Tensor:
    return torch.randn(shape, generator=torch.Generator().manual_seed(rank), dtype=torch.float64)


def wait_for(path: Path, seconds: float = 20.0) -> None:
    deadline = time.monotonic() + seconds
    while not path.exists():
        assert time.monotonic() < deadline, f"{path.name} did not appear"
        time.sleep(0.005)


@pytest.mark.ranks(1, 2, 3)
@pytest.mark.parametrize("dim", [0, 1, 2])
def test_results_are_those_of_one_process(dim):
    group, rank, size = dist.group.WORLD, dist.get_rank(), dist.get_world_size()
    shape = (2 * size, size, 3 * size)
    tensors = [of_rank(r, *shape) for r in range(size)]
    gathered = start_all_gather(tensors[rank], group, dim=dim)
    scattered = start_reduce_scatter(tensors[rank], group, dim=dim)
    reduced = start_all_reduce(tensors[rank], group)
    exchanged = start_all_to_all(tensors[rank], group)
    # waited for in another order than issued
    assert torch.equal(exchanged.wait(), torch.cat([t.chunk(size)[rank] for t in tensors]))
    torch.testing.assert_close(reduced.wait(), sum(tensors))
    torch.testing.assert_close(scattered.wait(), sum(tensors).chunk(size, dim)[rank])
    assert torch.equal(gathered.wait(), torch.cat(tensors, dim))
    assert gathered.wait() is gathered.wait()


@pytest.mark.ranks(2)
def test_an_in_place_all_reduce_returns_the_tensor_itself():
    group, rank = dist.group.WORLD, dist.get_rank()
    tensor = of_rank(rank, 5, 3)
    result = start_all_reduce(tensor, group, in_place=True).wait()
    assert result.data_ptr() == tensor.data_ptr()
    torch.testing.assert_close(tensor, of_rank(0, 5, 3) + of_rank(1, 5, 3))
    with pytest.raises(ValueError, match="in_place needs a contiguous tensor"):
        start_all_reduce(tensor.t(), group, in_place=True)


@pytest.mark.ranks(2)
def test_starting_does_not_wait_for_the_other_ranks(tmp_path):
    # Rank 1 joins only after rank 0 got control back from all four starts.
    group, rank = dist.group.WORLD, dist.get_rank()
    if rank == 1:
        wait_for(tmp_path / "started")
    tensor = of_rank(rank, 4, 4)
    pending = [
        start_all_gather(tensor, group),
        start_reduce_scatter(tensor, group, dim=1),
        start_all_reduce(tensor, group),
        start_all_to_all(tensor, group),
    ]
    (tmp_path / "started").touch()
    for one in pending:
        one.wait()


@pytest.mark.ranks(2)
def test_tensors_may_be_dropped_while_in_flight(tmp_path):
    group, rank = dist.group.WORLD, dist.get_rank()
    expected = of_rank(0, 64, 64) + of_rank(1, 64, 64)
    if rank == 1:
        wait_for(tmp_path / "started")
    pending = [start_all_reduce(of_rank(rank, 64, 64), group) for _ in range(8)]
    start_all_reduce(of_rank(rank, 64, 64), group)  # dropped at once, and joined by all
    (tmp_path / "started").touch()
    noise = [torch.full((64, 64), float("nan"), dtype=torch.float64) for _ in range(32)]
    for one in pending:
        torch.testing.assert_close(one.wait(), expected)
    del noise


@pytest.mark.ranks(3)
@pytest.mark.parametrize("seed", range(3))
def test_many_in_flight_on_one_group_do_not_mix_whatever_the_timing(seed):
    group, rank, size = dist.group.WORLD, dist.get_rank(), dist.get_world_size()
    delays = torch.rand(24, generator=torch.Generator().manual_seed(100 * seed + rank))
    pending = []
    for number, delay in enumerate(delays.tolist()):
        tensor = torch.full((6,), 10.0 * number + rank)
        start = (start_all_reduce, start_all_gather, start_reduce_scatter)[number % 3]
        pending.append(start(tensor, group))
        if delay < 0.3:
            time.sleep(0.01 * delay)
    ranks = torch.arange(3.0)
    for number, one in enumerate(pending):
        total = float(10 * number * size + 3)
        expected = (
            torch.full((6,), total),
            (10.0 * number + ranks).repeat_interleave(6),
            torch.full((2,), total),
        )[number % 3]
        assert torch.equal(one.wait(), expected), number


class OverlappedColumn(torch.autograd.Function):
    """A column-parallel product whose weight-gradient GEMM hides an all-reduce."""

    @staticmethod
    def forward(ctx, x, weight, group):
        ctx.save_for_backward(x, weight)
        ctx.group = group
        return x @ weight.t()

    @staticmethod
    def backward(ctx, gradient):
        x, weight = ctx.saved_tensors
        pending = start_all_reduce(gradient @ weight, ctx.group, in_place=True)
        weight_gradient = gradient.t() @ x
        return pending.wait(), weight_gradient, None


@pytest.mark.ranks(2)
def test_a_linear_that_overlaps_its_all_reduce_gives_the_gradients_of_copy_to():
    group, rank = dist.group.WORLD, dist.get_rank()
    x, weight = of_rank(5, 16, 8), of_rank(rank, 6, 8)
    results = []
    for function in (
        lambda x, w: OverlappedColumn.apply(x, w, group),
        lambda x, w: F.linear(copy_to(x, group), w),
    ):
        leaves = [x.clone().requires_grad_(), weight.clone().requires_grad_()]
        with Ledger() as ledger:
            function(*leaves).square().sum().backward()
        results.append([leaf.grad for leaf in leaves])
        assert [record.op for record in ledger.records] == ["all_reduce_fp32"]
        assert ledger.records[0].asynchronous == (len(results) == 1)
    torch.testing.assert_close(results[0], results[1])


def test_group_none_returns_the_tensor_itself():
    tensor = torch.randn(4, 4)
    for start in (start_all_gather, start_reduce_scatter, start_all_reduce, start_all_to_all):
        assert start(tensor, None).wait() is tensor
