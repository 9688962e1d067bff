"""Updated weights come back under the next forward: in one order, before anybody reads them."""

import pytest
import torch
from torch import nn

from lamina.ddp import (
    DistributedDataParallel,
    DistributedDataParallelConfig,
    ShardedOptimizer,
    full_parameters,
)
from lamina.mesh import ParallelLayout
from lamina_testing import delayed_collectives, device_type
from lamina_testing.toys import OddNet


class Conditional(OddNet):
    """Leaves its last block out on some ranks."""

    def forward(self, x, blocks=3):
        x = self.enter(x)
        for block in self.blocks[:blocks]:
            x = block(x)
        return self.leave(x) * self.temperature + self.empty.sum()


def build(make=Conditional, dtype=torch.float32):
    torch.manual_seed(7)
    return make().to(dtype)


def sgd(parameters):
    return torch.optim.SGD(parameters, lr=0.1, momentum=0.9)


def wrap(model, sharded=True, **config):
    mesh = ParallelLayout().build(device_type())
    optimizer = sgd(model.parameters())
    settings = {"overlap_param_gather": sharded, "overlap_grad_reduce": True, **config}
    wrapped = DistributedDataParallel(
        model, DistributedDataParallelConfig(use_distributed_optimizer=sharded, **settings), mesh
    )
    return wrapped, ShardedOptimizer(optimizer, wrapped, mesh)


def batch(rank, step):
    return torch.randn(4, 5, generator=torch.Generator().manual_seed(10 * step + rank))


def step_of(wrapped, optimizer, rank, step, **how):
    wrapped(batch(rank, step), **how).square().mean().backward()
    optimizer.step()
    optimizer.zero_grad()


@pytest.mark.ranks(2, timeout=40)
@pytest.mark.parametrize("align", [False, True])
def test_ranks_that_run_other_modules_gather_in_one_order(align, ranks):
    wrapped, optimizer = wrap(build(), bucket_size=1, align_param_gather=align)
    model = build()
    plain = sgd(model.parameters())
    used = [[3, 3], [2, 3], [3, 2], [2, 2], [3, 2]]  # blocks by step and rank
    for step, blocks in enumerate(used):
        step_of(wrapped, optimizer, ranks.rank, step, blocks=blocks[ranks.rank])
        losses = [model(batch(r, step), blocks[r]).square().mean() for r in range(2)]
        (sum(losses) / 2).backward()
        plain.step()
        plain.zero_grad()
    state = wrapped.state_dict()
    for name, value in model.named_parameters():
        torch.testing.assert_close(state[name], value.detach(), rtol=0, atol=3e-6, msg=name)


class Watched(nn.MultiheadAttention):
    """Reads weights of a child it never calls, and says whether they have arrived."""

    def forward(self, x):
        self.arrived = self.watch() if hasattr(self, "watch") else None
        return super().forward(x, x, x, need_weights=False)[0]


class Reader(nn.Module):
    def __init__(self):
        super().__init__()
        self.enter = nn.Linear(5, 8)
        self.blocks = nn.ModuleList(Watched(8, 2) for _ in range(3))
        self.leave = nn.Linear(8, 3)

    def forward(self, x):
        x = self.enter(x)
        for block in self.blocks:
            x = x + block(x)
        return self.leave(x)


@pytest.mark.ranks(2)
def test_weights_that_a_parent_reads_are_there_before_it_runs(ranks):
    wrapped, optimizer = wrap(build(Reader), bucket_size=1)
    holder = {ref.name: g for g in wrapped.parameter_groups() for ref in g.refs}
    for index, block in enumerate(wrapped.module.blocks):
        group = holder[f"blocks.{index}.out_proj.weight"]
        block.watch = lambda group=group: group.weights.ready
    model = build(Reader)
    plain = sgd(model.parameters())
    with delayed_collectives(0.1) as log:
        for step in range(3):
            wrapped.module.enter.register_forward_hook(lambda *_, s=step: log.mark(f"step {s}"))
            step_of(wrapped, optimizer, ranks.rank, step)
            assert all(block.arrived for block in wrapped.module.blocks), step
            (sum(model(batch(r, step)).square().mean() for r in range(2)) / 2).backward()
            plain.step()
            plain.zero_grad()
    # Only those that are needed: later ones are under way while the first module runs. On a GPU a
    # wait is for streams, so the host has none to end; `-s order` looks at these.
    assert ranks.backend == "nccl" or log.in_flight_at(log.marked("step 2"))
    for name, value in full_parameters(wrapped).items():
        wanted = model.get_parameter(name).detach()
        torch.testing.assert_close(value, wanted, rtol=0, atol=3e-6, msg=name)


