"""Rings of any size, shift and number of tensors, and what they cost on the wire."""

from __future__ import annotations

import time
from pathlib import Path

import pytest
import torch
import torch.distributed as dist
import torch.nn.functional as F

from lamina.collectives import Ledger, send_recv
from lamina.collectives.engine import ring

SIZES = (1, 2, 3, 4, 5, 8)


def of_rank(rank: int, *shape: int) -> torch.Tensor:
    return torch.randn(shape, generator=torch.Generator().manual_seed(rank))


@pytest.mark.matrix(strength=1)
@pytest.mark.ranks(*SIZES)
@pytest.mark.parametrize("shift", [1, -1, 2])
def test_a_step_brings_the_tensors_from_shift_places_back(shift):
    group, rank, size = dist.group.WORLD, dist.get_rank(), dist.get_world_size()
    source = (rank - shift) % size
    for _ in range(3):
        one, two = send_recv([of_rank(rank, 3, 5), torch.tensor(rank)], group, shift).wait()
        assert torch.equal(one, of_rank(source, 3, 5))
        assert two.shape == ()
        assert two.item() == source


@pytest.mark.ranks(*SIZES)
@pytest.mark.parametrize("shift", [1, -1])
def test_a_ring_visits_every_rank_once_starting_at_this_one(shift):
    group, rank, size = dist.group.WORLD, dist.get_rank(), dist.get_world_size()
    origins = []
    for origin, (keys, values) in ring([of_rank(rank, 4), of_rank(rank, 2, 2)], group, shift):
        assert torch.equal(keys, of_rank(origin, 4))
        assert torch.equal(values, of_rank(origin, 2, 2))
        origins.append(origin)
    assert origins == [(rank - shift * step) % size for step in range(size)]


@pytest.mark.ranks(2, 3)
def test_messages_larger_than_any_socket_buffer_do_not_deadlock():
    group, rank = dist.group.WORLD, dist.get_rank()
    tensor = torch.full((4 << 20,), float(rank))  # 16 MiB
    for origin, (held,) in ring([tensor], group):
        assert torch.all(held == origin)


@pytest.mark.ranks(4)
def test_a_slow_rank_gets_its_tensors_unspoilt_by_the_fast_ones():
    group, rank = dist.group.WORLD, dist.get_rank()
    for turn in range(3):
        for origin, (held,) in ring([torch.full((1000,), float(10 * turn + rank))], group):
            if rank == turn:
                time.sleep(0.02)
            assert torch.all(held == 10 * turn + origin)


@pytest.mark.ranks(4)
def test_a_ring_holds_two_sets_of_buffers_and_leaves_the_first_tensors_alone():
    group, rank = dist.group.WORLD, dist.get_rank()
    mine = torch.full((8,), float(rank))
    addresses = [held.data_ptr() for _, (held,) in ring([mine], group)]
    assert addresses[0] == mine.data_ptr()
    assert addresses[1] == addresses[3] != addresses[2]
    assert torch.all(mine == rank)


@pytest.mark.ranks(2, backend="gloo")  # on a GPU streams wait: tests/test_order.py
def test_a_step_is_under_way_before_anyone_waits_for_it(tmp_path: Path):
    # Rank 1 does not wait for its step until rank 0 has seen rank 1's tensor arrive.
    group, rank = dist.group.WORLD, dist.get_rank()
    out = torch.full((3,), -1.0)
    pending = send_recv([torch.full((3,), float(rank))], group, out=[out])
    deadline = time.monotonic() + 20
    if rank == 0:
        while not torch.all(out == 1):
            assert time.monotonic() < deadline
        (tmp_path / "arrived").touch()
    else:
        while not (tmp_path / "arrived").exists():
            assert time.monotonic() < deadline
            time.sleep(0.005)
    assert torch.all(pending.wait()[0] == 1 - rank)


@pytest.mark.ranks(2)
@pytest.mark.parametrize(
    "dtype", [torch.bfloat16, torch.float16, torch.float8_e4m3fn, torch.uint16, torch.bool]
)
def test_any_dtype_and_any_strides_travel(dtype):
    group, rank = dist.group.WORLD, dist.get_rank()
    tensors = [torch.arange(12).view(3, 4).add(r).remainder(2).to(dtype).t() for r in range(2)]
    (received,) = send_recv([tensors[rank]], group).wait()
    assert torch.equal(received.view(torch.uint8), tensors[1 - rank].contiguous().view(torch.uint8))


