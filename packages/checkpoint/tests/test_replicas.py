"""Tensors that several ranks offer under one name, wrappers' names, and weights kept in fp32."""

from __future__ import annotations

import re

import pytest
import torch
import torch.distributed as dist
from torch import nn

from lamina.checkpoint import CheckpointError, CheckpointManager, PerRank, compare_checkpoints
from lamina.mesh import ParallelLayout, mark
from lamina.mesh.engine import mesh_axis
from lamina_testing import device_type


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


@pytest.mark.ranks(4)
@pytest.mark.parametrize("wrap", ["fully_shard", pytest.param("ddp", marks=pytest.mark.slow)])
def test_experts_that_are_modules_are_stored_under_names_that_rename_gives(tmp_path, wrap):
    """Expert i of rank r is number 2 i + r of the model: one's name here is another's there."""
    fsdp, ddp = pytest.importorskip("lamina.fsdp"), pytest.importorskip("lamina.ddp")
    mesh = ParallelLayout(dp_shard=4, ep=2).build(device_type())
    rank = mesh_axis(mesh, "ep").rank

    def rename(name: str) -> str:
        return re.sub(r"experts\.(\d+)", lambda m: f"experts.{2 * int(m[1]) + rank}", name)

    def build(numbers: list[int], seed: int, wrap: str) -> tuple[nn.Module, torch.optim.Optimizer]:
        model = nn.Module()
        torch.manual_seed(seed)
        model.first = nn.Linear(3, 3)
        model.experts = nn.ModuleList()
        for number in numbers:
            torch.manual_seed(100 * seed + number)
            model.experts.append(nn.Linear(3, 3))
        for parameter in model.experts.parameters():
            mark(parameter, expert=True)
        adamw = torch.optim.AdamW(model.parameters(), lr=0.1, foreach=False)
        if wrap == "bare":
            return model, adamw
        if wrap == "fully_shard":
            return fsdp.fully_shard(model, adamw, device_mesh=mesh, fsdp_unit_modules=[nn.Linear])
        config = ddp.DistributedDataParallelConfig(use_distributed_optimizer=True)
        wrapped = ddp.DistributedDataParallel(model, config, mesh)
        return wrapped, ddp.ShardedOptimizer(adamw, wrapped, mesh)

    alone, plain = build([0, 1, 2, 3], 1, "bare")
    for parameter in alone.parameters():
        parameter.grad = parameter.detach().clone()
    plain.step()
    mine = [dist.new_group([r]) for r in range(4)][dist.get_rank()]
    if dist.get_rank() == 0:
        state = {"model": alone, "optimizer": plain}
        CheckpointManager(tmp_path / "alone", group=mine).save(1, state)
    dist.barrier()

    model, optimizer = build([rank, rank + 2], 2, wrap)
    state = {"model": model, "optimizer": optimizer}
    CheckpointManager(tmp_path / "alone", rename=rename).restore(state)
    # Without it one of two would be lost, of each part of what is cut over the ranks.
    with pytest.raises(CheckpointError, match=r"experts\.0\.weight.* from \[0.*\(rename="):
        CheckpointManager(tmp_path / "lost").save(1, state)
    CheckpointManager(tmp_path / "cut", rename=rename).save(1, state)
    dist.barrier()
    found = compare_checkpoints(tmp_path / "alone/step-00000001", tmp_path / "cut/step-00000001")
    assert not [d for d in found if ".params." not in d.name], found
    again, fresh = build([rank, rank + 2], 3, wrap)
    state = {"model": again, "optimizer": fresh}
    CheckpointManager(tmp_path / "cut", rename=rename).restore(state)
    CheckpointManager(tmp_path / "back", rename=rename).save(1, state)
    dist.barrier()
    found = compare_checkpoints(tmp_path / "alone/step-00000001", tmp_path / "back/step-00000001")
    assert not [d for d in found if ".params." not in d.name], found


@pytest.mark.ranks(2)
def test_buffers_may_differ_and_whole_tensors_among_plain_values_are_the_first_ranks(tmp_path):
    rank = dist.get_rank()
    torch.manual_seed(0)
    model = nn.BatchNorm1d(2)
    model.running_mean.fill_(rank)
    plain = {f"t{i}": torch.full((50,), float(rank)) for i in range(4)}
    manager = CheckpointManager(tmp_path)
    if rank == 0:
        with pytest.warns(UserWarning, match=r"model\.running_mean' on ranks 0 and 1") as warned:
            manager.save(1, {"model": model, "plain": plain})
        said = "".join(str(one.message) for one in warned)
        assert "broadcast_buffers" in said
        (stored,) = re.findall(r"model\.running_mean of rank (\d)", said)
    else:
        manager.save(1, {"model": model, "plain": plain})
    state = {"plain": None}
    manager.restore(state)
    again = nn.BatchNorm1d(2)
    manager.restore({"model": again})
    if rank == 0:
        assert again.running_mean.tolist() == [float(stored)] * 2
    assert all(not tensor.any() for tensor in state["plain"].values())

    class Average:  # of the weights: an object that is neither module nor optimizer
        def __init__(self, **tensors: torch.Tensor) -> None:
            self.tensors = tensors

        def state_dict(self) -> dict[str, torch.Tensor]:
            return self.tensors

        def load_state_dict(self, tensors: dict[str, torch.Tensor]) -> None:
            self.tensors = tensors

    ours = torch.full((3,), float(rank))
    for average in (Average(w=ours), Average(**{"ab"[rank]: ours})):
        with pytest.raises(CheckpointError, match=r"average\.[wb]' on rank 1 .*PerRank"):
            manager.save(2, {"average": average})
    manager.save(2, {"average": Average(w=torch.ones(3)), "own": PerRank(Average(w=ours))})
    own = {"own": PerRank(Average())}
    manager.restore(own)
    assert torch.equal(own["own"].value.tensors["w"], ours)


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

    mesh = init_device_mesh(device_type(), (2,), mesh_dim_names=("dp",))

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

    before = {name: tensor.clone() for name, tensor in ddp.full_parameters(other).items()}
    CheckpointManager(tmp_path).restore({"model": other}, include=["model.0"])
    for name, tensor in ddp.full_parameters(other).items():  # what is left alone stays unrounded
        assert torch.equal(tensor, before[name]) == name.startswith("2"), name
