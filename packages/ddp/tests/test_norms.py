"""One norm: torch's over sharded gradients and `clip_grad_norm` add in fp64 and round once."""

import math

import pytest
import torch
from torch import nn

from lamina.ddp import DistributedDataParallel, DistributedDataParallelConfig, clip_grad_norm
from lamina.mesh import ParallelLayout
from lamina_testing import device_type

SLOPES = {  # sums of equal squares in fp32 drift away
    "large": torch.full((20011,), 1.3),
    "small": torch.full((300, 67), 0.03),
}


def exact(tensors, order):
    """The norm of fp32 numbers: squares are exact in fp64, and so is the rounding of fsum."""
    sizes = [abs(x) for tensor in tensors for x in tensor.flatten().tolist()]
    if order == math.inf:
        return torch.tensor(max(sizes), dtype=torch.float32)
    return torch.tensor(math.fsum(x**order for x in sizes) ** (1 / order), dtype=torch.float32)


@pytest.mark.matrix(strength=1)
@pytest.mark.ranks(2, 4)
@pytest.mark.parametrize("order", [2.0, 3.0, math.inf])
def test_torch_and_clip_grad_norm_round_the_same_sum_once(order, ranks):
    model, slopes = nn.Module(), {n: slope.to(device_type()) for n, slope in SLOPES.items()}
    for name, slope in slopes.items():
        model.register_parameter(name, nn.Parameter(torch.zeros_like(slope)))
    model.forward = lambda: sum((getattr(model, n) * slope).sum() for n, slope in slopes.items())
    config = DistributedDataParallelConfig(use_distributed_optimizer=True)
    wrapped = DistributedDataParallel(model, config, ParallelLayout().build(device_type()))
    wrapped().backward()
    (group,) = wrapped.parameter_groups()
    mains, names = group.main_parameters, [ref.name for ref in group.refs]
    found = clip_grad_norm(wrapped, math.inf, norm_type=order)
    assert torch.equal(found, exact(SLOPES.values(), order))
    assert torch.equal(clip_grad_norm(mains, math.inf, norm_type=order), found)
    each = torch._foreach_norm([p.grad for p in mains], order)
    for name, parameter, norm in zip(names, mains, each, strict=True):
        assert torch.equal(norm, exact([SLOPES[name]], order))
        assert torch.equal(clip_grad_norm(parameter, math.inf, norm_type=order), norm)
