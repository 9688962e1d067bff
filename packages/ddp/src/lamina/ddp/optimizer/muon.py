"""Muon, which steps a matrix by its momentum made orthogonal, over any mesh (Jordan, 2024).

Momentum is kept where the matrix is, cut like it. Only the update that is to be made orthogonal
travels, in the dtype of the iteration (bf16 is torch's), and so does the result. See
`lamina.ddp.optimizer.owners` and decision 0430.
"""

import math
import re
from collections.abc import Callable, Iterable, Mapping, Sequence
from typing import Any

import torch
from torch import nn
from torch.optim import AdamW, Optimizer

from lamina.ddp.group.group import ParameterGroup
from lamina.ddp.group.shown import local_of
from lamina.ddp.optimizer.flat_step import ELEMENTWISE, FlatStep
from lamina.ddp.optimizer.owners import Owners
from lamina.mesh import role_of

_BUFFER = "momentum_buffer"
_NO_MATRICES = r"embed|(^|\.)w[tp]e\.|(^|\.)(lm_|output_)?head\."


class Muon(Optimizer):
    """Muon for matrices, and AdamW for all other parameters: one optimizer, over any mesh.

    Each matrix (and each of a stack of experts) is whole on one rank while it is made orthogonal,
    whatever the strategy, tp and ep have cut. Give it to `fully_shard` or `ShardedOptimizer`, which
    also take `torch.optim.Muon`; the numbers are that one's.

    Args:
        params: a module, or tensors, or groups of them. Of a module the matrices are its weights of
            two dimensions and its stacked experts, without embeddings and what has the shape or
            the name of a head. Tensors are matrices. A group says `orthogonalize=False` for AdamW.
        lr: of matrices.
        adamw_lr: of all others, in groups that name no `lr`.
        weight_decay: of both, decoupled.
        momentum, nesterov: of matrices, as of `torch.optim.Muon`.
        ns_coefficients, ns_steps, ns_eps: of the Newton-Schulz iteration, likewise.
        ns_dtype: in which it is computed and in which matrices travel.
        adjust_lr_fn: "original" (also None) or "match_rms_adamw", as of `torch.optim.Muon`.
        betas, eps: of AdamW.

    Raises:
        ValueError: a matrix has not two dimensions, or three (a stack); or another name of
            `adjust_lr_fn`.

    Examples:
        >>> optimizer = Muon(torch.nn.Linear(8, 4), lr=0.02, adamw_lr=3e-4)
        >>> [group["orthogonalize"] for group in optimizer.param_groups]
        [True, False]
    """

    def __init__(
        self,
        params: nn.Module | Iterable[Any],
        lr: float = 0.02,
        *,
        adamw_lr: float = 3e-4,
        weight_decay: float = 0.1,
        momentum: float = 0.95,
        nesterov: bool = True,
        ns_coefficients: tuple[float, float, float] = (3.4445, -4.7750, 2.0315),
        ns_steps: int = 5,
        ns_eps: float = 1e-7,
        ns_dtype: torch.dtype = torch.bfloat16,
        adjust_lr_fn: str | None = None,
        betas: tuple[float, float] = (0.9, 0.95),
        eps: float = 1e-8,
    ) -> None:
        if adjust_lr_fn not in (None, "original", "match_rms_adamw"):
            raise ValueError(
                f"adjust_lr_fn={adjust_lr_fn!r}: it is None, 'original' or 'match_rms_adamw'"
            )
        groups = _split(params) if isinstance(params, nn.Module) else list(params)
        groups = groups if groups and isinstance(groups[0], dict) else [{"params": groups}]
        # What AdamW steps has a learning rate of its own, unless the group names one.
        rest = [{"lr": adamw_lr} if not g.get("orthogonalize", True) else {} for g in groups]
        defaults = {
            "lr": lr,
            "weight_decay": weight_decay,
            "momentum": momentum,
            "nesterov": nesterov,
            "ns_coefficients": ns_coefficients,
            "ns_steps": ns_steps,
            "ns_eps": ns_eps,
            "ns_dtype": ns_dtype,
            "adjust_lr_fn": adjust_lr_fn,
            "betas": betas,
            "eps": eps,
            "orthogonalize": True,
        }
        super().__init__(
            [{**more, **group} for more, group in zip(rest, groups, strict=True)], defaults
        )

    def add_param_group(self, param_group: dict[str, Any]) -> None:
        """Add a group, as of `torch.optim.Optimizer`.

        Raises:
            ValueError: a matrix of other than two or three dimensions.
        """
        super().add_param_group(param_group)
        group = self.param_groups[-1]
        for parameter in group["params"] if group["orthogonalize"] else ():
            if parameter.ndim not in (2, 3):
                raise ValueError(
                    f"Muon steps matrices and stacks of them, and a parameter has shape "
                    f"{list(parameter.shape)}: put it into a group with orthogonalize=False, or "
                    "give the module itself, Muon(model)"
                )

    @torch.no_grad()
    def step(self, closure: Callable[[], float] | None = None) -> float | None:  # type: ignore[override]
        """One step; returns the closure's loss.

        Raises:
            NotImplementedError: over parameters that are cut over ranks, if nobody was told.
        """
        loss = None
        if closure is not None:
            with torch.enable_grad():
                loss = closure()
        for group in self.param_groups:
            if not group["orthogonalize"]:
                self._step_by_adamw(group)
                continue
            for parameter in group["params"]:
                if hasattr(parameter, "to_local"):
                    raise NotImplementedError(
                        f"Muon makes whole matrices orthogonal, and one of shape "
                        f"{list(parameter.shape)} is cut over ranks: give the optimizer to "
                        "fully_shard(model, optimizer) or ShardedOptimizer"
                    )
            step_matrices(self, group, _whole_here)
        return loss

    def _step_by_adamw(self, group: dict[str, Any]) -> None:
        if stepped := [p for p in group["params"] if p.grad is not None]:
            # Made for this step: wrappers lend other parameters to the group in every one.
            adamw = AdamW([{**group, "params": stepped}])
            adamw.state.update({parameter: self.state[parameter] for parameter in stepped})
            adamw.step()


