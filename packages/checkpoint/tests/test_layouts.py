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
from layouts import LAYOUTS, STEPS, build, train

# Every layout of a model to every other one, and, by default, so that each is in one pair: both of
# a pair are saved from and loaded into.
PRODUCT = [(a, b) for a in LAYOUTS for b in LAYOUTS if LAYOUTS[a].model == LAYOUTS[b].model]
PAIRS = [
    ("0", "tp pp"),
    ("1", "hsdp tp"),
    ("2", "pp"),
    ("3", "tp bare"),
    ("hsdp", "ddp 1 tp"),
    ("hfsdp", "cp"),
    ("ddp 0 tp", "bare"),
    ("ddp 0", "tp"),
    ("ddp 1", "3"),
    ("experts bare", "ep pp"),
    ("ep", "ep tp"),
    ("ep ddp 1", "experts 3"),
    ("tied zbv", "tied 3"),
    ("tied pp", "tied zbv ddp"),
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
        reference = tmp_path / "alone" / f"step-{STEPS:08d}"
        for name in ("x", "y"):
            found = compare_checkpoints(reference, tmp_path / name / f"step-{STEPS:08d}")
            assert not [d for d in found if not is_order_of_names(d)], (name, found)
            assert members(tmp_path / name) == members(tmp_path / "alone")

    train(second, STEPS)
    managers[1].save(2 * STEPS, second.state)
    train(alone, STEPS)
    back = build(name_of_one, seed=3)
    CheckpointManager(tmp_path / "y", group=mine).restore(back.state)
    for (name, got), expected in zip(
        back.model.named_parameters(), alone.model.parameters(), strict=True
    ):
        torch.testing.assert_close(got, expected, rtol=1e-9, atol=1e-9, msg=name)
        state, wanted = back.optimizer.state[got], alone.optimizer.state[expected]
        assert state["step"] == wanted["step"] == 2 * STEPS
        for key in ("exp_avg", "exp_avg_sq"):
            torch.testing.assert_close(state[key], wanted[key], rtol=1e-9, atol=1e-9, msg=name)


def is_order_of_names(difference: Difference) -> bool:
    """Whether what differs is only where in a group's list a name stands."""
    return re.fullmatch(r"optimizer\.param_groups\.\d+\.params\.\d+", difference.name) is not None


def members(directory: Path) -> list[set[str]]:
    values = json.loads((directory / f"step-{STEPS:08d}" / "values.json").read_text())
    return [set(group["params"]) for group in values["optimizer"]["param_groups"]]


@pytest.mark.ranks(4)
@pytest.mark.parametrize(("saved", "loaded"), PAIRS)
def test_a_run_moves_from_layout_to_layout(tmp_path, saved, loaded):
    moved(tmp_path, saved, loaded)


@pytest.mark.slow
@pytest.mark.ranks(4)
@pytest.mark.parametrize(("saved", "loaded"), PRODUCT)
def test_a_run_moves_from_any_layout_to_any(tmp_path, saved, loaded):
    moved(tmp_path, saved, loaded)


@pytest.mark.ranks(2)
@pytest.mark.parametrize("axis", ["ep", "expert_tp"])
def test_experts_over_ranks_are_stored_as_all_experts(tmp_path, axis):
    from lamina.mesh import ParallelLayout
    from lamina.models import GroupedExperts

    sizes = {"ep": 2, "dp_shard": 2} if axis == "ep" else {"expert_tp": 2, "tp": 2, "dp_shard": 1}
    mesh = ParallelLayout(**sizes).build("cpu")

    def experts(mesh: object) -> torch.nn.Module:
        torch.manual_seed(0)
        return GroupedExperts(4, 8, 12, mesh)

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
