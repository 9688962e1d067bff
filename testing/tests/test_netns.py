"""The shaped link carries what is sent, at the speed asked for, and leaves nothing behind."""

from __future__ import annotations

import subprocess
import sys
import time

import pytest

from lamina_testing.netns import RankProgramError, shaped_link, unavailable

MEGABYTE = 2**20

SEND = """
import os, socket, sys, time
rank, size = int(os.environ["RANK"]), int(sys.argv[1])
address = (os.environ["MASTER_ADDR"], int(os.environ["MASTER_PORT"]))
if rank == 0:
    server = socket.create_server(address)
    connection, _ = server.accept()
    begin = time.perf_counter()
    received = 0
    while received < size:
        received += len(connection.recv(1 << 20))
    print(time.perf_counter() - begin)
else:
    for _ in range(200):
        try:
            connection = socket.create_connection(address)
            break
        except OSError:
            time.sleep(0.05)
    connection.sendall(bytes(size))
    connection.close()
"""

ALL_REDUCE = """
import torch, torch.distributed as dist
dist.init_process_group("gloo")
total = torch.ones(1 << 18)
dist.all_reduce(total)
print(dist.get_world_size(), total[0].item())
dist.destroy_process_group()
"""


@pytest.fixture(scope="module", autouse=True)
def _possible():
    reason = unavailable()
    if reason is not None:
        pytest.skip(reason)


def test_bytes_take_the_time_that_the_rate_says():
    """Never less, and no more in the quickest of some runs: a loaded machine holds up others."""
    rate, taken = 100 * 10**6, []
    expected = 8 * 4 * MEGABYTE / rate
    with shaped_link(bits_per_second=rate) as link:
        for _ in range(10):
            before = link.traffic()
            seconds, _ = link.run_ranks([sys.executable, "-c", SEND, str(4 * MEGABYTE)])
            traffic = link.traffic() - before
            taken.append(float(seconds))
            assert taken[-1] > 0.8 * expected
            if taken[-1] < 2 * expected + 0.2:
                break
    assert min(taken) < 2 * expected + 0.2, taken
    assert 4 * MEGABYTE <= traffic.sent[1] < 4.6 * MEGABYTE
    assert traffic.sent[0] < 0.3 * MEGABYTE, "only acknowledgements"


def test_a_failing_rank_ends_the_others_and_is_reported():
    program = "import os, sys, time; print('rank', os.environ['RANK'], flush=True)\n"
    program += "time.sleep(1000) if os.environ['RANK'] == '0' else sys.exit(3)"
    begin = time.monotonic()
    with (
        shaped_link(bits_per_second=10**9) as link,
        pytest.raises(RankProgramError, match=r"codes \[-9, 3\]") as caught,
    ):
        link.run_ranks([sys.executable, "-c", program])
    assert "--- rank 1:\nrank 1" in str(caught.value)
    assert time.monotonic() - begin < 20


def test_namespaces_are_removed():
    with shaped_link(bits_per_second=10**9) as link:
        listed = subprocess.check_output(["ip", "netns", "list"], text=True)
        assert all(name in listed for name in link.namespaces)
    listed = subprocess.check_output(["ip", "netns", "list"], text=True)
    assert not any(name in listed for name in link.namespaces)


@pytest.mark.slow
@pytest.mark.parametrize("ranks_per_namespace", [1, 2])
def test_gloo_runs_over_the_link(ranks_per_namespace):
    with shaped_link(bits_per_second=10**9) as link:
        before = link.traffic()
        outputs = link.run_ranks(
            [sys.executable, "-c", ALL_REDUCE], ranks_per_namespace=ranks_per_namespace
        )
        traffic = link.traffic() - before
    world_size = 2 * ranks_per_namespace
    assert [text.split() for text in outputs] == [[str(world_size), f"{world_size}.0"]] * world_size
    assert min(traffic.sent) >= MEGABYTE // 2, "each half of the tensor crosses the link"


DATAGRAMS = """
import os, socket, sys, time
rank, address = int(os.environ["RANK"]), (os.environ["MASTER_ADDR"], 4000)
with socket.socket(socket.AF_INET, socket.SOCK_DGRAM) as there:
    if rank == 0:
        there.bind(address)
        there.settimeout(2)
        count, ready = 0, open(sys.argv[1], "w")
        try:
            while there.recv(64):
                count += 1
        except TimeoutError:
            print(count)
    else:
        while not os.path.exists(sys.argv[1]):
            time.sleep(0.01)
        for _ in range(200):
            there.sendto(b"datagram", address)
            time.sleep(0.001)
"""


@pytest.mark.slow
def test_a_spoiled_link_loses_the_share_of_packets_that_was_asked_for(tmp_path):
    arrived = []
    with shaped_link(bits_per_second=10**9) as link:
        for number, lost in enumerate((0.0, 0.5, 1.0, 0.0)):
            link.spoil(1, lost=lost)
            ready = str(tmp_path / str(number))
            arrived.append(int(link.run_ranks([sys.executable, "-c", DATAGRAMS, ready])[0]))
    assert (arrived[0], arrived[2], arrived[3]) == (200, 0, 200), arrived
    assert 50 < arrived[1] < 150, arrived
