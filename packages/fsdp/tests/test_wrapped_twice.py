"""What somebody wrapped already, we or another library, is refused by every wrapper."""

import weakref

import pytest
import torch
import torch.distributed.fsdp as torch_fsdp
from torch import nn

from lamina.ddp import DistributedDataParallel
from lamina.fsdp import (
    TorchFullyShardedDataParallel,
    TorchFullyShardedDataParallelConfig,
    fully_shard,
    shard_module,
)
from lamina.mesh import ParallelLayout
from lamina_testing import device_type, not_freed


def build():
    return nn.Sequential(nn.Linear(4, 4), nn.Sequential(nn.Linear(4, 4), nn.ReLU()))


def over_torch(model):
    mesh = ParallelLayout().build(device_type())
    return TorchFullyShardedDataParallel(model, TorchFullyShardedDataParallelConfig(), mesh)


def part(model):
    fully_shard(model[1], zero_dp_strategy=1)
    return model


def inner_of_wrapped(model):
    model.kept = [DistributedDataParallel(model)]  # in a list: no submodule of its own
    return model


OURS = {
    "DistributedDataParallel": DistributedDataParallel,
    "fully_shard": fully_shard,
    "shard_module": shard_module,
    "TorchFullyShardedDataParallel": over_torch,
}
BEFORE = {
    **OURS,
    "strategy 0": lambda model: fully_shard(model, zero_dp_strategy=0),
    "a part": part,
    "what DDP holds": inner_of_wrapped,
    "torch's DDP": nn.parallel.DistributedDataParallel,
    "torch's FSDP1": lambda model: torch_fsdp.FullyShardedDataParallel(
        model, device_id=next(model.parameters()).device
    ),
    "torch's FSDP2": torch_fsdp.fully_shard,
    "around torch's DDP": lambda m: nn.Sequential(nn.parallel.DistributedDataParallel(m)),
}


@pytest.mark.ranks(2)
@pytest.mark.parametrize("outer", OURS)
def test_what_is_wrapped_is_not_wrapped_again(ranks, outer):
    for inner in BEFORE:
        wrapped = BEFORE[inner](build())
        with pytest.raises(RuntimeError, match=f"^{outer}: .* is wrapped or sharded already, by "):
            OURS[outer](wrapped)


@pytest.mark.ranks(2)
@pytest.mark.parametrize("again", OURS)
def test_what_was_wrapped_and_let_go_is_wrapped_again(ranks, again):
    model = build()
    wrapper = DistributedDataParallel(model)
    wrapper(torch.ones(2, 4)).sum().backward()
    groups = [weakref.ref(group) for group in wrapper.parameter_groups()]
    del wrapper
    assert not_freed(groups) == []
    OURS[again](model)
