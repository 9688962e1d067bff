"""Parameters that tp or ep has cut are saved and loaded as parts of one whole tensor."""

from __future__ import annotations

import copy

import pytest
import torch
import torch.distributed as dist
import torch.distributed.checkpoint as dcp
from hypothesis import given, settings
from hypothesis import strategies as st

from lamina.buffers import BufferLayout, FlatBuffer, Shard, ShardedTensor, TensorSpec
from lamina.buffers.engine import PlainAxis, TensorPart, TensorRegion


def tp_piece(whole, dim, rank, size, blocks=None):
    """Oracle: what a tp rank's module holds, cut and put together by torch."""
    parts = whole.split(list(blocks), dim) if blocks else [whole]
    return torch.cat([part.chunk(size, dim)[rank] for part in parts], dim)


def part_of(local, region, world, rank):
    """The part that data-parallel `rank` of `world` holds of a tp rank's tensor."""
    layout = BufferLayout.plan([TensorSpec("w", tuple(local.shape))], world, alignment=1)
    buffer = FlatBuffer(layout, Shard(), local.dtype, mesh=PlainAxis("dp", world, rank))
    buffer.load("w", local)
    return TensorPart(buffer.as_sharded("w"), region)


CASES = {
    "column": ((8, 6), 0, None),
    "row": ((6, 8), 1, None),
    "fused qkv": ((16, 5), 0, (8, 4, 4)),
    "fused gate and up": ((12, 3), 0, (6, 6)),
    "bias of a column": ((8,), 0, None),
    "middle of a cube": ((3, 12, 2), 1, (8, 4)),
}


@pytest.mark.parametrize("name", list(CASES))
@pytest.mark.parametrize("tp", [1, 2])
@pytest.mark.parametrize("dp", [1, 3])
def test_parts_of_all_ranks_tile_the_whole(name, tp, dp):
    shape, dim, blocks = CASES[name]
    whole = torch.arange(1.0, torch.Size(shape).numel() + 1).view(shape)
    read = torch.zeros(shape)
    for t in range(tp):
        region = TensorRegion.whole(shape).cut(dim, t, tp, blocks)
        local = tp_piece(whole, dim, t, tp, blocks)
        assert region.part_shape == tuple(local.shape)
        for d in range(dp):
            part = part_of(local, region, dp, d)
            assert part.shape == whole.shape
            for box in part.boxes():
                into = read
                for axis, (offset, size) in enumerate(zip(box.offsets, box.sizes, strict=True)):
                    into = into.narrow(axis, offset, size)
                assert bool((into == 0).all())
                into.copy_(part.view_of(box))
    assert torch.equal(read, whole)


@settings(max_examples=60, deadline=None)
@given(st.data())
def test_a_whole_copied_into_parts_gives_each_its_elements(data):
    ep, tp, dp = (data.draw(st.integers(1, 2)) for _ in range(3))
    shape = (2 * data.draw(st.integers(1, 2)), 4 * data.draw(st.integers(1, 2)), 3)
    blocks = (shape[1] // 2, shape[1] // 2)
    whole = torch.randn(shape, generator=torch.Generator().manual_seed(0))
    for e in range(ep):
        for t in range(tp):
            region = TensorRegion.whole(shape).cut(0, e, ep).cut(1, t, tp, blocks)
            local = tp_piece(tp_piece(whole, 0, e, ep), 1, t, tp, blocks)
            for d in range(dp):
                expected = part_of(local, region, dp, d)
                target = part_of(torch.zeros_like(local), region, dp, d)
                target.copy_(whole)
                assert torch.equal(target.to_local(), expected.to_local())


@pytest.mark.ranks(4)
@pytest.mark.parametrize("name", ["column", "row", "fused qkv", "middle of a cube"])
def test_a_checkpoint_is_read_on_another_mesh(tmp_path, name):
    shape, dim, blocks = CASES[name]
    whole = torch.randn(shape, generator=torch.Generator().manual_seed(0))

    def state(tp, values):
        d, t = divmod(dist.get_rank(), tp)
        region = TensorRegion.whole(shape).cut(dim, t, tp, blocks)
        local = tp_piece(values, dim, t, tp, blocks)
        return {"w": part_of(local, region, 4 // tp, d)}

    dcp.save(state(2, whole), checkpoint_id=str(tmp_path / "x"))
    dcp.async_save(state(4, whole), checkpoint_id=str(tmp_path / "y")).result()
    for path in ("x", "y"):
        for tp in (1, 4, 2):
            loaded = state(tp, torch.zeros(shape))
            dcp.load(loaded, checkpoint_id=str(tmp_path / path))
            assert torch.equal(loaded["w"].to_local(), state(tp, whole)["w"].to_local())
        plain = {"w": torch.zeros(shape)}
        dcp.load(plain, checkpoint_id=str(tmp_path / path))
        assert torch.equal(plain["w"], whole)


def test_a_part_shares_memory_with_its_parameter_and_copies_apart():
    whole = torch.randn(8, 6)
    part = part_of(whole[:4], TensorRegion.whole((8, 6)).cut(0, 0, 2), 1, 0)
    plain = whole[4:].clone()
    other = TensorPart(plain, TensorRegion.whole((8, 6)).cut(0, 1, 2))
    assert other.to_local().data_ptr() == plain.data_ptr()
    twin = copy.deepcopy(part)
    twin.to_local().zero_()
    assert bool(part.to_local().any())
    twin.copy_(part)
    assert torch.equal(twin.to_local(), part.to_local())
    assert part.to(torch.bfloat16).to_local().dtype == torch.bfloat16
    assert "TensorPart(shape=[8, 6]" in repr(part)
    with pytest.raises(ValueError, match="another part"):
        part.copy_(other)


def whole_span():
    return ShardedTensor(torch.zeros(48), (8, 6))


@pytest.mark.parametrize(
    ("call", "error", "words"),
    [
        (lambda part: part + 1, NotImplementedError, "for checkpoints"),
        (lambda part: part.copy_(torch.zeros(2)), ValueError, "not the whole of shape"),
        (lambda part: torch.zeros(8, 6).copy_(part), NotImplementedError, "TensorPart"),
        (lambda part: part.copy_(whole_span()), NotImplementedError, "ShardedTensor together"),
        (lambda part: whole_span().copy_(part), NotImplementedError, "ShardedTensor.*together"),
        (lambda part: part.__reduce_ex__(2), NotImplementedError, "not pickled"),
        (
            lambda part: TensorPart(torch.zeros(3, 3), part.tensor_region),
            ValueError,
            r"\[3, 3\] is not the part \(4, 6\) of \(8, 6\)",
        ),
        (
            lambda part: TensorPart(torch.zeros(6, 4).t(), part.tensor_region),
            ValueError,
            "contiguous",
        ),
        (lambda part: part.tensor_region.cut(0, 0, 2), ValueError, "cut already"),
        (lambda part: TensorRegion.whole((8, 6)).cut(1, 0, 4), ValueError, "multiple of 4"),
        (lambda part: TensorRegion.whole((8, 6)).cut(0, 2, 2), ValueError, "piece 2 of 2"),
        (lambda part: TensorRegion.whole((8,)).cut(0, 0, 2, (4, 2)), ValueError, "add up to 8"),
    ],
)
def test_what_a_part_cannot_do_is_named(call, error, words):
    part = part_of(torch.zeros(4, 6), TensorRegion.whole((8, 6)).cut(0, 0, 2), 1, 0)
    with pytest.raises(error, match=words):
        call(part)
