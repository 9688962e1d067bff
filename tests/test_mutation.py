"""Faults are planted where they should be, and what tests say of them is counted right."""

from __future__ import annotations

import ast
import subprocess
from pathlib import Path

import pytest
from hypothesis import given
from hypothesis import strategies as st
from tasks.mutation.mutants import is_program, mutants_of_text
from tasks.mutation.page import explanation, keep, show
from tasks.mutation.running import Choice, Field, run_all, verdicts_of

ROOT = Path(__file__).resolve().parents[1]

FAULTS = {
    "if a < b:\n    pass": {("condition", "not (a < b)"), ("condition", " <= ")},
    "if a == b:\n    pass": {("condition", " != ")},
    "x = a in b": {("condition", " not in ")},
    "x = a is not b": {("condition", " is ")},
    "x = a and b": {("condition", " or ")},
    "x = f(flag=True)": {("condition", "False")},
    "x = a if not b else c": {("condition", "b")},
    "x = a - b": {("sign", " + ")},
    "x = -a": {("sign", "a")},
    "x += y": {("sign", " -= ")},
    "x = a * b": {("scale", "a")},
    "x = a // b": {("scale", "a")},
    "x *= y": {("scale", "pass")},
    "x = 0.5": {("scale", "1.0")},
    "x = a[3]": {("off-by-one", "4")},
    "for i in range(n):\n    pass": {("off-by-one", "n - 1")},
    "handle.wait()": {("wait", "pass")},
    "pool.release(x)": {("call", "pass")},
}
LEFT_ALONE = [
    '"""A docstring, 1 + 1."""',
    "raise ValueError(f'{a + b} is not 3')",
    "assert a < b",
    '__all__ = ["x" + "y"]',
    "x: Literal[1, 2]",
    "def f(x: int = None) -> Literal[1]:\n    pass",
    "if TYPE_CHECKING:\n    import x",
    "class A:\n    def __repr__(self):\n        return a + b",
    "x = f'{a + b}'",
    "x = 'a' + b",
]


@pytest.mark.parametrize("text", FAULTS)
def test_a_fault_of_each_kind_is_planted(text):
    found = mutants_of_text("m.py", text)
    assert {(mutant.kind, mutant.after) for mutant in found} == FAULTS[text]
    for mutant in found:
        planted = mutant.plant(text)
        assert is_program(mutant, text)
        assert ast.dump(ast.parse(planted)) != ast.dump(ast.parse(text))
        assert planted.replace(mutant.after, "", 1).count(mutant.before) < text.count(mutant.before)


@pytest.mark.parametrize("text", LEFT_ALONE)
def test_what_is_for_people_or_checkers_is_left_alone(text):
    assert mutants_of_text("m.py", text) == []


@given(st.text(alphabet="aé\u20ac ", max_size=5), st.integers(0, 3))
def test_only_the_place_changes_whatever_stands_before_it(comment, lines):
    head = f"# {comment}\n" * lines + f"'{comment}'; "
    text = head + "x = a - b\ny = a - b\n"
    first, second = mutants_of_text("m.py", text)
    assert first.plant(text) == head + "x = a + b\ny = a - b\n"
    assert second.plant(text) == head + "x = a - b\ny = a + b\n"


def test_a_fault_knows_the_function_around_it():
    text = "class A:\n    @staticmethod\n    def f():\n"
    text += "        def g():\n            return 1\n        return 2\n"
    inner, outer = mutants_of_text("m.py", text)
    assert (inner.function, inner.first_line) == ("A.f.g", 4)
    assert (outer.function, outer.first_line) == ("A.f", 2)


def test_a_fault_is_not_planted_into_a_source_that_has_changed():
    (mutant,) = mutants_of_text("m.py", "x = a - b\n")
    with pytest.raises(ValueError, match="the source has changed"):
        mutant.plant("\nx = a - b\n")


# ------------------------------------------------------------------------ a planted layer

SOURCE = """
def held(a, b):
    return a - b


def entered(a, b):
    return a * b


def never(a, b):
    return a - b


def in_a_process(a):
    return -a
"""
TESTS = """
import subprocess
import sys
from lamina.mesh.planted import entered, held

def test_held():
    assert held(3, 1) == 2

def test_entered():
    entered(3, 1)

def test_process():
    program = "import lamina.mesh.planted as p, sys; sys.exit(p.in_a_process(0 - 7) - 7)"
    assert subprocess.run([sys.executable, "-c", program]).returncode == 0

def test_other():
    pass
"""


