"""Tensors that several ranks offer under one name, wrappers' names, and weights kept in fp32."""

from __future__ import annotations

import pytest
import torch
import torch.distributed as dist
from torch import nn

from lamina.checkpoint import CheckpointError, CheckpointManager
from lamina.mesh import mark


def experts(seed: int) -> nn.Module:
    """Experts that are modules of their own, with the same names on every rank."""
    torch.manual_seed(seed)
    model = nn.ModuleDict({"experts": nn.ModuleList([nn.Linear(3, 3)])})
    for parameter in model.parameters():
        mark(parameter, expert=True)
    return model


def save(manager: CheckpointManager, state: dict[str, object]) -> None:
    manager.save(1, state)
    manager.wait()


def saved_steps(path) -> list[str]:
    return sorted(entry.name for entry in path.iterdir())


@pytest.mark.ranks(2)
@pytest.mark.parametrize("background", [False, True], ids=["sync", "async"])
def test_different_tensors_under_one_name_are_refused_before_one_is_lost(tmp_path, background):
    rank = dist.get_rank()
    manager = CheckpointManager(tmp_path, async_save=background)
    expected = pytest.raises(
        CheckpointError, match=r"model\.experts\.0\.weight' on rank 1 .* than on rank 0.*mesh="
    )
    with expected:
        save(manager, {"model": experts(seed=rank)})

    optimizer = torch.optim.SGD(experts(seed=rank).parameters(), 0.1, momentum=0.9)
    for parameter in optimizer.param_groups[0]["params"]:
        parameter.grad = parameter.detach().clone()
    optimizer.step()
    with pytest.raises(CheckpointError, match=r"optimizer\.state\.0\.momentum_buffer"):
        save(manager, {"optimizer": optimizer})  # numbers are no names: its model is not there
    dist.barrier()
    assert saved_steps(tmp_path) == []

    save(manager, {"model": experts(seed=0)})  # copies
    CheckpointManager(tmp_path, check_replicas=False).save(2, {"model": experts(seed=rank)})
    assert saved_steps(tmp_path) == ["step-00000001", "step-00000002"]


@pytest.mark.ranks(2)
def test_buffers_may_differ_and_whole_tensors_among_plain_values_are_the_first_ranks(tmp_path):
    rank = dist.get_rank()
    torch.manual_seed(0)
    model = nn.BatchNorm1d(2)
    model.running_mean.fill_(rank)
    plain = {f"t{i}": torch.full((50,), float(rank)) for i in range(4)}
    manager = CheckpointManager(tmp_path)
    if rank == 0:
        with pytest.warns(UserWarning, match=r"model\.running_mean' on ranks 0 and 1"):
            manager.save(1, {"model": model, "plain": plain})
    else:
        manager.save(1, {"model": model, "plain": plain})
    state = {"plain": None}
    manager.restore(state)
    assert all(not tensor.any() for tensor in state["plain"].values())


@pytest.mark.parametrize("wrap", ["ddp", pytest.param("compile", marks=pytest.mark.slow)])
def test_torchs_wrappers_have_the_names_of_what_they_wrap(tmp_path, wrap):
    torch.manual_seed(0)
    inner = nn.Sequential(nn.Linear(3, 3), nn.Linear(3, 3))
    optimizer = torch.optim.AdamW(inner.parameters())
    inner(torch.ones(3)).sum().backward()
    optimizer.step()
    if wrap == "ddp":
        dist.init_process_group("fake", rank=0, world_size=1)
        model = nn.parallel.DistributedDataParallel(inner)
        dist.destroy_process_group()
    else:
        model = torch.compile(inner)
    manager = CheckpointManager(tmp_path)
    manager.save(1, {"model": model, "optimizer": optimizer})

    bare = nn.Sequential(nn.Linear(3, 3), nn.Linear(3, 3))
    fresh = torch.optim.AdamW(bare.parameters())
    manager.restore({"model": bare, "optimizer": fresh})
    for one, other in zip(bare.parameters(), inner.parameters(), strict=True):
        assert torch.equal(one, other)
        assert torch.equal(fresh.state[one]["exp_avg"], optimizer.state[other]["exp_avg"])
        with torch.no_grad():
            other.zero_()
    manager.restore({"model": model, "optimizer": optimizer})
    assert torch.equal(inner[0].weight, bare[0].weight)


@pytest.mark.ranks(2)
@pytest.mark.parametrize("loaded", [False, True], ids=["whole", "sharded"])
def test_main_weights_of_a_bf16_model_come_back_unrounded(tmp_path, loaded):
    ddp = pytest.importorskip("lamina.ddp")
    from torch.distributed.device_mesh import init_device_mesh

    mesh = init_device_mesh("cpu", (2,), mesh_dim_names=("dp",))

    def build(seed: int, sharded: bool) -> tuple[nn.Module, torch.optim.Optimizer]:
        torch.manual_seed(seed)
        model = nn.Sequential(nn.Linear(8, 16), nn.Tanh(), nn.Linear(16, 3)).bfloat16()
        config = ddp.DistributedDataParallelConfig(use_distributed_optimizer=sharded)
        wrapped = ddp.DistributedDataParallel(model, config, mesh)
        adamw = torch.optim.AdamW(wrapped.parameters(), lr=1e-3)
        return wrapped, ddp.ShardedOptimizer(adamw, wrapped, mesh)

    def train(model: nn.Module, optimizer: torch.optim.Optimizer, steps: range) -> None:
        for step in steps:
            generator = torch.Generator().manual_seed(10 * step + dist.get_rank())
            x = torch.randn(4, 8, generator=generator).bfloat16()
            (model(x) - x[:, :3]).square().mean().backward()
            optimizer.step()
            optimizer.zero_grad()

    model, optimizer = build(0, sharded=True)
    train(model, optimizer, range(3))
    CheckpointManager(tmp_path).save(3, {"model": model, "optimizer": optimizer})
    rounded = ddp.full_parameters(model)
    assert any((t != t.bfloat16().float()).any() for t in rounded.values())
    train(model, optimizer, range(3, 6))

    other, fresh = build(1, sharded=loaded)
    state = {"optimizer": fresh, "model": other}  # the order does not matter
    CheckpointManager(tmp_path).restore(state)
    train(other, fresh, range(3, 6))
    expected = ddp.full_parameters(model)
    for name, tensor in ddp.full_parameters(other).items():
        assert torch.equal(tensor, expected[name]), name
