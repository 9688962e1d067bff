"""The last word on gradients before the optimizer: every reduction that is not data-parallel.

In this order: data-parallel sums are finished; gradients of parameters that every tp rank holds
whole are combined over tp by their role; gradients of parameters tied across pipeline stages are
summed; submodules with a `finalize_step` have their turn; all is divided by the global token count.
"""

from __future__ import annotations

import warnings
import zlib
from collections.abc import Iterable, Sequence
from typing import Any, Protocol, runtime_checkable

import torch
from torch import nn
from torch.distributed.device_mesh import DeviceMesh
from torch.optim import Optimizer

from lamina.collectives import all_reduce_fp32
from lamina.collectives.engine import all_reduce_small, broadcast, host_device
from lamina.ddp.backward.grad_attribute import follow_user, holds_zeros
from lamina.ddp.backward.reducer import agree_on_seen
from lamina.ddp.gradients.sums import GradientState
from lamina.ddp.group.group import ParameterGroup
from lamina.ddp.inspect.inspection import groups_of
from lamina.mesh import ParallelMesh
from lamina.mesh.engine import MeshAxis, axis_if_there

__all__ = ["FinalizesStep", "finalize_grads", "tied_axis", "warn_of_unfinished_steps"]


@runtime_checkable
class FinalizesStep(Protocol):
    """A submodule with work of its own between backward and optimizer step (a router's bias)."""

    def finalize_step(self, mesh: ParallelMesh | DeviceMesh) -> None:
        """Called once per step on every rank, after all gradients are summed."""
        ...


def finalize_grads(
    modules: nn.Module | Sequence[nn.Module],
    mesh: ParallelMesh | DeviceMesh,
    *,
    num_tokens: torch.Tensor | int | None = None,
) -> None:
    """Finish the gradients of a step. Collective over the whole mesh.

    Args:
        modules: a wrapped module, or this rank's pipeline stages in order.
        mesh: the mesh.
        num_tokens: this rank's number of tokens in the step, counted where the loss is: on the
            last pipeline stage. Other stages' values are ignored, but give one (0) there. None on
            all ranks for mean losses. With it, wrappers must have left sums
            (`calculate_per_token_loss=True`).

    Raises:
        TypeError: for a module that was not wrapped by Lamina.
        ValueError: for a token count where gradients are means already, or for tied parameters
            whose copies are not on the first and the last stage (or both here).
        RuntimeError: a second time for the same step, where that would sum or divide again.
    """
    stages = [modules] if isinstance(modules, nn.Module) else list(modules)
    for stage in stages:
        finish = getattr(stage, "finish_grad_sync", None)
        if finish is not None:
            finish()
    groups = [
        group for stage in stages for group in groups_of(stage) if group.gradients is not None
    ]
    for group in groups:
        follow_user(group)
        _refuse_twice(group, mesh, num_tokens)
    _combine_over_tp(groups, mesh)
    _sum_tied(groups, mesh)
    for stage in stages:
        for module in stage.modules():
            if isinstance(module, FinalizesStep):
                module.finalize_step(mesh)
    if num_tokens is not None:
        _divide_by_tokens(groups, mesh, num_tokens)
    for group in groups:
        group.trained.finalised = group.trained.state is GradientState.FINAL


def _refuse_twice(
    group: ParameterGroup,
    mesh: ParallelMesh | DeviceMesh,
    num_tokens: torch.Tensor | int | None,
) -> None:
    """What was summed over tp or stages, or divided, must not be so again. A mean of means may."""
    if not group.trained.finalised:
        return
    role = group.refs[0].role
    summed = role.tp_grad == "sum" and _axis(mesh, "expert_tp" if role.expert else "tp")
    again = num_tokens is not None or role.tied is not None or summed
    if again and not holds_zeros(group):
        raise RuntimeError(
            f"finalize_grads(): the gradient of {group.refs[0].name} is final since an earlier "
            "call (a pipeline's step() makes one), and would be summed or divided again: call it "
            "once, after the step's last backward (accumulate with no_sync(), or with more "
            "microbatches in a pipeline's step()), and zero_grad() before the next step"
        )


