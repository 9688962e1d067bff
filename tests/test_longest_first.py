"""Workers begin with the modules that took longest, and a run records how long each takes."""

from __future__ import annotations

import json
import subprocess
import sys
from pathlib import Path

CONFTEST = """
from pathlib import Path

import longest_first
import pytest

longest_first.RECORD = Path(__file__).with_name("durations.json")
pytest_plugins = ["longest_first"]

@pytest.hookimpl(wrapper=True)
def pytest_runtest_makereport(item, call):
    # The same on a busy machine as on a quiet one.
    report = yield
    report.duration = 5.0 if (item.name, call.when) == ("test_one", "call") else 0.0
    return report
"""
MANY = "import pytest\n\n@pytest.mark.parametrize('n', range(3))\ndef test(n): pass\n"
LONG = "def test_one(): pass\n\ndef test_another(): pass\n"


def run(place: Path, *words: str) -> list[str]:
    """Run the tests of a directory on one worker; return them in the order in which they ended."""
    command = [sys.executable, "-m", "pytest", "-v", "-p", "no:cacheprovider", *words]
    answer = subprocess.run(
        [*command, "-n", "1", "--dist", "loadscope", "--import-mode=importlib"],
        cwd=place,
        env={"PYTHONPATH": str(Path(__file__).parent), "PATH": "/usr/bin:/bin"},
        capture_output=True,
        text=True,
    )
    assert answer.returncode == 0, answer.stdout + answer.stderr
    return [line.split()[-1] for line in answer.stdout.splitlines() if "PASSED" in line]


def test_the_module_that_took_longest_begins(tmp_path):
    (tmp_path / "conftest.py").write_text(CONFTEST)
    (tmp_path / "test_many.py").write_text(MANY)
    (tmp_path / "test_long.py").write_text(LONG)
    (tmp_path / "durations.json").write_text('{"test_gone.py": 9.0}')
    many = [f"test_many.py::test[{n}]" for n in range(3)]
    long = ["test_long.py::test_one", "test_long.py::test_another"]
    assert run(tmp_path, "--keep-durations") == [*many, *long], "unknown: by the number of tests"
    record = json.loads((tmp_path / "durations.json").read_text())
    assert record == {"test_long.py": 5.0}
    assert run(tmp_path) == [*long, *many]
