"""Chunks: what was written is read back, without unpickling where possible; sums add up."""

from __future__ import annotations

import io
import zlib

import pytest
import torch
from hypothesis import given, settings
from hypothesis import strategies as st

import lamina.checkpoint.storage.streams as streams
from lamina.checkpoint.storage.streams import combine


@settings(deadline=None)
@given(st.binary(max_size=300), st.binary(max_size=5000))
def test_the_sum_of_a_whole_follows_from_its_pieces(first, second):
    got = combine(zlib.crc32(first), zlib.crc32(second), len(second))
    assert got == zlib.crc32(first + second)


@pytest.mark.parametrize(
    "dtype", [torch.float32, torch.bfloat16, torch.float8_e4m3fn, torch.int64, torch.bool]
)
@pytest.mark.parametrize("shape", [(), (0, 3), (7,), (3, 1, 5)])
def test_chunks_in_a_file_come_back(monkeypatch, dtype, shape):
    tensors = [torch.randint(0, 2, shape).to(dtype) for _ in range(3)]
    tensors.append(torch.randint(0, 2, (9, *shape)).to(dtype)[4])  # a view of more memory
    file = io.BytesIO()
    stream = streams.SummingStream(file)
    for tensor in tensors:
        torch.save(streams.own_memory(tensor), stream)
        assert stream.end_chunk() < 4000
    data = file.getvalue()
    assert (stream.sum.bytes, stream.sum.crc32) == (len(data), zlib.crc32(data))

    def no_unpickling(*_: object, **__: object) -> None:
        raise AssertionError("read by torch.load")

    offset = 0
    for tensor, (length, crc) in zip(tensors, stream.chunks, strict=True):
        chunk = memoryview(bytearray(data[offset : offset + length]))
        assert zlib.crc32(chunk) == crc
        if tensor.numel():
            monkeypatch.setattr(torch, "load", no_unpickling)
        got = streams.tensor_in(chunk, dtype, shape)
        monkeypatch.undo()
        assert got.dtype == dtype
        assert got.shape == tensor.shape
        assert torch.equal(got.view(-1).view(torch.uint8), tensor.reshape(-1).view(torch.uint8))
        offset += length