MATRIX_OPTIMIZERS: frozenset[type[Optimizer]] = frozenset({torch.optim.Muon, Muon})
"""Optimizers that keep state of each element, and whose update is of whole matrices."""

ELEMENTWISE_STATE = ELEMENTWISE | MATRIX_OPTIMIZERS
"""Optimizers whose state is one tensor per name, of the parameter's shape, and counts."""


def _split(module: nn.Module) -> list[dict[str, Any]]:
    """Groups of the matrices in a module, and of the rest."""
    owned = [
        (name, f"{path}.{name}", child, parameter)
        for path, child in module.named_modules()
        for name, parameter in child.named_parameters(recurse=False)
    ]
    tables = {p.shape for _, _, child, p in owned if "Embedding" in type(child).__name__}
    matrices: dict[int, nn.Parameter] = {}
    for name, path, _, parameter in owned:
        of_experts = parameter.ndim == 3 and role_of(parameter).expert
        of_experts = of_experts and min(parameter.shape[1:]) > 1  # a bias is a column
        # A matrix of an embedding's shape may be a tied output head, whose rows belong to tokens.
        is_weight = parameter.ndim == 2 and name == "weight" and parameter.shape not in tables
        if of_experts or (is_weight and not re.search(_NO_MATRICES, path)):
            matrices[id(parameter)] = parameter
    rest = [p for p in module.parameters() if id(p) not in matrices]
    return [
        {"params": list(matrices.values()), "orthogonalize": True},
        {"params": rest, "orthogonalize": False},
    ]


Updates = Callable[
    [Sequence[nn.Parameter], list[torch.Tensor], Mapping[str, Any]],
    Iterable[tuple[torch.Tensor, torch.Size]],
]
"""Of parameters and their updates, the orthogonal ones and the shape of the whole matrix."""


@torch.no_grad()
def step_matrices(optimizer: Optimizer, settings: Mapping[str, Any], orthogonal: Updates) -> None:
    """Step the parameters of one of an optimizer's groups, on what this rank holds of them.

    The settings are those of `torch.optim.Muon` or `Muon`.
    """
    stepped = [p for p in settings["params"] if p.grad is not None]
    updates = []
    # Momentum is computed element by element, so a part of a matrix is enough. Only what
    # `orthogonal` computes needs whole matrices.
    for parameter in stepped:
        gradient = local_of(parameter.grad).to(parameter.dtype)
        buffer = local_of(_momentum(optimizer, parameter))
        buffer.lerp_(gradient, 1 - settings["momentum"])
        updates.append(
            gradient.lerp(buffer, settings["momentum"]) if settings["nesterov"] else buffer
        )
    rate = float(settings["lr"])
    for parameter, (update, (rows, columns)) in zip(
        stepped, orthogonal(stepped, updates, settings), strict=True
    ):
        ratio = math.sqrt(max(1, rows / columns))
        if settings["adjust_lr_fn"] == "match_rms_adamw":
            ratio = 0.2 * math.sqrt(max(rows, columns))
        local = local_of(parameter)
        local.mul_(1 - rate * settings["weight_decay"])
        local.add_(update.view(local.shape), alpha=-rate * ratio)


