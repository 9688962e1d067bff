"""Checksums of a whole from checksums of its pieces, as zlib's C library can and Python's can't.

A file is a row of chunks, one per box of a tensor. Each chunk has a checksum, so that damage is
found by the tensor it is in; the file's own checksum follows from them without reading twice.
"""

from __future__ import annotations

from functools import cache

_POLYNOMIAL = 0xEDB88320  # CRC-32 of zlib, bits reversed


def combine(first: int, second: int, length: int) -> int:
    """Return the CRC-32 of ``a + b``.

    Args:
        first: CRC-32 of a.
        second: CRC-32 of b.
        length: of b, in bytes.

    Source:
        Mark Adler's crc32_combine in zlib: appending n zero bytes multiplies a CRC by a matrix
        over GF(2); powers of two of that matrix are made by squaring.

    """
    for matrix in _of_zeros():
        if not length:
            break
        if length & 1:
            first = _times(matrix, first)
        length >>= 1
    return first ^ second


def _times(matrix: tuple[int, ...], vector: int) -> int:
    total = 0
    row = 0
    while vector:
        if vector & 1:
            total ^= matrix[row]
        vector >>= 1
        row += 1
    return total


@cache
def _of_zeros() -> tuple[tuple[int, ...], ...]:
    """Return, for k = 0 .. 47, the matrix that appends 2**k zero bytes."""
    matrix = (_POLYNOMIAL, *(1 << bit for bit in range(31)))  # one zero bit
    made = []
    for power in range(3 + 48):
        if power >= 3:
            made.append(matrix)
        matrix = tuple(_times(matrix, row) for row in matrix)
    return tuple(made)
