"""What a plan says that PyTorch's allocator reserves.

tests/virtual_gpu/test_allocator.py has random requests beside the allocator itself.
"""

from __future__ import annotations

from dataclasses import replace

import pytest

from lamina.models import TransformerConfig
from lamina.models.plan import Job, plan
from lamina.models.plan.preflight import complaints
from lamina.models.plan.record.allocator import CachingAllocator, reserved_for
from lamina.models.plan.record.step_record import Life, Operation, StepRecord

MIB = 1 << 20


@pytest.mark.parametrize(
    ("nbytes", "reserved"),
    [
        (1, 2 * MIB),
        (MIB, 2 * MIB),
        (MIB + 1, 20 * MIB),
        (10 * MIB - 512, 20 * MIB),
        (10 * MIB, 10 * MIB),
        (10 * MIB + 512, 12 * MIB),
    ],
)
def test_a_segment_has_the_size_that_its_first_request_asks_for(nbytes, reserved):
    allocator = CachingAllocator()
    allocator.take(nbytes)
    assert allocator.reserved == reserved


def test_a_free_block_serves_its_own_stream_and_joins_its_neighbours():
    allocator = CachingAllocator()
    blocks = [allocator.take(6 * MIB) for _ in range(3)]  # of one segment
    assert allocator.reserved == 20 * MIB
    for block in (blocks[0], blocks[2], blocks[1]):
        allocator.give_back(block)
    whole = allocator.take(20 * MIB - 512)
    assert allocator.reserved == 20 * MIB
    allocator.give_back(whole)
    allocator.take(2 * MIB, stream=1)
    assert allocator.reserved == 40 * MIB


def test_the_smallest_free_block_that_fits_is_taken():
    allocator = CachingAllocator()
    large, small = allocator.take(100 * MIB), allocator.take(60 * MIB)
    allocator.give_back(large)
    allocator.give_back(small)
    allocator.take(59 * MIB)
    allocator.take(100 * MIB)
    assert allocator.reserved == 160 * MIB


def again(life: Life) -> Life:
    """The life in the next record of what is still there."""
    return Life(0, life.category, False, [(0, life.sizes[-1][1])], earlier=life)


def test_states_that_the_first_update_makes_lie_where_the_next_step_wants_to():
    """They take the place of the first step's activations, and the second needs another."""
    weights = Life(0, "weights", False, [(0, 100 * MIB)])
    states = Life(6, "optimizer state", False, [(6, 60 * MIB)])
    activations = Life(1, "activations", True, [(1, 100 * MIB)], died=5)
    first = StepRecord(lives=[weights, activations, states], end=7)
    next_step = StepRecord(lives=[again(weights), again(states), activations], end=7)
    assert reserved_for(first, next_step) == (100 + 100 + 100) * MIB


def test_workspaces_come_first_or_where_the_first_products_are():
    """In the second case they lie in a hole, and nothing has to be reserved for them."""
    activations = Life(1, "activations", True, [(1, 100 * MIB)], died=3)
    first = StepRecord(lives=[activations], end=7)
    first.operations += [Operation("mm", at, back, 1.0, 0) for at, back in ((4, 0), (5, 1))]
    nothing = StepRecord(end=7)
    assert reserved_for(first, nothing, 40 * MIB) == (40 + 100) * MIB
    assert reserved_for(first, nothing, 40 * MIB, made_early=False) == 100 * MIB


def test_storages_that_are_resized_take_and_give_back():
    gathered = Life(0, "gathered units", False, [(0, 0), (2, 50 * MIB), (4, 0)])
    record = StepRecord(lives=[gathered, Life(4, "temporaries", False, [(4, 50 * MIB)], 6)], end=6)
    assert reserved_for(record, StepRecord()) == 50 * MIB


def test_what_a_step_leaves_is_given_back_by_the_next_one():
    """Gradients that the next backward replaces: there are two of them at no time."""
    made = Life(5, "gradients", False, [(5, 50 * MIB)])
    left = again(made)
    left.died = 2
    between = Life(3, "temporaries", False, [(3, 50 * MIB)], died=4)
    steady = StepRecord(lives=[left, between, Life(5, "gradients", False, [(5, 50 * MIB)])], end=6)
    assert reserved_for(StepRecord(lives=[made], end=6), steady) == 50 * MIB
    left.died = 6
    assert reserved_for(StepRecord(lives=[made], end=6), steady) == 100 * MIB


def test_a_plan_reserves_what_it_allocates_and_fragments():
    config = TransformerConfig(
        vocab_size=256, hidden_size=64, num_layers=10, num_heads=4, ffn_size=128
    )
    job = Job(config=config, ranks=2, batch=2, sequence=64)
    shallow, whole = plan(job), plan(job, whole=True)
    assert shallow.worst.extrapolated
    assert not whole.worst.extrapolated
    assert whole.allocated == shallow.allocated
    played, workspaces = whole.played[0], whole.worst.memory["workspaces"]
    assert whole.reserved == reserved_for(played.before, played.record, workspaces)
    assert whole.reserved == whole.allocated + whole.worst.fragments
    assert whole.margin == whole.machine.gpu.memory - whole.machine.costs.context - whole.reserved


def test_what_fits_but_for_its_fragments_is_said_so():
    config = TransformerConfig(
        vocab_size=256, hidden_size=64, num_layers=1, num_heads=4, ffn_size=128
    )
    planned = plan(Job(config=config, ranks=2, batch=2, sequence=64))
    for spare, words in ((0, "fits, with"), (-1, "but for the allocator's fragments")):
        gpu = replace(planned.machine.gpu, memory=planned.reserved + spare)
        costs = replace(planned.machine.costs, context=0)
        small = replace(planned, machine=replace(planned.machine, gpu=gpu, costs=costs))
        assert small.fits == (spare == 0)
        assert small.fits_unfragmented
        assert words in str(small)
        assert any("expandable_segments" in text for text in complaints(small)) == (spare < 0)
    gpu = replace(gpu, memory=planned.allocated - 1)
    none = replace(small, machine=replace(small.machine, gpu=gpu))
    assert not none.fits_unfragmented
    assert "fragments" not in str(none)
