"""Gradient scalers whose ranks agree, over the whole mesh, on whether a step overflowed.

Note [The question of a scaler]
A scaler decides from the gradients of its rank whether to skip a step, and nothing tells an
optimizer that a scaler is about to decide for it. But before a scaler looks at any gradient it asks
the optimizer whether that scales by itself (`_step_supports_amp_scaling`). `answer_scalers` puts a
value there that is true or false as the optimizer's own was. When it is asked, it finishes the
gradients, and refuses a plain scaler where other ranks hold other parameters. See
docs/decisions/0518.
"""

import weakref
from typing import Any

import torch
from torch.distributed.device_mesh import DeviceMesh
from torch.optim import Optimizer

from lamina.collectives.engine import all_reduce_small
from lamina.ddp.optimizer.flat_step import BorrowedGroups
from lamina.ddp.parameters.axes import whole_mesh
from lamina.mesh import ParallelMesh

_QUESTION, _AGREED = "_step_supports_amp_scaling", "_lamina_overflow_agreed"


class ShardedGradScaler(torch.amp.GradScaler):  # type: ignore[misc, unused-ignore]
    """`torch.amp.GradScaler` for meshes with tensor, pipeline or expert parallelism.

    Each rank there looks at other parameters. A plain scaler lets those of one rank overflow and
    the others step: weights, scales and step counts then differ for good.

    Args:
        mesh: the mesh the model was wrapped over.
        settings: of `torch.amp.GradScaler`; `device` is the mesh's unless given.

    Examples:
        >>> scaler = ShardedGradScaler(ParallelLayout().build("cpu"), device="cpu")
    """

    def __init__(self, mesh: ParallelMesh | DeviceMesh, **settings: Any) -> None:
        settings.setdefault("device", mesh.device_type)
        super().__init__(**settings)
        self._axes = whole_mesh(mesh)

    def _unscale_grads_(
        self,
        optimizer: Optimizer,
        inv_scale: torch.Tensor,
        found_inf: torch.Tensor,
        allow_fp16: bool,
    ) -> dict[torch.device, torch.Tensor]:
        overflows = super()._unscale_grads_(optimizer, inv_scale, found_inf, allow_fp16)
        anywhere = found_inf.clone()  # a rank without gradients takes part as well
        for overflow in overflows.values():
            anywhere = torch.maximum(anywhere, overflow.to(anywhere.device))
        for axis in self._axes:
            all_reduce_small([anywhere], axis.sibling("reduce"), op="max")
        return {anywhere.device: anywhere}

    def step(self, optimizer: Optimizer, *args: Any, **kwargs: Any) -> float | None:
        """As torch's; the whole mesh steps, or nobody does."""
        optimizer.__dict__[_AGREED] = True
        return super().step(optimizer, *args, **kwargs)


def answer_scalers(optimizer: Optimizer, borrowed: BorrowedGroups, ranks: int) -> None:
    """Refuse gradient scalers whose ranks would disagree, and let others see final gradients.

    `borrowed` is what it steps over. Ranks beyond their data-parallel ones hold other parameters
    (tp, pp, ep, expert_tp), which a plain scaler does not see: with more `ranks` than these it is
    refused when it steps. Gradients are finished when a scaler asks.
    """
    answer = getattr(optimizer, _QUESTION, False)
    if not isinstance(answer, _Answer):
        optimizer.__dict__[_QUESTION] = _Answer(optimizer, bool(answer), borrowed, ranks)


class _Answer:
    """True or false as the optimizer had it. See Note [The question of a scaler]."""

    def __init__(
        self, optimizer: Optimizer, own: bool, borrowed: BorrowedGroups, ranks: int
    ) -> None:
        self._optimizer = weakref.ref(optimizer)
        self._own, self._borrowed, self._ranks = own, borrowed, ranks

    def __bool__(self) -> bool:
        optimizer = self._optimizer()
        # Ranks along the data-parallel axes have the same gradients, and so the same answer. Others
        # may differ, unless somebody has made them agree.
        alike = min([self._ranks, *(group.axes.size for group in self._borrowed.trained)])
        agreed = optimizer is not None and optimizer.__dict__.get(_AGREED, False)
        if alike < self._ranks and not agreed:
            raise RuntimeError(
                f"torch's GradScaler looks at this rank's gradients, and {alike} of the "
                f"{self._ranks} ranks share them: the others, along tp, pp, ep or expert_tp, "
                "hold other gradients, so some would skip a step that the rest make. Use "
                "lamina.ddp.ShardedGradScaler(mesh) with the mesh of all of them"
            )
        self._borrowed.finish_gradients()
        return self._own
