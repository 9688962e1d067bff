"""kill -9, or an error, at operations on the disk: at every one in slow runs, else at a sixth."""

from __future__ import annotations

import json
import os
import subprocess
import sys
import tempfile
from pathlib import Path

import pytest

OUTCOMES = {
    "new": [[1, "old"], [2, "new"]],
    "replace": [[1, "new"], [1, "old"]],
    "retire": [[1, "old"], [2, "new"]],
    "background": [[1, "old"], [2, "new"]],
    "replace, errors": [[1, "new"], [1, "old"]],
    "retire, errors": [[1, "old"], [2, "new"]],
    "retire, objects": [[1, "old"], [2, "new"]],  # at a URL, where the manifest is what counts
    "replace, objects": [[1, "new"], [1, "old"]],
    "start in litter": [[1, "old"]],
    "save in litter, objects": [[1, "old"], [2, "new"]],
}


@pytest.fixture(scope="module")
def sweeps(request):
    """Every sixth operation of each scenario, from one that its place gives; all in slow runs."""
    every = 1 if request.config.getoption("--slow") else 6
    driver = Path(__file__).with_name("kill_driver.py")
    # In memory where possible: a kill (unlike a power cut) does not need a real disk to be seen,
    # and a hundred saves that sync their files take half a minute on one.
    memory = "/dev/shm" if os.path.isdir("/dev/shm") else None
    with tempfile.TemporaryDirectory(dir=memory) as base:
        run = subprocess.run(
            [sys.executable, str(driver), base, str(every), *OUTCOMES],
            capture_output=True,
            text=True,
            timeout=240,
            check=False,
        )
    assert run.returncode == 0, run.stderr
    return json.loads(run.stdout)


@pytest.mark.parametrize("scenario", list(OUTCOMES))
def test_a_kill_or_an_error_at_any_moment_leaves_a_whole_checkpoint_and_no_litter(sweeps, scenario):
    assert sweeps[scenario]["operations"] > 20
    assert sweeps[scenario]["outcomes"] == OUTCOMES[scenario]


def test_a_writer_at_work_is_not_taken_for_a_leftover(tmp_path):
    from lamina.checkpoint import CheckpointManager
    from lamina.checkpoint.storage.stores import WritingDirectory

    alive = WritingDirectory(tmp_path, 5)
    CheckpointManager(tmp_path)
    assert alive.path.is_dir()
    os.close(alive._lock)  # what the kernel does when the writer is killed
    CheckpointManager(tmp_path)
    assert not alive.path.exists()


def test_what_an_old_kill_left_does_not_come_back_as_a_deleted_checkpoint(tmp_path, monkeypatch):
    import shutil

    from lamina.checkpoint import CheckpointManager

    manager = CheckpointManager(tmp_path)
    manager.save(1, {"n": "old"})
    monkeypatch.setattr(shutil, "rmtree", lambda *_, **__: None)  # killed before it
    manager.save(1, {"n": "new"}, overwrite=True)
    monkeypatch.undo()
    shutil.rmtree(tmp_path / "step-00000001")  # by hand
    assert CheckpointManager(tmp_path).list() == []
    assert list(tmp_path.iterdir()) == []


def test_leftovers_that_may_not_be_touched_are_left_alone(tmp_path, monkeypatch):
    from lamina.checkpoint import CheckpointManager
    from lamina.checkpoint.storage.stores import WritingDirectory

    CheckpointManager(tmp_path).save(1, {"n": 1})
    other = WritingDirectory(tmp_path, 2)
    os.close(other._lock)
    (tmp_path / "step-00000001").rename(tmp_path / ".replaced-00000001-00000000")
    opened = os.open

    def read_only(path: object, flags: int, *rest: object, **more: object) -> int:
        if flags & (os.O_RDWR | os.O_WRONLY):
            raise PermissionError(13, "Permission denied", str(path))
        return opened(path, flags, *rest, **more)

    def refused(*_: object) -> None:
        raise OSError(30, "Read-only file system")

    monkeypatch.setattr(os, "open", read_only)
    monkeypatch.setattr(Path, "rename", refused)
    with pytest.warns(UserWarning, match=r"\.replaced-00000001.* should be step-00000001.*Read-o"):
        CheckpointManager(tmp_path)
    assert other.path.is_dir()
