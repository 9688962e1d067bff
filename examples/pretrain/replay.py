"""Runs a step of a run again, on any ranks, and compares all bits.

python examples/pretrain/replay.py runs/gpt 120                        # on one rank
torchrun --nproc-per-node=4 examples/pretrain/replay.py runs/gpt 120 --mesh tp=2,pp=2

The run needs `--train.invariant`, and checkpoints of steps 119 and 120. The step is trained from
the first of them in a folder of its own. Weights, and the moments of the optimizer, which follow
from the gradients, are compared with those of the second bit for bit.
"""

from __future__ import annotations

import argparse
import json
import shutil
import sys
import tempfile
from pathlib import Path

import first_line  # noqa: F401 (before torch, whose import takes seconds)

# isort: split
import torch.distributed as dist
from options import configure, flat, refusals, words_of
from torch.distributed.elastic.multiprocessing.errors import record
from train import train

from lamina.checkpoint import Difference, compare_checkpoints
from lamina.mesh import Runtime, init_distributed


@record
def main() -> None:
    """Replay the step; status 1 if a bit differs."""
    parser = argparse.ArgumentParser(description=__doc__.partition("\n")[0])
    parser.add_argument("run", type=Path, help="directory of the run")
    parser.add_argument("step", type=int, help="the step, counted from 1")
    parser.add_argument("--mesh", default="dp_shard=-1", help="axes to run it on")
    given = parser.parse_args()
    with init_distributed() as runtime:
        differences = replay(given.run, given.step, given.mesh, runtime)
        if runtime.is_main:
            for difference in differences:
                print(difference)
            print(f"step {given.step} of {given.run}: {len(differences)} tensors differ")
    sys.exit(bool(differences))


def replay(run: Path, step: int, mesh: str, runtime: Runtime) -> list[Difference]:
    """Train a step of a run again. Collective over all ranks, whose first returns what differs.

    Raises:
        SystemExit: the run was not trained with `--train.invariant`, or lacks a checkpoint.
    """
    settings = json.loads((run / "config.json").read_text())
    before, after = (run / "checkpoints" / f"step-{at:08}" for at in (step - 1, step))
    with refusals(speak=runtime.is_main):
        if not settings["train"].get("invariant"):
            raise ValueError(
                f"{run} was not trained with --train.invariant, so its bits are of its mesh"
            )
        for checkpoint in (before, after):
            if not checkpoint.is_dir():
                raise ValueError(
                    f"{checkpoint} is missing: train with --checkpoint.every 1, and keep enough"
                )
    settings["mesh"] = mesh
    settings["train"]["steps"] = step  # the schedule ends where it did
    settings["eval"]["samples"] = 0
    with tempfile.TemporaryDirectory() as folder:
        folders = [folder]
        dist.broadcast_object_list(folders)
        copy = Path(folders[0]) / "run"
        if runtime.is_main:
            shutil.copytree(run / "data", copy / "data")
            shutil.copytree(before, copy / "checkpoints" / before.name)
        dist.barrier()
        words = [
            w for name, value in flat(settings) for w in words_of(name.replace("_", "-"), value)
        ]
        train(configure([*words, "--run.directory", str(copy)], runtime), runtime)
        dist.barrier()
        differences = []
        if runtime.is_main:
            differences = compare_checkpoints(after, copy / "checkpoints" / after.name)
        dist.barrier()
    return [each for each in differences if each.name.startswith(("model", "optimizer"))]


if __name__ == "__main__":
    main()
