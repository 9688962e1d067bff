"""`reduction="int8"`: a quarter of the bytes, the loss of fp32, and one set of bits per cadence."""

import pytest
import torch
from torch.distributed.device_mesh import init_device_mesh

from lamina.collectives import Ledger
from lamina.ddp import full_parameters, memory_plan
from lamina.ddp.engine import resolve_reduction
from lamina.fsdp import fully_shard
from lamina_testing import device_type
from lamina_testing.toys import Block, OddNet


def build(world, strategy, outer=None, **settings):
    torch.manual_seed(3)
    model = OddNet(width=40)
    names = {"dp_shard_dim": "dp"}
    mesh = init_device_mesh(device_type(), (world,), mesh_dim_names=("dp",))
    if outer is not None:
        mesh = init_device_mesh(device_type(), (2, world // 2), mesh_dim_names=("replica", "dp"))
        names |= {"dp_outer_dim": "replica", "outer_dp_sharding_strategy": outer}
    return fully_shard(
        model,
        torch.optim.AdamW(model.parameters(), lr=3e-3, foreach=False),
        device_mesh=mesh,
        fsdp_unit_modules=[Block],
        zero_dp_strategy=strategy,
        **names,
        **settings,
    )


def train(model, optimizer, rank, steps):
    """Fit a function; return the mean loss over the last twenty steps."""
    losses = []
    for step in range(steps):
        batch = torch.randn(16, 5, generator=torch.Generator().manual_seed(97 * step + rank))
        target = torch.stack((batch.sum(1), batch[:, 0] * batch[:, 1], batch[:, 2].sin()), 1)
        loss = (model(batch) - target).square().mean()
        loss.backward()
        losses.append(loss.item())
        optimizer.step()
        optimizer.zero_grad()
    return sum(losses[-20:]) / len(losses[-20:])


@pytest.mark.ranks(4)
def test_every_strategy_has_the_same_bits(ranks):
    wanted = None
    for strategy, outer in ((1, None), (0, None), (2, None), (3, None), (1, 0), (3, 0), (3, 1)):
        model, optimizer = build(ranks.world_size, strategy, outer, reduction="int8")
        train(model, optimizer, ranks.rank, 3)
        found = full_parameters(model)
        wanted = wanted or found
        for name, value in wanted.items():
            assert torch.equal(found[name], value), (strategy, outer, name)


@pytest.mark.slow
@pytest.mark.ranks(2, timeout=240)
@pytest.mark.parametrize("steps", [40, pytest.param(120, marks=pytest.mark.slow)])
def test_the_loss_is_that_of_fp32_within_one_percent(steps, ranks):
    found = {}
    for reduction in ("ordered", "int8"):
        model, optimizer = build(2, 3, reduction=reduction)
        found[reduction] = train(model, optimizer, ranks.rank, steps)
    assert found["int8"] != found["ordered"], "nothing was compressed"
    assert found["int8"] == pytest.approx(found["ordered"], rel=0.01)


@pytest.mark.ranks(2)
def test_gradients_take_a_quarter_of_the_bytes_and_the_plan_says_what_is_kept(ranks):
    sent, plans = {}, {}
    for reduction in ("ordered", "int8"):
        model, optimizer = build(2, 3, reduction=reduction)
        train(model, optimizer, ranks.rank, 1)
        with Ledger() as ledger:
            train(model, optimizer, ranks.rank, 1)
        sent[reduction] = ledger.bytes(op="reduce_scatter_fp32")
        plans[reduction] = memory_plan(model)
    assert 0 < sent["int8"] <= 0.27 * sent["ordered"]
    elements = sum(group.layout.size for group in model.parameter_groups())
    assert plans["int8"].resident - plans["ordered"].resident == 4 * elements


def test_reproducible_bits_refuse_what_earlier_steps_have_lost():
    with pytest.raises(ValueError, match="lost on the wire"):
        resolve_reduction("int8", reproducible=True)
