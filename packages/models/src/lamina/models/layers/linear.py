"""Linear layers, whole or with the rows or columns of the weight cut over tensor-parallel ranks.

The cut products are those of Shoeybi et al. (2019) and Korthikanti et al. (2022), as one autograd
function. The autograd regions of `lamina.collectives` would communicate before or after the
products; a function of its own can communicate during them. Its backward has two products, and only
the input's gradient is sent to other ranks, so the weight's gradient is computed in the meantime.

With sequence parallelism activations between the products are `[tokens / tp, width]`. Each rank
holds a contiguous run of the batch's tokens in row-major order, so gathers need no rearrangement
(decision 0602).
"""

from collections.abc import Callable, Sequence
from dataclasses import dataclass
from typing import Any, ClassVar, cast

import torch
import torch.nn.functional as F
from torch import Tensor, nn
from torch.autograd.function import once_differentiable
from torch.distributed import ProcessGroup

from lamina.collectives import copy_to, gather_from
from lamina.collectives.engine import (
    Pending,
    gathered,
    group_named,
    start_all_gather,
    start_all_reduce,
    start_reduce_scatter,
    summed,
    summed_piece,
)
from lamina.mesh import mark
from lamina.mesh.engine import GroupRef, MeshAxis, group_ref, live_group
from lamina.models.base.applied import applied, in_dtype
from lamina.models.base.config import Reduction, TransformerConfig
from lamina.models.base.initialise import fill, normal
from lamina.models.base.mesh_axes import MeshLike, axis_of, require_divisible
from lamina.models.compat import one_graph_break
from lamina.models.invariance.fixed_sums import FixedSums
from lamina.models.invariance.layer_products import InvariantProducts
from lamina.models.invariance.products import cut_blocks
from lamina.models.invariance.token_sums import TokenCut, TokenSum, add_vector
from lamina.models.layers.matmul_products import (
    PLAIN,
    Gradients,
    Products,
    WeightGradientQueue,
    may_sink,
    under_autocast,
    weight_gradient,
)
from lamina.models.precision.fp8_products import Cut, Float8Gradients, Float8Products


@dataclass(frozen=True)
class CutProduct:
    """How the ranks of a group share a product; without one it is one process's.

    Each holds some rows of the weight (`side` is `output`) or some columns (`input`). With
    `sequence`, activations outside of the product are cut over tokens.
    """

    ref: GroupRef | None
    side: Cut
    sequence: bool
    reduction: Reduction

    @property
    def group(self) -> ProcessGroup | None:
        """The ranks; None is one process."""
        return live_group(self.ref)

    def gathered(self, x: Tensor) -> Tensor:
        """All tokens of activations that may be cut over tokens."""
        return gathered(x, self.group, 0) if self.sequence and self.group is not None else x

    def summed(self, partial: Tensor) -> Tensor:
        """The sum over the ranks, scattered over tokens if activations are cut over them."""
        if self.group is None:
            return partial
        if torch.compiler.is_compiling():
            if self.sequence:
                return summed_piece(partial, self.group, 0, self.reduction)
            return summed(partial, self.group, self.reduction)
        return self.start_sum(partial, async_op=False).wait()

    def start_sum(self, partial: Tensor, *, async_op: bool = True) -> Pending[Tensor]:
        """`summed`, beside what the caller does until it waits; takes the memory of `partial`."""
        how: Any = {"reduction": self.reduction, "async_op": async_op}
        if self.sequence:
            return start_reduce_scatter(partial, self.group, **how)
        return start_all_reduce(partial, self.group, in_place=True, **how)


