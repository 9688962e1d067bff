"""Sums in slices: the bits of whole pieces, in memory that does not grow with the buffer."""

from types import SimpleNamespace

import pytest
import torch
import torch.distributed as dist

from lamina.collectives.engine import Int8Blocks, OrderedReduction, bytes_received
from lamina.collectives.reduction.ordered import message_bytes_on
from lamina.mesh import make_host_groups
from lamina_testing import Meter
from lamina_testing.simulated import simulated_world

from .test_hosts import SimulatedGroup, of_rank, on_threads, oracle

PIECE = 5 * 128 + 37  # a last slice that is narrower than the others


@pytest.mark.parametrize("wire", [torch.float32, torch.bfloat16], ids=str)
@pytest.mark.parametrize("ranks", [6, 16])
def test_slices_give_the_bits_of_the_tree(ranks, wire):
    """On one host, and over two hosts of 8, by a backend's all-to-all (here of threads)."""
    expected = oracle(ranks, ranks * PIECE, wire).view(ranks, PIECE)

    def body(group: SimulatedGroup) -> torch.Tensor:
        given, output = of_rank(group.rank(), ranks * PIECE, wire), torch.full((PIECE,), torch.nan)
        reduction = OrderedReduction(
            output, given, group, scatter=True, message_bytes=ranks * 128 * wire.itemsize
        )
        handle = reduction.start(output, given, async_op=False)
        first = output.clone()
        reduction.start(output, given, scale=0.5, accumulate=True, async_op=False)
        squares = torch.tensor([handle.squared_norm, handle.nonfinite], dtype=torch.float64)
        return torch.stack([first, output, squares.repeat(PIECE)[:PIECE].float()])

    for rank, (first, second, squares) in enumerate(on_threads(ranks, body)):
        assert torch.equal(first, expected[rank])
        assert torch.equal(second, expected[rank] + expected[rank] * 0.5)
        norm = expected[rank].double().square().sum()
        assert squares[:2].tolist() == [pytest.approx(norm.item(), rel=1e-6), 0]


@pytest.mark.ranks(1, init=False)
@pytest.mark.parametrize("hosts", [False, True])
def test_a_reduction_holds_what_the_formula_says_however_large_its_buffer_is(ranks, hosts):
    with simulated_world(16, hosts=hosts):
        group, message, found = dist.group.WORLD, 16 * 128 * 4, []
        if hosts:
            make_host_groups(group)
        for piece in (PIECE, 10 * PIECE, 100):  # the last one is smaller than a slice
            output, given = torch.zeros(piece), torch.ones(16 * piece)
            reduction = OrderedReduction(output, given, group, scatter=True, message_bytes=message)
            with Meter() as meter:
                before = meter.live_bytes()
                reduction.start(output, given, statistics=False, async_op=False)
            held = meter.peak_live_bytes - before
            said = bytes_received(group, given.numel(), torch.float32, given.device, message)
            assert held == said
            found.append(held)
        assert found[0] == found[1] > found[2]


@pytest.mark.ranks(1, init=False)
@pytest.mark.parametrize("hosts", [False, True])
@pytest.mark.parametrize("scatter", [False, True])
@pytest.mark.parametrize("codec", [None, Int8Blocks()], ids=["as-it-is", "int8"])
def test_all_reduces_and_codes_hold_what_the_formula_says(ranks, codec, scatter, hosts):
    """Partial sums between hosts count, and so do the codes that are sent and what they stand for.

    To encode takes memory of its own, before anything has arrived.
    """
    with simulated_world(16, hosts=hosts):
        group, piece = dist.group.WORLD, 8 * 128
        if hosts:
            make_host_groups(group)
        given = torch.ones(16 * piece)
        output = torch.zeros(piece if scatter else 16 * piece)
        reduction = OrderedReduction(output, given, group, scatter=scatter, codec=codec)
        how = {"scatter": scatter, "codec": codec}
        with Meter() as meter:
            before = meter.live_bytes()
            reduction.start(output, given, statistics=False, async_op=False)
        held = meter.peak_live_bytes - before
        said = bytes_received(group, given.numel(), torch.float32, given.device, **how)
        if codec is None:
            assert held == said
        else:
            assert said <= held <= said + 2 * given.nbytes


def test_on_a_gpu_three_messages_take_a_32nd_of_its_memory(monkeypatch):
    """So a unit of 2 GiB is one message on a GPU of 80."""
    memory = SimpleNamespace(total_memory=80 << 30)
    monkeypatch.setattr(torch.cuda, "get_device_properties", lambda device: memory)
    assert 3 * message_bytes_on(torch.device("cuda", 1)) == pytest.approx((80 << 30) / 32)
    assert message_bytes_on(torch.device("cpu")) == 32 << 20
