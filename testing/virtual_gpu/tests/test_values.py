"""Without arithmetic what a test says of values is left out, and nothing else is."""

from __future__ import annotations

import os
import subprocess
import sys
from pathlib import Path

import pytest

SUITE = """
import weakref
from contextlib import nullcontext
from dataclasses import dataclass

import pytest
import torch
from elsewhere import cut, given

def double(x):
    return x * 2

def helper_that_looks(x):
    assert x.sum().item() == 6

def test_values():
    '''All of these would need a device that computes.'''
    x = double(torch.tensor([1.0, 2.0], device="cuda"))
    assert torch.equal(x.cpu(), torch.tensor([2.0, 4.0]))
    assert x.sum().item() == 6, "a message"
    assert x[0] == 2
    y = x.cpu()
    loss = float(y.sum())
    assert y[1] == 4
    assert loss == 6
    torch.testing.assert_close(y, torch.tensor([2.0, 4.0]))
    helper_that_looks(x)
    assert x.shape == (2,)

def test_a_tensor_goes_after_an_assert_that_was_passed_over():
    x = torch.ones(3, device="cuda")
    alive = weakref.ref(x)
    assert x.add(1).sum().item() == 9
    del x
    assert alive() is None

class TestOne:
    def test_method(self):
        assert torch.tensor([1.0], device="cuda").add(1).item() == 2

def test_result_of_a_helper():
    x = given(torch.ones(3, device="cuda").double())
    assert x.shape == (3,)

def test_answers():
    alike = [torch.equal(torch.ones(1, device="cuda"), torch.zeros(1, device="cuda").add(1))]
    assert alike == [True]
    assert len(alike) == 1

def test_no_answers():
    alike = [torch.cuda.is_available()]
    assert alike == [False]

def test_launches():
    x = torch.ones(3, device="cuda")
    launches = 3
    assert launches == 4

def test_shape():
    assert tuple(torch.ones(3, device="cuda").shape) == (4,)

def test_an_error_that_values_would_have_caused():
    with pytest.raises(ValueError):
        cut(torch.ones(3, device="cuda"), None if torch.ones(1, device="cuda").item() else [3])

def test_an_error_that_did_not_come():
    with pytest.raises(ValueError):
        torch.ones(3, device="cuda")

def test_an_error_of_the_program():
    torch.ones(3, device="cuda").sum().item()
    double(None)

def test_an_error_of_the_program_from_values():
    cut(torch.ones(3, device="cuda"))

def test_the_same_function_where_it_reads_nothing():
    cut(torch.ones(3, device="cuda"), [1, 1])

def refuse(limit):
    raise ValueError(limit)

def test_an_error_of_a_number_that_the_line_read():
    refuse(torch.ones(1, device="cuda").item())

def test_an_error_of_a_number_that_was_read_before():
    limit = torch.ones(1, device="cuda").item() / 2
    refuse(limit)

def test_an_error_of_a_number_that_was_not_read():
    limit = 0.5
    refuse(limit)

def test_a_float_that_no_device_has_given():
    ratio, limit = 0.8, 0.75
    assert ratio <= limit

def test_a_number_in_place_of_none():
    norm = None if torch.zeros(1, device="cuda").item() == 0 else 3.0
    assert norm == 3.0

def test_an_error_that_is_expected_on_some_ranks():
    expected = pytest.raises(ValueError)
    with expected if torch.cuda.is_available() else nullcontext():
        cut(torch.ones(3, device="cuda"), None if torch.ones(1, device="cuda").item() else [3])

def test_an_error_in_other_words():
    with pytest.raises(ValueError, match="a sum of 3"):
        raise ValueError(f"a sum of {torch.ones(3, device='cuda').sum().item()}")

def test_an_error_in_other_words_that_reads_nothing():
    with pytest.raises(ValueError, match="a sum of 3"):
        raise ValueError("a sum of 4")

@dataclass
class Answer:
    alike: bool

def test_an_answer_in_a_dataclass():
    answer = Answer(torch.ones(1, device="cuda").add(1).item() == 2)
    assert answer == Answer(True)

def test_a_dataclass_that_no_device_has_given():
    answer = Answer(torch.cuda.is_available())
    assert answer == Answer(False)
"""

# pytest leaves its asserts as they are.
ELSEWHERE = """
def given(x):
    assert x.sum().item() == 6
    return x

def cut(x, sizes=None):
    return x.split(sizes or x.add(0).int().tolist())
"""


PYTEST = (sys.executable, "-m", "pytest", "-p", "no:cacheprovider")


@pytest.fixture
def outcomes(tmp_path: Path):
    def run(*words: str, **settings: str) -> dict[str, str]:
        (tmp_path / "test_suite.py").write_text(SUITE)
        (tmp_path / "elsewhere.py").write_text(ELSEWHERE)
        (tmp_path / "pytest.ini").write_text("[pytest]\npythonpath = .\n")
        answer = subprocess.run(
            [*PYTEST, "-v", "test_suite.py", *words],
            cwd=tmp_path,
            env={**os.environ, "PYTEST_DISABLE_PLUGIN_AUTOLOAD": "1", **settings},
            capture_output=True,
            text=True,
            timeout=400,
        )
        words = (line.split() for line in answer.stdout.splitlines() if "::" in line)
        return {w[0].partition("::")[2]: w[1] for w in words if w[1].isupper()}

    return run


def test_only_asserts_about_values_are_passed_over(outcomes):
    found = outcomes(VGPU_VALUES="unknown")
    assert found == {
        "test_values": "PASSED",
        "test_a_tensor_goes_after_an_assert_that_was_passed_over": "PASSED",
        "TestOne::test_method": "PASSED",
        "test_result_of_a_helper": "SKIPPED",
        "test_answers": "PASSED",
        "test_no_answers": "FAILED",
        "test_launches": "FAILED",
        "test_shape": "FAILED",
        "test_an_error_that_values_would_have_caused": "SKIPPED",
        "test_an_error_that_did_not_come": "FAILED",
        "test_an_error_of_the_program": "FAILED",
        "test_an_error_of_the_program_from_values": "SKIPPED",
        "test_the_same_function_where_it_reads_nothing": "FAILED",
        "test_an_error_of_a_number_that_the_line_read": "SKIPPED",
        "test_an_error_of_a_number_that_was_read_before": "SKIPPED",
        "test_an_error_of_a_number_that_was_not_read": "FAILED",
        "test_a_float_that_no_device_has_given": "FAILED",
        "test_a_number_in_place_of_none": "PASSED",
        "test_an_error_that_is_expected_on_some_ranks": "SKIPPED",
        "test_an_error_in_other_words": "SKIPPED",
        "test_an_error_in_other_words_that_reads_nothing": "FAILED",
        "test_an_answer_in_a_dataclass": "PASSED",
        "test_a_dataclass_that_no_device_has_given": "FAILED",
    }
    # The byte code of one mode is not taken for the other's.
    assert set(outcomes(VGPU_VALUES="").values()) == {"FAILED"}


@pytest.mark.parametrize(
    ("test", "reads"),
    [
        ("test_an_error_of_the_program_from_values", True),
        ("TestOne", False),
        ("test_launches", False),
    ],
)
def test_a_program_that_reads_a_number_says_so_and_a_test_does_not(outcomes, tmp_path, test, reads):
    """The test bed ends ranks by it that wait for each other."""
    said = tmp_path / "0.steered"
    assert outcomes("-k", test, VGPU_VALUES="unknown", VGPU_STEERED=str(said))
    assert said.exists() == reads