class Multiply(torch.autograd.Function):
    """`x @ weight.T + bias`, whole or cut.

    With rows cut, sequence parallelism first gathers the tokens. Backward sums the input's gradient
    over ranks, and scatters it under sequence parallelism, while it computes the weight's gradient.

    With columns cut, the ranks' products are summed, so every rank has the whole sum. Under
    sequence parallelism the sum is scattered over tokens instead, and backward first gathers the
    gradient, which both of its products need.
    """

    @staticmethod
    def forward(
        ctx: Any,
        x: Tensor,
        weight: Tensor,
        bias: Tensor | None,
        cut: CutProduct,
        products: Products,
        queue: WeightGradientQueue | None,
    ) -> Tensor:
        """Compute `[..., out]`, or with rows cut `[..., out / size]`."""
        ctx.cut, ctx.products, ctx.queue = cut, products, queue
        whole = cut.gathered(x) if cut.side == "output" else x
        y, kept = products.output(whole, weight, bias)
        ctx.parameter = weight if weight.is_leaf else None
        ctx.bias = bias if bias is not None and bias.is_leaf else None
        ctx.save_for_backward(x, weight, *kept)
        if cut.side == "input":
            y = cut.summed(y)
        return in_dtype(y, x.dtype)

    @staticmethod
    @once_differentiable
    def backward(ctx: Any, grad: Tensor) -> tuple[Tensor | None, ...]:
        """The gradients of input, weight and bias, those of them that are wanted."""
        x, weight, *kept = ctx.saved_tensors
        cut, wanted = ctx.cut, ctx.needs_input_grad[:3]
        grad = grad if cut.side == "output" else cut.gathered(grad)
        products = ctx.products.gradients(grad, kept)

        def by_weight(whole: Tensor) -> Tensor | None:
            later = None if ctx.parameter is None else ctx.queue
            if later is not None and later.put(ctx.parameter, products, whole):
                return None
            return weight_gradient(products, ctx.parameter, whole)

        communicates = cut.side == "output" and cut.group is not None
        if communicates and torch.compiler.is_compiling():
            made = _gradients_in_graph(products, grad, x, weight, cut, wanted)
        else:
            made = input_and_weight(products, x, weight, cut, wanted, by_weight)
        grad_bias = products.by_bias(ctx.bias) if wanted[2] else None
        return *made, grad_bias, None, None, None


def input_and_weight(
    products: Gradients,
    x: Tensor,
    weight: Tensor,
    cut: CutProduct,
    wanted: Sequence[bool],
    by_weight: Callable[[Tensor], Tensor | None],
) -> tuple[Tensor | None, Tensor | None]:
    """The gradients of input and weight, those that are wanted, of which `by_weight` makes one."""
    for_x, for_weight, by_rows = wanted[0], wanted[1], cut.side == "output"
    arriving = departing = grad_x = grad_weight = None
    if by_rows and cut.sequence and for_weight:
        # The input is gathered again instead of saved. The product with the weight hides this.
        arriving = start_all_gather(x, cut.group)
    if for_x:
        grad_x = products.by_input(weight)
        if by_rows and cut.group is not None:
            departing = cut.start_sum(grad_x)
    if for_weight:
        grad_weight = by_weight(x if arriving is None else arriving.wait())
    if departing is not None:
        grad_x = departing.wait()
    return None if grad_x is None else grad_x.to(x.dtype), grad_weight


# Note [Overlap in a compiled graph]
# In a graph collectives run one by one with what is around them. The two products of this backward
# are what hides its messages, so the graph has one operator for all of it, which runs the same code
# as without a compiler.
@torch.library.custom_op("lamina::input_and_weight", mutates_args=())
def _input_and_weight(
    grad: Tensor,
    x: Tensor,
    weight: Tensor,
    group: str,
    sequence: bool,
    reduction: str,
    for_x: bool,
    for_weight: bool,
) -> tuple[Tensor, Tensor]:
    ref = group_ref(group_named(group))
    cut = CutProduct(ref, "output", sequence, reduction)  # type: ignore[arg-type]
    products, wanted = PLAIN.gradients(grad, ()), (for_x, for_weight)
    made = input_and_weight(products, x, weight, cut, wanted, products.by_weight)
    # An operator returns tensors, also in the place of what nobody wants.
    grad_x, grad_weight = (
        grad.new_empty(0) if each is None else each.contiguous() for each in made
    )
    return grad_x, grad_weight


@_input_and_weight.register_fake
def _(
    grad: Tensor, x: Tensor, weight: Tensor, group: str, sequence: bool, reduction: str,
    for_x: bool, for_weight: bool,
) -> tuple[Tensor, Tensor]:  # fmt: skip
    return (
        x.new_empty(x.shape if for_x else (0,)),
        grad.new_empty(weight.shape if for_weight else (0,)),
    )


