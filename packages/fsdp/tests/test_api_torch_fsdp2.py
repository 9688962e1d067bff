"""torch's FSDP2 behind our contract trains as one process does, and says what it cannot take."""

import pytest
import torch
from torch import nn
from torch.distributed.device_mesh import init_device_mesh
from torch.distributed.fsdp import FSDPModule

from lamina.ddp import (
    DataParallel,
    clip_grad_norm,
    full_gradients,
    full_parameters,
    memory_plan,
)
from lamina.fsdp import TorchFullyShardedDataParallel, TorchFullyShardedDataParallelConfig
from lamina.mesh import OverlapError, ParallelLayout, mark
from lamina_testing import bytes_at_rest, device_type
from lamina_testing.toys import Block

Config = TorchFullyShardedDataParallelConfig


class Net(nn.Module):
    """No parameter of 0 dimensions: FSDP2 cuts rows and takes none."""

    def __init__(self):
        super().__init__()
        self.enter = nn.Linear(5, 16)
        self.blocks = nn.ModuleList(Block(16) for _ in range(2))

    def forward(self, x):
        x = self.enter(x)
        for block in self.blocks:
            x = block(x)
        return x


def build(seed=3):
    torch.manual_seed(seed)
    return Net()


def batch(step, rank):
    return torch.randn(4, 5, generator=torch.Generator().manual_seed(10 * step + rank))


def one_process(world, microbatches):
    model = build()
    optimizer = torch.optim.SGD(model.parameters(), lr=0.1, momentum=0.9)
    for step in range(3):
        for m in range(microbatches):
            for rank in range(world):
                (model(batch(10 * step + m, rank)).square().mean() / world).backward()
        optimizer.step()
        optimizer.zero_grad()
    return dict(model.named_parameters())


@pytest.mark.matrix
@pytest.mark.ranks(2)
@pytest.mark.parametrize("reshard", [True, False])
@pytest.mark.parametrize("microbatches", [1, 2])
@pytest.mark.parametrize("lamina_mesh", [True, False])
def test_it_trains_as_one_process(reshard, microbatches, lamina_mesh, ranks):
    mesh = (
        ParallelLayout().build(device_type())
        if lamina_mesh
        else init_device_mesh(device_type(), (2,), mesh_dim_names=("dp",))
    )
    model = TorchFullyShardedDataParallel(build(3 + ranks.rank), Config(reshard), mesh)
    assert isinstance(model, DataParallel)
    assert sum(isinstance(m, FSDPModule) for m in model.modules()) > 1
    optimizer = torch.optim.SGD(model.parameters(), lr=0.1, momentum=0.9)
    for step in range(3):
        for m in range(microbatches):
            with model.no_sync() if m < microbatches - 1 else torch.enable_grad():
                model(batch(10 * step + m, ranks.rank)).square().mean().backward()
        model.finish_grad_sync()
        optimizer.step()
        model.zero_grad_buffer()
    for name, value in one_process(2, microbatches).items():
        found = model.state_dict()[name].full_tensor()
        torch.testing.assert_close(found, value.data, rtol=0, atol=1e-5)


@pytest.mark.ranks(2)
def test_gradients_left_by_no_sync_are_named(ranks):
    mesh = init_device_mesh(device_type(), (2,), mesh_dim_names=("dp",))
    model = TorchFullyShardedDataParallel(build(), Config(), mesh, [Block])
    with model.no_sync():
        model(batch(0, 0)).sum().backward()
    with pytest.raises(RuntimeError, match="no_sync"):
        model.finish_grad_sync()
    with pytest.raises(RuntimeError, match="no_sync"):
        model.zero_grad_buffer()


@pytest.mark.ranks(2)
def test_scaled_and_forgotten_gradients(ranks):
    mesh = init_device_mesh(device_type(), (2,), mesh_dim_names=("dp",))
    model = TorchFullyShardedDataParallel(build(), Config(), mesh, [Block])
    model(batch(0, 0)).sum().backward()
    before = model.module.enter.weight.grad.full_tensor().clone()
    model.scale_gradients(0.5)
    assert torch.equal(model.module.enter.weight.grad.full_tensor(), 0.5 * before)
    model.zero_grad_buffer()
    assert model.module.enter.weight.grad is None


@pytest.mark.ranks(4)
@pytest.mark.parametrize("replicate", [1, 2])
def test_inspection_and_clipping_see_its_parameters(replicate, ranks):
    mesh = ParallelLayout(dp_replicate=replicate).build(device_type())
    model = TorchFullyShardedDataParallel(build(3 + ranks.rank), Config(), mesh)
    reference = build()
    assert_near(full_parameters(model), {n: p.detach() for n, p in reference.named_parameters()})
    model(batch(0, ranks.rank)).square().mean().backward()
    for rank in range(4):
        (reference(batch(0, rank)).square().mean() / 4).backward()
    gradients = full_gradients(model)
    assert_near(gradients, {n: p.grad for n, p in reference.named_parameters()})
    wanted = torch.nn.utils.clip_grad_norm_(reference.parameters(), 0.1)
    assert wanted > 0.1
    for with_mesh in (mesh, None):
        measured = clip_grad_norm(model, float("inf"), with_mesh)
        torch.testing.assert_close(measured, wanted, rtol=1e-5, atol=0)
    clip_grad_norm(model, 0.1, mesh)
    assert_near(full_gradients(model), {n: p.grad for n, p in reference.named_parameters()})


