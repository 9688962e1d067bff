"""Delays keep results, hold up completion, and log what happened in order."""

from __future__ import annotations

import time

import pytest
import torch
import torch.distributed as dist

from lamina_testing import delayed_collectives, delays
from lamina_testing.parametrization import needs_torch

DELAY = 0.2


class Clock:
    """A clock in place of `time`, which only a sleep moves: no machine is too slow for it."""

    def __init__(self):
        self.now = 0.0

    def perf_counter(self):
        return self.now

    def sleep(self, seconds):
        self.now += seconds


def use_a_clock(monkeypatch):
    clock = Clock()
    monkeypatch.setattr(delays, "time", clock)
    return clock


@pytest.mark.ranks(2)
def test_a_blocking_collective_takes_the_delay_and_is_right(monkeypatch):
    clock = use_a_clock(monkeypatch)
    with delayed_collectives(DELAY) as log:
        total = torch.ones(8)
        dist.all_reduce(total)
    assert clock.now == DELAY
    assert total.tolist() == [2.0] * 8
    assert [(e.kind, e.name, e.number, e.size) for e in log.events] == [
        ("issue", "allreduce", 0, 32),
        ("finish", "allreduce", 0, 32),
    ]
    dist.all_reduce(total)
    assert clock.now == DELAY, "outside the block nothing is delayed"


@pytest.mark.ranks(2)
def test_a_delay_is_a_time_on_the_real_clock():
    with delayed_collectives(DELAY):
        begin = time.perf_counter()
        dist.all_reduce(torch.ones(8))
    assert time.perf_counter() - begin >= DELAY


@pytest.mark.ranks(2)
def test_issuing_is_not_delayed_but_completion_is(monkeypatch):
    clock = use_a_clock(monkeypatch)
    with delayed_collectives(DELAY) as log:
        works = [dist.all_reduce(torch.ones(4), async_op=True) for _ in range(3)]
        for work in works:  # gloo itself is done
            work.get_future().wait()
        assert clock.now == 0
        assert not any(work.is_completed() for work in works)
        clock.sleep(DELAY / 2)
        assert not any(work.is_completed() for work in works)
        log.mark("computed")
        for work in works:
            work.wait()
        assert clock.now == DELAY, "delays run side by side"
        assert all(work.is_completed() for work in works)
    first, second, third = log.issued("allreduce")
    assert log.in_order(third, log.marked("computed"))
    assert log.in_order(log.marked("computed"), log.finish_of(first))
    assert log.in_flight_at(log.marked("computed")) == [first, second, third]
    assert log.in_flight_at(log.finish_of(second)) == [second, third]


@needs_torch(2, 13, "gloo has no all_to_all of lists")
@pytest.mark.ranks(2)
@pytest.mark.filterwarnings("ignore:.*is deprecated:FutureWarning")
def test_every_kind_of_collective_is_logged(ranks):
    group = dist.new_group([0, 1], group_desc="pairs")
    two, four = torch.ones(2), torch.ones(4)
    other = 1 - ranks.rank
    with delayed_collectives(0.0) as log:
        dist.broadcast(two, 0, group=group)
        dist.all_to_all_single(two, two.clone(), group=group)
        dist.all_to_all([torch.ones(1), torch.ones(1)], [torch.ones(1)] * 2, group=group)
        dist.all_gather([two, two.clone()], two, group=group)
        dist.all_gather_into_tensor(four, two, group=group)
        dist.reduce_scatter_tensor(two, four, group=group)
        dist.reduce(two, 0, group=group)
        sending = dist.isend(two, group=group, group_dst=other)
        dist.recv(two, group=group, group_src=other)
        sending.wait()
        dist.barrier(group=group)
    assert len(log.issued()) == 10, log.table()
    assert {event.group for event in log.events} == {"pairs"}
    assert all(log.in_order(event, log.finish_of(event)) for event in log.issued())


@pytest.mark.ranks(2)
def test_names_imported_before_are_delayed_too():
    from torch.distributed import all_reduce

    with delayed_collectives(0.0) as log:
        all_reduce(torch.ones(1))
    assert len(log.issued()) == 1


def backward_with_buckets(overlap, log):
    """Three layers; gradients are summed as soon as they are there, or all at the end."""
    torch.manual_seed(0)
    layers = [torch.nn.Linear(8, 8, bias=False) for _ in range(3)]
    works = []

    def reduce(parameter):
        works.append(dist.all_reduce(parameter.grad, async_op=True))

    def finished(parameter):
        log.mark("backward of layer 0")

    layers[0].weight.register_post_accumulate_grad_hook(finished)
    if overlap:
        for layer in layers:
            layer.weight.register_post_accumulate_grad_hook(reduce)
    torch.nn.Sequential(*layers)(torch.ones(1, 8)).sum().backward()
    if not overlap:
        for layer in layers:
            reduce(layer.weight)
    for work in works:
        work.wait()


@pytest.mark.ranks(2)
@pytest.mark.parametrize("overlap", [True, False])
def test_overlap_shows_in_the_log_and_its_absence_too(overlap):
    with delayed_collectives(0.2) as log:
        backward_with_buckets(overlap, log)
    end = log.marked("backward of layer 0")
    assert len(log.in_flight_at(end)) == (2 if overlap else 0), log.table()
    assert log.in_order(log.issued()[0], end) is overlap


@pytest.mark.ranks(1)
def test_a_collective_nobody_waits_for_has_no_finish():
    with delayed_collectives(0.0) as log:
        work = dist.all_reduce(torch.ones(1), async_op=True)
    with pytest.raises(LookupError, match="allreduce number 0 was never waited for"):
        log.finish_of(log.issued()[0])
    with pytest.raises(LookupError, match="no mark 'x'"):
        log.marked("x")
    work.wait()
