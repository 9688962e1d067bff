"""Streams are late, and in as unlucky an order as waits allow: a missing wait is a wrong number."""

from __future__ import annotations

import json
import os
import subprocess
import sys
import textwrap
from pathlib import Path
from typing import Any

import pytest

SEEDS = 20  # one of so many must show a fault

# What each fault is in a training step: `wait(name)` is a line that can be left out.
FAULTS = """
    import json, os, sys, torch
    import lamina_virtual_gpu as virtual_gpu
    torch.manual_seed(0)
    left_out = sys.argv[1]
    main, side = torch.cuda.current_stream(), torch.cuda.Stream()
    N = 1 << 10

    def wait(name, stream, other):
        if name != left_out:
            stream.wait_stream(other)

    def storage_is_reused_before_its_collective_ends():
        message = torch.full((N,), 3.0, device="cuda")
        out = torch.zeros(N, device="cuda")
        side.wait_stream(main)
        with torch.cuda.stream(side):
            out.copy_(message * 1.0)  # stands for a collective
        if left_out != "reuse":
            message.record_stream(side)
        del message
        torch.full((N,), 7.0, device="cuda")  # may get the same block
        main.wait_stream(side)
        return out

    def the_optimizer_waits_for_the_reduction():
        gradient, weight = torch.ones(N, device="cuda"), torch.zeros(N, device="cuda")
        side.wait_stream(main)
        with torch.cuda.stream(side):
            gradient.mul_(5.0)
        wait("optimizer", main, side)
        weight.sub_(gradient)
        main.wait_stream(side)
        return weight

    def a_prefetch_goes_into_a_free_slot():
        slot, weights = torch.full((N,), 2.0, device="cuda"), torch.full((N,), 9.0, device="cuda")
        side.wait_stream(main)
        backward = slot * 3.0
        wait("prefetch", side, main)
        with torch.cuda.stream(side):
            slot.copy_(weights)
        main.wait_stream(side)
        return backward

    def memory_is_freed_on_the_stream_that_used_it():
        out = torch.zeros(N, device="cuda")
        with torch.cuda.stream(side):
            scratch = torch.full((N,), 4.0, device="cuda")
        main.wait_stream(side)
        out.copy_(scratch * 1.0)
        if left_out != "free":
            side.wait_stream(main)
        del scratch
        with torch.cuda.stream(side):
            torch.full((N,), 8.0, device="cuda")
        main.wait_stream(side)
        return out

    def a_host_copy_is_read_when_it_has_ended():
        there, here = torch.full((N,), 6.0, device="cuda"), torch.zeros(N).pin_memory()
        here.copy_(there, non_blocking=True)
        done = torch.cuda.Event()
        done.record()
        if left_out != "host copy":
            done.synchronize()
        return here.clone()

    def pinned_memory_is_written_when_it_was_read():
        here, there = torch.full((N,), 6.0).pin_memory(), torch.zeros(N, device="cuda")
        there.copy_(here, non_blocking=True)
        if left_out != "staging":
            torch.cuda.current_stream().synchronize()
        here.fill_(1.0)
        return there

    CASES = {
        "reuse": (storage_is_reused_before_its_collective_ends, 3.0),
        "optimizer": (the_optimizer_waits_for_the_reduction, -5.0),
        "prefetch": (a_prefetch_goes_into_a_free_slot, 6.0),
        "free": (memory_is_freed_on_the_stream_that_used_it, 4.0),
        "host copy": (a_host_copy_is_read_when_it_has_ended, 6.0),
        "staging": (pinned_memory_is_written_when_it_was_read, 6.0),
    }
    wrong, races = [], {}
    for name, (case, wanted) in CASES.items():
        torch.cuda.synchronize()
        if not case().cpu().eq(wanted).all():
            wrong.append(name)
        races |= {name: virtual_gpu.races()} if virtual_gpu.races() else {}
        virtual_gpu.forget_races()
    print(json.dumps([wrong, races]))
"""
NAMES = ("reuse", "optimizer", "prefetch", "free", "host copy", "staging")


@pytest.fixture
def wrong(answer: Any) -> Any:
    """Run the cases with one wait left out, and return those whose numbers are wrong."""
    return lambda left_out, order, seed=0: answer(left_out, VGPU_COMPUTE=order, VGPU_SEED=seed)[0]


@pytest.fixture
def answer(tmp_path: Path) -> Any:
    """Run the cases with one wait left out; return the wrong ones, and the races of each."""
    path = tmp_path / "faults.py"
    path.write_text(textwrap.dedent(FAULTS))

    def run(left_out: str, **settings: object) -> tuple[list[str], dict[str, list[str]]]:
        env = {**os.environ, **{name: str(value) for name, value in settings.items()}}
        command = [sys.executable, str(path), left_out]
        answer = subprocess.run(command, env=env, capture_output=True, text=True, timeout=120)
        assert answer.returncode == 0, answer.stderr[-3000:]
        wrong, races = json.loads(answer.stdout.splitlines()[-1])
        return wrong, races

    return run


