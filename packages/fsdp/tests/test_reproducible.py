"""`reproducible=True`: one tree over the step's microbatches, whoever computes which of them."""

import pytest
import torch
from torch.distributed.device_mesh import init_device_mesh

from lamina.ddp import full_gradients, full_parameters
from lamina.fsdp import fully_shard
from lamina_testing import device_type
from lamina_testing.oracles import bit_oracle
from lamina_testing.toys import Block, OddNet, inputs

STEPS, GLOBAL = 3, 4
STRATEGIES = {
    "zero 1": {"zero_dp_strategy": 1},
    "zero 2": {"zero_dp_strategy": 2},
    "zero 3": {"zero_dp_strategy": 3},
    "HSDP": {"zero_dp_strategy": 3, "outer_dp_sharding_strategy": 0},
    "HFSDP": {"zero_dp_strategy": 3, "outer_dp_sharding_strategy": 1},
}


def build():
    torch.manual_seed(7)
    return OddNet()


def adamw(model):
    return torch.optim.AdamW(model.parameters(), lr=1e-2, foreach=False)


def loss_fn(model, batch):
    return model(batch).square().mean()


def leaf(model, step, index):
    """The step's microbatch number `index`, of `GLOBAL`."""
    return inputs(model, 100 * step + index)


def mesh_of(world, name):
    if "outer_dp_sharding_strategy" not in STRATEGIES[name]:
        return {"device_mesh": init_device_mesh(device_type(), (world,), mesh_dim_names=("dp",))}
    mesh = init_device_mesh(device_type(), (2, world // 2), mesh_dim_names=("outer", "inner"))
    return {"device_mesh": mesh, "dp_shard_dim": "inner", "dp_outer_dim": "outer"}


def train(name, rank, world):
    model = build()
    model, optimizer = fully_shard(
        model,
        adamw(model),
        fsdp_unit_modules=[Block],
        reproducible=True,
        **mesh_of(world, name),
        **STRATEGIES[name],
    )
    steps, microbatches = [], GLOBAL // world
    for step in range(STEPS):
        for m in range(microbatches):
            with model.no_sync() if m < microbatches - 1 else torch.enable_grad():
                batch = leaf(model, step, m * world + rank)
                (loss_fn(model, batch) / microbatches).backward()
        gradients = full_gradients(model)
        optimizer.step()
        optimizer.zero_grad()
        steps.append((gradients, full_parameters(model)))
    return steps


@pytest.mark.ranks(1, 2, 4)
def test_the_number_of_ranks_and_the_strategy_do_not_change_bits(ranks):
    """All worlds equal one process that runs the same microbatches, so they equal each other."""
    world = ranks.world_size
    oracle = bit_oracle(
        build,
        lambda step: [[leaf(build(), step, index) for index in range(GLOBAL)]],
        loss_fn,
        adamw,
        steps=STEPS,
        cadence="reproducible",
    )
    for name in STRATEGIES if world == 4 else ("zero 1", "zero 2", "zero 3"):
        for (gradients, parameters), wanted in zip(
            train(name, ranks.rank, world), oracle, strict=True
        ):
            for key, value in wanted.gradients.items():
                assert torch.equal(gradients[key], value), f"{name}: gradient of {key}"
            for key, value in wanted.parameters.items():
                assert torch.equal(parameters[key], value), f"{name}: {key}"
