"""Sums, norms, clipping and gathering of sharded tensors are those of the whole, on real ranks."""

from __future__ import annotations

import math

import pytest
import torch
import torch.distributed as dist
from torch import nn
from torch.distributed.device_mesh import init_device_mesh
from torch.distributed.tensor import Replicate as DReplicate
from torch.distributed.tensor import Shard as DShard
from torch.distributed.tensor import distribute_tensor

from lamina.buffers import (
    BufferLayout,
    FlatBuffer,
    Granularity,
    Replicate,
    Shard,
    ShardedTensor,
    TensorSpec,
)
from lamina.buffers.engine import PlainAxis
from lamina_testing import device_type

SHAPES = {"matrix": (13, 8), "scalar": (), "empty": (0, 3), "vector": (17,), "cube": (5, 3, 4)}
OPS = {"sum": dist.ReduceOp.SUM, "max": dist.ReduceOp.MAX, "min": dist.ReduceOp.MIN}


class Communicator:
    """Meets SpanCommunicator over the default group with torch's own collectives; counts calls."""

    def __init__(self, group=None):
        self.group = group
        self.calls = 0

    @property
    def size(self):
        return dist.get_world_size(self.group)

    def all_reduce(self, tensor, op):
        self.calls += 1
        dist.all_reduce(tensor, OPS[op], group=self.group)
        return tensor

    def all_gather(self, local, numels):
        self.calls += 1
        pieces = [None] * self.size
        dist.all_gather_object(pieces, local, group=self.group)
        return torch.cat([piece.to(local.device) for piece in pieces])


def values(dtype=torch.float32, seed=0):
    generator = torch.Generator().manual_seed(seed)
    return {
        name: (torch.randn(shape, generator=generator) * 10).to(device_type(), dtype)
        for name, shape in SHAPES.items()
    }


def sharded(full, communicator=None, sizes=None, placement=None, alignment=4):
    specs = [TensorSpec(name, tuple(tensor.shape)) for name, tensor in full.items()]
    world, rank = dist.get_world_size(), dist.get_rank()
    sizes = sizes or (world,)
    axes, rest = [], rank
    for at, size in reversed(list(enumerate(sizes))):
        axes.insert(0, PlainAxis(f"axis{at}", size, rest % size))
        rest //= size
    placement = placement or Shard()
    layout = BufferLayout.plan(specs, world, alignment=alignment)
    dtype = next(iter(full.values())).dtype
    communicator = communicator or Communicator()
    place = device_type()
    buffer = FlatBuffer(
        layout, placement, dtype, device=place, mesh=axes, communicator=communicator
    )
    buffer.load_all(full)
    return buffer.sharded()


@pytest.mark.ranks(2, 4)
def test_full_tensor_is_the_whole_on_every_rank():
    for dtype in (torch.float32, torch.bfloat16, torch.int64):
        full = values(dtype)
        for name, tensor in sharded(full).items():
            assert torch.equal(tensor.full_tensor(), full[name])


@pytest.mark.ranks(4)
def test_two_shard_axes_gather_in_element_order():
    full = values()
    for sizes in ((2, 2), (4, 1), (1, 4)):
        for name, tensor in sharded(full, None, sizes, (Shard(), Shard())).items():
            assert torch.equal(tensor.full_tensor(), full[name])
            assert tensor.extents()[dist.get_rank()] == (tensor.start, tensor.stop)


@pytest.mark.ranks(2)
def test_extents_that_nobody_gave_are_gathered():
    whole = torch.arange(7.0)
    cut = [(0, 5), (5, 7)][dist.get_rank()]
    axis = PlainAxis("dp", 2, dist.get_rank())
    tensor = ShardedTensor(whole[slice(*cut)], (7, 1), cut[0], axis, communicator=Communicator())
    assert tensor.extents() == ((0, 5), (5, 7))
    assert torch.equal(tensor.full_tensor(), whole.view(7, 1))


REDUCTIONS = {
    "sum": lambda t: t.sum(),
    "mean": lambda t: t.mean(),
    "sum in double": lambda t: t.sum(dtype=torch.float64),
    "norm": lambda t: t.norm(),
    "norm 1": lambda t: t.norm(1),
    "norm 3": lambda t: torch.linalg.vector_norm(t, 3),
    "norm inf": lambda t: torch.linalg.vector_norm(t, math.inf),
    "norm -inf": lambda t: torch.linalg.vector_norm(t, -math.inf),
    "norm 0": lambda t: torch.linalg.vector_norm(t, 0),
    "max": lambda t: t.max(),
    "min": lambda t: t.min(),
    "amax": lambda t: t.amax(),
    "std": lambda t: t.std(),
    "var": lambda t: t.var(correction=0),
    "all": lambda t: (t > -20).all(),
    "any": lambda t: (t > 15).any(),
    "count": lambda t: torch.count_nonzero(t > 0),
    "dot": lambda t: torch.dot(t.flatten(), t.flatten()),
    "isfinite": lambda t: t.isfinite().all(),
}


