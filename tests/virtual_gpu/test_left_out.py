"""A wait that is left out is seen: by a race, an error, or a wrong number."""

from __future__ import annotations

from importlib.metadata import version

import pytest
from historic_faults import PLANTS
from virtual_gpu.left_out_table import SEEDS, measure, show_plant


@pytest.mark.parametrize("scenario", ["strategy 3", "dropped handles"])
def test_each_wait_of_a_step_is_missed_when_it_is_left_out(scenario):
    """With all its waits a scenario says nothing; twenty seeds at most show each left out."""
    shown = measure(scenario, 0)
    assert len(shown) > 1
    for wait in (wait for wait, how in shown.items() if not how):
        line = wait.split()[0]
        assert any(measure(scenario, n, "--only", line).get(wait) for n in range(1, SEEDS)), wait


def test_a_backward_on_another_stream_waits_for_what_it_reads_and_its_caller_for_it():
    shown = measure("a backward on another stream", 0, "--only", "BackwardStream.end")
    ends = [how for wait, how in shown.items() if wait.endswith("BackwardStream.end")]
    assert ends
    assert all(ends)


@pytest.mark.skipif(
    tuple(int(part) for part in version("torch").split(".")[:2]) >= (2, 15),
    reason="under torch 2.15 one of the two waits changes nothing that this scenario shows",
)
def test_a_gradient_from_another_stream_is_waited_for_and_kept():
    """The bucket is filled on the backward's stream, and the gradient was made on another one."""
    scenario = "DDP, a branch beside a stream of its own"
    shown = measure(scenario, 0, "--only", "BackwardStream.entered")
    assert len(shown) == 2
    for wait in (wait for wait, how in shown.items() if not how):
        line = wait.split()[0]
        assert any(measure(scenario, n, "--only", line).get(wait) for n in range(1, SEEDS)), wait


@pytest.mark.parametrize("plant", sorted(PLANTS))
def test_a_fault_of_history_in_a_step_is_seen(plant):
    """What other systems have shipped, in Lamina's engine; its waits are in the table of waits."""
    assert any(show_plant(plant, seed) for seed in range(SEEDS))
