"""Hugging Face's files in and out, a tensor at a time.

A model says which of its tensors is which of Hugging Face's by `HuggingFaceWeights`. A
`transformers` model is its own answer, `lamina.models` have theirs, and any other model can have a
method `huggingface_weights()`. Nothing of `transformers` or `lamina.models` is imported here unless
such a model is handed in.
"""

from __future__ import annotations

import json
import os
from collections.abc import Mapping, Sequence
from contextlib import suppress
from pathlib import Path
from typing import Any

import torch
import torch.distributed as dist
from torch import Tensor, nn

from lamina.buffers.engine import TensorRegion
from lamina.checkpoint.errors import CheckpointMismatchError, shortened
from lamina.checkpoint.huggingface.files import (
    DTYPES,
    INDEX,
    Described,
    Files,
    FileWriter,
    divide,
    index_text,
)
from lamina.checkpoint.huggingface.gathering import Whole, boxes_of, fill, gathered, meet
from lamina.checkpoint.huggingface.quantised import Requantised
from lamina.checkpoint.huggingface.weight_links import HuggingFaceLink, Piece, pieces_of, weights_of
from lamina.checkpoint.ranks import Ranks
from lamina.checkpoint.state.cut_tensors import CutTensors, Hints, Mesh, as_part
from lamina.checkpoint.state.optimizer_names import parameters_of, unwrapped
from lamina.checkpoint.storage.locations import LocalLocation, is_url, local_path, write_whole
from lamina.checkpoint.storage.stores import fsync_directory
from lamina.collectives.engine import all_reduce_small

_SMALL = ("config.json", INDEX)
_DIMENSIONS = 8  # the most that a tensor of a model has
_FLOATING = (torch.float64, torch.float32, torch.float16, torch.bfloat16)
"""What is converted from one to another."""
_DERIVED = (".rotary_emb.inv_freq", ".attn.masked_bias")
"""Ends of names of tables in old files that follow from the config."""


class _Tensors:
    """A model's tensors by name, each with the part of a whole that it is."""

    def __init__(self, model: nn.Module, mesh: Mesh) -> None:
        self.tree: dict[str, Any] = model.state_dict()
        self._cut_tensors = CutTensors({"model": model}, Hints(mesh))
        self._parameters = dict(parameters_of(model))

    def refuse_unlinked(self, links: Sequence[HuggingFaceLink]) -> None:
        """CheckpointMismatchError names tensors that the weight map has under none of their names.

        They would be left out without a word.
        """
        linked = {link.ours for link in links}
        linked_ids = {id(self._parameters[name]) for name in linked & self._parameters.keys()}
        left = sorted(
            name
            for name, value in self.tree.items()
            if isinstance(value, Tensor)
            and name not in linked
            and id(self._parameters.get(name)) not in linked_ids
        )
        if left:
            raise CheckpointMismatchError(
                f"the model has {shortened(left)} ({len(left)} tensors), which its weight map does "
                "not have, so Hugging Face's files have no place for them: add their links to "
                "huggingface_weights(), or register buffers that follow from the config with "
                "persistent=False"
            )

    def region_of(self, name: str) -> TensorRegion | None:
        """Which part of the whole tensor this rank holds; None for a buffer, or if it holds all."""
        parameter = self._parameters.get(name)
        return None if parameter is None else self._cut_tensors.region_of(name, parameter)

    def shape(self, name: str) -> tuple[int, ...]:
        """The shape of the whole tensor; KeyError if this rank has no part of it."""
        region = self.region_of(name)
        return tuple(self.tree[name].shape) if region is None else region.shape

    def local_part(self, name: str) -> Tensor | None:
        """What this rank holds of a tensor; None on stages that have other layers."""
        if name not in self.tree:
            return None
        tensor: Tensor = self.tree[name].detach()
        region = self.region_of(name)
        return tensor if region is None else as_part(tensor, region, self._parameters[name])

    def survey(self, names: Sequence[str], ranks: Ranks) -> dict[str, tuple[Whole, bool]]:
        """Ask all ranks what the tensors are, by name, and if they are parameters (collective).

        CheckpointMismatchError says that no rank has one, TypeError that safetensors lacks its
        dtype.
        """
        # Of each: here, not here, parameter, dtype, dimensions, sizes.
        table = torch.zeros(len(names), 5 + _DIMENSIONS, dtype=torch.int64, device="cpu")
        table[:, 1] = 1
        for row, name in zip(table, names, strict=True):
            if name not in self.tree:
                continue
            shape, dtype = self.shape(name), self.tree[name].dtype
            if dtype not in DTYPES:
                raise TypeError(f"'{name}' is {dtype}, which safetensors lacks")
            sizes = [*shape, *[0] * (_DIMENSIONS - len(shape))]
            known = [1, 0, name in self._parameters, DTYPES.index(dtype), len(shape), *sizes]
            row.copy_(torch.tensor(known, device="cpu"))
        all_reduce_small([table], ranks.group, op="max")
        rows = dict(zip(names, table.tolist(), strict=True))
        if lost := [name for name, row in rows.items() if not row[0]]:
            raise CheckpointMismatchError(f"the model has no {shortened(lost)}, on any rank")
        devices = (t.device for t in self.tree.values() if isinstance(t, Tensor))
        device = next(devices, torch.device("cpu"))
        return {
            name: (Whole(name, tuple(sizes[:dims]), DTYPES[dtype], device, not lacks), bool(own))
            for name, (_, lacks, own, dtype, dims, *sizes) in rows.items()
        }


