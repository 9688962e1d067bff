"""Tied parameters are stored once."""

from __future__ import annotations

import pytest
import torch
from torch import nn

from lamina.buffers import Granularity
from lamina.buffers.engine import collect_specs


def tied_model(device="cpu"):
    model = nn.ModuleDict(
        {"embed": nn.Embedding(5, 3, device=device), "head": nn.Linear(3, 5, device=device)}
    )
    model["head"].weight = model["embed"].weight
    return model


@pytest.mark.parametrize("device", ["cpu", "meta"])
def test_tied_parameters_are_stored_once(device):
    collected = collect_specs(tied_model(device).named_parameters(remove_duplicate=False))
    assert [spec.name for spec in collected.specs] == ["embed.weight", "head.bias"]
    assert collected.canonical["head.weight"] == "embed.weight"


def test_one_view_under_two_parameters_is_tied():
    whole = torch.zeros(4, 3)
    pair = [("a", nn.Parameter(whole)), ("b", nn.Parameter(whole))]
    assert len(collect_specs(pair).specs) == 1


def test_different_views_of_one_memory_are_refused():
    whole = torch.zeros(4, 3)
    with pytest.raises(ValueError, match="'b' and 'a' share memory"):
        collect_specs([("a", nn.Parameter(whole)), ("b", nn.Parameter(whole[1:]))])
    apart = [("a", nn.Parameter(whole[:2])), ("b", nn.Parameter(whole[2:]))]
    assert len(collect_specs(apart).specs) == 2


def test_granularity_is_chosen_by_name_and_tensor():
    collected = collect_specs(
        nn.Linear(3, 2).named_parameters(),
        lambda name, tensor: Granularity.row() if tensor.dim() > 1 else Granularity.element(),
    )
    assert [spec.granule for spec in collected.specs] == [3, 1]
    with pytest.raises(ValueError, match="two tensors are named 'w'"):
        collect_specs([("w", torch.zeros(1)), ("w", torch.zeros(1))])
