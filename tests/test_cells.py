"""The cells of the matrix: planned whole, skipped with a reason, resumed, reported."""

from __future__ import annotations

import io
import itertools
import json
import os
import subprocess
import sys
from collections import Counter
from pathlib import Path
from xml.etree import ElementTree

import pytest
from tasks.bootstrap import LAYERS
from tasks.matrix.cells import Cell, Devices, Torch, choose, plan
from tasks.matrix.history import VIRTUAL, load, merge
from tasks.matrix.page import compatibility, junit, markdown, to_html, write
from tasks.matrix.running import Bench, Progress

ROOT = Path(__file__).resolve().parents[1]
TORCHES = ["2.12", "2.13"]
TWO_GPUS = Devices(cores=16, cards=("H200", "H200"))


def whole_plan(devices=TWO_GPUS, there=("2.13",)):
    return plan(LAYERS, devices, there, TORCHES)


def test_every_cell_is_planned_once():
    names = Counter(entry.cell.name for entry in whole_plan())
    expected = itertools.product(LAYERS, ("gloo", "nccl"), (1, 2, 4, 8), TORCHES)
    assert names == Counter("-".join(map(str, values)) for values in expected)


@pytest.mark.parametrize("gpus", [0, 1, 2, 8])
@pytest.mark.parametrize("cores", [1, 2, 8])
def test_a_cell_runs_where_its_devices_and_its_torch_are(gpus, cores):
    devices = Devices(cores, ("H200",) * gpus)
    for entry in whole_plan(devices):
        cell = entry.cell
        enough = cell.world <= gpus if cell.backend == "nccl" else cell.world <= max(cores, 4)
        assert (entry.refusal == "") == (enough and cell.torch == "2.13"), entry


def test_a_torch_out_of_the_declared_range_has_cells_too():
    assert any(e.cell.torch == "2.99" and not e.refusal for e in whole_plan(there=["2.99"]))


def test_without_a_driver_nobody_is_asked_for_gpus(monkeypatch, tmp_path):
    monkeypatch.setattr("tasks.matrix.cells.DRIVER", tmp_path / "nvidiactl")
    assert Devices.find(tmp_path / "no-such-python").cards == ()


def test_words_name_cells_by_any_of_their_values():
    def names(*words):
        return {e.cell.name for e in choose(whole_plan(), words)}

    assert names("fsdp-nccl-8-2.13") == {"fsdp-nccl-8-2.13"}
    assert names("nccl-8-fsdp") == {f"fsdp-nccl-8-{torch}" for torch in TORCHES}
    assert len(names("fsdp", "mesh")) == 2 * 8 * 2
    assert names() == {e.cell.name for e in whole_plan()}
    with pytest.raises(ValueError, match="'fspd' names no cell"):
        names("fspd")


def test_shards_part_the_cells():
    shards = [{e.cell for e in choose(whole_plan(), (), (part, 3))} for part in (1, 2, 3)]
    assert sum(map(len, shards)) == len(set.union(*shards)) == len(whole_plan())


# ------------------------------------------------------------------------ planted layers

CONFTEST = """
pytest_plugins = ["tasks.matrix.plugin"]

def pytest_addoption(parser):
    parser.addoption("--backend")
    parser.addoption("--world-size")
"""
TESTS = """
import pathlib
import pytest

@pytest.mark.parametrize("number", range(4))
def test_it(number, request):
    with open("ran", "a") as file:
        file.write(f"{number}")
    assert request.config.getoption("--world-size") == "2"
    assert number != 2 or not pathlib.Path("door").exists(), "open"

def test_skipped():
    pytest.skip("no such device")
"""


@pytest.fixture
def tree(tmp_path: Path) -> Path:
    tests = tmp_path / "packages" / "mesh" / "tests"
    tests.mkdir(parents=True)
    (tests / "test_it.py").write_text(TESTS)
    (tmp_path / "conftest.py").write_text(CONFTEST)
    (tmp_path / ".gitignore").write_text(".matrix/\n__pycache__/\n.pytest_cache/\nran\ndoor\n")
    (tmp_path / "docs").mkdir()
    git = ["git", "-c", "user.name=a", "-c", "user.email=a@b"]
    for words in (["init", "-q"], ["add", "."], ["commit", "-qm", "suite"]):
        subprocess.run([*git, *words], cwd=tmp_path, check=True)
    return tmp_path


CELL = Cell("mesh", "gloo", 2, "2.13")


def run(tree: Path, *words: str, again: bool = False, devices=TWO_GPUS):
    """Run the cell, and others that cannot run; return how it ended and what was shown."""
    versions = {"python": "3.11.7", "torch": "2.13.0", "triton": "", "transformer_engine": ""}
    torches = {"2.13": Torch(Path(sys.executable), versions)}
    mine = {"PYTHONPATH": str(ROOT), "PYTEST_ADDOPTS": "-p no:cacheprovider"}
    environment = {**os.environ, **mine, "PYTEST_DISABLE_PLUGIN_AUTOLOAD": "1"}
    bench = Bench(tree, Devices(2), torches, environment, words, again)
    out = io.StringIO()
    planned = choose(plan(["mesh"], devices, ["2.13"], ["2.13"]), ["mesh-gloo-2", "mesh-nccl-8"])
    ended = {entry.cell: entry for entry in bench.run_all(planned, Progress(out))}
    assert len(ended) == 2
    return ended[CELL], out.getvalue(), list(ended.values()), planned


def ran(tree: Path) -> str:
    """Numbers of the tests that ran since the last call, in order."""
    path = tree / "ran"
    numbers = "".join(sorted(path.read_text())) if path.exists() else ""
    path.unlink(missing_ok=True)
    return numbers