def export_huggingface(
    model: nn.Module,
    directory: str | os.PathLike[str],
    *,
    dtype: torch.dtype | None = None,
    max_file_bytes: int = 5 << 30,
    like: str | os.PathLike[str] | None = None,
    mesh: Mesh = None,
    group: dist.ProcessGroup | None = None,
) -> Path:
    """Write a model as `transformers` reads it (collective).

    Tensors are gathered and written one at a time, by the first rank: no rank holds more than its
    own part of the model and one tensor of a file (two where Hugging Face's is transposed). What is
    several of theirs put together (query, key and value; a layer's experts) goes in pieces.

    Args:
        model: a `transformers` model, one of `lamina.models`, or one with `huggingface_weights()`;
            sharded in any way, or not; or what `lamina.models.pipeline` returns, where each rank
            holds some of the layers.
        directory: made if absent. An earlier export stays as it is until all of this one is written
            (so there must be room for both), and is then replaced; `config.json` is the last.
        dtype: floating-point parameters are converted; None keeps them. Buffers keep theirs, as
            with transformers (the bias of DeepSeek-V3's routers stays fp32).
        max_file_bytes: a larger model is divided, with an index.
        like: a directory of the same model with quantised weights (blockwise FP8, MXFP4), which
            each rank can read: what is quantised there is written so, by the same blocks, and
            `quantization_config` is copied. Another directory than the one that is written.
        mesh: see `CheckpointManager`.
        group: the ranks that hold the model; None is all.

    Returns:
        The directory. `AutoModelForCausalLM.from_pretrained` opens it; tokenizers are not ours.

    Raises:
        TypeError: the model does not say how Hugging Face stores it; `dtype` and float8 parameters.
        ValueError: no architecture of Hugging Face's has the model's features; a URL; another
            `dtype` than float64, float32, float16 or bfloat16.
        CheckpointMismatchError: its weight map names tensors that no rank has, or lacks some of
            the model's.
        OSError: the first rank could not write; others raise CheckpointError.

    Examples:
        >>> config = TransformerConfig(vocab_size=256, hidden_size=64, num_layers=2, num_heads=4)
        >>> with tempfile.TemporaryDirectory() as folder:
        ...     directory = export_huggingface(GPTModel(config), folder)
    """
    if dtype is not None and dtype not in _FLOATING:
        wide = ", ".join(map(str, _FLOATING))
        raise ValueError(f"dtype is {dtype}: weights are converted to {wide}")
    path, ranks, model = _directory(directory), Ranks(group), unwrapped(model)
    weights = weights_of(model)
    tensors = ranks.together(lambda: _Tensors(model, mesh))
    ranks.together(lambda: tensors.refuse_unlinked(weights.links))
    known = tensors.survey([link.ours for link in weights.links], ranks)
    plan = [_Planned(link, *known[link.ours], dtype) for link in weights.links]
    again = None if like is None else Requantised(Files(_directory(like)))
    described = [t for planned in plan for made in planned.made for t in made]
    if again is not None:
        described = [part for t in described for part in again.described(t)]
    files = divide(described, max_file_bytes)
    writer = _Export(path, files, again) if ranks.is_first else None
    config = {**weights.config, "dtype": _dtype_name(files)}
    if like is not None:
        there = json.loads((_directory(like) / "config.json").read_text())
        config["quantization_config"] = there["quantization_config"]
    try:
        ranks.together(lambda: writer.begin() if writer else None)
        for planned in plan:
            _export_one(planned, tensors.local_part(planned.whole.name), ranks, writer)
        ranks.together(lambda: writer.finish(config) if writer else None)
    finally:
        if writer is not None:
            writer.abandon()
    return path


def _directory(path: str | os.PathLike[str]) -> Path:
    if is_url(path):
        raise ValueError(
            f"{path} is a URL: Hugging Face's files are written to and read from local "
            "directories; copy them with fsspec"
        )
    return local_path(path)


