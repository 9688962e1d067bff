"""Hugging Face's files in and out, a tensor at a time.

A model says which of its tensors is which of Hugging Face's by `HuggingFaceWeights`. A
`transformers` model is its own answer, `lamina.models` have theirs, and any other model can have a
method `huggingface_weights()`. Nothing of `transformers` or `lamina.models` is imported here unless
such a model is handed in.
"""

from __future__ import annotations

import importlib
import json
import os
from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import Any, Protocol, cast

import torch
import torch.distributed as dist
from torch import Tensor, nn
from torch.distributed.checkpoint.metadata import MetadataIndex

from lamina.buffers import Region
from lamina.checkpoint.errors import CheckpointMismatchError, shortened
from lamina.checkpoint.gathering import narrow, whole_tensor
from lamina.checkpoint.names import parameters_of, unwrapped
from lamina.checkpoint.parts import Parts, as_part
from lamina.checkpoint.safetensors_files import (
    INDEX,
    Described,
    Files,
    FileWriter,
    divide,
    index_text,
)
from lamina.checkpoint.state import Mesh
from lamina.checkpoint.together import Ranks


class WeightLink(Protocol):
    """One of a model's tensors and the tensors that it is in Hugging Face's files."""

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
class _Same:
    """A tensor that has the same name and shape on both sides."""

    ours: str

    @property
    def theirs(self) -> tuple[str, ...]:
        return (self.ours,)

    def to_theirs(self, tensor: Tensor) -> tuple[Tensor, ...]:
        return (tensor,)

    def to_ours(self, tensors: Sequence[Tensor]) -> Tensor:
        return tensors[0]


@dataclass(frozen=True)
class HuggingFaceWeights:
    """How a model's weights are stored by Hugging Face.

    Attributes:
        config: contents of `config.json`.
        links: one for each tensor of the model; tied ones once.

    """

    config: Mapping[str, Any]
    links: Sequence[WeightLink]


def weights_of(model: nn.Module) -> HuggingFaceWeights:
    """Ask a model, or what it wraps, how Hugging Face stores its weights.

    Raises:
        TypeError: it does not say.
        ValueError: no architecture of Hugging Face's has the model's features.

    """
    inner: Any = model
    while inner is not None:
        if hasattr(inner, "huggingface_weights"):
            return cast(HuggingFaceWeights, inner.huggingface_weights())
        config = getattr(inner, "config", None)
        if hasattr(config, "to_dict") and hasattr(config, "model_type"):
            return _of_transformers(inner)
        if any(base.__module__.startswith("lamina.models.") for base in type(inner).__mro__):
            models = importlib.import_module("lamina.models")
            return HuggingFaceWeights(models.huggingface_config(config), models.weight_map(config))
        inner = getattr(inner, "module", None)
    raise TypeError(
        f"{type(model).__name__} does not say how Hugging Face stores its weights: give it a "
        "method huggingface_weights() that returns lamina.checkpoint.HuggingFaceWeights"
    )


def _of_transformers(model: Any) -> HuggingFaceWeights:
    parameters = dict(model.named_parameters())  # tied ones once
    twice = dict(model.named_parameters(remove_duplicate=False)).keys() - parameters.keys()
    config = model.config.to_dict()
    kind = next((c for c in type(model).__mro__ if "transformers" in c.__module__), type(model))
    config["architectures"] = [kind.__name__]
    return HuggingFaceWeights(
        config, [_Same(name) for name in model.state_dict() if name not in twice]
    )


class _Tensors:
    """A model's tensors by name, each with the part of a whole that it is."""

    def __init__(self, model: nn.Module, mesh: Mesh) -> None:
        self.tree: dict[str, Any] = model.state_dict()
        self._parts = Parts({"model": model}, mesh)
        self._parameters = dict(parameters_of(model))

    def is_parameter(self, name: str) -> bool:
        return name in self._parameters

    def region(self, name: str) -> Region | None:
        parameter = self._parameters.get(name)
        return None if parameter is None else self._parts.region(name, parameter)

    def shape(self, name: str) -> tuple[int, ...]:
        region = self.region(name)
        return tuple(self.tree[name].shape) if region is None else region.shape

    def part(self, name: str) -> Tensor:
        tensor: Tensor = self.tree[name].detach()
        region = self.region(name)
        return tensor if region is None else as_part(tensor, region, self._parameters[name])


