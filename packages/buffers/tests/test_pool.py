"""Pooled storage comes back where views expect it, within its budget, and never mixes owners."""

from __future__ import annotations

import gc

import pytest
import torch
from hypothesis import given, settings
from hypothesis import strategies as st
from torch import nn

from lamina.buffers import (
    BufferLayout,
    PoolExhaustedError,
    SavedTensorGuard,
    StaleStorageError,
    StoragePool,
    TensorSpec,
    conflict_graph,
)


def pool_of(keys="abcd", numel=100, **options):
    pool = StoragePool(**options)
    for key in keys:
        pool.register(key, numel, torch.float32)
    return pool


def slotted(keys="abcd", **options):
    pool = pool_of(keys, mode="slots", **options)
    pool.plan_slots(conflict_graph(keys))
    return pool


@pytest.mark.parametrize("make", [pool_of, slotted])
def test_views_outlive_release_and_see_what_the_next_gather_writes(make):
    pool = make()
    with pool.viewing("a") as flat:
        view = flat[10:20].view(2, 5)
    pool.acquire("a")
    pool.destination("a").fill_(3.0)
    assert view.sum() == 30
    pool.release("a")
    pool.acquire("a")
    pool.destination("a").copy_(torch.arange(100.0))
    assert torch.equal(view, torch.arange(10.0, 20.0).view(2, 5))
    assert pool.generation("a") == 2


def test_released_keys_hold_no_bytes():
    pool = pool_of()
    storage = pool.tensor("a").untyped_storage()
    assert storage.nbytes() == 0
    pool.acquire("a")
    assert storage.nbytes() == 400 == pool.bytes_resident
    pool.acquire("b")
    pool.release("a")
    assert storage.nbytes() == 0
    assert pool.bytes_resident == 400
    assert pool.bytes_peak == 800
    assert pool.live_keys() == ("b",)
    with pool.viewing("a"):
        assert pool.bytes_resident == 400
    assert storage.nbytes() == 0


def test_acquire_and_release_may_be_repeated():
    pool = pool_of()
    first = pool.acquire("a")
    first.fill_(2.0)
    assert pool.acquire("a") is first
    assert first.sum() == 200
    assert pool.generation("a") == 1
    pool.release("a")
    pool.release("a")
    assert not pool.is_live("a")
    with pool.using("a") as tensor:
        assert tensor is first
        assert pool.is_live("a")
    assert not pool.is_live("a")


def test_a_unit_returns_to_the_same_address_step_after_step():
    pool = slotted("abcdef")
    assert pool.bytes_resident == 800  # two slots
    seen: dict[str, set[int]] = {}
    ballast = []
    for _ in range(3):
        for order in ("abcdef", "fedcba"):
            for place, key in enumerate(order):
                for wanted in order[place : place + 2]:  # one unit ahead
                    seen.setdefault(wanted, set()).add(pool.acquire(wanted).data_ptr())
                ballast.append(torch.zeros(100))  # other users of the allocator
                pool.release(key)
    assert all(len(addresses) == 1 for addresses in seen.values())
    assert len(set.union(*seen.values())) == 2
    assert pool.fallbacks == {}
    assert pool.bytes_peak == 800


@settings(max_examples=60, deadline=None)
@given(st.lists(st.tuples(st.sampled_from("abcde"), st.booleans()), max_size=60), st.data())
def test_content_of_live_keys_survives_any_order_of_use(events, data):
    """Oracle: a dictionary of what was written. Slots are planned for another order on purpose."""
    pool = StoragePool(mode="slots", poison=data.draw(st.booleans()))
    sizes = dict(zip("abcde", (5, 9, 3, 9, 1), strict=True))
    for key, numel in sizes.items():
        pool.register(key, numel, torch.float32)
    pool.plan_slots(conflict_graph("abcde"))
    written: dict[str, float] = {}
    for step, (key, take) in enumerate(events):
        if take and key not in written:
            pool.acquire(key).fill_(float(step))
            written[key] = float(step)
        elif not take:
            pool.release(key)
            written.pop(key, None)
        elif step % 7 == 0 and not written:
            pool.plan_slots()
        for live, value in written.items():
            assert bool((pool.tensor(live) == value).all())
            assert pool.owner_of(pool.tensor(live)) == live
        assert pool.live_keys() == tuple(sorted(written))
        places = {pool.tensor(live).data_ptr() for live in written}
        assert len(places) == len(written)


