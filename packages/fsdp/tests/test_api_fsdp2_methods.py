"""What torch FSDP2 has besides, on `shard_module`: lists of modules, factors, hooks, embeddings."""

import pytest
import torch
import torch.distributed as dist
from torch import nn

from lamina.collectives import Ledger
from lamina.ddp import full_gradients
from lamina.fsdp import (
    UnavailableError,
    fully_shard,
    fully_shard_optimizer,
    register_forward_method,
    shard_module,
)
from lamina.fsdp.module.fsdp2_methods import UnitMethods
from lamina_testing.toys import Block, OddNet, inputs

from .module_models import assert_same, build, loss_of, mesh_of, one_line, run, sgd


def ends_as_one(mesh, **settings):
    model = build()
    pair = [model.enter, model.leave]
    assert shard_module(pair, mesh, **settings) == pair
    for block in model.blocks:
        shard_module(block, mesh, **settings)
    return shard_module(model, mesh, **settings)


def gathers(ledger):
    return sum(record.communicator == "shard:gather" for record in ledger.records)


@pytest.mark.ranks(2)
def test_a_list_of_modules_is_one_unit(ranks):
    mesh = mesh_of(2)
    wanted_gradients, wanted = one_line(mesh, ranks.rank)
    model = ends_as_one(mesh)
    optimizer = fully_shard_optimizer(sgd(model), model)
    gradients, parameters = run(model, optimizer, ranks.rank)
    assert_same(gradients, wanted_gradients)
    assert_same(parameters, wanted)
    ends = model.enter.sharding_unit
    assert ends is model.leave.sharding_unit
    names = {ref.name for group in ends.groups for ref in group.refs}
    assert names == {"enter.weight", "enter.bias", "leave.weight", "leave.bias"}
    assert len(list(model.sharding_units())) == 5
    with Ledger() as ledger:
        loss = loss_of(model, 7, ranks.rank)
    assert gathers(ledger) == 5, "the root, the ends once, three blocks"
    with Ledger() as ledger:
        loss.backward()
    assert gathers(ledger) == 3, "two blocks, and the ends once, until the first has run"
    optimizer.zero_grad()
    with Ledger() as ledger, torch.no_grad():
        model(inputs(model, 3))
    assert gathers(ledger) == 5
    other = ends_as_one(mesh)
    with torch.no_grad():
        other.leave.weight.zero_()
    other.load_state_dict(model.state_dict())
    with torch.no_grad():
        assert torch.equal(other(inputs(other, 5)), model(inputs(model, 5)))


class Headless(OddNet):
    """Its head is called by the loss, in pieces."""

    def forward(self, x):
        x = self.enter(x)
        for block in self.blocks:
            x = block(x)
        return x * self.temperature


@pytest.mark.ranks(2)
def test_a_module_of_a_list_may_run_after_the_model(ranks):
    def loss(model, rank):
        x = model(inputs(model, rank))
        return sum(model.leave(part).square().sum() for part in x.chunk(2))

    model = build(Headless)
    shard_module([model.blocks[2], model.leave], mesh_of(2))
    shard_module(model, mesh_of(2))
    model.leave.zero_grad()
    reference, before = build(Headless), {}
    for forget in ([model], [model], [model.leave, model.blocks[2], model]):
        for module in forget:
            module.zero_grad()
            if module is model.leave:  # the unit is that of blocks[2] as well
                assert module.weight.grad is None
                kept = full_gradients(model)["blocks.2.up.weight"]
                assert torch.equal(kept, before["blocks.2.up.weight"])
        loss(model, ranks.rank).backward()
        before = full_gradients(model)
    (sum(loss(reference, rank) for rank in range(2)) / 2).backward()
    found = full_gradients(model)
    for name, parameter in reference.named_parameters():
        if parameter.grad is not None:
            torch.testing.assert_close(found[name], parameter.grad, msg=name)


@pytest.mark.ranks(2)
def test_lists_that_cannot_be_one_unit_are_refused(ranks):
    model, mesh = build(), mesh_of(2)
    with pytest.raises(ValueError, match="at least one"):
        shard_module([], mesh)
    with pytest.raises(ValueError, match="Linear is inside another"):
        shard_module([model.blocks[0], model.blocks[0].up], mesh)
    shard_module([model.enter, model.leave], mesh)
    with pytest.raises(
        RuntimeError, match="this Linear is one unit with modules outside of this Linear"
    ):
        model.enter(torch.randn(2, 5))


