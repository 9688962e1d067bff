"""What a rank of a job holds open: process groups, descriptors and threads.

The budget of docs/mesh.md: a gloo group takes 4 descriptors and one for each rank that it talks to,
and 3 threads. With TORCH_GLOO_LAZY_INIT=1 it talks to those alone that messages go to.
"""

from __future__ import annotations

import math
import os
import time
from collections import Counter

import pytest
import torch
import torch.distributed as dist
from torch import nn
from torch.distributed.device_mesh import init_device_mesh

from lamina.collectives.engine import CommonFacts, all_reduce_small, broadcast
from lamina.collectives.transport.lanes import lanes
from lamina.ddp import clip_grad_norm
from lamina.fsdp import fully_shard
from lamina.mesh import init_distributed
from lamina_testing.simulated import simulated_world
from lamina_testing.toys import Block

DESCRIPTORS = 256  # of a rank, on 1,024 ranks
OWN = {
    "socket": 1,
    "anon_inode": 1,
    "pipe": 2,
}  # of a group: it listens, waits, and wakes its threads
THREADS = 3  # of a group


def peers(ranks: int) -> int:
    """Ranks that a group's messages between hosts' CPUs go to: a ring, and a tree to broadcast."""
    return min(ranks - 1, 2 + math.ceil(math.log2(ranks)))


def opened() -> Counter[str]:
    """This process' descriptors by kind, and its threads."""
    found = Counter({"threads": len(os.listdir("/proc/self/task"))})
    for each in os.listdir("/proc/self/fd"):
        try:
            found[os.readlink(f"/proc/self/fd/{each}").split(":")[0]] += 1
        except OSError:  # of the listing itself
            continue
    return found


def settled() -> Counter[str]:
    """The same once nothing has changed for a second: the store's connections come and go."""
    last, since = opened(), time.monotonic()
    while time.monotonic() - since < 1.0:
        time.sleep(0.1)
        if (now := opened()) != last:
            last, since = now, time.monotonic()
    return last


def step_of(ranks: int, strategy: int) -> None:
    """A job's mesh and wrapper, and a step that clips."""
    model = nn.Sequential(*(Block(16) for _ in range(2)))
    model, optimizer = fully_shard(
        model,
        torch.optim.AdamW(model.parameters(), lr=1e-3),
        device_mesh=init_device_mesh("cpu", (ranks,), mesh_dim_names=("dp",)),
        fsdp_unit_modules=[Block],
        zero_dp_strategy=strategy,
    )
    for _ in range(2):
        model(torch.randn(2, 16)).square().mean().backward()
        clip_grad_norm(model, 1.0)
        optimizer.step()
        optimizer.zero_grad()


@pytest.mark.ranks(2, 4, init=False, reuse=False)
def test_a_job_opens_what_its_groups_take_and_no_more(ranks):
    """On CPUs over gloo, which connects all pairs; ranks of a host have a socket besides."""
    torch.set_num_threads(1)
    with init_distributed():
        before, others = settled(), ranks.world_size - 1
        dist.barrier()
        for _ in range(2):  # the same groups serve a second model
            step_of(ranks.world_size, 3)
        made = len(dist.distributed_c10d._world.pg_map) - 1
        assert made == 2, "one each for gathers and reductions"
        readable = sum(peer is not None for lane in lanes() for peer in lane.host_peers or ())
        found = settled() - before
        dist.barrier()
    assert found["socket"] == made * (OWN["socket"] + others) + readable
    assert found["anon_inode"] == made * OWN["anon_inode"]
    assert found["pipe"] == made * OWN["pipe"]
    assert found["threads"] <= made * THREADS + 2, "two lanes may still be at work"


@pytest.mark.ranks(8, init=False, reuse=False)
def test_messages_to_the_host_talk_to_few_ranks(ranks, monkeypatch):
    """What a step sends over gloo beside NCCL: integers in a ring, and broadcasts in a tree."""
    monkeypatch.setenv("TORCH_GLOO_LAZY_INIT", "1")
    with init_distributed():
        dist.barrier()
        before = settled()["socket"]
        dist.barrier()
        group = dist.new_group()
        for _ in range(3):
            all_reduce_small([torch.ones(5, dtype=torch.int32)], group)
        broadcast(torch.ones(3), group, src=3)
        broadcast(torch.ones(3), group)
        CommonFacts("this test", [group]).require([("same", 1)])
        made = settled()["socket"] - before - OWN["socket"]
        assert 2 <= made <= peers(8) < 7
        dist.barrier()


@pytest.mark.ranks(1, init=False)
@pytest.mark.parametrize("strategy", [0, 1, 3])
def test_a_rank_of_1024_stays_below_its_budget(strategy, ranks):
    """By formula: no machine here has so many ranks. The count of groups is the engine's own."""
    with simulated_world(1024, hosts=True):
        step_of(1024, strategy)
        groups = len(dist.distributed_c10d._world.pg_map)
    assert groups == 5
    held = groups * (sum(OWN.values()) + peers(1024))
    assert held <= 80 < DESCRIPTORS
    assert groups * THREADS <= 15
    assert groups * (sum(OWN.values()) + 1023) > DESCRIPTORS, "why the variable is asked for"
