"""Cut over tp, cut again over data parallelism, put together: the same bits, and right training."""

import copy

import pytest
import torch
import torch.nn.functional as F
from torch import nn
from torch.distributed.device_mesh import init_device_mesh
from torch.distributed.tensor import DTensor, Replicate, Shard
from torch.distributed.tensor.parallel import (
    ColwiseParallel,
    RowwiseParallel,
    SequenceParallel,
    parallelize_module,
)

from lamina.ddp import clip_grad_norm, full_gradients, full_parameters
from lamina.fsdp import UnavailableError, fully_shard
from lamina.mesh import ParallelLayout, mark, role_of
from lamina.mesh.engine import mesh_axis
from lamina_testing import device_type
from lamina_testing.toys import Block

from .tp_models import (
    WIDTH,
    Net,
    batch,
    gathered_over,
    in_tp_order,
    make_whole,
    mesh_2x2,
    put_together,
    sgd,
    take_pieces,
)

STRATEGIES = pytest.mark.parametrize("strategy", [0, 1, 3])
STEPS = 3


def train_whole():
    model = make_whole()
    optimizer = sgd(model)
    for step in range(STEPS):
        optimizer.zero_grad()
        for rank in range(2):
            (model(batch(rank, step)).square().mean() / 2).backward()
        gradients = {n: p.grad.clone() for n, p in model.named_parameters()}
        norm = torch.nn.utils.clip_grad_norm_(model.parameters(), 0.5)
        optimizer.step()
    parameters = {n: p.detach() for n, p in model.named_parameters()}
    return in_tp_order(gradients, 2), in_tp_order(parameters, 2), norm


@pytest.mark.ranks(4)
@STRATEGIES
def test_cut_cut_again_and_put_together_gives_the_same_bits(strategy, ranks):
    mesh = mesh_2x2()
    axis = mesh_axis(mesh, "tp")
    whole = make_whole()
    model = Net(axis)
    take_pieces(model, whole, axis)
    model = fully_shard(model, device_mesh=mesh, dp_shard_dim="dp", zero_dp_strategy=strategy)
    assert len(model.sharding_engine.units) == 3
    found = put_together(full_parameters(model), model, axis)
    for name, value in in_tp_order(dict(whole.named_parameters()), 2).items():
        assert torch.equal(found[name], value), name


@pytest.mark.ranks(4)
@STRATEGIES
def test_tagged_layers_on_2x2_train_like_one_process(strategy, ranks):
    mesh = mesh_2x2()
    axis, dp = mesh_axis(mesh, "tp"), mesh_axis(mesh, "dp")
    model = Net(axis)
    take_pieces(model, make_whole(), axis)
    model, optimizer = fully_shard(
        model, sgd(model), device_mesh=mesh, dp_shard_dim="dp", zero_dp_strategy=strategy
    )
    for step in range(STEPS):
        model(batch(dp.rank, step)).square().mean().backward()
        found = put_together(full_gradients(model), model, axis)
        if strategy > 0:
            with pytest.raises(
                NotImplementedError, match=r"cut over tp too .*ddp\.clip_grad_norm,"
            ):
                torch.nn.utils.clip_grad_norm_(model.parameters(), 0.5)
        norm = clip_grad_norm(model, 0.5, mesh)
        optimizer.step()
        optimizer.zero_grad()
    gradients, parameters, expected_norm = train_whole()
    torch.testing.assert_close(norm, expected_norm, rtol=1e-5, atol=0)
    for name, value in gradients.items():
        torch.testing.assert_close(found[name], value, rtol=0, atol=2e-6, msg=name)
    found = put_together(full_parameters(model), model, axis)
    for name, value in parameters.items():
        torch.testing.assert_close(found[name], value, rtol=0, atol=2e-6, msg=name)


# -- torch's own tensor parallelism -----------------------------------------------------------


class TorchNet(nn.Module):
    def __init__(self):
        super().__init__()
        self.enter = nn.Linear(5, WIDTH)
        self.blocks = nn.ModuleList(Block(WIDTH) for _ in range(2))

    def forward(self, x):
        x = self.enter(x)
        for block in self.blocks:
            x = block(x)
        return x


def plan():
    return {"up": ColwiseParallel(), "down": RowwiseParallel()}


def parallelized(mesh):
    torch.manual_seed(6)
    model = TorchNet()
    for block in model.blocks:
        parallelize_module(block, mesh["tp"], plan())
    return model


def torch_batch(rank, step):
    return torch.randn(4, 5, generator=torch.Generator().manual_seed(100 * step + rank))


