"""The one state of a group's weights says whether they are there and what modules hold, always."""

import ast
import pathlib

import pytest
import torch
from torch.utils.checkpoint import checkpoint

from lamina.collectives import Ledger
from lamina.ddp import engine as of_ddp
from lamina.ddp.engine import WeightsState
from lamina.ddp.execution import unit as source
from lamina.ddp.group.weights import TRANSITIONS
from lamina.fsdp import engine as of_fsdp
from lamina.fsdp import fully_shard
from lamina_testing.toys import Block, OddNet, inputs

HELD = {  # what modules hold; whether the bytes are there
    WeightsState.RELEASED: ("main", False),
    WeightsState.GATHERING: ("main", True),
    WeightsState.READY: ("main", True),
    WeightsState.STALE: ("compute", False),
    WeightsState.REFRESHING: ("compute", True),
    WeightsState.IN_USE: ("compute", True),
}


class Checkpointed(OddNet):
    reentrant = False

    def forward(self, x):
        x = self.enter(x)
        for block in self.blocks:
            x = checkpoint(block, x, use_reentrant=self.reentrant)
        return self.leave(x) * self.temperature + self.empty.sum()


class Reentrant(Checkpointed):
    reentrant = True


class Reused(OddNet):
    def forward(self, x):
        x = self.enter(x)
        for block in (*self.blocks, *self.blocks):
            x = block(x)
        return self.leave(x) * self.temperature + self.empty.sum()


def build(make=OddNet, **settings):
    torch.manual_seed(3)
    return fully_shard(make(), fsdp_unit_modules=[Block], **settings)


def held(group):
    """Whether modules hold a group's main parameters or its compute parameters."""
    kinds = set()
    for ref, main in zip(group.refs, group.main_parameters, strict=True):
        for owner, attribute in ref.owners:
            now = owner()._parameters[attribute]
            kinds.add("main" if now is main else "compute" if now is ref.parameter else "other")
    return kinds


def check(model, seen):
    for unit in model.sharding_engine.units:
        for group in unit.groups:
            state = group.weights.state
            seen.add((state, unit.in_backward))
            holds, there = HELD[state]
            assert held(group) == {holds}, (unit.title, state)
            assert bool(group.weights.full.untyped_storage().nbytes()) is there, (unit.title, state)


@pytest.mark.matrix(strength=1)
@pytest.mark.ranks(2)
@pytest.mark.parametrize("make", [OddNet, Checkpointed, Reentrant, Reused])
@pytest.mark.parametrize("reshard", [None, False, True])
def test_modules_and_weights_are_as_the_state_says(make, reshard, ranks):
    model = build(make, reshard_after_forward=reshard)
    seen = set()

    def look(_, args, output):
        check(model, seen)
        if output.requires_grad:
            output.register_hook(lambda gradient: check(model, seen))

    for module in model.modules():
        if not list(module.children()):
            module.register_forward_hook(look)
    for step in range(2):
        check(model, seen)
        loss = model(inputs(model, 10 * step + ranks.rank)).square().mean()
        check(model, seen)
        loss.backward()
        for unit in model.sharding_engine.units:
            assert {group.weights.state for group in unit.groups} == {WeightsState.RELEASED}
            assert not unit.in_backward
        check(model, seen)
        model.zero_grad()
    assert seen >= {
        (WeightsState.RELEASED, False),
        (WeightsState.GATHERING, False),
        (WeightsState.IN_USE, False),
        (WeightsState.IN_USE, True),
    }


@pytest.mark.ranks(2)
def test_weights_that_are_written_while_modules_compute_are_old_until_they_are_gathered(ranks):
    model = build(reshard_after_forward=False)
    loss = model(inputs(model, ranks.rank)).square().mean()
    groups = [group for unit in model.sharding_engine.units for group in unit.groups]
    assert {group.weights.state for group in groups} == {WeightsState.IN_USE}
    model.start_param_sync()  # main weights were written by hand, with a backward to come
    assert {group.weights.state for group in groups} == {WeightsState.STALE}
    check(model, set())
    for unit in model.sharding_engine.units:
        unit.start_unshard()
    assert {group.weights.state for group in groups} == {WeightsState.REFRESHING}
    check(model, set())
    loss.backward()
    assert {group.weights.state for group in groups} == {WeightsState.RELEASED}
    check(model, set())


