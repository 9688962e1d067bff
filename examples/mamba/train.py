"""Train a hybrid of Mamba and attention to copy what it was told to remember.

torchrun --nproc-per-node 2 examples/mamba/train.py
"""

from __future__ import annotations

import argparse
import time

import torch
from torch import Tensor

from lamina.fsdp import fully_shard
from lamina.mesh import ParallelLayout, init_distributed
from lamina.models import GPTModel, MambaConfig, TransformerConfig

# Selective copying (Gu and Dao, 2023): WORDS symbols lie scattered among NOISE; then come WORDS
# times ASK, and at each the model has to say the next of the symbols.
SYMBOLS, WORDS = 8, 6
NOISE, ASK = SYMBOLS, SYMBOLS + 1
BATCH = 24  # sequences per rank and step


def options() -> argparse.Namespace:
    """The command line."""
    parser = argparse.ArgumentParser(description=__doc__.splitlines()[0])
    parser.add_argument("--pattern", default="M*M-", help="M Mamba, * attention, - MLP")
    parser.add_argument("--steps", type=int, default=360)
    parser.add_argument("--length", type=int, default=48)
    parser.add_argument("--lr", type=float, default=5e-3)
    return parser.parse_args()


def sample(batch: int, length: int, seed: int) -> tuple[Tensor, Tensor]:
    """Tokens and labels ``[batch, length + WORDS]``; labels count at ASK only."""
    g = torch.Generator().manual_seed(seed)
    places = torch.rand(batch, length, generator=g).argsort(dim=1)[:, :WORDS].sort(dim=1).values
    words = torch.randint(0, SYMBOLS, (batch, WORDS), generator=g)
    tokens = torch.full((batch, length), NOISE).scatter_(1, places, words)
    asked = torch.full((batch, WORDS), ASK)
    labels = torch.cat((torch.full((batch, length), -100), words), dim=1)
    return torch.cat((tokens, asked), dim=1), labels


def build(pattern: str) -> GPTModel:
    """A stack as the pattern spells it, without positions."""
    config = TransformerConfig(
        vocab_size=SYMBOLS + 2, hidden_size=64, num_layers=len(pattern), num_heads=4, ffn_size=128,
        max_sequence_length=4096, positions="none" if "M" in pattern else "rope", init_std=0.1,
        layer_pattern=pattern,
        mamba=MambaConfig(state_size=32, head_dim=32, chunk_size=18) if "M" in pattern else None,
    )  # fmt: skip
    return GPTModel(config, seed=0)


@torch.no_grad()
def accuracy(model: torch.nn.Module, length: int, device: torch.device) -> float:
    """Part of the symbols that come back right, over 64 sequences of this length."""
    tokens, labels = (x.to(device) for x in sample(64, length, seed=-1))
    right = (model(tokens).argmax(dim=-1) == labels) & (labels >= 0)
    return (right.sum() / (labels >= 0).sum()).item()


def main() -> None:
    """Train at one length, test at longer ones."""
    args = options()
    with init_distributed() as runtime:
        mesh = ParallelLayout().build(runtime.device.type)
        model = build(args.pattern).to(runtime.device)
        size = model.num_parameters()
        optimizer = torch.optim.AdamW(model.parameters(), lr=args.lr, weight_decay=0.01)
        schedule = torch.optim.lr_scheduler.OneCycleLR(optimizer, args.lr, args.steps)
        model, optimizer = fully_shard(model, optimizer, device_mesh=mesh)
        if runtime.is_main:
            print(f"{args.pattern}: {size} parameters", flush=True)
        for step in range(args.steps):
            seed = step * runtime.world_size + runtime.rank
            tokens, labels = sample(BATCH, args.length, seed)
            loss = model(tokens.to(runtime.device), labels.to(runtime.device))
            loss.backward()
            torch.nn.utils.clip_grad_norm_(model.parameters(), 1.0)
            optimizer.step()
            optimizer.zero_grad()
            schedule.step()
            if runtime.is_main and (step + 1) % 50 == 0:
                print(f"step {step + 1}: loss {loss.item():.3f}", flush=True)
        for factor in (1, 2, 4, 8):
            length = factor * args.length
            found = accuracy(model, length, runtime.device)
            if runtime.is_main:
                print(f"length {length}: {100 * found:.0f}% right", flush=True)
        if runtime.is_main:
            print(f"{time.process_time():.0f} s of processor time on this rank", flush=True)


if __name__ == "__main__":
    main()
