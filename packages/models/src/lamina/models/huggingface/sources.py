"""Where Hugging Face weights are read from: a directory, or a model in memory.

Two formats of codes with scales are read as numbers: blockwise FP8 (DeepSeek-V3: `weight` in
float8 and `weight_scale_inv`, one float32 factor for each 128 x 128 elements) and MXFP4 (GPT-OSS:
`..._blocks`, two codes of four bits in a byte, and `..._scales`, one power of two for each 32
elements; OCP Microscaling Formats 1.0).
"""

import json
import math
from collections.abc import Callable, Collection, Iterable, Mapping
from pathlib import Path
from typing import Any

import torch
from torch import Tensor, nn

from lamina.models.huggingface.config_fields import AS_IT_IS, shortened
from lamina.models.huggingface.known_types import type_of


class SourceTensors:
    """The tensors of a directory or of a model in memory; notes which of them were read.

    `read_one` reads a tensor by one of the `names`. The `source` is named in errors.
    """

    def __init__(
        self, source: str, names: Iterable[str], read_one: Callable[[str], Tensor], kind: object
    ) -> None:
        self.source = source
        names = frozenset(names)
        self._coded = coded_weights(names)
        parts = {part for pair in self._coded.values() for part in pair}
        self._names = (names - parts) | self._coded.keys()
        self._unread = set(self._names)
        self._read_one = read_one
        self._derived = _DERIVED + (_MASKS if kind == "gpt2" else ())

    def __contains__(self, name: str) -> bool:
        """Whether there is a tensor of exactly this name."""
        return name in self._names

    def read(self, name: str) -> Tensor:
        """A tensor by its name, or by the name that a base model gives it; KeyError if it lacks."""
        for candidate in (name, name.removeprefix("transformer.").removeprefix("model.")):
            if candidate in self._names:
                self._unread.discard(candidate)
                if candidate in self._coded:
                    return dequantised(candidate, *map(self._read_one, self._coded[candidate]))
                return _as_written(self._read_one, candidate)
        raise KeyError(name)

    def leave_out(self, beginning: str) -> None:
        """Let nobody read the tensors whose names begin so."""
        self._unread = {name for name in self._unread if not name.startswith(beginning)}

    def require_copy(self, name: str, of: str) -> None:
        """Raise ValueError for a tensor that is there, and is no copy of another one."""
        if name in self and not torch.equal(self.read(name), self.read(of)):
            raise ValueError(
                f"{self.source} has {name} with other values than {of}, of which it must be a "
                "copy: the model has one for both"
            )

    def refuse_unread(self, tied_to: str | None, heads: Collection[str]) -> None:
        """Raise ValueError for weights that nothing has read: it would be another model.

        A head (of one of these names) that is `tied_to` the embeddings need not be read, if it has
        their values.
        """
        for head in self._unread & {*heads} if tied_to is not None else ():
            if not torch.equal(self.read(head), self.read(str(tied_to))):
                raise ValueError(
                    f"{self.source} has {head} with other values than {tied_to}, and "
                    "tie_word_embeddings of its config.json says that they are one: make it False"
                )
        left = sorted(name for name in self._unread if not name.endswith(self._derived))
        if left:
            raise ValueError(
                f"{self.source} has {shortened(left, 3)}, for which the model of its config.json "
                f"has no place ({len(left)} tensors): config.json may be that of another model. "
                f"Take them out if they change nothing{AS_IT_IS}"
            )


_DERIVED = (".rotary_emb.inv_freq",)
_MASKS = (".attn.bias", ".attn.masked_bias")
"""Ends of names of tensors that follow from the config: frequencies, and GPT-2's causal masks."""


def open_source(source: str | Path | nn.Module) -> tuple[Mapping[str, Any], SourceTensors]:
    """The contents of `config.json`, and the tensors."""
    if not isinstance(source, nn.Module):
        return _open_directory(Path(source))
    tensors, title = source.state_dict(), type(source).__name__
    written: dict[str, Any] = source.config.to_dict()  # type: ignore[union-attr, operator]
    kind = written.get("model_type")
    own = getattr(getattr(source, "config_class", None), "model_type", None)
    shared = (known := type_of(kind)) is not None and known.architecture == title
    if own and own != kind and not shared:
        raise ValueError(
            f"{title} is a model of type {own!r}, and its config says model_type={kind!r}: it "
            f"would be read as another model{AS_IT_IS}"
        )
    _refuse_quantised(written, tensors, title)
    return written, SourceTensors(title, tensors, tensors.__getitem__, kind)


def _open_directory(path: Path) -> tuple[Mapping[str, Any], SourceTensors]:
    try:
        from safetensors import safe_open
    except ImportError as error:
        raise ImportError(
            "reading a checkpoint's files needs safetensors: pip install 'lamina-models[hf]'"
        ) from error
    file = path / "config.json"
    if not file.is_file():
        raise FileNotFoundError(
            f"{file} is missing: give a directory saved by save_pretrained() (names of the hub are "
            "not downloaded: huggingface_hub.snapshot_download(name) returns such a directory)"
        )
    written = json.loads(file.read_text())
    where: dict[str, Any] = {}
    for shard in _weight_files(path):
        opened: Any = safe_open(shard, framework="pt")
        for name in opened.keys():  # noqa: SIM118
            if name in where:
                raise ValueError(
                    f"{name} is in two files under {path}, {shard.name} is one of them: which of "
                    "them is meant? Leave one set of files there"
                )
            where[name] = opened
    _refuse_quantised(written, where, str(path))
    read = lambda name: where[name].get_tensor(name)  # noqa: E731
    return written, SourceTensors(str(path), where, read, written.get("model_type"))


