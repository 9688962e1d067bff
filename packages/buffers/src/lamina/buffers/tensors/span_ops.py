"""What a ShardedTensor does with each aten operation: pointwise families, or a named refusal."""

from collections.abc import Iterable, Iterator, Sequence
from itertools import zip_longest
from typing import Any, NoReturn

import torch

from lamina.buffers.compat import OpOverload, current_graph_task_id
from lamina.buffers.tensors import span_moves, span_reductions
from lamina.buffers.tensors.span_tensor import Handler, SpanSpec, SpanTensor

_SPECIAL: dict[OpOverload, Handler] = {**span_moves.HANDLERS, **span_reductions.HANDLERS}

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
    "In a model a weight is whole while the unit that holds it runs: call that module itself, and "
    "not its .forward; before calling another method of it, register_forward_method(module, name); "
    "or choose the units (fsdp_unit_modules) so that what is called, or reads the weight, is one"
)
_INSTEAD = {
    "random": "a span's draws would differ from the whole tensor's, and ranks with one seed would "
    "repeat each other: initialise the whole tensor and copy_() it in, or use .to_local()",
    "matrix": "the other operand needs whole rows: use .full_tensor(), or let the unit gather its "
    f"parameters (call the module). {_UNIT}",
    "index": "an index names elements that other ranks may hold: use .full_tensor()[...], or "
    f".to_local() with .start and .stop. {_UNIT}",
    "other": "use .full_tensor() for the whole (collective), or .to_local() for this rank's span. "
    f"{_UNIT}",
}
_TRANSPOSE = frozenset({"t", "transpose", "permute", "numpy_T"})  # what F.linear does first
_MATRIX = ("mm", "matmul", "addmm", "bmm", "linear", "conv", "embedding", "einsum", "addmv", "mv")
_INDEX = ("select", "slice", "index", "gather", "scatter", "narrow", "split", "unbind", "diagonal")


def dispatch(func: OpOverload, args: tuple[Any, ...], kwargs: dict[str, Any]) -> Any:
    """Run `func` on spans. Called by torch below autograd.

    NotImplementedError says what to call for an operation that cannot be right on a span,
    ValueError that operands are cut differently.
    """
    special = _SPECIAL.get(func)
    if special is not None:
        return special(func, *args, **kwargs)
    # torch tags what works element by element, so operations that nobody has listed work as well.
    schema = func._schema
    name = schema.name.removeprefix("aten::")
    if name.startswith("_foreach_"):
        if name.removeprefix("_foreach_").removesuffix("_") in _FOREACH:
            return _lists(func, args, kwargs)
    elif name in _FUSED:
        return _lists(func, args, kwargs)
    elif (
        torch.Tag.pointwise in func.tags
        and torch.Tag.nondeterministic_seeded not in func.tags
        and schema.name not in _NOT_POINTWISE
    ) or name in _UNTAGGED_POINTWISE:
        return _pointwise(func, args, kwargs)
    elif name in _FILLS and not any(axis.apart for axis in args[0]._spec.axes):
        return _draw(func, args, kwargs)
    elif name == "slice" and _takes_all(func, args, kwargs):
        return args[0]._with(args[0]._local.view(-1))
    return refuse(func, args)


def _takes_all(func: OpOverload, args: tuple[Any, ...], kwargs: dict[str, Any]) -> bool:
    """Whether a slice leaves nothing out, as `t[:]` and `t[::1]`. A slice changes no order."""
    meta = torch.empty(args[0].shape, device="meta")
    return bool(func(meta, *args[1:], **kwargs).shape == args[0].shape)


_FILLS = frozenset({"normal_", "uniform_"})
"""What initialisers draw. Another axis must not have cut the tensor (an axis' `apart`)."""


