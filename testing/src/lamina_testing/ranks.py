"""What a test body knows about the rank it runs on."""

from __future__ import annotations

from dataclasses import dataclass
from typing import TYPE_CHECKING

if TYPE_CHECKING:
    import torch


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
