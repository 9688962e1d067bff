"""Weights whose unit is released: whoever reads or writes them is told so, through any tensor."""

from __future__ import annotations

import pytest
import torch
from torch import Tensor, nn

from lamina.buffers import StaleStorageError
from lamina.fsdp import fully_shard, shard_module
from lamina.mesh import ParallelLayout
from lamina_testing import device_type


class Block(nn.Module):
    def __init__(self) -> None:
        super().__init__()
        self.up, self.down = nn.Linear(6, 12), nn.Linear(12, 6)

    def forward(self, x: Tensor) -> Tensor:
        return x + self.down(torch.relu(self.up(x)))


WAYS = ("fully_shard", "slots", "shard_module")
ACCESSES = {
    "sum": lambda t: t.sum(),
    "clone": lambda t: t.clone(),
    "tolist": lambda t: t.tolist(),
    "numpy": lambda t: t.cpu().numpy(),  # on a CPU the first is the tensor itself
    "address": lambda t: t.data_ptr(),
    "foreach": lambda t: torch._foreach_norm([t]),
    "product": lambda t: t.reshape(-1) @ torch.ones(t.numel()),
    "write": lambda t: t.zero_(),
}


def sharded(way: str) -> nn.Sequential:
    """Three blocks under strategy 3, whose units are the blocks."""
    torch.manual_seed(0)
    model = nn.Sequential(Block(), Block(), Block())
    mesh = ParallelLayout().build(device_type())
    if way != "shard_module":
        settings = {"device_mesh": mesh, "fsdp_unit_modules": [Block], "zero_dp_strategy": 3}
        model = fully_shard(model, fsdp_double_buffer=way == "slots", **settings)
    else:
        for block in model:
            shard_module(block, mesh=mesh)
        shard_module(model, mesh=mesh)
    return model


def train(model: nn.Module, steps: int = 2) -> Tensor:
    for step in range(steps):
        loss = model(torch.full((4, 6), 1.0 + step)).square().sum()
        loss.backward()
    return loss


def keep_tensors(model: nn.Sequential) -> dict[str, Tensor]:
    """What a program can hold of the second block's weights once they are released."""
    kept: dict[str, Tensor] = {}

    def keep(module: nn.Linear, _: object, out: Tensor) -> None:
        weight = module.weight
        kept.update(
            parameter=weight,
            data=weight.data,
            detached=weight.detach(),
            row=weight.data[1],
            transposed=weight.t().detach(),
            bias=module.bias.data.view(3, 4),
            saved=out.grad_fn._saved_mat2.detach(),
        )

    handle = model[1].up.register_forward_hook(keep)
    train(model, 1)
    handle.remove()
    return kept


@pytest.mark.ranks(2)
@pytest.mark.parametrize("way", WAYS)
def test_every_access_to_released_weights_raises(way, ranks):
    model = sharded(way)
    train(model)
    kept = keep_tensors(model)
    assert len(kept) == 7
    for name, tensor in kept.items():
        for access, read in ACCESSES.items():
            with pytest.raises(RuntimeError, match=r"released|invalid") as caught, torch.no_grad():
                read(tensor)
            named = isinstance(caught.value, StaleStorageError)
            assert named == (name == "parameter"), (name, access, caught.value)


@pytest.mark.ranks(2)
@pytest.mark.parametrize("way", WAYS)
def test_a_released_parameter_says_its_name_and_where_to_read_it(way, ranks):
    torch.manual_seed(0)
    model = sharded(way)
    weight = keep_tensors(model)["parameter"]
    for read in (
        lambda: weight + 1,
        lambda: weight.data,
        lambda: weight[0],
        lambda: print(weight),
        lambda: nn.functional.linear(torch.ones(1, 6), weight),
        lambda: weight.copy_(torch.ones(12, 6)),
    ):
        with pytest.raises(StaleStorageError, match=r"1\.up\.weight.*released.*unsharded"):
            read()
    assert weight.shape == (12, 6)
    assert weight.dtype == torch.float32
    assert isinstance(weight, nn.Parameter)
    assert weight in {weight}
    with model.unsharded():
        assert type(weight) is nn.Parameter
        assert weight.sum().isfinite()
    with pytest.raises(StaleStorageError, match=r"1\.up\.weight"):
        weight.sum()


@pytest.mark.ranks(2)
def test_a_weight_that_was_taken_before_sharding_raises(ranks):
    torch.manual_seed(0)
    model = nn.Sequential(Block(), Block())
    weight = model[0].up.weight
    model = fully_shard(
        model, device_mesh=ParallelLayout().build(device_type()), fsdp_unit_modules=[Block]
    )
    with pytest.raises(StaleStorageError, match=r"0\.up\.weight"):
        weight.norm()


@pytest.mark.ranks(2)
def test_a_unit_that_reads_another_units_weight_is_told_in_its_forward(ranks):
    class Reads(nn.Module):
        def __init__(self, other: list[Tensor]) -> None:
            super().__init__()
            self.scale, self.other = nn.Parameter(torch.ones(6)), other

        def forward(self, x: Tensor) -> Tensor:
            return x * self.scale * self.other[0].mean()

    first, other = Block(), []
    first.up.register_forward_hook(lambda module, *_: other.append(module.weight))
    model = fully_shard(
        nn.Sequential(first, Block(), Reads(other)),
        device_mesh=ParallelLayout().build(device_type()),
        fsdp_unit_modules=[Block, Reads],
        zero_dp_strategy=3,
    )
    with pytest.raises(StaleStorageError, match=r"0\.up\.weight"):
        train(model)


class Router(nn.Module):
    """Reads the weight of a module that it never calls, as LongCat's does."""

    def __init__(self) -> None:
        super().__init__()
        self.classifier = nn.Linear(6, 6)

    def forward(self, x: Tensor) -> Tensor:
        return nn.functional.linear(x, self.classifier.weight)


@pytest.mark.ranks(2)
@pytest.mark.parametrize("strategy", [1, 3])
def test_a_weight_that_is_read_outside_of_its_unit_is_named(strategy, ranks):
    mesh = ParallelLayout().build(device_type())
    settings = {"fsdp_unit_modules": [nn.Linear], "zero_dp_strategy": strategy}
    model = fully_shard(nn.Sequential(Block(), Router()), device_mesh=mesh, **settings)
    with pytest.raises(
        NotImplementedError, match=r"that of 1\.classifier\.weight; .*fsdp_unit_mod"
    ):
        model(torch.ones(4, 6))
