"""Operators that the CPU has no kernel for, or whose kernel refuses what CUDA's gives."""

from __future__ import annotations

import functools
from collections.abc import Callable, Sequence
from typing import Any

import torch
from torch import Tensor

from lamina_virtual_gpu.arithmetic import attention
from lamina_virtual_gpu.arithmetic.keys import generator_of, key_of_operator

aten = torch.ops.aten
Number = float | int


def rms_norm_backward(
    grad: Tensor,
    input: Tensor,
    normalized_shape: Sequence[int],
    rstd: Tensor,
    weight: Tensor | None,
    output_mask: Sequence[bool],
) -> tuple[Tensor | None, Tensor | None]:
    """`aten::_fused_rms_norm_backward`, in the order of the CPU's own backward."""
    inner = tuple(range(-len(normalized_shape), 0))
    outer = tuple(range(input.dim() - len(normalized_shape)))
    wide, slope, root = (attention.wide(x) for x in (input, grad, rstd))
    of_weight = None
    if weight is not None:
        if output_mask[1]:
            of_weight = (slope * (wide * root)).sum(outer).to(weight.dtype)
        slope = slope * attention.wide(weight)
    of_root = (slope * wide).sum(inner, keepdim=True)
    count = wide.numel() // max(1, root.numel())
    of_mean = -0.5 * of_root * root.pow(3)
    of_input = slope * root + (of_mean / count).expand_as(wide) * (wide * 2.0)
    return of_input.to(input.dtype), of_weight


def mm(self: Tensor, mat2: Tensor, out_dtype: torch.dtype) -> Tensor:
    """`aten::mm.dtype`: products of narrow numbers that are summed and kept in wide ones."""
    return torch.mm(self.to(out_dtype), mat2.to(out_dtype))


def bmm(self: Tensor, mat2: Tensor, out_dtype: torch.dtype) -> Tensor:
    """`aten::bmm.dtype`."""
    return torch.bmm(self.to(out_dtype), mat2.to(out_dtype))


def addmm(
    self: Tensor,
    mat1: Tensor,
    mat2: Tensor,
    out_dtype: torch.dtype,
    *,
    beta: Number = 1,
    alpha: Number = 1,
) -> Tensor:
    """`aten::addmm.dtype`."""
    wide = (x.to(out_dtype) for x in (self, mat1, mat2))
    return torch.addmm(*wide, beta=beta, alpha=alpha)


def baddbmm(
    self: Tensor,
    batch1: Tensor,
    batch2: Tensor,
    out_dtype: torch.dtype,
    *,
    beta: Number = 1,
    alpha: Number = 1,
) -> Tensor:
    """`aten::baddbmm.dtype`."""
    wide = (x.to(out_dtype) for x in (self, batch1, batch2))
    return torch.baddbmm(*wide, beta=beta, alpha=alpha)


def into(function: Callable[..., Tensor]) -> Callable[..., Tensor]:
    """Return the form of an operator that writes into `out`."""

    def write(*given: Any, out: Tensor, **more: Any) -> Tensor:
        return out.copy_(function(*given, **more))

    return write


def depthwise(
    self: Tensor,
    weight: Tensor,
    kernel_size: Sequence[int],
    bias: Tensor | None,
    stride: Sequence[int],
    padding: Sequence[int],
    dilation: Sequence[int],
) -> Tensor:
    """`aten::_conv_depthwise2d`, and in three dimensions: a group for each channel."""
    none = [0] * len(stride)
    groups = self.size(1)
    given = (self, weight, bias, stride, padding, dilation, False, none, groups)
    out: Tensor = aten.convolution.default(*given)
    return out