def _draw(func: OpOverload, args: tuple[Any, ...], kwargs: dict[str, Any]) -> Any:
    """Draw the whole tensor, as one process would, and keep this rank's span of it.

    Ranks whose generators are in the same state make the tensor of one process together.
    """
    first, spec = args[0], args[0]._spec
    whole = torch.empty(spec.shape, dtype=first.dtype, device=first._local.device)
    func(whole, *args[1:], **kwargs)
    first._local.copy_(whole.view(-1)[spec.start : spec.stop])
    return first


# Pointwise in fact, without torch's tag: some forms in place lack that of their other form.
_UNTAGGED_POINTWISE = frozenset(
    "fill_ fill masked_fill_ rsub floor_divide floor_divide_ zero_ isclose conj _conj "
    "resolve_conj abs_ copysign_ eq_ ge_ gelu_ gt_ heaviside_ le_ lt_ mish_ ne_ threshold_ "
    "true_divide_".split()
)


def refuse(func: OpOverload, args: tuple[Any, ...]) -> NoReturn:
    """Raise NotImplementedError that names the operation, the tensor and the remedy."""
    name = func._schema.name.removeprefix("aten::")
    # In-place forms end with an underscore, and private ones begin with it.
    bare = name.strip("_")
    if torch.Tag.nondeterministic_seeded in func.tags:
        kind = "random"
    elif bare.startswith(_MATRIX) or bare in _TRANSPOSE:
        kind = "matrix"
    elif bare.startswith(_INDEX):
        kind = "index"
    else:
        kind = "other"
    first = next(_spans(args), None)
    shape = "" if first is None else f" of {first._spec.described()}"
    raise NotImplementedError(
        f"{func} of a ShardedTensor{shape}: {_INSTEAD[kind]}. {span_reductions.OPTIMIZER}"
    )


def _spans(values: Iterable[Any]) -> Iterator[SpanTensor]:
    for value in values:
        if isinstance(value, SpanTensor):
            yield value
        elif isinstance(value, list | tuple):
            yield from _spans(value)


def _pointwise(func: OpOverload, args: tuple[Any, ...], kwargs: dict[str, Any]) -> Any:
    first = next(_spans((*args, *kwargs.values())))
    spec = first._spec
    # In a backward, and not where an optimizer or a hook writes something in place.
    backward = current_graph_task_id() != -1 and not func._schema.is_mutable
    operand = _gradient_of if backward and spec.is_cut else local_of
    # In-place and out= forms hand back what they wrote, others make new tensors.
    written = [
        args[place] if place < len(args) else kwargs[argument.name]
        for place, argument in enumerate(func._schema.arguments)
        if argument.alias_info is not None and argument.alias_info.is_write
    ]
    for target in written:
        if not isinstance(target, SpanTensor):
            raise _unplaced(func, target, spec)
    result = func(
        *(operand(func, value, spec) for value in args),
        **{key: operand(func, value, spec) for key, value in kwargs.items()},
    )
    if written:
        return written[0] if len(written) == 1 else tuple(written)
    if isinstance(result, tuple | list):
        return type(result)(first._with(local) for local in result)
    return first._with(result)


def local_of(func: OpOverload, value: Any, spec: SpanSpec) -> Any:
    """An operand as it meets spans of `spec`: a span of the same cut, or a value for all elements.

    ValueError: another ShardedTensor is cut differently, or a plain tensor has elements that cannot
    be told to belong to this span.
    """
    if isinstance(value, SpanTensor):
        spec.must_match(value._spec, func)
        return value._local
    if not isinstance(value, torch.Tensor):
        return value
    if value.dim() == 0:  # beside a 0-d whole, both take part in type promotion
        return value if spec.shape else value.reshape(1)[: spec.local_numel]
    if value.numel() == 1 and value.dim() <= len(spec.shape):
        return value.reshape(1)  # not 0-d: that would leave type promotion to the other operand
    if value.shape == spec.shape and not any(
        stride for stride, size in zip(value.stride(), value.shape, strict=True) if size > 1
    ):
        # One value for every element, as autograd makes of an expanded scalar.
        return value.as_strided((spec.local_numel,), (0,))
    raise _unplaced(func, value, spec)


