"""Sampling text from a language model."""

from collections.abc import Iterator, Mapping
from contextlib import contextmanager
from typing import Any

import torch
import torch.nn.functional as F
from torch import Tensor, nn

from lamina.collectives.engine import broadcast


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

    Nothing is cached between tokens, so this works with any wrapper around the model. Every rank of
    a sharded model must call it. Ranks of tp and cp, which share the sequences, take the tokens
    that the first of them draws. The image token of a `VisionLanguageModel` is never drawn.

    Args:
        model: maps int64 `[batch, sequence]` to logits `[batch, sequence, vocabulary]`.
        tokens: int64 `[batch, sequence]`, the prompt, at least one token.
        max_new_tokens: how many tokens to add.
        temperature: divides the logits; 0 takes the most likely token.
        top_k: sample only among this many most likely tokens.
        top_p: sample only among the most likely tokens that together have this probability.
        context_length: the number of tokens that the model reads; by default the config's
            `max_sequence_length`, if the model inside its wrappers has one.
        generator: for sampling; by default torch's own.
        inputs: further arguments of the model, such as `{"images": images}`.

    Returns:
        int64 `[batch, sequence + max_new_tokens]`.

    Raises:
        ValueError: for an empty prompt, a context that ranks cannot share, and images that
            would leave the context before the end.

    Examples:
        >>> config = TransformerConfig(vocab_size=256, hidden_size=64, num_layers=2, num_heads=4)
        >>> generate(GPTModel(config), torch.randint(256, (1, 4)), max_new_tokens=2).shape
        torch.Size([1, 6])
    """
    inner = model  # without wrappers, whose own `config` means something else
    while isinstance(below := getattr(inner, "module", None), nn.Module):
        inner = below
    config = getattr(inner, "config", None)
    if context_length is None:
        context_length = getattr(config, "max_sequence_length", None)
    # Ranks that share a sequence need its length to be divisible, so it is padded. The padding is
    # after all tokens that are read. It is not the image token, and it goes to no expert.
    multiple = int(getattr(inner, "length_multiple", 1))
    image_token = getattr(inner, "image_token", None)
    padding = 1 if image_token == 0 else 0
    limited = getattr(getattr(config, "moe", None), "capacity_factor", None) is not None
    if context_length is not None:
        context_length = _shared_length(context_length, multiple)
    _check_prompt(inner, tokens, max_new_tokens, context_length)
    with _evaluating(model):
        for _ in range(max_new_tokens):
            window = tokens if context_length is None else tokens[:, -context_length:]
            end = window.shape[1]
            padded = F.pad(window, (0, -end % multiple), value=padding)
            options = dict(inputs or {})
            if limited and padded.shape[1] > end:
                places = torch.arange(padded.shape[1], device=padded.device)
                options["padding_mask"] = (places >= end).expand_as(padded)
            logits = model(padded, **options)[:, end - 1].float()
            if image_token is not None:  # an image token without an image is refused
                logits[:, image_token] = -torch.inf
            following = sample(logits, temperature, top_k, top_p, generator)
            for axis in getattr(inner, "sequence_axes", ()):
                broadcast(following, axis.group)
            tokens = torch.cat((tokens, following[:, None]), dim=1)
    return tokens


@contextmanager
def _evaluating(model: nn.Module) -> Iterator[None]:
    """Put every module into evaluation mode, and afterwards back into its own mode."""
    modes = [(module, module.training) for module in model.modules()]
    model.eval()
    try:
        yield
    finally:
        for module, training in modes:
            module.training = training


def _shared_length(length: int, multiple: int) -> int:
    """The longest context, up to `length`, that ranks which share a sequence can cut."""
    shared = length - length % multiple
    if shared < 1:
        raise ValueError(
            f"context_length is {length}: it must be at least {multiple}"
            + (", into which ranks of tp and cp cut a sequence" if multiple > 1 else "")
        )
    return shared


def _check_prompt(
    inner: nn.Module, tokens: Tensor, max_new_tokens: int, context_length: int | None
) -> None:
    """Raise ValueError for an empty prompt, or if images would leave the context."""
    if tokens.ndim != 2 or tokens.shape[1] < 1:
        raise ValueError(
            f"tokens have shape {tuple(tokens.shape)}: they must be [batch, sequence], with at "
            "least one token"
        )
    image_token = getattr(inner, "image_token", None)
    if context_length is None or image_token is None:
        return
    left = tokens.shape[1] + max_new_tokens - 1 - context_length
    if left > 0 and bool((tokens[:, :left] == image_token).any()):
        raise ValueError(
            f"{tokens.shape[1]} tokens and {max_new_tokens} new ones reach {left} beyond the "
            f"context of {context_length}, which then begins after image tokens: lower "
            "max_new_tokens, shorten the prompt, or raise max_sequence_length in TransformerConfig"
        )


def sample(
    logits: Tensor,
    temperature: float = 1.0,
    top_k: int | None = None,
    top_p: float | None = None,
    generator: torch.Generator | None = None,
) -> Tensor:
    """Draw one id per row of logits `[batch, vocabulary]`: int64 `[batch]`."""
    if temperature == 0.0:
        return logits.argmax(dim=-1)
    logits = logits / temperature
    if top_k is not None:
        kth = logits.topk(min(top_k, logits.shape[-1]), dim=-1).values[:, -1:]
        logits = logits.masked_fill(logits < kth, -torch.inf)
    if top_p is not None:
        ordered, order = logits.sort(dim=-1, descending=True)
        before = ordered.softmax(dim=-1).cumsum(dim=-1) - ordered.softmax(dim=-1)
        # The most likely token always stays, because no probability comes before it.
        dropped = (before >= top_p).scatter(-1, order, before >= top_p)
        logits = logits.masked_fill(dropped, -torch.inf)
    return torch.multinomial(logits.softmax(dim=-1), 1, generator=generator).squeeze(-1)
