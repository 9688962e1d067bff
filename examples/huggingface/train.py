"""Fine-tune a `transformers` model from disk, sharded over the ranks.

torchrun --nproc-per-node 2 examples/huggingface/train.py [MODEL_DIRECTORY] [TEXT_FILE]

Without a directory a tiny Llama is made and saved first. The result is saved as `transformers`
does.
"""

from __future__ import annotations

import argparse
import sys
from pathlib import Path

import torch
import torch.distributed as dist
from torch import Tensor
from transformers import (
    AutoModelForCausalLM,
    AutoTokenizer,
    LlamaConfig,
    LlamaForCausalLM,
    PreTrainedModel,
)
from transformers.utils import logging

from lamina.ddp import full_parameters
from lamina.fsdp import fully_shard
from lamina.mesh import ParallelLayout, Runtime, init_distributed

RUNS = Path("runs/huggingface")
BATCH, LENGTH = 8, 64


def options() -> argparse.Namespace:
    """The command line."""
    parser = argparse.ArgumentParser(description=__doc__.splitlines()[0])
    parser.add_argument("model", nargs="?", type=Path, help="directory of save_pretrained()")
    parser.add_argument("text", nargs="?", type=Path, default=Path(torch.__file__))
    parser.add_argument("--output", type=Path, help="where the tuned model goes")
    parser.add_argument("--steps", type=int, default=120)
    parser.add_argument("--lr", type=float, default=2e-3)
    return parser.parse_args()


def make_tiny_model(directory: Path) -> Path:
    """Save a Llama of 0.2 million random weights that reads bytes; rank 0 alone writes."""
    torch.manual_seed(0)
    config = LlamaConfig(
        vocab_size=256, hidden_size=64, intermediate_size=176, num_hidden_layers=4,
        num_attention_heads=4, num_key_value_heads=2, max_position_embeddings=256,
        bos_token_id=None, eos_token_id=None,
    )  # fmt: skip
    LlamaForCausalLM(config).save_pretrained(directory)
    if dist.is_initialized():
        dist.barrier()  # the others wait until it is there
    return directory


def read_text(path: Path, model: Path) -> Tensor:
    """Token ids of the text: by the model's tokenizer where there is one, else its bytes."""
    if (model / "tokenizer_config.json").exists():
        ids = AutoTokenizer.from_pretrained(model)(path.read_text())["input_ids"]
    else:
        ids = list(path.read_bytes())
    return torch.tensor(ids)


def held_out_loss(model: PreTrainedModel, text: Tensor, runtime: Runtime) -> float:
    """Mean loss over the text's last tenth, in nats per token; every rank computes it."""
    rows = text[-len(text) // 10 :][: 8 * LENGTH]
    rows = rows[: len(rows) // LENGTH * LENGTH].view(-1, LENGTH).to(runtime.device)
    model.eval()
    with torch.no_grad():
        loss = model(input_ids=rows, labels=rows).loss.item()
    model.train()
    return loss


def tune(args: argparse.Namespace, source: Path, output: Path, runtime: Runtime) -> None:
    """Load, shard, train, save."""
    text = read_text(args.text, source)
    model = AutoModelForCausalLM.from_pretrained(source, dtype=torch.float32).to(runtime.device)
    size = sum(parameter.numel() for parameter in model.parameters())
    optimizer = torch.optim.AdamW(model.parameters(), lr=args.lr)

    # The one line. Units are found by themselves: the decoder's layers, large embeddings.
    mesh = ParallelLayout().build(runtime.device.type)
    model, optimizer = fully_shard(model, optimizer, device_mesh=mesh, zero_dp_strategy=3)

    before = held_out_loss(model, text, runtime)
    generator = torch.Generator().manual_seed(1 + runtime.rank)  # other text on every rank
    for step in range(args.steps):
        last = len(text) * 9 // 10 - LENGTH
        starts = torch.randint(last, (BATCH,), generator=generator)
        rows = torch.stack([text[s : s + LENGTH] for s in starts]).to(runtime.device)
        loss = model(input_ids=rows, labels=rows).loss
        loss.backward()
        torch.nn.utils.clip_grad_norm_(model.parameters(), 1.0)
        optimizer.step()
        optimizer.zero_grad()
        if runtime.is_main and (step + 1) % 20 == 0:
            print(f"step {step + 1}: loss {loss.item():.3f}", flush=True)
    after = held_out_loss(model, text, runtime)
    held = sum(parameter.to_local().numel() for parameter in model.parameters())

    # Whole weights again, under transformers' names: every rank takes part, one writes.
    weights = full_parameters(model)
    if runtime.is_main:
        print(f"parameters: {size}, of them on this rank: {held}")
        print(f"held-out loss: {before:.3f} before, {after:.3f} after")
        save(source, output, weights)
        again = AutoModelForCausalLM.from_pretrained(output)
        reloaded = held_out_loss(again.to(runtime.device), text, runtime)
        print(f"saved to {output}; loaded by transformers again: {reloaded:.3f}")


def save(source: Path, output: Path, weights: dict[str, Tensor]) -> None:
    """Write a directory that `from_pretrained` reads."""
    whole = AutoModelForCausalLM.from_pretrained(source)
    whole.load_state_dict(weights, strict=False)  # tied weights come once
    whole.save_pretrained(output)
    if (source / "tokenizer_config.json").exists():
        AutoTokenizer.from_pretrained(source).save_pretrained(output)


def main() -> None:
    """Start this rank, find or make the model, tune it."""
    args = options()
    logging.disable_progress_bar()
    with init_distributed() as runtime:
        source = args.model or make_tiny_model(RUNS / "tiny")
        if not (source / "config.json").exists():
            sys.exit(f"{source} has no config.json: give a directory saved by save_pretrained()")
        tune(args, source, args.output or RUNS / "tuned", runtime)


if __name__ == "__main__":
    main()
