"""Collectives in flight: they finish by themselves, keep what they need and report failures."""

from __future__ import annotations

import gc
import threading
import time
import types
import weakref
from datetime import timedelta

import pytest
import torch
import torch.distributed as dist
from torch.distributed import distributed_c10d

from lamina.collectives import all_gather_into, all_reduce_fp32, reduce_scatter_fp32
from lamina.collectives.call import collective
from lamina.collectives.call.collective import _EndOnDevice
from lamina.collectives.transport import lanes
from lamina.collectives.transport.lanes import Worker, lane_of
from lamina.collectives.transport.transport import BackendEnd
from lamina.mesh import ParallelLayout, init_distributed

LONG = 1 << 19


def until(condition, seconds: float = 10.0) -> bool:
    end = time.monotonic() + seconds
    while not condition():
        if time.monotonic() > end:
            return False
        time.sleep(0.005)
    return True


@pytest.mark.ranks(2, backend="gloo")  # on a GPU such a look is a race
@pytest.mark.parametrize("numel", [10, LONG])
def test_the_sum_runs_beside_the_caller_and_not_in_wait(numel):
    output = torch.zeros(numel)
    handle = reduce_scatter_fp32(output, torch.ones(2 * numel), dist.group.WORLD, async_op=True)
    assert until(lambda: bool((output == 2).all()))
    handle.wait()
    dist.barrier()


@pytest.mark.ranks(2)
def test_an_asynchronous_call_returns_before_its_peers_have_called():
    store = distributed_c10d._get_default_store()
    if dist.get_rank() == 1:
        store.wait(["rank 0 has returned"])  # a call that waited for its peers never would
    output = torch.empty(8)
    handle = all_reduce_fp32(output, torch.ones(8), dist.group.WORLD, async_op=True)
    if dist.get_rank() == 0:
        store.set("rank 0 has returned", "yes")
    handle.wait()
    assert torch.equal(output, torch.full((8,), 2.0))


@pytest.mark.ranks(2)
@pytest.mark.parametrize("numel", [100, LONG])
def test_callers_may_drop_tensors_and_handles_at_once(numel):
    group, rank = dist.group.WORLD, dist.get_rank()
    outputs = []
    for number in range(4):
        output = torch.empty(numel)
        whole = torch.full((2 * numel,), float(number + rank))
        handle = reduce_scatter_fp32(output, whole, group, async_op=True)
        outputs.append(output)
        del whole, handle  # nobody else holds the input, and nobody waits
        gc.collect()
        torch.full((2 * numel,), 1e9)  # would land in freed memory
    last = torch.empty(2)
    all_gather_into(last, torch.ones(1), group, async_op=True).wait()  # after all others
    dist.barrier()
    for number, output in enumerate(outputs):
        assert torch.equal(output, torch.full((numel,), 2.0 * number + 1))


@pytest.mark.ranks(2)
def test_sums_in_flight_into_one_output_are_made_in_the_order_of_issue():
    numbers = [2.0**24, 1.0, 1.0, -(2.0**24)]  # in fp32 every other order gives something else
    output = torch.zeros(1000)
    handles = [
        reduce_scatter_fp32(
            output,
            torch.full((2000,), number / 2),
            dist.group.WORLD,
            accumulate=number != numbers[0],
            async_op=True,
        )
        for number in numbers
    ]
    for handle in reversed(handles):
        handle.wait()
    assert torch.equal(output, torch.zeros(1000))


@pytest.mark.ranks(2)
def test_waiting_again_returns_at_once():
    handle = all_gather_into(torch.empty(2), torch.ones(1), dist.group.WORLD, async_op=True)
    handle.wait()
    handle.wait()


def test_a_failed_job_is_reported_by_every_wait_and_later_jobs_run():
    worker = Worker()

    def fail() -> None:
        raise RuntimeError("the peer died")

    done = []
    job, later = worker.submit(fail), worker.submit(lambda: done.append(1))
    for _ in range(2):
        with pytest.raises(RuntimeError, match="the peer died"):
            job.wait()
    later.wait()
    assert done == [1]


