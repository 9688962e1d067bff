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
from lamina.models.plan.record.step_record import Life, StepRecord

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


def test_states_that_the_first_update_makes_lie_where_the_next_step_wants_to():
    """They take the place of the first step's activations, and the second needs another."""
    record = StepRecord(
        lives=[
            Life(0, "weights", False, [(0, 100 * MIB)]),
            Life(0, "optimizer state", False, [(0, 60 * MIB)]),
            Life(1, "activations", True, [(1, 100 * MIB)], died=5),
        ],
        marks=[(6, "optimizer")],
        end=7,
    )
    assert reserved_for(record) == (100 + 100 + 100) * MIB
    assert reserved_for(record, workspaces=40 * MIB) == (100 + 100 + 100) * MIB


def test_storages_that_are_resized_take_and_give_back():
    record = StepRecord(
        lives=[
            Life(0, "gathered units", False, [(0, 0), (2, 50 * MIB), (4, 0)]),
            Life(4, "temporaries", False, [(4, 50 * MIB)], died=6),
        ],
        end=6,
    )
    assert reserved_for(record) == 50 * MIB


def test_a_plan_reserves_what_it_allocates_and_fragments():
    config = TransformerConfig(
        vocab_size=256, hidden_size=64, num_layers=10, num_heads=4, ffn_size=128
    )
    job = Job(config=config, ranks=2, batch=2, sequence=64)
    shallow, whole = plan(job), plan(job, whole=True)
    assert shallow.worst.extrapolated
    assert not whole.worst.extrapolated
    assert whole.allocated == shallow.allocated
    assert whole.reserved == reserved_for(whole.played[0].record, whole.worst.memory["workspaces"])
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
