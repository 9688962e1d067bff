"""What a ShardedTensor does with each aten operation: pointwise families, or a named refusal."""

from __future__ import annotations

from collections.abc import Iterator, Sequence
from typing import TYPE_CHECKING, Any, NoReturn

import torch

from lamina.buffers.tensors import span_moves, span_norms, span_reductions
from lamina.buffers.tensors.handlers import Handler
from lamina.buffers.tensors.span_spec import SpanSpec

if TYPE_CHECKING:
    from lamina.buffers.tensors.sharded_tensor import ShardedTensor

__all__ = ["dispatch"]


_SPECIAL: dict[torch._ops.OpOverload, Handler] = {
    **span_moves.HANDLERS,
    **span_reductions.HANDLERS,
    **span_norms.HANDLERS,
}

# Tagged pointwise by torch, but not one element at a time.
_NOT_POINTWISE = frozenset({"aten::equal"})

# torch._foreach_*: those that work element by element.
_FOREACH = frozenset(
    "abs acos add addcdiv addcmul asin atan ceil clamp_max clamp_min clone copy cos cosh div erf "
    "erfc exp expm1 floor frac lerp lgamma log log10 log1p log2 maximum minimum mul neg pow "
    "reciprocal round rsqrt sigmoid sign sin sinh sqrt sub tan tanh trunc zero".split()
)
_FUSED = frozenset({"_fused_adam_", "_fused_adamw_", "_fused_sgd_", "_fused_adagrad_"})

_UNIT = (
    "In a model's forward a weight is whole while the unit that holds it runs: call its module, or "
    "choose the units (fsdp_unit_modules) so that whoever reads it is in the same one"
)
_INSTEAD = {
    "random": "a span's draws would differ from the whole tensor's, and ranks with one seed would "
    "repeat each other: initialise the whole tensor and copy_() it in, or use .to_local()",
    "matrix": "the other operand needs whole rows: use .full_tensor(), or let the unit gather its "
    f"parameters (call the module). {_UNIT}",
    "index": "an index names elements that other ranks may hold: use .full_tensor()[...], or "
    f".to_local() with .start and .stop. {_UNIT}",
    "other": "use .full_tensor() for the whole (collective), or .to_local() for this rank's span",
}
_TRANSPOSE = frozenset({"t", "transpose", "permute", "numpy_T"})  # what F.linear does first
_MATRIX = ("mm", "matmul", "addmm", "bmm", "linear", "conv", "embedding", "einsum", "addmv", "mv")
_INDEX = ("select", "slice", "index", "gather", "scatter", "narrow", "split", "unbind", "diagonal")


def dispatch(
    cls: type[ShardedTensor],
    func: torch._ops.OpOverload,
    args: tuple[Any, ...],
    kwargs: dict[str, Any],
) -> Any:
    """Run `func` on spans. Called by torch below autograd.

    Raises:
        NotImplementedError: the operation can't be right on a span; says what to call instead.
        ValueError: operands are cut differently.
    """
    special = _SPECIAL.get(func)
    if special is not None:
        return special(cls, func, args, kwargs)
    schema = func._schema
    name = schema.name.removeprefix("aten::")
    if name.startswith("_foreach_"):
        if name.removeprefix("_foreach_").removesuffix("_") in _FOREACH:
            return _lists(cls, func, args, kwargs)
    elif name in _FUSED:
        return _lists(cls, func, args, kwargs)
    elif (
        torch.Tag.pointwise in func.tags
        and torch.Tag.nondeterministic_seeded not in func.tags
        and schema.name not in _NOT_POINTWISE
    ) or name in _UNTAGGED_POINTWISE:
        return _pointwise(cls, func, args, kwargs)
    return refuse(cls, func, args)


# Pointwise in fact, without torch's tag.
_UNTAGGED_POINTWISE = frozenset(
    {
        "fill_",
        "fill",
        "masked_fill_",
        "rsub",
        "floor_divide",
        "zero_",
        "isclose",
        "floor_divide_",
        "conj",
        "_conj",
        "resolve_conj",
    }
)


def refuse(
    cls: type[ShardedTensor], func: torch._ops.OpOverload, args: tuple[Any, ...]
) -> NoReturn:
    """Raise NotImplementedError that names the operation, the tensor and the remedy."""
    name = func._schema.name.removeprefix("aten::")
    bare = name.strip("_")
    if torch.Tag.nondeterministic_seeded in func.tags:
        kind = "random"
    elif bare.startswith(_MATRIX) or bare in _TRANSPOSE:
        kind = "matrix"
    elif bare.startswith(_INDEX):
        kind = "index"
    else:
        kind = "other"
    first = next(_sharded(cls, args), None)
    shape = "" if first is None else f" of shape {list(first.shape)} ({first._spec.where()})"
    raise NotImplementedError(f"{func} of a ShardedTensor{shape}: {_INSTEAD[kind]}")


def _sharded(cls: type[ShardedTensor], values: Sequence[Any]) -> Iterator[ShardedTensor]:
    for value in values:
        if isinstance(value, cls):
            yield value
        elif isinstance(value, list | tuple):
            yield from _sharded(cls, value)


