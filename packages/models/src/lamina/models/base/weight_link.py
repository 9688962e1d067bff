"""The correspondence between a parameter and tensors of a Hugging Face checkpoint."""

from __future__ import annotations

from collections.abc import Callable, Iterator, Sequence
from dataclasses import dataclass, replace
from typing import Any

import torch
from torch import Tensor


@dataclass(frozen=True)
class WeightLink:
    """A parameter of Lamina and the tensors of a Hugging Face checkpoint that have its values.

    Attributes:
        ours: name of the parameter in Lamina's model.
        theirs: names of the tensors whose rows, concatenated in order, are the parameter's rows.
        rows: the number of rows of each of these tensors; None if there is one tensor.
        transposed: their matrices are `[in, out]` (GPT-2's Conv1D).
        order: for each row of ours, the index of the row of theirs; None keeps the order. With
            `stacked`, of each matrix.
        rows_added: rows at the end of ours that theirs does not have (vocabulary padding).
        stack: ours is a stack of this many matrices, `[stack, rows, ...]`; None is one matrix.
        stacked: theirs is one tensor, a stack as ours (gpt-oss).
        kernel: the shape of a row of theirs, whose elements are one dimension of ours (a
            convolution's; () is a number, where ours has a column); None is as ours.
        in_memory: the name of the tensor of the same shape in a `transformers` model in memory,
            or names in place of `theirs`, if these differ from the names in files; () if such a
            model leaves the tensors out.
    """

    ours: str
    theirs: tuple[str, ...]
    rows: tuple[int, ...] | None = None
    transposed: bool = False
    order: tuple[int, ...] | None = None
    rows_added: int = 0
    stack: int | None = None
    stacked: bool = False
    kernel: tuple[int, ...] | None = None
    in_memory: str | tuple[str, ...] | None = None

    def to_theirs(self, tensor: Tensor) -> tuple[Tensor, ...]:
        """Make their tensors from our whole one."""
        if self.rows_added:
            tensor = tensor[: -self.rows_added]
        if self.stack is not None and not self.stacked:
            tensor = tensor.flatten(0, 1)
        if self.order is not None:
            inverse = torch.tensor(self.order, device=tensor.device).argsort()
            tensor = tensor.index_select(int(self.stacked), inverse)
        if self.kernel is not None:
            tensor = tensor.reshape(*tensor.shape[: 1 + self.stacked], *self.kernel)
        parts = (tensor,) if self.rows is None else torch.split(tensor, list(self.rows))
        return tuple((part.mT if self.transposed else part).contiguous() for part in parts)

    def to_ours(self, tensors: Sequence[Tensor]) -> Tensor:
        """Make our whole tensor from theirs; ValueError if one has another number of rows."""
        parts = [tensor.mT if self.transposed else tensor for tensor in tensors]
        for name, part, rows in zip(self.theirs, parts, self.rows or (), strict=False):
            if len(part) != rows:  # their sum may be right, and each row in another's place
                raise ValueError(f"{name} has {len(part)} rows, and by its config it has {rows}")
        whole = parts[0] if len(parts) == 1 else torch.cat(parts)
        if self.kernel is not None:
            leading = whole.shape[: 1 + self.stacked]
            if whole.shape[len(leading) :] != self.kernel:
                raise ValueError(
                    f"{self.theirs[0]} is {list(whole.shape)}, and by its config its rows "
                    f"are {list(self.kernel)}"
                )
            whole = whole.reshape(*leading, -1)
        if self.order is not None:
            order = torch.tensor(self.order, device=whole.device)
            whole = whole.index_select(int(self.stacked), order)
        if self.stack is not None and not self.stacked:
            whole = whole.view(self.stack, -1, *whole.shape[1:])
        if self.rows_added:
            padding = whole.new_zeros(self.rows_added, *whole.shape[1:])
            whole = torch.cat((whole, padding))
        return whole

    def pieces(self) -> Iterator[tuple[tuple[slice, ...], WeightLink]]:
        """Split the link into one link for each of their tensors, where that is possible.

        Yields:
            Slices of the first dimensions of ours, and a link of that part to one of theirs.
        """
        if self.stacked:
            yield (), self
            return
        rows, each = self.rows or (), len(self.theirs) // (self.stack or 1)
        matrices = [rows[at : at + each] for at in range(0, len(rows), each)]
        alike = all(matrix == matrices[0] for matrix in matrices)
        if len(rows) < 2 or not alike or self.order is not None or self.rows_added or self.kernel:
            yield (), self
            return
        stack = None if self.stack is None else 1
        for number, matrix in enumerate(matrices):
            start = 0
            for name, length in zip(self.theirs[number * each :], matrix, strict=False):
                inner = slice(start, start + length)
                slices = (inner,) if stack is None else (slice(number, number + 1), inner)
                yield slices, replace(self, theirs=(name,), rows=None, stack=stack, in_memory=None)
                start += length

    def read(self, tensor: Callable[[str], Tensor]) -> Tensor:
        """Make our whole tensor from a function that reads theirs by name.

        Raises:
            KeyError: if there are no such tensors, by the names in files or in memory.
        """
        try:
            return self.to_ours([tensor(name) for name in self.theirs])
        except KeyError:
            if not self.in_memory:
                raise
        if isinstance(self.in_memory, str):
            return tensor(self.in_memory)
        return self.to_ours([tensor(name) for name in self.in_memory])


def linked(ours: str, *theirs: str, bias: bool = False, **how: Any) -> Iterator[WeightLink]:
    """Link the weight of a module, and its bias if it has one; `how` is as of `WeightLink`."""
    for kind in ("weight", "bias") if bias else ("weight",):
        yield WeightLink(f"{ours}.{kind}", tuple(f"{name}.{kind}" for name in theirs), **how)