class CalledAgain(OddNet):
    """The block that is called first is called again at the end."""

    def forward(self, x):
        x = self.enter(x)
        for block in (*self.blocks, self.blocks[0]):
            x = block(x)
        return self.leave(x) * self.temperature + self.empty.sum()


class CalledAgainFromData(CalledAgain):
    """The same, and what its first call is given needs no gradient, as a batch does not."""

    def __init__(self):
        super().__init__()
        self.enter.requires_grad_(False)


class Around(torch.nn.Module):
    def __init__(self, inside):
        super().__init__()
        self.inside, self.scale = inside, torch.nn.Parameter(torch.ones(17))

    def forward(self, x):
        return self.inside(x) * self.scale


class Nested(OddNet):
    """The last block is inside another unit, whose backward comes first."""

    def __init__(self):
        super().__init__()
        self.blocks[2] = Around(self.blocks[2])


AGAIN = {
    OddNet: (["0", "1", "2"], ["1", "0"]),
    CalledAgain: (["0", "1", "2", "0"], ["2", "1"]),
    CalledAgainFromData: (["0", "1", "2", "0"], ["2", "1"]),
    Nested: (["0", "1", "2", "2.inside"], ["2.inside", "1", "0"]),
}
"""Blocks as a forward gathers them, and as its backward gathers them again."""


def gathered_blocks(ledger):
    titles = [r.purpose for r in ledger.records if r.op == "all_gather_into"]
    names = [t.removeprefix("blocks.") for t in titles if t.startswith("blocks.")]
    return [name.partition(".norm")[0].removesuffix(".scale") for name in names]


@pytest.mark.ranks(2)
@pytest.mark.parametrize("make", AGAIN)
@pytest.mark.parametrize("overlap", [True, False])
def test_the_unit_whose_last_call_ends_last_is_kept_for_its_backward(make, overlap, ranks):
    torch.manual_seed(3)
    settings = {"fsdp_unit_modules": [Block, Around], "overlap_param_gather": overlap}
    model = fully_shard(make(), **settings)
    for step in range(3):
        with Ledger() as forward:
            loss = model(inputs(model, 10 * step + ranks.rank)).square().mean()
        with Ledger() as backward:
            loss.backward()
        if step:  # the first one is not known in advance
            assert (gathered_blocks(forward), gathered_blocks(backward)) == AGAIN[make]
        model.zero_grad()


def test_every_state_is_entered_and_left():
    entered = {after for rows in TRANSITIONS.values() for after in rows.values()}
    left = {before for rows in TRANSITIONS.values() for before in rows}
    assert entered == left == set(WeightsState)


def test_no_other_file_changes_a_units_state():
    """Nor any other attribute of it: what others want of a unit are methods."""
    tree = ast.parse(pathlib.Path(source.__file__).read_text())
    (unit,) = (c for c in tree.body if isinstance(c, ast.ClassDef) and c.name == "Unit")
    own = {
        node.attr
        for node in ast.walk(unit)
        if isinstance(node, ast.Attribute) and isinstance(node.ctx, ast.Store)
    }
    assert "in_backward" in own
    folders = (pathlib.Path(face.__file__).parent for face in (of_ddp, of_fsdp))
    for path in (path for folder in folders for path in folder.rglob("*.py")):
        for node in ast.walk(ast.parse(path.read_text())):
            if isinstance(node, ast.Attribute) and isinstance(node.ctx, ast.Store):
                of_unit = isinstance(node.value, ast.Name) and "unit" in node.value.id
                of_unit |= isinstance(node.value, ast.Attribute) and "unit" in node.value.attr
                assert not (of_unit and node.attr in own), f"{path.name}: {node.lineno}"
