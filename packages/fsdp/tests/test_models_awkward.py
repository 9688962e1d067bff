"""Modules used in awkward ways. Each compares parameters with plain PyTorch in one process."""

import copy
import dataclasses
import operator
import types
from typing import Any

import pytest
import torch
from torch import nn

from lamina.fsdp import fully_shard, plan_units, shard_module
from lamina_testing.toys import Block, OddNet, inputs

from .module_parity import (
    STEPS,
    STRATEGIES,
    build,
    check,
    compare,
    one_process,
    plain_loss,
    sgd,
    shard,
    train,
)

# -- what goes in and comes out ---------------------------------------------------------------


@dataclasses.dataclass
class State:
    hidden: torch.Tensor
    seen: list[Any] = dataclasses.field(default_factory=list)


@dataclasses.dataclass(frozen=True)
class Result:
    loss: torch.Tensor
    state: State


class StateBlock(Block):
    def forward(self, state: State, *, scale: float = 1.0) -> State:
        return State(super().forward(state.hidden) * scale, [*state.seen, state.hidden])


class Dataclasses(OddNet):
    """Blocks take a dataclass and give one; the model gives a frozen one around it."""

    def __init__(self):
        super().__init__()
        self.blocks = nn.ModuleList(StateBlock(17) for _ in range(3))

    def forward(self, x):
        state = State(self.enter(x))
        for block in self.blocks:
            state = block(state=state, scale=0.5)
        out = self.leave(state.hidden) * self.temperature
        return Result(out.square().mean() + state.seen[1].mean(), state)


class Opaque(OddNet):
    """Blocks hide their output in an object that nobody but its author knows."""

    def forward(self, x):
        return types.SimpleNamespace(logits=super().forward(x))


class OpaqueBlock(Block):
    def forward(self, box):
        return types.SimpleNamespace(inner=types.SimpleNamespace(x=super().forward(box.inner.x)))


class OpaqueInside(OddNet):
    def __init__(self):
        super().__init__()
        self.blocks = nn.ModuleList(OpaqueBlock(17) for _ in range(3))

    def forward(self, x):
        box = types.SimpleNamespace(inner=types.SimpleNamespace(x=self.enter(x)))
        for block in self.blocks:
            box = block(box)
        return types.SimpleNamespace(logits=self.leave(box.inner.x))


@pytest.mark.ranks(2)
@STRATEGIES
def test_dataclasses_go_in_and_come_out(strategy, ranks):
    check(Dataclasses, lambda m, r, s: m(inputs(m, 10 * s + r)).loss, ranks, strategy)


@pytest.mark.ranks(2)
@pytest.mark.parametrize("make", [Opaque, OpaqueInside])
@STRATEGIES
def test_outputs_hidden_in_objects_are_found(strategy, make, ranks):
    check(make, lambda m, r, s: m(inputs(m, 10 * s + r)).logits.square().mean(), ranks, strategy)


@pytest.mark.ranks(1)
def test_the_callers_dataclass_is_not_written_to(ranks):
    model = fully_shard(build(Dataclasses), fsdp_unit_modules=[StateBlock])
    hidden = torch.randn(2, 17, requires_grad=True)
    state = State(hidden)
    model.blocks[0](state)
    assert state.hidden is hidden


# -- order ------------------------------------------------------------------------------------


class AnyOrder(OddNet):
    """Uses its blocks in the order that it is told, some of them not at all."""

    def forward(self, x, order=(0, 1, 2)):
        x = self.enter(x)
        for index in order:
            x = self.blocks[index](x)
        return self.leave(x) * self.temperature


ORDERS = [(0, 1, 2), (2, 0, 1), (1,), (0, 2), (2, 1, 0), (0, 1, 2)]


@pytest.mark.ranks(2)
@STRATEGIES
def test_the_order_of_units_may_change_at_every_step(strategy, ranks):
    def loss(model, rank, step):
        return model(inputs(model, 10 * step + rank), ORDERS[step]).square().mean()

    model, optimizer = shard(AnyOrder, strategy)
    train(model, optimizer, loss, ranks.rank, len(ORDERS))
    compare(model, one_process(AnyOrder, loss, len(ORDERS)))


