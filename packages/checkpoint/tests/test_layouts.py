"""Saved on any layout, loaded on any other: the same bits, and the run goes on as if alone."""

from __future__ import annotations

import json
import re
import sys
from pathlib import Path

import pytest
import torch
import torch.distributed as dist

from lamina.checkpoint import CheckpointManager, Difference, compare_checkpoints

pytest.importorskip("lamina.fsdp")
pytest.importorskip("lamina.models")
sys.path.insert(0, str(Path(__file__).parent))
from layouts import LAYOUTS, STEPS, Job, build, train

from lamina_testing import device_type

# Each layout is in one pair: both of a pair are saved from and loaded into. By default the pairs
# run that hold each kind of layout (a strategy, an axis, a wrapper, a schedule) once; slow are
# the other pairs, and the product of every layout of a model with every one.
DEFAULT = [
    ("0", "tp pp"),
    ("1", "hsdp tp"),
    ("hfsdp", "cp"),
    ("ddp 1", "3"),
    ("ep", "ep tp"),
    ("ep hfsdp", "ep ddp 0"),
    ("tied pp", "tied zbv ddp"),
    ("mamba bare", "mamba tp"),
]
OTHERS = [
    ("2", "pp"),
    ("3", "tp bare"),
    ("hsdp", "ddp 1 tp"),
    ("ddp 0 tp", "bare"),
    ("ddp 0", "tp"),
    ("experts bare", "ep pp"),
    ("ep ddp 1", "experts 3"),
    ("ep 0", "ep 2"),
    ("ep 1", "ep hsdp"),
    ("tied zbv", "tied 3"),
    ("tied zbv one", "tied bare"),
]


def moved(tmp_path: Path, saved: str, loaded: str) -> None:
    """One process trains alone; its state goes through both layouts, which train on."""
    rank = dist.get_rank()
    kind = LAYOUTS[saved].model
    name_of_one = "bare" if kind == "dense" else f"{kind} bare"
    alone = build(name_of_one, seed=0)
    train(alone, 0)
    mine = [dist.new_group([r]) for r in range(dist.get_world_size())][rank]
    managers = [CheckpointManager(tmp_path / name, verify=False) for name in ("x", "y")]
    if rank == 0:
        CheckpointManager(tmp_path / "alone", group=mine).save(STEPS, alone.state)
    dist.barrier()

    first = build(saved, seed=1)
    CheckpointManager(tmp_path / "alone").restore(first.state)
    managers[0].save(STEPS, first.state)
    second = build(loaded, seed=2)
    managers[0].restore(second.state)
    managers[1].save(STEPS, second.state)
    if rank == 0:
        for name in ("x", "y"):
            same_state(tmp_path / "alone", tmp_path / name)

    train(second, STEPS)
    managers[1].save(2 * STEPS, second.state)
    train(alone, STEPS)
    back = build(name_of_one, seed=3)
    CheckpointManager(tmp_path / "y", group=mine).restore(back.state)
    assert_near(back, alone)


def assert_near(back: Job, alone: Job) -> None:
    for (name, got), expected in zip(
        back.model.named_parameters(), alone.model.parameters(), strict=True
    ):
        torch.testing.assert_close(got, expected, rtol=1e-9, atol=1e-9, msg=name)
        state, wanted = back.optimizer.state[got], alone.optimizer.state[expected]
        assert state["step"] == wanted["step"] == 2 * STEPS
        for key in ("exp_avg", "exp_avg_sq"):
            torch.testing.assert_close(state[key], wanted[key], rtol=1e-9, atol=1e-9, msg=name)
    for (name, buffer), wanted in zip(
        back.model.named_buffers(), alone.model.buffers(), strict=True
    ):
        assert torch.equal(buffer, wanted), name


def same_state(one: Path, other: Path) -> None:
    """Two checkpoints of step `STEPS` hold the same bits under the same names, however cut."""
    found = compare_checkpoints(*(d / f"step-{STEPS:08d}" for d in (one, other)))
    assert not [d for d in found if not is_order_of_names(d)], (other, found)
    assert members(other) == members(one)


