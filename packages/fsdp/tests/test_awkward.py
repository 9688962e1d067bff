"""Models that break wrappers silently. Parameters and gradients are compared with one process."""

import copy

import pytest
import torch
from torch import nn
from torch.utils.checkpoint import checkpoint

from lamina.ddp import full_gradients, full_parameters
from lamina.fsdp import MixedPrecisionPolicy, fully_shard, shard_module
from lamina.mesh import ParallelLayout
from lamina_testing.toys import OddNet, TiedNet, inputs

from .one_process import (
    STRATEGIES,
    Conditional,
    build,
    check,
    compare,
    expected,
    plain_loss,
    sgd,
    shard,
)


@pytest.mark.matrix(few=4)
@pytest.mark.ranks(1, 2)
@STRATEGIES
def test_tied_and_reused_parameters(strategy, ranks):
    check(TiedNet, plain_loss, ranks, strategy)


@pytest.mark.ranks(2)
@STRATEGIES
def test_frozen_parameters_keep_their_values_and_have_no_gradient(strategy, ranks):
    def freeze(model):
        model.blocks[1].requires_grad_(False)
        model.enter.bias.requires_grad_(False)

    def loss(model, rank, step):  # another block is frozen for a step in between
        model.blocks[2].requires_grad_(step != 1)
        model.leave.weight.requires_grad_(step != 1)
        return plain_loss(model, rank, step)

    check(OddNet, loss, ranks, strategy, prepare=freeze)
    model = build()
    freeze(model)
    model, _ = shard(model, sgd(model.parameters()), ranks.world_size, strategy)
    model.blocks[1].requires_grad_(True)
    with pytest.raises(ValueError, match=r"blocks\.1\.\S+ was frozen when the model was wrapped"):
        plain_loss(model, ranks.rank, 0)


class Shuffled(nn.Module):
    def __init__(self):
        super().__init__()
        self.order = nn.Parameter(torch.arange(5).flip(0), requires_grad=False)
        self.linear = nn.Linear(5, 2)

    def forward(self, x):
        return self.linear(x[:, self.order])


@pytest.mark.ranks(2)
@pytest.mark.parametrize("strategy", range(4))
def test_frozen_integers_are_indices_under_any_policy(strategy, ranks):
    policy = MixedPrecisionPolicy(param_dtype=torch.bfloat16)
    model = fully_shard(Shuffled(), zero_dp_strategy=strategy, mixed_precision_policy=policy)
    model(torch.ones(3, 5)).sum().backward()
    for one in (model, copy.deepcopy(model)):
        order = full_parameters(one)["order"]
        assert order.dtype is torch.int64
        assert order.tolist() == [4, 3, 2, 1, 0]
        one(torch.ones(3, 5))


@pytest.mark.ranks(2)
@STRATEGIES
def test_unused_on_all_ranks_has_no_gradient_and_is_not_decayed(strategy, ranks):
    def loss(model, rank, step):
        return model(inputs(model, 10 * step + rank), use_last=step == 1).square().mean()

    check(Conditional, loss, ranks, strategy)


@pytest.mark.ranks(2)
@STRATEGIES
def test_unused_on_some_ranks_counts_as_zero_there(strategy, ranks):
    def loss(model, rank, step):
        out = model(inputs(model, 10 * step + rank), use_temperature=rank == 1)
        return out.square().mean()

    check(Conditional, loss, ranks, strategy)


@pytest.mark.ranks(2)
@pytest.mark.parametrize("strategy", [0, 1, 2])
def test_whole_blocks_unused_on_some_ranks_do_not_reorder_reductions(strategy, ranks):
    def loss(model, rank, step):
        out = model(inputs(model, 10 * step + rank), use_last=(rank + step) % 2 == 1)
        return out.square().mean()

    check(Conditional, loss, ranks, strategy)


@pytest.mark.matrix(few=2)
@pytest.mark.ranks(2)
@STRATEGIES
def test_two_forwards_before_one_backward(strategy, ranks):
    def loss(model, rank, step):
        first = model(inputs(model, 100 * step + rank))
        second = model(inputs(model, 100 * step + rank + 50))
        return (first * second).mean()

    check(OddNet, loss, ranks, strategy)


@pytest.mark.matrix(few=2)
@pytest.mark.ranks(2)
@STRATEGIES
def test_two_forwards_before_their_two_backwards(strategy, ranks):
    model = build()
    model, optimizer = shard(model, sgd(model.parameters()), 2, strategy)
    for step in range(3):
        losses = [model(inputs(model, 100 * step + ranks.rank + k)).mean() for k in (0, 50)]
        for loss in losses:
            loss.backward()
        gradients = full_gradients(model)
        optimizer.step()
        optimizer.zero_grad()

    def both(model, rank, step):
        return sum(model(inputs(model, 100 * step + rank + k)).mean() for k in (0, 50))

    compare(model, gradients, expected(OddNet, both, 2))


