"""Several ranks: sharded tensors, other numbers of ranks, a rank that fails."""

from __future__ import annotations

import os
from collections import Counter, OrderedDict

import pytest
import torch
import torch.distributed as dist
from torch import nn
from torch.distributed.device_mesh import DeviceMesh, init_device_mesh
from torch.distributed.tensor import DTensor, Replicate, Shard, distribute_tensor

import lamina.checkpoint.save.writer as writer_module
from lamina.checkpoint import CheckpointDamagedError, CheckpointError, CheckpointManager
from lamina_testing import device_type

PLACEMENTS = {"rows": Shard(0), "columns": Shard(1), "whole": Replicate()}


def whole(seed: int) -> torch.Tensor:
    return torch.randn(7, 5, generator=torch.Generator().manual_seed(seed))


@pytest.mark.ranks(2)
@pytest.mark.parametrize("saved", list(PLACEMENTS))
@pytest.mark.parametrize("loaded", list(PLACEMENTS))
def test_a_tensor_saved_in_one_sharding_loads_into_another(tmp_path, saved, loaded):
    mesh = init_device_mesh(device_type(), (2,))
    tensor = distribute_tensor(whole(1), mesh, [PLACEMENTS[saved]])
    manager = CheckpointManager(tmp_path)
    manager.save(1, {"x": {"t": tensor, "n": 3}})

    class Holder:  # an object whose state_dict says how it wants its tensor cut
        t = distribute_tensor(torch.zeros(7, 5), mesh, [PLACEMENTS[loaded]])
        n = 0

        def state_dict(self):
            return {"t": self.t, "n": self.n}

        def load_state_dict(self, state):
            self.t, self.n = state["t"], state["n"]

    holder = Holder()
    manager.restore({"x": holder})
    assert isinstance(holder.t, DTensor)
    assert holder.n == 3
    assert torch.equal(holder.t.full_tensor(), whole(1))


def sharded_training(mesh: DeviceMesh):
    """Build a model whose parameters are DTensors, and its optimizer."""
    torch.manual_seed(0)
    model = nn.Linear(6, 9)
    for name, parameter in list(model.named_parameters()):
        placed = distribute_tensor(parameter.detach(), mesh, [Shard(0)])
        setattr(model, name, nn.Parameter(placed))
    return model, torch.optim.AdamW(model.parameters(), lr=0.1)


def fake_step(model, optimizer, seed: int) -> None:
    """Step on gradients that don't depend on the sharding."""
    for i, parameter in enumerate(model.parameters()):
        grad = torch.randn(parameter.shape, generator=torch.Generator().manual_seed(seed + i))
        parameter.grad = distribute_tensor(grad, parameter.device_mesh, parameter.placements)
    optimizer.step()


@pytest.mark.ranks(4)
def test_model_and_optimizer_move_between_numbers_of_ranks(tmp_path):
    rank = dist.get_rank()
    worlds = {n: dist.new_group(list(range(n))) for n in (2, 3, 4)}
    expected = {}
    if rank < 2:
        model, optimizer = sharded_training(DeviceMesh.from_group(worlds[2], "cpu"))
        fake_step(model, optimizer, 1)
        state = {"model": model, "optimizer": optimizer}
        CheckpointManager(tmp_path, group=worlds[2]).save(1, state)
        fake_step(model, optimizer, 2)
        expected = {n: p.full_tensor() for n, p in model.named_parameters()}
    dist.barrier()
    for n in (3, 4):
        if rank < n:
            model, optimizer = sharded_training(DeviceMesh.from_group(worlds[n], "cpu"))
            state = {"model": model, "optimizer": optimizer}
            assert CheckpointManager(tmp_path, group=worlds[n]).restore(state) == 1
            fake_step(model, optimizer, 2)
            got = {name: p.full_tensor() for name, p in model.named_parameters()}
            for name, tensor in expected.items():
                assert torch.equal(got[name], tensor), (n, name)
        dist.barrier()


@pytest.mark.ranks(2)
def test_plain_values_come_from_the_first_rank_and_replicas_are_stored_once(tmp_path):
    rank = dist.get_rank()
    manager = CheckpointManager(tmp_path)
    report = manager.save(1, {"model": nn.Linear(100, 100, bias=False), "n": rank})
    assert report.bytes < 2 * 100 * 100 * 4
    state = {"n": None}
    manager.restore(state)
    assert state["n"] == 0


@pytest.mark.ranks(2)
def test_entries_that_only_some_ranks_have_are_named_on_all(tmp_path):
    rank = dist.get_rank()
    manager = CheckpointManager(tmp_path)
    model = nn.Linear(2, 2)
    manager.save(1, {"model": model, "n": 1})
    average = nn.Linear(2, 2) if rank == 0 else None
    head = {"head": nn.Linear(2, 2)} if rank == 1 else {}
    twice = {"two\nlines": nn.Linear(2, 2) if rank == 0 else 1, "more\nlines": 1}
    for others, message in (
        ({"ema": average}, "'ema' .* a module on rank 0 and a plain value on rank 1"),
        (head, "'head' .* missing on rank 0 and a module on rank 1"),
        (twice, "'two\nlines' .* a module on rank 0 and a plain value on rank 1"),
    ):
        state = {"model": model, **others}
        with pytest.raises(CheckpointError, match=message):
            manager.save(2, state)
        with pytest.raises(CheckpointError, match=message):
            manager.restore(state)
    assert manager.list() == [1]


class Loader:
    """An object that is neither module nor optimizer."""

    def __init__(self, position: int) -> None:
        self.position = position

    def state_dict(self) -> dict[str, int]:
        return {"position": self.position}

    def load_state_dict(self, state: dict[str, int]) -> None:
        self.position = state["position"]


