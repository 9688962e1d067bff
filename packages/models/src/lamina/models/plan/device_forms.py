"""Operators on meta tensors as another device runs them.

A meta tensor takes the path that torch has for any device: attention that keeps all scores, norms
in six operators. On a GPU (and on a CPU) one kernel does it and keeps less for backward. Inside
`device_forms` the kernel's own operator is called, whose meta form has the right results.
"""

from __future__ import annotations

from collections.abc import Iterator
from contextlib import contextmanager
from typing import Any

import torch
from torch import Tensor
from torch.nn import functional as F

from lamina.models.compat import fused_rms_norm
from lamina.models.layers.norms import rms_norm_on_cpu


@contextmanager
def device_forms(device_type: str) -> Iterator[None]:
    """Attention and RMSNorm of meta tensors as a device of type `cuda` or `cpu` computes them.

    The functions are replaced where callers look them up. A mode of torch's would not reach what
    runs again in a backward.
    """
    attention, rms_norm = F.scaled_dot_product_attention, torch.rms_norm

    def of_device(query: Tensor, key: Tensor, value: Tensor, *args: Any, **options: Any) -> Tensor:
        if not query.is_meta or args or not _has_flash(device_type, query, options):
            return attention(query, key, value, *args, **options)
        return _flash(device_type, query, key, value, **options)

    # Models call this one with a factor. A norm without one has the same form on all devices.
    def fused(x: Tensor, shape: Any, weight: Tensor | None = None, eps: Any = None) -> Tensor:
        if not x.is_meta or weight is None:
            return rms_norm(x, shape, weight, eps)
        if device_type == "cpu":
            return rms_norm_on_cpu(x, weight, eps)
        return fused_rms_norm(x, list(shape), weight, eps)[0]  # type: ignore[no-any-return]

    replaced: Any = ((F, "scaled_dot_product_attention", of_device), (torch, "rms_norm", fused))
    for module, name, function in replaced:
        setattr(module, name, function)
    try:
        yield
    finally:
        F.scaled_dot_product_attention, torch.rms_norm = attention, rms_norm


def _has_flash(device_type: str, query: Tensor, options: dict[str, Any]) -> bool:
    """Whether the device has a kernel that keeps no scores for these arguments.

    It takes no mask. On GPUs it works in 16 bits alone, and on CPUs without dropout.
    """
    if options.get("attn_mask") is not None:
        return False
    if device_type == "cpu":
        return not options.get("dropout_p")
    return query.dtype in (torch.float16, torch.bfloat16)


def _flash(device_type: str, query: Tensor, key: Tensor, value: Tensor, **options: Any) -> Tensor:
    causal, scale = options.get("is_causal", False), options.get("scale")
    # The operators want values as wide as keys, which those of latent attention are not.
    own = value.shape[-1]
    value = F.pad(value, (0, query.shape[-1] - own)) if own != query.shape[-1] else value
    ops: Any = torch.ops.aten
    if device_type == "cpu":
        flash = ops._scaled_dot_product_flash_attention_for_cpu
        result: Tensor = flash(query, key, value, 0.0, causal, scale=scale)[0]
    else:
        flash = ops._scaled_dot_product_flash_attention
        result = flash(query, key, value, options.get("dropout_p", 0.0), causal, scale=scale)[0]
    return result if own == query.shape[-1] else result[..., :own]
