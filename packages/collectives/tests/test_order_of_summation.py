"""Law 2: one order of summation over ranks, whatever the group, the transport and the route."""

from __future__ import annotations

import struct

import pytest
import torch
import torch.distributed as dist

from lamina.collectives import all_gather_into, all_reduce_fp32, reduce_scatter_fp32
from lamina.collectives.engine import kept_bytes, use_messages
from lamina.collectives.transport.chunked_messages import AHEAD, PART
from lamina.mesh import ParallelLayout
from lamina_testing import device_type

PIECE = 1009  # prime: no block or vector width divides it
WIRES = [torch.float32, torch.bfloat16]


def of_rank(rank: int, numel: int, wire: torch.dtype) -> torch.Tensor:
    """Input of `rank`: large and small numbers of both signs, so that every order differs."""
    generator = torch.Generator().manual_seed(rank)
    numbers = torch.randn(numel, generator=generator)
    return (numbers * 10 ** torch.randint(-3, 4, (numel,), generator=generator)).to(wire)


def single(value: float) -> float:
    """Round to fp32 without torch or numpy."""
    return struct.unpack("f", struct.pack("f", value))[0]


def tree(numbers: list[float]) -> float:
    """Pairwise sum in fp32, one number at a time: split at the largest power of two below N."""
    if len(numbers) == 1:
        return numbers[0]
    split = 1
    while 2 * split < len(numbers):
        split *= 2
    return single(tree(numbers[:split]) + tree(numbers[split:]))


def oracle(world: int, numel: int, wire: torch.dtype) -> torch.Tensor:
    """Sum over ranks by Python floats: fp64 additions of fp32 numbers, rounded, are exact fp32."""
    rows = [of_rank(rank, numel, wire).float().tolist() for rank in range(world)]
    return torch.tensor([tree(list(column)) for column in zip(*rows, strict=True)])


@pytest.mark.matrix(strength=1)
@pytest.mark.ranks(1, 2, 3, 4, 5, 6, 7, 8)
@pytest.mark.parametrize("wire", WIRES, ids=str)
def test_the_sum_has_the_bits_of_the_tree_in_one_process_and_again(wire):
    group, world, rank = dist.group.WORLD, dist.get_world_size(), dist.get_rank()
    whole = of_rank(rank, world * PIECE, wire)
    mine = oracle(world, world * PIECE, wire)[rank * PIECE : (rank + 1) * PIECE]
    for async_op in (False, True):
        output = torch.full((PIECE,), torch.nan)
        reduce_scatter_fp32(output, whole, group, async_op=async_op).wait()
        assert torch.equal(output, mine)


@pytest.mark.ranks(1, 2, 3, 5, 8)
@pytest.mark.parametrize("wire", WIRES, ids=str)
def test_an_all_reduce_has_the_same_bits_for_any_number_of_elements(wire):
    group, world, rank = dist.group.WORLD, dist.get_world_size(), dist.get_rank()
    for numel in (0, 1, world - 1, 8 * world + 3):
        output = torch.full((numel,), torch.nan)
        all_reduce_fp32(output, of_rank(rank, numel, wire), group)
        assert torch.equal(output, oracle(world, numel, wire))


@pytest.mark.ranks(3)
def test_messages_and_reads_of_a_peers_memory_give_the_same_bits():
    world, rank = dist.get_world_size(), dist.get_rank()
    by_messages = dist.new_group()
    use_messages(by_messages)
    for piece in ((3 << 17) + 3, (9 << 17) + 3):  # sent whole, and in five parts
        whole = torch.randn(world * piece, generator=torch.Generator().manual_seed(rank))
        outputs = [torch.empty(piece), torch.empty(piece)]
        for output, group in zip(outputs, (dist.group.WORLD, by_messages), strict=True):
            reduce_scatter_fp32(output, whole, group)
        assert torch.equal(*outputs)


@pytest.mark.ranks(3)
@pytest.mark.parametrize("wire", [torch.float32, torch.bfloat16], ids=str)
def test_sums_of_parts_in_flight_together_keep_apart(wire):
    """Several at once, one into scratch of the caller's; the memory kept is that of some parts."""
    world, rank, group = dist.get_world_size(), dist.get_rank(), dist.new_group()
    use_messages(group)
    piece = (7 << 22) // wire.itemsize + 5
    whole = torch.randn(world * piece, generator=torch.Generator().manual_seed(rank)).to(wire)
    expected = torch.empty(piece)
    reduce_scatter_fp32(expected, whole, dist.group.WORLD)
    scratch = torch.empty((world - 1) * piece, dtype=wire)
    outputs = [torch.full((piece,), torch.nan) for _ in range(3)]
    kept = kept_bytes()
    handles = [
        reduce_scatter_fp32(output, whole, group, async_op=True, scratch=given)
        for output, given in zip(outputs, (None, scratch, None), strict=True)
    ]
    for handle in handles:
        handle.wait()
    assert all(torch.equal(output, expected) for output in outputs)
    parts = 2 * (world - 1) * AHEAD * PART  # of the two without scratch; each chunk has 28
    assert kept_bytes() - kept <= parts + (4 << 20)  # and the workspaces of their sums


def over_two_axes(outer: int, inner: int) -> bool:
    """HSDP: scatter over the inner axis, then reduce over the outer in fp32; equal to flat?"""
    mesh = ParallelLayout(dp_replicate=outer, dp_shard=inner).build(device_type())
    replicate, shard = mesh.axis("dp_replicate"), mesh.axis("dp_shard")
    world, rank = dist.get_world_size(), dist.get_rank()
    whole = of_rank(rank, inner * PIECE, torch.bfloat16)
    piece, total = torch.empty(PIECE), torch.empty(PIECE)
    reduce_scatter_fp32(piece, whole, shard.group)
    all_reduce_fp32(total, piece, replicate.group, scale=1 / 3)
    flat = oracle(world, inner * PIECE, torch.bfloat16)
    flat = flat[shard.rank * PIECE : (shard.rank + 1) * PIECE]
    return torch.equal(total, flat * torch.tensor(1 / 3))


@pytest.mark.ranks(4)
def test_hsdp_2x2_equals_flat_4():
    assert over_two_axes(2, 2)


@pytest.mark.ranks(8)
@pytest.mark.parametrize("shape", [(2, 4), (4, 2)], ids=str)
def test_hsdp_of_8_ranks_equals_flat_8(shape):
    assert over_two_axes(*shape)


@pytest.mark.ranks(6)
def test_hsdp_2x3_is_another_tree():
    """Documented: only a power of two of inner ranks is a subtree of the flat group's tree."""
    same = torch.tensor([int(over_two_axes(2, 3))])
    gathered = torch.empty(6, dtype=torch.int64)
    all_gather_into(gathered, same, dist.group.WORLD)
    assert gathered.sum() < 6
