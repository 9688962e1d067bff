"""The two oracles of Lamina's first law, in one process and plain PyTorch.

The *bit oracle* runs the local batches of D data-parallel ranks and M microbatches one by one, adds
their gradients in the order that Lamina promises, and steps. Every data-parallel strategy must
equal it bit for bit in fp32. The *whole-batch oracle* trains on the concatenated batch. Every mesh
must equal it within a tolerance. Neither shares code with Lamina; both are meant to be read.

The loop that is to be compared with them computes, on every rank and for every microbatch,
`(loss_fn(model, batch) / M).backward()`, where `loss_fn` is a mean over its batch (with
`per_token`: a sum, not divided by M), on as many threads as the oracle.
"""

from __future__ import annotations

import copy
from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass, replace
from typing import Any, Literal

import torch
from torch import Tensor, nn

Batch = Any
LossFunction = Callable[[nn.Module, Batch], Any]
BatchesOfStep = Sequence[Sequence[Batch]]
Cadence = Literal["once", "every", "reproducible"]
Gradients = dict[str, "Tensor | None"]


@dataclass(frozen=True)
class OracleStep:
    """One optimizer step.

    `losses` has one 0-dimensional tensor per local batch, rank by rank (one in all for the
    whole-batch oracle), as `loss_fn` gave it. `gradients` by name are final but not clipped;
    `clipped_gradients` are what the optimizer read. None: no gradient on any rank. `norm` is
    the global norm before clipping, None without `max_norm`. `parameters` are copies of the
    main weights after the step. Tied parameters appear once, under their first name.
    """

    losses: list[Tensor]
    gradients: Gradients
    clipped_gradients: Gradients
    norm: Tensor | None
    parameters: dict[str, Tensor]


@dataclass(frozen=True)
class Arithmetic:
    """In which order and precision the bit oracle adds gradients.

    `cadence`: "once" adds a rank's microbatches in order, then sums over ranks (strategies 0 and
    1); "every" sums each microbatch over ranks, then adds those sums in order (strategies 2 and 3);
    "reproducible" is one tree over microbatch * D + rank. `axes` are the sizes of the
    data-parallel axes, outer first: the innermost follows the cadence, outer ones are summed last,
    once per step. `wire_dtype`: a gradient is rounded to it before its sum over the innermost
    axis. `compute_dtype`: forward and backward run in it, on weights rounded from main ones.
    """

    cadence: Cadence = "once"
    axes: tuple[int, ...] | None = None
    wire_dtype: torch.dtype | None = None
    compute_dtype: torch.dtype | None = None

    def reduce(self, local: list[list[Tensor | None]]) -> Tensor | None:
        """Sum the gradients of one parameter, `local[rank][microbatch]`, over both."""
        ranks, microbatches = len(local), len(local[0])
        if self.cadence == "reproducible":
            return tree_sum(
                [self._on_wire(local[r][m]) for m in range(microbatches) for r in range(ranks)]
            )
        axes = self.axes or (ranks,)
        inner = axes[-1]
        rows = [local[first : first + inner] for first in range(0, ranks, inner)]
        sums = [self._reduce_inner(row) for row in rows]
        for size in reversed(axes[:-1]):
            sums = [tree_sum(sums[first : first + size]) for first in range(0, len(sums), size)]
        return sums[0]

    def _reduce_inner(self, local: list[list[Tensor | None]]) -> Tensor | None:
        if self.cadence == "once":
            return tree_sum([self._on_wire(ordered_sum(of_rank)) for of_rank in local])
        microbatches = zip(*local, strict=True)
        return ordered_sum(
            [tree_sum([self._on_wire(g) for g in of_microbatch]) for of_microbatch in microbatches]
        )

    def _on_wire(self, gradient: Tensor | None) -> Tensor | None:
        if gradient is None or self.wire_dtype is None:
            return gradient
        return gradient.to(self.wire_dtype).to(gradient.dtype)


