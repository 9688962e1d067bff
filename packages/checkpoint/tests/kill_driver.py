"""Kills a save at its n-th touch of the disk, for every n, and looks at what is left.

Run by test_kill.py as a program of its own: it forks a child per kill, which a test process with
threads should not do. Prints one JSON object.
"""

from __future__ import annotations

import itertools
import json
import os
import shutil
import signal
import sys
import types
from pathlib import Path

import torch

import lamina.checkpoint.streams as streams_module
from lamina.checkpoint import CheckpointManager


def tensors(step: int) -> dict[str, torch.Tensor]:
    generator = torch.Generator().manual_seed(step)
    return {f"t{i}": torch.randn(64, generator=generator) for i in range(2)}


def die_at(number: int, root: Path) -> None:
    """Arrange a SIGKILL just before the number-th operation on the disk."""
    seen = 0

    def touch() -> None:
        nonlocal seen
        if seen == number:
            os.kill(os.getpid(), signal.SIGKILL)
        seen += 1

    def hook(event: str, arguments: tuple[object, ...]) -> None:
        # rmtree works relative to an open directory, so its names are bare: count them all.
        inside = event in ("open", "os.mkdir") and str(root) in str(arguments[0])
        if inside or event in ("os.rename", "os.remove", "os.rmdir", "shutil.rmtree"):
            touch()

    sync, crc32 = os.fsync, streams_module.zlib.crc32
    os.fsync = lambda descriptor: (touch(), sync(descriptor))[1]
    writes = itertools.count(1)

    def sometimes_touch(data: bytes, start: int = 0) -> int:
        if next(writes) % 10 == 0:  # in the middle of a file, which torch.save writes in crumbs
            touch()
        return crc32(data, start)

    streams_module.zlib = types.SimpleNamespace(crc32=sometimes_touch)
    sys.addaudithook(hook)


def attempt(
    root: Path, number: int, steps: list[int], keep_last: int | None, background: bool
) -> bool:
    """Save in a child that dies at `number`; True if it lived."""
    child = os.fork()
    if child == 0:
        manager = CheckpointManager(root, keep_last=keep_last, async_save=background)
        die_at(number, root)
        for step in steps:
            manager.save(step, {"t": tensors(step), "version": "new"}, overwrite=True)
        manager.wait()
        os._exit(0)
    _, status = os.waitpid(child, 0)
    if os.WIFSIGNALED(status):
        assert os.WTERMSIG(status) == signal.SIGKILL, status
        return False
    assert os.WEXITSTATUS(status) == 0, status
    return True


def check(root: Path, allowed: set[int]) -> tuple[int, str]:
    manager = CheckpointManager(root)
    latest = manager.latest()
    assert latest in allowed, (latest, allowed)
    assert not [p.name for p in root.iterdir() if p.name.startswith(".")]
    for step in manager.list():
        state = {"t": None, "version": None}
        manager.restore(state, step=step)
        for name, tensor in tensors(step).items():
            assert torch.equal(state["t"][name], tensor), (step, name)
    manager.save(1000, {"t": tensors(1000), "version": "after"})  # and life goes on
    return latest, state["version"]


def sweep(base: Path, scenario: str) -> dict[str, object]:
    steps, keep_last, allowed = {
        "new": ([2], None, {1, 2}),
        "replace": ([1], None, {1}),
        "retire": ([2], 1, {1, 2}),
        "background": ([2], 1, {1, 2}),
    }[scenario]
    outcomes = []
    for number in range(10_000):
        root = base / str(number)
        CheckpointManager(root).save(1, {"t": tensors(1), "version": "old"})
        lived = attempt(root, number, steps, keep_last, scenario == "background")
        outcomes.append(check(root, allowed))
        shutil.rmtree(root)
        if lived:
            break
    return {"kills": number, "outcomes": sorted(set(outcomes))}


if __name__ == "__main__":
    torch.set_num_threads(1)
    print(json.dumps({s: sweep(Path(sys.argv[1]) / s, s) for s in sys.argv[2:]}))
