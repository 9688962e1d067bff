"""The last word on gradients before the optimizer: every reduction that is not data-parallel.

In this order: data-parallel sums are finished; gradients of parameters that every tp rank holds
whole are combined over tp by their role; gradients of parameters tied across pipeline stages are
summed; submodules with a `finalize_step` have their turn; all is divided by the global token count.
"""

import warnings
import weakref
from collections.abc import Iterable, Sequence
from typing import Any, Protocol, runtime_checkable

import torch
from torch import nn
from torch.distributed.device_mesh import DeviceMesh
from torch.optim import Optimizer

from lamina.collectives.engine import all_reduce_small, broadcast
from lamina.ddp.finalize.role_sums import (
    GroupGradient,
    PlainGradient,
    is_summed_over_tp,
    sum_over_tp,
    sum_tied,
    wide_axis,
)
from lamina.ddp.gradients.states import GradientState
from lamina.ddp.group.group import ParameterGroup
from lamina.ddp.inspect.inspection import groups_of
from lamina.mesh import ParallelMesh

_SUMMED = "_lamina_summed"
"""On a `.grad` that is a sum over tp or stages already."""


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
        modules: a wrapped module, or this rank's pipeline stages in order (`runner.stages`).
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

    Examples:
        >>> mesh = ParallelLayout().build("cpu")
        >>> model = DistributedDataParallel(torch.nn.Linear(4, 1), mesh=mesh)
        >>> model(torch.ones(2, 4)).mean().backward()
        >>> finalize_grads(model, mesh)
    """
    stages = _stages(modules)
    # Sums over data-parallel ranks end first: the steps below read them.
    for stage in stages:
        finish = getattr(stage, "finish_grad_sync", None)
        if finish is not None:
            finish()
    groups = [
        group for stage in stages for group in groups_of(stage) if group.gradients is not None
    ]
    # Every group is looked at before anything is summed, so an error leaves all gradients as they
    # were.
    for group in groups:
        group.shown.follow_user()
        role = group.refs[0].role
        sums = num_tokens is not None or role.tied is not None or is_summed_over_tp(role, mesh)
        finalized = group.trained.state is GradientState.FINALIZED
        if finalized and sums and not group.shown.holds_zeros:
            raise _called_twice("finalize_grads", group.refs[0].name)
    gradients = [GroupGradient(group) for group in groups]
    sum_over_tp(gradients, mesh)
    sum_tied(gradients, mesh)
    for group in groups:
        if group.refs[0].role.tp_grad is not None or group.refs[0].role.tied is not None:
            group.shown.show()
    _finalize_submodules(stages, mesh)
    if num_tokens is not None:
        _divide_by_tokens(groups, mesh, num_tokens)
    for group in groups:
        group.trained.mark_finalized()


def _stages(modules: nn.Module | Sequence[nn.Module]) -> list[nn.Module]:
    """One module, or those of a list; a `ModuleList` is a list unless it is wrapped itself."""
    single = isinstance(modules, nn.Module) and type(modules) is not nn.ModuleList
    return [modules] if single else list(modules)  # type: ignore[list-item, arg-type]


def finalize_plain_gradients(modules: nn.Module | Sequence[nn.Module], mesh: ParallelMesh) -> None:
    """`finalize_grads` for modules that no wrapper holds: gradients stay where autograd put them.

    For meshes without data parallelism, where a wrapper would only copy. Collective over the mesh.

    `modules` are a module, or the pipeline stages of this rank in order. ValueError says that the
    mesh has data-parallel or context-parallel ranks, over which nobody would sum; RuntimeError that
    it has summed these gradients over tp or stages before.
    """
    stages = _stages(modules)
    named = (pair for stage in stages for pair in stage.named_parameters())
    gradients = [PlainGradient(name, p) for name, p in named if p.requires_grad]
    _refuse_data_parallel(gradients, mesh)
    for gradient in gradients:
        grad = gradient.parameter.grad
        # Sums must not be summed again, with or without what later backwards have added.
        if grad is not None and hasattr(grad, _SUMMED) and bool(grad.any()):
            raise _called_twice("finalize_plain_gradients", gradient.name)
    sum_over_tp(gradients, mesh)
    summed = [gradient for gradient in gradients if is_summed_over_tp(gradient.role, mesh)]
    for gradient in (*summed, *sum_tied(gradients, mesh)):
        _mark_summed(gradient.parameter)
    _finalize_submodules(stages, mesh)


def _called_twice(function: str, name: str) -> RuntimeError:
    """What was summed over tp or stages, or divided, must not be so again. A mean of means may."""
    return RuntimeError(
        f"{function}(): the gradient of {name} is final since an earlier call (a pipeline's step() "
        "makes one), and would be summed or divided again: call it once, after the step's last "
        "backward (accumulate with no_sync(), or with more microbatches in a pipeline's step()), "
        "and zero_grad() before the next step"
    )


def _refuse_data_parallel(gradients: Iterable[PlainGradient], mesh: ParallelMesh) -> None:
    remedy = "wrap each in DistributedDataParallel or fully_shard"
    if (size := mesh.axis("dp_cp").size) > 1:
        raise ValueError(
            f"the mesh has {size} data-parallel ranks ({mesh!r}), and the modules are not "
            f"wrapped, so nobody sums their gradients over them: {remedy}"
        )
    # Without data parallelism of the dense parameters, ranks may still hold copies of the same
    # experts.
    size = mesh.axis("expert_dp").size
    if size > 1 and any(gradient.role.expert for gradient in gradients):
        raise ValueError(
            f"{size} ranks hold copies of the same experts (expert_dp of {mesh!r}) and see "
            "different tokens, and the modules are not wrapped, so nobody sums the copies' "
            f"gradients: {remedy}"
        )


def _mark_summed(parameter: torch.Tensor) -> None:
    """Remember on `.grad` that it is summed, until it is zeroed in place or dropped.

    A gradient that was zeroed in place begins anew. That is seen when the next one comes.
    """
    if parameter.grad is None or hasattr(parameter.grad, _SUMMED):
        return
    setattr(parameter.grad, _SUMMED, True)
    reference = weakref.ref(parameter)  # the parameter holds its hooks

    def before(_: torch.Tensor) -> None:
        """A gradient is about to be added: forget a sum that was dropped or zeroed."""
        summed = getattr(reference(), "grad", None)
        if summed is None or not hasattr(summed, _SUMMED):
            handle.remove()  # it was dropped
        elif not bool(summed.any()):
            handle.remove()  # it was zeroed, and what comes now is no sum yet
            delattr(summed, _SUMMED)

    handle = parameter.register_hook(before)  # type: ignore[no-untyped-call]


def _finalize_submodules(stages: Iterable[nn.Module], mesh: ParallelMesh | DeviceMesh) -> None:
    for stage in stages:
        for module in stage.modules():
            if isinstance(module, FinalizesStep):
                module.finalize_step(mesh)


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
    stages = wide_axis(mesh, "pp")
    if stages is not None:
        broadcast(count, stages.sibling("reduce"), src=stages.size - 1)
    count.clamp_(min=1)  # all tokens masked: the gradients are zeros, and stay so
    for group in chosen:
        if group.trained.state is not GradientState.EMPTY:
            main = group.trained.main.data
            main.div_(count.to(main.dtype))


def warn_of_unfinished_steps(optimizer: Optimizer, module: nn.Module) -> None:
    """Warn, once, before a step that comes without `finalize_grads` to modules that need it.

    Those are submodules with a `finalize_step` whose attribute `needs_finalize` is true then: a
    router whose bias has not moved since tokens were counted, for one. Its method `leave_steps` is
    called, if there is one: the submodule need not look for steps itself.

    The optimizer gets a hook if there is such a submodule.
    """
    watched = [
        (name, part) for name, part in module.named_modules() if isinstance(part, FinalizesStep)
    ]
    if not watched:
        return
    for _, part in watched:
        if (leave := getattr(part, "leave_steps", None)) is not None:
            leave()

    def before(_: Optimizer, args: tuple[Any, ...], kwargs: dict[str, Any]) -> None:
        """Warn once, if a submodule waits for its end of a step."""
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