def _pointwise(
    cls: type[ShardedTensor],
    func: torch._ops.OpOverload,
    args: tuple[Any, ...],
    kwargs: dict[str, Any],
) -> Any:
    spec = next(_sharded(cls, (*args, *kwargs.values())))._spec
    result = func(
        *(local_of(cls, func, value, spec) for value in args),
        **{key: local_of(cls, func, value, spec) for key, value in kwargs.items()},
    )
    return _returned(cls, func, args, kwargs, result, spec)


def _returned(
    cls: type[ShardedTensor],
    func: torch._ops.OpOverload,
    args: tuple[Any, ...],
    kwargs: dict[str, Any],
    result: Any,
    spec: SpanSpec,
) -> Any:
    """Hand back the written arguments of in-place and out= forms, new wrappers otherwise."""
    written = [
        args[place] if place < len(args) else kwargs[argument.name]
        for place, argument in enumerate(func._schema.arguments)
        if argument.alias_info is not None and argument.alias_info.is_write
    ]
    if written:
        return written[0] if len(written) == 1 else tuple(written)
    if isinstance(result, tuple | list):
        return type(result)(cls._wrap(one, spec) for one in result)
    return cls._wrap(result, spec)


def local_of(
    cls: type[ShardedTensor], func: torch._ops.OpOverload, value: Any, spec: SpanSpec
) -> Any:
    """An operand as it meets spans of `spec`: a span of the same cut, or a value for all elements.

    Raises:
        ValueError: another ShardedTensor that is cut differently, or a plain tensor whose elements
            can't be told to belong to this span.
    """
    if isinstance(value, cls):
        if not spec.matches(value._spec):
            raise ValueError(
                f"{func}: operands are cut differently: shape {list(spec.shape)} span "
                f"{spec.start}..{spec.stop}, and shape {list(value._spec.shape)} span "
                f"{value._spec.start}..{value._spec.stop}. Both must come from one layout; "
                "broadcasting between ShardedTensors is not supported: use .full_tensor()"
            )
        return value._local
    if not isinstance(value, torch.Tensor):
        return value
    if value.dim() == 0:
        if not spec.shape:
            # As 0-d operands of the whole would, both take part in type promotion.
            return value.reshape(1)[: spec.local_numel]
        return value
    if value.shape == spec.shape and not any(
        stride for stride, size in zip(value.stride(), value.shape, strict=True) if size > 1
    ):
        # One value for every element, as autograd makes of an expanded scalar.
        return value.as_strided((spec.local_numel,), (0,))
    raise ValueError(
        f"{func}: a plain tensor of shape {list(value.shape)} meets a ShardedTensor of shape "
        f"{list(spec.shape)}, of which this rank holds {spec.start}..{spec.stop}: which of its "
        "elements belong here is not known. Use a Python scalar or a 0-d tensor, make the operand "
        "a ShardedTensor (torch.zeros_like(t).copy_(whole)), or work on .to_local()"
    )


def _lists(
    cls: type[ShardedTensor],
    func: torch._ops.OpOverload,
    args: tuple[Any, ...],
    kwargs: dict[str, Any],
) -> Any:
    """Foreach and fused optimizer kernels: the i-th tensors of all lists belong together."""
    every = [*args, *kwargs.values()]
    lists = [value for value in every if _is_tensor_list(value)]
    specs = _specs_by_place(cls, func, lists)
    fused = func._schema.name.startswith("aten::_fused")

    def unwrap(value: Any) -> Any:
        if not _is_tensor_list(value):
            return value
        return [
            one._local
            if type(one) is cls and one._spec is spec  # by far the most common
            # A fused kernel reads step counts as numbers, whatever its tensors' shapes.
            else one
            if spec is None or (fused and not isinstance(one, cls))
            else local_of(cls, func, one, spec)
            for one, spec in zip(value, specs, strict=False)
        ]

    result = func(
        *(unwrap(value) for value in args), **{key: unwrap(value) for key, value in kwargs.items()}
    )
    if not isinstance(result, list | tuple):
        return result
    return [
        one if spec is None else cls._wrap(one, spec)
        for one, spec in zip(result, specs, strict=True)
    ]


def _is_tensor_list(value: Any) -> bool:
    return isinstance(value, list | tuple) and any(isinstance(one, torch.Tensor) for one in value)


def _specs_by_place(
    cls: type[ShardedTensor], func: torch._ops.OpOverload, lists: Sequence[Sequence[Any]]
) -> list[SpanSpec | None]:
    specs: list[SpanSpec | None] = [None] * max(len(values) for values in lists)
    for values in lists:
        for place, value in enumerate(values):
            if specs[place] is None and isinstance(value, cls):
                specs[place] = value._spec
    if lists and any(isinstance(one, cls) for one in lists[0]):
        return specs
    if func._schema.arguments[0].alias_info is not None:
        raise ValueError(
            f"{func}: the tensors written are plain and other operands are ShardedTensors: use "
            ".to_local() or .full_tensor() of the latter"
        )
    return specs
