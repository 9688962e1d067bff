"""Law 1: every strategy equals the bit oracle, bit for bit in fp32, and one process within 1e-5."""

import pytest
import torch
from torch.distributed.device_mesh import init_device_mesh

from lamina.ddp import full_gradients, full_parameters
from lamina.fsdp import MixedPrecisionPolicy, fully_shard
from lamina_testing.oracles import bit_oracle, whole_batch_oracle
from lamina_testing.toys import ConvNet, OddNet, TiedNet, TinyTransformer, inputs

STEPS = 4
MODELS = {"odd": OddNet, "tied": TiedNet, "conv": ConvNet, "transformer": TinyTransformer}
OPTIMIZERS = {
    "adamw": lambda model: torch.optim.AdamW(model.parameters(), lr=1e-2, foreach=False),
    "sgd": lambda model: torch.optim.SGD(
        model.parameters(), lr=0.1, momentum=0.9, weight_decay=0.01, foreach=False
    ),
}


def loss_fn(model, batch):
    if batch.is_floating_point():  # the oracle's bf16 model casts no inputs by itself
        batch = batch.to(next(model.parameters()).dtype)
    return model(batch).float().square().mean()


def build(name):
    torch.manual_seed(7)
    return MODELS[name]()


def batches(model, world, microbatches):
    return lambda step: [
        [inputs(model, 1000 * step + 10 * rank + m) for m in range(microbatches)]
        for rank in range(world)
    ]


def mesh_of(world, outer):
    if outer is None:
        return init_device_mesh("cpu", (world,), mesh_dim_names=("dp",)), {"dp_shard_dim": "dp"}
    mesh = init_device_mesh("cpu", (2, world // 2), mesh_dim_names=("outer", "inner"))
    settings = {
        "dp_shard_dim": "inner",
        "dp_outer_dim": "outer",
        "outer_dp_sharding_strategy": outer,
    }
    return mesh, settings


def train(model, optimizer, data, microbatches, rank):
    """The user's loop; gradients and parameters after every step."""
    steps = []
    for step in range(STEPS):
        mine = data(step)[rank]
        for batch in mine[:-1]:
            with model.no_sync():
                (loss_fn(model, batch) / microbatches).backward()
        (loss_fn(model, mine[-1]) / microbatches).backward()
        gradients = full_gradients(model)
        optimizer.step()
        optimizer.zero_grad()
        steps.append((gradients, full_parameters(model)))
    return steps


def assert_bits(found, oracle):
    for (gradients, parameters), wanted in zip(found, oracle, strict=True):
        present = {name for name, gradient in wanted.gradients.items() if gradient is not None}
        assert gradients.keys() == present
        for name in present:
            assert torch.equal(gradients[name], wanted.gradients[name]), f"gradient of {name}"
        assert parameters.keys() == wanted.parameters.keys()
        for name, value in wanted.parameters.items():
            assert torch.equal(parameters[name], value), f"parameter {name}"


@pytest.mark.matrix(where=lambda ranks, outer: outer is None or ranks == 4)
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
    found = train(sharded, stepper, data, microbatches, ranks.rank)
    oracle = bit_oracle(
        lambda: build(name),
        data,
        loss_fn,
        OPTIMIZERS[optimizer],
        steps=STEPS,
        cadence="once" if strategy < 2 else "every",
        axes=None if outer is None else (2, world // 2),
        wire_dtype=torch.bfloat16 if bf16 else None,
        compute_dtype=torch.bfloat16 if bf16 else None,
    )
    assert_bits(found, oracle)


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
    found = train(sharded, stepper, data, 2, ranks.rank)
    oracle = whole_batch_oracle(lambda: build(name), data, loss_fn, OPTIMIZERS["sgd"], steps=STEPS)
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
        results[strategy, outer] = train(sharded, stepper, data, 1, ranks.rank)[-1]
    first = results.pop((0, None))
    for case, (gradients, parameters) in results.items():
        for name, value in first[0].items():
            assert torch.equal(gradients[name], value), f"{case}: gradient of {name}"
        for name, value in first[1].items():
            assert torch.equal(parameters[name], value), f"{case}: parameter {name}"
