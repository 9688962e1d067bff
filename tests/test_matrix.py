"""The matrix machinery: covers cover, products are whole, shards part them, records go on."""

from __future__ import annotations

import itertools
import json
import shlex
import subprocess
import sys
from pathlib import Path

import pytest
from hypothesis import given
from hypothesis import strategies as st
from tasks.matrix.cover import cover, in_shard

AXES = st.lists(st.integers(1, 5), min_size=1, max_size=5)


def meetings(cases):
    """Every two values along two axes that meet in a case, by brute force."""
    return {(i, c[i], j, c[j]) for c in cases for i in range(len(c)) for j in range(i + 1, len(c))}


@given(AXES, st.randoms(use_true_random=False))
def test_every_two_values_that_can_meet_do_meet_in_the_cover(lengths, random):
    product = list(itertools.product(*map(range, lengths)))
    cases = [case for case in product if random.random() < 0.7] or product[:1]
    chosen = [cases[place] for place in cover(cases)]
    assert meetings(chosen) == meetings(cases)
    assert {c[0] for c in chosen} == {c[0] for c in cases}


@given(AXES, st.randoms(use_true_random=False))
def test_at_strength_one_every_value_is_in_as_few_cases_as_the_longest_axis_has(lengths, random):
    product = list(itertools.product(*map(range, lengths)))
    chosen = [product[place] for place in cover(product, strength=1)]
    assert [len({case[axis] for case in chosen}) for axis in range(len(lengths))] == lengths
    assert len(chosen) == max(lengths)
    some = [case for case in product if random.random() < 0.7] or product[:1]
    values = [set(column) for column in zip(*(some[p] for p in cover(some, 1)), strict=True)]
    assert values == [set(column) for column in zip(*some, strict=True)]


def test_cover_of_a_large_product_is_small():
    cases = list(itertools.product(range(4), range(3), range(3), range(3), range(2), range(2)))
    assert len(cases) == 432
    assert len(cover(cases)) <= 20  # 12 is the least that can be


@given(st.text(), st.integers(1, 60))
def test_every_case_is_in_exactly_one_shard(name, shards):
    assert sum(in_shard(name, shard, shards) for shard in range(1, shards + 1)) == 1


# ------------------------------------------------------------------------ the plugin

SUITE = """
import pytest

@pytest.mark.matrix(where=lambda a, b: (a, b) != (0, 0))
@pytest.mark.parametrize("a", range(4))
@pytest.mark.parametrize("b", range(3))
@pytest.mark.parametrize("c", range(3))
def test_product(a, b, c):
    if (a, b, c) == (1, 1, 1):
        pytest.skip("no such device")
    assert not open_door()

def open_door():
    import pathlib
    return pathlib.Path("door").exists()

def test_ordinary():
    pass
"""


@pytest.fixture(autouse=True)
def no_other_plugins(monkeypatch):
    monkeypatch.setenv("PYTEST_DISABLE_PLUGIN_AUTOLOAD", "1")  # half of a small run's time


@pytest.fixture
def suite(tmp_path: Path) -> Path:
    root = Path(__file__).resolve().parents[1]
    (tmp_path / "test_suite.py").write_text(SUITE)
    (tmp_path / "docs").mkdir()
    (tmp_path / "pytest.ini").write_text(
        f"[pytest]\npythonpath = {shlex.quote(str(root))}\naddopts = --import-mode=importlib\n"
    )
    (tmp_path / "conftest.py").write_text("pytest_plugins = ['tasks.matrix.plugin']\n")
    (tmp_path / ".gitignore").write_text(".matrix/\n__pycache__/\n.pytest_cache/\ndoor\n")
    git = ["git", "-c", "user.name=a", "-c", "user.email=a@b"]
    for words in (["init", "-q"], ["add", "."], ["commit", "-qm", "suite"]):
        subprocess.run([*git, *words], cwd=tmp_path, check=True)
    return tmp_path


def run(suite: Path, *words: str) -> tuple[int, str]:
    """Run pytest on the planted suite: its exit code and closing line."""
    command = [sys.executable, "-m", "pytest", "-p", "no:cacheprovider", *words]
    done = subprocess.run(command, cwd=suite, capture_output=True, text=True)
    return done.returncode, done.stdout.splitlines()[-1].strip("= ")


