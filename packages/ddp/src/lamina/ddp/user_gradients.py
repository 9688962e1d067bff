"""What users do to `.grad`: zeroing it, dropping it, putting tensors of their own there."""

from __future__ import annotations

import torch

from lamina.ddp.group import ParameterGroup
from lamina.ddp.rank_sums import GradientState

__all__ = ["follow_user", "zero_gradients"]


def follow_user(group: ParameterGroup) -> None:
    """Bring a group's state in line with `.grad` as the user left it."""
    gradients = group.trained
    if gradients.state is GradientState.EMPTY and not gradients.has_local:
        return
    mains = group.main_parameters
    if all(main.grad is None for main in mains):
        gradients.discard()
        return
    for index, main in enumerate(mains):
        span = gradients.main.span_view(group.refs[index].name)
        if main.grad is None:
            if gradients.state is GradientState.FINAL:
                span.zero_()
                gradients.seen[index] = False
            continue
        local = _local_of(main.grad)
        if local.data_ptr() != span.data_ptr() and span.numel():
            span.copy_(local.reshape(-1))  # the user put a tensor of their own there


def zero_gradients(group: ParameterGroup) -> None:
    """Forget all gradients, and leave zeros where some were shown (not None)."""
    gradients = group.gradients
    if gradients is None:
        return
    shown = [main.grad is not None for main in group.main_parameters]
    gradients.discard()
    if any(shown):
        gradients.main.data.zero_()
        gradients.seen = list(shown)  # the optimizer steps them, as in one process
    for index, main in enumerate(group.main_parameters):
        main.grad = group.gradient_of(index) if shown[index] else None


def _local_of(tensor: torch.Tensor) -> torch.Tensor:
    to_local = getattr(tensor, "to_local", None)
    return to_local() if to_local is not None else tensor
