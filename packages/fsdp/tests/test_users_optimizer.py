"""The user's own optimizer: of several models, zeroing in place, and gradient scalers."""

import copy
import functools
import inspect

import pytest
import torch
from torch import nn
from torch.distributed.device_mesh import init_device_mesh

from lamina.ddp import ShardedGradScaler, full_parameters
from lamina.fsdp import MixedPrecisionPolicy, fully_shard, fully_shard_optimizer
from lamina.mesh import ParallelLayout, mark
from lamina_testing import device_type
from lamina_testing.toys import Block, OddNet, inputs


def build():
    torch.manual_seed(7)
    return OddNet()


def sgd(model, made_by=torch.optim.SGD, **settings):
    return made_by(model.parameters(), lr=0.1, momentum=0.9, weight_decay=0.01, **settings)


class AsOnGPU(torch.optim.SGD):
    """Zeroes gradients without counting it, as `torch._foreach_zero_` does on a GPU."""

    def zero_grad(self, set_to_none=True):
        parameters = (p for group in self.param_groups for p in group["params"])
        grads = tuple(p.grad for p in parameters if p.grad is not None)
        with torch.autograd._unsafe_preserve_version_counter(grads):
            super().zero_grad(set_to_none)


def loss_of(model, number, rank):
    return model(inputs(model, 10 * number + rank)).square().mean()


