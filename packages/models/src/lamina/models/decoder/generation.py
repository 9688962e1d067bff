"""Sampling text from a language model."""

from collections.abc import Iterator, Mapping
from contextlib import AbstractContextManager, ExitStack, contextmanager, nullcontext
from typing import Any, cast

import torch
import torch.nn.functional as F
from torch import Tensor, nn

from lamina.collectives.engine import broadcast
from lamina.models.attention.context import TokenCache


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

    A model that `caches` computes each new token alone, while the context holds all tokens. Others
    compute the whole context for each token. Every rank of a sharded model must call it. The
    weights are gathered once, and are whole on each rank until the end. Ranks of tp and cp, which
    share the sequences, take the tokens that the first of them draws. The image token of a
    `VisionLanguageModel` is never drawn.

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
    if context_length is None:
        context_length = getattr(getattr(inner, "config", None), "max_sequence_length", None)
    if context_length is not None:
        context_length = _shared_length(context_length, int(getattr(inner, "length_multiple", 1)))
    _check_prompt(inner, tokens, max_new_tokens, context_length)
    reader = _Reader(model, inner, dict(inputs or {}), context_length, tokens.shape[0])
    image_token = getattr(inner, "image_token", None)
    with _evaluating(model), reader.gathered(), reader.inference():
        for _ in range(max_new_tokens):
            logits = reader.read(tokens).float()
            if image_token is not None:  # an image token without an image is refused
                logits[:, image_token] = -torch.inf
            following = sample(logits, temperature, top_k, top_p, generator)
            for axis in getattr(inner, "sequence_axes", ()):
                broadcast(following, axis.group)
            tokens = torch.cat((tokens, following[:, None]), dim=1)
    return tokens.clone()  # one that was made in inference mode cannot be trained on


class _Reader:
    """Gives the logits after the last token, from a cache while the context holds all tokens.

    Ranks that share a sequence need its length to be divisible by `multiple`. They share one token
    of several rows instead, so with a cache rows are repeated until these are divisible.
    """

    def __init__(
        self,
        model: nn.Module,
        inner: nn.Module,
        inputs: dict[str, Any],
        context_length: int | None,
        rows: int,
    ) -> None:
        self.model, self.inputs, self.context_length = model, inputs, context_length
        self.multiple = int(getattr(inner, "length_multiple", 1))
        image_token = getattr(inner, "image_token", None)
        self.padding = 1 if image_token == 0 else 0
        moe = getattr(getattr(inner, "config", None), "moe", None)
        self.limited = getattr(moe, "capacity_factor", None) is not None
        # Positions and the like belong to whole sequences, and images to the rows of the prompt.
        known = inputs.keys() <= {"images"} and (rows % self.multiple == 0 or image_token is None)
        caches = known and getattr(inner, "caches", False)
        self.cache = TokenCache(last_only=True) if caches else None

    @contextmanager
    def gathered(self) -> Iterator[None]:
        """Hold a sharded model's weights whole; let no block be compiled for each length."""
        with ExitStack() as stack:
            stack.enter_context(getattr(self.model, "unsharded", nullcontext)())
            compiled = (getattr(m, "_compiled_call_impl", None) for m in self.model.modules())
            if self.cache is not None and any(compiled):
                stack.enter_context(torch.compiler.set_stance("force_eager"))
            yield

    def inference(self) -> AbstractContextManager[None]:
        """Inference mode for a model of Lamina's own layers, which keep no tensor for later."""
        return nullcontext() if self.cache is None else torch.inference_mode()

    def read(self, tokens: Tensor) -> Tensor:
        """Logits `[batch, vocabulary]`."""
        end, limit = tokens.shape[1], self.context_length
        if self.cache is None or (limit is not None and end > limit):
            return self._read_context(tokens if limit is None else tokens[:, -limit:])
        new, inputs = tokens[:, self.cache.length :], {} if self.cache.length else self.inputs
        rows = tokens.shape[0]
        padded = rows + -rows % self.multiple
        if padded > rows:
            new = new.repeat(-(-padded // rows), 1)[:padded]
        return cast(Tensor, self.model(new, **inputs, cache=self.cache)[:rows, -1])

    def _read_context(self, tokens: Tensor) -> Tensor:
        # The padding is after all tokens that are read. It is not the image token, and it goes to
        # no expert.
        end = tokens.shape[1]
        padded = F.pad(tokens, (0, -end % self.multiple), value=self.padding)
        inputs = dict(self.inputs)
        if self.limited and padded.shape[1] > end:
            places = torch.arange(padded.shape[1], device=padded.device)
            inputs["padding_mask"] = (places >= end).expand_as(padded)
        return cast(Tensor, self.model(padded, **inputs)[:, end - 1])


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
