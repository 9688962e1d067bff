"""Ranks that run different units, as with layers that are dropped at random on each rank.

Where weights stay whole they train as one process. Where units are gathered they are refused, and
never trained with weights or gradients of another unit.
"""

from __future__ import annotations

import pytest
import torch
from torch import Tensor
from torch.distributed.device_mesh import init_device_mesh

from lamina.collectives import DisagreementError
from lamina.ddp import full_gradients, full_parameters
from lamina.fsdp import fully_shard, shard_module
from lamina_testing import device_type
from lamina_testing.toys import Block, OddNet, inputs

from .module_parity import build, compare, sgd

STEPS = 4


class Dropping(OddNet):
    """Leaves out the blocks that it is told to."""

    def __init__(self) -> None:
        super().__init__(depth=4)

    def forward(self, x: Tensor, without: tuple[int, ...] = ()) -> Tensor:
        x = self.enter(x)
        for index, block in enumerate(self.blocks):
            x = x if index in without else block(x)
        return self.leave(x) * self.temperature


def dropped(rank: int, step: int) -> tuple[int, ...]:
    """Each rank leaves out as many blocks as the others, and no two the same."""
    return ((rank + step) % 4, (rank + step + 2) % 4) if step % 2 else ((rank + step) % 4,)


def loss_of(model, rank: int, step: int) -> Tensor:
    return model(inputs(model, 10 * step + rank), dropped(rank, step)).square().mean()


def one_process(ranks: int) -> tuple[torch.nn.Module, dict[str, Tensor]]:
    """The model after all steps, and the gradients of the last one."""
    model = build(Dropping)
    optimizer = sgd(model)
    for step in range(STEPS):
        optimizer.zero_grad()
        for rank in range(ranks):
            (loss_of(model, rank, step) / ranks).backward()
        optimizer.step()
    return model, {name: p.grad for name, p in model.named_parameters() if p.grad is not None}


@pytest.mark.ranks(2, 4)
@pytest.mark.parametrize("ahead", ["the next", "none", "chosen"])
@pytest.mark.parametrize("strategy", [0, 1, 2])
def test_whole_weights_train_as_one_process_whatever_units_each_rank_runs(strategy, ahead, ranks):
    model = build(Dropping)
    mesh = init_device_mesh(device_type(), (ranks.world_size,), mesh_dim_names=("dp",))
    model, optimizer = fully_shard(
        model,
        sgd(model),
        device_mesh=mesh,
        fsdp_unit_modules=[Block],
        zero_dp_strategy=strategy,
        overlap_param_gather=ahead != "none",
    )
    if ahead == "chosen":  # one that comes later, one that came before, and none at all
        first, second, third, _ = model.blocks
        model.set_modules_to_forward_prefetch([third])
        model.unit_of(second).set_prefetch(1, [])
        model.unit_of(third).set_prefetch(1, [model.unit_of(first)])
    for step in range(STEPS):
        optimizer.zero_grad()
        loss_of(model, ranks.rank, step).backward()
        gradients = full_gradients(model)
        optimizer.step()
        with torch.no_grad():  # gathers what the step has written, in an order of its own
            loss_of(model, ranks.rank + 1, step)
    reference, expected = one_process(ranks.world_size)
    compare(model, reference)
    for name, value in expected.items():
        torch.testing.assert_close(gradients[name], value, rtol=0, atol=3e-6, msg=name)


@pytest.mark.ranks(2)
@pytest.mark.parametrize("frozen", [False, True])
@pytest.mark.parametrize("way", ["fully_shard", "slots", "shard_module"])
def test_collectives_that_do_not_pair_are_refused_before_a_step(way, frozen, ranks):
    """Gradients of one block would be added to another's; frozen blocks have gathers alone."""
    model = build(Dropping)
    model.blocks.requires_grad_(not frozen)
    mesh = init_device_mesh(device_type(), (2,), mesh_dim_names=("dp",))
    if way == "shard_module":
        for block in model.blocks:
            shard_module(block, mesh=mesh)
        model = shard_module(model, mesh=mesh)
    else:
        slots = {"fsdp_double_buffer": way == "slots"}
        model = fully_shard(
            model, device_mesh=mesh, fsdp_unit_modules=[Block], zero_dp_strategy=3, **slots
        )
    optimizer = torch.optim.SGD([p for p in model.parameters() if p.requires_grad], lr=0.1)
    for without in ((), (1,), (3,)):  # on all ranks: allowed
        model(inputs(model, ranks.rank), without).sum().backward()
        optimizer.step()
        optimizer.zero_grad()
    before = full_parameters(model)

    def two_backwards():  # what was gathered ahead for the first hides the difference from it
        for _ in range(2):
            model(inputs(model, ranks.rank), (1 + ranks.rank,)).sum().backward()

    order = r"the unit of gather \d+ since the last step is blocks\.\d on"
    if not frozen:
        order += r"|the order in which gradients were summed is .*blocks\.\d"
    with pytest.raises(DisagreementError, match=f"on all ranks or on none.*({order})"):
        two_backwards()
    for name, value in full_parameters(model).items():
        assert torch.equal(value, before[name]), name


@pytest.mark.ranks(4)
def test_replicas_that_run_different_units_are_refused_before_a_step(ranks):
    """Each replica gathers alone and right, and all of them add gradients in the order of units."""
    two = init_device_mesh(device_type(), (2, 2), mesh_dim_names=("outer", "inner"))
    mesh = {"device_mesh": two, "dp_shard_dim": "inner", "dp_outer_dim": "outer"}
    model = fully_shard(build(Dropping), fsdp_unit_modules=[Block], zero_dp_strategy=3, **mesh)
    replica = ranks.rank // 2
    model(inputs(model, ranks.rank)).sum().backward()
    with torch.no_grad():
        model(inputs(model, ranks.rank), (replica,))  # an evaluation may differ between replicas
    model(inputs(model, ranks.rank)).sum().backward()
    with pytest.raises(DisagreementError, match="the order in which gradients were summed is"):
        model(inputs(model, ranks.rank), (1 + replica,)).sum().backward()