@pytest.mark.ranks(2)
def test_a_unit_gathered_ahead_and_not_called_is_released(ranks):
    model, optimizer = shard(AnyOrder, 3)
    train(model, optimizer, plain_loss, ranks.rank, 2)
    with torch.no_grad():
        model(inputs(model, 1), (0,))
    assert not any(w.ready for unit in model.sharding_engine.units for w in unit.gathered)


# -- units of all kinds -----------------------------------------------------------------------


class Nothing(nn.Module):
    """A unit without parameters, with a buffer."""

    def __init__(self):
        super().__init__()
        self.register_buffer("seen", torch.zeros(()))

    def forward(self, x):
        self.seen += 1
        return torch.tanh(x)


class Wide(nn.Module):
    """Two blocks and a weight of its own: a unit with units inside."""

    def __init__(self):
        super().__init__()
        self.scale = nn.Parameter(torch.ones(17))
        self.inner = nn.ModuleList([Block(17), Block(17)])
        self.out = nn.Linear(17, 17)

    def forward(self, x):
        for block in self.inner:
            x = block(x) * self.scale
        return self.out(x)


class Nested(nn.Module):
    def __init__(self):
        super().__init__()
        self.enter = nn.Linear(5, 17)
        self.parts = nn.ModuleList([Wide(), Nothing(), Wide(), Block(17)])

    def forward(self, x):
        x = self.enter(x)
        for part in self.parts:
            x = part(x)
        return x


@pytest.mark.ranks(2)
@STRATEGIES
def test_nested_unequal_and_empty_units(strategy, ranks):
    units = (Wide, Block, Nothing)
    model = check(Nested, plain_loss, ranks, strategy, units)
    names = {unit.name for unit in model.sharding_engine.units}
    assert {"", "parts.0", "parts.0.inner.0", "parts.2.inner.1", "parts.3"} <= names
    assert "parts.1" not in names, "a unit without parameters has nothing to gather"
    assert model.parts[1].seen == STEPS


class SharedModule(nn.Module):
    """One module object inside two units, and one block under two names."""

    def __init__(self):
        super().__init__()
        self.enter = nn.Linear(5, 17)
        self.blocks = nn.ModuleList(Block(17) for _ in range(3))
        self.blocks[2].up = self.blocks[0].up
        self.again = nn.ModuleList([self.blocks[1]])

    def forward(self, x):
        x = self.enter(x)
        for block in (*self.blocks, *self.again):
            x = block(x)
        return x


@pytest.mark.ranks(2)
@STRATEGIES
def test_a_module_inside_two_units_belongs_to_the_unit_around_both(strategy, ranks):
    check(SharedModule, plain_loss, ranks, strategy)


class TiedAcross(OddNet):
    """Two blocks share a weight, not a module; both have others of their own."""

    def __init__(self):
        super().__init__()
        self.blocks[2].down.weight = self.blocks[0].down.weight


@pytest.mark.ranks(2)
@STRATEGIES
def test_a_weight_tied_across_units_belongs_to_the_unit_around_both(strategy, ranks):
    model = check(TiedAcross, plain_loss, ranks, strategy)
    root = model.sharding_engine.root
    assert any(ref.name == "blocks.0.down.weight" for g in root.groups for ref in g.refs)


class RawBlock(nn.Module):
    """A block written with parameters alone."""

    def __init__(self):
        super().__init__()
        self.weight = nn.Parameter(torch.randn(17, 17) / 5)

    def forward(self, x):
        return x + torch.tanh(x @ self.weight)


def test_repeated_modules_without_submodules_are_units_but_torchs_own_are_not():
    raw = nn.Sequential(nn.Linear(3, 17), *(RawBlock() for _ in range(3)))
    assert [plan.name for plan in plan_units(raw, None)] == ["", "1", "2", "3"]
    plain = nn.Sequential(nn.Linear(5, 17), nn.Linear(17, 17), nn.Linear(17, 3))
    assert [plan.name for plan in plan_units(plain, None)] == [""]


