"""The three implementations of the sum: the reference is right, and the others have its bits."""

from __future__ import annotations

import itertools
import math
import os
import subprocess
import sys
from fractions import Fraction
from pathlib import Path

import pytest
import torch

from lamina.collectives.call.collective import Statistics
from lamina.collectives.reduction.summation import Epilogue, fused_sum, reference_sum

WIRES = [torch.float32, torch.bfloat16, torch.float16, torch.float64]


def wild(numel: int, wire: torch.dtype, seed: int) -> torch.Tensor:
    generator = torch.Generator().manual_seed(seed)
    exponents = torch.randint(-3, 4, (numel,), generator=generator)
    return (torch.randn(numel, generator=generator) * 10.0**exponents).to(wire)


@pytest.mark.parametrize("count", [1, 2, 3, 6, 7])
def test_the_reference_rounds_each_sum_of_the_tree_and_the_factor_once(count):
    """Oracle: rationals, rounded to fp32 by the only function that needs to be trusted."""

    def rounded(value: Fraction) -> Fraction:
        return Fraction(torch.tensor(float(value), dtype=torch.float32).item())

    def tree(values: list[Fraction]) -> Fraction:
        if len(values) == 1:
            return values[0]
        split = next(2**k for k in range(9, -1, -1) if 2**k < len(values))
        return rounded(tree(values[:split]) + tree(values[split:]))

    chunks = [wild(50, torch.float32, seed) for seed in range(count)]
    output, factor = wild(50, torch.float32, 99), torch.tensor(0.3).item()
    before = output.clone()
    reference_sum(chunks, output, factor, accumulate=True)
    for place in range(50):
        total = tree([Fraction(chunk[place].item()) for chunk in chunks])
        total = rounded(total * Fraction(factor))
        total = rounded(Fraction(before[place].item()) + total)
        assert output[place].item() == float(total)


def measured_sum(chunks, output, factor=None, accumulate=False):
    """Sum on the CPU as training does, and return squared norm and non-finite flag."""
    statistics = Statistics(output.device)
    fused_sum(chunks, output, Epilogue(factor, accumulate, statistics))
    return statistics.squared_norm, statistics.nonfinite


@pytest.mark.matrix(strength=1)
@pytest.mark.parametrize("wire", WIRES, ids=str)
@pytest.mark.parametrize("count", [1, 2, 3, 4, 5, 6, 7, 8, 9, 20])
def test_the_cpu_path_has_the_references_bits(wire, count):
    for numel, narrow, accumulate, factor in itertools.product(
        (0, 1, 5000, (1 << 18) + 3), (False, True), (False, True), (None, 1 / 3)
    ):
        if numel > 5000 and (count > 3 or narrow):
            continue
        if factor is not None and wire != torch.float64:
            factor = torch.tensor(factor, dtype=torch.float32).item()
        chunks = [wild(numel, wire, seed) for seed in range(count)]
        output = wild(numel, wire if narrow else torch.float32, 99)
        expected = output.clone()
        norm, nonfinite = reference_sum(chunks, expected, factor, accumulate)
        found = measured_sum(chunks, output, factor, accumulate)
        assert torch.equal(output, expected)
        assert found[0].item() == pytest.approx(norm.item(), rel=1e-13)
        assert found[1] == nonfinite


@pytest.mark.matrix(strength=1)
@pytest.mark.parametrize("wire", WIRES, ids=str)
@pytest.mark.parametrize("count", [1, 2, 3, 5, 8, 24, 33, 1000])
def test_rows_of_one_tensor_have_the_references_bits(wire, count):
    for numel, factor, accumulate in ((1, None, False), (5000, 0.5, False), (9001, None, True)):
        rows = torch.stack([wild(numel, wire, seed) for seed in range(count)])
        rows[:, ::3] = -0.0
        output = wild(numel, torch.promote_types(wire, torch.float32), 99)
        expected = output.clone()
        norm, nonfinite = reference_sum(list(rows.clone()), expected, factor, accumulate)
        found = measured_sum(rows, output, factor, accumulate)
        assert torch.equal(output.view(torch.uint8), expected.view(torch.uint8))
        assert found[0].item() == pytest.approx(norm.item(), rel=1e-13)
        assert found[1] == nonfinite


@pytest.mark.parametrize("place", range(5))
def test_the_cpu_path_may_write_over_any_chunk(place):
    chunks = [wild(70_000, torch.float32, seed) for seed in range(5)]
    expected = torch.empty(70_000)
    reference_sum(chunks, expected)
    fused_sum(chunks, chunks[place], Epilogue())
    assert torch.equal(chunks[place], expected)


def test_bits_and_norm_do_not_depend_on_the_number_of_threads():
    chunks = [wild(1 << 20, torch.bfloat16, seed) for seed in range(3)]
    found = []
    threads = torch.get_num_threads()
    try:
        for number in (1, 2, 3):
            torch.set_num_threads(number)
            output = torch.empty(1 << 20)
            norm, _ = measured_sum(chunks, output, 0.5)
            found.append((output, norm))
    finally:
        torch.set_num_threads(threads)
    for output, norm in found[1:]:
        assert torch.equal(output, found[0][0])
        assert norm == found[0][1]