def tree_sum(terms: Sequence[Tensor | None]) -> Tensor | None:
    """Sum in a pairwise tree that splits at the largest power of two below the number of terms.

    None counts as zero; the sum of nothing but None is None. Raises ValueError without terms.
    """
    if not terms:
        raise ValueError("a sum over no ranks")
    if len(terms) == 1:
        return terms[0]
    split = 1
    while 2 * split < len(terms):
        split *= 2
    return _add(tree_sum(terms[:split]), tree_sum(terms[split:]))


def ordered_sum(terms: Sequence[Tensor | None]) -> Tensor | None:
    """Sum from left to right. None counts as zero, as in `tree_sum`."""
    total: Tensor | None = None
    for term in terms:
        total = _add(total, term)
    return total


def _add(left: Tensor | None, right: Tensor | None) -> Tensor | None:
    if left is None:
        return right
    return left if right is None else left + right


def global_norm(gradients: Mapping[str, Tensor | None]) -> Tensor:
    """Return the 2-norm over all gradients: squares added in fp64, rounded to fp32 once."""
    total = torch.zeros((), dtype=torch.float64)
    for gradient in gradients.values():
        if gradient is not None:
            total = total + gradient.double().square().sum().cpu()
    return total.sqrt().float()


def bit_oracle(
    build_model: Callable[[], nn.Module],
    batches: BatchesOfStep | Callable[[int], BatchesOfStep],
    loss_fn: LossFunction,
    build_optimizer: Callable[[nn.Module], torch.optim.Optimizer],
    *,
    steps: int = 1,
    cadence: Cadence | Callable[[str], Cadence] = "once",
    axes: Sequence[int] | None = None,
    max_norm: float | None = None,
    per_token: bool = False,
    wire_dtype: torch.dtype | None = None,
    compute_dtype: torch.dtype | None = None,
) -> list[OracleStep]:
    """Train as D data-parallel ranks with M microbatches would, one local batch after the other.

    `batches[rank][microbatch]` (the same at every step), or a function of the step that gives
    such lists. `build_optimizer(model)` is called once, with the main weights; its groups are set
    to `foreach=False`. The sum is multiplied by fp32(1/D); with `per_token` it is divided by
    the global count instead, and `loss_fn` returns (sum of losses, number of tokens).
    `max_norm` multiplies all gradients by min(1, max_norm / (norm + 1e-6)), in fp32.
    `Arithmetic` explains the other options; `cadence` may be a function of a parameter's name.

    Sums are in the dtype of the main weights (fp32, or fp64 for a model built so). Nothing random
    (dropout) and no state in buffers may make a forward depend on those before it.

    Raises ValueError if ranks have different numbers of microbatches or `axes` don't multiply
    to D.
    """
    cadence_of = cadence if callable(cadence) else lambda _: cadence
    arithmetic = Arithmetic("once", tuple(axes) if axes else None, wire_dtype, compute_dtype)
    main = build_model()
    compute = main if compute_dtype is None else copy.deepcopy(main)
    optimizer = _without_foreach(build_optimizer(main))
    history: list[OracleStep] = []
    for step in range(steps):
        of_step = batches(step) if callable(batches) else batches
        _check_batches(of_step, arithmetic)
        _install(main, compute, compute_dtype)
        losses, tokens, local = _run_local_batches(compute, main, of_step, loss_fn, per_token)
        gradients = {
            name: replace(arithmetic, cadence=cadence_of(name)).reduce(of_name)
            for name, of_name in local.items()
        }
        gradients = _normalised(gradients, len(of_step), tokens)
        history.append(_step(main, optimizer, losses, gradients, max_norm))
    return history


