"""The experts of a rank: two projections each, for all experts at once or one by one.

The weights' gradients are written into a wrapper's bucket if there is one, as in linear layers.
"""

from dataclasses import dataclass
from typing import Any, Literal

import torch
import torch.nn.functional as F
from torch import Tensor, nn
from torch.autograd.function import once_differentiable

from lamina.mesh import derive_seed, mark
from lamina.mesh.engine import MeshAxis
from lamina.models.base.applied import applied
from lamina.models.base.computing_device import computes_on
from lamina.models.base.configs.elements import Activation, ActivationName, activation_of
from lamina.models.base.configs.moe import ExpertsPath
from lamina.models.base.initialise import draw_seed, fill_stack, normal
from lamina.models.base.mesh_axes import MeshLike, require_divisible
from lamina.models.invariance.fixed_sums import FixedSums
from lamina.models.invariance.products import cut_blocks
from lamina.models.layers.matmul_products import (
    may_sink,
    under_autocast,
    weight_gradient,
    write_product,
)
from lamina.models.layers.mlp import ActivationFunction
from lamina.models.moe.dispatcher import ExpertRows
from lamina.models.moe.expert_axes import ExpertAxes
from lamina.models.moe.fixed_experts import CopyOrder, fixed_expert_product

Way = Literal["batched", "grouped", "loop"]


