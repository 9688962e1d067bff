"""The gated delta rule: as matrix products over chunks of tokens, and for one token.

The state of a head is a matrix `[key_width, value_width]`, from which a key reads a value. At each
token the state decays, and what the token's key reads is moved towards the token's value:

    S = exp(g_t) S_{t-1}        S_t = S + b_t k_t (v_t - k_t S)        y_t = q_t S_t

Within a chunk, what each token adds depends on what those before it have added. The dependence is a
triangular system of equations, which is solved for all tokens at once (Yang et al., 2024).
"""

from __future__ import annotations

import torch
from torch import Tensor

from lamina.models.layers.matmul_products import without_autocast
from lamina.models.mamba.chunks import ChunkDocuments, cut_chunks, decay_within


def chunked_delta_rule(
    query: Tensor,
    key: Tensor,
    value: Tensor,
    decay: Tensor,
    step: Tensor,
    *,
    chunk: int,
    runs: Tensor | None = None,
) -> tuple[Tensor, Tensor]:
    """Run the recurrence a chunk of tokens at a time.

    Source: Yang, Kautz and Hatamizadeh, Gated Delta Networks, arXiv:2412.06464, section 3.3.

    Args:
        query: `[batch, sequence, key_heads, key_width]`.
        key: as `query`; of length 1, or below. Head k serves the k-th run of value heads.
        value: `[batch, sequence, value_heads, value_width]`.
        decay: g, the logarithm of what is left of the state, `[batch, sequence, value_heads]`.
        step: b, between 0 and 2, `[batch, sequence, value_heads]`.
        chunk: tokens per chunk; results do not depend on it.
        runs: int64 `[batch, sequence]`: each token's document; the state starts at zero in each.

    Returns:
        `y` like `value`, and the state after the last token, `[batch, value_heads, key_width,
        value_width]`, both in float32 or wider, also under autocast.
    """
    length, groups = value.shape[1], key.shape[2]
    wide = torch.promote_types(value.dtype, torch.float32)
    chunk = min(chunk, length)
    # Padding has steps of 0 and does not decay, so it leaves the state as it is.
    # [batch, key heads, value heads of each, chunks, chunk, width]; key heads have 1 in the third.
    queries, keys, values = (cut_chunks(x.to(wide), chunk, groups) for x in (query, key, value))
    steps = cut_chunks(step.to(wide).unsqueeze(-1), chunk, groups)
    total = cut_chunks(decay.to(wide).unsqueeze(-1), chunk, groups).squeeze(-1).cumsum(dim=-1)
    from_start, to_end = total.exp(), (total[..., -1:] - total).exp()
    through = total[..., -1].exp()
    documents = None if runs is None else ChunkDocuments(runs, chunk)
    if documents is not None:
        from_start, to_end = from_start * documents.reach_start, to_end * documents.reach_end
        through = through * documents.pass_through
    between = decay_within(total, documents)
    with without_autocast(value.device):
        # Row t says how much of what each token before it adds token t reads.
        system = steps * (keys @ keys.mT) * between
        # Solved for what a token adds of its own, and for what it takes of the state before.
        known = torch.cat((steps * values, steps * from_start.unsqueeze(-1) * keys), dim=-1)
        solved = torch.linalg.solve_triangular(system, known, upper=False, unitriangular=True)
        own, taken = solved.split((value.shape[-1], key.shape[-1]), dim=-1)
        scores = (queries @ keys.mT) * between
        reading, writing = queries * from_start.unsqueeze(-1), keys * to_end.unsqueeze(-1)
        state = values.new_zeros(*values.shape[:3], key.shape[-1], value.shape[-1])
        results = []
        for i in range(values.shape[3]):
            added = own[:, :, :, i] - taken[:, :, :, i] @ state
            results.append(reading[:, :, :, i] @ state + scores[:, :, :, i] @ added)
            state = through[..., i, None, None] * state + writing[:, :, :, i].mT @ added
    # [batch, key heads, value heads of each, chunks, chunk, width] to [batch, sequence, heads, ...]
    y = torch.stack(results, dim=3).permute(0, 3, 4, 1, 2, 5).flatten(1, 2).flatten(2, 3)
    return y[:, :length], state.flatten(1, 2)


def delta_step(
    query: Tensor, key: Tensor, value: Tensor, decay: Tensor, step: Tensor, state: Tensor
) -> tuple[Tensor, Tensor]:
    """Advance the recurrence by one token.

    Args:
        query: `[batch, key_heads, key_width]`.
        key: as `query`.
        value: `[batch, value_heads, value_width]`.
        decay: `[batch, value_heads]`.
        step: `[batch, value_heads]`.
        state: `[batch, value_heads, key_width, value_width]`.

    Returns:
        `y` like `value`, and the next state, both in float32 or wider, also under autocast.
    """
    wide = torch.promote_types(value.dtype, torch.float32)
    each = value.shape[1] // key.shape[1]
    rows = [x.to(wide).repeat_interleave(each, dim=1).unsqueeze(-2) for x in (query, key)]
    state = decay.to(wide).exp()[..., None, None] * state.to(wide)
    with without_autocast(value.device):
        added = step.to(wide)[..., None, None] * (value.to(wide).unsqueeze(-2) - rows[1] @ state)
        state = state + rows[1].mT @ added
        return (rows[0] @ state).squeeze(-2), state