def _combine_over_tp(groups: Sequence[ParameterGroup], mesh: ParallelMesh | DeviceMesh) -> None:
    for name, expert in (("tp", False), ("expert_tp", True)):
        chosen = [
            group
            for group in groups
            if group.refs[0].role.tp_grad is not None and group.refs[0].role.expert is expert
        ]
        axis = _axis(mesh, name)
        if axis is not None and chosen:
            _combine(chosen, axis)
        elif expert and chosen and isinstance(mesh, DeviceMesh) and _axis(mesh, "tp") is not None:
            raise ValueError(
                f"{chosen[0].refs[0].name} belongs to an expert and has tp_grad: which ranks hold "
                "it whole is known to a ParallelMesh (its expert_tp axis), not to a DeviceMesh"
            )


def _combine(chosen: Sequence[ParameterGroup], axis: MeshAxis) -> None:
    _zero_unseen(chosen, axis)
    for kind in ("sum", "mean"):
        members = [
            group.trained.main.data
            for group in chosen
            if group.refs[0].role.tp_grad == kind and any(group.trained.seen)
        ]
        _all_reduce_together(members, axis, 1.0 / axis.size if kind == "mean" else None)
    for group in chosen:
        group.show_gradients()


def _zero_unseen(groups: Sequence[ParameterGroup], axis: MeshAxis) -> None:
    """A gradient that only some tp ranks have is zero on the others."""
    agree_on_seen(groups, [axis.sibling("reduce")])
    for group in groups:
        if any(group.trained.seen):
            group.trained.zero_if_empty()


def _sum_tied(groups: Iterable[ParameterGroup], mesh: ParallelMesh | DeviceMesh) -> None:
    """Tied parameters have groups of their own, so all copies are cut alike.

    Under V-shaped schedules one rank holds both stages, and the others neither.
    """
    copies: dict[str, list[ParameterGroup]] = {}
    for group in groups:
        if (name := group.refs[0].role.tied) is not None:
            copies.setdefault(name, []).append(group)
    for held in copies.values():
        if len(held) > 1:
            _sum_here(held)
    tied = [held[0] for _, held in sorted(copies.items()) if len(held) == 1]
    axis = tied_axis([name for name, held in copies.items() if len(held) == 1], mesh)
    if axis is None:
        return
    _zero_unseen(tied, axis)
    tied = [group for group in tied if any(group.trained.seen)]
    _all_reduce_together([g.trained.main.data for g in tied], axis, None)
    for group in tied:
        group.show_gradients()


def _sum_here(held: Sequence[ParameterGroup]) -> None:
    """Sum the gradients of copies on this rank, and give all of them the sum."""
    shapes = {group.layout.specs[0].shape: group.refs[0].name for group in held}
    if len(shapes) > 1:
        raise ValueError(
            f"{' and '.join(shapes.values())} are tied as {held[0].refs[0].role.tied!r} and have "
            f"shapes {list(shapes)}: copies of one parameter have one shape"
        )
    if not any(flag for group in held for flag in group.trained.seen):
        return
    first, *others = (group.trained for group in held)
    for gradients in (first, *others):
        gradients.zero_if_empty()
        gradients.seen = [True] * len(gradients.seen)
    for gradients in others:
        first.main.data.add_(gradients.main.data)
    for gradients in others:
        gradients.main.data.copy_(first.main.data)
    for group in held:
        group.show_gradients()


def _all_reduce_together(
    tensors: Sequence[torch.Tensor], axis: MeshAxis, scale: float | None
) -> None:
    """Sum several flat tensors over an axis in fp32 with one collective per dtype."""
    group = axis.sibling("reduce")
    by_dtype: dict[torch.dtype, list[torch.Tensor]] = {}
    for tensor in tensors:
        by_dtype.setdefault(torch.promote_types(tensor.dtype, torch.float32), []).append(tensor)
    for dtype, members in by_dtype.items():
        packed = torch.cat([member.to(dtype) for member in members])
        all_reduce_fp32(packed, packed, group, scale=scale)
        offset = 0
        for member in members:
            member.copy_(packed[offset : offset + member.numel()])
            offset += member.numel()


