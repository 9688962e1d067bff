"""Keys that may be live together never share a slot, and slots are few."""

from __future__ import annotations

from hypothesis import given, settings
from hypothesis import strategies as st

from lamina.buffers.engine import color_slots

from .pools import conflicts_of, live_sets


@st.composite
def runs(draw):
    """An order of use with prefetch and nesting, and sizes."""
    keys = [f"u{at}" for at in range(draw(st.integers(1, 8)))]
    order = draw(st.lists(st.sampled_from(keys), min_size=1, max_size=14))
    prefetch = draw(st.integers(0, 2))
    nesting = {}
    for at in range(1, len(keys)):  # a parent has a lower number: no circles
        if draw(st.booleans()):
            nesting[keys[at]] = keys[draw(st.integers(0, at - 1))]
    sizes = {key: draw(st.integers(0, 9)) for key in keys}
    return order, prefetch, nesting, sizes


@settings(max_examples=200, deadline=None)
@given(runs(), st.booleans())
def test_no_two_live_keys_share_a_slot(run, dedicated):
    order, prefetch, nesting, sizes = run
    graph = conflicts_of(order, prefetch=prefetch, nesting=nesting)
    plans = color_slots(sizes, graph, dedicated=dedicated)
    slot = {key: at for at, plan in enumerate(plans) for key in plan.keys}
    for live in live_sets(order, prefetch, nesting):
        slots = [slot[key] for key in live if key in slot]
        assert len(slots) == len(set(slots))
    assert sum(len(plan.keys) for plan in plans) == len(slot)
    for plan in plans:
        assert plan.nbytes == max(sizes[key] for key in plan.keys)
        assert dedicated or len(plan.keys) > 1
    again = color_slots(sizes, graph, dedicated=dedicated)
    assert plans == again


def test_a_chain_of_equal_units_needs_two_slots():
    order = [f"block{at}" for at in range(80)]
    plans = color_slots(dict.fromkeys(order, 10), conflicts_of(order))
    assert [plan.nbytes for plan in plans] == [10, 10]
    assert sum(len(plan.keys) for plan in plans) == 80


def test_unequal_units_share_by_size():
    sizes = {"a": 8, "b": 2, "c": 8, "d": 2, "e": 8}
    plans = color_slots(sizes, conflicts_of("abcde"))
    assert sorted(plan.nbytes for plan in plans) == [2, 8]


def test_a_unit_that_can_share_with_none_gets_no_slot_unless_asked():
    nesting = dict.fromkeys("abcd", "root")
    sizes = {"root": 100, **dict.fromkeys("abcd", 10)}
    graph = conflicts_of("abcd", nesting=nesting)
    assert all("root" not in plan.keys for plan in color_slots(sizes, graph))
    dedicated = color_slots(sizes, graph, dedicated=True)
    assert sorted(plan.nbytes for plan in dedicated) == [10, 10, 100]


def test_several_forwards_before_a_backward_conflict_as_the_whole_order_says():
    order = ["a", "b", "c", "a", "b", "c", "c", "b", "a", "c", "b", "a"]
    graph = conflicts_of(order)
    assert graph["c"] == {"a", "b"}  # the last unit's forward prefetches the next forward's first
    assert len(color_slots(dict.fromkeys("abc", 1), graph, dedicated=True)) == 3
