"""Pooled storage comes back where views expect it, within its budget, and never mixes owners."""

from __future__ import annotations

import gc

import pytest
import torch
from hypothesis import given, settings
from hypothesis import strategies as st
from torch import nn

from lamina.buffers import BufferLayout, StaleStorageError, StoragePool, TensorSpec

from .pools import address, conflicts_of, has_own_block, pool_of, slotted


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
    assert "a" not in pool.live_keys()
    assert pool.acquire("a") is first
    assert "a" in pool.live_keys()


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
    assert pool.bytes_peak == 800


@settings(max_examples=60, deadline=None)
@given(st.lists(st.tuples(st.sampled_from("abcde"), st.booleans()), max_size=60), st.data())
def test_content_of_live_keys_survives_any_order_of_use(events, data):
    """Oracle: a dictionary of what was written. Slots are planned for another order on purpose."""
    pool = StoragePool(mode="slots", poison=data.draw(st.booleans()))
    sizes = dict(zip("abcde", (5, 9, 3, 9, 1), strict=True))
    for key, numel in sizes.items():
        pool.register(key, numel, torch.float32)
    pool.plan_slots(conflicts_of("abcde"))
    slots, written = pool.bytes_resident, dict[str, float]()
    for step, (key, take) in enumerate(events):
        if take and key not in written:
            pool.acquire(key).fill_(float(step))
            written[key] = float(step)
        elif not take:
            pool.release(key)
            written.pop(key, None)
        elif step % 7 == 0 and not written:
            pool.plan_slots()
            slots = pool.bytes_resident
        for live, value in written.items():
            assert bool((pool.tensor(live) == value).all())
            assert pool.owner_of(pool.tensor(live)) == live
        assert pool.live_keys() == tuple(sorted(written))
        places = {pool.tensor(live).data_ptr() for live in written}
        assert len(places) == len(written)
        own = [live for live in written if has_own_block(pool, live)]
        assert pool.bytes_resident == slots + 4 * sum(sizes[live] for live in own)


def test_a_taken_slot_makes_its_key_fall_back_to_its_own_storage():
    pool = slotted()
    assert address(pool, "a") == address(pool, "c")
    pool.acquire("a").fill_(1.0)
    epoch, slot = pool.epoch("c"), pool.tensor("c").data_ptr()
    taken = pool.acquire("c")
    taken.fill_(2.0)
    assert pool.tensor("a").sum() == 100
    assert taken.data_ptr() != slot
    assert has_own_block(pool, "c")
    assert pool.epoch("c") == epoch + 1
    pool.release("a")
    pool.release("c")
    # The conflict was seen: the next plan keeps the two apart.
    pool.plan_slots(conflicts_of("abcd"), dedicated=True)
    assert address(pool, "a") != address(pool, "c")


def test_planning_again_moves_only_what_it_must():
    pool = slotted()
    kept = {key: pool.tensor(key) for key in "abcd"}
    assert pool.plan_slots(conflicts_of("abcd")) == set()
    assert all(pool.tensor(key) is tensor for key, tensor in kept.items())
    moved = pool.plan_slots({"a": "bcd", "b": "cd", "c": "d"}, dedicated=True)
    assert moved
    assert len({address(pool, key) for key in "abcd"}) == 4
    assert not any(has_own_block(pool, key) for key in "abcd")
    for key in "abcd":
        assert (pool.tensor(key) is kept[key]) == (key not in moved)


def test_slots_are_not_moved_under_a_live_key():
    pool = slotted()
    pool.acquire("a")
    with pytest.raises(RuntimeError, match=r"\['a'\] are live in slots: release"):
        pool.plan_slots({"a": "b"})
    pool = pool_of("ab", mode="slots")
    tensor = pool.acquire("a")
    assert "a" not in pool.plan_slots(conflicts_of("ab"), dedicated=True)
    assert pool.tensor("a") is tensor
    with pytest.raises(ValueError, match="mode='slots'"):
        pool_of().plan_slots()


def test_poisoned_storage_reads_as_nan_in_every_dtype():
    for dtype in (torch.float64, torch.float32, torch.bfloat16, torch.float16, torch.float8_e4m3fn):
        for mode in ("resize", "slots"):
            pool = StoragePool(mode=mode, poison=True)
            for key in "abcd":
                pool.register(key, 8, dtype)
            if mode == "slots":
                pool.plan_slots(conflicts_of("abcd"))
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
    pool.unregister("a")
    assert "a" not in pool
    assert pool.keys() == ()


def test_empty_units_are_keys_as_well():
    pool = StoragePool(mode="slots")
    pool.register("none", 0, torch.float32)
    pool.plan_slots()
    assert pool.acquire("none").numel() == 0
    assert "none" in pool.live_keys()
    pool.release("none")


def test_storage_is_never_made_in_inference_mode():
    weight = {}
    with torch.inference_mode():
        pool = StoragePool(mode="slots")
        pool.register("a", 4, torch.float32)
        pool.register("b", 4, torch.float32)
        pool.plan_slots(conflicts_of("ac"))
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
    assert sum(storage.nbytes() for storage in {s._cdata: s for s in storages}.values()) == 800
    for key in "abcd":
        pool.unregister(key)
    pool.mode = "slots"
    pool.plan_slots()
    assert pool.bytes_resident == 0
    del pool
    gc.collect()
    assert all(storage.nbytes() == 0 for storage in storages)


def test_the_table_names_slots_keys_and_bytes():
    pool = slotted()
    pool.register("own", 10, torch.float32)
    pool.acquire("a")
    table = pool.describe()
    assert "slot 0: 400 bytes, holds 'a', for ['a', 'c']" in table
    assert "own: 'own' 40 bytes, released" in table
    assert "800 bytes resident" in table
