"""Files that were altered, cut, removed or forged after a checkpoint was complete."""

from __future__ import annotations

import contextlib
import enum
import errno
import io
import json
import os
import pickle
import sys
import tracemalloc
import zlib

import pytest
import torch
from torch import nn
from torch.distributed.checkpoint.metadata import _MEM_FORMAT_ENCODING

from lamina.checkpoint import (
    CheckpointDamagedError,
    CheckpointError,
    CheckpointManager,
    CheckpointUnsafeError,
    compare_checkpoints,
    import_dcp,
    verify_checkpoint,
)
from lamina.checkpoint.load.reader import _KNOWN, read_metadata
from lamina.checkpoint.storage.locations import LocalLocation, RemoteLocation, write_whole
from lamina.checkpoint.storage.manifest import FileSum, Manifest

STEP = "step-00000001"


@pytest.fixture
def saved(tmp_path):
    torch.manual_seed(0)
    state = {"model": nn.Linear(64, 64), "n": 1}
    CheckpointManager(tmp_path).save(1, state)
    return tmp_path


def files(directory):
    return sorted(p.name for p in (directory / STEP).iterdir())


def flip(path, position: int) -> None:
    data = bytearray(path.read_bytes())
    data[position] ^= 0x10
    path.write_bytes(data)


@pytest.mark.parametrize("name", [".metadata", "__0_0.distcp", "values.json", "manifest.json"])
@pytest.mark.parametrize("place", [0.0, 0.3, 0.6, 0.999])
def test_a_flipped_bit_anywhere_is_found_named_and_loads_nothing(saved, name, place):
    assert name in files(saved)
    path = saved / STEP / name
    flip(path, int(place * path.stat().st_size))
    state = {"model": nn.Linear(64, 64), "n": 0}
    before = state["model"].weight.clone()
    with pytest.raises(CheckpointDamagedError, match=name.replace(".", r"\.")):
        CheckpointManager(saved).restore(state, default=0)  # what is damaged is not absent
    assert torch.equal(state["model"].weight, before)
    assert state["n"] == 0