@pytest.mark.matrix(strength=1)
@pytest.mark.ranks(4)
@pytest.mark.parametrize("optimizer_first", [True, False])
@STRATEGIES
def test_parallelize_module_on_2x2_trains_like_one_process(strategy, optimizer_first, ranks):
    mesh = mesh_2x2()
    axis, dp = mesh_axis(mesh, "tp"), mesh_axis(mesh, "dp")
    model = parallelized(mesh)
    settings = {"device_mesh": mesh, "dp_shard_dim": "dp", "zero_dp_strategy": strategy}
    if optimizer_first:
        model, optimizer = fully_shard(model, sgd(model), **settings)
    else:
        model = fully_shard(model, **settings)
        optimizer = sgd(model)
    assert role_of(model.blocks[0].up.weight).tp_shard_dim == 0
    assert role_of(model.blocks[0].down.weight).tp_shard_dim == 1
    torch.manual_seed(6)
    reference = TorchNet()
    start = put_together(full_parameters(model), model, axis)
    for name, value in reference.named_parameters():
        assert torch.equal(start[name], value), name
    plain = sgd(reference)
    for step in range(STEPS):
        model(torch_batch(dp.rank, step)).square().mean().backward()
        if strategy > 0:
            with pytest.raises(NotImplementedError, match="cut over tp too"):
                torch.nn.utils.clip_grad_norm_(model.parameters(), 0.5)
        optimizer.step()
        optimizer.zero_grad()
        sum(reference(torch_batch(r, step)).square().mean() / 2 for r in range(2)).backward()
        plain.step()
        plain.zero_grad()
    found = put_together(full_parameters(model), model, axis)
    for name, value in reference.named_parameters():
        torch.testing.assert_close(found[name], value.detach(), rtol=0, atol=2e-6, msg=name)


class SequenceBlock(Block):
    """Normalises its own part of the tokens: the norm's gradients are partial over tp."""

    def forward(self, x):
        mesh = self.up.weight.device_mesh if hasattr(self.up.weight, "device_mesh") else None
        part = x
        if mesh is not None:
            part = DTensor.from_local(x, mesh, [Replicate()]).redistribute(placements=[Shard(0)])
        return x + self.down(F.gelu(self.up(self.norm(part))))


class SequenceNet(TorchNet):
    def __init__(self):
        super().__init__()
        self.blocks = nn.ModuleList(SequenceBlock(WIDTH) for _ in range(2))


@pytest.mark.ranks(4)
@STRATEGIES
def test_replicated_dtensors_have_gradients_summed_over_tp(strategy, ranks):
    mesh = mesh_2x2()
    axis, dp = mesh_axis(mesh, "tp"), mesh_axis(mesh, "dp")
    torch.manual_seed(6)
    model = SequenceNet()
    reference = copy.deepcopy(model)
    for block in model.blocks:
        parallelize_module(
            block,
            mesh["tp"],
            {
                "norm": SequenceParallel(sequence_dim=0),
                "up": ColwiseParallel(input_layouts=Shard(0)),
                "down": RowwiseParallel(),
            },
        )
    model = fully_shard(model, device_mesh=mesh, dp_shard_dim="dp", zero_dp_strategy=strategy)
    model(torch_batch(dp.rank, 0)).square().mean().backward()
    sum(reference(torch_batch(r, 0)).square().mean() / 2 for r in range(2)).backward()
    found = put_together(full_gradients(model), model, axis)
    for name, value in reference.named_parameters():
        torch.testing.assert_close(found[name], value.grad, rtol=0, atol=1e-6, msg=name)


@pytest.mark.ranks(4)
def test_state_that_an_optimizer_has_of_dtensors_comes_along(ranks):
    mesh = mesh_2x2()
    model = parallelized(mesh)
    optimizer = sgd(model)
    model(torch_batch(0, 0)).square().mean().backward()
    optimizer.step()
    optimizer.zero_grad()
    before = optimizer.state[model.blocks[0].up.weight]["momentum_buffer"].to_local().clone()
    model, optimizer = fully_shard(model, optimizer, device_mesh=mesh, dp_shard_dim="dp")
    after = optimizer.state[model.blocks[0].up.weight]["momentum_buffer"]
    assert torch.equal(after.full_tensor(), before)


