"""Trains `invariant=True` on layouts of ranks that share one GPU, and compares their bits.

    python invariant_on_gpu.py                  # layouts of 1, 2 and 4 ranks over gloo
    python invariant_on_gpu.py --device cpu     # a rehearsal

Prints the SHA-256 of all parameters after some steps of each model, dtype and layout, and whether
it is that of one rank with one microbatch. Each number of ranks is a world of its own; the worlds
run beside each other.
"""

from __future__ import annotations

import argparse
import json
import os
import subprocess
import sys
import tempfile
from collections.abc import Iterator
from pathlib import Path

import torch
import torch.distributed as dist
import torch.multiprocessing as mp
from invariant_layouts import KINDS, LAYOUTS, MODELS, ROWS, Layout, layouts_of, sha256, train

ALONE = Layout()
EVERY = {**MODELS, **KINDS}
GIVEN = ("grouped", "latent", "experts", "mamba", "hybrid")


def cases(words: argparse.Namespace, world: int) -> Iterator[tuple[str, torch.dtype, Layout]]:
    """Yield the models, dtypes and layouts of a number of ranks, one rank alone first."""
    for name in words.models:
        for dtype in (getattr(torch, word) for word in words.dtypes):
            for layout in (ALONE, *(layouts_of(name) if name in KINDS else LAYOUTS)):
                # A model in bf16 under DDP starts from rounded weights: another model.
                apart = layout.ddp and dtype is torch.bfloat16
                chosen = not words.layouts or layout is ALONE or str(layout) in words.layouts
                if layout.ranks == world and chosen and not apart:
                    yield name, dtype, layout


def rank_main(rank: int, world: int, words: argparse.Namespace, path: str) -> None:
    """Train every case of this world, and print a line of each."""
    if words.device == "cuda":
        torch.cuda.set_device(0)
    dist.init_process_group("gloo", init_method=f"file://{path}", rank=rank, world_size=world)
    for name, dtype, layout in cases(words, world):
        parameters = train(name, layout, dtype, words.steps, words.device, words.rows)
        if rank == 0:
            row = f"{name} {str(dtype)[6:]}", str(layout), sha256(parameters)
            print(json.dumps(row), flush=True)
    dist.barrier()
    dist.destroy_process_group()


def run_world(words: argparse.Namespace) -> None:
    """Run the ranks of one world."""
    with tempfile.TemporaryDirectory() as folder:
        path = str(Path(folder) / "rendezvous")
        mp.spawn(rank_main, args=(words.world, words, path), nprocs=words.world)


def main() -> int:
    """Run all worlds, compare, and return 1 if bits differ or a world has failed."""
    parser = argparse.ArgumentParser(description=__doc__)
    parser.add_argument("--device", default="cuda")
    parser.add_argument("--steps", type=int, default=4)
    parser.add_argument("--rows", type=int, default=ROWS, help="sequences of a batch")
    parser.add_argument("--models", nargs="+", default=[*GIVEN], choices=EVERY)
    parser.add_argument("--dtypes", nargs="+", default=["float32", "bfloat16"])
    parser.add_argument("--layouts", nargs="+", default=[], help="such as tp2,sp; all if none")
    parser.add_argument("--worlds", type=int, nargs="+", default=[1, 2, 4])
    parser.add_argument("--world", type=int, help="these ranks alone")
    words = parser.parse_args()
    if words.world:
        run_world(words)
        return 0
    programs = [
        subprocess.Popen(
            [sys.executable, __file__, *sys.argv[1:], f"--world={world}"],
            stdout=subprocess.PIPE,
            text=True,
            env={**os.environ, "OMP_NUM_THREADS": "1"},
        )
        for world in words.worlds
    ]
    outputs = [program.communicate()[0] for program in programs]
    rows = [json.loads(line) for text in outputs for line in text.splitlines() if line[:1] == "["]
    alone = {what: result for what, layout, result in rows if layout == str(ALONE)}
    wrong = 0
    for what, layout, result in rows:
        same = result == alone.get(what)
        wrong += not same
        print(f"| {what} | {layout} | {result[:16]} | {'same' if same else 'OTHER BITS'} |")
    print(f"{len(rows) - wrong} of {len(rows)} have the bits of one rank alone")
    return int(wrong > 0 or any(program.returncode for program in programs))


if __name__ == "__main__":
    sys.exit(main())
