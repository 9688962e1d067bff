"""Programs as a user starts them, in processes forked from one that has torch imported.

`python PROGRAM WORDS` imports torch for seconds. A rank that was made without a process group
(`init=False`) is a single thread with everything imported, so it can fork processes that run the
program at once. What a program imports is found imported; the rest is as in a new process.
"""

from __future__ import annotations

import faulthandler
import os
import runpy
import signal
import socket
import sys
import tempfile
import threading
import time
import traceback
import warnings
from collections.abc import Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import NoReturn, TextIO

from lamina_testing.jobs import STACK_SIGNAL
from lamina_testing.rank import end_with_parent

_OF_TORCHRUN = (
    "RANK", "LOCAL_RANK", "WORLD_SIZE", "LOCAL_WORLD_SIZE", "MASTER_ADDR", "MASTER_PORT"
)  # fmt: skip


@dataclass(frozen=True)
class Ended:
    """How a program ended: its exit code (negative: a signal's), its words, its memory in KiB."""

    code: int
    stdout: str
    stderr: str
    peak: int = 0

    @property
    def output(self) -> str:
        """Return all that it said."""
        return self.stdout + self.stderr


class Program:
    """One process, in a process group of its own; it writes to files `output` and `output`.err."""

    def __init__(
        self, words: Sequence[str], output: Path, directory: Path | None = None, **variables: str
    ) -> None:
        self.outputs = (output, output.with_suffix(".err"))
        self.ended: Ended | None = None
        self.pid = os.fork()
        if self.pid == 0:
            _become(words, self.outputs, directory, variables)

    def poll(self) -> Ended | None:
        """Return how the program ended, or None while it runs."""
        if self.ended is None:
            pid, status, usage = os.wait4(self.pid, os.WNOHANG)
            if pid:
                said, complained = (path.read_text(errors="replace") for path in self.outputs)
                code = os.waitstatus_to_exitcode(status)
                self.ended = Ended(code, said, complained, usage.ru_maxrss)
        return self.ended

    def wait(self, seconds: float) -> Ended:
        """Wait for the end. Raises TimeoutError, and then the program is killed."""
        deadline = time.monotonic() + seconds
        while (ended := self.poll()) is None:
            if time.monotonic() > deadline:
                self.signal(signal.SIGKILL)
                said = "".join(path.read_text(errors="replace") for path in self.outputs)
                raise TimeoutError(f"no end within {seconds} s: {said}")
            time.sleep(0.002)
        return ended

    def signal(self, number: int) -> None:
        """Send a signal to the program and all that it has started."""
        os.killpg(self.pid, number)


def _become(
    words: Sequence[str],
    outputs: tuple[Path, Path],
    directory: Path | None,
    variables: dict[str, str],
) -> NoReturn:
    """Be `python WORDS` until it ends."""
    code = 1
    try:
        os.setpgid(0, 0)
        end_with_parent()
        faulthandler.unregister(STACK_SIGNAL)
        warnings.showwarning = _show  # the rank records warnings, a program prints them
        for number, path in enumerate(outputs, start=1):
            os.dup2(os.open(path, os.O_WRONLY | os.O_CREAT | os.O_APPEND, 0o600), number)
        os.environ.update(variables)
        if directory is not None:
            os.chdir(directory)
        sys.argv = list(words)
        sys.path.insert(0, str(Path(words[0]).parent))
        runpy.run_path(words[0], run_name="__main__")
        code = 0
    except SystemExit as leaving:
        code = _exit_code(leaving.code)
    except BaseException:
        traceback.print_exc()
    finally:
        threading._shutdown()  # type: ignore[attr-defined]  # as an interpreter that ends
        sys.stdout.flush()
        sys.stderr.flush()
        os._exit(code)


def _show(
    message: Warning | str,
    category: type[Warning],
    filename: str,
    lineno: int,
    file: TextIO | None = None,
    line: str | None = None,
) -> None:
    (file or sys.stderr).write(warnings.formatwarning(message, category, filename, lineno, line))


def _exit_code(said: object) -> int:
    if said is None or isinstance(said, int):
        return said or 0
    print(said, file=sys.stderr)
    return 1


def start_ranks(
    words: Sequence[str], nproc: int, place: Path, directory: Path | None = None
) -> list[Program]:
    """Start a program on ranks as torchrun would; outputs go to new files in `place`."""
    with socket.create_server(("127.0.0.1", 0)) as free:
        port = free.getsockname()[1]
    started = []
    for rank in range(nproc):
        values = (rank, rank, nproc, nproc, "127.0.0.1", port)
        variables = dict(zip(_OF_TORCHRUN, map(str, values), strict=True))
        output = place / f"output-{time.monotonic_ns()}-{rank}"
        started.append(Program(words, output, directory, OMP_NUM_THREADS="1", **variables))
    return started


def run_ranks(
    words: Sequence[str], nproc: int, directory: Path | None = None, seconds: float = 240.0
) -> list[Ended]:
    """Run a program to its end. With `nproc` 0 it is one process that torchrun did not start.

    A test has `rank_server.call(run_ranks, ...)` do it: pytest's own process has threads.
    """
    with tempfile.TemporaryDirectory() as name:
        if nproc == 0:
            for variable in _OF_TORCHRUN:
                os.environ.pop(variable, None)
            started = [Program(words, Path(name, "output"), directory)]
        else:
            started = start_ranks(words, nproc, Path(name), directory)
        return [program.wait(seconds) for program in started]
