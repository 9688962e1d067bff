"""Copies of weights and optimizer state are compared bit by bit, in a message sent anyway."""

import itertools
from contextlib import nullcontext

import pytest
import torch
from torch import nn

from lamina.collectives import Ledger
from lamina.ddp import (
    DistributedDataParallel,
    DistributedDataParallelConfig,
    HealthMonitor,
    ReplicaError,
    ReplicaMonitor,
    ShardedOptimizer,
    clip_grad_norm,
    full_parameters,
)
from lamina.ddp.monitor.replicas import _Family, _Piece
from lamina.mesh import ParallelLayout
from lamina_testing import device_type


def wrap(dtype=torch.float32, **layout):
    torch.manual_seed(0)
    module = nn.Sequential(nn.Linear(5, 7), nn.Linear(7, 1)).to(dtype)
    mesh = ParallelLayout(**layout).build(device_type())
    sharded = bool(layout)
    config = DistributedDataParallelConfig(
        use_distributed_optimizer=sharded, num_distributed_optimizer_instances=2 if sharded else 1
    )
    model = DistributedDataParallel(module, config, mesh)
    adamw = torch.optim.AdamW(module.parameters(), lr=0.1)
    return model, ShardedOptimizer(adamw, model, mesh), mesh


def backward(model, step, rank):
    generator = torch.Generator().manual_seed(10 * step + rank)
    x = torch.randn(4, 5, generator=generator).to(next(model.parameters()).dtype)
    model(x).square().mean().backward()


