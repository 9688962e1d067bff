"""A long job: descriptors and threads do not grow, and how much memory does is printed."""

from __future__ import annotations

import json
import os
import subprocess
import sys

import numpy as np
import pytest

STEPS = int(os.environ.get("LAMINA_TEST_SOAK", "2000"))
ENDS = STEPS // 3, 2 * STEPS // 3  # where the job fails, to be started again by torchrun
PROGRAM = """
import gc, json, os, sys
from pathlib import Path
import psutil, torch
from torch import nn
from lamina.checkpoint import CheckpointManager
from lamina.ddp import HealthMonitor, clip_grad_norm
from lamina.fsdp import fully_shard
from lamina.mesh import ParallelLayout, init_distributed

folder, steps, ends = Path(sys.argv[1]), int(sys.argv[2]), json.loads(sys.argv[3])
torch.set_num_threads(1)
life = int(os.environ["TORCHELASTIC_RESTART_COUNT"])
with init_distributed() as runtime:
    mesh = ParallelLayout().build("cpu")
    torch.manual_seed(0)
    model = nn.Sequential(*(nn.Sequential(nn.Linear(64, 64), nn.Tanh()) for _ in range(3)))
    optimizer = torch.optim.AdamW(model.parameters(), lr=1e-3)
    how = {"device_mesh": mesh, "fsdp_unit_modules": [nn.Sequential], "zero_dp_strategy": 3}
    model, optimizer = fully_shard(model, optimizer, **how)
    health = HealthMonitor(nonfinite="stop")
    state = {"model": model, "optimizer": optimizer}
    manager = CheckpointManager(folder / "run", keep_last=2, async_save=True, progress=False)
    process = psutil.Process()
    for step in range(manager.restore(state, default=0), steps):
        if life < len(ends) and step == ends[life]:
            raise RuntimeError(f"planted: life {life} ends")
        generator = torch.Generator().manual_seed(2 * step + runtime.rank)
        loss = model(torch.randn(8, 64, generator=generator)).square().mean()
        health.note(loss)
        loss.backward()
        clip_grad_norm(model, 1.0, mesh=mesh, health=health)
        optimizer.step()
        optimizer.zero_grad()
        if step % 25 == 24:
            manager.save(step + 1, state)
        if step % 20 == 19:
            with torch.no_grad():
                model(torch.ones(8, 64))
        if step % 50 == 49:
            manager.wait()
            gc.collect()
            found = process.memory_info().rss, process.num_fds(), process.num_threads()
            with (folder / f"rank-{runtime.rank}").open("a") as file:
                file.write(json.dumps([life, step + 1, *found]) + "\\n")
    manager.close()
"""


@pytest.mark.slow
def test_a_job_of_2000_steps_with_saves_and_restarts_opens_and_starts_no_more(tmp_path):
    program = tmp_path / "program.py"
    program.write_text(PROGRAM)
    given = [str(program), str(tmp_path), str(STEPS), json.dumps(ENDS)]
    torchrun = ["--standalone", "--nproc-per-node=2", "--max-restarts=2"]
    command = [sys.executable, "-m", "torch.distributed.run", *torchrun, *given]
    # torch keeps records of the last 2,000 collectives: 1.3 KiB per step until they are full.
    apart = os.environ | {"TORCH_FR_BUFFER_SIZE": "0"}
    done = subprocess.run(
        command, capture_output=True, text=True, check=False, timeout=1500, env=apart
    )
    assert done.returncode == 0, done.stderr[-3000:]
    for rank in range(2):
        rows = map(json.loads, (tmp_path / f"rank-{rank}").read_text().splitlines())
        found = np.array(list(rows))
        assert found[-1, 1] == STEPS
        assert set(found[:, 0]) == {0, 1, 2}
        for life in range(3):
            _, steps, memory, descriptors, threads = found[found[:, 0] == life][1:].T
            slopes = [np.polyfit(steps, one, 1)[0] for one in (memory, descriptors, threads)]
            print(
                f"rank {rank}, life {life}, per 1,000 steps: {slopes[0] / 1.024:.0f} KiB, "
                f"{1e3 * slopes[1]:.2f} descriptors, {1e3 * slopes[2]:.2f} threads"
            )
            assert slopes[0] < 4 << 10  # a bound, not the aim: docs/open.md has what is known
            assert descriptors.max() <= descriptors[0] + 2  # of a look around that is under way
            assert threads[-1] <= threads[0]
