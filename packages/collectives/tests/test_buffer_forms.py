"""Buffers as a whole: gathered into place, reduced by what their placements say."""

from __future__ import annotations

import pytest
import torch
import torch.distributed as dist

from lamina.buffers import BufferLayout, FlatBuffer, Partial, Replicate, Shard, TensorSpec
from lamina.collectives import gather, reduce
from lamina.mesh import ParallelLayout
from lamina_testing import Meter, device_type

SPECS = [TensorSpec("weight", (7, 5)), TensorSpec("bias", (3,))]


def plan(shards: int) -> BufferLayout:
    return BufferLayout.plan(SPECS, shards, alignment=4)


def mesh_axes(outer: int, inner: int):
    mesh = ParallelLayout(dp_replicate=outer, dp_shard=inner).build(device_type())
    return mesh.axis("dp_replicate"), mesh.axis("dp_shard")


def buffer(layout, placement, **settings):
    return FlatBuffer(layout, placement, device=device_type(), **settings)


@pytest.mark.ranks(1, 2, 3)
@pytest.mark.parametrize("async_op", [False, True])
def test_a_sharded_buffer_is_gathered_into_a_whole_one(async_op):
    _, shard = mesh_axes(1, dist.get_world_size())
    layout = plan(shard.size)
    source = buffer(layout, Shard(), mesh=shard)
    whole = buffer(layout, Replicate(), mesh=shard)
    torch.manual_seed(0)
    tensors = {spec.name: torch.randn(spec.shape) for spec in SPECS}
    source.load_all(tensors)
    gather(source, whole, shard.group, async_op=async_op).wait()
    assert all(torch.equal(view, tensors[name]) for name, view in whole.views().items())


@pytest.mark.ranks(4, 6)
def test_two_sharded_axes_are_gathered_without_rearranging():
    outer, inner = mesh_axes(2, dist.get_world_size() // 2)
    layout = plan(outer.size * inner.size)
    source = buffer(layout, (Shard(), Shard()), mesh=(outer, inner))
    torch.manual_seed(0)
    tensors = {spec.name: torch.randn(spec.shape) for spec in SPECS}
    source.load_all(tensors)
    whole = buffer(layout, (Replicate(), Replicate()), mesh=(outer, inner))
    gather(source, whole, [outer.group, inner.group], async_op=True).wait()
    assert all(torch.equal(view, tensors[name]) for name, view in whole.views().items())


@pytest.mark.ranks(8)
def test_three_sharded_axes_are_gathered_without_rearranging():
    mesh = ParallelLayout(dp_replicate=2, dp_shard=2, cp=2).build(device_type())
    axes = [mesh.axis(name) for name in ("dp_replicate", "dp_shard", "cp")]
    layout = plan(8)
    source = buffer(layout, (Shard(),) * 3, mesh=axes)
    source.data.copy_(torch.arange(layout.size)[slice(*source.range)])
    whole = torch.empty(layout.size)
    groups = [axis.group for axis in axes]
    gather(source, torch.empty(layout.size), groups)  # the ranks get to know each other
    with Meter() as meter:
        gather(source, whole, groups)
    assert torch.equal(whole, torch.arange(float(layout.size)))
    # Its own piece, once, and nothing in between. NCCL copies it itself.
    assert meter.bytes_copied == (0 if device_type() == "cuda" else source.data.nbytes)


@pytest.mark.ranks(2)
@pytest.mark.parametrize("reduction", ["ordered", "native"])
def test_a_partial_buffer_is_scattered_or_reduced_as_its_destination_asks(reduction):
    _, axis = mesh_axes(1, 2)
    layout = plan(2)
    source = buffer(layout, Partial(), mesh=axis)
    source.data.copy_(torch.arange(float(layout.size)) + axis.rank)
    total = 2 * torch.arange(float(layout.size)) + 1
    piece = buffer(layout, Shard(), mesh=axis)
    reduce(source, piece, axis.group, scale=0.5, reduction=reduction, async_op=True).wait()
    assert torch.equal(piece.data, 0.5 * total[slice(*piece.range)])
    whole = buffer(layout, Replicate(), mesh=axis)
    reduce(source, whole, axis.group, accumulate=True, reduction=reduction)
    assert torch.equal(whole.data, total)


@pytest.mark.ranks(2)
def test_what_is_not_partial_is_not_summed_again():
    _, axis = mesh_axes(1, 2)
    source = buffer(plan(2), Replicate(), mesh=axis)
    with pytest.raises(ValueError, match="must not be summed again"):
        reduce(source, source.data.clone(), axis.group)
    with pytest.raises(ValueError, match="must not be summed again"):
        reduce(buffer(plan(2), Partial(), mesh=axis), source, None)


def test_a_world_of_one():
    layout = plan(1)
    source = buffer(layout, Partial())
    source.data.fill_(3.0)
    target = torch.empty(layout.size)
    reduce(source, target, None, scale=0.5)
    assert torch.equal(target, torch.full((layout.size,), 1.5))
    shard = buffer(layout, Shard())
    gather(shard, target, None)
    assert torch.equal(target, torch.zeros(layout.size))


def test_refusals_name_what_does_not_fit():
    layout = plan(1)
    whole, shard = buffer(layout, Replicate()), buffer(layout, Shard())
    with pytest.raises(ValueError, match="sharded along 0 axes"):
        gather(whole, torch.empty(layout.size), None)
    with pytest.raises(ValueError, match=r"holds all .* already"):
        gather(whole, torch.empty(layout.size), [])
    with pytest.raises(ValueError, match="but the layout has"):
        gather(shard, torch.empty(3), None)
    with pytest.raises(ValueError, match="not 'fast'"):
        reduce(buffer(layout, Partial()), whole, None, reduction="fast")
