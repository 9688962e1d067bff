"""Latent attention to the keys that an indexer chooses (DeepSeek-V3.2, 2025).

The indexer gives each pair of a query and a key a score that is cheap to compute: few dimensions,
and keys that its heads share. Each query attends to the keys with the best scores. No gradient
goes through that choice, so the indexer has a loss of its own: how far the softmax of its scores is
from the weights that attention gives the chosen keys, in the mean over attention's heads.
"""

from collections.abc import Iterator, Mapping
from dataclasses import dataclass, replace
from typing import Any, Literal, NamedTuple

import torch
from torch import Tensor, nn
from torch.utils.checkpoint import checkpoint

from lamina.collectives import gather_from, reduce_from
from lamina.mesh.engine import MeshAxis
from lamina.models.attention.context import AttentionContext
from lamina.models.attention.context_parallel import GatheredKeys
from lamina.models.attention.kernels import AttentionPattern, Masked, allowed_pairs
from lamina.models.attention.latent_attention import LatentAttention, LatentSelfAttention
from lamina.models.attention.ring import positions_of
from lamina.models.attention.rotary import apply_rotary
from lamina.models.base.config import TransformerConfig
from lamina.models.base.configs.field_checks import require_at_least
from lamina.models.base.mesh_axes import MeshLike, axis_of
from lamina.models.base.weight_link import WeightLink, linked
from lamina.models.compat import one_graph_break
from lamina.models.layers.linear import Linear
from lamina.models.layers.matmul_products import without_autocast
from lamina.models.layers.norms import LayerNorm
from lamina.models.layers.zigzag import cut_sequence, in_order
from lamina.models.moe.losses import RoutingContext, inject

_SCORES_AT_ONCE = 1 << 27
"""Scores of single heads that there is memory for at a time (512 MiB in float32)."""


@dataclass(frozen=True, kw_only=True)
class SparseLatentAttention(LatentAttention):
    """Latent attention in which each query attends to `top_k` keys, which an indexer chooses.

    Sequences of at most `top_k` tokens attend to all keys before them, which trains the indexer as
    the paper's first stage does.

    Args:
        top_k: keys that a query attends to, itself among them if it is chosen.
        index_heads: heads of the indexer.
        index_width: elements of a head of the indexer, of which RoPE turns the first
            `qk_rope_head_dim`.
        index_interleaved: whether RoPE turns neighbouring elements in the indexer of Hugging Face's
            model, as `interleaved` says it of attention.
        index_loss: the factor of the indexer's loss, whose gradients reach the indexer alone. With
            0 the indexer is frozen: its parameters require no gradient.

    Examples:
        >>> sparse = SparseLatentAttention(kv_lora_rank=512, q_lora_rank=1536, top_k=2048)
    """

    huggingface_type = None  # a config names one, as `TransformerConfig.huggingface_type`
    context_parallel = ("all_gather",)
    reads_documents = True
    adds_loss = True

    top_k: int = 2048
    index_heads: int = 64
    index_width: int = 128
    index_interleaved: bool = False
    index_loss: float = 1.0

    def __post_init__(self) -> None:
        super().__post_init__()
        require_at_least(1, self, "top_k", "index_heads", "index_width")
        if not self.index_loss >= 0.0:
            raise ValueError(f"index_loss is {self.index_loss}: it must be at least 0")
        if self.index_width < self.qk_rope_head_dim:
            raise ValueError(
                f"index_width is {self.index_width}, and RoPE turns qk_rope_head_dim "
                f"{self.qk_rope_head_dim} of its elements: make it at least as wide"
            )

    def make(self, config: TransformerConfig, mesh: MeshLike = None) -> nn.Module:
        """See `AttentionVariant.make`."""
        return SparseLatentSelfAttention(config, self, mesh)

    def check(self, config: TransformerConfig) -> None:
        """See `AttentionVariant.check`."""
        super().check(config)
        lacks = {
            f"attention_path={config.attention_path!r} (only a kernel with a mask reads what the "
            "indexer chose)": config.attention_path not in ("auto", "sdpa"),
            "invariant=True (the indexer's sums have no fixed order)": config.invariant,
        }
        for what, there in lacks.items():
            if there:
                raise ValueError(f"SparseLatentAttention beside {what}: leave one of them out")

    def parameters(self, config: TransformerConfig) -> int:
        """See `AttentionVariant.parameters`."""
        queries = (self.q_lora_rank or config.hidden_size) * self.index_heads * self.index_width
        others = config.hidden_size * (self.index_width + self.index_heads)
        return super().parameters(config) + queries + others

    def products_per_token(self, config: TransformerConfig, sequence: int) -> float:
        """See `LayerPart.products_per_token`: of the chosen pairs, and of the indexer's."""
        chosen = min(self.top_k, config.sliding_window or self.top_k)
        attended = super().products_per_token(replace(config, sliding_window=chosen), sequence)
        pairs = super().products_per_token(config, sequence) / self.products_per_pair(config)
        return attended + pairs * self.index_heads * (self.index_width + 1)

    @classmethod
    def read_huggingface(cls, source: Mapping[str, Any]) -> dict[str, Any]:
        """See `AttentionVariant.read_huggingface`."""
        latent = LatentAttention.read_huggingface(source)["mla"]
        sizes = {ours: source[theirs] for ours, theirs in INDEX_NAMES.items()}
        return {"mla": cls(**vars(latent), **sizes)}

    def huggingface_fields(self, config: TransformerConfig) -> dict[str, Any]:
        """See `AttentionVariant.huggingface_fields`."""
        sizes = {theirs: getattr(self, ours) for ours, theirs in INDEX_NAMES.items()}
        return super().huggingface_fields(config) | sizes

    def huggingface_links(
        self, config: TransformerConfig, ours: str, theirs: str
    ) -> Iterator[WeightLink]:
        """See `AttentionVariant.huggingface_links`."""
        yield from super().huggingface_links(config, ours, theirs)
        ours, theirs, turned = f"{ours}.indexer", f"{theirs}.indexer", self.qk_rope_head_dim
        head = tuple(range(self.index_width))
        if self.index_interleaved:
            head = (*range(0, turned, 2), *range(1, turned, 2), *head[turned:])
        heads = tuple(h * self.index_width + i for h in range(self.index_heads) for i in head)
        yield from linked(f"{ours}.query", f"{theirs}.wq_b", order=heads)
        yield from linked(f"{ours}.key", f"{theirs}.wk", order=head)
        yield from linked(f"{ours}.key_norm", f"{theirs}.k_norm", bias=True, order=head)
        yield from linked(f"{ours}.head_weights", f"{theirs}.weights_proj")


