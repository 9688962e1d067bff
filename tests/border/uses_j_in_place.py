"""J: tensors that are changed in place where a block begins or ends."""

from __future__ import annotations

from typing import Any

import torch
import torch.nn.functional as F
from border.case import Block, Case, Net
from border.judge import use
from torch import Tensor, nn

J = "Changes in place at a block's border"


def _inner(block: Block, x: Tensor) -> Tensor:
    return block.down(F.gelu(block.up(block.norm(x))))


class OfBlocks(Net):
    """A net with blocks of another class."""

    def __init__(self, block: type[Block]) -> None:
        super().__init__()
        self.blocks = nn.ModuleList(block(8) for _ in range(2))


def _trained(case: Case, net: type[OfBlocks], block: type[Block]) -> dict[str, Any]:
    return case.train(*case.setup(case.net(net, block)))


class Rectifies(Block):
    def forward(self, x: Tensor) -> Tensor:
        F.relu(x, inplace=True)
        return x + _inner(self, x)


class Residual(OfBlocks):
    def forward(self, x: Tensor) -> Tensor:
        x = self.enter(x)
        for block in self.blocks:
            y = x + 0
            x = y + 0.5 * block(y)
        return self.leave(x)


@use(J)
def input_is_changed(case: Case):
    """A block begins with an in-place ReLU"""
    return _trained(case, OfBlocks, Rectifies)


@use(J)
def input_is_changed_and_used_again(case: Case):
    """A block begins with an in-place ReLU, and a residual connection goes around it"""
    return _trained(case, Residual, Rectifies)


class ScalesQuietly(Block):
    def forward(self, x: Tensor) -> Tensor:
        with torch.no_grad():
            x.mul_(0.5)
        return super().forward(x)


@use(J)
def input_is_changed_under_no_grad(case: Case):
    """A block scales its input in place under no_grad, and the input is used again"""
    return _trained(case, Residual, ScalesQuietly)


class Adds(Block):
    def forward(self, x: Tensor) -> None:
        x += 0.5 * _inner(self, x.clone())


class AddsAndReturns(Adds):
    def forward(self, x: Tensor) -> Tensor:
        super().forward(x)
        return x.mean(1, keepdim=True)


class OnViews(OfBlocks):
    def forward(self, x: Tensor) -> Tensor:
        x = self.enter(x)
        whole = torch.cat((x, x * 2), 1)
        self.blocks[0](whole[:, :8])
        self.blocks[0](whole[:, 8:])
        whole = whole * 1.5
        part = whole[:, 4:12]
        out = self.blocks[1](part)
        return self.leave(whole[:, :8] + part) + (0 if out is None else out)


@use(J)
def slice_is_changed(case: Case):
    """A block adds to a slice that it is given, and returns nothing"""
    return _trained(case, OnViews, Adds)


@use(J)
def slice_is_changed_beside_an_output(case: Case):
    """A block adds to a slice that it is given, and returns something else"""
    return _trained(case, OnViews, AddsAndReturns)


class AddsInList(Block):
    def forward(self, tensors: list[Tensor]) -> None:
        tensors[0] *= 0.5
        tensors[0] += _inner(self, tensors[0].clone())


class WithList(OfBlocks):
    def forward(self, x: Tensor) -> Tensor:
        x = self.enter(x) * 1
        tensors = [x]
        for block in self.blocks:
            block(tensors)
        return self.leave(x + tensors[0])


@use(J)
def tensor_of_a_list_is_changed(case: Case):
    """A block changes a tensor of a list in place, and the caller holds both"""
    return _trained(case, WithList, AddsInList)


class ScalesBehind(Block):
    kept: tuple[Tensor]

    def forward(self, x: Tensor) -> Tensor:
        self.kept[0].mul_(2)
        return super().forward(x)


class Behind(OfBlocks):
    def forward(self, x: Tensor) -> Tensor:
        x = self.enter(x)
        for block in self.blocks:
            x = x * 1
            block.kept = (x,)
            x = block(x)
        return self.leave(x)


@use(J)
def input_is_changed_by_another_name(case: Case):
    """A block changes its input in place through an attribute that holds it too"""
    return _trained(case, Behind, ScalesBehind)


class ReturnsView(Block):
    def forward(self, x: Tensor) -> Tensor:
        return super().forward(x).t().contiguous().t()


class ReturnsSlices(Block):
    def forward(self, x: Tensor) -> tuple[Tensor, Tensor]:
        whole = super().forward(x)
        return whole[:, :4], whole[:, 4:]


class ChangesOutput(OfBlocks):
    def forward(self, x: Tensor) -> Tensor:
        x = self.enter(x)
        for block in self.blocks:
            x = block(x)
            x += 0.5
        return self.leave(x)


class ChangesSlices(OfBlocks):
    def forward(self, x: Tensor) -> Tensor:
        x = self.enter(x)
        for block in self.blocks:
            one, two = block(x)
            one += 0.5
            two *= 2
            x = torch.cat((two, one), 1)
        return self.leave(x)


@use(J)
def output_is_changed(case: Case):
    """The model changes a block's output in place"""
    return _trained(case, ChangesOutput, Block)


@use(J)
def view_is_returned_and_changed(case: Case):
    """A block returns a view, and the model changes it in place"""
    return _trained(case, ChangesOutput, ReturnsView)


@use(J)
def slices_are_returned_and_changed(case: Case):
    """A block returns two slices of one tensor, and the model changes both in place"""
    return _trained(case, ChangesSlices, ReturnsSlices)


class Keeps(Block):
    def forward(self, x: Tensor, kept: dict[str, Tensor]) -> tuple[Tensor, Tensor]:
        kept["skip"] = x
        return super().forward(x * 1.0), x


class ChangesKept(OfBlocks):
    def forward(self, x: Tensor) -> Tensor:
        x = self.enter(x)
        for block in self.blocks:
            kept: dict[str, Tensor] = {}
            given = x * 0.5
            out, same = block(given, kept)
            given *= 0.3
            same += 0.2
            x = 0.5 * out + kept["skip"] + same + given
        return self.leave(x)


@use(J)
def kept_input_is_changed(case: Case):
    """A block keeps its input in a dict and returns it, and the caller changes all in place"""
    return _trained(case, ChangesKept, Keeps)