def scaled_grouped(
    self: Tensor,
    mat2: Tensor,
    scale_a: Tensor,
    scale_b: Tensor,
    offs: Tensor | None = None,
    bias: Tensor | None = None,
    scale_result: Tensor | None = None,
    out_dtype: torch.dtype | None = None,
    use_fast_accum: bool = False,
) -> Tensor:
    """`aten::_scaled_grouped_mm` with a scale for each row: what FP8 stands for, multiplied."""
    if scale_a.dtype != torch.float32 or bias is not None or scale_result is not None:
        raise NotImplementedError(
            f"aten::_scaled_grouped_mm with scales of {scale_a.dtype} or a bias has no arithmetic "
            "on the virtual GPU.\nUse one scale for each row, or run without VGPU_COMPUTE"
        )
    ends = [] if offs is None else offs.tolist()
    a, b = self.float(), mat2.float()
    out = torch.bfloat16 if out_dtype is None else out_dtype
    starts = [0, *ends[:-1]]
    pairs = list(zip(starts, ends, strict=True))
    if a.dim() == 2 and b.dim() == 2:  # the inner dimension is in groups
        parts_a = scale_a.view(len(ends), a.size(0), 1)
        parts_b = scale_b.view(len(ends), 1, b.size(1))
        products = [(a[:, i:j] @ b[i:j]) * x * y
                    for (i, j), x, y in zip(pairs, parts_a, parts_b, strict=True)]  # fmt: skip
        return torch.stack(products).to(out)
    a = a * scale_a.unsqueeze(-1)
    b = b * scale_b.unsqueeze(-2)
    if a.dim() == 2:
        whole = a.new_zeros(a.size(0), b.size(-1))
        for group, (i, j) in enumerate(pairs):
            whole[i:j] = a[i:j] @ b[group]
        return whole.to(out)
    if b.dim() == 2:
        whole = a.new_zeros(a.size(-2), b.size(-1))
        for group, (i, j) in enumerate(pairs):
            whole[:, i:j] = a[group] @ b[:, i:j]
        return whole.to(out)
    return (a @ b).to(out)


def fused_dropout(
    self: Tensor, p: float, generator: torch.Generator | None = None
) -> tuple[Tensor, Tensor]:
    """`aten::_fused_dropout`: `p` is how likely an element is kept."""
    kept = torch.empty_like(self, dtype=torch.uint8).bernoulli_(p, generator=generator)
    return self * kept / p, kept


def masked_scale(self: Tensor, mask: Tensor, scale: float) -> Tensor:
    """`aten::_masked_scale`."""
    return self * mask * scale


def gru_cell(
    input_gates: Tensor,
    hidden_gates: Tensor,
    hx: Tensor,
    input_bias: Tensor | None = None,
    hidden_bias: Tensor | None = None,
) -> tuple[Tensor, Tensor]:
    """`aten::_thnn_fused_gru_cell`: the next state, and what backward needs, `[batch, 5 * hidden]`.

    Gates are in the order reset, update, new.
    """
    inside = attention.wide(input_gates if input_bias is None else input_gates + input_bias)
    hidden = attention.wide(hidden_gates if hidden_bias is None else hidden_gates + hidden_bias)
    (r_in, u_in, n_in), (r_hid, u_hid, n_hid) = inside.chunk(3, -1), hidden.chunk(3, -1)
    reset, update = torch.sigmoid(r_in + r_hid), torch.sigmoid(u_in + u_hid)
    new = torch.tanh(n_in + reset * n_hid)
    state = attention.wide(hx)
    out = new + update * (state - new)
    kept = torch.cat([reset, update, new, state, n_hid], -1)
    return out.to(hx.dtype), kept.to(hx.dtype)


def gru_cell_backward(grad: Tensor, workspace: Tensor, has_bias: bool) -> tuple[Any, ...]:
    """`aten::_thnn_fused_gru_cell_backward`."""
    reset, update, new, state, n_hid = attention.wide(workspace).chunk(5, -1)
    slope = attention.wide(grad)
    of_update = slope * (state - new) * (1 - update) * update
    of_new = slope * (1 - update) * (1 - new * new)
    of_reset = of_new * n_hid * (1 - reset) * reset
    of_inside = torch.cat([of_reset, of_update, of_new], -1).to(grad.dtype)
    of_hidden = torch.cat([of_reset, of_update, of_new * reset], -1).to(grad.dtype)
    biases = (of_inside.sum(0), of_hidden.sum(0)) if has_bias else (None, None)
    return of_inside, of_hidden, (slope * update).to(grad.dtype), *biases


