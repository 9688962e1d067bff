"""Attention as CUDA's kernels give it, computed on the CPU.

The CPU has no kernel for flash and memory-efficient attention's operators. Those of dense attention
without dropout are ATen's `_scaled_dot_product_flash_attention_for_cpu`, so that a model gives the
bits of the CPU. All others (dropout, biases that are trained, windows, documents) are computed
from the definition, in fp32. The mask of dropout comes from a key, which forward gives to backward
in the place of CUDA's seed and offset.
"""

from __future__ import annotations

from collections.abc import Callable, Iterator
from dataclasses import dataclass, replace
from typing import Any

import torch
from torch import Tensor

from lamina_virtual_gpu.arithmetic.keys import generator_of, key_of, key_of_operator

aten = torch.ops.aten
PADDED_TO = 32  # the log-sum-exp of memory-efficient attention


def wide(x: Tensor) -> Tensor:
    """Return numbers in the precision that CUDA's kernels compute in."""
    return x if x.dtype == torch.float64 else x.float()


@dataclass(frozen=True)
class Attention:
    """One attention of queries [.., heads, rows, width] over keys and values.

    `allowed` is true where a query may see a key; `kept` is what dropout multiplies with.
    """

    query: Tensor
    key: Tensor
    value: Tensor
    scale: float
    bias: Tensor | None = None
    allowed: Tensor | None = None
    kept: Tensor | None = None

    def wide(self) -> Attention:
        """Return it in fp32 or fp64, with as many heads of keys as of queries."""
        query, key, value = (wide(x) for x in (self.query, self.key, self.value))
        times = query.size(-3) // key.size(-3)
        if times > 1:
            key, value = (x.repeat_interleave(times, -3) for x in (key, value))
        return replace(self, query=query, key=key, value=value)

    def scores(self) -> Tensor:
        """Return the scaled and masked products of queries and keys."""
        scores = self.query @ self.key.mT * self.scale
        if self.bias is not None:
            scores = scores + wide(self.bias)
        return scores if self.allowed is None else scores.masked_fill(~self.allowed, -torch.inf)

    def dropped(self, weights: Tensor) -> Tensor:
        """Return weights, or their gradients, after dropout."""
        return weights if self.kept is None else weights * self.kept

    def forward(self) -> tuple[Tensor, Tensor]:
        """Return the output and the natural logarithm of each row's sum."""
        whole = self.wide()
        scores = whole.scores()
        sums = torch.logsumexp(scores, -1)
        weights = torch.exp(scores - sums.unsqueeze(-1)).nan_to_num(0.0)  # rows that see nothing
        return (whole.dropped(weights) @ whole.value).to(self.query.dtype), sums

    def backward(self, grad: Tensor, out: Tensor, sums: Tensor) -> tuple[Tensor, ...]:
        """Return the gradients of queries, keys, values and scores."""
        whole = self.wide()
        weights = torch.exp(whole.scores() - sums.unsqueeze(-1)).nan_to_num(0.0)
        grad = wide(grad)
        grad_weights = whole.dropped(grad @ whole.value.mT)
        delta = (grad * wide(out)).sum(-1, keepdim=True)
        grad_scores = weights * (grad_weights - delta)
        grad_value = whole.dropped(weights).mT @ grad
        grad_key = grad_scores.mT @ whole.query * self.scale
        grad_query = grad_scores @ whole.key * self.scale
        grads = grad_query, self.narrowed(grad_key), self.narrowed(grad_value)
        return *(x.to(self.query.dtype) for x in grads), grad_scores

    def narrowed(self, grad: Tensor) -> Tensor:
        """Sum the gradients of keys that several heads of queries shared."""
        heads = self.key.size(-3)
        if grad.size(-3) == heads:
            return grad
        shape = (*grad.shape[:-3], heads, -1, *grad.shape[-2:])
        return grad.reshape(shape).sum(-3)


