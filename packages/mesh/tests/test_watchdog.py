"""Who is gone and who waits for whom: what the watchdog of each rank tells."""

from __future__ import annotations

import os
import socket
import subprocess
import threading
import time
from collections import Counter
from dataclasses import replace
from pathlib import Path

import pytest
import torch
import torch.distributed as dist
from torch.distributed import HashStore  # type: ignore[attr-defined]
from torch.overrides import TorchFunctionMode

import lamina.mesh
from lamina.mesh import init_distributed
from lamina.mesh.engine import Activity, Wait, running_watchdog
from lamina.mesh.watching.waits import _FOREIGN, Report, verdict
from lamina.mesh.watching.watchdog import Watchdog


def eventually(condition, seconds=50.0):
    end = time.monotonic() + seconds
    while not condition():
        assert time.monotonic() < end, "it did not happen"
        time.sleep(0.05)


def wait(what="gather of blocks.3", number=7, ranks=(0, 1, 2, 3)):
    return Wait(what, "dp_shard:gather", number, 31.0, ranks)


def report(rank, *waits, at="train.py:5 in loop", idle=31.0):
    return Report(f"rank {rank} (dp_shard={rank})", at, idle, waits, (), ["stack\n"])


def test_a_verdict_names_who_is_in_no_collective_and_where():
    reports = {rank: report(rank, wait()) for rank in range(3)}
    reports[3] = report(3, at="data.py:88 in load")
    told = verdict(reports, {})
    words, details = told.words, told.details
    assert not told.hopeless  # rank 3 may still come
    assert "rank 3 (dp_shard=3) is in none of Lamina's collectives for 31 s: it is at " in words
    assert "it is at data.py:88 in load" in words
    assert "3 ranks (0-2) wait for 31 s in gather of blocks.3" in words
    assert "(rank 0 at train.py:5 in loop), to which rank 3 did not come" in words
    assert details.count("stack") == 4


def test_a_verdict_names_ranks_that_make_different_calls_and_those_that_are_stopped():
    there = report(1, wait("sum of head", 9), at="train.py:8 in loop")
    told = verdict({0: report(0, wait()), 1: there}, {})
    words = told.words
    assert told.hopeless
    assert "not in the same collective" in words
    assert "gather of blocks.3 (collective 7" in words
    assert "sum of head (collective 9" in words
    assert "(at train.py:5 in loop)" in words
    assert "(at train.py:8 in loop)" in words
    words = verdict({0: report(0, wait()), 1: None, 2: None}, {1: "T"}).words
    assert "rank 1 does not run (its process is stopped)" in words
    assert "rank 2 does not run (no answer)" in words


def test_ranks_that_all_wait_in_one_collective_are_slow_and_not_hopeless():
    same = wait(ranks=(0, 1))
    assert not verdict({0: report(0, same), 1: report(1, same)}, {}).hopeless


@pytest.fixture
def looks(monkeypatch):
    """How often the watchdog of each rank has looked around, by rank."""
    counts = Counter()
    look_around = Watchdog._look_around

    def counted(self):
        look_around(self)
        counts[self._rank] += 1

    monkeypatch.setattr(Watchdog, "_look_around", counted)
    return counts


def let_look(looks, rank):
    """Wait until a watchdog has looked around twice more."""
    wanted = looks[rank] + 2
    eventually(lambda: looks[rank] >= wanted)


def test_a_rank_whose_process_has_ended_is_known_at_the_next_look(tmp_path, looks):
    """The other rank is a process that has only signed, and is then killed."""
    store = HashStore()
    process = subprocess.Popen(["sleep", "600"])
    watchdog = Watchdog(store, 0, 2, 0.4, tmp_path)
    started = Path(f"/proc/{process.pid}/stat").read_text().rpartition(")")[2].split()[19]
    number = store.add(f"{watchdog._hosts.key}/count", 1)
    store.set(f"{watchdog._hosts.key}/{number}", f'[1, {process.pid}, "{started}"]')
    store.set("here/1", "rank 1 (tp=1)")
    try:
        let_look(looks, 0)
        assert watchdog.lost is None
        process.kill()
        # A process that nobody has waited for is as dead, once the kernel has ended it.
        os.waitid(os.P_PID, process.pid, os.WEXITED | os.WNOWAIT)
        let_look(looks, 0)  # the first of them may have begun before
        assert watchdog.lost.startswith(f"rank 1 (tp=1) (process {process.pid} on ")
    finally:
        watchdog.close()
        process.kill()
        process.wait()


def test_a_watchdog_looks_around_each_second_or_more_often(tmp_path):
    for soft_limit, pause in ((30.0, 1.0), (0.4, 0.1)):
        watchdog = Watchdog(HashStore(), 0, 2, soft_limit, tmp_path)
        watchdog.close()
        assert watchdog._pause == pytest.approx(pause)