class _Planned:
    """One of our tensors, the pieces that it goes in, and what each piece is in the files."""

    def __init__(
        self, link: HuggingFaceLink, whole: Whole, parameter: bool, dtype: torch.dtype | None
    ) -> None:
        self.whole = whole
        self.pieces = pieces_of(link, whole.shape)
        converted = dtype is not None and whole.dtype.is_floating_point and parameter
        if converted and whole.dtype not in _FLOATING:
            raise TypeError(
                f"'{whole.name}' is {whole.dtype}, numbers without their scales, which can't be "
                f"converted to {dtype}: leave dtype out"
            )
        kept = dtype if dtype is not None and converted else whole.dtype
        self.made = [_described(piece, whole.dtype, kept) for piece in self.pieces]


def _described(piece: Piece, model_dtype: torch.dtype, file_dtype: torch.dtype) -> list[Described]:
    made = piece.link.to_theirs(torch.empty(piece.sizes, dtype=model_dtype, device="meta"))
    return [
        Described(name, tuple(tensor.shape), file_dtype)
        for name, tensor in zip(piece.link.theirs, made, strict=True)
    ]


def _export_one(
    planned: _Planned, part: Tensor | None, ranks: Ranks, writer: _Export | None
) -> None:
    boxes = [(piece.offsets, piece.sizes) for piece in planned.pieces]
    tensors = gathered(planned.whole, part, boxes, ranks)
    for piece, made in zip(planned.pieces, planned.made, strict=True):
        if writer is None:
            next(tensors)
        else:  # nothing here holds the piece while the next one is gathered
            writer.add(piece.link, next(tensors), made)


def _dtype_name(files: Mapping[str, Sequence[Described]]) -> str:
    floating = [t.dtype for tensors in files.values() for t in tensors if t.dtype.is_floating_point]
    return str(floating[0] if floating else torch.float32).removeprefix("torch.")


class _Export:
    """The first rank's side of an export."""

    def __init__(
        self,
        path: Path,
        files: Mapping[str, Sequence[Described]],
        again: Requantised | None = None,
    ) -> None:
        self._path, self._files, self._again = path, files, again
        self._order = [(name, t) for name, tensors in files.items() for t in tensors]
        self._written: list[tuple[str, FileWriter]] = []  # the last one may be open
        self.failure: Exception | None = None

    def begin(self) -> None:
        """Make the directory, and remove files that a killed export left half written."""
        self._path.mkdir(parents=True, exist_ok=True)
        for left in self._path.glob(".model*.safetensors.writing"):  # by one that was killed
            left.unlink()

    def add(self, link: HuggingFaceLink, whole: Tensor, planned: Sequence[Described]) -> None:
        """Write a link's tensors. A failure is kept: the other ranks are still gathering."""
        if self.failure is not None:
            return
        try:
            for tensor, described in zip(link.to_theirs(whole), planned, strict=True):
                parts = iter([tensor])
                if self._again is not None:
                    parts = self._again.stored(described.name, tensor)
                for part in parts:
                    file, last = self._order.pop(0)
                    self._file(file).add(part.to(last.dtype))
        except Exception as error:
            self.failure = error

    def _file(self, name: str) -> FileWriter:
        if not self._written or self._written[-1][0] != name:
            self._close()
            self._written.append((name, FileWriter(self._path / name, self._files[name])))
        return self._written[-1][1]

    def _close(self) -> None:
        if self._written:
            self._written[-1][1].close()

    def finish(self, config: Mapping[str, Any]) -> None:
        """Put the files in the place of earlier ones, or raise what went wrong."""
        if self.failure is not None:
            raise self.failure
        self._close()
        small = {INDEX: index_text(self._files)} if len(self._files) > 1 else {}
        small["config.json"] = json.dumps(config, indent=2, default=str)
        here = LocalLocation(self._path)
        for name, text in small.items():
            write_whole(here, _unfinished(self._path / name).name, f"{text}\n".encode())
        # A kill, or a power failure, from here on leaves files of two exports: without a config
        # nothing opens them.
        fsync_directory(self._path)
        for name in _SMALL:
            (self._path / name).unlink(missing_ok=True)
        fsync_directory(self._path)
        for _, writer in self._written:
            writer.commit()
        for path in self._path.glob("model*.safetensors"):
            if path.name not in self._files:  # of an earlier export that was divided otherwise
                path.unlink()
        fsync_directory(self._path)
        for name in small:
            _unfinished(self._path / name).replace(self._path / name)
        fsync_directory(self._path)

    def abandon(self) -> None:
        """Close and remove what has no place yet: nothing, after an export that went well."""
        for _, writer in self._written:
            writer.abandon()
        for name in _SMALL:
            with suppress(OSError):
                _unfinished(self._path / name).unlink(missing_ok=True)


def _unfinished(path: Path) -> Path:
    return path.with_name(f".{path.name}.writing")