def whole_batch_oracle(
    build_model: Callable[[], nn.Module],
    batches: BatchesOfStep | Callable[[int], BatchesOfStep],
    loss_fn: LossFunction,
    build_optimizer: Callable[[nn.Module], torch.optim.Optimizer],
    *,
    steps: int = 1,
    max_norm: float | None = None,
    per_token: bool = False,
) -> list[OracleStep]:
    """Train on the batches of all ranks and microbatches at once.

    Arguments as in `bit_oracle`. Batches are tensors, or tuples, lists and dicts of them, joined
    along dimension 0; local batches must be equally large, or the mean over them is not the mean
    of their means (with `per_token` they need not be). Raises ValueError if they are not.
    """
    model = build_model()
    optimizer = _without_foreach(build_optimizer(model))
    history: list[OracleStep] = []
    for step in range(steps):
        of_step = batches(step) if callable(batches) else batches
        parts = [batch for of_rank in of_step for batch in of_rank]
        sizes = {_rows(part) for part in parts}
        if len(sizes) > 1 and not per_token:
            raise ValueError(f"local batches have {sorted(sizes)} rows; a mean needs equal ones")
        losses, tokens, local = _run_local_batches(
            model, model, [[concatenate(parts)]], loss_fn, per_token
        )
        gradients = _normalised({name: g[0][0] for name, g in local.items()}, 1, tokens)
        history.append(_step(model, optimizer, losses, gradients, max_norm))
    return history


def concatenate(batches: Sequence[Batch]) -> Batch:
    """Join batches of the same structure along dimension 0 of their tensors."""
    first = batches[0]
    if isinstance(first, Tensor):
        return torch.cat(list(batches))
    if isinstance(first, Mapping):
        return {key: concatenate([batch[key] for batch in batches]) for key in first}
    if isinstance(first, (tuple, list)):
        return type(first)([concatenate(column) for column in zip(*batches, strict=True)])
    raise TypeError(f"batches are tensors, or tuples, lists and dicts of them, not {type(first)}")


def _rows(batch: Batch) -> int:
    if isinstance(batch, Tensor):
        return len(batch)
    values = list(batch.values()) if isinstance(batch, Mapping) else list(batch)
    return _rows(values[0])


def _check_batches(batches: BatchesOfStep, arithmetic: Arithmetic) -> None:
    counts = [len(of_rank) for of_rank in batches]
    if len(set(counts)) != 1:
        raise ValueError(f"ranks have {counts} microbatches; all need the same number")
    product = 1
    for size in arithmetic.axes or (len(batches),):
        product *= size
    if product != len(batches):
        raise ValueError(f"axes {arithmetic.axes} make {product} ranks; there are {len(batches)}")


def _install(main: nn.Module, compute: nn.Module, dtype: torch.dtype | None) -> None:
    if dtype is None:
        return
    for source, target in zip(main.parameters(), compute.parameters(), strict=True):
        target.data = source.detach().to(dtype)


def _run_local_batches(
    model: nn.Module,
    main: nn.Module,
    batches: BatchesOfStep,
    loss_fn: LossFunction,
    per_token: bool,
) -> tuple[list[Tensor], int | None, dict[str, list[list[Tensor | None]]]]:
    """Return losses, the token count and the gradients by name, [rank][microbatch]."""
    losses: list[Tensor] = []
    tokens = 0
    local: dict[str, list[list[Tensor | None]]] = {n: [] for n, _ in main.named_parameters()}
    for of_rank in batches:
        for of_name in local.values():
            of_name.append([])
        for batch in of_rank:
            model.zero_grad(set_to_none=True)
            result = loss_fn(model, batch)
            loss, count = result if per_token else (result, 0)
            tokens += int(count)
            (loss if per_token else loss / len(of_rank)).backward()
            losses.append(loss.detach().clone())
            weights = zip(main.named_parameters(), model.parameters(), strict=True)
            for (name, weight), computed in weights:
                gradient = computed.grad
                local[name][-1].append(None if gradient is None else gradient.to(weight.dtype))
    model.zero_grad(set_to_none=True)
    return losses, tokens if per_token else None, local


