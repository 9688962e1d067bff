"""Losses that depend on parameters outside the units' forwards, against one process.

Note that no case tells the wrapper anything: a penalty is a term of the loss, as in plain PyTorch.
"""

import copy

import pytest
import torch
from torch.distributed.device_mesh import init_device_mesh

from lamina.ddp import full_gradients, full_parameters
from lamina.fsdp import MixedPrecisionPolicy, fully_shard, fully_shard_optimizer, shard_module
from lamina_testing import device_type
from lamina_testing.toys import Block, OddNet, inputs

from .one_process import Conditional, build, sgd

STEPS = 2


class Reading(OddNet):
    """Its forward reads weights of blocks, before they run and after."""

    def forward(self, x):
        early = self.blocks[0].up.weight.square().sum()
        out = super().forward(x)
        return out + 0.1 * early + 0.1 * self.blocks[1].norm.weight.abs().sum()


def squares(model):
    return sum(p.square().sum() for p in model.parameters())


def whole(parameter):
    """As PyTorch's FSDP2 has it for its own parameters: a matrix product needs the whole."""
    return parameter.full_tensor() if hasattr(parameter, "full_tensor") else parameter


def outside(model, x):
    return model(x).square().mean() + 0.1 * squares(model)


def before(model, x):
    penalty = 0.1 * squares(model)
    return model(x).square().mean() + penalty


def alone(model, x):
    return 0.3 * squares(model)


def unused(model, x):
    """The last block has a gradient from its penalty alone."""
    return model(x, use_last=False).square().mean() + 0.1 * squares(model.blocks[2])


def inside(model, x):
    return model(x).square().mean()


def orthogonal(model, x):
    weight = whole(model.blocks[1].up.weight)
    gram = weight.t() @ weight - torch.eye(weight.shape[1])
    return model(x).square().mean() + 1e-2 * gram.square().sum()


def of_its_batch(model, x):
    """The penalty's factor differs between ranks."""
    return model(x).square().mean() + x.abs().mean() * whole(model.blocks[1].up.weight).norm()


LOSSES = {
    "outside": (OddNet, outside),
    "before": (OddNet, before),
    "alone": (OddNet, alone),
    "unused": (Conditional, unused),
    "inside": (Reading, inside),
    "orthogonal": (OddNet, orthogonal),
    "of_its_batch": (OddNet, of_its_batch),
}


def wrapped(make, wrapper, mesh, dtype=None, **settings):
    model = build(make)
    policy = MixedPrecisionPolicy(param_dtype=dtype)
    if wrapper != "module":
        names = {"dp_shard_dim": "shard", **settings}
        return fully_shard(
            model,
            sgd(model.parameters()),
            device_mesh=mesh,
            zero_dp_strategy=wrapper,
            fsdp_unit_modules=[Block],
            mixed_precision_policy=policy,
            **names,
        )
    for block in model.blocks:
        shard_module(block, mesh, mp_policy=policy)
    shard_module(model, mesh, mp_policy=policy)
    return model, fully_shard_optimizer(sgd(model.parameters()), model)


def steps_of(model, optimizer, loss, batches, microbatches, world=None, rank=0):
    """`STEPS` steps; in one process (`world`) over all ranks' batches."""
    gradients = {}
    for step in range(STEPS):
        for micro in range(microbatches):
            number = step * microbatches + micro
            if world is not None:
                for each in range(world):
                    (loss(model, batches(number, each)) / world).backward()
                continue
            final = micro == microbatches - 1
            model.set_requires_gradient_sync(final)
            loss(model, batches(number, rank)).backward()
        gradients = full_gradients(model) if world is None else grads_of(model)
        optimizer.step()
        optimizer.zero_grad()
    return gradients


def grads_of(model):
    return {n: p.grad.clone() for n, p in model.named_parameters() if p.grad is not None}


def compare(model, found, oracle, wanted, tolerance):
    assert found.keys() == wanted.keys()
    for name, value in wanted.items():
        torch.testing.assert_close(found[name].float(), value, rtol=0, atol=tolerance, msg=name)
    for name, value in full_parameters(model).items():
        expected = oracle.get_parameter(name).detach()
        torch.testing.assert_close(value.float(), expected, rtol=0, atol=tolerance, msg=name)


