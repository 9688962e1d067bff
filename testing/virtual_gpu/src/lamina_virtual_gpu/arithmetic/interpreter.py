"""What Triton's interpreter (3.8) does wrong, slowly, or not at all, done as a GPU does it.

Casts to bfloat16, float16 and FP8 round to nearest even; FP8 saturates. Operators, reductions and
products of bfloat16 are computed in fp32, where the interpreter takes the bits for integers.
Reductions and scans by a function of the kernel's own take whole slices, not one number after the
other. Functions of libdevice are torch's. Addresses that a kernel loads and stores go to the race
detector, when there is one.
"""

from __future__ import annotations

import functools
import re
from collections.abc import Callable
from types import ModuleType
from typing import Any

import numpy as np
import torch
import triton.language as tl
from triton.runtime import interpreter

from lamina_virtual_gpu.arithmetic.work import touch, watches_races

Handle = interpreter.TensorHandle
TORCH = {
    tl.float8e5: torch.float8_e5m2,
    tl.float8e4nv: torch.float8_e4m3fn,
    tl.bfloat16: torch.bfloat16,
    tl.float16: torch.float16,
    tl.float32: torch.float32,
    tl.float64: torch.float64,
}
NARROW = (tl.bfloat16, tl.float8e5, tl.float8e4nv)  # numpy has no such numbers, only their bits


def widened(data: Any, dtype: Any) -> Any:
    """Return numbers of a narrow type in fp32; others as they are."""
    if dtype not in NARROW:
        return data
    bits = torch.from_numpy(np.ascontiguousarray(data))
    return bits.view(TORCH[dtype]).float().numpy()


def narrowed(data: Any, dtype: Any) -> Any:
    """Return numbers in a type, rounded to nearest even; FP8 stops at its largest number."""
    if dtype not in NARROW:
        return data.astype(interpreter._get_np_dtype(dtype))
    numbers = torch.from_numpy(np.ascontiguousarray(data))
    if dtype is not tl.bfloat16:
        largest = torch.finfo(TORCH[dtype]).max
        numbers = numbers.float().clamp(-largest, largest)
    bits = torch.int16 if dtype is tl.bfloat16 else torch.uint8
    kept = numbers.to(TORCH[dtype]).view(bits).numpy()
    return kept.view(interpreter._get_np_dtype(dtype))


def wide(handle: Any) -> Any:
    """Return the numbers of a handle, in fp32 if they are narrow."""
    return widened(handle.data, handle.dtype.scalar)


def in_wide(method: Callable[..., Any]) -> Callable[..., Any]:
    """Have a method of the builder compute narrow numbers in fp32, and round once."""

    def run(self: Any, *handles: Any) -> Any:
        dtype = handles[0].dtype.scalar
        if dtype not in NARROW:
            return method(self, *handles)
        given = [Handle(wide(x), tl.float32) if isinstance(x, Handle) else x for x in handles]
        out = method(self, *given)
        if out.data.dtype == np.bool_:
            return out
        return Handle(narrowed(out.data, dtype), dtype)

    return run


def cast(self: Any, source: Any, target: Any) -> Any:
    """Every cast between numbers."""
    dtype = target.scalar
    return Handle(narrowed(wide(source), dtype), dtype)


def fp_to_fp(plain: Callable[..., Any]) -> Callable[..., Any]:
    """The cast that a kernel gives a rounding of."""

    def run(self: Any, source: Any, target: Any, rounding: Any) -> Any:
        if rounding == interpreter._ir.ROUNDING_MODE.RTZ:
            return plain(self, source, target, rounding)  # it cuts off
        return cast(self, source, target)

    return run


def dot(self: Any, a: Any, b: Any, d: Any, precision: Any, imprecise: Any) -> Any:
    """A product: each element is a chain of multiply-adds in the type of what it is added to.

    `np.matmul` calls a BLAS, whose kernel for some processors sums the columns of an edge in
    another order than the others. On a GPU an element depends on its row and its column alone.
    """
    left, right = wide(a), wide(b)
    total = d.data
    # The product of two float32 is exact in float64, as within a fused multiply-add.
    exact = np.promote_types(total.dtype, np.float64)
    for k in range(left.shape[-1]):
        product = left[..., k, None].astype(exact) * right[..., k, None, :].astype(exact)
        total = (total + product).astype(total.dtype)
    return Handle(total, d.dtype.scalar)


@functools.cache
def numpy_type(scalar: Any) -> Any:
    """Return what numpy keeps numbers of a scalar type as."""
    return _numpy_type(scalar)


_numpy_type = interpreter._get_np_dtype  # makes a table of all types each time it is asked


def numpy_type_of(dtype: Any) -> Any:
    """Return the same of a scalar, a pointer, or a block of them."""
    element = dtype.element_ty if isinstance(dtype, tl.block_type) else dtype
    return numpy_type(tl.uint64 if isinstance(element, tl.pointer_type) else element)


# ---- functions of libdevice: torch's of that name, or of another one

