"""Layers that write their weight gradient into the bucket themselves."""

import gc
import pickle
import time
import weakref

import pytest
import torch
from torch import nn

from lamina.ddp import (
    DistributedDataParallel,
    DistributedDataParallelConfig,
    ShardedOptimizer,
    full_gradients,
    full_parameters,
)
from lamina.ddp.engine import gradient_sink
from lamina.mesh import ParallelLayout
from lamina_testing import Meter, device_type, live_bytes

USED = []


class SinkingLinear(torch.autograd.Function):
    @staticmethod
    def forward(ctx, x, weight):
        ctx.save_for_backward(x)
        ctx.weight = weight
        return x @ weight.t()

    @staticmethod
    def backward(ctx, grad):
        (x,) = ctx.saved_tensors
        sink = gradient_sink(ctx.weight)
        USED.append(sink is not None)
        if sink is None:
            return grad @ ctx.weight, grad.t() @ x
        if sink.accumulate:
            torch.addmm(sink.view, grad.t(), x, out=sink.view)
        else:
            torch.mm(grad.t(), x, out=sink.view)
        sink.written()
        return grad @ ctx.weight, None


class Net(nn.Module):
    """A plain layer, a sinking one, one used twice, one tied to a plain use, one unused."""

    def __init__(self, sinking):
        super().__init__()
        torch.manual_seed(0)
        self.sinking = sinking
        self.plain = nn.Linear(24, 24)
        self.once, self.twice, self.tied, self.unused = (
            nn.Parameter(torch.randn(24, 24) / 5) for _ in range(4)
        )

    def linear(self, x, weight):
        return SinkingLinear.apply(x, weight) if self.sinking else nn.functional.linear(x, weight)

    def forward(self, x):
        x = self.linear(self.plain(x).relu(), self.once)
        x = self.linear(self.linear(x, self.twice).tanh(), self.twice)
        return nn.functional.linear(self.linear(x, self.tied).tanh(), self.tied)


def trained(sinking, sharded, microbatches, ranks, overlap=True):
    mesh = ParallelLayout().build(device_type())
    model = Net(sinking)
    optimizer = torch.optim.SGD(model.parameters(), lr=0.1, momentum=0.9)
    model = DistributedDataParallel(
        model,
        DistributedDataParallelConfig(
            num_buckets=3, use_distributed_optimizer=sharded, overlap_grad_reduce=overlap
        ),
        mesh,
    )
    optimizer = ShardedOptimizer(optimizer, model, mesh)
    gradients = []
    for step in range(3):
        for microbatch in range(microbatches):
            torch.manual_seed(100 * step + 10 * microbatch + ranks.rank)
            x = torch.randn(5, 24)
            if microbatch < microbatches - 1:
                with model.no_sync():
                    model(x).square().mean().backward()
            else:
                model(x).square().mean().backward()
        gradients.append(full_gradients(model))
        optimizer.step()
        optimizer.zero_grad()
    return full_parameters(model), gradients


@pytest.mark.matrix
@pytest.mark.ranks(1, 2)
@pytest.mark.parametrize("sharded", [False, True])
@pytest.mark.parametrize("microbatches", [1, 2])
def test_gradients_and_weights_are_those_of_plain_layers(sharded, microbatches, ranks):
    for overlap in (True, False):
        USED.clear()
        parameters, gradients = trained(True, sharded, microbatches, ranks, overlap)
        assert len(USED) == 4 * 3 * microbatches
        assert all(USED)
        expected, plain = trained(False, sharded, microbatches, ranks, overlap)
        for name, value in expected.items():
            torch.testing.assert_close(parameters[name], value, rtol=1e-6, atol=1e-7)
        for mine, theirs in zip(gradients, plain, strict=True):
            assert mine.keys() == theirs.keys()
            assert "unused" not in {name for name, value in mine.items() if value is not None}
            for name, value in theirs.items():
                if value is not None:
                    torch.testing.assert_close(mine[name], value, rtol=1e-6, atol=1e-7)
        if microbatches == 1:  # written once, nothing added: the same bits
            assert torch.equal(gradients[0]["once"], plain[0]["once"])


