"""Several ranks and one URL: an object store that they share, and file://."""

from __future__ import annotations

import os
import shutil
import signal
import subprocess
import sys
import textwrap
from pathlib import Path

import pytest
import torch
import torch.distributed as dist
from torch.distributed.device_mesh import init_device_mesh
from torch.distributed.tensor import DTensor, Shard, distribute_tensor

from lamina.checkpoint import CheckpointDamagedError, CheckpointError, CheckpointManager
from lamina.checkpoint.__main__ import main
from lamina.checkpoint.storage.manifest import Manifest

pytest.importorskip("fsspec")
sys.path.insert(0, str(Path(__file__).parent))
from object_store import Objects

from lamina_testing import device_type


def state_of(mesh: object, step: int) -> dict[str, object]:
    whole = torch.randn(6, 5, generator=torch.Generator().manual_seed(step))
    cut = distribute_tensor(whole, mesh, [Shard(0)])
    return {"cut": cut, "whole": whole[0].clone(), "n": step}


def check(manager: CheckpointManager, mesh: object, step: int) -> None:
    state = state_of(mesh, 99)
    assert manager.restore(state) == step
    expected = state_of(mesh, step)
    assert state["n"] == step
    assert torch.equal(state["whole"], expected["whole"])
    assert isinstance(state["cut"], DTensor)
    assert torch.equal(state["cut"].to_local(), expected["cut"].to_local())


@pytest.mark.ranks(2)
def test_ranks_save_to_a_url_and_load_from_it(tmp_path):
    mesh = init_device_mesh(device_type(), (2,))
    for kind, background in (("objects", False), ("objects", True), ("file", True)):
        root = tmp_path / f"{kind}{background}"
        url = f"{kind}://{root}"
        manager = CheckpointManager(url, keep_last=2, async_save=background)
        for step in range(3):
            state = state_of(mesh, step)
            manager.save(step, state)
            state["cut"].to_local().zero_()
        manager.save(2, state_of(mesh, 2), overwrite=True)
        manager.close()
        dist.barrier()
        assert manager.list() == [1, 2]
        names = {"step-00000001", "step-00000002" + ("-1" if kind == "objects" else "")}
        assert {p.name for p in root.iterdir()} == names
        check(CheckpointManager(url), mesh, 2)
        dist.barrier()
        if dist.get_rank() == 0:  # the other rank's file
            path = root / "step-00000001" / "__1_0.distcp"
            assert main(["verify", url]) == 0
            path.write_bytes(b"x" + path.read_bytes()[1:])
            assert main(["verify", url]) == 1
        dist.barrier()
        with pytest.raises(CheckpointDamagedError, match=r"rank 1: .*__1_0\.distcp is damaged"):
            manager.restore(state_of(mesh, 0), step=1)
        state = {**state_of(mesh, 3), **({} if dist.get_rank() == 0 else {"x": object()})}
        with pytest.raises((TypeError, CheckpointError)):
            manager.save(3, state)
        assert manager.latest() == 2


@pytest.mark.ranks(2)
def test_a_rank_fetches_what_it_restores_once(tmp_path):
    mesh = init_device_mesh(device_type(), (2,))
    url = f"objects://{tmp_path}/run"
    CheckpointManager(url, verify=False).save(1, state_of(mesh, 1))
    dist.barrier()
    Objects.fetched.clear()
    manager = CheckpointManager(url)
    check(manager, mesh, 1)
    rank = dist.get_rank()
    fetched = {Path(name).name: n for name, n in Objects.fetched.items()}
    sizes = {p.name: p.stat().st_size for p in (tmp_path / "run" / "step-00000001").iterdir()}
    assert manager.last_restore is not None
    small = [name for name in sizes if not name.endswith(".distcp")]
    assert all(fetched[name] == sizes[name] for name in small if name != "manifest.json")
    data = {name: n for name, n in fetched.items() if name not in small}
    assert data[f"__{rank}_0.distcp"] <= sizes[f"__{rank}_0.distcp"]
    assert sum(data.values()) == manager.last_restore.bytes


def test_retention_reads_each_manifest_once(tmp_path, monkeypatch):
    url = f"objects://{tmp_path}/run"
    CheckpointManager(url).save(1, {"n": 1}, metric=1.0)
    honest, read = Manifest.read, []

    def counted(place: object) -> Manifest:
        read.append(str(place).rpartition("/")[2])
        return honest(place)

    monkeypatch.setattr(Manifest, "read", counted)
    manager = CheckpointManager(url, keep_last=2, keep_best=1)
    for step in range(2, 7):
        manager.save(step, {"n": step}, metric=float(step))
    assert read == ["step-00000001"]  # an earlier program's; its own it knows
    manager.save(1, {"n": 1}, metric=9.0, overwrite=True)
    manager.save(7, {"n": 7}, metric=7.0)
    assert manager.list() == [5, 6, 7]


def test_only_a_save_deletes_what_has_no_manifest(tmp_path):
    url, root = f"objects://{tmp_path}/run", tmp_path / "run"
    CheckpointManager(url).save(1, {"n": 1})
    (root / "step-00000002").mkdir()
    (root / "step-00000002" / "__0_0.distcp").write_bytes(b"a save in progress, elsewhere")
    reader = CheckpointManager(url, keep_last=1)
    state = {"n": 0}
    assert reader.restore(state) == 1
    assert (root / "step-00000002" / "__0_0.distcp").exists()
    reader.save(3, state)
    assert {p.name for p in root.iterdir()} == {"step-00000003"}