@pytest.fixture
def field(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> Field:
    source = tmp_path / "packages/mesh/src/lamina/mesh"
    source.mkdir(parents=True)
    (source / "__init__.py").touch()
    (source / "planted.py").write_text(SOURCE)
    tests = tmp_path / "packages/mesh/tests"
    tests.mkdir()
    (tests / "test_planted.py").write_text(TESTS)
    (tmp_path / "conftest.py").write_text('pytest_plugins = ["tasks.matrix.plugin"]\n')
    (tmp_path / ".gitignore").write_text(".matrix/\n__pycache__/\n")
    git = ["git", "-c", "user.name=a", "-c", "user.email=a@b"]
    for words in (["init", "-q"], ["add", "."], ["commit", "-qm", "planted"]):
        subprocess.run([*git, *words], cwd=tmp_path, check=True)
    monkeypatch.setenv("PYTHONPATH", str(ROOT))
    monkeypatch.setenv("PYTEST_DISABLE_PLUGIN_AUTOLOAD", "1")
    return Field(tmp_path, "mesh", ("packages/mesh/tests",))


def test_faults_die_live_or_are_never_entered(field):
    before = {path: path.read_bytes() for path in field.source.rglob("*.py")}
    chosen = Choice(100, 0, (), "").of(field)
    assert len(chosen) == 4
    verdicts = {v.mutant.function: v for v in run_all(field, chosen, 2, 40, again=False)}
    assert {name: v.outcome for name, v in verdicts.items()} == {
        "held": "died",
        "entered": "lived",
        "never": "never entered",
        "in_a_process": "died",
    }
    assert verdicts["held"].by == "packages/mesh/tests/test_planted.py::test_held"
    assert verdicts["entered"].by == "1 tests"  # those that enter the function, and no others
    assert {path: path.read_bytes() for path in field.source.rglob("*.py")} == before
    assert "of 4 faults 2 died, 1 lived, 1 never entered (50% died)" in show(
        "mesh", list(verdicts.values())
    )
    record = keep(field.root, "mesh", list(verdicts.values()), field.tests).read_text()
    assert "- `planted.py:7:11 scale: a * b -> a` (lived)" in record
    assert "| sign | 3 | 2 | 0 | 1 |" in record


def test_a_run_goes_on_and_another_state_of_the_tests_starts_anew(field, monkeypatch):
    chosen = Choice(100, 0, (), "").of(field)
    first = list(run_all(field, chosen[:2], 1, 40, again=False))
    with open(field.place / "verdicts.jsonl", "a") as handle:
        handle.write('{"mutant": {"fi')  # cut off
    tried = []
    monkeypatch.setattr(
        "tasks.mutation.running.try_mutant",
        lambda field, mutant, *_: tried.append(mutant) or first[0],
    )
    list(run_all(field, chosen, 1, 40, again=False))
    assert tried == chosen[2:]
    assert set(verdicts_of(field.place)) >= set(chosen[:2])
    tests = field.root / field.tests[0] / "test_planted.py"
    tests.write_text(TESTS + "\n# changed\n")
    assert verdicts_of(field.place) == {}


def test_tests_that_fail_without_a_fault_are_complained_of(field):
    (field.root / field.tests[0] / "test_red.py").write_text("def test_red():\n    assert False\n")
    with pytest.raises(RuntimeError, match=r"do not pass without a fault: \[.*test_red"):
        field.entered()


def test_a_larger_sample_holds_the_smaller_and_choices_hold(field):
    assert Choice(2, 0, (), "").of(field) == Choice(4, 0, (), "").of(field)[:2]
    assert {m.kind for m in Choice(9, 0, ("sign",), "").of(field)} == {"sign"}
    assert Choice(9, 0, (), "no-such-file").of(field) == []


def test_an_explanation_is_found_wherever_the_line_has_moved():
    (mutant,) = mutants_of_text("m.py", "\n\ndef f(a, b):\n    return a - b\n")
    entry = {"file": "m.py", "function": "f", "before": " - ", "after": " + ", "why": "b is 0"}
    assert explanation("mesh", mutant, {"mesh": [entry]}) == "b is 0"
    assert explanation("mesh", mutant, {"ddp": [entry]}) == ""
    assert explanation("mesh", mutant, {"mesh": [{**entry, "function": "g"}]}) == ""
