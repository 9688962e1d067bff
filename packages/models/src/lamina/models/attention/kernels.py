"""Attention patterns: which tokens attend to which, computed by one of torch's kernels.

Each class is one way to compute the same attention. A forward makes one object of one class, and
every block calls it. All classes take queries `[batch, sequence, heads, width]` and keys and values
with `kv_heads` heads, and return `[batch, sequence, heads, value_width]`.
"""

from __future__ import annotations

import functools
import importlib
import inspect
from dataclasses import dataclass, replace
from typing import TYPE_CHECKING, Any, Protocol, cast

import torch
import torch.nn.functional as F
from torch import Tensor

from lamina.models.base.computing_device import computes_on
from lamina.models.base.config import TransformerConfig
from lamina.models.base.configs.elements import AttentionScores
from lamina.models.invariance.random_keys import PairDraws

if TYPE_CHECKING:
    from torch.nn.attention.flex_attention import BlockMask

_FLEX_WIDTH = 16
"""Elements of the narrowest heads that flex_attention has a kernel for on a GPU."""


class AttentionPattern(Protocol):
    """A way to compute attention."""

    def __call__(
        self, query: Tensor, key: Tensor, value: Tensor, *, scale: float, dropout: float
    ) -> Tensor:
        """Mix values by softmax(scale * query . key)."""


class PerHeadPattern(AttentionPattern, Protocol):
    """A pattern that reads numbers of each head."""

    def with_heads(self, per_head: Tensor) -> AttentionPattern:
        """The pattern with these numbers, `[heads, columns]`: slopes, and sinks if there are."""


class DrawnPattern(AttentionPattern, Protocol):
    """A pattern whose dropout is drawn by the place of heads, queries and keys."""

    def with_draws(self, draws: PairDraws) -> AttentionPattern:
        """The pattern with these draws, of the heads that it is called with."""


