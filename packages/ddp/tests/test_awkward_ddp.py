"""What happens once: a gradient in one microbatch only, a backward that dies, a lone evaluation."""

import copy

import pytest
import torch

from lamina.ddp import (
    DistributedDataParallel,
    DistributedDataParallelConfig,
    ShardedOptimizer,
    full_gradients,
    full_parameters,
)
from lamina.mesh import ParallelLayout
from lamina_testing import device_type
from lamina_testing.toys import OddNet

CASES = pytest.mark.parametrize(
    ("sharded", "config"),
    [
        (False, {}),
        (True, {}),
        (True, {"overlap_grad_reduce": False}),
        (True, {"zero_dp_strategy": 2}),
        (True, {"overlap_param_gather": True}),
        (False, {"reproducible": True}),
        (True, {"reproducible": True}),
        (True, {"reduction": "native"}),
    ],
)


class Failing(torch.autograd.Function):
    @staticmethod
    def forward(ctx, x, fail):
        ctx.fail = fail
        return x.clone()

    @staticmethod
    def backward(ctx, gradient):
        if ctx.fail:
            raise RuntimeError("on purpose")
        return gradient, None


class Net(OddNet):
    def forward(self, x, blocks=3, fail=False):
        x = self.enter(x)
        for index, block in enumerate(self.blocks[:blocks]):
            x = block(x)
            if index == 0:
                x = Failing.apply(x, fail)
        return self.leave(x) * self.temperature + self.empty.sum()


def build():
    torch.manual_seed(7)
    return Net()


def sgd(parameters):
    return torch.optim.SGD(parameters, lr=0.1, momentum=0.9, weight_decay=0.01)


def wrap(sharded, config):
    model = build()
    mesh = ParallelLayout().build(device_type())
    optimizer = sgd(model.parameters())
    settings = {"overlap_grad_reduce": True, "num_buckets": 4, **config}
    wrapped = DistributedDataParallel(
        model, DistributedDataParallelConfig(use_distributed_optimizer=sharded, **settings), mesh
    )
    return wrapped, ShardedOptimizer(optimizer, wrapped, mesh)


def loss(model, rank, number, **how):
    x = torch.randn(4, 5, generator=torch.Generator().manual_seed(10 * number + rank))
    return model(x, **how).square().mean()


def in_one_process(steps):
    """`steps[k]` lists the microbatches of step k as keyword arguments of the model."""
    model = build()
    optimizer = sgd(model.parameters())
    number = 0
    for microbatches in steps:
        optimizer.zero_grad()
        for how in microbatches:
            sum(loss(model, rank, number, **how) / 2 for rank in range(2)).backward()
            number += 1
        optimizer.step()
    return {name: p.detach() for name, p in model.named_parameters()}


def check(wrapped, wanted):
    found = full_parameters(wrapped)
    for name, value in wanted.items():
        torch.testing.assert_close(found[name], value, rtol=0, atol=3e-6, msg=name)


@pytest.mark.matrix(strength=1)
@pytest.mark.ranks(2)
@CASES
@pytest.mark.parametrize("used", [(1, 3), (3, 1), (1, 3, 1)])
def test_gradients_in_some_microbatches_only(used, sharded, config, ranks):
    wrapped, optimizer = wrap(sharded, config)
    number = 0
    for _ in range(2):
        for place, blocks in enumerate(used):
            last = place == len(used) - 1
            wrapped_loss = lambda n=number, b=blocks: loss(wrapped, ranks.rank, n, blocks=b)  # noqa: E731
            if last:
                wrapped_loss().backward()
            else:
                with wrapped.no_sync():
                    wrapped_loss().backward()
            number += 1
        optimizer.step()
        optimizer.zero_grad()
    check(wrapped, in_one_process([[{"blocks": b} for b in used]] * 2))


