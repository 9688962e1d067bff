"""What a test body knows about the rank it runs on."""

from __future__ import annotations

from collections.abc import Iterator
from contextlib import contextmanager
from contextvars import ContextVar
from dataclasses import dataclass
from typing import TYPE_CHECKING

if TYPE_CHECKING:
    import torch

_device_type = ContextVar("device_type", default="cpu")


def device_type() -> str:
    """Return the kind of device that the tensors of this body belong to: "cpu" or "cuda"."""
    return _device_type.get()


@contextmanager
def tensors_on(device: torch.device) -> Iterator[None]:
    """Have a body make its tensors on a device, also those drawn from a generator of the CPU."""
    from lamina_testing.default_device import DefaultDevice

    before = _device_type.set(device.type)
    try:
        with DefaultDevice(device):
            yield
    finally:
        _device_type.reset(before)


@dataclass(frozen=True)
class Ranks:
    """The value of the `ranks` fixture inside a body marked `@pytest.mark.ranks`.

    `rank` and `world_size` are those of the default process group, `backend` is the name the
    marker or `--backend` gave ("gloo", "nccl" or "fake"), `device` is where this rank's
    tensors belong: the CPU, or one GPU per rank.
    """

    rank: int
    world_size: int
    backend: str
    device: torch.device
