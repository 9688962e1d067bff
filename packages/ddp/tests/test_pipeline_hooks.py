"""What pipeline schedules ask of gradients: late ones, copies of a tied parameter on one rank."""

import pytest
import torch
from torch import nn
from torch.distributed.device_mesh import init_device_mesh

from lamina.ddp import (
    DistributedDataParallel,
    DistributedDataParallelConfig,
    clip_grad_norm,
    finalize_grads,
    full_gradients,
)
from lamina.ddp.engine import finalize_plain_gradients
from lamina.mesh import ParallelLayout, mark
from lamina_testing import device_type


def config(**settings):
    return DistributedDataParallelConfig(overlap_grad_reduce=True, **settings)


class LateLinear(nn.Linear):
    """Its backward leaves out the weight's gradient, as that of a split backward does."""

    def forward(self, x):
        return nn.functional.linear(x, self.weight.detach())


@pytest.mark.ranks(2)
@pytest.mark.parametrize("sharded", [False, True])
def test_gradients_that_come_after_their_backward_are_summed_like_others(sharded, ranks):
    mesh = ParallelLayout().build(device_type())
    torch.manual_seed(0)
    layer, plain = LateLinear(4, 3, bias=False), nn.Linear(4, 3, bias=False)
    plain.load_state_dict(layer.state_dict())
    model = DistributedDataParallel(layer, config(use_distributed_optimizer=sharded), mesh)
    batches = torch.randn(2, 3, 5, 4)  # rank, microbatch, row, column
    for _ in range(2):  # the second step finds nothing of the first
        model.zero_grad_buffer()
        for x in batches[ranks.rank]:
            with model.no_sync():
                out = model(x.requires_grad_())
                out.square().mean().backward()
            with model.late_gradients():
                torch.autograd.backward(layer.weight, (2 * out.detach() / out.numel()).t() @ x)
        model.start_grad_sync()
        model.finish_grad_sync()
    for x in batches.flatten(0, 1):
        (plain(x).square().mean() / 2).backward()
    torch.testing.assert_close(full_gradients(model)["weight"], plain.weight.grad)


@pytest.mark.ranks(2)
@pytest.mark.parametrize("wrapped", [False, True])
def test_copies_of_a_tied_parameter_on_one_rank_are_summed_and_counted_once(wrapped, ranks):
    mesh = ParallelLayout(pp=2).build(device_type())
    stages = [nn.Linear(3, 2, bias=False) for _ in range(2)]
    if ranks.rank == 0:
        for stage in stages:
            mark(stage.weight, tied="embedding")
    modules = [DistributedDataParallel(s, config(), mesh) for s in stages] if wrapped else stages
    for scale, module in enumerate(modules, start=1):
        module(torch.full((1, 3), float(scale))).sum().backward()
    (finalize_grads if wrapped else finalize_plain_gradients)(modules, mesh)
    for scale, stage in enumerate(stages, start=1):
        wanted = 3.0 if ranks.rank == 0 else float(scale)
        assert torch.equal(stage.weight.grad, torch.full((2, 3), wanted))
    if ranks.rank == 0:
        with pytest.raises(RuntimeError, match="again"):
            (finalize_grads if wrapped else finalize_plain_gradients)(modules, mesh)
    norm = clip_grad_norm(modules, float("inf"), mesh)
    torch.testing.assert_close(norm, torch.tensor((6 * 9 + 6 * 1 + 6 * 4.0) ** 0.5))


class Copies(nn.Module):
    """Two copies of one parameter in one module, and one whose copy is on the other stage."""

    def __init__(self, stage):
        super().__init__()
        self.first = mark(nn.Parameter(torch.ones(7, 3)), tied=f"in {stage}")
        self.body = nn.Parameter(torch.ones(5))
        self.second = mark(nn.Parameter(torch.ones(7, 3)), tied=f"in {stage}")
        self.across = mark(nn.Parameter(torch.ones(3)), tied="across")

    def forward(self, factor):
        weighted = self.first.sum() + 2 * self.second.sum() + self.body.sum()
        return factor * (weighted + self.across.sum())