def check(ranks, wrapper, mesh, names, microbatches=1, dtype=None, tolerance=5e-6, **settings):
    for name in names:
        make, loss = LOSSES[name]

        def batches(number, rank, make=make):
            return inputs(make(), 10 * number + rank)

        oracle = build(make)
        wanted = steps_of(
            oracle, sgd(oracle.parameters()), loss, batches, microbatches, ranks.world_size
        )
        model, optimizer = wrapped(make, wrapper, mesh, dtype, **settings)
        found = steps_of(model, optimizer, loss, batches, microbatches, rank=ranks.rank)
        compare(model, found, oracle, wanted, tolerance)


@pytest.mark.matrix(few=4)
@pytest.mark.ranks(2)
@pytest.mark.parametrize(
    ("wrapper", "microbatches"), [(0, 2), (1, 1), (1, 2), (2, 2), (3, 1), (3, 2), ("module", 2)]
)
def test_a_term_over_parameters_is_added_once(wrapper, microbatches, ranks):
    mesh = init_device_mesh(device_type(), (2,), mesh_dim_names=("shard",))
    # How many microbatches there are matters to what is added when, not to each kind of term.
    check(ranks, wrapper, mesh, LOSSES if microbatches > 1 else ["outside", "inside"], microbatches)


@pytest.mark.matrix(few=1)
@pytest.mark.ranks(4)
@pytest.mark.parametrize(("strategy", "outer"), [(3, 0), (3, 1), (1, 0)])
def test_with_replicas_the_sum_is_the_same(strategy, outer, ranks):
    mesh = init_device_mesh(device_type(), (2, 2), mesh_dim_names=("replicate", "shard"))
    settings = {"dp_outer_dim": "replicate", "outer_dp_sharding_strategy": outer}
    check(ranks, strategy, mesh, ["outside", "inside", "orthogonal"], 2, **settings)


@pytest.mark.matrix(few=2)
@pytest.mark.ranks(2)
@pytest.mark.parametrize("wrapper", [0, 1, 3, "module"])
def test_with_bf16_weights_the_term_is_one_over_main_weights(wrapper, ranks):
    mesh = init_device_mesh(device_type(), (2,), mesh_dim_names=("shard",))
    names = ["outside", "alone", "unused", "orthogonal"]
    check(ranks, wrapper, mesh, names, 2, dtype=torch.bfloat16, tolerance=4e-2)


@pytest.mark.ranks(2)
@pytest.mark.parametrize("strategy", [0, 1, 3])
def test_reproducible_sums_take_terms_too(strategy, ranks):
    mesh = init_device_mesh(device_type(), (2,), mesh_dim_names=("shard",))
    check(ranks, strategy, mesh, ["outside", "inside"], 2, reproducible=True)


@pytest.mark.ranks(2)
def test_a_backward_that_raises_takes_its_terms_along(ranks):
    mesh = init_device_mesh(device_type(), (2,), mesh_dim_names=("shard",))
    model, _ = wrapped(OddNet, 3, mesh)

    class Raises(torch.autograd.Function):
        @staticmethod
        def forward(ctx, x):
            return x.clone()

        @staticmethod
        def backward(ctx, gradient):
            raise RuntimeError("planted")

    with pytest.raises(RuntimeError, match="planted"):
        (Raises.apply(model(inputs(model, 1))).sum() + squares(model)).backward()
    alone(model, None).backward()
    oracle = build(OddNet)
    alone(oracle, None).backward()
    compare(model, full_gradients(model), oracle, grads_of(oracle), 1e-6)


def given_gradients(model, optimizer, x):
    """A step over gradients that the user made, and one where a backward adds to such ones."""
    for adds in (False, True, False):
        for parameter in model.parameters():
            parameter.grad = torch.full_like(parameter, 0.25)
        if adds:
            model(x).square().mean().backward()
        optimizer.step()
        optimizer.zero_grad()


