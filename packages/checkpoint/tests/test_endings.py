"""How a job ends: the save that is being written completes, and no wait is without end."""

from __future__ import annotations

import gc
import os
import subprocess
import sys
import textwrap
import threading
import time
import warnings
import weakref
from types import SimpleNamespace

import pytest
import torch
import torch.distributed as dist

import lamina.checkpoint.save.writer as writer_module
from lamina.checkpoint import CheckpointManager
from lamina.checkpoint.save.phases import Phase, Phases
from lamina.checkpoint.save.saving import Background
from lamina.checkpoint.save.writer import in_threads
from lamina.collectives.engine import all_reduce_small
from lamina.mesh import init_distributed


@pytest.mark.ranks(2, init=False, reuse=False)
def test_the_save_that_is_being_written_completes_after_an_exception(ranks, tmp_path, monkeypatch):
    honest = writer_module.own_memory

    def slow(tensor):
        time.sleep(2.0)
        return honest(tensor)

    monkeypatch.setattr(writer_module, "own_memory", slow)

    def job():
        with init_distributed("gloo", soft_limit=3.0):
            manager = CheckpointManager(tmp_path, async_save=True, progress=False)
            manager.save(1, {"t": torch.full((1000,), 3.0)})
            if ranks.rank == 1:
                raise RuntimeError("planted: the batch is broken")
            all_reduce_small([torch.ones(1)], dist.group.WORLD)  # rank 1 does not come

    begun = time.monotonic()
    with pytest.raises(RuntimeError, match="planted: the batch is broken"):
        job()
    assert time.monotonic() - begun < 15
    assert not dist.is_initialized()
    state = {"t": None}
    assert CheckpointManager(tmp_path).restore(state) == 1
    assert torch.equal(state["t"], torch.full((1000,), 3.0))


def test_a_manager_that_is_dropped_is_gone_without_a_collection(tmp_path):
    """It holds process groups, whose sockets tell other ranks that this one has left."""
    gc.disable()
    try:
        manager = CheckpointManager(tmp_path, async_save=True, keep_last=1, progress=False)
        there = weakref.ref(manager)
        for step in (1, 2):
            manager.save(step, {"t": torch.ones(10)})
        manager.wait()
        assert manager.list() == [2]
        del manager
        assert there() is None
    finally:
        gc.enable()


def test_a_save_is_waited_for_as_long_as_it_makes_progress():
    background, end = Background(), threading.Event()

    def task():
        for _ in range(6):
            time.sleep(0.2)
            background.moved_at = time.monotonic()
        end.wait(20)

    background.start(task)
    begun = time.monotonic()
    assert not background.finish(0.5)
    assert time.monotonic() - begun > 1.2
    end.set()
    assert background.finish(5.0)


def test_a_save_without_progress_is_given_up_and_nothing_that_was_printed_is_lost():
    program = """
        import threading
        from lamina.checkpoint.save import saving

        saving._PATIENCE = 0.5
        background = saving.Background()
        background.words = lambda: "it waits for rank 1"
        background.start(threading.Event().wait)  # which nobody sets
        print("printed into a buffer")
    """
    command = [sys.executable, "-c", textwrap.dedent(program)]
    env = {name: value for name, value in os.environ.items() if name != "PYTHONUNBUFFERED"}
    ended = subprocess.run(command, env=env, capture_output=True, text=True, timeout=300)
    assert ended.returncode == 1
    assert "s: it is given up; it waits for rank 1" in ended.stderr
    assert ended.stdout == "printed into a buffer\n"


@pytest.mark.ranks(2)
def test_a_rank_waits_for_another_that_has_more_to_write(ranks, tmp_path, monkeypatch):
    honest = writer_module.own_memory

    def slow(tensor):  # one of the ranks writes the tensor, and the other has nothing to write
        time.sleep(2.5)
        return honest(tensor)

    monkeypatch.setattr(writer_module, "own_memory", slow)
    monkeypatch.setattr(writer_module, "_SLOW_DISK", 500)
    manager = CheckpointManager(tmp_path, async_save=True, progress=False)
    manager.save(1, {"t": torch.ones(1000)})
    assert manager._saver._background.finish(1.0)
    manager.close()
    assert manager.list() == [1]