def lstm_cell(
    input_gates: Tensor,
    hidden_gates: Tensor,
    cx: Tensor,
    input_bias: Tensor | None = None,
    hidden_bias: Tensor | None = None,
) -> tuple[Tensor, Tensor, Tensor]:
    """`aten::_thnn_fused_lstm_cell`: state, cell, and the gates that backward needs.

    Gates are in the order input, forget, cell, output.
    """
    inside = attention.wide(input_gates if input_bias is None else input_gates + input_bias)
    hidden = attention.wide(hidden_gates if hidden_bias is None else hidden_gates + hidden_bias)
    enter, forget, cell, leave = (inside + hidden).chunk(4, -1)
    enter, forget, leave = (torch.sigmoid(gate) for gate in (enter, forget, leave))
    cell = torch.tanh(cell)
    after = forget * attention.wide(cx) + enter * cell
    kept = torch.cat([enter, forget, cell, leave], -1).to(input_gates.dtype)
    return (leave * torch.tanh(after)).to(cx.dtype), after.to(cx.dtype), kept


def lstm_cell_backward(
    grad_hy: Tensor | None,
    grad_cy: Tensor | None,
    cx: Tensor,
    cy: Tensor,
    workspace: Tensor,
    has_bias: bool,
) -> tuple[Any, ...]:
    """`aten::_thnn_fused_lstm_cell_backward_impl`."""
    enter, forget, cell, leave = attention.wide(workspace).chunk(4, -1)
    before, through = attention.wide(cx), torch.tanh(attention.wide(cy))
    none = torch.zeros_like(before)
    of_state = none if grad_hy is None else attention.wide(grad_hy)
    of_cell = of_state * leave * (1 - through * through)
    of_cell = of_cell + (none if grad_cy is None else attention.wide(grad_cy))
    gates = (
        of_cell * cell * (1 - enter) * enter,
        of_cell * before * (1 - forget) * forget,
        of_cell * enter * (1 - cell * cell),
        of_state * through * (1 - leave) * leave,
    )
    of_gates = torch.cat(gates, -1).to(workspace.dtype)
    return of_gates, (of_cell * forget).to(cx.dtype), of_gates.sum(0) if has_bias else None


NEW: dict[str, Callable[..., Any]] = {
    **attention.OPERATORS,
    "_fused_rms_norm_backward": rms_norm_backward,
    "mm.dtype": mm,
    "mm.dtype_out": into(mm),
    "bmm.dtype": bmm,
    "bmm.dtype_out": into(bmm),
    "addmm.dtype": addmm,
    "addmm.dtype_out": into(addmm),
    "baddbmm.dtype": baddbmm,
    "baddbmm.dtype_out": into(baddbmm),
    "_conv_depthwise2d": depthwise,
    "conv_depthwise3d": depthwise,
    "_scaled_grouped_mm": scaled_grouped,
    "_fused_dropout": fused_dropout,
    "_masked_scale": masked_scale,
    "_thnn_fused_gru_cell": gru_cell,
    "_thnn_fused_gru_cell_backward": gru_cell_backward,
    "_thnn_fused_lstm_cell": lstm_cell,
    "_thnn_fused_lstm_cell_backward_impl": lstm_cell_backward,
}


# ---- operators of the CPU that are asked for what CUDA does otherwise

Kernel = Callable[..., Any]


def native_dropout(plain: Kernel, input: Tensor, p: float, train: bool | None) -> tuple[Any, ...]:
    """Draw from the key of the GPU's operator, and from the CPU's generator for the CPU's own."""
    key = key_of_operator()
    if key is None or train is False or p in (0, 1):
        return tuple(plain(input, p, train))
    mask = torch.empty_like(input, dtype=torch.bool).bernoulli_(1 - p, generator=generator_of(key))
    return input * mask * (1 / (1 - p)), mask


def layer_norm_backward(
    plain: Kernel,
    grad: Tensor,
    input: Tensor,
    shape: Sequence[int],
    mean: Tensor,
    rstd: Tensor,
    weight: Tensor | None,
    *more: Any,
) -> tuple[Any, ...]:
    """Take statistics in fp32 beside narrow numbers, as CUDA's forward gives them."""
    if mean.dtype != input.dtype and (weight is None or weight.dtype == input.dtype):
        mean, rstd = mean.to(input.dtype), rstd.to(input.dtype)
    return tuple(plain(grad, input, shape, mean, rstd, weight, *more))


