"""The products of a linear layer in FP8, and the maxima from which their scales follow."""

from __future__ import annotations

from collections.abc import Callable, Sequence
from contextlib import AbstractContextManager
from typing import Any, Literal

import torch
from torch import Tensor, nn

from lamina.collectives.engine import all_reduce_small
from lamina.ddp.engine import BackwardEnd
from lamina.mesh.engine import MeshAxis
from lamina.models.base.configs.product_precision import Precision
from lamina.models.base.mesh_axes import MeshLike, axis_of
from lamina.models.precision.fp8 import (
    BACKWARD,
    FORWARD,
    Coded,
    encode,
    magnitude,
    scaled_product,
)

Cut = Literal["output", "input"]
INPUT, WEIGHT, GRADIENT = range(3)


class Float8Products(nn.Module):
    """How one layer multiplies in FP8. It holds the history of maxima, as a buffer.

    The scales of a matrix that is cut over tensor-parallel ranks (on the side `cut` of the weight)
    follow from the maximum over all ranks, so results do not depend on the number of ranks.

    `amax_history` (delayed scaling only) is int32 `[1 + history, 3]`: maxima of input, weight and
    gradient. Row 0 has those of the current pass, which is a backward and the forwards before it
    that record gradients, one per microbatch; the backward's end moves it to row 1. See Note
    [Maxima are stored as integers].
    """

    # Note [Maxima are stored as integers]
    # The history is a buffer, so that checkpoints hold it. `model.to(torch.bfloat16)` and wrappers
    # cast floating-point buffers, which would round the maxima and change the scales. So the buffer
    # holds the bits of the float32 numbers as int32. Maxima are not negative, and the bits of such
    # numbers compare as the numbers do (decision 0661).
    amax_history: Tensor | None

    def __init__(self, precision: Precision, axis: MeshAxis | None, cut: Cut) -> None:
        super().__init__()
        self.precision = precision
        self.rowwise = precision.scaling == "rowwise"
        self.axis = axis
        self.cut = cut
        self.keep_fp8_transpose_cache = precision.keep_transpose
        # Whether the current forward records maxima. Forwards without gradients (validation) must
        # not change the scales of training. The layer sets it, because grad mode is always off
        # inside an autograd function.
        self.remembers = True
        # Whether a pass has ended. All ranks agree on this without communication.
        self.looks_back = False
        self.passing: Pass | None = None
        # Set while a recomputed block runs: it records the maxima of forward and replays them.
        self.kept_scales: _ScalesKept | None = None
        history = None
        if precision.amax == "delayed":
            history = torch.zeros(1 + precision.history, 3, dtype=torch.int32)
        self.register_buffer("amax_history", history)

    def reset_parameters(self) -> None:
        """Clear the history."""
        if self.amax_history is not None:
            self.amax_history.zero_()
        self.looks_back = False

    def _load_from_state_dict(self, *arguments: Any, **options: Any) -> None:
        super()._load_from_state_dict(*arguments, **options)
        if self.amax_history is not None and not self.amax_history.is_meta:
            self.looks_back = bool(self.amax_history[1:].any())

    def __getstate__(self) -> dict[str, Any]:
        """A copy has no current pass, as autograd's callbacks refer to the original."""
        return {**self.__dict__, "passing": None}

    @property
    def in_graph(self) -> bool:
        """A history is not: ranks agree on it at a backward's end, which is no part of a graph."""
        return self.amax_history is None

    def output(
        self, x: Tensor, weight: Tensor, bias: Tensor | None
    ) -> tuple[Tensor, tuple[Tensor, ...]]:
        """See `lamina.models.layers.matmul_products.Products`."""
        flat = x.flatten(0, -2)
        # Each rank has seen a part of a tensor, whichever side is cut. Rows may be whole.
        cut = not self.rowwise or self.cut == "input"
        sides = {INPUT: flat, WEIGHT: weight}
        scales = self.kept_scales
        amax = self.maxima(sides, cut) if scales is None else scales.run(self, sides, cut)
        left, right = (self.code(m, a) for m, a in zip((flat, weight), amax, strict=True))
        y = scaled_product(left, right, x.dtype, fast_accumulation=True)
        if bias is not None:
            y += bias
        # Backward reuses the scales of tensors. It needs scales of other rows than forward.
        kept = () if self.rowwise else tuple(amax)
        if self.keep_fp8_transpose_cache:
            turned = self.code_turned(weight) if self.rowwise else right.transposed()
            kept = (*kept, *turned)
        return y.view(*x.shape[:-1], -1), kept

    def gradients(self, grad: Tensor, kept: Sequence[Tensor]) -> Float8Gradients:
        """See `lamina.models.layers.matmul_products.Products`."""
        if self.passing is not None:
            self.passing.ends_with_backward()
        return Float8Gradients(self, grad, kept)

    def code(self, x: Tensor, amax: Tensor, dtype: torch.dtype = FORWARD) -> Coded:
        """Quantise by a maximum, which may be too small if it comes from a history."""
        return encode(x, amax, dtype, saturate=self.amax_history is not None)

    def code_turned(self, weight: Tensor) -> Coded:
        """Quantise the transposed weight, with a scale for each of its rows."""
        turned = weight.t()
        amax = self.over_ranks([magnitude(turned, rows=True)], self.cut == "output")[0]
        return encode(turned, amax, FORWARD)

    def over_ranks(self, amax: list[Tensor], cut: bool) -> list[Tensor]:
        """Take maxima over the ranks, in place, if each rank has seen a part (`cut`)."""
        if cut and self.axis is not None:
            all_reduce_small(amax, self.axis.group, op="max")
        return amax

    def maxima(self, matrices: dict[int, Tensor], cut: bool) -> list[Tensor]:
        """The maxima that decide the scales, of each matrix or of its rows."""
        maxima = [magnitude(matrix, rows=self.rowwise) for matrix in matrices.values()]
        if self.amax_history is None:
            return self.over_ranks(maxima, cut)
        columns = slice(min(matrices), max(matrices) + 1)
        return self.remembered(self.amax_history.view(torch.float32), maxima, columns)

    def remembered(self, history: Tensor, maxima: list[Tensor], columns: slice) -> list[Tensor]:
        """Record the maxima, and return the largest of the history, or these if it is empty."""
        with torch.no_grad():
            now = torch.stack(maxima)
            sound = torch.isfinite(now)
            finite = torch.where(sound, now, 0.0)
            if self.remembers or columns.start == GRADIENT:
                history[0, columns] = torch.maximum(history[0, columns], finite)
            if not self.looks_back:
                finite = self.over_ranks([finite], True)[0]
            past = history[1:, columns].amax(dim=0)
            chosen = torch.where(past > 0, past, finite)
            return list(torch.where(sound, chosen, torch.nan).unbind())

    def end_pass(self, begun: bool) -> None:
        """Shift the history by a row, or merge into its newest row if no forward has `begun`."""
        if self.amax_history is None:
            return
        if begun:
            self.amax_history[1:] = self.amax_history[:-1].clone()
        else:
            torch.maximum(*self.amax_history[:2], out=self.amax_history[1])
        self.amax_history[0] = 0
        self.looks_back = True


