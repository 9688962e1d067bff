"""Train over gloo on CPUs, and over NCCL on virtual GPUs; torchrun runs it.

It ends with the settings under which a loss or a parameter has other bits on the GPUs.
"""

from __future__ import annotations

import json
import os
from typing import Any

import torch
import torch.distributed as dist
import torch.nn.functional as F
from torch import Tensor, nn

from lamina.ddp import clip_grad_norm, full_parameters
from lamina.fsdp import fully_shard
from lamina.mesh import ParallelLayout

SETTINGS: dict[str, dict[str, Any]] = {
    **{f"strategy {number}": {"zero_dp_strategy": number} for number in range(4)},
    "reproducible": {"reproducible": True},
    "int8": {"reduction": "int8"},
    "messages of 4 KiB": {"reduce_message_bytes": 4096},
}


class Block(nn.Module):
    """Attention and a product, of torch's own modules."""

    def __init__(self) -> None:
        super().__init__()
        self.qkv, self.out, self.norm = nn.Linear(32, 96), nn.Linear(32, 32), nn.LayerNorm(32)

    def forward(self, x: Tensor) -> Tensor:
        rows = self.qkv(self.norm(x)).unflatten(-1, (3, 4, 8)).permute(2, 0, 3, 1, 4)
        mixed = F.scaled_dot_product_attention(rows[0], rows[1], rows[2], is_causal=True)
        return x + self.out(F.gelu(mixed.transpose(1, 2).flatten(-2)))


class Model(nn.Module):
    """An operator of torch has the bits of a CPU on a virtual GPU, so the rest is Lamina's."""

    def __init__(self) -> None:
        super().__init__()
        self.embedding, self.head = nn.Embedding(64, 32), nn.Linear(32, 64)
        self.blocks = nn.ModuleList(Block() for _ in range(2))

    def forward(self, tokens: Tensor) -> Tensor:
        x = self.embedding(tokens)
        for block in self.blocks:
            x = block(x)
        return self.head(x)


def train(device: str, settings: dict[str, Any]) -> tuple[list[float], dict[str, torch.Tensor]]:
    """Losses and parameters of four steps."""
    mesh = ParallelLayout().build(device)
    torch.manual_seed(0)
    model: Any = Model().to(device)
    adamw = torch.optim.AdamW(model.parameters(), lr=1e-2)
    model, optimizer = fully_shard(
        model, adamw, device_mesh=mesh, fsdp_unit_modules=[Block], **settings
    )
    losses = []
    for number in range(4):
        draws = torch.Generator().manual_seed(100 * number + dist.get_rank())
        text = torch.randint(0, 64, (2, 17), generator=draws).to(device)
        loss = F.cross_entropy(model(text[:, :-1]).flatten(0, 1), text[:, 1:].flatten())
        loss.backward()
        clip_grad_norm(model, 0.5, mesh)
        optimizer.step()
        optimizer.zero_grad()
        losses.append(loss.item())
    return losses, {name: value.cpu() for name, value in full_parameters(model).items()}


def main() -> None:
    local = int(os.environ["LOCAL_RANK"])
    torch.cuda.set_device(local)
    dist.init_process_group("cpu:gloo,cuda:nccl", device_id=torch.device("cuda", local))
    differing = []
    for name, settings in SETTINGS.items():
        (losses, wanted), (on_gpus, found) = (train(each, settings) for each in ("cpu", "cuda"))
        if losses != on_gpus or not all(torch.equal(found[n], p) for n, p in wanted.items()):
            differing.append(name)
    dist.destroy_process_group()
    if os.environ["RANK"] == "0":
        print(json.dumps(differing), flush=True)


if __name__ == "__main__":
    main()
