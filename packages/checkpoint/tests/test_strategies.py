"""What fully_shard shards one way loads into what it shards another way."""

from __future__ import annotations

import pytest
import torch
import torch.distributed as dist
from torch import nn

from lamina.checkpoint import CheckpointManager

fsdp = pytest.importorskip("lamina.fsdp")
ddp = pytest.importorskip("lamina.ddp")


class Block(nn.Module):
    def __init__(self) -> None:
        super().__init__()
        self.norm = nn.LayerNorm(24)
        self.linear = nn.Linear(24, 24)

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        return x + self.linear(self.norm(x)).tanh()


def build(strategy: int | None, seed: int, *, frozen: bool = False, **settings: object):
    torch.manual_seed(seed)
    model = nn.Sequential(nn.Linear(8, 24), Block(), Block(), nn.Linear(24, 3))
    model[0].requires_grad_(not frozen)
    model[1].norm.requires_grad_(not frozen)
    optimizer = torch.optim.AdamW(
        [
            {"params": [p for p in model.parameters() if p.ndim > 1], "weight_decay": 0.1},
            {"params": [p for p in model.parameters() if p.ndim == 1], "weight_decay": 0.0},
        ],
        lr=0.02,
    )
    if strategy is None:
        return model, optimizer
    return fsdp.fully_shard(
        model, optimizer, fsdp_unit_modules=[Block], zero_dp_strategy=strategy, **settings
    )


def train(model, optimizer, seeds: range) -> None:
    rank = dist.get_rank()
    for seed in seeds:
        x = torch.randn(4, 8, generator=torch.Generator().manual_seed(100 * seed + rank))
        y = model(x)
        (y - x[:, : y.shape[1]]).square().mean().backward()
        optimizer.step()
        optimizer.zero_grad()


@pytest.mark.matrix(few=2)
@pytest.mark.ranks(2)
@pytest.mark.parametrize("saved", [0, 1, 2, 3])
def test_training_goes_on_bit_for_bit_under_every_strategy(tmp_path, saved):
    model, optimizer = build(saved, seed=0)
    train(model, optimizer, range(3))
    CheckpointManager(tmp_path).save(3, {"model": model, "optimizer": optimizer})
    train(model, optimizer, range(3, 6))
    expected = ddp.full_parameters(model)

    for loaded in (0, 1, 2, 3):
        other, fresh = build(loaded, seed=9)
        CheckpointManager(tmp_path).restore({"model": other, "optimizer": fresh})
        train(other, fresh, range(3, 6))
        got = ddp.full_parameters(other)
        assert got.keys() == expected.keys()
        for name, tensor in expected.items():
            assert torch.equal(got[name], tensor), f"{name} under strategy {loaded}"


@pytest.mark.ranks(2)
@pytest.mark.parametrize(("saved", "loaded"), [(3, 1), (1, 3)])
def test_mixed_precision_beside_frozen_parameters_goes_on_bit_for_bit(tmp_path, saved, loaded):
    policy = fsdp.MixedPrecisionPolicy(param_dtype=torch.bfloat16)

    def training(strategy: int, seed: int) -> tuple[nn.Module, torch.optim.Optimizer]:
        return build(strategy, seed, frozen=True, mixed_precision_policy=policy)

    model, optimizer = training(saved, 0)
    train(model, optimizer, range(2))
    CheckpointManager(tmp_path).save(2, {"model": model, "optimizer": optimizer})
    train(model, optimizer, range(2, 5))
    other, fresh = training(loaded, 9)
    CheckpointManager(tmp_path).restore({"model": other, "optimizer": fresh})
    train(other, fresh, range(2, 5))
    expected = ddp.full_parameters(model)
    for name, tensor in ddp.full_parameters(other).items():
        assert torch.equal(tensor, expected[name]), name
        frozen = name.startswith(("0.", "1.norm"))
        assert tensor.dtype is (torch.bfloat16 if frozen else torch.float32)


@pytest.mark.ranks(2)
@pytest.mark.parametrize("kind", ["Muon", pytest.param("Adafactor", marks=pytest.mark.slow)])
def test_optimizers_of_whole_matrices_go_on_where_they_were(tmp_path, kind):
    """State comes back into an optimizer that has not stepped, and from one process too."""

    def build(seed: int, *, alone: bool = False) -> tuple[nn.Module, torch.optim.Optimizer]:
        torch.manual_seed(seed)
        model = nn.Sequential(nn.Linear(8, 8, bias=False), nn.Tanh(), nn.Linear(8, 8, bias=False))
        optimizer = getattr(torch.optim, kind)(model.parameters(), lr=0.02)
        return (model, optimizer) if alone else fsdp.fully_shard(model, optimizer)

    model, optimizer = build(0)
    train(model, optimizer, range(3))
    CheckpointManager(tmp_path / "a").save(3, {"model": model, "optimizer": optimizer})
    plain, muon = build(7, alone=True)
    CheckpointManager(tmp_path / "a").restore({"model": plain, "optimizer": muon})
    CheckpointManager(tmp_path / "b").save(3, {"model": plain, "optimizer": muon})
    train(model, optimizer, range(3, 6))
    expected = ddp.full_parameters(model)
    for name in ("a", "b"):
        other, fresh = build(9)
        CheckpointManager(tmp_path / name).restore({"model": other, "optimizer": fresh})
        train(other, fresh, range(3, 6))
        for key, tensor in ddp.full_parameters(other).items():
            assert torch.equal(tensor, expected[key]), (name, key)


@pytest.mark.ranks(2)
def test_step_counts_that_differ_come_back_where_parameters_share_one(tmp_path):
    """fully_shard gives spans that step as one flat run one tensor for their count."""

    class Pair(nn.Module):
        def __init__(self) -> None:
            super().__init__()
            self.a, self.b = nn.Linear(3, 3, bias=False), nn.Linear(3, 3, bias=False)

        def forward(self, names: str) -> torch.Tensor:
            return sum(getattr(self, name)(torch.ones(3)).sum() for name in names)

    def trained(*steps: str, shard: bool) -> dict[str, object]:
        model = nn.Sequential(Pair())
        optimizer = torch.optim.AdamW(model.parameters(), lr=0.1)
        if shard:
            model, optimizer = fsdp.fully_shard(model, optimizer, fsdp_unit_modules=[Pair])
        for names in steps:
            model(names).backward()
            optimizer.step()
            optimizer.zero_grad()
        return {"model": model, "optimizer": optimizer}

    torch.manual_seed(0)
    manager = CheckpointManager(tmp_path)
    manager.save(1, trained("ab", "ab", "a", shard=False))
    warm = trained("ab", shard=True)
    manager.restore(warm)
    counts = [int(warm["optimizer"].state[p]["step"]) for p in warm["model"].parameters()]
    assert counts == [3, 2]


@pytest.mark.ranks(2)
def test_a_sharded_checkpoint_loads_into_plain_modules(tmp_path):
    model, optimizer = build(3, seed=0)
    train(model, optimizer, range(3))
    CheckpointManager(tmp_path).save(3, {"model": model, "optimizer": optimizer})
    plain, adamw = build(None, seed=9)
    CheckpointManager(tmp_path).restore({"model": plain, "optimizer": adamw})
    expected = ddp.full_parameters(model)
    for name, tensor in plain.named_parameters():
        assert torch.equal(tensor, expected[name]), name
        assert adamw.state[tensor]["step"] == 3
        assert adamw.state[tensor]["exp_avg"].shape == tensor.shape
        assert adamw.state[tensor]["exp_avg"].abs().sum() > 0
