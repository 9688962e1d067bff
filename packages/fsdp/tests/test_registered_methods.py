"""Methods other than forward that gather what they need, beside plain PyTorch in one process."""

import pytest
import torch
from torch import nn

from lamina.fsdp import fully_shard, register_forward_method
from lamina_testing.toys import Block, OddNet, inputs

from .module_parity import STRATEGIES, build, compare, one_process, plain_loss, shard, train


class Generating(OddNet):
    """Methods that use weights outside of forward, with forwards inside them."""

    def generate(self, x, steps=4):
        tokens = []
        for _ in range(steps):
            y = self(x)
            x = torch.nn.functional.linear(y, self.enter.weight.t()[:, :3])
            tokens.append(x.argmax(dim=-1))
        return torch.stack(tokens)

    def score(self, x, *, power):
        return (self(x) * self.temperature).abs().pow(power).mean()


@pytest.mark.ranks(2)
@STRATEGIES
@pytest.mark.parametrize("mode", [torch.no_grad, torch.inference_mode])
def test_generation_with_a_registered_method_equals_plain(mode, strategy, ranks):
    model, optimizer = shard(Generating, strategy)
    register_forward_method(model, "generate")
    train(model, optimizer, plain_loss, ranks.rank)
    reference = one_process(Generating, plain_loss)
    with mode():
        assert torch.equal(model.generate(inputs(model, 7)), reference.generate(inputs(model, 7)))
    train(model, optimizer, plain_loss, ranks.rank)


@pytest.mark.ranks(2)
@STRATEGIES
def test_training_through_a_registered_method(strategy, ranks):
    def loss(model, rank, step):
        return model.score(inputs(model, 10 * step + rank), power=2)

    model, optimizer = shard(Generating, strategy)
    register_forward_method(model, "score")
    train(model, optimizer, loss, ranks.rank)
    compare(model, one_process(Generating, loss))


class BlockWithMethod(Block):
    def forward(self, x):
        return self.mix(x)

    def mix(self, x):
        return super().forward(x)


class CallsMethods(OddNet):
    """Calls a method of its blocks instead of the blocks."""

    def __init__(self):
        super().__init__()
        self.blocks = nn.ModuleList(BlockWithMethod(17) for _ in range(3))

    def forward(self, x):
        x = self.enter(x)
        for block in self.blocks:
            x = block.mix(x)
        return self.leave(x)


@pytest.mark.ranks(2)
@STRATEGIES
def test_a_units_registered_method_is_a_forward_of_the_unit(strategy, ranks):
    model, optimizer = shard(CallsMethods, strategy)
    for block in model.blocks:
        register_forward_method(block, "mix")
    train(model, optimizer, plain_loss, ranks.rank)
    compare(model, one_process(CallsMethods, plain_loss))


@pytest.mark.ranks(1)
def test_a_method_that_cannot_be_registered_is_named(ranks):
    model = fully_shard(build(OddNet), fsdp_unit_modules=[Block])
    with pytest.raises(ValueError, match="LayerNorm is not a unit"):
        register_forward_method(model.blocks[0].norm, "forward")
    with pytest.raises(AttributeError, match="no method 'decode'"):
        register_forward_method(model, "decode")
