"""Flat buffers: any tensors through any placements come back whole."""

from __future__ import annotations

import itertools

import pytest
import torch
from hypothesis import given, settings
from hypothesis import strategies as st
from torch.distributed.device_mesh import init_device_mesh

from lamina.buffers import (
    BufferLayout,
    FlatBuffer,
    Granularity,
    Partial,
    Placements,
    Replicate,
    Shard,
    TensorSpec,
)
from lamina.buffers.engine import PlainAxis
from lamina.mesh import ParallelLayout
from lamina.mesh.engine import mesh_axis
from lamina_testing import device_type, live_bytes

SHAPES = st.one_of(
    st.just(()),
    st.tuples(st.integers(0, 50)),
    st.tuples(st.integers(0, 9), st.integers(0, 11)),
    st.tuples(st.integers(1, 3), st.integers(1, 4), st.integers(1, 5)),
)
KINDS = st.sampled_from([Granularity.element(), Granularity.row(), Granularity.tensor()])


def values(specs, seed=0):
    generator = torch.Generator().manual_seed(seed)
    return {spec.name: torch.randn(spec.shape, generator=generator) for spec in specs}


def coordinates(sizes):
    return list(itertools.product(*(range(size) for size in sizes)))


def axes(sizes, coordinate):
    return [
        PlainAxis(f"axis{at}", size, place)
        for at, (size, place) in enumerate(zip(sizes, coordinate, strict=True))
    ]


def buffer_of(layout, placement, sizes, coordinate, **options):
    return FlatBuffer(layout, placement, mesh=axes(sizes, coordinate), **options)


@st.composite
def placed(draw):
    shapes = draw(st.lists(st.tuples(SHAPES, KINDS), min_size=1, max_size=7))
    specs = [TensorSpec(f"t{at}", shape, kind) for at, (shape, kind) in enumerate(shapes)]
    sizes = draw(st.lists(st.integers(1, 4), min_size=1, max_size=2))
    placement = tuple(draw(st.sampled_from([Replicate(), Shard()])) for _ in sizes)
    pieces = 1
    for size in sizes:
        pieces *= size
    return specs, sizes, placement, BufferLayout.plan(specs, pieces, alignment=4)


@settings(max_examples=80, deadline=None)
@given(placed())
def test_any_tensors_come_back_from_any_placements(case):
    """Oracle: paste every rank's span at its start; replicas must agree; nothing may be missing."""
    specs, sizes, placement, layout = case
    full = values(specs)
    found = {name: torch.full((tensor.numel(),), torch.nan) for name, tensor in full.items()}
    for coordinate in coordinates(sizes):
        buffer = buffer_of(layout, placement, sizes, coordinate)
        buffer.load_all(full)
        for name in full:
            span = buffer.as_sharded(name)
            assert span.shape == full[name].shape
            local = span.to_local()
            assert local.data_ptr() == buffer.span_view(name).data_ptr() or not local.numel()
            into = found[name][span.start : span.stop]
            assert bool((into.isnan() | (into == local)).all())
            into.copy_(local)
    for name, tensor in full.items():
        assert torch.equal(found[name].view(tensor.shape), tensor)


@settings(max_examples=40, deadline=None)
@given(placed())
def test_pieces_of_the_ranks_tile_the_buffer(case):
    _, sizes, placement, layout = case
    held = sorted(
        {buffer_of(layout, placement, sizes, place).range for place in coordinates(sizes)}
    )
    assert held[0][0] == 0
    assert held[-1][1] == layout.size
    assert all(left[1] == right[0] for left, right in itertools.pairwise(held))
    assert len({stop - start for start, stop in held}) == 1


def test_the_inner_axis_cuts_first():
    layout = BufferLayout.plan([TensorSpec("w", (24,))], 6, alignment=1)
    outer, inner = 2, 3
    for o, i in coordinates((outer, inner)):
        both = buffer_of(layout, (Shard(), Shard()), (outer, inner), (o, i))
        assert both.range[0] == (i * outer + o) * layout.shard_size
        only_inner = buffer_of(layout, (Replicate(), Shard()), (outer, inner), (o, i))
        low, high = only_inner.range
        assert low <= both.range[0] < both.range[1] <= high