def shard(world, outer=None, made_by=torch.optim.SGD, **settings):
    model = build()
    optimizer = sgd(model, made_by, foreach=outer is None)
    if outer is None:
        mesh = {"device_mesh": init_device_mesh(device_type(), (world,), mesh_dim_names=("dp",))}
    else:
        shape = (2, world // 2)
        mesh = {
            "device_mesh": init_device_mesh(
                device_type(), shape, mesh_dim_names=("outer", "inner")
            ),
            "dp_shard_dim": "inner",
            "dp_outer_dim": "outer",
            "outer_dp_sharding_strategy": outer,
        }
    return fully_shard(model, optimizer, fsdp_unit_modules=[Block], **mesh, **settings)


CASES = {
    2: [
        {"zero_dp_strategy": 0},
        {"zero_dp_strategy": 0, "reproducible": True},
        {"zero_dp_strategy": 0, "made_by": AsOnGPU},
        {"zero_dp_strategy": 1},
        {"zero_dp_strategy": 2},
        {"zero_dp_strategy": 3, "reproducible": True},
    ],
    4: [{"zero_dp_strategy": 1, "outer": 0}, {"zero_dp_strategy": 3, "outer": 1}],
}


def expected(world):
    """Two steps in one process, with a step of zeros before the second."""
    model = build()
    optimizer = sgd(model)
    for number in range(2):
        if number:
            optimizer.zero_grad(set_to_none=False)
            optimizer.step()
        optimizer.zero_grad(set_to_none=False)
        (sum(loss_of(model, number, r) for r in range(world)) / world).backward()
        optimizer.step()
    return {name: p.detach() for name, p in model.named_parameters()}


@pytest.mark.ranks(2, 4)
def test_zeroing_in_place_between_microbatches_discards_them(ranks):
    wanted = expected(ranks.world_size)
    for case, settings in enumerate(CASES[ranks.world_size]):
        model, optimizer = shard(ranks.world_size, **settings)
        zeroing = model if case % 2 else optimizer
        for number in range(2):
            with model.no_sync():
                loss_of(model, 90, ranks.rank).backward()
            zeroing.zero_grad(set_to_none=False)
            if number:
                optimizer.step()
                with model.no_sync():
                    loss_of(model, 91, ranks.rank).backward()
                zeroing.zero_grad(set_to_none=False)
            loss_of(model, number, ranks.rank).backward()
            optimizer.step()
            zeroing.zero_grad(set_to_none=False)
        for name, value in full_parameters(model).items():
            torch.testing.assert_close(
                value, wanted[name], rtol=0, atol=3e-6, msg=f"{settings}: {name}"
            )


@pytest.mark.ranks(1)
def test_libraries_see_what_zero_grad_takes(ranks):
    """Accelerate asks for the parameter before it passes it on."""
    plain = sgd(build())
    wanted = inspect.signature(plain.zero_grad)
    model, optimizer = shard(1)
    assert inspect.signature(optimizer.zero_grad) == wanted
    loss_of(model, 0, 0).backward()
    optimizer.zero_grad(set_to_none=False)
    assert all(p.grad is not None and not p.grad.any() for p in model.parameters())
    optimizer.zero_grad()
    assert all(p.grad is None for p in model.parameters())


@pytest.mark.ranks(2)
def test_other_writes_between_microbatches_are_refused_where_they_would_be_lost(ranks):
    def scale(model):
        for p in model.parameters():
            p.grad.mul_(0.5)

    def zero_one(model):
        model.blocks[0].up.weight.grad.zero_()

    def own(model):
        for p in model.parameters():
            p.grad = torch.ones_like(p)

    for change in (scale, zero_one, own):
        model, _ = shard(2, zero_dp_strategy=1)
        with model.no_sync():
            loss_of(model, 0, ranks.rank).backward()
        change(model)
        with pytest.raises(RuntimeError, match=r"between microbatches.*scale_gradients\(\)"):
            model.finish_grad_sync()
    model, optimizer = shard(2, zero_dp_strategy=1)
    with model.no_sync():
        loss_of(model, 0, ranks.rank).backward()
    optimizer.zero_grad()
    model.finish_grad_sync()
    assert all(p.grad is None for p in model.parameters())


class OneOverflow(nn.Module):
    """One element of one rank's gradient overflows when told to."""

    def __init__(self, tp):
        super().__init__()
        self.piece = nn.Parameter(torch.ones(64))
        if tp:
            mark(self.piece, tp_shard_dim=0)

    def forward(self, factor):
        scales = torch.ones(64)
        scales[40] = factor
        return (self.piece * scales).sum()


@pytest.mark.ranks(2)
@pytest.mark.parametrize("fused", [False, True])
@pytest.mark.parametrize("axis", ["dp_shard", "tp"])
def test_one_overflow_anywhere_skips_the_step_everywhere(axis, fused, ranks):
    """A plain scaler is refused where other ranks hold other parameters."""
    mesh = ParallelLayout(**{axis: 2}).build(device_type())
    for settings in ({}, {"sync_model_each_microbatch": False}):
        model = OneOverflow(axis == "tp")
        optimizer = torch.optim.AdamW(model.parameters(), lr=0.01, fused=fused)
        model, optimizer = fully_shard(model, optimizer, device_mesh=mesh, **settings)
        scaler = torch.amp.GradScaler(device_type(), init_scale=2.0**10)
        if axis == "tp":
            scaler.scale(model(1.0)).backward()
            with pytest.raises(RuntimeError, match=r"1 of the 2 ranks.*ShardedGradScaler\(mesh\)"):
                scaler.step(optimizer)
            optimizer.zero_grad()
            scaler = ShardedGradScaler(mesh, init_scale=2.0**10)
        for factor, stepped in ((1e38, False), (1.0, True)):
            scaler.scale(model(factor if ranks.rank == 1 else 1.0)).backward()
            scaler.step(optimizer)
            scaler.update()
            optimizer.zero_grad()
            assert scaler.get_scale() == 2.0**9
            wanted = 1 - 0.01 * 0.01 - 0.01 if stepped else 1.0  # AdamW's first step, unscaled
            torch.testing.assert_close(full_parameters(model)["piece"], torch.full((64,), wanted))


@pytest.mark.ranks(2)
def test_an_optimizer_nobody_was_told_of_beside_one_that_was(ranks):
    """It may be the only one to step."""
    mesh = {"device_mesh": init_device_mesh(device_type(), (2,), mesh_dim_names=("dp",))}
    bf16 = {"mixed_precision_policy": MixedPrecisionPolicy(param_dtype=torch.bfloat16)}
    for settings in ({"zero_dp_strategy": 1}, {"zero_dp_strategy": 2}, bf16):
        model = build()
        told = torch.optim.SGD(model.blocks[0].parameters(), lr=0.1)
        model, told = fully_shard(model, told, fsdp_unit_modules=[Block], **mesh, **settings)
        other = torch.optim.SGD([*model.blocks[1].parameters(), model.leave.bias], lr=0.1)
        model(inputs(model, ranks.rank)).float().square().mean().backward()
        other.step()
        other.zero_grad()
        fresh = build()
        fresh.load_state_dict(full_parameters(model))
        fresh = fully_shard(fresh, fsdp_unit_modules=[Block], **mesh, **settings)
        with torch.no_grad():
            x = inputs(model, 5)
            assert torch.equal(model(x), fresh(x)), settings


@pytest.mark.ranks(2)
def test_one_optimizer_steps_over_several_sharded_modules(ranks):
    """Given with each, or once with what holds both; also one that steps over whole matrices."""
    mesh = {"device_mesh": init_device_mesh(device_type(), (2,), mesh_dim_names=("dp",))}
    torch.manual_seed(7)
    plain = nn.ModuleList(nn.Linear(16, 16, bias=False) for _ in range(2))

    def muon(model):
        return torch.optim.Muon(model.parameters(), lr=0.1)

    def train(model, optimizer, shares):
        for step in range(3):
            for share in shares:
                x = torch.randn(4, 16, generator=torch.Generator().manual_seed(10 * step + share))
                (model[1](model[0](x).tanh()).square().mean() / len(shares)).backward()
            optimizer.step()
            optimizer.zero_grad()

    for make, together, sync in (
        (sgd, False, True),
        (sgd, False, False),
        (sgd, True, False),
        (muon, False, True),
    ):
        settings = {**mesh, "sync_model_each_microbatch": sync}  # False: the step ends both sums
        pair, whole = copy.deepcopy(plain), copy.deepcopy(plain)
        train(whole, make(whole), range(2))
        optimizer = make(pair)
        for part in pair:
            fully_shard(part, None if together else optimizer, **settings)
        if together:
            fully_shard_optimizer(optimizer, pair)
        train(pair, optimizer, [ranks.rank])
        for part, other in zip(pair, whole, strict=True):
            torch.testing.assert_close(full_parameters(part)["weight"], other.weight.detach())
    with pytest.raises(TypeError, match=r"not sharded \(2.weight belongs to no sharded module"):
        fully_shard_optimizer(sgd(pair), pair.append(nn.Linear(2, 2)))


class RefusedError(Exception):
    pass


@pytest.mark.ranks(1)
@pytest.mark.parametrize("strategy", [0, 3])
@pytest.mark.parametrize("make", [torch.optim.AdamW, torch.optim.SGD])
def test_a_step_that_a_users_hook_refuses_is_not_made(make, strategy, ranks):
    torch.manual_seed(0)
    plain = torch.nn.Sequential(torch.nn.Linear(4, 4), torch.nn.Linear(4, 2))
    model = copy.deepcopy(plain)
    optimizer = make(model.parameters(), lr=0.1)
    model, optimizer = fully_shard(model, optimizer, zero_dp_strategy=strategy)
    reference = make(plain.parameters(), lr=0.1)
    refuses = []

    def refuse(held, args, kwargs):
        shapes = [tuple(p.shape) for group in held.param_groups for p in group["params"]]
        assert shapes == [(4, 4), (4,), (2, 4), (2,)]  # the user's own
        if refuses:
            refuses.pop()
            raise RefusedError

    optimizer.register_step_pre_hook(refuse)
    for step in range(4):
        for each in (model, plain):
            each(torch.ones(3, 4)).square().mean().backward()
        if step % 2:
            refuses.append(True)
            with pytest.raises(RefusedError):
                optimizer.step()
        optimizer.step()
        reference.step()
        for each in (optimizer, reference):
            each.zero_grad()
        for name, value in full_parameters(model).items():
            torch.testing.assert_close(value, plain.get_parameter(name).detach())


@pytest.mark.ranks(1, 2)
@pytest.mark.parametrize("foreach", [False, True])  # True is what a GPU has by default
@pytest.mark.parametrize("name", ["NAdam", "ASGD", "AdamW", "Rprop"])
def test_state_that_was_never_stepped_leaves_a_first_step_as_it_is(name, foreach, ranks):
    ends = []
    for loads in (False, True):
        model = build()
        optimizer = getattr(torch.optim, name)(model.parameters(), lr=0.1, foreach=foreach)
        model, optimizer = fully_shard(model, optimizer, zero_dp_strategy=1)
        if loads:
            optimizer.load_state_dict(optimizer.state_dict())
        loss_of(model, 0, ranks.rank).backward()
        optimizer.step()
        ends.append(full_parameters(model))
    for parameter, value in ends[0].items():
        torch.testing.assert_close(ends[1][parameter], value, rtol=0, atol=1e-6, msg=parameter)


@pytest.mark.ranks(2)
@pytest.mark.parametrize("foreach", [False, True])
@pytest.mark.parametrize("name", ["ASGD", "AdamW"])
def test_state_of_a_parameter_that_is_one_number_was_made_before_it_was_sharded(
    name, foreach, ranks
):
    """Its rates have its shape too, and are not cut like it."""
    make = functools.partial(getattr(torch.optim, name), lr=0.1, foreach=foreach)
    plain, model = build(), build()
    reference, optimizer = (make(each.parameters()) for each in (plain, model))

    def step_whole(module, own, step):
        losses = [loss_of(module, step, rank) for rank in range(ranks.world_size)]
        (sum(losses) / ranks.world_size).backward()
        own.step()
        own.zero_grad()

    step_whole(plain, reference, 0)
    step_whole(model, optimizer, 0)
    model, optimizer = fully_shard(model, optimizer, zero_dp_strategy=1)
    for step in (1, 2):
        step_whole(plain, reference, step)
        loss_of(model, step, ranks.rank).backward()
        optimizer.step()
        optimizer.zero_grad()
    for parameter, value in full_parameters(model).items():
        wanted = plain.get_parameter(parameter).detach()
        torch.testing.assert_close(value, wanted, rtol=0, atol=1e-5, msg=parameter)


@pytest.mark.ranks(2)
@pytest.mark.parametrize("name", ["SGD", "RMSprop", "AdamW"])
def test_state_is_loaded_in_place_before_the_first_step(name, ranks):
    """As the bridges do: torch's `load` fills what the new optimizer's `state_dict()` has."""
    settings = {} if name == "AdamW" else {"momentum": 0.9}
    both = []
    for _ in range(2):
        model = build()
        optimizer = getattr(torch.optim, name)(model.parameters(), lr=0.1, **settings)
        both.append(fully_shard(model, optimizer, zero_dp_strategy=3))
    (model, optimizer), (other, again) = both
    for step in range(2):
        loss_of(model, step, ranks.rank).backward()
        optimizer.step()
        optimizer.zero_grad()
    saved = model.state_dict(), optimizer.state_dict()
    state = again.state_dict()
    assert saved[1]["state"].keys() == state["state"].keys()
    for index, kept in saved[1]["state"].items():
        assert state["state"][index].keys() == kept.keys()
        for key, value in kept.items():
            state["state"][index][key].copy_(value)
    other.load_state_dict(saved[0])
    again.load_state_dict(state)
    for each, stepped in both:
        loss_of(each, 5, ranks.rank).backward()
        stepped.step()
    for parameter, value in full_parameters(model).items():
        torch.testing.assert_close(full_parameters(other)[parameter], value, msg=parameter)


class Chosen(nn.Module):
    """Two weights, of which a forward uses those that it is told to."""

    def __init__(self):
        super().__init__()
        self.weights = nn.ParameterList(torch.full((4, 4), 0.1 * n) for n in (1, 2))

    def forward(self, x, chosen):
        return sum((x @ self.weights[number]).square().sum() for number in chosen)


@pytest.mark.ranks(1)
@pytest.mark.parametrize("strategy", [0, 3])
@pytest.mark.parametrize("name", ["ASGD", "NAdam", "AdamW"])
def test_parameters_that_began_at_different_rates_keep_their_own(name, strategy, ranks):
    """Neighbours that were each stepped once, one before and one after the rate was halved."""
    ends = []
    for wrap in (False, True):
        model = Chosen()
        optimizer = getattr(torch.optim, name)(model.parameters(), lr=0.1)
        if wrap:
            model, optimizer = fully_shard(model, optimizer, zero_dp_strategy=strategy)
        for chosen in ([0], [1], [0, 1]):
            model(torch.ones(2, 4), chosen).backward()
            optimizer.step()
            optimizer.zero_grad()
            optimizer.param_groups[0]["lr"] *= 0.5
        ends.append(full_parameters(model) if wrap else dict(model.named_parameters()))
    for parameter, value in ends[0].items():
        torch.testing.assert_close(ends[1][parameter], value.detach(), msg=parameter)