class InLists(OddNet):
    """Blocks in lists of lists, as U-Nets have them, and weights in a list that is no module's."""

    def __init__(self):
        super().__init__()
        blocks = list(self.blocks)
        self.blocks = nn.ModuleList(nn.ModuleList([block, RawBlock()]) for block in blocks)
        self.by_name = nn.ModuleDict({"shift": RawBlock()})
        self.bank = nn.ParameterList(nn.Parameter(torch.randn(17, 40) / 9) for _ in range(2))

    def forward(self, x):
        x = self.enter(x)
        for block, mix in self.blocks:
            x = mix(block(x))
        x = self.by_name["shift"](x)
        return self.leave(x + x @ self.bank[0] @ self.bank[1].T) * self.temperature


@pytest.mark.ranks(2)
def test_containers_that_are_never_called_are_no_units(ranks):
    found = [plan.name for plan in plan_units(build(InLists), None)]
    blocks = [f"blocks.{b}.{part}" for b in range(3) for part in range(2)]
    assert found == ["", *blocks, "by_name.shift"]
    with pytest.raises(ValueError, match=r"blocks is a ModuleList, which has no forward"):
        plan_units(build(InLists), [nn.ModuleList])
    with pytest.raises(ValueError, match="the module is a ModuleList"):
        shard_module(build(InLists).blocks)
    check(InLists, plain_loss, ranks, 3, units=None)


# -- without gradients ------------------------------------------------------------------------


@pytest.mark.ranks(2)
@STRATEGIES
@pytest.mark.parametrize("mode", [torch.no_grad, torch.inference_mode])
def test_evaluation_between_microbatches(mode, strategy, ranks):
    model, optimizer = shard(AnyOrder, strategy)
    for step in range(STEPS):
        with model.no_sync():
            plain_loss(model, ranks.rank, step + 50).backward()
        with mode():
            model(inputs(model, 5), (2, 1))
        model.eval()
        with mode():
            model(inputs(model, 6))
        model.train()
        plain_loss(model, ranks.rank, step).backward()
        optimizer.step()
        optimizer.zero_grad()
    both = lambda m, r, s: plain_loss(m, r, s + 50) + plain_loss(m, r, s)  # noqa: E731
    compare(model, one_process(AnyOrder, both))


class Ends(nn.Module):
    """An embedding and a head of their own weights, larger than the blocks between them."""

    def __init__(self, reads_past=False):
        super().__init__()
        self.embedding = nn.Embedding(90, 17)
        self.blocks = nn.ModuleList(Block(17) for _ in range(2))
        self.head = nn.Linear(17, 90, bias=False)
        self.reads_past = reads_past

    def forward(self, tokens):
        x = self.embedding(tokens)
        for block in self.blocks:
            x = block(x)
        return x @ self.head.weight.T if self.reads_past else self.head(x)


def tokens_loss(model, rank, step):
    generator = torch.Generator().manual_seed(10 * step + rank)
    return model(torch.randint(90, (3, 5), generator=generator)).square().mean()


@pytest.mark.ranks(2)
def test_large_embeddings_and_heads_are_units_of_their_own(ranks):
    model = check(Ends, tokens_loss, ranks, 3, None)
    names = [unit.name for unit in model.sharding_engine.units]
    assert names == ["", "embedding", "blocks.0", "blocks.1", "head"]
    past = fully_shard(Ends(reads_past=True))
    with pytest.raises(NotImplementedError, match=r"choose the units \(fsdp_unit_modules\)"):
        tokens_loss(past, ranks.rank, 0)
    named = fully_shard(Ends(reads_past=True), fsdp_unit_modules=[Block])
    tokens_loss(named, ranks.rank, 0).backward()


class Condition(nn.Module):
    """What a block is conditioned on, as the embeddings of time in diffusers' DiT."""

    def __init__(self):
        super().__init__()
        self.inner = nn.Linear(8, 8)

    def forward(self, x):
        return self.inner(x).tanh()


class Conditioned(nn.Module):
    def __init__(self):
        super().__init__()
        self.condition, self.outer = Condition(), nn.Linear(8, 8)

    def forward(self, x):
        return self.outer(x) * self.condition(x)


