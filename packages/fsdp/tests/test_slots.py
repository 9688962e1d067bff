"""Gathering into shared fixed memory: the same numbers, fixed addresses, NaN for late readers."""

import pytest
import torch
from torch import nn
from torch.utils.checkpoint import checkpoint

from lamina.buffers import StaleStorageError
from lamina.buffers.pool.pool import MemoryBlock
from lamina.buffers.storage_access import access_of
from lamina.ddp import full_parameters
from lamina.fsdp import fully_shard
from lamina.fsdp.api import build as api
from lamina.fsdp.weights import unit_slots
from lamina_testing.toys import Block, OddNet, inputs

STEPS = 5


class Checkpointed(OddNet):
    reentrant = False

    def forward(self, x):
        x = self.enter(x)
        for block in self.blocks:
            x = checkpoint(block, x, use_reentrant=self.reentrant)
        return self.leave(x) * self.temperature + self.empty.sum()


class Reentrant(Checkpointed):
    reentrant = True


class Segment(OddNet):
    def forward(self, x):
        first = nn.Sequential(*self.blocks[:3])
        x = checkpoint(first, self.enter(x), use_reentrant=False)
        for block in self.blocks[3:]:
            x = block(x)
        return self.leave(x) * self.temperature + self.empty.sum()


class Shuffled(OddNet):
    """Runs its blocks in another order at every call."""

    def forward(self, x):
        self.calls = getattr(self, "calls", -1) + 1
        x = self.enter(x)
        for place in range(len(self.blocks)):
            x = self.blocks[(place * (1 + 2 * (self.calls % 2)) + self.calls) % 5](x)
        return self.leave(x) * self.temperature + self.empty.sum()


class Branches(OddNet):
    """Blocks one after the other at first, later side by side: then all backwards overlap."""

    def forward(self, x):
        self.calls = getattr(self, "calls", 0) + 1
        if self.calls <= 2:
            return super().forward(x)
        x = self.enter(x).detach()  # without a gradient to their inputs no unit ends early
        outputs = [block(x) for block in self.blocks]
        return self.leave(sum(outputs)) * self.temperature


def sgd(model):
    return torch.optim.SGD(model.parameters(), lr=0.1, momentum=0.9, foreach=False)


def build(make):
    torch.manual_seed(1)
    return make(depth=5)


def shard(model, *, slots, poison):
    optimizer = sgd(model)
    settings = {"fsdp_double_buffer": slots, "check_storage": poison}
    return fully_shard(model, optimizer, fsdp_unit_modules=[Block], **settings)


def expected(make, losses):
    model = build(make)
    optimizer = sgd(model)
    for step in range(STEPS):
        optimizer.zero_grad()
        sum(losses(model, rank, step) / 2 for rank in range(2)).backward()
        optimizer.step()
    return {name: p.detach() for name, p in model.named_parameters()}


def check(make, losses, ranks, *, slots, poison=True):
    model, optimizer = shard(build(make), slots=slots, poison=poison)
    for step in range(STEPS):
        losses(model, ranks.rank, step).backward()
        optimizer.step()
        optimizer.zero_grad()
    found = full_parameters(model)
    for name, value in expected(make, losses).items():
        torch.testing.assert_close(found[name], value, rtol=0, atol=2e-6)
    return model


def one(model, rank, step):
    return model(inputs(model, 10 * step + rank)).square().mean()


def two(model, rank, step):
    first, second = (model(inputs(model, 100 * step + rank + k)) for k in (0, 50))
    return (first * second).mean()


@pytest.mark.matrix(few=5)
@pytest.mark.ranks(2)
@pytest.mark.parametrize("slots", [False, True])
@pytest.mark.parametrize("losses", [one, two])
@pytest.mark.parametrize("make", [OddNet, Checkpointed, Reentrant, Segment])
def test_released_weights_are_never_read(make, losses, slots, ranks):
    check(make, losses, ranks, slots=slots)


@pytest.mark.ranks(2)
@pytest.mark.parametrize("slots", [False, True])
def test_units_that_share_a_place_and_then_live_together_are_refused_by_name(slots, ranks):
    """Why slots are not the default (decision 0517)."""
    model, _ = shard(build(Branches), slots=slots, poison=True)
    for number in range(2):
        model(inputs(model, number)).sum().backward()
    loss = model(inputs(model, 2)).sum()
    if not slots:
        loss.backward()
        return
    with pytest.raises(
        StaleStorageError, match=r"blocks\.\d shares its slot .* fsdp_double_buffer=False"
    ):
        loss.backward()


@pytest.mark.ranks(2)
@pytest.mark.parametrize("slots", [False, True])
def test_another_order_of_units_at_every_step_is_right_all_the_same(slots, ranks):
    def loss(model, rank, step):
        if not hasattr(model, "sharding_engine") and rank == 0:
            model.calls = step - 1  # one process runs both ranks' forwards of a step
        if not hasattr(model, "sharding_engine") and rank == 1:
            model.calls = step - 1
        return one(model, rank, step)

    check(Shuffled, loss, ranks, slots=slots)


