"""Bad data meets wrappers, optimizers and checkpoints: the run is as if it had never been there.

The oracle is one process of plain PyTorch that trains on the batches that are left.
"""

from __future__ import annotations

import math

import pytest
import torch
import torch.distributed as dist
from torch import nn

from lamina.checkpoint import CheckpointManager, CheckpointNotFoundError
from lamina.collectives import DisagreementError
from lamina.ddp import (
    Decision,
    DistributedDataParallel,
    DistributedDataParallelConfig,
    HealthMonitor,
    ShardedOptimizer,
    clip_grad_norm,
    full_parameters,
)
from lamina.fsdp import MixedPrecisionPolicy, fully_shard
from lamina.mesh import ParallelLayout

STEPS, EVERY, BAD = 9, 2, 5
CLIP = 0.5


def build():
    torch.manual_seed(3)
    return nn.Sequential(nn.Linear(4, 6), nn.Tanh(), nn.Linear(6, 2)).double()


def adamw(parameters):
    return torch.optim.AdamW(parameters, lr=0.05, foreach=False)


def batch(number, rank):
    """Two microbatches. The loss of rank 1's second one of batch BAD is broken."""
    generator = torch.Generator().manual_seed(100 * number + rank)
    return torch.randn(2, 3, 4, dtype=torch.float64, generator=generator)


def loss_of(model, x):
    return model(x).square().mean()


def expected(numbers):
    """Plain PyTorch: parameters after steps on the batches of these numbers."""
    model = build()
    optimizer = adamw(model.parameters())
    for number in numbers:
        parts = [loss_of(model, x) for rank in range(2) for x in batch(number, rank)]
        (sum(parts) / 4).backward()
        torch.nn.utils.clip_grad_norm_(model.parameters(), CLIP)
        optimizer.step()
        optimizer.zero_grad()
    return {name: value.detach() for name, value in model.named_parameters()}


def wrapped(kind, mesh):
    module = build()
    if kind.startswith("ddp"):
        config = DistributedDataParallelConfig(use_distributed_optimizer=kind == "ddp_sharded")
        model = DistributedDataParallel(module, config, mesh)
        return model, ShardedOptimizer(adamw(module.parameters()), model, mesh)
    optimizer = adamw(module.parameters())
    policy = MixedPrecisionPolicy(torch.float64, torch.float64, torch.float64)
    how = {"zero_dp_strategy": int(kind[-1]), "mixed_precision_policy": policy}
    return fully_shard(module, optimizer, device_mesh=mesh, fsdp_unit_modules=[nn.Linear], **how)


FACTOR = {"nan": math.nan, "spike": 1e3}


def train(kind, how, rank, directory, **policies):
    mesh = ParallelLayout().build("cpu")
    model, optimizer = wrapped(kind, mesh)
    health = HealthMonitor(window=4, least=2, **policies)
    manager = CheckpointManager(directory, keep_last=1, mesh=mesh)
    state = {"model": model, "optimizer": optimizer, "health": health}
    taken, done = [], 0
    while done < STEPS:
        number = health.batch(done)
        for index, piece in enumerate(batch(number, rank)):
            broken = number == BAD and rank == 1 and index == 1
            loss = loss_of(model, piece) * (FACTOR[how] if broken else 1.0)
            health.note(loss)
            if index == 0:
                with model.no_sync():
                    (loss / 2).backward()
            else:
                (loss / 2).backward()
        clip_grad_norm(model, CLIP, mesh, health=health)
        if health.last.decision is Decision.STEP:
            optimizer.step()
            taken.append(number)
        optimizer.zero_grad()
        if health.last.decision is Decision.BACK:
            done = manager.back(state, before=done)
            del taken[done:]
            health.went_back(done, number)
            continue
        done += 1
        if done % EVERY == 0:
            manager.save(done, state, healthy=health.last.healthy)
    return full_parameters(model), taken, health, manager


