"""What a disk, another user or another optimizer can do to a save or a restore, in words."""

from __future__ import annotations

import errno
import json
import os
import shutil
import zlib
from pathlib import Path

import pytest
import torch
from torch import nn

import lamina.checkpoint.storage.stores as directory_module
from lamina.checkpoint import CheckpointError, CheckpointManager, CheckpointMismatchError
from lamina.checkpoint.storage.locations import LocalLocation


def trained(make, **how):
    torch.manual_seed(0)
    model = nn.Linear(4, 3)
    optimizer = make(model.parameters(), lr=0.1, **how)
    model(torch.ones(2, 4)).sum().backward()
    optimizer.step()
    return {"model": model, "optimizer": optimizer}


@pytest.mark.parametrize(
    ("saved", "here", "said"),
    [
        ((torch.optim.AdamW, {}), (torch.optim.SGD, {}), ("class AdamW", "class SGD")),
        ((torch.optim.SGD, {}), (torch.optim.AdamW, {}), ("class SGD", "class AdamW")),
        (
            (torch.optim.AdamW, {}),
            (torch.optim.AdamW, {"amsgrad": True}),
            ("amsgrad False", "amsgrad True"),
        ),
        (
            (torch.optim.SGD, {"momentum": 0.9, "nesterov": True}),
            (torch.optim.SGD, {"momentum": 0.9}),
            ("nesterov True", "nesterov False"),
        ),
    ],
)
def test_another_optimizer_is_refused_with_both_values(tmp_path, saved, here, said):
    manager = CheckpointManager(tmp_path, verify=False)
    manager.save(1, trained(saved[0], **saved[1]))
    state = trained(here[0], **here[1])
    before = {name: value.clone() for name, value in state["model"].named_parameters()}
    expected = rf"'optimizer' has {said[0]} in the checkpoint and {said[1]} here.*exclude="
    with pytest.raises(CheckpointMismatchError, match=expected):
        manager.restore(state)
    assert all(
        torch.equal(before[name], value) for name, value in state["model"].named_parameters()
    )
    assert manager.restore(state, exclude=["optimizer"]) == 1


def test_other_learning_rates_and_kernels_are_no_other_optimizer(tmp_path):
    manager = CheckpointManager(tmp_path, verify=False)
    manager.save(1, trained(torch.optim.AdamW, foreach=False, weight_decay=0.3))
    state = trained(torch.optim.AdamW, foreach=True)
    manager.restore(state)
    assert state["optimizer"].param_groups[0]["weight_decay"] == 0.3
    assert set(state["optimizer"].state_dict()) == {"state", "param_groups"}


def forged(step: Path, name: str, data: bytes) -> None:
    """Replace a file, and its sum in the manifest."""
    (step / name).write_bytes(data)
    body = json.loads((step / "manifest.json").read_text())["body"]
    body["files"][name] = {"bytes": len(data), "crc32": zlib.crc32(data)}
    crc = zlib.crc32(json.dumps(body, sort_keys=True).encode())
    (step / "manifest.json").write_text(json.dumps({"crc32": crc, "body": body}))


def stray_file(root: Path) -> None:
    (root / "step-00000003").write_text("notes")


def empty_directory(root: Path) -> None:
    (root / "step-00000003").mkdir()


def a_pipe_for_a_manifest(root: Path) -> None:
    (root / "step-00000003").mkdir()
    os.mkfifo(root / "step-00000003" / "manifest.json")


def directory_for_a_manifest(root: Path) -> None:
    (root / "step-00000003" / "manifest.json").mkdir(parents=True)


def values_that_are_none(root: Path) -> None:
    forged(root / "step-00000002", "values.json", b'{"n": {"$tuple": 7}}')


def values_that_are_a_list(root: Path) -> None:
    forged(root / "step-00000002", "values.json", b"[1, 2")


def chunks_of_another_form(root: Path) -> None:
    forged(root / "step-00000002", "chunks.json", b'{"__0_0.distcp": [3]}')


def forged_metadata(root: Path) -> None:
    forged(root / "step-00000002", ".metadata", b"cos\nsystem\n(S'true'\ntR.")