def _divide_by_tokens(
    groups: Iterable[ParameterGroup],
    mesh: ParallelMesh | DeviceMesh,
    num_tokens: torch.Tensor | int,
) -> None:
    chosen = list(groups)
    averaged = [group for group in chosen if group.settings.scale is not None]
    if averaged:
        raise ValueError(
            f"num_tokens={num_tokens}: gradients of {averaged[0].refs[0].name} are means over "
            "data-parallel ranks already; wrap the model with calculate_per_token_loss=True, or "
            "leave num_tokens out"
        )
    device = chosen[0].device if chosen else torch.device("cpu")
    count = torch.as_tensor(num_tokens, dtype=torch.int64, device=device).reshape(1).clone()
    if isinstance(mesh, ParallelMesh):
        all_reduce_small([count], mesh.axis("dp_cp").sibling("reduce"))
    elif chosen:
        for process_group in chosen[0].axes.groups("reduce"):
            all_reduce_small([count], process_group)
    stages = _axis(mesh, "pp")
    if stages is not None:
        broadcast(count, stages.sibling("reduce"), src=stages.size - 1)
    count.clamp_(min=1)  # all tokens masked: the gradients are zeros, and stay so
    for group in chosen:
        if group.trained.state is not GradientState.EMPTY:
            main = group.trained.main.data
            main.div_(count.to(main.dtype))


def _axis(mesh: ParallelMesh | DeviceMesh, name: str) -> MeshAxis | None:
    axis = axis_if_there(mesh, name)
    return axis if axis is not None and axis.size > 1 else None


def tied_axis(names: Iterable[str], mesh: ParallelMesh | DeviceMesh) -> MeshAxis | None:
    """The first and the last pipeline stage, which hold one copy each of the same parameters.

    Collective over those two stages, which compare what they hold.

    Args:
        names: what this rank holds one copy of (the `tied` of a role).
        mesh: the mesh.

    Returns:
        None where nobody else holds copies.

    Raises:
        ValueError: for a tie to a stage in between, or one that only one of the two stages knows.
    """
    held = sorted(names)
    stages = axis_if_there(mesh, "pp")
    if stages is None or stages.size == 1:
        return None
    first_or_last = stages.rank in (0, stages.size - 1)
    if held and not first_or_last:
        raise ValueError(
            f"stage {stages.rank} of {stages.size} holds a parameter marked tied={held[0]!r}: "
            "gradients of tied parameters are summed between the first and the last stage only; "
            "move it there, or give it a name of its own"
        )
    if isinstance(mesh, ParallelMesh):
        axis = mesh.embedding_axis
    else:
        axis = stages if stages.size == 2 else None
        if axis is None and held:
            raise ValueError(
                f"tied={held[0]!r} on a DeviceMesh with {stages.size} stages: the first and the "
                "last need a group of their own, which ParallelLayout(...).build() makes"
            )
    if axis is None or axis.size == 1:
        return None
    _agree(held, axis, mesh.device_type)
    return axis if held else None


def _agree(held: list[str], axis: MeshAxis, device_type: str) -> None:
    """Raise ValueError on both stages if they hold other names."""
    number = zlib.crc32("\0".join(held).encode()) if held else 0
    group = axis.sibling("reduce")
    device = host_device([group], device_type)
    extremes = torch.tensor([number, -number], dtype=torch.int64, device=device)
    all_reduce_small([extremes], group, op="max")
    largest, negated = extremes.tolist()
    if largest != -negated:
        raise ValueError(
            f"this stage (ranks {axis.ranks}, place {axis.rank}) holds parameters tied as "
            f"{held or 'nothing'}, and the stage at the other end of the pipeline others: mark "
            "both copies of a tied parameter with the same name, and freeze both or none"
        )


def warn_of_unfinished_steps(optimizer: Optimizer, module: nn.Module) -> None:
    """Warn, once, before a step that comes without `finalize_grads` to modules that need it.

    Those are submodules with a `finalize_step` whose attribute `needs_finalize` is true then: a
    router whose bias has not moved since tokens were counted, for one. An attribute `step_watched`
    is set to True, if there is one: the submodule need not look for steps itself.

    Args:
        optimizer: what steps; it gets a hook if there is such a submodule.
        module: the model.
    """
    watched = [
        (name, part) for name, part in module.named_modules() if isinstance(part, FinalizesStep)
    ]
    if not watched:
        return
    for _, part in watched:
        if hasattr(part, "step_watched"):  # it would look for steps itself
            part.step_watched = True

    def before(_: Optimizer, args: tuple[Any, ...], kwargs: dict[str, Any]) -> None:
        names = [name for name, part in watched if getattr(part, "needs_finalize", False)]
        if names:
            watched.clear()
            shown = ", ".join(names[:4]) + (", ..." if len(names) > 4 else "")
            warnings.warn(
                f"the optimizer steps, and {shown} have work of their own at the end of a step (a "
                "router's bias, its counts for a global loss) that is left undone: call "
                "lamina.ddp.finalize_grads(model, mesh) after the last backward of every step",
                stacklevel=4,
            )

    optimizer.register_step_pre_hook(before)