def test_a_cell_that_has_passed_does_not_run_again_on_the_same_sources(tree):
    first, shown, *_ = run(tree)
    assert first.run.counts == {"passed": 4, "failed": 0, "skipped": 1}
    assert ran(tree) == "0123"
    assert "skipped 1 cell: nccl needs a GPU per rank; found 2" in shown
    second, shown, *_ = run(tree)
    assert (second.run, ran(tree)) == (first.run, "")
    assert "has passed on these sources" in shown
    run(tree, again=True)
    assert ran(tree) == "0123"
    (tree / "packages/mesh/new.py").write_text("x = 1\n")  # not committed, and yet a source
    run(tree)
    assert ran(tree) == "0123"


def test_a_cell_goes_on_with_what_has_failed_or_not_run(tree):
    (tree / "door").touch()
    first, *_ = run(tree)
    assert first.failed
    assert first.run.counts == {"passed": 3, "failed": 1, "skipped": 1}
    ran(tree)
    (tree / "door").unlink()
    lines = first.files.results.read_text().splitlines(keepends=True)
    kept = [line for line in lines if "test_it[3]" not in line]
    first.files.results.write_text("".join(kept) + '{"case": "packages/me')  # cut off
    second, *_ = run(tree)
    assert ran(tree) == "23"
    assert second.run.counts == {"passed": 4, "failed": 0, "skipped": 1}


def test_a_cell_whose_pytest_does_not_start_is_a_failure_that_shows_its_output(tree):
    ended, shown, everything, _ = run(tree, "--no-such-option")
    assert ended.failed
    assert "unrecognized arguments: --no-such-option" in shown
    (error,) = ElementTree.fromstring(junit(everything).partition("\n")[2]).iter("error")
    assert "--no-such-option" in error.get("message", "")


def test_junit_has_every_test_and_every_cell_that_was_skipped(tree):
    (tree / "door").touch()
    *_, everything, _ = run(tree)
    top = ElementTree.fromstring(junit(everything).partition("\n")[2])
    suites = {suite.get("name"): suite for suite in top}
    mine = suites[CELL.name]
    assert [mine.get(key) for key in ("tests", "failures", "skipped")] == ["5", "1", "1"]
    assert "open" in next(mine.iter("failure")).get("message", "")
    (reason,) = suites["mesh-nccl-8-2.13"].iter("skipped")
    assert reason.get("message") == "nccl needs a GPU per rank; found 2"


def test_kept_records_hold_the_last_run_of_each_cell_from_whatever_machine(tree):
    ended, _, everything, planned = run(tree)
    elsewhere = ended.run.__class__(
        **{**vars(ended.run), "cell": planned[-1].cell, "date": "2025-01-02"}
    )
    older = ended.run.__class__(**{**vars(ended.run), "commit": "older"})
    write(tree, merge([elsewhere, older], [ended.run]), everything, planned, keep=True)
    kept = load(tree / "docs/records/cells.json")
    assert {(run.cell, run.date, run.commit) for run in kept} == {
        (elsewhere.cell, "2025-01-02", elsewhere.commit),
        (CELL, ended.run.date, ended.run.commit),
    }
    assert "4 passed on gloo 2, nccl 8" in compatibility(kept).replace("8 passed", "4 passed")


def test_the_page_says_what_ran_when_and_what_never_did(tree):
    ended, _, _, planned = run(tree)
    page = markdown([ended.run], planned)
    (row,) = [line for line in page.splitlines() if line.startswith("| mesh gloo 2 |")]
    for word in (
        "4 passed, 1 skipped",
        ended.run.commit,
        ended.run.date,
        "2.13.0",
        "2 cores, no GPU",
    ):
        assert word in row
    assert "- 1 cell: nccl needs a GPU per rank; found 2" in page
    html = to_html(page)
    assert html.count("<tr>") == sum(line.startswith("|") for line in page.splitlines()) - 2
    assert "class='passed'>4 passed, 1 skipped" in html


def test_a_cell_of_virtual_gpus_is_marked_and_takes_no_real_ones_place(tree):
    ended, _, _, planned = run(tree)
    cell = Cell("mesh", "nccl", 2, "2.13")
    real = ended.run.__class__(**{**vars(ended.run), "cell": cell, "machine": "2 cores, 2 x H200"})
    virtual = ended.run.__class__(**{**vars(real), "machine": f"{VIRTUAL}, at-once", "commit": "v"})
    (kept,) = merge([real], [virtual])
    assert kept == real
    assert "virtual:" not in markdown([real], planned)
    (kept,) = merge([virtual], [real])
    assert kept.machine == real.machine
    (kept,) = merge([], [virtual])
    page = markdown([kept], planned)
    assert "| virtual: 4 passed, 1 skipped" in page
    assert f"4 passed on virtual {kept.cell.backend} {kept.cell.world}" in compatibility([kept])
    assert f"| {virtual.date} | `v` | {VIRTUAL}, at-once" in page


def test_a_run_with_options_of_pytest_leaves_the_cells_own_run_alone(tree):
    whole, *_ = run(tree)
    ran(tree)
    part, *_ = run(tree, "-k", "it and 1")
    assert ran(tree) == "1"
    assert part.run.counts["passed"] == 1
    again, *_ = run(tree)
    assert (again.run, ran(tree)) == (whole.run, "")


def test_records_are_json_with_a_line_per_cell(tree):
    ended, _, everything, planned = run(tree)
    write(tree, [ended.run], everything, planned, keep=True)
    text = (tree / "docs/records/cells.json").read_text()
    assert len(json.loads(text)) == 1
    assert len(text.splitlines()) == 3
