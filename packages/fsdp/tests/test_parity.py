"""Law 1: every strategy equals the bit oracle, bit for bit in fp32, and one process within 1e-5."""

import pytest
import torch
from torch.distributed.device_mesh import init_device_mesh

from lamina.ddp import full_gradients, full_parameters
from lamina.fsdp import MixedPrecisionPolicy, fully_shard
from lamina_testing import device_type
from lamina_testing.parity import (
    MODELS,
    OPTIMIZERS,
    assert_bits,
    assert_same,
    batches,
    bits_of_one_process,
    build,
    train,
    whole_batch_of_one_process,
)

STEPS = 5


def mesh_of(world, outer):
    if outer is None:
        return init_device_mesh(device_type(), (world,), mesh_dim_names=("dp",)), {
            "dp_shard_dim": "dp"
        }
    mesh = init_device_mesh(device_type(), (2, world // 2), mesh_dim_names=("outer", "inner"))
    settings = {
        "dp_shard_dim": "inner",
        "dp_outer_dim": "outer",
        "outer_dp_sharding_strategy": outer,
    }
    return mesh, settings


def run(model, optimizer, data, rank):
    return train(
        model, optimizer, lambda step: data(step)[rank], STEPS, full_gradients, full_parameters
    )


@pytest.mark.matrix(where=lambda ranks, outer: outer is None or ranks == 4, few=14)
@pytest.mark.ranks(1, 2, 4)
@pytest.mark.parametrize("outer", [None, 0, 1])
@pytest.mark.parametrize("strategy", [0, 1, 2, 3])
@pytest.mark.parametrize("microbatches", [1, 2, 3])
@pytest.mark.parametrize("optimizer", ["adamw", "sgd"])
@pytest.mark.parametrize("overlap", [True, False])
@pytest.mark.parametrize("precision", ["fp32", "bf16"])
@pytest.mark.parametrize("name", list(MODELS))
def test_every_strategy_equals_the_bit_oracle(
    name, precision, overlap, optimizer, microbatches, strategy, outer, ranks
):
    world = ranks.world_size
    bf16 = precision == "bf16"
    model = build(name)
    data = batches(model, world, microbatches)
    mesh, settings = mesh_of(world, outer)
    sharded, stepper = fully_shard(
        model,
        OPTIMIZERS[optimizer](model),
        device_mesh=mesh,
        zero_dp_strategy=strategy,
        overlap_grad_reduce=overlap,
        overlap_param_gather=overlap,
        mixed_precision_policy=MixedPrecisionPolicy(param_dtype=torch.bfloat16 if bf16 else None),
        **settings,
    )
    found = run(sharded, stepper, data, ranks.rank)
    oracle = bits_of_one_process(
        name,
        optimizer,
        world,
        microbatches,
        steps=STEPS,
        cadence="once" if strategy < 2 else "every",
        axes=None if outer is None else (2, world // 2),
        wire_dtype=torch.bfloat16 if bf16 else None,
        compute_dtype=torch.bfloat16 if bf16 else None,
    )
    assert_bits(found, oracle)


@pytest.mark.matrix(strength=1)
@pytest.mark.ranks(2)
@pytest.mark.parametrize("strategy", [0, 1, 2, 3])
@pytest.mark.parametrize("name", list(MODELS))
def test_every_strategy_equals_one_process_on_the_whole_batch(name, strategy, ranks):
    model = build(name)
    data = batches(model, 2, 2)
    mesh, settings = mesh_of(2, None)
    sharded, stepper = fully_shard(
        model, OPTIMIZERS["sgd"](model), device_mesh=mesh, zero_dp_strategy=strategy, **settings
    )
    found = run(sharded, stepper, data, ranks.rank)
    oracle = whole_batch_of_one_process(name, "sgd", 2, 2, steps=STEPS)
    for key, value in oracle[-1].parameters.items():
        torch.testing.assert_close(found[-1][1][key], value, rtol=0, atol=1e-5)


@pytest.mark.ranks(4)
def test_with_one_microbatch_all_strategies_give_the_same_bits(ranks):
    results = {}
    for strategy, outer in [(0, None), (1, None), (2, None), (3, None), (0, 0), (3, 0), (3, 1)]:
        model = build("odd")
        data = batches(model, 4, 1)
        mesh, settings = mesh_of(4, outer)
        sharded, stepper = fully_shard(
            model,
            OPTIMIZERS["adamw"](model),
            device_mesh=mesh,
            zero_dp_strategy=strategy,
            **settings,
        )
        results[strategy, outer] = run(sharded, stepper, data, ranks.rank)[-1]
    first = results.pop((0, None))
    for case, (gradients, parameters) in results.items():
        assert_same(gradients, first[0], f"{case}: gradient of ")
        assert_same(parameters, first[1], f"{case}: ")