def dropout(probability: float, key: int, shape: tuple[int, ...]) -> Tensor | None:
    """Return what dropout multiplies with, or None without dropout."""
    if not probability:
        return None
    drawn = torch.rand(shape, generator=generator_of(key), device="cpu")
    return (drawn >= probability).float() / (1 - probability)


def visible(rows: int, columns: int, left: int, right: int, shift: int) -> Tensor | None:
    """Return which keys each query sees within a window, or None for all.

    Args:
        rows: of queries.
        columns: of keys.
        left: how many keys before its own place a query sees; negative for all.
        right: how many after it.
        shift: the place among the keys of the first query.
    """
    if left < 0 and right < 0:
        return None
    ahead = torch.arange(columns)[None] - torch.arange(rows)[:, None] - shift
    seen = torch.ones(rows, columns, dtype=torch.bool)
    if left >= 0:
        seen &= ahead >= -left
    if right >= 0:
        seen &= ahead <= right
    return seen


def scale_of(query: Tensor, scale: float | None) -> float:
    """Return the scale of scores: what was asked for, else one over the root of the width."""
    return float(query.size(-1) ** -0.5 if scale is None else scale)


def plain(query: Tensor, key: Tensor, value: Tensor, probability: float) -> bool:
    """Whether ATen's kernel for the CPU takes it."""
    same = query.size(-3) == key.size(-3) and query.size(-1) == value.size(-1)
    return same and not probability


def dense(
    query: Tensor,
    key: Tensor,
    value: Tensor,
    bias: Tensor | None,
    probability: float,
    causal: bool,
    scale: float | None,
    random_key: int,
) -> Attention:
    """Return the attention of `scaled_dot_product_attention`."""
    rows, columns = query.size(-2), key.size(-2)
    kept = dropout(probability, random_key, (*query.shape[:-1], columns))
    allowed = visible(rows, columns, -1, 0 if causal else -1, 0)
    return Attention(query, key, value, scale_of(query, scale), bias, allowed, kept)


def dense_forward(
    query: Tensor,
    key: Tensor,
    value: Tensor,
    bias: Tensor | None,
    probability: float,
    causal: bool,
    scale: float | None,
) -> tuple[Tensor, Tensor, int]:
    """Return the output, the log-sum-exp and the key of dropout."""
    random_key = (key_of_operator() or 0) if probability else 0
    if plain(query, key, value, probability):
        forward = aten._scaled_dot_product_flash_attention_for_cpu
        out, sums = forward(query, key, value, 0.0, causal, attn_mask=bias, scale=scale)
        return out, sums, random_key
    attention = dense(query, key, value, bias, probability, causal, scale, random_key)
    return *attention.forward(), random_key


def flash_forward(
    query: Tensor,
    key: Tensor,
    value: Tensor,
    dropout_p: float = 0.0,
    is_causal: bool = False,
    return_debug_mask: bool = False,
    *,
    scale: float | None = None,
) -> tuple[Any, ...]:
    """`aten::_scaled_dot_product_flash_attention`."""
    out, sums, drawn = dense_forward(query, key, value, None, dropout_p, is_causal, scale)
    state = torch.tensor([signed(drawn), 0]).view(torch.uint64) if dropout_p else None
    return out, sums, None, None, query.size(-2), key.size(-2), state, None, None


def flash_backward(
    grad: Tensor,
    query: Tensor,
    key: Tensor,
    value: Tensor,
    out: Tensor,
    sums: Tensor,
    cum_seq_q: Tensor | None,
    cum_seq_k: Tensor | None,
    max_q: int,
    max_k: int,
    dropout_p: float,
    is_causal: bool,
    state: Tensor,
    unused: Tensor,
    *,
    scale: float | None = None,
) -> tuple[Tensor, ...]:
    """`aten::_scaled_dot_product_flash_attention_backward`."""
    if plain(query, key, value, dropout_p):
        backward = aten._scaled_dot_product_flash_attention_for_cpu_backward
        given = (grad, query, key, value, out, sums, 0.0, is_causal)
        return tuple(backward(*given, attn_mask=None, scale=scale))
    drawn = int(state.view(torch.int64)[0]) if dropout_p else 0
    attention = dense(query, key, value, None, dropout_p, is_causal, scale, drawn)
    return attention.backward(grad, out, sums)[:3]