@pytest.mark.ranks(2)
def test_an_object_may_be_on_the_first_rank_alone(tmp_path):
    rank = dist.get_rank()
    manager = CheckpointManager(tmp_path)
    manager.save(1, {"loader": Loader(7) if rank == 0 else None})
    state = {"loader": Loader(0) if rank == 0 else None}
    manager.restore(state)
    assert rank == 1 or state["loader"].position == 7
    with pytest.raises(CheckpointError, match=r"a plain value on rank 0 .*give rank 0 the object"):
        manager.save(2, {"loader": Loader(7) if rank == 1 else None})


class Extra(nn.Linear):
    """A module with state of its own."""

    def __init__(self, extra: object) -> None:
        super().__init__(1, 1)
        self.extra = extra

    def get_extra_state(self) -> object:
        return self.extra

    def set_extra_state(self, extra: object) -> None:
        self.extra = extra


@pytest.mark.ranks(2)
def test_values_of_a_module_that_differ_between_ranks_are_joined_by_keys(tmp_path):
    torch.manual_seed(0)
    manager = CheckpointManager(tmp_path)
    devices = OrderedDict(device="cuda:0"), OrderedDict(device="cuda:1")
    for step, (*of_ranks, loaded) in enumerate(
        (
            (*devices, devices[0]),
            (OrderedDict(a=[1]), OrderedDict(b=(2,), a=[3]), OrderedDict(a=[1], b=(2,))),
            ({0: "a", (1, 2): {}}, {1: "b", 0: "c"}, {0: "a", (1, 2): {}, 1: "b"}),
            ({"a": 1}, {0: 2}, {"a": 1, 0: 2}),
            ({}, Counter(a=1), {}),
            (("a",), ("b",), ("a",)),
            (1j, 2 + 1j, 1j),
        )
    ):
        manager.save(step, {"model": Extra(of_ranks[dist.get_rank()])})
        manager.restore({"model": (model := Extra(None))})
        assert type(model.extra) is type(loaded)
        assert model.extra == loaded


@pytest.mark.ranks(2)
def test_a_sharded_tensor_among_plain_values_keeps_its_sharding(tmp_path):
    mesh = init_device_mesh(device_type(), (2,))
    manager = CheckpointManager(tmp_path)
    manager.save(1, {"x": {"t": distribute_tensor(whole(1), mesh, [Shard(0)]), "n": 1}})
    state = {"x": {"t": distribute_tensor(torch.zeros(7, 5), mesh, [Shard(1)]), "n": 0}}
    manager.restore(state)
    assert state["x"]["n"] == 1
    assert state["x"]["t"].placements == (Shard(1),)
    assert torch.equal(state["x"]["t"].full_tensor(), whole(1))


@pytest.mark.ranks(2)
@pytest.mark.parametrize("victim", [0, 1])
def test_a_rank_that_cannot_write_fails_the_save_on_every_rank(tmp_path, victim):
    mesh = init_device_mesh(device_type(), (2,))
    state = {"t": distribute_tensor(whole(1), mesh, [Shard(0)])}
    manager = CheckpointManager(tmp_path)
    manager.save(1, state)
    sync = os.fsync
    if dist.get_rank() == victim:
        os.fsync = lambda descriptor: (_ for _ in ()).throw(OSError(28, "No space left on device"))
    with pytest.raises(CheckpointError, match=rf"rank {victim}.*No space left"):
        manager.save(2, state)
    os.fsync = sync
    dist.barrier()
    assert manager.latest() == 1
    assert [p.name for p in tmp_path.iterdir()] == ["step-00000001"]
    manager.save(2, state)
    assert manager.latest() == 2


@pytest.mark.ranks(2)
def test_a_failure_before_dcp_on_one_rank_reaches_all(tmp_path):
    manager = CheckpointManager(tmp_path)
    bad = object() if dist.get_rank() == 1 else 1
    with pytest.raises((TypeError, CheckpointError), match=r"rank 1|builtins\.object"):
        manager.save(1, {"x": bad})


@pytest.mark.ranks(2)
def test_damage_that_one_rank_sees_stops_all_before_any_tensor_changes(tmp_path):
    mesh = init_device_mesh(device_type(), (2,))
    model, _ = sharded_training(mesh)
    manager = CheckpointManager(tmp_path)
    manager.save(1, {"model": model})
    dist.barrier()
    path = tmp_path / "step-00000001" / "__1_0.distcp"  # only rank 1 reads it
    if dist.get_rank() == 0:
        data = bytearray(path.read_bytes())
        data[len(data) // 2] ^= 1
        path.write_bytes(data)
    dist.barrier()
    other, _ = sharded_training(mesh)
    with torch.no_grad():
        for parameter in other.parameters():
            parameter.zero_()
    before = [p.to_local().clone() for p in other.parameters()]
    with pytest.raises(CheckpointDamagedError, match=r"rank 1: .*__1_0\.distcp is damaged"):
        manager.restore({"model": other})
    for parameter, old in zip(other.parameters(), before, strict=True):
        assert torch.equal(parameter.to_local(), old)


@pytest.mark.ranks(2)
def test_a_rank_that_does_not_see_the_directory_is_told_so(tmp_path, monkeypatch):
    class Elsewhere(writer_module.Writer):
        def write_data(self, plan, planner):
            if dist.get_rank() == 1:
                plan.storage_data.location += "-on-another-machine"
            return super().write_data(plan, planner)

    import lamina.checkpoint.save.saving as saving_module

    monkeypatch.setattr(saving_module, "Writer", Elsewhere)
    with pytest.raises(CheckpointError, match=r"rank 1.* share"):
        CheckpointManager(tmp_path).save(1, {"t": torch.ones(3)})
    dist.barrier()
    assert list(tmp_path.iterdir()) == []