@pytest.mark.ranks(2, 4)
def test_reductions_equal_those_of_the_whole_in_double_rounded_once():
    for dtype in (torch.float32, torch.bfloat16):
        full = values(dtype)
        parts = sharded(full)
        for name, reduction in REDUCTIONS.items():
            for key in ("matrix", "vector", "cube"):
                result = reduction(parts[key])
                expected = reduction(full[key].double())
                if result.dtype.is_floating_point:
                    expected = expected.to(result.dtype)
                assert type(result) is torch.Tensor
                # Sums in double may differ in their last bit, which seldom shows after rounding.
                torch.testing.assert_close(
                    result, expected, rtol=torch.finfo(torch.float32).eps, atol=0, msg=name
                )


@pytest.mark.ranks(3)
def test_small_tensors_reduce_whoever_holds_their_elements():
    full = {"scalar": torch.tensor(-3.5), "two": torch.tensor([1.0, -2.0])}
    parts = sharded(full)
    assert parts["scalar"].item() == -3.5
    assert float(parts["scalar"].max()) == -3.5
    assert parts["two"].max() == 1.0
    assert parts["two"].min() == -2.0
    flags = {"flag": torch.tensor([True, False, True])}
    assert sharded(flags)["flag"].any()
    assert not sharded(flags)["flag"].all()
    numbers = sharded({"n": torch.tensor([2**53 + 1, 2])})["n"]
    assert numbers.sum().item() == 2**53 + 3
    assert numbers.max().item() == 2**53 + 1
    empty = sharded({"empty": torch.zeros(0, 3)})["empty"]
    assert empty.sum() == 0
    assert empty.norm() == 0
    with pytest.raises(RuntimeError, match="empty"):
        empty.max()


@pytest.mark.ranks(2)
def test_a_nan_on_one_rank_reaches_every_rank():
    full = values()
    full["matrix"][12, 7] = math.nan  # on the last rank
    part = sharded(full)["matrix"]
    for result in (
        part.sum(),
        part.norm(),
        part.max(),
        part.min(),
        torch.linalg.vector_norm(part, math.inf),
        torch.linalg.vector_norm(part, -math.inf),
    ):
        assert result.isnan()
    assert part.isnan().any()
    full["matrix"][12, 7] = math.inf
    part = sharded(full)["matrix"]
    assert torch.linalg.vector_norm(part, math.inf) == math.inf
    assert part.max() == math.inf


@pytest.mark.ranks(2, 4)
def test_clip_grad_norm_clips_by_the_norm_of_all_elements():
    for norm_type in (2.0, math.inf, 1.0):
        for foreach in (None, True, False):
            full = values()
            whole = [nn.Parameter(torch.zeros_like(tensor)) for tensor in full.values()]
            for parameter, grad in zip(whole, full.values(), strict=True):
                parameter.grad = grad.clone()
            kept = [(n, t) for n, t in full.items() if t.numel() or norm_type == 2.0]
            parts = sharded(dict(kept))
            mine = [nn.Parameter(torch.zeros_like(part)) for part in parts.values()]
            for parameter, grad in zip(mine, parts.values(), strict=True):
                parameter.grad = grad
            total = nn.utils.clip_grad_norm_(mine, 0.5, norm_type, foreach=foreach)
            used = [p for p in whole if p.numel() or norm_type == 2.0]
            expected = nn.utils.clip_grad_norm_(used, 0.5, norm_type)
            torch.testing.assert_close(total, expected)
            for parameter, reference in zip(mine, used, strict=True):
                torch.testing.assert_close(parameter.grad.full_tensor(), reference.grad)


@pytest.mark.ranks(2)
def test_many_norms_cost_one_communication():
    communicator = Communicator()
    parts = list(sharded(values(), communicator).values())
    norms = torch._foreach_norm(parts)
    assert communicator.calls == 1
    for norm, tensor in zip(norms, values().values(), strict=True):
        assert torch.equal(norm, tensor.double().norm().float())


@pytest.mark.ranks(2)
def test_norms_over_different_meshes_in_one_call_are_refused():
    one = sharded(values())["matrix"]
    alone = dist.new_group([dist.get_rank()], use_local_synchronization=True)
    axis = PlainAxis("expert_dp", 2, 0)
    other = ShardedTensor(torch.ones(4), (8,), 0, axis, communicator=Communicator(alone))
    with pytest.raises(NotImplementedError, match=r"lamina\.ddp\.clip_grad_norm"):
        torch._foreach_norm([one, other])


@pytest.mark.ranks(2)
def test_replicated_and_sharded_tensors_are_clipped_together():
    full = {"matrix": values()["matrix"]}
    whole = torch.arange(6.0)
    tensors = [sharded(full)["matrix"], ShardedTensor(whole, (2, 3))]
    norms = torch._foreach_norm(tensors)
    assert torch.equal(norms[0], full["matrix"].double().norm().float())
    assert torch.equal(norms[1], whole.double().norm().float())
    hybrid = sharded(full, None, (2, 1), (Replicate(), Shard()))["matrix"]
    assert torch.equal(hybrid.full_tensor(), full["matrix"])


