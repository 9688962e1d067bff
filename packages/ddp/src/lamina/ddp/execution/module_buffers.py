"""When ranks take the first one's buffers: one policy for all wrappers.

Buffers (running statistics, tables, codebooks) have no gradient, so nothing else brings them
together. A rank that computed its own statistics would evaluate another model than its peers.
"""

from collections.abc import Collection, Iterable, Iterator
from typing import Literal

import torch
from torch import nn

from lamina.collectives.engine import broadcast
from lamina.ddp.parameters.axes import DataParallelAxes
from lamina.mesh import role_of

BufferPolicy = Literal["forward", "start", "never"] | bool
"""The setting `broadcast_buffers` of every wrapper. True and False are "forward" and "never"."""

_STATISTICS = (nn.BatchNorm1d, nn.BatchNorm2d, nn.BatchNorm3d, nn.SyncBatchNorm)


class ModuleBuffers:
    """Brings the buffers of one model together (collective).

    Ranks along ep hold different experts, so buffers of experts go over the axes `expert`, if the
    mesh has these. `ignored` are qualified names of buffers that each rank keeps.
    """

    def __init__(
        self,
        policy: BufferPolicy,
        dense: DataParallelAxes,
        expert: DataParallelAxes | None,
        ignored: Collection[str] = (),
    ) -> None:
        self._at_start = policy not in ("never", False)
        self.per_forward = policy in ("forward", True)
        """Whether forwards bring them together too."""
        self._axes = {False: dense, True: dense if expert is None else expert}
        self._has_experts = expert is not None
        self._ignored = frozenset(ignored)
        self._written = True
        """Whether the forward before this one may have written buffers, as those of training do.
        Of a model that has run in no forward yet nobody knows: it may be a copy of one that has."""

    def start(self, root: nn.Module, modules: Iterable[nn.Module]) -> None:
        """The model is being wrapped.

        Own buffers of the modules, which are in the model or unit `root`, are sent.
        """
        if self._at_start:
            self._send(root, {id(module) for module in modules})

    def before_forward(self, root: nn.Module) -> None:
        """A forward of the model begins: one of training, or the first after it, as in torch."""
        if self.per_forward:
            if root.training or self._written:
                self._send(root, {id(module) for module in root.modules()})
            self._written = root.training

    def _send(self, root: nn.Module, chosen: set[int]) -> None:
        """Take the first rank's, with one collective for all of one device."""
        experts = set(_of_experts(root)) if self._has_experts else set()
        by_kind: dict[tuple[bool, torch.device], list[torch.Tensor]] = {}
        for prefix, module in root.named_modules():
            for name, buffer in module._buffers.items() if id(module) in chosen else ():
                if buffer is None or not buffer.numel() or buffer.is_meta:
                    continue
                if f"{prefix}.{name}".removeprefix(".") not in self._ignored:
                    # `.data` leaves the version alone, as batch norm itself does: no backward
                    # reads statistics, and one of an earlier forward may be still to come.
                    written = buffer.data if isinstance(module, _STATISTICS) else buffer
                    by_kind.setdefault((id(module) in experts, buffer.device), []).append(written)
        for (of_expert, _), buffers in by_kind.items():
            _broadcast(buffers, self._axes[of_expert])


def _broadcast(buffers: list[torch.Tensor], axes: DataParallelAxes) -> None:
    # Bytes, because backends do not know all dtypes.
    sent = [b.detach().contiguous().reshape(-1).view(torch.uint8) for b in buffers]
    together = torch.cat(sent)
    for group in axes.groups("gather"):
        broadcast(together, group, src=0).wait()
    pieces = torch.split(together, [piece.numel() for piece in sent])
    with torch.no_grad():
        for buffer, piece in zip(buffers, pieces, strict=True):
            # A copy, because a piece may begin where its dtype may not.
            buffer.copy_(piece.clone().view(buffer.dtype).view(buffer.shape))


def _of_experts(root: nn.Module) -> Iterator[int]:
    """`id`s of the modules at and below which all parameters, one at least, are experts'."""
    for module in root.modules():
        roles = [role_of(parameter).expert for parameter in module.parameters()]
        if roles and all(roles):
            yield from (id(below) for below in module.modules())
