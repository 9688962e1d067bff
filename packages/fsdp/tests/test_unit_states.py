"""A unit's state says what its modules hold and whether its weights are there, at every moment."""

import ast
import pathlib

import pytest
import torch
from torch.utils.checkpoint import checkpoint

from lamina.ddp.engine import WeightsState
from lamina.fsdp import fully_shard
from lamina.fsdp.execution import unit as source
from lamina.fsdp.execution.unit import TRANSITIONS, UnitState
from lamina_testing.toys import Block, OddNet, inputs

SEEN = {
    UnitState.AT_REST: (WeightsState.RELEASED, "main"),
    UnitState.WHOLE: (WeightsState.READY, "compute"),
    UnitState.IN_BACKWARD: (WeightsState.READY, "compute"),
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


def held(unit):
    """Whether modules hold a unit's main parameters or its compute parameters."""
    kinds = set()
    for group in unit.groups:
        for ref, main in zip(group.refs, group.main_parameters, strict=True):
            for owner, attribute in ref.owners:
                now = owner()._parameters[attribute]
                kinds.add("main" if now is main else "compute" if now is ref.parameter else "other")
    return kinds


def check(model, seen):
    for unit in model.sharding_engine.units:
        seen.add(unit.state)
        if unit.state in SEEN:
            weights, holds = SEEN[unit.state]
            assert {one.state for one in unit.gathered} == {weights}, (unit.title, unit.state)
            assert held(unit) == {holds}, (unit.title, unit.state)


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
        assert {unit.state for unit in model.sharding_engine.units} == {UnitState.AT_REST}
        check(model, seen)
        model.zero_grad()
    assert seen == set(UnitState)


def test_every_state_is_entered_and_left():
    entered = {after for rows in TRANSITIONS.values() for after in rows.values()}
    left = {before for rows in TRANSITIONS.values() for before in rows}
    assert entered == left == set(UnitState)


def test_no_other_file_changes_a_units_state():
    """Nor any other attribute of a unit: what others want of it are methods."""
    tree = ast.parse(pathlib.Path(source.__file__).read_text())
    (unit,) = (c for c in tree.body if isinstance(c, ast.ClassDef) and c.name == "Unit")
    own = {
        node.attr
        for node in ast.walk(unit)
        if isinstance(node, ast.Attribute) and isinstance(node.ctx, ast.Store)
    }
    assert "state" in own
    folder = pathlib.Path(source.__file__).parents[1]
    for path in folder.rglob("*.py"):
        for node in ast.walk(ast.parse(path.read_text())):
            if isinstance(node, ast.Attribute) and isinstance(node.ctx, ast.Store):
                of_unit = isinstance(node.value, ast.Name) and "unit" in node.value.id
                of_unit |= isinstance(node.value, ast.Attribute) and "unit" in node.value.attr
                assert not (of_unit and node.attr in own), f"{path.name}: {node.lineno}"