@pytest.mark.ranks(2)
def test_a_call_that_was_refused_can_be_made_again_with_dtensors(ranks):
    mesh = init_device_mesh(device_type(), (1, 2), mesh_dim_names=("dp", "tp"))
    model = parallelized(mesh)
    optimizer = sgd(model.blocks[0].up)
    settings = {"device_mesh": mesh, "dp_shard_dim": "dp"}
    with pytest.raises(ValueError, match="Net"):
        fully_shard(model, optimizer, fsdp_unit_modules=[Net], **settings)
    model, optimizer = fully_shard(model, optimizer, fsdp_unit_modules=[Block], **settings)
    before = model.blocks[0].up.weight.detach().clone()
    model(torch_batch(0, 0)).square().mean().backward()
    optimizer.step()
    assert not torch.equal(model.blocks[0].up.weight, before)
    with pytest.raises(UnavailableError, match=r"deepcopy of blocks\.0, .*copy\.deepcopy\(model\)"):
        copy.deepcopy(model.blocks[0])


@pytest.mark.ranks(4)
@pytest.mark.parametrize("strategy", [0, 3])
def test_a_copy_of_a_model_that_holds_dtensors_trains_like_it(strategy, ranks):
    mesh = mesh_2x2()
    dp = mesh_axis(mesh, "dp")
    settings = {"device_mesh": mesh, "dp_shard_dim": "dp", "zero_dp_strategy": strategy}
    model = fully_shard(parallelized(mesh), fsdp_unit_modules=[Block], **settings)
    made = copy.deepcopy(model)
    start = full_parameters(model)
    for step in range(2):
        for one in (model, made):
            one(torch_batch(dp.rank, step)).square().mean().backward()
            sgd(one).step()
            one.zero_grad()
        if step == 0:
            after = full_parameters(made)
    found = full_parameters(made)
    for name, value in full_parameters(model).items():
        assert torch.equal(found[name], value), name
        assert not torch.equal(value, start[name]), name
    assert not torch.equal(after["enter.weight"], found["enter.weight"])
    shapes = [value.shape for value in model.state_dict().values()]
    assert [value.shape for value in made.state_dict().values()] == shapes


@pytest.mark.ranks(2)
def test_dtensors_that_cannot_be_cut_again_are_named(ranks):
    mesh = init_device_mesh(device_type(), (1, 2), mesh_dim_names=("dp", "tp"))
    with torch.device("meta"):
        model = TorchNet()
    parallelize_module(model.blocks[0], mesh["tp"], plan())
    with pytest.raises(ValueError, match=r"blocks\.0\.up\.weight is a DTensor on the meta device"):
        fully_shard(model, device_mesh=mesh, dp_shard_dim="dp")


# -- experts ----------------------------------------------------------------------------------


class ExpertNet(nn.Module):
    """Each ep rank holds its own expert, and every token goes to the expert at hand."""

    def __init__(self):
        super().__init__()
        self.dense = nn.Linear(4, 4)
        self.expert = nn.Parameter(torch.eye(4))

    def forward(self, x):
        return self.dense(x) @ self.expert


@pytest.mark.ranks(4)
@STRATEGIES
def test_experts_are_cut_over_their_own_axis_and_scaled_by_the_dense_ranks(strategy, ranks):
    mesh = ParallelLayout(ep=2).build(device_type())
    torch.manual_seed(2)
    model = ExpertNet()
    plain = copy.deepcopy(model)
    mark(model.expert, expert=True)
    ep = mesh.coordinate["ep"]
    with torch.no_grad():
        model.expert.mul_(ep + 1)
    model = fully_shard(model, device_mesh=mesh, zero_dp_strategy=strategy)
    assert torch.equal(full_parameters(model)["expert"], torch.eye(4) * (ep + 1))
    for step in range(2):
        model.zero_grad()
        model(torch_batch(ranks.rank, step)[:, :4]).square().mean().backward()
    found = full_gradients(model)
    dense, expert = torch.zeros(4, 4), torch.zeros(4, 4)
    here = gathered_over(torch.tensor([float(ep)]), mesh.axis("dp_shard_cp"))
    for rank, of_rank in enumerate(int(value) for value in here):
        one = copy.deepcopy(plain)
        with torch.no_grad():
            one.expert.mul_(of_rank + 1)
        one(torch_batch(rank, 1)[:, :4]).square().mean().backward()
        dense += one.dense.weight.grad / 4
        if of_rank == ep:
            expert += one.expert.grad / 4  # by D = 4, though two ranks hold this expert
    torch.testing.assert_close(found["dense.weight"], dense, rtol=1e-5, atol=1e-6)
    torch.testing.assert_close(found["expert"], expert, rtol=1e-5, atol=1e-6)
    groups = {g.refs[0].name: g for g in model.parameter_groups()}
    assert groups["expert"].axes.size == 2
    assert groups["dense.weight"].axes.size == 4
