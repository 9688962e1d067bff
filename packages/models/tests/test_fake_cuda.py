"""Models on fake CUDA tensors: nothing is made on another device, no kernel refuses its inputs."""

from __future__ import annotations

import json
import subprocess
import sys
from pathlib import Path

import pytest

from lamina_testing.cuda_without_gpu import build, what_lacks

from .fake_cuda_cases import CASES, DTYPES

pytestmark = pytest.mark.slow  # it compiles against torch's headers, which not every g++ can


@pytest.fixture(scope="module")
def found(tmp_path_factory):
    if lacks := what_lacks():
        pytest.skip(lacks)
    library = build(tmp_path_factory.mktemp("cuda"))
    program = Path(__file__).with_name("fake_cuda_cases.py")
    run = [sys.executable, str(program), str(library)]
    done = subprocess.run(run, check=False, capture_output=True, text=True)
    assert not done.returncode, done.stderr
    return json.loads(done.stdout)


@pytest.mark.parametrize("case", CASES)
def test_gradients_are_on_the_device_in_the_dtype_of_their_parameters(found, case):
    assert found[case] == [f"cuda:0 {DTYPES[CASES[case][1]]}"]
