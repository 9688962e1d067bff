"""Where two layouts part: the first module, tensor and element, without a tolerance."""

from __future__ import annotations

import math
from collections.abc import Iterator, Sequence
from dataclasses import dataclass, replace

import torch
from torch import Tensor

from lamina.models.bisection.pieces import MismatchError, parameter_piece, token_piece, token_widths
from lamina.models.bisection.recording import Key, Trace


@dataclass(frozen=True)
class Difference:
    """Where two layouts part.

    Attributes:
        module: the module to look at: everything that it was given is equal in both layouts, and
            something that it computes is not. The empty name is the model itself.
        key: the tensor.
        where: the element, and the rank that has it.
        values: of the element in both layouts; none if a rank's tensor has a wrong shape.
        count: the number of elements of the rank's tensor that differ.
    """

    module: str
    key: Key
    where: str
    values: tuple[float, float] | None = None
    count: int = 0

    def __str__(self) -> str:
        label = f" {self.key.label}" if self.key.label else ""
        call = f", call {self.key.call}" if self.key.call else ""
        lines = [
            f"the layouts part in {self.module or 'the model itself'}: {self.key.what}{label} of "
            f"{self.key.module or 'the model'}{call}",
            f"  {self.where}",
        ]
        if self.values is not None:
            lines.append(f"  {self.values[0]!r} and {self.values[1]!r}; {self.count} differ there")
        return "\n".join(lines)


class Reference:
    """The whole tensors of a step in one process, which say how tensors of ranks are cut."""

    def __init__(self, trace: Trace) -> None:
        self.share = trace.share
        self.modules = {key.module for key in trace.activations}
        self.widths: dict[Key, tuple[int, ...]] = {}
        for key, activations in trace.activations.items():
            shape = activations[0].values.shape
            widths = () if not shape else token_widths(shape, trace.share)
            if widths is not None:
                self.widths[key] = widths
        self.numbers = {key for key in self.widths if not trace.activations[key][0].values.shape}
        self.shapes = {key: value.shape for key, (value, _) in trace.parameters.items()}

    @property
    def keys(self) -> list[Key]:
        """All tensors in the order of a step: what comes first is computed first."""
        before = [key for key in self.shapes if key.what == "parameter before"]
        after = [key for key in self.shapes if key.what != "parameter before"]
        return [*before, *self.widths, *after]

    def pieces(self, key: Key, trace: Trace) -> Iterator[tuple[Tensor, Tensor, str]]:
        """Yield a rank's tensors of a key, with their elements' numbers in the whole one.

        Raises:
            MismatchError: a rank's tensor is no piece of the whole one.
        """
        share = trace.share
        if key in self.shapes:
            if key in trace.parameters:
                value, role = trace.parameters[key]
                yield value, parameter_piece(value.shape, self.shapes[key], role, share), ""
            return
        widths = self.widths[key]
        for activation in trace.activations.get(key, ()):
            fused = activation.fused
            if fused is not None and -1 in fused:
                fused = tuple(widths[-1] // len(fused) for _ in fused)
            shape, at = activation.values.shape, activation.microbatch
            if key in self.numbers:
                # A microbatch's loss stands at the first token of its first sequence. Ranks that
                # share sequences have parts of it.
                parts = share.axes["cp"][1] > 1 and not key.what.startswith("gradient")
                if share.rows != self.share.rows or parts:
                    continue
                index = share.tokens(at, whole=True)[0, 0]
            else:
                index = token_piece(shape, widths, share, at, fused)
            scaled = trace.scale if key.what.startswith("gradient") else 1
            yield activation.values * scaled, index, f", microbatch {at}"

    def element(self, key: Key, number: int) -> str:
        """Name an element of a whole tensor."""
        if key in self.shapes:
            return f"element {list(_coordinates(number, self.shapes[key]))}"
        widths = self.widths[key]
        token, column = divmod(number, math.prod(widths))
        sequence, position = divmod(token, self.share.length)
        at = list(_coordinates(column, widths))
        return f"sequence {sequence}, token {position}, element {at}"

    def assemble(self, key: Key, traces: Sequence[Trace]) -> Tensor | None:
        """The whole tensor, flat; None if no rank has a part of it."""
        whole: Tensor | None = None
        for trace in traces:
            for values, index, _ in self.pieces(key, trace):
                if whole is None:
                    whole = torch.zeros(self._size(key), dtype=values.dtype)
                whole[index.flatten()] = values.flatten()
        return whole

    def responsible(self, key: Key) -> str:
        """The module that computes a tensor: for what a module is given, the one that calls it."""
        if key.what in ("output", "gradient of input"):
            return key.module
        parent = key.module.rpartition(".")[0]
        # Lists of modules call nothing.
        while parent and "parameter" not in key.what and parent not in self.modules:
            parent = parent.rpartition(".")[0]
        return parent

    def _size(self, key: Key) -> int:
        if key in self.shapes:
            return math.prod(self.shapes[key])
        return self.share.sequences * self.share.length * math.prod(self.widths[key])


def first_difference(reference: Trace, a: Sequence[Trace], b: Sequence[Trace]) -> Difference | None:
    """Find the first tensor in which two layouts part; None if all have the same values.

    Args:
        reference: of the same model and batch in one process, without a wrapper. It says in what
            order tensors are computed and how large they are.
        a: of all ranks of a layout.
        b: of all ranks of the other one.
    """
    whole = Reference(reference)
    for key in whole.keys:
        try:
            expected = whole.assemble(key, a)
            difference = None if expected is None else _compare(whole, key, expected, b)
        except MismatchError as error:
            return Difference(whole.responsible(key), key, str(error))
        if difference is not None:
            return (
                difference
                if key.what != "gradient of parameter"
                else _of_all(difference, whole, a, b)
            )
    return None


def _of_all(
    difference: Difference, whole: Reference, a: Sequence[Trace], b: Sequence[Trace]
) -> Difference:
    """If the gradients of all parameters differ, no module of theirs computes them wrong."""
    keys = [key for key in whole.shapes if key.what == difference.key.what]
    for key in keys:
        expected = whole.assemble(key, a)
        if expected is None or _compare(whole, key, expected, b) is None:
            return difference
    return replace(difference, module="")


def _compare(
    whole: Reference, key: Key, expected: Tensor, traces: Sequence[Trace]
) -> Difference | None:
    """Compare all ranks' pieces with the whole tensor; each copy of an element counts."""
    absent = True
    for trace in traces:
        for values, index, where in whole.pieces(key, trace):
            absent = False
            wanted = expected[index]
            differs = (values != wanted) & ~((values != values) & (wanted != wanted))
            if differs.any():
                first = int(torch.where(differs.flatten(), index.flatten(), len(expected)).argmin())
                number = int(index.flatten()[first])
                pair = float(wanted.flatten()[first]), float(values.flatten()[first])
                where = f"{whole.element(key, number)}, on {trace.share.describe}{where}"
                return Difference(whole.responsible(key), key, where, pair, int(differs.sum()))
    if absent and key not in whole.numbers:
        return Difference(whole.responsible(key), key, "no rank of the second layout has it")
    return None


def _coordinates(number: int, shape: Sequence[int]) -> tuple[int, ...]:
    return tuple(int(at) for at in torch.unravel_index(torch.tensor(number), tuple(shape)))
