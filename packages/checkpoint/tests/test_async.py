"""Saves in the background: what training may do meanwhile, and what becomes of failures."""

from __future__ import annotations

import os
import threading
import weakref

import pytest
import torch
import torch.distributed as dist
from torch import nn
from torch.distributed.device_mesh import init_device_mesh
from torch.distributed.tensor import Shard, distribute_tensor

import lamina.checkpoint.save.writer as writer_module
from lamina.checkpoint import CheckpointError, CheckpointManager
from lamina.checkpoint.save.staging import Stage
from lamina_testing import device_type


class Gate:
    """Holds writers before they look at their first tensor, until it is opened."""

    def __init__(self) -> None:
        self.open = threading.Event()
        self.waiting = threading.Event()
        self._own_memory = writer_module.own_memory
        writer_module.own_memory = self

    def __call__(self, tensor: torch.Tensor) -> torch.Tensor:
        self.waiting.set()
        assert self.open.wait(20)
        return self._own_memory(tensor)

    def remove(self) -> None:
        self.open.set()
        writer_module.own_memory = self._own_memory


@pytest.fixture
def gate():
    made = Gate()
    yield made
    made.remove()


def test_tensors_may_change_the_moment_save_returns(tmp_path, gate):
    torch.manual_seed(0)
    model = nn.Linear(50, 50)
    optimizer = torch.optim.AdamW(model.parameters())
    model(torch.ones(50)).sum().backward()
    optimizer.step()
    state = {"model": model, "optimizer": optimizer, "n": 7, "list": [1]}
    expected = model.weight.detach().clone()
    moment = optimizer.state[model.weight]["exp_avg"].clone()
    manager = CheckpointManager(tmp_path, async_save=True)
    report = manager.save(1, state)
    assert gate.waiting.wait(20)
    assert not report.complete
    assert manager.latest() is None
    with torch.no_grad():
        for tensor in (*model.parameters(), *optimizer.state[model.weight].values()):
            tensor.fill_(float("nan"))
    state["n"] = 8
    state["list"].append(2)
    gate.open.set()
    manager.wait()
    assert manager.latest() == 1
    assert manager.last_save.complete
    assert manager.last_save.blocked_seconds < manager.last_save.seconds
    other = nn.Linear(50, 50)
    fresh = torch.optim.AdamW(other.parameters())
    got = {"model": other, "optimizer": fresh, "n": 0, "list": None}
    manager.restore(got)
    assert torch.equal(other.weight, expected)
    assert torch.equal(fresh.state[other.weight]["exp_avg"], moment)
    assert (got["n"], got["list"]) == (7, [1])


def test_two_saves_never_interleave(tmp_path, gate):
    manager = CheckpointManager(tmp_path, async_save=True)
    manager.save(1, {"t": torch.zeros(10)})
    assert gate.waiting.wait(20)
    second = threading.Thread(target=manager.save, args=(2, {"t": torch.ones(10)}))
    second.start()
    second.join(0.2)
    assert second.is_alive()  # waits for the first
    assert len([p for p in tmp_path.iterdir() if p.name.startswith(".writing")]) == 1
    gate.open.set()
    second.join(20)
    manager.close()
    assert manager.list() == [1, 2]


@pytest.mark.parametrize("call", ["save", "restore", "wait", "close"])
def test_a_failure_in_the_background_is_raised_by_the_next_call_and_once(
    tmp_path, monkeypatch, call
):
    manager = CheckpointManager(tmp_path, async_save=True)
    state = {"t": torch.zeros(10)}
    manager.save(1, state)
    manager.wait()

    def full(_: int) -> None:
        raise OSError(28, "No space left on device")

    with monkeypatch.context() as patched:
        patched.setattr(os, "fsync", full)
        manager.save(2, state)
        manager._saver._background._job.wait()
    calls = {
        "save": lambda: manager.save(3, state),
        "restore": lambda: manager.restore(state),
        "wait": manager.wait,
        "close": manager.close,
    }
    with pytest.raises(CheckpointError, match=r"step 2 .*No space left"):
        calls[call]()
    assert [p.name for p in tmp_path.iterdir()] == ["step-00000001"]
    calls[call]()
    manager.wait()
    assert manager.latest() == (3 if call == "save" else 1)


def test_a_failure_that_nobody_asks_for_is_printed(tmp_path, monkeypatch, capfd):
    monkeypatch.setattr(os, "fsync", lambda _: (_ for _ in ()).throw(OSError(5, "broken")))
    manager = CheckpointManager(tmp_path, async_save=True)
    manager.save(1, {"t": torch.zeros(10)})
    manager._saver._background._job.wait()
    manager._saver._background._last_words()  # Python calls it at exit
    assert "broken" in capfd.readouterr().err


