"""Generating text with a cache beside computing the whole context for each token.

    python benchmarks/generation.py [--hidden 512 --layers 8 --prompt 128 --new 200 --rows 1 4]

The model is the main job's default with GPUs. Both write the same tokens and take turns in one
process, so trust the ratio: on a busy machine that of CPU time with one thread, as threads that
wait for others count too. `--sharded` also measures a model under `fully_shard` (torchrun), whose
weights are gathered once.
"""

from __future__ import annotations

import argparse
import statistics
import time
from collections.abc import Iterator
from contextlib import contextmanager, nullcontext
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
        print(
            f"{torch.get_num_threads()} threads; seconds of {settings.rounds} rounds: wall, CPU\n\n"
            "| rows | whole context | cache | ratio of wall | ratio of CPU |\n"
            "| --- | --- | --- | --- | --- |"
        )
        for rows in settings.rows:
            prompt = torch.randint(256, (rows, settings.prompt))
            times: dict[str, list[tuple[float, float]]] = {"whole": [], "cache": []}
            written = {}
            for _ in range(settings.rounds):
                for name, taken in times.items():
                    start = time.perf_counter(), time.process_time()
                    with without_cache() if name == "whole" else nullcontext():
                        written[name] = generate(model, prompt, settings.new, temperature=0.0)
                    taken.append((time.perf_counter() - start[0], time.process_time() - start[1]))
            assert torch.equal(written["whole"], written["cache"])
            (whole, whole_cpu), (cache, cache_cpu) = (
                map(statistics.median, zip(*each, strict=True)) for each in times.values()
            )
            print(
                f"| {rows} | {whole:.2f}, {whole_cpu:.2f} | {cache:.2f}, {cache_cpu:.2f} | "
                f"{whole / cache:.1f} | {whole_cpu / cache_cpu:.1f} |",
                flush=True,
            )


if __name__ == "__main__":
    main()
