"""What can't be registered is refused with the reason; what can is registered in a safe order.

Registration itself needs NCCL. Without a GPU the order of the calls is tested on stand-ins for
torch's backend and pool, and the reasons on real gloo groups.
"""

from __future__ import annotations

import contextlib
import types

import pytest
import torch
import torch.distributed as dist

from lamina.collectives import RegistrationError, register_pool
from lamina.collectives.engine import registration_problem

CUDA = torch.device("cuda", 0)


class Backend:
    mem_allocator = "nccl's allocator"

    def __init__(self, log, name, refuse=False):
        self.log, self.label, self.refuse = log, name, refuse

    def name(self):
        return "nccl"

    def register_mem_pool(self, pool, symm=False):
        if self.refuse:
            raise RuntimeError("no multicast")
        self.log.append((self.label, "register", symm))

    def deregister_mem_pool(self, pool):
        self.log.append((self.label, "deregister"))


class Group:
    """As much of a process group as registration looks at."""

    def __init__(self, log, name, **options):
        self.group_desc = name
        self.backend = Backend(log, name, **options)

    def size(self):
        return 2

    def rank(self):
        return 0

    def _get_backend(self, device):
        return self.backend


@pytest.fixture
def log(monkeypatch):
    """A torch that seems to have CUDA and NCCL 2.28, and a log of what is asked of them."""
    log = []

    @contextlib.contextmanager
    def use_mem_pool(pool, device):
        log.append("open")
        yield
        log.append("close")

    monkeypatch.setattr(torch.cuda, "is_available", lambda: True)
    monkeypatch.setattr(torch.cuda, "current_device", lambda: 0)
    monkeypatch.setattr(torch.cuda, "synchronize", lambda device: log.append("synchronize"))
    monkeypatch.setattr(torch.cuda, "nccl", types.SimpleNamespace(version=lambda: (2, 28, 3)))
    monkeypatch.setattr(torch.cuda, "MemPool", lambda *a, **k: "pool")
    monkeypatch.setattr(torch.cuda, "use_mem_pool", use_mem_pool)
    monkeypatch.setattr(torch, "zeros", lambda *a, **k: torch.ones(1))
    monkeypatch.setattr(
        dist, "all_reduce", lambda t, group: log.append((group.group_desc, "all_reduce"))
    )
    return log


@pytest.mark.skipif(torch.cuda.is_available(), reason="states what a machine without CUDA says")
@pytest.mark.ranks(2)
def test_without_cuda_the_reason_is_the_build_or_the_machine():
    problem = registration_problem(dist.group.WORLD)
    assert problem is not None
    assert torch.__version__ in problem
    assert "CUDA" in problem
    with pytest.raises(RegistrationError, match="can't register memory with NCCL: torch"):
        register_pool(dist.group.WORLD)


def test_an_axis_of_one_rank_has_nothing_to_register():
    assert "no process group" in registration_problem(None)


def test_memory_that_is_not_cuda_is_named(log):
    assert "the memory is on cpu" in registration_problem(Group(log, "dp"), "cpu")


def test_a_group_that_gloo_serves_is_named(log):
    group = Group(log, "dp")
    group.backend.name = lambda: "gloo"
    assert "group 'dp' serves cuda tensors by gloo" in registration_problem(group)

    def none_for_cuda(device):
        raise RuntimeError("No backend type associated with device type cuda")

    group._get_backend = none_for_cuda
    assert "group 'dp' serves cuda tensors by no backend" in registration_problem(group)


def test_a_backend_without_the_calls_is_named(log):
    group = Group(log, "dp")
    group.backend = types.SimpleNamespace(name=lambda: "nccl")
    assert "has no register_mem_pool" in registration_problem(group)


def test_nccl_versions_are_named_with_what_they_lack(log, monkeypatch):
    group = Group(log, "dp")
    assert registration_problem(group) is None
    monkeypatch.setattr(torch.cuda, "nccl", types.SimpleNamespace(version=lambda: (2, 21, 5)))
    problem = registration_problem(group)
    assert "symmetric windows need NCCL 2.27 and this is 2.21.5; pass symmetric=False" in problem
    assert registration_problem(group, symmetric=False) is None
    monkeypatch.setattr(torch.cuda, "nccl", types.SimpleNamespace(version=lambda: (2, 18, 1)))
    assert "user buffers need NCCL 2.19" in registration_problem(group, symmetric=False)


@pytest.mark.parametrize("symmetric", [False, True])
def test_everything_is_allocated_before_it_is_registered_group_by_group(log, symmetric):
    groups = [Group(log, "dp:gather"), Group(log, "dp:reduce")]
    pool = register_pool(groups, symmetric=symmetric)
    with pool:
        log.append("allocate")
        assert not pool.registered
    assert pool.registered
    assert log == [
        "open",
        "allocate",
        "close",
        ("dp:gather", "all_reduce"),  # makes the communicator
        ("dp:gather", "register", symmetric),
        ("dp:reduce", "all_reduce"),
        ("dp:reduce", "register", symmetric),
    ]
    log.clear()
    pool.close()
    pool.close()
    assert log == ["synchronize", ("dp:reduce", "deregister"), ("dp:gather", "deregister")]


def test_a_symmetric_pool_takes_no_allocations_after_its_registration(log):
    group = Group(log, "dp")
    pool = register_pool(group)
    with pool:
        pass
    with pytest.raises(RuntimeError, match="by this rank alone, which hangs"), pool:
        pass
    user_buffers = register_pool(group, symmetric=False)
    for _ in range(2):
        with user_buffers:
            pass
    assert log.count(("dp", "register", False)) == 1
    user_buffers.close()
    with pytest.raises(RuntimeError, match="closed"), user_buffers:
        pass


def test_an_error_while_allocating_registers_nothing(log):
    pool = register_pool(Group(log, "dp"))
    with pytest.raises(MemoryError), pool:
        raise MemoryError
    assert not pool.registered
    assert log == ["open"]  # the stand-in's generator got the error


def test_a_refusal_by_nccl_names_group_and_switches_and_undoes_the_rest(log):
    pool = register_pool([Group(log, "a"), Group(log, "b", refuse=True)])
    message = r"'b' \(symmetric=True\): no multicast.*NCCL_WIN"
    with pytest.raises(RegistrationError, match=message), pool:
        pass
    assert log[-1] == ("a", "deregister")
    assert not pool.registered
    pool.close()
    assert "synchronize" not in log


def test_no_groups_are_refused():
    with pytest.raises(ValueError, match="`groups` is empty"):
        register_pool([])


@pytest.mark.skipif(not torch.cuda.is_available(), reason="needs a GPU and NCCL")
@pytest.mark.parametrize("symmetric", [False, True])
@pytest.mark.ranks(1, backend="nccl")
def test_registered_memory_works_in_a_collective(symmetric):
    group = dist.group.WORLD
    problem = registration_problem(group, symmetric=symmetric)
    if problem is not None:
        pytest.skip(problem)
    pool = register_pool(group, symmetric=symmetric)
    with pool:
        tensor = torch.full((1 << 19,), 3.0, device="cuda")
    dist.all_reduce(tensor, group=group)
    assert torch.all(tensor == 3)
    pool.close()
