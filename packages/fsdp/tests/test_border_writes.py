"""Parameters that are written without an optimizer's step, against plain PyTorch."""

import pytest
import torch
from torch.distributed.device_mesh import init_device_mesh

from lamina.collectives import DisagreementError, Ledger, PeerLostError
from lamina.ddp import (
    DistributedDataParallel,
    DistributedDataParallelConfig,
    ShardedOptimizer,
    full_parameters,
)
from lamina.mesh import ParallelLayout, init_distributed
from lamina_testing import device_type
from lamina_testing.toys import Block, OddNet, inputs

from .one_process import build, sgd
from .test_border_gradients import wrapped


def swapped(model, optimizer, x, mains):
    """A step, then evaluation with an average in the weights' place, and back; then a clamp."""
    average = [p.detach().clone() for p in mains()]
    model(x).square().mean().backward()
    optimizer.step()
    optimizer.zero_grad()
    found = [model(x).detach()]
    kept = [p.detach().clone() for p in mains()]
    with torch.no_grad():
        for parameter, value in zip(mains(), average, strict=True):
            parameter.copy_(value)
        found.append(model(x))
        for parameter, value in zip(mains(), kept, strict=True):
            parameter.copy_(value)
        found.append(model(x))
        torch._foreach_mul_(mains(), 0.5)
        found.append(model(x))
        for parameter in mains():
            parameter.data.clamp_(-0.05, 0.05)
        found.append(model(x))
    return found


@pytest.mark.ranks(2)
@pytest.mark.parametrize("wrapper", [0, 1, 2, 3, "module", "ddp"])
def test_what_is_written_between_steps_is_what_all_ranks_compute_with(wrapper, ranks):
    oracle = build(OddNet)
    x = inputs(oracle, 1)
    wanted = swapped(oracle, sgd(oracle.parameters()), x, lambda: list(oracle.parameters()))
    if wrapper == "ddp":
        mesh = ParallelLayout().build(device_type())
        config = DistributedDataParallelConfig(use_distributed_optimizer=True)
        model = DistributedDataParallel(build(OddNet), config, mesh)
        optimizer = ShardedOptimizer(sgd(model.parameters()), model, mesh)
        parameters = [p for group in optimizer.param_groups for p in group["params"]]
    else:
        mesh = init_device_mesh(device_type(), (2,), mesh_dim_names=("shard",))
        model, optimizer = wrapped(OddNet, wrapper, mesh)
        parameters = list(model.parameters())
    found = swapped(model, optimizer, x, lambda: parameters)
    for number, (one, other) in enumerate(zip(found, wanted, strict=True)):
        torch.testing.assert_close(one, other, rtol=0, atol=2e-6, msg=str(number))


class Codebook(Block):
    """Writes two of its parameters in forward, one of which is frozen."""

    def __init__(self, width):
        super().__init__(width)
        self.codes = torch.nn.Parameter(torch.ones(3, width), requires_grad=False)

    def forward(self, x):
        with torch.no_grad():
            self.codes.mul_(0.9).add_(0.01)
            self.up.weight.clamp_(-0.1, 0.1)
        return super().forward(x) + self.codes.mean(0)


class Writing(OddNet):
    def __init__(self):
        super().__init__()
        self.blocks[1] = Codebook(17)


@pytest.mark.ranks(2)
@pytest.mark.parametrize("wrapper", [0, 1, 2, 3, "module"])
def test_what_a_forward_writes_stays_written(wrapper, ranks):
    mesh = init_device_mesh(device_type(), (2,), mesh_dim_names=("shard",))
    oracle = build(Writing)
    model, optimizer = wrapped(Writing, wrapper, mesh)
    plain = sgd(p for p in oracle.parameters() if p.requires_grad)
    for step in range(3):
        for net, stepper in ((oracle, plain), (model, optimizer)):
            net(inputs(net, step)).square().mean().backward()
            stepper.step()
            stepper.zero_grad()
            with torch.no_grad():
                net(inputs(net, 50 + step))
    found = full_parameters(model)
    for name, parameter in oracle.named_parameters():
        value = parameter.detach()
        torch.testing.assert_close(found[name], value, rtol=0, atol=3e-6, msg=name)


@pytest.mark.ranks(2)
@pytest.mark.parametrize("wrapper", [0, "bf16", "plain", "ddp", "zero1"])
def test_what_is_assigned_to_data_is_computed_with_or_refused(wrapper, ranks):
    """An average that is swapped in and back evaluates right, or is refused in that forward."""
    oracle = build(OddNet)
    x = inputs(oracle, 1)
    if wrapper in ("ddp", "zero1"):
        mesh = ParallelLayout().build(device_type())
        config = DistributedDataParallelConfig(use_distributed_optimizer=wrapper == "zero1")
        model = DistributedDataParallel(build(OddNet), config, mesh)
        optimizer = sgd(model.parameters())
        if wrapper == "zero1":
            optimizer = ShardedOptimizer(optimizer, model, mesh)
    else:
        mesh = init_device_mesh(device_type(), (2,), mesh_dim_names=("shard",))
        dtype = torch.bfloat16 if wrapper == "bf16" else None
        model, optimizer = wrapped(OddNet, 0, mesh, dtype)
        if wrapper == "plain":  # nobody tells of its steps
            optimizer = sgd(model.parameters())
    found, backup = [], []
    for net, stepper in ((oracle, sgd(oracle.parameters())), (model, optimizer)):
        backup = [p.data for p in net.parameters()]
        for p in net.parameters():
            p.data = 0.5 * p.data
        if wrapper == "bf16" and net is model:
            with pytest.raises(RuntimeError, match=r"taken out of its buffer.*copy_\(value\)"):
                net(x)
            return
        found.append(net(x).detach())
        for p, before in zip(net.parameters(), backup, strict=True):
            p.data = before
        net(x).square().mean().backward()
        stepper.step()
        stepper.zero_grad()
        found.append(net(x).detach())
    for wanted, one in zip(found[:2], found[2:], strict=True):
        torch.testing.assert_close(one, wanted, rtol=0, atol=2e-6)
    for p in model.parameters():
        p.data = 0.5 * p.data
    model(x).square().mean().backward()
    if wrapper in (0, "zero1"):
        with pytest.raises(RuntimeError, match=r"taken out of its buffer.*copy_\(value\)"):
            optimizer.step()
    with pytest.raises(RuntimeError, match=r"taken out of its buffer.*copy_\(value\)"):
        full_parameters(model)


