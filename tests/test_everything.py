"""What fails on the virtual GPU without arithmetic is judged by its run with values."""

from __future__ import annotations

import sys
from collections import Counter

import pytest
from tasks.matrix.record import Result, add_result
from tasks.virtual_gpu import everything
from tasks.virtual_gpu.everything import Part


@pytest.fixture
def part(tmp_path, monkeypatch) -> Part:
    monkeypatch.setattr(everything, "RESULTS", tmp_path)
    made = Part("ddp-2", ("packages/ddp/tests", "--backend", "nccl", "--world-size", "2"))
    for case, outcome in {"a": "passed", "b": "failed", "c": "failed", "d": "skipped"}.items():
        add_result(made.results, Result(f"packages/ddp/tests/test_{case}.py::test", outcome))
    return made


def test_what_failed_runs_again_with_values_on_the_same_ranks(part):
    failed = ("packages/ddp/tests/test_b.py::test", "packages/ddp/tests/test_c.py::test")
    again = part.again()
    assert again.words == (*failed, "--backend", "nccl", "--world-size", "2")
    assert again.settings["VGPU_COMPUTE"] == "at-once"
    assert "VGPU_VALUES" not in again.settings


def test_a_test_that_passes_with_values_is_counted_so_and_the_others_have_failed(part):
    add_result(part.again().results, Result("packages/ddp/tests/test_b.py::test", "passed"))
    add_result(part.again().results, Result("packages/ddp/tests/test_c.py::test", "failed"))
    counts = Counter(kind for kind, _ in everything.outcomes(part))
    assert counts == {"passed": 1, "with values": 1, "failed": 1, "skipped": 1}


def test_a_part_with_failures_is_followed_by_its_run_with_values(part, monkeypatch, tmp_path):
    monkeypatch.setattr(everything, "ROOT", tmp_path)
    ran = []
    monkeypatch.setattr(everything, "run", lambda part, seconds: ran.append(part))
    monkeypatch.setattr(sys, "argv", ["everything"])
    assert everything.main(["ddp-2"]) == 1
    assert [each.name for each in ran] == ["ddp-2", "ddp-2-again"]