def test_an_infinity_or_nan_is_found_wherever_it_is():
    for place, bad in itertools.product((0, 4095, 4096, 9999), (math.inf, math.nan)):
        chunk = torch.ones(10_000)
        chunk[place] = bad
        for implementation in (measured_sum, reference_sum):
            found = implementation([chunk, torch.ones(10_000)], torch.empty(10_000))
            assert found is not None
            assert found[1]


def test_the_definition_overwrites_unless_it_is_told_to_add():
    output = torch.full((3,), 9.0)
    reference_sum([torch.ones(3), torch.ones(3)], output)
    assert output.tolist() == [2.0] * 3
    reference_sum([torch.ones(3)], output, accumulate=True)
    assert output.tolist() == [3.0] * 3


INTERPRETED = """
import itertools, sys, torch
from lamina.collectives.reduction.summation import reference_sum
from lamina.collectives.reduction.triton_sum import Config, LEAVES, fused_sum

def statistics():
    return torch.empty((), dtype=torch.float64), torch.empty((), dtype=torch.bool)

cases = 0
for turn, count in enumerate((1, 2, 7, 2 * LEAVES + 3, LEAVES**2 + 40)):
    choices = list(itertools.product(
        (torch.float32, torch.bfloat16, torch.float16), (False, True), (False, True), (None, 1 / 3)
    ))
    if count > LEAVES**2:
        choices = [(torch.bfloat16, False, False, None)]
    elif "--all" not in sys.argv:
        # Every fifth from another place for each count: all values of each setting with each other.
        choices = [choices[(turn + 5 * i) % len(choices)] for i in range(len(choices) // 4)]
    for wire, narrow, accumulate, factor in choices:
        numel = 1500 if count < 9 else 700
        generator = torch.Generator().manual_seed(cases)
        chunks = [torch.randn(numel, generator=generator).to(wire) for _ in range(count)]
        output = torch.randn(numel, generator=generator).to(wire if narrow else torch.float32)
        expected, found = output.clone(), statistics()
        rounded = None if factor is None else torch.tensor(factor, dtype=torch.float32).item()
        rows = torch.stack(chunks)
        rows[:, ::3] = -0.0
        chunks = list(rows.clone())
        norm, _ = reference_sum(chunks, expected, rounded, accumulate)
        fused_sum(rows, output, rounded, accumulate, found, Config(512, 2, 4))
        same = torch.equal(output.view(torch.uint8), expected.view(torch.uint8))  # -0.0 is not 0.0
        assert same, (count, wire, narrow, accumulate, factor)
        assert abs(found[0] / norm - 1) < 1e-13 and not found[1]
        cases += 1
exact = torch.randn(8, 500)
output, found = torch.empty(500), statistics()
fused_sum(exact, output, None, False, found)
total = exact.double().sum(0)
assert ((output - total).abs() <= 3e-7 * exact.abs().sum(0)).all()
for bad in (float("inf"), float("-inf"), float("nan")):
    spoiled = torch.ones(2000)
    spoiled[1500] = bad
    for wire in (torch.float32, torch.bfloat16):
        output = torch.empty(2000, dtype=wire)
        rows = torch.stack([spoiled, torch.ones(2000)]).to(wire)
        fused_sum(rows, output, None, False, found)
        assert found[1], bad
        assert torch.equal(output[1500].float(), torch.tensor(bad)) or bad != bad
fused_sum(torch.empty(1, 0), torch.empty(0), None, False, found)
assert found[0] == 0 and not found[1]
print(cases, "cases")
"""


@pytest.mark.parametrize(
    ("choice", "cases"),
    [([], 25), pytest.param(["--all"], 97, marks=pytest.mark.slow)],
    ids=["choice", "all"],
)
def test_the_triton_kernel_has_the_references_bits(choice, cases):
    """In the interpreter, which has to be switched on before triton is imported."""
    pytest.importorskip("triton")
    environment = {**os.environ, "TRITON_INTERPRET": "1"}
    run = subprocess.run(
        [sys.executable, "-c", INTERPRETED, *choice],
        env=environment,
        capture_output=True,
        text=True,
    )
    assert run.returncode == 0, run.stderr
    assert run.stdout == f"{cases} cases\n"


COMPILED = Path(__file__).with_name("compile_kernels.py")


@pytest.mark.parametrize(
    "choice", [[], pytest.param(["--all"], marks=pytest.mark.slow)], ids=["choice", "all"]
)
def test_the_triton_kernel_compiles_without_spills_and_loads_vectors(choice):
    """Only compiled, for real targets: needs Triton and no GPU; not in an interpreting process."""
    pytest.importorskip("triton")
    environment = {name: value for name, value in os.environ.items() if name != "TRITON_INTERPRET"}
    run = subprocess.run(
        [sys.executable, str(COMPILED), *choice, "80", "90", "100"],
        env=environment,
        capture_output=True,
        text=True,
    )
    assert run.returncode == 0, run.stdout + run.stderr