@pytest.mark.matrix(few=2)
@pytest.mark.ranks(2)
@STRATEGIES
def test_a_second_backward_without_no_sync_adds_and_never_reduces_twice(strategy, ranks):
    model = build()
    model, optimizer = shard(model, sgd(model.parameters()), 2, strategy)
    for step in range(3):
        for k in (0, 50, 70):
            model(inputs(model, 100 * step + ranks.rank + k)).mean().backward()
        gradients = full_gradients(model)
        optimizer.step()
        optimizer.zero_grad(set_to_none=step % 2 == 0)

    def three(model, rank, step):
        return sum(model(inputs(model, 100 * step + rank + k)).mean() for k in (0, 50, 70))

    compare(model, gradients, expected(OddNet, three, 2))


class Checkpointed(OddNet):
    """Recomputes each block in backward."""

    reentrant = False

    def forward(self, x):
        x = self.enter(x)
        for block in self.blocks:
            x = checkpoint(block, x, use_reentrant=self.reentrant)
        return self.leave(x) * self.temperature + self.empty.sum()


class CheckpointedReentrant(Checkpointed):
    reentrant = True


class CheckpointedSegment(OddNet):
    """Recomputes several units as one segment."""

    def forward(self, x):
        x = checkpoint(
            lambda y: self.blocks[1](self.blocks[0](y)), self.enter(x), use_reentrant=False
        )
        return self.leave(self.blocks[2](x)) * self.temperature + self.empty.sum()


@pytest.mark.matrix(strength=1)
@pytest.mark.ranks(2)
@pytest.mark.parametrize("make", [Checkpointed, CheckpointedReentrant, CheckpointedSegment])
@STRATEGIES
def test_recomputation_around_units(strategy, make, ranks):
    check(make, plain_loss, ranks, strategy)


class ReusedReentrant(OddNet):
    """Reentrant recomputation of a block used twice fires its hooks twice in one backward."""

    def forward(self, x):
        x = self.enter(x)
        for block in (self.blocks[0], self.blocks[1], self.blocks[0], self.blocks[2]):
            x = checkpoint(block, x, use_reentrant=True)
        return self.leave(x) * self.temperature + self.empty.sum()


@pytest.mark.ranks(2)
@STRATEGIES
def test_reentrant_recomputation_of_a_reused_block(strategy, ranks):
    check(ReusedReentrant, plain_loss, ranks, strategy)


@pytest.mark.ranks(2)
def test_two_forwards_of_reentrant_blocks_are_one_term_of_the_sum_over_ranks(ranks):
    """Each is recomputed by itself, and a unit that ended in between would be summed twice."""
    plain, model = build(CheckpointedReentrant), build(CheckpointedReentrant)
    model, _ = shard(model, sgd(model.parameters()), 2, 3)
    for net in (model, plain):
        with torch.no_grad():
            net(inputs(net, 9))
        losses = [net(inputs(net, ranks.rank + k)).square().mean() for k in (0, 50)]
        sum(losses).backward()
    for name, value in full_gradients(model).items():
        total = plain.get_parameter(name).grad
        assert total is not None
        torch.distributed.all_reduce(total)
        assert torch.equal(value, total / 2), name


class RecomputesInside(nn.Module):
    def __init__(self):
        super().__init__()
        self.enter, self.block = nn.Linear(8, 8), nn.Linear(8, 8)

    def forward(self, x):
        return checkpoint(self.block, self.enter(x), use_reentrant=True).tanh()


class CallsItTwice(nn.Module):
    def __init__(self):
        super().__init__()
        self.part = RecomputesInside()

    def forward(self, x):
        x = x + self.part(x)  # no gradient goes to this x, so nothing tells that the call has ended
        return x + self.part(x)


@pytest.mark.ranks(2)
def test_a_unit_is_reduced_once_where_its_first_call_has_no_input_with_a_gradient(ranks):
    torch.manual_seed(0)
    plain = CallsItTwice()
    model = copy.deepcopy(plain)
    mesh = ParallelLayout().build(ranks.device.type)
    shard_module(model.part, mesh)
    model = shard_module(model, mesh)
    x = torch.randn(3, 8, generator=torch.Generator().manual_seed(ranks.rank))
    for net in (model, plain):
        net(x).square().sum().backward()
    for name, value in full_gradients(model).items():
        total = plain.get_parameter(name).grad
        assert total is not None
        torch.distributed.all_reduce(total)
        assert torch.equal(value, total / 2), name