def export_huggingface(
    model: nn.Module,
    directory: str | os.PathLike[str],
    *,
    dtype: torch.dtype | None = None,
    max_file_bytes: int = 5 << 30,
    mesh: Mesh = None,
    group: dist.ProcessGroup | None = None,
) -> Path:
    """Write a model as `transformers` reads it (collective).

    Tensors are gathered and written one at a time, by the first rank: no rank holds more than its
    own part of the model and one whole tensor (two where Hugging Face's is transposed).

    Args:
        model: a `transformers` model, one of `lamina.models`, or one with `huggingface_weights()`;
            sharded in any way, or not. With pipeline stages, join them first.
        directory: made if absent. Files of the same names are replaced, each at once.
        dtype: floating-point parameters are converted; None keeps them. Buffers keep theirs, as
            with transformers (the bias of DeepSeek-V3's routers stays fp32).
        max_file_bytes: a larger model is divided, with an index.
        mesh: see `CheckpointManager`.
        group: the ranks that hold the model; None is all.

    Returns:
        The directory. `AutoModelForCausalLM.from_pretrained` opens it; tokenizers are not ours.

    Raises:
        TypeError: the model does not say how Hugging Face stores it.
        ValueError: no architecture of Hugging Face's has the model's features.
        CheckpointMismatchError: its weight map names tensors that it does not have.

    """
    path, ranks = Path(directory), Ranks(group)
    model = unwrapped(model)
    weights = weights_of(model)
    tensors = _Tensors(model, mesh)
    if lost := [link.ours for link in weights.links if link.ours not in tensors.tree]:
        raise CheckpointMismatchError(
            f"the model has no {shortened(lost)}: every rank must hold all layers"
        )
    planned = {link.ours: _described(link, tensors, dtype) for link in weights.links}
    files = divide([t for of_link in planned.values() for t in of_link], max_file_bytes)
    writer = _Export(path, files) if ranks.is_first else None
    ranks.together(lambda: writer.begin() if writer else None)
    _export_all(weights, tensors, planned, ranks, writer)
    config = {**weights.config, "dtype": _dtype_name(planned)}
    ranks.together(lambda: writer.finish(config) if writer else None)
    return path


def _export_all(
    weights: HuggingFaceWeights,
    tensors: _Tensors,
    planned: Mapping[str, Sequence[Described]],
    ranks: Ranks,
    writer: _Export | None,
) -> None:
    try:
        for link in weights.links:
            _export_one(link, tensors, planned[link.ours], ranks, writer)
    finally:
        if writer is not None:
            writer.close()


def _export_one(
    link: WeightLink,
    tensors: _Tensors,
    planned: Sequence[Described],
    ranks: Ranks,
    writer: _Export | None,
) -> None:
    """Gather and write; a function, so that nothing is held while the next one is gathered."""
    whole = whole_tensor(link.ours, tensors.part(link.ours), ranks)
    if writer is not None:
        writer.add(link, whole, planned)


def _described(link: WeightLink, tensors: _Tensors, dtype: torch.dtype | None) -> list[Described]:
    held = tensors.tree[link.ours].dtype
    converted = dtype is not None and held.is_floating_point and tensors.is_parameter(link.ours)
    kept = dtype if dtype is not None and converted else held
    meta = torch.empty(tensors.shape(link.ours), dtype=held, device="meta")
    made = link.to_theirs(meta)
    return [
        Described(name, tuple(tensor.shape), kept)
        for name, tensor in zip(link.theirs, made, strict=True)
    ]


def _dtype_name(planned: Mapping[str, Sequence[Described]]) -> str:
    floating = [t.dtype for of in planned.values() for t in of if t.dtype.is_floating_point]
    return str(floating[0] if floating else torch.float32).removeprefix("torch.")


