"""python -m lamina.checkpoint, run in this process to save the time of a start."""

from __future__ import annotations

import os
import pickle
import shutil

import pytest
import torch
from torch import nn

from lamina.checkpoint import CheckpointManager
from lamina.checkpoint.__main__ import main
from lamina.checkpoint.storage.locations import LocalLocation, write_whole
from lamina.checkpoint.storage.manifest import Manifest


@pytest.fixture
def saved(tmp_path):
    torch.manual_seed(0)
    CheckpointManager(tmp_path).save(1, {"model": nn.Linear(8, 4), "n": 1}, metric=0.5)
    return tmp_path / "step-00000001"


def test_an_undamaged_checkpoint_is_fine(saved, capsys):
    assert main(["verify", str(saved)]) == 0
    assert main(["verify", str(saved.parent)]) == 0  # the directory of checkpoints
    assert capsys.readouterr().out.count(": ok") == 2


@pytest.mark.parametrize("how", ["flipped", "truncated", "missing"])
def test_damage_is_named_with_file_tensor_and_rank(saved, capsys, how):
    path = saved / "__0_0.distcp"
    data = bytearray(path.read_bytes())
    if how == "flipped":
        data[len(data) // 2] ^= 1
        path.write_bytes(data)
    elif how == "truncated":
        os.truncate(path, len(data) // 2)
    else:
        path.unlink()
    assert main(["verify", str(saved)]) == 1
    out = capsys.readouterr().out
    assert "DAMAGED" in out
    assert "__0_0.distcp" in out
    assert "model." in out
    assert "rank 0" in out


def test_a_chunk_of_another_dtype_or_shape_is_named(saved, capsys):
    # Checksums fit, as after a faulty copy program that mixed up two checkpoints.
    location = LocalLocation(saved)
    metadata = pickle.loads(location.read(".metadata"))
    described = metadata.state_dict_metadata["model.weight"]
    metadata.state_dict_metadata["model.weight"] = type(described)(
        type(described.properties)(dtype=torch.float64), described.size, described.chunks
    )
    manifest = Manifest.read(LocalLocation(saved))
    summed = write_whole(location, ".metadata", pickle.dumps(metadata))
    Manifest(1, 1, "x", {**manifest.files, ".metadata": summed}).write(LocalLocation(saved))
    assert main(["verify", str(saved)]) == 1
    out = capsys.readouterr().out
    assert "'model.weight'" in out
    assert "float32 [4, 8], the metadata says torch.float64 [4, 8]" in out


def test_inspect_lists_tensors_and_values(saved, capsys):
    assert main(["inspect", str(saved), "--values"]) == 0
    out = capsys.readouterr().out
    assert "step 1" in out
    assert "metric 0.5" in out
    assert "model.weight  float32   [4, 8]" in out
    assert "n = 1" in out


def test_diff_tells_what_differs(saved, tmp_path, capsys):
    other = tmp_path / "other"
    torch.manual_seed(0)
    model = nn.Linear(8, 4)
    manager = CheckpointManager(other)
    manager.save(1, {"model": model, "n": 1})
    assert main(["diff", str(saved), str(other)]) == 0
    assert "equal" in capsys.readouterr().out
    with torch.no_grad():
        model.weight[0, 0] += 1
    manager.save(2, {"model": model, "n": 2, "extra": torch.ones(1)})
    assert main(["diff", str(saved), str(other)]) == 1
    out = capsys.readouterr().out
    assert "model.weight: 1 of 32 elements differ, by at most 1" in out
    assert "n: 1 / 2" in out
    assert "extra: only in the second" in out
    assert "model.bias" not in out


def test_what_is_no_checkpoint_is_said(tmp_path, capsys):
    assert main(["verify", str(tmp_path / "absent")]) == 2
    assert main(["inspect", str(tmp_path)]) == 2
    shutil.rmtree(tmp_path)
    assert "absent" in capsys.readouterr().err
