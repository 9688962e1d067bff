"""Budgets in bytes: what is gathered ahead, and what is on the wire, counted from outside."""

import pytest
import torch
from torch import nn
from torch.distributed.device_mesh import init_device_mesh
from torch.distributed.fsdp import CPUOffloadPolicy
from torch.utils.checkpoint import checkpoint

from lamina.collectives import Ledger
from lamina.collectives.engine import AllGather
from lamina.ddp import full_parameters, memory_plan
from lamina.fsdp import fully_shard
from lamina_testing import device_type
from lamina_testing.toys import Block

WIDTH, DEPTH = 16, 5


class Deep(nn.Module):
    def __init__(self, recompute=False):
        super().__init__()
        self.scale = nn.Parameter(torch.ones(()))
        self.blocks = nn.ModuleList(Block(WIDTH) for _ in range(DEPTH))
        self.recompute = recompute

    def forward(self, x):
        for block in self.blocks:
            x = checkpoint(block, x, use_reentrant=False) if self.recompute else block(x)
        return x * self.scale


def build(recompute=False, **settings):
    torch.manual_seed(0)
    model = Deep(recompute)
    mesh = init_device_mesh(device_type(), (2,), mesh_dim_names=("dp",))
    optimizer = torch.optim.SGD(model.parameters(), lr=0.1)
    return fully_shard(model, optimizer, device_mesh=mesh, fsdp_unit_modules=[Block], **settings)


def step(model, optimizer, rank=0, number=0):
    generator = torch.Generator().manual_seed(10 * number + rank)
    x = torch.randn(4, WIDTH, generator=generator, requires_grad=True)
    model(x).square().mean().backward()
    optimizer.step()
    optimizer.zero_grad()


def sizes(model):
    """Bytes of the root's whole weights, and of a block's."""
    return [4 * group.layout.size for group in model.parameter_groups()][:2]


def watched(monkeypatch, model):
    """Bytes of the storages behind all parameters, after each gather has got its own."""
    found = []
    start = AllGather.start
    storages = {
        p.untyped_storage()._cdata: p.untyped_storage()
        for group in model.parameter_groups()
        for p in group.compute_parameters
    }

    def noting(*args, **settings):
        found.append(sum(storage.nbytes() for storage in storages.values()))
        return start(*args, **settings)

    monkeypatch.setattr(AllGather, "start", noting)
    return found


@pytest.mark.ranks(2)
@pytest.mark.parametrize("recompute", [False, True])
def test_whole_weights_fill_the_gather_budget_and_never_exceed_it(recompute, ranks, monkeypatch):
    plain = build(recompute)
    root, block = sizes(plain[0])
    for number in range(3):
        step(*plain, ranks.rank, number)
    for units, spare in ((1, 0), (3, 8)):
        budget = root + units * block + spare
        model, optimizer = build(recompute, gather_budget=budget)
        step(model, optimizer, ranks.rank, 0)
        with monkeypatch.context() as patch:
            live = watched(patch, model)
            for number in (1, 2):
                step(model, optimizer, ranks.rank, number)
        assert max(live) == root + units * block
        assert memory_plan(model).gathered == budget
        found, wanted = full_parameters(model), full_parameters(plain[0])
        assert all(torch.equal(found[name], wanted[name]) for name in wanted)


@pytest.mark.ranks(2)
@pytest.mark.parametrize("strategy", [1, 3])
def test_gradients_on_the_wire_fill_the_reduce_budget_and_never_exceed_it(strategy, ranks):
    _, block = sizes(build()[0])
    for units in (1, 3):
        model, optimizer = build(reduce_budget=units * block + 8, zero_dp_strategy=strategy)
        step(model, optimizer)
        with Ledger() as ledger:
            step(model, optimizer)
        sent = [r for r in ledger.records if r.op == "reduce_scatter_fp32" and r.bytes > block // 8]
        assert len(sent) == DEPTH
        together = [
            2 * sum(r.bytes for r in sent if r.issued <= at.issued < r.waited) for at in sent
        ]
        assert max(together) == units * block
        assert memory_plan(model).in_flight > units * block


@pytest.mark.ranks(2)
def test_the_plan_of_a_reduce_budget_counts_the_sums_that_go_to_the_host(ranks):
    """Each reduction on the wire has its sum on the device until it is copied to the host."""
    plans = {}
    for policy in (None, CPUOffloadPolicy()):
        for budget in (None, 1 << 20):  # all units fit on the wire
            model, _ = build(reduce_budget=budget, offload_policy=policy)
            plans[policy is not None, budget is not None] = memory_plan(model).in_flight
    root, block = sizes(model)
    # Two sums, and a third unit's gradients, which are filled beside them.
    assert plans[True, False] - plans[False, False] == 2 * block // 2 + block
    assert plans[True, True] - plans[False, True] == (DEPTH * block + root) // 2


@pytest.mark.ranks(1)
def test_a_budget_that_no_step_fits_into_is_refused(ranks):
    mesh = init_device_mesh(device_type(), (1,), mesh_dim_names=("dp",))
    common = {"device_mesh": mesh, "fsdp_unit_modules": [Block]}
    for settings, says in (
        ({"gather_budget": 5000}, r"gather_budget=5000 .* the root and blocks\.0.* bytes"),
        ({"reduce_budget": 5000}, r"reduce_budget=5000 .* blocks\.0 are \d+ bytes"),
        ({"gather_budget": 1 << 20, "fsdp_double_buffer": True}, "fixed memory"),
        ({"gather_budget": 1 << 20, "zero_dp_strategy": 1}, "keeps weights whole"),
        ({"gather_budget": 1 << 20, "overlap_param_gather": False}, "which is off"),
    ):
        model = Deep()
        with pytest.raises(ValueError, match=says):
            fully_shard(model, **common, **settings)
        model(torch.randn(2, WIDTH))
