"""The ```python blocks of Markdown pages, and a way to run many of them that imports torch once.

A block that is not to be run has the comment `<!-- not run: why -->` on the line before it.
As a program, reads jobs from standard input as JSON and answers in JSON: see `run`.
"""

from __future__ import annotations

import importlib
import json
import os
import re
import subprocess
import sys
import tempfile
import time
import traceback
from collections.abc import Sequence
from dataclasses import dataclass
from pathlib import Path

BLOCK = re.compile(r"^([ ]*)```python[^\n]*\n(.*?)^\1```[ ]*$", re.MULTILINE | re.DOTALL)
NOT_RUN = re.compile(r"<!-- not run: .+ -->\s*$")
TIMEOUT = 120.0  # seconds for all blocks of one job


@dataclass(frozen=True)
class Snippet:
    """One block: where its first line is, and its text without the page's indentation."""

    page: Path
    line: int
    source: str


def snippets(page: Path) -> list[Snippet]:
    """Return the blocks of a page that are to be run, in order."""
    text = page.read_text()
    found = []
    for match in BLOCK.finditer(text):
        if not NOT_RUN.search(text[: match.start()]):
            lines = match[2].splitlines()
            source = "\n".join(line.removeprefix(match[1]) for line in lines) + "\n"
            found.append(Snippet(page, text.count("\n", 0, match.start(2)) + 1, source))
    return found


@dataclass(frozen=True)
class Job:
    """Snippets that run one after the other in one namespace, with `paths` to import from."""

    snippets: tuple[Snippet, ...]
    paths: tuple[Path, ...]


def run(jobs: Sequence[Job], base: Path) -> list[str]:
    """Run each job in a process of its own as a world of one; return what went wrong or "".

    Their import path is the standard library, `base` (which holds torch), and the job's own paths.
    """
    words = [
        {
            "paths": [str(path) for path in job.paths],
            "blocks": [[str(s.page), s.line, s.source] for s in job.snippets],
        }
        for job in jobs
    ]
    started_by_others = (
        "PYTHONPATH",
        "RANK",
        "WORLD_SIZE",
        "LOCAL_RANK",
        "MASTER_",
        "GROUP_",
        "TORCHELASTIC_",
    )
    env = {k: v for k, v in os.environ.items() if not k.startswith((*started_by_others, "SLURM_"))}
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


def child(job: dict[str, list[list[str]]]) -> int:
    """Run one job's blocks here; return the exit code."""
    sys.path[1:1] = job["paths"]  # type: ignore[assignment]
    namespace: dict[str, object] = {"__name__": "__main__"}
    try:
        with tempfile.TemporaryDirectory() as place:
            os.chdir(place)
            for page, line, source in job["blocks"]:
                # The page's own line numbers in tracebacks.
                exec(compile("\n" * (int(line) - 1) + source, page, "exec"), namespace)
            os.chdir("/")
    except BaseException:
        traceback.print_exc()
        return 1
    return 0


def serve(jobs: list[dict[str, list[list[str]]]]) -> list[str]:
    """Fork one process per job from this one, which has torch imported; return their complaints."""
    for module in ("torch", "torch.distributed.checkpoint", "torch.distributed.tensor"):
        importlib.import_module(module)
    answers = []
    for job in jobs:
        with tempfile.TemporaryFile("w+") as output:
            pid = os.fork()
            if pid == 0:
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
    os.kill(pid, 9)
    os.waitpid(pid, 0)
    return f"none: ended after {TIMEOUT} s"


if __name__ == "__main__":
    sys.path[0] = "/"  # not tests/
    sys.path.append(sys.argv[1])
    print(json.dumps(serve(json.load(sys.stdin))))
