"""Ranks of one attempt agree on its name, whatever earlier attempts left in the store."""

from __future__ import annotations

import socket
import time
from concurrent.futures import ThreadPoolExecutor
from datetime import timedelta

import pytest
from torch.distributed import Store, TCPStore

from lamina.mesh import RendezvousError
from lamina.mesh.launching.launch import Launch
from lamina.mesh.launching.rendezvous import agree_on_attempt, open_store

TIMEOUT = timedelta(seconds=20)


@pytest.fixture
def agent() -> TCPStore:
    """The store of torchrun's agent, which outlives every attempt."""
    return TCPStore("127.0.0.1", 0, is_master=True, wait_for_workers=False)


def launched(agent: TCPStore, rank: int, world_size: int) -> Launch:
    return Launch(
        "torchrun", rank, world_size, host="127.0.0.1", port=agent.port, store_is_running=True
    )


def join(agent: TCPStore, rank: int, world_size: int, timeout: timedelta = TIMEOUT) -> str:
    client = TCPStore("127.0.0.1", agent.port, is_master=False, timeout=timeout)
    return agree_on_attempt(client, launched(agent, rank, world_size), timeout)


def attempt(agent: TCPStore, ranks: list[int], world: int, delay: dict[int, float]) -> list[str]:
    """Ranks as threads, some of which come late."""

    def late(rank: int) -> str:
        time.sleep(delay.get(rank, 0.0))
        return join(agent, rank, world)

    with ThreadPoolExecutor(len(ranks)) as pool:
        return list(pool.map(late, ranks))


@pytest.mark.parametrize("late", [0, 2])
def test_every_attempt_has_one_name_of_its_own(agent: TCPStore, late: int) -> None:
    names = [attempt(agent, [0, 1, 2], 3, {late: 0.05}) for _ in range(4)]
    assert all(len(set(ranks)) == 1 for ranks in names)
    assert len({ranks[0] for ranks in names}) == 4


def test_a_rank_that_reads_a_finished_attempts_name_waits_for_the_next(agent: TCPStore) -> None:
    (old, *_) = attempt(agent, [0, 1], 2, {})
    # Rank 1 comes long before rank 0, finds the old name and must not take it.
    new = attempt(agent, [0, 1], 2, {0: 0.3})
    assert new[0] == new[1] != old


def test_a_rank_that_reads_a_broken_attempts_name_waits_for_the_next(agent: TCPStore) -> None:
    with ThreadPoolExecutor(2) as pool:
        broken = [pool.submit(join, agent, rank, 3, timedelta(seconds=0.3)) for rank in (0, 1)]
    with pytest.raises(RendezvousError, match=r"1 never came: 2\."):
        broken[0].result()
    # Now rank 2 comes, signs under the broken name, and is joined by all in the next attempt.
    names = attempt(agent, [2, 1, 0], 3, {1: 0.1, 0: 0.2})
    assert len(set(names)) == 1


def test_a_world_of_another_size_is_another_attempt(agent: TCPStore) -> None:
    attempt(agent, [0, 1], 2, {})
    # Rank 2 never signed before; the finished attempt of two ranks must not let it in.
    names = attempt(agent, [0, 1, 2], 3, {0: 0.2})
    assert len(set(names)) == 1


def test_ranks_without_rank_0_give_up_at_the_timeout(agent: TCPStore) -> None:
    with pytest.raises(RendezvousError, match=r"rank 1 of 2 waited .* rank 0 never came"):
        join(agent, 1, 2, timedelta(seconds=0.2))


def test_an_unreachable_store_is_named() -> None:
    launch = Launch("torchrun", 1, 2, host="127.0.0.1", port=9, store_is_running=True)
    with pytest.raises(RendezvousError, match=r"rank 1 of 2 couldn't reach .* 127\.0\.0\.1:9"):
        open_store(launch, timedelta(seconds=1))


def test_a_port_that_is_taken_is_named() -> None:
    with socket.socket() as taken:
        taken.bind(("127.0.0.1", 0))
        taken.listen()
        launch = Launch("torchrun", 0, 2, host="127.0.0.1", port=taken.getsockname()[1])
        with pytest.raises(RendezvousError, match="rank 0 of 2 couldn't serve"):
            open_store(launch, timedelta(seconds=1))


def test_ranks_of_an_attempt_share_keys_and_attempts_do_not(agent: TCPStore) -> None:
    def start(rank: int) -> Store:
        return open_store(launched(agent, rank, 2), TIMEOUT)

    for _ in range(2):
        with ThreadPoolExecutor(2) as pool:
            first, second = pool.map(start, range(2))
        assert not first.check(["address"])
        first.set("address", "here")
        assert second.get("address") == b"here"