@pytest.mark.parametrize("order", ["at-once", "clock", "late"])
def test_a_program_with_all_its_waits_is_right_in_every_order(wrong, order):
    assert wrong("nothing", order) == []


def test_a_program_with_all_its_waits_is_right_under_an_adversary(wrong):
    assert [wrong("nothing", "adversarial", seed) for seed in range(5)] == [[]] * 5


def test_nothing_shows_a_missing_wait_where_all_is_done_at_once(wrong):
    assert wrong("optimizer", "at-once") == []


@pytest.mark.parametrize("name", NAMES)
def test_a_missing_wait_gives_a_wrong_number_under_some_seed(wrong, name):
    seed = next((seed for seed in range(SEEDS) if wrong(name, "adversarial", seed)), None)
    assert seed is not None, f"{name}: {SEEDS} seeds, and no wrong number"
    assert wrong(name, "adversarial", seed) == [name], "the seed gives the fault again"


# What the host reads and writes itself is not watched: the wrong number shows those.
OF_TWO_STREAMS = ("reuse", "optimizer", "prefetch", "free")


def test_streams_that_wait_for_each_other_do_not_race(answer):
    for order in ("at-once", "adversarial"):
        assert answer("nothing", VGPU_COMPUTE=order, VGPU_RACES="report") == ([], {})


@pytest.mark.parametrize("name", OF_TWO_STREAMS)
def test_a_missing_wait_is_a_race_in_every_order(answer, name):
    """It names both pieces of work, their streams and lines, and the memory."""
    for order in ("at-once", "adversarial"):
        _, races = answer(name, VGPU_COMPUTE=order, VGPU_SEED=7, VGPU_RACES="report")
        assert list(races) == [name]
        text = races[name][0]
        assert all(f"on stream {number} of device 0" in text for number in (0, 1))
        assert text.count(" in <module>") >= 2  # both were given by this program
        assert text.count("faults.py:") >= 5  # and so was the memory
        assert "VGPU_SEED=7 runs this order again" in text


RACES = """
    import json, torch
    import lamina_virtual_gpu as virtual_gpu
    main, side = torch.cuda.current_stream(), torch.cuda.Stream()
    whole = torch.zeros(64, 64, device="cuda")
    torch.cuda.synchronize()

    def on_both(here, there):
        with torch.cuda.stream(side):
            there()
        here()
        torch.cuda.synchronize()
        found = len(virtual_gpu.races())
        virtual_gpu.forget_races()
        return found

    graph = torch.cuda.CUDAGraph()
    with torch.cuda.graph(graph):
        whole[:32].add_(1)
    event = torch.cuda.Event()
    def waits_on_the_host():
        event.record(side)
        event.synchronize()
        whole.add_(1)
    print(json.dumps({
        "halves of rows": on_both(lambda: whole[:32].add_(1), lambda: whole[32:].add_(1)),
        "columns": on_both(lambda: whole[:, :32].add_(1), lambda: whole[:, 32:].add_(1)),
        "two readers": on_both(lambda: whole.sum(), lambda: whole.sum()),
        "one column": on_both(lambda: whole[:, :33].add_(1), lambda: whole[:, 32:].add_(1)),
        "a graph": on_both(graph.replay, lambda: whole[31].zero_()),
        "a graph of other rows": on_both(graph.replay, lambda: whole[32].zero_()),
        "the host waits": on_both(waits_on_the_host, lambda: whole.mul_(2)),
        "a copy": on_both(lambda: whole[:32].copy_(whole[32:]), lambda: whole[32:].fill_(2)),
    }))
"""


def test_a_race_is_of_the_same_bytes_and_of_one_that_writes(program):
    wanted = {
        "halves of rows": 0, "columns": 0, "two readers": 0, "one column": 1, "a graph": 1,
        "a graph of other rows": 0, "the host waits": 0, "a copy": 1,
    }  # fmt: skip
    assert program(RACES, VGPU_COMPUTE="at-once", VGPU_RACES="report") == wanted


def test_a_race_ends_the_streams_on_request(program):
    text = """
        import json, torch
        x, side = torch.zeros(9, device="cuda"), torch.cuda.Stream()
        with torch.cuda.stream(side):
            x.add_(1)
        try:
            torch.cuda.synchronize()
            print(json.dumps("went on"))
        except RuntimeError as error:
            print(json.dumps("launch failure" in str(error)))
        """
    assert program(text, VGPU_COMPUTE="at-once", VGPU_RACES="fail") is True