def _gradients_in_graph(
    products: Gradients,
    grad: Tensor,
    x: Tensor,
    weight: Tensor,
    cut: CutProduct,
    wanted: Sequence[bool],
) -> tuple[Tensor | None, Tensor | None]:
    """`input_and_weight` in a graph. Plain products are one operator, and FP8's are traced."""
    if isinstance(products, Float8Gradients):
        # A compiler fuses the rounding to FP8 with what is before it. One operator for the whole
        # would send messages beside the products, and take the rounding out of the graph.
        grad_x = cut.summed(products.by_input(weight)).to(x.dtype) if wanted[0] else None
        return grad_x, products.by_weight(cut.gathered(x)) if wanted[1] else None
    group, how = cast(ProcessGroup, cut.group), (cut.sequence, cut.reduction)
    made = _input_and_weight(grad, x, weight, group.group_name, *how, wanted[0], wanted[1])
    return made[0] if wanted[0] else None, made[1] if wanted[1] else None


_uncompiled = one_graph_break(applied)


def multiply(
    x: Tensor,
    weight: Tensor,
    bias: Tensor | None,
    cut: CutProduct,
    products: Products,
    queue: WeightGradientQueue | None = None,
) -> Tensor:
    """`Multiply`, which breaks a compiler's graph where no graph can hold it."""
    # A queue is filled while backward runs.
    traced = products.in_graph and queue is None
    call = applied if traced or cut.ref is None else _uncompiled
    return call(Multiply, x, weight, bias, cut, products, queue)


def fixed_linear(x: Tensor, weight: Tensor, products: InvariantProducts) -> Tensor:
    """`x @ weight.T` of `[tokens, in]` with a whole weight, in the order of the model."""
    return multiply(x, weight, None, CutProduct(None, "output", False, "ordered"), products.of(x))


class _Projection(FixedSums, nn.Module):
    """What all linear layers have in common: the parameters, and how they multiply."""

    side: ClassVar[Cut] = "output"
    partial = False
    bias: nn.Parameter | None
    fixed: InvariantProducts | None = None

    def __init__(
        self,
        rows: int,
        columns: int,
        bias: bool,
        init_std: float,
        axis: MeshAxis | None = None,
        sequence_parallel: bool = False,
        reduction: Reduction = "ordered",
    ) -> None:
        super().__init__()
        self.axis = axis
        self.sequence_parallel = sequence_parallel and axis is not None
        self.reduction = reduction
        self.init_std = init_std
        self.init_seed: int | None = None
        self.float8: Float8Products | None = None
        self.weight_queue: WeightGradientQueue | None = None
        self.weight = nn.Parameter(torch.empty(rows, columns))
        self.bias = nn.Parameter(torch.empty(rows)) if bias else None

    def draw(self, *, dim: int = 0, blocks: Sequence[int] | None = None) -> None:
        """Cut the weight from a whole one drawn from N(0, init_std^2), and zero the bias."""
        draw = normal(self.init_std)
        fill(self.weight, draw, self.init_seed, self.axis, dim=dim, blocks=blocks)
        if self.bias is not None:
            nn.init.zeros_(self.bias)

    @property
    def widths(self) -> tuple[tuple[int, ...], tuple[int, ...]]:
        """Widths, over all ranks, of what is fused in the input and in the output."""
        rows, columns = self.weight.shape
        return (columns,), (rows,)

    def fix_sums(self, tokens: TokenCut) -> None:
        """See `FixedSums`; ValueError if the ranks do not divide the blocks of a width."""
        super().fix_sums(tokens)
        inputs, outputs = self.widths
        size = 1 if self.axis is None else self.axis.size
        by_rows = self.side == "output"
        inner = cut_blocks(inputs, 1 if by_rows else size)
        outer = cut_blocks(outputs, size if by_rows else 1)
        self.fixed = InvariantProducts(tokens, inner, outer, self.partial)

    def forward(self, x: Tensor) -> Tensor:
        """`[..., in_features]` to `[..., out_features]`; of the side that is cut, this rank's."""
        products: Products = PLAIN if self.fixed is None else self.fixed.of(x)
        if self.float8 is not None:
            products = self.float8
            if self.float8.amax_history is not None:
                self.float8.remembers = torch.is_grad_enabled()
        plain = products is PLAIN and self.weight_queue is None
        if self.axis is None and plain and not may_sink(self.weight):
            return F.linear(x, self.weight, self.bias)
        x, weight, bias = under_autocast(x, self.weight, self.bias)
        # Ranks that hold columns add the bias to the sum of their products.
        first, last = (bias, None) if self.side == "output" else (None, bias)
        ref = None if self.axis is None else self.axis.ref
        cut = CutProduct(ref, self.side, self.sequence_parallel, self.reduction)
        y = multiply(x, weight, first, cut, products, self.weight_queue)
        if last is None:
            return y
        if self.fixed is None:
            return y + last
        return add_vector(y, last, TokenSum(self.fixed.of(y).tokens, self.sequence_parallel))

    def extra_repr(self) -> str:
        """Sizes, the bias and the side that is cut, for printing."""
        (rows, columns), size = self.weight.shape, 1 if self.axis is None else self.axis.size
        return f"{columns} -> {rows}, bias={self.bias is not None}, {self.side} cut by {size}"


