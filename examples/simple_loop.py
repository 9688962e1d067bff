"""The shortest real loop: plain PyTorch, sharded over the ranks by one line.

torchrun --nproc-per-node=2 examples/simple_loop.py
"""

from pathlib import Path

import torch

from lamina.fsdp import fully_shard
from lamina.mesh import ParallelLayout, init_distributed
from lamina.models import GPTModel, TransformerBlock, TransformerConfig

STEPS, BATCH, LENGTH = 60, 8, 64


def main() -> None:
    """Train a small GPT to continue this file."""
    text = torch.tensor(list(Path(__file__).read_bytes()))
    with init_distributed() as runtime:
        mesh = ParallelLayout().build(runtime.device.type)
        torch.manual_seed(0)  # the same weights on every rank
        model = GPTModel(
            TransformerConfig(vocab_size=256, hidden_size=64, num_layers=2, num_heads=4)
        ).to(runtime.device)
        optimizer = torch.optim.AdamW(model.parameters(), lr=3e-3)

        model, optimizer = fully_shard(
            model, optimizer, device_mesh=mesh, fsdp_unit_modules=[TransformerBlock]
        )

        generator = torch.Generator().manual_seed(1 + runtime.rank)  # other text on every rank
        for step in range(STEPS):
            starts = torch.randint(len(text) - LENGTH - 1, (BATCH,), generator=generator)
            rows = torch.stack([text[s : s + LENGTH + 1] for s in starts]).to(runtime.device)
            loss = model(rows[:, :-1], labels=rows[:, 1:])
            loss.backward()
            norm = torch.nn.utils.clip_grad_norm_(model.parameters(), 1.0)
            optimizer.step()
            optimizer.zero_grad()
            if runtime.is_main and step % 10 == 9:
                print(f"step {step + 1}: loss {loss.item():.3f}, gradient norm {norm:.3f}")


if __name__ == "__main__":
    main()
