"""Exports that fail halfway, and files that are quantised, altered or point elsewhere."""

from __future__ import annotations

import errno
import json
import os
from pathlib import Path

import pytest
import torch
import torch.distributed as dist
from torch import nn

from lamina.checkpoint import (
    CheckpointDamagedError,
    CheckpointError,
    CheckpointMismatchError,
    export_huggingface,
    import_huggingface,
)
from lamina.checkpoint.engine import HuggingFaceWeights
from lamina.checkpoint.huggingface.files import INDEX, FileWriter
from lamina.checkpoint.huggingface.weight_links import Same

safetensors = pytest.importorskip("safetensors.torch")


class Model(nn.Module):
    """Three tensors; as files of 40 bytes, three files."""

    def __init__(self, value: float) -> None:
        super().__init__()
        self.a = nn.Parameter(torch.full((2, 5), value))
        self.b = nn.Parameter(torch.full((5, 2), value))
        self.head = nn.Parameter(torch.full((10,), value))

    def huggingface_weights(self) -> HuggingFaceWeights:
        return HuggingFaceWeights({"model_type": "mine"}, [Same(n) for n in ("a", "b", "head")])


def contents(directory) -> dict[str, bytes]:
    return {path.name: path.read_bytes() for path in directory.iterdir()}


@pytest.mark.parametrize("limit", [40, 1000], ids=["files", "one file"])
@pytest.mark.parametrize("failing", ["a", "head", "sync", "config"])
def test_an_export_that_fails_leaves_the_earlier_one(tmp_path, monkeypatch, failing, limit):
    export_huggingface(Model(1.0), tmp_path, max_file_bytes=limit)
    before = contents(tmp_path)
    full = OSError(errno.ENOSPC, "No space left on device")
    honest = FileWriter._write

    def write(self, data):
        if isinstance(data, memoryview) and self._expected[0].name == failing:
            honest(self, data[:20])
            raise full
        honest(self, data)

    def fail(*_: object, **__: object) -> None:
        raise full

    with monkeypatch.context() as patched:
        patched.setattr(FileWriter, "_write", write)
        if failing == "sync":
            patched.setattr(os, "fsync", fail)
        if failing == "config":
            patched.setattr("lamina.checkpoint.huggingface.huggingface.write_whole", fail)
        with pytest.raises(OSError, match="No space"):
            export_huggingface(Model(2.0), tmp_path, max_file_bytes=limit)
    assert contents(tmp_path) == before
    (tmp_path / ".model-00009-of-00009.safetensors.writing").touch()  # of one that was killed
    export_huggingface(Model(2.0), tmp_path, max_file_bytes=limit)
    assert contents(tmp_path).keys() == before.keys()
    import_huggingface(model := Model(0.0), tmp_path)
    assert all((p == 2.0).all() for p in model.parameters())


def test_a_kill_between_two_files_leaves_nothing_that_opens(tmp_path, monkeypatch):
    export_huggingface(Model(1.0), tmp_path, max_file_bytes=40)
    honest = FileWriter.commit

    def killed(self) -> None:
        if "00002" in self._path.name:
            raise KeyboardInterrupt
        honest(self)

    monkeypatch.setattr(FileWriter, "commit", killed)
    with pytest.raises(KeyboardInterrupt):
        export_huggingface(Model(2.0), tmp_path, max_file_bytes=40)
    assert not {"config.json", INDEX} & contents(tmp_path).keys()


def test_an_export_reaches_the_disk_in_an_order_that_a_power_failure_may_cut(tmp_path, monkeypatch):
    export_huggingface(Model(1.0), tmp_path, max_file_bytes=40)
    events = []

    def noted(kind, honest):
        def call(first, *others, **options):
            path = os.readlink(f"/proc/self/fd/{first}") if kind == "sync" else first
            events.append((kind, Path(path).name))
            return honest(first, *others, **options)

        return call

    monkeypatch.setattr(os, "fsync", noted("sync", os.fsync))
    monkeypatch.setattr(Path, "unlink", noted("unlink", Path.unlink))
    monkeypatch.setattr(Path, "replace", noted("replace", Path.replace))
    export_huggingface(Model(2.0), tmp_path, max_file_bytes=40)
    whole, gone = ("sync", tmp_path.name), ("unlink", "config.json")
    small = [("sync", f".{name}.writing") for name in ("config.json", INDEX)]
    before = events[: events.index(gone)]
    assert {*small, whole} <= {*before}
    assert before[-1] == whole
    places = [n for n, event in enumerate(events) if event == whole]
    tensors = [n for n, (kind, name) in enumerate(events) if kind == "replace" and "model-" in name]
    named = [n for n, e in enumerate(events) if e == ("replace", ".config.json.writing")]
    # Between each two steps one sync: gone, tensors, config.
    assert places[0] < events.index(gone) < places[1] < tensors[0]
    assert tensors[-1] < places[2] < named[0] < places[3]


