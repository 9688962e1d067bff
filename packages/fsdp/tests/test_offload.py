"""Shards in host memory: the same bits as without, and where each thing lies.

On a CPU the host is the device; what leaves it and comes back is told by storages, and the order of
CUDA streams by stand-ins. Nothing here has run on a GPU.
"""

from contextlib import contextmanager
from types import SimpleNamespace

import pytest
import torch
from torch.distributed.device_mesh import init_device_mesh
from torch.distributed.fsdp import CPUOffloadPolicy, OffloadPolicy

from lamina.ddp import clip_grad_norm, full_gradients, full_parameters
from lamina.fsdp import MixedPrecisionPolicy, fully_shard, fully_shard_optimizer, shard_module
from lamina.fsdp.weights.offloaded import OffloadedSum, OffloadedWeights, SideStream
from lamina_testing import device_type
from lamina_testing.toys import Block, OddNet, inputs

STEPS = 3


def build():
    torch.manual_seed(3)
    return OddNet()


def adamw(model):
    return torch.optim.AdamW(model.parameters(), lr=1e-2, foreach=False)


def mesh_of(world, outer=None):
    if outer is None:
        return {"device_mesh": init_device_mesh(device_type(), (world,), mesh_dim_names=("dp",))}
    return {
        "device_mesh": init_device_mesh(
            device_type(), (2, world // 2), mesh_dim_names=("outer", "inner")
        ),
        "dp_shard_dim": "inner",
        "dp_outer_dim": "outer",
        "outer_dp_sharding_strategy": outer,
    }


def train(model, optimizer, rank, microbatches, clip):
    gradients, norm = {}, None
    for step in range(STEPS):
        for m in range(microbatches):
            with model.no_sync() if m < microbatches - 1 else torch.enable_grad():
                batch = inputs(model, 100 * step + 10 * m + rank)
                model(batch).square().mean().backward()
        gradients = full_gradients(model)
        if clip:
            norm = clip_grad_norm(model, 0.05)
        optimizer.step()
        optimizer.zero_grad()
    return gradients, full_parameters(model), norm


def run(ranks, microbatches, outer=None, clip=False, **settings):
    model = build()
    model, optimizer = fully_shard(
        model,
        adamw(model),
        fsdp_unit_modules=[Block],
        **mesh_of(ranks.world_size, outer),
        **settings,
    )
    return train(model, optimizer, ranks.rank, microbatches, clip)


def assert_same(found, wanted):
    for one, other in zip(found[:2], wanted[:2], strict=True):
        assert one.keys() == other.keys()
        for name in other:
            assert torch.equal(one[name].cpu(), other[name].cpu()), name
    if wanted[2] is not None:
        torch.testing.assert_close(found[2].cpu(), wanted[2].cpu(), rtol=1e-6, atol=0)


@pytest.mark.matrix(few=2)
@pytest.mark.ranks(2)
@pytest.mark.parametrize(
    ("microbatches", "settings"),
    [
        (3, {}),
        (3, {"reproducible": True}),
        (2, {"mixed_precision_policy": MixedPrecisionPolicy(param_dtype=torch.bfloat16)}),
        (1, {"fsdp_double_buffer": True, "clip": True}),
    ],
    ids=["fp32", "reproducible", "bf16", "slots and clipping"],
)
def test_offloading_changes_no_bits(settings, microbatches, ranks):
    wanted = run(ranks, microbatches, **settings)
    assert_same(run(ranks, microbatches, offload_policy=CPUOffloadPolicy(), **settings), wanted)


@pytest.mark.ranks(1)
def test_one_rank_offloads_whole_weights(ranks):
    assert_same(run(ranks, 2, offload_policy=CPUOffloadPolicy()), run(ranks, 2))


@pytest.mark.matrix(few=1)
@pytest.mark.ranks(4)
@pytest.mark.parametrize("outer", [0, 1], ids=["HSDP", "HFSDP"])
def test_offloading_changes_no_bits_with_replicas(outer, ranks):
    wanted = run(ranks, 2, outer)
    assert_same(run(ranks, 2, outer, offload_policy=CPUOffloadPolicy()), wanted)


@pytest.mark.ranks(2)
@pytest.mark.parametrize("outer", [0, 1], ids=["HSDP", "HFSDP"])
def test_replicas_alone_are_offloaded(outer, ranks):
    wanted = run(ranks, 2, outer)
    assert_same(run(ranks, 2, outer, offload_policy=CPUOffloadPolicy()), wanted)


@pytest.mark.ranks(2)
def test_module_by_module_as_the_one_line(ranks):
    model = build()
    mesh = mesh_of(2)["device_mesh"]
    for module in (*model.blocks, model):
        shard_module(module, mesh, offload_policy=CPUOffloadPolicy())
    optimizer = fully_shard_optimizer(adamw(model), model)
    assert_same(train(model, optimizer, ranks.rank, 2, clip=False), run(ranks, 2))


@pytest.mark.ranks(2)
def test_gradients_are_summed_and_weights_gathered_away_from_what_is_kept(ranks):
    model = build()
    model, optimizer = fully_shard(
        model,
        adamw(model),
        fsdp_unit_modules=[Block],
        offload_policy=CPUOffloadPolicy(),
        **mesh_of(2),
    )
    groups = list(model.parameter_groups())
    kept = {g.trained.main.data.untyped_storage().data_ptr() for g in groups}
    kept |= {g.weights.local.data.untyped_storage().data_ptr() for g in groups}
    sums = [g.trained.rank_sum for g in groups]
    for one in sums:
        one._inner.run = watched(one._inner, kept)
    for block in model.blocks:
        block.up.register_forward_pre_hook(
            lambda module, _: places.append(module.weight.untyped_storage().data_ptr())
        )
    places = []
    train(model, optimizer, ranks.rank, 2, clip=False)
    assert all(isinstance(g.weights, OffloadedWeights) for g in groups)
    assert all(isinstance(one, OffloadedSum) for one in sums)
    assert places
    assert not kept & set(places)
    for parameter, state in optimizer.state.items():
        assert {parameter.device.type} | {v.device.type for v in state.values()} == {"cpu"}


def watched(inner, kept):
    run = type(inner).run

    def checked(*arguments):
        assert inner.main.data.untyped_storage().data_ptr() not in kept
        return run(inner, *arguments)

    return checked


@pytest.mark.ranks(1)
def test_what_cannot_be_offloaded_is_named(ranks):
    mesh = mesh_of(1)
    with pytest.raises(ValueError, match=r"offload_policy.*zero_dp_strategy=3"):
        fully_shard(build(), zero_dp_strategy=2, offload_policy=CPUOffloadPolicy(), **mesh)
    with pytest.raises(TypeError, match="offload_policy='cpu'"):
        fully_shard(build(), offload_policy="cpu", **mesh)

    class Pinned(CPUOffloadPolicy):
        """A policy of the user's own."""

    model = fully_shard(build(), offload_policy=Pinned(), **mesh)
    assert any(isinstance(g.weights, OffloadedWeights) for g in model.parameter_groups())
    model = fully_shard(build(), offload_policy=OffloadPolicy(), **mesh)
    assert not any(isinstance(g.weights, OffloadedWeights) for g in model.parameter_groups())


def test_copies_wait_for_what_was_queued_and_not_for_what_comes_later(monkeypatch):
    """The order of events on a GPU, with stand-ins for streams."""
    log = []

    class Stream:
        def __init__(self, device):
            self.name = "side"

        def wait_stream(self, other):
            log.append(f"side waits for {other.name}")

        def record_event(self):
            log.append("event")
            return SimpleNamespace(synchronize=lambda: log.append("host waits"))

    @contextmanager
    def on(stream):
        log.append("enter")
        yield
        log.append("leave")

    monkeypatch.setattr(torch.cuda, "Stream", Stream)
    monkeypatch.setattr(torch.cuda, "stream", on)
    monkeypatch.setattr(
        torch.cuda, "current_stream", lambda device=None: SimpleNamespace(name="compute")
    )
    side = SideStream(torch.device("cuda"))
    assert side.mark() is None
    side.follow()
    with side.use():
        log.append("copy")
        side.mark().synchronize()
    assert log == ["side waits for compute", "enter", "copy", "event", "host waits", "leave"]
