"""Runs the Python examples of Markdown pages as a reader would: each in a process of its own."""

from __future__ import annotations

import os
import subprocess
import sys
import tempfile
from collections.abc import Mapping
from dataclasses import dataclass
from pathlib import Path


@dataclass(frozen=True)
class Snippet:
    """A fenced block: its source without the fences, and the line (from 1) of its first line."""

    path: Path
    line: int
    source: str

    def __str__(self) -> str:
        return f"{self.path.name}:{self.line}"


class SnippetFailedError(AssertionError):
    """A snippet ended with an error; the message says where it is and holds its output."""


def python_blocks(markdown_path: str | os.PathLike[str]) -> list[Snippet]:
    """Return the blocks fenced as ```python (and nothing after that word), in order.

    Blocks indented in a list keep their own indentation only. Raises ValueError if a fence is not
    closed.
    """
    path = Path(markdown_path)
    found: list[Snippet] = []
    begin, indent, lines = 0, 0, list[str]()
    for number, line in enumerate(path.read_text(encoding="utf-8").splitlines(), start=1):
        text = line.strip()
        if begin == 0 and text == "```python":
            begin, indent, lines = number + 1, len(line) - len(line.lstrip()), []
        elif begin and text == "```":
            found.append(Snippet(path, begin, "\n".join(lines) + "\n"))
            begin = 0
        elif begin:
            lines.append(line[indent:] if line[:indent].isspace() else line)
    if begin:
        raise ValueError(f"{path}:{begin - 1}: the block is not closed")
    return found


def run_snippet(
    snippet: Snippet,
    *,
    interpreter: str | os.PathLike[str] = sys.executable,
    directory: str | os.PathLike[str] | None = None,
    environment: Mapping[str, str] | None = None,
    timeout: float = 120.0,
) -> str:
    """Run a snippet with `interpreter` and return what it printed to stdout.

    It runs in `directory` (left out: an empty temporary one) with this process's environment, less
    what torchrun, SLURM, PYTHONPATH and PYTHONUNBUFFERED would tell it, updated by `environment`.
    `timeout` is in seconds. Raises SnippetFailedError, or subprocess.TimeoutExpired.
    """
    with tempfile.TemporaryDirectory(prefix="lamina-snippet-") as scratch:
        # A traceback should name the page and the line that the reader sees.
        program = Path(scratch) / f"{snippet.path.stem}_line_{snippet.line}.py"
        program.write_text("\n" * (snippet.line - 1) + snippet.source, encoding="utf-8")
        empty = Path(scratch) / "work"
        empty.mkdir()
        run = subprocess.run(
            [os.fspath(interpreter), str(program)],
            cwd=directory or empty,
            env=_plain_environment() | dict(environment or {}),
            capture_output=True,
            text=True,
            timeout=timeout,
        )
    if run.returncode != 0:
        raise SnippetFailedError(
            f"{snippet.path}:{snippet.line}: the snippet ended with code {run.returncode}\n"
            f"{run.stdout}{run.stderr}"
        )
    return run.stdout


def run_only_python_block(
    markdown_path: str | os.PathLike[str],
    *,
    interpreter: str | os.PathLike[str] = sys.executable,
    environment: Mapping[str, str] | None = None,
    timeout: float = 120.0,
) -> str:
    """Run the one Python block that a package's README has; as `run_snippet`.

    Raises ValueError if it has none or several.
    """
    blocks = python_blocks(markdown_path)
    if len(blocks) != 1:
        lines = [block.line for block in blocks]
        raise ValueError(f"{markdown_path} has {len(blocks)} python blocks (lines {lines}), not 1")
    return run_snippet(blocks[0], interpreter=interpreter, environment=environment, timeout=timeout)


def _plain_environment() -> dict[str, str]:
    removed = ("RANK", "WORLD_SIZE", "LOCAL_RANK", "LOCAL_WORLD_SIZE", "MASTER_ADDR", "MASTER_PORT")
    prefixes = ("TORCHELASTIC_", "SLURM_", "PYTEST_", "PYTHONPATH", "PYTHONUNBUFFERED")
    return {
        name: value
        for name, value in os.environ.items()
        if name not in removed and not name.startswith(prefixes)
    }
