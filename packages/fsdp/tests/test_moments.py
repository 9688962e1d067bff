"""Moments in a chosen dtype: the bits of Adam whose moments are rounded after each step."""

import pytest
import torch
from torch import nn

from lamina.buffers import ShardedTensor
from lamina.ddp import DistributedDataParallel, DistributedDataParallelConfig, ShardedOptimizer
from lamina.fsdp import MixedPrecisionPolicy, fully_shard
from lamina.mesh import ParallelLayout
from lamina_testing import device_type
from lamina_testing.toys import Block

STEPS = 4
MOMENTS = ("exp_avg", "exp_avg_sq")


def made():
    torch.manual_seed(0)
    return nn.Sequential(Block(8), Block(8))


def batch(step):
    return torch.randn(4, 8, generator=torch.Generator().manual_seed(step))


def train(model, optimizer, steps, round_moments=False):
    for step in steps:
        model(batch(step)).square().mean().backward()
        optimizer.step()
        optimizer.zero_grad()
        for state in optimizer.state.values() if round_moments else ():
            for name in MOMENTS:
                state[name].copy_(state[name].bfloat16())


def adamw(model, **settings):
    return torch.optim.AdamW(model.parameters(), lr=0.01, **settings)


def oracle(**settings):
    """Plain PyTorch in one process: the ranks have equal batches, so their mean is exact."""
    model = made()
    train(model, adamw(model, foreach=False, **settings), range(STEPS), round_moments=True)
    return [parameter.detach() for parameter in model.parameters()]


def whole(model):
    return [
        p.full_tensor() if isinstance(p, ShardedTensor) else p.detach() for p in model.parameters()
    ]


def sharded(strategy, dtype=torch.bfloat16, **settings):
    policy = MixedPrecisionPolicy(moments_dtype=dtype)
    model = made()
    return fully_shard(
        model,
        adamw(model, **settings),
        fsdp_unit_modules=[Block],
        zero_dp_strategy=strategy,
        mixed_precision_policy=policy,
    )


@pytest.mark.ranks(2)
@pytest.mark.parametrize("strategy", [0, 1, 2, 3])
def test_every_strategy_has_the_bits_of_adam_with_rounded_moments(strategy):
    model, optimizer = sharded(strategy)
    train(model, optimizer, range(STEPS))
    for found, expected in zip(whole(model), oracle(), strict=True):
        assert torch.equal(found, expected)
    for state in optimizer.state.values():
        assert {state[name].dtype for name in MOMENTS} == {torch.bfloat16}
    plain, exact = sharded(strategy, None)
    train(plain, exact, range(STEPS))
    assert not all(map(torch.equal, whole(plain), whole(model))), "the rounding shows"


@pytest.mark.ranks(2)
def test_fused_adam_is_stepped_in_blocks_too():
    model, optimizer = sharded(3, fused=True)
    train(model, optimizer, range(STEPS))
    for found, expected in zip(whole(model), oracle(fused=True), strict=True):
        torch.testing.assert_close(found, expected, rtol=1e-6, atol=1e-6)


@pytest.mark.ranks(1)
@pytest.mark.parametrize("settings", [{"fused": True}, {"amsgrad": True}])
def test_moments_in_the_dtype_of_main_weights_are_any_optimizers_own(settings):
    found, expected = (sharded(3, dtype, **settings) for dtype in (torch.float32, None))
    for model, optimizer in (found, expected):
        train(model, optimizer, range(STEPS))
    assert all(map(torch.equal, whole(found[0]), whole(expected[0])))


@pytest.mark.ranks(2)
@pytest.mark.parametrize("zero", [False, True])
def test_a_load_goes_on_with_the_same_bits(zero):
    config = DistributedDataParallelConfig(
        use_distributed_optimizer=zero, moments_dtype=torch.bfloat16
    )
    mesh = ParallelLayout().build(device_type())

    def wrapped():
        model = DistributedDataParallel(made(), config, mesh)
        return model, ShardedOptimizer(adamw(model.module), model, mesh)

    first, optimizer = wrapped()
    train(first, optimizer, range(2))
    second, restored = wrapped()
    second.load_state_dict(first.state_dict())
    restored.prepare_state()
    assert {s[name].dtype for s in restored.state.values() for name in MOMENTS} == {torch.bfloat16}
    restored.load_state_dict(optimizer.state_dict())
    train(second, restored, range(2, STEPS))
    for found, expected in zip(second.module.parameters(), oracle(), strict=True):
        assert torch.equal(found, expected)


@pytest.mark.ranks(1)
def test_what_cannot_keep_its_moments_so_is_refused():
    policy = MixedPrecisionPolicy(moments_dtype=torch.bfloat16)
    model = made()
    with pytest.raises(ValueError, match=r"for torch\.optim\.Adam and AdamW, and .* has SGD"):
        fully_shard(
            model, torch.optim.SGD(model.parameters(), lr=1.0), mixed_precision_policy=policy
        )
    model, optimizer = sharded(3, amsgrad=True)
    with pytest.raises(RuntimeError, match="without amsgrad"):
        train(model, optimizer, range(1))