def group_norm_backward(
    plain: Kernel, grad: Tensor, input: Tensor, mean: Tensor, rstd: Tensor, weight: Any, *more: Any
) -> tuple[Any, ...]:
    """The same for groups of channels."""
    if mean.dtype != input.dtype and (weight is None or weight.dtype == input.dtype):
        mean, rstd = mean.to(input.dtype), rstd.to(input.dtype)
    return tuple(plain(grad, input, mean, rstd, weight, *more))


def batch_norm(
    plain: Kernel,
    input: Tensor,
    weight: Tensor | None,
    bias: Tensor | None,
    mean: Tensor | None,
    variance: Tensor | None,
    training: bool,
    momentum: float,
    eps: float,
) -> tuple[Any, ...]:
    """Evaluation saves the statistics that it uses, as CUDA's kernel does; the CPU's saves none."""
    out, saved, root = plain(input, weight, bias, mean, variance, training, momentum, eps)
    if not training and mean is not None and variance is not None:
        saved, root = mean.clone(), torch.rsqrt(variance + eps)
    return out, saved, root


def batch_norm_backward(
    plain: Kernel,
    grad: Tensor,
    input: Tensor,
    weight: Tensor | None,
    mean: Tensor | None,
    variance: Tensor | None,
    saved: Tensor | None,
    root: Tensor | None,
    *more: Any,
) -> tuple[Any, ...]:
    """Take statistics in fp32 beside narrow numbers."""
    if weight is None or weight.dtype == input.dtype:
        saved = None if saved is None else saved.to(input.dtype)
        root = None if root is None else root.to(input.dtype)
    return tuple(plain(grad, input, weight, mean, variance, saved, root, *more))


def histc(
    plain: Kernel, input: Tensor, bins: int = 100, min: Number = 0, max: Number = 0
) -> Tensor:
    """Take whole numbers, as CUDA's kernel does."""
    wide = input if input.is_floating_point() else input.double()
    return Tensor.to(plain(wide, bins, min, max), input.dtype)


def log_sigmoid(plain: Kernel, input: Tensor) -> tuple[Tensor, Tensor]:
    """Keep nothing for backward, as CUDA's kernel does."""
    out, kept = plain(input)
    return out, kept.new_empty(0)


def log_sigmoid_backward(plain: Kernel, grad: Tensor, input: Tensor, kept: Tensor) -> Tensor:
    """Make what the CPU's forward keeps, if CUDA's has kept nothing."""
    of_input: Tensor = plain(grad, input, kept if kept.numel() else torch.exp(-input.abs()))
    return of_input


CHANGED: dict[str, Kernel] = {
    "histc": histc,
    "log_sigmoid_backward": log_sigmoid_backward,
    "log_sigmoid_forward": log_sigmoid,
    "native_batch_norm": batch_norm,
    "native_batch_norm_backward": batch_norm_backward,
    "native_dropout": native_dropout,
    "native_layer_norm_backward": layer_norm_backward,
    "native_group_norm_backward": group_norm_backward,
}


def install() -> object:
    """Register all of these for the CPU; they stay until what is returned is dropped."""
    library: Any = torch.library.Library("aten", "IMPL")  # type: ignore[no-untyped-call]
    for name, function in NEW.items():
        library.impl(name, on_the_cpu(function), "CPU")
    for name, change in CHANGED.items():
        library.impl(name, on_the_cpu(changed(name, change)), "CPU", with_keyset=True)
    return library


def on_the_cpu(kernel: Kernel) -> Kernel:
    """Return a kernel whose new tensors lie on the CPU, whatever the program's default device is.

    A tensor of the GPU would be work for the stream that waits for this kernel to end.
    """

    @functools.wraps(kernel)
    def run(*given: Any, **more: Any) -> Any:
        with torch._C.DisableTorchFunction():
            return kernel(*given, **more)

    return run


def changed(name: str, change: Kernel) -> Kernel:
    """Return a kernel that has the operator's own at hand."""
    own = torch.library.get_kernel(f"aten::{name}", "CPU")

    def kernel(keys: Any, *given: Any, **more: Any) -> Any:
        return change(lambda *rest: own.call_boxed(keys, *rest), *given, **more)

    return kernel