def test_buffers_are_reused_and_follow_shapes(tmp_path):
    manager = CheckpointManager(tmp_path, async_save=True)
    tensor = torch.zeros(100)
    pointers = set()
    for step in range(3):
        manager.save(step, {"t": tensor + step})
        manager.wait()
        pointers |= {b.data_ptr() for b in manager._saver._stage._buffers.values()}
    assert len(pointers) == 1
    assert manager.staged_bytes == 400
    manager.save(9, {"u": torch.full((7,), 9.0)})
    manager.wait()
    assert manager.staged_bytes == 28
    state = {"u": None}
    manager.restore(state)
    assert torch.equal(state["u"], torch.full((7,), 9.0))


def test_what_is_made_for_a_save_goes_before_it_is_written_and_buffers_with_the_manager(
    tmp_path, gate
):
    made: list[weakref.ref[torch.Tensor]] = []

    class Average:  # gathers, or computes, what it saves
        def state_dict(self):
            tensor = torch.ones(300)
            made.append(weakref.ref(tensor))
            return {"t": tensor}

        def load_state_dict(self, state):
            self.t = state["t"]

    manager = CheckpointManager(tmp_path, async_save=True)
    manager.save(1, {"average": Average()})
    assert gate.waiting.wait(20)
    assert made[0]() is None
    assert manager.staged_bytes == 1200
    gate.open.set()
    manager.close()
    assert manager.staged_bytes == 0
    average = Average()
    manager.restore({"average": average})
    assert torch.equal(average.t, torch.ones(300))


@pytest.mark.ranks(2)
def test_ranks_save_in_the_background_and_stage_only_what_they_write(tmp_path, monkeypatch):
    rank = dist.get_rank()
    mesh = init_device_mesh(device_type(), (2,))
    replicated = nn.ParameterDict({f"w{i}": torch.full((1000,), float(i)) for i in range(4)})
    replicated.requires_grad_(False)
    sharded = distribute_tensor(torch.arange(10.0), mesh, [Shard(0)])
    manager = CheckpointManager(tmp_path, async_save=True)
    for step in range(1, 4):
        for i, tensor in enumerate(replicated.values()):
            tensor.fill_(10 * step + i)
        manager.save(step, {"w": replicated, "s": sharded, "n": step})
        for tensor in replicated.values():  # while the writers work: other traffic, other values
            tensor.fill_(-1.0)
            dist.all_reduce(tensor)
        manager.wait()
        # Whole tensors are written by one rank, and after the first save staged by that one only.
        assert manager.staged_bytes == 2 * 4000 + 20
    for step in manager.list():
        state = {"w": replicated, "s": None, "n": None}
        manager.restore(state, step=step)
        assert state["n"] == step
        assert torch.equal(state["s"], torch.arange(10.0))
        for i in range(4):
            assert torch.equal(replicated[f"w{i}"], torch.full((1000,), 10.0 * step + i))
    if rank == 1:
        full = OSError(28, "No space left on device")
        monkeypatch.setattr(os, "fsync", lambda _: (_ for _ in ()).throw(full))
    manager.save(4, {"s": sharded})
    with pytest.raises(CheckpointError, match=r"rank 1.*No space left"):
        manager.wait()
    assert manager.latest() == 3


class OnGPU(torch.Tensor):
    """A tensor of the CPU that says it is on one of two GPUs."""

    is_cuda = True
    device = property(lambda self: torch.device("cuda", self.number))


def test_a_writer_waits_for_the_copies_of_every_gpu_that_a_rank_has(monkeypatch):
    recorded, waited = [], []

    class Event:
        def record(self, stream):
            self.stream = stream
            recorded.append(stream)

        def synchronize(self):
            waited.append(self.stream)

    monkeypatch.setattr(torch.cuda, "Event", Event)
    monkeypatch.setattr(torch.cuda, "current_stream", str)
    stage = Stage()
    planner, plan = stage.plan({name: torch.ones(3) for name in "abc"}, coordinator=True)
    sources = {}
    for number, item in enumerate(plan.items):
        sources[item.index] = torch.ones(3).as_subclass(OnGPU)
        sources[item.index].number = number % 2
    monkeypatch.setattr(planner, "resolve_data", lambda item: sources[item.index])
    staged = stage.copy((planner, plan), known=False)
    assert sorted(recorded) == ["cuda:0", "cuda:1"]
    staged.ready()
    assert sorted(waited) == ["cuda:0", "cuda:1"]


def test_threads_that_write_see_what_was_queued_on_the_stream_of_the_loop(monkeypatch, tmp_path):
    happened = []

    class Stream:
        def synchronize(self):
            happened.append("waited")

    def own_memory(tensor, own=writer_module.own_memory):
        happened.append("read")
        return own(tensor)

    monkeypatch.setattr(writer_module, "own_memory", own_memory)
    model = nn.Linear(4, 4)
    manager = CheckpointManager(tmp_path, threads=2)
    monkeypatch.setattr(torch.cuda, "is_initialized", lambda: True)
    monkeypatch.setattr(torch.cuda, "current_stream", Stream)
    manager.save(1, {"model": model})
    assert happened == ["waited", "read", "read"]
