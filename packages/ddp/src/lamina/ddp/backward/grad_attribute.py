"""What users do to `.grad`: zeroing it, dropping it, putting tensors of their own there."""

import torch

from lamina.ddp.gradients.states import GradientState
from lamina.ddp.group.group import ParameterGroup

__all__ = ["follow_user", "holds_zeros", "local_of", "refuse_unsummed", "zero_gradients"]


def follow_user(group: ParameterGroup) -> None:
    """Bring a group's state in line with `.grad` as the user left it.

    RuntimeError says that gradients that are kept apart until the last microbatch would have to be
    changed otherwise than all to zero; or that a backward raised that would have added to gradients
    held before it, and nobody has dropped both.
    """
    group.follow_compute_grads()
    gradients = group.trained
    dropped = not group.shows_gradients
    if gradients.at_risk and not dropped:
        raise RuntimeError(
            f"a backward raised half-way, and the gradient of {group.refs[0].name} held earlier "
            "microbatches: some of the raised one's may be among them. Call zero_grad_buffer() of "
            "the wrapped module and begin the step again (from its first microbatch)"
        )
    if dropped:
        if not gradients.is_empty:
            gradients.discard()
        return
    views = group.gradient_views
    if gradients.is_empty:
        mains = zip(group.main_parameters, views, strict=True)
        if all(main.grad is None or main.grad is view for main, view in mains):
            return  # nothing was put there since they were zeroed
        gradients.zero_if_empty()
    for index, main in enumerate(group.main_parameters):
        if main.grad is None:
            if gradients.is_kept_apart and gradients.state is GradientState.PARTIAL:
                raise RuntimeError(_unfinished(group.refs[index].name))
            gradients.drop(index)
        elif main.grad is not views[index]:
            _adopt(group, index, main.grad)
    if gradients.is_kept_apart and group.written_since:
        _follow_zeroing(group)


def _adopt(group: ParameterGroup, index: int, given: torch.Tensor) -> None:
    """The user put a tensor of their own in `.grad`: take its values."""
    gradients = group.trained
    span, local = _span(group, index), local_of(given)
    if local.data_ptr() == span.data_ptr() or not span.numel():
        return
    span.copy_(local.reshape(-1))
    if gradients.state.is_final:
        gradients.mark_produced(
            [flag or i == index for i, flag in enumerate(gradients.produced_gradient)]
        )
        # Further changes reach what is stepped.
        group.main_parameters[index].grad = group.gradient_views[index]


def _follow_zeroing(group: ParameterGroup) -> None:
    """Somebody has written to placeholders: drop the gradients if it was zeros, or refuse it.

    Note [Zeros that tell zeroing]
        Gradients that wait for a step's last microbatch may lie outside main grads. `.grad` then
        shows a placeholder, since a `zero_grad(set_to_none=False)` has to be noticed and a torch
        optimizer has no hook for it. The placeholder is filled with -0.0, which equals zero for
        whoever looks. A version counter tells that somebody has written. If every element is +0.0
        then, the write was `zero_()`, and the gradients are dropped. Anything else (a factor, a
        clipped norm) would be lost, and is refused. See docs/decisions/0408.
    """
    for index, ref in enumerate(group.refs):
        span = _span(group, index)
        if bool(span.ne(0).logical_or_(span.signbit()).any()):
            raise RuntimeError(_unfinished(ref.name))
    zero_gradients(group)


def refuse_unsummed(group: ParameterGroup, what: str) -> None:
    """Refuse to read gradients that are not summed over ranks, or not all of them.

    `what` reads them. `follow_user` is called first, and raises as it does. RuntimeError says that
    one is waiting in `no_sync`, unless the user has made it zeros.
    """
    follow_user(group)
    gradients = group.trained
    if gradients.is_waiting and not holds_zeros(group):
        raise RuntimeError(
            f"{what} while the gradient of {group.refs[0].name} waits to be summed over ranks (its "
            "last backward was inside no_sync()): call finish_grad_sync() of the wrapped module "
            "first, or run the step's last backward outside no_sync()"
        )


def holds_zeros(group: ParameterGroup) -> bool:
    """Whether the gradients that are held are zeros (the user's `zero_()`), summed or not."""
    gradients = group.trained
    if gradients.is_kept_apart or not gradients.main.has_memory:
        return False
    return not any(bool(_span(group, index).any()) for index in range(len(group.refs)))


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
        gradients.mark_produced(shown)  # the optimizer steps them, as in one process
    group.show_where(shown)


def _span(group: ParameterGroup, index: int) -> torch.Tensor:
    """What `.grad` of a main parameter shows, flat."""
    start, stop = group.spans[index]
    return group.gradients_to_step.data[start:stop]


def local_of(tensor: torch.Tensor) -> torch.Tensor:
    """What this rank holds of a tensor: the span of a sharded one, or all of it."""
    to_local = getattr(tensor, "to_local", None)
    return to_local() if to_local is not None else tensor