def _remembering(module: nn.Module) -> list[Float8Products]:
    """All layers at or below a module that have a history."""
    layers = (m for m in module.modules() if isinstance(m, Float8Products))
    return [layer for layer in layers if layer.amax_history is not None]


class _ScalesKept(AbstractContextManager[None]):
    """Inside, layers record the maxima of a block's forward, or replay them.

    The history may have changed before the block is recomputed: under 1F1B other backwards end
    before this one runs. This is a class, as a graph that is kept may enter it several times.
    """

    def __init__(
        self,
        layers: Sequence[Float8Products],
        inner: AbstractContextManager[None],
        maxima: list[list[Tensor]],
        replay: bool,
    ) -> None:
        self._layers, self._inner = layers, inner
        self._maxima, self._replay = maxima, replay

    def __enter__(self) -> None:
        self._inner.__enter__()
        self._replayed = iter(self._maxima)
        for layer in self._layers:
            layer.kept_scales = self

    def __exit__(self, *exception: Any) -> None:
        for layer in self._layers:
            layer.kept_scales = None
        self._inner.__exit__(*exception)

    def run(self, layer: Float8Products, sides: dict[int, Tensor], cut: bool) -> list[Tensor]:
        """A layer's maxima: recorded in the order of calls, or replayed."""
        if self._replay:
            return next(self._replayed)
        self._maxima.append(layer.maxima(sides, cut))
        return self._maxima[-1]


Contexts = Callable[[], tuple[AbstractContextManager[None], AbstractContextManager[None]]]


def replaying_scales(block: nn.Module, contexts: Contexts) -> Contexts:
    """Make a `context_fn` of `torch.utils.checkpoint` that repeats the scales of a block's forward.

    `contexts` is another `context_fn`, which is called too.
    """
    layers = _remembering(block)

    def keeping() -> Any:
        maxima: list[list[Tensor]] = []
        forward, again = contexts()
        return _ScalesKept(layers, forward, maxima, False), _ScalesKept(layers, again, maxima, True)

    return keeping if layers else contexts