@pytest.mark.parametrize(
    "spoil",
    [
        stray_file,
        empty_directory,
        a_pipe_for_a_manifest,
        directory_for_a_manifest,
        values_that_are_none,
        values_that_are_a_list,
        chunks_of_another_form,
        forged_metadata,
    ],
)
def test_whatever_cannot_be_read_is_passed_over(tmp_path, spoil):
    manager = CheckpointManager(tmp_path, verify=False)
    for step in (1, 2):
        manager.save(step, {"n": step, "t": torch.full((4,), float(step))})
    spoil(tmp_path)
    good = 2 if (tmp_path / "step-00000003").exists() else 1
    state = {"n": 0, "t": None}
    with pytest.warns(UserWarning, match="is passed over"):
        assert manager.restore(state, fallback=True) == good
    assert (state["n"], float(state["t"][0])) == (good, good)
    assert manager.latest() in (1, 2)


def test_what_another_user_may_not_let_us_read_is_passed_over(tmp_path, monkeypatch):
    manager = CheckpointManager(tmp_path, verify=False)
    for step in (1, 2):
        manager.save(step, {"n": step})
    honest = LocalLocation.read

    def read(self, name):
        if self.path.name == "step-00000002":
            raise PermissionError(errno.EACCES, "Permission denied", str(self.path / name))
        return honest(self, name)

    monkeypatch.setattr(LocalLocation, "read", read)
    with pytest.warns(UserWarning, match="step 2 is passed over: .*this user may not read it"):
        assert manager.restore({"n": 0}, fallback=True) == 1


def test_a_full_disk_is_told_with_needed_and_free_bytes(tmp_path, monkeypatch):
    create = LocalLocation.create

    def full(self, name):
        file = create(self, name)
        if name.endswith(".distcp"):

            def write(_):
                raise OSError(errno.ENOSPC, os.strerror(errno.ENOSPC))

            monkeypatch.setattr(type(file), "write", lambda self, data: write(data))
        return file

    monkeypatch.setattr(LocalLocation, "create", full)
    manager = CheckpointManager(tmp_path, verify=False)
    expected = r"No space left.*: this rank writes 80000 bytes of .* there, and \d+ bytes are free"
    with pytest.raises(CheckpointError, match=expected):
        manager.save(1, {"t": torch.ones(20000)})
    assert manager.list() == []


def test_a_writer_and_another_jobs_cleaning_do_not_meet(tmp_path, monkeypatch):
    """Another job's manager is made between any two of a writer's first steps."""
    CheckpointManager(tmp_path, verify=False).save(1, {"n": 1})
    honest, cleaned = directory_module.fcntl.flock, []

    def flock(descriptor, how):
        locks = not how & directory_module.fcntl.LOCK_NB
        if locks and not cleaned:
            cleaned.extend(directory_module.LocalStore(tmp_path).clean())
        honest(descriptor, how)
        if locks:
            assert directory_module.LocalStore(tmp_path).clean() == []

    monkeypatch.setattr(directory_module.fcntl, "flock", flock)
    CheckpointManager(tmp_path, verify=False).save(2, {"n": 2})
    assert len(cleaned) == 1
    assert CheckpointManager(tmp_path).list() == [1, 2]
    assert len(list(tmp_path.iterdir())) == 2


def test_200_kept_checkpoints_cost_a_save_what_a_few_do(tmp_path, monkeypatch):
    calls = []
    for name in ("size", "read", "open"):
        honest = getattr(LocalLocation, name)

        def counted(self, *given, honest=honest, **options):
            calls.append(given)
            return honest(self, *given, **options)

        monkeypatch.setattr(LocalLocation, name, counted)
    counts = {}
    for keep in (5, 200):
        root = tmp_path / str(keep)
        manager = CheckpointManager(root, keep_last=keep, verify=False)
        manager.save(0, {"n": 0})
        for step in range(1, keep):
            shutil.copytree(root / "step-00000000", root / f"step-{step:08d}")
        for step in (keep, keep + 1):  # the first one reads what is there
            calls.clear()
            manager.save(step, {"n": step})
        counts[keep] = len(calls)
        assert len(manager.list()) == keep
    files = 5
    assert counts[200] <= counts[5] + files  # the checkpoint whose turn it is to be looked at