def flip(tensor, element, bit):
    """Flip one bit, as a fault would: nobody's version counter knows."""
    raw = tensor.detach().data.reshape(-1).view(torch.uint8)
    raw[element * tensor.itemsize + bit // 8] ^= 1 << bit % 8


def tensor_of(model, optimizer, what, index=0):
    parameter = [p for group in optimizer.param_groups for p in group["params"]][index]
    return parameter if what == "weights" else optimizer.state[parameter][what]


def trained(ranks, replicas_of, fault=None, steps=4):
    """Parameters after some steps; `fault` flips a bit of rank 1 before the third one's norm."""
    model, optimizer, mesh = wrap()
    replicas = replicas_of(model, optimizer, mesh)
    for step in range(steps):
        backward(model, step, ranks.rank)
        if step == 2 and fault and ranks.rank == 1:
            flip(tensor_of(model, optimizer, fault), 3, 30)
        clip_grad_norm(model, 1.0, mesh, replicas=replicas)
        optimizer.step()
        optimizer.zero_grad()
    return full_parameters(model), replicas


@pytest.mark.ranks(3)
@pytest.mark.parametrize("what", ["weights", "exp_avg", "exp_avg_sq"])
def test_of_three_copies_the_odd_one_is_named_or_healed(what, ranks):
    good, _ = trained(ranks, lambda *_: None)
    with pytest.raises(ReplicaError, match="unlike 2 of 3 copies") as told:
        trained(ranks, lambda *of: ReplicaMonitor(*of, steps=1), what)
    text = str(told.value)
    assert f"{what} of 0.weight" in text
    assert "rank 1 (dp_shard_cp=1): on " in text
    assert "rank 0" not in text
    assert "rank 2" not in text
    with pytest.warns(UserWarning, match="it was replaced") if ranks.rank == 0 else nullcontext():
        healed, replicas = trained(ranks, lambda *of: ReplicaMonitor(*of, steps=1, heal=True), what)
    assert replicas.healed == 1
    for name, value in good.items():
        assert torch.equal(healed[name], value), name


@pytest.mark.ranks(2)
def test_every_bit_is_compared_once_in_so_many_steps(ranks):
    """Any one flipped bit is told exactly once in each round, and both of two copies are named."""
    model, optimizer, mesh = wrap()
    for step in range(2):
        backward(model, step, ranks.rank)
        optimizer.step()
    generator = torch.Generator().manual_seed(1)
    for _ in range(12):
        what = ["weights", "exp_avg", "exp_avg_sq"][torch.randint(3, (), generator=generator)]
        index = int(torch.randint(4, (), generator=generator))
        victim = tensor_of(model, optimizer, what, index)
        element = int(torch.randint(victim.numel(), (), generator=generator))
        bit = int(torch.randint(32, (), generator=generator))
        replicas = ReplicaMonitor(model, optimizer, mesh, steps=5, heal=True)
        for fault in (True, False):
            if fault and ranks.rank == 1:
                flip(victim, element, bit)
            told = []
            for _ in range(5):
                try:
                    replicas.compare()
                except ReplicaError as error:
                    told.append(str(error))
            assert len(told) == int(fault), (what, index, element, bit)
            if told:
                assert "rank 0" in told[0]
                assert "rank 1" in told[0]
                assert f"{what} of {index // 2}" in told[0]
                assert "no majority among 2 copies" in told[0]
            if fault and ranks.rank == 1:
                flip(victim, element, bit)


@pytest.mark.ranks(2)
def test_the_comparison_sends_no_message_of_its_own(ranks):
    sent = []
    for watched in (False, True):
        model, optimizer, mesh = wrap()
        replicas = ReplicaMonitor(model, optimizer, mesh, steps=3) if watched else None
        health = HealthMonitor()
        for step in range(3):
            backward(model, step, ranks.rank)
            with Ledger() as ledger:
                norm = clip_grad_norm(model, 1.0, mesh, health=health, replicas=replicas)
            optimizer.step()
            optimizer.zero_grad()
        sent.append(([(record.axis, record.op) for record in ledger.records], float(norm)))
    assert sent[0] == sent[1]
    with Ledger() as ledger:
        replicas.compare()
        clip_grad_norm(model, 1.0, mesh, norm_type=float("inf"), replicas=replicas)
    assert len(ledger.records) == 3


@pytest.mark.ranks(4)
def test_shards_are_compared_with_those_of_other_replicas_only(ranks):
    model, optimizer, mesh = wrap(torch.bfloat16, dp_replicate=2, dp_shard=2)
    replicas = ReplicaMonitor(model, optimizer, mesh, steps=1)
    backward(model, 0, ranks.rank)
    clip_grad_norm(model, 1.0, mesh, replicas=replicas)
    optimizer.step()
    optimizer.zero_grad()
    backward(model, 1, ranks.rank)
    clip_grad_norm(model, 1.0, mesh, replicas=replicas)
    held = [tensor_of(model, optimizer, "exp_avg", index).to_local() for index in range(4)]
    assert not all(exp_avg.numel() for exp_avg in held)
    if ranks.rank == 3:
        flip(next(exp_avg for exp_avg in held if exp_avg.numel()), 0, 3)
    with pytest.raises(ReplicaError, match="exp_avg of") as told:
        replicas.compare()
    assert [f"rank {rank} " in str(told.value) for rank in range(4)] == [False, True, False, True]


@pytest.mark.ranks(2)
def test_state_in_lists_and_buffers_that_are_asked_for_are_compared(ranks):
    model, optimizer, mesh = wrap()
    model.module[0].register_buffer("table", torch.ones(6, dtype=torch.bfloat16))
    first = optimizer.param_groups[0]["params"][0]
    history = [torch.ones(3), {"mean": torch.ones(2)}]
    optimizer.state[first]["history"] = history
    for victim, name in (
        (history[0], "history.0 of 0.weight"),
        (history[1]["mean"], "history.1.mean of 0.weight"),
        (model.module[0].table, "buffer module.0.table"),
    ):
        replicas = ReplicaMonitor(model, optimizer, mesh, steps=1, buffers=True)
        replicas.compare()
        for wrong in (True, False):
            if ranks.rank == 1:
                flip(victim, 1, 3)
            with pytest.raises(ReplicaError, match=name) if wrong else nullcontext():
                replicas.compare()
    model.module[0].table.fill_(ranks.rank)
    ReplicaMonitor(model, optimizer, mesh, steps=1).compare()  # buffers may differ


def test_a_round_has_at_least_one_step():
    with pytest.raises(ValueError, match="steps=0"):
        ReplicaMonitor(nn.Linear(1, 1), steps=0)


def test_opposite_flips_of_one_bit_in_two_pieces_do_not_cancel():
    def digest(*bits):
        held = [torch.tensor([bit, 7, 9], dtype=torch.int32) for bit in bits]
        pieces = [_Piece(str(at), 3, 4, lambda at=at: held[at]) for at in range(len(held))]
        return int(_Family((), pieces).digest(0, 1))

    assert len({digest(*bits) for bits in itertools.product((0, 1), repeat=6)}) == 64
