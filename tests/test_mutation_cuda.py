"""Faults in code that only CUDA reaches: which are chosen, which tests meet them, what is told."""

from __future__ import annotations

from pathlib import Path

import pytest
import tasks.mutation.cuda as cuda
from tasks.mutation.page import Verdict
from tasks.mutation.running import Entered

SOURCE = """
def copy(x, pin):
    if x.is_cuda:
        return x - 1
    return x - 2
"""
SLOW, QUICK, OTHER = "test_a.py::test_slow", "test_a.py::test_quick", "test_b.py::test_other"


@pytest.fixture
def layers(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> Path:
    monkeypatch.setattr(cuda, "source", lambda layer: tmp_path / layer)
    for layer in cuda.PLANTED:
        (tmp_path / layer).mkdir()
    for layer in ("ddp", "fsdp"):
        (tmp_path / layer / "copies.py").write_text(SOURCE)
        (tmp_path / layer / "plain.py").write_text(SOURCE.replace("x.is_cuda", "pin"))
    return tmp_path


@pytest.fixture
def reach() -> cuda.Reach:
    blocks = [f"{of}/{file}.py:{n}" for of in ("ddp", "fsdp") for file in ("copies", "plain")
              for n in (3, 4)]  # fmt: skip
    first = Entered({key: [SLOW, QUICK] for key in blocks}, {SLOW: 9.0, QUICK: 2.0})
    second = Entered({key: [OTHER] for key in blocks}, {OTHER: 1.0})
    on_cpu = frozenset(block for block in blocks if block.endswith(":3"))
    return cuda.Reach({"ddp": first, "step": second}, on_cpu)


def test_faults_are_in_blocks_that_a_gpu_alone_reaches_and_functions_that_name_it(layers, reach):
    found = cuda.faults(reach)
    assert [len(found[layer]) for layer in cuda.PLANTED] == [0, 2, 2, 0, 0]
    assert {(m.file, m.line) for m in found["ddp"]} == {("copies.py", 4)}


def test_layers_take_turns_and_a_larger_sample_holds_the_smaller(layers, reach):
    found = cuda.faults(reach)
    chosen = cuda.sample(found, 4, 0)
    assert [layer for layer, _ in chosen] == ["ddp", "fsdp", "ddp", "fsdp"]
    assert len(set(chosen)) == 4
    assert cuda.sample(found, 3, 0) == chosen[:3]


def test_tests_of_the_layers_own_part_come_first_and_no_more_of_each_than_the_limit(layers, reach):
    _, mutant = cuda.sample(cuda.faults(reach), 1, 0)[0]
    assert list(reach.fitting("ddp", mutant, 9).items()) == [
        ("ddp", [QUICK, SLOW]),
        ("step", [OTHER]),
    ]
    assert list(reach.fitting("fsdp", mutant, 1).items()) == [("step", [OTHER]), ("ddp", [QUICK])]
    assert reach.fitting("models", mutant, 9) == {}


def test_a_fault_that_no_order_shows_lives_and_one_that_hangs_has_died(layers, reach, monkeypatch):
    _, mutant = cuda.sample(cuda.faults(reach), 1, 0)[0]
    asked = []

    def answering(*codes):
        left = iter(codes)
        asked.clear()

        def pytest(python, words, seconds, *first, **order):
            if first:
                text = (first[0] / "lamina" / "ddp" / mutant.file).read_text()
                assert text == mutant.plant(SOURCE)
            asked.append((order.get("VGPU_COMPUTE", "CPU"), words[0], bool(first)))
            return next(left), Entered({}, {}, (words[0],))

        monkeypatch.setattr(cuda, "pytest", pytest)
        return cuda.attempt(reach, "ddp", mutant, 1)

    assert answering(0, 0, 0, 0, 0).outcome == "lived"
    orders, played = ("at-once", "adversarial"), cuda.PLAYED["ddp"][0]
    expected = [(order, test, True) for order in orders for test in (QUICK, OTHER)]
    assert asked == [*expected, ("CPU", played, True)]
    assert answering(0, 0, 0, 0, 1).by == f"on a CPU: {played}"
    assert answering(0, 1).by == f"at-once: {OTHER}"
    assert "no end" in answering(0, -1).by
    assert answering(0, 0, 1, 0).by == f"adversarial: {QUICK}"
    assert asked[-1] == ("adversarial", QUICK, False)
    assert answering(0, 0, 1, 1, 0, 0).outcome == "lived"  # the test fails without the fault too
    assert (layers / "ddp" / mutant.file).read_text() == SOURCE


def test_the_record_counts_and_names_what_lives(layers, reach):
    first, second = cuda.sample(cuda.faults(reach), 2, 0)
    verdicts = [
        (first[0], Verdict(first[1], "died", f"at-once: {OTHER}", 3.0)),
        (second[0], Verdict(second[1], "lived", "2 tests", 4.0)),
    ]
    text = cuda.page(reach, cuda.faults(reach), verdicts, 0, 6)
    assert "Of 2 planted, 1 died and 1 lived." in text
    assert "| ddp | 1 | 1 | 0 |" in text
    assert f"- fsdp, `{second[1].name}`" in text
