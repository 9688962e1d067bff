"""What pipeline schedules ask of gradients: late ones, copies of a tied parameter on one rank."""

import pytest
import torch
from torch import nn

from lamina.ddp import (
    DistributedDataParallel,
    DistributedDataParallelConfig,
    clip_grad_norm,
    finalize_grads,
    finalize_plain_grads,
    full_gradients,
)
from lamina.mesh import ParallelLayout, mark


def config(**settings):
    return DistributedDataParallelConfig(overlap_grad_reduce=True, **settings)


class LateLinear(nn.Linear):
    """Its backward leaves out the weight's gradient, as that of a split backward does."""

    def forward(self, x):
        return nn.functional.linear(x, self.weight.detach())


@pytest.mark.ranks(2)
@pytest.mark.parametrize("sharded", [False, True])
def test_gradients_that_come_after_their_backward_are_summed_like_others(sharded, ranks):
    mesh = ParallelLayout().build("cpu")
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
    mesh = ParallelLayout(pp=2).build("cpu")
    stages = [nn.Linear(3, 2, bias=False) for _ in range(2)]
    if ranks.rank == 0:
        for stage in stages:
            mark(stage.weight, tied="embedding")
    modules = [DistributedDataParallel(s, config(), mesh) for s in stages] if wrapped else stages
    for scale, module in enumerate(modules, start=1):
        module(torch.full((1, 3), float(scale))).sum().backward()
    (finalize_grads if wrapped else finalize_plain_grads)(modules, mesh)
    for scale, stage in enumerate(stages, start=1):
        wanted = 3.0 if ranks.rank == 0 else float(scale)
        assert torch.equal(stage.weight.grad, torch.full((2, 3), wanted))
    norm = clip_grad_norm(modules, float("inf"), mesh)
    torch.testing.assert_close(norm, torch.tensor((6 * 9 + 6 * 1 + 6 * 4.0) ** 0.5))


@pytest.mark.ranks(2)
def test_plain_gradients_are_refused_where_nobody_sums_them(ranks):
    mesh = ParallelLayout(dp_shard=2).build("cpu")
    with pytest.raises(ValueError, match="2 data-parallel ranks"):
        finalize_plain_grads(nn.Linear(2, 2), mesh)


@pytest.mark.ranks(4)
def test_plain_gradients_follow_roles_over_tp_and_stages(ranks):
    mesh = ParallelLayout(pp=2, tp=2).build("cpu")
    layer = nn.Linear(2, 2)
    mark(layer.weight, tied="embedding", tp_shard_dim=0)
    mark(layer.bias, tp_grad="sum")
    value = 10.0**ranks.rank
    layer.weight.grad = torch.full((2, 2), value)
    if mesh.coordinate["tp"] == 0:
        layer.bias.grad = torch.full((2,), value)
    finalize_plain_grads(layer, mesh)
    tp, pp = mesh.coordinate["tp"], mesh.coordinate["pp"]
    assert torch.equal(layer.weight.grad, torch.full((2, 2), [101.0, 1010.0][tp]))
    assert torch.equal(layer.bias.grad, torch.full((2,), [1.0, 100.0][pp]))
