"""Gathers, all-to-all, broadcast and small reductions: what arrives where, and what is refused."""

from __future__ import annotations

from datetime import timedelta
from types import SimpleNamespace
from typing import Any

import pytest
import torch
import torch.distributed as dist

from lamina.collectives import Ledger, all_gather_into, all_to_all
from lamina.collectives.engine import all_reduce_small, broadcast, host_device, use_messages
from lamina.collectives.transport import transport
from lamina.mesh.engine import MeshAxis

DTYPES = [torch.float32, torch.bfloat16, torch.uint8, torch.bool, torch.float8_e4m3fn]
LONG = (1 << 19) + 1  # elements that are worth reading from a peer's memory


def mine(rank: int, numel: int, dtype: torch.dtype = torch.float32) -> torch.Tensor:
    return (torch.arange(numel) % 7 + rank).to(dtype)


def same(first: torch.Tensor, second: torch.Tensor) -> bool:
    return torch.equal(first.view(torch.uint8), second.view(torch.uint8))


@pytest.mark.ranks(1, 2, 3, 5)
@pytest.mark.parametrize("dtype", DTYPES, ids=str)
def test_a_gather_puts_pieces_in_rank_order(dtype):
    world, rank = dist.get_world_size(), dist.get_rank()
    output = torch.zeros(world * 11, dtype=torch.uint8).to(dtype)
    all_gather_into(output, mine(rank, 11, dtype), dist.group.WORLD)
    assert same(output, torch.cat([mine(place, 11, dtype) for place in range(world)]))


@pytest.mark.ranks(3)
@pytest.mark.parametrize("numel", [5, LONG])
@pytest.mark.parametrize("async_op", [False, True])
def test_a_gather_may_be_in_place(numel, async_op):
    world, rank = dist.get_world_size(), dist.get_rank()
    output = torch.zeros(world * numel)
    own = output[rank * numel : (rank + 1) * numel]
    own.copy_(mine(rank, numel))
    all_gather_into(output, own, dist.group.WORLD, async_op=async_op).wait()
    assert torch.equal(output, torch.cat([mine(place, numel) for place in range(world)]))


@pytest.mark.ranks(2)
def test_a_gather_copies_nothing_but_what_it_delivers():
    """In place, a rank's own piece is not touched, not even by a copy onto itself."""
    output = torch.zeros(2 * 64)
    own = output.chunk(2)[dist.get_rank()]
    version = own._version
    all_gather_into(output, own, dist.group.WORLD)
    assert own._version == version


@pytest.mark.ranks(3)
def test_gathers_in_flight_on_one_group_do_not_mix():
    world, rank, group = dist.get_world_size(), dist.get_rank(), dist.group.WORLD
    outputs, handles = [], []
    for number in range(20):
        numel = LONG if number in (3, 4) else 50 - number  # different sizes, long and short
        outputs.append(torch.empty(world * numel))
        piece = mine(rank, numel) + 100 * number
        handles.append(all_gather_into(outputs[-1], piece, group, async_op=number % 3 > 0))
    for number in (*range(1, 20, 2), *range(0, 20, 2)):
        handles[number].wait()
        numel = outputs[number].numel() // world
        expected = torch.cat([mine(place, numel) + 100 * number for place in range(world)])
        assert torch.equal(outputs[number], expected)


