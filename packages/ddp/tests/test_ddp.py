"""DistributedDataParallel and ShardedOptimizer against the bit oracle, and the awkward cases."""

import gc
import weakref

import pytest
import torch
from torch.utils.checkpoint import checkpoint

from lamina.ddp import (
    DistributedDataParallel,
    DistributedDataParallelConfig,
    ShardedOptimizer,
    clip_grad_norm,
    full_gradients,
    full_parameters,
)
from lamina.mesh import ParallelLayout
from lamina_testing import device_type, not_freed, parity
from lamina_testing.oracles import bit_oracle
from lamina_testing.parity import (
    MODELS,
    OPTIMIZERS,
    assert_bits,
    batches,
    bits_of_one_process,
    build,
    loss_fn,
    whole_batch_of_one_process,
)
from lamina_testing.toys import OddNet, inputs

from .passing import pass_gradients

STEPS, MAX_NORM = 5, 0.05
SHARDED = pytest.mark.parametrize("sharded", [False, True])
STRATEGIES = pytest.mark.parametrize("strategy", [0, 1, 2])


def wrap(model, optimizer="adamw", strategy=1, replicate=1, **config):
    mesh = ParallelLayout(dp_replicate=replicate).build(device_type())
    config.setdefault("num_buckets", 3)
    config.setdefault("overlap_grad_reduce", True)
    plain = OPTIMIZERS[optimizer](model)
    wrapped = DistributedDataParallel(
        model,
        DistributedDataParallelConfig(
            use_distributed_optimizer=strategy > 0,
            zero_dp_strategy=int(strategy),
            num_distributed_optimizer_instances=replicate if strategy else None,
            **config,
        ),
        mesh,
    )
    return wrapped, ShardedOptimizer(plain, wrapped, mesh)


def train(wrapped, optimizer, data, rank, steps=STEPS, max_norm=None):
    return parity.train(
        wrapped,
        optimizer,
        lambda step: data(step)[rank],
        steps,
        full_gradients,
        full_parameters,
        None if max_norm is None else lambda model: clip_grad_norm(model, max_norm),
    )


PRECISIONS = {"fp32": torch.float32, "bf16": torch.bfloat16, "fp64": torch.float64}
NEAR = {("fp32", "sgd"): 1e-5, ("fp64", "adamw"): 1e-9}
"""Of the whole batch; fp32 AdamW amplifies the rounding of gradients that are truly zero."""


def in_the_product(ranks, replicate, overlap, precision, optimizer, clip):
    """HSDP is 2 x 2; clipping and fp64 know nothing of overlap; fp64 is there for AdamW."""
    fp64 = precision == "fp64"
    return (
        (replicate == 1 or ranks == 4)
        and (overlap or not (fp64 or clip))
        and not (fp64 and (clip or optimizer == "sgd"))
    )