ELSEWHERE: dict[str, Callable[..., Any]] = {
    "fabs": torch.abs,
    "rint": torch.round,
    "nearbyint": torch.round,
    "round": lambda x: torch.sign(x) * torch.floor(torch.abs(x) + 0.5),
    "fma": lambda x, y, z: torch.addcmul(z, x, y),
    "fmax": torch.fmax,
    "fmin": torch.fmin,
    "fdividef": torch.div,
    "div": torch.div,
    "cbrt": lambda x: torch.sign(x) * torch.abs(x) ** (1 / 3),
    "exp10": lambda x: 10.0**x,
    "finite": torch.isfinite,
    "powi": torch.pow,
    "ilogb": lambda x: torch.frexp(x).exponent - 1,
    "llrint": torch.round,
    "logb": lambda x: (torch.frexp(x).exponent - 1).to(x.dtype),
    "cyl_bessel_i0": torch.special.i0,
    "cyl_bessel_i1": torch.special.i1,
    "normcdf": torch.special.ndtr,
    "normcdfinv": torch.special.ndtri,
    "erfcx": torch.special.erfcx,
}
NAME = re.compile(r"__nv_(?:fast_)?(?P<name>\w+?)(?:_r[nzdu])?$")


def function_of(symbol: str) -> Callable[..., Any]:
    """Return what a symbol such as `__nv_rsqrtf` computes.

    Raises:
        NotImplementedError: torch has no such function.
    """
    match = NAME.match(symbol)
    name = match["name"] if match else symbol
    for word in (name, name.removesuffix("f"), name.removeprefix("d"), name.removeprefix("f")):
        function = ELSEWHERE.get(word) or getattr(torch, word, None)
        if function is None:
            function = getattr(torch.special, word, None)
        if function is not None:
            return function
    raise NotImplementedError(
        f"{symbol} of libdevice has no arithmetic on the virtual GPU.\nAdd what it computes to "
        "`ELSEWHERE` in lamina_virtual_gpu/arithmetic/interpreter.py, or run without VGPU_COMPUTE"
    )


def extern_elementwise(
    self: Any, library: str, path: str, symbol: str, arguments: Any, result: Any, pure: bool
) -> Any:
    """A call of libdevice."""
    given = [torch.from_numpy(np.ascontiguousarray(wide(x))) for x in arguments]
    out = function_of(symbol)(*given)
    return Handle(narrowed(out.numpy(), result.scalar), result.scalar)


def inline_asm(self: Any, assembly: str, *more: Any) -> Any:
    """Assembly of a kernel: nothing here knows what it does."""
    raise NotImplementedError(
        f"the assembly {assembly!r} in a kernel of Triton has no arithmetic on the virtual GPU"
    )


def libdevice(scope: Any, function: Any) -> None:
    """Have the libdevice that a kernel sees call the builder of the interpreter."""
    from triton.language.extra.cuda import libdevice as own

    modules = [x for x in function.__globals__.values() if isinstance(x, ModuleType)]
    for module in modules:
        if not module.__name__.endswith("libdevice"):
            continue
        for name in dir(own):
            if tl.core.is_builtin(getattr(own, name)) and hasattr(module, name):
                scope.set_attr(module, name, bound(getattr(own, name)))


def bound(function: Any) -> Callable[..., Any]:
    """Return a function of libdevice that needs no compiler."""

    def run(*given: Any, **named: Any) -> Any:
        named.pop("_semantic", None)
        return function(*given, **named, _semantic=interpreter.interpreter_semantic)

    return run


# ---- reductions and scans


def folded(self: Any, input: Any) -> list[Any]:
    """Reduce by the kernel's own function: halves are combined until one is left."""
    dtypes = [x.dtype for x in input]
    whole = self.axis is None
    datas = [x.handle.data.reshape(-1) if whole else x.handle.data for x in input]
    axis = 0 if whole else self.axis
    parts = [np.moveaxis(data, axis, 0) for data in datas]
    while (length := parts[0].shape[0]) > 1:
        half = length // 2
        pair = [
            self.to_tensor(p[at : at + half], t)
            for at in (0, half)
            for p, t in zip(parts, dtypes, strict=True)
        ]
        out = self.combine_fn.fn(*pair)
        out = out if isinstance(out, tuple) else (out,)
        parts = [np.concatenate([number_of(new), old[2 * half :]])
                 for new, old in zip(out, parts, strict=True)]  # fmt: skip
    found = [part[0] for part in parts]
    if self.keep_dims:
        shape = [1] * input[0].handle.data.ndim
        found = [x.reshape(shape) if whole else np.expand_dims(x, axis) for x in found]
    return [self.to_tensor(x, t) for x, t in zip(found, dtypes, strict=True)]


