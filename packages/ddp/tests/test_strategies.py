"""Strategies as placements: each trains to the bit oracle, or is refused with the reason."""

import itertools

import pytest
import torch

from lamina.buffers import Partial, Placements, Replicate, Shard
from lamina.ddp import (
    Cadence,
    DistributedDataParallel,
    DistributedDataParallelConfig,
    ShardedOptimizer,
    Strategy,
    clip_grad_norm,
    full_gradients,
    full_parameters,
)
from lamina.ddp.engine import resolve_strategy
from lamina.mesh import ParallelLayout
from lamina_testing import device_type, parity
from lamina_testing.oracles import bit_oracle
from lamina_testing.parity import (
    OPTIMIZERS,
    assert_bits,
    batches,
    bits_of_one_process,
    build,
    loss_fn,
)

STEPS, MAX_NORM = 4, 0.05
PLACEMENT = {"R": Replicate(), "S": Shard(), "P": Partial()}
CADENCE = {"once": Cadence.ONCE, "every": Cadence.EVERY_MICROBATCH}
COMBINATIONS = ["".join(one) for one in itertools.product("RS", repeat=3)]
"""Model weights, main grads and optimizer state over one axis."""
TRAIN = {"RRR", "RRS", "RSS", "SRS", "SSS"}
WITH_DDP = {"RRR", "RRS", "RSS"}
OVER_TWO_AXES = [
    *("RR RR RR", "RR RR SR", "RR SR SR", "RR RR RS", "RR RS RS", "RR RR SS", "RR RS SS"),
    *("RR SS SS", "RS RR RS", "RS RS RS", "RS RR SS", "RS RS SS", "RS SS SS"),
]
"""All that train; each state's placements along the outer and the inner axis."""


def strategy_of(states, cadence="once"):
    """From "RSS" (one letter a state) or "RR RS SS" (a word a state, a letter an axis)."""
    words = states.split() if " " in states else list(states)
    placements = Placements(*([PLACEMENT[at] for at in word] for word in words))
    return Strategy(placements, CADENCE[cadence])


def train(strategy, optimizer, rank, world, replicate=1, microbatches=2, clip=False, **config):
    model = build("odd")
    data = batches(model, world, microbatches)
    mesh = ParallelLayout(dp_replicate=replicate).build(device_type())
    plain = OPTIMIZERS[optimizer](model)
    settings = DistributedDataParallelConfig(
        zero_dp_strategy=strategy,
        use_distributed_optimizer=strategy.shards_optimizer,
        num_buckets=3,
        **config,
    )
    wrapped = DistributedDataParallel(model, settings, mesh)
    return parity.train(
        wrapped,
        ShardedOptimizer(plain, wrapped, mesh),
        lambda step: data(step)[rank],
        STEPS,
        full_gradients,
        full_parameters,
        (lambda model: clip_grad_norm(model, MAX_NORM)) if clip else None,
    )


@pytest.mark.matrix
@pytest.mark.ranks(2)
@pytest.mark.parametrize("states", COMBINATIONS)
@pytest.mark.parametrize("cadence", list(CADENCE))
@pytest.mark.parametrize("microbatches", [1, 2, 3])
@pytest.mark.parametrize("optimizer", list(OPTIMIZERS))
@pytest.mark.parametrize("clip", [False, True])
@pytest.mark.parametrize("overlap", [False, True])
def test_every_combination_equals_the_bit_oracle_or_is_refused(
    states, cadence, microbatches, optimizer, clip, overlap, ranks
):
    if states not in TRAIN:
        with pytest.raises(ValueError, match=r"so every rank would .*: make optimizer_state Shard"):
            strategy_of(states, cadence)
        return
    strategy = strategy_of(states, cadence)
    if states not in WITH_DDP:
        with pytest.raises(ValueError, match=r"cuts weights: use lamina\.fsdp\.fully_shard"):
            DistributedDataParallelConfig(zero_dp_strategy=strategy, use_distributed_optimizer=True)
        return
    found = train(
        strategy,
        optimizer,
        ranks.rank,
        ranks.world_size,
        microbatches=microbatches,
        clip=clip,
        overlap_grad_reduce=overlap,
        overlap_param_gather=overlap and strategy.shards_optimizer,
    )
    max_norm = MAX_NORM if clip else None
    wanted = bits_of_one_process(
        "odd", optimizer, 2, microbatches, steps=STEPS, cadence=cadence, max_norm=max_norm
    )
    assert_bits(found, wanted)


