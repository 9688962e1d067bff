"""Sums that know hosts: the bits of the flat tree, and fewer bytes and messages between hosts."""

from __future__ import annotations

import contextlib
import json
import sys
import threading
from collections.abc import Callable, Iterator
from datetime import timedelta
from typing import Any
from unittest import mock

import pytest
import torch
import torch.distributed as dist

from lamina.collectives import (
    DamagedMessageError,
    Ledger,
    all_gather_into,
    all_reduce_fp32,
    reduce_scatter_fp32,
)
from lamina.collectives.engine import Checksums, Int8Blocks, use_messages
from lamina.collectives.reduction import ordered
from lamina.collectives.reduction.codec import Wire
from lamina.mesh import ParallelLayout, make_host_groups
from lamina.mesh.engine import split_over_hosts
from lamina.mesh.groups.process_groups import default_store
from lamina_testing import device_type
from lamina_testing.netns import shaped_link, unavailable

WIRES = [torch.float32, torch.bfloat16]
PIECE = 3


class SimulatedGroup:
    """One rank of a group whose ranks are threads of this process, as a backend shows it."""

    def __init__(self, ranks: tuple[int, ...], rank: int, rooms: dict[Any, Room]) -> None:
        self.ranks, self._rank, self._rooms = ranks, rank, rooms
        rooms.setdefault("groups", []).append(self)  # torch holds its groups as well
        self.group_desc = self.group_name = str(ranks)

    def size(self) -> int:
        return len(self.ranks)

    def rank(self) -> int:
        return self._rank

    def name(self) -> str:
        return "simulated"

    def _get_backend(self, device: torch.device) -> SimulatedGroup:
        return self

    def everyone(self, tensor: torch.Tensor) -> list[torch.Tensor]:
        """What all ranks of the group pass; all of them call."""
        return self._rooms[self.ranks].meet(self._rank, tensor)


class Room:
    """Where the ranks of a group meet."""

    def __init__(self, size: int) -> None:
        self._given: list[Any] = [None] * size
        self._barrier = threading.Barrier(size)

    def meet(self, rank: int, tensor: torch.Tensor) -> list[torch.Tensor]:
        self._given[rank] = tensor.clone()
        self._barrier.wait()
        found = list(self._given)
        self._barrier.wait()
        return found


def host_groups(group: SimulatedGroup) -> tuple[SimulatedGroup, SimulatedGroup] | None:
    run = split_over_hosts(group.ranks, group.rank(), 8).run
    if run in (1, group.size()):
        return None
    host, place = divmod(group.rank(), run)
    near, far = group.ranks[host * run : (host + 1) * run], group.ranks[place::run]
    rooms = group._rooms
    return SimulatedGroup(near, place, rooms), SimulatedGroup(far, host, rooms)


def all_to_all(
    output: torch.Tensor,
    input: torch.Tensor,
    *splits: None,
    group: SimulatedGroup,
    async_op: bool,
) -> None:
    pieces = [given.view(group.size(), -1)[group.rank()] for given in group.everyone(input)]
    output.view(group.size(), -1).copy_(torch.stack(pieces))


def all_gather(
    output: torch.Tensor, input: torch.Tensor, group: SimulatedGroup, *, async_op: bool
) -> None:
    output.copy_(torch.cat(group.everyone(input)))


def on_threads(ranks: int, body: Callable[[SimulatedGroup], torch.Tensor]) -> list[torch.Tensor]:
    """What `body` returns on each rank of a simulated group with 8 ranks per host."""
    everyone, rooms = tuple(range(ranks)), {}
    for run in (1, 8, ranks):
        for begin in range(0, ranks, run):
            rooms[everyone[begin : begin + run]] = Room(run)
    for place in range(min(8, ranks)):
        rooms[everyone[place::8]] = Room(len(everyone[place::8]))
    found: list[Any] = [None] * ranks

    def run_rank(rank: int) -> None:
        found[rank] = body(SimulatedGroup(everyone, rank, rooms))

    with simulated_backend():
        threads = [threading.Thread(target=run_rank, args=(rank,)) for rank in range(ranks)]
        for thread in threads:
            thread.start()
        for thread in threads:
            thread.join()
    return found


