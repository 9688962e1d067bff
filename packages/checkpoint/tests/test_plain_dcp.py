"""torch's own checkpoints in, ours out, without and with Lamina."""

from __future__ import annotations

import pickle
import re
import subprocess
import sys
import textwrap

import pytest
import torch
import torch.distributed as dist
import torch.distributed.checkpoint as dcp
from torch import nn
from torch.distributed.checkpoint.default_planner import DefaultLoadPlanner
from torch.distributed.checkpoint.state_dict import (
    get_model_state_dict,
    get_optimizer_state_dict,
    set_state_dict,
)
from torch.distributed.fsdp import fully_shard as torch_fully_shard

from lamina.checkpoint import CheckpointManager, CheckpointMismatchError, import_dcp

fsdp = pytest.importorskip("lamina.fsdp")
ddp = pytest.importorskip("lamina.ddp")


def build(seed: int) -> nn.Module:
    torch.manual_seed(seed)
    return nn.Sequential(nn.Linear(5, 12), nn.Tanh(), nn.Linear(12, 3))


def adamw(model: nn.Module) -> torch.optim.AdamW:
    return torch.optim.AdamW(model.parameters(), lr=0.02)


def train(model: nn.Module, optimizer: torch.optim.Optimizer, seeds: range) -> None:
    for seed in seeds:
        generator = torch.Generator().manual_seed(100 * seed + dist.get_rank())
        x = torch.randn(4, 5, generator=generator)
        (model(x) - x[:, :3]).square().mean().backward()
        optimizer.step()
        optimizer.zero_grad()


@pytest.mark.ranks(2)
def test_a_checkpoint_of_torchs_fsdp2_loads_into_lamina(tmp_path):
    theirs = torch_fully_shard(build(0))
    optimizer = adamw(theirs)
    train(theirs, optimizer, range(3))
    saved = {
        "model": get_model_state_dict(theirs),
        "optimizer": get_optimizer_state_dict(theirs, optimizer),
    }
    dcp.save(saved, checkpoint_id=tmp_path)
    train(theirs, optimizer, range(3, 6))

    model = build(9)
    model, fresh = fsdp.fully_shard(model, adamw(model))
    import_dcp({"model": model, "optimizer": fresh}, tmp_path)
    train(model, fresh, range(3, 6))
    expected = {n: p.full_tensor() for n, p in theirs.named_parameters()}
    for name, tensor in ddp.full_parameters(model).items():
        torch.testing.assert_close(tensor, expected[name], rtol=1e-6, atol=1e-7)
    with pytest.raises(CheckpointMismatchError, match="has shape"):
        import_dcp({"model": nn.Sequential(nn.Linear(5, 13))}, tmp_path, strict=False)


@pytest.mark.parametrize("make", [adamw, lambda model: torch.optim.SGD(model.parameters(), 0.1)])
def test_an_entry_that_is_not_in_the_checkpoint_is_refused(tmp_path, make):
    """Many programs save the optimizer as "optim": under another name its state was lost."""
    model = build(0)
    optimizer = make(model)
    model(torch.ones(5)).sum().backward()
    optimizer.step()
    saved = {
        "model": get_model_state_dict(model),
        "optim": get_optimizer_state_dict(model, optimizer),
    }
    dcp.save(saved, checkpoint_id=tmp_path / "flat", no_dist=True)
    dcp.save({"app": saved}, checkpoint_id=tmp_path / "nested", no_dist=True)

    other = build(9)
    fresh = make(other)
    before = {name: tensor.clone() for name, tensor in other.state_dict().items()}
    with pytest.raises(CheckpointMismatchError, match=r"no entry.*optimizer.*it has.*optim"):
        import_dcp({"model": other, "optimizer": fresh}, tmp_path / "flat")
    with pytest.raises(CheckpointMismatchError, match="an optimizer here, and none in"):
        import_dcp({"app": fresh}, tmp_path / "nested")
    torch.testing.assert_close(dict(other.state_dict()), before, rtol=0, atol=0)

    loose = import_dcp({"model": other, "optimizer": fresh}, tmp_path / "flat", strict=False)
    assert loose.missing == ("optimizer",)
    import_dcp({"app.model": other, "app.optim": fresh}, tmp_path / "nested")
    assert str(fresh.state_dict()["state"]) == str(optimizer.state_dict()["state"])


@pytest.mark.ranks(2)
def test_a_checkpoint_of_lamina_loads_into_torchs_fsdp2(tmp_path):
    model = build(0)
    model, optimizer = fsdp.fully_shard(model, adamw(model))
    train(model, optimizer, range(3))
    CheckpointManager(tmp_path).save(3, {"model": model, "optimizer": optimizer})
    train(model, optimizer, range(3, 6))

    theirs = torch_fully_shard(build(9))
    fresh = adamw(theirs)
    wanted = {
        "model": get_model_state_dict(theirs),
        "optimizer": get_optimizer_state_dict(theirs, fresh),
    }
    # Partial: hyperparameters are in values.json, which dcp does not know; they stay as they are.
    planner = DefaultLoadPlanner(allow_partial_load=True)
    dcp.load(wanted, checkpoint_id=tmp_path / "step-00000003", planner=planner)
    set_state_dict(
        theirs, fresh, model_state_dict=wanted["model"], optim_state_dict=wanted["optimizer"]
    )
    assert all(state["step"] == 3 for state in fresh.state.values())
    train(theirs, fresh, range(3, 6))
    expected = ddp.full_parameters(model)
    for name, parameter in theirs.named_parameters():
        got = parameter.full_tensor()
        torch.testing.assert_close(got, expected[name], rtol=1e-6, atol=1e-7)


