"""What `-s elsewhere` makes: a place that shares nothing with this one, and a table of trials."""

from __future__ import annotations

import ast
import json
import os
import re
import subprocess
import sys
from pathlib import Path

import pytest
from tasks.bootstrap import ROOT
from tasks.elsewhere import record
from tasks.elsewhere.place import made, settings_of_pip
from tasks.elsewhere.pythons import SYSTEM, version_of

needs_the_system = pytest.mark.skipif(
    not (ROOT / ".git").exists() or version_of(SYSTEM) < (3, 11),
    reason=f"needs git's data of the tree, and a {SYSTEM} of 3.11 or newer",
)
PARTS = ("packages", "testing", "tests", "tasks", "examples", "benchmarks")
LOOK = """
import json, os
made = os.umask(0)
print(json.dumps([os.getuid(), made, os.getcwd(), dict(os.environ)]))
"""


@needs_the_system
def test_a_place_has_another_user_path_and_environment(monkeypatch):
    monkeypatch.setenv("PYTHONUNBUFFERED", "1")
    monkeypatch.setenv("MINE", "1")
    with made(SYSTEM) as place:
        done = place.run(SYSTEM, "-c", LOOK, limit=60, where=place.tree.name, echo=False)
        user, umask, where, environment = json.loads(done.last_line)
        assert (user != os.getuid()) == (os.getuid() == 0)
        assert umask == 0o077
        assert where == str(place.tree)
        assert " " in where
        assert "lamina" in where
        assert environment["LC_ALL"] == "C"
        assert not list(Path(environment["HOME"]).iterdir())
        assert not {"PYTHONUNBUFFERED", "PYTHONPATH", "MINE"} & {*environment}
        assert (place.tree / "noxfile.py").stat().st_mode & 0o777 == 0o600
        assert not (place.tree / ".git").exists()
        slow = place.run(SYSTEM, "-c", "import time; time.sleep(600)", limit=1, echo=False)
        assert slow.code < 0
    assert not place.root.exists()


KILLED = """
import os, signal, threading
from pathlib import Path
from tasks.elsewhere.place import made
with made(Path("/usr/bin/python3")) as place:
    print(place.root, flush=True)
    threading.Timer(0.3, os.kill, (os.getpid(), signal.SIGTERM)).start()
    place.run("sleep", "61.8", limit=60)
"""


@needs_the_system
def test_a_place_is_gone_when_its_task_is_ended():
    command = [sys.executable, "-c", KILLED]
    run = subprocess.run(command, cwd=ROOT, capture_output=True, text=True)
    assert run.returncode == 143, run.stderr
    assert not Path(run.stdout.strip()).exists()


def test_of_pips_settings_a_place_has_where_packages_come_from(monkeypatch, tmp_path):
    file = tmp_path / "pip.conf"
    file.write_text(
        "[global]\nfind-links = /some/wheels\ncache-dir = /mine\n[install]\nuser = yes\n"
    )
    for name in [name for name in os.environ if name.startswith("PIP_")]:
        monkeypatch.delenv(name)
    monkeypatch.setenv("PIP_CONFIG_FILE", str(file))
    monkeypatch.setenv("PIP_INDEX_URL", "https://some/index")
    found = settings_of_pip()
    assert found["PIP_FIND_LINKS"] == "/some/wheels"
    assert found["PIP_INDEX_URL"] == "https://some/index"
    assert not {"PIP_CACHE_DIR", "PIP_USER", "PIP_CONFIG_FILE"} & {*found}


def test_the_table_has_the_last_trial_of_each_python_and_torch(monkeypatch, tmp_path):
    monkeypatch.setattr(record, "RECORD", tmp_path / "elsewhere.md")
    row = record.Row("3.13.0", "2.15.0", "abc", "9 passed", "all as it should be")
    record.add(row)
    record.add(row._replace(python="3.14", torch="", tests="", others="not reached: no network"))
    record.add(row._replace(python="3.9.1"))
    record.add(row._replace(tests="8 passed, 1 failed"))
    text = record.RECORD.read_text()
    first = [line.split(" | ")[0] for line in text.splitlines() if " | abc | " in line]
    assert first == ["| 3.9.1", "| 3.13.0", "| 3.14"]
    assert text.count("9 passed") == 1
    assert "8 passed, 1 failed" in text
    record.add(row._replace(python="3.14.2"))
    assert "not reached" not in record.RECORD.read_text()


def test_the_recorded_table_can_be_written_again():
    """A row that a reader cannot take apart would be lost with the next trial."""
    if record.RECORD.exists():
        before = record.RECORD.read_text()
        assert before.startswith(record.HEAD)
        assert all(line.count("|") == 7 for line in before[len(record.HEAD) :].splitlines())


def test_no_source_is_known_by_a_word_in_its_path():
    """A clone is called lamina, and then torch's files lie below a folder of that name too."""
    words = re.compile(r"lamina|torch|packages|tests")
    found = []
    for path in (each for top in PARTS for each in sorted((ROOT / top).rglob("*.py"))):
        for node in ast.walk(ast.parse(path.read_text())):
            if not (isinstance(node, ast.Compare) and isinstance(node.ops[0], ast.In | ast.NotIn)):
                continue
            word, where = getattr(node.left, "value", None), ast.unparse(node.comparators[0])
            in_path = re.search(r"(file|filename|path|__file__)\)?$", where)
            if isinstance(word, str) and words.search(word) and ("/" in word or in_path):
                found.append(f"{path.relative_to(ROOT)}:{node.lineno}: {ast.unparse(node)}")
    assert not found, f"ask lamina_testing.walk.path_in_lamina, or a package's own folder: {found}"