@pytest.mark.ranks(2)
def test_shapes_may_differ_between_ranks_where_the_destination_is_given():
    group, rank = dist.group.WORLD, dist.get_rank()
    (received,) = send_recv([of_rank(rank, 2 + rank)], group, out=[torch.empty(3 - rank)]).wait()
    assert torch.equal(received, of_rank(1 - rank, 3 - rank))
    (received,) = send_recv([torch.ones(3 * rank)], group, out=[torch.empty(3 - 3 * rank)]).wait()
    assert torch.equal(received, torch.ones(3 - 3 * rank))


@pytest.mark.ranks(4)
def test_the_ledger_knows_what_a_ring_sends():
    rank = dist.get_rank()
    group = dist.new_group(group_desc="cp")
    keys, values = of_rank(rank, 6, 4).bfloat16(), of_rank(rank, 6, 4).bfloat16()
    with Ledger() as ledger:
        for _ in ring([keys, values], group):
            pass
    assert {(r.axis, r.op, r.dtype) for r in ledger.records} == {
        ("cp", "send_recv", torch.bfloat16)
    }
    assert [r.bytes for r in ledger.records] == [2 * 24 * 2] * 3
    assert all(r.finished is not None for r in ledger.records)


@pytest.mark.ranks(2, 4)
def test_ring_attention_is_attention_over_the_whole_sequence_without_a_gather():
    group, rank, size = dist.group.WORLD, dist.get_rank(), dist.get_world_size()
    q, k, v = (of_rank(i, 1, 2, 4 * size, 8).double() for i in range(3))
    expected = F.scaled_dot_product_attention(q, k, v).chunk(size, 2)[rank]
    mine, total, maximum = q.chunk(size, 2)[rank], 0.0, torch.tensor(-torch.inf)
    weights = torch.zeros(1, 2, 4, 1, dtype=torch.float64)
    with Ledger() as ledger:
        for _, (keys, values) in ring([k.chunk(size, 2)[rank], v.chunk(size, 2)[rank]], group):
            scores = mine @ keys.mT / 8**0.5
            peak = torch.maximum(maximum, scores.amax(-1, keepdim=True))
            old, new = torch.exp(maximum - peak), torch.exp(scores - peak)
            total, weights, maximum = (
                total * old + new @ values,
                weights * old + new.sum(-1, keepdim=True),
                peak,
            )
    torch.testing.assert_close(total / weights, expected)
    assert {record.op for record in ledger.records} == {"send_recv"}


def test_group_none_gives_copies():
    tensor = torch.arange(4.0)
    (received,) = send_recv([tensor], None).wait()
    assert torch.equal(received, tensor)
    assert received.data_ptr() != tensor.data_ptr()
    assert [(origin, held[0] is tensor) for origin, held in ring([tensor], None)] == [(0, True)]


@pytest.mark.ranks(4)
def test_what_does_not_fit_is_refused():
    group, tensor = dist.group.WORLD, torch.zeros(4)
    with pytest.raises(TypeError, match=r"not one tensor of shape \(4,\); write \[tensor\]"):
        send_recv(tensor, group)
    with pytest.raises(ValueError, match="nothing to send"):
        send_recv([], group)
    with pytest.raises(ValueError, match="`out` has 2 tensors, but 1 are sent"):
        send_recv([tensor], group, out=[tensor, tensor])
    with pytest.raises(ValueError, match=r"out\[0\] must be contiguous and torch.float32"):
        send_recv([tensor], group, out=[torch.zeros(4, dtype=torch.float64)])
    with pytest.raises(ValueError, match="share memory"):
        send_recv([tensor], group, out=[tensor])
    with pytest.raises(ValueError, match="divisor 2 in common with the 4 ranks"):
        next(ring([tensor], group, 2))


@pytest.mark.ranks(64, backend="fake")
def test_rings_run_on_the_fake_backend():
    origins = [origin for origin, _ in ring([torch.zeros(4)], dist.group.WORLD)]
    assert sorted(origins) == list(range(64))