def test_a_rank_that_has_finished_is_no_fault_until_somebody_needs_it(tmp_path, looks):
    store = HashStore()
    watchdog = Watchdog(store, 0, 2, 0.4, tmp_path)
    other = Watchdog(store, 1, 2, 0.4, tmp_path)
    try:
        assert watchdog.cause([0, 1], patience=0.2) is None
        other.close()
        let_look(looks, 0)
        assert watchdog.lost is None
        assert watchdog.cause([0, 1]) == "rank 1 is gone: it has finished"
    finally:
        watchdog.close()


def test_a_rank_that_raised_tells_the_others_what(tmp_path):
    store = HashStore()
    watchdog, other = (Watchdog(store, rank, 2, 30.0, tmp_path) for rank in (0, 1))
    try:
        other.close("it ended with ValueError: the batch is broken")
        assert "ValueError: the batch is broken" in watchdog.cause([0, 1])
    finally:
        watchdog.close()


def test_a_rank_that_is_stuck_ends_its_saves_before_its_process(tmp_path, monkeypatch):
    order, over = [], threading.Event()

    def end(status):
        order.append(status)
        over.set()

    monkeypatch.setattr("lamina.mesh.watching.watchdog.os._exit", end)
    monkeypatch.setattr("lamina.mesh.watching.watchdog._PATIENCE", 0.2)
    watchdog = Watchdog(HashStore(), 0, 2, 0.4, tmp_path)
    watchdog.before_end = lambda: order.append("saves")
    watchdog.lost = "rank 1 is gone: planted"
    try:
        assert over.wait(50)  # in a file that the watchdog takes for code of others
    finally:
        watchdog.lost = None
        watchdog.close()
    assert order[:2] == ["saves", 70]


@pytest.fixture
def two_hosts(tmp_path, monkeypatch):
    """Watchdogs of two ranks that do not see each other's processes."""
    names = iter("ab")
    monkeypatch.setattr("lamina.mesh.watching.host_watch._host_name", lambda: next(names))
    monkeypatch.setattr("lamina.mesh.watching.host_watch.BEAT", 0.1)
    store = HashStore()
    dogs = [Watchdog(store, rank, 2, 0.4, tmp_path) for rank in (0, 1)]
    for dog in dogs:
        dog._silence.longest = 600.0
    yield dogs
    for dog in dogs:
        dog._end.set()


def test_a_host_that_falls_silent_is_named_with_its_ranks(two_hosts, looks):
    first, second = two_hosts
    for _ in range(8):  # both count, and nobody is lost
        let_look(looks, 0)
    assert first.lost is None
    second._end.set()  # without a word
    first._silence.longest = 0.5
    eventually(lambda: first.lost)
    assert f"host {socket.gethostname()} (rank 1) is silent for" in first.lost
    assert "its link is cut" in first.lost


def test_a_host_that_has_left_in_order_is_not_lost(two_hosts, looks):
    first, second = two_hosts
    let_look(looks, 0)
    second.close()
    first._silence.longest = 0.5
    time.sleep(1.0)
    let_look(looks, 0)
    assert first.lost is None


def test_a_store_that_does_not_answer_is_told_although_its_thread_waits(two_hosts, looks):
    _, second = two_hosts
    let_look(looks, 1)
    let_look(looks, 1)
    again = threading.Event()
    second._look_around = again.wait  # as a call does whose link is cut
    second._silence.longest = 0.5
    try:
        eventually(lambda: second.lost)
        assert f"the store at rank 0 on host {socket.gethostname()}" in second.lost
        assert second.cause([0, 1]) == second.lost
        second.close()  # asks nobody
    finally:
        again.set()


def test_words_for_other_ranks_are_there_until_they_are_replaced(tmp_path):
    store = HashStore()
    watchdog, other = (Watchdog(store, rank, 3, 30.0, tmp_path) for rank in (0, 1))
    try:
        watchdog.say("save", "1 2")
        other.say("save", "1 3")
        other.say("save", "2 1")
        other.say("load", "9 9")
        assert watchdog.said("save", [0, 1, 2]) == {0: "1 2", 1: "2 1"}
    finally:
        watchdog.close()
        other.close()


def test_a_line_is_the_users_wherever_the_program_lies():
    """It is named as the place where a rank is, and a clone is called "lamina" or "torch"."""
    for file in ("/home/me/lamina/train.py", "/home/me/torch/lamina/mesh/train.py", __file__):
        assert not file.startswith(_FOREIGN)
    for module in (torch.nn, lamina.mesh, threading):
        assert module.__file__.startswith(_FOREIGN)


def test_a_wait_beyond_the_soft_limit_is_told_by_the_first_rank_and_in_a_file(
    tmp_path, capfd, looks
):
    store = HashStore()
    dogs = [Watchdog(store, rank, 2, 0.4, tmp_path) for rank in (0, 1)]
    try:
        dogs[1].locate("dp_shard=1")
        dogs[0].watch(lambda: Activity([wait(ranks=(0, 1))], ["gather of blocks.2"], 31.0))
        told = ""

        def said():  # the file is written first
            nonlocal told
            told += capfd.readouterr().err
            return "Stacks and last collectives" in told

        eventually(said)
        let_look(looks, 0)  # it is not told again
        let_look(looks, 1)
        told += capfd.readouterr().err
    finally:
        for dog in dogs:
            dog.close()
    assert "rank 1 (dp_shard=1) is in none of Lamina's collectives" in told
    assert "rank 0 waits for 31 s in gather of blocks.3" in told
    (file,) = tmp_path.iterdir()
    assert str(file) in told
    assert "did: gather of blocks.2" in file.read_text()
    assert "test_watchdog.py" in file.read_text()  # stacks