def _normalised(gradients: Gradients, ranks: int, tokens: int | None) -> Gradients:
    result: Gradients = {}
    for name, gradient in gradients.items():
        if gradient is None:
            result[name] = None
        elif tokens is not None:
            result[name] = gradient / torch.tensor(tokens, dtype=gradient.dtype)
        else:
            # Rounded to the sum's precision first: a product with 1/D in double differs.
            result[name] = gradient * torch.tensor(1.0 / ranks, dtype=gradient.dtype)
    return result


def _without_foreach(optimizer: torch.optim.Optimizer) -> torch.optim.Optimizer:
    for group in optimizer.param_groups:
        if "foreach" in group:
            group["foreach"] = False
    return optimizer


def _step(
    model: nn.Module,
    optimizer: torch.optim.Optimizer,
    losses: list[Tensor],
    gradients: Gradients,
    max_norm: float | None,
) -> OracleStep:
    clipped, norm = gradients, None
    if max_norm is not None:
        norm = global_norm(gradients)
        factor = (max_norm / (norm + 1e-6)).clamp(max=1.0)
        clipped = {name: None if g is None else g * factor for name, g in gradients.items()}
    for name, parameter in model.named_parameters():
        gradient = clipped[name]
        parameter.grad = None if gradient is None else gradient.clone()
    optimizer.step()
    optimizer.zero_grad(set_to_none=True)
    parameters = {name: p.detach().clone() for name, p in model.named_parameters()}
    return OracleStep(losses, gradients, clipped, norm, parameters)


class PlainMuon(torch.optim.Optimizer):
    """Muon one matrix after the other, in the dtype of the matrix, beside AdamW written out.

    Matrices are those whose name `is_matrix` takes; of three dimensions, each of a stack.
    """

    def __init__(
        self, model: nn.Module, lr: float, adamw_lr: float, is_matrix: Callable[[str], bool]
    ) -> None:
        super().__init__(model.parameters(), {})
        self.lr, self.adamw_lr = lr, adamw_lr
        self.matrices = {p for name, p in model.named_parameters() if is_matrix(name)}

    @torch.no_grad()
    def step(self) -> None:  # type: ignore[override]
        """One step, with a weight decay of 0.1, momentum 0.95 and betas 0.9 and 0.95."""
        for parameter in self.param_groups[0]["params"]:
            gradient, state = parameter.grad, self.state[parameter]
            if gradient is None:
                continue
            if not state:
                state["first"], state["second"] = (
                    torch.zeros_like(gradient),
                    torch.zeros_like(gradient),
                )
                state["count"] = 0
            state["count"] += 1
            if parameter in self.matrices:
                state["first"] = 0.95 * state["first"] + 0.05 * gradient
                update = 0.05 * gradient + 0.95 * state["first"]
                parameter *= 1 - self.lr * 0.1
                stacks = (
                    (parameter, update) if parameter.ndim == 3 else (parameter[None], update[None])
                )
                for matrix, direction in zip(*stacks, strict=True):
                    scale = max(1, matrix.shape[0] / matrix.shape[1]) ** 0.5
                    matrix -= self.lr * scale * _orthogonal(direction)
            else:
                state["first"] = 0.9 * state["first"] + 0.1 * gradient
                state["second"] = 0.95 * state["second"] + 0.05 * gradient**2
                first = state["first"] / (1 - 0.9 ** state["count"])
                second = state["second"] / (1 - 0.95 ** state["count"])
                parameter *= 1 - self.adamw_lr * 0.1
                parameter -= self.adamw_lr * first / (second.sqrt() + 1e-8)


def _orthogonal(matrix: Tensor) -> Tensor:
    """Five steps of the quintic Newton-Schulz iteration, always from the right."""
    x = matrix / max(matrix.square().sum().sqrt().item(), 1e-7)
    for _ in range(5):
        square = x.T @ x
        x = 3.4445 * x - 4.7750 * x @ square + 2.0315 * x @ square @ square
    return x