def test_a_taken_slot_makes_its_key_fall_back_to_its_own_storage():
    pool = slotted()
    assert pool.slot_of("a") == pool.slot_of("c")
    pool.acquire("a").fill_(1.0)
    epoch, address = pool.epoch("c"), pool.tensor("c").data_ptr()
    taken = pool.acquire("c")
    taken.fill_(2.0)
    assert pool.tensor("a").sum() == 100
    assert taken.data_ptr() != address
    assert pool.slot_of("c") is None
    assert pool.epoch("c") == epoch + 1
    assert pool.fallbacks == {"c": 1}
    pool.release("a")
    pool.release("c")
    # The conflict was seen: the next plan keeps the two apart.
    pool.plan_slots(conflict_graph("abcd"), dedicated=True)
    assert pool.slot_of("a") != pool.slot_of("c")


def test_planning_again_moves_only_what_it_must():
    pool = slotted()
    kept = {key: pool.tensor(key) for key in "abcd"}
    assert pool.plan_slots(conflict_graph("abcd")) == set()
    assert all(pool.tensor(key) is tensor for key, tensor in kept.items())
    moved = pool.plan_slots({"a": "bcd", "b": "cd", "c": "d"}, dedicated=True)
    assert moved
    assert len({pool.slot_of(key) for key in "abcd"}) == 4
    for key in "abcd":
        assert (pool.tensor(key) is kept[key]) == (key not in moved)


def test_slots_are_not_moved_under_a_live_key():
    pool = slotted()
    pool.acquire("a")
    with pytest.raises(RuntimeError, match=r"\['a'\] are live in slots: release"):
        pool.plan_slots({"a": "b"})
    pool = pool_of("ab", mode="slots")
    tensor = pool.acquire("a")
    assert "a" not in pool.plan_slots(conflict_graph("ab"), dedicated=True)
    assert pool.tensor("a") is tensor
    with pytest.raises(ValueError, match="mode='slots'"):
        pool_of().plan_slots()


def test_the_budget_refuses_with_the_bytes_wanted_and_there():
    pool = pool_of(budget=900)
    pool.acquire("a")
    pool.acquire("b")
    assert not pool.fits("c")
    assert pool.fits("a")
    with pytest.raises(PoolExhaustedError, match=r"'c' wants 400 bytes, 100 of the budget of 900"):
        pool.acquire("c")
    assert not pool.is_live("c")
    pool.release("a")
    pool.acquire("c")


def test_slots_stay_within_the_budget():
    pool = pool_of(mode="slots", budget=500)
    pool.plan_slots(conflict_graph("abcd"))
    assert pool.bytes_resident <= 500
    assert {pool.slot_of(key) for key in "abcd"} == {0, None}


def test_poisoned_storage_reads_as_nan_in_every_dtype():
    for dtype in (torch.float64, torch.float32, torch.bfloat16, torch.float16, torch.float8_e4m3fn):
        for mode in ("resize", "slots"):
            pool = StoragePool(mode=mode, poison=True)
            for key in "abcd":
                pool.register(key, 8, dtype)
            if mode == "slots":
                pool.plan_slots(conflict_graph("abcd"))
            assert pool.acquire("a").float().isnan().all()
            pool.destination("a").view(torch.uint8).zero_()
            pool.release("a")
            assert pool.tensor("a").float().isnan().all()
            assert pool.bytes_resident == (0 if mode == "resize" else 2 * 8 * dtype.itemsize)


def test_keys_are_checked():
    pool = pool_of("a")
    with pytest.raises(ValueError, match="registered"):
        pool.register("a", 3, torch.float32)
    with pytest.raises(ValueError, match="-1 elements"):
        pool.register("z", -1, torch.float32)
    with pytest.raises(KeyError, match="'q' is not registered"):
        pool.acquire("q")
    with pytest.raises(StaleStorageError, match=r"'a' .* is not live"):
        pool.destination("a")
    with pytest.raises(ValueError, match="use 'resize' or 'slots'"):
        StoragePool(mode="fixed")
    with pytest.raises(ValueError, match="budget is -1"):
        StoragePool(budget=-1)
    pool.unregister("a")
    assert "a" not in pool
    assert pool.keys() == ()


def test_empty_units_are_keys_as_well():
    pool = StoragePool(mode="slots")
    pool.register("none", 0, torch.float32)
    pool.plan_slots()
    assert pool.acquire("none").numel() == 0
    assert pool.is_live("none")
    pool.release("none")


