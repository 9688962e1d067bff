"""The published accuracy test: bf16 gradients, summed in fp32, against the alternatives."""

from __future__ import annotations

import pytest
import torch
import torch.distributed as dist

from lamina.collectives import reduce_scatter_fp32

from .native import reduce_scatter_native

TRIALS, NUMEL = 20, 100_000


def mean_error(result: torch.Tensor, exact: torch.Tensor) -> float:
    return ((result.double() - exact).abs().mean() / exact.abs().mean()).item()


@pytest.mark.ranks(4)
def test_a_bf16_wire_is_close_to_an_fp32_reduce_scatter_and_better_than_a_bf16_one():
    world, rank, group = dist.get_world_size(), dist.get_rank(), dist.group.WORLD
    own = slice(rank * NUMEL // world, (rank + 1) * NUMEL // world)
    errors = {"bf16 wire, fp32 sum": 0.0, "fp32 reduce-scatter": 0.0, "bf16 reduce-scatter": 0.0}
    for trial in range(TRIALS):
        generator = torch.Generator().manual_seed(trial)
        inputs = [torch.randn(NUMEL, generator=generator).bfloat16() for _ in range(world)]
        exact = torch.stack([each[own].double() for each in inputs]).sum(0)
        ours, single = torch.empty(NUMEL // world), torch.empty(NUMEL // world)
        half = torch.empty(NUMEL // world, dtype=torch.bfloat16)
        reduce_scatter_fp32(ours, inputs[rank], group)
        reduce_scatter_native(single, inputs[rank].float(), group)
        reduce_scatter_native(half, inputs[rank], group)
        for name, result in zip(errors, (ours, single, half), strict=True):
            errors[name] += mean_error(result, exact) / TRIALS
    if rank == 0:
        print("mean relative error:", {name: f"{value:.2e}" for name, value in errors.items()})
    ours, single, half = errors.values()
    assert ours <= 1.5 * single
    assert ours < half / 1000
