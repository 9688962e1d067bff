"""The pytest process's end of the fork server."""

from __future__ import annotations

import contextlib
import os
import shutil
import socket
import subprocess
import sys
import tempfile
from pathlib import Path
from typing import cast

from lamina_testing.jobs import DeviceCount, Job, RankOutcome, receive, send


class RankServerError(RuntimeError):
    """The fork server ended unexpectedly; the message holds what it wrote."""


class ForkServer:
    """A server process, started at once; its imports run while pytest goes on."""

    def __init__(self) -> None:
        shared = Path("/dev/shm")
        base = shared if os.access(shared, os.W_OK) else None
        self._directory = Path(tempfile.mkdtemp(prefix="lamina-ranks-", dir=base))
        self._gpus: int | None = None
        self._connection, theirs = socket.socketpair()
        environment = os.environ | {
            "OMP_NUM_THREADS": "1",
            "MKL_NUM_THREADS": "1",
            # If a layer asks on import whether there is a GPU, CUDA must not start in the server.
            "PYTORCH_NVML_BASED_CUDA_CHECK": "1",
        }
        command = [sys.executable, "-m", "lamina_testing.server"]
        with theirs, (self._directory / "server.err").open("w") as errors:
            self._process = subprocess.Popen(
                [*command, str(theirs.fileno()), str(self._directory)],
                pass_fds=[theirs.fileno()],
                stdin=subprocess.DEVNULL,
                stdout=subprocess.DEVNULL,
                stderr=errors,
                env=environment,
                start_new_session=True,  # Ctrl-C goes to pytest, which then closes the socket
            )

    def run(self, job: Job) -> list[RankOutcome]:
        """Run one body on every rank. Raises RankServerError."""
        return cast(list[RankOutcome], self._ask(job))

    def device_count(self) -> int:
        """Return how many GPUs this machine has. Raises RankServerError."""
        if self._gpus is None:
            self._gpus = cast(int, self._ask(DeviceCount()))
        return self._gpus

    def _ask(self, request: object) -> object:
        with contextlib.suppress(BrokenPipeError):
            send(self._connection, request)
            answer = receive(self._connection)
            if answer is not None:
                return answer
        code = self._process.wait()
        errors = (self._directory / "server.err").read_text(errors="replace")
        raise RankServerError(f"the rank server ended with code {code}; it wrote:\n{errors}")

    def close(self) -> None:
        """End the server and all its ranks."""
        self._connection.close()
        try:
            self._process.wait(timeout=10)
        except subprocess.TimeoutExpired:
            self._process.kill()
            self._process.wait()
        shutil.rmtree(self._directory, ignore_errors=True)
