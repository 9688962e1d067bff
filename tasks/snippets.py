"""The ```python blocks of Markdown pages, and a way to run many of them that imports torch once.

A comment on the line before a block says how the block is run:

- `<!-- not run: why -->`: the block is not run.
- `<!-- ranks: 2 -->`: the block is a program of its own, and two ranks run it as under torchrun.
- `<!-- ranks: 2, restarts: 1 -->`: the ranks fail once and are started again.

A ```text block with the comment `<!-- prints -->` before it is what the block above it prints (on
rank 0); `...` in it stands for any text.

As a program, this reads jobs from standard input as JSON and answers in JSON: see `run`.
"""

from __future__ import annotations

import contextlib
import importlib
import io
import json
import os
import re
import signal
import socket
import subprocess
import sys
import tempfile
import time
import traceback
from collections.abc import Iterator, Sequence
from dataclasses import asdict, dataclass
from pathlib import Path
from typing import Any

BLOCK = re.compile(r"^([ ]*)```python[^\n]*\n(.*?)^\1```[ ]*$", re.MULTILINE | re.DOTALL)
NOT_RUN = re.compile(r"<!-- not run: .+ -->\s*$")
RANKS = re.compile(r"<!-- ranks: (\d+)(?:, restarts: (\d+))? -->\s*$")
PRINTS = re.compile(r"<!-- prints -->\n```text\n(.*?)^```[ ]*$", re.MULTILINE | re.DOTALL)
TIMEOUT = 300.0  # seconds for all blocks of one job


@dataclass(frozen=True)
class Snippet:
    """One block: where its first line is, and its text without the page's indentation.

    Attributes:
        ranks: how many ranks run it as a program of its own; 0 runs it in the page's process.
        restarts: how often the ranks fail and are started again.
        prints: what the page says that it prints; None where the page says nothing.
    """

    page: Path
    line: int
    source: str
    ranks: int = 0
    restarts: int = 0
    prints: str | None = None


def snippets(page: Path) -> list[Snippet]:
    """Return the blocks of a page that are to be run, in order."""
    text = page.read_text()
    found = []
    blocks = list(BLOCK.finditer(text))
    ends = [*(block.start() for block in blocks), len(text)][1:]
    for match, end in zip(blocks, ends, strict=True):
        if not NOT_RUN.search(text[: match.start()]):
            lines = match[2].splitlines()
            source = "\n".join(line.removeprefix(match[1]) for line in lines) + "\n"
            line = text.count("\n", 0, match.start(2)) + 1
            said = RANKS.search(text[: match.start()])
            ranks, restarts = (int(number or 0) for number in (said.groups() if said else (0, 0)))
            prints = PRINTS.search(text, match.end(), end)
            found.append(
                Snippet(page, line, source, ranks, restarts, prints[1] if prints else None)
            )
    return found


@dataclass(frozen=True)
class Job:
    """Snippets that run one after the other in one namespace, with `paths` to import from.

    What `imported` names is imported before: by all jobs from this one on, which must be able to
    see it too. So its cost is paid once.
    """

    snippets: tuple[Snippet, ...]
    paths: tuple[Path, ...]
    imported: tuple[str, ...] = ()


def run(jobs: Sequence[Job], base: Path) -> list[str]:
    """Run each job in a process of its own as a world of one; return what went wrong or "".

    Their import path is the standard library, `base` (which holds torch), and the job's own paths.
    """
    words = [
        {
            "paths": [str(path) for path in job.paths],
            "imported": job.imported,
            "blocks": [{**asdict(s), "page": str(s.page)} for s in job.snippets],
        }
        for job in jobs
    ]
    not_the_readers = (
        "PYTHONPATH",
        "PYTHONUNBUFFERED",  # it would hide that a page forgets to flush
        "RANK",
        "WORLD_SIZE",
        "LOCAL_RANK",
        "MASTER_",
        "GROUP_",
        "TORCHELASTIC_",
    )
    env = {k: v for k, v in os.environ.items() if not k.startswith((*not_the_readers, "SLURM_"))}
    done = subprocess.run(
        [sys.executable, "-S", __file__, str(base)],
        input=json.dumps(words),
        capture_output=True,
        text=True,
        env={**env, "OMP_NUM_THREADS": "1"},
    )
    if done.returncode:
        raise RuntimeError(f"the snippet runner failed:\n{done.stderr}")
    answers: list[str] = json.loads(done.stdout.splitlines()[-1])
    return answers


def execute(block: Snippet, namespace: dict[str, object]) -> None:
    """Run a block here; tracebacks have the page's own line numbers."""
    exec(compile("\n" * (block.line - 1) + block.source, str(block.page), "exec"), namespace)


def run_here(block: Snippet, namespace: dict[str, object]) -> str:
    """Run a block in this process; return what it prints."""
    printed = io.StringIO()
    if block.prints is None:
        execute(block, namespace)
    else:
        with contextlib.redirect_stdout(printed):
            execute(block, namespace)
    return printed.getvalue()


