"""Streams carry virtual time: events order them, and waits move the host."""

from __future__ import annotations

from collections.abc import Callable

import pytest
import torch

import lamina_virtual_gpu as virtual_gpu

LONG = 1 << 26  # elements: tens of microseconds for an H100


def test_work_is_not_done_when_it_is_launched():
    x, done = torch.empty(LONG, device="cuda"), torch.cuda.Event()
    x.add_(1)
    done.record()
    assert not done.query()
    torch.cuda.synchronize()
    assert done.query()


def test_work_that_was_waited_for_is_done_however_sums_of_times_are_rounded():
    """The host's time is a sum of waits. torch asks once before it takes an elapsed time."""
    begin, end = (torch.cuda.Event(enable_timing=True) for _ in range(2))
    for number in range(40):
        begin.record()
        torch.cuda._sleep(int(100 * 2.55**number) + 6)
        end.record()
        torch.cuda.current_stream().synchronize()
        assert begin.elapsed_time(end) > 0


def test_a_stream_that_waits_ends_after_what_it_waits_for():
    x, y = (torch.empty(LONG, device="cuda") for _ in range(2))
    torch.cuda.synchronize()
    first, last, side = (
        *(torch.cuda.Event(enable_timing=True) for _ in range(2)),
        torch.cuda.Stream(),
    )
    first.record()
    x.add_(1)
    alone = torch.cuda.Event(enable_timing=True)
    alone.record()
    with torch.cuda.stream(side):
        side.wait_stream(torch.cuda.default_stream())
        y.add_(1)
        last.record()
    torch.cuda.synchronize()
    assert first.elapsed_time(last) > 1.9 * first.elapsed_time(alone)


def test_streams_without_a_wait_overlap():
    first, last, side = (
        *(torch.cuda.Event(enable_timing=True) for _ in range(2)),
        torch.cuda.Stream(),
    )
    cycles = 10_000_000  # some 5 ms, in which a kernel waits
    torch.cuda.synchronize()
    first.record()
    torch.cuda._sleep(cycles)
    with torch.cuda.stream(side):
        torch.cuda._sleep(cycles)
        last.record()
    torch.cuda.synchronize()
    assert first.elapsed_time(last) < 1.2 * cycles / 1.98e6


def test_a_program_that_polls_gets_an_end_and_is_recorded_as_one_that_waits():
    x, done = torch.empty(LONG, device="cuda"), torch.cuda.Event()
    x.add_(1)
    done.record()
    while not done.query():
        pass
    assert virtual_gpu.record().host_waits == {"polled cudaEventQuery": 1}


def test_a_program_that_polls_two_events_in_turn_gets_their_ends():
    events = []
    for _ in range(2):
        torch.cuda._sleep(10_000_000)
        events.append(torch.cuda.Event())
        events[-1].record()
    for _ in range(1_000):
        if all([event.query() for event in events]):  # noqa: C419 - each of them is asked
            return
    raise AssertionError("1,000 queries of two events, and they have not ended")


def test_pinned_memory_is_copied_without_a_wait_and_pageable_memory_is_not():
    pinned, pageable = torch.ones(1 << 20, pin_memory=True), torch.ones(1 << 20)
    assert pinned.is_pinned()
    virtual_gpu.reset()
    there = pinned.to("cuda", non_blocking=True)
    assert not virtual_gpu.record().host_waits
    pageable.to("cuda", non_blocking=True)
    record = virtual_gpu.record()
    assert "cudaMemcpyAsync host to device, pageable" in record.host_waits
    assert record.copies["host to device"] == [1, 1 << 22]
    back = torch.empty(1 << 20, pin_memory=True)
    back.copy_(there, non_blocking=True)
    torch.cuda.synchronize()
    assert back.sum().item() == 1 << 20


def test_the_same_program_takes_the_same_virtual_time(program):
    text = """
        import json, torch, lamina_virtual_gpu as virtual_gpu
        x = torch.randn(1000, 1000, device="cuda")
        for _ in range(5):
            x = x @ x
        torch.cuda.synchronize()
        print(json.dumps(virtual_gpu.now()))
    """
    assert program(text) == program(text)


