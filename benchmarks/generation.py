"""Generating text with a cache beside computing the whole context for each token.

    python benchmarks/generation.py [--hidden 512 --layers 8 --prompt 128 --new 200 --rows 1 4]

The model is the main job's default with GPUs. Both write the same tokens and take turns in one
process, so trust the ratio. `--sharded` also measures a model under `fully_shard` (torchrun), whose
weights are gathered once.
"""

from __future__ import annotations

import argparse
import statistics
import time
from collections.abc import Iterator
from contextlib import contextmanager
from unittest import mock

import torch

from lamina.fsdp import fully_shard
from lamina.mesh import ParallelLayout, init_distributed
from lamina.models import GPTModel, TransformerConfig, generate


@contextmanager
def without_cache() -> Iterator[None]:
    with mock.patch.object(GPTModel, "caches", False):
        yield


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
        print("| rows | whole context, s | cache, s | ratio |\n| --- | --- | --- | --- |")
        for rows in settings.rows:
            prompt = torch.randint(256, (rows, settings.prompt))
            times: dict[str, list[float]] = {"whole": [], "cache": []}
            written = {}
            for _ in range(settings.rounds):
                for name in times:
                    start = time.perf_counter()
                    if name == "whole":
                        with without_cache():
                            written[name] = generate(model, prompt, settings.new, temperature=0.0)
                    else:
                        written[name] = generate(model, prompt, settings.new, temperature=0.0)
                    times[name].append(time.perf_counter() - start)
            assert torch.equal(written["whole"], written["cache"])
            whole, cache = (statistics.median(each) for each in times.values())
            print(f"| {rows} | {whole:.2f} | {cache:.2f} | {whole / cache:.1f} |", flush=True)


if __name__ == "__main__":
    main()
