"""Attention of some queries to some keys, with the numbers that merging such pieces takes.

Pieces of a softmax over all keys are merged by the logs of their sums of exponentials (Milakov and
Gimelshein, 2018). torch's kernels return these logs. If their backward is given the log of the
whole softmax instead of the piece's own, it returns the piece's part of the gradients (Liu et al.,
Ring Attention, 2023). All tensors are `[batch, heads, tokens, width]`; keys and values may have
fewer heads.
"""

from dataclasses import dataclass

import torch
from torch import Tensor

from lamina.models.compat import (
    flash_attention,
    flash_attention_backward,
    flash_attention_backward_for_cpu,
    flash_attention_for_cpu,
)

__all__ = ["Block", "merge"]

Gradients = tuple[Tensor, Tensor, Tensor]


@dataclass(frozen=True)
class Block:
    """The attention of some queries to some keys.

    Attributes:
        scale: what scores are multiplied by.
        causal: query i sees keys 0 .. i.
        mask: bool `[batch or 1, 1, queries, keys]`, used instead of `causal`.
    """

    scale: float
    causal: bool = False
    mask: Tensor | None = None

    def forward(self, query: Tensor, key: Tensor, value: Tensor) -> tuple[Tensor, Tensor]:
        """Return mixed values like `query`, and logs of sums `[batch, heads, queries]`.

        Logs are float32 or wider. For a query without any key they are -inf and its values are 0.
        """
        if _flash_on_cpu(query):
            out, logs = flash_attention_for_cpu(
                query, key, value, 0.0, self.causal, attn_mask=self._bias(query), scale=self.scale
            )
            if self.mask is not None:
                # The kernel returns 0 for a query without any key.
                logs = logs.masked_fill(~self.mask.any(dim=-1), -torch.inf)
            return out, logs
        if _flash_on_cuda(query) and self.mask is None:
            found = flash_attention(query, key, value, 0.0, self.causal, False, scale=self.scale)
            return found[0], found[1]
        scores = self._scores(query, key)
        logs = scores.logsumexp(dim=-1)
        weights = (scores - _finite(logs)[..., None]).exp()
        return (weights @ _repeat(value, query).to(weights.dtype)).to(query.dtype), logs

    def backward(
        self, grad: Tensor, query: Tensor, key: Tensor, value: Tensor, out: Tensor, logs: Tensor
    ) -> Gradients:
        """Compute this piece's part of the gradients.

        `grad`, `out` and `logs` are those of the whole attention: the gradient of its result, the
        result, and its logs of sums.
        """
        if _flash_on_cpu(query):
            found: Gradients = flash_attention_backward_for_cpu(
                grad, query, key, value, out, logs, 0.0, self.causal,
                attn_mask=self._bias(query), scale=self.scale,
            )  # fmt: skip
            return found
        if _flash_on_cuda(query) and self.mask is None:
            return self._flash_backward(grad, query, key, value, out, logs)
        weights = (self._scores(query, key) - _finite(logs)[..., None]).exp()
        grad, out = grad.to(weights.dtype), out.to(weights.dtype)
        keys, values = (_repeat(x, query).to(weights.dtype) for x in (key, value))
        by_weights = grad @ values.transpose(-1, -2) - (grad * out).sum(dim=-1, keepdim=True)
        by_scores = weights * by_weights * self.scale
        grad_key = by_scores.transpose(-1, -2) @ query.to(weights.dtype)
        grad_value = weights.transpose(-1, -2) @ grad
        return (
            (by_scores @ keys).to(query.dtype),
            _gather_heads(grad_key, key).to(key.dtype),
            _gather_heads(grad_value, value).to(value.dtype),
        )

    def _flash_backward(
        self, grad: Tensor, query: Tensor, key: Tensor, value: Tensor, out: Tensor, logs: Tensor
    ) -> Gradients:
        none = torch.empty(0, dtype=torch.int64, device="cpu")
        # Without dropout the kernel does not read seed and offset, nor lengths of equal sequences.
        found: Gradients = flash_attention_backward(
            grad, query, _repeat(key, query), _repeat(value, query), out, logs.contiguous(),
            None, None,
            query.shape[2], key.shape[2], 0.0, self.causal, none, none, scale=self.scale,
        )  # fmt: skip
        return found[0], _gather_heads(found[1], key), _gather_heads(found[2], value)

    def _bias(self, query: Tensor) -> Tensor | None:
        if self.mask is None:
            return None
        bias = torch.zeros(self.mask.shape, dtype=query.dtype, device=query.device)
        return bias.masked_fill_(~self.mask, -torch.inf)

    def _scores(self, query: Tensor, key: Tensor) -> Tensor:
        wide = torch.promote_types(query.dtype, torch.float32)
        scores = query.to(wide) @ _repeat(key, query).to(wide).transpose(-1, -2) * self.scale
        mask = self.mask
        if self.causal:
            mask = torch.ones(scores.shape[-2:], dtype=torch.bool, device=scores.device).tril()
        return scores if mask is None else scores.masked_fill(~mask, -torch.inf)


def merge(out: Tensor, logs: Tensor, more: Tensor, more_logs: Tensor) -> None:
    """Merge another piece into `out` and `logs`, in place; both are float32 or wider."""
    total = torch.logaddexp(logs, more_logs)
    shift = _finite(total)
    out *= (logs - shift).exp()[..., None]
    out += more * (more_logs - shift).exp()[..., None]
    logs.copy_(total)


def _finite(logs: Tensor) -> Tensor:
    """Replace -inf by 0, so that subtracting it from -inf gives -inf and not NaN."""
    return logs.masked_fill(logs == -torch.inf, 0.0)


def _flash_on_cpu(query: Tensor) -> bool:
    return query.device.type == "cpu"


def _flash_on_cuda(query: Tensor) -> bool:
    half = query.dtype in (torch.float16, torch.bfloat16)
    return query.is_cuda and half and query.shape[-1] <= 256


def _repeat(x: Tensor, query: Tensor) -> Tensor:
    """Repeat key or value heads for the queries that share them."""
    return (
        x if x.shape[1] == query.shape[1] else x.repeat_interleave(query.shape[1] // x.shape[1], 1)
    )


def _gather_heads(grad: Tensor, x: Tensor) -> Tensor:
    """Sum the gradients of heads that `_repeat` made."""
    return grad if grad.shape == x.shape else grad.view(*x.shape[:2], -1, *x.shape[2:]).sum(dim=2)
