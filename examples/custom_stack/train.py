"""Train with a ZeRO-1 made by hand, and compare it with plain PyTorch.

torchrun --nproc-per-node 2 examples/custom_stack/train.py
"""

from __future__ import annotations

import argparse

import torch
import torch.nn.functional as F
from torch import Tensor, nn
from zero1 import Zero1

from lamina.collectives import Ledger
from lamina.mesh import ParallelLayout, init_distributed

BATCH, TURNS = 64, 3.0


def spirals(step: int, rank: int) -> tuple[Tensor, Tensor]:
    """Points on two spirals that wind around each other, and which of them each is on."""
    generator = torch.Generator().manual_seed(1000 * step + rank)
    along = torch.rand(BATCH, generator=generator).sqrt()
    which = torch.randint(0, 2, (BATCH,), generator=generator)
    angle = along * TURNS * torch.pi + which * torch.pi
    points = torch.stack((angle.cos(), angle.sin()), dim=1) * along[:, None]
    return points + 0.01 * torch.randn(points.shape, generator=generator), which


def build() -> nn.Module:
    """The same weights on every rank."""
    torch.manual_seed(0)
    return nn.Sequential(
        nn.Linear(2, 64), nn.GELU(), nn.Linear(64, 64), nn.GELU(), nn.Linear(64, 2)
    )


def plain_training(ranks: int, steps: int) -> nn.Module:
    """One process, no Lamina: the batches of all ranks, one after the other."""
    model = build()
    optimizer = torch.optim.AdamW(model.parameters(), lr=5e-3)
    for step in range(steps):
        for rank in range(ranks):
            points, which = spirals(step, rank)
            F.cross_entropy(model(points), which).backward()
        for parameter in model.parameters():
            parameter.grad *= 1.0 / ranks
        optimizer.step()
        optimizer.zero_grad()
    return model


def main() -> None:
    """Train, report, compare."""
    parser = argparse.ArgumentParser(description=__doc__.splitlines()[0])
    parser.add_argument("--steps", type=int, default=300)
    steps = parser.parse_args().steps
    with init_distributed(device="cpu") as runtime:
        model = build()
        mesh = ParallelLayout().build("cpu")
        zero = Zero1(model, mesh, lambda mine: torch.optim.AdamW(mine, lr=5e-3))
        for step in range(steps):
            points, which = spirals(step, runtime.rank)
            loss = F.cross_entropy(model(points), which)
            loss.backward()
            with Ledger() as ledger:
                zero.step()
            if runtime.is_main and (step + 1) % 60 == 0:
                print(f"step {step + 1}: loss {loss.item():.3f}")

        points, which = spirals(steps, 0)
        accuracy = (model(points).argmax(dim=1) == which).float().mean()
        expected = plain_training(runtime.world_size, steps)
        difference = max(
            (one - other).abs().max().item()
            for one, other in zip(model.parameters(), expected.parameters(), strict=True)
        )
        if runtime.is_main:
            state = sum(value.numel() for value in zero.optimizer.state[zero.mine].values())
            whole = 2 * sum(parameter.numel() for parameter in expected.parameters())
            print(f"accuracy on new points: {accuracy:.2f}")
            print(f"optimizer state: {state} numbers on this rank, {whole} in one process")
            print(f"largest difference from plain PyTorch after {steps} steps: {difference:.1e}")
            print(ledger.table())
        if difference > 1e-4:
            raise SystemExit(f"rank {runtime.rank} differs from plain PyTorch by {difference}")


if __name__ == "__main__":
    main()