@contextlib.contextmanager
def simulated_backend() -> Iterator[None]:
    transport = "lamina.collectives.transport.transport"
    threads = torch.get_num_threads()
    torch.set_num_threads(1)
    with (
        mock.patch.object(dist, "all_to_all_single", all_to_all),
        mock.patch(f"{transport}.all_gather_single", all_gather),
        mock.patch.object(ordered, "host_groups", host_groups),
    ):
        yield
    torch.set_num_threads(threads)


def of_rank(rank: int, numel: int, wire: torch.dtype) -> torch.Tensor:
    """Input of `rank`: large and small numbers of both signs, so that every order differs."""
    generator = torch.Generator().manual_seed(rank)
    numbers = torch.randn(numel, generator=generator)
    return (numbers * 10 ** torch.randint(-3, 4, (numel,), generator=generator)).to(wire)


def tree(rows: list[torch.Tensor]) -> torch.Tensor:
    """The tree of law 2 in plain PyTorch: split at the largest power of two below N."""
    if len(rows) == 1:
        return rows[0].float()
    split = 1
    while 2 * split < len(rows):
        split *= 2
    return tree(rows[:split]) + tree(rows[split:])


def oracle(ranks: int, numel: int, wire: torch.dtype) -> torch.Tensor:
    return tree([of_rank(rank, numel, wire) for rank in range(ranks)])


@pytest.mark.parametrize("wire", WIRES, ids=str)
@pytest.mark.parametrize("ranks", [24, 64, 96, pytest.param(1024, marks=pytest.mark.slow)])
def test_hosts_of_8_give_the_bits_of_the_flat_tree(ranks, wire):
    expected = oracle(ranks, ranks * PIECE, wire)

    def body(group: SimulatedGroup) -> torch.Tensor:
        output = torch.full((PIECE,), torch.nan)
        reduce_scatter_fp32(output, of_rank(group.rank(), ranks * PIECE, wire), group)
        return output

    assert torch.equal(torch.cat(on_threads(ranks, body)), expected)
    if ranks != 24:
        return
    numel = ranks * PIECE - 5  # an all-reduce pads

    def whole(group: SimulatedGroup) -> torch.Tensor:
        output = torch.full((numel,), torch.nan)
        all_reduce_fp32(output, of_rank(group.rank(), numel, wire), group)
        return output

    expected = oracle(ranks, numel, wire)
    assert all(torch.equal(each, expected) for each in on_threads(ranks, whole))


def with_hosts(monkeypatch: pytest.MonkeyPatch, per_host: int) -> dist.ProcessGroup:
    """A group of all ranks, which count as hosts of so many."""
    monkeypatch.setenv("LAMINA_RANKS_PER_HOST", str(per_host))
    group = dist.new_group(group_desc="dp")
    assert group is not None
    make_host_groups(group)
    return group


@pytest.mark.ranks(4)
@pytest.mark.parametrize("messages", [False, True])
@pytest.mark.parametrize("wire", WIRES, ids=str)
def test_two_hosts_of_two_ranks_give_the_bits_of_the_tree(monkeypatch, wire, messages):
    group, rank = with_hosts(monkeypatch, 2), dist.get_rank()
    if messages:
        use_messages(group)
    for piece in (5, 40_000):  # the second is read from the peer's memory
        expected = oracle(4, 4 * piece, wire)
        mine, whole = expected[rank * piece : (rank + 1) * piece], of_rank(rank, 4 * piece, wire)
        for async_op in (False, True):
            output = torch.full((piece,), torch.nan)
            with Ledger() as ledger:
                handle = reduce_scatter_fp32(output, whole, group, async_op=async_op)
                norm = handle.squared_norm
            assert norm.item() == pytest.approx(mine.double().square().sum().item(), rel=1e-12)
            assert torch.equal(output, mine)
            # Inside: both pieces of the neighbour's place. Between: a partial sum of one piece.
            assert ledger.bytes(between_hosts=False) == 2 * piece * wire.itemsize
            assert ledger.bytes(between_hosts=True) == 4 * piece
        reduce_scatter_fp32(output, whole, group, op="avg", accumulate=True)
        assert torch.equal(output, mine + mine * 0.25)


