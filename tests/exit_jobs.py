"""Jobs of two ranks, one after another, to their very end; says which did not end with status 0.

    python tests/exit_jobs.py JOBS BUSY                     # the job below
    python tests/exit_jobs.py JOBS BUSY PROGRAM WORDS...    # any program, as torchrun starts it

BUSY loops run beside them, so that threads meet in other orders than on a machine at rest. Ranks
are forked from this process, which has torch and Lamina imported, and end as any interpreter does:
that is what is tried. `{job}` in WORDS is the job's number.
"""

from __future__ import annotations

import os
import runpy
import signal
import socket
import sys
import time
from pathlib import Path

import torch
import torch.distributed as dist

from lamina.collectives import reduce_scatter_fp32

RANKS, LIMIT = 2, 300.0


def sums() -> None:
    """Some dozens of asynchronous sums whose handles are kept, then one of torch's; all right."""
    dist.init_process_group("gloo")
    rank, group = dist.get_rank(), dist.group.WORLD
    given, handles = torch.full((RANKS * 4096,), rank + 1.0), []
    for _ in range(36):
        shard = torch.empty(4096)
        handles.append((reduce_scatter_fp32(shard, given, group, async_op=True), shard))
    for handle, shard in handles:
        handle.wait()
        assert bool((shard == 3).all())
    total = torch.ones(4096)
    dist.all_reduce(total)
    dist.destroy_process_group()
    sys.exit(0)


def free_port() -> int:
    with socket.socket() as probe:
        probe.bind(("127.0.0.1", 0))
        return int(probe.getsockname()[1])


def start(busy: int) -> list[int]:
    """Processes that only keep processors busy."""
    loops = []
    for _ in range(busy):
        pid = os.fork()
        if pid == 0:
            parent = os.getppid()
            while os.getppid() == parent:
                sum(range(100_000))
            os._exit(0)
        loops.append(pid)
    return loops


def status_of(pid: int, deadline: float) -> int:
    while True:
        found, status = os.waitpid(pid, os.WNOHANG)
        if found:
            return os.waitstatus_to_exitcode(status)
        if time.monotonic() > deadline:
            os.kill(pid, signal.SIGKILL)
        time.sleep(0.005)


def main(jobs: int, busy: int, program: list[str]) -> None:
    """Run the jobs. In a rank, returns or raises at the end of its program."""
    loops, wrong = start(busy), []
    try:
        for job in range(jobs):
            port, ranks = free_port(), []
            for rank in range(RANKS):
                pid = os.fork()
                if pid == 0:
                    loops.clear()  # they are the first process's
                    os.environ |= {"RANK": str(rank), "LOCAL_RANK": str(rank)}
                    os.environ |= {"WORLD_SIZE": str(RANKS), "LOCAL_WORLD_SIZE": str(RANKS)}
                    os.environ |= {"MASTER_ADDR": "127.0.0.1", "MASTER_PORT": str(port)}
                    torch.set_num_threads(1)
                    if not program:
                        return sums()
                    sys.argv = [word.format(job=job) for word in program]
                    sys.path.insert(0, str(Path(program[0]).parent))
                    os.dup2(os.open(os.devnull, os.O_WRONLY), 1)  # what it says is not asked
                    runpy.run_path(program[0], run_name="__main__")
                    return None
                ranks.append(pid)
            deadline = time.monotonic() + LIMIT
            ended = [status_of(pid, deadline) for pid in ranks]
            print(f"job {job}: {ended}", file=sys.stderr, flush=True)
            wrong += [(job, ended)] * (ended != [0] * RANKS)
    finally:
        for pid in loops:
            os.kill(pid, signal.SIGKILL)
            os.waitpid(pid, 0)
    print(f"{jobs - len(wrong)} of {jobs} jobs ended with status 0", *wrong, sep="\n")
    sys.exit(bool(wrong))


if __name__ == "__main__":
    main(int(sys.argv[1]), int(sys.argv[2]), sys.argv[3:])