@pytest.mark.parametrize("name", [".metadata", "__0_0.distcp", "values.json", "manifest.json"])
@pytest.mark.parametrize("how", ["missing", "truncated"])
def test_a_checkpoint_with_a_missing_or_short_file_is_not_the_latest(saved, name, how):
    CheckpointManager(saved).save(2, {"n": 2, "t": torch.ones(100)})
    path = saved / "step-00000002" / name
    if how == "missing":
        path.unlink()
    else:
        os.truncate(path, path.stat().st_size // 2)
    manager = CheckpointManager(saved)
    assert manager.latest() == 1
    lost = r".* \(written by rank 0; gone with it: t\)" if name == "__0_0.distcp" else ""
    with pytest.raises(CheckpointDamagedError, match=name.replace(".", r"\.") + lost):
        manager.restore({"n": 0})
    with pytest.warns(UserWarning, match="step 2 is passed over"):
        assert manager.restore({"n": 0}, strict=False, fallback=True) == 1


def test_a_bad_sector_is_damage_and_verify_names_it(saved, monkeypatch):
    honest = LocalLocation.open

    class BadSector(io.FileIO):
        def read(self, size=-1):
            raise OSError(errno.EIO, "Input/output error")

        def readall(self):
            return self.read()

    def opened(self, name, **options):
        bad = name.endswith(".distcp")
        return BadSector(self.path / name) if bad else honest(self, name, **options)

    monkeypatch.setattr(LocalLocation, "open", opened)
    expected = pytest.raises(CheckpointDamagedError, match=r"__0_0\.distcp: 'model\..*faulty")
    with expected:
        CheckpointManager(saved).restore({"model": nn.Linear(64, 64)})
    problems = verify_checkpoint(saved / STEP)
    assert any("'model.weight'" in p and "written by rank 0" in p for p in problems), problems

    def fails(self, name):
        raise OSError(errno.EIO, "Input/output error")

    for method in ("read", "size"):
        with monkeypatch.context() as patched:
            patched.setattr(LocalLocation, method, fails)
            with pytest.raises(CheckpointDamagedError, match="faulty"):
                CheckpointManager(saved).restore({"n": 0})
            assert CheckpointManager(saved).latest() is None


def test_a_checkpoint_of_a_newer_version_is_neither_passed_over_nor_replaced(saved):
    path = saved / STEP / "manifest.json"
    body = {**json.loads(path.read_text())["body"], "format": 99}
    crc = zlib.crc32(json.dumps(body, sort_keys=True).encode())
    path.write_text(json.dumps({"crc32": crc, "body": body}))
    manager = CheckpointManager(saved)
    calls = {
        "restore": lambda: manager.restore({"n": 0}, default=0, fallback=True),
        "save": lambda: manager.save(1, {"n": 0}),
        "latest": manager.latest,
    }
    for call in calls.values():
        with pytest.raises(CheckpointError, match=r"format 99.*newer") as caught:
            call()
        assert not isinstance(caught.value, CheckpointDamagedError)


class Bomb:
    def __reduce__(self):
        return os.system, ("touch " + self.target,)


@pytest.mark.parametrize("place", ["whole", "inside"])
def test_a_pickle_that_would_run_code_is_refused(saved, tmp_path, place):
    target = tmp_path / "executed"
    bomb = Bomb()
    bomb.target = str(target)
    path = saved / STEP
    payload = bomb
    if place == "inside":
        payload = pickle.loads((path / ".metadata").read_bytes())
        payload.planner_data = bomb
    summed = write_whole(LocalLocation(path), ".metadata", pickle.dumps(payload))
    manifest = Manifest.read(LocalLocation(path))  # a forger can fix checksums too
    forged = Manifest(1, 1, manifest.torch, {**manifest.files, ".metadata": summed})
    forged.write(LocalLocation(path))
    with pytest.raises(CheckpointUnsafeError, match="system"):
        CheckpointManager(saved).restore({"n": 0})
    assert not target.exists()
    pickle.loads((path / ".metadata").read_bytes())  # the bomb is live: an open unpickler runs it
    assert target.exists()


@pytest.mark.parametrize("whose", ["ours", "plain dcp's"])
def test_a_pickle_in_a_chunk_that_would_run_code_is_refused(saved, tmp_path, whose):
    target = tmp_path / "executed"
    bomb = Bomb()
    bomb.target = str(target)
    path = saved / STEP
    metadata = pickle.loads((path / ".metadata").read_bytes())
    data = io.BytesIO()
    torch.save(bomb, data)
    for index, info in metadata.storage_data.items():
        assert index.fqn.startswith("model.")
        info.offset, info.length = 0, data.tell()
    small = {
        "__0_0.distcp": data.getvalue(),
        ".metadata": pickle.dumps(metadata),
        "chunks.json": json.dumps(
            {"__0_0.distcp": [[data.tell(), zlib.crc32(data.getvalue())]]}
        ).encode(),
    }
    at = LocalLocation(path)
    sums = {name: write_whole(at, name, content) for name, content in small.items()}
    manifest = Manifest.read(LocalLocation(path))
    Manifest(1, 1, manifest.torch, {**manifest.files, **sums}).write(LocalLocation(path))
    state = {"model": nn.Linear(64, 64)}
    loads = {
        "ours": lambda: CheckpointManager(saved).restore(state),
        "plain dcp's": lambda: import_dcp(state, path),
    }
    with pytest.raises(CheckpointUnsafeError, match="nothing of it was executed"):
        loads[whose]()
    assert not target.exists()
    torch.load(path / "__0_0.distcp", weights_only=False)
    assert target.exists()  # the bomb is live


def test_a_manifest_that_points_outside_is_refused(saved):
    manifest = Manifest.read(LocalLocation(saved / STEP))
    outside = Manifest(1, 1, "x", {**manifest.files, "../../etc/passwd": FileSum(1, 1)})
    outside.write(LocalLocation(saved / STEP))
    with pytest.raises(CheckpointDamagedError, match="outside"):
        CheckpointManager(saved).restore({"n": 0}, step=1)


def test_a_disk_that_returns_other_bytes_than_written_fails_the_save(tmp_path, monkeypatch):
    import lamina.checkpoint.save.writer as writer

    honest = writer.sum_of

    def faulty(location, name, **how):
        path = location.path / name
        flip(path, path.stat().st_size // 2)
        return honest(location, name, **how)

    monkeypatch.setattr(writer, "sum_of", faulty)
    manager = CheckpointManager(tmp_path)
    with pytest.raises(CheckpointDamagedError, match="disk"):
        manager.save(1, {"model": nn.Linear(8, 8)})
    assert manager.latest() is None
    assert list(tmp_path.iterdir()) == []


@pytest.mark.parametrize("outside", ["../away", "/tmp/away", "of/../../away"])
def test_metadata_that_points_outside_is_refused(saved, outside):
    path = saved / STEP
    metadata = pickle.loads((path / ".metadata").read_bytes())
    for info in metadata.storage_data.values():
        info.relative_path = outside
    summed = write_whole(LocalLocation(path), ".metadata", pickle.dumps(metadata))
    manifest = Manifest.read(LocalLocation(path))
    Manifest(1, 1, manifest.torch, {**manifest.files, ".metadata": summed}).write(
        LocalLocation(path)
    )
    state = {"model": nn.Linear(64, 64)}
    for load in (
        lambda: import_dcp(state, path),
        lambda: CheckpointManager(saved).restore(state),
        lambda: compare_checkpoints(path, path),
    ):
        with pytest.raises(CheckpointDamagedError, match=rf"outside the checkpoint.*{outside}"):
            load()
    assert any("outside" in problem for problem in verify_checkpoint(path))


_OF = b"\x80\x02ctorch.distributed.checkpoint.metadata\n"


@pytest.mark.parametrize(
    "target",
    [
        _OF + b"Metadata\n",
        _OF + b"TensorProperties\n",
        _OF + b"_MEM_FORMAT_ENCODING\n",
        b"\x80\x02ctorch.serialization\n_get_layout\n",
        _OF + b"_MEM_FORMAT_ENCODING\nK\x00\x85R",
    ],
    ids=["class", "class with __setstate__", "class of enum", "function", "enum"],
)
@pytest.mark.parametrize("slots", [False, True])
def test_metadata_that_would_change_what_later_loads_use_is_refused(saved, target, slots):
    # BUILD, with what goes to __dict__ or what is set as slots are.
    text = target + (b"(N}U\x07plantedK\x01stb." if slots else b"}U\x07plantedK\x01sb.")
    with pytest.raises(CheckpointUnsafeError, match=r"sets attributes of .*nothing was changed"):
        read_metadata(LocalLocation(saved / STEP), text)
    if slots and b"TensorProp" not in target:
        changed = pickle.loads(text)  # it works on an open unpickler
        assert changed.planted == 1
        del changed.planted


def test_nothing_that_metadata_may_name_can_be_changed(tmp_path):
    for module, name in sorted(_KNOWN):
        named = f"\x80\x02c{module}\n{name}\n".encode("latin1")
        for given in (b"", b")R", b"K\x00\x85R", b")\x81", b"U\x07strided\x85R"):
            for state in (b"(N}U\x07plantedK\x01stb.", b"}U\x07plantedK\x01sb."):
                with contextlib.suppress(CheckpointError):
                    read_metadata(LocalLocation(tmp_path), named + given + state)
        real = getattr(sys.modules.get(module), name, None)  # not every Python has pathlib._local
        shared = [real, _KNOWN[module, name], torch.strided, *_MEM_FORMAT_ENCODING]
        assert not any(hasattr(one, "planted") for one in shared)


class _AsPython3112(pickle.Pickler):
    """Writes members of enums as Python 3.11.2 does, whatever Python this is."""

    def reducer_override(self, made):
        return (getattr, (type(made), made.name)) if isinstance(made, enum.Enum) else NotImplemented


class _AsPython3117(pickle.Pickler):
    def reducer_override(self, made):
        return (type(made), (made.value,)) if isinstance(made, enum.Enum) else NotImplemented


@pytest.mark.parametrize("pickler", [_AsPython3112, _AsPython3117])
@pytest.mark.parametrize("protocol", [2, 4])
def test_metadata_of_every_release_of_python_is_read(saved, pickler, protocol):
    metadata = pickle.loads((saved / STEP / ".metadata").read_bytes())
    pickler(file := io.BytesIO(), protocol).dump(metadata)
    assert (b"getattr" in file.getvalue()) == (pickler is _AsPython3112)
    read = read_metadata(LocalLocation(saved / STEP), file.getvalue())
    assert read.state_dict_metadata == metadata.state_dict_metadata
    assert read.storage_data == metadata.storage_data


_METADATA = "torch.distributed.checkpoint.metadata"


@pytest.mark.parametrize(
    ("module", "owner", "name"),
    [
        (_METADATA, "_MEM_FORMAT_ENCODING", "__init__"),
        (_METADATA, "_MEM_FORMAT_ENCODING", "__subclasses__"),
        (_METADATA, "_MEM_FORMAT_ENCODING", "_member_map_"),
        (_METADATA, "Metadata", "TORCH_CONTIGUOUS_FORMAT"),
        ("torch.serialization", "_get_layout", "__globals__"),
        ("builtins", "getattr", "__self__"),
        ("collections", "OrderedDict", "fromkeys"),
        ("torch", "Size", "numel"),
    ],
)
def test_metadata_gets_members_of_its_enum_and_no_other_attribute(saved, module, owner, name):
    text = f"\x80\x04cbuiltins\ngetattr\nc{module}\n{owner}\nU{chr(len(name))}{name}\x86R."
    if owner == "Size":
        assert pickle.loads(text.encode("latin1")) is torch.Size.numel
    with pytest.raises(CheckpointUnsafeError, match=f"asks for the attribute '{name}' of"):
        read_metadata(LocalLocation(saved / STEP), text.encode("latin1"))


_FOREVER = (1 << 33).to_bytes(8, "little")  # 8 GiB


@pytest.mark.parametrize(
    "text",
    [
        b"\x80\x04Nr\xff\xff\xff\x0f.",
        b"\x80\x02Np268435455\n.",
        b"\x80\x04\x95" + _FOREVER + b"N.",
        b"\x80\x04\x8e" + _FOREVER + b".",
        b"\x80\x04\x8d" + _FOREVER + b".",
        b"\x80\x05\x96" + _FOREVER + b".",
        b"\x80\x03B\xff\xff\xff\x7f.",
        b"\x80\x02\x8b\xff\xff\xff\x7f.",
        b"\x80\x02cpathlib\nPurePosixPath\nq\x00X\x64\0\0\0" + b"a" * 100 + b"q\x01"
        + (b"h\x00(" + b"h\x01" * 9 + b"tRq\x01") * 5 + b".",  # nine times as long, five times
    ],
    ids=["entry", "entry as text", "frame", "bytes", "text", "bytearray", "bytes 4", "int", "path"],
)  # fmt: skip
def test_a_few_bytes_of_metadata_cannot_ask_for_memory(tmp_path, text):
    tracemalloc.start()
    try:
        with pytest.raises(CheckpointError):
            read_metadata(LocalLocation(tmp_path), text)
        assert tracemalloc.get_traced_memory()[1] < 1 << 20
    finally:
        tracemalloc.stop()


def test_a_manifest_that_no_save_wrote_so_large_is_not_read(saved):
    with open(saved / STEP / "manifest.json", "ab") as file:
        file.truncate(300 << 20)  # a hole: it takes no room on the disk
    with pytest.raises(CheckpointDamagedError, match="larger than any that this layer writes"):
        CheckpointManager(saved).restore({"model": nn.Linear(64, 64)})


def test_what_is_fetched_a_second_time_is_checked_again(tmp_path, monkeypatch):
    pytest.importorskip("fsspec")
    url = f"memory://{tmp_path.name}/run"
    manager = CheckpointManager(url)
    manager.save(1, {"t": torch.ones(100)})

    def no_room() -> None:
        raise OSError(errno.ENOSPC, "No space left on device")

    monkeypatch.setattr("tempfile.TemporaryFile", no_room)
    manager.restore(state := {"t": None})
    assert torch.equal(state["t"], torch.ones(100))
    honest, opened = RemoteLocation.open, []

    def altered(self, name, **options):
        with honest(self, name, **options) as file:
            data = bytearray(file.read())
        if name.endswith(".distcp"):
            opened.append(name)
            if len(opened) > 1:
                data[data.index(b"\x00\x00\x80\x3f" * 9)] = 1
        return io.BytesIO(data)

    monkeypatch.setattr(RemoteLocation, "open", altered)
    with pytest.raises(CheckpointDamagedError, match=r"distcp is damaged: 't'"):
        manager.restore({"t": None})
    assert len(opened) == 2
