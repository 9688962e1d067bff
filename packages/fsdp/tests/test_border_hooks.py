"""Hooks that users register on parameters, against plain PyTorch on the whole batch."""

import pytest
import torch
from torch.distributed.device_mesh import init_device_mesh

from lamina.ddp import full_gradients, full_parameters
from lamina_testing import device_type
from lamina_testing.toys import OddNet, inputs

from .one_process import Conditional, build, sgd
from .test_border_gradients import wrapped


def mesh_of(world):
    return init_device_mesh(device_type(), (world,), mesh_dim_names=("shard",))


def whole(tensor):
    return tensor.full_tensor() if hasattr(tensor, "full_tensor") else tensor


def assert_same(found, wanted, tolerance=3e-6):
    for name, value in wanted.items():
        torch.testing.assert_close(found[name], value.detach(), rtol=0, atol=tolerance, msg=name)


def mean_loss(model, world, seed):
    return sum(model(inputs(model, seed + rank)).square().mean() for rank in range(world)) / world


@pytest.mark.ranks(2)
@pytest.mark.parametrize(
    ("wrapper", "early"),
    [(0, True), (1, False), (2, True), (3, False), (3, True), ("module", True)],
)
def test_a_hook_sees_the_final_gradient_once(wrapper, early, ranks):
    """Registered before or after wrapping, on whichever object the model gives then."""
    seen, after, scaled = {}, [], "blocks.1.up.weight"

    def register(model):
        for name, parameter in model.named_parameters():
            parameter.register_hook(lambda grad, n=name: seen.setdefault(n, []).append(grad * 1))
            parameter.register_post_accumulate_grad_hook(
                lambda p, n=name: after.append((n, p.grad is not None))
            )
        model.get_parameter(scaled).register_hook(lambda grad: grad * 0.5)
        handle = model.get_parameter(scaled).register_hook(lambda grad: grad * 100)
        handle.remove()

    if early:
        make, prepared = OddNet, build(OddNet)
        register(prepared)
        model, _ = wrapped(lambda: prepared, wrapper, mesh_of(2))
    else:
        make = OddNet
        model, _ = wrapped(make, wrapper, mesh_of(2))
        register(model)
    oracle = build(OddNet)
    mean_loss(oracle, 2, 10).backward()
    mean_loss(oracle, 2, 20).backward()
    with model.no_sync():
        model(inputs(model, 10 + ranks.rank)).square().mean().backward()
    assert not seen
    model(inputs(model, 20 + ranks.rank)).square().mean().backward()
    wanted = {n: p.grad.clone() for n, p in oracle.named_parameters()}
    assert {n: len(g) for n, g in seen.items()} == dict.fromkeys(wanted, 1)
    assert sorted(after) == sorted((name, True) for name in wanted)
    assert_same({n: whole(g[0]) for n, g in seen.items()}, wanted)
    wanted[scaled] *= 0.5
    assert_same(full_gradients(model), wanted)


def step_in_backward(model, make_optimizer):
    """As torchtune has it: an optimizer per parameter, stepped when its gradient is there."""
    optimizers = {p: make_optimizer([p]) for p in model.parameters()}

    def step(parameter):
        optimizers[parameter].step()
        optimizers[parameter].zero_grad()

    for parameter in model.parameters():
        parameter.register_post_accumulate_grad_hook(step)


@pytest.mark.matrix(few=3)
@pytest.mark.ranks(2)
@pytest.mark.parametrize(
    ("wrapper", "make_optimizer"),
    [(0, sgd), (1, torch.optim.AdamW), (2, sgd), (3, torch.optim.AdamW), ("module", sgd)],
)
def test_an_optimizer_in_backward_trains_as_in_one_process(wrapper, make_optimizer, ranks):
    oracle = build(Conditional)
    step_in_backward(oracle, make_optimizer)
    model, _ = wrapped(Conditional, wrapper, mesh_of(2))
    step_in_backward(model, make_optimizer)
    for step in range(3):

        def loss(net, rank, step=step):
            # In the first step rank 1 leaves the last block out: the other's gradient counts.
            last = rank == 0 or step > 0 or wrapper in (3, "module")
            penalty = 0.1 * sum(p.square().sum() for p in net.parameters()) if step > 0 else 0.0
            return net(inputs(net, 10 * step + rank), use_last=last).square().mean() + penalty

        sum(loss(oracle, rank) / 2 for rank in range(2)).backward()
        loss(model, ranks.rank).backward()
        assert all(p.grad is None for p in model.parameters())
        assert not full_gradients(model)
    assert_same(full_parameters(model), dict(oracle.named_parameters()), 2e-5)


@pytest.mark.ranks(2)
@pytest.mark.parametrize("key", [lambda parameter: parameter, id, lambda _: "lr"])
def test_a_key_error_of_a_hook_is_explained_where_the_parameter_is_the_key(key, ranks):
    """Tables of before the wrapping do not hold it; other errors are the hook's own business."""
    model = build(OddNet)
    table = {key(parameter): None for parameter in model.parameters()}
    table.pop("lr", None)
    for parameter in model.parameters():
        parameter.register_post_accumulate_grad_hook(lambda p: table[key(p)])
    model, _ = wrapped(lambda: model, 3, mesh_of(2))
    own = key(torch.empty(0)) == "lr"
    with pytest.raises(KeyError if own else RuntimeError, match="lr" if own else "after wrapping"):
        model(inputs(model, 0)).square().mean().backward()
