"""Matrix products and sums whose bits do not depend on what else is computed with them.

An element of a product is a sum over the inner dimension, and a library chooses the order of that
sum by the shapes of the operands. So a row's result changes with the number of rows beside it, and
a sum that is cut over ranks changes with their number. Here the order is fixed:

- The inner dimension is cut into blocks, a power of two of them, and the blocks' results are added
  in the tree of law 2. Ranks of tensor parallelism hold whole blocks, next to each other, so the
  ordered sum over them is the upper part of the same tree.
- A block is cut into chunks of `CHUNK` elements, which are added one after the other.
- A chunk is a chain of fused multiply-adds, from the first element to the last.

See Note [A product as a chain].
"""

from collections.abc import Iterable, Iterator, Sequence

import torch
import torch.nn.functional as F
from torch import Tensor

CHUNK = 128
"""Elements of the inner dimension that are one chain of fused multiply-adds."""

GRANULE = 64
"""Tokens whose part of a weight's gradient is one chain."""

BLOCKS = 8
"""The most blocks of an inner dimension, and so the most ranks of tensor parallelism."""

_FEWEST = 16

# Note [A product as a chain]
# MKL's `sgemm` has kernels that keep an element of the result in a register and add one product
# after the other with a fused multiply-add. So an element is a chain, whatever the number of rows,
# columns and threads. This holds for inner dimensions up to 192; from 256 on MKL cuts them by the
# shapes. With fewer than 4 rows or 16 columns it takes other kernels, so small operands are padded.
# If a result is added to (`addmm_`), the chain starts at zero and is added at its end. A chain of
# one element is the exception: with AVX-512 `addmm_` rounds such a product once with its sum, and
# `baddbmm_` rounds it twice, so it is multiplied and added apart. All of this is measured, not
# promised: tests/test_invariant_sums.py compares with chains written in Python.


Block = tuple[slice, ...]
"""Pieces of an inner dimension that are added one after the other."""


def tree(leaves: Iterable[Tensor]) -> Tensor:
    """Add tensors in the tree of law 2, in place; few of them exist at a time.

    The leaves come one by one. Sums of equally many leaves are added at once, as in a binary
    counter, so that about log2(leaves) sums exist.
    """
    sums: list[tuple[int, Tensor]] = []
    for leaf in leaves:
        size = 1
        while sums and sums[-1][0] == size:
            leaf = sums.pop()[1].add_(leaf)
            size *= 2
        sums.append((size, leaf))
    while len(sums) > 1:
        _, right = sums.pop()
        size, left = sums.pop()
        sums.append((size, left.add_(right)))
    return sums[0][1]


def fold(x: Tensor, dim: int = 0, leaves: int | None = None) -> Tensor:
    """Add a dimension's elements in the tree of law 2: `dim` is gone.

    With `leaves`, only runs of that many neighbours are added, which must be a power of two that
    divides the dimension: `dim` is shorter by that factor.
    """
    x = x.movedim(dim, 0)
    goal = 1 if leaves is None else x.shape[0] // leaves
    while x.shape[0] > goal:
        pairs = x.shape[0] // 2
        added = x[0 : 2 * pairs : 2] + x[1 : 2 * pairs : 2]
        x = torch.cat((added, x[2 * pairs :])) if x.shape[0] % 2 else added
    return x[0] if leaves is None else x.movedim(0, dim)


def row_sum(x: Tensor) -> Tensor:
    """Sum each row `[..., width]` in one order: `[..., 1]`, in float32.

    A row is cut into runs of 1,024 elements. torch adds one run in an order that depends on its
    length alone, and the runs are added in the tree. On a GPU torch's order depends on the number
    of rows too, so all of a row is added in the tree.
    """
    width, run = x.shape[-1], 1024
    if x.is_cuda:
        return fold(x, dim=-1).unsqueeze(-1)
    if width <= run:
        return x.contiguous().sum(dim=-1, keepdim=True)
    whole = width - width % run
    sums = torch.unflatten(x[..., :whole], -1, (-1, run)).contiguous().sum(dim=-1)
    if whole < width:
        rest = x[..., whole:].contiguous().sum(dim=-1, keepdim=True)
        sums = torch.cat((sums, rest), dim=-1)
    return fold(sums, dim=-1).unsqueeze(-1)


def blocks_of(widths: Sequence[int]) -> int:
    """The number of blocks of a dimension that consists of fused parts of these widths."""
    blocks = BLOCKS
    while any(width % blocks for width in widths):
        blocks //= 2
    return blocks