def import_huggingface(
    model: nn.Module,
    path: str | os.PathLike[str],
    *,
    strict: bool = True,
    mesh: Mesh = None,
    group: dist.ProcessGroup | None = None,
) -> tuple[str, ...]:
    """Load weights from Hugging Face's files into a model that exists, sharded in any way.

    Each rank reads what its own part needs, one tensor at a time; dtypes are converted. Collective
    where the model is cut over ranks or stages: a rank that fails stops the others.

    Args:
        model: as for `export_huggingface`.
        path: a directory with `*.safetensors`, or one such file.
        strict: whether files and model have to have all of each other's tensors. Without it the
            model keeps what its weight map lacks, and has no use for others of the files.
        mesh: see `CheckpointManager`.
        group: the ranks that hold the model; None is all.

    Returns:
        Names in the files that the model has no use for: with `strict` those of tables that follow
        from the config.

    Raises:
        FileNotFoundError: no such files.
        ValueError: a URL.
        CheckpointMismatchError: a tensor is missing, has another shape, is quantised, or is on the
            meta device here, by name; with `strict`, one of the files or the model is left over.
        CheckpointDamagedError: a file is cut off or no safetensors file.
        CheckpointError: another rank failed.

    Examples:
        >>> config = TransformerConfig(vocab_size=256, hidden_size=64, num_layers=2, num_heads=4)
        >>> with tempfile.TemporaryDirectory() as folder:
        ...     directory = export_huggingface(GPTModel(config), folder)
        ...     import_huggingface(GPTModel(config), directory)
        ()
    """
    model = unwrapped(model)
    links = weights_of(model).links
    tensors = _Tensors(model, mesh)

    def read() -> tuple[str, ...]:
        """Read what this rank has of the tensors; return the names without a use."""
        with Files(_directory(path)) as files:
            used = {name for link in links for name in link.theirs}
            files.leave_coded(used)
            short = {name.removeprefix("transformer.").removeprefix("model.") for name in used}
            unused = tuple(sorted(set(files.names()) - used - short))
            for link in links:
                _check_link(link, tensors, files)
            if strict:
                tensors.refuse_unlinked(links)
                _refuse_unused(unused, files)
            for link in links:
                if (part := tensors.local_part(link.ours)) is not None:
                    for piece in pieces_of(link, tensors.shape(link.ours)):
                        _import_one(piece, part, files)
            return unused

    # Ranks with whole models all fail alike, or are alone.
    cut = any(type(tensors.local_part(link.ours)) is not Tensor for link in links)
    left = Ranks(group).together(read) if cut else read()
    model.load_state_dict(tensors.tree)  # in place already; wrappers learn of it
    return left


def _refuse_unused(names: Sequence[str], files: Files) -> None:
    """Refuse weights that nothing reads: the model is another one than that of the files."""
    left = [name for name in names if not name.endswith(_DERIVED)]
    if left:
        raise CheckpointMismatchError(
            f"{files.path} has {shortened(left)} ({len(left)} tensors), which the model has no "
            "place for: its config may be another one's. If they change nothing, pass strict=False"
        )


def _check_link(link: HuggingFaceLink, tensors: _Tensors, files: Files) -> None:
    """Refuse, before anything changes, what the files lack or can't give."""
    part = tensors.local_part(link.ours)
    if part is None:
        return  # another pipeline stage's
    if part.is_meta:
        raise CheckpointMismatchError(
            f"'{link.ours}' is on the meta device, where nothing can be loaded: give the model "
            "memory first (model.to_empty(device=...))"
        )
    for name in link.theirs:
        stored = files.dtype(name)
        both = {stored, part.dtype}
        whole = not any(dtype.is_floating_point or dtype.is_complex for dtype in both)
        if len(both) == 2 and not whole and not both <= {*_FLOATING}:
            raise CheckpointMismatchError(
                f"'{name}' is {stored} in {files.path} and '{link.ours}' is {part.dtype} here: "
                "such numbers mean something only with their scales, which are not applied (they "
                "may be quantised, see quantization_config in config.json): convert the files first"
            )


def _import_one(piece: Piece, part: Tensor, files: Files) -> None:
    """Read a piece, if this rank's part has some of it."""
    box = piece.offsets, piece.sizes
    if part.numel() and not any(meet(own_box, box) for own_box in boxes_of(part)):
        return
    values = piece.link.to_ours([files.tensor(name) for name in piece.link.theirs])
    if tuple(values.shape) != piece.sizes:
        raise CheckpointMismatchError(
            f"{shortened(list(piece.link.theirs))} in {files.path} make {list(values.shape)} of "
            f"'{piece.link.ours}', which is {list(piece.sizes)} here"
        )
    fill(part, box, values)