@pytest.mark.ranks(2)
def test_a_gradient_written_by_its_layer_is_never_copied(ranks):
    mesh = ParallelLayout().build(device_type())
    copied = {}
    for sinking in (True, False):
        model = Net(sinking)
        model = DistributedDataParallel(
            model, DistributedDataParallelConfig(use_distributed_optimizer=True), mesh
        )
        with Meter(min_numel=576) as meter:
            model(torch.randn(5, 24)).square().mean().backward()
        copied[sinking] = meter.bytes_copied
    # `once` and `twice` (twice over) are copied by nobody; the plain layers' gradients once each.
    assert copied[False] - copied[True] >= 2 * 24 * 24 * 4


class GivingLinear(SinkingLinear):
    @staticmethod
    def backward(ctx, grad):
        (x,) = ctx.saved_tensors
        sink, gradient = gradient_sink(ctx.weight), grad.t() @ x
        if not sink.adopt(gradient):
            sink.view.add_(gradient)
        sink.written()
        return None, None


def settled_bytes():
    """Live bytes; a busy lane's thread lets go of the last message a little later."""

    def look():
        time.sleep(0.02)
        return live_bytes()

    return min(look() for _ in range(10))


@pytest.mark.ranks(2)
def test_a_gradient_that_its_layer_gives_away_is_the_bucket_and_nobody_keeps_it(ranks):
    mesh, found = ParallelLayout().build(device_type()), {}
    for linear in (GivingLinear.apply, nn.functional.linear):
        torch.manual_seed(0)
        model = nn.Linear(48, 32, bias=False)
        model.forward = lambda x, model=model, linear=linear: linear(x, model.weight)
        model = DistributedDataParallel(
            model, DistributedDataParallelConfig(use_distributed_optimizer=True), mesh
        )
        gradients, copied, held = [], [], []
        for step in range(6):
            x = torch.full((4, 48), 0.1 + ranks.rank) + torch.arange(48) * (step + 1)
            with Meter(min_numel=1536) as meter:
                if step % 2:
                    with model.no_sync():
                        model(x).square().sum().backward()
                model(x).square().sum().backward()
            copied.append(meter.bytes_copied)
            gradients.append(full_gradients(model)["weight"])
            model.zero_grad()
            del x, meter
            gc.collect()
            held.append(settled_bytes())
        assert held[5] - held[3] == gradients[0].nbytes * 2  # which this test keeps
        found[linear] = gradients, copied[0]
    (given, few), (plain, many) = found.values()
    assert many - few == 32 * 48 * 4
    assert all(torch.equal(*pair) for pair in zip(given, plain, strict=True))


@pytest.mark.ranks(1)
def test_there_is_no_sink_where_no_wrapper_takes_the_gradient(ranks):
    mesh = ParallelLayout().build(device_type())
    bare = Net(True)
    x = torch.randn(5, 24, requires_grad=True)
    USED.clear()
    bare(x).sum().backward()
    assert not any(USED)
    model = DistributedDataParallel(bare, DistributedDataParallelConfig(), mesh)
    USED.clear()
    (of_input,) = torch.autograd.grad(model(x).sum(), x)
    (of_weight,) = torch.autograd.grad(model(x).sum(), bare.once)
    assert not any(USED)
    assert of_input.abs().sum() > 0
    assert of_weight.abs().sum() > 0
    model.zero_grad_buffer()
    bare.once.requires_grad_(False)
    assert gradient_sink(bare.once) is None


@pytest.mark.ranks(1)
def test_a_sink_neither_keeps_the_model_nor_travels_with_a_pickled_parameter(ranks):
    mesh = ParallelLayout().build(device_type())
    model = DistributedDataParallel(Net(True), DistributedDataParallelConfig(), mesh)
    copy = pickle.loads(pickle.dumps(model.module.once))
    assert gradient_sink(copy) is None
    gone = weakref.ref(model.module.once)
    gc.disable()
    try:
        del model
        assert gone() is None
    finally:
        gc.enable()