@pytest.mark.ranks(2)
def test_a_first_rank_that_cannot_write_stops_the_others(tmp_path, monkeypatch):
    def fail(_: object) -> None:
        raise OSError(errno.EIO, "Input/output error")

    monkeypatch.setattr(os, "fsync", fail)
    with pytest.raises((OSError, CheckpointError), match=r"Input/output|rank 0"):
        export_huggingface(Model(float(dist.get_rank())), tmp_path)
    dist.barrier()
    assert contents(tmp_path) == {}


@pytest.mark.parametrize("stored", [torch.float8_e4m3fn, torch.int8])
def test_quantised_tensors_are_refused_before_anything_changes(tmp_path, stored):
    export_huggingface(Model(1.0), tmp_path)
    path = tmp_path / "model.safetensors"
    tensors = safetensors.load_file(path)
    tensors["head"] = tensors["head"].to(stored)
    safetensors.save_file({**tensors, "head_scale_inv": torch.ones(1)}, path)
    model = Model(0.0)
    with pytest.raises(CheckpointMismatchError, match=rf"'head' is {stored}.*quantised"):
        import_huggingface(model, tmp_path)
    assert (model.a == 0).all()
    model.head = nn.Parameter(torch.zeros(10).to(stored), requires_grad=False)
    left = import_huggingface(model, tmp_path, strict=False)
    assert left == ("head_scale_inv",)  # as they are
    assert torch.equal(model.head.float(), torch.ones(10))
    half = Model(0.0).bfloat16()
    half.head = model.head
    import_huggingface(half, tmp_path, strict=False)
    assert (half.a == 1).all()


@pytest.mark.parametrize(
    ("stored", "here"), [(torch.int32, torch.int64), (torch.bool, torch.uint8)]
)
def test_whole_numbers_are_converted(tmp_path, stored, here):
    model = Model(1.0)
    model.head = nn.Parameter(torch.ones(10).to(stored), requires_grad=False)
    export_huggingface(model, tmp_path)
    model.head = nn.Parameter(torch.zeros(10).to(here), requires_grad=False)
    import_huggingface(model, tmp_path)
    assert torch.equal(model.head, torch.ones(10).to(here))


def test_a_model_without_memory_is_refused(tmp_path):
    export_huggingface(Model(1.0), tmp_path)
    with pytest.raises(CheckpointMismatchError, match=r"'a' is on the meta device.*to_empty"):
        import_huggingface(Model(0.0).to("meta"), tmp_path)


@pytest.mark.parametrize(
    ("change", "message"),
    [
        ({"shape": [3, 5]}, r"'a' has 40 bytes"),
        ({"shape": [-2, -5]}, r"'a' has shape"),
        ({"data_offsets": [-40, 0]}, r"'a' is at -40 to 0"),
        ({"data_offsets": [200, 240]}, r"'a' is at 200 to 240 of 120"),
        ({"data_offsets": 3}, "can't be read"),
        ({"dtype": "U16"}, r"'a' in .* is U16; known are F64"),
        ({"dtype": []}, "can't be read"),
    ],
)
def test_an_altered_header_is_named(tmp_path, change, message):
    export_huggingface(Model(1.0), tmp_path)
    path = tmp_path / "model.safetensors"
    data = path.read_bytes()
    length = int.from_bytes(data[:8], "little")
    header = json.loads(data[8 : 8 + length])
    header["a"] |= change
    text = json.dumps(header).encode()
    path.write_bytes(len(text).to_bytes(8, "little") + text + data[8 + length :])
    model = Model(0.0)
    with pytest.raises(CheckpointError, match=message):
        import_huggingface(model, tmp_path)
    assert (model.head == 0).all()


@pytest.mark.parametrize("text", ["", "[]", '{"weight_map": {"a": 1}}', "outside", "absolute"])
def test_an_index_that_is_none_or_points_elsewhere_is_refused(tmp_path, text):
    inside = tmp_path / "inside"
    export_huggingface(Model(1.0), tmp_path)
    export_huggingface(Model(1.0), inside)
    names = {"outside": "../model.safetensors", "absolute": str(tmp_path / "model.safetensors")}
    if text in names:
        text = json.dumps({"weight_map": dict.fromkeys(("a", "b", "head"), names[text])})
    (inside / INDEX).write_text(text)
    with pytest.raises(CheckpointDamagedError, match=r"index\.json can't be read"):
        import_huggingface(Model(0.0), inside)


def test_an_export_converts_nothing_that_needs_scales(tmp_path):
    with pytest.raises(ValueError, match=r"dtype is torch\.float8_e5m2: weights"):
        export_huggingface(Model(1.0), tmp_path, dtype=torch.float8_e5m2)
    model = Model(1.0)
    model.head = nn.Parameter(torch.ones(10).to(torch.float8_e4m3fn), requires_grad=False)
    with pytest.raises(TypeError, match=r"'head' is .*float8_e4m3fn, numbers without their scales"):
        export_huggingface(model, tmp_path, dtype=torch.bfloat16)
    assert contents(tmp_path) == {}
    export_huggingface(model, tmp_path)
    assert safetensors.load_file(tmp_path / "model.safetensors")["head"].dtype == model.head.dtype
