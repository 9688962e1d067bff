"""kill -9 at random moments of a run that saves without pause, in the background and not.

`test_kill.py` kills at every operation on the disk of a save in one process. Here real ranks are
killed by the clock, while they train on and threads write.
"""

from __future__ import annotations

import contextlib
import os
import random
import signal
import subprocess
import sys
import tempfile
import textwrap
import time

import pytest
import torch

from lamina.checkpoint import CheckpointManager
from lamina.checkpoint.inspection import verify_checkpoint

PROGRAM = """
    import itertools, os, sys, traceback
    import torch
    import torch.distributed as dist
    from torch.distributed.device_mesh import init_device_mesh
    from torch.distributed.tensor import Shard, distribute_tensor
    from lamina.checkpoint import CheckpointManager

    torch.set_num_threads(1)
    root, background, kills = sys.argv[1], sys.argv[2] == "1", int(sys.argv[3])

    def rank_program(rank, store):
        dist.init_process_group("gloo", store=dist.FileStore(store, 2), rank=rank, world_size=2)
        mesh = init_device_mesh("cpu", (2,))
        sharded = distribute_tensor(torch.zeros(4000), mesh, [Shard(0)])
        manager = CheckpointManager(root, keep_last=2, async_save=background)
        state = {"t": sharded, "w": torch.zeros(3000), "n": 0}
        first = manager.restore(state, default=0)
        open(f"{store}.began{rank}", "w").close()
        for step in itertools.count(first + 1):
            state["t"].to_local().fill_(step)
            state["w"].fill_(-step)
            state["n"] = step
            manager.save(step, state)
            state["t"].to_local().fill_(float("nan"))  # the next step's changes

    # A server: the parent asks for a run with a line, gets the ranks' ids, and kills them.
    for number in range(kills):
        sys.stdin.readline()
        store = f"{root}.store{number}"
        children = []
        for rank in range(2):
            child = os.fork()
            if child == 0:
                try:
                    rank_program(rank, store)
                except BaseException:
                    traceback.print_exc()
                finally:
                    os._exit(1)
            children.append(child)
        print(*children, flush=True)
        for child in children:
            os.waitpid(child, 0)
        print("dead", flush=True)
"""


def run(kills: int, *, background: bool, seed: int) -> int:
    """Kill `kills` times; return how many steps the run survived in all."""
    memory = "/dev/shm" if os.path.isdir("/dev/shm") else None
    moments = random.Random(seed)
    with tempfile.TemporaryDirectory(dir=memory) as base:
        root = f"{base}/run"
        server = subprocess.Popen(
            [
                *(sys.executable, "-c", textwrap.dedent(PROGRAM)),
                *(root, str(int(background)), str(kills)),
            ],
            stdin=subprocess.PIPE,
            stdout=subprocess.PIPE,
            stderr=subprocess.DEVNULL,
            text=True,
        )
        newest = 0
        with server:
            for number in range(kills):
                server.stdin.write("go\n")
                server.stdin.flush()
                children = [int(word) for word in server.stdout.readline().split()]
                wait_for([f"{root}.store{number}.began{rank}" for rank in range(2)])
                time.sleep(moments.uniform(0.0, 0.3))
                for child in children:
                    os.kill(child, 0)  # nobody has died by itself
                # Both, or one: the other must not commit what the dead one had no part in, and end.
                for child in moments.sample(children, moments.choice((1, 2))):
                    with contextlib.suppress(ProcessLookupError):  # it has lost its peer
                        os.kill(child, signal.SIGKILL)
                assert server.stdout.readline() == "dead\n"
                newest = check(root, newest)
        assert server.returncode == 0
    return newest


def wait_for(files: list[str]) -> None:
    deadline = time.monotonic() + 60
    while not all(os.path.exists(name) for name in files):
        assert time.monotonic() < deadline, files
        time.sleep(0.005)


def check(root: str, before: int) -> int:
    manager = CheckpointManager(root)
    if os.path.isdir(root):
        assert not [name for name in os.listdir(root) if name.startswith(".")]
    latest = manager.latest()
    if latest is None:
        assert before == 0
        return 0
    assert latest >= before  # nothing that was complete is lost
    for step in manager.list():
        assert verify_checkpoint(f"{root}/step-{step:08d}") == []
        state = {"t": None, "w": None, "n": None}
        manager.restore(state, step=step)
        assert state["n"] == step
        assert torch.equal(state["t"], torch.full((4000,), float(step)))
        assert torch.equal(state["w"], torch.full((3000,), -float(step)))
    return latest


@pytest.mark.slow
@pytest.mark.parametrize("background", [False, True], ids=["sync", "async"])
def test_nothing_is_lost_at_fifty_random_moments(background):
    assert run(50, background=background, seed=2) > 10