@pytest.mark.ranks(2)
@pytest.mark.parametrize("wrapper", [1, 2])
def test_a_gather_that_a_write_has_caused_says_so(wrapper, ranks):
    """Ranks that have not written would not gather: the message about the wait names the cause."""
    mesh = init_device_mesh(device_type(), (2,), mesh_dim_names=("shard",))
    model, _ = wrapped(OddNet, wrapper, mesh)
    x = inputs(model, 1)
    model(x)
    written = model.get_parameter("blocks.1.up.weight")
    with torch.no_grad():
        written.mul_(0.5)
    with Ledger() as ledger:
        model(x)
    (purpose,) = {record.purpose for record in ledger.records}
    assert "blocks.1." in purpose
    assert "whose main parameters this rank has written" in purpose
    with Ledger() as ledger:
        model(x)
    assert not ledger.records


def sharded(wrapper):
    """A model, its optimizer, and the parameters that a user writes to."""
    if wrapper == "ddp":  # nobody tells it of steps
        model = DistributedDataParallel(build(OddNet), mesh=ParallelLayout().build(device_type()))
        optimizer = sgd(model.parameters())
    else:
        mesh = init_device_mesh(device_type(), (2,), mesh_dim_names=("shard",))
        dtype = torch.bfloat16 if wrapper == "bf16" else None
        model, optimizer = wrapped(OddNet, 0 if wrapper == "bf16" else wrapper, mesh, dtype)
    return model, optimizer, [p for group in optimizer.param_groups for p in group["params"]]


def step(model, optimizer, x):
    model(x).float().square().mean().backward()
    optimizer.step()
    optimizer.zero_grad()


@pytest.mark.ranks(2)
@pytest.mark.parametrize("wrapper", [0, 1, 3, "bf16", "ddp"])
def test_a_write_on_one_rank_is_named_before_the_next_step(wrapper, ranks):
    """Writes of all ranks, and of one that leaves equal weights behind, are none."""
    model, optimizer, parameters = sharded(wrapper)
    names = [name for name, _ in model.named_parameters()]
    written, x = parameters[names.index("blocks.1.up.weight")], inputs(model, ranks.rank)
    step(model, optimizer, x)
    with torch.no_grad():
        torch._foreach_mul_(parameters, 0.5)
        step_as_usual = torch.enable_grad()(step)
        step_as_usual(model, optimizer, x)
        if (
            wrapper in (0, "bf16", "ddp") and ranks.rank == 1
        ):  # others do not know of this evaluation
            kept = written.clone()
            written.zero_()
            model(x)
            written.copy_(kept)
        step_as_usual(model, optimizer, x)
        if ranks.rank == 1:
            written.mul_(0.5)
    before = full_parameters(model)
    message = r"blocks\.1\.up\.weight was written outside .*rank 1 .*has written blocks.*all ranks"
    with pytest.raises(DisagreementError, match=message):
        step(model, optimizer, x)
    optimizer.zero_grad()
    for name, value in full_parameters(model).items():
        assert torch.equal(value, before[name]), name


@pytest.mark.ranks(2)
@pytest.mark.parametrize("wrapper", [1, 3])
def test_a_write_on_one_rank_to_weights_that_a_forward_has_left_is_named(wrapper, ranks):
    model, optimizer, _ = sharded(wrapper)
    x = inputs(model, ranks.rank)
    model(x)  # for a backward that does not come
    if ranks.rank == 1:
        with torch.no_grad():
            model.leave.weight.mul_(0.5)
    with pytest.raises(DisagreementError, match=r"leave\.weight was written .*has written leave"):
        step(model, optimizer, x)


@pytest.mark.slow
@pytest.mark.ranks(2, reuse=False)
def test_a_wait_for_ranks_that_have_not_written_ends_in_an_error_that_names_the_write(
    ranks, tmp_path
):
    """Without a step between, only the rank that has written gathers, and others wait for it."""
    with init_distributed(soft_limit=3.0, verdict_directory=tmp_path):
        model, optimizer, _ = sharded(1)
        x = inputs(model, ranks.rank)
        step(model, optimizer, x)
        model(x)
        if ranks.rank == 1:
            with torch.no_grad():
                model.get_parameter("blocks.1.up.weight").mul_(0.5)
        message = r"this rank has written \(blocks\.1\.up\.weight\).*every rank waits"
        with pytest.raises(PeerLostError, match=message):
            step(model, optimizer, x)
