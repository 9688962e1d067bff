"""Operators on meta tensors as another device runs them.

A meta tensor takes the path that torch has for any device: attention that keeps all scores, norms
in six operators, products that are rounded before they are added. On a GPU (and on a CPU) one
kernel does it and keeps less for backward. Inside `device_forms` the kernel's own operator is
called, whose meta form has the right results.
"""

from __future__ import annotations

from collections.abc import Iterator
from contextlib import contextmanager
from dataclasses import dataclass
from functools import wraps
from typing import Any

import torch
from torch import Tensor
from torch.nn import functional as F

from lamina.models.attention import kernels
from lamina.models.base import computing_device
from lamina.models.base.computing_device import has_values, planned_as
from lamina.models.compat import LACKS_WRITTEN_SCALED_MM_ON_META, scoped_library
from lamina.models.layers.norms import rms_norm_on_cpu
from lamina.models.plan.record.storages import local_memory


@contextmanager
def device_forms(device_type: str) -> Iterator[None]:
    """Tensors without values are attended, normed and multiplied as on `cuda` or `cpu`.

    Blocks choose their kernels by `computes_on`. torch's own functions, which choose by the tensor,
    are replaced where callers look them up: a mode of torch's would not reach what runs again in a
    backward.
    """
    attention, rms_norm, flex = (
        F.scaled_dot_product_attention,
        torch.rms_norm,
        kernels.flex_function,
    )

    @wraps(attention)  # torch's context parallelism replaces the function by its name
    def of_device(query: Tensor, key: Tensor, value: Tensor, *args: Any, **options: Any) -> Tensor:
        of_values = has_values(query) and not torch.compiler.is_compiling()
        if of_values or args or not _has_kernel(device_type, options):
            return attention(query, key, value, *args, **options)
        return _attended(device_type, query, key, value, **options)

    # Models call this one with a factor. A norm without one has the same form on all devices.
    def fused(x: Tensor, shape: Any, weight: Tensor | None = None, eps: Any = None) -> Tensor:
        if has_values(local_memory(x)) or weight is None:
            return rms_norm(x, shape, weight, eps)
        if device_type == "cpu":
            return rms_norm_on_cpu(x, weight, eps)
        # A GPU's operator has no meta form: torch takes it apart there, and keeps two tensors in
        # fp32 for backward. Layer norm's has one, and moves and keeps the same.
        return F.layer_norm(x, shape, weight, eps=1e-5 if eps is None else eps)

    def of_flex(name: str, compiled: bool, **options: Any) -> Any:
        if compiled or device_type != "cuda":
            return flex(name, compiled, **options)
        return _flex_attention if name == "flex_attention" else _no_mask

    replaced: Any = (
        (F, "scaled_dot_product_attention", attention, of_device),
        (torch, "rms_norm", rms_norm, fused),
        (kernels, "flex_function", flex, of_flex),
        (computing_device, "traced_for", computing_device.traced_for, lambda _: device_type),
    )
    for module, name, _, function in replaced:
        setattr(module, name, function)
    try:
        with planned_as(device_type), scoped_library("aten", "IMPL") as library:
            if LACKS_WRITTEN_SCALED_MM_ON_META:
                library.impl("_scaled_mm_v2.out", _written, "Meta")
            yield
    finally:
        for module, name, function, _ in replaced:
            setattr(module, name, function)


def _written(*_: object, out: Tensor) -> Tensor:
    """A product that is written into `out`."""
    return out


def _has_kernel(device_type: str, options: dict[str, Any]) -> bool:
    """Whether the device has a kernel that keeps no scores; on CPUs it takes no dropout."""
    if device_type == "cuda":
        return True
    return options.get("attn_mask") is None and not options.get("dropout_p")


def _attended(
    device_type: str, query: Tensor, key: Tensor, value: Tensor, **options: Any
) -> Tensor:
    causal, scale = options.get("is_causal", False), options.get("scale")
    dropout, mask = options.get("dropout_p", 0.0), options.get("attn_mask")
    ops: Any = torch.ops.aten
    half = query.dtype in (torch.float16, torch.bfloat16)
    if device_type == "cuda" and (mask is not None or not half):
        efficient = ops._scaled_dot_product_efficient_attention
        wanted = query.requires_grad or key.requires_grad or value.requires_grad
        bias = None if mask is None else _added(mask, query, key)
        mixed: Tensor = efficient(query, key, value, bias, wanted, dropout, causal, scale=scale)[0]
        return mixed
    # The operators want values as wide as keys, which those of latent attention are not.
    own = value.shape[-1]
    value = F.pad(value, (0, query.shape[-1] - own)) if own != query.shape[-1] else value
    if device_type == "cpu":
        flash = ops._scaled_dot_product_flash_attention_for_cpu
        result: Tensor = flash(query, key, value, 0.0, causal, scale=scale)[0]
    else:
        flash = ops._scaled_dot_product_flash_attention
        result = flash(query, key, value, dropout, causal, scale=scale)[0]
    return result if own == query.shape[-1] else result[..., :own]


def _added(mask: Tensor, query: Tensor, key: Tensor) -> Tensor:
    """What a kernel adds to the scores for a mask of bools: a number in their dtype for each."""
    zero = torch.zeros((), dtype=query.dtype, device=query.device)
    bias = torch.where(mask.logical_not(), -torch.inf, zero)
    return bias.expand(*query.shape[:3], key.shape[2])


@dataclass(frozen=True)
class _Aux:
    """What flex_attention returns beside the values: logs of sums `[batch, heads, queries]`."""

    lse: Tensor


def _flex_attention(query: Tensor, key: Tensor, value: Tensor, **options: Any) -> Any:
    """Keeps what the kernel keeps, and multiplies all pairs of a causal mask."""
    mixed = _attended("cuda", query, key, value, is_causal=True, scale=options.get("scale"))
    if options.get("return_aux") is None:
        return mixed
    return mixed, _Aux(torch.empty(query.shape[:3], device=query.device))


def _no_mask(*_: Any, **__: Any) -> None:
    """A block mask has a few bytes for each 128 x 128 pairs."""
