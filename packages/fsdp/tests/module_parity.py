"""A model under `fully_shard` on two ranks, and the same in one process of plain PyTorch."""

import pytest
import torch
from torch.distributed.device_mesh import init_device_mesh

from lamina.ddp import full_parameters
from lamina.fsdp import fully_shard
from lamina_testing import device_type
from lamina_testing.toys import Block, inputs

STRATEGIES = pytest.mark.parametrize("strategy", [3, 1])
STEPS = 3


def sgd(model):
    return torch.optim.SGD(model.parameters(), lr=0.1, momentum=0.9, foreach=False)


def build(make):
    torch.manual_seed(3)
    return make()


def shard(make, strategy, units=(Block,), **settings):
    model = build(make)
    mesh = init_device_mesh(device_type(), (2,), mesh_dim_names=("dp",))
    return fully_shard(
        model,
        sgd(model),
        device_mesh=mesh,
        fsdp_unit_modules=None if units is None else list(units),
        zero_dp_strategy=strategy,
        **settings,
    )


def one_process(make, loss, steps=STEPS):
    model = build(make)
    optimizer = sgd(model)
    for step in range(steps):
        optimizer.zero_grad()
        sum(loss(model, rank, step) / 2 for rank in range(2)).backward()
        optimizer.step()
    return model


def train(model, optimizer, loss, rank, steps=STEPS):
    for step in range(steps):
        loss(model, rank, step).backward()
        optimizer.step()
        optimizer.zero_grad()


def compare(model, reference):
    found = {name.replace("_orig_mod.", ""): v for name, v in full_parameters(model).items()}
    wanted = dict(reference.named_parameters())
    assert found.keys() == wanted.keys()
    for name, value in wanted.items():
        if value.numel():
            worst = float((found[name] - value.detach()).abs().max())
            assert worst <= 3e-6, f"{name} is off by {worst}"


def check(make, loss, ranks, strategy, units=(Block,), **settings):
    model, optimizer = shard(make, strategy, units, **settings)
    train(model, optimizer, loss, ranks.rank)
    compare(model, one_process(make, loss))
    return model


def plain_loss(model, rank, step):
    return model(inputs(model, 10 * step + rank)).square().mean()
