"""Law 10: what a step costs the host does not grow with the number of ranks."""

from pathlib import Path

import pytest
import torch
import torch.distributed as dist
from torch import nn
from torch.distributed.device_mesh import init_device_mesh

from lamina.collectives.engine import reduction_class
from lamina.ddp import clip_grad_norm
from lamina.fsdp import MixedPrecisionPolicy, fully_shard
from lamina.mesh import make_host_groups
from lamina_testing import device_type
from lamina_testing.simulated import Operations, simulated_world
from lamina_testing.toys import Block
from lamina_testing.walk import Profile, least

UNITS = 3


def step_of(strategy, world):
    torch.manual_seed(0)
    model = nn.Sequential(*(Block(16) for _ in range(UNITS)))
    model, optimizer = fully_shard(
        model,
        torch.optim.AdamW(model.parameters(), lr=1e-3),
        device_mesh=init_device_mesh(device_type(), (world,), mesh_dim_names=("dp",)),
        fsdp_unit_modules=[Block],
        zero_dp_strategy=strategy,
    )
    batch = torch.randn(2, 16)

    def step():
        model(batch).square().mean().backward()
        clip_grad_norm(model, 1e9)
        optimizer.step()
        optimizer.zero_grad()

    return step


def costs(strategy, world, **hosts):
    """Python calls, operators, calls of the backend, the longest list in one, and groups."""
    with (
        simulated_world(world, **hosts) as traffic,
        Profile(lambda file: not Path(file).name.startswith("simulated")) as profile,
    ):
        step = step_of(strategy, world)
        for _ in range(2):
            step()
        walks = []
        for _ in range(4):
            with profile.walk() as walk:
                step()
            walks.append(walk)
        traffic.clear()
        with Operations() as operations:
            step()
        groups = len(dist.distributed_c10d._world.pg_map)
        return least(walks).calls.total(), operations.total, traffic.calls, traffic.listed, groups


@pytest.mark.ranks(1, init=False, backend="gloo")  # simulated groups order no streams
@pytest.mark.parametrize(
    "world", [1024, pytest.param(65_536, marks=pytest.mark.slow)], ids=["1024", "65536"]
)
@pytest.mark.parametrize("strategy", [0, 1, 3])
def test_a_step_costs_the_host_as_much_on_many_ranks_as_on_eight(strategy, world, ranks):
    calls, operators, launches, listed, groups = costs(strategy, 8)
    found = costs(strategy, world)
    assert 0.95 * calls <= found[0] <= 1.05 * calls
    assert found[2] == launches
    assert found[3] == listed == 1, "the backend was given a list with a tensor per rank"
    assert found[4] == groups == 3, "the world's, and one each for gathers and reductions"
    if world > 1024:  # buffers padded to so many ranks are stepped in more blocks
        return
    # A sum of rows takes a slice for each side and an addition per level of its tree: one sum per
    # group of parameters, and the norm's. Ten more: a clip that scales, and what ends with it.
    levels = (world // 8).bit_length() - 1
    assert found[1] - operators <= 3 * levels * (UNITS + 1) + 10


@pytest.mark.ranks(1, init=False, backend="gloo")  # simulated groups order no streams
@pytest.mark.parametrize("strategy", [0, 3])
def test_sums_over_hosts_cost_the_host_as_much_on_many_hosts_as_on_two(strategy, ranks):
    calls, _, launches, _, groups = costs(strategy, 16, hosts=True)
    found = costs(strategy, 1024, hosts=True)
    assert 0.95 * calls <= found[0] <= 1.05 * calls
    assert found[2] == launches
    assert found[3] == 1
    assert found[4] == groups == 5, "two more, for reductions inside and between hosts"


@pytest.mark.slow
@pytest.mark.ranks(1, init=False, backend="gloo")  # simulated groups order no streams
@pytest.mark.parametrize("strategy", [0, 1, 3])
def test_a_step_on_8192_hosts_costs_the_host_as_much_as_on_two(strategy, ranks):
    """On one host the second exchange is missing; the padded buffers have more blocks."""
    assert costs(strategy, 65_536, hosts=True)[0] <= 1.02 * costs(strategy, 16, hosts=True)[0]


@pytest.mark.ranks(1, init=False)
@pytest.mark.parametrize("strategy", [0, 1, 2, 3])
def test_the_host_reads_nothing_from_the_device_in_a_step(strategy, ranks):
    """Meta tensors stand in for a GPU's: they have no values, so any read of one raises."""

    def train(**settings):
        with torch.device("meta"):
            model = nn.Sequential(*(Block(16) for _ in range(UNITS)))
        model, optimizer = fully_shard(
            model,
            torch.optim.AdamW(model.parameters()),
            device_mesh=init_device_mesh(device_type(), (64,), mesh_dim_names=("dp",)),
            device=torch.device("meta"),
            fsdp_unit_modules=[Block],
            zero_dp_strategy=strategy,
            mixed_precision_policy=MixedPrecisionPolicy(param_dtype=torch.bfloat16),
            **settings,
        )
        batch = torch.randn(2, 16, device="meta", dtype=torch.bfloat16)
        for _ in range(2):
            with model.no_sync():
                model(batch).square().mean().backward()
            model(batch).square().mean().backward()
            clip_grad_norm(model, 1.0)
            optimizer.step()
            optimizer.zero_grad()

    with simulated_world(64, hosts=True):
        train()
        with pytest.raises((RuntimeError, NotImplementedError), match="meta"):
            train(report_nan_in_param_grad=True)  # which has to look


@pytest.mark.ranks(1, init=False)
def test_bytes_and_messages_between_hosts_are_those_of_one_rank_of_a_host(ranks):
    """Hosts of 8: of N ranks every 8th is spoken to, and once for all ranks of its host."""
    for world in (64, 1024):
        sent = {}
        for hosts in (False, True):
            with simulated_world(world, hosts=hosts) as traffic:
                piece, group = 128, dist.group.WORLD
                make_host_groups(group)
                reduction = reduction_class("ordered")
                output, whole = torch.empty(piece), torch.ones(world * piece)
                prepared = reduction(output, whole, group, scatter=True)
                traffic.clear()
                prepared.start(output, whole, async_op=False)
                sent[hosts] = traffic.between, traffic.messages, traffic.far
        assert sent[False] == (4 * piece * (world - 8), world - 1, world - 8)
        assert sent[True] == (4 * piece * (world // 8 - 1), 7 + world // 8 - 1, world // 8 - 1)