@pytest.mark.matrix(few=8)
@pytest.mark.ranks(4)
@pytest.mark.parametrize("states", [one for one in OVER_TWO_AXES if one.startswith("RR ")])
@pytest.mark.parametrize("cadence", list(CADENCE))
@pytest.mark.parametrize("clip", [False, True])
def test_combinations_over_two_axes_equal_the_bit_oracle(states, cadence, clip, ranks):
    strategy = strategy_of(states, cadence)
    found = train(strategy, "adamw", ranks.rank, 4, replicate=2, clip=clip)
    max_norm = MAX_NORM if clip else None
    wanted = bits_of_one_process(
        "odd", "adamw", 4, 2, steps=STEPS, cadence=cadence, axes=(2, 2), max_norm=max_norm
    )
    assert_bits(found, wanted)


def test_over_two_axes_all_is_known_or_refused_with_a_remedy():
    axes = ["".join(one) for one in itertools.product("RS", repeat=2)]
    for states in map(" ".join, itertools.product(axes, repeat=3)):
        if states in OVER_TWO_AXES:
            strategy_of(states)
            continue
        with pytest.raises(ValueError, match=r"(model_weights|main_grads) is Shard\(\) .*: make "):
            strategy_of(states)


@pytest.mark.parametrize("number", range(4))
def test_numbers_are_rows_of_the_same_table(number):
    states, cadence = [("RRR", "once"), ("RSS", "once"), ("RSS", "every"), ("SSS", "every")][number]
    strategy = strategy_of(states, cadence)
    assert resolve_strategy(number) == strategy == resolve_strategy(strategy)
    assert strategy.gathers is (number == 3)
    assert strategy.shards_optimizer is (number > 0)
    with pytest.raises(ValueError, match="says by itself what the outer axis does"):
        resolve_strategy(strategy, 1)


def test_what_is_no_strategy_is_refused():
    with pytest.raises(ValueError, match=r"main_grads is Partial\(\) along the inner axis"):
        strategy_of("RPS")
    with pytest.raises(ValueError, match="name 3 axes: flatten"):
        strategy_of("RRR RRR RRR")
    with pytest.raises(TypeError, match="is not a Cadence"):
        Strategy(Placements(Replicate(), Shard(), Shard()), "once")
    with pytest.raises(TypeError, match="is not a Placements"):
        Strategy((Replicate(), Shard(), Shard()), Cadence.ONCE)


@pytest.mark.ranks(2)
def test_an_outer_cut_needs_an_outer_axis(ranks):
    mesh = torch.distributed.device_mesh.init_device_mesh(
        device_type(), (2,), mesh_dim_names=("dp",)
    )
    config = DistributedDataParallelConfig(
        zero_dp_strategy=strategy_of("RR SS SS"), use_distributed_optimizer=True
    )
    with pytest.raises(ValueError, match="about the ranks along 'dp_replicate'"):
        DistributedDataParallel(build("odd"), config, mesh)


@pytest.mark.ranks(2)
@pytest.mark.parametrize("cadence", list(CADENCE))
@pytest.mark.parametrize("how", ["drop", "zeros"])
def test_zeroing_between_microbatches_reaches_whole_gradients_of_a_cut_optimizer(
    cadence, how, ranks
):
    """A rank shows and zeroes its own part of what it accumulates for all."""
    strategy = strategy_of("RRS", cadence)
    model = build("odd")
    data = batches(model, 2, 2)(0)[ranks.rank]
    mesh = ParallelLayout().build(device_type())
    plain = OPTIMIZERS["sgd"](model)
    config = DistributedDataParallelConfig(
        zero_dp_strategy=strategy, use_distributed_optimizer=True
    )
    wrapped = DistributedDataParallel(model, config, mesh)
    optimizer = ShardedOptimizer(plain, wrapped, mesh)
    with wrapped.no_sync():
        loss_fn(wrapped, data[0]).backward()
    for group in optimizer.param_groups:
        for parameter in group["params"]:
            if how == "drop":
                parameter.grad = None
            elif parameter.grad is not None:
                parameter.grad.zero_()
    loss_fn(wrapped, data[1]).backward()
    gradients = full_gradients(wrapped)
    expected = bit_oracle(
        lambda: build("odd"),
        [[batches(model, 2, 2)(0)[rank][1]] for rank in range(2)],
        loss_fn,
        OPTIMIZERS["sgd"],
    )[0].gradients
    for name, wanted in expected.items():
        if wanted is not None:
            assert torch.equal(gradients[name], wanted), name
        elif name in gradients:  # unused in this microbatch, and zeroed since the one before
            assert how == "zeros"
            assert not gradients[name].any()