@pytest.mark.ranks(2)
def test_factor_and_hook_change_a_units_own_gradients(ranks):
    model = build()
    for module in (*model.blocks, model):
        shard_module(module, mesh_of(2))
    model.blocks[0].set_gradient_divide_factor(1.0)
    calls = []

    def hook(gradient):
        calls.append(gradient.numel())
        dist.all_reduce(gradient.mul_(1.5))  # a sum over ranks that FSDP does not know of

    model.blocks[1].set_all_reduce_hook(hook)
    reference = build()
    for step in range(2):
        with model.no_sync():
            loss_of(model, 2 * step, ranks.rank).backward()
        loss_of(model, 2 * step + 1, ranks.rank).backward()
        for number in (2 * step, 2 * step + 1):
            sum(loss_of(reference, number, rank) / 2 for rank in range(2)).backward()
        assert len(calls) == step + 1, "once per step"
        # The first step's gradients are kept, and are not given to the hook again.
    group = model.blocks[1].sharding_unit.groups[0]
    assert set(calls) == {group.layout.size // 2}
    for name, found in full_gradients(model).items():
        if name.startswith("blocks.1."):
            continue  # the hook added up different parts of the ranks
        factor = 2.0 if name.startswith("blocks.0.") else 1.0
        wanted = factor * reference.get_parameter(name).grad
        torch.testing.assert_close(found, wanted, msg=name)
    with pytest.raises(RuntimeError, match=r"being accumulated: choose the factor"):
        model.blocks[0].set_gradient_divide_factor(2.0)
    with pytest.raises(ValueError, match=r"factor\(0\)"):
        model.blocks[0].set_gradient_divide_factor(0)
    with pytest.raises(UnavailableError, match="stream"):
        model.blocks[1].set_all_reduce_hook(hook, stream=object())
    model.blocks[1].set_all_reduce_hook(lambda gradient: gradient.mul_(3.0))
    model.zero_grad()
    reference.zero_grad()
    loss_of(model, 9, ranks.rank).backward()
    sum(loss_of(reference, 9, rank) / 2 for rank in range(2)).backward()
    torch.testing.assert_close(
        full_gradients(model)["blocks.1.up.weight"], 3 * reference.blocks[1].up.weight.grad
    )


class Mixer(Block):
    def mix(self, x):
        return self(x)


class Encoder(OddNet):
    """Called by a method, and its blocks by one of theirs."""

    def __init__(self):
        super().__init__()
        self.blocks = nn.ModuleList(Mixer(17) for _ in range(2))

    def encode(self, x):
        x = self.enter(x)
        for block in self.blocks:
            x = block.mix(x)
        return self.leave(x) * self.temperature


@pytest.mark.ranks(2)
def test_methods_are_registered_before_the_first_call(ranks):
    """In FSDP2's order: there is no engine yet."""
    model, reference = build(Encoder), build(Encoder)
    for block in model.blocks:
        register_forward_method(shard_module(block, mesh_of(2)), "mix")
    register_forward_method(shard_module(model, mesh_of(2)), "encode")
    model.encode(inputs(model, ranks.rank)).square().mean().backward()
    for rank in range(2):
        (reference.encode(inputs(reference, rank)).square().mean() / 2).backward()
    for name, found in full_gradients(model).items():
        torch.testing.assert_close(found, reference.get_parameter(name).grad, msg=name)


class Words(nn.Module):
    def __init__(self):
        super().__init__()
        self.embedding = nn.Embedding(40, 17)
        self.blocks = nn.ModuleList(Block(17) for _ in range(2))

    def forward(self, tokens):
        x = self.embedding(tokens)
        for block in self.blocks:
            x = block(x)
        return x


@pytest.mark.ranks(2)
@pytest.mark.parametrize("by_module", [True, False])
def test_embeddings_need_not_be_gathered_for_backward(by_module, ranks):
    tokens = [torch.arange(8).add(3 * rank).view(2, 4) for rank in range(2)]
    torch.manual_seed(3)
    model, mesh = Words(), mesh_of(2)
    torch.manual_seed(3)
    reference = Words()
    sum(reference(t).square().mean() / 2 for t in tokens).backward()
    if by_module:
        for module in (model.embedding, *model.blocks, model):
            shard_module(module, mesh)
        chosen, refused = model.embedding, model.blocks[0]
    else:
        model = fully_shard(model, device_mesh=mesh, fsdp_unit_modules=[nn.Embedding, Block])
        chosen, refused = model.unit_of("embedding"), model.unit_of("blocks.0")
    with pytest.raises(UnavailableError, match=r"norm\.weight is no embedding's"):
        refused.set_unshard_in_backward(False)
    counts = []
    for needed in (True, True, False):
        chosen.set_unshard_in_backward(needed)
        model.zero_grad()
        loss = model(tokens[ranks.rank]).square().mean()
        with Ledger() as ledger:
            loss.backward()
        counts.append(gathers(ledger))
        for name, found in full_gradients(model).items():
            torch.testing.assert_close(found, reference.get_parameter(name).grad, msg=name)
    assert counts == [3, 2, 1], "the last block is known, and kept, from the second step on"


def test_every_method_of_torchs_modules_is_there_and_says_what_to_do_instead():
    from torch.distributed.fsdp import FSDPModule

    public = {name for name in vars(FSDPModule) if not name.startswith("_")}
    assert public <= set(dir(UnitMethods))
    absent = {"set_custom_all_gather", "set_custom_reduce_scatter", "set_symm_mem_for_comm"}
    of_torch_2_15 = {"finalize_backward", "set_keep_unsharded_storage"}
    for name in absent | of_torch_2_15:
        with pytest.raises(UnavailableError, match=rf"{name}\(\): "):
            getattr(UnitMethods, name)(object(), None)


@pytest.mark.ranks(2)
def test_after_a_backward_that_raised_the_state_can_be_reset(ranks):
    mesh = mesh_of(2)
    wanted_gradients, wanted = one_line(mesh, ranks.rank)
    model = ends_as_one(mesh)
    optimizer = fully_shard_optimizer(sgd(model), model)

    def fail(_):
        raise ArithmeticError("here")

    with model.no_sync():
        loss_of(model, 3, ranks.rank).backward()
    handle = model.blocks[1].register_forward_hook(
        lambda _, args, out: out.register_hook(fail) and None
    )
    with pytest.raises(ArithmeticError, match="here"):
        loss_of(model, 0, ranks.rank).backward()
    handle.remove()
    model.reset_iter_state()
    gradients, parameters = run(model, optimizer, ranks.rank)
    assert_same(gradients, wanted_gradients)
    assert_same(parameters, wanted)