INDEX_NAMES = {
    "top_k": "index_topk",
    "index_heads": "index_n_heads",
    "index_width": "index_head_dim",
}
"""The sizes of the indexer in Hugging Face's configs."""


class _Index(NamedTuple):
    """What the indexer scores pairs by.

    Queries `[batch, queries, heads, width]`, keys `[batch, keys, width]`, and the weights of the
    heads `[batch, queries, heads]`.
    """

    query: Tensor
    key: Tensor
    weights: Tensor

    def pieces(self) -> "list[_Index]":
        """Some of the queries at a time, and all keys."""
        rows = _rows_at_once(self.query, self.key)
        parts = zip(*(torch.split(x, rows, 1) for x in (self.query, self.weights)), strict=True)
        return [_Index(query, self.key, weights) for query, weights in parts]

    def scores(self) -> Tensor:
        """The score of each pair, in float32 or wider: `[batch, queries, keys]`.

        Products of queries and keys are in their dtype, and the sum over heads is in the wide one.
        """
        wide = torch.promote_types(self.query.dtype, torch.float32)
        # One product for all queries and heads: with a dimension for queries, torch would copy the
        # keys for each of them.
        of_heads = self.query.flatten(1, 2) @ self.key.mT
        of_heads = of_heads.view(*self.query.shape[:3], -1).relu().to(wide)
        total: Tensor = self.weights.to(wide).unsqueeze(-2) @ of_heads
        return total.squeeze(-2)


class TokenIndexer(nn.Module):
    """Makes the queries, keys and weights by which pairs are scored.

    It is whole on every tensor-parallel rank. Under sequence parallelism each rank projects its own
    tokens, and is given what the others made. Its input carries no gradient back.

    Args:
        config: the layer's.
        sizes: of the indexer.
        mesh: has an axis `tp`, or is that axis; None is one process.
    """

    def __init__(
        self, config: TransformerConfig, sizes: SparseLatentAttention, mesh: MeshLike = None
    ) -> None:
        super().__init__()
        self.sizes, self.window = sizes, config.sliding_window
        self.tokens_tp = axis_of(mesh, "tp") if config.sequence_parallel else None
        heads, width, hidden = sizes.index_heads, sizes.index_width, config.hidden_size
        partial = self.tokens_tp is not None
        how: dict[str, Any] = {"init_std": config.init_std, "partial": partial}
        self.query = Linear(sizes.q_lora_rank or hidden, heads * width, **how)
        self.key = Linear(hidden, width, **how)
        self.key_norm = LayerNorm(width, 1e-6, partial=partial)
        self.head_weights = Linear(hidden, heads, **how)
        if not sizes.index_loss:
            self.requires_grad_(False)

    def forward(self, x: Tensor, latent: Tensor, context: AttentionContext) -> _Index:
        """Score the pairs of tokens `x` whose queries are made from `latent`.

        Both are `[batch, sequence, ...]`, or under sequence parallelism `[tokens / tp, ...]`. The
        result has all tokens of this context-parallel rank, and keys that the cache kept.
        """
        x, latent = x.detach(), latent.detach()
        heads, width = self.sizes.index_heads, self.sizes.index_width
        parts = [self.query(latent), self.key_norm(self.key(x)), self.head_weights(x)]
        if self.tokens_tp is not None:
            sizes = [part.shape[-1] for part in parts]
            whole = gather_from(torch.cat(parts, dim=-1), self.tokens_tp.group)
            parts = list(torch.split(whole, sizes, dim=-1))
        query, key, weights = (part.view(*context.shape, -1) for part in parts)
        query, key = query.unflatten(-1, (heads, width)), key.unsqueeze(2)
        if context.rotary is not None:
            query, key = (apply_rotary(each, *context.rotary) for each in (query, key))
        key = key.squeeze(2)
        if context.cache is not None:
            (key,) = context.cache.extended((key,), self.window)
        return _Index(query, key, weights * (heads * width) ** -0.5)