def repeat_heads(x: Tensor, heads: int) -> Tensor:
    """Repeat key or value heads `[batch, sequence, kv_heads, width]` until there are `heads`."""
    return x if x.shape[2] == heads else x.repeat_interleave(heads // x.shape[2], dim=2)


def refuse_dropout(name: str, dropout: float) -> None:
    """Raise ValueError if there is dropout, for a kernel that never stores the probabilities."""
    if dropout:
        raise ValueError(
            f"{name} has no attention_dropout (here {dropout}): set it to 0, or take a pattern of "
            "scaled_dot_product_attention (Causal, Masked)"
        )


def _sdpa(query: Tensor, key: Tensor, value: Tensor, **options: Any) -> Tensor:
    q, k, v = (x.transpose(1, 2) for x in (query, key, value))
    return F.scaled_dot_product_attention(q, k, v, **options).transpose(1, 2)


# Patterns are compared as objects (`eq=False`). The compiler of torch 2.11 asks a pattern's hash
# while it makes the pattern, before there are fields.
@dataclass(frozen=True, eq=False)
class Causal:
    """Plain causal attention, which needs no mask and has the fastest kernel on every device."""

    def __call__(
        self, query: Tensor, key: Tensor, value: Tensor, *, scale: float, dropout: float
    ) -> Tensor:
        """See `AttentionPattern`."""
        # On CUDA only the half-precision kernels support grouped heads. For other dtypes torch
        # would silently fall back to a kernel that stores all scores.
        half = query.dtype in (torch.float16, torch.bfloat16)
        grouped = half or computes_on(query) != "cuda"
        if not grouped:
            key, value = repeat_heads(key, query.shape[2]), repeat_heads(value, query.shape[2])
        options = {"is_causal": True, "enable_gqa": key.shape[2] != query.shape[2]}
        return _sdpa(query, key, value, dropout_p=dropout, scale=scale, **options)


@dataclass(frozen=True, eq=False)
class Masked:
    """Attention with a stored mask, on any device, for sequence^2 bools per row of the batch.

    The mask is broadcast to `[batch, 1, sequence, sequence]`: True where the query (rows) may
    attend to the key (columns). None: every query attends to every key.
    """

    mask: Tensor | None

    def __call__(
        self, query: Tensor, key: Tensor, value: Tensor, *, scale: float, dropout: float
    ) -> Tensor:
        """See `AttentionPattern`."""
        shared = key.shape[2] != query.shape[2]
        grouped = self.mask is None and shared and computes_on(query) != "cuda"
        if not grouped:
            key, value = repeat_heads(key, query.shape[2]), repeat_heads(value, query.shape[2])
        options = {"attn_mask": self.mask, "enable_gqa": grouped}
        return _sdpa(query, key, value, dropout_p=dropout, scale=scale, **options)


@dataclass(frozen=True, eq=False)
class Scored:
    """Attention whose scores `rule` changes. All of them are stored.

    The mask is that of `Masked`; `distance`, int64 `[queries, keys]`, is that of
    `AttentionScores.change`.
    """

    rule: AttentionScores
    mask: Tensor
    distance: Tensor
    per_head: Tensor | None = None

    def with_heads(self, per_head: Tensor) -> Scored:
        """See `PerHeadPattern`."""
        return replace(self, per_head=per_head)

    def __call__(
        self, query: Tensor, key: Tensor, value: Tensor, *, scale: float, dropout: float
    ) -> Tensor:
        """See `AttentionPattern`."""
        columns = _columns_of(self.per_head)
        key, value = repeat_heads(key, query.shape[2]), repeat_heads(value, query.shape[2])
        q, k, v = (x.transpose(1, 2) for x in (query, key, value))
        scores = q.to(columns.dtype) @ k.to(columns.dtype).transpose(-1, -2) * scale
        slopes = columns[:, 0, None, None]
        scores = self.rule.change(scores, self.distance, slopes).masked_fill(~self.mask, -torch.inf)
        if self.rule.sinks:
            sinks = columns[:, 1, None, None].expand(*scores.shape[:-1], 1)
            weights = torch.cat((scores, sinks), dim=-1).softmax(dim=-1)[..., :-1]
        else:
            weights = scores.softmax(dim=-1)
        return (F.dropout(weights, dropout).to(v.dtype) @ v).transpose(1, 2)


def _columns_of(per_head: Tensor | None) -> Tensor:
    if per_head is None:
        raise ValueError(
            "a pattern with AttentionScores was called without the heads' slopes and sinks: call "
            "context.pattern.with_heads(per_head), as SelfAttention does"
        )
    return per_head


@dataclass(frozen=True, eq=False)
class Varlen:
    """Concatenated documents, by torch's variable-length flash kernel (CUDA, fp16 and bf16).

    `starts`, int32 `[documents + 1]`, is where each document of the flattened batch starts, and the
    end of the last. `longest` is the number of tokens in the longest document, and `window` that
    which a token attends to, itself included; None is all before it. `grouped_heads` says whether
    the kernel takes fewer heads of keys than of queries.
    """

    starts: Tensor
    longest: int
    window: int | None = None
    grouped_heads: bool = False

    def __call__(
        self, query: Tensor, key: Tensor, value: Tensor, *, scale: float, dropout: float
    ) -> Tensor:
        """See `AttentionPattern`."""
        refuse_dropout("Varlen", dropout)
        from torch.nn.attention.varlen import varlen_attn

        grouped = key.shape[2] != query.shape[2]
        options: dict[str, Any] = {"scale": scale}
        if grouped and self.grouped_heads:
            options["enable_gqa"] = True
        elif grouped:
            key, value = repeat_heads(key, query.shape[2]), repeat_heads(value, query.shape[2])
        options["window_size"] = (-1 if self.window is None else self.window - 1, 0)
        mixed: Any = varlen_attn(
            query.flatten(0, 1), key.flatten(0, 1), value.flatten(0, 1),
            self.starts, self.starts, self.longest, self.longest, **options,
        )  # fmt: skip
        return cast(Tensor, mixed.view(*query.shape[:2], *mixed.shape[1:]))


@dataclass(frozen=True, eq=False)
class Flex:
    """Attention by torch's `flex_attention` (trains on CUDA only).

    Blocks of the mask without an allowed pair are skipped. `rule` changes the scores of queries and
    keys at the positions `at`.
    """

    mask: BlockMask
    rule: AttentionScores | None = None
    at: tuple[Tensor, Tensor] | None = None
    per_head: Tensor | None = None

    def with_heads(self, per_head: Tensor) -> Flex:
        """See `PerHeadPattern`."""
        return replace(self, per_head=per_head)

    def __call__(
        self, query: Tensor, key: Tensor, value: Tensor, *, scale: float, dropout: float
    ) -> Tensor:
        """See `AttentionPattern`."""
        refuse_dropout("Flex", dropout)
        q, k, v = (x.transpose(1, 2) for x in (query, key, value))
        options: dict[str, Any] = {"block_mask": self.mask, "scale": scale}
        options["enable_gqa"] = k.shape[1] != q.shape[1]
        attend = flex_function("flex_attention", query.is_cuda, dynamic=False)
        if self.rule is None or self.at is None:
            return cast(Tensor, attend(q, k, v, **options).transpose(1, 2))
        rule, columns, (queries, keys) = self.rule, _columns_of(self.per_head), self.at
        slopes = columns[:, 0].detach()

        def score_mod(score: Tensor, b: Tensor, h: Tensor, i: Tensor, j: Tensor) -> Tensor:
            return rule.change(score, keys[j] - queries[i], slopes[h])

        # A sink takes its share of the sum of exponentials, whose log the kernel returns.
        flex = importlib.import_module("torch.nn.attention.flex_attention")
        options |= {"score_mod": score_mod, "return_aux": flex.AuxRequest(lse=True)}
        mixed, more = attend(q, k, v, **options)
        if rule.sinks:
            mixed = mixed * (more.lse - columns[:, 1, None]).sigmoid()[..., None].to(mixed.dtype)
        return cast(Tensor, mixed.transpose(1, 2))


@functools.cache
def flex_function(name: str, compiled: bool, **options: Any) -> Any:
    """A function of torch's flex attention; uncompiled, it stores every pair of tokens."""
    # Imported here, as in torch 2.15 the module imports sympy, which costs everybody half a second.
    function = getattr(importlib.import_module("torch.nn.attention.flex_attention"), name)
    return torch.compile(function, **options) if compiled else function  # takes seconds once


def _first_of_run(ids: Tensor) -> Tensor:
    """Which tokens are the first of a run of equal ids in their row: bool `[batch, sequence]`."""
    first = torch.ones_like(ids, dtype=torch.bool)
    first[:, 1:] = ids[:, 1:] != ids[:, :-1]
    return first


def document_starts(runs: Tensor) -> Tensor:
    """Where each document of the flattened batch starts, and the end: int64 `[documents + 1]`.

    The number of documents is on the device, so the host waits for it.
    """
    places = _first_of_run(runs).flatten().nonzero().squeeze(1)
    return F.pad(places, (0, 1), value=runs.numel())


def document_runs(document_ids: Tensor) -> Tensor:
    """Number the runs of equal ids in each row: int64 `[batch, sequence]`.

    A document is a run of equal ids. An id that occurs again after another one starts a new
    document; this holds for every kernel.
    """
    return _first_of_run(document_ids).to(torch.int64).cumsum(dim=1) - 1


def document_positions(document_ids: Tensor) -> Tensor:
    """Count positions from 0 in each run of equal ids.

    Args:
        document_ids: integers `[batch, sequence]`.

    Returns:
        int64 `[batch, sequence]`.
    """
    index = torch.arange(document_ids.shape[1], device=document_ids.device).expand_as(document_ids)
    starts = _first_of_run(document_ids)
    return index - torch.where(starts, index, 0).cummax(dim=1).values


def allowed_pairs(
    queries: Tensor,
    keys: Tensor,
    window: int | None,
    query_runs: Tensor | None = None,
    key_runs: Tensor | None = None,
) -> Tensor:
    """Make the mask of queries and the keys that they may attend to: bool `[batch or 1, 1, q, k]`.

    `queries` `[q]` and `keys` `[k]` are positions in the sequence, and `query_runs` `[batch, q]`
    and `key_runs` `[batch, k]` their documents, all int64. A token attends to `window` tokens,
    itself included.
    """
    distance = queries[:, None] - keys[None, :]
    allowed = distance >= 0
    if window is not None:
        allowed &= distance < window
    allowed = allowed[None]
    if query_runs is not None and key_runs is not None:
        allowed = allowed & (query_runs[:, :, None] == key_runs[:, None, :])
    return allowed[:, None]


def choose_pattern(
    config: TransformerConfig,
    tokens: Tensor,
    dtype: torch.dtype,
    document_ids: Tensor | None,
    dropout: float = 0.0,
) -> AttentionPattern:
    """Choose the path that the config names, or the fastest one that supports the case.

    Args:
        config: names the path and the window.
        tokens: any tensor `[batch, sequence, ...]` on the device of the activations.
        dtype: of queries, keys and values.
        document_ids: integers `[batch, sequence]` or None.
        dropout: of attention probabilities.

    Raises:
        ValueError: if the named path cannot do the case.
    """
    sequence, device = tokens.shape[1], tokens.device
    window = config.sliding_window
    if window is not None and window >= sequence:
        window = None
    path: str = config.attention_path
    if path == "auto":
        path = _best_path(config, device, dtype, dropout)
        if window is None and document_ids is None and config.scores is None:
            return Causal()
    if config.scores is None and path == "sdpa" and window is None and document_ids is None:
        return Causal()
    check_path(config, device, dtype, dropout)
    runs = None if document_ids is None else document_runs(document_ids)
    if path == "varlen":
        return _varlen(tokens, runs, window)
    index = torch.arange(sequence, device=device)
    return over_positions(config.scores, index, index, window, runs, runs, flex=path == "flex")


def over_positions(
    rule: AttentionScores | None,
    queries: Tensor,
    keys: Tensor,
    window: int | None,
    runs: Tensor | None = None,
    query_runs: Tensor | None = None,
    *,
    flex: bool,
) -> AttentionPattern:
    """Make the pattern of queries and keys at some positions; see `allowed_pairs`.

    `runs` are those of the whole sequence, and of the keys.
    """
    if flex:
        pattern = flex_over(queries, keys, window, runs)
        return pattern if rule is None else replace(pattern, rule=rule, at=(queries, keys))
    mask = allowed_pairs(queries, keys, window, query_runs, runs)
    if rule is None:
        return Masked(mask)
    return Scored(rule, mask, keys[None, :] - queries[:, None])


def _best_path(
    config: TransformerConfig, device: torch.device, dtype: torch.dtype, dropout: float
) -> str:
    if computes_on(device) != "cuda" or dropout:
        return "sdpa"
    if config.scores is None and _what_varlen_lacks(config, device, dtype) is None:
        return "varlen"
    return "flex" if flex_compiles(config) else "sdpa"


def flex_compiles(config: TransformerConfig) -> bool:
    """Whether torch has a kernel of flex_attention for the widths of heads on a GPU."""
    return min(config.head_width, config.value_width) >= _FLEX_WIDTH


def _what_varlen_lacks(
    config: TransformerConfig, device: torch.device, dtype: torch.dtype
) -> str | None:
    if computes_on(device) != "cuda":
        return f"no kernel on {device.type}"
    if dtype not in (torch.float16, torch.bfloat16):
        return f"no kernel for {dtype} (only for float16 and bfloat16)"
    if not config.value_width == config.head_width <= 256:
        return (
            f"no kernel for query heads of {config.head_width} and value heads of "
            f"{config.value_width} elements (only for equal widths up to 256)"
        )
    # The variable-length kernel is FlashAttention's, which needs an Ampere GPU or later.
    if device.type == "cuda" and torch.cuda.get_device_capability(device) < (8, 0):
        return "no kernel for this GPU (compute capability 8.0 or above)"
    return None


def check_path(
    config: TransformerConfig, device: torch.device, dtype: torch.dtype, dropout: float
) -> None:
    """Raise ValueError if the config names a path that does not support the case."""
    path, lacks = config.attention_path, None
    if path in ("auto", "sdpa"):
        return
    if dropout:
        lacks = f"no attention_dropout (here {dropout})"
    elif path == "varlen" and config.scores is not None:
        lacks = f"no scores (here {config.scores})"
    elif path == "varlen":
        lacks = _what_varlen_lacks(config, device, dtype)
    elif computes_on(device) == "cuda" and not flex_compiles(config):
        lacks = (
            f"no kernel on {device.type} for query heads of {config.head_width} and value heads of "
            f"{config.value_width} elements (at least {_FLEX_WIDTH})"
        )
    elif computes_on(device) != "cuda" and torch.is_grad_enabled():
        lacks = f"no backward on {device.type} (it runs under torch.no_grad())"
    if lacks is not None:
        raise ValueError(
            f"attention_path {path!r} has {lacks}: set attention_path to 'auto' or 'sdpa'"
        )


def _varlen(tokens: Tensor, runs: Tensor | None, window: int | None) -> Varlen:
    from torch.nn.attention.varlen import varlen_attn

    grouped = "enable_gqa" in inspect.signature(varlen_attn).parameters
    batch, sequence = tokens.shape[:2]
    if runs is None:
        starts = torch.arange(0, (batch + 1) * sequence, sequence, device=tokens.device)
        return Varlen(starts.to(torch.int32), sequence, window, grouped)
    starts = document_starts(runs)
    # max waits for the device, as document_starts does: once per forward, not per block.
    return Varlen(starts.to(torch.int32), int(starts.diff().max()), window, grouped)


def flex_over(
    queries: Tensor, keys: Tensor, window: int | None, runs: Tensor | None = None
) -> Flex:
    """Make the flex pattern of queries and keys at some positions; see `allowed_pairs`.

    `runs` are those of the whole sequence.
    """

    def mask_mod(b: Tensor, h: Tensor, q: Tensor, k: Tensor) -> Tensor:
        query, key = queries[q], keys[k]
        allowed = query >= key
        if window is not None:
            allowed = allowed & (query - key < window)
        if runs is not None:
            allowed = allowed & (runs[b, query] == runs[b, key])
        return allowed

    rows = None if runs is None else runs.shape[0]
    lengths = queries.numel(), keys.numel()
    make = flex_function("create_block_mask", queries.is_cuda)
    return Flex(make(mask_mod, rows, None, *lengths, device=queries.device))
