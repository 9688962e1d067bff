"""What all blocks of a forward share: it is made once and passed to each of them."""

from __future__ import annotations

from dataclasses import dataclass
from typing import Any

import torch
from torch import Tensor

from lamina.models.attention.context_parallel import parallel_pattern
from lamina.models.attention.kernels import (
    AttentionPattern,
    Masked,
    document_positions,
    document_runs,
    over_positions,
)
from lamina.models.attention.rotary import query_factors, rotary_tables
from lamina.models.base.config import TransformerConfig
from lamina.models.base.mesh_axes import MeshLike, axis_of
from lamina.models.invariance.random_keys import TokenKeys
from lamina.models.layers.zigzag import cut_sequence
from lamina.models.moe.losses import RoutingContext


def default_positions(tokens: Tensor, document_ids: Tensor | None = None, start: int = 0) -> Tensor:
    """Count from `start`, anew in each document if there are any: int64 `[(batch,) sequence]`."""
    if document_ids is not None:
        return document_positions(document_ids) + start
    return torch.arange(start, start + tokens.shape[1], device=tokens.device)


def same_for_all(positions: Tensor) -> Tensor:
    """Return positions `[1, sequence]`, which all rows share, as `[sequence]`; others unchanged."""
    return positions[0] if positions.ndim == 2 and positions.shape[0] == 1 else positions


def _attends_alike(a: TransformerConfig, b: TransformerConfig) -> bool:
    """Whether layers of two configs take the same pattern and the same tables."""
    names = ["sliding_window", "attention_path", "head_widths", "score_scale", "attention_dropout"]
    names += ["scores"]
    if a.positions == b.positions == "rope":
        names += ["rope_theta", "rope_scaling"]
    alike = (a.positions == "rope") == (b.positions == "rope")
    return alike and all(getattr(a, name) == getattr(b, name) for name in names)


class _Tokens:
    """Tensors `[batch, sequence, ...]` to which single tokens are added: in place, in blocks."""

    BLOCK = 128
    """Tokens that there is room for when the tensors are made anew."""

    def __init__(self, tensors: tuple[Tensor, ...]) -> None:
        self.buffers, self.first, self.end = tensors, 0, tensors[0].shape[1]

    def views(self) -> tuple[Tensor, ...]:
        """The tokens that are kept."""
        return tuple(each.narrow(1, self.first, self.end - self.first) for each in self.buffers)

    def add(self, new: tuple[Tensor, ...]) -> None:
        """Add a token `[batch, 1, ...]` to each tensor."""
        if self.end == self.buffers[0].shape[1]:
            kept, length = self.views(), self.end - self.first
            self.buffers = tuple(
                tensor.new_empty(tensor.shape[0], length + self.BLOCK, *tensor.shape[2:])
                for tensor in kept
            )
            for buffer, tensor in zip(self.buffers, kept, strict=True):
                buffer[:, :length] = tensor
            self.first, self.end = 0, length
        for buffer, tensor in zip(self.buffers, new, strict=True):
            buffer.narrow(1, self.end, 1).copy_(tensor)
        self.end += 1


class TokenCache:
    """What layers keep of the tokens so far, so that a forward computes the new ones alone.

    The first forward takes any number of tokens, and each later one a single token per row. Layers
    find what they kept by the order in which a forward calls them, so a layer that is used twice
    has two entries.

    Args:
        last_only: give the logits of a forward's last token alone, `[batch, 1, vocabulary]`.

    Attributes:
        length: tokens of each row so far.
    """

    def __init__(self, *, last_only: bool = False) -> None:
        self.length, self.last_only = 0, last_only
        self._tables: dict[Any, tuple[Tensor, Tensor]] = {}
        self._kept: list[Any] = []
        self._next = 0

    def before(self) -> Any:
        """What the layer at hand has kept; None in the first forward."""
        return self._kept[self._next] if self.length else None

    def keep(self, value: Any) -> None:
        """Keep this for the layer at hand, and go on to the next."""
        self._kept[self._next : self._next + 1] = [value]
        self._next += 1

    def extended(self, new: tuple[Tensor, ...], window: int | None) -> tuple[Tensor, ...]:
        """Tensors `[batch, sequence, ...]` of the tokens so far, which `new` ends.

        Of a layer with a window the next token will read `window - 1`, and only these are kept.
        """
        kept: _Tokens | None = self.before()
        if kept is None:
            kept = _Tokens(new)
        elif torch.is_grad_enabled():  # a write in place would spoil what backward reads
            kept = _Tokens(
                tuple(torch.cat(pair, 1) for pair in zip(kept.views(), new, strict=True))
            )
        else:
            kept.add(new)
        views = kept.views()
        if window is not None:
            kept.first = max(kept.first, kept.end - window + 1)
        self.keep(kept)
        return views

    def rotary(self, config: TransformerConfig, tokens: Tensor) -> tuple[Tensor, Tensor]:
        """`rotary_tables` of a forward's tokens, from tables that reach a block further."""
        key = config.rotary_width, config.rope_theta, config.rope_scaling
        end = self.length + tokens.shape[1]
        tables = self._tables.get(key)
        if tables is None or tables[0].shape[0] < end:
            ahead = torch.arange(end + _Tokens.BLOCK, device=tokens.device)
            tables = self._tables[key] = rotary_tables(config, ahead)
        return tables[0][self.length : end], tables[1][self.length : end]

    def end_forward(self, tokens: int) -> None:
        """A forward of so many tokens is done."""
        self.length, self._next = self.length + tokens, 0


