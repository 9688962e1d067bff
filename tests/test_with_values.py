"""What `-s virtual-gpu -- tests` has run is counted by layer, and enters the page of cells."""

from __future__ import annotations

import pytest
from tasks.bootstrap import LAYERS
from tasks.matrix.record import Result, add_result
from tasks.virtual_gpu import with_values
from tasks.virtual_gpu.with_values import Computed, by_layer, page, parts, runs_of, sample


@pytest.fixture
def part(tmp_path, monkeypatch) -> Computed:
    monkeypatch.setattr(with_values, "RESULTS", tmp_path)
    monkeypatch.setattr(with_values, "state", lambda: "0123456789ab")  # a copy may have no git
    (made,) = (each for each in parts(names=["ranks-2"]) if each.order == "at-once")
    made.results.parent.mkdir()
    for case, outcome in {
        "ddp/tests/test_a.py": "passed",
        "fsdp/tests/test_b.py": "failed",
    }.items():
        add_result(made.results, Result(f"packages/{case}::test", outcome, reason="rank 1: no"))
    return made


def test_layers_of_one_part_have_rows_of_their_own(part):
    counted = {name: len(results) for name, results in by_layer(part).items()}
    assert counted == {f"{layer}-2": layer in ("ddp", "fsdp") for layer in LAYERS}
    text = "\n".join(page([part], ["ranks-2", "--keep"]))
    assert "virtual-gpu -- tests ranks-2 --keep`" in text
    assert "| ddp-2 | at-once | 0 | 1 | 0 | 0 |" in text
    assert "| fsdp-2 | at-once | 0 | 0 | 0 | 1 |" in text
    assert "mesh-2" not in text
    assert "Not at their end: ranks-2 at-once." in text


def test_a_cell_is_entered_once_its_part_has_come_to_its_end(part):
    assert runs_of([part]) == []
    part.whole.touch()
    cells = {run.cell.layer: run.counts for run in runs_of([part])}
    assert cells["fsdp"]["failed"] == cells["ddp"]["passed"] == 1
    # That a layer has no test of so many ranks is known then too.
    assert [layer for layer in LAYERS if not any(cells[layer].values())] == [
        layer for layer in LAYERS if layer not in ("ddp", "fsdp")
    ]


def test_a_sample_is_no_cell(part):
    (first, _) = sample()
    add_result(first.results, Result("packages/ddp/tests/test_a.py::test", "passed"))
    first.whole.touch()
    assert runs_of([first]) == []


def test_a_cell_can_be_chosen_by_its_name():
    assert {each.name for each in parts(names=["ddp-2", "models"])} == {"ddp-2", "models"}
    assert {each.name for each in parts()} == {
        "step", "models", "registration", "ranks-1", "ranks-2", "ranks-4",
    }  # fmt: skip
