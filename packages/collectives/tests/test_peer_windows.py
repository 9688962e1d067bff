"""Sums and gathers of ranks that read each other's GPU memory, with stand-ins on a CPU.

The ranks are threads of one process, whose blocks are CPU tensors, so an address is an address.
The kernel runs in Triton's interpreter, which must be switched on before triton is imported.
"""

from __future__ import annotations

import os
import subprocess
import sys
import types

import pytest
import torch
import torch.distributed as dist

from lamina.collectives.engine import Int8Blocks, OrderedReduction, bytes_received, use_messages
from lamina.collectives.reduction import ordered
from lamina.collectives.transport import peer_windows
from lamina.collectives.transport.lanes import lane_of
from lamina.collectives.transport.peer_windows import PeerRoute, PeerWindow, open_window
from lamina.collectives.transport.transport import route_for

PROGRAM = """
import itertools, random, sys, threading, time
from concurrent.futures import ThreadPoolExecutor
import torch
from lamina.collectives.reduction import triton_sum
from lamina.collectives.reduction.summation import reference_sum
from lamina.collectives.transport.peer_windows import PeerRoute, PeerWindow

launch, kernel = triton_sum._launch, threading.Lock()  # the interpreter serves one thread

def one_at_a_time(*arguments):
    time.sleep(random.random() / 500)  # so that ranks are at different places
    with kernel:
        return launch(*arguments)

class Locked:
    def __init__(self, jitted):
        self.jitted = jitted
    def __getitem__(self, grid):
        def run(*arguments, **options):
            with kernel:
                self.jitted[grid](*arguments, **options)
        return run

triton_sum._launch, triton_sum.finish_kernel = one_at_a_time, Locked(triton_sum.finish_kernel)

class Memory:
    def __init__(self, blocks, barrier):
        self.blocks, self.wait = blocks, barrier
        self.buffer_ptrs = [block.data_ptr() for block in blocks]
    def get_buffer(self, rank, sizes, dtype, storage_offset=0):
        return self.blocks[rank].view(dtype)[storage_offset : storage_offset + sizes[0]]
    def barrier(self, channel=0, timeout_ms=0):
        self.wait.wait(60)

def on_threads(ranks, area, body):
    blocks = [torch.full((2 * area,), 255, dtype=torch.uint8) for _ in range(ranks)]
    memory = Memory(blocks, threading.Barrier(ranks))
    windows = [PeerWindow(block, memory, rank) for rank, block in enumerate(blocks)]
    with ThreadPoolExecutor(ranks) as pool:
        return list(pool.map(body, windows))

def summed(inputs, output, factor, accumulate):
    def body(window):
        kept = torch.empty((), dtype=torch.float64), torch.empty((), dtype=torch.bool)
        shard = output.clone()
        chunks = PeerRoute(window).collect(inputs[window.rank]).chunks()
        triton_sum.fused_sum(chunks, shard, factor, accumulate, kept)
        chunks.close()
        route, whole = PeerRoute(window), torch.empty(len(shard) * window.size, dtype=shard.dtype)
        route.gather(whole, shard)()
        return shard, kept, whole
    return body

cases = 0
for ranks, wire in itertools.product((2, 3, 4, 8), (torch.float32, torch.bfloat16)):
    piece, area = 2500, ranks * 1024 * wire.itemsize + 48  # three slices, the last one narrower
    generator = torch.Generator().manual_seed(cases)
    inputs = [torch.randn(ranks * piece, generator=generator).to(wire) for _ in range(ranks)]
    for each in inputs:
        each[::3] = -0.0
    output = torch.randn(piece, generator=generator)
    factor, accumulate = (None, False) if cases % 2 else (torch.tensor(1 / 3).item(), True)
    found = on_threads(ranks, area, summed(inputs, output, factor, accumulate))
    for rank, (shard, (norm, nonfinite), whole) in enumerate(found):
        pieces = [each[rank * piece : (rank + 1) * piece] for each in inputs]
        expected = output.clone()
        norm_of_it, _ = reference_sum(pieces, expected, factor, accumulate)
        assert torch.equal(shard.view(torch.uint8), expected.view(torch.uint8)), (ranks, wire)
        assert abs(norm / norm_of_it - 1) < 1e-13 and not nonfinite
        exact = torch.stack([each.double() for each in pieces])
        error = (shard - (exact.sum(0) * (factor or 1) + accumulate * output)).abs()
        assert (error <= 1e-6 * (exact.abs().sum(0) + output.abs() + 1e-30)).all()
        assert torch.equal(whole, torch.cat([each for each, _, _ in found]))
    cases += 1
print(cases, "cases")
"""


def test_sums_of_windows_have_the_bits_of_the_ordered_sum():
    """Oracles: the definition of the ordered sum for the bits, and fp64 for the value."""
    pytest.importorskip("triton")
    environment = {**os.environ, "TRITON_INTERPRET": "1"}
    run = subprocess.run(
        [sys.executable, "-c", PROGRAM], env=environment, capture_output=True, text=True
    )
    assert run.returncode == 0, run.stderr
    assert run.stdout == "8 cases\n"


class Alone:
    """The handle of a group whose other ranks show what this one does."""

    def __init__(self, block: torch.Tensor, ranks: int) -> None:
        self.block, self.buffer_ptrs, self.waits = block, [block.data_ptr()] * ranks, 0

    def get_buffer(self, rank, sizes, dtype, storage_offset=0):
        return self.block.view(dtype)[storage_offset : storage_offset + sizes[0]]

    def barrier(self, channel=0, timeout_ms=0):
        self.waits += 1


