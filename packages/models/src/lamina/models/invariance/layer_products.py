"""The products of a linear layer in the order of the model: `Products` of `matmul_products`."""

from collections.abc import Sequence
from dataclasses import dataclass, replace
from typing import ClassVar

import torch
from torch import Tensor

from lamina.models.invariance.products import Block, product, weight_product
from lamina.models.invariance.token_sums import TokenCut, TokenSum, delivered


@dataclass(frozen=True)
class InvariantProducts:
    """How a layer multiplies if bits may not depend on the layout.

    Results are in float32, so that sums over ranks are in float32 too; the layer rounds them.

    Attributes:
        tokens: how the ranks cut a batch.
        inner: blocks of this rank's input width.
        outer: blocks of this rank's output width, the inner dimension of the input's gradient.
        partial: whether ranks of tp hold other tokens each, and the whole weight.
    """

    tokens: TokenCut
    inner: tuple[Block, ...]
    outer: tuple[Block, ...]
    partial: bool = False
    in_graph: ClassVar[bool] = False

    def of(self, x: Tensor) -> "InvariantProducts":
        """The products of one call with `[..., in]`, whose backward may come much later.

        RuntimeError: under autocast, which would round a weight's gradient for each microbatch.
        """
        if torch.is_autocast_enabled(x.device.type):
            raise RuntimeError(
                "invariant=True under torch.autocast, which rounds each microbatch's gradients: "
                "give the wrapper MixedPrecisionPolicy(param_dtype=torch.bfloat16, "
                "grad_comm_dtype=torch.float32) instead"
            )
        return replace(self, tokens=self.tokens.of(x))

    def output(
        self, x: Tensor, weight: Tensor, bias: Tensor | None
    ) -> tuple[Tensor, tuple[Tensor, ...]]:
        """`x @ weight.T + bias`; backward needs nothing of it."""
        y = product(x.flatten(0, -2), weight.t(), self.inner)
        if bias is not None:
            y = y + bias
        return y.view(*x.shape[:-1], weight.shape[0]), ()

    def gradients(self, grad: Tensor, kept: Sequence[Tensor]) -> "InvariantGradients":
        """The products of backward; `kept` is empty."""
        return InvariantGradients(self, grad)


class InvariantGradients:
    """`Gradients` of all tokens of the batch, of this rank's own rows where ranks share the work.

    See Note [Gradients over a cut sequence].
    """

    def __init__(self, products: InvariantProducts, grad: Tensor) -> None:
        self.products, self.grad = products, grad

    def by_input(self, weight: Tensor) -> Tensor:
        """`grad @ weight`: `[..., in]`, float32."""
        grad_x = product(self.grad.flatten(0, -2), weight, self.products.outer)
        return grad_x.view(*self.grad.shape[:-1], weight.shape[1])

    def by_weight(self, x: Tensor) -> Tensor:
        """`grad.T @ x` over the tokens of the batch: `[out, in]`, float32."""
        tokens, partial = self.products.tokens, self.products.partial
        rows = self.grad.shape[-1]
        own = tokens.own_rows(rows, partial=partial)
        grad, x = (tokens.whole(each.flatten(0, -2), scattered=partial) for each in (self.grad, x))
        return tokens.among_zeros(weight_product(grad[:, own], x), rows, partial=partial)

    def add_by_weight(self, x: Tensor, total: Tensor, accumulate: bool) -> None:
        """Write the weight's gradient into `total`, or add it."""
        if accumulate:
            total.add_(self.by_weight(x))
        else:
            total.copy_(self.by_weight(x))

    def by_bias(self, bias: Tensor | None) -> Tensor | None:
        """`grad` summed over the tokens of the batch: `[out]`, float32; None if it is written."""
        return delivered(bias, TokenSum(self.products.tokens, self.products.partial)(self.grad))
