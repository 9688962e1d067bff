"""Generating text with a cache beside computing the whole context for each token.

    python benchmarks/generation.py [--hidden 512 --layers 8 --prompt 128 --new 200 --rows 1 4]

The model is the main job's default with GPUs. The third contestant is the same model written out
as torch's functions alone (`by_hand`), with room for all tokens made once: what a loop of
operators can reach. All write the same tokens and take turns in one process, so trust the ratio:
on a busy machine that of CPU time with one thread, as threads that wait for others count too.
`--sharded` also measures a model under `fully_shard` (torchrun), whose weights are gathered once.
"""

from __future__ import annotations

import argparse
import statistics
import time
from collections.abc import Iterator
from contextlib import contextmanager, nullcontext
from unittest import mock

import torch
import torch.nn.functional as F
from torch import Tensor

from lamina.fsdp import fully_shard
from lamina.mesh import ParallelLayout, init_distributed
from lamina.models import GPTModel, TransformerConfig, generate


@contextmanager
def without_cache() -> Iterator[None]:
    with mock.patch.object(GPTModel, "caches", False):
        yield


@torch.inference_mode()
def by_hand(model: GPTModel, prompt: Tensor, new: int) -> Tensor:
    """Greedy tokens of a model with plain attention, RMSNorm, SwiGLU and RoPE, uncut."""
    config, rows, start, end = model.config, prompt.shape[0], 0, prompt.shape[1]
    room, heads, width = end + new, config.num_heads, config.head_width
    rates = config.rope_theta ** -(torch.arange(0, width, 2) / width)
    angles = (torch.arange(room)[:, None] * rates)[:, None]
    cos, sin = torch.cat([angles.cos()] * 2, -1), torch.cat([-angles.sin(), angles.sin()], -1)
    kept = [torch.empty(2, rows, heads, room, width) for _ in model.blocks]
    tokens = F.pad(prompt, (0, new))

    def norm(x: Tensor, module: torch.nn.Module) -> Tensor:
        return torch.rms_norm(x, x.shape[-1:], module.weight, config.norm_eps)

    for _ in range(new):
        x = F.embedding(tokens[:, start:end], model.embedding.weight)
        for block, (keys, values) in zip(model.blocks, kept, strict=True):
            both = F.linear(norm(x, block.attention_norm), block.attention.qkv.weight)
            both = both.view(rows, end - start, -1, width).transpose(1, 2)
            turned = both[:, : 2 * heads]
            at = slice(start, end)
            turned = torch.addcmul(turned * cos[at, 0], turned.roll(width // 2, -1), sin[at, 0])
            keys[:, :, at], values[:, :, at] = turned[:, heads:], both[:, 2 * heads :]
            mixed = F.scaled_dot_product_attention(
                turned[:, :heads], keys[:, :, :end], values[:, :, :end], is_causal=start == 0
            )
            x = x + F.linear(mixed.transpose(1, 2).flatten(2), block.attention.output.weight)
            gate, up = F.linear(norm(x, block.mlp_norm), block.mlp.up.weight).chunk(2, -1)
            x = x + F.linear(F.silu(gate) * up, block.mlp.down.weight)
        logits = F.linear(norm(x[:, -1], model.final_norm), model.head.weight)
        tokens[:, end] = logits.argmax(-1)
        start, end = end, end + 1
    return tokens


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__.split("\n")[0])
    for name, value in {"hidden": 512, "layers": 8, "heads": 8, "prompt": 128, "new": 200}.items():
        parser.add_argument(f"--{name}", type=int, default=value)
    parser.add_argument("--rows", type=int, nargs="+", default=[1, 4])
    parser.add_argument("--rounds", type=int, default=3)
    parser.add_argument("--sharded", action="store_true")
    settings = parser.parse_args()
    with init_distributed():
        config = TransformerConfig(
            vocab_size=256,
            hidden_size=settings.hidden,
            num_layers=settings.layers,
            num_heads=settings.heads,
            max_sequence_length=512,
        )
        model = GPTModel(config, seed=0)
        if settings.sharded:
            model = fully_shard(model, device_mesh=ParallelLayout(dp_shard=-1).build())
        print(
            f"{torch.get_num_threads()} threads; medians of {settings.rounds} rounds: wall, CPU\n\n"
            "| rows | whole context | cache | by hand | whole / cache | whole / by hand |\n"
            "| --- | --- | --- | --- | --- | --- |"
        )
        for rows in settings.rows:
            prompt = torch.randint(256, (rows, settings.prompt))
            times: dict[str, list[tuple[float, float]]] = {"whole": [], "cache": []}
            times |= {} if settings.sharded else {"hand": []}
            written = {}
            for _ in range(settings.rounds):
                for name, taken in times.items():
                    start = time.perf_counter(), time.process_time()
                    if name == "hand":
                        written[name] = by_hand(model, prompt, settings.new)
                    else:
                        with without_cache() if name == "whole" else nullcontext():
                            written[name] = generate(model, prompt, settings.new, temperature=0.0)
                    taken.append((time.perf_counter() - start[0], time.process_time() - start[1]))
            assert all(torch.equal(written["whole"], each) for each in written.values())
            middle = {
                name: [statistics.median(column) for column in zip(*each, strict=True)]
                for name, each in times.items()
            }
            shown = [f"{wall:.3f}, {cpu:.3f}" for wall, cpu in middle.values()]
            ratios = [f"{middle['whole'][1] / cpu:.1f}" for _, cpu in [*middle.values()][1:]]
            print("|", " | ".join((str(rows), *shown, *ratios)), "|", flush=True)


if __name__ == "__main__":
    main()
