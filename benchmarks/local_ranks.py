"""Start a benchmark's program as every rank of this machine."""

from __future__ import annotations

import os
import socket
import subprocess
import sys
from collections.abc import Sequence


def environments(ranks: int) -> list[dict[str, str]]:
    """torchrun's variables for each rank, with one thread."""
    with socket.socket() as probe:
        probe.bind(("127.0.0.1", 0))
        port = probe.getsockname()[1]
    common = {"MASTER_ADDR": "127.0.0.1", "MASTER_PORT": str(port), "OMP_NUM_THREADS": "1"}
    common |= {"WORLD_SIZE": str(ranks), "LOCAL_WORLD_SIZE": str(ranks)}
    return [
        {**os.environ, **common, "RANK": str(rank), "LOCAL_RANK": str(rank)}
        for rank in range(ranks)
    ]


def start_ranks(ranks: int, program: str, arguments: Sequence[str]) -> None:
    """Run a Python program once per rank, and wait for all of them.

    Raises:
        SystemExit: a rank failed.
    """
    command = [sys.executable, program, *arguments]
    started = [subprocess.Popen(command, env=each) for each in environments(ranks)]
    codes = [rank.wait() for rank in started]
    if any(codes):
        raise SystemExit(f"a rank of {ranks} failed: exit codes {codes}")