@pytest.mark.ranks(2, init=False, reuse=False)
@pytest.mark.parametrize(
    ("late", "background", "words"),
    [
        ("prepare_local_plan", False, "the save of step 1 waits for the plan of rank 1"),
        ("write_data", True, "the save of step 1 waits for what is written by rank 1"),
        ("finish", False, "the save of step 1 waits for the first rank, which commits (rank 0)"),
    ],
)
def test_a_save_that_waits_names_the_phase_and_the_rank(
    ranks, tmp_path, monkeypatch, late, background, words
):
    honest = getattr(writer_module.Writer, late)

    def slow(*given, **named):
        time.sleep(3.0 if ranks.rank == 1 or late == "finish" else 0.0)
        return honest(*given, **named)

    with init_distributed("gloo"), warnings.catch_warnings(record=True) as caught:
        warnings.simplefilter("always")
        with CheckpointManager(tmp_path, progress=False) as earlier:
            earlier.save(0, {"t": torch.ones(1000)})
        monkeypatch.setattr(writer_module.Writer, late, slow)
        monkeypatch.setattr("lamina.checkpoint.save.phases._LIMIT", 0.5)
        monkeypatch.setattr("lamina.checkpoint.save.saving._PLANS", 0.0)
        monkeypatch.setattr(writer_module, "_SLOW_DISK", 1 << 40)
        manager = CheckpointManager(tmp_path, async_save=background, progress=False)
        manager.save(1, {"t": torch.ones(1000)})
        manager.close()
        told = [str(one.message) for one in caught if "the save of" in str(one.message)]
    waits = ranks.rank == (1 if late == "finish" else 0)
    assert any(words in text for text in told) == waits, told
    assert CheckpointManager(tmp_path).list() == [0, 1]


def test_a_rank_whose_own_word_is_late_does_not_wait_for_itself():
    phases = Phases(None, "checkpoints")
    phases._ranks, phases._rank, phases._saves, phases._step = [0, 1], 1, 1, 7
    planned = f"1 {Phase.PLANNED.value}"
    phases._watchdog = SimpleNamespace(say=lambda *_: None, said=lambda *_: {0: planned})
    phases.reach(Phase.PLANNED)
    words = "the save of step 7 waits for the first rank, which makes the directory (rank 0)"
    assert phases.words() == words


def test_a_program_that_ends_at_once_completes_a_save_in_several_threads(tmp_path):
    program = """
        import sys, time, torch
        from lamina.checkpoint import CheckpointManager
        from lamina.checkpoint.save.writer import Writer

        honest = Writer.write_data

        def late(self, *plan):
            time.sleep(1.0)
            return honest(self, *plan)

        Writer.write_data = late
        manager = CheckpointManager(sys.argv[1], async_save=True, threads=2)
        manager.save(1, {"a": torch.ones(9), "b": torch.ones(9)})
    """
    command = [sys.executable, "-c", textwrap.dedent(program), str(tmp_path)]
    ended = subprocess.run(command, capture_output=True, text=True, timeout=300)
    assert (ended.returncode, "failed" in ended.stderr) == (0, False), ended.stderr
    assert CheckpointManager(tmp_path).list() == [1]


def test_a_save_in_several_threads_completes_where_none_can_start(tmp_path, monkeypatch):
    """Python 3.12 starts none once it ends. The second of three threads is the first to fail."""
    begin, begun = threading.Thread.start, []

    def start(thread: threading.Thread) -> None:
        if thread.name == "save-file":
            begun.append(thread)
            if len(begun) > 1:
                raise RuntimeError("can't create new thread at interpreter shutdown")
        begin(thread)

    monkeypatch.setattr(threading.Thread, "start", start)
    state = {name: torch.full((9,), float(number)) for number, name in enumerate("abc")}
    with CheckpointManager(tmp_path, async_save=False, threads=3) as manager:
        manager.save(1, state)
        found = {name: torch.zeros(9) for name in state}
        manager.restore(found)
    assert len(begun) == 3
    assert all(torch.equal(found[name], state[name]) for name in state)


def test_an_error_in_one_thread_is_raised_once_all_have_ended():
    ended = []

    def fail() -> None:
        raise OSError("the disk is full")

    def go_on() -> None:
        time.sleep(0.2)
        ended.append(True)

    with pytest.raises(OSError, match="the disk is full"):
        in_threads([fail, go_on])
    assert ended == [True]