class Linear(_Projection):
    """`x @ weight.T + bias`, whole on every rank.

    The bias starts at zero, the weight with standard deviation `init_std`. Gradients are summed
    over tensor-parallel ranks if each sees other tokens (`partial`).
    """

    def __init__(
        self,
        in_features: int,
        out_features: int,
        *,
        bias: bool = False,
        init_std: float = 0.02,
        partial: bool = False,
    ) -> None:
        super().__init__(out_features, in_features, bias, init_std)
        self.partial = partial
        self.reset_parameters()

    def reset_parameters(self) -> None:
        """Draw the weight from N(0, init_std^2), set the bias to zero, and mark their roles."""
        for parameter in self.parameters(recurse=False):
            mark(parameter, tp_grad="sum" if self.partial else None)
        self.draw()


class ColumnParallelLinear(_Projection):
    """A linear layer whose output is cut over ranks (Shoeybi et al., 2019, section 3).

    Each rank holds some rows of `weight`. The whole weight is the same for all numbers of ranks.

    Args:
        in_features: width of the input.
        out_features: width of the output over all ranks.
        mesh: has an axis `tp`, or is that axis; None is one process.
        bias: whether there is a bias (it starts at zero).
        blocks: widths, over all ranks, of the projections that are fused in the output (queries,
            keys, values; gate, up). Each is cut separately. None is one projection.
        sequence_parallel: the input is `[tokens / size, in_features]` and is gathered first
            (Korthikanti et al., 2022).
        gather_output: gather the output, so that every rank returns the whole.
        init_std: standard deviation of the initial weight.
        reduction: who sums over the ranks, see `TransformerConfig.tp_reduction`.

    Raises:
        ValueError: if a width is not divisible by the number of ranks.

    Examples:
        >>> ColumnParallelLinear(8, 16)(torch.ones(2, 8)).shape
        torch.Size([2, 16])
    """

    def __init__(
        self,
        in_features: int,
        out_features: int,
        mesh: MeshLike = None,
        *,
        bias: bool = False,
        blocks: Sequence[int] | None = None,
        sequence_parallel: bool = False,
        gather_output: bool = False,
        init_std: float = 0.02,
        reduction: Reduction = "ordered",
    ) -> None:
        axis = axis_of(mesh, "tp")
        blocks = (out_features,) if blocks is None else tuple(blocks)
        if sum(blocks) != out_features:
            raise ValueError(
                f"blocks {blocks} sum to {sum(blocks)}, not out_features {out_features}"
            )
        if gather_output and len(blocks) > 1:
            raise ValueError(f"gather_output with blocks {blocks}: gather each by itself")
        rows = sum(require_divisible("output width", block, axis) for block in blocks)
        super().__init__(rows, in_features, bias, init_std, axis, sequence_parallel, reduction)
        self.blocks, self.gather_output = blocks, gather_output
        self.fused = blocks if len(blocks) > 1 else None
        self.reset_parameters()

    @property
    def widths(self) -> tuple[tuple[int, ...], tuple[int, ...]]:
        """See `_Projection.widths`."""
        return (self.weight.shape[1],), self.blocks

    def reset_parameters(self) -> None:
        """Cut the weight from a whole one drawn from N(0, init_std^2); mark the roles."""
        if self.axis is not None:
            for parameter in self.parameters(recurse=False):
                mark(parameter, tp_shard_dim=0, tp_blocks=self.fused)
        self.draw(blocks=self.fused)

    def forward(self, x: Tensor) -> Tensor:
        """`[..., in_features]` to `[..., out_features / size]`, whole with gather_output."""
        y = super().forward(x)
        if self.axis is None or not self.gather_output:
            return y
        return gather_from(y, self.axis.group, dim=-1)


