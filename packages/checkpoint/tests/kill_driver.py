"""Kills a save at its n-th touch of the disk, for every n, and looks at what is left.

Or lets the n-th touch fail, once, where the scenario says so. Run by test_kill.py as a program of
its own: it forks a child per kill, which a test process with threads should not do. Prints one JSON
object.
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

import object_store  # noqa: F401 (objects:// is a URL from here on)
import torch

import lamina.checkpoint.storage.streams as streams_module
from lamina.checkpoint import CheckpointError, CheckpointManager

ENDS = ["lived", "failed", "survived"]  # by the child's exit code, from 10


def tensors(step: int) -> dict[str, torch.Tensor]:
    generator = torch.Generator().manual_seed(step)
    return {f"t{i}": torch.randn(64, generator=generator) for i in range(2)}


class Touches:
    """Counts operations on the disk; the number-th is met by a SIGKILL, or by an error."""

    def __init__(self, number: int, root: Path | str, *, kill: bool) -> None:
        self.number, self.kill, self.seen = number, kill, 0
        self.root = str(root).removeprefix("objects://")
        # rmtree works relative to an open directory, so its names are bare: count them all.
        self.counted = ("os.rename", "os.remove", "os.rmdir", *(["shutil.rmtree"] if kill else []))
        sync, crc32 = os.fsync, streams_module.zlib.crc32
        os.fsync = lambda descriptor: (self.touch(), sync(descriptor))[1]
        writes = itertools.count(1)

        def sometimes_touch(data: bytes, start: int = 0) -> int:
            if next(writes) % 10 == 0:  # in the middle of a file, which torch.save writes in crumbs
                self.touch()
            return crc32(data, start)

        streams_module.zlib = types.SimpleNamespace(crc32=sometimes_touch)
        sys.addaudithook(self.hook)

    def touch(self) -> None:
        self.seen += 1
        if self.seen != self.number + 1:
            return
        if self.kill:
            os.kill(os.getpid(), signal.SIGKILL)
        raise OSError(5, "Input/output error")

    def hook(self, event: str, arguments: tuple[object, ...]) -> None:
        inside = event in ("open", "os.mkdir") and self.root in str(arguments[0])
        if inside or event in self.counted:
            self.touch()


def litter(root: Path | str) -> None:
    """Leave beside the checkpoint of step 1 what kills leave."""
    if isinstance(root, str):
        for name in ("step-00000001-1", "step-00000003"):
            half = Path(root.removeprefix("objects://")) / name
            shutil.copytree(half.with_name("step-00000001"), half)
            (half / "manifest.json").unlink()
        return
    whole = root / "step-00000001"
    for name in (".writing-00000002-0a", ".deleting-00000003-0b", ".replaced-00000001-0c"):
        shutil.copytree(whole, root / f"{name}000000")
    whole.rename(root / ".replaced-00000001-0d000000")


def attempt(
    root: Path | str,
    number: int,
    step: int | None,
    keep_last: int | None,
    background: bool,
    kill: bool,
) -> str:
    """Save, or start and restore, in a child that is killed or meets an error at `number`.

    Returns:
        What came of it.

    """
    child = os.fork()
    if child == 0:
        if step is not None:
            manager = CheckpointManager(root, keep_last=keep_last, async_save=background)
        touches = Touches(number, root, kill=kill)
        end = "survived"
        try:
            if step is None:
                CheckpointManager(root).restore({"t": None, "version": None})
            else:
                manager.save(step, {"t": tensors(step), "version": "new"}, overwrite=True)
                manager.wait()
        except (OSError, CheckpointError):
            end = "failed"
        os._exit(10 + ENDS.index(end if touches.seen > number else "lived"))
    _, status = os.waitpid(child, 0)
    if os.WIFSIGNALED(status):
        assert os.WTERMSIG(status) == signal.SIGKILL, status
        return "killed"
    return ENDS[os.WEXITSTATUS(status) - 10]


def check(root: Path | str, allowed: set[int]) -> tuple[int, str]:
    manager = CheckpointManager(root)
    latest = manager.latest()
    assert latest in allowed, (latest, allowed)
    if isinstance(root, Path):  # at a URL only a save deletes what kills leave
        assert len(files_in(root)) == len(manager.list()), files_in(root)
    for step in manager.list():
        state = {"t": None, "version": None}
        manager.restore(state, step=step)
        for name, tensor in tensors(step).items():
            assert torch.equal(state["t"][name], tensor), (step, name)
    manager.save(1000, {"t": tensors(1000), "version": "after"})  # and life goes on
    assert len(files_in(root)) == len(manager.list()), files_in(root)
    return latest, state["version"]


def files_in(root: Path | str) -> list[str]:
    return os.listdir(str(root).removeprefix("objects://"))


def sweep(base: Path, scenario: str, every: int, first: int) -> dict[str, object]:
    step, keep_last, allowed = {
        "new": (2, None, {1, 2}),
        "replace": (1, None, {1}),
        "retire": (2, 1, {1, 2}),
        "background": (2, 1, {1, 2}),
        "replace, errors": (1, None, {1}),
        "retire, errors": (2, 1, {1, 2}),
        "retire, objects": (2, 1, {1, 2}),
        "replace, objects": (1, None, {1}),
        "start in litter": (None, None, {1}),
        "save in litter, objects": (2, None, {1, 2}),
    }[scenario]
    background, kill = scenario == "background", not scenario.endswith("errors")
    outcomes = []
    for number in range(first % every, 10_000, every):
        root: Path | str = base / str(number)
        if scenario.endswith("objects"):
            root = f"objects://{root}"
        CheckpointManager(root).save(1, {"t": tensors(1), "version": "old"})
        if "litter" in scenario:
            litter(root)
        end = attempt(root, number, step, keep_last, background, kill)
        assert end == "lived" or (end == "killed") == kill, end
        outcomes.append(check(root, allowed))
        if end in ("survived", "lived"):  # what is said to be saved is
            saved = (1, "old") if step is None else (step, "new")
            assert outcomes[-1] == saved, (number, end, outcomes[-1])
        shutil.rmtree(base / str(number))
        if end == "lived":
            break
    return {"operations": number, "outcomes": sorted(set(outcomes))}


if __name__ == "__main__":
    torch.set_num_threads(1)
    base, every, *scenarios = sys.argv[1:]
    os.environ["UPLOADS"] = base
    found = {
        scenario: sweep(Path(base) / scenario, scenario, int(every), place)
        for place, scenario in enumerate(scenarios)
    }
    print(json.dumps(found))