class TestGraphs:
    def test_a_captured_graph_is_replayed_with_all_its_work(self):
        x, graph = torch.empty(1000, device="cuda"), torch.cuda.CUDAGraph()
        with torch.cuda.graph(graph):
            for _ in range(3):
                x = x * 2
        virtual_gpu.reset()
        graph.replay()
        record = virtual_gpu.record()
        assert (record.launches, record.replayed_launches) == (0, 3)

    def test_a_wait_within_a_capture_is_refused(self):
        with (
            pytest.raises(RuntimeError, match="capturing"),
            torch.cuda.graph(torch.cuda.CUDAGraph()),
        ):
            torch.ones(1, device="cuda").item()
        torch.ones(1, device="cuda").item()

    def test_work_that_was_forked_off_must_be_joined(self):
        side, x = torch.cuda.Stream(), torch.empty(8, device="cuda")

        def fork() -> None:
            with torch.cuda.graph(torch.cuda.CUDAGraph()):
                side.wait_stream(torch.cuda.current_stream())
                with torch.cuda.stream(side):
                    x.add_(1)

        with pytest.raises(RuntimeError, match="unjoined"):
            fork()

    def test_work_that_was_forked_off_and_joined_is_in_the_graph(self):
        side, x, graph = torch.cuda.Stream(), torch.empty(8, device="cuda"), torch.cuda.CUDAGraph()
        with torch.cuda.graph(graph):
            side.wait_stream(torch.cuda.current_stream())
            with torch.cuda.stream(side):
                x.add_(1)
            torch.cuda.current_stream().wait_stream(side)
        virtual_gpu.reset()
        graph.replay()
        assert virtual_gpu.record().replayed_launches == 1

    def test_a_replay_takes_as_long_as_the_same_work_on_its_streams(self):
        side, x = torch.cuda.Stream(), torch.empty(4096, 4096, device="cuda")
        pinned, copy = torch.empty(1 << 26).pin_memory(), torch.empty(1 << 26, device="cuda")

        def work() -> None:
            side.wait_stream(torch.cuda.current_stream())
            with torch.cuda.stream(side):
                copy.copy_(pinned, non_blocking=True)
            for _ in range(8):
                torch.mm(x, x)
            torch.cuda.current_stream().wait_stream(side)
            torch.mm(x, x)

        def seconds(act: Callable[[], None]) -> float:
            torch.cuda.synchronize()
            begun = virtual_gpu.now()
            act()
            torch.cuda.synchronize()
            return virtual_gpu.now() - begun

        graph = torch.cuda.CUDAGraph()
        with torch.cuda.graph(graph):
            work()
        assert seconds(graph.replay) == pytest.approx(seconds(work), rel=0.02)
        # The products and the copy go on at once, so both together take less than their sum.
        alone = seconds(lambda: copy.copy_(pinned, non_blocking=True))
        products = seconds(lambda: [torch.mm(x, x) for _ in range(9)])
        assert seconds(graph.replay) < 0.9 * (alone + products)

    def test_an_event_from_outside_cannot_be_waited_for_within(self):
        outside = torch.cuda.Event()
        outside.record()
        with (
            pytest.raises(RuntimeError, match="uncaptured work"),
            torch.cuda.graph(torch.cuda.CUDAGraph()),
        ):
            torch.cuda.current_stream().wait_event(outside)


def test_the_cuda_sanitizer_finds_a_planted_race(program):
    text = """
        import json, sys, torch
        x, side = torch.zeros(1000, device="cuda"), torch.cuda.Stream()
        try:
            with torch.cuda.stream(side):
                x.add_(1)
            x * 2
            print(json.dumps("no race"))
        except Exception as error:
            print(json.dumps(type(error).__name__))
    """
    assert program(text, TORCH_CUDA_SANITIZER=1) == "CUDASanitizerErrors"


def test_an_interrupt_while_work_is_done_reaches_the_program(program):
    """A kernel has no caller in Python that could take it, and the device goes on."""
    got = program(
        """
        import json, os, signal, time, torch
        from lamina_virtual_gpu.arithmetic.work import enqueue

        # A shell ignores the signal for what it starts in the background.
        signal.signal(signal.SIGINT, signal.default_int_handler)

        def interrupted():
            os.kill(os.getpid(), signal.SIGINT)
            time.sleep(5)

        x, seen = torch.ones(3, device="cuda"), False
        try:
            enqueue("interrupted", interrupted)
            torch.cuda.synchronize()
            time.sleep(5)
        except KeyboardInterrupt:
            seen = True
        print(json.dumps([seen, x.sum().item()]))
        """,
        VGPU_COMPUTE="at-once",
    )
    assert got == [True, 3.0]
