"""Train a layer of one's own under tensor and data parallelism.

torchrun --nproc-per-node 2 examples/own_layer/train.py            # two ranks of tp
torchrun --nproc-per-node 2 examples/own_layer/train.py --tp 1     # two ranks of dp_shard
"""

from __future__ import annotations

import argparse

import torch
import torch.nn.functional as F
from radial import Radial
from torch import Tensor, nn

from lamina.ddp import clip_grad_norm, finalize_grads
from lamina.fsdp import fully_shard
from lamina.mesh import ParallelLayout, ParallelMesh, init_distributed

BATCH, TURNS, RATE = 128, 3.0, 1e-2


def spirals(number: int) -> tuple[Tensor, Tensor]:
    """Points on two spirals that wind around each other, and which of them each is on."""
    generator = torch.Generator().manual_seed(number)
    along = torch.rand(BATCH, generator=generator).sqrt()
    which = torch.randint(0, 2, (BATCH,), generator=generator)
    angle = along * TURNS * torch.pi + which * torch.pi
    points = torch.stack((angle.cos(), angle.sin()), dim=1) * 2 * along[:, None]
    return points + 0.1 * torch.randn(points.shape, generator=generator), which


def build(mesh: ParallelMesh) -> nn.Module:
    """All ranks of tp begin with the same seed, as they are pieces of one model."""
    torch.manual_seed(0)
    return nn.Sequential(Radial(2, 64, 8, mesh), nn.Tanh(), Radial(8, 64, 2, mesh))


def main() -> None:
    """Train, and print the loss on points that are never trained on."""
    parser = argparse.ArgumentParser(description=__doc__.splitlines()[0])
    parser.add_argument("--tp", type=int, default=2, help="ranks that share the centres")
    parser.add_argument("--steps", type=int, default=120)
    options = parser.parse_args()
    with init_distributed() as runtime:
        mesh = ParallelLayout(tp=options.tp).build(runtime.device.type)  # dp_shard takes the rest
        model = build(mesh)
        if runtime.is_main:
            for name, parameter in model.named_parameters():
                print(f"{name}: {tuple(parameter.shape)} on this rank")
        optimizer = torch.optim.AdamW(model.parameters(), lr=RATE)
        model, optimizer = fully_shard(
            model, optimizer, device_mesh=mesh, device=runtime.device, fsdp_unit_modules=[Radial]
        )
        dp, (new_points, new_which) = mesh.axis("dp"), spirals(-1)
        for step in range(1, options.steps + 1):
            points, which = (part.chunk(dp.size)[dp.rank] for part in spirals(step))
            loss = F.cross_entropy(model(points.to(runtime.device)), which.to(runtime.device))
            loss.backward()
            finalize_grads(model, mesh)  # sums the gradients of roles: here `sharpness`
            clip_grad_norm(model, 1.0, mesh)
            optimizer.step()
            optimizer.zero_grad()
            if step % (options.steps // 4) == 0:
                with torch.no_grad():
                    found = model(new_points.to(runtime.device)).cpu()
                loss = F.cross_entropy(found, new_which)
                right = (found.argmax(dim=1) == new_which).float().mean()
                if runtime.is_main:
                    print(f"step {step}: loss {loss:.4f}, {right:.0%} of new points right")
        with model.unsharded():
            learned = [layer.sharpness.item() for layer in model.modules() if type(layer) is Radial]
        if runtime.is_main:
            print("sharpness, from 1.0000:", *(f"{value:.4f}" for value in learned))


if __name__ == "__main__":
    main()