def _unplaced(func: OpOverload, value: torch.Tensor, spec: SpanSpec) -> ValueError:
    return ValueError(
        f"{func}: a plain tensor of shape {list(value.shape)} meets a ShardedTensor of shape "
        f"{list(spec.shape)}, of which this rank holds {spec.start}..{spec.stop}: which of its "
        "elements belong here is not known. Use a Python scalar or a tensor of one element, make "
        "the operand a ShardedTensor (torch.zeros_like(t).copy_(whole)), take the whole of this "
        "one (.full_tensor(), collective), or work on .to_local()"
    )


def _gradient_of(func: OpOverload, value: Any, spec: SpanSpec) -> Any:
    """`local_of`, in a backward: a plain operand is the mean over the ranks of the spans.

    Note [Gradients of a span]
        A reduction over a ShardedTensor gives each rank the same number, and what ranks compute
        from it may differ (a norm times an activation). So the gradient that comes back to the
        reduction differs too, and each rank's span needs that of all ranks. By convention a span's
        gradient is the mean over the ranks, and whoever sums over ranks multiplies by their number.
        A gradient is still plain, one value for all elements, where it first meets a span. There
        the mean is taken, which leaves constants as they are. (collective)
    """
    operand = local_of(func, value, spec)
    plain = isinstance(value, torch.Tensor) and not isinstance(value, SpanTensor)
    if not plain or not value.is_floating_point():
        return operand
    number = value.as_strided((1,), (1,)).clone()
    communicator = spec.reach("a backward")
    mean = communicator.all_reduce(number, "sum").div_(communicator.size)
    return mean.reshape(()) if operand is value else mean.expand(operand.shape)


def _lists(func: OpOverload, args: tuple[Any, ...], kwargs: dict[str, Any]) -> Any:
    """Foreach and fused optimizer kernels: the i-th tensors of all lists belong together."""
    lists = [value for value in (*args, *kwargs.values()) if _is_tensor_list(value)]
    firsts = _first_spans(func, lists)
    fused = func._schema.name.startswith("aten::_fused")

    def unwrap(value: Any) -> Any:
        """A list of tensors as they meet the spans at their places; other arguments as they are."""
        if not _is_tensor_list(value):
            return value
        return [
            each
            # A fused kernel reads step counts as numbers, whatever its tensors' shapes.
            if first is None or (fused and not isinstance(each, SpanTensor))
            else local_of(func, each, first._spec)
            for each, first in zip(value, firsts, strict=False)
        ]

    # torch's kernels run once over all lists of spans, as fast as over plain tensors.
    result = func(*map(unwrap, args), **{key: unwrap(value) for key, value in kwargs.items()})
    if not isinstance(result, list | tuple):
        return result
    return [
        each if first is None else first._with(each)
        for each, first in zip(result, firsts, strict=True)
    ]


def _is_tensor_list(value: Any) -> bool:
    return isinstance(value, list | tuple) and any(isinstance(each, torch.Tensor) for each in value)


def _first_spans(func: OpOverload, lists: Sequence[Sequence[Any]]) -> list[SpanTensor | None]:
    """At each place of the lists the first span that any of them has there."""
    firsts: list[SpanTensor | None] = [
        next((each for each in place if isinstance(each, SpanTensor)), None)
        for place in zip_longest(*lists)
    ]
    # A span written into a plain tensor would lose where it belongs.
    plain = not any(isinstance(each, SpanTensor) for each in lists[0])
    if plain and func._schema.arguments[0].alias_info is not None:
        raise ValueError(
            f"{func}: the tensors written are plain and other operands are ShardedTensors: use "
            ".to_local() or .full_tensor() of the latter"
        )
    return firsts