class Float8Gradients:
    """The products of a backward, as `lamina.models.layers.matmul_products.Gradients` says.

    With one scale per matrix both products use the same codes, transposed for one of them. With one
    scale per row each product quantises its own operands, as their rows differ.
    """

    def __init__(self, products: Float8Products, grad: Tensor, kept: Sequence[Tensor]) -> None:
        self.products = products
        self.shape = grad.shape
        self.grad = grad.flatten(0, -2)
        # The scales of forward, and the weight's codes if they are kept for backward.
        self.amax, self.codes_kept = ((), kept) if products.rowwise else (kept[:2], kept[2:])
        if not products.rowwise:
            self.codes = self._coded()

    def _coded(self) -> Coded:
        products = self.products
        amax = products.maxima({GRADIENT: self.grad}, products.cut == "output")
        return products.code(self.grad, amax[0], BACKWARD)

    def by_input(self, weight: Tensor) -> Tensor:
        """The gradient of the input, `[..., in]`, in the dtype of the output's."""
        products = self.products
        codes = self._coded() if products.rowwise else self.codes
        if self.codes_kept:
            turned = Coded(*self.codes_kept)
        elif products.rowwise:
            turned = products.code_turned(weight)
        else:
            turned = products.code(weight, self.amax[WEIGHT]).transposed()
        return scaled_product(codes, turned, self.grad.dtype).view(*self.shape[:-1], -1)

    def by_weight(self, x: Tensor) -> Tensor:
        """The gradient of the weight, `[out, in]`, in the dtype of the output's."""
        return scaled_product(*self._columns(x), self.grad.dtype)

    def add_by_weight(self, x: Tensor, total: Tensor, accumulate: bool) -> None:
        """Write the gradient of the weight into `total` `[out, in]`, or add it."""
        if accumulate:  # the kernels cannot, so adding takes a temporary
            total.add_(scaled_product(*self._columns(x), total.dtype))
        else:
            scaled_product(*self._columns(x), total.dtype, into=total)

    def by_bias(self, bias: Tensor | None) -> Tensor | None:
        """The gradient of a bias, `[out]`, in the dtype of the output's."""
        return self.grad.flatten(0, -2).sum(dim=0)

    def _columns(self, x: Tensor) -> tuple[Coded, Coded]:
        """The gradient `[out, tokens]` and the input `[in, tokens]`."""
        x = x.flatten(0, -2)
        if not self.products.rowwise:
            return self.codes.transposed(), self.products.code(x, self.amax[INPUT]).transposed()
        sides = (self.grad.t(), BACKWARD), (x.t(), FORWARD)
        left, right = (encode(m, magnitude(m, rows=True), dtype) for m, dtype in sides)
        return left, right


class AmaxExchange:
    """A forward pre-hook of the root module: histories shift at the end of each backward.

    At that time ranks of the data-parallel, `cp` and `tp` axes, which saw other tokens or pieces,
    exchange their maxima, in one small message per axis for all layers together. So between two
    steps histories are equal on all ranks, and a resumed run needs no other state.
    """

    def __init__(self, mesh: MeshLike = None) -> None:
        names = ("dp_replicate", "dp_shard", "cp", "tp")
        axes = [mesh] if isinstance(mesh, MeshAxis) else [axis_of(mesh, name) for name in names]
        self.axes = [axis for axis in axes if axis is not None]

    def __call__(self, root: nn.Module, inputs: Any) -> None:
        """Start a pass of every layer below `root`."""
        if not torch.is_grad_enabled():
            return
        layers = _remembering(root)
        begun = Pass(layers, self.axes)
        for layer in layers:
            layer.passing = begun


class Pass:
    """The time from one forward of the root to the next; backwards in between end the pass."""

    def __init__(self, layers: Sequence[Float8Products], axes: Sequence[MeshAxis]) -> None:
        self._layers = layers
        self._axes = axes
        self._begun = True
        self._backward_end = BackwardEnd()

    def ends_with_backward(self) -> None:
        """Shift histories once when this backward ends. Each layer calls this in backward."""
        if not self._backward_end.will_come:
            self._backward_end.queue(self._end)

    def _end(self) -> None:
        histories = [layer.amax_history for layer in self._layers]
        now = [history[0].view(torch.float32) for history in histories if history is not None]
        with torch.no_grad():
            for axis in self._axes:
                all_reduce_small(now, axis.group, op="max")
            for layer in self._layers:
                layer.end_pass(self._begun)
        self._begun = False
