"""Casting memory where it lies, and storing tied parameters once."""

from __future__ import annotations

import pytest
import torch
from hypothesis import given, settings
from hypothesis import strategies as st
from torch import nn
from torch.utils._python_dispatch import TorchDispatchMode

from lamina.buffers import Granularity, in_place_cast
from lamina.buffers.engine import cast_in_place, collect_specs

DTYPES = [torch.float64, torch.float32, torch.bfloat16, torch.float16, torch.float8_e4m3fn]


@settings(max_examples=60, deadline=None)
@given(
    st.sampled_from(DTYPES), st.sampled_from(DTYPES), st.integers(0, 300), st.sampled_from([1, 7])
)
def test_a_cast_in_place_gives_the_values_of_a_cast(old, new, numel, head):
    values = torch.randn(numel, generator=torch.Generator().manual_seed(numel)).to(old)
    room = torch.empty(numel * 8 + 16, dtype=torch.uint8)
    region = room.view(old)[:numel] if numel else room[:0].view(old)
    region = region.copy_(values)
    saved, in_place_cast._HEAD = (
        in_place_cast._HEAD,
        head,
    )  # so that all pieces occur
    try:
        result = cast_in_place(region, new)
    finally:
        in_place_cast._HEAD = saved
    assert result.data_ptr() == region.data_ptr()
    assert torch.equal(result.view(torch.uint8), values.to(new).view(torch.uint8))


class LargestCopy(TorchDispatchMode):
    """Notes the most elements that any new tensor of a cast has."""

    def __init__(self):
        super().__init__()
        self.numel = 0

    def __torch_dispatch__(self, func, types, args=(), kwargs=None):
        if func is torch.ops.aten._to_copy.default:
            self.numel = max(self.numel, args[0].numel())
        return func(*args, **(kwargs or {}))


def test_a_cast_in_place_needs_little_memory_beside_it():
    flat = torch.arange(1_000_000.0)
    for dtype in (torch.bfloat16, torch.float32, torch.int32):
        with LargestCopy() as meter:
            flat = cast_in_place(flat, dtype)
        assert 0 < meter.numel <= 65_536


def test_casting_an_inner_region_leaves_its_neighbours_alone():
    flat = torch.arange(12.0)
    cast_in_place(flat[4:8], torch.bfloat16)
    assert torch.equal(flat[:4], torch.arange(4.0))
    assert torch.equal(flat[8:], torch.arange(8.0, 12.0))


def test_a_wider_cast_needs_room():
    with pytest.raises(ValueError, match=r"need 32 bytes from byte 0.*the storage has 16"):
        cast_in_place(torch.zeros(8, dtype=torch.bfloat16), torch.float32)
    with pytest.raises(ValueError, match="flat"):
        cast_in_place(torch.zeros(2, 2), torch.bfloat16)


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
    assert collected.aliases("head.weight") == ("embed.weight", "head.weight")


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
