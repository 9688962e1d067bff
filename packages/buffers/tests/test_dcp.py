"""torch.distributed.checkpoint saves and loads sharded tensors across cuts and numbers of ranks."""

from __future__ import annotations

import warnings

import pytest
import torch
import torch.distributed as dist
import torch.distributed.checkpoint as dcp
from hypothesis import given, settings
from hypothesis import strategies as st
from torch import nn
from torch.distributed.checkpoint.metadata import MetadataIndex

from lamina.buffers import BufferLayout, FlatBuffer, Granularity, Replicate, Shard, TensorSpec
from lamina.buffers.engine import PlainAxis
from lamina_testing import device_type

SHAPES = {
    "matrix": (13, 8),
    "scalar": (),
    "empty": (0, 3),
    "vector": (17,),
    "experts": (4, 6, 5),
    "conv": (3, 2, 3, 3),
}


def values(seed=0):
    generator = torch.Generator().manual_seed(seed)
    drawn = {name: torch.randn(shape, generator=generator) for name, shape in SHAPES.items()}
    return {name: tensor.to(device_type()) for name, tensor in drawn.items()}


def cut(sizes, place, placement, kind=None, alignment=1):
    """A buffer of all tensors for the rank at `place` of axes of `sizes`."""
    pieces = 1
    axes = []
    for at, (size, one) in enumerate(zip(sizes, placement, strict=True)):
        pieces *= size if isinstance(one, Shard) else 1
        axes.append(PlainAxis(f"axis{at}", size, place[at]))
    granularity = kind or Granularity.element()
    specs = [TensorSpec(name, shape, granularity) for name, shape in SHAPES.items()]
    layout = BufferLayout.plan(specs, pieces, alignment=alignment)
    return FlatBuffer(layout, placement, mesh=axes, device=device_type())


def flat_cut(group_size, rank, **options):
    return cut((group_size,), (rank,), (Shard(),), **options)


def agrees(buffer, full):
    return all(
        torch.equal(buffer.span_view(name), tensor.flatten()[slice(*buffer.span(name))])
        for name, tensor in full.items()
    )


def subgroups():
    """Groups of 4, 3, 2 and 1 of the four ranks, made on all of them."""
    return {size: dist.new_group(list(range(size))) for size in (4, 3, 2, 1)}


@pytest.mark.ranks(4)
def test_any_number_of_ranks_reads_what_any_other_wrote(tmp_path):
    full, groups, rank = values(), subgroups(), dist.get_rank()
    for saved in (4, 3):
        path = str(tmp_path / str(saved))
        if rank < saved:
            buffer = flat_cut(saved, rank, alignment=4)
            buffer.load_all(full)
            dcp.save({"model": buffer.sharded()}, checkpoint_id=path, process_group=groups[saved])
        dist.barrier()
        for loaded in (4, 3, 2, 1):
            if rank < loaded:
                # Another cut as well: rows stay whole, tensors may lie in another order.
                buffer = flat_cut(loaded, rank, kind=Granularity.row())
                state = {"model": buffer.sharded()}
                dcp.load(state, checkpoint_id=path, process_group=groups[loaded])
                assert agrees(buffer, full), (saved, loaded)
        dist.barrier()


@pytest.mark.ranks(4)
def test_replicas_are_written_once_and_read_by_all(tmp_path):
    full = values()
    place = divmod(dist.get_rank(), 2)
    hybrid = cut((2, 2), place, (Replicate(), Shard()))
    hybrid.load_all(full)
    dcp.save({"model": hybrid.sharded()}, checkpoint_id=str(tmp_path / "x"))
    payload = sum(tensor.numel() * 4 for tensor in full.values())
    metadata = dcp.FileSystemReader(str(tmp_path / "x")).read_metadata()
    for name, tensor in full.items():
        chunks = metadata.state_dict_metadata[f"model.{name}"].chunks
        assert sum(chunk.sizes.numel() for chunk in chunks) == tensor.numel()
    stored = {
        index: info.length for index, info in (metadata.storage_data or {}).items() if info.length
    }
    elements = sum(
        chunk.sizes.numel() * 4
        for index in stored
        for chunk in metadata.state_dict_metadata[index.fqn].chunks
        if chunk.offsets == index.offset
    )
    assert elements == payload
    both = cut((2, 2), place, (Shard(), Shard()))
    dcp.load({"model": both.sharded()}, checkpoint_id=str(tmp_path / "x"))
    assert agrees(both, full)


