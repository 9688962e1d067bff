"""The ledger's books against formulas, and its times against delays that the tests make."""

from __future__ import annotations

import contextlib
import dataclasses
import gzip
import importlib.util
import json
import threading
import time
from pathlib import Path

import pytest
import torch
import torch.distributed as dist
from torch.profiler import ProfilerActivity, profile

from lamina.collectives import (
    Ledger,
    all_gather_into,
    all_reduce_fp32,
    all_to_all,
    all_to_all_tokens,
    copy_to,
    gather_from,
    reduce_from,
    reduce_scatter_fp32,
    reduce_scatter_to,
    scatter_to,
    send_recv,
)
from lamina.collectives.call import collective
from lamina.collectives.engine import Span, all_reduce_small, broadcast, purpose, start_all_reduce
from lamina.collectives.transport.lanes import Call

DTYPES = [torch.float32, torch.bfloat16, torch.float64]

VIRTUAL = importlib.util.find_spec("lamina_virtual_gpu") is not None


def only(ledger: Ledger):
    (record,) = ledger.records
    return record


@pytest.mark.ranks(2, 3, 4)
@pytest.mark.parametrize("dtype", DTYPES)
def test_bytes_sent_are_the_formula_of_each_collective(dtype):
    group, rank, size = dist.group.WORLD, dist.get_rank(), dist.get_world_size()
    width, n = dtype.itemsize, 24
    piece, whole = torch.ones(n, dtype=dtype), torch.ones(n * size, dtype=dtype)
    splits = [[(i + 2 * j) % 4 for j in range(size)] for i in range(size)]  # i sends to j
    rows = torch.ones(sum(splits[rank]), 5, dtype=dtype)
    incoming = [splits[i][rank] for i in range(size)]
    arrived = torch.empty(sum(incoming), 5, dtype=dtype)
    cases = {
        "all_gather_into": (
            lambda: all_gather_into(whole, piece, group),
            (size - 1) * n * width,
        ),
        "reduce_scatter_fp32": (
            lambda: reduce_scatter_fp32(piece, whole.clone(), group),
            (size - 1) * n * width,
        ),
        "all_reduce_fp32": (
            lambda: all_reduce_fp32(whole, whole, group),
            2 * (size - 1) * n * width,
        ),
        "all_to_all": (
            lambda: all_to_all(
                arrived, rows, group, output_splits=incoming, input_splits=splits[rank]
            ),
            (sum(splits[rank]) - splits[rank][rank]) * 5 * width,
        ),
        "broadcast": (
            lambda: broadcast(piece, group, src=1),
            (size - 1) * n * width if rank == 1 else 0,
        ),
        "send_recv": (lambda: send_recv([piece, whole], group).wait(), (1 + size) * n * width),
    }
    for op, (call, expected) in cases.items():
        with Ledger() as ledger:
            call()
        record = only(ledger)
        assert (record.op, record.bytes) == (op, expected)
        assert (record.dtype, record.group_size) == (dtype, size)
        assert ledger.bytes() == ledger.bytes(op=op) == expected
        assert ledger.bytes(op="other") == 0


@pytest.mark.ranks(2, 3, 4)
def test_a_small_sum_of_integers_counts_what_a_ring_sends():
    # The backend's own: each rank passes on size - 1 pieces, and as many pieces of the sum.
    size = dist.get_world_size()
    with Ledger() as ledger:
        all_reduce_small([torch.ones(n, dtype=torch.int64) for n in (5, 6)], dist.group.WORLD)
    piece = {2: 6, 3: 4, 4: 3}[size]  # of 11 numbers
    record = only(ledger)
    assert (record.op, record.bytes) == ("all_reduce_small", (size - 1) * 2 * piece * 8)