def efficient_forward(
    query: Tensor,
    key: Tensor,
    value: Tensor,
    attn_bias: Tensor | None,
    compute_log_sumexp: bool,
    dropout_p: float = 0.0,
    is_causal: bool = False,
    *,
    scale: float | None = None,
) -> tuple[Any, ...]:
    """`aten::_scaled_dot_product_efficient_attention`."""
    out, sums, drawn = dense_forward(query, key, value, attn_bias, dropout_p, is_causal, scale)
    return out, padded(sums) if compute_log_sumexp else None, *seed_and_offset(drawn)


def efficient_backward(
    grad: Tensor | None,
    query: Tensor,
    key: Tensor,
    value: Tensor,
    attn_bias: Tensor | None,
    out: Tensor,
    sums: Tensor,
    seed: Tensor,
    offset: Tensor,
    dropout_p: float,
    grad_input_mask: list[bool],
    is_causal: bool = False,
    *,
    scale: float | None = None,
) -> tuple[Any, ...]:
    """`aten::_scaled_dot_product_efficient_attention_backward`."""
    if grad is None:
        return None, None, None, None
    sums = sums[..., : query.size(-2)]
    if plain(query, key, value, dropout_p) and not grad_input_mask[3]:
        backward = aten._scaled_dot_product_flash_attention_for_cpu_backward
        given = (grad, query, key, value, out, sums.contiguous(), 0.0, is_causal)
        return *backward(*given, attn_mask=attn_bias, scale=scale), None
    drawn = key_of(int(seed), int(offset)) if dropout_p else 0
    attention = dense(query, key, value, attn_bias, dropout_p, is_causal, scale, drawn)
    *grads, of_scores = attention.backward(grad, out, sums)
    if attn_bias is None or not grad_input_mask[3]:
        return *grads, None
    return *grads, of_scores.sum_to_size(attn_bias.shape).to(attn_bias.dtype)


# ---- attention of rows that lie behind each other: heads are the last dimension but one


def documents(
    cum_q: Tensor | None, cum_k: Tensor | None, query: Tensor, key: Tensor
) -> Iterator[tuple[Any, Any]]:
    """Yield where the queries and the keys of each sequence are."""
    if cum_q is None or cum_k is None:
        for i in range(query.size(0)):
            yield (i,), (i,)
        return
    q, k = cum_q.tolist(), cum_k.tolist()
    batch = (0,) if query.dim() == 4 else ()
    for i in range(len(q) - 1):
        yield (*batch, slice(q[i], q[i + 1])), (*batch, slice(k[i], k[i + 1]))


def one_of(
    query: Tensor, key: Tensor, value: Tensor, scale: float, window: tuple[int, int], from_end: bool
) -> Attention:
    """Return the attention of one sequence, from [rows, heads, width]."""
    query, key, value = (x.transpose(0, 1) for x in (query, key, value))
    shift = key.size(1) - query.size(1) if from_end else 0
    allowed = visible(query.size(1), key.size(1), *window, shift)
    return Attention(query, key, value, scale, None, allowed)


def refuse(name: str, **what: object) -> None:
    """Stop at an argument whose arithmetic is not there."""
    for argument, value in what.items():
        if value is not None and value is not False and value != 0:
            raise NotImplementedError(
                f"aten::{name} with {argument} has no arithmetic on the virtual GPU.\n"
                "Run without VGPU_COMPUTE, or add it to lamina_virtual_gpu/arithmetic/attention.py"
            )


