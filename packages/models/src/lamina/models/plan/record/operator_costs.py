"""What an operator costs by its arguments: operations of a product, and bytes read and written."""

from __future__ import annotations

from collections.abc import Callable, Mapping
from typing import Any

from torch import Tensor


def tensors_in(tree: Any) -> list[Tensor]:
    """The tensors among an operator's arguments or results, which are lists and dicts at most."""
    if isinstance(tree, Tensor):
        return [tree]
    if isinstance(tree, dict):
        tree = list(tree.values())
    if not isinstance(tree, list | tuple):
        return []
    # Most are tensors or numbers. A call for each of these would be most of the time.
    leaves = []
    for part in tree:
        if isinstance(part, Tensor):
            leaves.append(part)
        elif isinstance(part, list | tuple | dict):
            leaves += tensors_in(part)
    return leaves


def cost_of(
    schema: Any,
    args: tuple[Any, ...],
    kwargs: Mapping[str, Any],
    results: list[Tensor],
    inputs: list[Tensor],
) -> tuple[float, int, tuple[int, ...], int]:
    """Operations of a product, bytes read and written, the product's shape and element width."""
    name = schema.name.removeprefix("aten::")
    nbytes = _bytes_moved(name, schema, args, kwargs, results, inputs)
    product = _PRODUCTS.get(name)
    if product is None:
        return 0.0, nbytes, (), 2
    flops, shape = product(args, kwargs)
    # A product of bf16 may be added to fp32, and takes the time of bf16.
    factors = [each for each in inputs if each.ndim >= 2 and each.is_floating_point()]
    width = min((each.element_size() for each in factors), default=2)
    return flops, nbytes, shape, width


_PICKS = frozenset({"index_select", "gather", "index", "embedding"})
"""Operators that read of their source what they return, however large it is."""
_ADDS = frozenset({"index_add_", "index_put_", "index_copy_", "scatter_", "scatter_add_"})
"""Operators that change of their target as much as their last tensor has."""
_OVERWRITES = frozenset(
    "copy_ zero_ fill_ normal_ uniform_ random_ bernoulli_ _foreach_copy_ _foreach_zero_".split()
)
"""Operators in place that do not read what they change."""


def _bytes_moved(
    name: str,
    schema: Any,
    args: tuple[Any, ...],
    kwargs: Mapping[str, Any],
    results: list[Tensor],
    inputs: list[Tensor],
) -> int:
    """Bytes that a kernel reads and writes."""
    if name in _PICKS:
        return 2 * nbytes_of(results) + nbytes_of(inputs[1:])
    if name in _ADDS:
        return 3 * nbytes_of(inputs[-1:]) + nbytes_of(inputs[1:-1])
    changed, unread = [], []
    for position, argument in enumerate(schema.arguments):
        if argument.alias_info is None or not argument.alias_info.is_write:
            continue
        value = args[position] if position < len(args) else kwargs.get(argument.name)
        changed += tensors_in(value)
        if argument.kwarg_only or name in _OVERWRITES:  # an `out`
            unread += tensors_in(value)
    left_out = {id(tensor) for tensor in unread}
    read = [tensor for tensor in inputs if id(tensor) not in left_out]
    return nbytes_of(read) + nbytes_of([*results, *changed])


def nbytes_of(tensors: list[Tensor]) -> int:
    """Bytes of different tensors. An expanded one has no more than its storage."""
    sizes = {
        id(tensor): min(tensor.numel() * tensor.element_size(), tensor.untyped_storage().nbytes())
        for tensor in tensors
    }
    return sum(sizes.values())


def _matrix(left: int) -> Callable[[Any, Any], tuple[float, tuple[int, ...]]]:
    """The product of two matrices (or two stacks of them) that are arguments `left` and next."""

    def count(args: Any, kwargs: Any) -> tuple[float, tuple[int, ...]]:
        first, second = args[left], args[left + 1]
        batch = first.shape[0] if first.ndim == 3 else 1
        rows, inner, columns = first.shape[-2], first.shape[-1], second.shape[-1]
        return 2.0 * batch * rows * inner * columns, (batch, rows, columns, inner)

    return count