def test_a_worker_runs_jobs_in_order_and_leaves_no_thread_behind():
    worker, seen = Worker(), []
    jobs = [worker.submit(lambda n=n: seen.append(n)) for n in range(100)]
    for job in jobs:
        job.wait()
    assert seen == list(range(100))
    assert until(lambda: not worker.busy)
    worker.submit(lambda: seen.append(100)).wait()
    assert seen[-1] == 100


def test_workers_that_work_one_after_another_start_one_thread(monkeypatch):
    """torch keeps memory for ever of each thread that has waited for a message."""
    monkeypatch.setattr(lanes, "_idle", [])
    seen = set()
    for _ in range(50):
        worker = Worker()
        worker.submit(lambda: seen.add(threading.get_ident())).wait()
        gone = weakref.ref(worker)
        assert until(lambda: lanes._idle)
        del worker
        assert gone() is None, "an idle thread holds no worker"
    assert len(lanes._idle) == len(seen) == 1


class FakeEvent:
    """Stands for a CUDA event: notes which streams came after it."""

    def __init__(self) -> None:
        self.waited: list[str] = []

    def wait(self, stream: str) -> None:
        self.waited.append(stream)


@pytest.mark.parametrize("last", ["the job", "a job before", "a job after"])
def test_an_end_that_is_dropped_on_the_threads_of_its_lane_hangs_nobody(last):
    # As over gloo on a GPU, where whoever called keeps nothing and a job refers to the handle.
    worker, event, tensor = Worker(), FakeEvent(), torch.zeros(3)
    freed, owned = weakref.ref(tensor), {}
    begin = threading.Event()
    before = worker.submit(lambda: (begin.wait(10), last == "a job before" and owned.clear()))
    job = worker.submit(lambda: last == "the job" and owned.clear())
    after = worker.submit(lambda: last == "a job after" and owned.clear())
    call = types.SimpleNamespace(device_ended=None)
    owned["end"] = _EndOnDevice(call, event, "the caller's stream", job, (tensor,))
    del tensor
    begin.set()
    for one in (before, job, after):
        assert one.wait(5)
    assert until(lambda: event.waited == ["the caller's stream"])
    assert until(lambda: freed() is None)


@pytest.mark.parametrize("watched", [False, True])
def test_what_a_watchdog_asks_after_a_wait_keeps_no_output(watched, monkeypatch):
    """The backend's own end does, so an event takes its place; nobody else asks for one."""
    recorded = []
    event = types.SimpleNamespace(record=lambda: recorded.append("event"))
    monkeypatch.setattr(collective, "running_watchdog", lambda: object() if watched else None)
    monkeypatch.setattr(collective, "_event", lambda timed: event)
    backend = BackendEnd(None, torch.device("cuda"))
    call = types.SimpleNamespace(device_ended=backend)
    _EndOnDevice(call, backend, "the caller's stream", None, ()).forget()
    assert call.device_ended is (event if watched else None)
    assert recorded == ["event"] * watched


@pytest.mark.ranks(2)
def test_a_lane_belongs_to_a_group_and_dies_with_it():
    group = dist.new_group()
    lane = lane_of(group)
    assert lane_of(group) is lane
    assert lane_of(dist.group.WORLD) is not lane


@pytest.mark.ranks(2, backend="gloo")  # NCCL's watchdog ends the process instead
@pytest.mark.parametrize("used_before", [False, True])
def test_a_peer_that_does_not_come_is_an_error_at_the_groups_timeout(used_before):
    group = dist.new_group(timeout=timedelta(seconds=0.5))
    output = torch.empty(LONG)
    if used_before:
        reduce_scatter_fp32(output, torch.ones(2 * LONG), group)
    if dist.get_rank() == 0:
        with pytest.raises(RuntimeError, match=r"[Tt]imed out"):
            reduce_scatter_fp32(output, torch.ones(2 * LONG), group, async_op=True).wait()
    dist.barrier()