@pytest.mark.ranks(2, 4)
def test_what_all_ranks_together_send_is_what_they_receive(ranks):
    # Uneven: the rank's own books differ, the sum over the ranks does not.
    group, rank, size = dist.group.WORLD, dist.get_rank(), dist.get_world_size()
    counts = [[i * j for j in range(size)] for i in range(size)]
    with Ledger() as ledger:
        all_to_all_tokens(
            torch.ones(sum(counts[rank]), 3),
            group,
            output_splits=[counts[r][rank] for r in range(size)],
            input_splits=counts[rank],
        )
        all_reduce_fp32(torch.ones(size + 1), torch.ones(size + 1), group)
    tokens = torch.tensor(ledger.bytes(op="all_to_all"))
    reduced = torch.tensor(ledger.bytes(op="all_reduce_fp32"))
    dist.all_reduce(tokens)
    dist.all_reduce(reduced)
    moved = sum(counts[i][j] for i in range(size) for j in range(size) if i != j)
    assert tokens.item() == moved * 3 * 4
    # Over NCCL pieces are equally large.
    numel = -(-(size + 1) // size) * size if ranks.backend == "nccl" else size + 1
    assert reduced.item() == 2 * (size - 1) * numel * 4


@pytest.mark.ranks(2, 4)
def test_regions_cost_what_tensor_parallelism_is_said_to_cost():
    group, size = dist.group.WORLD, dist.get_world_size()
    x = torch.ones(4 * size, 8, requires_grad=True)
    activation = x.numel() * 4
    with Ledger() as forward:
        y = reduce_from(copy_to(x, group) * 2, group)
    with Ledger() as backward:
        y.sum().backward()
    share = (size - 1) * activation // size
    assert forward.bytes() == backward.bytes() == 2 * share  # one all-reduce each
    part = scatter_to(x.detach(), group).requires_grad_()
    with Ledger() as forward:
        y = reduce_scatter_to(gather_from(part, group, grad="reduce_scatter") * 2, group)
    with Ledger() as backward:
        y.sum().backward()
    assert forward.bytes() == backward.bytes() == 2 * share  # a gather and a reduce-scatter each
    assert [r.op for r in forward.records] == ["all_gather_into", "reduce_scatter_fp32"]
    assert [r.op for r in backward.records] == ["all_gather_into", "reduce_scatter_fp32"]


@pytest.mark.ranks(2)
def test_the_axis_is_the_group_and_its_purpose_can_be_asked_for():
    weights = dist.new_group(group_desc="dp_shard:gather")
    grads = dist.new_group(group_desc="dp_shard:reduce")
    tensor = dist.new_group(group_desc="mesh_tp")  # as torch names the groups of a DeviceMesh
    with Ledger() as ledger:
        all_gather_into(torch.empty(8), torch.ones(4), weights)
        reduce_scatter_fp32(torch.empty(4), torch.ones(8), grads)
        reduce_from(torch.ones(4), tensor)
    assert [record.axis for record in ledger.records] == ["dp_shard", "dp_shard", "tp"]
    assert ledger.bytes(axis="dp_shard") == 32
    assert ledger.bytes(axis="dp_shard:gather") == 16
    assert ledger.bytes(axis="dp_shard", op="reduce_scatter_fp32") == 16
    assert ledger.bytes(axis="tp") == ledger.bytes() - 32 == 16


@pytest.mark.ranks(2)
def test_ledgers_nest_and_see_only_what_happens_inside_them():
    group = dist.group.WORLD
    with Ledger() as outer:
        reduce_from(torch.ones(2), group)
        with Ledger() as inner:
            broadcast(torch.ones(2), group)
        broadcast(torch.ones(2), group)
    broadcast(torch.ones(2), group)
    assert [r.op for r in outer.records] == ["all_reduce_fp32", "broadcast", "broadcast"]
    assert [r.op for r in inner.records] == ["broadcast"]
    both = outer.records[1], inner.records[0]
    for record in both:  # each reading asks the device's clock anew
        assert record.issued == pytest.approx(both[0].issued, abs=0.1)
    times = {"issued": 0.0, "finished": None, "waited": None}
    assert len({dataclasses.replace(record, **times) for record in both}) == 1
    with outer:  # once closed it may be opened again, and goes on
        broadcast(torch.ones(2), group)
    assert len(outer.records) == 4


@pytest.mark.ranks(2)
def test_an_error_inside_closes_the_ledger():
    ledger = Ledger()
    with pytest.raises(KeyError), ledger:
        raise KeyError
    broadcast(torch.ones(2), dist.group.WORLD)
    assert ledger.records == []
    with ledger, pytest.raises(RuntimeError, match="already open"), ledger:
        pass


@pytest.mark.ranks(2)
def test_models_on_two_threads_have_books_of_their_own():
    groups = [dist.new_group(group_desc=f"model{i}") for i in range(2)]
    ledgers: list[Ledger | None] = [None, None]
    both = threading.Barrier(2)

    def train(place: int) -> None:
        with Ledger() as ledger:
            both.wait()
            x = torch.ones(4, requires_grad=True)
            reduce_from(copy_to(x, groups[place]), groups[place]).sum().backward()
            both.wait()
        ledgers[place] = ledger

    threads = [threading.Thread(target=train, args=(place,)) for place in range(2)]
    with Ledger() as main:
        for thread in threads:
            thread.start()
        for thread in threads:
            thread.join()
    assert main.records == []
    for place, ledger in enumerate(ledgers):
        assert [record.axis for record in ledger.records] == [f"model{place}"] * 2


class Reenter(torch.autograd.Function):
    """Runs a backward inside a backward, `depth` times: beyond 60, torch moves to a new thread."""

    @staticmethod
    def forward(ctx, x, depth, group, threads):
        ctx.state = depth, group, threads
        return x.clone()

    @staticmethod
    def backward(ctx, gradient):
        depth, group, threads = ctx.state
        if depth == 0:
            threads.append(threading.get_ident())
            return reduce_from(gradient, group), None, None, None
        with torch.enable_grad():
            x = torch.ones(2, requires_grad=True)
            Reenter.apply(x, depth - 1, group, threads).sum().backward()
        return gradient, None, None, None


@pytest.mark.ranks(2)
def test_collectives_on_autograd_worker_threads_are_seen():
    threads: list[int] = []
    x = torch.ones(2, requires_grad=True)
    y = Reenter.apply(x, 80, dist.group.WORLD, threads)
    with Ledger() as ledger:
        y.sum().backward()
    assert threads != [threading.get_ident()]  # or the test shows nothing
    assert only(ledger).op == "all_reduce_fp32"


def wait_for(path: Path) -> None:
    deadline = time.monotonic() + 20
    while not path.exists():
        assert time.monotonic() < deadline
        time.sleep(0.002)


@pytest.mark.ranks(2, backend="gloo")  # on a GPU streams wait: tests/test_order.py
def test_a_collective_that_ends_before_its_wait_was_overlapped():
    group = dist.group.WORLD
    with Ledger() as ledger:
        pending = start_all_reduce(torch.ones(1000), group)
        assert not only(ledger).overlapped  # nobody knows yet
        deadline = time.monotonic() + 20
        while only(ledger).finished is None:  # noted by whoever finishes it, not by `wait`
            assert time.monotonic() < deadline
            time.sleep(0.005)  # compute
        assert only(ledger).waited is None
        pending.wait()
    record = only(ledger)
    assert record.asynchronous
    assert record.issued <= record.finished <= record.waited
    assert record.exposed == 0
    assert record.overlapped


@pytest.mark.ranks(2, backend="gloo")  # on a GPU streams wait: tests/test_order.py
def test_a_collective_waited_for_at_once_was_not_overlapped(tmp_path):
    group, rank = dist.group.WORLD, dist.get_rank()
    with Ledger() as ledger:
        if rank == 1:
            wait_for(tmp_path / "issued")
            time.sleep(0.5)  # keeps rank 0 waiting
        pending = start_all_reduce(torch.ones(1000), group)
        if rank == 0:
            (tmp_path / "issued").touch()
        pending.wait()
    record = only(ledger)
    if rank == 0:
        assert record.duration > 0.2
        assert record.exposed > 0.5 * record.duration
        assert not record.overlapped


@pytest.mark.ranks(2)
def test_a_synchronous_collective_is_exposed_from_end_to_end():
    with Ledger() as ledger:
        reduce_from(torch.ones(10), dist.group.WORLD)
    record = only(ledger)
    assert not record.asynchronous
    assert not record.overlapped
    assert record.exposed == record.duration > 0


@pytest.mark.ranks(2)
def test_a_call_in_flight_when_the_ledger_closes_still_gets_its_end(tmp_path):
    group, rank = dist.group.WORLD, dist.get_rank()
    if rank == 1:
        wait_for(tmp_path / "closed")
    with Ledger() as ledger:
        pending = start_all_reduce(torch.ones(4), group)
    if rank == 0:
        assert only(ledger).finished is None
        assert only(ledger).duration == 0
        assert "all_reduce_fp32" in ledger.table()
    (tmp_path / "closed").touch()
    pending.wait()
    assert only(ledger).finished is not None


@pytest.mark.ranks(2)
def test_the_table_adds_up():
    group = dist.new_group(group_desc="tp")
    with Ledger() as ledger:
        for _ in range(3):
            reduce_from(torch.ones(1000), group)
        broadcast(torch.ones(2), group)
    heading, first, *_, total = [line.split() for line in ledger.table().splitlines()]
    assert heading[:4] == ["axis", "op", "dtype", "calls"]
    assert first[:5] == ["tp", "all_reduce_fp32", "float32", "3", "12,000"]
    assert total[:3] == ["total", "4", f"{ledger.bytes():,}"]
    assert Ledger().table().splitlines()[-1].split()[:3] == ["total", "0", "0"]


@pytest.mark.ranks(2)
def test_the_trace_is_chrome_json_with_every_finished_call(tmp_path):
    rank = dist.get_rank()
    group = dist.new_group(group_desc="tp:gather")
    start = time.time()
    with Ledger() as ledger:
        pending = [start_all_reduce(torch.ones(500), group) for _ in range(3)]
        for one in pending:
            one.wait()
    path = ledger.trace(tmp_path / f"rank{rank}.json")
    events = json.loads(path.read_text())["traceEvents"]
    names = {e["name"]: e["args"]["name"] for e in events if e["ph"] == "M"}
    assert names == {"process_name": f"rank {rank}", "thread_name": "tp:gather"}
    begins = {e["id"]: e for e in events if e["ph"] == "b"}
    ends = {e["id"]: e for e in events if e["ph"] == "e"}
    assert len(begins) == len(ends) == 3
    for key, begin in begins.items():
        assert begin["name"] == ends[key]["name"] == "all_reduce_fp32"
        assert begin["cat"] == ends[key]["cat"]
        assert begin["pid"] == ends[key]["pid"] == rank
        assert begin["args"]["bytes"] == 2000
        assert start <= begin["ts"] * 1e-6 <= ends[key]["ts"] * 1e-6 <= time.time()


def test_the_trace_of_a_program_without_process_groups_is_rank_0s(tmp_path):
    with Ledger() as ledger:
        all_reduce_fp32(torch.ones(4), torch.ones(4), None)
    events = json.loads(ledger.trace(tmp_path / "alone.json").read_text())["traceEvents"]
    assert {event["pid"] for event in events} == {0}
    assert [e["args"]["name"] for e in events if e["name"] == "process_name"] == ["rank 0"]


def clocks_apart(path: Path, group: dist.ProcessGroup) -> float:
    """Trace a collective beside compute, check it, and return microseconds between clocks."""
    compute = Span()
    with profile(activities=[ProfilerActivity.CPU]) as profiler, Ledger() as ledger:
        before = purpose.set("blocks.0")
        pending = start_all_reduce(torch.ones(500), group)
        purpose.reset(before)
        compute.begin("forward of", "blocks.1")
        torch.ones(100, 100) @ torch.ones(100, 100)
        compute.end()
        pending.wait()
    assert [record.purpose for record in ledger.records] == ["blocks.0"]
    found = {
        (event["name"], event["ph"]): (event["ts"], event["ts"] + event.get("dur", 0))
        for event in json.loads(gzip.decompress(ledger.trace(path, profiler).read_bytes()))[
            "traceEvents"
        ]
        if event["ph"] in "Xbe"
    }
    name = "all_reduce_fp32 of blocks.0"
    issued, waited = found[f"{name} (tp:gather)", "X"], found[f"wait for {name} (tp:gather)", "X"]
    begin, _ = found[name, "b"]
    end, _ = found[name, "e"]
    span, product = found["forward of blocks.1", "X"], found["aten::mm", "X"]
    assert span[0] < product[0] < product[1] < span[1]
    assert begin < end
    return max(issued[0] - begin, begin - issued[1], end - waited[1])


@pytest.mark.ranks(2)
def test_a_profile_and_the_records_are_one_trace_that_says_what_collectives_are_for(tmp_path):
    group = dist.new_group(group_desc="tp:gather")
    path = tmp_path / f"rank{dist.get_rank()}.json.gz"
    # A busy machine may read one of the clocks late, though not each time.
    apart = min(clocks_apart(path, group) for _ in range(5))
    assert VIRTUAL or apart < 2000  # a virtual GPU has a clock of its own


def test_spans_are_not_named_where_no_profiler_records(monkeypatch):
    monkeypatch.setattr(collective, "record_function", None)
    open_one = Span()
    open_one.begin("forward of", "blocks.0")
    all_gather_into(torch.empty(4), torch.ones(4), None).wait()
    open_one.end()


class StandInEvent:
    """A CUDA timing event of a device whose clock is wrong by a minute."""

    device = torch.device("cuda", 0)

    def __init__(self, seconds: float | None = None, enable_timing: bool = True) -> None:
        self.seconds = seconds

    def record(self) -> None:
        self.seconds = time.perf_counter() + 60

    def synchronize(self) -> None:
        assert self.seconds is not None

    def elapsed_time(self, end: StandInEvent) -> float:
        return (end.seconds - self.seconds) * 1e3


def test_times_on_cuda_are_the_devices_moved_to_the_hosts_clock(monkeypatch):
    monkeypatch.setattr(torch.cuda, "Event", StandInEvent)
    monkeypatch.setattr(torch.cuda, "device", contextlib.nullcontext)
    now = time.perf_counter()
    monkeypatch.setattr(time, "perf_counter", lambda: now)  # a loaded machine loses no time then
    monkeypatch.setattr(time, "perf_counter_ns", lambda: int(now * 1e9))
    call = Call("all_gather_into", "tp", 2, torch.float32, 8, True, issued_ns=int((now - 1) * 1e9))
    call.device_events = [StandInEvent(now + seconds) for seconds in (59.5, 59.7, 59.6)]
    call.finish()  # the host was done with it at once
    ledger = Ledger()
    ledger.issued(call)
    record = only(ledger)
    assert record.issued == pytest.approx(now - 0.5, abs=0.001)
    assert record.waited == pytest.approx(now - 0.4, abs=0.001)
    assert record.finished == pytest.approx(now - 0.3, abs=0.001)
    assert record.exposed == pytest.approx(0.1, abs=0.001)


@pytest.mark.skipif(not torch.cuda.is_available(), reason="needs a GPU")
@pytest.mark.ranks(2, device="cuda")
def test_collectives_in_a_cuda_backward_are_seen_and_timed_on_the_device():
    group = dist.group.WORLD
    x = torch.ones(1 << 16, device="cuda", requires_grad=True)
    with Ledger() as ledger:
        y = reduce_from(x, group)
        copy_to(y, group).sum().backward()  # the all-reduce is issued on autograd's device thread
        pending = start_all_reduce(x, group)
        torch.cuda._sleep(10_000_000)
        pending.wait()
    assert [record.op for record in ledger.records] == ["all_reduce_fp32"] * 3
    for record in ledger.records:
        assert record.finished is not None
        assert 0 < record.duration < 10