class Reaching(nn.Module):
    """Its forward calls a block's part (DiT), a block's forward (timm's HRNet), or all at once."""

    def __init__(self, reach):
        super().__init__()
        self.blocks = nn.ModuleList(Conditioned() for _ in range(2))
        self.ends = nn.Sequential(nn.Linear(8, 8), nn.Linear(8, 8))
        self.reach = reach

    def forward(self, x):
        x = self.blocks[0](x)
        x = self.blocks[1].forward(x) if self.reach == "forward" else self.blocks[1](x)
        return self.ends(x) + (self.blocks[0].condition(x) if self.reach == "part" else 0)


def reaching_loss(model, rank, step):
    generator = torch.Generator().manual_seed(10 * step + rank)
    return model(torch.randn(3, 8, generator=generator)).square().mean()


@pytest.mark.ranks(2)
@pytest.mark.parametrize(("reach", "units"), [("part", [Conditioned, Condition]), ("forward", [])])
@pytest.mark.parametrize("strategy", [1, 2, 3])
def test_what_a_forward_reaches_inside_a_unit_can_be_a_unit(reach, units, strategy, ranks):
    """Otherwise the read is refused, and the message says what to choose."""
    found = fully_shard(Reaching(reach), zero_dp_strategy=strategy)
    with pytest.raises(NotImplementedError, match=r"(?s)not its \.forward.*fsdp_unit_modules"):
        reaching_loss(found, ranks.rank, 0)
    check(lambda: Reaching(reach), reaching_loss, ranks, strategy, units)


@pytest.mark.ranks(2)
@pytest.mark.parametrize("strategy", [1, 2, 3])
def test_a_method_of_a_model_that_reads_weights_names_the_call_to_make(strategy, ranks):
    model = fully_shard(OddNet(), zero_dp_strategy=strategy)
    with pytest.raises(NotImplementedError, match=r"register_forward_method\(module, name\)"):
        model.temperature.expand(3, -1)


@pytest.mark.parametrize("rows", [20, 40, 60, 80])
def test_what_the_roots_unit_holds_through_the_step_is_less_than_half_a_block(rows):
    """An embedding and a head of `rows`, beside blocks of 128 rows."""
    blocks = [nn.Sequential(nn.Linear(32, 64), nn.Linear(64, 32)) for _ in range(2)]
    model = nn.ModuleDict(
        {
            "embedding": nn.Embedding(rows, 32),
            "blocks": nn.ModuleList(blocks),
            "head": nn.Linear(32, rows, bias=False),
        }
    )
    root, *units = plan_units(model, None)
    sizes = [sum(ref.parameter.numel() for ref in unit.refs) for unit in (root, *units)]
    assert sizes[0] < sum(p.numel() for p in blocks[0].parameters()) / 2
    assert sum(sizes) == sum(p.numel() for p in model.parameters())


# -- teachers, which are frozen -------------------------------------------------------------------


@pytest.mark.ranks(2)
@pytest.mark.parametrize(
    ("strategy", "frozen"),
    [(1, "afterwards"), (2, "afterwards"), (3, "afterwards"), (3, "before it is sharded")],
)
def test_a_frozen_model_is_at_rest_after_a_forward_with_gradients_on(frozen, strategy, ranks):
    """No backward comes to it. A moving average reads its parameters next, beside the student's."""
    student, optimizer = shard(OddNet, strategy)
    if frozen == "afterwards":
        teacher = copy.deepcopy(student).requires_grad_(False)
    else:
        teacher = fully_shard(
            build(OddNet).requires_grad_(False),
            fsdp_unit_modules=[Block],
            zero_dp_strategy=strategy,
        )
    plain, averaged = build(OddNet), build(OddNet)
    plain_optimizer = sgd(plain)
    resting = list(teacher.parameters())
    for step in range(STEPS):
        x = inputs(student, 10 * step + ranks.rank)
        (student(x) - teacher(x).detach()).square().mean().backward()
        optimizer.step()
        optimizer.zero_grad()
        assert all(map(operator.is_, teacher.parameters(), resting)), "it waits"
        assert strategy < 3 or not any(unit.live_bytes for unit in teacher.sharding_engine.units)
        losses = (
            (plain(x) - averaged(x).detach()).square().mean() / 2
            for x in (inputs(plain, 10 * step + rank) for rank in range(2))
        )
        sum(losses).backward()
        plain_optimizer.step()
        plain_optimizer.zero_grad()
        with torch.no_grad():
            for model, average in ((student, teacher), (plain, averaged)):
                for new, mean in zip(model.parameters(), average.parameters(), strict=True):
                    mean.lerp_(new.detach(), 0.25)
    compare(student, plain)
    compare(teacher, averaged)


