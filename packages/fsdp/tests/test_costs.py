"""What a step costs, as formulas: overlap by structure, bytes on the wire, copies, memory."""

import time

import pytest
import torch
from torch import nn
from torch.distributed.device_mesh import init_device_mesh

from lamina.collectives import Ledger
from lamina.collectives.engine import kept_bytes
from lamina.ddp import memory_plan
from lamina.fsdp import fully_shard
from lamina_testing import Meter, bytes_at_rest, delayed_collectives, device_type
from lamina_testing.toys import Block

WIDTH, DEPTH = 64, 3
STRATEGIES = pytest.mark.parametrize("strategy", [0, 1, 2, 3])


class Stack(nn.Module):
    def __init__(self):
        super().__init__()
        self.enter = nn.Linear(8, WIDTH)
        self.blocks = nn.ModuleList(Block(WIDTH) for _ in range(DEPTH))

    def forward(self, x):
        x = self.enter(x)
        for block in self.blocks:
            x = block(x)
        return x


def build(strategy, world, **settings):
    torch.manual_seed(0)
    model = Stack()
    mesh = init_device_mesh(device_type(), (world,), mesh_dim_names=("dp",))
    optimizer = torch.optim.SGD(model.parameters(), lr=0.1)
    return fully_shard(
        model,
        optimizer,
        device_mesh=mesh,
        fsdp_unit_modules=[Block],
        zero_dp_strategy=strategy,
        **settings,
    )


def step(model, optimizer):
    model(torch.randn(4, 8)).square().mean().backward()
    optimizer.step()
    optimizer.zero_grad()


def noting(times, key):
    """A hook that notes when it first ran."""

    def hook(*_):
        times.setdefault(key, time.perf_counter())

    return hook


def sizes(model):
    """Elements of each unit's buffer, padding included: the root first."""
    return [group.layout.size for group in model.parameter_groups()]


@pytest.mark.matrix(strength=1)
@pytest.mark.ranks(2, backend="gloo")  # on a GPU streams wait: tests/test_order.py
@pytest.mark.parametrize("overlap", [True, False])
@STRATEGIES
def test_a_unit_is_reduced_while_the_unit_before_it_computes(strategy, overlap, ranks):
    model, optimizer = build(strategy, 2, overlap_grad_reduce=overlap)
    # Gathers are delayed as well, and the next unit's backward would come when its own ends.
    model.set_reshard_after_forward(False)
    step(model, optimizer)
    ends = {}
    for index, block in enumerate(model.blocks):
        block.down.register_full_backward_pre_hook(noting(ends, ("begin", index)))
        block.norm.register_full_backward_hook(noting(ends, ("end", index)))
    loss = model(torch.randn(4, 8)).square().mean()
    with delayed_collectives(0.2 if overlap else 0.05), Ledger() as ledger:
        loss.backward()
    op = "all_reduce_fp32" if strategy == 0 else "reduce_scatter_fp32"
    reductions = [record for record in ledger.records if record.op == op]
    last_block, block_before = reductions[0], 1
    assert last_block.issued < ends["end", block_before], "issued only after the next backward"
    if overlap:
        assert last_block.finished > ends["begin", block_before], "waited for before the next"
    else:
        assert last_block.finished <= ends["begin", block_before]


@pytest.mark.matrix(strength=1)
@pytest.mark.ranks(2, backend="gloo")  # on a GPU streams wait: tests/test_order.py
@pytest.mark.parametrize("overlap", [True, False])
@pytest.mark.parametrize("strategy", [1, 2, 3])
def test_the_next_units_weights_are_on_their_way_while_one_computes(strategy, overlap, ranks):
    model, optimizer = build(strategy, 2, overlap_param_gather=overlap)
    step(model, optimizer)
    begins = {}
    for index, block in enumerate(model.blocks):
        block.norm.register_forward_pre_hook(noting(begins, index))
    with delayed_collectives(0.05), Ledger() as ledger:
        model(torch.randn(4, 8))
    gathers = [record for record in ledger.records if record.op == "all_gather_into"]
    assert len(gathers) == DEPTH + 1
    of_second_block = gathers[2]
    assert (of_second_block.issued < begins[0]) is overlap


