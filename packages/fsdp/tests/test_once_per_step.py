"""Gathers and sums once per step: the bits of strategy 0, one gather per unit, planned memory."""

import pytest
import torch
from torch.distributed.device_mesh import init_device_mesh

from lamina.collectives import Ledger
from lamina.ddp import full_gradients, full_parameters, memory_plan
from lamina.fsdp import fully_shard
from lamina_testing import device_type
from lamina_testing.toys import TinyTransformer, inputs


def build(strategy, once):
    torch.manual_seed(3)
    model = TinyTransformer()
    mesh = init_device_mesh(device_type(), (2,), mesh_dim_names=("dp",))
    optimizer = torch.optim.AdamW(model.parameters(), 1e-2)
    model, optimizer = fully_shard(
        model, optimizer, device_mesh=mesh, dp_shard_dim="dp", zero_dp_strategy=strategy
    )
    if once:
        model.gather_once_per_step()
        model.reduce_once_per_step()
    return model, optimizer


def step(model, optimizer, number, rank):
    """Three microbatches whose forwards and backwards take turns, as in 1F1B."""
    losses = []
    for microbatch in range(4):
        if microbatch < 3:
            batch = inputs(model, 100 * number + 10 * rank + microbatch)
            losses.append(model(batch).square().mean())
        if microbatch in (1, 2):
            with model.no_sync():
                losses.pop(0).backward()
    losses.pop(0).backward()
    if hasattr(model, "release_units"):
        model.release_units()
    gradients = full_gradients(model)
    optimizer.step()
    optimizer.zero_grad()
    return gradients


@pytest.mark.ranks(2)
@pytest.mark.parametrize("strategy", [2, 3])
def test_a_step_has_the_bits_of_strategy_0_and_gathers_each_unit_once(strategy, ranks):
    plain, plain_optimizer = build(0, once=False)
    model, optimizer = build(strategy, once=True)
    for number in range(3):
        wanted = step(plain, plain_optimizer, number, ranks.rank)
        with Ledger() as ledger:
            found = step(model, optimizer, number, ranks.rank)
        for name, gradient in wanted.items():
            assert torch.equal(found[name], gradient), name
    for name, value in full_parameters(plain).items():
        assert torch.equal(full_parameters(model)[name], value), name
    cut = [g for g in model.parameter_groups() if not g.weights.local.is_whole]
    gathers = sum(
        r.op == "all_gather_into" and r.communicator == "dp:gather" for r in ledger.records
    )
    looked_at = len(list(model.parameter_groups()))  # full_gradients gathers each group once
    assert gathers == len(cut) + looked_at if strategy == 3 else not cut
    sums = [r for r in ledger.records if r.op == "reduce_scatter_fp32"]
    assert len(sums) == looked_at


@pytest.mark.ranks(2)
def test_the_plan_shows_the_memory_that_it_costs(ranks):
    model, _ = build(3, once=True)
    groups = list(model.parameter_groups())
    plan = memory_plan(model)
    assert plan.gathered == sum(4 * group.layout.size for group in groups)
    assert plan.local_grads == sum(4 * group.layout.size for group in groups)
    model.gather_once_per_step(False)
    model.reduce_once_per_step(False)
    assert memory_plan(model).gathered < plan.gathered
    assert memory_plan(model).local_grads == 0


@pytest.mark.ranks(2)
def test_the_cadence_cannot_change_under_accumulated_gradients(ranks):
    model, _ = build(2, once=False)
    model(inputs(model, ranks.rank)).square().mean().backward()
    with pytest.raises(RuntimeError, match="being accumulated"):
        model.reduce_once_per_step()
