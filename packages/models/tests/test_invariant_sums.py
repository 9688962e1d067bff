"""Each mechanism of `invariant=True` against sums written out in Python, one number at a time."""

from __future__ import annotations

import math
import struct
from fractions import Fraction

import pytest
import torch

from lamina.models.invariance.chain_attention import ChainAttention
from lamina.models.invariance.products import (
    CHUNK,
    GRANULE,
    cut_blocks,
    fold,
    product,
    row_sum,
    tree,
    weight_product,
)
from lamina.models.invariance.token_sums import ACTIVATIONS, sum_by_row


def single(value: float) -> float:
    """Round a float64 to fp32."""
    return struct.unpack("f", struct.pack("f", value))[0]


def fma(total: float, x: float, y: float) -> float:
    """`total + x * y` of fp32 numbers, rounded to fp32 once."""
    near = total + x * y  # the product is exact in float64, the sum is rounded
    rest = Fraction(total) + Fraction(x) * Fraction(y) - Fraction(near)
    if rest and single(near) != near:
        # Rounding to odd: then the second rounding sees on which side the exact sum lies.
        low, high = (near, math.nextafter(near, math.inf)) if rest > 0 else (
            math.nextafter(near, -math.inf), near)  # fmt: skip
        bits = struct.unpack("q", struct.pack("d", low))[0]
        near = low if bits & 1 else high
    return single(near)


def chain(xs: list[float], ys: list[float]) -> float:
    total = 0.0
    for x, y in zip(xs, ys, strict=True):
        total = fma(total, x, y)
    return total


def in_order(numbers: list[float]) -> float:
    total = numbers[0]
    for number in numbers[1:]:
        total = single(total + number)
    return total


def by_tree(numbers: list[float]) -> float:
    """Split at the largest power of two below their number."""
    if len(numbers) == 1:
        return numbers[0]
    split = 1
    while 2 * split < len(numbers):
        split *= 2
    return single(by_tree(numbers[:split]) + by_tree(numbers[split:]))


def chunks(xs: list[float], ys: list[float]) -> float:
    starts = range(0, len(xs), CHUNK)
    return in_order([chain(xs[at : at + CHUNK], ys[at : at + CHUNK]) for at in starts])


def numbers(*shape: int, seed: int = 0) -> torch.Tensor:
    """Large and small numbers of both signs, so that every order differs."""
    generator = torch.Generator().manual_seed(seed)
    scale = 10.0 ** torch.randint(-2, 3, shape, generator=generator)
    return torch.randn(shape, generator=generator) * scale


@pytest.mark.parametrize("inner", [1, 24, 128, 300])
@pytest.mark.parametrize("dtype", [torch.float32, torch.bfloat16], ids=str)
def test_an_element_of_a_product_is_chains_in_order(inner, dtype):
    left, right = numbers(20, inner).to(dtype), numbers(inner, 18, seed=1).to(dtype)
    whole = product(left, right)
    for row, column in [(0, 0), (3, 17), (19, 5)]:
        expected = chunks(left[row].tolist(), right[:, column].tolist())
        assert whole[row, column].item() == expected


def test_blocks_of_a_product_are_added_in_the_tree():
    left, right = numbers(3, 384), numbers(384, 5, seed=1)
    widths = (256, 64, 64)  # queries, keys, values
    got = product(left, right, cut_blocks(widths))
    for row in range(3):
        xs, ys = left[row].tolist(), right[:, 2].tolist()
        leaves = []
        for block in range(8):
            pieces, start = [], 0
            for width in widths:
                first, size = start + block * width // 8, width // 8
                pieces.append(chain(xs[first : first + size], ys[first : first + size]))
                start += width
            leaves.append(in_order(pieces))
        assert got[row, 2].item() == by_tree(leaves)