@pytest.mark.ranks(2)
def test_whole_tensors_and_spans_read_each_other(tmp_path):
    full = values()
    buffer = flat_cut(2, dist.get_rank())
    buffer.load_all(full)
    dcp.save({"model": buffer.sharded()}, checkpoint_id=str(tmp_path / "spans"))
    plain = {name: torch.zeros_like(tensor) for name, tensor in full.items()}
    with warnings.catch_warnings():
        warnings.simplefilter("ignore")  # torch says that it loads in a single process
        dcp.load({"model": plain}, checkpoint_id=str(tmp_path / "spans"), no_dist=True)
    assert all(torch.equal(plain[name], full[name]) for name in full)
    dcp.save({"model": full}, checkpoint_id=str(tmp_path / "plain"))
    other = flat_cut(2, dist.get_rank(), kind=Granularity.tensor())
    dcp.load({"model": other.sharded()}, checkpoint_id=str(tmp_path / "plain"))
    assert agrees(other, full)


@pytest.mark.ranks(2)
def test_an_asynchronous_save_stages_the_values_of_its_call(tmp_path):
    full = values()
    buffer = flat_cut(2, dist.get_rank())
    buffer.load_all(full)
    pending = dcp.async_save({"model": buffer.sharded()}, checkpoint_id=str(tmp_path / "x"))
    buffer.data.fill_(7.0)  # the next step overwrites the weights while the file is written
    pending.result()
    loaded = flat_cut(2, dist.get_rank())
    dcp.load({"model": loaded.sharded()}, checkpoint_id=str(tmp_path / "x"))
    assert agrees(loaded, full)


@pytest.mark.ranks(2)
def test_optimizer_state_travels_with_its_parameters(tmp_path):
    def trained(buffer, steps):
        module = nn.Module()
        for name, tensor in buffer.sharded().items():
            setattr(module, name, nn.Parameter(tensor))
        optimizer = torch.optim.AdamW(module.parameters(), lr=0.1)
        for step in range(steps):
            for parameter in module.parameters():
                parameter.grad = torch.cos(parameter.detach() + step)
            optimizer.step()
        return module, optimizer

    def state_of(module, optimizer):
        names = [name for name, _ in module.named_parameters()]
        inner = optimizer.state_dict()["state"]
        state = {name: inner[at] for at, name in enumerate(names) if at in inner}
        return {"model": module.state_dict(), "optimizer": state}

    first = flat_cut(2, dist.get_rank())
    first.load_all(values())
    saved = trained(first, 2)
    dcp.save(state_of(*saved), checkpoint_id=str(tmp_path / "x"))
    second = flat_cut(2, dist.get_rank())
    second.load_all(values(seed=1))
    loaded = trained(second, 1)  # makes the state's tensors
    state = state_of(*loaded)
    dcp.load(state, checkpoint_id=str(tmp_path / "x"))
    expected = state_of(*saved)
    for name in values():
        assert torch.equal(first.span_view(name), second.span_view(name))
        for key in ("exp_avg", "exp_avg_sq"):
            got, want = state["optimizer"][name][key], expected["optimizer"][name][key]
            assert torch.equal(got.to_local(), want.to_local())


class Forbidden:
    """A communicator that must not be used."""

    size = 5

    def all_reduce(self, tensor, op):
        raise AssertionError("the checkpoint protocol communicated")

    all_gather = all_reduce


@settings(max_examples=60, deadline=None)
@given(
    st.lists(st.integers(1, 6), max_size=4),
    st.integers(1, 5),
    st.sampled_from([1, 4]),
    st.booleans(),
)
def test_boxes_of_all_ranks_tile_the_tensor_without_communication(shape, world, alignment, row):
    granularity = Granularity.row() if row else Granularity.element()
    spec = TensorSpec("t", tuple(shape), granularity)
    layout = BufferLayout.plan([spec], world, alignment=alignment)
    whole = torch.arange(1.0, spec.numel + 1).view(shape)
    read = torch.zeros(shape)
    for rank in range(world):
        axis = PlainAxis("dp", world, rank)
        buffer = FlatBuffer(layout, Shard(), mesh=axis, communicator=Forbidden())
        buffer.load("t", whole)
        tensor = buffer.as_sharded("t")
        items = tensor.__create_write_items__("t", tensor)
        chunks = tensor.__create_chunk_list__()
        assert [item.tensor_data.chunk for item in items] == chunks
        for chunk in chunks:
            box = tensor.__get_tensor_shard__(MetadataIndex("t", chunk.offsets))
            target = read
            for dim, (offset, size) in enumerate(zip(chunk.offsets, chunk.sizes, strict=True)):
                target = target.narrow(dim, offset, size)
            assert bool((target == 0).all()), "two boxes overlap"
            target.copy_(box)
    assert torch.equal(read, whole)


def test_a_box_that_is_not_here_is_named():
    tensor = flat_cut(4, 3).as_sharded("matrix")
    with pytest.raises(ValueError, match=r"matrix: no box of span .* starts at .*axis0=3/4"):
        tensor.__get_tensor_shard__(MetadataIndex("matrix", torch.Size([0, 0])))