@pytest.mark.ranks(2)
def test_units_share_few_places_with_fixed_addresses(ranks):
    model, optimizer = shard(build(OddNet), slots=True, poison=False)
    pool = model.sharding_engine.units[1].gathered[0]._pool
    seen = {}
    for step in range(4):
        one(model, ranks.rank, step).backward()
        optimizer.step()
        optimizer.zero_grad()
        if step == 0:
            continue
        for unit in model.sharding_engine.units:
            for weights in unit.gathered:
                pool.acquire(weights.key)
                seen.setdefault(weights.key, set()).add(weights.full.data_ptr())
                pool.release(weights.key)
    assert all(len(addresses) == 1 for addresses in seen.values())
    blocks = [w.key for u in model.sharding_engine.units[1:] for w in u.gathered]
    assert not any(f"own: {key!r} " in pool.describe() for key in blocks)
    assert len({pool.tensor(key).untyped_storage()._cdata for key in blocks}) <= 3, (
        "five blocks, of which two or three are live together"
    )


def held(model):
    """Which units' weights share memory, which have memory of their own, and the pool."""
    pool = model.sharding_engine.units[1].gathered[0]._pool
    keys = [w.key for unit in model.sharding_engine.units for w in unit.gathered]
    storages = [pool.tensor(key).untyped_storage()._cdata for key in keys]
    own = [f"own: {key!r} " in pool.describe() for key in keys]
    return [
        (storages.index(storage), mine) for storage, mine in zip(storages, own, strict=True)
    ], pool


def addresses(model):
    found = []
    for unit in model.sharding_engine.units:
        for weights in unit.gathered:
            # An empty slot refuses to say where it is.
            access_of(weights.full.untyped_storage(), "released").allow()
            found.append(weights.full.data_ptr())
    return found


@pytest.mark.ranks(2)
def test_looking_at_the_whole_model_changes_no_places(ranks):
    """`unsharded()` has all units live at once, as no step has: before and after planning."""
    model, optimizer = shard(build(OddNet), slots=True, poison=True)
    other, stepper = shard(build(OddNet), slots=True, poison=True)
    seen = []
    for step in range(4):
        with model.sharding_engine.unsharded():
            whole = {name: p.detach().clone() for name, p in model.named_parameters()}
        assert all(torch.equal(whole[n], p) for n, p in full_parameters(model).items())
        for one_model, its in ((model, optimizer), (other, stepper)):
            one(one_model, ranks.rank, step).backward()
            its.step()
            its.zero_grad()
        seen.append(addresses(model))
    assert seen[1:] == seen[1:2] * 3
    assert held(model)[0] == held(other)[0]
    assert held(model)[1].bytes_resident == held(other)[1].bytes_resident
    for name, value in full_parameters(other).items():
        assert torch.equal(full_parameters(model)[name], value), name


@pytest.mark.ranks(2)
def test_for_cuda_graphs_no_unit_ever_moves(ranks):
    """The order changes at every step: a unit whose place is taken waits for it."""
    slots = {"fsdp_double_buffer": True, "cuda_graph_mode": True}
    with pytest.MonkeyPatch.context() as patch:
        patch.setattr(api, "refuse_unavailable", lambda *_: None)  # would refuse it on a CPU
        model = fully_shard(build(Shuffled), fsdp_unit_modules=[Block], **slots)
    seen = []
    for step in range(4):
        one(model, ranks.rank, step).backward()
        seen.append(addresses(model))
        with model.sharding_engine.unsharded():
            pass
    assert seen[1:] == seen[1:2] * 3
    assert not any(own for _, own in held(model)[0])


class Registered:
    """Stands in for NCCL's registered pool: takes allocations, registers once, at the end."""

    def __init__(self, groups, device, *, symmetric):
        self.groups, self.symmetric = groups, symmetric
        self.log = []

    def __enter__(self):
        self.log.append("open")
        return self

    def __exit__(self, *_):
        self.log.append("register")

    def close(self):
        self.log.append("close")


@pytest.mark.ranks(2)
def test_slots_are_allocated_in_one_block_of_registered_memory(ranks):
    """All slots and nothing else: what NCCL registers collectively may not grow afterwards."""
    made, allocated = [], []

    def register(groups, device, *, symmetric):
        made.append(Registered(groups, device, symmetric=symmetric))
        return made[-1]

    with pytest.MonkeyPatch.context() as patch:
        patch.setattr(unit_slots, "registration_refusal", lambda *_, **__: None)
        patch.setattr(unit_slots, "register_pool", register)
        make = MemoryBlock.__init__

        def noting(self, *args, fixed, poison):
            inside = bool(made) and made[-1].log == ["open"]
            allocated.append((fixed, inside))
            make(self, *args, fixed=fixed, poison=poison)

        patch.setattr(MemoryBlock, "__init__", noting)
        with pytest.raises(ValueError, match="fsdp_double_buffer"):
            fully_shard(build(OddNet), nccl_ub=True)
        model = build(OddNet)
        model, optimizer = fully_shard(
            model,
            sgd(model),
            fsdp_unit_modules=[Block],
            nccl_ub=True,
            fsdp_double_buffer=True,
            disable_symmetric_registration=True,
        )
        for step in range(3):
            one(model, ranks.rank, step).backward()
            optimizer.step()
            optimizer.zero_grad()
    assert [m.log for m in made] == [["open", "register"]]
    assert {inside for fixed, inside in allocated if fixed} == {True}
    assert {inside for fixed, inside in allocated if not fixed} == {False}
    assert not made[0].symmetric
    gather = next(model.parameter_groups()).axes.inner.sibling("gather")
    assert made[0].groups == (gather,)
    model.deregister_memory()
    model.deregister_memory()
    assert made[0].log == ["open", "register", "close"]
