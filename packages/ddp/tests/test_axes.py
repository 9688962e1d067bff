"""Which ranks a wrapper takes for copies: those the mesh names, and nobody else."""

import pytest
import torch
from torch import nn
from torch.distributed.device_mesh import init_device_mesh

from lamina.ddp import (
    DistributedDataParallel,
    DistributedDataParallelConfig,
    clip_grad_norm,
    full_gradients,
)
from lamina.ddp.engine import data_parallel_axes
from lamina.mesh import ParallelLayout, mark
from lamina_testing import device_type


def build(rank=0):
    torch.manual_seed(rank)
    return nn.Linear(3, 2, bias=False)


def wrap(model, mesh, **config):
    return DistributedDataParallel(model, DistributedDataParallelConfig(**config), mesh)


@pytest.mark.ranks(2)
def test_ranks_that_only_replicate_are_averaged_once(ranks):
    for names, shape in ((("dp_replicate",), (2,)), (("dp_replicate", "tp"), (2, 1))):
        mesh = init_device_mesh(device_type(), shape, mesh_dim_names=names)
        for strategy in (0, 1, 2):
            settings = {"zero_dp_strategy": strategy, "use_distributed_optimizer": strategy > 0}
            model = wrap(build(ranks.rank), mesh, **settings)
            assert torch.equal(model.module.weight, build().weight), "not the first rank's values"
            model(torch.full((1, 3), 1.0 + ranks.rank)).sum().backward()
            found = full_gradients(model)["weight"]
            assert torch.equal(found, torch.full((2, 3), 1.5)), (names, strategy)
    mesh = init_device_mesh(device_type(), (2,), mesh_dim_names=("dp_replicate",))
    settings = {"use_distributed_optimizer": True, "num_distributed_optimizer_instances": 2}
    assert wrap(build(), mesh, **settings).config.num_distributed_optimizer_instances == 2
    with pytest.raises(ValueError, match="'dp_replicate' replicates, and both have ranks"):
        data_parallel_axes(mesh, "dp_replicate", "dp_replicate")


@pytest.mark.ranks(2)
def test_dimensions_that_are_not_data_parallel_are_refused_by_name(ranks):
    for names, says in (
        (("tp",), "2 ranks along 'tp' hold different parts"),
        (("pp",), "2 ranks along 'pp' hold different parts"),
        (("ep",), r"ParallelLayout\(ep=2"),
        (("dp", "ep"), r"ParallelLayout\(ep=2"),
        (("dp", "cp"), "2 ranks along 'cp', which is no data-parallel"),
        (("dp_shard", "dp"), "2 ranks along 'dp', which"),
        (("dp_replicate", "model"), r"2 ranks along 'model'.*mesh\['dp_replicate'\]"),
        (("rows", "columns"), "name the data-parallel one"),
    ):
        mesh = init_device_mesh(device_type(), (1, 2)[-len(names) :], mesh_dim_names=names)
        with pytest.raises(ValueError, match=says):
            wrap(build(), mesh)
    # What is named, or of one rank, is fine; so is a part of the mesh.
    mesh = init_device_mesh(device_type(), (2, 1), mesh_dim_names=("dp", "cp"))
    wrap(build(), mesh)
    mesh = init_device_mesh(device_type(), (1, 2), mesh_dim_names=("dp", "model"))
    assert torch.equal(wrap(build(ranks.rank), mesh["dp"]).module.weight, build(ranks.rank).weight)


@pytest.mark.ranks(2)
def test_experts_cut_over_tp_are_not_taken_for_copies(ranks):
    model = build(ranks.rank)
    mark(model.weight, expert=True, tp_shard_dim=0)
    with pytest.raises(ValueError, match=r"weight is an expert's.*ParallelLayout\(expert_tp=2\)"):
        wrap(model, ParallelLayout(tp=2).build(device_type()))
    wrap(model, ParallelLayout(tp=2, expert_tp=2).build(device_type()))
    assert torch.equal(model.weight, build(ranks.rank).weight)
    whole = build(ranks.rank)
    mark(whole.weight, expert=True)
    wrap(whole, ParallelLayout(tp=2).build(device_type()))
    assert torch.equal(whole.weight, build().weight)


@pytest.mark.ranks(2)
@pytest.mark.parametrize("axis", ["tp", "ep", "pp"])
def test_clipping_without_the_mesh_refuses_parts_of_a_model(axis, ranks):
    layout = {"dp_shard": 2 if axis == "ep" else 1, axis: 2}
    mesh = ParallelLayout(**layout).build(device_type())
    role = {"tp": {"tp_shard_dim": 0}, "ep": {"expert": True}, "pp": {"tied": "one"}}[axis]
    says = {"tp": "cut over tp", "ep": "is an expert's", "pp": "the mesh has pp ranks"}[axis]
    model = build(ranks.rank)
    mark(model.weight, **role)
    wrapped = wrap(model, mesh)
    wrapped(torch.ones(1, 3)).sum().backward()
    before = full_gradients(wrapped)["weight"]
    with pytest.raises(ValueError, match=says + r".*pass mesh="):
        clip_grad_norm(wrapped, 0.1)
    with pytest.raises(ValueError, match=r"parameter 0 of shape \(2, 3\).*pass mesh="):
        clip_grad_norm(wrapped.parameters(), 0.1)
    assert torch.equal(full_gradients(wrapped)["weight"], before)
    clip_grad_norm(wrapped, 0.1, mesh)