def _weight_files(path: Path) -> list[Path]:
    """Those that the index names, or all; FileNotFoundError if there are none."""
    index = path / "model.safetensors.index.json"
    if index.is_file():
        return sorted(
            {path / name for name in json.loads(index.read_text())["weight_map"].values()}
        )
    if not (files := sorted(path.glob("*.safetensors"))):
        raise FileNotFoundError(f"{path} has no *.safetensors: other formats are not read")
    return files


# Names of scales and codes: DeepSeek's and torchao's FP8, bitsandbytes, GPTQ and AWQ.
_SCALES = ("_scale_inv", ".weight_scale", ".SCB", ".absmax", ".qweight", ".qzeros", ".scales")
_REMEDY = "give a checkpoint of its weights in bfloat16 or float32 (dequantise it first)"


def _refuse_quantised(written: Mapping[str, Any], names: Iterable[str], source: str) -> None:
    """Raise ValueError for quantised weights in another format than those that are read."""
    names = frozenset(names)
    coded = coded_weights(names)
    parts = {part for pair in coded.values() for part in pair}
    scales = sorted(name for name in names - parts if name.endswith(_SCALES))
    said = written.get("quantization_config")
    if scales or (said and (not coded or said.get("quant_method") not in ("fp8", "mxfp4"))):
        method = f"quantization_config of config.json: {said}" if said else f"tensor {scales[0]}"
        raise ValueError(f"{source} holds quantised weights ({method}): {_REMEDY}")


def _as_written(read: Callable[[str], Tensor], name: str) -> Tensor:
    tensor = read(name)
    if tensor.dtype not in (torch.float64, torch.float32, torch.bfloat16, torch.float16):
        raise ValueError(f"{name} is {tensor.dtype}, codes of quantised weights: {_REMEDY}")
    return tensor


BLOCK = 128
"""Rows and columns that share a factor of FP8."""

FP4_VALUES = (0.0, 0.5, 1.0, 1.5, 2.0, 3.0, 4.0, 6.0)
"""Of the codes 0 to 7; 8 to 15 are their negatives."""


def coded_weights(names: Collection[str]) -> dict[str, tuple[str, str]]:
    """Of each quantised weight the names of its codes and scales, by the weight's own name."""
    weights = {}
    for name in names:
        if name.endswith("_scale_inv") and (codes := name.removesuffix("_scale_inv")) in names:
            weights[codes] = codes, name
        if name.endswith("_scales") and f"{name.removesuffix('_scales')}_blocks" in names:
            weight = name.removesuffix("_scales")
            weights[weight] = f"{weight}_blocks", name
    return weights


def dequantised(name: str, codes: Tensor, scales: Tensor) -> Tensor:
    """The float32 numbers of a weight, in the shape that unquantised files give it.

    Codes of FP8 are `[rows, columns]`, with scales `[rows / 128, columns / 128]` rounded up. Codes
    of MXFP4 are uint8 `[experts, rows, groups, 16]` with scales `[experts, rows, groups]`, and the
    weight is `[experts, 32 groups, rows]`: GPT-OSS multiplies by it from the right.

    ValueError: shapes or dtypes that do not belong together.
    """
    if not belong_together(codes, scales):
        raise ValueError(
            f"{name} has codes {codes.dtype} {list(codes.shape)} and scales {list(scales.shape)}: "
            f"read are float8 with one scale for each {BLOCK} x {BLOCK}, and MXFP4"
        )
    if codes.dtype is not torch.uint8:
        return codes.float() * spread(scales.float(), codes.shape)
    with codes.device:  # not a program's default one, where torch's `ldexp` makes its 2
        values = torch.tensor((*FP4_VALUES, *(-value for value in FP4_VALUES)))
        pairs = torch.stack((codes & 15, codes >> 4), dim=-1).flatten(-2)
        exponents = scales.to(torch.int32).unsqueeze(-1) - 127
        return torch.ldexp(values[pairs.int()], exponents).flatten(-2).mT.contiguous()


def belong_together(codes: Tensor, scales: Tensor) -> bool:
    """Whether codes and scales have the dtypes and shapes of a format that is read."""
    if codes.dtype is torch.uint8:
        return codes.ndim == 4 and codes.shape[:-1] == scales.shape
    is_float8 = codes.dtype.itemsize == 1 and codes.dtype.is_floating_point
    grid = tuple(math.ceil(size / BLOCK) for size in codes.shape)
    return is_float8 and codes.ndim == 2 and tuple(scales.shape) == grid


def spread(scales: Tensor, shape: tuple[int, ...]) -> Tensor:
    """Each block's factor at each of its elements, for a weight of this shape."""
    rows, columns = shape
    whole = scales.repeat_interleave(BLOCK, 0).repeat_interleave(BLOCK, 1)
    return whole[:rows, :columns]
