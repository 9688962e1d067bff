"""One rank of a world that loads a model with experts from one checkpoint and saves another.

Run by test_worlds.py, every rank as a program of its own: their strings hash differently, as under
torchrun. Arguments: directory, number of the world in `WORLDS`, rank.
"""

from __future__ import annotations

import sys
from pathlib import Path
from typing import Any

import torch
import torch.distributed as dist
from layouts import BARE, CONFIGS, FSDP, Job, Layout, adamw, pipelined, train, wrapped

from lamina.checkpoint import CheckpointManager
from lamina.mesh import ParallelLayout
from lamina.models import GPTModel
from lamina_testing import device_type

WORLDS: list[dict[str, int]] = [
    {"dp_shard": 1},
    {"dp_replicate": 2, "dp_shard": 2, "tp": 2},
    {"pp": 2, "dp_shard": 3},
    {"dp_shard": 3},
    {"dp_shard": 5},
    {"pp": 2, "dp_shard": 2, "tp": 2, "ep": 2},
    {"dp_shard": 7},
    {"tp": 2, "pp": 2, "dp_shard": 1},
    {"pp": 2, "dp_shard": 1},
    {"dp_shard": 1},
]


def size(world: dict[str, int]) -> int:
    count = 1
    for axis, ranks in world.items():
        count *= 1 if axis == "ep" else ranks  # ep shares the ranks of dp_shard and tp
    return count


def build(sizes: dict[str, int], seed: int) -> Job:
    alone = size(sizes) == 1
    layout = Layout(sizes, BARE if alone else FSDP, model="experts")
    mesh = ParallelLayout(**sizes).build(device_type())
    model = GPTModel(CONFIGS["experts"], mesh, seed=seed).double()
    if alone:
        return Job(model, adamw(model), slice(0, 4))
    parts: Any = pipelined if "pp" in sizes else wrapped
    return Job(*parts(model, layout, mesh), slice(0, 4), mesh)


def main(root: Path, number: int, rank: int) -> None:
    torch.set_num_threads(1)
    world = WORLDS[number]
    store = dist.FileStore(str(root / f"store{number}"), size(world))
    dist.init_process_group("gloo", store=store, rank=rank, world_size=size(world))
    job = build(world, seed=number)
    with CheckpointManager(root / "run", progress=False) as manager:
        if number == 0:
            train(job, 0)
        else:
            assert manager.restore(job.state) == number - 1
        manager.save(number, job.state)
    dist.destroy_process_group()


if __name__ == "__main__":
    main(Path(sys.argv[1]), int(sys.argv[2]), int(sys.argv[3]))
