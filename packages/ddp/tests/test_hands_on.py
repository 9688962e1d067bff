"""What users do with their own hands between the calls of a loop: right, or refused by name."""

import copy
import gc
import pickle
from dataclasses import dataclass

import pytest
import torch
from torch import nn
from torch.optim.optimizer import _global_optimizer_pre_hooks

from lamina.ddp import (
    DistributedDataParallel,
    DistributedDataParallelConfig,
    ShardedOptimizer,
    clip_grad_norm,
    full_gradients,
    full_parameters,
)
from lamina.mesh import ParallelLayout, mark, role_of
from lamina_testing import device_type
from lamina_testing.toys import OddNet

SHARDED = pytest.mark.parametrize("sharded", [False, True])


def build(make=OddNet, dtype=torch.float32):
    torch.manual_seed(7)
    return make().to(dtype)


def sgd(model):
    return torch.optim.SGD(model.parameters(), lr=0.1, momentum=0.9, weight_decay=0.01)


def wrap(model, sharded, replicate=1, **config):
    mesh = ParallelLayout(dp_replicate=replicate).build(device_type())
    settings = {"num_buckets": 4, "overlap_grad_reduce": True, **config}
    config = DistributedDataParallelConfig(use_distributed_optimizer=sharded, **settings)
    return DistributedDataParallel(model, config, mesh), mesh


def batch(rank, number=0):
    return torch.randn(4, 5, generator=torch.Generator().manual_seed(10 * number + rank))


def check_gradients(wrapped, loss, make=OddNet, world=2):
    """`loss(model, rank)` on all ranks in one process has the wrapper's gradients."""
    model = build(make)
    (sum(loss(model, rank) for rank in range(world)) / world).backward()
    wanted = {name: p.grad for name, p in model.named_parameters() if p.grad is not None}
    found = full_gradients(wrapped)
    assert found.keys() == wanted.keys()
    for name, value in wanted.items():
        torch.testing.assert_close(found[name], value, rtol=0, atol=3e-6, msg=name)


@dataclass
class Output:
    value: torch.Tensor


class Bag:
    __slots__ = ("value",)

    def __init__(self, value):
        self.value = value


class GivesObjects(OddNet):
    kind = Output

    def forward(self, x):
        return self.kind(super().forward(x))


class GivesBags(GivesObjects):
    kind = Bag


@pytest.mark.ranks(2)
@SHARDED
@pytest.mark.parametrize("make", [GivesObjects, GivesBags])
def test_outputs_of_any_kind_start_the_reduction(make, sharded, ranks):
    wrapped, _ = wrap(build(make), sharded)
    wrapped(batch(ranks.rank)).value.square().mean().backward()
    check_gradients(wrapped, lambda m, rank: m(batch(rank)).value.square().mean(), make=make)
    wrapped.zero_grad()
    wrapped.module(batch(ranks.rank)).value.square().mean().backward()  # not through the wrapper
    check_gradients(wrapped, lambda m, rank: m(batch(rank)).value.square().mean(), make=make)
    wrapped.module(batch(ranks.rank)).value.square().mean().backward()  # added to the first one
    check_gradients(wrapped, lambda m, rank: 2 * m(batch(rank)).value.square().mean(), make=make)


class Partial(OddNet):
    def forward(self, x):
        return self.enter(x)


@pytest.mark.ranks(2)
@SHARDED
def test_penalties_reach_parameters_that_the_forward_did_not(sharded, ranks):
    def loss(model, rank):
        return model(batch(rank)).mean() + sum(p.square().sum() for p in model.parameters())

    wrapped, _ = wrap(build(Partial), sharded)
    loss(wrapped, ranks.rank).backward()
    check_gradients(wrapped, loss, make=Partial)
    wrapped.zero_grad()
    with wrapped.no_sync():
        loss(wrapped, ranks.rank).backward()
    loss(wrapped, ranks.rank).backward()
    check_gradients(wrapped, lambda model, rank: 2 * loss(model, rank), make=Partial)


