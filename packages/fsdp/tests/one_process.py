"""Any loss of any rank in one process of plain PyTorch, and `fully_shard` beside it."""

import pytest
import torch
from torch.distributed.device_mesh import init_device_mesh

from lamina.ddp import full_gradients, full_parameters
from lamina.fsdp import fully_shard
from lamina_testing import device_type
from lamina_testing.toys import Block, OddNet, inputs

STRATEGIES = pytest.mark.parametrize("strategy", [0, 1, 2, 3])


def sgd(parameters):
    return torch.optim.SGD(parameters, lr=0.1, momentum=0.9, weight_decay=0.01, foreach=False)


def build(make=OddNet):
    torch.manual_seed(3)
    return make()


def shard(model, optimizer, world, strategy, **settings):
    mesh = init_device_mesh(device_type(), (world,), mesh_dim_names=("dp",))
    settings.setdefault("fsdp_unit_modules", [Block])
    return fully_shard(model, optimizer, device_mesh=mesh, zero_dp_strategy=strategy, **settings)


def average(gradients_of_ranks):
    """What one process would compute: zeros where a rank has none, nothing where no rank has."""
    mean = {}
    for name in gradients_of_ranks[0]:
        found = [g[name] for g in gradients_of_ranks if g[name] is not None]
        if found:
            mean[name] = torch.stack(found).sum(0) / len(gradients_of_ranks)
    return mean


def expected(make, loss_of_rank, world, steps=3, prepare=lambda model: None):
    """Plain PyTorch: each rank's loss in turn, gradients averaged, one optimizer."""
    model = build(make)
    prepare(model)
    optimizer = sgd(model.parameters())
    mean = {}
    for step in range(steps):
        per_rank = []
        for rank in range(world):
            model.zero_grad()
            loss_of_rank(model, rank, step).backward()
            per_rank.append(
                {n: None if p.grad is None else p.grad.clone() for n, p in model.named_parameters()}
            )
        mean = average(per_rank)
        for name, parameter in model.named_parameters():
            parameter.grad = mean.get(name)
        optimizer.step()
    return dict(model.named_parameters()), mean


def train(model, optimizer, loss_of_rank, rank, steps=3):
    """Steps of one microbatch; returns the last one's gradients."""
    gradients = {}
    for step in range(steps):
        loss_of_rank(model, rank, step).backward()
        gradients = full_gradients(model)
        optimizer.step()
        optimizer.zero_grad()
    return gradients


def check(make, loss_of_rank, ranks, strategy, steps=3, prepare=lambda model: None, **settings):
    model = build(make)
    prepare(model)
    model, optimizer = shard(model, sgd(model.parameters()), ranks.world_size, strategy, **settings)
    gradients = train(model, optimizer, loss_of_rank, ranks.rank, steps)
    compare(model, gradients, expected(make, loss_of_rank, ranks.world_size, steps, prepare))


def assert_near(name, found, wanted):
    worst = (found - wanted).abs().max() if wanted.numel() else 0.0
    assert worst <= 2e-6, f"{name} is off by {worst}"


def compare(model, gradients, oracle):
    parameters, mean = oracle
    assert gradients.keys() == mean.keys()
    for name in mean:
        assert_near(name, gradients[name], mean[name])
    found = full_parameters(model)
    assert found.keys() == parameters.keys()
    for name in parameters:
        assert_near(name, found[name], parameters[name].detach())


def plain_loss(model, rank, step):
    return model(inputs(model, 10 * step + rank)).square().mean()


class Conditional(OddNet):
    """Uses its last block only when told to."""

    def forward(self, x, use_last=True, use_temperature=True):
        x = self.enter(x)
        for block in self.blocks[: 3 if use_last else 2]:
            x = block(x)
        x = self.leave(x)
        return x * self.temperature if use_temperature else x


class Failing(torch.autograd.Function):
    @staticmethod
    def forward(ctx, x):
        return x.clone()

    @staticmethod
    def backward(ctx, gradient):
        raise RuntimeError("planted")


class FailingNet(OddNet):
    fail = False

    def forward(self, x):
        x = self.blocks[0](self.enter(x))
        if self.fail:
            x = Failing.apply(x)
        return self.leave(self.blocks[2](self.blocks[1](x))) * self.temperature + self.empty.sum()