def test_a_second_manager_leaves_a_save_of_the_first_alone(tmp_path):
    url, root = f"objects://{tmp_path}/run", tmp_path / "run"
    manager = CheckpointManager(url)
    (root / "step-00000001").mkdir(parents=True)
    (root / "step-00000001" / "__0_0.distcp").write_bytes(b"another's, still being written")
    later = CheckpointManager(url)
    manager.save(3, {"n": 3})
    assert (root / "step-00000001" / "__0_0.distcp").exists()
    shutil.copytree(root / "step-00000003", root / "step-00000001", dirs_exist_ok=True)
    later.save(4, {"n": 4})  # it was unfinished when this one was made, and is complete now
    assert later.list() == [1, 3, 4]


class Timeouts:
    """Lets every question about a manifest fail."""

    def __init__(self, monkeypatch: pytest.MonkeyPatch) -> None:
        self.failing, honest = False, Objects.info

        def info(fs: Objects, path: object, **options: object) -> dict[str, object]:
            if self.failing and str(path).endswith("manifest.json"):
                raise TimeoutError(110, "Connection timed out")
            return honest(fs, path, **options)

        monkeypatch.setattr(Objects, "info", info)


def test_a_timeout_does_not_make_a_checkpoint_unfinished(tmp_path, monkeypatch):
    url = f"objects://{tmp_path}/run"
    CheckpointManager(url).save(1, {"n": 1})
    timeouts, manager = Timeouts(monkeypatch), CheckpointManager(url)
    timeouts.failing = True
    calls = (manager.latest, lambda: manager.restore({"n": 0}, default=0), manager._store.clean)
    for call in (*calls, lambda: manager.save(2, {"n": 2})):
        with pytest.raises(TimeoutError):
            call()
    timeouts.failing = False
    assert manager.restore({"n": 0}) == 1


@pytest.mark.parametrize("background", [False, True])
def test_a_save_is_complete_whatever_fails_after_its_manifest(tmp_path, monkeypatch, background):
    url = f"objects://{tmp_path}/run"
    timeouts = Timeouts(monkeypatch)
    manager = CheckpointManager(url, async_save=background)
    manager.save(1, {"n": 1})
    manager.wait()
    honest = Manifest.encoded

    def encoded(manifest: Manifest) -> bytes:
        timeouts.failing = True
        return honest(manifest)

    monkeypatch.setattr(Manifest, "encoded", encoded)

    def save() -> None:
        manager.save(1, {"n": 2}, overwrite=True)
        manager.wait()

    with pytest.warns(UserWarning, match="older attempts at .*step-00000001-1 are left"):
        save()
    timeouts.failing = False
    assert manager.last_save is not None
    assert manager.last_save.complete
    assert manager.last_save.path == f"{url}/step-00000001-1"
    manager.restore(state := {"n": 0})
    assert state["n"] == 2


PROGRAM = """
    import itertools, sys
    import torch
    import torch.distributed as dist
    sys.path.insert(0, sys.argv[4])
    import object_store
    from test_urls import state_of
    from torch.distributed.device_mesh import init_device_mesh
    from lamina.checkpoint import CheckpointManager

    url, store, rank = sys.argv[1], sys.argv[2], int(sys.argv[3])
    torch.set_num_threads(1)
    dist.init_process_group("gloo", store=dist.FileStore(store, 2), rank=rank, world_size=2)
    mesh = init_device_mesh("cpu", (2,))
    manager = CheckpointManager(url, keep_last=2, async_save=True)
    first = manager.restore(state_of(mesh, 0), default=0)
    for step in itertools.count(first + 1):
        manager.save(step, state_of(mesh, step))
        print(step, flush=True)
"""


@pytest.mark.slow
@pytest.mark.ranks(1, timeout=240)
def test_ranks_that_are_killed_leave_whole_checkpoints_at_a_url(tmp_path):
    mesh = init_device_mesh(device_type(), (1,))
    url, newest = f"objects://{tmp_path}/run", 0
    for number in range(6):
        command = [sys.executable, "-c", textwrap.dedent(PROGRAM), url, f"{tmp_path}/s{number}"]
        ranks = [
            subprocess.Popen(
                [*command, str(rank), str(Path(__file__).parent)],
                stdout=subprocess.PIPE,
                stderr=subprocess.DEVNULL,
                env={**os.environ, "UPLOADS": str(tmp_path)},
            )
            for rank in range(2)
        ]
        for _ in range(3 + number):  # so many saves begun, the one before the last complete
            assert ranks[0].stdout is not None
            begun = int(ranks[0].stdout.readline())
        victims = ranks if number % 2 else ranks[:1]  # one: the other must not commit without it
        for process in victims:
            process.send_signal(signal.SIGKILL)
        for process in ranks:
            process.kill() if process in victims else process.wait(60)
            process.communicate()
        manager = CheckpointManager(url)
        latest = manager.latest()
        assert latest is not None
        assert latest >= max(begun - 1, newest)
        for step in manager.list():
            state = state_of(mesh, 99)
            manager.restore(state, step=step)
            assert torch.equal(state["cut"].to_local(), state_of(mesh, step)["cut"].to_local())
        manager.save(latest + 1, state_of(mesh, latest + 1))  # deletes what was left
        assert {p.name for p in (tmp_path / "run").iterdir()} == {
            f"step-{step:08d}" for step in manager.list()
        }
        newest = latest
