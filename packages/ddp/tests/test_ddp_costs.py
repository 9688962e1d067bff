"""What a step of DistributedDataParallel costs: overlap by structure, copies, wire, memory."""

import gc
import time
from itertools import product

import pytest
import torch
from torch import nn

from lamina.collectives import Ledger
from lamina.collectives.engine import kept_bytes, use_messages
from lamina.ddp import (
    DistributedDataParallel,
    DistributedDataParallelConfig,
    ShardedOptimizer,
    memory_plan,
)
from lamina.mesh import ParallelLayout
from lamina_testing import Meter, delayed_collectives, device_type

WIDTH, DEPTH = 64, 6


class Stack(nn.Module):
    """Layers of one parameter each, so that a bucket of one element is a layer."""

    def __init__(self):
        super().__init__()
        self.layers = nn.ModuleList(nn.Linear(WIDTH, WIDTH, bias=False) for _ in range(DEPTH))

    def forward(self, x):
        for layer in self.layers:
            x = layer(x).tanh()
        return x


def build(strategy, dtype=torch.float32, replicate=1, **config):
    torch.manual_seed(0)
    model = Stack().to(dtype)
    mesh = ParallelLayout(dp_replicate=replicate).build(device_type())
    # GPUs of a host read each other's memory; messages are measured. Groups that another test has
    # used may read already, so such ranks have processes of their own.
    if device_type() == "cuda":
        for name, purpose in product(("dp_shard_cp", "dp_replicate"), ("gather", "reduce")):
            use_messages(mesh.axis(name).sibling(purpose))
    optimizer = torch.optim.SGD(model.parameters(), lr=0.1)
    config = {"bucket_size": 1, "overlap_grad_reduce": True, **config}
    wrapped = DistributedDataParallel(
        model,
        DistributedDataParallelConfig(
            use_distributed_optimizer=strategy > 0, zero_dp_strategy=strategy, **config
        ),
        mesh,
    )
    return wrapped, ShardedOptimizer(optimizer, wrapped, mesh)


def backward(model, dtype=torch.float32):
    model(torch.randn(4, WIDTH, dtype=dtype)).float().square().mean().backward()


def step(model, optimizer, dtype=torch.float32, microbatches=1):
    for _ in range(microbatches - 1):
        with model.no_sync():
            backward(model, dtype)
    backward(model, dtype)
    optimizer.step()
    optimizer.zero_grad()


def noting(times, key):
    """A hook that notes when it first ran."""

    def hook(*_):
        times.setdefault(key, time.perf_counter())

    return hook


@pytest.mark.matrix(few=2)
@pytest.mark.ranks(2, backend="gloo")  # on a GPU streams wait: tests/test_order.py
@pytest.mark.parametrize(("strategy", "overlap"), [(0, True), (1, True), (2, True), (1, False)])
def test_a_bucket_is_reduced_while_the_layer_before_it_computes(strategy, overlap, ranks):
    """From the first iteration on."""
    model, _ = build(strategy, overlap_grad_reduce=overlap)
    times = {}
    for index, layer in enumerate(model.module.layers):
        layer.register_full_backward_pre_hook(noting(times, ("begin", index)))
        layer.register_full_backward_hook(noting(times, ("end", index)))
    loss = model(torch.randn(4, WIDTH).requires_grad_()).square().mean()
    with delayed_collectives(0.2 if overlap else 0.05), Ledger() as ledger:
        loss.backward()
    op = "all_reduce_fp32" if strategy == 0 else "reduce_scatter_fp32"
    reductions = [record for record in ledger.records if record.op == op]
    assert len(reductions) == DEPTH
    for place in (0, 1):  # the bucket of layer 5 under the backward of layer 4, and so on
        layer_before = DEPTH - 2 - place
        hidden = reductions[place].issued < times["end", layer_before]
        assert hidden is overlap
        if overlap:
            assert reductions[place].finished > times["begin", layer_before]
    assert (reductions[0].finished > reductions[1].issued) is overlap


@pytest.mark.ranks(2, backend="gloo")  # on a GPU streams wait: tests/test_order.py
@pytest.mark.parametrize(
    ("overlap", "align", "before"), [(True, False, 4), (True, True, DEPTH), (False, False, 0)]
)
def test_weights_are_on_their_way_while_layers_compute(overlap, align, before, ranks):
    model, optimizer = build(1, overlap_param_gather=overlap, align_param_gather=align)
    step(model, optimizer)
    begins = {}
    for index, layer in enumerate(model.module.layers):
        layer.register_forward_pre_hook(noting(begins, index))
    with Ledger() as ledger:
        model(torch.randn(4, WIDTH))
    gathers = [record for record in ledger.records if record.op == "all_gather_into"]
    assert len(gathers) == (DEPTH if overlap else 0)
    assert sum(record.issued < begins[0] for record in gathers) == before
    if overlap and not align:  # each layer that is needed lets one more go
        assert all(gathers[4 + index].issued < begins[1 + index] for index in range(DEPTH - 4))


@pytest.mark.ranks(2, reuse=False)
@pytest.mark.parametrize(
    ("strategy", "dtype"),
    [
        (0, torch.float32),
        (0, torch.bfloat16),
        (1, torch.float32),
        (1, torch.bfloat16),
        (2, torch.bfloat16),
    ],
)
def test_a_gradient_is_copied_once_and_bytes_on_the_wire_are_a_formula(strategy, dtype, ranks):
    """In bf16 too: into the buffer that is sent, and not into an fp32 one before it."""
    model, optimizer = build(strategy, dtype)
    step(model, optimizer, dtype)
    loss = model(torch.randn(4, WIDTH, dtype=dtype)).float().square().mean()
    with Meter(min_numel=1024) as meter, Ledger() as ledger:
        loss.backward()
    assert meter.bytes_copied <= DEPTH * WIDTH * WIDTH * dtype.itemsize
    half = dtype.itemsize * sum(group.layout.size for group in model.parameter_groups()) // 2
    if strategy == 0:  # half of the gradients out, and half of the sums, which are fp32
        assert ledger.bytes(op="all_reduce_fp32") == half + half // dtype.itemsize * 4
    else:
        assert ledger.bytes(op="reduce_scatter_fp32") == half


