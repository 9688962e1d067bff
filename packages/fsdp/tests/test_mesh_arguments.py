"""Which ranks `fully_shard` takes for copies: those its arguments name, and nobody else."""

import pytest
import torch
from torch import nn
from torch.distributed.device_mesh import init_device_mesh

from lamina.ddp import full_gradients, full_parameters
from lamina.fsdp import (
    TorchFullyShardedDataParallel,
    TorchFullyShardedDataParallelConfig,
    fully_shard,
    shard_module,
)
from lamina.mesh import ParallelLayout, mark
from lamina.models import GPTModel, MoEConfig, TransformerConfig
from lamina_testing import device_type


def build(rank=0, **role):
    torch.manual_seed(rank)
    model = nn.Linear(3, 2, bias=False)
    if role:
        mark(model.weight, **role)
    return model


def mesh_of(*names, shape=None):
    return init_device_mesh(device_type(), shape or (1, 2)[-len(names) :], mesh_dim_names=names)


@pytest.mark.ranks(2)
def test_dimensions_that_nobody_would_sum_over_are_refused_by_name(ranks):
    fsdp2 = TorchFullyShardedDataParallelConfig()
    for mesh, settings, says in (
        (mesh_of("tp"), {}, "2 ranks along 'tp' hold different parts"),
        (mesh_of("dp", "tp"), {"dp_shard_dim": ("dp", "tp")}, "2 ranks along 'tp' hold different"),
        (mesh_of("dp", "cp"), {"dp_shard_dim": "dp"}, "2 ranks along 'cp', which is no data-par"),
        (mesh_of("dp", "ep"), {"dp_shard_dim": "dp"}, "2 ranks along 'ep', which is no data-par"),
        (mesh_of("dp"), {"dp_shard_dim": "dp", "dp_outer_dim": "dp"}, "would be counted twice"),
    ):
        with pytest.raises(ValueError, match=says):
            fully_shard(build(), device_mesh=mesh, **settings)
    with pytest.raises(ValueError, match="2 ranks along 'tp' hold different parts"):
        shard_module(build(), mesh_of("dp", "tp"))
    for part in ("tp", "pp", "ep"):
        with pytest.raises(ValueError, match=f"2 ranks along '{part}' hold different parts"):
            TorchFullyShardedDataParallel(build(), fsdp2, mesh_of("dp", part))
    # What is named, or of one rank, is fine; so is one dimension of any name.
    fully_shard(build(), device_mesh=mesh_of("dp", "cp", shape=(2, 1)), dp_shard_dim="dp")
    fully_shard(build(), device_mesh=mesh_of("dp", "model"), dp_shard_dim="dp", tp_dim="model")
    for names, settings in (
        (("dp_replicate",), {}),
        (("dp", "cp"), {"dp_shard_dim": ("dp", "cp")}),
        (("dp", "cp"), {"dp_shard_dim": "dp", "dp_outer_dim": "cp"}),
    ):
        model = fully_shard(build(ranks.rank), device_mesh=mesh_of(*names), **settings)
        model(torch.full((1, 3), 1.0 + ranks.rank)).sum().backward()
        assert torch.equal(full_gradients(model)["weight"], torch.full((2, 3), 1.5)), names


@pytest.mark.ranks(2)
def test_different_experts_are_not_taken_for_copies(ranks):
    mesh = mesh_of("dp", "ep")
    mine = build(ranks.rank).weight
    with pytest.raises(ValueError, match=r"weight is an expert's.*along 'ep'.*expt_device_mesh="):
        fully_shard(build(expert=True), device_mesh=mesh, dp_shard_dim=("dp", "ep"))
    with pytest.raises(ValueError, match=r"weight is an expert's.*along 'ep'"):
        shard_module(build(expert=True), mesh)
    for one, shard in ((mesh, ("dp", "ep")), (mesh_of("ep"), "ep")):
        model = build(ranks.rank, expert=True)
        model = fully_shard(model, device_mesh=one, dp_shard_dim=shard, expt_device_mesh=one)
        assert torch.equal(full_parameters(model)["weight"], mine), "another rank's expert"
        model(torch.ones(1, 3)).sum().backward()
        assert torch.equal(full_gradients(model)["weight"], torch.full((2, 3), 0.5))  # by D = 2


@pytest.mark.ranks(2)
def test_experts_that_tp_has_cut_need_an_axis_of_their_own(ranks):
    moe = MoEConfig(num_experts=2, top_k=2)
    config = TransformerConfig(vocab_size=16, hidden_size=8, num_layers=1, num_heads=2, moe=moe)
    mesh = ParallelLayout(tp=2).build(device_type())
    for wrap in (
        lambda model: fully_shard(model, device_mesh=mesh),
        lambda m: shard_module(m, mesh),
    ):
        with pytest.raises(ValueError, match=r"experts\..*ParallelLayout\(expert_tp=2\)"):
            wrap(GPTModel(config, mesh["tp"]))
    model = GPTModel(config, mesh["tp"])
    before = {name: p.detach().clone() for name, p in model.named_parameters() if "expert" in name}
    model = fully_shard(model, device_mesh=ParallelLayout(tp=2, expert_tp=2).build(device_type()))
    after = full_parameters(model)
    assert before
    assert all(torch.equal(after[name], value) for name, value in before.items())
