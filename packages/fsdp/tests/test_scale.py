"""Law 10: what a step costs the host does not grow with the number of ranks."""

import pytest
import torch
from torch import nn
from torch.distributed.device_mesh import init_device_mesh

from lamina.ddp import clip_grad_norm
from lamina.fsdp import fully_shard
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
        device_mesh=init_device_mesh("cpu", (world,), mesh_dim_names=("dp",)),
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


def costs(strategy, world):
    """Python calls, operators, calls of the backend, and the longest list of tensors in one."""
    with (
        simulated_world(world) as traffic,
        Profile(lambda file: "simulated" not in file) as profile,
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
        return least(walks).calls.total(), operations.total, traffic.calls, traffic.listed


@pytest.mark.ranks(1, init=False)
@pytest.mark.parametrize(
    "world", [1024, pytest.param(65_536, marks=pytest.mark.slow)], ids=["1024", "65536"]
)
@pytest.mark.parametrize("strategy", [0, 1, 3])
def test_a_step_costs_the_host_as_much_on_many_ranks_as_on_eight(strategy, world, ranks):
    calls, operators, launches, listed = costs(strategy, 8)
    found = costs(strategy, world)
    assert 0.95 * calls <= found[0] <= 1.05 * calls
    assert found[2] == launches
    assert found[3] == listed == 1, "the backend was given a list with a tensor per rank"
    if world > 1024:  # buffers padded to so many ranks are stepped in more blocks
        return
    # A sum of rows takes a slice for each side and an addition per level of its tree: one sum per
    # group of parameters, and the norm's. Ten more: a clip that scales, and what ends with it.
    levels = (world // 8).bit_length() - 1
    assert found[1] - operators <= 3 * levels * (UNITS + 1) + 10