def test_ranks_that_hold_blocks_make_the_same_sum():
    left, right = numbers(9, 384), numbers(384, 7, seed=1)
    widths = (256, 64, 64)
    whole = product(left, right, cut_blocks(widths))
    for ranks in (2, 4, 8):
        parts, start = [], [0, 256, 320]
        for rank in range(ranks):
            own = [
                torch.arange(at + rank * width // ranks, at + (rank + 1) * width // ranks)
                for at, width in zip(start, widths, strict=True)
            ]
            own = torch.cat(own)
            parts.append(product(left[:, own], right[own], cut_blocks(widths, ranks)))
        assert torch.equal(tree(parts), whole)


@pytest.mark.parametrize("threads", [1, 2])
def test_rows_and_columns_of_a_product_do_not_depend_on_their_neighbours(threads):
    before = torch.get_num_threads()
    torch.set_num_threads(threads)
    try:
        for rows, inner, columns in [(300, 128, 200), (2050, 40, 64), (33, 257, 1030)]:
            left, right = numbers(rows, inner), numbers(inner, columns, seed=1)
            whole = product(left, right)
            for m, n in [(1, 1), (2, columns), (rows, 1), (5, 17), (64, 33)]:
                assert torch.equal(product(left[3 : 3 + m], right[:, :n]), whole[3 : 3 + m, :n])
                turned = product(left[:m].t().contiguous().t(), right[:, -n:].t().contiguous().t())
                assert torch.equal(turned, whole[:m, -n:])
            batch = product(left[:30].expand(3, -1, -1), right.expand(3, -1, -1))
            assert torch.equal(batch[1], whole[:30])
    finally:
        torch.set_num_threads(before)


def test_a_weights_gradient_is_granules_in_the_tree():
    tokens = 5 * GRANULE
    grad, x = numbers(tokens, 6), numbers(tokens, 4, seed=1)
    got = weight_product(grad, x)
    for row, column in [(0, 0), (5, 3)]:
        ys, xs = grad[:, row].tolist(), x[:, column].tolist()
        starts = range(0, tokens, GRANULE)
        leaves = [chain(ys[at : at + GRANULE], xs[at : at + GRANULE]) for at in starts]
        assert got[row, column].item() == by_tree(leaves)


def test_halves_of_a_batch_are_subtrees():
    grad, x = numbers(8 * GRANULE, 6), numbers(8 * GRANULE, 4, seed=1)
    whole = weight_product(grad, x)
    for pieces in (2, 4, 8):
        parts = zip(grad.chunk(pieces), x.chunk(pieces), strict=True)
        assert torch.equal(tree(weight_product(*each) for each in parts), whole)


@pytest.mark.parametrize("count", [1, 2, 3, 5, 6, 7, 8, 13])
def test_the_trees_are_law_twos(count):
    leaves = numbers(count, 3)
    expected = torch.tensor([by_tree(leaves[:, column].tolist()) for column in range(3)])
    assert torch.equal(tree(leaf.clone() for leaf in leaves), expected)
    assert torch.equal(fold(leaves), expected)
    assert torch.equal(fold(leaves.t(), dim=1), expected)
    apart = count & -count
    assert torch.equal(fold(fold(leaves, leaves=apart)), expected)


@pytest.mark.parametrize("width", [8, 64, 100, 1024, 1500, 5000])
def test_the_sum_of_a_row_does_not_depend_on_other_rows(width):
    x = numbers(203, width)
    whole = row_sum(x)
    for rows in (slice(0, 1), slice(1, 4), slice(7, 203), slice(5, 21)):
        assert torch.equal(row_sum(x[rows]), whole[rows])
    gaps = torch.stack((x, x), dim=-1)[..., 0]
    assert torch.equal(row_sum(gaps[:4]), whole[:4])


@pytest.mark.parametrize("name", ACTIVATIONS)
def test_a_function_of_an_element_does_not_depend_on_its_place(name):
    x = numbers(70_003)

    def value_and_gradient(piece: torch.Tensor) -> tuple[torch.Tensor, torch.Tensor]:
        piece = piece.clone().requires_grad_()
        value = ACTIVATIONS[name](piece)
        value.backward(piece.detach())
        return value.detach(), piece.grad

    whole = value_and_gradient(x)
    for piece in (slice(0, 7), slice(1, 34), slice(5, 50_001), slice(11, 59)):
        for part, all_of_it in zip(value_and_gradient(x[piece]), whole, strict=True):
            assert torch.equal(part, all_of_it[piece])
    gaps = torch.stack((x, x), dim=1)[:, 0]
    assert torch.equal(ACTIVATIONS[name](gaps), whole[0])


def test_a_tables_gradient_is_the_tree_over_all_tokens():
    tokens, rows = 24, 5
    ids = torch.randint(rows - 1, (tokens,), generator=torch.Generator().manual_seed(0))
    values = numbers(tokens, 3)
    got = sum_by_row(ids, values, rows)
    for row in range(rows):
        leaves = torch.where((ids == row)[:, None], values, 0.0)
        expected = [by_tree(leaves[:, column].tolist()) for column in range(3)]
        assert got[row].tolist() == expected


def attention_and_gradients(query, key, value, grad, **how):
    inputs = [x.clone().requires_grad_() for x in (query, key, value)]
    mixed = ChainAttention(**how)(*inputs, scale=0.3, dropout=0.0)
    mixed.backward(grad)
    return mixed.detach(), *(x.grad for x in inputs)


def test_attention_is_softmax_over_the_tokens_before():
    query, key, value, grad = (
        numbers(2, 150, heads, 8, seed=heads).clamp(-2, 2) for heads in (4, 2, 2, 4)
    )
    for window in (None, 5, 140):
        got = attention_and_gradients(query, key, value, grad, window=window)
        inputs = [x.double().requires_grad_() for x in (query, key, value)]
        q, k, v = (x.transpose(1, 2) for x in inputs)
        place = torch.arange(150)
        distance = place[:, None] - place
        mask = (distance >= 0) & (distance < (window or 1000))
        expected = torch.nn.functional.scaled_dot_product_attention(
            q, k, v, attn_mask=mask, scale=0.3, enable_gqa=True
        ).transpose(1, 2)
        expected.backward(grad.double())
        for ours, theirs in zip(got, (expected, *(x.grad for x in inputs)), strict=True):
            torch.testing.assert_close(ours.double(), theirs.detach(), rtol=1e-4, atol=1e-4)


def test_a_row_of_attention_is_a_sum_over_chunks_of_keys_in_order():
    query, key, value = (numbers(1, 200, 1, 8, seed=seed).clamp(-2, 2) for seed in range(3))
    mixed = ChainAttention()(query, key, value, scale=0.5, dropout=0.0)
    q, k, v = (x[0, :, 0] for x in (query, key, value))
    for row in (0, 130, 199):
        scores = [chain(q[row].tolist(), k[at].tolist()) * 0.5 for at in range(row + 1)]
        exponentials = (torch.tensor(scores) - max(scores)).exp().tolist()
        total = chunks(exponentials, [1.0] * (row + 1))
        expected = chunks(exponentials, v[: row + 1, 3].tolist())
        assert mixed[0, row, 0, 3].item() == single(expected / total)


def test_attention_depends_on_neither_batch_nor_padding_nor_packing_nor_other_heads():
    length, after = 70, 90
    query, key, value, grad = (
        numbers(3, length + after, heads, 8, seed=heads).clamp(-2, 2) for heads in (4, 2, 2, 4)
    )
    grad[:, length:] = 0.0  # what comes after is padding
    padded = attention_and_gradients(query, key, value, grad)
    alone = [x[1:2, :length] for x in (query, key, value, grad)]
    expected = attention_and_gradients(*alone)
    for got, want in zip(padded, expected, strict=True):
        assert torch.equal(got[1:2, :length], want)
    # In a packed row it begins at token 37, after another document.
    packed = [torch.cat((x[:1, :37], y), dim=1) for x, y in zip((query, key, value, grad), alone,
                                                               strict=True)]  # fmt: skip
    runs = torch.cat((torch.zeros(37), torch.ones(length)))[None].long()
    for got, want in zip(attention_and_gradients(*packed, runs=runs), expected, strict=True):
        assert torch.equal(got[:, 37:], want)
    half = [x[:, :, : x.shape[2] // 2] for x in alone]
    for got, want in zip(attention_and_gradients(*half), expected, strict=True):
        assert torch.equal(got, want[:, :, : got.shape[2]])


def test_what_has_no_chains_is_refused_by_name():
    with pytest.raises(NotImplementedError, match="float64"):
        product(torch.ones(2, 3).double(), torch.ones(3, 2).double())
    with pytest.raises(ValueError, match=r"tp 4 does not divide"):
        cut_blocks((6,), ranks=4)