@dataclass(frozen=True)
class ExpertRuns:
    """The number of rows of each expert, also on the host if it knows, and how they are multiplied.

    `way` is `batched` if all experts have the same number of rows, `grouped` by
    `torch.nn.functional.grouped_mm`, `loop` one expert after the other.
    """

    counts: Tensor
    on_host: tuple[int, ...] | None
    way: Way

    @property
    def sizes(self) -> list[int]:
        """The number of rows of each expert; on CUDA the host may have to wait for it."""
        return list(self.counts.tolist() if self.on_host is None else self.on_host)

    @property
    def ends(self) -> Tensor:
        """Where each expert's rows end, int32 `[experts]`."""
        return self.counts.cumsum(0).to(torch.int32)

    def multiply(self, rows: Tensor, stack: Tensor) -> Tensor:
        """`[rows, in]` with each expert's matrix of `[experts, in, out]`: `[rows, out]`."""
        if self.way == "batched":
            return torch.bmm(self.batched(rows), stack).flatten(0, 1)
        if self.way == "grouped":
            return F.grouped_mm(rows, stack, offs=self.ends)
        # unbind, because the backward of indexing would write zeros for all experts each time.
        parts = zip(torch.split(rows, self.sizes), stack.unbind(0), strict=True)
        return torch.cat([part @ matrix for part, matrix in parts])

    def add(self, rows: Tensor, vectors: Tensor) -> Tensor:
        """`[rows, width]` with each expert's vector of `[experts, width]` added to its rows."""
        return applied(_AddToRuns, rows, vectors, self)

    def totals(self, rows: Tensor) -> Tensor:
        """The sum of each expert's rows: `[experts, width]`."""
        if self.way == "batched":
            return self.batched(rows).sum(1)
        if self.way == "grouped":
            # A product with ones, as torch has no sum of runs whose order is the same each time
            # and that needs no counts on the host. It takes rows of 16 bytes.
            column = rows.new_ones(len(rows), 16 // rows.element_size())
            sums = F.grouped_mm(column.t(), rows, offs=self.ends)
            return sums[:, 0].masked_fill(_without_rows(self.counts)[:, 0], 0)
        return torch.stack([part.sum(0) for part in torch.split(rows, self.sizes)])

    def batched(self, rows: Tensor) -> Tensor:
        """`[experts, rows of each, width]`."""
        return rows.view(self.counts.shape[0], -1, rows.shape[1])


def expert_product(rows: Tensor, weight: Tensor, runs: ExpertRuns) -> Tensor:
    """`rows @ weight[e].T` for the rows `[rows, in]` of each expert e of `[experts, out, in]`."""
    if may_sink(weight):
        return applied(_ExpertProduct, rows, weight, runs)
    if runs.way != "grouped":
        return runs.multiply(rows, weight.transpose(1, 2))
    weight = applied(_NoRowsNoGradient, weight, runs.counts)
    return applied(_ContiguousGradient, runs.multiply(rows, weight.transpose(1, 2)))


class _AddToRuns(torch.autograd.Function):
    """See `ExpertRuns.add`."""

    @staticmethod
    def forward(ctx: Any, rows: Tensor, vectors: Tensor, runs: ExpertRuns) -> Tensor:
        ctx.runs = runs
        # Without the length the host would have to wait for the counts.
        return rows + vectors.repeat_interleave(runs.counts, dim=0, output_size=len(rows))

    @staticmethod
    @once_differentiable
    def backward(ctx: Any, grad: Tensor) -> tuple[Tensor, Tensor | None, None]:
        grad = grad.contiguous()
        return grad, ctx.runs.totals(grad) if ctx.needs_input_grad[1] else None, None


class _OnFirstRank(torch.autograd.Function):
    """Vectors on the first rank of an axis, and zeros on the others.

    Gradients pass as they are: ranks that share an expert have the same rows.
    """

    @staticmethod
    def forward(ctx: Any, vectors: Tensor, axis: MeshAxis) -> Tensor:
        return vectors.clone() if axis.rank == 0 else torch.zeros_like(vectors)

    @staticmethod
    def backward(ctx: Any, grad: Tensor) -> tuple[Tensor, None]:
        return grad, None


class ExpertGradients:
    """The two products of a backward, given the gradient of the results `[rows, out]`."""

    def __init__(self, grad: Tensor, runs: ExpertRuns) -> None:
        self.grad = grad.contiguous()
        self.runs = runs

    def by_input(self, weight: Tensor) -> Tensor:
        """`[rows, in]`."""
        return self.runs.multiply(self.grad, weight)

    def by_weight(self, x: Tensor) -> Tensor:
        """`[experts, out, in]`."""
        runs, grad = self.runs, self.grad
        if runs.way == "batched":
            return torch.bmm(runs.batched(grad).transpose(1, 2), runs.batched(x))
        if runs.way == "grouped":
            expert_grads = F.grouped_mm(grad.t(), x, offs=runs.ends)
            return expert_grads.masked_fill_(_without_rows(runs.counts), 0)
        parts = zip(torch.split(grad, runs.sizes), torch.split(x, runs.sizes), strict=True)
        return torch.stack([each.t() @ rows for each, rows in parts])

    def add_by_weight(self, x: Tensor, total: Tensor, accumulate: bool) -> None:
        """Write the weight's gradient into `total` `[experts, out, in]`, or add it."""
        runs, grad = self.runs, self.grad
        if runs.way == "batched" and total.dtype == x.dtype:
            sides = runs.batched(grad).transpose(1, 2), runs.batched(x)
            if accumulate:
                total.baddbmm_(*sides)
            else:
                torch.bmm(*sides, out=total)
        elif computes_on(x) == "cuda" and runs.way != "loop":
            # One product for all experts, and one pass to add it, as grouped_mm has no `out`.
            expert_grads = self.by_weight(x)
            if accumulate:
                total.add_(expert_grads)
            else:
                total.copy_(expert_grads)
        else:
            parts = torch.split(grad, runs.sizes), torch.split(x, runs.sizes), total.unbind(0)
            for each, rows, place in zip(*parts, strict=True):
                write_product(each.t(), rows, place, accumulate)


class _ExpertProduct(torch.autograd.Function):
    """See `expert_product`."""

    @staticmethod
    def forward(ctx: Any, rows: Tensor, weight: Tensor, runs: ExpertRuns) -> Tensor:
        ctx.runs = runs
        ctx.parameter = weight if weight.is_leaf else None
        ctx.save_for_backward(rows, weight)
        return runs.multiply(rows, weight.transpose(1, 2))

    @staticmethod
    @once_differentiable
    def backward(ctx: Any, grad: Tensor) -> tuple[Tensor | None, Tensor | None, None]:
        rows, weight = ctx.saved_tensors
        gradients = ExpertGradients(grad, ctx.runs)
        grad_rows = gradients.by_input(weight) if ctx.needs_input_grad[0] else None
        grad_weight = None
        if ctx.needs_input_grad[1]:
            grad_weight = weight_gradient(gradients, ctx.parameter, rows)
        return grad_rows, grad_weight, None


# Note [Gradients of experts without rows]
# On Blackwell GPUs grouped_mm is reported not to write the product of a group whose inner dimension
# is 0, so the gradient of such an expert is what its memory held before (pytorch issue 172439).
def _without_rows(counts: Tensor) -> Tensor:
    """Which experts have no rows: bool `[experts, 1, 1]`."""
    return (counts == 0)[:, None, None]


class _NoRowsNoGradient(torch.autograd.Function):
    """See Note [Gradients of experts without rows]; passes weights `[experts, out, in]` on."""

    @staticmethod
    def forward(ctx: Any, weight: Tensor, counts: Tensor) -> Tensor:
        ctx.save_for_backward(counts)
        return weight.view_as(weight)

    @staticmethod
    def backward(ctx: Any, grad: Tensor) -> tuple[Tensor, None]:
        return grad.masked_fill(_without_rows(*ctx.saved_tensors), 0), None


class _ContiguousGradient(torch.autograd.Function):
    """Makes gradients contiguous, as grouped_mm's backward refuses expanded ones (of `sum()`)."""

    @staticmethod
    def forward(ctx: Any, x: Tensor) -> Tensor:
        return x.view_as(x)

    @staticmethod
    def backward(ctx: Any, grad: Tensor) -> Tensor:
        return grad.contiguous()


_GROUPED = (torch.float32, torch.bfloat16, torch.float16)


class GroupedExperts(FixedSums, nn.Module):
    """Up projection, activation and down projection of each expert.

    `up` is `[experts, ffn, hidden]`, with SwiGLU `[experts, 2 * ffn, hidden]` with the gate's
    rows first; `down` is `[experts, hidden, ffn]`. With `bias` there are `up_bias`, a number for
    each row of `up`, and `down_bias` `[experts, hidden, 1]`. The experts are cut over the ranks of
    `ep`, and the inner width of each expert over those of `expert_tp`. The initial weights of an
    expert are the same for every number of ranks.

    Args:
        num_experts: over all ranks.
        hidden_size: width of a row.
        ffn_size: inner width of an expert, over all ranks.
        activation: between the projections.
        bias: both projections have a bias.
        mesh: has the axes `ep` and `expert_tp`; None is one process.
        init_std: standard deviation of the initial `up`.
        output_std: of the initial `down`.
        path: `grouped` (`torch.nn.functional.grouped_mm`), `loop`, or `auto`: one batched
            product if the host knows that experts have equally many rows, or else the first of
            the two that supports the case.

    Raises:
        ValueError: if experts or inner width are not divisible by the number of ranks.

    Examples:
        >>> experts = GroupedExperts(num_experts=8, hidden_size=64, ffn_size=128)
    """

    def __init__(
        self,
        num_experts: int,
        hidden_size: int,
        ffn_size: int,
        mesh: MeshLike | ExpertAxes = None,
        *,
        activation: ActivationName | Activation = "swiglu",
        bias: bool = False,
        init_std: float = 0.02,
        output_std: float | None = None,
        path: ExpertsPath = "auto",
    ) -> None:
        super().__init__()
        self.axes = ExpertAxes.of(mesh, sequence_parallel=True)
        self.path = path
        self.init_std = init_std
        self.output_std = init_std if output_std is None else output_std
        self.init_seed: int | None = None
        self.blocks = (ffn_size, ffn_size) if activation_of(activation).gated else (ffn_size,)
        local_experts = require_divisible("num_experts", num_experts, self.axes.ep)
        inner = require_divisible("ffn_size of experts", ffn_size, self.axes.expert_tp)
        self.first = 0 if self.axes.ep is None else self.axes.ep.rank * local_experts
        self.up = nn.Parameter(torch.empty(local_experts, len(self.blocks) * inner, hidden_size))
        self.down = nn.Parameter(torch.empty(local_experts, hidden_size, inner))
        # With a column, so that all parameters of experts are stacks of matrices, and are cut over
        # ranks and saved as such.
        columns = (*self.up.shape[:2], 1), (*self.down.shape[:2], 1)
        self.up_bias = nn.Parameter(torch.empty(columns[0])) if bias else None
        self.down_bias = nn.Parameter(torch.empty(columns[1])) if bias else None
        self.activation = ActivationFunction(activation)
        self.reset_parameters()

    def reset_parameters(self) -> None:
        """Draw each expert's weights from its own seed, zero the biases; mark the roles."""
        cut = self.axes.expert_tp
        fused = self.blocks if len(self.blocks) > 1 else None
        dims = {self.up: 1, self.up_bias: 1, self.down: 2, self.down_bias: None}
        for parameter, dim in dims.items():
            if parameter is not None:
                blocks = fused if dim == 1 and cut is not None else None
                mark(
                    parameter,
                    expert=True,
                    tp_shard_dim=None if cut is None else dim,
                    tp_blocks=blocks,
                )
        for bias in (self.up_bias, self.down_bias):
            if bias is not None:
                nn.init.zeros_(bias)
        # The seed is the same on all ranks. Each expert derives its own from it by its number.
        seed = draw_seed() if self.init_seed is None else self.init_seed
        owned = range(self.first, self.first + self.up.shape[0])
        ups = [derive_seed(seed, "up", expert) for expert in owned]
        downs = [derive_seed(seed, "down", expert) for expert in owned]
        fill_stack(self.up, normal(self.init_std), ups, cut, blocks=fused)
        fill_stack(self.down, normal(self.output_std), downs, cut, dim=1)

    def forward(self, arrived: ExpertRows) -> Tensor:
        """Compute the results of rows `[rows, hidden]`, in the same order.

        With `expert_tp` results are partial, and are to be summed over its ranks.
        """
        if self.tokens is not None and arrived.tokens is not None:
            return self._in_order(arrived, arrived.tokens)
        rows, up, up_bias = under_autocast(arrived.rows, self.up, self.up_bias)
        _, down, down_bias = under_autocast(rows, self.down, self.down_bias)
        way: Way = "loop"
        equal = arrived.on_host is not None and len(set(arrived.on_host)) == 1
        if self.path == "auto" and equal:
            way = "batched"
        elif self._can_group(rows):
            way = "grouped"
        on_host = arrived.on_host
        if way == "loop" and on_host is None:
            on_host = tuple(arrived.counts.tolist())
        runs = ExpertRuns(arrived.counts, on_host, way)
        inner = expert_product(rows, up, runs)
        if up_bias is not None:
            inner = runs.add(inner, up_bias.squeeze(2))
        inner = self.activation(inner)
        results = expert_product(inner, down, runs)
        if down_bias is not None:
            cut = self.axes.expert_tp
            # Results of ranks that share an expert are summed, and the bias counts once.
            once = down_bias if cut is None else applied(_OnFirstRank, down_bias, cut)
            results = runs.add(results, once.squeeze(2))
        return results.to(arrived.rows.dtype)

    def _in_order(self, arrived: ExpertRows, tokens: Tensor) -> Tensor:
        """`forward` in the order of the model: results in float32."""
        sizes = arrived.on_host or tuple(arrived.counts.tolist())
        order = CopyOrder(tokens, sizes, self.first, self.axes)
        ranks = 1 if self.axes.expert_tp is None else self.axes.expert_tp.size
        inner = sum(self.blocks) // len(self.blocks)
        hidden = cut_blocks((self.up.shape[2],))
        up = hidden, cut_blocks(self.blocks, ranks)
        down = cut_blocks((inner,), ranks), hidden
        rows = self.activation(fixed_expert_product(arrived.rows, self.up, order, *up))
        return fixed_expert_product(rows, self.down, order, *down)

    def _can_group(self, rows: Tensor) -> bool:
        if self.path == "loop" or rows.shape[0] == 0:
            return False
        # Strides must be multiples of 16 bytes. CUDA has kernels for bfloat16 only, and so has the
        # form without data that torch.compile asks for shapes, on any device.
        widths = (self.up.shape[1], self.up.shape[2], self.down.shape[2])
        aligned = all(width * rows.element_size() % 16 == 0 for width in widths)
        narrow = computes_on(rows) == "cuda" or torch.compiler.is_compiling()
        dtypes = (torch.bfloat16,) if narrow else _GROUPED
        if aligned and rows.dtype in dtypes:
            return True
        if self.path == "grouped":
            raise ValueError(
                f"experts='grouped' with {rows.dtype} on {rows.device.type} and widths {widths}: "
                f"grouped_mm takes {', '.join(map(str, dtypes))} and rows of a multiple of 16 "
                "bytes; use 'auto' or 'loop'"
            )
        return False

    def extra_repr(self) -> str:
        """Sizes, for printing."""
        local, _, hidden = self.up.shape
        return f"{local} experts from {self.first}, {hidden} -> {self.down.shape[2]} -> {hidden}"