@pytest.mark.ranks(2)
@pytest.mark.parametrize("strategy", [1, 2, 3])
def test_gradients_come_through_a_model_that_was_frozen_since(strategy, ranks):
    """As of a perceptual loss, or a generator's loss by a frozen critic."""
    model, _ = shard(OddNet, strategy)
    model.requires_grad_(False)
    x = inputs(model, ranks.rank).requires_grad_()
    plain_x = x.detach().clone().requires_grad_()
    model(x).square().sum().backward()
    build(OddNet)(plain_x).square().sum().backward()
    torch.testing.assert_close(x.grad, plain_x.grad)


class Features(OddNet):
    """Says what it saw, without a graph; the features lie in an attribute."""

    def forward(self, x):
        self.features = self.enter(x + getattr(self, "prompt", 0))
        for block in self.blocks:
            self.features = block(self.features)
        self.features = self.features @ self.leave.weight.t()
        return self.features.detach()


@pytest.mark.ranks(2)
@pytest.mark.parametrize("strategy", [1, 2, 3])
@pytest.mark.parametrize("wanted", ["of the input", "of a tensor that is no parameter"])
def test_gradients_come_through_features_of_a_frozen_model(wanted, strategy, ranks):
    """The forward returns no graph, so the outputs do not say that a backward will come."""
    sharded = build(Features).requires_grad_(False)
    model = fully_shard(sharded, fsdp_unit_modules=[Block], zero_dp_strategy=strategy)
    plain, gradients = build(Features), []
    for features, call in ((sharded, model), (plain, plain)):
        x = inputs(plain, ranks.rank)
        given = x.requires_grad_() if wanted == "of the input" else torch.zeros(5).requires_grad_()
        if given is not x:
            features.prompt = given
        call(x)
        features.features.square().sum().backward()
        gradients.append(given.grad)
    torch.testing.assert_close(*gradients)


class Silent(nn.Module):
    """Leaves its result in the object that it was given, or in itself, and returns nothing."""

    def __init__(self):
        super().__init__()
        self.linear = nn.Linear(5, 5)

    def forward(self, x):
        given, read = isinstance(x, types.SimpleNamespace), getattr(x, "value", x)
        self.kept = self.linear(read).tanh()
        if given:
            x.value = self.kept


class OfSilent(nn.Module):
    def __init__(self, objects):
        super().__init__()
        self.enter, self.objects = nn.Linear(5, 5), objects
        self.blocks = nn.ModuleList(Silent() for _ in range(3))

    def forward(self, x):
        x = self.enter(x)
        for block in self.blocks:
            block(types.SimpleNamespace(value=x) if self.objects else x)
            x = block.kept
        return x


@pytest.mark.ranks(2)
@pytest.mark.parametrize("objects", [False, True])
@pytest.mark.parametrize("frozen", ["before it is sharded", "afterwards", "one block"])
def test_gradients_come_through_frozen_units_that_return_nothing(frozen, objects, ranks):
    model = build(lambda: OfSilent(objects))
    if frozen != "afterwards":
        (model if frozen != "one block" else model.blocks[1]).requires_grad_(False)
    model = fully_shard(model, fsdp_unit_modules=[Silent])
    if frozen == "afterwards":
        model.requires_grad_(False)
    plain = build(lambda: OfSilent(objects))
    for _ in range(2):
        x = torch.randn(3, 5, generator=torch.Generator().manual_seed(ranks.rank)).requires_grad_()
        plain_x = x.detach().clone().requires_grad_()
        model(x).square().sum().backward()
        plain(plain_x).square().sum().backward()
        torch.testing.assert_close(x.grad, plain_x.grad)
        assert not any(unit.live_bytes for unit in model.sharding_engine.units)
