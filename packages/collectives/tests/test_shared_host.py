"""Ranks of one host: who reads whom, what is checked, and what happens when it goes wrong."""

from __future__ import annotations

import os
import subprocess
import sys
from unittest import mock

import pytest
import torch
import torch.distributed as dist

from lamina.collectives import all_gather_into, reduce_scatter_fp32
from lamina.collectives.engine import use_messages
from lamina.collectives.transport import shared_host as module
from lamina.collectives.transport.lanes import lane_of
from lamina.collectives.transport.shared_host import HostPeer
from lamina_testing import netns

LONG = 1 << 20


def secret_of(process: int) -> torch.Tensor:
    return torch.tensor([process * 7919], dtype=torch.int64)


def reads_of(action) -> int:
    """How many times `action` reads another process's memory."""
    with mock.patch.object(HostPeer, "read", autospec=True, side_effect=HostPeer.read) as read:
        action()
    return read.call_count


def can_read_children() -> bool:
    """Whether this kernel lets a process read one of its own kind (some policies do not)."""
    value = torch.tensor([42], dtype=torch.int64)
    child = os.fork()
    if child == 0:
        import time

        time.sleep(30)
        os._exit(0)
    found = torch.zeros_like(value)
    try:
        HostPeer(1, child).read(value.data_ptr(), found)
    except RuntimeError:
        return False
    finally:
        os.kill(child, 9)
        os.waitpid(child, 0)
    return torch.equal(found, value)


allowed = pytest.mark.skipif(
    not sys.platform.startswith("linux") or not can_read_children(),
    reason="this kernel does not let a process read another one's memory",
)


@allowed
@pytest.mark.ranks(3, backend="gloo")
def test_long_messages_between_ranks_of_one_host_are_read_and_short_ones_sent():
    group, world = dist.group.WORLD, dist.get_world_size()
    long, short = torch.ones(LONG), torch.ones(10)
    reduce_scatter_fp32(torch.empty(10), torch.ones(30), group)  # getting to know each other
    assert reads_of(lambda: all_gather_into(torch.empty(world * LONG), long, group)) == world - 1
    assert reads_of(lambda: all_gather_into(torch.empty(world * 10), short, group)) == 0
    whole = torch.ones(world * LONG)
    assert reads_of(lambda: reduce_scatter_fp32(torch.empty(LONG), whole, group)) >= world - 1


@allowed
@pytest.mark.ranks(2, backend="gloo")
def test_one_rank_is_enough_to_keep_a_group_to_messages():
    group = dist.new_group()
    if dist.get_rank() == 1:
        use_messages(group)
    output = torch.empty(2 * LONG)
    assert reads_of(lambda: all_gather_into(output, torch.ones(LONG), group)) == 0
    assert torch.equal(output, torch.ones(2 * LONG))
    assert lane_of(group).host_peers == (None, None)


@allowed
@pytest.mark.ranks(2, backend="gloo")
def test_messages_cannot_be_asked_for_when_it_is_too_late():
    all_gather_into(torch.empty(2), torch.ones(1), dist.group.WORLD)
    with pytest.raises(RuntimeError, match="before its first collective"):
        use_messages(dist.group.WORLD)


@allowed
@pytest.mark.ranks(2, backend="gloo")
def test_ranks_of_one_host_that_disagree_about_a_size_are_told_on_both_sides():
    group, rank = dist.group.WORLD, dist.get_rank()
    numel = LONG + rank
    with pytest.raises(ValueError, match=r"rank [01] of 2.*bytes.*expects 41943\d\d"):
        all_gather_into(torch.empty(2 * numel), torch.ones(numel), group)


@allowed
def test_a_host_peer_that_is_gone_is_named():
    child = subprocess.Popen([sys.executable, "-c", "pass"])
    child.wait()
    with pytest.raises(RuntimeError, match=rf"rank 3 .*process {child.pid}.*died"):
        HostPeer(3, child.pid).read(4096, torch.empty(1))


@allowed
def test_memory_that_is_gone_is_an_error():
    with pytest.raises(RuntimeError, match="Bad address"):
        HostPeer(0, os.getpid()).read(4096, torch.empty(1))


@allowed
def test_a_read_takes_the_run_that_was_asked_for():
    source, target = torch.arange(1000.0), torch.zeros(10)
    run = module.RemoteMemory(HostPeer(0, os.getpid()), source.data_ptr(), 1000, torch.float32)
    run.read(30, target)
    assert torch.equal(target, source[30:40])


@allowed
@pytest.mark.parametrize("difference", [0, 1, 2], ids=["machine", "process space", "network"])
def test_only_ranks_of_one_machine_and_namespaces_believe_each_other(difference):
    secret = secret_of(os.getpid())
    hello = module._hello(secret, 1, willing=True)
    assert module._believe(1, hello, hello) == HostPeer(1, os.getpid())
    elsewhere = hello.clone()
    elsewhere[difference] += 1
    assert module._believe(1, elsewhere, hello) is None


@allowed
def test_who_cannot_show_a_secret_is_not_believed():
    hello = module._hello(secret_of(os.getpid()), 1, willing=True)
    other_secret, nowhere, nobody, unwilling = (hello.clone() for _ in range(4))
    other_secret[module._HOST_WORDS + 2] += 1
    nowhere[module._HOST_WORDS + 1] = 4096
    nobody[module._HOST_WORDS] = 2**22 + 5
    unwilling[-1] = 0
    for theirs in (other_secret, nowhere, nobody, unwilling):
        assert module._believe(1, hello, theirs) is None
    assert module._believe(1, unwilling, hello) is None


def test_a_host_without_proc_is_nobodys_peer():
    with mock.patch.object(module, "host_words", side_effect=FileNotFoundError):
        hello = module._hello(secret_of(1), 1, willing=True)
    assert hello.tolist() == [0] * module._WORDS
    assert module._believe(1, hello, hello) is None


IN_NAMESPACES = """
import os
import torch
import torch.distributed as dist
from lamina.collectives import all_gather_into
from lamina.collectives.transport.lanes import lane_of

dist.init_process_group("gloo", init_method="env://")
rank, numel = dist.get_rank(), 1 << 18
whole = torch.empty(4 * numel)
all_gather_into(whole, torch.full((numel,), float(rank)), dist.group.WORLD)
assert torch.equal(whole, torch.arange(4.0).repeat_interleave(numel))
print([place for place, peer in enumerate(lane_of(dist.group.WORLD).host_peers) if peer])
dist.destroy_process_group()
"""


@allowed
@pytest.mark.slow
def test_ranks_in_two_network_namespaces_use_the_network_between_them():
    problem = netns.unavailable()
    if problem is not None:
        pytest.skip(problem)
    with netns.shaped_link(bits_per_second=10**9) as link:
        outputs = link.run_ranks([sys.executable, "-c", IN_NAMESPACES], ranks_per_namespace=2)
    assert [output.strip() for output in outputs] == ["[1]", "[0]", "[3]", "[2]"]
