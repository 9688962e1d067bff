"""Weights written as codes with scales, like those of files that they came from."""

from __future__ import annotations

from collections.abc import Iterator

import torch
from torch import Tensor

from lamina.checkpoint.huggingface.files import Described, Files, formats


class Requantised:
    """Writes weights as another directory has them: in codes and scales, or as they are.

    A block keeps the scale that it has there, if its numbers still fit it: weights that were not
    changed are written with the bytes that they were read from. Otherwise the scale is made anew
    from the largest number.
    """

    def __init__(self, files: Files) -> None:
        self._files = files

    def described(self, plain: Described) -> list[Described]:
        """What a weight is in the new files."""
        if plain.name not in self._files.coded:
            return [plain]
        parts = [self._files.stored_as(name) for name in self._files.coded[plain.name]]
        shape = parts[0].shape
        if parts[0].dtype is torch.uint8:  # groups of 32 numbers in 16 bytes, transposed
            shape = (shape[0], shape[2] * 32, shape[1])
        if shape != plain.shape:
            raise ValueError(
                f"'{plain.name}' is {list(plain.shape)} in the model and {list(shape)} in "
                f"{self._files.path}: like= has to be the directory of the same model"
            )
        return parts

    def stored(self, name: str, weight: Tensor) -> Iterator[Tensor]:
        """A weight as its `described` parts."""
        if name not in self._files.coded:
            yield weight
            return
        codes, scales = (self._files.stored(part) for part in self._files.coded[name])
        quantise = _mxfp4 if codes.dtype is torch.uint8 else _fp8
        with torch.device("cpu"):  # not a program's default one, where torch's `ldexp` makes its 2
            parts = quantise(weight.detach().float().cpu(), codes, scales)
        yield from parts  # outside, or the reader of these would have the CPU as its default


def _fp8(weight: Tensor, codes: Tensor, scales: Tensor) -> tuple[Tensor, Tensor]:
    engine = formats()
    largest = torch.finfo(codes.dtype).max
    blocks = torch.nn.functional.pad(
        weight.abs(), [n for size in reversed(weight.shape) for n in (0, -size % engine.BLOCK)]
    )
    kept, block = scales.float(), engine.BLOCK
    peak = blocks.view(kept.shape[0], block, kept.shape[1], block).amax((1, 3)) / largest
    # A scale that is far too large would waste bits, and one that is too small would cut numbers.
    fits = (peak <= kept * (1 + 2**-20)) & (peak >= kept / 4)
    new = torch.where(fits | (peak == 0), kept, peak)
    spread = engine.spread(new, weight.shape)
    made = torch.where(spread > 0, weight / spread, 0.0).clamp(-largest, largest)
    return made.to(codes.dtype), new.to(scales.dtype)


def _mxfp4(weight: Tensor, codes: Tensor, scales: Tensor) -> tuple[Tensor, Tensor]:
    groups = weight.mT.reshape(*scales.shape, 32)
    peak = groups.abs().amax(-1)
    kept = torch.ldexp(torch.ones(scales.shape), scales.to(torch.int32) - 127)
    fits = (peak <= 6 * kept) & (peak > 1.5 * kept) | (peak == 0)
    exponents = torch.where(fits, scales.to(torch.int32) - 127, torch.frexp(peak)[1] - 3)
    scaled = torch.ldexp(groups, -exponents.unsqueeze(-1)).abs().clamp(max=6.0)
    # Steps of e2m1 are 1/2 below 2, 1 below 4, and 2 above; ties go to the even code.
    step = torch.where(scaled < 2, 0.5, torch.where(scaled < 4, 1.0, 2.0))
    rounded = torch.round(scaled / step) * step
    values = torch.tensor(formats().FP4_VALUES)
    index = torch.searchsorted(values, rounded.contiguous()).to(torch.uint8)
    index |= (groups.signbit()).to(torch.uint8) << 3
    packed = index[..., 0::2] | (index[..., 1::2] << 4)
    return packed.view(codes.shape), (exponents + 127).clamp(0, 255).to(scales.dtype)