@pytest.mark.matrix
@pytest.mark.ranks(2, reuse=False)
@pytest.mark.parametrize("dtype", [torch.float32, torch.bfloat16])
@pytest.mark.parametrize("overlap", [True, False])
@pytest.mark.parametrize("strategy", [0, 1, 2])
def test_bytes_at_rest_and_at_the_peak_are_what_the_plan_says(strategy, overlap, dtype, ranks):
    with Meter() as meter:
        before = meter.live_bytes()
        model, optimizer = build(strategy, dtype, overlap_grad_reduce=overlap)
        for _ in range(2):
            step(model, optimizer, dtype, microbatches=2)
        gc.collect()
        plan, held = memory_plan(model), meter.live_bytes() - before
        meter.reset()
        step(model, optimizer, dtype, microbatches=2)
    # On CPU collectives keep the buffers of their sums for the next step.
    assert plan.resident - plan.kept_buffers <= held <= plan.resident + kept_bytes() + 4096, plan
    if not overlap and strategy == 1 and dtype is torch.float32:  # all were held at once
        assert held >= plan.resident, plan
    extra = 64 * WIDTH * 8 + 3 * WIDTH * WIDTH * 4  # activations; gradients in autograd's hands
    assert meter.peak_live_bytes - before <= plan.peak + kept_bytes() + extra, plan


@pytest.mark.ranks(4, reuse=False)
@pytest.mark.parametrize("strategy", [0, 2])
def test_replicas_hold_what_the_plan_says(strategy, ranks):
    with Meter() as meter:
        before = meter.live_bytes()
        model, optimizer = build(strategy, replicate=2)
        for _ in range(2):
            step(model, optimizer, microbatches=2)
        gc.collect()
        plan, held = memory_plan(model), meter.live_bytes() - before
    assert plan.resident - plan.kept_buffers <= held <= plan.resident + kept_bytes() + 4096, plan


@pytest.mark.ranks(2, reuse=False)
def test_memory_returns_when_a_model_is_deleted(ranks):
    with Meter() as meter:
        before, kept = meter.live_bytes(), kept_bytes()
        model, optimizer = build(1, overlap_param_gather=True)
        step(model, optimizer)
        gc.collect()
        gc.disable()
        try:
            assert meter.live_bytes() - before >= memory_plan(model).weights
            del model, optimizer
            left = meter.live_bytes() - before - (kept_bytes() - kept)
            assert left < 4 * WIDTH * WIDTH, "more than a layer"
        finally:
            gc.enable()


@pytest.mark.ranks(1)
@pytest.mark.parametrize("made", [torch.optim.Adam, torch.optim.AdamW])
def test_a_first_step_makes_moments_once(made, ranks):
    """The two groups cut the shard into runs, whose moments are parts of the shard's."""
    model = nn.Sequential(*(nn.Linear(1024, 1024) for _ in range(4)))
    weights, biases = ([p for p in model.parameters() if p.ndim == n] for n in (2, 1))
    groups = [{"params": weights, "weight_decay": 0.1}, {"params": biases, "weight_decay": 0.0}]
    mesh = ParallelLayout().build(device_type())
    config = DistributedDataParallelConfig(use_distributed_optimizer=True)
    wrapped = DistributedDataParallel(model, config, mesh)
    optimizer = ShardedOptimizer(made(groups), wrapped, mesh)
    wrapped(torch.ones(2, 1024)).square().mean().backward()
    with Meter() as meter:
        before = meter.live_bytes()
        meter.reset()
        optimizer.step()
        moments = 2 * sum(4 * p.numel() for p in (*weights, *biases))
        assert moments <= meter.live_bytes() - before < 1.01 * moments
        # A step in blocks has temporaries of some MiB.
        assert meter.peak_live_bytes - before < 1.3 * moments


@pytest.mark.ranks(1)
@pytest.mark.parametrize("dtype", [torch.float32, torch.float64])
@pytest.mark.parametrize("fused", [False, True])
def test_a_first_step_makes_the_state_that_torch_makes(fused, dtype, ranks):
    """A count has the default dtype's width, and lies beside the weights where a step is fused."""
    states = []
    before = torch.get_default_dtype()
    torch.set_default_dtype(dtype)
    try:
        for wraps in (False, True):
            torch.manual_seed(0)
            model = nn.Linear(8, 8).to(device_type())
            optimizer = torch.optim.AdamW(model.parameters(), fused=fused)
            if wraps:
                config = DistributedDataParallelConfig(use_distributed_optimizer=True)
                mesh = ParallelLayout().build(device_type())
                model = DistributedDataParallel(model, config, mesh)
                optimizer = ShardedOptimizer(optimizer, model, mesh)
            model(torch.ones(2, 8, device=device_type())).square().mean().backward()
            optimizer.step()
            state = optimizer.state_dict()["state"].values()
            counts = [each["step"] for each in state]
            states.append([(set(each), float(each["step"])) for each in state])
            states.append([(count.dtype, count.device.type) for count in counts])
    finally:
        torch.set_default_dtype(before)
    assert states[:2] == states[2:]