def test_ranks_that_make_different_groups_are_told_of_each_other(tmp_path, capfd):
    store = HashStore()
    dogs = [Watchdog(store, rank, 2, 0.4, tmp_path) for rank in (0, 1)]
    try:
        with dogs[0].making("dp_shard", (0, 1)), dogs[1].making("dp_replicate", (0, 1)):
            eventually(lambda: dogs[0].lost and dogs[1].lost)
        assert not dogs[0]._waits.activity().waits
    finally:
        for dog in dogs:
            dog.close()
    told = capfd.readouterr().err
    assert "rank 0 waits for" in told
    assert "in the making of a group (dp_shard)" in told
    assert "in the making of a group (dp_replicate)" in told
    assert "to which rank 1 did not come" in told
    assert "ranks make different calls" in dogs[1].lost


@pytest.mark.ranks(2, reuse=False)  # a job has one watchdog, which another test may have made
def test_every_world_of_several_ranks_has_one_unless_it_is_switched_off(ranks):
    with init_distributed(soft_limit=None):
        assert running_watchdog() is None
    with pytest.raises(ValueError, match="soft_limit=-1"):
        init_distributed(soft_limit=-1)
    with init_distributed():
        assert running_watchdog() is not None


def test_a_rank_that_has_waited_little_may_just_go_on():
    reports = {0: report(0, wait()), 1: report(1, replace(wait("sum of head", 9), seconds=2.0))}
    assert not verdict(reports, {}).hopeless
    reports[1] = report(1, replace(wait("sum of head", 9), seconds=12.0))
    assert verdict(reports, {}).hopeless


class PassesOn(TorchFunctionMode):
    """A mode that changes nothing, in the test's own file."""

    def __torch_function__(self, func, types, args=(), kwargs=None):
        return func(*args, **(kwargs or {}))


def in_a_mode(call):
    with PassesOn():
        call()


@pytest.mark.ranks(2, init=False, reuse=False)
@pytest.mark.parametrize("call", ["broadcast", "barrier", "all_gather_object", "in a mode"])
def test_a_wait_in_torchs_own_collective_is_named_and_ends_with_the_job(
    call, ranks, monkeypatch, tmp_path
):
    """An evaluation on the first rank alone, while the other one waits for its result."""
    # It would end this process.
    monkeypatch.setattr("lamina.mesh.watching.watchdog._PATIENCE", 60.0)
    calls = {
        "broadcast": lambda: dist.broadcast(torch.zeros(3), 0),
        "barrier": dist.barrier,
        "all_gather_object": lambda: dist.all_gather_object([None, None], 1),
    }
    if call == "in a mode":  # of the user's, whose frames lie between torch's
        call = "all_gather_object"
        calls[call] = lambda: in_a_mode(lambda: dist.all_gather_object([None, None], 1))
    with init_distributed(device="cpu", soft_limit=0.5, verdict_directory=tmp_path):
        watchdog = running_watchdog()
        if ranks.rank == 0:
            with watchdog.making("a group of the first rank's", (0, 1)):
                eventually(lambda: watchdog.lost)
        calls[call]()  # the first rank comes late, and so the other one goes on
        eventually(lambda: watchdog.lost)
        assert f"in torch's {call} (" in watchdog.lost
        assert "(rank 1 at " not in watchdog.lost
        assert "to which rank 0 did not come" in watchdog.lost
        assert "ranks make different calls" in watchdog.lost


@pytest.mark.ranks(2, init=False, reuse=False)
def test_a_large_message_of_torchs_is_given_its_time_and_a_single_one_is_no_collective(ranks):
    with init_distributed(device="cpu", soft_limit=60):
        watchdog, seen = running_watchdog(), []
        if ranks.rank == 1:
            spy = threading.Thread(target=look_beside, args=(watchdog, seen))
            spy.start()
            dist.broadcast(torch.zeros(10_000_000), 0)  # 40 MB: 8 s for two ranks
            dist.recv(torch.zeros(1), 0)
            dist.broadcast(torch.zeros(1), 0)
            seen.append("end")
            spy.join()
            assert [words for words in seen if words != "end"] == ["torch's broadcast (default_pg)"]
        else:
            for send in (
                lambda: dist.broadcast(torch.zeros(10_000_000), 0),
                lambda: dist.send(torch.zeros(1), 1),
                lambda: dist.broadcast(torch.zeros(1), 0),
            ):
                time.sleep(0.4)
                send()


def look_beside(watchdog, seen):
    """Note each wait in torch's collectives that the watchdog sees, once."""
    while "end" not in seen:
        wait = watchdog._waits.in_torch()
        if wait is not None and str(wait) not in seen:
            seen.append(str(wait))
        time.sleep(0.01)
