"""A span is cut into few boxes that tile it in order."""

from __future__ import annotations

import pytest
import torch
from hypothesis import given, settings
from hypothesis import strategies as st

from lamina.buffers.engine import boxes_of_span, narrowed


@st.composite
def spans(draw):
    shape = tuple(draw(st.lists(st.integers(1, 5), max_size=4)))
    numel = torch.Size(shape).numel()
    start = draw(st.integers(0, numel))
    return shape, start, draw(st.integers(start, numel))


@settings(max_examples=200, deadline=None)
@given(spans())
def test_boxes_tile_the_span_in_order(span):
    shape, start, stop = span
    whole = torch.arange(torch.Size(shape).numel()).view(shape)  # each element is its own index
    local = whole.reshape(-1)[start:stop]
    boxes = boxes_of_span(shape, start, stop)
    seen = []
    for box in boxes:
        piece = whole
        for dim, (offset, size) in enumerate(zip(box.offsets, box.sizes, strict=True)):
            piece = piece.narrow(dim, offset, size)
        assert torch.equal(piece, local[box.start : box.start + box.numel].view(box.sizes))
        seen.extend(piece.reshape(-1).tolist())
    assert seen == list(range(start, stop))
    assert len(boxes) <= max(2 * len(shape) - 1, 1)


def test_whole_rows_are_one_box():
    assert len(boxes_of_span((6, 4), 4, 16)) == 1
    assert len(boxes_of_span((6, 4), 5, 15)) == 3


def test_a_span_outside_its_tensor_is_refused():
    with pytest.raises(ValueError, match=r"3\.\.9 is not inside a tensor of 8"):
        boxes_of_span((2, 4), 3, 9)


def test_a_box_of_all_is_the_tensor_itself():
    """Some subclasses of tensors can be cut along their first dimension only."""
    whole = torch.arange(6).view(2, 3)
    assert narrowed(whole, (0, 0), (2, 3)) is whole
    assert torch.equal(narrowed(whole, (1, 1), (1, 2)), whole[1:, 1:])