@pytest.mark.ranks(2)
@pytest.mark.parametrize("numel", [10, LONG])
def test_a_collective_leaves_no_reference_cycles(numel):
    """A cycle would hold tensors until the garbage collector comes by."""
    group = dist.group.WORLD
    whole, piece = torch.ones(2 * numel), torch.ones(numel)
    calls = [
        lambda: reduce_scatter_fp32(piece, whole, group),
        lambda: reduce_scatter_fp32(piece, whole, group, async_op=True).wait(),
        lambda: all_reduce_fp32(whole, whole, group),
        lambda: all_gather_into(whole, piece, group, async_op=True).wait(),
    ]
    for call in calls:
        call()  # the first call imports and caches
    gc.collect()
    gc.disable()
    gc.set_debug(gc.DEBUG_SAVEALL)  # to name what was in a cycle
    try:
        for call in calls:
            call()
            assert gc.collect() == 0, [f"{type(left)}: {left!r:.80}" for left in gc.garbage]
    finally:
        gc.set_debug(0)
        gc.garbage.clear()
        gc.enable()


@pytest.mark.ranks(2)
@pytest.mark.parametrize("async_op", [False, True])
def test_collectives_work_in_inference_mode_and_after_it(async_op):
    group = dist.group.WORLD
    for mode in (True, False, True):
        with torch.inference_mode(mode):
            for numel in (10, LONG):
                piece, whole = torch.empty(numel), torch.ones(2 * numel)
                reduce_scatter_fp32(piece, whole, group, async_op=async_op).wait()
                assert torch.equal(piece, torch.full((numel,), 2.0))
                all_gather_into(whole, piece, group, async_op=async_op).wait()
                all_reduce_fp32(whole, whole, group, async_op=async_op).wait()
                assert torch.equal(whole, torch.full((2 * numel,), 4.0))


@pytest.mark.ranks(2)
@pytest.mark.parametrize("async_op", [False, True])
def test_parameters_may_be_gathered_and_leave_no_graph(async_op):
    group = dist.group.WORLD
    shard = torch.nn.Parameter(torch.ones(10))
    whole = torch.empty(20)
    all_gather_into(whole, shard, group, async_op=async_op).wait()
    reduce_scatter_fp32(shard, whole, group, async_op=async_op).wait()
    assert not whole.requires_grad
    assert torch.equal(shard, torch.full((10,), 2.0))


@pytest.mark.ranks(2)
def test_a_default_device_does_not_move_what_collectives_allocate():
    group = dist.group.WORLD
    piece, whole = torch.empty(LONG), torch.ones(2 * LONG)
    with torch.device("meta"):
        handle = reduce_scatter_fp32(piece, whole, group, op="avg", scale=0.5)
        all_gather_into(whole, piece, group)
    assert handle.squared_norm == 0.25 * LONG
    assert torch.equal(whole, torch.full((2 * LONG,), 0.5))


@pytest.mark.ranks(2, backend="gloo")  # NCCL's watchdog ends the process instead
@pytest.mark.parametrize("asynchronous", [False, True])
def test_a_collective_that_fails_names_the_rank_that_has_left_and_why(
    asynchronous, ranks, monkeypatch
):
    # gloo notices late that the other rank has gone, whose process lives on here.
    monkeypatch.setattr("lamina.mesh.watching.watchdog._PATIENCE", 60.0)
    runtime = init_distributed()
    axis = ParallelLayout().build().axis("dp")
    whole, piece = torch.zeros(2), torch.ones(1)
    all_gather_into(whole, piece, axis.group)
    if ranks.rank == 1:
        runtime.__exit__(ValueError, ValueError("the batch is broken"), None)
        dist.destroy_process_group()
        return
    named = r"rank 1 \(dp_shard=1\) is gone: it ended with ValueError: the batch is broken"
    with runtime, pytest.raises(RuntimeError, match=named) as caught:
        gather_until_it_fails(whole, piece, axis.group, asynchronous)
    assert "all_gather_into (rank 0 of 2 in group" in str(caught.value)


def gather_until_it_fails(whole, piece, group, asynchronous):
    while True:
        all_gather_into(whole, piece, group, async_op=asynchronous).wait()
