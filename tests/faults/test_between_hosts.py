"""A fault of a host, or of its link, is told on every host that is left, and the job goes on."""

from __future__ import annotations

import functools
import sys
from pathlib import Path

import pytest

sys.path.insert(0, str(Path(__file__).parent))
from between_hosts import HOST_FAULTS, SURVIVED, odd_host, play_on_hosts

from lamina_testing.netns import unavailable

pytestmark = pytest.mark.slow
TOLD_WITHIN = 30.0


@functools.cache
def undisturbed():
    """The digest of a job to which nothing happens."""
    (digest,) = play_on_hosts("nothing").digests
    return digest


@pytest.mark.parametrize(
    ("fault", "hosts"), [*((fault, 2) for fault in HOST_FAULTS), ("kill_host", 3), ("kill_host", 4)]
)
def test_a_fault_between_hosts_is_told_and_the_job_goes_on(fault, hosts):
    if (problem := unavailable()) is not None:
        pytest.skip(problem)
    played = play_on_hosts(fault, hosts=hosts)
    at = odd_host(fault, hosts)
    if fault in SURVIVED:
        assert played.statuses == [0] * len(played.statuses), played.output
        assert len(played.digests) == 1
    else:
        assert None not in played.statuses, played.output
        assert played.begun >= 4, played.output  # it has gone on, and not begun again
    if fault == "slow_rank":
        assert f"rank {2 * hosts - 1} " in played.messages[0]
        assert "times as long for a step" in played.messages[0]
    elif fault == "slow_link":
        assert all("the network is slow: all 4 ranks wait" in one for one in played.messages)
    elif fault not in SURVIVED:
        there = [host for host in range(hosts) if not (fault.startswith("kill") and host == at)]
        for host in there:
            message = played.messages[host]
            assert played.told[host] < TOLD_WITHIN, played
            assert f"node{at}" in message or (host == at and "link is cut" in message), message
    if fault not in ("slow_rank", "slow_link"):  # these take more steps
        assert {played.resumed, *played.digests} - {None} == {undisturbed()}