def cut_blocks(widths: Sequence[int], ranks: int = 1) -> tuple[Block, ...]:
    """Cut a rank's piece of a dimension into its blocks.

    Of parts that are fused in the dimension, a block holds a piece of each, as a rank does.

    Args:
        widths: of the fused parts, over all ranks.
        ranks: of tensor parallelism; each holds a piece of each part.

    Raises:
        ValueError: if the ranks do not divide the number of blocks.

    Examples:
        >>> cut_blocks([16, 8], ranks=4)[0]
        (slice(0, 2, None), slice(4, 5, None))
    """
    blocks = blocks_of(widths)
    if blocks % ranks:
        raise ValueError(
            f"invariant=True cuts an inner dimension of {sum(widths)} (parts {tuple(widths)}) into "
            f"{blocks} blocks, and tp {ranks} does not divide that: take a tp of 1, 2, ... "
            f"{blocks}, or widths that a higher power of two divides (at most {BLOCKS})"
        )
    local = []
    for block in range(blocks // ranks):
        pieces, start = [], 0
        for width in widths:
            piece = width // blocks
            first = start + block * piece
            pieces.append(slice(first, first + piece))
            start += width // ranks
        local.append(tuple(pieces))
    return tuple(local)


def product(left: Tensor, right: Tensor, blocks: Sequence[Block] | None = None) -> Tensor:
    """`left @ right` in float32, in the order that this file describes.

    Args:
        left: `[m, k]`, or a batch `[b, m, k]`.
        right: `[k, n]`, or `[b, k, n]`.
        blocks: of the inner dimension, to be added in the tree; None is one block.

    Returns:
        `[m, n]` or `[b, m, n]`, float32 for operands in float32, bfloat16 and float16.

    Raises:
        NotImplementedError: for operands in float64.
    """
    _require_float32(left)
    rows, columns, inner = left.shape[-2], right.shape[-1], left.shape[-1]
    if min(rows, columns, inner) == 0:
        return left.new_zeros(*left.shape[:-1], columns, dtype=torch.float32)
    if left.is_cuda:
        return _on_a_gpu(left, right, blocks)
    left = F.pad(left.float(), (0, 0, 0, max(_FEWEST - rows, 0)))
    right = F.pad(right.float(), (0, max(_FEWEST - columns, 0)))
    cut = [(slice(0, inner),)] if blocks is None else blocks
    total = tree(_one_after_the_other(left, right, block) for block in cut)
    return total[..., :rows, :columns]


def weight_product(grad: Tensor, x: Tensor) -> Tensor:
    """`grad.T @ x` over tokens, a chain for each granule, granules in the tree: float32.

    Args:
        grad: `[tokens, out]`, the tokens in the order of the batch.
        x: `[tokens, in]`.

    Returns:
        `[out, in]`.
    """
    if not len(grad):
        return product(grad.t(), x)
    return tree(granules(grad, x))


def granules(grad: Tensor, x: Tensor) -> Iterator[Tensor]:
    """The leaves of `weight_product`, one for each `GRANULE` of tokens."""
    for start in range(0, len(grad), GRANULE):
        each = slice(start, start + GRANULE)
        # Contiguous, as the padding of small products is cut off.
        yield product(grad[each].t(), x[each]).contiguous()


def _one_after_the_other(left: Tensor, right: Tensor, block: Block) -> Tensor:
    """Add the chains of a block's chunks."""
    first, *others = [
        slice(start, min(start + CHUNK, piece.stop))
        for piece in block
        for start in range(piece.start, piece.stop, CHUNK)
    ]
    total = torch.matmul(left[..., first], right[..., first, :])
    for chunk in others:
        factors = left[..., chunk], right[..., chunk, :]
        if chunk.stop - chunk.start == 1:
            total.add_(factors[0] * factors[1])
        elif total.ndim == 2:
            total.addmm_(*factors)
        else:
            total.baddbmm_(*factors)
    return total


def _on_a_gpu(left: Tensor, right: Tensor, blocks: Sequence[Block] | None) -> Tensor:
    """The same in the same order, by a kernel with tiles of one shape."""
    from lamina.models.invariance.chain_kernel import add_chains  # needs Triton

    batched = left.ndim == 3
    left, right = (x.float() if batched else x.float()[None] for x in (left, right))
    shape = left.shape[0], left.shape[1], right.shape[2]

    def leaves() -> Iterator[Tensor]:
        for block in blocks or [(slice(0, left.shape[2]),)]:
            total = left.new_empty(shape, dtype=torch.float32)
            add_chains(left, right, block, CHUNK, total)
            yield total

    total = tree(leaves())
    return total if batched else total[0]


def _require_float32(x: Tensor) -> None:
    if x.dtype == torch.float64:
        raise NotImplementedError(
            "invariant=True has products in float32 (of float32, bfloat16 and float16), and this "
            "one is in float64, whose kernels depend on the shape: take float32"
        )
