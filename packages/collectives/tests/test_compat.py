"""Old and new names of torch's collectives, without warnings."""

from __future__ import annotations

import types
import warnings
from contextlib import contextmanager

import pytest
import torch
import torch.distributed as dist

from lamina.collectives import compat
from lamina.collectives.transport.groups import backend_name
from lamina.collectives.transport.lanes import Call


@pytest.mark.parametrize(
    ("old", "new"),
    [
        ("all_gather_into_tensor", "all_gather_single"),
        ("reduce_scatter_tensor", "reduce_scatter_single"),
    ],
)
def test_the_new_name_is_used_where_there_is_one_and_else_the_old(monkeypatch, old, new):
    function = getattr(compat, new)
    assert function is getattr(dist, new, None) or function is getattr(dist, old)
    for present, chosen in (((old,), old), ((old, new), new), ((new,), new)):
        torch_with = types.SimpleNamespace(**{name: name for name in present})
        monkeypatch.setattr(compat, "dist", torch_with)
        assert compat._first(new, old) == chosen
    monkeypatch.setattr(compat, "dist", types.SimpleNamespace())
    with pytest.raises(RuntimeError, match=f"has none of .*{new}.*{old}"):
        compat._first(new, old)


@pytest.mark.ranks(2)
def test_torchs_own_collectives_are_reached_without_warnings():
    output, piece, group = torch.empty(4), torch.ones(2), dist.group.WORLD
    with warnings.catch_warnings():
        warnings.simplefilter("error")
        compat.all_gather_single(output, piece, group=group)
        compat.reduce_scatter_single(piece, output, group=group)
        work = compat.all_gather_single(output, piece, group=group, async_op=True)
        assert work is not None
        work.wait()
    assert torch.equal(output, torch.full((4,), 2.0))


@pytest.mark.ranks(2)
def test_a_device_that_a_group_does_not_serve_is_named():
    assert backend_name(dist.group.WORLD, torch.device("cpu")) == "gloo"
    with pytest.raises(ValueError, match=r"has no backend for xpu tensors.*init_distributed"):
        backend_name(dist.group.WORLD, torch.device("xpu"))


class Device:
    """As much of CUDA as asking an event takes: the capture mode and the GPU of this thread."""

    def __init__(self) -> None:
        self.mode, self.index, self.asked = 0, 0, []

    def cuThreadExchangeStreamCaptureMode(self, wanted):
        wanted._obj.value, self.mode = self.mode, wanted._obj.value
        return 0

    @contextmanager
    def current(self, device):
        before, self.index = self.index, device.index
        yield
        self.index = before

    def event(self, answer):
        def query():
            self.asked.append((self.mode, self.index))
            if isinstance(answer, Exception):
                raise answer
            return answer

        return types.SimpleNamespace(device=torch.device("cuda", 3), query=query)


def test_events_are_asked_beside_a_capture_and_on_their_own_device(monkeypatch):
    device = Device()
    monkeypatch.setattr(compat.ctypes, "CDLL", lambda name: device)
    monkeypatch.setattr(torch.cuda, "device", device.current)
    assert compat.has_ended(device.event(True))
    assert not compat.has_ended(device.event(False))
    with pytest.raises(RuntimeError, match="illegal"):
        compat.has_ended(device.event(RuntimeError("illegal memory access")))
    assert device.asked == [(2, 3)] * 3  # relaxed, and not GPU 0
    assert device.mode == 0


def test_an_event_that_has_ended_is_asked_no_more(monkeypatch):
    device = Device()
    monkeypatch.setattr(compat.ctypes, "CDLL", lambda name: device)
    monkeypatch.setattr(torch.cuda, "device", device.current)
    call = Call("all_gather_into", "dp", 2, torch.float32, 4, True, issued_ns=0)
    call.device_ended = device.event(False)
    assert call.waited_for() > 1.0
    call.device_ended = device.event(True)
    assert call.waited_for() is None
    assert call.waited_for() is None
    assert len(device.asked) == 2