@pytest.mark.ranks(4)
@pytest.mark.parametrize("sharded", [False, True])
@pytest.mark.parametrize("device_mesh", [False, True])
def test_ties_are_summed_here_and_across_stages_in_one_module(device_mesh, sharded, ranks):
    mesh = ParallelLayout(pp=2).build(device_type())
    given = mesh
    if device_mesh:
        given = init_device_mesh(
            device_type(), (2, ranks.world_size // 2), mesh_dim_names=("pp", "dp")
        )
    stage = mesh.coordinate["pp"]
    model = Copies(stage)
    model = DistributedDataParallel(model, config(use_distributed_optimizer=sharded), given)
    model(10.0**stage).backward()
    finalize_grads(model, given)
    found = full_gradients(model)
    wanted = {"first": 3.0 * 10**stage, "second": 3.0 * 10**stage, "body": 1.0 * 10**stage}
    for name, value in {**wanted, "across": 11.0}.items():
        assert torch.equal(found[name], torch.full_like(found[name], value)), name
    squares = 21 * 9 * 101 + 5 * 101 + 3 * 121  # each once
    norm = clip_grad_norm(model, float("inf"), given)
    torch.testing.assert_close(norm, torch.tensor(float(squares)).sqrt())


@pytest.mark.ranks(4)
def test_ties_that_nobody_would_sum_are_refused_where_they_are(ranks):
    mesh = ParallelLayout(pp=4).build(device_type())
    layer = mark(nn.Linear(2, 2, bias=False).weight, tied="embedding")
    holder = nn.Module()
    holder.weight = layer
    if ranks.rank in (0, 3):
        finalize_plain_gradients(holder, mesh)
    else:
        with pytest.raises(ValueError, match=r"stage \d of 4 holds a parameter marked tied="):
            finalize_plain_gradients(holder, mesh)
    name = {0: "one", 3: "other"}.get(ranks.rank)
    if name is not None:
        holder.weight = mark(nn.Parameter(torch.ones(2)), tied=name)
        with pytest.raises(ValueError, match="at the other end of the pipeline others"):
            finalize_plain_gradients(holder, mesh)
        holder = holder if name == "one" else nn.Module()  # or nothing at all
        with pytest.raises(ValueError, match="at the other end of the pipeline others"):
            finalize_plain_gradients(holder, mesh)


@pytest.mark.ranks(2)
@pytest.mark.parametrize("wrapped", [False, True])
def test_experts_are_combined_over_their_own_tensor_axis(wrapped, ranks):
    # Each rank has an expert of its own, whole.
    mesh = ParallelLayout(tp=2, ep=2).build(device_type())
    module = nn.Module()
    module.expert = mark(nn.Parameter(torch.ones(3)), expert=True, tp_grad="sum")
    module.dense = mark(nn.Parameter(torch.ones(3)), tp_grad="sum")
    module.forward = lambda x: (module.expert + module.dense).sum() * x
    model = DistributedDataParallel(module, config(), mesh) if wrapped else module
    model(10.0**ranks.rank).backward()
    (finalize_grads if wrapped else finalize_plain_gradients)(model, mesh)
    assert torch.equal(module.expert.grad, torch.full((3,), 10.0**ranks.rank))
    assert torch.equal(module.dense.grad, torch.full((3,), 11.0))


@pytest.mark.ranks(2)
def test_plain_gradients_are_refused_where_nobody_sums_them(ranks):
    mesh = ParallelLayout(dp_shard=2).build(device_type())
    with pytest.raises(ValueError, match="2 data-parallel ranks"):
        finalize_plain_gradients(nn.Linear(2, 2), mesh)


@pytest.mark.ranks(4)
def test_plain_gradients_follow_roles_over_tp_and_stages(ranks):
    mesh = ParallelLayout(pp=2, tp=2).build(device_type())
    layer = nn.Linear(2, 2)
    mark(layer.weight, tied="embedding", tp_shard_dim=0)
    mark(layer.bias, tp_grad="sum")
    value = 10.0**ranks.rank
    layer.weight.grad = torch.full((2, 2), value)
    if mesh.coordinate["tp"] == 0:
        layer.bias.grad = torch.full((2,), value)
    finalize_plain_gradients(layer, mesh)
    tp, pp = mesh.coordinate["tp"], mesh.coordinate["pp"]
    assert torch.equal(layer.weight.grad, torch.full((2, 2), [101.0, 1010.0][tp]))
    assert torch.equal(layer.bias.grad, torch.full((2,), [1.0, 100.0][pp]))


@pytest.mark.ranks(1)
def test_a_lone_copy_of_a_tied_parameter_is_summed_with_nothing_and_may_be_finalized_again():
    mesh, layer = ParallelLayout().build(device_type()), nn.Linear(2, 2, bias=False)
    mark(layer.weight, tied="embedding")
    for backwards in (1.0, 2.0):
        layer(torch.ones(1, 2)).sum().backward()
        finalize_plain_gradients(layer, mesh)
        assert torch.equal(layer.weight.grad, torch.full((2, 2), backwards))
