"""Sampling text from a language model."""

from __future__ import annotations

from collections.abc import Mapping
from typing import Any

import torch
import torch.nn.functional as F
from torch import Tensor, nn


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
    inputs: Mapping[str, Any] | None = None,
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
            ``max_sequence_length`` where the model (in its wrappers) has one.
        generator: for sampling; by default torch's own.
        inputs: what else the model is called with, such as ``{"images": images}``.

    Returns:
        int64 ``[batch, sequence + max_new_tokens]``.

    """
    inner = _without_wrappers(model)
    config = getattr(inner, "config", None)
    if context_length is None:
        context_length = getattr(config, "max_sequence_length", None)
    training = model.training
    model.eval()
    # Ranks that share a sequence need its length to be divisible; what is appended comes after all
    # that is read, is no image's place, and competes for no expert's capacity.
    multiple = int(getattr(inner, "length_multiple", 1))
    padding = 1 if getattr(inner, "image_token", None) == 0 else 0
    limited = getattr(getattr(config, "moe", None), "capacity_factor", None) is not None
    if context_length is not None:
        context_length -= context_length % multiple
    for _ in range(max_new_tokens):
        window = tokens if context_length is None else tokens[:, -context_length:]
        end = window.shape[1]
        padded = F.pad(window, (0, -end % multiple), value=padding)
        options = dict(inputs or {})
        if limited and padded.shape[1] > end:
            places = torch.arange(padded.shape[1], device=padded.device)
            options["padding_mask"] = (places >= end).expand_as(padded)
        logits = model(padded, **options)[:, end - 1].float()
        following = sample(logits, temperature, top_k, top_p, generator)
        tokens = torch.cat((tokens, following[:, None]), dim=1)
    model.train(training)
    return tokens


def _without_wrappers(model: nn.Module) -> nn.Module:
    """The model that wrappers hold as ``module``: their own ``config`` is about something else."""
    while isinstance(inner := getattr(model, "module", None), nn.Module):
        model = inner
    return model


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
