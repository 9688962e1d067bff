"""Saved on any layout, loaded on any other: the same bits, and the run goes on as if alone."""

from __future__ import annotations

import sys
from pathlib import Path

import pytest
import torch
import torch.distributed as dist

from lamina.checkpoint import CheckpointManager, compare_checkpoints

pytest.importorskip("lamina.fsdp")
pytest.importorskip("lamina.models")
sys.path.insert(0, str(Path(__file__).parent))
from layouts import LAYOUTS, STEPS, build, train

NAMES = list(LAYOUTS)
# Each layout is saved from once and loaded into once.
PAIRS = [(name, NAMES[(i + 4) % len(NAMES)]) for i, name in enumerate(NAMES)]


def moved(tmp_path: Path, saved: str, loaded: str) -> None:
    """One process trains alone; its state goes through both layouts, which train on."""
    rank = dist.get_rank()
    alone = build("bare", seed=0)
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
            assert not [d for d in found if "param_groups" not in d.name], (name, found)

    train(second, STEPS)
    managers[1].save(2 * STEPS, second.state)
    train(alone, STEPS)
    back = build("bare", seed=3)
    CheckpointManager(tmp_path / "y", group=mine).restore(back.state)
    for (name, got), expected in zip(
        back.model.named_parameters(), alone.model.parameters(), strict=True
    ):
        torch.testing.assert_close(got, expected, rtol=2e-5, atol=2e-6, msg=name)
        for state in (back.optimizer.state[got],):
            moment = alone.optimizer.state[expected]["momentum_buffer"]
            torch.testing.assert_close(state["momentum_buffer"], moment, rtol=1e-4, atol=1e-5)


@pytest.mark.ranks(4)
@pytest.mark.parametrize(("saved", "loaded"), PAIRS)
def test_a_run_moves_from_layout_to_layout(tmp_path, saved, loaded):
    moved(tmp_path, saved, loaded)


@pytest.mark.slow
@pytest.mark.ranks(4)
@pytest.mark.parametrize("saved", NAMES)
@pytest.mark.parametrize("loaded", NAMES)
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