def test_shard_is_the_piece_that_a_collective_leaves_here():
    layout = BufferLayout.plan([TensorSpec("w", (10, 3))], 4, alignment=1)
    whole = buffer_of(layout, Partial(), (4,), (2,))
    assert whole.shard.data_ptr() == whole.data[2 * layout.shard_size :].data_ptr()
    assert whole.shard.numel() == layout.shard_size
    # HSDP: two replicas of two shards. Only the inner axis cuts.
    layout = BufferLayout.plan([TensorSpec("w", (10, 3))], 2, alignment=1)
    hybrid = buffer_of(layout, (Replicate(), Replicate()), (2, 2), (1, 1))
    inner = hybrid.piece((Replicate(), Shard()))
    assert (inner.data_ptr(), inner.numel()) == (hybrid.shard.data_ptr(), layout.shard_size)
    assert hybrid.shard.data_ptr() == hybrid.data[layout.shard_size :].data_ptr()
    assert hybrid.piece((Shard(), Replicate())).data_ptr() == hybrid.shard.data_ptr()
    sharded = buffer_of(layout, (Replicate(), Shard()), (2, 2), (1, 1))
    assert sharded.shard.data_ptr() == sharded.data.data_ptr()
    with pytest.raises(ValueError, match="not among"):
        sharded.piece((Replicate(), Replicate()))


def test_views_share_the_buffer_s_memory():
    specs = [TensorSpec("w", (3, 4)), TensorSpec("s", ()), TensorSpec("e", (0, 2))]
    buffer = FlatBuffer(BufferLayout.plan(specs, 1), Replicate())
    views = buffer.views()
    views["w"].fill_(2.0)
    views["s"].fill_(3.0)
    assert buffer.data.sum() == 12 * 2 + 3
    assert views["e"].shape == (0, 2)
    assert all(
        view.untyped_storage().data_ptr() == buffer.data.data_ptr() for view in views.values()
    )


def test_a_cut_buffer_has_no_shaped_views():
    layout = BufferLayout.plan([TensorSpec("w", (8,))], 2, alignment=1)
    with pytest.raises(ValueError, match=r"elements 4\.\.8 of 8.*axis0=1/2 Shard.*span_view"):
        buffer_of(layout, Shard(), (2,), (1,)).views()


def test_non_contiguous_and_other_dtypes_are_loaded_by_value():
    specs = [TensorSpec("w", (6, 5)), TensorSpec("x", (2, 3, 4))]
    full = {
        "w": torch.arange(30.0).view(5, 6).t(),
        "x": torch.arange(24, dtype=torch.float64).view(4, 3, 2).permute(2, 1, 0),
    }
    layout = BufferLayout.plan(specs, 4, alignment=1)
    for rank in range(4):
        buffer = buffer_of(layout, Shard(), (4,), (rank,))
        buffer.load_all(full)
        for name, tensor in full.items():
            start, stop = buffer.span(name)
            expected = tensor.contiguous().view(-1)[start:stop].float()
            assert torch.equal(buffer.span_view(name), expected)


def test_a_sharded_tensor_of_the_same_cut_is_loaded_and_another_cut_refused():
    layout = BufferLayout.plan([TensorSpec("w", (6, 5))], 2, alignment=1)
    one, two = (buffer_of(layout, Shard(), (2,), (1,)) for _ in range(2))
    one.load("w", torch.randn(6, 5))
    two.load("w", one.as_sharded("w"))
    assert torch.equal(one.data, two.data)
    other = buffer_of(layout, Shard(), (2,), (0,))
    with pytest.raises(ValueError, match="cut differently"):
        other.load("w", one.as_sharded("w"))


def test_missing_and_misshapen_tensors_are_named():
    layout = BufferLayout.plan([TensorSpec("w", (6,)), TensorSpec("b", (2,))], 1)
    buffer = FlatBuffer(layout, Replicate())
    with pytest.raises(ValueError, match=r"1 tensors are missing: b"):
        buffer.load_all({"w": torch.zeros(6)})
    with pytest.raises(ValueError, match=r"w: cannot load shape \[6, 1\] into \[6\]"):
        buffer.load("w", torch.zeros(6, 1))