def _groups(args: Any, kwargs: Any) -> tuple[float, tuple[int, ...]]:
    """Products of experts: each row of the left meets one matrix, or rows are the inner sum."""
    first, second = args[0], args[1]
    rows, inner, columns = first.shape[-2], first.shape[-1], second.shape[-1]
    groups = second.shape[0] if second.ndim == 3 else 1
    batch = first.shape[0] if first.ndim == 3 else 1
    return 2.0 * batch * rows * inner * columns, (max(groups, 1), rows, columns, inner)


def _attention(times: float, heads_first: bool = True) -> Callable[[Any, Any], Any]:
    """Flash attention: `times` products of scores' size, of which a causal kernel skips half."""

    def count(args: Any, kwargs: Any) -> tuple[float, tuple[int, ...]]:
        query, key, value = args[:3] if times == 2.0 else args[1:4]
        batch, heads, rows, width = query.shape
        columns, wide = key.shape[-2], value.shape[-1]
        flags = [each for each in (*args, *kwargs.values()) if isinstance(each, bool)]
        share = 0.5 if any(flags) and rows == columns else 1.0
        pairs = batch * heads * rows * columns * share
        return times * pairs * (width + wide), (batch * heads, rows, columns, width)

    return count


def _efficient_attention(times: float, causal: int) -> Callable[[Any, Any], Any]:
    """The kernel that takes fp32; `causal` is the argument that says so."""

    def count(args: Any, kwargs: Any) -> tuple[float, tuple[int, ...]]:
        flags = args[causal:] or (kwargs.get("is_causal", False),)
        tensors = args[:3] if times == 2.0 else args[:4]
        counted: tuple[float, tuple[int, ...]] = _attention(times)((*tensors, bool(flags[0])), {})
        return counted

    return count


def _varlen_attention(times: float) -> Callable[[Any, Any], Any]:
    """Sequences one behind the other, `[tokens, heads, width]`: each token sees half of its own, or
    its window.
    """

    def count(args: Any, kwargs: Any) -> tuple[float, tuple[int, ...]]:
        query, _, value = args[:3] if times == 2.0 else args[1:4]
        longest = args[6] if times == 2.0 else args[9]
        sizes = [each for each in (*args, *kwargs.values()) if isinstance(each, list | tuple)]
        before = sizes[0][0] if sizes else -1
        partners = longest / 2 if before < 0 else min(before + 1, longest / 2)
        (tokens, heads, width), wide = query.shape, value.shape[-1]
        return times * tokens * heads * partners * (width + wide), (
            heads,
            tokens,
            int(partners),
            width,
        )

    return count


_PRODUCTS: dict[str, Callable[[Any, Any], tuple[float, tuple[int, ...]]]] = {
    "mm": _matrix(0),
    "bmm": _matrix(0),
    "addmm": _matrix(1),
    "addmm_": _matrix(1),
    "baddbmm": _matrix(1),
    "baddbmm_": _matrix(1),
    "_scaled_mm": _matrix(0),
    "_scaled_mm_v2": _matrix(0),
    "_grouped_mm": _groups,
    "_scaled_dot_product_flash_attention": _attention(2.0),
    "_scaled_dot_product_flash_attention_for_cpu": _attention(2.0),
    "_scaled_dot_product_flash_attention_backward": _attention(5.0),
    "_scaled_dot_product_flash_attention_for_cpu_backward": _attention(5.0),
    "_scaled_dot_product_efficient_attention": _efficient_attention(2.0, 6),
    "_scaled_dot_product_efficient_attention_backward": _efficient_attention(5.0, 11),
    "torch_attn::_varlen_attn": _varlen_attention(2.0),
    "torch_attn::_varlen_attn_backward": _varlen_attention(5.0),
}
"""Operators that multiply. The backward of flash attention computes the scores again: 5 products
beside the forward's 2 (Dao, 2023)."""
