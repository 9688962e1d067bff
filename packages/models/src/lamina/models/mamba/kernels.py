"""The choice between torch and the Triton kernels of flash-linear-attention for the scan."""

import functools
import importlib
import logging
from typing import Any, cast

import torch
from torch import Tensor

from lamina.models.attention.kernels import document_starts
from lamina.models.base.configs.mamba import MambaPath

__all__ = ["choose_path", "fused_scan", "kernel_scan"]

_LOGGER = logging.getLogger(__name__)
_HALF = (torch.float16, torch.bfloat16)


@functools.cache
def fused_scan() -> Any:
    """Find `chunk_simple_gla` of flash-linear-attention (Yang et al., 2024); None without it."""
    try:
        return importlib.import_module("fla.ops.simple_gla").chunk_simple_gla
    except ImportError:
        return None


def choose_path(wanted: MambaPath, device: torch.device, dtype: torch.dtype) -> str:
    """Choose how the scan runs, `torch` or `fla`, and log the choice once per process.

    The kernels round float32 to TF32 in products, so `auto` uses torch for float32.

    Raises:
        RuntimeError: if `fla` is asked for and cannot run.
    """
    if wanted == "torch" or (wanted == "auto" and device.type != "cuda"):
        return "torch"
    if device.type != "cuda" or fused_scan() is None:
        lacking = (
            f"activations are on {device}: its kernels need CUDA"
            if device.type != "cuda"
            else "it is not installed: pip install 'lamina-models[mamba]'"
        )
        if wanted == "fla":
            raise RuntimeError(
                f"path is 'fla', which is flash-linear-attention, and {lacking}, or set path='auto'"
            )
        _say("torch", f"flash-linear-attention would be faster; {lacking}")
        return "torch"
    if wanted == "auto" and dtype not in _HALF:
        _say("torch", f"activations are {dtype}; flash-linear-attention is used for half precision")
        return "torch"
    _say("fla", "flash-linear-attention's Triton kernels")
    return "fla"


@functools.cache
def _say(path: str, why: str) -> None:
    _LOGGER.warning("Mamba's scan runs in %s: %s", path, why)


def kernel_scan(
    x: Tensor,
    dt: Tensor,
    rate: Tensor,
    b: Tensor,
    c: Tensor,
    *,
    runs: Tensor | None = None,
) -> Tensor:
    """Run the scan by flash-linear-attention; arguments as of `chunked_scan`, in the dtype of x.

    The recurrence is simple gated linear attention with queries C, keys B, values dt x and gates
    dt A.
    """
    heads = x.shape[2]
    query, key = (part.repeat_interleave(heads // b.shape[2], dim=2).to(x.dtype) for part in (c, b))
    value = (x * dt.unsqueeze(-1)).to(x.dtype)
    gate = dt.float() * rate.float()
    parts: tuple[Tensor, ...] = (query, key, value, gate)
    options: dict[str, Any] = {"scale": 1.0, "output_final_state": False}
    if runs is not None:
        parts = tuple(part.flatten(0, 1).unsqueeze(0) for part in parts)
        options["cu_seqlens"] = document_starts(runs)
    y, _ = fused_scan()(*parts, **options)
    return cast(Tensor, y).view_as(x)
