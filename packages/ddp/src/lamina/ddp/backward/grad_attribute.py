"""What users do to `.grad`: zeroing it, dropping it, putting tensors of their own there."""

from __future__ import annotations

import torch

from lamina.ddp.gradients.sums import GradientState
from lamina.ddp.group.group import ParameterGroup

__all__ = ["follow_user", "holds_zeros", "refuse_unsummed", "zero_gradients"]


def follow_user(group: ParameterGroup) -> None:
    """Bring a group's state in line with `.grad` as the user left it.

    Raises:
        RuntimeError: if gradients that are kept apart until the last microbatch would have to be
            changed otherwise than all to zero; or if a backward raised that would have added to
            gradients held before it, and nobody has dropped both.
    """
    gradients = group.trained
    # Where the optimizer's parameters are the module's, the backward itself has emptied `.grad`.
    visible = group.main_parameters[0] is not group.refs[0].parameter
    dropped = visible and all(main.grad is None for main in group.main_parameters)
    if gradients.at_risk and not dropped:
        raise RuntimeError(
            f"a backward raised half-way, and the gradient of {group.refs[0].name} held earlier "
            "microbatches: some of the raised one's may be among them. Call zero_grad_buffer() of "
            "the wrapped module and begin the step again (from its first microbatch)"
        )
    if gradients.state is GradientState.EMPTY and not gradients.has_local:
        return
    mains = group.main_parameters
    if all(main.grad is None for main in mains):
        gradients.discard()
        return
    stepped = group.gradients_to_step
    for index, main in enumerate(mains):
        span = stepped.span_view(index)
        if main.grad is None:
            if gradients.kept_apart and gradients.state is GradientState.PARTIAL:
                raise RuntimeError(_unfinished(group.refs[index].name))
            gradients.drop(index)
            continue
        local = _local_of(main.grad)
        if local.data_ptr() != span.data_ptr() and span.numel():
            span.copy_(local.reshape(-1))  # the user put a tensor of their own there
            if gradients.state is GradientState.FINAL:
                gradients.seen[index] = True
                main.grad = group.gradient_of(index)  # further changes reach what is stepped
    if gradients.kept_apart and group.written_since:
        _follow_zeroing(group)


def _follow_zeroing(group: ParameterGroup) -> None:
    """Somebody has written to the place of gradients that are elsewhere: zeros, one hopes.

    The place held negative zeros (or gradients): what is not `zero_()` leaves something of them.
    """
    stepped = group.gradients_to_step
    for index, ref in enumerate(group.refs):
        span = stepped.span_view(index)
        if bool(span.ne(0).logical_or_(span.signbit()).any()):
            raise RuntimeError(_unfinished(ref.name))
    zero_gradients(group)


def refuse_unsummed(group: ParameterGroup, what: str) -> None:
    """Refuse to read gradients that are not summed over ranks, or not all of them.

    Args:
        group: whose gradients; `follow_user` is called first, and raises as it does.
        what: who reads them, for the message.

    Raises:
        RuntimeError: if any is waiting in `no_sync`, unless the user has made it zeros.
    """
    follow_user(group)
    gradients = group.trained
    waiting = gradients.has_local or gradients.state is GradientState.PARTIAL
    if waiting and not holds_zeros(group):
        raise RuntimeError(
            f"{what} while the gradient of {group.refs[0].name} waits to be summed over ranks (its "
            "last backward was inside no_sync()): call finish_grad_sync() of the wrapped module "
            "first, or run the step's last backward outside no_sync()"
        )


def holds_zeros(group: ParameterGroup) -> bool:
    """Whether the gradients that are held are zeros (the user's `zero_()`), summed or not."""
    gradients = group.trained
    if gradients.kept_apart or not gradients.main.has_memory:
        return False
    stepped = group.gradients_to_step
    return not any(bool(stepped.span_view(index).any()) for index in range(len(group.refs)))


def _unfinished(name: str) -> str:
    return (
        f"the gradient of {name} was changed between microbatches, and what it holds then is kept "
        "apart until the last one: only zeroing those of all its neighbours in the buffer can be "
        "followed. Zero with zero_grad() of the wrapped module or of one optimizer over all of "
        "them, scale with scale_gradients(), and unscale or clip after finish_grad_sync()"
    )


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
