"""Roles: what was marked is what is read, marks add up, and contradictions are errors."""

from __future__ import annotations

import copy

import pytest
import torch
from torch import nn

from lamina.mesh import Role, mark, role_of
from lamina.mesh.engine import copy_role, copy_roles


def weight(*shape: int) -> nn.Parameter:
    return nn.Parameter(torch.zeros(shape))


def test_an_unmarked_parameter_has_the_default_role() -> None:
    assert role_of(weight(2)) == Role()


def test_what_was_marked_is_read() -> None:
    parameter = weight(6, 4)
    returned = mark(
        parameter, tp_shard_dim=-2, tp_blocks=[8, 4], expert=True, tied="embedding", block_rows=2
    )
    assert returned is parameter
    assert role_of(parameter) == Role(
        tp_shard_dim=0, tp_blocks=(8, 4), expert=True, tied="embedding", block_rows=2
    )


def test_marks_add_up() -> None:
    parameter = mark(weight(4, 2), tp_shard_dim=0)
    mark(parameter, tied="embedding")
    mark(parameter, tp_shard_dim=0)
    assert role_of(parameter) == Role(tp_shard_dim=0, tied="embedding")


def test_a_mark_does_not_change_behind_its_readers_back() -> None:
    parameter = mark(weight(4, 2), tp_shard_dim=0)
    with pytest.raises(ValueError, match=r"marked tp_shard_dim=0 already and can't become .*=1"):
        mark(parameter, tp_shard_dim=1)
    assert role_of(parameter) == Role(tp_shard_dim=0)


@pytest.mark.parametrize(
    ("fields", "message"),
    [
        ({"tp_shard_dim": 2}, r"tp_shard_dim=2: a parameter of shape \(6, 4\).*dimensions 0\.\.1"),
        ({"tp_shard_dim": -3}, r"tp_shard_dim=-3"),
        ({"tp_grad": "max"}, r"tp_grad='max'.*'sum', 'mean' or None"),
        ({"tp_shard_dim": 0, "tp_grad": "sum"}, r"sharded over tp .* Give one of the two"),
        ({"tied": ""}, r"tied=''"),
        ({"block_rows": 0}, r"block_rows=0"),
        ({"tp_blocks": (6,)}, r"give tp_shard_dim too"),
        ({"tp_shard_dim": 0, "tp_blocks": ()}, r"positive length of each block"),
        ({"tp_shard_dim": 0, "tp_blocks": (6, 5)}, r"sum to 11 .* no multiple of the 6"),
        ({"tp_shard_dim": 0, "tp_blocks": (3, 9)}, r"2 tp ranks, and block 3 is not divisible"),
    ],
)
def test_marks_that_cannot_be_are_refused(fields: dict, message: str) -> None:
    parameter = weight(6, 4)
    with pytest.raises(ValueError, match=message):
        mark(parameter, **fields)
    assert role_of(parameter) == Role()


def test_a_role_is_copied_to_what_replaces_a_parameter() -> None:
    source, target = mark(weight(4), expert=True), mark(weight(4), tied="x")
    copy_role(source, target)
    assert role_of(target) == Role(expert=True)


@pytest.mark.parametrize("renew", [copy.deepcopy, lambda m: copy.copy(m).to_empty(device="cpu")])
def test_roles_can_be_given_back_to_a_module_whose_parameters_were_made_anew(renew) -> None:
    module = nn.Sequential(nn.Linear(2, 2, device="meta"), nn.Linear(2, 2, device="meta"))
    for index, parameter in enumerate(module.parameters()):
        mark(parameter, tied=f"tie {index}")
    template = copy.deepcopy(module)
    copy_roles(module, template)
    renewed = renew(module)
    copy_roles(template, renewed)
    assert [role_of(p).tied for p in renewed.parameters()] == [f"tie {i}" for i in range(4)]


def test_copies_of_a_layer_keep_the_roles_of_its_parameters() -> None:
    layer = nn.Linear(4, 4)
    layer.tied = layer.weight
    mark(layer.weight, block_rows=2)
    made = copy.deepcopy(copy.deepcopy(layer))
    assert role_of(made.weight) == Role(block_rows=2)
    assert made.tied is made.weight
    assert type(made.weight) is nn.Parameter
    assert torch.equal(made.weight, layer.weight)
    assert made.weight.data_ptr() != layer.weight.data_ptr()


def test_roles_are_not_copied_between_different_modules() -> None:
    with pytest.raises(ValueError, match="'bias'"):
        copy_roles(nn.Linear(2, 2), nn.Linear(2, 2, bias=False))
