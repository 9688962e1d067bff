"""Batches that the ranks do not divide: every sample counts once, and once only."""

from __future__ import annotations

import contextlib

import pytest
import torch
from hypothesis import given
from hypothesis import strategies as st

from lamina.checkpoint import BatchPart, cut_batch
from lamina_testing import device_type
from lamina_testing.oracles import bit_oracle
from lamina_testing.parity import assert_same

BATCH, WIDTH, STEPS = 14, 6, 2


@given(
    batch=st.integers(1, 60),
    ranks=st.integers(1, 9),
    microbatches=st.integers(1, 5),
    size=st.integers(0, 7),
)
def test_every_sample_counts_once_on_any_number_of_ranks(batch, ranks, microbatches, size):
    of_ranks = [
        cut_batch(batch, rank, ranks, microbatches=microbatches, size=size) for rank in range(ranks)
    ]
    assert len({len(parts) for parts in of_ranks}) == 1  # every rank takes part in every pass
    parts = [part for parts in of_ranks for part in parts]
    counted = [sample for part in parts if part.counted for sample in part.samples]
    assert sorted(counted) == list(range(batch))
    for part in parts:
        assert part.counted in (0, len(part.samples))
        assert part.samples
        assert set(part.samples) <= set(range(batch))
        assert part.weight * batch == pytest.approx(part.counted * ranks)
    if size:  # pass by pass and rank by rank, the parts are the same leaves in the same order
        in_order = [parts[index] for index in range(len(of_ranks[0])) for parts in of_ranks]
        leaves = [part.samples for part in in_order if part.counted]
        assert leaves == [range(k, min(k + size, batch)) for k in range(0, batch, size)]
    else:
        shares = [sum(part.counted for part in parts) for parts in of_ranks]
        assert max(shares) - min(shares) <= 1


@pytest.mark.parametrize(
    ("wrong", "said"),
    [
        ({"batch_size": 0}, "batch_size is 0"),
        ({"batch_size": 4, "microbatches": 0}, "microbatches is 0"),
        ({"batch_size": 4, "size": -1}, "size is -1"),
        ({"batch_size": 4, "rank": 2, "ranks": 2}, "rank is 2 of 2"),
    ],
)
def test_cuts_that_mean_nothing_are_refused(wrong, said):
    with pytest.raises(ValueError, match=said):
        cut_batch(**wrong)


def build(dtype: torch.dtype) -> torch.nn.Module:
    torch.manual_seed(3)
    return torch.nn.Sequential(
        torch.nn.Linear(WIDTH, 10), torch.nn.Tanh(), torch.nn.Linear(10, 3)
    ).to(dtype)


def adamw(model: torch.nn.Module) -> torch.optim.Optimizer:
    return torch.optim.AdamW(model.parameters(), lr=1e-2, foreach=False)


def batch_of(step: int, dtype: torch.dtype) -> torch.Tensor:
    generator = torch.Generator().manual_seed(step)
    return torch.randn(BATCH, WIDTH, generator=generator).to(dtype)


def losses(model: torch.nn.Module, rows: torch.Tensor) -> torch.Tensor:
    return model(rows).square().sum(1)


def trained(parts: list[BatchPart], strategy: int, reproducible: bool, dtype: torch.dtype):
    """Whole parameters after each step."""
    from lamina.ddp import finalize_grads, full_parameters
    from lamina.fsdp import fully_shard
    from lamina.mesh import ParallelLayout

    mesh = ParallelLayout().build(device_type())
    model = build(dtype)
    model, optimizer = fully_shard(
        model,
        adamw(model),
        device_mesh=mesh,
        fsdp_unit_modules=[torch.nn.Linear],
        zero_dp_strategy=strategy,
        reproducible=reproducible,
        calculate_per_token_loss=reproducible,
    )
    for step in range(STEPS):
        batch = batch_of(step, dtype)
        for index, part in enumerate(parts):
            last = index == len(parts) - 1
            mine = losses(model, batch[list(part.samples)]).mean()
            with contextlib.nullcontext() if last else model.no_sync():
                (mine * (part.counted if reproducible else part.weight)).backward()
        counted = sum(part.counted for part in parts)
        finalize_grads(model, mesh, num_tokens=counted if reproducible else None)
        optimizer.step()
        optimizer.zero_grad()
        yield {name: value.detach().clone() for name, value in full_parameters(model).items()}


@pytest.mark.matrix(strength=1)
@pytest.mark.ranks(3, 5)
@pytest.mark.parametrize("strategy", [0, 1, 2, 3])
@pytest.mark.parametrize("microbatches", [1, 4])  # 4 passes over 5 ranks: some have no sample
def test_uneven_parts_train_like_one_process(ranks, strategy, microbatches):
    parts = cut_batch(BATCH, ranks.rank, ranks.world_size, microbatches=microbatches)
    model = build(torch.float64)
    optimizer = adamw(model)
    for step, found in enumerate(trained(parts, strategy, False, torch.float64)):
        optimizer.zero_grad()
        losses(model, batch_of(step, torch.float64)).mean().backward()
        optimizer.step()
        for name, value in model.named_parameters():
            torch.testing.assert_close(found[name], value.detach(), rtol=1e-12, atol=1e-12)


@pytest.mark.matrix(strength=1)
@pytest.mark.ranks(1, 3, 4, 5)
@pytest.mark.parametrize("strategy", [0, 1, 2, 3])
def test_uneven_leaves_have_the_bits_of_one_process(ranks, strategy):
    leaf = 2
    parts = cut_batch(BATCH, ranks.rank, ranks.world_size, size=leaf)

    def data(step):
        return [list(batch_of(step, torch.float32).split(leaf))]

    def summed(model, rows):
        return losses(model, rows).mean() * len(rows), len(rows)

    oracle = bit_oracle(
        lambda: build(torch.float32),
        data,
        summed,
        adamw,
        steps=STEPS,
        cadence="reproducible",
        per_token=True,
    )
    for found, wanted in zip(trained(parts, strategy, True, torch.float32), oracle, strict=True):
        assert_same(found, wanted.parameters)