@pytest.mark.ranks(2)
def test_a_gradient_scaler_skips_the_step_on_all_ranks_if_one_rank_overflows():
    for overflow in (False, True):
        full = {"w": torch.ones(11, 3)}
        parameter = nn.Parameter(sharded(full)["w"])
        grad = torch.full((11, 3), 4.0)
        if overflow:
            grad[0, 0] = math.inf  # on rank 0 alone
        parameter.grad = sharded({"w": grad})["w"]
        optimizer = torch.optim.SGD([parameter], lr=0.5)
        scaler = torch.amp.GradScaler(device_type(), init_scale=4.0)
        scaler.scale(torch.tensor(1.0))
        scaler.step(optimizer)
        scaler.update()
        expected = 1.0 if overflow else 0.5
        assert bool((parameter.detach().to_local() == expected).all())
        assert scaler.get_scale() == (2.0 if overflow else 4.0)


@pytest.mark.ranks(2, 4)
def test_equality_is_of_all_elements():
    full = values()
    one, two = sharded(full), sharded(full)
    assert torch.equal(one["matrix"], two["matrix"])
    assert torch.allclose(one["matrix"], two["matrix"] * (1 + 1e-7))
    two["matrix"].to_local()[: dist.get_rank() == 0] += 1
    assert not torch.equal(one["matrix"], two["matrix"])


# -- DTensor ------------------------------------------------------------------------------------


def rows_on(world, rows, width, alignment=1, communicator=None):
    """A tensor of `rows` whole rows per shard and nothing else in the buffer."""
    layout = BufferLayout.plan(
        [TensorSpec("w", (rows, width), Granularity.row())], world, alignment=alignment
    )
    axis = PlainAxis("dp", world, dist.get_rank() % world)
    device = torch.get_default_device()
    return FlatBuffer(layout, Shard(), device=device, mesh=axis, communicator=communicator)


@pytest.mark.ranks(4)
def test_a_cut_like_torch_chunk_s_becomes_a_dtensor_without_a_copy():
    mesh = init_device_mesh(device_type(), (4,), mesh_dim_names=("dp",))
    for rows in (8, 7, 13, 3):
        whole = torch.randn(rows, 5, generator=torch.Generator().manual_seed(rows))
        buffer = rows_on(4, rows, 5)
        buffer.load("w", whole)
        each = -(-rows // 4)
        assert buffer.layout.shard_size == each * 5
        tensor = buffer.as_sharded("w").to_dtensor(mesh)
        reference = distribute_tensor(whole, mesh, [DShard(0)])
        assert tensor.placements == reference.placements
        assert torch.equal(tensor.to_local(), reference.to_local())
        assert torch.equal(tensor.full_tensor(), whole)
        if tensor.to_local().numel():
            assert tensor.to_local().data_ptr() == buffer.data.data_ptr()


@pytest.mark.ranks(4)
def test_another_cut_is_refused_as_a_dtensor_on_every_rank():
    mesh = init_device_mesh(device_type(), (4,), mesh_dim_names=("dp",))
    for tensor in sharded(values(), alignment=1).values():
        if tensor.shape == (0, 3):
            continue
        with pytest.raises(NotImplementedError, match=r"torch.chunk.*silently wrong"):
            tensor.to_dtensor(mesh)


@pytest.mark.ranks(4)
@pytest.mark.parametrize("dim", [0, 1])
def test_tensor_parallel_dimensions_are_carried_along(dim):
    mesh = init_device_mesh(device_type(), (2, 2), mesh_dim_names=("dp", "tp"))
    whole = torch.randn(8, 6, generator=torch.Generator().manual_seed(0))
    dp, tp = divmod(dist.get_rank(), 2)
    mine = whole.chunk(2, dim)[tp]
    layout = BufferLayout.plan([TensorSpec("w", tuple(mine.shape))], 2, alignment=1)
    buffer = FlatBuffer(layout, Shard(), mesh=PlainAxis("dp", 2, dp))
    buffer.load("w", mine)
    tensor = buffer.as_sharded("w").to_dtensor(mesh, [DShard(dim)])
    assert tensor.shape == whole.shape
    assert torch.equal(tensor.full_tensor(), whole)
    replicated = buffer.as_sharded("w").to_dtensor(mesh, [DReplicate()])
    assert replicated.shape == mine.shape


@pytest.mark.ranks(4)
def test_two_shard_axes_become_a_dtensor_cut_from_the_inside_out():
    mesh = init_device_mesh(device_type(), (2, 2), mesh_dim_names=("outer", "inner"))
    whole = torch.randn(8, 3, generator=torch.Generator().manual_seed(0))
    tensor = sharded({"w": whole}, None, (2, 2), (Shard(), Shard()), alignment=1)["w"]
    assert torch.equal(tensor.to_dtensor(mesh).full_tensor(), whole)
