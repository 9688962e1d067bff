"""The selective scan of Mamba-2: as matrix products over chunks, or by Triton kernels.

The state of a head is a matrix `[head_dim, state_size]`. At each token it decays, and an outer
product is added:

    state_t = exp(dt_t A) state_{t-1} + dt_t x_t B_t^T        y_t = state_t C_t

Within a chunk this is attention without a softmax, whose scores `C_t . B_s` are multiplied by the
decay between s and t. Only the state is carried from chunk to chunk (Dao and Gu, 2024, section 6).
"""

from __future__ import annotations

import functools
import importlib
import logging
from typing import Any, cast

import torch
from torch import Tensor

from lamina.models.attention.kernels import document_starts
from lamina.models.base.configs.mamba import MambaPath
from lamina.models.invariance.row_functions import (
    below_last,
    decay_between,
    for_each,
    matrix_products,
    running_sum,
    scale_rows,
)
from lamina.models.layers.matmul_products import without_autocast
from lamina.models.mamba.chunks import ChunkDocuments, cut_chunks, decay_within

_LOGGER = logging.getLogger(__name__)
_HALF = (torch.float16, torch.bfloat16)


def chunked_scan(
    x: Tensor,
    dt: Tensor,
    rate: Tensor,
    b: Tensor,
    c: Tensor,
    *,
    chunk: int,
    runs: Tensor | None = None,
    state: Tensor | None = None,
) -> tuple[Tensor, Tensor]:
    """Run the recurrence a chunk of tokens at a time.

    Args:
        x: inputs `[batch, sequence, heads, head_dim]`.
        dt: steps, at least 0, `[batch, sequence, heads]`.
        rate: A, negative, `[heads]`.
        b: `[batch, sequence, groups, state_size]`; group g serves the g-th run of heads.
        c: as `b`.
        chunk: tokens per chunk; results do not depend on it.
        runs: int64 `[batch, sequence]`: each token's document; the state starts at zero in each.
        state: `[batch, heads, head_dim, state_size]` before the first token; zeros if None.

    Returns:
        `y` like `x`, and the state after the last token like `state`, both in float32 or
        wider, also under autocast.
    """
    length, groups, wide = x.shape[1], b.shape[2], torch.promote_types(x.dtype, torch.float32)
    chunk = min(chunk, length)
    steps = dt.to(wide)
    # Padding has steps of 0, so it neither decays the state nor adds to it.
    decay = cut_chunks((steps * rate.to(wide)).unsqueeze(-1), chunk, groups).squeeze(-1)
    inputs = cut_chunks(x.to(wide) * steps.unsqueeze(-1), chunk, groups)
    keys, queries = (cut_chunks(part.to(wide), chunk, groups).squeeze(2) for part in (b, c))
    documents = None if runs is None else ChunkDocuments(runs, chunk)
    with without_autocast(x.device):
        y, last = _scan(decay, inputs, keys, queries, documents, state)
    # [batch, groups, per, chunks, chunk, width] back to [batch, sequence, heads, width]
    y = y.permute(0, 3, 4, 1, 2, 5).flatten(1, 2).flatten(2, 3)
    return y[:, :length], last.flatten(1, 2)


def _scan(
    decay: Tensor,
    inputs: Tensor,
    keys: Tensor,
    queries: Tensor,
    documents: ChunkDocuments | None,
    state: Tensor | None,
) -> tuple[Tensor, Tensor]:
    """Run the recurrence over operands that `cut_chunks` has cut into chunks."""
    total = decay.cumsum(dim=-1)  # [batch, groups, heads per group, chunks, chunk]
    weights = decay_within(total, documents)
    scores = queries @ keys.transpose(-1, -2)
    y = (scores.unsqueeze(2) * weights) @ inputs

    to_end = (total[..., -1:] - total).exp()
    if documents is not None:
        to_end = to_end * documents.reach_end
    added = (inputs * to_end.unsqueeze(-1)).transpose(-1, -2) @ keys.unsqueeze(2)
    through = total[..., -1].exp()
    if documents is not None:
        through = through * documents.pass_through
    entering, last = _across_chunks(added, through, state)

    from_start = total.exp()
    if documents is not None:
        from_start = from_start * documents.reach_start
    carried = queries.unsqueeze(2) @ entering.transpose(-1, -2)
    return y + carried * from_start.unsqueeze(-1), last


def _across_chunks(
    added: Tensor, through: Tensor, state: Tensor | None, *, fixed: bool = False
) -> tuple[Tensor, Tensor]:
    """Carry the state from chunk to chunk: those before each, like `added`, and the last.

    With `fixed`, the gradients of decays have one order of summation (`invariant=True`).
    """
    groups, per, chunks = added.shape[1:4]
    if state is None:
        current = torch.zeros_like(added[:, :, :, 0])
    else:
        current = torch.unflatten(state.to(added.dtype), 1, (groups, per))
    entering = []
    for i in range(chunks):
        entering.append(current)
        factor = through[..., i]
        if fixed:
            kept = scale_rows(current.flatten(-2), factor).view(current.shape)
        else:
            kept = current * factor[..., None, None]
        current = kept + added[:, :, :, i]
    return torch.stack(entering, dim=3), current