@pytest.mark.ranks(2)
@pytest.mark.parametrize("reshard", [False, True, 1])
def test_a_forward_without_a_backward_hides_neither_gradients_nor_what_a_step_wrote(reshard, ranks):
    mesh = ParallelLayout().build(device_type())
    model = TorchFullyShardedDataParallel(build(), Config(reshard), mesh)
    optimizer = torch.optim.SGD(model.parameters(), lr=0.1)
    reference = build()
    model(batch(0, ranks.rank)).square().mean().backward()
    for rank in range(2):
        (reference(batch(0, rank)).square().mean() / 2).backward()
    model(batch(1, ranks.rank))
    assert_near(full_gradients(model), {n: p.grad for n, p in reference.named_parameters()})
    model(batch(1, ranks.rank))
    wanted = torch.nn.utils.clip_grad_norm_(reference.parameters(), 0.1)
    torch.testing.assert_close(clip_grad_norm(model, 0.1, mesh), wanted, rtol=1e-5, atol=0)
    model(batch(1, ranks.rank))
    optimizer.step()
    with torch.no_grad():
        for parameter in reference.parameters():
            parameter.sub_(parameter.grad, alpha=0.1)
    assert_near(full_parameters(model), {n: p.detach() for n, p in reference.named_parameters()})
    model(batch(1, ranks.rank))
    model.zero_grad()
    assert full_gradients(model) == {}


def assert_near(found, wanted):
    assert found.keys() == wanted.keys()
    for name, value in wanted.items():
        torch.testing.assert_close(found[name], value, rtol=1e-4, atol=1e-6, msg=name)


@pytest.mark.ranks(2)
def test_its_memory_plan_is_what_it_holds_between_steps(ranks):
    before = bytes_at_rest()
    mesh = init_device_mesh(device_type(), (2,), mesh_dim_names=("dp",))
    model = TorchFullyShardedDataParallel(build(), Config(), mesh, [Block])
    plan = memory_plan(model)
    model(batch(0, ranks.rank)).square().mean().backward()
    held = bytes_at_rest() - before
    assert plan.main_grads == plan.weights
    assert plan.resident <= held <= plan.resident + 1024, str(plan)
    assert plan.peak > plan.resident


def test_its_requirements_are_named(monkeypatch):
    with pytest.raises(ValueError, match="gradient_accumulation_fusion"):
        Config(gradient_accumulation_fusion=True)
    with pytest.raises(ValueError, match="torch_dist"):
        Config(ckpt_format="zarr")
    monkeypatch.setenv("CUDA_DEVICE_MAX_CONNECTIONS", "1")
    with pytest.raises(OverlapError, match="CUDA_DEVICE_MAX_CONNECTIONS"):
        TorchFullyShardedDataParallel(build(), Config(), None)


def test_parameters_it_would_sum_over_the_wrong_ranks_are_refused():
    model = build()
    mark(model.enter.weight, expert=True)
    with pytest.raises(ValueError, match=r"enter\.weight"):
        TorchFullyShardedDataParallel(model, Config(), None)
    with torch.device("meta"):
        described = Net()
    with pytest.raises(ValueError, match="meta"):
        TorchFullyShardedDataParallel(described, Config(), None)


@pytest.mark.ranks(2)
def test_weights_of_other_strides_are_refused_by_torch_and_not_by_a_broadcast(ranks):
    model = nn.Conv2d(2, 2, 3).to(memory_format=torch.channels_last)
    mesh = ParallelLayout().build(device_type())
    with pytest.raises(NotImplementedError, match="non-contiguous parameters"):
        TorchFullyShardedDataParallel(model, TorchFullyShardedDataParallelConfig(), mesh)


@pytest.mark.ranks(2)
def test_a_mesh_without_names_shards_all_the_same_or_is_refused(ranks):
    """FSDP2 takes each rank's own values for equal: without names nobody would have sent them."""
    model = TorchFullyShardedDataParallel(
        build(3 + ranks.rank), Config(), init_device_mesh(device_type(), (2,))
    )
    assert_near(full_parameters(model), {n: p.detach() for n, p in build().named_parameters()})
    with pytest.raises(ValueError, match="mesh_dim_names"):
        TorchFullyShardedDataParallel(build(), Config(), init_device_mesh(device_type(), (2, 1)))
