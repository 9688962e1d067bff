"""The pytest process's end of the fork server."""

from __future__ import annotations

import contextlib
import inspect
import os
import pickle
import shutil
import socket
import subprocess
import sys
import tempfile
from collections.abc import Callable, Sequence
from pathlib import Path
from typing import Any, cast

from lamina_testing.jobs import Argument, DeviceCount, Job, RankOutcome, receive, send
from lamina_testing.report import RanksFailed, RanksReport

# What test modules import: once in the fork server, or else in every rank of every test.
PRELOADED = (
    "torch._dynamo",
    "torch._inductor.compile_fx",  # the first compilation imports it, with any backend: 1.5 s
    "torch.distributed.checkpoint.state_dict",
    "torch.distributed.fsdp",
    "torch.distributed.pipelining",
    "torch.distributed.tensor.experimental",
    "torch.distributed.tensor.parallel",
    "lamina_testing.delays",
    "lamina_testing.meter",
    "lamina_testing.oracles",
    "hypothesis",
    "lamina.*",
)


class RankServerError(RuntimeError):
    """The fork server ended unexpectedly; the message holds what it wrote."""


class ForkServer:
    """A server process, started at once; its imports run while pytest goes on."""

    def __init__(self, preload: Sequence[str] = PRELOADED) -> None:
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
                [*command, str(theirs.fileno()), str(self._directory), *preload],
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

    def call(
        self,
        function: Callable[..., Any],
        *,
        world_size: int = 1,
        init: bool = False,
        timeout: float = 300.0,
        **arguments: object,
    ) -> Any:
        """Call a function of a module on new ranks and return what it returns on rank 0.

        Arguments and the value are pickled. Raises RanksFailed, RankServerError.
        """
        job = Job(
            module_name=function.__module__,
            path=inspect.getfile(function),
            qualname=(function.__qualname__,),
            arguments={name: Argument(pickle.dumps(value)) for name, value in arguments.items()},
            world_size=world_size,
            backend="gloo",
            device="cpu",
            timeout=timeout,
            init=init,
            environment=dict(os.environ),
            directory=os.getcwd(),
            sys_path=list(sys.path),
            warning_filters=[],
            reuse=False,
            traceback_style="auto",
            show_locals=False,
        )
        outcomes = self.run(job)
        if any(outcome.status != "passed" for outcome in outcomes):
            raise RanksFailed(RanksReport(job, outcomes))
        value = outcomes[0].value
        return pickle.loads(value) if value else None

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