class RowParallelLinear(_Projection):
    """A linear layer whose input is cut over ranks; the products of the ranks are summed.

    Each rank holds some columns of `weight`. The whole weight is the same for all numbers of ranks.

    Args:
        in_features: width of the input over all ranks.
        out_features: width of the output.
        mesh: has an axis `tp`, or is that axis; None is one process.
        bias: whether there is a bias (it starts at zero), whole on every rank.
        sequence_parallel: the sum is scattered: the output is `[tokens / size, out_features]`.
        init_std: standard deviation of the initial weight.
        reduction: who sums over the ranks, see `TransformerConfig.tp_reduction`.

    Raises:
        ValueError: if `in_features` is not divisible by the number of ranks.

    Examples:
        >>> RowParallelLinear(16, 8)(torch.ones(2, 16)).shape
        torch.Size([2, 8])
    """

    side = "input"

    def __init__(
        self,
        in_features: int,
        out_features: int,
        mesh: MeshLike = None,
        *,
        bias: bool = False,
        sequence_parallel: bool = False,
        init_std: float = 0.02,
        reduction: Reduction = "ordered",
    ) -> None:
        axis = axis_of(mesh, "tp")
        columns = require_divisible("input width", in_features, axis)
        super().__init__(out_features, columns, bias, init_std, axis, sequence_parallel, reduction)
        self.reset_parameters()

    @property
    def widths(self) -> tuple[tuple[int, ...], tuple[int, ...]]:
        """See `_Projection.widths`."""
        rows, columns = self.weight.shape
        return (columns * (1 if self.axis is None else self.axis.size),), (rows,)

    def reset_parameters(self) -> None:
        """Cut the weight from a whole one drawn from N(0, init_std^2); mark the roles."""
        if self.axis is not None:
            mark(self.weight, tp_shard_dim=1)
        if self.bias is not None:
            # The bias is added after the sum. Under sequence parallelism it is added to this rank's
            # tokens only, so its gradients are summed over ranks.
            mark(self.bias, tp_grad="sum" if self.sequence_parallel else None)
        self.draw(dim=1)


def attach_queue(module: nn.Module, queue: WeightGradientQueue) -> None:
    """Let all linear layers below a module put their weights' gradients off."""
    for layer in module.modules():
        if isinstance(layer, _Projection):
            layer.weight_queue = queue


def for_cut_layers(x: Tensor, config: TransformerConfig, axis: MeshAxis | None) -> Tensor:
    """Make activations, for all tokens, the input of what is cut over the ranks of an axis."""
    if axis is None:
        return x
    if config.sequence_parallel:
        return gather_from(x, axis.group, grad="reduce_scatter", reduction=config.tp_reduction)
    return copy_to(x, axis.group, reduction=config.tp_reduction)


def from_residual(
    config: TransformerConfig,
    blocks: Sequence[int],
    mesh: MeshLike,
    *,
    bias: bool,
    width: int | None = None,
    reduction: Reduction | None = None,
) -> ColumnParallelLinear:
    """Build fused projections of the residual stream, or of `width` elements made from it."""
    return ColumnParallelLinear(
        width or config.hidden_size, sum(blocks), mesh, bias=bias, blocks=blocks,
        sequence_parallel=config.sequence_parallel, init_std=config.init_std,
        reduction=reduction or config.tp_reduction,
    )  # fmt: skip


def into_residual(
    config: TransformerConfig,
    width: int,
    mesh: MeshLike,
    *,
    bias: bool,
    reduction: Reduction | None = None,
) -> RowParallelLinear:
    """Build the projection of `width` elements into the residual stream."""
    return RowParallelLinear(
        width, config.hidden_size, mesh, bias=bias, sequence_parallel=config.sequence_parallel,
        init_std=config.residual_init_std, reduction=reduction or config.tp_reduction,
    )  # fmt: skip
