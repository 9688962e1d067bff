"""A program that trains on a CPU and on the virtual GPU, and prints what differed (as JSON)."""

from __future__ import annotations

import json

import torch
import torch.nn as nn
import torch.nn.functional as F
from torch.utils.checkpoint import checkpoint

STEPS, VOCABULARY, WIDTH, HEADS = 4, 50, 32, 4


class Block(nn.Module):
    """Attention and a feed-forward part, each behind a norm."""

    def __init__(self, dropout: float, norm: type[nn.Module]) -> None:
        super().__init__()
        self.first, self.second, self.dropout = norm(WIDTH), nn.LayerNorm(WIDTH), dropout
        self.qkv, self.out = nn.Linear(WIDTH, 3 * WIDTH), nn.Linear(WIDTH, WIDTH)
        self.wide, self.narrow = nn.Linear(WIDTH, 4 * WIDTH), nn.Linear(4 * WIDTH, WIDTH)

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        qkv = self.qkv(self.first(x)).unflatten(-1, (3, HEADS, -1)).permute(2, 0, 3, 1, 4)
        mixed = F.scaled_dot_product_attention(*qkv, dropout_p=self.dropout, is_causal=True)
        x = x + F.dropout(self.out(mixed.transpose(1, 2).flatten(-2)), self.dropout)
        return x + self.narrow(F.gelu(self.wide(self.second(x))))


class Transformer(nn.Module):
    """An embedding, two blocks and a head."""

    def __init__(self, dropout: float = 0.0, norm: type[nn.Module] = nn.LayerNorm) -> None:
        super().__init__()
        self.embedding, self.head = nn.Embedding(VOCABULARY, WIDTH), nn.Linear(WIDTH, VOCABULARY)
        self.blocks = nn.ModuleList(Block(dropout, norm) for _ in range(2))
        self.recomputes = False

    def forward(self, tokens: torch.Tensor) -> torch.Tensor:
        x = self.embedding(tokens)
        for block in self.blocks:
            x = checkpoint(block, x, use_reentrant=False) if self.recomputes else block(x)
        return self.head(x)


def train(
    device: str,
    dtype: torch.dtype = torch.float32,
    autocast: bool = False,
    recomputes: bool = False,
    dropout: float = 0.0,
    norm: type[nn.Module] = nn.LayerNorm,
    **options: bool,
) -> list[torch.Tensor]:
    """Return the losses, the last norm of gradients and the parameters."""
    torch.manual_seed(0)
    model = Transformer(dropout, norm).to(dtype).to(device)
    model.recomputes = recomputes
    adamw = torch.optim.AdamW(model.parameters(), lr=1e-2, **options)
    numbers = torch.Generator().manual_seed(1)
    seen = []
    for _ in range(STEPS):
        tokens = torch.randint(0, VOCABULARY, (2, 16), generator=numbers).to(device)
        with torch.autocast(device, torch.bfloat16, enabled=autocast):
            logits = model(tokens).flatten(0, 1).float()
        loss = F.cross_entropy(logits, tokens.roll(-1, 1).flatten())
        loss.backward()
        norm_of_all = nn.utils.clip_grad_norm_(model.parameters(), 1.0)
        adamw.step()
        adamw.zero_grad()
        seen.append(loss.detach().cpu())
    return [*seen, norm_of_all.cpu(), *(p.detach().cpu() for p in model.parameters())]


def differ(a: list[torch.Tensor], b: list[torch.Tensor]) -> float:
    """Return the largest difference; 0.0 only for equal bits."""
    if all(map(torch.equal, a, b)):
        return 0.0
    return max(float((x.double() - y.double()).abs().max()) for x, y in zip(a, b, strict=True))


def losses_differ(a: list[torch.Tensor], b: list[torch.Tensor]) -> float:
    """The same for the losses."""
    return differ(a[:STEPS], b[:STEPS])


def main() -> None:
    """Print for each way to train how far the GPU is from the CPU."""
    plain = train("cpu", foreach=True)
    drawn = train("cuda", dropout=0.1)
    found = {
        "foreach": differ(plain, train("cuda", foreach=True)),
        "one by one": differ(train("cpu", foreach=False), train("cuda", foreach=False)),
        "fused": differ(train("cpu", fused=True), train("cuda", fused=True)),
        "bf16": differ(train("cpu", torch.bfloat16), train("cuda", torch.bfloat16, foreach=False)),
        "autocast": differ(
            train("cpu", autocast=True, foreach=True), train("cuda", autocast=True, foreach=True)
        ),
        "rms, loss": losses_differ(
            train("cpu", norm=nn.RMSNorm), train("cuda", norm=nn.RMSNorm, foreach=False)
        ),
        "recomputed dropout": differ(drawn, train("cuda", dropout=0.1, recomputes=True)),
        "drawn again": differ(drawn, train("cuda", dropout=0.1)),
        "dropout does something": differ(plain, drawn),
    }
    print(json.dumps(found))


if __name__ == "__main__":
    main()