@pytest.mark.ranks(2)
@pytest.mark.parametrize(("sharded", "dtype"), [(True, torch.float32), (False, torch.bfloat16)])
def test_an_optimizer_that_would_train_nothing_is_refused(sharded, dtype, ranks):
    wrapped, mesh = wrap(build(dtype=dtype), sharded)
    plain = sgd(wrapped)
    with pytest.raises(ValueError, match=r"LBFGS.*another optimizer"):
        ShardedOptimizer(torch.optim.LBFGS(wrapped.parameters()), wrapped, mesh)
    x = batch(ranks.rank).to(dtype)
    wrapped(x).square().mean().backward()
    for act in (plain.step, lambda: wrapped(x)):  # a loop may step otherwise than by an Optimizer
        with pytest.raises(RuntimeError, match=r"ShardedOptimizer\(optimizer, model, mesh\)"):
            act()
    with torch.no_grad():
        wrapped(x)
    wrapped.zero_grad()
    wrapped(x).square().mean().backward()  # somebody who looks at gradients alone
    optimizer = ShardedOptimizer(plain, wrapped, mesh)
    optimizer.step()
    wrapped(x)
    plain.add_param_group({"params": [wrapped.module.enter.weight]})
    for step in (optimizer.step, plain.step):
        with pytest.raises(RuntimeError, match=r"add_param_group|added to it afterwards"):
            step()


@pytest.mark.ranks(1)
def test_nothing_watches_over_optimizers_once_a_model_is_gone(ranks):
    before = len(_global_optimizer_pre_hooks)
    wrapped, _ = wrap(build(dtype=torch.bfloat16), False)
    other = sgd(nn.Linear(2, 2))
    other.step()  # of another model: none of the wrapped one's parameters is in it
    assert len(_global_optimizer_pre_hooks) == before + 1
    del wrapped
    gc.collect()
    assert len(_global_optimizer_pre_hooks) == before


KINDS = pytest.mark.parametrize(
    ("sharded", "config"),
    [
        (False, {}),
        (True, {}),
        (True, {"zero_dp_strategy": 2}),
        (True, {"reproducible": True}),
        (True, {"replicate": 2}),
    ],
)
FITS = pytest.mark.matrix(where=lambda ranks, config: ranks == 2 * config.get("replicate", 1))


@FITS
@pytest.mark.ranks(2, 4)
@KINDS
def test_gradients_inside_no_sync_are_scaled_and_neither_stepped_nor_clipped(
    sharded, config, ranks
):
    wrapped, mesh = wrap(build(), sharded, **config)
    optimizer = ShardedOptimizer(sgd(wrapped), wrapped, mesh)
    with wrapped.no_sync():
        wrapped(batch(ranks.rank, 0)).square().mean().backward()
    for early in (optimizer.step, lambda: clip_grad_norm(wrapped, 1.0)):
        with pytest.raises(RuntimeError, match=r"summed over ranks.*finish_grad_sync\(\)"):
            early()
    wrapped.scale_gradients(3.0)
    with wrapped.no_sync():
        wrapped(batch(ranks.rank, 1)).square().mean().backward()
    wrapped.start_grad_sync()
    wrapped.scale_gradients(0.5)
    wrapped.finish_grad_sync()

    def loss(model, rank):
        return sum(f * model(batch(rank, n)).square().mean() for n, f in ((0, 1.5), (1, 0.5)))

    check_gradients(wrapped, loss, world=ranks.world_size)
    optimizer.step()


@FITS
@pytest.mark.ranks(2, 4)
@KINDS
@pytest.mark.parametrize("by", ["optimizer", "wrapper"])
def test_zeroing_in_place_between_microbatches_discards_them(by, sharded, config, ranks):
    wrapped, mesh = wrap(build(), sharded, **config)
    optimizer = ShardedOptimizer(sgd(wrapped), wrapped, mesh)
    model = build()
    plain = sgd(model)
    mains = [p for group in optimizer.param_groups for p in group["params"]]
    zeroing = optimizer if by == "optimizer" else wrapped
    for step in range(2):
        with wrapped.no_sync():
            wrapped(batch(ranks.rank, 90)).square().mean().backward()
        zeroing.zero_grad(set_to_none=False)
        assert all(bool((p.grad == 0).all()) for p in mains if p.numel())
        if step == 1:
            optimizer.step()  # zeros are gradients: momentum and weight decay go on
            plain.zero_grad(set_to_none=False)
            plain.step()
        wrapped(batch(ranks.rank, step)).square().mean().backward()
        optimizer.step()
        zeroing.zero_grad(set_to_none=False)
        plain.zero_grad(set_to_none=False)
        losses = [model(batch(r, step)).square().mean() for r in range(ranks.world_size)]
        (sum(losses) / len(losses)).backward()
        plain.step()
    for name, value in full_parameters(wrapped).items():
        wanted = model.get_parameter(name).detach()
        torch.testing.assert_close(value, wanted, rtol=0, atol=3e-6, msg=name)