def test_without_lamina_plain_dcp_reads_it(tmp_path):
    model = build(0)
    optimizer = adamw(model)
    model(torch.ones(5)).sum().backward()
    optimizer.step()
    CheckpointManager(tmp_path / "run").save(1, {"model": model, "optimizer": optimizer})
    torch.save(model.state_dict(), tmp_path / "expected.pt")
    program = f"""
        import sys
        class Refuse:
            def find_spec(self, name, path=None, target=None):
                if name.split(".")[0] == "lamina":
                    raise ImportError("there is no lamina here")
        sys.meta_path.insert(0, Refuse())
        import warnings; warnings.simplefilter("ignore")
        import torch, torch.distributed.checkpoint as dcp
        from torch.distributed.checkpoint.format_utils import dcp_to_torch_save
        path = {str(tmp_path / "run" / "step-00000001")!r}
        expected = torch.load({str(tmp_path / "expected.pt")!r})
        got = {{name: torch.zeros_like(tensor) for name, tensor in expected.items()}}
        dcp.load({{"model": got}}, checkpoint_id=path, no_dist=True)
        dcp_to_torch_save(path, {str(tmp_path / "plain.pt")!r})
        plain = torch.load({str(tmp_path / "plain.pt")!r}, weights_only=True)
        for name, tensor in expected.items():
            assert torch.equal(got[name], tensor)
            assert torch.equal(plain["model"][name], tensor)
            assert plain["optimizer"]["state"][name]["exp_avg"].shape == tensor.shape
        assert "lamina" not in sys.modules
        print("read")
    """
    run = subprocess.run(
        [sys.executable, "-c", textwrap.dedent(program)],
        capture_output=True,
        text=True,
        timeout=600,  # a busy machine takes a minute to import torch
        check=False,
    )
    assert run.stdout.strip() == "read", run.stderr


def test_names_are_those_that_rename_gives(tmp_path):
    torch.manual_seed(0)
    whole = nn.ModuleDict({"experts": nn.ModuleList(nn.Linear(2, 2) for _ in range(4))})
    moments = {n: {"momentum_buffer": torch.randn_like(p)} for n, p in whole.named_parameters()}
    state = {"model": whole.state_dict(), "optimizer": {"state": moments}}
    dcp.save(state, checkpoint_id=tmp_path, no_dist=True)

    here = nn.ModuleDict({"experts": nn.ModuleList(nn.Linear(2, 2) for _ in range(2))})
    optimizer = torch.optim.SGD(here.parameters(), 0.1, momentum=0.9)
    import_dcp(
        {"model": here, "optimizer": optimizer},
        tmp_path,
        strict=False,
        rename=lambda name: re.sub(r"(\d)", lambda m: str(2 * int(m[1]) + 1), name),
    )
    for mine, other in ((0, 1), (1, 3)):
        weight = here["experts"][mine].weight
        assert torch.equal(weight, whole["experts"][other].weight)
        expected = moments[f"experts.{other}.weight"]["momentum_buffer"]
        assert torch.equal(optimizer.state[weight]["momentum_buffer"], expected)


def test_nested_state_of_an_optimizer_and_files_in_directories(tmp_path):
    weight = torch.randn(2, 3)
    inner = {"GG": [torch.eye(2), 2 * torch.eye(3)], "counts": {"steps": torch.ones(())}}
    state = {"model": {"0.weight": weight}, "optimizer": {"state": {"0.weight": inner}}}
    dcp.save(state, checkpoint_id=tmp_path, no_dist=True)
    (tmp_path / "of").mkdir()
    (tmp_path / "__0_0.distcp").rename(tmp_path / "of" / "__0_0.distcp")
    metadata = pickle.loads((tmp_path / ".metadata").read_bytes())
    for info in metadata.storage_data.values():
        info.relative_path = f"of/{info.relative_path}"
    (tmp_path / ".metadata").write_bytes(pickle.dumps(metadata))
    model = nn.Sequential(nn.Linear(3, 2, bias=False))
    optimizer = torch.optim.SGD(model.parameters(), 0.1)
    import_dcp({"model": model, "optimizer": optimizer}, tmp_path)
    assert torch.equal(model[0].weight, weight)
    loaded = optimizer.state[model[0].weight]
    assert isinstance(loaded["GG"], list)
    assert all(torch.equal(a, b) for a, b in zip(loaded["GG"], inner["GG"], strict=True))
    assert loaded["counts"]["steps"] == 1
    inner["GG"][0] = 7
    dcp.save(state, checkpoint_id=tmp_path / "mixed", no_dist=True)
    with pytest.raises(CheckpointMismatchError, match=r"'0\.weight\.GG' is a list of tensors and"):
        import_dcp({"model": model, "optimizer": optimizer}, tmp_path / "mixed")