def scanned(self: Any, input: Any) -> list[Any]:
    """Scan by the kernel's own function, a slice after the other."""
    dtypes = [x.dtype for x in input]
    parts = [np.moveaxis(x.handle.data, self.axis, 0).copy() for x in input]
    for at in range(1, parts[0].shape[0]):
        before = [self.to_tensor(p[at - 1], t) for p, t in zip(parts, dtypes, strict=True)]
        here = [self.to_tensor(p[at], t) for p, t in zip(parts, dtypes, strict=True)]
        out = self.combine_fn.fn(*before, *here)
        for part, new in zip(parts, out if isinstance(out, tuple) else (out,), strict=True):
            part[at] = number_of(new).reshape(part[at].shape)
    back = [np.moveaxis(part, 0, self.axis) for part in parts]
    return [self.to_tensor(x, t) for x, t in zip(back, dtypes, strict=True)]


def number_of(value: Any) -> Any:
    """Return the numbers of a tensor of the kernel."""
    return value.handle.data if isinstance(value, tl.core.tensor) else np.asarray(value)


def apply_in_wide(plain: Callable[..., Any]) -> Callable[..., Any]:
    """Have a reduction or a scan of narrow numbers be one of fp32."""

    def run(self: Any, input: Any) -> Any:
        parts = input if isinstance(input, tuple) else (input,)
        dtypes = [x.dtype.scalar for x in parts]
        if not any(dtype in NARROW for dtype in dtypes):
            return plain(self, input)
        given = tuple(
            self.to_tensor(wide(x.handle), tl.float32) if t in NARROW else x
            for x, t in zip(parts, dtypes, strict=True)
        )
        out = plain(self, given)
        kept = []
        for x, t in zip(out, dtypes, strict=False):
            if t in NARROW:
                x = self.to_tensor(narrowed(x.handle.data, t), t)
            kept.append(x)
        return tuple(kept) if isinstance(input, tuple) else kept[0]

    return run


# ---- addresses


class Addresses:
    """What the kernels of one launch load and store."""

    def __init__(self) -> None:
        self.seen: dict[tuple[int, bool], list[Any]] = {}

    def note(self, pointers: Any, mask: Any, writes: bool) -> None:
        """Keep the addresses that a mask leaves."""
        width = max(1, pointers.get_element_ty().primitive_bitwidth // 8)
        data, kept = np.broadcast_arrays(pointers.data, mask.data)
        if kept.any():
            self.seen.setdefault((width, writes), []).append(np.unique(data[kept]))

    def tell(self) -> None:
        """Tell the device of all that was seen, in runs without gaps."""
        for (width, writes), parts in sorted(self.seen.items(), key=lambda entry: entry[0][1]):
            every = np.unique(np.concatenate(parts))
            ends = np.flatnonzero(np.diff(every) > width)
            first = every[np.concatenate([[0], ends + 1])]
            last = every[np.concatenate([ends, [len(every) - 1]])]
            for start, stop in zip(first.tolist(), last.tolist(), strict=True):
                touch(start, stop - start + width, writes)
        self.seen.clear()


addresses = Addresses()


def noting(method: Callable[..., Any], mask_at: int | None, writes: bool) -> Callable[..., Any]:
    """Have a method that touches memory note where."""

    def run(self: Any, *given: Any, **named: Any) -> Any:
        if watches_races():
            pointers = given[1] if isinstance(given[0], interpreter._ir.ATOMIC_OP) else given[0]
            mask = Handle(np.ones(1, bool), tl.int1) if mask_at is None else given[mask_at]
            addresses.note(pointers, mask, writes)
        return method(self, *given, **named)

    return run


def mend() -> None:
    """Change the interpreter of this process; once."""
    builder = interpreter.InterpreterBuilder
    if builder.cast_impl is cast:
        return
    builder.cast_impl = cast
    builder.create_fp_to_fp = fp_to_fp(builder.create_fp_to_fp)
    builder.create_dot = dot
    interpreter._get_np_dtype = numpy_type_of
    # Arguments lie on the CPU, so nothing is copied there and back. The functions that would do it
    # refer to themselves, and keep the arguments until Python collects them.
    executor = interpreter.GridExecutor
    executor._init_args_hst = lambda _, given, named: (list(given), named)
    executor._restore_args_dev = lambda *_: None
    for name in ("binary_op", "unary_op", "create_fma", "create_erf", "create_rsqrt"):
        setattr(builder, name, in_wide(getattr(builder, name)))
    builder.create_extern_elementwise = extern_elementwise
    builder.create_inline_asm = inline_asm
    builder.create_masked_load = noting(builder.create_masked_load, 1, writes=False)
    builder.create_masked_store = noting(builder.create_masked_store, 2, writes=True)
    builder.create_atomic_cas = noting(builder.create_atomic_cas, None, writes=True)
    builder.create_atomic_rmw = noting(builder.create_atomic_rmw, 3, writes=True)
    for kind, name, change in (
        (interpreter.ReduceOps, "generic_reduce", folded),
        (interpreter.ScanOps, "generic_scan", scanned),
    ):
        setattr(kind, name, change)
        kind.apply_impl = apply_in_wide(kind.apply_impl)
