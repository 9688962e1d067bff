"""Sockets between ranks of a host: strangers hold nobody up, and who is gone is named at once."""

from __future__ import annotations

import os
import socket
import subprocess
import sys
import threading
import time
from contextlib import closing, contextmanager

import pytest

from lamina.collectives.transport import host_socket as module
from lamina.collectives.transport.host_socket import HostSocketListener

NUMBER, SECRET = 4711, 99
CALL = """
import socket, struct, sys, time
number, secret, greet = int(sys.argv[1]), int(sys.argv[2]), sys.argv[3]
if greet != "gone":
    line = socket.socket(socket.AF_UNIX, socket.SOCK_SEQPACKET)
    line.connect(f"\\0lamina-{number:016x}")
    if greet == "greet":
        line.send(struct.pack("<QQ", 0, secret))
    print("called", flush=True)
    time.sleep(60)
"""


@contextmanager
def caller(greet, number=NUMBER, secret=SECRET):
    words = [sys.executable, "-c", CALL, str(number), str(secret), greet]
    process = subprocess.Popen(words, stdout=subprocess.PIPE)
    try:
        yield process
    finally:
        process.kill()
        process.wait()


@pytest.fixture
def listener():
    with closing(HostSocketListener(NUMBER)) as made:
        yield made


def test_a_stranger_that_knows_the_secret_is_not_believed_and_holds_nobody_up(listener):
    with caller("silent") as silent, caller("greet") as impostor:
        for process in (silent, impostor):
            assert process.stdout.readline()
        with caller("greet") as expected:
            begun = time.monotonic()
            found = listener.accept({0: expected.pid}, SECRET, timeout=120)
            assert time.monotonic() - begun < 60
            assert found.keys() == {0}
            impostor.kill()
            impostor.wait()
            found[0].send(1, 2, 3)  # the line is to the expected process, which is alive


def test_callers_that_are_slow_to_greet_are_waited_for_side_by_side(listener, monkeypatch):
    """Two calls of this process: one greets only once the other has been taken."""
    second_taken, over = threading.Event(), threading.Event()
    greeted = module._greeted

    def watched(*arguments):
        rank = greeted(*arguments)
        if rank == 1:
            second_taken.set()
        return rank

    monkeypatch.setattr(module, "_greeted", watched)

    def call(rank):
        with socket.socket(socket.AF_UNIX, socket.SOCK_SEQPACKET) as line:
            line.connect(module._address(NUMBER))
            if rank == 0:
                second_taken.wait(60)
            line.send(module._GREETING.pack(rank, SECRET))
            over.wait(60)

    threads = [threading.Thread(target=call, args=(rank,)) for rank in range(2)]
    for thread in threads:
        thread.start()
    found = listener.accept({0: os.getpid(), 1: os.getpid()}, SECRET, timeout=30)
    over.set()
    assert list(found) == [1, 0]
    for thread in threads:
        thread.join()


def test_a_rank_that_ends_before_it_connects_is_named_at_once(listener):
    with caller("gone") as process:
        begun = time.monotonic()
        with pytest.raises(RuntimeError, match=rf"rank 0 of the group \(process {process.pid}"):
            listener.accept({0: process.pid}, SECRET, timeout=120)
        assert time.monotonic() - begun < 60


def test_a_rank_that_never_calls_is_named_when_the_time_is_over(listener):
    with pytest.raises(RuntimeError, match=r"Timed out after 0.2 s .*ranks \[0\]"):
        listener.accept({0: os.getpid()}, SECRET, timeout=0.2)


def test_connecting_to_a_rank_that_is_gone_names_it(listener):
    with pytest.raises(RuntimeError, match="rank 3 of the group, on this host, is gone"):
        listener.connect(NUMBER + 1, 0, SECRET, peer=3, timeout=5)