@pytest.mark.ranks(2)
def test_an_evaluation_reads_what_the_last_step_wrote_whoever_reads_it(ranks):
    """In evaluation torch's encoder layer reads all weights itself and calls no child."""
    layer = nn.TransformerEncoderLayer(8, 2, 16, dropout=0.0, batch_first=True)
    wrapped, optimizer = wrap(nn.Sequential(nn.Linear(5, 8), layer), bucket_size=1)
    arrived, groups = [], list(wrapped.parameter_groups())
    layer.register_forward_pre_hook(
        lambda *_: arrived.append(all(group.weights.ready for group in groups))
    )
    for step in range(2):
        wrapped(batch(ranks.rank, step)[None]).square().mean().backward()
        optimizer.step()
        optimizer.zero_grad()
        arrived.clear()
        wrapped.eval()
        with torch.no_grad(), delayed_collectives(0.01):
            wrapped(batch(0, 9)[None])
        assert arrived == [True]
        wrapped.train()


@pytest.mark.ranks(2)
@pytest.mark.parametrize("dtype", [torch.float32, torch.bfloat16])
@pytest.mark.parametrize("sharded", [False, True])
def test_weights_that_are_broadcast_or_loaded_after_a_step(sharded, dtype, ranks):
    wrapped, optimizer = wrap(build(dtype=dtype), sharded, num_buckets=8)
    data = [batch(ranks.rank, step).to(dtype) for step in range(3)]
    wrapped(data[0]).square().mean().backward()
    optimizer.step()
    optimizer.zero_grad()
    stepped = full_parameters(wrapped)
    wrapped.broadcast_params()  # with gathers pending: nothing may change
    for name, value in full_parameters(wrapped).items():
        assert torch.equal(value, stepped[name]), name
    if ranks.rank == 1:  # one rank goes astray, and is brought back
        with torch.no_grad():
            wrapped.module.leave.weight.add_(1.0)
    wrapped.broadcast_params()
    state = {name: value.clone() for name, value in wrapped.state_dict().items()}
    for name, value in full_parameters(wrapped).items():
        assert torch.equal(value.to(dtype), state[name]), name
        assert torch.equal(value.to(dtype), stepped[name].to(dtype)), name

    before = full_parameters(wrapped)
    wrapped(data[1]).square().mean().backward()
    optimizer.step()
    optimizer.zero_grad()
    stepped = full_parameters(wrapped)
    part = {"leave.weight": state["leave.weight"]}  # with gathers pending again
    wrapped.load_state_dict(part, strict=False)
    for name, value in full_parameters(wrapped).items():
        wanted = state[name].to(value.dtype) if name in part else stepped[name]
        assert torch.equal(value, wanted), name
    assert not torch.equal(before["enter.weight"], stepped["enter.weight"])
    with torch.no_grad():  # and by hand: main weights were written
        for group in wrapped.parameter_groups():
            group.main_weights.data.mul_(0.5)
    wrapped.start_param_sync()
    for name, value in wrapped.state_dict().items():
        wanted = part[name].to(stepped[name].dtype) if name in part else stepped[name]
        assert torch.equal(value, (wanted * 0.5).to(dtype)), name
    with pytest.raises(ValueError, match="assign=True"):
        wrapped.load_state_dict(state, assign=True)


@pytest.mark.ranks(2)
@pytest.mark.parametrize("dtype", [torch.float32, torch.bfloat16], ids=["fp32", "bf16"])
@pytest.mark.parametrize("around", [torch.compile, nn.Sequential], ids=["compiled", "sequential"])
def test_a_module_around_the_wrapper_loads_the_state_that_it_gives(around, dtype, ranks):
    """Main weights included, with gathers of a step's weights pending."""
    wrapped, optimizer = wrap(build(dtype=dtype), num_buckets=8)
    outer = around(wrapped)
    saved = {name: value.clone() for name, value in outer.state_dict().items()}
    wanted = full_parameters(wrapped)
    wrapped(batch(ranks.rank, 0).to(dtype)).square().mean().backward()
    optimizer.step()
    optimizer.zero_grad()
    outer.load_state_dict(saved)
    for name, value in full_parameters(wrapped).items():
        assert torch.equal(value, wanted[name]), name
    with pytest.raises(ValueError, match="assign=True"):
        outer.load_state_dict(saved, assign=True)
    with pytest.raises(RuntimeError, match=r"Missing key.*leave\.weight"):
        outer.load_state_dict({name: saved[name] for name in saved if "leave" not in name})