@pytest.mark.ranks(2, backend="gloo")  # on a GPU streams wait: tests/test_order.py
@pytest.mark.parametrize("overlap", [True, False])
def test_in_backward_the_unit_before_is_on_its_way_while_one_computes(overlap, ranks):
    model, optimizer = build(3, 2, overlap_param_gather=overlap)
    step(model, optimizer)
    begins = {}
    for index, block in enumerate(model.blocks):
        block.norm.register_full_backward_pre_hook(noting(begins, index))
    loss = model(torch.randn(4, 8)).square().mean()
    with delayed_collectives(0.05), Ledger() as ledger:
        loss.backward()
    gathers = [record for record in ledger.records if record.communicator == "dp:gather"]
    assert len(gathers) == DEPTH - 1, "the last block and the root were kept"
    of_middle, of_first = gathers
    assert (of_middle.issued < begins[2]) is overlap
    assert (of_first.issued < begins[1]) is overlap


@pytest.mark.matrix(strength=1)
@pytest.mark.ranks(2, 4)
@STRATEGIES
def test_bytes_on_the_wire_are_a_formula(strategy, ranks):
    world = ranks.world_size
    model, optimizer = build(strategy, world)
    step(model, optimizer)
    with Ledger() as ledger:
        step(model, optimizer)
    total, root_and_last = sum(sizes(model)), sizes(model)[0] + sizes(model)[-1]
    share = 4 * (world - 1) // world  # bytes per element: all but a rank's own piece
    assert share * world == 4 * (world - 1)
    # forward gathers every unit; backward those that forward released
    gathered = {0: 0, 1: total, 2: total, 3: total + (total - root_and_last)}[strategy]
    assert ledger.bytes(op="all_gather_into") >= share * gathered
    flags = ledger.bytes(op="all_gather_into") - share * gathered
    assert flags <= 64 * (world - 1) * 4, "more than the flags of used parameters"
    if strategy == 0:
        assert ledger.bytes(op="all_reduce_fp32") == 2 * share * total
    else:
        assert ledger.bytes(op="reduce_scatter_fp32") == share * total


@pytest.mark.ranks(2)
@STRATEGIES
def test_a_gradient_is_copied_once_and_a_weight_never(strategy, ranks):
    model, optimizer = build(strategy, 2)
    step(model, optimizer)
    if memory_plan(model).windows:
        pytest.skip("GPUs of one host copy each slice into a window first")
    loss_input = torch.randn(4, 8)
    with Meter(min_numel=1024) as meter:
        loss = model(loss_input).square().mean()
        assert meter.bytes_copied <= 4 * sum(sizes(model)) // 2  # a gather's own piece
        before = meter.bytes_copied
        loss.backward()
    parameters = 4 * sum(
        spec.numel for g in model.parameter_groups() for spec in g.layout.specs if spec.numel > 1023
    )
    own_pieces = 4 * sum(sizes(model)) // 2 if strategy == 3 else 0
    assert meter.bytes_copied - before <= parameters + own_pieces


@pytest.mark.matrix(strength=1)
@pytest.mark.ranks(2, 4)
@STRATEGIES
def test_bytes_at_rest_are_what_the_plan_says(strategy, ranks):
    before = bytes_at_rest() - kept_bytes()
    model, optimizer = build(strategy, ranks.world_size)
    step(model, optimizer)
    plan = memory_plan(model)
    # What collectives keep is not the model's: buffers of sums, and windows of GPUs.
    held, states = bytes_at_rest() - kept_bytes() - before, plan.resident - plan.windows
    assert abs(held - states) <= 4096, f"{held - states} bytes more than planned:\n{plan}"