def test_a_copy_between_devices_comes_after_the_work_of_both(program):
    text = """
        import json, torch, lamina_virtual_gpu as virtual_gpu
        source = torch.zeros(64, device="cuda:0")
        there = torch.empty(64, device="cuda:1")
        there.fill_(1.0)
        source.fill_(2.0)
        there.copy_(source)
        print(json.dumps([there.sum().item(), len(virtual_gpu.races())]))
        """
    for seed in range(5):
        settings = {"VGPU_SEED": seed, "VGPU_RACES": "report", "VGPU_DEVICES": 2}
        assert program(text, VGPU_COMPUTE="adversarial", **settings) == [128.0, 0]


def test_a_graph_replays_its_work_with_the_addresses_of_its_capture(program):
    text = """
        import json, torch
        x, graph = torch.ones(4, device="cuda"), torch.cuda.CUDAGraph()
        with torch.cuda.graph(graph):
            y = (x * 2).sum()
            kept = torch.nn.functional.dropout(torch.ones(64, device="cuda"))
        answers, masks = [], set()
        for value in range(4):
            x.fill_(value)
            graph.replay()
            answers.append(y.item())
            masks.add(tuple(kept.tolist()))
        stale = torch.full((4,), 5.0, device="cuda")
        x.set_(stale)  # the graph knows nothing of it: it reads the memory of its capture
        graph.replay()
        print(json.dumps([answers, len(masks), y.item()]))
        """
    for order in ("at-once", "late", "adversarial"):
        assert program(text, VGPU_COMPUTE=order) == [[0.0, 8.0, 16.0, 24.0], 4, 24.0]


def test_a_graph_whose_input_was_freed_reads_what_lies_there_now(program):
    text = """
        import json, torch
        x, graph = torch.full((1000,), 3.0, device="cuda"), torch.cuda.CUDAGraph()
        torch.cuda.synchronize()
        with torch.cuda.graph(graph):
            y = x * 2
        place = x.data_ptr()
        del x
        other = torch.empty(1000, device="cuda")  # the allocator gives the same memory out again
        assert other.data_ptr() == place
        graph.replay()
        fresh = y[0].item()
        other.fill_(5.0)
        graph.replay()
        print(json.dumps([fresh, y[0].item()]))
        """
    assert program(text, VGPU_COMPUTE="at-once") == [6.0, 10.0]
    fresh, after = program(text, VGPU_COMPUTE="adversarial")
    assert (fresh != fresh, after) == (True, 10.0)  # under the adversary fresh memory is NaN


def test_memory_that_another_stream_gets_is_nan_until_it_is_written(program):
    text = """
        import json, torch
        side = torch.cuda.Stream()
        x = torch.ones(1000, device="cuda")
        place = x.data_ptr()
        with torch.cuda.stream(side):
            side.wait_stream(torch.cuda.default_stream())
            x.add_(1)
        x.record_stream(side)
        del x  # the block is free once the side stream has done its work
        torch.cuda.synchronize()
        again = torch.empty(1000, device="cuda")
        print(json.dumps([again.data_ptr() == place, bool(again.isnan().all())]))
        """
    assert program(text, VGPU_COMPUTE="adversarial") == [True, True]
    assert program(text, VGPU_COMPUTE="at-once") == [True, False]


def test_work_that_fails_late_ends_the_streams_with_its_name(program):
    text = """
        import json, torch
        x = torch.full((4,), 9, device="cuda")
        try:
            torch.ones(3, device="cuda")[x]
            torch.cuda.synchronize()
        except (IndexError, RuntimeError) as error:
            print(json.dumps(str(error).splitlines()[0]))
        """
    assert "launch failure" in program(text, VGPU_COMPUTE="late")
    assert "out of bounds" in program(text, VGPU_COMPUTE="at-once")


def test_a_forked_child_does_no_work_of_its_parent(program):
    # Its parent's memory is shared with other ranks, so work that it did as well would be done
    # twice there, and it would take the peers' messages from its parent.
    text = """
        import json, os, torch
        x = torch.zeros(1000, device="cuda")
        torch.cuda.synchronize()
        x.add_(1)
        event = torch.cuda.Event()
        event.record()
        reading, writing = os.pipe()
        if (child := os.fork()) == 0:
            asked = event.query()
            try:
                event.synchronize()
                x.sum().item()
            except RuntimeError as error:
                os.write(writing, json.dumps([asked, "CUDA" in str(error)]).encode())
            os._exit(0)
        os.close(writing)
        with open(reading) as said:
            answers = json.load(said)
        os.waitpid(child, 0)
        print(json.dumps([*answers, x.sum().item()]))
        """
    for order in ("at-once", "late", "adversarial"):
        assert program(text, VGPU_COMPUTE=order, VGPU_SHARE=1) == [False, True, 1000.0]
