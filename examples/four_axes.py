"""One loop over four axes: the data, the sequence, the layers and the matrices are shared out.

torchrun --nproc-per-node=8 examples/four_axes.py dp_shard=-1 cp=2 tp=2 pp=2
"""

import sys
from pathlib import Path

import torch

from lamina.ddp import clip_grad_norm
from lamina.fsdp import fully_shard, fully_shard_optimizer
from lamina.mesh import ParallelLayout, init_distributed
from lamina.models import GPTModel, TransformerConfig, pipeline

STEPS, BATCH, LENGTH, MICROBATCHES = 20, 8, 64, 2


def main(sizes: list[str]) -> None:
    """Train a small GPT to continue this file; the axes change who computes what, and no number."""
    text = torch.tensor(list(Path(__file__).read_bytes()))
    layout = ParallelLayout(**{name: int(size) for name, size in (s.split("=") for s in sizes)})
    with init_distributed() as runtime:
        mesh = layout.build(runtime.device.type)
        config = TransformerConfig(
            vocab_size=256,
            hidden_size=64,
            num_layers=4,
            num_heads=4,
            sequence_parallel=mesh.axis("tp").size > 1,  # norms then share the sequence over tp
        )
        with torch.device("meta"):  # this rank's piece over tp and cp, so far without memory
            model = GPTModel(config, mesh, seed=0)
        # The stages of this rank over pp, each with its share of weights and gradients over dp.
        runner = pipeline(
            model,
            mesh,
            num_microbatches=MICROBATCHES,
            wrap=lambda stage: fully_shard(stage, device_mesh=mesh, device=runtime.device),
        )
        optimizer = torch.optim.AdamW(runner.parameters(), lr=3e-3)
        optimizer = fully_shard_optimizer(optimizer, runner)

        dp = mesh.axis("dp")
        generator = torch.Generator().manual_seed(1)  # the same batches on all ranks
        for step in range(STEPS):
            starts = torch.randint(len(text) - LENGTH - 1, (BATCH,), generator=generator)
            mine = starts.chunk(dp.size)[dp.rank]  # ranks of other axes take the same samples
            rows = torch.stack([text[s : s + LENGTH + 1] for s in mine]).to(runtime.device)
            loss = runner.step(rows[:, :-1], rows[:, 1:])
            norm = clip_grad_norm(runner.stages, 1.0, mesh)
            optimizer.step()
            optimizer.zero_grad()
            if runtime.is_main and step % 5 == 4:
                print(f"step {step + 1}: loss {loss:.4f}, gradient norm {norm:.4f}")


if __name__ == "__main__":
    main(sys.argv[1:])
