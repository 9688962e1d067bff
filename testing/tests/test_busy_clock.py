"""The clock of limits goes slower on a busy machine, and never stands still."""

from __future__ import annotations

import os

import pytest

from lamina_testing import busy_clock
from lamina_testing.busy_clock import LONGEST, BusyClock, share_of_a_core

CORES = len(os.sched_getaffinity(0))


@pytest.mark.parametrize(
    ("running", "share"),
    [(0, 1.0), (1, 1.0), (CORES, 1.0), (4 * CORES, 0.25), (1000 * CORES, 1 / LONGEST)],
)
def test_a_thread_has_its_part_of_the_cores(running, share, tmp_path):
    loads = tmp_path / "loadavg"
    loads.write_text(f"1.00 2.00 3.00 {running}/697 21545\n")
    assert share_of_a_core(loads) == pytest.approx(share)


def test_without_the_kernels_counts_all_cores_are_free(tmp_path):
    assert share_of_a_core(tmp_path / "loadavg") == 1.0


def test_the_clock_goes_at_the_rate_of_each_moment(monkeypatch):
    now, share = [100.0], [1.0]
    monkeypatch.setattr("time.monotonic", lambda: now[0])
    monkeypatch.setattr(busy_clock, "share_of_a_core", lambda: share[0])
    clock = BusyClock()
    now[0] += 4
    assert clock.seconds() == 4
    share[0] = 0.5
    now[0] += 4
    assert clock.seconds() == 6
