"""Which checkpoints are kept, which one a restore takes, and what is passed over."""

from __future__ import annotations

import contextlib
import gc
import math
import os
import re
import shutil
import threading
import time
from pathlib import Path

import pytest
import torch

import lamina.checkpoint.storage.stores as directory_module
from lamina.checkpoint import (
    CheckpointDamagedError,
    CheckpointError,
    CheckpointManager,
    CheckpointNotFoundError,
)
from lamina.checkpoint.storage.scrubber import Scrubber
from lamina_testing import device_type


def flip(path) -> None:
    data = bytearray(path.read_bytes())
    data[len(data) // 2] ^= 1
    path.write_bytes(data)


@pytest.mark.parametrize(
    ("rules", "kept"),
    [
        ({}, [0, 1, 2, 3, 4, 5]),
        ({"keep_last": 2}, [4, 5]),
        ({"keep_every": 2}, [0, 2, 4, 5]),
        ({"keep_best": 2}, [1, 3, 5]),
        ({"keep_best": 1, "best_is": "max"}, [0, 5]),
        ({"keep_last": 2, "keep_every": 3, "keep_best": 1}, [0, 3, 4, 5]),
    ],
)
def test_a_checkpoint_is_kept_if_any_rule_keeps_it(tmp_path, rules, kept):
    manager = CheckpointManager(tmp_path, verify=False, **rules)
    for step, metric in enumerate([9.0, 2.0, 5.0, 1.0, float("nan"), None]):
        manager.save(step, {"n": step}, metric=metric)
    assert manager.list() == kept


def test_rules_that_mean_nothing_are_refused(tmp_path):
    for name in ("keep_every", "keep_best"):
        with pytest.raises(ValueError, match=f"{name} is 0"):
            CheckpointManager(tmp_path, **{name: 0})
    with pytest.raises(ValueError, match="best_is"):
        CheckpointManager(tmp_path, best_is="good")
    with pytest.raises(ValueError, match="best_is='max' has no effect: keep_best=None"):
        CheckpointManager(tmp_path, best_is="max")


def test_restore_falls_back_to_the_previous_good_one_when_told(tmp_path):
    manager = CheckpointManager(tmp_path)
    for step in range(4):
        manager.save(step, {"t": torch.full((500,), float(step))})
    flip(tmp_path / "step-00000003" / "__0_0.distcp")
    (tmp_path / "step-00000002" / "values.json").unlink()
    state = {"t": None}
    with pytest.raises(CheckpointDamagedError, match=r"__0_0\.distcp is damaged: 't'"):
        manager.restore(state)
    with pytest.warns(UserWarning, match="step 3 is passed over"):
        assert manager.restore(state, fallback=True) == 1
    assert torch.equal(state["t"], torch.ones(500))
    assert list(manager.last_restore.skipped) == [3, 2]
    for step in (2, 3):  # the run comes by these steps again: what is no use is replaced
        manager.save(step, {"t": torch.full((500,), float(step))})
    with pytest.raises(FileExistsError, match="overwrite=True"):
        manager.save(3, {"t": torch.zeros(500)})
    assert manager.restore(state) == 3
    for step in (2, 3):
        flip(tmp_path / f"step-0000000{step}" / "__0_0.distcp")
    for step in (0, 1):
        flip(tmp_path / f"step-0000000{step}" / "__0_0.distcp")
    expected = pytest.raises(CheckpointNotFoundError, match="step 0")
    with pytest.warns(UserWarning, match="passed over"), expected:
        manager.restore(state, fallback=True)


def test_a_run_that_went_back_keeps_what_it_saves(tmp_path):
    manager = CheckpointManager(tmp_path, keep_last=2, keep_every=100, verify=False)
    for step in range(100, 1001, 100):
        manager.save(step, {"n": step})
    with pytest.warns(UserWarning, match=r"newer .*\[600, 700, 800, 900, 1000\]"):
        manager.restore({"n": 0}, step=500)
    for step in (550, 560):
        manager.save(step, {"n": step})
        assert step in manager.list()
    assert 550 not in manager.list()


def test_a_damaged_checkpoint_is_not_the_newest_that_is_kept(tmp_path):
    manager = CheckpointManager(tmp_path, keep_every=1000, verify=False)
    for step in (1000, 2000, 2300):
        manager.save(step, {"t": torch.full((500,), float(step))})
    flip(tmp_path / "step-00002300" / "__0_0.distcp")
    with pytest.warns(UserWarning, match="step 2300 is passed over"):
        assert manager.restore({"t": None}, fallback=True) == 2000
    for step in (2100, 2200):
        manager.save(step, {"t": torch.ones(500)})
    assert manager.list() == [1000, 2000, 2200, 2300]


def test_a_damaged_step_is_replaced_even_if_the_first_try_fails(tmp_path, monkeypatch):
    manager = CheckpointManager(tmp_path)
    manager.save(1, {"t": torch.ones(500)})
    flip(tmp_path / "step-00000001" / "__0_0.distcp")
    with pytest.raises(CheckpointDamagedError):
        manager.restore({"t": None})
    with monkeypatch.context() as patched:
        patched.setattr(os, "fsync", lambda _: (_ for _ in ()).throw(OSError(28, "No space")))
        with pytest.raises(CheckpointError, match="No space"):
            manager.save(1, {"t": torch.zeros(500)})
    manager.save(1, {"t": torch.zeros(500)})
    with pytest.raises(FileExistsError):
        manager.save(1, {"t": torch.zeros(500)})
    state = {"t": None}
    manager.restore(state)
    assert not state["t"].any()


@pytest.mark.ranks(2)
def test_all_ranks_fall_back_together(tmp_path):
    import torch.distributed as dist
    from torch.distributed.device_mesh import init_device_mesh
    from torch.distributed.tensor import Shard, distribute_tensor

    mesh = init_device_mesh(device_type(), (2,))
    manager = CheckpointManager(tmp_path)
    for step in (1, 2, 3):
        tensor = distribute_tensor(torch.full((600,), float(step)), mesh, [Shard(0)])
        manager.save(step, {"t": tensor})
    dist.barrier()
    if dist.get_rank() == 0:
        flip(tmp_path / "step-00000003" / "__1_0.distcp")  # seen by rank 1 alone
    dist.barrier()

    class Holder:
        tensor = distribute_tensor(torch.zeros(600), mesh, [Shard(0)])

        def state_dict(self):
            return self.tensor

        def load_state_dict(self, state):
            self.tensor = state

    holder = Holder()
    with pytest.warns(UserWarning, match="step 3 is passed over"):
        assert manager.restore({"t": holder}, fallback=True) == 2
    assert torch.equal(holder.tensor.full_tensor(), torch.full((600,), 2.0))
    if dist.get_rank() == 0:

        def lost():
            raise OSError(116, "Stale file handle")

        manager._store.locations = lost
    with pytest.raises((OSError, CheckpointError), match=r"Stale|rank 0 of the group"):
        manager.restore({"t": holder})  # rank 1 does not wait for rank 0's choice


def test_the_names_of_new_directories_are_synced_too(tmp_path, monkeypatch):
    synced = []
    honest = directory_module.fsync_directory
    monkeypatch.setattr(
        directory_module, "fsync_directory", lambda path: (synced.append(path), honest(path))
    )
    manager = CheckpointManager(tmp_path / "runs" / "a")
    manager.save(1, {"n": 1})
    assert {tmp_path, tmp_path / "runs"} <= set(synced)
    synced.clear()
    manager.save(2, {"n": 2})
    assert tmp_path / "runs" not in synced


@pytest.mark.parametrize("call", ["save", "replace", "finish another's replacement"])
def test_a_checkpoint_has_its_name_on_the_disk_when_a_call_returns(tmp_path, monkeypatch, call):
    CheckpointManager(tmp_path).save(1, {"n": 1})
    if call == "finish another's replacement":  # killed between two renames
        (tmp_path / "step-00000001").rename(tmp_path / ".replaced-00000001-0123abcd")
    renamed, sync = set(), os.fsync  # names that a power cut would take away

    def noted(honest):
        def move(source, target):
            honest(source, target)
            renamed.add(Path(target))

        return move

    def synced(descriptor):
        sync(descriptor)
        held = os.fstat(descriptor)
        for path in [one for one in renamed if os.path.samestat(held, os.stat(one.parent))]:
            renamed.remove(path)

    for name in ("rename", "replace"):
        monkeypatch.setattr(os, name, noted(getattr(os, name)))
    monkeypatch.setattr(os, "fsync", synced)
    manager = CheckpointManager(tmp_path)
    if call != "finish another's replacement":
        manager.save(1 + (call == "save"), {"n": 2}, overwrite=True)
    manager.close()
    assert manager.list() == [1, 2][: 1 + (call == "save")]
    assert not [path for path in renamed if path.exists()]


def test_a_checkpoint_loses_its_name_on_the_disk_before_its_files(tmp_path, monkeypatch):
    manager = CheckpointManager(tmp_path, keep_last=1)
    manager.save(1, {"n": 1})
    done = []
    for owner, name in (
        (Path, "rename"),
        (directory_module, "fsync_directory"),
        (shutil, "rmtree"),
    ):
        honest = getattr(owner, name)

        def noted(path, *rest, honest=honest, name=name, **more):
            done.append((name, path))
            return honest(path, *rest, **more)

        monkeypatch.setattr(owner, name, noted)
    for save in (lambda: manager.save(2, {"n": 2}), lambda: manager.save(2, {}, overwrite=True)):
        save()
        assert [name for name, _ in done[-3:]] == ["rename", "fsync_directory", "rmtree"]
        assert done[-2][1] == tmp_path
        assert done[-1][1].name.startswith(".deleting-")


def told(recwarn: pytest.WarningsRecorder) -> list[str]:
    return [str(one.message) for one in recwarn if "rotted" in str(one.message)]


def test_a_rotten_checkpoint_is_found_without_a_restore_and_counts_no_more(tmp_path, recwarn):
    with CheckpointManager(tmp_path, keep_last=2, scrub_rate=1 << 30) as manager:
        for step in (1, 2):
            manager.save(step, {"t": torch.full((500,), float(step))})
        manager.close()  # so that the scrubber begins its next round at once
        flip(tmp_path / "step-00000002" / "__0_0.distcp")
        manager.save(3, {"t": torch.zeros(500)})
        deadline = time.monotonic() + 20
        while not told(recwarn) and time.monotonic() < deadline:
            time.sleep(0.01)
        assert re.search(r"step 2 has rotted .*__0_0\.distcp is damaged", *told(recwarn))
        assert manager.list() == [2, 3]
        manager.save(4, {"t": torch.zeros(500)})
        manager.save(5, {"t": torch.zeros(500)})
        assert manager.list() == [2, 4, 5]
    assert not [thread for thread in threading.enumerate() if thread.name == "scrubber"]


def test_a_scrubber_keeps_its_budget_and_takes_no_replacement_for_damage(tmp_path, recwarn):
    manager = CheckpointManager(tmp_path, scrub_rate=4 << 20)
    state = {"t": torch.zeros(1 << 20)}  # 4 MiB: a round takes a second
    seen = 0
    with monkeypatched_reads() as read:
        for number in range(6):
            state["t"] += 1
            manager.save(1, state, overwrite=number > 0)
            time.sleep(0.2)
            seen = sum(size for name, size in read if name == "scrubber")
    assert 0 < seen <= 12 << 20
    manager.close()
    assert not told(recwarn)
    with pytest.raises(ValueError, match="scrub_rate is 0"):
        CheckpointManager(tmp_path, scrub_rate=0)


def test_a_manager_that_is_dropped_ends_its_scrubber_without_a_collection(tmp_path):
    gc.disable()
    try:
        manager = CheckpointManager(tmp_path, scrub_rate=1 << 20)
        manager.save(1, {"t": torch.zeros(500)})
        (thread,) = [one for one in threading.enumerate() if one.name == "scrubber"]
        del manager
        thread.join(20)
        assert not thread.is_alive()
    finally:
        gc.enable()


def test_a_scrubber_outlives_whatever_a_store_raises_and_knows_no_limit(recwarn):
    asked, again = [], threading.Event()

    class Store:
        def locations(self):
            asked.append(None)
            if len(asked) > 1:
                again.set()
                return {}
            raise Exception("of a library that knows no OSError")

    scrubber = Scrubber(Store(), set(), math.inf, rest=0.01)
    scrubber.start()
    assert again.wait(20)
    scrubber.stop()
    assert "not scrubbed: of a library" in str(recwarn.pop(UserWarning).message)


@contextlib.contextmanager
def monkeypatched_reads():
    """The bytes that each thread sums, piece by piece."""
    import lamina.checkpoint.storage.manifest as manifest_module

    read: list[tuple[str, int]] = []
    sum_of = manifest_module.sum_of

    def counted(location, name, *, moved, **how):
        def noted(size: int) -> None:
            read.append((threading.current_thread().name, size))
            moved(size)

        return sum_of(location, name, moved=noted, **how)

    manifest_module.sum_of = counted
    try:
        yield read
    finally:
        manifest_module.sum_of = sum_of


def test_two_hundred_kept_checkpoints_cost_a_save_what_three_do(tmp_path, monkeypatch):
    calls: list[str] = []

    def counting(module, name):
        real = getattr(module, name)

        def counted(*given, **named):
            calls.append(name)
            return real(*given, **named)

        monkeypatch.setattr(module, name, counted)

    for name in ("open", "stat", "listdir", "scandir", "rename", "fsync"):
        counting(os, name)
    manager, costs = CheckpointManager(tmp_path, keep_last=300, verify=False), []
    for step in range(1, 9):
        calls.clear()
        manager.save(step, {"n": step})
        costs.append(len(calls))
    for step in range(9, 200):  # copies, which are made faster
        shutil.copytree(tmp_path / "step-00000008", tmp_path / f"step-{step:08d}")
    manager.save(200, {"n": 200})  # reads the manifests that it does not know
    calls.clear()
    manager.save(201, {"n": 201})
    costs.append(len(calls))
    assert len(manager.list()) == 201
    # Of four checkpoints each file is looked at, and of one more that is another one each time.
    assert 20 < costs[-1] <= costs[-2] + 5, costs
