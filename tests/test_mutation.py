"""Faults are planted where they should be, and what tests say of them is counted right."""

from __future__ import annotations

import ast
import subprocess
from pathlib import Path

import pytest
from hypothesis import given
from hypothesis import strategies as st
from tasks.mutation.mutants import is_program, mutants_of_text
from tasks.mutation.page import Conditions, Verdict, explanation, keep, show
from tasks.mutation.running import Choice, Entered, Field, in_doubt, run_all, verdicts_of

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


def test_a_fault_knows_the_function_and_the_block_around_it():
    text = "class A:\n    @staticmethod\n    def f(a=0):\n        if a == b:\n"
    text += "            def g():\n                return 1\n        else:\n"
    text += "            x = 2\n    y = 3\n"
    found = {m.before: (m.function, m.block) for m in mutants_of_text("m.py", text)}
    assert found == {
        "0": ("A.f", 4),
        " == ": ("A.f", 4),
        "1": ("A.f.g", 6),
        "2": ("A.f", 8),
        "3": ("A", 0),
    }


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


def seldom(a):
    while a:
        return -a
    return a


def never(a, b):
    return a - b


def in_a_process(a):
    return -a
"""
TESTS = """
import subprocess
import sys
from lamina.mesh.planted import entered, held, seldom

def test_held():
    assert held(3, 1) == 2

def test_entered():
    entered(3, 1)

def test_process():
    program = "import lamina.mesh.planted as p, sys; sys.exit(p.in_a_process(0 - 7) - 7)"
    assert subprocess.run([sys.executable, "-c", program]).returncode == 0

def test_other():
    seldom(0)
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
    assert len(chosen) == 5
    entered = field.entered()
    verdicts = {v.mutant.function: v for v in run_all(field, entered, chosen, 2, 40)}
    assert {name: v.outcome for name, v in verdicts.items()} == {
        "held": "died",
        "entered": "lived",
        "never": "never entered",
        "seldom": "never entered",  # the function is entered, the block is not
        "in_a_process": "died",
    }
    assert verdicts["held"].by == "packages/mesh/tests/test_planted.py::test_held"
    assert verdicts["entered"].by == "1 tests"  # those that reach its block, and no others
    assert {path: path.read_bytes() for path in field.source.rglob("*.py")} == before
    assert in_doubt(field, list(verdicts.values()), entered) == []
    assert "of 5 faults 2 died, 1 lived, 2 never entered (40% died)" in show(
        "mesh", list(verdicts.values())
    )
    how = Conditions(field.tests, 0, 40)
    record = keep(field.root, "mesh", list(verdicts.values()), how).read_text()
    assert "- `planted.py:7:11 scale: a * b -> a` (lived)" in record
    assert "| sign | 4 | 2 | 0 | 2 |" in record
    assert "Each test that has killed a fault passed once more without it." in record


def test_a_run_goes_on_and_another_state_of_the_tests_starts_anew(field, monkeypatch):
    chosen = Choice(100, 0, (), "").of(field)
    entered = field.entered()
    first = list(run_all(field, entered, chosen[:2], 1, 40))
    with open(field.place / "verdicts.jsonl", "a") as handle:
        handle.write('{"mutant": {"fi')  # cut off
    tried = []
    monkeypatch.setattr(
        "tasks.mutation.running.try_mutant",
        lambda field, mutant, *_: tried.append(mutant) or first[0],
    )
    list(run_all(field, entered, chosen, 1, 40))
    assert tried == chosen[2:]
    tried.clear()
    list(run_all(field, entered, chosen[:2], 1, 40, again="lived"))
    assert tried == [v.mutant for v in first if v.outcome != "died"]
    tried.clear()
    list(run_all(field, entered, chosen[:2], 1, 40, again="all"))
    assert tried == chosen[:2]
    assert set(verdicts_of(field.place)) >= set(chosen[:2])
    tests = field.root / field.tests[0] / "test_planted.py"
    tests.write_text(TESTS + "\n# changed\n")
    assert verdicts_of(field.place) == {}


def test_tests_that_fail_without_a_fault_are_left_out_and_named(field):
    red = "def test_red():\n    import lamina.mesh.planted as p\n    assert p.entered(1, 1) == 2\n"
    (field.root / field.tests[0] / "test_red.py").write_text(red)
    entered = field.entered()
    name = "packages/mesh/tests/test_red.py::test_red"
    assert entered.failed == (name,)
    (mutant,) = (m for m in Choice(9, 0, ("scale",), "").of(field) if m.function == "entered")
    assert name not in entered.fitting("mesh", mutant, 40)
    died = Verdict(mutant, "died", name, 1.0)
    passed = Entered(entered.tests, {**entered.seconds, name: 0.1})
    assert in_doubt(field, [died], passed) == [name]
    how = Conditions(field.tests, 0, 40, entered.failed, (name,))
    assert f"Left out, as they fail without a fault: `{name}`. In doubt" in how.doubts()


def test_tests_that_cannot_be_collected_are_complained_of(field):
    (field.root / field.tests[0] / "test_broken.py").write_text("import no_such_module\n")
    with pytest.raises(RuntimeError, match="did not run to its end"):
        field.entered()


KERNEL = """
import triton
import triton.language as tl

@triton.jit
def kernel(x, n, out):
    i = tl.program_id(0)
    value = tl.load(x + i)
    if n > 1:
        value = value * 2
    tl.store(out + i, value)
"""
TEST_OF_KERNEL = """
import torch
from lamina.mesh.kernels import kernel

def test_kernel():
    x, out = torch.ones(3), torch.empty(3)
    kernel[(3,)](x, 1, out)
    assert torch.equal(out, x)
"""


def test_blocks_of_a_kernel_that_triton_interprets_are_seen(field, monkeypatch):
    pytest.importorskip("triton")
    monkeypatch.setenv("TRITON_INTERPRET", "1")
    (field.source / "kernels.py").write_text(KERNEL)
    (field.root / field.tests[0] / "test_kernels.py").write_text(TEST_OF_KERNEL)
    entered = Field(field.root, "mesh", ("packages/mesh/tests/test_kernels.py",)).entered()
    test = "packages/mesh/tests/test_kernels.py::test_kernel"
    assert entered.failed == ()
    assert entered.tests == {"mesh/kernels.py:7": [test]}  # and not the block in line 10


def test_one_case_of_each_test_comes_first_and_the_quickest_of_those():
    (mutant,) = mutants_of_text("m.py", "def f(a, b):\n    return a - b\n")
    seconds = {"a[1]": 1.0, "a[2]": 2.0, "a[3]": 3.0, "b[1]": 5.0, "c": 4.0}
    entered = Entered({"mesh/m.py:2": [*seconds, "skipped"]}, seconds)
    assert entered.fitting("mesh", mutant, 40) == ["a[1]", "c", "b[1]", "a[2]", "a[3]"]
    assert entered.fitting("mesh", mutant, 2) == ["a[1]", "c"]
    assert entered.fitting("ddp", mutant, 40) == []


def test_a_modules_own_statements_meet_all_tests_those_that_enter_it_first():
    (mutant,) = mutants_of_text("m.py", "LIMIT = 3\n")
    entered = Entered({"mesh/m.py:9": ["c"]}, {"a": 1.0, "b": 2.0, "c": 3.0})
    assert entered.fitting("mesh", mutant, 40) == ["c", "a", "b"]


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