@pytest.mark.filterwarnings("ignore:loss")
@pytest.mark.ranks(2)
@pytest.mark.parametrize(
    ("kind", "how", "policy"),
    [
        ("ddp", "nan", "skip"),
        ("ddp_sharded", "spike", "back"),
        ("zero1", "nan", "back"),
        ("zero3", "nan", "skip"),
        ("zero3", "spike", "back"),
    ],
)
def test_a_run_is_as_if_the_bad_data_had_never_been_there(kind, how, policy, ranks, tmp_path):
    policies = {"nonfinite" if how == "nan" else "spike": policy}
    found, taken, health, manager = train(kind, how, ranks.rank, tmp_path, **policies)
    left = [0, 1, 2, 3, 4, 6, 7, 8]
    if policy == "back":  # to the checkpoint of step 4, past batches 4 and 5
        left = [0, 1, 2, 3, 6, 7, 8, 9, 10]
    assert taken == left
    assert health.counts == {policy: 1}
    for name, value in expected(left).items():
        torch.testing.assert_close(found[name], value, rtol=1e-9, atol=1e-12)
    # The newest, and the last healthy one besides. Step 6 is saved after a step that was skipped.
    assert manager.list() == ([6, 8] if policy == "back" else [4, 8])


@pytest.mark.ranks(1)
def test_the_last_healthy_checkpoint_is_never_deleted(ranks, tmp_path):
    manager = CheckpointManager(tmp_path, keep_last=1, verify=False)
    for step, healthy in enumerate([True, True, False, False, False]):
        manager.save(step, {"n": step}, healthy=healthy)
    assert manager.list() == [1, 4]
    state = {"n": None}
    assert manager.restore(state) == 4
    with pytest.warns(UserWarning, match=r"steps \[4\] are passed over"):
        assert manager.restore(state, healthy=True) == 1
    manager.save(4, {"n": 40}, healthy=True)  # what is not healthy is replaced
    assert manager.restore(state, healthy=True) == 4
    assert state["n"] == 40
    with pytest.raises(FileExistsError):
        manager.save(4, {"n": 41}, healthy=True)
    assert manager.list() == [1, 4]
    assert manager.back(state, before=4) == 1
    assert manager.list() == [1]
    assert manager.back(state, before=1) == 1  # there is none before it
    with pytest.raises(CheckpointNotFoundError, match="save one before the first step"):
        manager.back(state, before=0)


@pytest.mark.ranks(2)
def test_a_steps_own_checkpoint_is_taken_if_those_before_it_are_damaged(ranks, tmp_path):
    manager = CheckpointManager(tmp_path)
    for step in (1, 2, 3):
        manager.save(step, {"n": step}, healthy=True)
    if ranks.rank == 0:
        (tmp_path / "step-00000001" / "values.json").write_text("{}")
    state = {"n": None}
    with pytest.warns(UserWarning, match="step 1 is passed over"):
        assert manager.back(state, before=2) == 2
    assert state == {"n": 2}
    assert manager.list() == [2]


@pytest.mark.ranks(2)
def test_ranks_that_would_go_back_from_other_steps_are_told_and_nothing_is_deleted(ranks, tmp_path):
    manager = CheckpointManager(tmp_path)
    for step in (1, 2, 3):
        manager.save(step, {"n": step}, healthy=True)
    state = {"n": None}
    with pytest.raises(DisagreementError, match="before"):
        manager.back(state, before=2 + ranks.rank)
    assert (state, manager.list()) == ({"n": None}, [1, 2, 3])


@pytest.mark.ranks(2)
@pytest.mark.parametrize("kind", ["file", "link"])
def test_going_back_removes_a_stray_file_that_is_named_like_a_later_step(kind, ranks, tmp_path):
    manager = CheckpointManager(tmp_path / "run", keep_last=1)
    manager.save(1, {"n": 1}, healthy=True)
    elsewhere = tmp_path / "elsewhere"
    if ranks.rank == 0:
        elsewhere.mkdir()
        (elsewhere / "kept").write_text("mine")
        stray = tmp_path / "run" / "step-00000003"
        stray.write_text("?") if kind == "file" else stray.symlink_to(elsewhere)
    dist.barrier()
    state = {"n": None}
    assert manager.back(state, before=2) == 1
    manager.save(3, {"n": 3}, healthy=True)
    assert manager.latest() == 3
    assert (elsewhere / "kept").read_text() == "mine"


@pytest.mark.ranks(2)
def test_ranks_that_differ_on_health_are_told(ranks, tmp_path):
    manager = CheckpointManager(tmp_path)
    with pytest.raises(RuntimeError, match="healthy is"):
        manager.save(1, {"n": 1}, healthy=ranks.rank == 0)
