"""Optimizers that cannot be pointed at shards: refused before anything is changed."""

import pytest
import torch
from torch import nn
from torch.distributed.device_mesh import init_device_mesh

from lamina.fsdp import MixedPrecisionPolicy, fully_shard
from lamina_testing import device_type


class Caching(nn.Linear):
    keep_fp8_transpose_cache = False


class Mixed(nn.Sequential):
    def forward(self, x):
        return self[1](self[0](x.bfloat16()).float())


def build():
    return nn.Sequential(Caching(8, 8), nn.Linear(8, 8))


@pytest.mark.ranks(2)
def test_a_model_whose_optimizer_is_refused_is_as_it_was(ranks):
    mesh = {"device_mesh": init_device_mesh(device_type(), (2,), mesh_dim_names=("dp",))}
    model = build()
    before = dict(model.named_parameters())
    bf16 = MixedPrecisionPolicy(param_dtype=torch.bfloat16)
    lbfgs = torch.optim.LBFGS(model.parameters())
    for optimizer, says, settings in (
        (torch.optim.SGD(build().parameters(), lr=0.1), "none of them is in the module", {}),
        (lbfgs, r"LBFGS keeps its own list of parameters, and 0\.weight", {}),
        (lbfgs, "LBFGS", {"zero_dp_strategy": 1}),
        (lbfgs, "LBFGS", {"zero_dp_strategy": 0, "mixed_precision_policy": bf16}),
    ):
        with pytest.raises(ValueError, match=says):
            fully_shard(model, optimizer, keep_fp8_transpose_cache=True, **settings, **mesh)
        assert all(p is before[name] for name, p in model.named_parameters())
        assert not model[0].keep_fp8_transpose_cache
    fully_shard(model, lbfgs, keep_fp8_transpose_cache=True, zero_dp_strategy=0, **mesh)
    assert model[0].keep_fp8_transpose_cache


class Around(torch.optim.Optimizer):
    """Wraps another optimizer, and inherits torch's class without its `__init__`."""

    def __init__(self, inner):
        self.inner, self.param_groups = inner, inner.param_groups
        self.state, self.defaults = inner.state, inner.defaults

    def step(self):
        self.inner.step()

    def zero_grad(self, set_to_none=True):
        self.inner.zero_grad(set_to_none)


@pytest.mark.ranks(2)
def test_a_wrapper_of_an_optimizer_that_takes_no_hooks_is_told_to_come_afterwards(ranks):
    model = build()
    before, inner = dict(model.named_parameters()), torch.optim.SGD(model.parameters(), lr=0.1)
    with pytest.raises(ValueError, match=r"Around takes no hooks.*the optimizer that it wraps"):
        fully_shard(model, Around(inner))
    assert all(p is before[name] for name, p in model.named_parameters())
    weight = model[0].weight.detach().clone()
    model, inner = fully_shard(model, inner)
    optimizer = Around(inner)
    model(torch.ones(2, 8)).sum().backward()
    gradient = model[0].weight.grad.full_tensor()
    optimizer.step()
    torch.testing.assert_close(model[0].weight.full_tensor(), weight - 0.1 * gradient)


@pytest.mark.ranks(2)
def test_keeping_tensors_whole_that_nobody_cuts_is_refused(ranks):
    with pytest.raises(ValueError, match=r"keep_tensors_whole=True.*cuts none"):
        fully_shard(build(), zero_dp_strategy=0, keep_tensors_whole=True)


@pytest.mark.ranks(1)
def test_state_that_was_made_on_meta_is_refused_before_anything_is_changed(ranks):
    with torch.device("meta"):
        model = build()
    before = dict(model.named_parameters())
    optimizer = torch.optim.Adagrad(model.parameters())
    with pytest.raises(ValueError, match=r"Adagrad makes its state .*meta .*after sharding"):
        fully_shard(model, optimizer)
    assert all(p is before[name] and p.is_meta for name, p in model.named_parameters())
    fully_shard(model, torch.optim.AdamW(model.parameters()))


@pytest.mark.ranks(2)
def test_lbfgs_beside_frozen_parameters_that_are_kept_in_fewer_bits(ranks):
    """They have no main weights, so it is no matter that LBFGS would not hold them."""
    mesh = {"device_mesh": init_device_mesh(device_type(), (2,), mesh_dim_names=("dp",))}
    model = Mixed(nn.Linear(8, 8).bfloat16().requires_grad_(False), nn.Linear(8, 8))
    x, before = torch.ones(2, 8), model[1].weight.detach().clone()
    lbfgs = torch.optim.LBFGS(model.parameters(), max_iter=1)
    model, lbfgs = fully_shard(model, lbfgs, zero_dp_strategy=0, fsdp_unit_modules=[], **mesh)

    def closure():
        lbfgs.zero_grad()
        loss = model(x).square().mean()
        loss.backward()
        return loss

    lbfgs.step(closure)
    assert not torch.equal(model[1].weight, before)


@pytest.mark.ranks(2)
@pytest.mark.parametrize("make", [torch.optim.Muon, torch.optim.Adafactor])
def test_an_optimizer_of_whole_tensors_that_was_not_given_says_where_to_give_it(make, ranks):
    mesh = init_device_mesh(device_type(), (2,), mesh_dim_names=("dp",))
    model = fully_shard(nn.Sequential(nn.Linear(8, 8, bias=False)), device_mesh=mesh)
    optimizer = make(model.parameters(), lr=0.1)
    model(torch.ones(2, 8)).sum().backward()
    with pytest.raises(NotImplementedError, match=r"fully_shard\(model, opt.*Adafactor and Muon"):
        optimizer.step()