def run_ranks(block: Snippet) -> str:
    """Run a block as the program of several ranks, as torchrun would; return what rank 0 prints.

    Raises:
        RuntimeError: if a rank fails in the last attempt, or none does in an earlier one.
    """
    sys.stdout.flush()  # or each rank would print again what earlier blocks have left in the buffer
    for attempt in range(block.restarts + 1):
        with socket.create_server(("localhost", 0)) as free:
            port = free.getsockname()[1]
        with tempfile.TemporaryFile("w+") as output:
            pids = [
                start_rank(block, rank, attempt, port, output.fileno())
                for rank in range(block.ranks)
            ]
            failed = wait_for_ranks(pids)
            output.seek(0)
            printed = output.read()
        if failed != (attempt < block.restarts):
            state = "failed" if failed else "did not fail"
            raise RuntimeError(f"{block.page}:{block.line}: attempt {attempt} {state}\n{printed}")
    return printed


def start_rank(block: Snippet, rank: int, attempt: int, port: int, output: int) -> int:
    """Fork one rank of a block; return its process id."""
    if pid := os.fork():
        return pid
    code = 1
    try:
        if rank == 0:
            os.dup2(output, 1)
        place = {"RANK": rank, "LOCAL_RANK": rank, "WORLD_SIZE": block.ranks}
        place |= {"LOCAL_WORLD_SIZE": block.ranks, "MASTER_PORT": port}
        os.environ.update({name: str(number) for name, number in place.items()})
        os.environ.update(MASTER_ADDR="localhost", TORCHELASTIC_RESTART_COUNT=str(attempt))
        # The names outlive the program. torch's Reducer may wait for a thread of gloo for ever
        # where the last reference to a DDP model goes: it holds the lock that this thread needs.
        names: dict[str, object] = {"__name__": "__main__"}
        execute(block, names)
        code = 0
    except BaseException:
        traceback.print_exc()
    finally:
        sys.stdout.flush()
        sys.stderr.flush()
        os._exit(code)


def wait_for_ranks(pids: list[int]) -> bool:
    """Wait until all ranks have ended; kill the others once one has failed. Return whether so."""
    running, failed = set(pids), False
    while running:
        ended, status = os.waitpid(-1, 0)
        running.discard(ended)
        if status and not failed:
            failed = True
            for pid in running:
                os.kill(pid, signal.SIGKILL)
    return failed


def compare(block: Snippet, printed: str) -> None:
    """Raise AssertionError if a block prints something else than its page says."""
    if block.prints is None:
        return
    wanted = re.escape(block.prints.rstrip()).replace(r"\.\.\.", ".*?")
    if not re.fullmatch(wanted, printed.rstrip(), re.DOTALL):
        raise AssertionError(
            f"{block.page}:{block.line} prints\n{printed}\ninstead of\n{block.prints}"
        )


def child(job: dict[str, Any]) -> int:
    """Run one job's blocks here; return the exit code."""
    sys.path[1:1] = job["paths"]
    namespace: dict[str, object] = {"__name__": "__main__"}
    try:
        with tempfile.TemporaryDirectory() as place:
            os.chdir(place)
            for words in job["blocks"]:
                block = Snippet(**words)
                compare(block, run_ranks(block) if block.ranks else run_here(block, namespace))
            os.chdir("/")
    except BaseException:
        traceback.print_exc()
        return 1
    return 0


@contextlib.contextmanager
def added_to_path(paths: list[str]) -> Iterator[None]:
    """Import from `paths` too, for a while."""
    before = sys.path[:]
    sys.path[1:1] = paths
    yield
    sys.path[:] = before


def serve(jobs: list[dict[str, Any]]) -> list[str]:
    """Fork one process per job from this one, which has torch imported; return their complaints."""
    for module in ("torch", "torch.distributed.checkpoint", "torch.distributed.tensor"):
        importlib.import_module(module)
    answers = []
    for job in jobs:
        with added_to_path(job["paths"]):
            for module in job["imported"]:
                importlib.import_module(module)
        with tempfile.TemporaryFile("w+") as output:
            pid = os.fork()
            if pid == 0:
                os.setpgrp()  # so that its ranks can be killed with it
                os.dup2(output.fileno(), 1)
                os.dup2(output.fileno(), 2)
                code = child(job)
                sys.stdout.flush()
                sys.stderr.flush()
                os._exit(code)
            status = wait(pid)
            output.seek(0)
            answers.append(output.read() + f"\nexit status {status}" if status else "")
    return answers


def wait(pid: int) -> int | str:
    """Wait for a process, TIMEOUT seconds at most; return its exit status."""
    end = time.monotonic() + TIMEOUT
    while time.monotonic() < end:
        ended, status = os.waitpid(pid, os.WNOHANG)
        if ended:
            return os.waitstatus_to_exitcode(status)
        time.sleep(0.01)
    os.killpg(pid, signal.SIGKILL)
    os.waitpid(pid, 0)
    return f"none: ended after {TIMEOUT} s"


if __name__ == "__main__":
    sys.path[0] = "/"  # not tests/
    sys.path.append(sys.argv[1])
    print(json.dumps(serve(json.load(sys.stdin))))