def _momentum(optimizer: Optimizer, parameter: nn.Parameter) -> torch.Tensor:
    state = optimizer.state[parameter]
    if _BUFFER not in state:
        state[_BUFFER] = torch.zeros_like(parameter)
    return state[_BUFFER]  # type: ignore[no-any-return]


def _whole_here(
    parameters: Sequence[nn.Parameter], updates: list[torch.Tensor], settings: Mapping[str, Any]
) -> Iterable[tuple[torch.Tensor, torch.Size]]:
    matrices = [m for update in updates for m in update.view(-1, *update.shape[-2:])]
    results = iter(newton_schulz(matrices, settings))
    for update in updates:
        yield (
            torch.stack([next(results) for _ in range(update.shape[:-2].numel())]),
            update.shape[-2:],
        )


def newton_schulz(matrices: list[torch.Tensor], settings: Mapping[str, Any]) -> list[torch.Tensor]:
    """Matrices with the singular vectors of these and singular values near 1, in `ns_dtype`.

    Matrices of one shape are computed together. One by one they give the same bits on a CPU, which
    are those of `torch.optim.Muon`.
    """
    a, b, c = settings["ns_coefficients"]
    eps = settings.get("ns_eps", settings["eps"])
    results: list[torch.Tensor] = [torch.empty(0)] * len(matrices)
    by_shape: dict[torch.Size, list[int]] = {}
    for place, matrix in enumerate(matrices):
        by_shape.setdefault(matrix.shape, []).append(place)
    for shape, places in by_shape.items():
        x = torch.stack([matrices[place] for place in places]).to(_ns_dtype(settings))
        x = x.mT if shape[0] > shape[1] else x  # the smaller product
        x = x / torch.linalg.vector_norm(x, dim=(-2, -1), keepdim=True).clamp(min=eps)
        for _ in range(settings["ns_steps"]):
            gram = x @ x.mT
            x = torch.baddbmm(x, torch.baddbmm(gram, gram, gram, beta=b, alpha=c), x, beta=a)
        for place, result in zip(places, x.mT if shape[0] > shape[1] else x, strict=True):
            results[place] = result
    return results


def _ns_dtype(settings: Mapping[str, Any]) -> torch.dtype:
    return settings.get("ns_dtype", torch.bfloat16)  # type: ignore[no-any-return]


class MatrixStep(FlatStep):
    """Steps groups of matrices on what each rank holds, and others over flat runs."""

    def __init__(self, optimizer: Optimizer) -> None:
        super().__init__(optimizer)
        self._owners: dict[tuple[int, ...], Owners] = {}

    def _prepare(self, groups: Sequence[ParameterGroup]) -> None:
        super()._prepare(groups)
        self._owners.clear()

    def _lend(
        self, number: int, settings: dict[str, Any], optimizer: Optimizer
    ) -> list[nn.Parameter]:
        if not settings.get("orthogonalize", True):
            return super()._lend(number, settings, optimizer)
        # They are stepped when the optimizer's own step has not raised; the closure's gradients
        # are there by then, too. Parameters of nobody's are stepped as they are.
        return [p for p in settings["params"] if id(p) not in self._located]

    def _collect(self, optimizer: Optimizer, *, stepped: bool) -> None:
        super()._collect(optimizer, stepped=stepped)
        for settings in optimizer.param_groups if stepped else ():
            if settings.get("orthogonalize", True):
                ours = [p for p in settings["params"] if id(p) in self._located]
                if self._for_state:
                    for parameter in (p for p in ours if p.grad is not None):
                        _momentum(optimizer, parameter)
                else:
                    step_matrices(optimizer, {**settings, "params": ours}, self._on_owners)

    def _on_owners(
        self,
        parameters: Sequence[nn.Parameter],
        updates: list[torch.Tensor],
        settings: Mapping[str, Any],
    ) -> Iterable[tuple[torch.Tensor, torch.Size]]:
        """The orthogonal updates, in one exchange for all parameters of the same axes."""
        together: dict[Any, list[int]] = {}
        for place, parameter in enumerate(parameters):
            group, _ = self._located[id(parameter)]
            group.weights.written_through(False)
            together.setdefault((group.axes, group.main_weights.cuts), []).append(place)
        results: dict[int, tuple[torch.Tensor, torch.Size]] = {}
        for places in together.values():
            key = tuple(id(parameters[place]) for place in places)
            if key not in self._owners:
                self._owners[key] = Owners([self._located[i] for i in key])
            owners, dtype = self._owners[key], _ns_dtype(settings)
            local = [updates[place].reshape(-1).to(dtype) for place in places]
            parts = owners.compute(local, lambda whole: newton_schulz(whole, settings))
            for number, (place, part) in enumerate(zip(places, parts, strict=True)):
                results[place] = part, owners.shapes[number]
        return [results[place] for place in range(len(parameters))]
