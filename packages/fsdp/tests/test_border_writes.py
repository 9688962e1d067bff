"""Parameters that are written without an optimizer's step, against plain PyTorch."""

import pytest
import torch
from torch.distributed.device_mesh import init_device_mesh

from lamina.ddp import (
    DistributedDataParallel,
    DistributedDataParallelConfig,
    ShardedOptimizer,
    full_parameters,
)
from lamina.mesh import ParallelLayout
from lamina_testing.toys import Block, OddNet, inputs

from .one_process import build, sgd
from .test_border_gradients import wrapped


def swapped(model, optimizer, x, mains):
    """A step, then evaluation with an average in the weights' place, and back; then a clamp."""
    average = [p.detach().clone() for p in mains()]
    model(x).square().mean().backward()
    optimizer.step()
    optimizer.zero_grad()
    found = [model(x).detach()]
    kept = [p.detach().clone() for p in mains()]
    with torch.no_grad():
        for parameter, value in zip(mains(), average, strict=True):
            parameter.copy_(value)
        found.append(model(x))
        for parameter, value in zip(mains(), kept, strict=True):
            parameter.copy_(value)
        found.append(model(x))
        torch._foreach_mul_(mains(), 0.5)
        found.append(model(x))
        for parameter in mains():
            parameter.data.clamp_(-0.05, 0.05)
        found.append(model(x))
    return found


@pytest.mark.ranks(2)
@pytest.mark.parametrize("wrapper", [0, 1, 2, 3, "module", "ddp"])
def test_what_is_written_between_steps_is_what_all_ranks_compute_with(wrapper, ranks):
    oracle = build(OddNet)
    x = inputs(oracle, 1)
    wanted = swapped(oracle, sgd(oracle.parameters()), x, lambda: list(oracle.parameters()))
    if wrapper == "ddp":
        mesh = ParallelLayout().build("cpu")
        config = DistributedDataParallelConfig(use_distributed_optimizer=True)
        model = DistributedDataParallel(build(OddNet), config, mesh)
        optimizer = ShardedOptimizer(sgd(model.parameters()), model, mesh)
        parameters = [p for group in optimizer.param_groups for p in group["params"]]
    else:
        mesh = init_device_mesh("cpu", (2,), mesh_dim_names=("shard",))
        model, optimizer = wrapped(OddNet, wrapper, mesh)
        parameters = list(model.parameters())
    found = swapped(model, optimizer, x, lambda: parameters)
    for number, (one, other) in enumerate(zip(found, wanted, strict=True)):
        torch.testing.assert_close(one, other, rtol=0, atol=2e-6, msg=str(number))


class Codebook(Block):
    """Writes two of its parameters in forward, one of which is frozen."""

    def __init__(self, width):
        super().__init__(width)
        self.codes = torch.nn.Parameter(torch.ones(3, width), requires_grad=False)

    def forward(self, x):
        with torch.no_grad():
            self.codes.mul_(0.9).add_(0.01)
            self.up.weight.clamp_(-0.1, 0.1)
        return super().forward(x) + self.codes.mean(0)


class Writing(OddNet):
    def __init__(self):
        super().__init__()
        self.blocks[1] = Codebook(17)


@pytest.mark.ranks(2)
@pytest.mark.parametrize("wrapper", [0, 1, 2, 3, "module"])
def test_what_a_forward_writes_stays_written(wrapper, ranks):
    mesh = init_device_mesh("cpu", (2,), mesh_dim_names=("shard",))
    oracle = build(Writing)
    model, optimizer = wrapped(Writing, wrapper, mesh)
    plain = sgd(p for p in oracle.parameters() if p.requires_grad)
    for step in range(3):
        for net, stepper in ((oracle, plain), (model, optimizer)):
            net(inputs(net, step)).square().mean().backward()
            stepper.step()
            stepper.zero_grad()
            with torch.no_grad():
                net(inputs(net, 50 + step))
    found = full_parameters(model)
    for name, parameter in oracle.named_parameters():
        value = parameter.detach()
        torch.testing.assert_close(found[name], value, rtol=0, atol=3e-6, msg=name)
