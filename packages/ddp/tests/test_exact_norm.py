"""The norm of `invariant=True`: exact sums of squares, against Python's fractions."""

from __future__ import annotations

import random
import struct
from fractions import Fraction

import pytest
import torch

from lamina.ddp import DistributedDataParallel, DistributedDataParallelConfig, clip_grad_norm
from lamina.ddp.norm.exact_squares import ExactSquares
from lamina.mesh import ParallelLayout
from lamina_testing import device_type


def any_magnitudes(count, seed=0):
    """Finite fp32 numbers of all exponents, zeros and denormals among them."""
    draw = random.Random(seed)
    words = [draw.getrandbits(32) for _ in range(count)]
    numbers = [struct.unpack("<f", struct.pack("<I", word))[0] for word in words]
    kept = [number for number in numbers if abs(number) < float("inf")]
    return torch.tensor([*kept, 0.0, -0.0, 2.0**-149, -(2.0**-126), 3.4e38])


@pytest.mark.parametrize("scale", [0, 40, 149], ids="largest 2^-{}".format)
def test_the_norm_is_that_of_fractions(scale):
    numbers = any_magnitudes(3000) * 2.0**-scale  # rounded to fp32 first
    norm = ExactSquares().root(ExactSquares().share(numbers)).item()
    squared = sum(Fraction(number) ** 2 for number in numbers.tolist())
    assert abs(Fraction(norm) ** 2 / squared - 1) < Fraction(1, 10**15)


def test_no_order_and_no_cut_changes_a_bit():
    kind, numbers = ExactSquares(), any_magnitudes(3000)
    whole = kind.share(numbers)
    for seed in range(5):
        generator = torch.Generator().manual_seed(seed)
        mixed = numbers[torch.randperm(len(numbers), generator=generator)]
        shares = [kind.share(part) for part in mixed.split(1 + 300 * seed)]
        assert torch.equal(sum(shares[1:], shares[0]), whole)


@pytest.mark.parametrize("dtype", [torch.bfloat16, torch.float16])
def test_narrow_gradients_have_the_norm_of_their_values(dtype):
    numbers = torch.linspace(-3, 3, 100).to(dtype)
    assert torch.equal(ExactSquares().share(numbers), ExactSquares().share(numbers.float()))


@pytest.mark.parametrize(
    ("number", "text"), [(torch.inf, "inf"), (-torch.inf, "inf"), (torch.nan, "nan")]
)
def test_what_is_not_finite_shows(number, text):
    kind = ExactSquares()
    total = kind.share(torch.tensor([1.0, number])) + kind.share(torch.tensor([torch.inf]))
    assert str(kind.root(total).item()) == text


GRADIENT = torch.tensor([2.0**-3] * 64 + [2.0**-30] * 4096 + [2.0**-12] * 2 + [2.0**-24])
"""Without the small elements the norm is 1 + 2^-24, the middle between two fp32 numbers.

Each small square is lost where it is added in fp64 to that of a large one.
"""


class Parameter(torch.nn.Module):
    """A vector whose gradient is what it is called with."""

    def __init__(self, count):
        super().__init__()
        self.weight = torch.nn.Parameter(torch.zeros(count))

    def forward(self, factors):
        return self.weight @ factors


@pytest.mark.ranks(1, 4)
@pytest.mark.parametrize("sharded", [False, True])
def test_the_norm_rounds_the_exact_sum_on_every_layout(sharded, ranks):
    mesh = ParallelLayout().build(device_type())
    config = DistributedDataParallelConfig(
        invariant=True, use_distributed_optimizer=sharded, average_in_collective=False
    )
    model = DistributedDataParallel(Parameter(len(GRADIENT)), config, mesh)
    model(GRADIENT.to(model.module.weight.device)).backward()
    squared = sum(Fraction(number) ** 2 for number in GRADIENT.tolist())
    assert Fraction(1 + 2.0**-24) ** 2 < squared < Fraction(1 + 2.0**-23) ** 2
    assert clip_grad_norm(model, torch.inf, mesh).item() == 1 + 2.0**-23
    # Riders make the message a mixed one.
    assert clip_grad_norm(model, torch.inf).item() == 1 + 2.0**-23


@pytest.mark.ranks(1)
def test_fp64_gradients_are_refused_by_name():
    config = DistributedDataParallelConfig(invariant=True)
    model = DistributedDataParallel(Parameter(2).double(), config)
    model(torch.ones(2).double()).backward()
    with pytest.raises(ValueError, match=r"torch.float64.*reproducible=True"):
        clip_grad_norm(model, 1.0)
    assert clip_grad_norm(model, 1.0, norm_type=torch.inf).item() == 1.0