@pytest.mark.matrix(strength=1)
@pytest.mark.ranks(2)
@CASES
def test_an_exception_in_backward_leaves_nothing_behind(sharded, config, ranks):
    wrapped, optimizer = wrap(sharded, config)
    loss(wrapped, ranks.rank, 0).backward()
    optimizer.step()
    optimizer.zero_grad()
    with pytest.raises(RuntimeError, match="on purpose"):
        loss(wrapped, ranks.rank, 99, fail=True).backward()
    optimizer.zero_grad()
    loss(wrapped, ranks.rank, 1).backward()
    optimizer.step()
    optimizer.zero_grad()
    failing, other = loss(wrapped, ranks.rank, 99, fail=True), loss(wrapped, ranks.rank, 2)
    with pytest.raises(RuntimeError, match="on purpose"):
        failing.backward()
    other.backward()
    optimizer.step()
    optimizer.zero_grad()
    check(wrapped, in_one_process([[{}], [{}], [{}]]))


@pytest.mark.matrix(strength=1)
@pytest.mark.ranks(2)
@CASES
def test_an_exception_in_backward_over_earlier_microbatches_wants_them_dropped(
    sharded, config, ranks
):
    wrapped, optimizer = wrap(sharded, config)
    for zero in (optimizer.zero_grad, wrapped.zero_grad_buffer):
        with wrapped.no_sync():
            loss(wrapped, ranks.rank, 50).backward()
        with pytest.raises(RuntimeError, match="on purpose"):
            loss(wrapped, ranks.rank, 99, fail=True).backward()
        for further in (optimizer.step, loss(wrapped, ranks.rank, 51).backward):
            with pytest.raises(RuntimeError, match=r"raised half-way.*zero_grad_buffer\(\)"):
                further()
        zero()
    loss(wrapped, ranks.rank, 0).backward()
    optimizer.step()
    check(wrapped, in_one_process([[{}]]))


@pytest.mark.matrix(strength=1)
@pytest.mark.ranks(2)
@CASES
def test_a_second_backward_without_no_sync_adds_and_never_reduces_twice(sharded, config, ranks):
    wrapped, _optimizer = wrap(sharded, config)
    for number in range(3):
        loss(wrapped, ranks.rank, number).backward()
    wanted = build()
    sum(loss(wanted, rank, n) / 2 for rank in range(2) for n in range(3)).backward()
    for name, gradient in full_gradients(wrapped).items():
        torch.testing.assert_close(
            gradient, wanted.get_parameter(name).grad, rtol=0, atol=3e-6, msg=name
        )


@pytest.mark.matrix(strength=1)
@pytest.mark.ranks(2)
@CASES
def test_evaluation_between_backward_and_step_changes_nothing(sharded, config, ranks):
    wrapped, optimizer = wrap(sharded, config)
    for number in range(2):
        loss(wrapped, ranks.rank, number).backward()
        with torch.no_grad():
            loss(wrapped, ranks.rank, 50)
        optimizer.step()
        with torch.no_grad():
            loss(wrapped, ranks.rank, 51)
        optimizer.zero_grad()
    check(wrapped, in_one_process([[{}], [{}]]))


@pytest.mark.matrix(strength=1)
@pytest.mark.ranks(2)
@CASES
def test_zero_grad_between_microbatches_discards_them(sharded, config, ranks):
    wrapped, optimizer = wrap(sharded, config)
    with wrapped.no_sync():
        loss(wrapped, ranks.rank, 99).backward()
    optimizer.zero_grad()
    loss(wrapped, ranks.rank, 0).backward()
    optimizer.step()
    check(wrapped, in_one_process([[{}]]))


@pytest.mark.ranks(1, 2)
def test_statistics_may_be_sent_between_a_forward_and_its_backward(ranks):
    def losses(model):
        generator = torch.Generator().manual_seed(ranks.rank)
        return [model(torch.randn(4, 5, generator=generator)).square().sum() for _ in range(2)]

    torch.manual_seed(7)
    plain = torch.nn.Sequential(torch.nn.Linear(5, 3), torch.nn.BatchNorm1d(3))
    wrapped = DistributedDataParallel(
        copy.deepcopy(plain), DistributedDataParallelConfig(broadcast_buffers="forward")
    )
    for model in (plain, wrapped):
        first, second = losses(model)
        first.backward()
        second.backward()
    for name, gradient in full_gradients(wrapped).items():
        expected = plain.get_parameter(name).grad
        torch.distributed.all_reduce(expected)
        torch.testing.assert_close(gradient, expected / ranks.world_size)
