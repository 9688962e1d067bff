"""The selective scan of Mamba-1, whose decay differs from element to element of the state.

The state of a channel is a vector of `state_size` elements. At each token

    state_t = exp(dt_t A) * state_{t-1} + dt_t x_t B_t        y_t = C_t . state_t

where A is a vector for each channel. Mamba-2 has one number there for a whole head, which makes
its chunks matrix products (`scan.py`). Here no product of matrices gives the states of a chunk, so
they are computed by doubling: each element is combined with the one 1, 2, 4, ... tokens before it.
"""

from __future__ import annotations

import torch
import torch.nn.functional as F
from torch import Tensor
from torch.utils.checkpoint import checkpoint

from lamina.models.layers.matmul_products import without_autocast


def selective_scan(
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

    Backward computes the states of a chunk again. So there is memory for the states of one chunk,
    some ten times `chunk * channels * state_size` elements, and not for those of all tokens.

    Args:
        x: inputs `[batch, sequence, channels]`.
        dt: steps, at least 0, `[batch, sequence, channels]`.
        rate: A, negative, `[channels, state_size]`.
        b: what the inputs are multiplied with, `[batch, sequence, state_size]`.
        c: what the state is read with, like `b`.
        chunk: tokens per chunk; results do not depend on it.
        runs: int64 `[batch, sequence]`: each token's document; the state starts at zero in each.
        state: `[batch, channels, state_size]` before the first token; zeros if None.

    Returns:
        `y` like `x`, and the state after the last token `[batch, channels, state_size]`, both in
        float32 or wider, also under autocast.
    """
    wide = torch.promote_types(x.dtype, torch.float32)
    x, dt, rate, b, c = (each.to(wide) for each in (x, dt, rate, b, c))
    state = x.new_zeros(x.shape[0], *rate.shape) if state is None else state.to(wide)
    goes_on = None if runs is None else (runs == F.pad(runs, (1, 0), value=-1)[:, :-1]).to(wide)
    results = []
    with without_autocast(x.device):
        for start in range(0, x.shape[1], chunk):
            tokens = slice(start, start + chunk)
            inputs = [each[:, tokens] for each in (x, dt, b, c)]
            kept = None if goes_on is None else goes_on[:, tokens]
            y, state = _of_chunk(state, rate, kept, *inputs)
            results.append(y)
    return torch.cat(results, dim=1), state


def _of_chunk(
    state: Tensor, rate: Tensor, goes_on: Tensor | None, x: Tensor, dt: Tensor, b: Tensor, c: Tensor
) -> tuple[Tensor, Tensor]:
    """Results and last state of a chunk, whose states are not kept for backward."""
    arguments = state, rate, goes_on, x, dt, b, c
    if not torch.is_grad_enabled():
        return _states_read(*arguments)
    y, state = checkpoint(_states_read, *arguments, use_reentrant=False, preserve_rng_state=False)
    return y, state


def _states_read(
    state: Tensor, rate: Tensor, goes_on: Tensor | None, x: Tensor, dt: Tensor, b: Tensor, c: Tensor
) -> tuple[Tensor, Tensor]:
    decay = (dt.unsqueeze(-1) * rate).exp()  # [batch, tokens, channels, state_size]
    added = (dt * x).unsqueeze(-1) * b.unsqueeze(-2)
    if goes_on is not None:
        decay = decay * goes_on[..., None, None]
    back = 1
    while back < x.shape[1]:
        # After this, `decay` and `added` span twice as many tokens. Products of decays stay within
        # 0 and 1, where a difference of sums of their logarithms would lose what is small.
        added = torch.cat(
            (added[:, :back], added[:, back:] + decay[:, back:] * added[:, :-back]), 1
        )
        decay = torch.cat((decay[:, :back], decay[:, back:] * decay[:, :-back]), 1)
        back *= 2
    states = added + decay * state.unsqueeze(1)
    # The last state is a copy: a view would keep the states of all tokens of the chunk.
    return (states @ c.unsqueeze(-1)).squeeze(-1), states[:, -1].clone()
