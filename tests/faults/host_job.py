"""One rank of a job on several hosts: HSDP, a copy of the model on each host, a save per step.

The job waits at a step until a fault has been played from outside, and goes on. Started again, it
goes on from its last checkpoint, on as many hosts as there are. `reproducible=True` makes the bits
independent of their number, so whatever happens has to end at one digest.
"""

from __future__ import annotations

import argparse
import contextlib
import hashlib
import os
import socket
import sys
import time
from pathlib import Path

import torch
from fault_job import Model, mark, nursery

SAMPLES = 12
FAULT_AT = {"slow_link": 26}
"""The step a fault is at, otherwise 4. Usual waits have to be known before a link becomes slow."""


def build(hosts):
    from lamina.fsdp import fully_shard
    from lamina.mesh import ParallelLayout

    mesh, module = ParallelLayout(dp_replicate=hosts).build(), Model()
    wrapped, optimizer = fully_shard(
        module,
        torch.optim.AdamW(module.parameters(), lr=0.01),
        device_mesh=mesh,
        fsdp_unit_modules=[torch.nn.Sequential],
        zero_dp_strategy=3,
        calculate_per_token_loss=True,
        reproducible=True,
    )
    return mesh, wrapped, optimizer


def train_step(runtime, mesh, wrapped, optimizer, health, number):
    from lamina.checkpoint import cut_batch
    from lamina.ddp import clip_grad_norm, finalize_grads

    parts = cut_batch(SAMPLES, runtime.rank, runtime.world_size, size=1)
    for part in parts:
        sample = torch.arange(8.0).view(1, 8).sin() * (1 + part.samples[0] + SAMPLES * number)
        with contextlib.nullcontext() if part is parts[-1] else wrapped.no_sync():
            (wrapped(sample).square().mean() * part.counted).backward()
    finalize_grads(wrapped, mesh, num_tokens=sum(part.counted for part in parts))
    clip_grad_norm(wrapped, 1.0, mesh, health=health)
    optimizer.step()
    optimizer.zero_grad()


def digest(wrapped):
    from lamina.ddp import full_parameters

    whole = full_parameters(wrapped)
    texts = [name.encode() + whole[name].contiguous().numpy().tobytes() for name in sorted(whole)]
    return hashlib.sha256(b"".join(texts)).hexdigest()


def run(given, rank):
    from lamina.checkpoint import CheckpointManager
    from lamina.ddp import HealthMonitor
    from lamina.mesh import init_distributed

    directory, slow = Path(given.directory), given.fault == "slow_rank"
    saves = given.fault not in ("slow_rank", "slow_link")
    with init_distributed(timeout=300, verdict_directory=directory) as runtime:
        hosts = runtime.world_size // int(os.environ["LOCAL_WORLD_SIZE"])
        mesh, wrapped, optimizer = build(hosts)
        state = {"model": wrapped, "optimizer": optimizer}
        manager = CheckpointManager(directory / "checkpoints", keep_last=2, progress=False)
        done = manager.restore(state, default=0)
        health = HealthMonitor(slow=2.0, slow_steps=16, spike=None)
        for number in range(done, given.steps):
            if number == FAULT_AT.get(given.fault, 4) and not done:
                mark("fault")
                while not (directory / "played").exists():
                    time.sleep(0.01)
            with health.step():
                if slow and number % 8 == 7:  # the steps that are timed
                    time.sleep(1.0 if rank == runtime.world_size - 1 else 0.2)
                train_step(runtime, mesh, wrapped, optimizer, health, number)
            for one in health.last.stragglers:
                mark("straggler", rank=rank, text=str(one))
            if health.last.network:
                mark("network", rank=rank, text=health.last.network)
            if saves:
                manager.save(number + 1, state)
        manager.close()
        mark("digest", rank=rank, text=digest(wrapped), begun=done)


def run_torch(given, rank):
    """The same with torch's FSDP2, without saves."""
    import datetime

    from torch.distributed import destroy_process_group, init_process_group
    from torch.distributed.device_mesh import init_device_mesh
    from torch.distributed.fsdp import fully_shard

    init_process_group("gloo", timeout=datetime.timedelta(seconds=300))
    per_host = int(os.environ["LOCAL_WORLD_SIZE"])
    sizes = (int(os.environ["WORLD_SIZE"]) // per_host, per_host)
    mesh, module = init_device_mesh("cpu", sizes, mesh_dim_names=("replicate", "shard")), Model()
    for part in (module.parts["first"], module.parts["second"], module):
        fully_shard(part, mesh=mesh)
    optimizer = torch.optim.AdamW(module.parameters(), lr=0.01)
    for number in range(given.steps):
        if number == FAULT_AT.get(given.fault, 4):
            mark("fault")
            while not Path(given.directory, "played").exists():
                time.sleep(0.01)
        module(torch.ones(4, 8) * (1 + rank)).square().mean().backward()
        optimizer.step()
        optimizer.zero_grad()
    destroy_process_group()


def main():
    parser = argparse.ArgumentParser()
    parser.add_argument("wrapper", choices=("hsdp", "torch_fsdp2"))
    parser.add_argument("fault")
    parser.add_argument("--directory", required=True)
    parser.add_argument("--steps", type=int, default=12)
    given = parser.parse_args()
    torch.set_num_threads(1)
    rank = int(os.environ["RANK"])
    try:
        (run if given.wrapper == "hsdp" else run_torch)(given, rank)
    except Exception as error:
        mark("error", rank=rank, text=f"{type(error).__name__}: {error}")
        raise
    mark("finished", rank=rank)


if __name__ == "__main__":
    if sys.argv[1:2] == ["nursery"]:
        socket.sethostname(sys.argv[2])
        sys.argv[1:] = nursery()
    main()
