"""Links between a model's tensors and those in Hugging Face's files."""

import importlib
import math
from collections.abc import Iterator, Mapping, Sequence
from dataclasses import dataclass
from typing import Any, Protocol, cast

from torch import Tensor, nn


class HuggingFaceLink(Protocol):
    """One of a model's tensors and the tensors that it is in Hugging Face's files.

    A link of a tensor that is several of theirs put together may have a method `pieces()` that
    yields, in the order of `theirs`, `(slices, link)`: slices of our first dimensions, and a link
    of what is in there. Then such a tensor goes piece by piece, and is never held as a whole.
    """

    @property
    def ours(self) -> str:
        """Name in the model's state_dict."""

    @property
    def theirs(self) -> tuple[str, ...]:
        """Names in the files."""

    def to_theirs(self, tensor: Tensor) -> tuple[Tensor, ...]:
        """Make their tensors from our whole one; must work on the meta device."""

    def to_ours(self, tensors: Sequence[Tensor]) -> Tensor:
        """Make our whole tensor from theirs."""


@dataclass(frozen=True)
class Same:
    """A tensor that has the same name and shape on both sides."""

    ours: str

    @property
    def theirs(self) -> tuple[str, ...]:
        """The same name."""
        return (self.ours,)

    def to_theirs(self, tensor: Tensor) -> tuple[Tensor, ...]:
        """Return the tensor."""
        return (tensor,)

    def to_ours(self, tensors: Sequence[Tensor]) -> Tensor:
        """Return the tensor."""
        return tensors[0]


@dataclass(frozen=True)
class HuggingFaceWeights:
    """How a model's weights are stored by Hugging Face.

    `config` is the contents of `config.json`; `links` has one for each tensor of the model, tied
    ones once.
    """

    config: Mapping[str, Any]
    links: Sequence[HuggingFaceLink]


@dataclass(frozen=True)
class Piece:
    """A box of one of our whole tensors, where it begins there, and a link of what is in it."""

    offsets: tuple[int, ...]
    sizes: tuple[int, ...]
    link: HuggingFaceLink


def pieces_of(link: HuggingFaceLink, shape: Sequence[int]) -> list[Piece]:
    """Cut a tensor of ours where its link says so; ValueError if the pieces are not all of it."""
    zeros, whole = (0,) * len(shape), tuple(shape)
    cut: Iterator[tuple[tuple[slice, ...], HuggingFaceLink]] | None = None
    if hasattr(link, "pieces"):
        cut = link.pieces()
    if cut is None:
        return [Piece(zeros, whole, link)]
    pieces = []
    for slices, part in cut:
        sides = [s.indices(n)[:2] for s, n in zip(slices, whole, strict=False)]
        offsets = tuple(start for start, _ in sides) + zeros[len(sides) :]
        sizes = tuple(stop - start for start, stop in sides) + whole[len(sides) :]
        pieces.append(Piece(offsets, sizes, part))
    covered = sum(math.prod(piece.sizes) for piece in pieces)
    if covered != math.prod(whole):
        raise ValueError(
            f"the pieces of '{link.ours}' have {covered} elements, the tensor {list(whole)} has "
            f"{math.prod(whole)}: its weight map does not fit it"
        )
    return pieces


def weights_of(model: nn.Module) -> HuggingFaceWeights:
    """Ask a model, what it wraps, or a pipeline's stage, how Hugging Face stores the weights.

    TypeError says that it does not say, ValueError that no architecture has the model's features.
    """
    inner: Any = model
    while inner is not None:
        if hasattr(inner, "huggingface_weights"):
            return cast(HuggingFaceWeights, inner.huggingface_weights())
        config = getattr(inner, "config", None)
        if hasattr(config, "to_dict") and hasattr(config, "model_type"):
            return _of_transformers(inner)
        ours = any(base.__module__.startswith("lamina.models.") for base in type(inner).__mro__)
        if ours and config is not None:
            models = importlib.import_module("lamina.models")
            return HuggingFaceWeights(models.huggingface_config(config), models.weight_map(config))
        stages = getattr(inner, "stages", None)  # every stage knows the whole model's config
        inner = stages[0] if isinstance(stages, nn.ModuleList) else getattr(inner, "module", None)
    raise TypeError(
        f"{type(model).__name__} does not say how Hugging Face stores its weights: give it a "
        "method huggingface_weights() that returns lamina.checkpoint.engine.HuggingFaceWeights"
    )


def _of_transformers(model: Any) -> HuggingFaceWeights:
    parameters = dict(model.named_parameters())  # tied ones once
    twice = dict(model.named_parameters(remove_duplicate=False)).keys() - parameters.keys()
    config = model.config.to_dict()
    kind = next((c for c in type(model).__mro__ if "transformers" in c.__module__), type(model))
    config["architectures"] = [kind.__name__]
    return HuggingFaceWeights(
        config, [Same(name) for name in model.state_dict() if name not in twice]
    )