def test_storage_is_never_made_in_inference_mode():
    weight = {}
    with torch.inference_mode():
        pool = StoragePool(mode="slots")
        pool.register("a", 4, torch.float32)
        pool.register("b", 4, torch.float32)
        pool.plan_slots(conflict_graph("ac"))
        layout = BufferLayout.plan([TensorSpec("w", (2, 2))], 1, alignment=1)
        for key in "ab":
            pool.acquire(key)
            pool.destination(key).fill_(2.0)
            weight[key] = pool.views(key, layout)["w"]
    for key in "ab":
        parameter = nn.Parameter(weight[key])
        (parameter * parameter).sum().backward()
        assert torch.equal(parameter.grad, torch.full((2, 2), 4.0))


def test_views_of_a_layout_are_made_while_the_key_is_released():
    layout = BufferLayout.plan([TensorSpec("w", (3, 4)), TensorSpec("e", (0,))], 1)
    pool = StoragePool()
    pool.register("unit", layout.size, torch.float32)
    views = pool.views("unit", layout)
    pool.acquire("unit").copy_(torch.arange(float(layout.size)))
    assert torch.equal(views["w"], torch.arange(12.0).view(3, 4))
    assert views["e"].shape == (0,)
    with pytest.raises(ValueError, match="elements, the layout"):
        pool.views("unit", BufferLayout.plan([TensorSpec("w", (3,))], 1, alignment=1))


def test_nothing_is_left_when_the_pool_goes():
    pool = slotted()
    pool.acquire("a")
    storages = [pool.tensor(key).untyped_storage() for key in "abcd"]
    assert sum(storage.nbytes() for storage in {s.data_ptr(): s for s in storages}.values()) == 800
    for key in "abcd":
        pool.unregister(key)
    pool.mode = "slots"
    pool.plan_slots()
    assert pool.bytes_resident == 0
    del pool
    gc.collect()
    assert all(storage.nbytes() == 0 for storage in storages)


# -- what autograd saved ------------------------------------------------------------------------


class Unit(nn.Module):
    """A linear layer whose weight is gathered into pooled storage, as an engine would do it."""

    def __init__(self, pool, key, weight):
        super().__init__()
        self.pool, self.key, self.content = pool, key, weight
        self.layout = BufferLayout.plan([TensorSpec("w", tuple(weight.shape))], 1, alignment=1)
        if key not in pool:
            pool.register(key, self.layout.size, weight.dtype)
        self.bind()

    def bind(self):
        self.weight = nn.Parameter(self.pool.views(self.key, self.layout)["w"])
        self.epoch = self.pool.epoch(self.key)

    def gather(self, **options):
        self.pool.acquire(self.key, **options)
        if self.epoch != self.pool.epoch(self.key):
            self.bind()
        self.pool.destination(self.key).copy_(self.content.view(-1))

    def forward(self, x):
        self.gather()
        y = torch.tanh(x @ self.weight)
        self.pool.release(self.key)
        return y


def chain(pool, seed=0, size=4, units="abc"):
    generator = torch.Generator().manual_seed(seed)
    return [Unit(pool, key, torch.randn(size, size, generator=generator)) for key in units]


def reference(units, x):
    """Oracle: the same chain in plain PyTorch."""
    weights = [unit.content.clone().requires_grad_() for unit in units]
    for weight in weights:
        x = torch.tanh(x @ weight)
    x.sum().backward()
    return [weight.grad for weight in weights]


def backward_through(units, y, **options):
    """Backward unit by unit, each gathered before its part."""
    for unit in reversed(units):
        unit.gather(**options)
    y.sum().backward()


@pytest.mark.parametrize("mode", ["resize", "slots"])
@pytest.mark.parametrize("guarded", [False, True])
def test_gradients_are_right_when_units_come_back(mode, guarded):
    pool = StoragePool(mode=mode, poison=True)
    units = chain(pool)
    if mode == "slots":
        # All three are live in this backward, and the plan knows it.
        pool.plan_slots({"a": "bc", "b": "c"}, dedicated=True)
        for unit in units:
            unit.bind()
    x = torch.randn(2, 4, generator=torch.Generator().manual_seed(5))
    for _ in range(2):
        y = x
        with SavedTensorGuard(pool) if guarded else torch.enable_grad():
            for unit in units:
                y = unit(y)
        backward_through(units, y, epoch=0 if mode == "resize" else 1)
        for unit, grad in zip(units, reference(units, x), strict=True):
            assert torch.equal(unit.weight.grad, grad)
            unit.weight.grad = None
            pool.release(unit.key)


def test_forgetting_to_gather_gives_nan_under_poison_and_an_error_under_the_guard():
    for guarded in (False, True):
        pool = StoragePool(poison=True)
        units = chain(pool, units="a")
        x = torch.randn(2, 4, requires_grad=True)
        with SavedTensorGuard(pool) if guarded else torch.enable_grad():
            y = units[0](x)
        if guarded:
            with pytest.raises(StaleStorageError, match=r"'a' \(generation 1\) is not live"):
                y.sum().backward()
        else:
            y.sum().backward()
            assert x.grad.isnan().all()