@pytest.mark.matrix(where=in_the_product, few=10)
@pytest.mark.ranks(1, 2, 4)
@pytest.mark.parametrize("replicate", [1, 2])
@pytest.mark.parametrize("strategy", [0, 1, 2])
@pytest.mark.parametrize("microbatches", [1, 2, 3])
@pytest.mark.parametrize("optimizer", ["adamw", "sgd"])
@pytest.mark.parametrize("precision", list(PRECISIONS))
@pytest.mark.parametrize("clip", [False, True])
@pytest.mark.parametrize("overlap", [True, False])
@pytest.mark.parametrize("name", list(MODELS))
def test_ddp_equals_the_bit_oracle_and_one_process_on_the_whole_batch(
    name, overlap, clip, precision, optimizer, microbatches, strategy, replicate, ranks
):
    dtype = PRECISIONS[precision]
    bf16 = torch.bfloat16 if precision == "bf16" else None
    model = build(name, dtype)
    world, max_norm = ranks.world_size, MAX_NORM if clip else None
    data = batches(model, world, microbatches)
    wrapped, stepper = wrap(
        model,
        optimizer,
        strategy,
        replicate,
        overlap_grad_reduce=overlap,
        overlap_param_gather=overlap and strategy > 0,
        # Neither changes a bit of ordered sums.
        average_in_collective=microbatches == 2,
        reduce_scatter_with_fp32_accumulation=microbatches == 2,
    )
    found = train(wrapped, stepper, data, ranks.rank, max_norm=max_norm)
    one_process = (name, optimizer, world, microbatches, dtype)
    oracle = bits_of_one_process(
        *one_process,
        steps=STEPS,
        max_norm=max_norm,
        cadence="every" if strategy == 2 else "once",
        axes=(replicate, world // replicate),
        wire_dtype=bf16,
        compute_dtype=bf16,
    )
    assert_bits(found, oracle)
    if tolerance := NEAR.get((precision, optimizer)):
        whole = whole_batch_of_one_process(*one_process, steps=STEPS, max_norm=max_norm)
        for key, value in whole[-1].parameters.items():
            torch.testing.assert_close(found[-1][1][key], value, rtol=0, atol=tolerance, msg=key)


@pytest.mark.ranks(2)
@SHARDED
def test_bf16_weights_with_fp32_main_weights_train_like_the_oracle(sharded, ranks):
    model = build("odd", torch.bfloat16)
    data = batches(model, 2, 2)
    wrapped, stepper = wrap(model, "adamw", sharded, grad_reduce_in_fp32=True)
    found = train(wrapped, stepper, data, ranks.rank)
    oracle = bit_oracle(
        lambda: build("odd", torch.bfloat16).float(),
        data,
        loss_fn,
        OPTIMIZERS["adamw"],
        steps=STEPS,
        cadence="once",
        compute_dtype=torch.bfloat16,
    )
    assert_bits(found, oracle)
    assert {p.dtype for p in wrapped.module.parameters()} == {torch.bfloat16}


@pytest.mark.ranks(2)
@SHARDED
def test_the_modules_weights_follow_the_main_weights(sharded, ranks):
    model = build("odd", torch.bfloat16)
    wrapped, stepper = wrap(model, "adamw", sharded)
    train(wrapped, stepper, batches(model, 2, 1), ranks.rank, steps=2)
    main = full_parameters(wrapped)
    with torch.no_grad():
        wrapped(inputs(model, 5).bfloat16())  # brings the update in
    for name, parameter in wrapped.module.named_parameters():
        assert torch.equal(parameter, main[name].bfloat16()), name


class Conditional(OddNet):
    def forward(self, x, use_last=True):
        x = self.enter(x)
        for block in self.blocks[: 3 if use_last else 2]:
            x = block(x)
        return self.leave(x) * self.temperature + self.empty.sum()


class Checkpointed(OddNet):
    reentrant, order = False, (0, 1, 0, 2)

    def forward(self, x):
        x = self.enter(x)
        for index in self.order:
            x = checkpoint(self.blocks[index], x, use_reentrant=self.reentrant)
        return self.leave(x) * self.temperature + self.empty.sum()


class CheckpointedReentrant(Checkpointed):
    reentrant = True


def expected(make, loss_of_rank, prepare=lambda model: None, steps=3):
    torch.manual_seed(7)
    model = make()
    prepare(model)
    optimizer = OPTIMIZERS["sgd"](model)
    for step in range(steps):
        optimizer.zero_grad()
        sum(loss_of_rank(model, rank, step) / 2 for rank in range(2)).backward()
        optimizer.step()
    return {name: p.detach() for name, p in model.named_parameters()}


def check(make, loss_of_rank, strategy, rank, prepare=lambda model: None):
    torch.manual_seed(7)
    model = make()
    prepare(model)
    wrapped, stepper = wrap(
        model, "sgd", strategy, num_buckets=4, overlap_param_gather=strategy > 0
    )
    for step in range(3):
        loss_of_rank(wrapped, rank, step).backward()
        stepper.step()
        stepper.zero_grad()
    found = full_parameters(wrapped)
    for name, value in expected(make, loss_of_rank, prepare).items():
        torch.testing.assert_close(found[name], value, rtol=0, atol=2e-6)


def toy_input(rank, step):
    return torch.randn(4, 5, generator=torch.Generator().manual_seed(10 * step + rank))


@pytest.mark.ranks(2)
@STRATEGIES
def test_unused_parameters_that_differ_by_rank(strategy, ranks):
    def loss(model, rank, step):
        return model(toy_input(rank, step), use_last=(rank + step) % 2 == 1).square().mean()

    check(Conditional, loss, strategy, ranks.rank)


@pytest.mark.ranks(2)
@STRATEGIES
def test_unused_everywhere_is_not_decayed(strategy, ranks):
    def loss(model, rank, step):
        return model(toy_input(rank, step), use_last=step == 1).square().mean()

    check(Conditional, loss, strategy, ranks.rank)


@pytest.mark.ranks(2)
@STRATEGIES
def test_frozen_parameters(strategy, ranks):
    def freeze(model):
        model.blocks[1].requires_grad_(False)

    check(
        OddNet,
        lambda m, rank, step: m(toy_input(rank, step)).square().mean(),
        strategy,
        ranks.rank,
        freeze,
    )


@pytest.mark.matrix(strength=1)
@pytest.mark.ranks(2)
@STRATEGIES
@pytest.mark.parametrize("make", [Checkpointed, CheckpointedReentrant])
def test_recomputation_of_a_reused_block(make, strategy, ranks):
    check(
        make, lambda m, rank, step: m(toy_input(rank, step)).square().mean(), strategy, ranks.rank
    )


@pytest.mark.ranks(2)
@SHARDED
def test_gradients_that_come_several_times_in_a_backward_are_added_in_fp32(sharded, ranks):
    torch.manual_seed(7)
    wrapped, _ = wrap(CheckpointedReentrant().bfloat16(), "sgd", int(sharded))
    wrapped.module.order = (0, 1, 0, 0, 2)
    came = []

    def note(gradient):
        came.append(gradient.clone())
        return gradient

    pass_gradients(wrapped.module.blocks[0].up, "weight", note)
    wrapped(toy_input(0, 0).bfloat16()).float().square().mean().backward()
    assert len(came) == 3
    first, second, third = (gradient.float() for gradient in came)
    total = (first + second + third).bfloat16().float()  # on the wire, the same on both ranks
    assert torch.equal(full_gradients(wrapped)["blocks.0.up.weight"], total)


@pytest.mark.ranks(2)
@STRATEGIES
def test_two_forwards_before_two_backwards(strategy, ranks):
    model = build()
    wrapped, stepper = wrap(model, "sgd", strategy, overlap_param_gather=strategy > 0)
    for step in range(3):
        losses = [wrapped(toy_input(ranks.rank + k, step)).mean() for k in (0, 50)]
        for loss in losses:
            loss.backward()
        stepper.step()
        stepper.zero_grad()
    found = full_parameters(wrapped)

    def both(m, rank, step):
        return sum(m(toy_input(rank + k, step)).mean() for k in (0, 50))

    for name, value in expected(OddNet, both).items():
        torch.testing.assert_close(found[name], value, rtol=0, atol=2e-6)


@pytest.mark.ranks(2)
@SHARDED
def test_syncing_by_hand_equals_syncing_in_the_last_backward(sharded, ranks):
    model = build()
    wrapped, stepper = wrap(model, "sgd", sharded)
    for step in range(3):
        with wrapped.no_sync():
            for k in (0, 50):
                wrapped(toy_input(ranks.rank + k, step)).mean().backward()
        wrapped.start_grad_sync()
        wrapped.finish_grad_sync()
        wrapped.finish_grad_sync()  # harmless
        stepper.step()
        stepper.zero_grad()
    found = full_parameters(wrapped)

    def both(m, rank, step):
        return sum(m(toy_input(rank + k, step)).mean() for k in (0, 50))

    for name, value in expected(OddNet, both).items():
        torch.testing.assert_close(found[name], value, rtol=0, atol=2e-6)


@pytest.mark.ranks(2)
@SHARDED
@pytest.mark.parametrize("max_norm", [0.01, 1e9])
def test_clipping_uses_the_global_norm(max_norm, sharded, ranks):
    model = build()
    data = batches(model, 2, 1)
    wrapped, stepper = wrap(model, "sgd", sharded)
    norms = []
    for step in range(STEPS):
        loss_fn(wrapped, data(step)[ranks.rank][0]).backward()
        norms.append(clip_grad_norm(wrapped, max_norm))
        stepper.step()
        stepper.zero_grad()
    oracle = bit_oracle(
        lambda: build(), data, loss_fn, OPTIMIZERS["sgd"], steps=STEPS, max_norm=max_norm
    )
    for norm, wanted in zip(norms, oracle, strict=True):
        assert torch.equal(norm, wanted.norm)
    found = full_parameters(wrapped)
    for name, value in oracle[-1].parameters.items():
        assert torch.equal(found[name], value), name


@pytest.mark.ranks(2)
@SHARDED
def test_optimizer_state_by_name_goes_on_where_it_stopped(sharded, ranks):
    model = build()
    data = batches(model, 2, 1)
    wrapped, stepper = wrap(model, "adamw", sharded)
    train(wrapped, stepper, data, ranks.rank, steps=2)
    weights = {name: value.clone() for name, value in full_parameters(wrapped).items()}
    saved = stepper.state_dict()
    assert "enter.weight" in saved["state"]

    second = build()
    with torch.no_grad():
        for name, value in weights.items():
            second.get_parameter(name).copy_(value)
    resumed, resumed_stepper = wrap(second, "adamw", sharded)
    resumed_stepper.load_state_dict(saved)
    later = lambda step: data(step + 2)  # noqa: E731
    one = train(wrapped, stepper, later, ranks.rank, steps=2)[-1][1]
    other = train(resumed, resumed_stepper, later, ranks.rank, steps=2)[-1][1]
    for name, value in one.items():
        assert torch.equal(other[name], value), name


@pytest.mark.ranks(2)
@SHARDED
def test_deleting_the_wrapper_frees_it_without_the_garbage_collector(sharded, ranks):
    gc.collect()
    gc.disable()
    try:
        wrapped, stepper = wrap(build(), "sgd", sharded)
        wrapped(toy_input(0, 0)).mean().backward()
        stepper.step()
        watched = [weakref.ref(wrapped), weakref.ref(wrapped.module.blocks[0])]
        watched += [weakref.ref(group) for group in wrapped.parameter_groups()]
        del wrapped, stepper
        assert not_freed(watched) == []
    finally:
        gc.enable()