@pytest.mark.ranks(4)
def test_an_all_reduce_over_hosts_gathers_as_it_scattered(monkeypatch):
    group, rank = with_hosts(monkeypatch, 2), dist.get_rank()
    for numel in (0, 1, 4 * 5, 4 * 5 + 3):
        expected = oracle(4, numel, torch.float32)
        for accumulate in (False, True):
            output, piece = torch.ones(numel), -(-numel // 4)
            with Ledger() as ledger:
                all_reduce_fp32(
                    output, of_rank(rank, numel, torch.float32), group, accumulate=accumulate
                )
            assert torch.equal(output, 1 + expected if accumulate else expected)
            assert ledger.bytes(between_hosts=False) == 2 * 2 * piece * 4
            assert ledger.bytes(between_hosts=True) == 2 * piece * 4


@pytest.mark.ranks(6)
@pytest.mark.parametrize("messages", [False, True])
@pytest.mark.parametrize(("per_host", "run"), [(6, 6), (3, 1), (2, 2)])
def test_a_gather_sends_a_piece_to_another_host_once(monkeypatch, per_host, run, messages):
    group, rank = with_hosts(monkeypatch, per_host), dist.get_rank()
    if messages:
        use_messages(group)
    for numel in (0, 5, 40_000):  # the last is read from the peer's memory
        pieces = [of_rank(each, numel, torch.float32) for each in range(6)]
        whole, handles = torch.cat(pieces), []
        outputs = [torch.full((6 * numel,), torch.nan) for _ in range(3)]
        outputs[2][rank * numel : (rank + 1) * numel] = pieces[rank]
        own = outputs[2][rank * numel : (rank + 1) * numel]
        with Ledger() as ledger:
            for output, piece in zip(outputs, (pieces[rank], pieces[rank], own), strict=True):
                handles.append(all_gather_into(output, piece, group, async_op=True))
            for handle in handles:
                handle.wait()
        assert all(torch.equal(output, whole) for output in outputs)
        assert ledger.bytes() == 3 * 5 * numel * 4
        assert ledger.bytes(between_hosts=True) == 3 * (6 - per_host) // run * numel * 4


@pytest.mark.ranks(4)
def test_blocks_of_int8_have_the_same_bits_over_hosts(monkeypatch):
    flat, rank = dist.new_group(), dist.get_rank()
    whole = of_rank(rank, 4 * 128 * 3, torch.float32)
    expected, output = torch.empty(128 * 3), torch.empty(128 * 3)
    reduce_scatter_fp32(expected, whole, flat, codec=Int8Blocks())
    group = with_hosts(monkeypatch, 2)
    with Ledger() as ledger:
        reduce_scatter_fp32(output, whole, group, codec=Int8Blocks())
    assert torch.equal(output, expected)
    assert ledger.bytes(between_hosts=False) == 2 * 3 * (128 + 4)
    assert ledger.bytes(between_hosts=True) == 128 * 3 * 4


@pytest.mark.ranks(4, backend="gloo")  # the host looks at checksums
def test_a_flip_in_a_partial_sum_between_hosts_is_named(monkeypatch):
    flat, rank, piece = dist.new_group(), dist.get_rank(), 2048
    whole = of_rank(rank, 4 * piece, torch.bfloat16)
    expected, output = torch.empty(piece), torch.empty(piece)
    reduce_scatter_fp32(expected, whole, flat)
    group, honest, fault = with_hosts(monkeypatch, 2), Wire.encode, False

    def flipping(self, values, wire, piece):
        honest(self, values, wire, piece)
        if fault and rank == 3 and self.codec.dtype == torch.float32:  # a partial sum
            wire[8 + 5] ^= 1

    monkeypatch.setattr(Wire, "encode", flipping)
    with Ledger() as ledger:
        reduce_scatter_fp32(output, whole, group, codec=Checksums(torch.bfloat16))
    assert torch.equal(output, expected)
    assert ledger.bytes(between_hosts=True) == 2 * (8 + 4 * 1024)
    fault = True
    told = pytest.raises(DamagedMessageError, match=r"what rank 3 sent .* on rank 1:")
    with told if rank == 1 else contextlib.nullcontext():
        reduce_scatter_fp32(output, whole, group, codec=Checksums(torch.bfloat16))
    dist.barrier()


@pytest.mark.ranks(4, backend="gloo")  # NCCL's first call of a group waits for all its ranks
def test_hosts_may_begin_the_sums_of_two_groups_in_different_orders(monkeypatch):
    """No sum waits for ranks that have not begun it, the first of a group included."""
    monkeypatch.setenv("LAMINA_RANKS_PER_HOST", "2")
    axis, rank = ParallelLayout().build(device_type()).axis("dp_shard"), dist.get_rank()
    groups = [axis.group, axis.sibling("reduce")]
    known = len(dist.distributed_c10d._world.pg_map)
    if rank == 0:  # sums of tensors without data need nobody else
        planned = torch.empty(5, device="meta"), torch.empty(20, device="meta")
        reduce_scatter_fp32(*planned, axis.group)
        all_reduce_fp32(planned[1], planned[1], axis.group)
    outputs = [torch.full((PIECE,), torch.nan) for _ in groups]
    inputs = [of_rank(rank + 4 * at, 4 * PIECE, torch.float32) for at in range(2)]
    handles = [
        reduce_scatter_fp32(outputs[at], inputs[at], groups[at], async_op=True)
        for at in ((0, 1) if rank < 2 else (1, 0))
    ]
    for handle in handles:
        handle.wait()
    for at, output in enumerate(outputs):
        terms = [of_rank(each + 4 * at, 4 * PIECE, torch.float32) for each in range(4)]
        assert torch.equal(output, tree(terms)[rank * PIECE : (rank + 1) * PIECE])
    assert len(dist.distributed_c10d._world.pg_map) == known


@pytest.mark.ranks(4)
def test_a_group_without_groups_over_hosts_sums_in_one_exchange(monkeypatch):
    monkeypatch.setenv("LAMINA_RANKS_PER_HOST", "2")
    group, rank, output = dist.new_group(), dist.get_rank(), torch.empty(PIECE)
    with Ledger() as ledger:
        reduce_scatter_fp32(output, of_rank(rank, 4 * PIECE, torch.float32), group)
    expected = oracle(4, 4 * PIECE, torch.float32)
    assert torch.equal(output, expected[rank * PIECE : (rank + 1) * PIECE])
    assert ledger.bytes(between_hosts=True) == 2 * PIECE * 4


@pytest.mark.ranks(6)
@pytest.mark.parametrize(("per_host", "run"), [(6, 6), (3, 1), (2, 2)])
def test_hosts_that_are_no_power_of_two_sum_in_the_largest_runs_that_are(
    monkeypatch, per_host, run
):
    group, rank = with_hosts(monkeypatch, per_host), dist.get_rank()
    output = torch.empty(PIECE)
    with Ledger() as ledger:
        reduce_scatter_fp32(output, of_rank(rank, 6 * PIECE, torch.bfloat16), group)
    expected = oracle(6, 6 * PIECE, torch.bfloat16)
    assert torch.equal(output, expected[rank * PIECE : (rank + 1) * PIECE])
    flat = (6 - per_host) * PIECE * 2
    assert ledger.bytes(between_hosts=True) == (2 * PIECE * 4 if run == 2 else flat)
    inside = 3 * PIECE * 2 if run == 2 else 5 * PIECE * 2 - flat
    assert ledger.bytes(between_hosts=False) == inside


@pytest.mark.ranks(2, backend="gloo")  # the group that it makes
def test_a_group_that_torch_has_not_made_counts_as_one_host(monkeypatch):
    monkeypatch.setenv("LAMINA_RANKS_PER_HOST", "1")
    rank, kind = dist.get_rank(), dist.ProcessGroup.BackendType.GLOO
    store = dist.PrefixStore("mine", default_store())
    group = dist.ProcessGroup(store, rank, 2)
    backend = dist.ProcessGroupGloo(store, rank, 2, timedelta(seconds=20))
    group._register_backend(torch.device("cpu"), kind, backend)
    group._set_default_backend(kind)
    group._set_group_name("mine")
    group._set_group_desc("mine")
    output = torch.empty(PIECE)
    with Ledger() as ledger:
        reduce_scatter_fp32(output, of_rank(rank, 2 * PIECE, torch.float32), group)
    expected = oracle(2, 2 * PIECE, torch.float32)
    assert torch.equal(output, expected[rank * PIECE : (rank + 1) * PIECE])
    assert (ledger.bytes(), ledger.bytes(between_hosts=True)) == (PIECE * 4, 0)


PROGRAM = """
import json, time
from pathlib import Path
import torch
import torch.distributed as dist
from lamina.collectives import (
    DamagedMessageError,
    Ledger,
    all_gather_into,
    all_reduce_fp32,
    reduce_scatter_fp32,
)
from lamina.mesh import ParallelLayout, init_distributed
from lamina.mesh.engine import ranks_per_host

def counter():
    dist.barrier()
    time.sleep(0.3)
    return int(Path("/sys/class/net/veth0/statistics/tx_bytes").read_text())

with init_distributed(device="cpu") as runtime:
    group = ParallelLayout().build("cpu").axis("dp_shard").group
    whole = torch.ones(1 << 21, dtype=torch.bfloat16)
    piece, total = torch.empty(len(whole) // runtime.world_size), torch.empty(len(whole))
    reduce_scatter_fp32(piece, whole, group)
    before = counter()
    with Ledger() as ledger:
        reduce_scatter_fp32(piece, whole, group)
        all_reduce_fp32(total, whole, group)
        gathered = torch.empty(len(whole))
        all_gather_into(gathered, piece, group)
    counted = counter() - before
    right = all(bool((each == runtime.world_size).all()) for each in (piece, total, gathered))
    sent = ledger.bytes(between_hosts=True)
    print(json.dumps([ranks_per_host(), right, sent, counted]))
"""


@pytest.mark.slow
@pytest.mark.parametrize("namespaces", [2, 4])
def test_network_interfaces_count_the_bytes_between_hosts(namespaces):
    """Namespaces are hosts, which nobody has named: two ranks each, found by `init_distributed`."""
    problem = unavailable()
    if problem is not None:
        pytest.skip(problem)
    with shaped_link(bits_per_second=2 * 10**9, namespaces=namespaces) as link:
        outputs = link.run_ranks(
            [sys.executable, "-c", PROGRAM], ranks_per_namespace=2, timeout=150
        )
    partial = (namespaces - 1) * 4 * (1 << 21) // (2 * namespaces)  # of each rank, in fp32
    for output in outputs:
        per_host, right, sent, counted = json.loads(output.splitlines()[-1])
        assert (per_host, right) == (2, True)
        assert sent == 4 * partial  # two reductions, and two gathers of fp32 sums
        assert 1.0 <= counted / (2 * sent) < 1.06