def test_partial_buffers_give_no_sharded_tensors():
    layout = BufferLayout.plan([TensorSpec("w", (8,))], 2)
    with pytest.raises(ValueError, match=r"Partial.*reduce it first"):
        buffer_of(layout, Partial(), (2,), (0,)).as_sharded("w")


@pytest.mark.ranks(4)
def test_axes_come_from_any_mesh_by_place(ranks):
    layout = BufferLayout.plan([TensorSpec("w", (8,))], 4, alignment=1)
    mesh = init_device_mesh(device_type(), (2, 2), mesh_dim_names=("outer", "inner"))
    o, i = divmod(ranks.rank, 2)
    buffer = FlatBuffer(layout, (Shard(), Shard()), mesh=mesh)
    assert [axis.name for axis in buffer.axes] == ["outer", "inner"]
    assert buffer.range[0] == (i * 2 + o) * layout.shard_size
    with pytest.raises(ValueError, match="1 axes, the DeviceMesh has 2"):
        FlatBuffer(layout, Shard(), mesh=mesh)
    parallel = ParallelLayout(dp_replicate=2, dp_shard=2).build(device_type())
    hybrid = FlatBuffer(layout, (Replicate(), Shard()), mesh=parallel)
    assert [axis.size for axis in hybrid.axes] == [2, 2]
    assert hybrid.range[0] == i * 2 * layout.shard_size
    flat = FlatBuffer(layout, Shard(), mesh=mesh_axis(mesh, ("outer", "inner")))
    assert flat.range[0] == ranks.rank * layout.shard_size
    with pytest.raises(ValueError, match="one or two data-parallel axes"):
        FlatBuffer(layout, (Replicate(), Replicate(), Shard()), mesh=parallel)


@pytest.mark.parametrize(
    ("call", "error", "words"),
    [
        (
            lambda layout: FlatBuffer(layout, Shard(), mesh=PlainAxis("dp", 3, 0)),
            ValueError,
            "layout of 4 shards does not cut into 3 pieces",
        ),
        (
            lambda layout: FlatBuffer(layout, Shard, mesh=PlainAxis("dp", 4, 0)),
            TypeError,
            "Shard",
        ),
        (
            lambda layout: FlatBuffer(layout, (Shard(), Shard()), mesh=PlainAxis("dp", 4, 0)),
            ValueError,
            "names 2 axes, the mesh gives 1",
        ),
        (
            lambda layout: FlatBuffer(layout, Replicate(), storage=torch.zeros(3)),
            ValueError,
            r"shape \[3\]; a flat tensor of",
        ),
        (
            lambda layout: FlatBuffer(
                layout, Replicate(), torch.bfloat16, storage=torch.zeros(layout.size)
            ),
            ValueError,
            "storage is torch.float32",
        ),
        (
            lambda layout: Placements(Shard(), (Shard(), Shard()), Shard()),
            ValueError,
            "different numbers of axes",
        ),
    ],
)
def test_impossible_buffers_are_named(call, error, words):
    layout = BufferLayout.plan([TensorSpec("w", (8,))], 4)
    with pytest.raises(error, match=words):
        call(layout)


def test_a_buffer_made_in_inference_mode_can_be_saved_for_backward():
    layout = BufferLayout.plan([TensorSpec("w", (4,))], 1)
    with torch.inference_mode():
        buffer = FlatBuffer(layout, Replicate())
    weight = buffer.views()["w"].requires_grad_()
    (weight * weight).sum().backward()
    assert weight.grad is not None


def test_a_lazy_buffer_has_memory_only_while_it_is_used():
    layout = BufferLayout.plan([TensorSpec("w", (4000,))], 1)
    before = live_bytes()
    buffer = FlatBuffer(layout, Replicate(), lazy=True)
    assert not buffer.has_memory
    assert (buffer.numel, buffer.dtype) == (layout.size, torch.float32)
    assert live_bytes() == before
    kept = buffer.span_view("w")
    kept.fill_(2.0)
    buffer.release()
    assert kept.sum() == 8000  # who holds a view keeps its memory
    del kept
    assert live_bytes() == before
    given = FlatBuffer(layout, Replicate(), storage=torch.ones(layout.size), lazy=True)
    given.release()
    assert given.data.sum() == layout.size
