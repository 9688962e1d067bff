"""A mixture of experts over two ranks, with and without something that balances its load.

torchrun --nproc-per-node=2 examples/moe/train.py [--steps 60]
"""

from __future__ import annotations

import argparse
from pathlib import Path

import torch

from lamina.ddp import clip_grad_norm, finalize_grads
from lamina.fsdp import fully_shard
from lamina.mesh import ParallelLayout, ParallelMesh, init_distributed
from lamina.models import (
    GPTModel,
    MoEConfig,
    TransformerBlock,
    TransformerConfig,
    routing_statistics,
)

TEXT = Path(__file__).parents[2] / "LICENSE"  # a text that stays as it is, and so do the numbers
BATCH, LENGTH = 8, 64
BALANCE = {
    "nothing": {},
    "an auxiliary loss": {"switch_loss": 0.02},
    "a bias per expert": {"bias_rate": 0.01},
}


def config_with(balance: dict[str, float]) -> TransformerConfig:
    """Two layers of eight experts, of which each token sees two and a shared one."""
    return TransformerConfig(
        vocab_size=256,
        hidden_size=64,
        num_layers=2,
        num_heads=4,
        moe=MoEConfig(num_experts=8, top_k=2, ffn_size=64, shared_ffn_size=64, **balance),
    )


def train(
    name: str, mesh: ParallelMesh, device: torch.device, text: torch.Tensor, steps: int
) -> str:
    """Train from the same start and say how it went."""
    model = GPTModel(config_with(BALANCE[name]), mesh, seed=0).to(device)
    with torch.device("meta"):
        whole = GPTModel(model.config, seed=0).num_parameters()
    held = model.num_parameters()
    optimizer = torch.optim.AdamW(model.parameters(), lr=3e-3)
    model, optimizer = fully_shard(
        model, optimizer, device_mesh=mesh, fsdp_unit_modules=[TransformerBlock]
    )
    generator = torch.Generator().manual_seed(1 + mesh.rank)  # other text on every rank
    losses = []
    for _ in range(steps):
        starts = torch.randint(len(text) - LENGTH - 1, (BATCH,), generator=generator)
        rows = torch.stack([text[s : s + LENGTH + 1] for s in starts]).to(device)
        loss = model(rows[:, :-1], labels=rows[:, 1:])  # without the auxiliary loss
        loss.backward()
        finalize_grads(model, mesh)  # moves the routers' biases
        clip_grad_norm(model, 1.0, mesh)
        optimizer.step()
        optimizer.zero_grad()
        losses.append(loss.detach())
    layers = routing_statistics(model, mesh).values()
    mean = torch.stack(losses[-10:]).mean()
    busiest = " ".join(f"{layer.imbalance:.2f}" for layer in layers)
    bars = "  ".join("".join("▁▂▃▄▅▆▇█"[min(int(x * 24), 7)] for x in each.load) for each in layers)
    return (
        f"balanced by {name:17}  loss {mean:.3f}  load {bars}  busiest/mean {busiest}  "
        f"{held / whole:.0%} of the parameters a rank"
    )


def main() -> None:
    """Train one model per way of balancing, on the text of this repository's license."""
    parser = argparse.ArgumentParser(description=__doc__)
    parser.add_argument("--steps", type=int, default=60)
    steps = parser.parse_args().steps
    text = torch.tensor(list(TEXT.read_bytes()))
    with init_distributed() as runtime:
        mesh = ParallelLayout(ep=runtime.world_size).build(runtime.device.type)
        for name in BALANCE:
            line = train(name, mesh, runtime.device, text, steps)
            if runtime.is_main:
                print(line, flush=True)


if __name__ == "__main__":
    main()