def loaded_from_all(kept: Path, tmp_path: Path, loaded: str) -> None:
    """One layout loads what each layout saved; the first test of a model saves for all."""
    rank, kind = dist.get_rank(), LAYOUTS[loaded].model
    name_of_one, kept = "bare" if kind == "dense" else f"{kind} bare", kept / kind
    mine = [dist.new_group([r]) for r in range(dist.get_world_size())][rank]
    alone = build(name_of_one, seed=0)
    train(alone, 0)
    saves = {name: kept / name for name in LAYOUTS if LAYOUTS[name].model == kind}
    if not (kept / "all").exists():
        if rank == 0:
            first = CheckpointManager(kept / "alone", group=mine)
            first.save(STEPS, alone.state, overwrite=True)
        dist.barrier()
        for name, path in saves.items():
            job = build(name, seed=1)
            CheckpointManager(kept / "alone").restore(job.state)
            CheckpointManager(path, verify=False).save(STEPS, job.state, overwrite=True)
        dist.barrier()
        if rank == 0:
            (kept / "all").touch()
    train(alone, STEPS)
    for number, path in enumerate(saves.values()):
        job = build(loaded, seed=4 + number)
        CheckpointManager(path).restore(job.state)
        manager = CheckpointManager(tmp_path / path.name, verify=False)
        manager.save(STEPS, job.state)
        if rank == 0:
            same_state(kept / "alone", path)
            same_state(kept / "alone", tmp_path / path.name)
        train(job, STEPS)
        manager.save(2 * STEPS, job.state)
        back = build(name_of_one, seed=3)
        CheckpointManager(tmp_path / path.name, group=mine).restore(back.state)
        assert_near(back, alone)


def is_order_of_names(difference: Difference) -> bool:
    """Whether what differs is only where in a group's list a name stands."""
    return re.fullmatch(r"optimizer\.param_groups\.\d+\.params\.\d+", difference.name) is not None


def members(directory: Path) -> list[set[str]]:
    values = json.loads((directory / f"step-{STEPS:08d}" / "values.json").read_text())
    return [set(group["params"]) for group in values["optimizer"]["param_groups"]]


def test_each_layout_is_in_a_pair():
    assert {name for pair in DEFAULT + OTHERS for name in pair} == set(LAYOUTS)


@pytest.mark.matrix(few=3)
@pytest.mark.ranks(4)
@pytest.mark.parametrize(
    ("saved", "loaded"),
    [*DEFAULT, *(pytest.param(*pair, marks=pytest.mark.slow) for pair in OTHERS)],
)
def test_a_run_moves_from_layout_to_layout(tmp_path, saved, loaded):
    moved(tmp_path, saved, loaded)


@pytest.fixture(scope="module")
def kept(tmp_path_factory) -> Path:
    """Where what each layout saved is kept from test to test."""
    return tmp_path_factory.mktemp("layouts")


@pytest.mark.slow
@pytest.mark.ranks(4, timeout=300)
@pytest.mark.parametrize("loaded", list(LAYOUTS))
def test_a_run_moves_from_every_layout_to_each(kept, tmp_path, loaded):
    loaded_from_all(kept, tmp_path, loaded)


@pytest.mark.ranks(2)
@pytest.mark.parametrize("axis", ["ep", "expert_tp"])
def test_experts_over_ranks_are_stored_as_all_experts(tmp_path, axis):
    from lamina.mesh import ParallelLayout
    from lamina.models import GroupedExperts

    sizes = {"ep": 2, "dp_shard": 2} if axis == "ep" else {"expert_tp": 2, "tp": 2, "dp_shard": 1}
    mesh = ParallelLayout(**sizes).build(device_type())

    def experts(mesh: object) -> torch.nn.Module:
        torch.manual_seed(0)
        made = GroupedExperts(4, 8, 12, mesh, bias=True)
        numbers = torch.arange(made.first, made.first + len(made.up)) + 1.0
        with torch.no_grad():  # each expert's are others
            for bias in (made.up_bias, made.down_bias):
                bias.copy_(numbers[:, None, None].expand_as(bias))
        return made

    cut, alone = experts(mesh), experts(None)
    optimizer, plain = (torch.optim.SGD(m.parameters(), 0.1, momentum=0.9) for m in (cut, alone))
    for model, stepped in ((cut, optimizer), (alone, plain)):
        for parameter in model.parameters():
            parameter.grad = parameter.detach().clone()
        stepped.step()
    CheckpointManager(tmp_path).save(1, {"model": cut, "optimizer": optimizer})
    mine = [dist.new_group([r]) for r in range(2)][dist.get_rank()]
    got = experts(None)
    fresh = torch.optim.SGD(got.parameters(), 0.1, momentum=0.9)
    CheckpointManager(tmp_path, group=mine).restore({"model": got, "optimizer": fresh})
    for one, other in zip(got.parameters(), alone.parameters(), strict=True):
        assert torch.equal(one, other)
        moments = (fresh.state[one], plain.state[other])
        assert torch.equal(*(m["momentum_buffer"] for m in moments))