def test_default_run_takes_the_cover_and_every_ordinary_test(suite):
    code, line = run(suite)
    assert code == 0
    assert "deselected" in line
    assert 12 <= int(line.split()[0]) <= 17  # 4 x 3 pairs less one, and test_ordinary


def test_few_cases_of_a_cover_lie_evenly_in_it(suite):
    (suite / "test_few.py").write_text(
        "import pathlib, pytest\n"
        "@pytest.mark.matrix(few=2)\n"
        '@pytest.mark.parametrize("a", range(5))\n'
        "def test_few(a): pathlib.Path(str(a)).touch()\n"
    )
    assert run(suite, "test_few.py")[1].startswith("2 passed")
    assert sorted(path.name for path in suite.glob("[0-9]")) == ["0", "2"]
    assert run(suite, "test_few.py", "--full")[1].startswith("5 passed")


def test_full_run_takes_the_product_and_writes_the_page(suite):
    code, line = run(suite, "--full", "-m", "matrix")
    assert code == 0
    assert line.startswith("32 passed, 1 skipped")  # 36 less the 3 that don't exist
    page = (suite / "docs/matrix.md").read_text()
    assert "| c 3 x b 3 x a 4 | 33 |" in page
    assert "| 32 | 1 | 0 |" in page
    assert "1: Skipped: no such device" in page


def test_full_run_over_worker_processes_counts_the_same(suite):
    code, line = run(suite, "--full", "-m", "matrix", "-p", "xdist.plugin", "-n", "2")
    assert code == 0
    assert line.startswith("32 passed, 1 skipped")
    assert "| 32 | 1 | 0 |" in (suite / "docs/matrix.md").read_text()


def test_shards_together_are_the_product_and_the_last_writes_the_page(suite):
    for shard in (1, 2, 3):
        assert not (suite / "docs/matrix.md").exists()
        assert run(suite, "--full", "-m", "matrix", f"--shard={shard}/3")[0] == 0
    assert "| 32 | 1 | 0 |" in (suite / "docs/matrix.md").read_text()


def test_shards_of_a_default_run_part_its_tests(suite):
    passed = [
        int(run(suite, *words)[1].split()[0]) for words in ([], ["--shard=1/2"], ["--shard=2/2"])
    ]
    assert passed[0] == passed[1] + passed[2]
    assert all(passed)


def test_a_run_that_failed_goes_on_with_what_has_not_passed(suite):
    run(suite, "--full", "-m", "matrix", "--shard=1/2")
    (suite / "door").touch()
    code, line = run(suite, "--full", "-m", "matrix")
    assert code == 1
    assert int(line.split()[0]) < 32
    failed = line.split()[0]
    (suite / "door").unlink()
    assert run(suite, "--full", "-m", "matrix")[1].startswith(f"{failed} passed")
    assert run(suite, "--full", "-m", "matrix")[0] == 5  # nothing left to run


def test_another_state_of_the_tree_starts_anew(suite):
    run(suite, "--full", "-m", "matrix")
    (suite / "test_suite.py").write_text(SUITE + "\n# changed\n")
    assert run(suite, "--full", "-m", "matrix")[1].startswith("32 passed")


def test_records_survive_a_kill(suite):
    kill = "import os, pathlib\n\ndef pytest_runtest_teardown(item):\n"
    kill += (
        "    if 'a' in item.fixturenames and item.callspec.params['a'] == 2:\n        os._exit(9)\n"
    )
    (suite / "killer.py").write_text(kill)
    assert run_code(suite, "-p", "killer") == 9
    (path,) = (suite / ".matrix").glob("*/results*.jsonl")
    lines = [line for line in path.read_text().splitlines() if line]
    assert all(json.loads(line)["outcome"] for line in lines)
    assert len(lines) >= 1


def run_code(suite: Path, *words: str) -> int:
    command = [sys.executable, "-m", "pytest", "--full", "-m", "matrix", *words]
    return subprocess.run(command, cwd=suite, capture_output=True).returncode


def test_a_cover_above_the_limit_is_refused(suite):
    text = SUITE.replace("(a, b) != (0, 0)", "True").replace("range(3)", "range(9)")
    (suite / "test_suite.py").write_text(text)
    done = subprocess.run(
        [sys.executable, "-m", "pytest"], cwd=suite, capture_output=True, text=True
    )
    assert done.returncode == 4
    assert "the limit is 40" in done.stderr + done.stdout
