"""`fully_shard` takes every `Strategy` that can be made, and trains it to the bit oracle."""

import itertools
import math

import pytest
from torch.distributed.device_mesh import init_device_mesh

from lamina.buffers import Placements, Replicate, Shard
from lamina.ddp import Cadence, Strategy, full_gradients, full_parameters
from lamina.fsdp import fully_shard
from lamina_testing import device_type
from lamina_testing.parity import (
    OPTIMIZERS,
    assert_bits,
    batches,
    bits_of_one_process,
    build,
    train,
)

STEPS = 4
PLACEMENT = {"R": Replicate(), "S": Shard()}
CADENCE = {"once": Cadence.ONCE, "every": Cadence.EVERY_MICROBATCH}
COMBINATIONS = ["".join(one) for one in itertools.product("RS", repeat=3)]
"""Model weights, main grads and optimizer state over one axis."""
TRAIN = {"RRR", "RRS", "RSS", "SRS", "SSS"}
OVER_TWO_AXES = [
    *("RR RR RR", "RR RR SR", "RR SR SR", "RR RR RS", "RR RS RS", "RR RR SS", "RR RS SS"),
    *("RR SS SS", "RS RR RS", "RS RS RS", "RS RR SS", "RS RS SS", "RS SS SS"),
]
"""All that train; each state's placements along the outer and the inner axis."""


def strategy_of(states, cadence):
    words = states.split() if " " in states else list(states)
    placements = Placements(*([PLACEMENT[at] for at in word] for word in words))
    return Strategy(placements, CADENCE[cadence])


def mesh_of(shape):
    names = ("outer", "inner")[-len(shape) :]
    settings = {"dp_shard_dim": "inner"} | ({"dp_outer_dim": "outer"} if len(shape) > 1 else {})
    return {"device_mesh": init_device_mesh(device_type(), shape, mesh_dim_names=names), **settings}


def check(
    strategy, cadence, rank, shape, name="odd", optimizer="adamw", microbatches=2, **settings
):
    model = build(name)
    data = batches(model, math.prod(shape), microbatches)
    sharded, stepper = fully_shard(
        model, OPTIMIZERS[optimizer](model), zero_dp_strategy=strategy, **mesh_of(shape), **settings
    )
    mine = lambda step: data(step)[rank]  # noqa: E731
    found = train(sharded, stepper, mine, STEPS, full_gradients, full_parameters)
    world = math.prod(shape)
    wanted = bits_of_one_process(
        name, optimizer, world, microbatches, steps=STEPS, cadence=cadence, axes=shape
    )
    assert_bits(found, wanted)


@pytest.mark.matrix(where=lambda states: states in TRAIN, few=10)
@pytest.mark.ranks(2)
@pytest.mark.parametrize("states", COMBINATIONS)
@pytest.mark.parametrize("cadence", list(CADENCE))
@pytest.mark.parametrize("microbatches", [1, 2, 3])
@pytest.mark.parametrize("optimizer", list(OPTIMIZERS))
@pytest.mark.parametrize("overlap", [False, True])
@pytest.mark.parametrize("name", ["odd", "transformer"])
def test_every_combination_over_one_axis_equals_the_bit_oracle(
    states, cadence, microbatches, optimizer, overlap, name, ranks
):
    check(
        strategy_of(states, cadence),
        cadence,
        ranks.rank,
        (2,),
        name,
        optimizer,
        microbatches,
        overlap_grad_reduce=overlap,
        overlap_param_gather=overlap,
    )


@pytest.mark.parametrize("states", [one for one in COMBINATIONS if one not in TRAIN])
@pytest.mark.parametrize("cadence", list(CADENCE))
def test_the_others_are_refused_before_any_model_is_touched(states, cadence):
    with pytest.raises(ValueError, match=r"so every rank would .*: make optimizer_state Shard"):
        strategy_of(states, cadence)


SAMPLE = list(zip(OVER_TWO_AXES, itertools.cycle(CADENCE)))
"""One cadence for each; the other one is slow."""


@pytest.mark.matrix(few=6)
@pytest.mark.ranks(4)
@pytest.mark.parametrize(
    ("states", "cadence"),
    [
        one if one in SAMPLE else pytest.param(*one, marks=pytest.mark.slow)
        for one in itertools.product(OVER_TWO_AXES, CADENCE)
    ],
)
def test_combinations_over_two_axes_equal_the_bit_oracle(states, cadence, ranks):
    check(strategy_of(states, cadence), cadence, ranks.rank, (2, 2))


@pytest.mark.ranks(1)
def test_a_strategy_speaks_for_the_outer_axis(ranks):
    model = build("odd")
    hfsdp = strategy_of("RS SS SS", "every")
    with pytest.raises(ValueError, match="outer placement of zero_dp_strategy is about the ranks"):
        fully_shard(model, zero_dp_strategy=hfsdp, **mesh_of((1,)))
    with pytest.raises(ValueError, match="says by itself what the outer axis does"):
        fully_shard(model, zero_dp_strategy=hfsdp, outer_dp_sharding_strategy=1, **mesh_of((1, 1)))