@pytest.mark.ranks(2)
def test_a_backward_while_gradients_are_on_their_way_is_refused(ranks):
    wrapped, mesh = wrap(build(), True)
    optimizer = ShardedOptimizer(sgd(wrapped), wrapped, mesh)
    with wrapped.no_sync():
        wrapped(batch(ranks.rank)).square().mean().backward()
    wrapped.start_grad_sync()
    loss = wrapped(batch(ranks.rank, 1)).square().mean()
    with pytest.raises(RuntimeError, match=r"finish_grad_sync\(\) first"):
        loss.backward()
    wrapped.finish_grad_sync()
    check_gradients(wrapped, lambda m, rank: m(batch(rank)).square().mean())
    optimizer.step()


@pytest.mark.ranks(2)
@SHARDED
def test_freezing_after_wrapping_works_and_unfreezing_is_refused(sharded, ranks):
    model, plain_model = build(), build()
    model.enter.requires_grad_(False)
    plain_model.enter.requires_grad_(False)
    wrapped, mesh = wrap(model, sharded)
    optimizer = ShardedOptimizer(sgd(model), wrapped, mesh)
    plain = sgd(plain_model)
    for step in range(3):
        for one in (model, plain_model):
            one.blocks[1].requires_grad_(step != 1)
        wrapped(batch(ranks.rank, step)).square().mean().backward()
        optimizer.step()
        optimizer.zero_grad()
        (sum(plain_model(batch(r, step)).square().mean() for r in range(2)) / 2).backward()
        plain.step()
        plain.zero_grad()
    for name, value in full_parameters(wrapped).items():
        wanted = plain_model.get_parameter(name).detach()
        torch.testing.assert_close(value, wanted, rtol=0, atol=3e-6, msg=name)
    model.enter.requires_grad_(True)
    with pytest.raises(ValueError, match=r"enter\.\w+ was frozen when the model was wrapped"):
        wrapped(batch(ranks.rank))


@pytest.mark.ranks(1)
def test_parameters_of_a_wrapped_module_can_be_copied_and_pickled(ranks):
    wrapped, _ = wrap(build(), True)
    for make in (copy.deepcopy, lambda p: pickle.loads(pickle.dumps(p))):
        weight = make(wrapped.module.enter.weight)
        assert torch.equal(weight, wrapped.module.enter.weight)
        nn.functional.linear(torch.ones(1, 5), weight).sum().backward()  # nobody's any more
        assert weight.grad is not None


def pickled(model):
    return pickle.loads(pickle.dumps(model))


@pytest.mark.ranks(2)
@pytest.mark.parametrize("make", [copy.deepcopy, pickled])
@pytest.mark.parametrize(
    ("sharded", "dtype"), [(False, torch.float32), (True, torch.float32), (True, torch.bfloat16)]
)
def test_a_copy_of_a_wrapper_trains_on_as_the_wrapper_does(sharded, dtype, make, ranks):
    def train(model, optimizer, numbers):
        for number in numbers:
            model(batch(ranks.rank, number).to(dtype)).float().square().mean().backward()
            optimizer.step()
            optimizer.zero_grad()
        return full_parameters(model)

    def step(model):
        return ShardedOptimizer(torch.optim.SGD(model.parameters(), 0.1), model, mesh)

    module = build(dtype=dtype)
    mark(module.enter.weight, block_rows=1)
    model, mesh = wrap(module, sharded)
    optimizer = step(model)
    train(model, optimizer, range(2))
    model.note = "the user's"
    made = make(model)
    assert made.note == "the user's"
    assert role_of(made.module.enter.weight).block_rows == 1
    for inner, other in zip(model.modules(), made.modules(), strict=True):
        assert len(inner._forward_pre_hooks) == len(other._forward_pre_hooks)
    before = full_parameters(model)
    found = train(made, step(made), range(2, 4))
    for name, value in full_parameters(model).items():
        assert torch.equal(value, before[name]), f"training the copy has changed {name}"
    for name, value in train(model, optimizer, range(2, 4)).items():
        assert not torch.equal(value, before[name]) or not value.numel(), name
        assert torch.equal(value, found[name]), name