class _Export:
    """The first rank's side of an export."""

    def __init__(self, path: Path, files: Mapping[str, Sequence[Described]]) -> None:
        self._path, self._files = path, files
        self._order = [(name, t) for name, held in files.items() for t in held]
        self._open: tuple[str, FileWriter] | None = None
        self.failure: Exception | None = None

    def begin(self) -> None:
        self._path.mkdir(parents=True, exist_ok=True)

    def add(self, link: WeightLink, whole: Tensor, planned: Sequence[Described]) -> None:
        """Write a link's tensors. A failure is kept: the other ranks are still gathering."""
        if self.failure is not None:
            return
        try:
            for tensor, described in zip(link.to_theirs(whole), planned, strict=True):
                file, _ = self._order.pop(0)
                self._file(file).add(tensor.to(described.dtype))
        except Exception as error:
            self.failure = error

    def _file(self, name: str) -> FileWriter:
        if self._open is None or self._open[0] != name:
            self.close()
            self._open = name, FileWriter(self._path / name, self._files[name])
        return self._open[1]

    def close(self) -> None:
        if self._open is not None:
            self._open[1].close()
            self._open = None

    def finish(self, config: Mapping[str, Any]) -> None:
        """Write index and config, or raise what went wrong."""
        if self.failure is not None:
            raise self.failure
        stale = {p.name for p in self._path.glob("model*.safetensors")} - self._files.keys()
        for name in stale:  # of an earlier export that was divided otherwise
            (self._path / name).unlink()
        if len(self._files) > 1:
            _replace(self._path / INDEX, index_text(self._files))
        else:
            (self._path / INDEX).unlink(missing_ok=True)
        _replace(self._path / "config.json", json.dumps(config, indent=2, default=str))


def _replace(path: Path, text: str) -> None:
    temporary = path.with_name(f".{path.name}.writing")
    temporary.write_text(text + "\n")
    temporary.replace(path)


def import_huggingface(
    model: nn.Module, path: str | os.PathLike[str], *, mesh: Mesh = None
) -> tuple[str, ...]:
    """Load weights from Hugging Face's files into a model that exists, sharded in any way.

    Each rank reads what its own part needs, one tensor at a time; dtypes are converted.

    Args:
        model: as for `export_huggingface`.
        path: a directory with `*.safetensors`, or one such file.
        mesh: see `CheckpointManager`.

    Returns:
        Names in the files that the model has no use for.

    Raises:
        FileNotFoundError: no such files.
        CheckpointMismatchError: a tensor is missing or has another shape, by name.
        CheckpointDamagedError: a file is cut off or no safetensors file.

    """
    model = unwrapped(model)
    weights = weights_of(model)
    tensors = _Tensors(model, mesh)
    used: set[str] = set()
    with Files(Path(path)) as files:
        for link in weights.links:
            if link.ours not in tensors.tree:
                continue  # another pipeline stage's
            used.update(link.theirs)
            whole = link.to_ours([files.tensor(name) for name in link.theirs])
            if tuple(whole.shape) != tensors.shape(link.ours):
                raise CheckpointMismatchError(
                    f"'{link.ours}' has shape {list(whole.shape)} in {path} and "
                    f"{list(tensors.shape(link.ours))} here"
                )
            _fill(tensors.part(link.ours), whole)
        model.load_state_dict(tensors.tree)  # in place already; wrappers learn of it
        short = {name.removeprefix("transformer.").removeprefix("model.") for name in used}
        return tuple(sorted(set(files.names()) - used - short))


def _fill(target: Tensor, whole: Tensor) -> None:
    """Copy a whole tensor's boxes into a tensor cut in any way."""
    boxes = getattr(target, "__create_chunk_list__", None)
    if boxes is None:
        target.copy_(whole)
        return
    for box in boxes():
        if not box.sizes.numel():
            continue
        shard = target.__get_tensor_shard__(MetadataIndex("", box.offsets))  # type: ignore[attr-defined]
        shard.detach().copy_(narrow(whole, box.offsets, box.sizes))
