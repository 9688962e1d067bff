"""The model of the tests of `shard_module`, sharded by it or by one line, and trained."""

import torch
from torch.distributed.device_mesh import init_device_mesh

from lamina.ddp import full_gradients, full_parameters
from lamina.fsdp import fully_shard, shard_module
from lamina_testing import device_type
from lamina_testing.toys import Block, OddNet, inputs


def build(make=OddNet):
    torch.manual_seed(3)
    return make()


def sgd(model):
    return torch.optim.SGD(model.parameters(), lr=0.1, momentum=0.9)


def mesh_of(*shape):
    return init_device_mesh(
        device_type(), shape, mesh_dim_names=("replicate", "shard")[-len(shape) :]
    )


def sharded(mesh, make=OddNet, **settings):
    model = build(make)
    for block in model.blocks:
        shard_module(block, mesh, **settings)
    return shard_module(model, mesh, **settings)


def loss_of(model, step, rank):
    return model(inputs(model, 10 * step + rank)).square().mean()


def run(model, optimizer, rank, steps=3):
    gradients = {}
    for step in range(steps):
        loss_of(model, step, rank).backward()
        gradients = full_gradients(model)
        optimizer.step()
        optimizer.zero_grad()
    return gradients, full_parameters(model)


def one_line(mesh, rank, **settings):
    model = build()
    model, optimizer = fully_shard(
        model, sgd(model), device_mesh=mesh, fsdp_unit_modules=[Block], **settings
    )
    return run(model, optimizer, rank)


def assert_same(found, wanted):
    assert found.keys() == wanted.keys()
    for name in wanted:
        assert torch.equal(found[name], wanted[name]), name