@pytest.mark.ranks(2)
def test_lbfgs_under_strategy_0_is_lbfgs_in_one_process(ranks):
    def train(model, optimizer, closure):
        for _ in range(2):
            optimizer.step(closure)
        return [p.detach() for p in model.parameters()]

    def make(model):
        return torch.optim.LBFGS(model.parameters(), lr=0.1, max_iter=3)

    wrapped, mesh = wrap(build(), False)
    optimizer = ShardedOptimizer(make(wrapped), wrapped, mesh)
    model = build()
    plain = make(model)

    def closure():
        wrapped.zero_grad()
        loss = wrapped(batch(ranks.rank)).square().mean()
        loss.backward()
        return loss

    def plain_closure():
        plain.zero_grad()
        loss = sum(model(batch(rank)).square().mean() for rank in range(2)) / 2
        loss.backward()
        return loss

    found, wanted = train(wrapped, optimizer, closure), train(model, plain, plain_closure)
    assert not torch.equal(wanted[0], next(build().parameters()))
    for value, expected in zip(found, wanted, strict=True):
        torch.testing.assert_close(value, expected, rtol=0, atol=1e-5)


@pytest.mark.ranks(1)
def test_names_of_parameters_lead_to_the_wrapped_module(ranks):
    class Scaled(nn.Module):
        def __init__(self):
            super().__init__()
            self.module = nn.Linear(3, 3)  # a child with the name that the wrapper has for it
            self.inner = nn.Linear(3, 3)
            self.scale = nn.Parameter(torch.ones(3))

        def forward(self, x):
            return self.scale * self.inner(self.module(x))

    torch.manual_seed(0)
    plain = Scaled()
    wrapped = DistributedDataParallel(copy.deepcopy(plain))
    assert [name for name, _ in wrapped.named_parameters()] == list(wrapped.state_dict())
    own = {n: p for n, p in wrapped.named_parameters() if not n.startswith("module.")}
    x = torch.randn(2, 3)
    assert torch.equal(torch.func.functional_call(wrapped, own, (x,)), plain(x))
    others = {name: nn.Parameter(torch.randn_like(value)) for name, value in own.items()}
    with pytest.raises(RuntimeError, match="scale is another parameter"):
        torch.func.functional_call(wrapped, others, (x,))
    assert torch.equal(wrapped(x), plain(x))
    assert set(wrapped._parameters) == set()
    with pytest.raises(AttributeError, match="nowhere"):
        wrapped.nowhere  # noqa: B018


@pytest.mark.ranks(2)
@pytest.mark.parametrize("compiled", [False, True])
def test_gradients_that_the_optimizer_drops_are_dropped_in_the_module(compiled, ranks):
    mesh = ParallelLayout().build(device_type())
    config = DistributedDataParallelConfig(use_distributed_optimizer=True)
    model = DistributedDataParallel(nn.Linear(4, 4), config, mesh)
    optimizer = ShardedOptimizer(torch.optim.SGD(model.parameters(), 0.1), model, mesh)
    run = torch.compile(model, backend="eager") if compiled else model
    for _ in range(2):
        run(torch.ones(2, 4)).sum().backward()
        assert all(p.grad is not None for p in model.parameters())
        optimizer.step()
        optimizer.zero_grad()
        assert all(p.grad is None for p in model.parameters())


@pytest.mark.ranks(2)
def test_a_part_may_be_compiled_while_its_weights_have_gradients(ranks):
    mesh = ParallelLayout().build(device_type())
    config = DistributedDataParallelConfig(use_distributed_optimizer=True)
    net = nn.Sequential(nn.Linear(4, 4), nn.Linear(4, 4))
    net[0].compile(backend="eager")
    model = DistributedDataParallel(net, config, mesh)
    optimizer = ShardedOptimizer(torch.optim.SGD(model.parameters(), 0.1), model, mesh)
    for rows in range(1, 4):
        model(torch.ones(rows, 4)).sum().backward()
        gradients = [p.grad for p in net.parameters()]
        assert all(grad is not None for grad in gradients)
        torch._dynamo.reset()
        with torch.no_grad():
            model(torch.ones(7, 4))
        assert [id(p.grad) for p in net.parameters()] == [id(grad) for grad in gradients]
    torch.testing.assert_close(full_gradients(model)["1.bias"], torch.full((4,), 6.0))
    optimizer.step()


@pytest.mark.ranks(2)
def test_an_optimizer_over_the_whole_world_needs_no_mesh(ranks):
    model = DistributedDataParallel(
        build(), DistributedDataParallelConfig(use_distributed_optimizer=True)
    )
    optimizer = ShardedOptimizer(sgd(model), model)
    before = full_parameters(model)["leave.weight"]
    model(batch(ranks.rank)).square().mean().backward()
    optimizer.step()
    assert not torch.equal(full_parameters(model)["leave.weight"], before)