class SparseLatentSelfAttention(LatentSelfAttention):
    """Latent attention to the keys that an indexer chooses, and the loss that trains the indexer.

    The loss is `index_loss` times the divergence KL(p || q), in the mean over the microbatch's
    tokens, of which padding counts as zero: p are the weights of a query's keys in the mean over
    attention's heads, and q is the softmax of the indexer's scores, both over the chosen keys. It
    follows `context.routing.scale`, as the losses of routers do (decision 0687).

    Args:
        config: the shape.
        sizes: widths of the latents, of the parts of a head and of the indexer.
        mesh: has an axis `tp`, or is that axis; None is one process.

    Attributes:
        divergence: this rank's part of the mean in the last forward that trained the indexer; None
            before.

    Raises:
        ValueError: if the heads are not divisible by the number of ranks.
    """

    caches = True

    def __init__(
        self, config: TransformerConfig, sizes: SparseLatentAttention, mesh: MeshLike = None
    ) -> None:
        super().__init__(config, sizes, mesh)
        self.top_k, self.loss_factor = sizes.top_k, sizes.index_loss
        self.indexer = TokenIndexer(config, sizes, mesh)
        self.divergence: Tensor | None = None

    def mix(self, x: Tensor, context: AttentionContext) -> Tensor:
        """See `Attention.mix`."""
        latent = self.query_latent(x)
        index = self.indexer(x, latent, context)
        cp = context.pattern.axis if isinstance(context.pattern, GatheredKeys) else None
        index = index._replace(key=_of_whole_sequence(index.key, cp, "reduce_scatter"))
        query, (key, value) = self.queries(latent, context), self.keys_and_values(x, context)
        trained = any(part.requires_grad for part in index)  # not where somebody has frozen them
        learns = self.training and self.loss_factor > 0.0 and trained
        chooses = index.key.shape[1] > self.top_k
        if not (learns or chooses):
            return self.attend(query, key, value, context)
        allowed = self._allowed(index, context, cp)
        chosen = _best_keys(index, allowed, self.top_k)
        valid = allowed.expand(len(chosen), -1, -1).gather(-1, chosen.long())
        if chooses:
            narrowed: AttentionPattern = Masked(_mask(chosen, valid, allowed.shape[-1]))
            narrowed = narrowed if cp is None else GatheredKeys(cp, narrowed)
            context = replace(context, pattern=narrowed)
        mixed = self.attend(query, key, value, context)
        if not learns:
            return mixed
        key = _of_whole_sequence(key.detach(), cp, "split")
        query = context.scaled(query.detach())
        return self._teach(mixed, index, chosen, valid, query, key, context)

    def _allowed(self, index: _Index, context: AttentionContext, cp: MeshAxis | None) -> Tensor:
        """The keys that are before each query: bool `[batch or 1, queries, keys]`."""
        keys, device = index.key.shape[1], index.key.device
        if context.cache is not None and context.cache.length:
            return torch.ones(1, 1, keys, dtype=torch.bool, device=device)
        places, runs = torch.arange(keys, device=device), context.runs
        mine = places if cp is None else positions_of(cp.rank, cp.size, keys, device)
        my_runs = None if runs is None else cut_sequence(runs, cp)
        return allowed_pairs(mine, places, self.config.sliding_window, my_runs, runs).squeeze(1)

    # Not compiled: the scale of auxiliary losses is only known in backward.
    @one_graph_break
    def _teach(
        self,
        mixed: Tensor,
        index: _Index,
        chosen: Tensor,
        valid: Tensor,
        query: Tensor,
        key: Tensor,
        context: AttentionContext,
    ) -> Tensor:
        """Attention's result, with the indexer's loss upon it."""
        routing = context.routing or RoutingContext()
        target = _attended(query, key, chosen, valid, self.core.scale)
        if self.axis is not None:
            target = reduce_from(target, self.axis.group)
        target = target / self.config.num_heads
        divergences = []
        rows = _rows_at_once(index.query, index.key)
        beside = (torch.split(each, rows, 1) for each in (chosen, valid, target))
        for piece, *others in zip(index.pieces(), *beside, strict=True):
            # Backward scores the pairs again: those of all heads would be the largest tensor.
            made = checkpoint(
                _divergence, *piece, *others, use_reentrant=False, preserve_rng_state=False
            )
            divergences.append(made)
        divergence = torch.cat(divergences, dim=1)
        if routing.padding is not None:
            counted = (~routing.padding).to(divergence.dtype)
            if self.indexer.tokens_tp is not None:
                counted = gather_from(counted, self.indexer.tokens_tp.group)
            divergence = divergence * counted.view(divergence.shape)
        tokens = divergence.shape[0] * key.shape[1]
        total = divergence.sum() / tokens
        self.divergence = total.detach()
        return inject(mixed, self.loss_factor * total, routing.scale)


