"""The decoder-only language model."""

from __future__ import annotations

from collections.abc import Callable
from typing import Any, Literal

import torch
import torch.nn.functional as F
from torch import Tensor, nn

from lamina.models.block import TransformerBlock
from lamina.models.config import TransformerConfig
from lamina.models.context import AttentionContext, default_positions
from lamina.models.embedding import Embedding, OutputHead
from lamina.models.initialise import assign_seeds, draw_seed
from lamina.models.norms import make_norm


class GPTModel(nn.Module):
    """Embedding, blocks, final norm and head.

    Built under ``torch.device("meta")`` it takes no memory; after ``to_empty(device=...)``,
    ``init_weights()`` (or ``reset_parameters()`` of each submodule, in any order) gives the same
    weights as a model built in place with the same seed.

    Args:
        config: the shape.
        mesh: the ranks to divide the work over; None is one process.
        seed: seed of the initial weights; by default drawn from torch's generator, so
            ``torch.manual_seed`` decides it.

    """

    def __init__(
        self, config: TransformerConfig, mesh: Any = None, *, seed: int | None = None
    ) -> None:
        super().__init__()
        self.config = config
        self.seed = draw_seed() if seed is None else seed
        self.embedding = Embedding(config.vocab_size, config.hidden_size, config.init_std)
        self.position_embedding = (
            Embedding(config.max_sequence_length, config.hidden_size, config.init_std)
            if config.positions == "learned"
            else None
        )
        self.blocks = nn.ModuleList(TransformerBlock(config) for _ in range(config.num_layers))
        self.final_norm = make_norm(config)
        self.head = OutputHead(
            config.hidden_size,
            config.vocab_size,
            config.init_std,
            tied=self.embedding.weight if config.tie_embeddings else None,
        )
        assign_seeds(self, self.seed)
        self.init_weights()

    def init_weights(self) -> None:
        """Call ``reset_parameters`` of every submodule that owns parameters."""
        for module in self.modules():
            reset = getattr(module, "reset_parameters", None)
            if reset is not None:
                reset()

    def forward(
        self,
        tokens: Tensor,
        labels: Tensor | None = None,
        positions: Tensor | None = None,
        document_ids: Tensor | None = None,
        *,
        reduction: Literal["mean", "sum"] = "mean",
    ) -> Tensor:
        """Predict the next token at every position.

        Args:
            tokens: int64 ``[batch, sequence]``.
            labels: int64 ``[batch, sequence]``: ``labels[:, i]`` is what should follow
                ``tokens[:, i]`` (the caller shifts); -100 is left out.
            positions: int64 ``[sequence]`` or ``[batch, sequence]``; by default counted from 0,
                anew in each document.
            document_ids: integers ``[batch, sequence]``: a token attends only to its own document.
            reduction: of the loss: ``mean`` over the labels that count, or ``sum``.

        Returns:
            Logits ``[batch, sequence, vocabulary]``, or with labels the scalar loss in float32
            (nats; float64 for a float64 model).

        Raises:
            ValueError: if the sequence is longer than ``config.max_sequence_length``.

        """
        self.check_inputs(tokens, labels, document_ids)
        if positions is None:
            positions = default_positions(tokens, document_ids)
        x = self.embed(tokens, positions)
        context = AttentionContext.build(
            self.config, tokens, x.dtype, positions, document_ids, training=self.training
        )
        for block in self.blocks:
            x = block(x, context)
        output: Tensor = self.head(self.final_norm(x), labels, reduction)
        return output

    def embed(self, tokens: Tensor, positions: Tensor) -> Tensor:
        """Embed tokens, and positions where they are learned: ``[batch, sequence, hidden]``."""
        x: Tensor = self.embedding(tokens)
        if self.position_embedding is not None:
            x = x + self.position_embedding(positions)
        return F.dropout(x, self.config.dropout, self.training)

    def check_inputs(
        self, tokens: Tensor, labels: Tensor | None, document_ids: Tensor | None
    ) -> None:
        """Raise ValueError for shapes that do not fit, before they become an error in a kernel."""
        if tokens.ndim != 2:
            raise ValueError(f"tokens have shape {tuple(tokens.shape)}: need [batch, sequence]")
        limit = self.config.max_sequence_length
        if tokens.shape[1] > limit:
            raise ValueError(
                f"sequence of {tokens.shape[1]} tokens is longer than max_sequence_length {limit}: "
                "cut it, or raise max_sequence_length in TransformerConfig"
            )
        for name, other in (("labels", labels), ("document_ids", document_ids)):
            if other is not None and other.shape != tokens.shape:
                raise ValueError(
                    f"{name} have shape {tuple(other.shape)}, tokens {tuple(tokens.shape)}: "
                    "they must be equal"
                )

    def num_parameters(self, *, embeddings: bool = True) -> int:
        """Count parameters, tied ones once; without embeddings (and head) if so asked."""
        skip = set() if embeddings else {self.head.weight, *self._embedding_weights()}
        return sum(p.numel() for p in self.parameters() if p not in skip)

    def _embedding_weights(self) -> list[nn.Parameter]:
        tables = (self.embedding, self.position_embedding)
        return [table.weight for table in tables if table is not None]

    def _apply(self, fn: Callable[[Tensor], Tensor], recurse: bool = True) -> GPTModel:
        # torch replaces a parameter that leaves the meta device once per module that holds it,
        # which would silently untie the head from the embedding.
        super()._apply(fn, recurse)  # type: ignore[no-untyped-call]
        if self.head.tied:
            self.head.weight = self.embedding.weight
        return self


