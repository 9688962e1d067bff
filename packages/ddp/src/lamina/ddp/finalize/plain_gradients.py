"""The step's last reductions for modules that no wrapper holds: their `.grad`s, by role.

For meshes without data parallelism, where a wrapper would only copy.
"""

from __future__ import annotations

import weakref
from collections.abc import Iterable, Sequence

import torch
from torch import nn

from lamina.collectives import all_reduce_fp32
from lamina.collectives.engine import all_reduce_small, host_device
from lamina.ddp.finalize.finalize import FinalizesStep, tied_axis
from lamina.mesh import ParallelMesh, role_of
from lamina.mesh.engine import MeshAxis

__all__ = ["finalize_plain_grads"]

_SUMMED = "_lamina_summed"
"""On a `.grad` that is a sum over tp or stages already."""


def finalize_plain_grads(modules: nn.Module | Sequence[nn.Module], mesh: ParallelMesh) -> None:
    """`finalize_grads` for modules as they are: gradients stay where autograd put them.

    Gradients of parameters that every tp rank holds whole are combined by their role, those of
    parameters tied across pipeline stages are summed, and submodules with a `finalize_step` have
    their turn. Collective over the mesh.

    Args:
        modules: a module, or this rank's pipeline stages in order.
        mesh: without data-parallel ranks.

    Raises:
        ValueError: if the mesh has data-parallel or context-parallel ranks: nobody would sum over
            them.
        RuntimeError: a second time for gradients that it has summed over tp or stages.
    """
    data = mesh.axis("dp_cp")
    if data.size > 1:
        raise ValueError(
            f"the mesh has {data.size} data-parallel ranks ({mesh!r}), and the modules are not "
            "wrapped, so nobody sums their gradients over them: wrap each in "
            "DistributedDataParallel or fully_shard"
        )
    copies_of_experts = mesh.axis("expert_dp").size
    stages = [modules] if isinstance(modules, nn.Module) else list(modules)
    parameters = [p for stage in stages for p in stage.parameters() if p.requires_grad]
    if copies_of_experts > 1 and any(role_of(p).expert for p in parameters):
        raise ValueError(
            f"{copies_of_experts} ranks hold copies of the same experts (expert_dp of {mesh!r}) "
            "and see different tokens, and the modules are not wrapped, so nobody sums the copies' "
            "gradients: wrap each in DistributedDataParallel or fully_shard"
        )
    _refuse_twice(stages)
    for expert, axis in ((False, mesh.axis("tp")), (True, mesh.axis("expert_tp"))):
        own = [p for p in parameters if role_of(p).expert is expert]
        for kind in ("sum", "mean"):
            chosen = [p for p in own if role_of(p).tp_grad == kind]
            _combine(chosen, axis, 1.0 / axis.size if kind == "mean" else None)
            if kind == "sum" and axis.size > 1:
                _note_summed(chosen)
    copies: dict[str, list[torch.Tensor]] = {}
    for parameter in parameters:
        if (name := role_of(parameter).tied) is not None:
            copies.setdefault(name, []).append(parameter)
    for held in copies.values():  # V-shaped schedules: one rank holds both stages
        if len(held) > 1:
            _sum_here(held)
            _note_summed(held)
    single = sorted(name for name, held in copies.items() if len(held) == 1)
    if (ends := tied_axis(single, mesh)) is not None:
        _combine([copies[name][0] for name in single], ends, None)
        _note_summed([copies[name][0] for name in single])
    for module in (module for stage in stages for module in stage.modules()):
        if isinstance(module, FinalizesStep):
            module.finalize_step(mesh)


def _refuse_twice(stages: Iterable[nn.Module]) -> None:
    """Sums must not be summed again, with or without what later backwards have added."""
    for name, parameter in (named for stage in stages for named in stage.named_parameters()):
        grad = parameter.grad
        if grad is not None and hasattr(grad, _SUMMED) and bool(grad.any()):
            raise RuntimeError(
                f"finalize_plain_grads(): the gradient of {name} is summed over tp ranks or "
                "stages by an earlier call (a pipeline's step() makes one), and would be summed "
                "again: call it once, after the step's last backward (accumulate with more "
                "microbatches), and zero_grad() before the next step"
            )


def _note_summed(parameters: Iterable[torch.Tensor]) -> None:
    for parameter in parameters:
        if parameter.grad is not None and not hasattr(parameter.grad, _SUMMED):
            setattr(parameter.grad, _SUMMED, True)
            _forget_when_zeroed(parameter)


def _forget_when_zeroed(parameter: torch.Tensor) -> None:
    """Zeroed in place, a gradient begins anew: seen when the next one comes to be added."""
    reference = weakref.ref(parameter)  # the parameter holds its hooks

    def before(_: torch.Tensor) -> None:
        held = reference()
        summed = None if held is None else held.grad
        if summed is None or not hasattr(summed, _SUMMED):
            handle.remove()
        elif not bool(summed.any()):
            handle.remove()
            delattr(summed, _SUMMED)

    handle = parameter.register_hook(before)  # type: ignore[no-untyped-call]


def _combine(parameters: Sequence[torch.Tensor], axis: MeshAxis, scale: float | None) -> None:
    """Sum `.grad`s over an axis with one collective per dtype; one that is missing counts as 0."""
    if axis.size == 1 or not parameters:
        return
    group = axis.sibling("reduce")
    device = host_device([group], parameters[0].device)
    flags = torch.tensor([p.grad is not None for p in parameters], dtype=torch.int32, device=device)
    all_reduce_small([flags], group, op="max")
    present = [p for p, seen in zip(parameters, flags.tolist(), strict=True) if seen]
    for dtype in sorted({p.dtype for p in present}, key=str):
        grads = [_gradient(p) for p in present if p.dtype == dtype]
        packed = torch.cat([grad.reshape(-1) for grad in grads])
        packed = packed.to(torch.promote_types(dtype, torch.float32))
        all_reduce_fp32(packed, packed, group, scale=scale)
        _write(grads, packed)


def _sum_here(parameters: Sequence[torch.Tensor]) -> None:
    grads = [p.grad for p in parameters if p.grad is not None]
    if grads:
        total = sum(grads[1:], start=grads[0])
        for parameter in parameters:
            _gradient(parameter).copy_(total)


def _gradient(parameter: torch.Tensor) -> torch.Tensor:
    if parameter.grad is None:
        parameter.grad = torch.zeros_like(parameter)
    return parameter.grad


def _write(tensors: Iterable[torch.Tensor], packed: torch.Tensor) -> None:
    offset = 0
    for tensor in tensors:
        tensor.copy_(packed[offset : offset + tensor.numel()].view(tensor.shape))
        offset += tensor.numel()