def _of_whole_sequence(
    key: Tensor, cp: MeshAxis | None, grad: Literal["split", "reduce_scatter"]
) -> Tensor:
    """Keys `[batch, tokens, ...]` of all context-parallel ranks."""
    if cp is None:
        return key
    return in_order(gather_from(key, cp.group, dim=1, grad=grad), cp.size)


def _mask(chosen: Tensor, valid: Tensor, keys: int) -> Tensor:
    """What is both chosen and allowed, as early queries have fewer keys: `[batch, 1, q, keys]`."""
    mask = torch.zeros(*chosen.shape[:2], keys, dtype=torch.bool, device=chosen.device)
    return mask.scatter(-1, chosen.long(), valid).unsqueeze(1)


def _rows_at_once(query: Tensor, key: Tensor) -> int:
    """Queries `[batch, queries, heads, width]` whose scores are computed at a time."""
    batch, _, heads = query.shape[:3]
    return max(1, _SCORES_AT_ONCE // (batch * heads * key.shape[1]))


@torch.no_grad()
def _best_keys(index: _Index, allowed: Tensor, top_k: int) -> Tensor:
    """The keys with the best scores of each query: int32 `[batch, queries, top_k]`.

    Where fewer are allowed, the rest are keys that are not.
    """
    best, number = [], min(top_k, index.key.shape[1])
    parts = torch.split(allowed, _rows_at_once(index.query, index.key), dim=1)
    with without_autocast(index.key.device):
        for piece, before in zip(index.pieces(), parts, strict=True):
            scores = piece.scores().masked_fill(~before, -torch.inf)
            best.append(scores.topk(number, dim=-1).indices.to(torch.int32))
    return torch.cat(best, dim=1)


@torch.no_grad()
def _attended(query: Tensor, key: Tensor, chosen: Tensor, valid: Tensor, scale: float) -> Tensor:
    """Sum attention's weights of the chosen keys over heads: `[batch, queries, top_k]`.

    Queries and keys are `[batch, tokens, heads, width]`. The softmax is in float32 or wider.
    """
    wide, rows = torch.promote_types(query.dtype, torch.float32), _rows_at_once(query, key)
    parts = (torch.split(each, rows, 1) for each in (query, chosen, valid))
    # Laid out once: with heads between tokens, each product would copy all keys.
    keys, sums = key.transpose(1, 2).contiguous().mT, []
    with without_autocast(query.device):
        for some, places, there in zip(*parts, strict=True):
            mask = _mask(places, there, key.shape[1])
            scores = (some.transpose(1, 2) @ keys).mul_(scale).masked_fill_(~mask, -torch.inf)
            weights = scores.softmax(dim=-1, dtype=wide).sum(dim=1)
            sums.append(weights.gather(-1, places.long()).masked_fill_(~there, 0.0))
    return torch.cat(sums, dim=1)


def _divergence(
    query: Tensor, key: Tensor, weights: Tensor, chosen: Tensor, valid: Tensor, target: Tensor
) -> Tensor:
    """KL(target || softmax of the scores) over the chosen keys, of each query."""
    with without_autocast(query.device):
        scores = _Index(query, key, weights).scores()
    scores = scores.gather(-1, chosen.long()).masked_fill(~valid, -torch.inf)
    logs = scores.log_softmax(dim=-1).masked_fill(~valid, 0.0)
    differences: Tensor = torch.special.xlogy(target, target) - target * logs
    return differences.sum(dim=-1)