def test_the_guard_finds_a_slot_that_holds_another_unit():
    pool = slotted("abc")
    assert pool.slot_of("a") == pool.slot_of("c")
    units = {}
    for key in "abc":
        pool.unregister(key)
    pool = StoragePool(mode="slots")
    made = chain(pool)
    pool.plan_slots(conflict_graph("abc"))
    for unit in made:
        unit.bind()
        units[unit.key] = unit
    x = torch.randn(2, 4, requires_grad=True)
    with SavedTensorGuard(pool):
        y = units["a"](x)
    units["c"].gather()  # takes a's slot
    with pytest.raises(StaleStorageError, match=r"'a' .* is not live: its slot holds 'c'"):
        y.sum().backward()


def test_a_key_that_must_come_back_to_its_slot_says_when_it_cannot():
    pool = slotted()
    epoch = pool.epoch("a")
    pool.acquire("a", epoch=epoch)
    pool.release("a")
    pool.acquire("c")
    with pytest.raises(StaleStorageError, match=r"'a' must come back to its slot.*'c' is live"):
        pool.acquire("a", epoch=epoch)
    assert not pool.is_live("a")
    pool.acquire("a")  # somewhere else
    with pytest.raises(StaleStorageError, match=r"'a': views were saved in epoch 1.*epoch 2"):
        pool.acquire("a", epoch=epoch)


def test_the_guard_finds_weights_that_changed_between_forward_and_backward():
    pool = StoragePool()
    unit = chain(pool, units="a")[0]
    x = torch.randn(2, 4, requires_grad=True)
    pool.acquire("a", stamp=1)
    with SavedTensorGuard(pool):
        y = unit(x)
    unit.gather(stamp=2)
    with pytest.raises(StaleStorageError, match="content 1 and holds content 2"):
        y.sum().backward()


def test_a_relocating_guard_is_right_wherever_units_have_moved():
    pool = StoragePool(mode="slots", poison=True)
    units = chain(pool)
    pool.plan_slots(conflict_graph("abc"))
    for unit in units:
        unit.bind()
    x = torch.randn(2, 4, generator=torch.Generator().manual_seed(5))
    y = x
    with SavedTensorGuard(pool, relocate=True):
        for unit in units:
            y = unit(y)
    before = [unit.weight for unit in units]
    # All three at once, though a and c share a slot: one of them moves, views and all.
    backward_through(units, y)
    assert pool.fallbacks
    for weight, grad in zip(before, reference(units, x), strict=True):
        assert torch.equal(weight.grad, grad)


def test_without_relocation_the_guard_refuses_units_that_have_moved():
    pool = StoragePool(mode="slots")
    units = chain(pool)
    pool.plan_slots(conflict_graph("abc"))
    for unit in units:
        unit.bind()
    y = torch.randn(2, 4, requires_grad=True)
    with SavedTensorGuard(pool):
        for unit in units:
            y = unit(y)
    with pytest.raises(StaleStorageError, match=r"was saved in epoch 1 .* has moved since"):
        backward_through(units, y)


def test_the_guard_leaves_other_tensors_alone():
    pool = StoragePool()
    pool.register("a", 4, torch.float32)
    x = torch.randn(3, requires_grad=True)
    with SavedTensorGuard(pool), SavedTensorGuard(pool, relocate=True):
        y = (x.exp() * x.to_sparse().to_dense()).sum()
    y.backward()
    assert torch.allclose(x.grad, x.exp() * (x + 1))


def test_a_second_gather_is_no_modification_for_autograd():
    """Without the guard: the destination has a version counter of its own."""
    pool = StoragePool()
    unit = chain(pool, units="a")[0]
    x = torch.randn(2, 4, requires_grad=True)
    y = unit(x)
    unit.gather()
    y.sum().backward()
    y = unit(x)
    pool.acquire("a").copy_(unit.content.view(-1))  # through the tensor itself: seen
    with pytest.raises(RuntimeError, match="modified by an inplace operation"):
        y.sum().backward()


def test_the_table_names_slots_keys_and_bytes():
    pool = slotted()
    pool.register("own", 10, torch.float32)
    pool.acquire("a")
    table = pool.describe()
    assert "slot 0: 400 bytes, holds 'a', for ['a', 'c']" in table
    assert "own: 'own' 40 bytes, released" in table
    assert "800 bytes resident" in table