def window_of(left: int | None, right: int | None, causal: bool) -> tuple[int, int]:
    """Return a window as two numbers, negative where it has no end."""
    right = 0 if causal else right
    return -1 if left is None else left, -1 if right is None else right


def rows_forward(
    query: Tensor,
    key: Tensor,
    value: Tensor,
    cum_seq_q: Tensor | None,
    cum_seq_k: Tensor | None,
    max_q: int,
    max_k: int,
    dropout_p: float,
    is_causal: bool,
    return_debug_mask: bool,
    *,
    scale: float | None = None,
    window_size_left: int | None = None,
    window_size_right: int | None = None,
    seqused_k: Tensor | None = None,
    alibi_slopes: Tensor | None = None,
    block_table: Tensor | None = None,
    num_splits: int | None = None,
) -> tuple[Any, ...]:
    """`aten::_flash_attention_forward`."""
    refuse(
        "_flash_attention_forward",
        dropout_p=dropout_p,
        seqused_k=seqused_k,
        alibi_slopes=alibi_slopes,
        block_table=block_table,
    )
    window = window_of(window_size_left, window_size_right, is_causal)
    out = query.new_zeros((*query.shape[:-1], value.size(-1)))
    *batch, rows, heads, _ = query.shape
    sums = torch.full((*batch, heads, rows), torch.inf)
    for q, k in documents(cum_seq_q, cum_seq_k, query, key):
        attention = one_of(query[q], key[k], value[k], scale_of(query, scale), window, True)
        seen, of_rows = attention.forward()
        out[q] = seen.transpose(0, 1)
        sums[q if query.dim() == 4 else (slice(None), *q)] = of_rows
    return out, sums, None, None, None


def rows_backward(
    grad: Tensor,
    query: Tensor,
    key: Tensor,
    value: Tensor,
    out: Tensor,
    sums: Tensor,
    cum_seq_q: Tensor | None,
    cum_seq_k: Tensor | None,
    max_q: int,
    max_k: int,
    dropout_p: float,
    is_causal: bool,
    state: Tensor,
    unused: Tensor,
    *,
    scale: float | None = None,
    window_size_left: int | None = None,
    window_size_right: int | None = None,
) -> tuple[Tensor, ...]:
    """`aten::_flash_attention_backward`."""
    window = window_of(window_size_left, window_size_right, is_causal)
    grads = tuple(torch.zeros_like(x) for x in (query, key, value))
    for q, k in documents(cum_seq_q, cum_seq_k, query, key):
        attention = one_of(query[q], key[k], value[k], scale_of(query, scale), window, True)
        of_rows = sums[q if query.dim() == 4 else (slice(None), *q)]
        given = grad[q].transpose(0, 1), out[q].transpose(0, 1), of_rows
        for whole, at, part in zip(grads, (q, k, k), attention.backward(*given), strict=False):
            whole[at] = part.transpose(0, 1)
    return grads


def padded(sums: Tensor) -> Tensor:
    """Return a log-sum-exp whose rows are filled up to a multiple of 32."""
    more = -sums.size(-1) % PADDED_TO
    return torch.nn.functional.pad(sums, (0, more), value=torch.inf) if more else sums


def signed(key: int) -> int:
    """Return the 64 bits of a key as a number that int64 holds."""
    return key - 2**64 if key >= 2**63 else key


def seed_and_offset(key: int) -> tuple[Tensor, Tensor]:
    """Return a key in the form in which memory-efficient attention keeps seeds."""
    return torch.tensor(signed(key)), torch.tensor(0)


OPERATORS: dict[str, Callable[..., Any]] = {
    "_scaled_dot_product_flash_attention": flash_forward,
    "_scaled_dot_product_flash_attention_backward": flash_backward,
    "_scaled_dot_product_efficient_attention": efficient_forward,
    "_scaled_dot_product_efficient_attention_backward": efficient_backward,
    "_flash_attention_forward": rows_forward,
    "_flash_attention_backward": rows_backward,
}