@pytest.mark.ranks(1, 2, 4)
@pytest.mark.parametrize("scale", [1, LONG // 7], ids=["short", "long"])
def test_an_all_to_all_delivers_uneven_and_empty_runs_of_rows(scale):
    world, rank = dist.get_world_size(), dist.get_rank()

    def rows(source: int, target: int) -> int:
        return (source * 2 + target) % 4  # some are empty

    def block(source: int, target: int) -> torch.Tensor:
        numbers = mine(10 * source + target, rows(source, target) * 2 * scale)
        return numbers.view(rows(source, target), 2, scale)

    sends = [rows(rank, target) for target in range(world)]
    receives = [rows(source, rank) for source in range(world)]
    output = torch.empty(sum(receives), 2, scale)
    source = torch.cat([block(rank, target) for target in range(world)])
    handle = all_to_all(
        output,
        source,
        dist.group.WORLD,
        output_splits=receives,
        input_splits=sends,
        async_op=True,
    )
    handle.wait()
    assert torch.equal(output, torch.cat([block(place, rank) for place in range(world)]))


@pytest.mark.ranks(3)
def test_an_even_all_to_all_needs_no_splits():
    world, rank = dist.get_world_size(), dist.get_rank()
    output = torch.empty(world, 2, dtype=torch.int64)
    all_to_all(output, torch.arange(world * 2).view(world, 2) + 100 * rank, dist.group.WORLD)
    expected = [[100 * place + 2 * rank, 100 * place + 2 * rank + 1] for place in range(world)]
    assert output.tolist() == expected


@pytest.mark.ranks(2)
@pytest.mark.parametrize("even", [True, False])
def test_an_all_to_all_of_the_backends_own_is_not_waited_for(monkeypatch, even):
    """As over NCCL. Rank 1 begins when rank 0 has said, after its own call, that it goes on."""
    monkeypatch.setattr(transport, "served_by_gloo", lambda *_: False)
    rank, store = dist.get_rank(), dist.distributed_c10d._get_default_store()
    counts = [[2, 2], [2, 2]] if even else [[1, 3], [2, 0]]  # rank i sends counts[i][j] rows to j
    receives = [counts[0][rank], counts[1][rank]]
    rows = torch.arange(sum(counts[rank]) * 2).view(-1, 2) + 100 * rank
    output = torch.empty(sum(receives), 2, dtype=rows.dtype)
    splits = {} if even else {"input_splits": counts[rank], "output_splits": receives}
    if rank == 1:
        store.wait([f"rank 0 goes on {even}"], timedelta(seconds=5))
    handle = all_to_all(output, rows, dist.group.WORLD, async_op=True, **splits)
    if rank == 0:
        store.set(f"rank 0 goes on {even}", "yes")
    handle.wait()
    first = [torch.arange(sum(held) * 2).view(-1, 2) + 100 * i for i, held in enumerate(counts)]
    runs = [rows.split(held)[rank] for rows, held in zip(first, counts, strict=True)]
    assert torch.equal(output, torch.cat(runs))


@pytest.mark.ranks(1, 3)
@pytest.mark.parametrize("dtype", DTYPES, ids=str)
def test_a_broadcast_reaches_all_ranks_from_any_source(dtype):
    for src in range(dist.get_world_size()):
        tensor = mine(dist.get_rank(), 12, dtype).view(3, 4)
        broadcast(tensor, dist.group.WORLD, src=src, async_op=True).wait()
        assert same(tensor, mine(src, 12, dtype).view(3, 4))


@pytest.mark.ranks(4)
def test_the_source_of_a_broadcast_counts_within_the_group():
    group = [dist.new_group([0, 2]), dist.new_group([1, 3])][dist.get_rank() % 2]
    tensor = torch.tensor([dist.get_rank()])
    broadcast(tensor, group, src=1)
    assert tensor.item() == 2 + dist.get_rank() % 2


@pytest.mark.ranks(1, 2, 3)
def test_small_reductions_are_exact_and_one_message():
    world, rank = dist.get_world_size(), dist.get_rank()
    tensors = [
        torch.tensor(2**53 + 1 + rank),  # an integer that no float64 holds
        torch.tensor([0.1 * (rank + 1)], dtype=torch.float64),
        torch.full((2, 2), 256.0 if rank == 0 else 1.0).bfloat16(),  # in bf16, 256 + 1 + 1 is 256
        torch.tensor([], dtype=torch.float32),
        torch.tensor([rank == 0]),
    ]
    with Ledger() as ledger:
        all_reduce_small(tensors[:-1], dist.group.WORLD)
    assert len(ledger.records) <= 1
    assert tensors[0].item() == sum(2**53 + 1 + place for place in range(world))
    expected = sum(0.1 * (place + 1) for place in range(world))
    assert tensors[1].item() == pytest.approx(expected, rel=1e-15)
    assert torch.equal(tensors[2], torch.full((2, 2), 255.0 + world).bfloat16())
    all_reduce_small([tensors[-1]], dist.group.WORLD, op="max")
    assert tensors[-1].item()


@pytest.mark.ranks(3)
@pytest.mark.parametrize(("op", "expected"), [("max", [2, 0]), ("min", [0, -2])])
def test_small_extremes(op, expected):
    rank = dist.get_rank()
    for dtype in (torch.int32, torch.float64, torch.bfloat16):
        tensor = torch.tensor([rank, -rank], dtype=dtype)
        all_reduce_small([tensor], dist.group.WORLD, op=op)
        assert tensor.tolist() == expected


@pytest.mark.ranks(2)
def test_a_small_reduction_writes_through_views_with_strides():
    table = torch.zeros(3, 3)
    table[:, 1] = 1.0 + dist.get_rank()
    all_reduce_small([table[:, 1]], dist.group.WORLD)
    assert table.tolist() == [[0.0, 3.0, 0.0]] * 3


def test_a_group_of_one_copies_and_nothing_else():
    source, output = torch.arange(6.0), torch.empty(6)
    all_gather_into(output, source, None, async_op=True).wait()
    assert torch.equal(output, source)
    all_gather_into(source, source, None)
    all_to_all(output, -source, None).wait()
    assert torch.equal(output, -source)
    broadcast(source, None)
    all_reduce_small([source], None)
    assert torch.equal(source, torch.arange(6.0))


REFUSED = [
    (lambda: all_gather_into(torch.empty(5), torch.empty(4), None), "5 elements, but 1 pieces"),
    (lambda: all_gather_into(torch.empty(4), torch.empty(4).int(), None), "cast the input"),
    (lambda: all_gather_into(torch.empty(4), torch.empty(4).view(2, 2), None), "flat"),
    (lambda: (lambda x: all_gather_into(x[1:], x[:-1], None))(torch.empty(5)), "share memory"),
    (lambda: all_to_all(torch.empty(4), torch.empty(4, 1), None), "must agree in dtype and in all"),
    (lambda: all_to_all(torch.empty(()), torch.empty(()), None), "at least one dimension"),
    (lambda: all_to_all(torch.empty(3), torch.empty(4), None), "sends itself 4 rows but expects 3"),
    (
        lambda: all_to_all(torch.empty(4), torch.empty(4), None, input_splits=[3]),
        r"input_splits=\[3\] sum to 3, but the tensor has 4 rows",
    ),
    (lambda: broadcast(torch.empty(4), None, src=1), "src=1 is not a rank of the group"),
    (lambda: broadcast(torch.empty(4)[::2], None), "contiguous"),
    (lambda: all_reduce_small([torch.empty(4)], None, op="mean"), "not 'mean'"),
]


@pytest.mark.parametrize(("call", "reason"), REFUSED, ids=range(len(REFUSED)))
def test_a_wrong_call_is_refused_with_its_reason(call, reason):
    with pytest.raises(ValueError, match=reason):
        call()


def test_what_is_no_group_is_told_where_groups_come_from():
    axis = MeshAxis("dp", 1, 0, (0,), None)
    with pytest.raises(TypeError, match=r"pass axis\.group or axis\.sibling"):
        all_gather_into(torch.empty(4), torch.empty(4), axis)
    with pytest.raises(TypeError, match="'dp' is no process group"):
        broadcast(torch.empty(4), "dp")


@pytest.mark.ranks(2)
def test_rows_that_do_not_divide_need_splits():
    with pytest.raises(
        ValueError, match=r"shape \(5,\) has size 5, which is not divisible by the group's 2"
    ):
        all_to_all(torch.empty(5), torch.empty(5), dist.group.WORLD)


@pytest.mark.ranks(2)
@pytest.mark.parametrize("messages", [False, True])
def test_a_check_finds_ranks_that_call_different_things(messages):
    rank, group = dist.get_rank(), dist.new_group()
    if messages:
        use_messages(group)
    numel = 4 + rank
    with pytest.raises(ValueError, match=r"rank 0: .*input=4\)\n  rank 1: .*input=5\)"):
        all_gather_into(torch.empty(2 * numel), torch.empty(numel), group, check=True)
    piece = torch.empty(1)
    others = [lambda: all_gather_into(torch.empty(2), piece, group, check=True)]
    others.append(lambda: broadcast(piece, group, check=True))
    with pytest.raises(ValueError, match="rank 1: broadcast"):
        others[rank]()
    sends = [1, 2] if rank == 0 else [0, 1]
    receives = [1, 0] if rank == 0 else [1, 1]
    source, output = torch.empty(sum(sends)), torch.empty(sum(receives))
    splits = {"input_splits": sends, "output_splits": receives}
    with pytest.raises(ValueError, match="rank 0 sends 2 rows to rank 1, which expects 1"):
        all_to_all(output, source, group, check=True, **splits)
    output = torch.empty(2)
    all_gather_into(output, torch.full((1,), float(rank)), group, check=True)
    assert output.tolist() == [0.0, 1.0]


def test_numbers_for_hosts_travel_between_hosts_where_all_groups_serve_them() -> None:
    def serving(*kinds: str) -> Any:
        return SimpleNamespace(_device_types=[torch.device(kind) for kind in kinds])

    both, nccl = serving("cpu", "cuda"), serving("cuda")
    assert host_device([both, None, both], "cuda:1") == torch.device("cpu")
    assert host_device([both, nccl], "cuda:1") == torch.device("cuda:1")
    assert host_device([None], "cuda") == torch.device("cpu"), "one rank asks nobody"