@torch.no_grad()
def generate(
    model: nn.Module,
    tokens: Tensor,
    max_new_tokens: int,
    *,
    temperature: float = 1.0,
    top_k: int | None = None,
    top_p: float | None = None,
    context_length: int | None = None,
    generator: torch.Generator | None = None,
) -> Tensor:
    """Sample a continuation, one token at a time.

    Nothing is cached between tokens, so that it works with any wrapper around the model; every rank
    of a sharded model must call it, with generators in the same state.

    Args:
        model: maps int64 ``[batch, sequence]`` to logits ``[batch, sequence, vocabulary]``.
        tokens: int64 ``[batch, sequence]``, the prompt, at least one token.
        max_new_tokens: how many tokens to add.
        temperature: divides the logits; 0 takes the most likely token.
        top_k: sample only among this many most likely tokens.
        top_p: sample only among the most likely tokens that together have this probability.
        context_length: tokens the model may look back; by default the config's
            ``max_sequence_length`` where the model has one.
        generator: for sampling; by default torch's own.

    Returns:
        int64 ``[batch, sequence + max_new_tokens]``.

    """
    if context_length is None:
        config = getattr(model, "config", None)
        context_length = getattr(config, "max_sequence_length", None)
    training = model.training
    model.eval()
    for _ in range(max_new_tokens):
        window = tokens if context_length is None else tokens[:, -context_length:]
        logits = model(window)[:, -1].float()
        following = sample(logits, temperature, top_k, top_p, generator)
        tokens = torch.cat((tokens, following[:, None]), dim=1)
    model.train(training)
    return tokens


def sample(
    logits: Tensor,
    temperature: float = 1.0,
    top_k: int | None = None,
    top_p: float | None = None,
    generator: torch.Generator | None = None,
) -> Tensor:
    """Draw one id per row of logits ``[batch, vocabulary]``: int64 ``[batch]``."""
    if temperature == 0.0:
        return logits.argmax(dim=-1)
    logits = logits / temperature
    if top_k is not None:
        kth = logits.topk(min(top_k, logits.shape[-1]), dim=-1).values[:, -1:]
        logits = logits.masked_fill(logits < kth, -torch.inf)
    if top_p is not None:
        ordered, order = logits.sort(dim=-1, descending=True)
        before = ordered.softmax(dim=-1).cumsum(dim=-1) - ordered.softmax(dim=-1)
        # The most likely token always stays: nothing comes before it.
        dropped = (before >= top_p).scatter(-1, order, before >= top_p)
        logits = logits.masked_fill(dropped, -torch.inf)
    return torch.multinomial(logits.softmax(dim=-1), 1, generator=generator).squeeze(-1)
