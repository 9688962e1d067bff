"""Blocks that return no tensor which the loss depends on: nothing tells when their backward begins.

Their weights are not given back before the backward has ended, so they train as one process.
"""

from __future__ import annotations

from typing import Any

import pytest
import torch
from torch import Tensor, nn

from lamina.fsdp import fully_shard, shard_module
from lamina_testing.toys import Block, OddNet, inputs

from .module_parity import build, check, compare, one_process, sgd, train


class State:
    """What a user may hand from block to block: no container, and no dataclass."""

    def __init__(self, x: Tensor) -> None:
        self.x = x


class Slotted:
    __slots__ = ("x",)

    def __init__(self, x: Tensor) -> None:
        self.x = x


class Leaves(Block):
    """Leaves its result in the object that it was given."""

    def forward(self, state: Any) -> None:
        state.x = super().forward(state.x)


class Wraps(Block):
    """Gives its result in an object with slots."""

    def forward(self, x: Tensor) -> Slotted:
        return Slotted(super().forward(x))


class Keeps(Block):
    """Keeps a loss, and gives an output that has no gradient."""

    loss: Tensor

    def forward(self, x: Tensor) -> Tensor:
        out = super().forward(x)
        self.loss = (out - 0.5).square().mean()
        return out.detach()


class Odd(OddNet):
    """Blocks of a class, told how to be called."""

    block: type[Block] = Block

    def __init__(self) -> None:
        super().__init__(depth=0)
        self.blocks = nn.ModuleList(self.block(17) for _ in range(4))


class Leaving(Odd):
    block, state = Leaves, State

    def forward(self, x: Tensor) -> Tensor:
        state = self.state(self.enter(x))
        for block in self.blocks:
            block(state)
        return self.leave(state.x) * self.temperature


class LeavingSlots(Leaving):
    state = Slotted


class Wrapping(Odd):
    block = Wraps

    def forward(self, x: Tensor) -> Tensor:
        x = self.enter(x)
        for block in self.blocks:
            x = block(x).x
        return self.leave(x) * self.temperature


class Keeping(Odd):
    block = Keeps


MODELS = {made.__name__: made for made in (Leaving, LeavingSlots, Wrapping, Keeping)}


def loss_of(model: nn.Module, rank: int, step: int) -> Tensor:
    loss: Tensor = model(inputs(model, 10 * step + rank)).square().mean()
    return loss + sum(block.loss for block in model.modules() if isinstance(block, Keeps))


@pytest.mark.ranks(2)
@pytest.mark.parametrize(
    "settings", [{}, {"fsdp_double_buffer": True}, {"gather_budget": 40_000}], ids=str
)
@pytest.mark.parametrize("name", MODELS)
def test_they_train_as_one_process(name, settings, ranks):
    model = check(MODELS[name], loss_of, ranks, 3, **settings)
    states = [group.weights.state.name for group in model.parameter_groups()]
    assert set(states) <= {"RELEASED", "STALE"}  # nothing stays behind


@pytest.mark.ranks(2)
@pytest.mark.parametrize("name", MODELS)
def test_shard_module_does_too(name, ranks):
    model = build(MODELS[name])
    for block in model.blocks:
        shard_module(block)
    shard_module(model)
    train(model, sgd(model), loss_of, ranks.rank)
    compare(model, one_process(MODELS[name], loss_of))


@pytest.mark.ranks(2)
def test_a_forward_without_gradients_comes_between(ranks):
    def loss(model, rank, step):
        value = loss_of(model, rank, step)
        with torch.no_grad():
            loss_of(model, rank, step + 1)
        return value

    check(Leaving, loss, ranks, 3)


@pytest.mark.ranks(2)
def test_a_forward_that_is_thrown_away_leaves_the_next_ones_right(ranks):
    def loss(model, rank, step):
        loss_of(model, rank, step + 1)
        return loss_of(model, rank, step)

    check(Leaving, loss, ranks, 3)


@pytest.mark.ranks(2)
def test_blocks_that_are_frozen_are_given_back(ranks):
    """Their outputs need no gradient, and no backward comes."""
    model = build(OddNet)
    model.enter.requires_grad_(False)
    model.blocks.requires_grad_(False)
    model = fully_shard(model, fsdp_unit_modules=[Block], zero_dp_strategy=3)
    out = model(inputs(model, ranks.rank))
    units = [model.unit_of(block) for block in model.blocks]
    assert [unit.live_bytes for unit in units[:2]] == [0, 0]  # the last call is kept
    out.sum().backward()
