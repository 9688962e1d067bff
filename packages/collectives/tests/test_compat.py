"""Old and new names of torch's collectives, without warnings."""

from __future__ import annotations

import types
import warnings

import pytest
import torch
import torch.distributed as dist

from lamina.collectives import compat
from lamina.collectives.transport.groups import backend_name


def torch_with(*names: str) -> types.SimpleNamespace:
    def named(name: str):
        return lambda *args, **kwargs: (name, args, kwargs)

    return types.SimpleNamespace(ReduceOp=dist.ReduceOp, **{name: named(name) for name in names})


@pytest.mark.parametrize(
    ("function", "old", "new"),
    [
        (compat.all_gather_single, "all_gather_into_tensor", "all_gather_single"),
        (compat.reduce_scatter_single, "reduce_scatter_tensor", "reduce_scatter_single"),
    ],
)
def test_the_new_name_is_used_where_there_is_one_and_else_the_old(monkeypatch, function, old, new):
    for present, chosen in (((old,), old), ((old, new), new), ((new,), new)):
        monkeypatch.setattr(compat, "dist", torch_with(*present))
        name, args, kwargs = function("output", "input", "group", async_op=True)
        assert name == chosen
        assert args == ("output", "input")
        assert kwargs["group"] == "group"
        assert kwargs["async_op"] is True
    monkeypatch.setattr(compat, "dist", torch_with())
    with pytest.raises(RuntimeError, match=f"has none of .*{new}.*{old}"):
        function("output", "input", "group")


@pytest.mark.ranks(2)
def test_torchs_own_collectives_are_reached_without_warnings():
    output, piece, group = torch.empty(4), torch.ones(2), dist.group.WORLD
    with warnings.catch_warnings():
        warnings.simplefilter("error")
        compat.all_gather_single(output, piece, group)
        compat.reduce_scatter_single(piece, output, group)
        work = compat.all_gather_single(output, piece, group, async_op=True)
        assert work is not None
        work.wait()
    assert torch.equal(output, torch.full((4,), 2.0))


@pytest.mark.ranks(2)
def test_a_device_that_a_group_does_not_serve_is_named():
    assert backend_name(dist.group.WORLD, torch.device("cpu")) == "gloo"
    with pytest.raises(ValueError, match=r"has no backend for xpu tensors.*init_distributed"):
        backend_name(dist.group.WORLD, torch.device("xpu"))