def test_a_gather_of_any_dtype_takes_one_wait_per_slice_and_no_memory_besides():
    block = torch.zeros(2 << 14, dtype=torch.uint8)
    for dtype in (torch.float64, torch.bfloat16, torch.float8_e4m3fn, torch.int8):
        memory = Alone(block, 3)
        window = PeerWindow(block, memory, rank=1)
        shard = torch.arange(20_000 // dtype.itemsize).to(dtype)
        whole = torch.empty(3 * len(shard), dtype=dtype)
        PeerRoute(window).gather(whole, shard)()
        assert torch.equal(whole.view(torch.uint8), shard.view(torch.uint8).repeat(3))
        assert memory.waits == 2


class Group:
    """As much of an NCCL group of GPUs as opening a window looks at."""

    group_desc, group_name = "dp", "dp"

    def __init__(self, ranks: int = 2) -> None:
        self.ranks = ranks

    def size(self):
        return self.ranks

    def rank(self):
        return 0

    def _get_backend(self, device):
        return types.SimpleNamespace(name=lambda: "nccl")


@pytest.fixture
def told(monkeypatch, caplog):
    """Ranks that all say what this one says, and memory that is this rank's own."""
    asked = []

    def shared_block(nbytes, device, group):
        asked.append(nbytes)
        block = torch.zeros(nbytes, dtype=torch.uint8)
        return block, Alone(block, group.size())

    monkeypatch.setattr(peer_windows, "AREA_BYTES", 1 << 16)
    monkeypatch.setattr(peer_windows, "shared_block", shared_block)
    monkeypatch.setattr(peer_windows, "_all_agree", lambda group, device, yes: yes)
    monkeypatch.setattr(peer_windows, "_reads_right", lambda window, device: True)
    caplog.set_level("INFO", logger=peer_windows.__name__)
    return types.SimpleNamespace(log=caplog, asked=asked)


CUDA = torch.device("cuda", 0)


def test_the_choice_is_made_once_and_logged(told):
    group = Group()
    for _ in range(2):
        open_window(group, CUDA)
    assert told.asked == [2 << 16]
    assert isinstance(lane_of(group).windows[CUDA], PeerWindow)
    (line,) = told.log.messages
    assert line == ("collectives (rank 0 of 2 in group 'dp'): its ranks read each other's memory")
    with pytest.raises(RuntimeError, match="already read each other's memory"):
        use_messages(group)


def test_ranks_that_cannot_read_each_other_exchange_messages_and_say_why(told, monkeypatch):
    def why(group):
        told.log.clear()
        open_window(group, CUDA)
        assert lane_of(group).windows[CUDA] is None
        (line,) = told.log.messages
        return line.partition("exchange messages: ")[2]

    assert why(Group(33)) == "it has 33 ranks, and windows serve 2 to 32"
    kept = Group()
    lane_of(kept).keep_to_messages()
    assert why(kept) == "use_messages() was called"
    monkeypatch.setattr(peer_windows, "_reads_right", lambda window, device: False)
    assert why(Group()) == "a trial read other values than the ranks had written"

    def refuse(*_):
        raise RuntimeError("no peer access")

    monkeypatch.setattr(peer_windows, "shared_block", refuse)
    assert why(Group()) == "torch gives no symmetric memory: no peer access"
    monkeypatch.setattr(peer_windows, "host_runs", lambda group: types.SimpleNamespace(run=1))
    assert why(Group()) == "it spans several hosts"


def test_what_a_window_reads_is_looked_at_before_it_is_used():
    block = torch.zeros(2 << 16, dtype=torch.uint8)
    window = PeerWindow(block, Alone(block, 2), rank=0)  # takes its own values for the other's
    assert not peer_windows._reads_right(window, torch.device("cpu"))


def test_what_a_sum_cannot_read_in_place_travels_as_before(monkeypatch):
    group, block = Group(), torch.zeros(2 << 16, dtype=torch.uint8)
    lane_of(group).windows[CUDA] = PeerWindow(block, Alone(block, 2), rank=0)
    assert isinstance(route_for(group, 4, 8, CUDA), PeerRoute)
    monkeypatch.setattr(ordered, "host_groups", lambda group: None)
    assert bytes_received(group, 8, torch.float32, CUDA) == 2 << 16
    for unequal_or_coded in ((4, 7), (4, 8, 1, False)):
        piece, total, *coded = unequal_or_coded
        route = route_for(group, piece, total, CUDA, *coded)
        assert not isinstance(route, PeerRoute)
        assert route.needs_scratch


@pytest.mark.ranks(2)
def test_codes_and_float64_are_not_read_in_place(monkeypatch):
    group, asked = dist.group.WORLD, []
    open_window(group, torch.device("cpu"))  # nothing to open
    open_window(None, CUDA)
    assert not lane_of(group).windows

    def recorded(*arguments):
        asked.append(arguments[5:])
        return route_for(*arguments)

    monkeypatch.setattr(ordered, "route_for", recorded)
    for dtype, codec in (
        (torch.bfloat16, None),
        (torch.float64, None),
        (torch.float32, Int8Blocks()),
    ):
        output, given = torch.empty(128, dtype=dtype), torch.ones(256, dtype=dtype)
        OrderedReduction(output, given, group, scatter=True, codec=codec)
    assert asked[::2] == [(True,), (False,), (False,)]
