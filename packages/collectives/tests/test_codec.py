"""Gradient codecs: a wire that carries scales, and the casts that are the wires of every day."""

from __future__ import annotations

import os

import pytest
import torch
import torch.distributed as dist

from lamina.collectives import (
    DamagedMessageError,
    Ledger,
    all_reduce_fp32,
    reduce_scatter_fp32,
)
from lamina.collectives.engine import Cast, Checksums, ErrorFeedback, Int8Blocks, use_messages
from lamina.collectives.reduction.codec import Wire


class BlockInt8:
    """Eight bits per element, and one fp32 scale per block."""

    dtype, side_dtype = torch.int8, torch.float32

    def __init__(self, block: int = 64) -> None:
        self.block = block

    def encode(self, values: torch.Tensor, codes: torch.Tensor, side: torch.Tensor | None) -> None:
        assert side is not None
        side.copy_(values.abs().amax(dim=1) / 127)
        steps = values / torch.where(side == 0, 1, side)[:, None]
        codes.copy_(steps.round().clamp(-127, 127))

    def decode(self, codes: torch.Tensor, side: torch.Tensor | None, values: torch.Tensor) -> None:
        assert side is not None
        values.copy_(codes).mul_(side[:, None])


def of_rank(rank: int, numel: int) -> torch.Tensor:
    """Numbers whose size differs from block to block, so that one scale for all would not do."""
    generator = torch.Generator().manual_seed(rank)
    exponents = torch.randint(-3, 4, (-(-numel // 64),), generator=generator)
    return torch.randn(numel, generator=generator) * (10.0**exponents).repeat_interleave(64)[:numel]


def rounded(piece: torch.Tensor, block: int) -> list[float]:
    """What int8 blocks make of one rank's piece: an oracle in Python's floats, block by block."""
    found: list[float] = []
    for start in range(0, piece.numel(), block):
        values: list[float] = piece[start : start + block].tolist()
        scale = torch.tensor(max(map(abs, values))).div(127).item()
        found += [round(float(torch.tensor(v) / (scale or 1))) * scale for v in values]
    return found


def require_sum(found: torch.Tensor, own: slice, world: int, numel: int, piece: int) -> None:
    """The fp64 sum over ranks of what their numbers become, but for fp32 roundings."""
    rows = []
    for rank in range(world):
        pieces = of_rank(rank, numel).split(piece)
        rows.append([value for one in pieces for value in rounded(one, 64)])
    terms = torch.tensor(rows, dtype=torch.float64)[:, own]
    assert ((found.double() - terms.sum(0)).abs() <= terms.abs().sum(0) * 2**-22).all()


@pytest.mark.matrix(strength=1)
@pytest.mark.ranks(2, 4)
@pytest.mark.parametrize("messages", [False, True], ids=["read", "messages"])
@pytest.mark.parametrize("piece", [64 * 7, 64 * 7 + 5], ids=["whole blocks", "a short block"])
def test_a_wire_with_scales_sums_what_each_ranks_codes_stand_for(piece, messages):
    world, rank, group = dist.get_world_size(), dist.get_rank(), dist.new_group()
    if messages:
        use_messages(group)
    output = torch.full((piece,), torch.nan)
    with Ledger() as ledger:
        reduce_scatter_fp32(
            output, of_rank(rank, world * piece), group, codec=BlockInt8(), async_op=True
        ).wait()
    own = slice(rank * piece, (rank + 1) * piece)
    require_sum(output, own, world, world * piece, piece)
    blocks = -(-piece // 64)
    assert ledger.bytes() == (world - 1) * blocks * (64 + 4), "codes and scales"


@pytest.mark.skipif("VGPU_COMPUTE" in os.environ, reason="Triton's interpreter takes minutes")
@pytest.mark.matrix(strength=1, few=1)
@pytest.mark.ranks(2, 4)
@pytest.mark.parametrize("messages", [False, True], ids=["read", "messages"])
def test_large_pieces_with_scales_are_read_and_received_in_parts(messages):
    """Large enough for parts of messages, and for several blocks of the sum."""
    world, rank, group = dist.get_world_size(), dist.get_rank(), dist.new_group()
    if messages:
        use_messages(group)
    piece, codec = (7 << 19) + 3, BlockInt8(256)
    whole = torch.randn(world * piece, generator=torch.Generator().manual_seed(rank))
    output = torch.empty(piece)
    reduce_scatter_fp32(output, whole, group, codec=codec, scale=0.5)
    ours = torch.zeros(piece, dtype=torch.float64)
    for source in range(world):
        theirs = torch.randn(world * piece, generator=torch.Generator().manual_seed(source))
        values = torch.zeros(-(-piece // 256) * 256)
        values[:piece] = theirs[rank * piece : (rank + 1) * piece]
        rows = values.view(-1, 256)
        scale = rows.abs().amax(1, keepdim=True) / 127
        ours += ((rows / scale).round() * scale).view(-1)[:piece].double()
    torch.testing.assert_close(output.double(), ours * 0.5, rtol=1e-6, atol=1e-6)


@pytest.mark.ranks(3)
def test_an_all_reduce_and_a_group_of_one_take_the_same_wire():
    world, rank, numel = dist.get_world_size(), dist.get_rank(), 500
    piece = -(-numel // world)
    output = torch.empty(numel)
    all_reduce_fp32(output, of_rank(rank, numel), dist.group.WORLD, codec=BlockInt8())
    require_sum(output, slice(0, numel), world, numel, piece)
    reduce_scatter_fp32(output, of_rank(rank, numel), None, codec=BlockInt8())
    alone = torch.tensor(rounded(of_rank(rank, numel), 64), dtype=torch.float64)
    torch.testing.assert_close(output.double(), alone, rtol=1e-6, atol=1e-7)


@pytest.mark.ranks(3)
@pytest.mark.parametrize("dtype", [torch.bfloat16, torch.float16, torch.float32, torch.float64])
def test_a_cast_has_the_bits_of_an_input_that_was_cast_before(dtype):
    rank, group = dist.get_rank(), dist.group.WORLD
    whole = of_rank(rank, 3 * 1009)
    first, second = torch.empty(1009), torch.empty(1009)
    with Ledger() as ledger:
        reduce_scatter_fp32(first, whole, group, codec=Cast(dtype))
        reduce_scatter_fp32(second, whole.to(dtype), group)
    assert torch.equal(first, second)
    one, other = ledger.records
    assert (
        (one.dtype, one.bytes) == (other.dtype, other.bytes) == (dtype, 2 * 1009 * dtype.itemsize)
    )


@pytest.mark.parametrize("block", [0, 3, 8192])
def test_a_block_that_no_sum_can_be_cut_at_is_refused(block):
    with pytest.raises(ValueError, match=f"BlockInt8.block={block} must be a power of two"):
        reduce_scatter_fp32(torch.empty(4), torch.empty(4), None, codec=BlockInt8(block))


def test_side_data_that_would_not_be_aligned_are_refused():
    with pytest.raises(ValueError, match="would not be aligned"):
        reduce_scatter_fp32(torch.empty(4), torch.empty(4), None, codec=BlockInt8(2))


@pytest.mark.parametrize("numel", [128, 1000])
def test_what_a_wire_has_lost_comes_later(numel):
    """Over many reductions the error stays that of one; without feedback it grows."""
    gradient, turns = of_rank(5, numel), 200
    errors = {}
    for name, codec in (("kept", ErrorFeedback(Int8Blocks())), ("dropped", Int8Blocks())):
        total, output = torch.zeros(numel, dtype=torch.float64), torch.empty(numel)
        for _ in range(turns):
            reduce_scatter_fp32(output, gradient, None, codec=codec)
            total += output
        errors[name] = (total - turns * gradient.double()).abs()
    step = torch.cat([one.abs().max().expand(len(one)) for one in gradient.split(128)]) / 127
    assert (errors["kept"] <= 1.01 * step).all()
    assert errors["dropped"].max() > 20 * errors["kept"].max()


def test_an_infinity_is_seen_and_does_not_spoil_the_next_step():
    codec, gradient, output = ErrorFeedback(Int8Blocks()), torch.randn(256), torch.empty(256)
    spoiled = gradient.clone()
    spoiled[3] = float("inf")
    assert reduce_scatter_fp32(output, spoiled, None, codec=codec).nonfinite
    handle = reduce_scatter_fp32(output, gradient, None, codec=codec)
    assert not handle.nonfinite
    assert ((output - gradient).abs() <= 2 * gradient.abs().max() / 127).all()


@pytest.mark.ranks(3)
@pytest.mark.parametrize("messages", [False, True], ids=["read", "messages"])
def test_checksums_leave_the_bits_alone_and_name_who_sent_a_flipped_one(
    messages, ranks, monkeypatch
):
    """The oracle for the bits is the sum of the plain wire, and for the name the planted rank."""
    group = dist.group.WORLD
    if messages:
        use_messages(group)
    encode = Wire.encode

    def flipping(self, values, wire, piece):
        encode(self, values, wire, piece)
        if fault is not None and ranks.rank == fault[0]:
            owner, element, bit = fault[1:]
            rows = wire.view(3, -1)[owner]
            block, rest = divmod(element, 1024)
            raw = rows.view(-1, 8 + 1024 * values.itemsize)[block, 8:]
            raw[rest * values.itemsize + bit // 8] ^= 1 << bit % 8

    monkeypatch.setattr(Wire, "encode", flipping)
    for dtype, piece in ((torch.float32, 1500), (torch.bfloat16, 2048)):
        values = of_rank(ranks.rank, 3 * piece).to(dtype)
        plain, found = torch.empty(piece), torch.empty(piece)
        fault = None
        reduce_scatter_fp32(plain, values, group)
        reduce_scatter_fp32(found, values, group, codec=Checksums(dtype))
        assert torch.equal(plain, found)
        whole, checked = values.clone(), values.clone()
        all_reduce_fp32(whole, whole, group)
        all_reduce_fp32(checked, checked, group, codec=Checksums(dtype))
        assert torch.equal(whole, checked)
        for fault in ((1, 2, piece - 1, 15), (2, 2, 0, 0), (0, 1, 1023, 7)):
            handle = reduce_scatter_fp32(
                found, values, group, codec=Checksums(dtype), async_op=True
            )
            if ranks.rank == fault[1]:
                with pytest.raises(
                    DamagedMessageError, match=rf"what rank {fault[0]} sent.*rank {fault[1]}:"
                ):
                    handle.wait()
            else:
                handle.wait()