@dataclass(frozen=True)
class AttentionContext:
    """What the attention of every block needs beside its input.

    Attributes:
        shape: sequences in the batch, and tokens of each sequence in the input of attention.
        pattern: computes attention, by a kernel and with the mask that it implies.
        rotary: cosines and sines from `rotary_tables`, or None without RoPE.
        query_scale: factors of queries, `[sequence]` or `[batch, sequence]` like positions; None
            leaves queries as they are.
        runs: int64 `[batch, sequence]`: each token's document, if the config has layers other than
            attention that need it; None without documents.
        routing: what the routers share, in a model with experts.
        config: the config that the context was built from; None is unknown.
        others: contexts of layers that attend otherwise, where layers differ.
        cache: of the tokens before these; None in a forward of whole sequences.
        token_keys: what dropout with `invariant=True` follows from; else None.
    """

    shape: tuple[int, int]
    pattern: AttentionPattern
    rotary: tuple[Tensor, Tensor] | None = None
    runs: Tensor | None = None
    routing: RoutingContext | None = None
    config: TransformerConfig | None = None
    others: tuple[AttentionContext, ...] = ()
    cache: TokenCache | None = None
    token_keys: TokenKeys | None = None
    query_scale: Tensor | None = None

    def of_layer(self, config: TransformerConfig) -> AttentionContext:
        """The context of a layer with this config.

        Raises ValueError if the context was made for other windows or positions. The blocks of a
        forward share these, so the settings of the block would be ignored.
        """
        if self.config is None or self.config is config:
            return self
        for context in (self, *self.others):
            if context.config is not None and _attends_alike(context.config, config):
                return context
        turns = config.positions == "rope"
        names = ["sliding_window"]
        if turns != (self.config.positions == "rope"):  # attention does not tell none from learned
            names = ["positions"]
        elif turns:
            names += ["rope_theta", "rope_scaling", "rotary_fraction"]
        for name in names:
            wanted, there = getattr(config, name), getattr(self.config, name)
            if wanted != there:
                raise ValueError(
                    f"a block is made with {name} {wanted!r}, and the model whose context it is "
                    f"given has {name} {there!r}: the blocks of a forward share them; make every "
                    "block with the model's, or call it with an AttentionContext of its own"
                )
        return self

    def scaled(self, query: Tensor) -> Tensor:
        """Queries `[batch, sequence, heads, width]` times `query_scale`, if there is one."""
        if self.query_scale is None:
            return query
        return query * self.query_scale[..., None, None].to(query.dtype)

    @staticmethod
    def build(
        config: TransformerConfig,
        tokens: Tensor,
        dtype: torch.dtype,
        positions: Tensor | None = None,
        document_ids: Tensor | None = None,
        *,
        training: bool = False,
        mesh: MeshLike = None,
        cache: TokenCache | None = None,
    ) -> AttentionContext:
        """Make the tables and the pattern of a forward.

        Args:
            config: the model's.
            tokens: any tensor `[batch, sequence, ...]` on the device of the activations, whole
                sequences.
            dtype: of the activations.
            positions: int64 `[sequence]` or `[batch, sequence]`; counted from the start of the
                text when None, or of each document where `document_ids` are given.
            document_ids: integers `[batch, sequence]`; a token attends only within its document,
                a run of equal ids.
            training: whether attention dropout applies.
            mesh: if it has an axis `cp`, or is that axis, attention's input is this rank's part
                of the sequences.
            cache: of the tokens before these, if there are some one token of each row follows.

        ValueError: more than one token of each row follows those in the cache.
        """
        cp = axis_of(mesh, "cp")
        if cache is not None and cache.length and tokens.shape[1] != 1:
            raise ValueError(
                f"{tokens.shape[1]} tokens a row, and the TokenCache has {cache.length} before "
                "them: after the first forward give it one token a row at a time"
            )
        rotary = query_scale = None
        if positions is None and (cache is None or document_ids is not None):
            positions = default_positions(tokens, document_ids)
        if config.positions == "rope" and positions is not None:
            mine = cut_sequence(positions, cp, dim=-1)
            rotary, query_scale = rotary_tables(config, mine), query_factors(config, mine)
        elif config.positions == "rope" and cache is not None:
            rotary = cache.rotary(config, tokens)
            query_scale = query_factors(config, default_positions(tokens, start=cache.length))
        dropout = config.attention_dropout if training else 0.0
        pattern: AttentionPattern = Masked(None)  # a token that follows reads all that is kept
        if cache is None or cache.length == 0 or config.invariant:
            pattern = parallel_pattern(config, cp, tokens, dtype, document_ids, dropout)
        elif config.scores is not None:
            window = config.sliding_window
            index = torch.arange(cache.length + 1, device=tokens.device)
            kept = index if window is None else index[-window:]
            pattern = over_positions(config.scores, index[-1:], kept, window, flex=False)
        local = tokens.shape[1] // (1 if cp is None else cp.size)
        runs = None
        kinds = [layer.attention_variant for layer in config.distinct_layers]
        reads = any(kind is not None and kind.reads_documents for kind in kinds)
        if document_ids is not None and (config.mamba is not None or reads):
            runs = document_runs(document_ids)
        others: list[AttentionContext] = []
        for layer in config.distinct_layers if config.layers else ():
            made = [config, *(each.config for each in others if each.config)]
            if not any(_attends_alike(layer, each) for each in made):
                inputs = tokens, dtype, positions, document_ids
                others.append(
                    AttentionContext.build(
                        layer, *inputs, training=training, mesh=mesh, cache=cache
                    )
                )
        return AttentionContext(
            (tokens.shape[0], local),
            pattern,
            rotary,
            runs,
            config=config,
            others=tuple(others),
            cache=cache,
            query_scale=query_scale,
        )