@pytest.mark.matrix(few=3)
@pytest.mark.ranks(2)
@pytest.mark.parametrize("strategy", [0, 1, 2, 3, "module"])
def test_gradients_that_the_user_made_before_any_backward_are_stepped(strategy, ranks):
    oracle = build(OddNet)
    x = inputs(oracle, 1)
    given_gradients(oracle, sgd(oracle.parameters()), x)
    mesh = init_device_mesh(device_type(), (2,), mesh_dim_names=("shard",))
    model, optimizer = wrapped(OddNet, strategy, mesh)
    given_gradients(model, optimizer, x)
    for name, wanted in oracle.named_parameters():
        torch.testing.assert_close(full_parameters(model)[name], wanted, msg=name)


def two_losses(model, x):
    out = model(x)
    return out.square().mean(), (out - 1).abs().mean()


@pytest.mark.ranks(2)
@pytest.mark.parametrize(("wrapper", "dtype"), [(0, "bfloat16"), (1, "float32"), (3, "float32")])
def test_autograd_grad_gives_what_one_process_gives(wrapper, dtype, ranks):
    """Of two losses of one graph, of a graph whose neighbour has had its backward, of a copy."""
    dtype = getattr(torch, dtype)
    mesh = init_device_mesh(device_type(), (2,), mesh_dim_names=("shard",))
    oracle, (model, optimizer) = build(OddNet), wrapped(OddNet, wrapper, mesh, dtype)
    tolerance = {"rtol": 0, "atol": 5e-6 if dtype == torch.float32 else 4e-2}

    def ask(of, number):
        x = inputs(oracle, number)
        parameters = list(of.parameters())
        first, second = two_losses(of, x)
        once = torch.autograd.grad(first, parameters, retain_graph=True)
        of(x).square().mean().backward()  # another graph's backward comes between
        if torch.__version__ < "2.13":  # inputs by name came later
            return [*once, *torch.autograd.grad(second, parameters)]
        return [*once, *torch.autograd.grad(second, dict(of.named_parameters())).values()]

    for of in (model, copy.deepcopy(model)):
        oracle.zero_grad()
        of.zero_grad()
        for wanted, found in zip(ask(oracle, ranks.rank), ask(of, ranks.rank), strict=True):
            assert found.shape == wanted.shape
            torch.testing.assert_close(found.float(), wanted, **tolerance)
    optimizer.step()
    assert {type(main).__name__ for main in model.parameters()} <= {"ShardedTensor", "Parameter"}


@pytest.mark.ranks(2)
@pytest.mark.parametrize("wrapper", [1, 3])
def test_autograd_grad_says_what_it_cannot_give(wrapper, ranks):
    mesh = init_device_mesh(device_type(), (2,), mesh_dim_names=("shard",))
    model, _ = wrapped(Conditional, wrapper, mesh)
    x, parameters = inputs(model, ranks.rank), dict(model.named_parameters())
    loss = model(x, use_last=False).square().mean()
    with pytest.raises(RuntimeError, match=r"empty has no part in the outputs.*unused=True"):
        torch.autograd.grad(loss, list(parameters.values()), retain_graph=True)
    asked = list(parameters.values())  # torch takes their names as well from 2.13 on
    values = torch.autograd.grad(loss, asked, allow_unused=True, retain_graph=True)
    found = dict(zip(parameters, values, strict=True))
    unused = {name for name, value in found.items() if value is None}
    assert unused == {name for name in parameters if name.startswith(("blocks.2.", "empty"))}
    zeros = dict(
        zip(parameters, torch.autograd.grad(loss, asked, materialize_grads=True), strict=True)
    )
    assert all(zeros[name].shape == one.shape for name, one in parameters.items())
    assert not zeros["blocks.2.up.weight"].any()
    loss = model(x).square().mean() + squares(model)
    del parameters["empty"]
    with pytest.raises(RuntimeError, match=r"a forward and outside of it.*loss\.backward\(\)"):
        torch.autograd.grad(loss, list(parameters.values()))
    (span,) = torch.autograd.grad(squares(model), parameters["blocks.0.up.weight"])
    torch.testing.assert_close(span, 2 * parameters["blocks.0.up.weight"])