def fixed_scan(
    x: Tensor,
    steps: Tensor,
    decay: Tensor,
    b: Tensor,
    c: Tensor,
    *,
    chunk: int,
    runs: Tensor | None = None,
) -> Tensor:
    """Run the recurrence in the order of the model (`invariant=True`).

    Chunks are whole, the last one padded with zeros, and sums are in float32. So a token's result
    depends on the tokens before it in its sequence, and on nothing else.

    Args:
        x: inputs `[batch, sequence, heads, head_dim]`.
        steps: at least 0, float32 `[batch, sequence, heads]`.
        decay: `steps * A`, float32 `[batch, sequence, heads]`.
        b: `[batch, sequence, groups, state_size]`; group g serves the g-th run of heads.
        c: as `b`.
        chunk: tokens per chunk.
        runs: int64 `[batch, sequence]`: each token's document; the state starts at zero in each.

    Returns:
        Like `x`, in float32.
    """
    length, groups, per = x.shape[1], b.shape[2], x.shape[2] // b.shape[2]
    inputs = cut_chunks(scale_rows(x.float(), steps), chunk, groups)
    total = running_sum(cut_chunks(decay.unsqueeze(-1), chunk, groups).squeeze(-1))
    keys, queries = (cut_chunks(part.float(), chunk, groups).squeeze(2) for part in (b, c))
    documents = None if runs is None else ChunkDocuments(runs, chunk)

    allowed = torch.ones(chunk, chunk, dtype=torch.bool, device=x.device).tril()
    scores = for_each(matrix_products(queries, keys.transpose(-1, -2)), per, 2)
    if documents is not None:
        allowed = allowed & documents.same
    y = matrix_products(scores * decay_between(total, allowed), inputs)

    keys, queries = (for_each(part, per, 2) for part in (keys, queries))
    to_end, through, from_start = below_last(total).exp(), total[..., -1].exp(), total.exp()
    if documents is not None:
        to_end = to_end * documents.reach_end
        through = through * documents.pass_through
        from_start = from_start * documents.reach_start
    added = matrix_products(scale_rows(inputs, to_end).transpose(-1, -2), keys)
    entering, _ = _across_chunks(added, through, None, fixed=True)
    carried = matrix_products(queries, entering.transpose(-1, -2))
    y = y + scale_rows(carried, from_start)
    # [batch, groups, per, chunks, chunk, width] back to [batch, sequence, heads, width]
    return y.permute(0, 3, 4, 1, 2, 5).flatten(1, 2).flatten(2, 3)[:, :length]


def scan_step(
    x: Tensor, dt: Tensor, rate: Tensor, b: Tensor, c: Tensor, state: Tensor
) -> tuple[Tensor, Tensor]:
    """Advance the recurrence by one token.

    Args:
        x: `[batch, heads, head_dim]`.
        dt: `[batch, heads]`.
        rate: A, negative, `[heads]`.
        b: `[batch, groups, state_size]`.
        c: as `b`.
        state: `[batch, heads, head_dim, state_size]`.

    Returns:
        `y` like `x`, and the next state, both in float32 or wider, also under autocast.
    """
    wide = torch.promote_types(x.dtype, torch.float32)
    heads = x.shape[1]
    key, query = (part.to(wide).repeat_interleave(heads // b.shape[1], dim=1) for part in (b, c))
    dt = dt.to(wide)
    kept = (dt * rate.to(wide)).exp()[..., None, None] * state.to(wide)
    state = kept + (x.to(wide) * dt.unsqueeze(-1)).unsqueeze(-1) * key.unsqueeze(-2)
    with without_autocast(x.device):
        return (state @ query.unsqueeze(-1)).squeeze(-1), state


@functools.cache
def fused_scan() -> Any:
    """Find `chunk_simple_gla` of flash-linear-attention (Yang et al., 2024); None without it."""
    try:
        return importlib.import_module("fla.ops.simple_gla").chunk_simple_gla
    except ImportError:
        return None


def choose_path(wanted: MambaPath, device: torch.device, dtype: torch.dtype) -> str:
    """Choose how the scan runs, `torch` or `fla`, and log the choice once per process.

    The kernels round float32 to TF32 in products, so `auto` uses torch for float32. RuntimeError
    says why `fla`, which was asked for, cannot run.
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
    x: Tensor, dt: Tensor, rate: Tensor, b: Tensor, c: Tensor, *, runs: Tensor | None = None
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
