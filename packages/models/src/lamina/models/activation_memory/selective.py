"""Outputs of operations that are not saved for backward, but computed again when it needs them.

An operation's output is usually saved by the operation itself and by the product that reads it.
Here the operation saves its inputs only, and the hooks that autograd calls for saved tensors save a
recipe for the output (decision 0604). The first part of backward that needs the output runs the
operation again, once, with autograd enabled. The backward of the operation uses the same run.
"""

from __future__ import annotations

import weakref
from collections.abc import Callable, Iterator
from contextlib import contextmanager, nullcontext
from typing import Any, NamedTuple

import torch
from torch import Tensor, nn
from torch.autograd.function import once_differentiable
from torch.multiprocessing.reductions import StorageWeakRef

from lamina.buffers.engine import SavedTensor
from lamina.mesh.engine import recompute_contexts
from lamina.models.base.applied import applied


class Discarder:
    """Knows, while a block's forward runs, which storages hold outputs that are not to be saved."""

    def __init__(self) -> None:
        self._known: dict[int, tuple[StorageWeakRef, int, _Recipe]] = {}

    @contextmanager
    def hooks(self) -> Iterator[None]:
        """Inside, autograd saves a recipe for an output that is known here."""
        try:
            with torch.autograd.graph.saved_tensors_hooks(self._pack, _unpack):
                yield
        finally:
            self._known.clear()

    def run(self, module: nn.Module, forward: Callable[..., Tensor], *inputs: Any) -> Tensor:
        """Call `forward`, which returns one tensor, and save its inputs rather than its output.

        `module` owns the parameters that `forward` uses. Tensors among the inputs may require
        gradients.
        """
        if not torch.is_grad_enabled():
            return forward(*inputs)
        narrow = any(parameter.dtype != torch.float32 for parameter in module.parameters())
        if narrow and getattr(module, "layout_invariant", False):
            raise ValueError(
                f"{type(module).__name__} of a model with invariant=True, recomputed by itself, "
                "would round its parameters' gradients to their dtype for each microbatch: take "
                "RecomputePolicy(kind='selective', operations=('attention', 'activation'))"
            )
        recipe = _Recipe(module, forward, inputs)
        tensors = [x for x in inputs if isinstance(x, Tensor)]
        output = applied(_Recomputed, recipe, len(tensors), *tensors, *module.parameters())
        if output.requires_grad:
            storage = output.untyped_storage()
            self._known[storage._cdata] = StorageWeakRef(storage), output._version, recipe  # type: ignore[no-untyped-call]
        return output

    def _pack(self, tensor: Tensor) -> SavedTensor | _RecipeView:
        entry = self._known.get(tensor.untyped_storage()._cdata)
        if entry is None:
            return SavedTensor.of(tensor)
        storage, version, recipe = entry
        # The address of a freed storage may belong to another one by now, and an output that was
        # written to afterwards cannot be computed again. Such tensors are saved as usual.
        if storage.expired() or tensor._version != version:  # type: ignore[no-untyped-call]
            return SavedTensor.of(tensor)
        return _RecipeView(recipe, tensor.size(), tensor.stride(), int(tensor.storage_offset()))


class _RecipeView(NamedTuple):
    """A view of a recipe's output."""

    recipe: _Recipe
    size: torch.Size
    stride: tuple[int, ...]
    offset: int


def _unpack(packed: SavedTensor | _RecipeView) -> Tensor:
    if isinstance(packed, SavedTensor):
        return packed.unpacked()
    output = packed.recipe.rerun().output.detach()
    return output.as_strided(packed.size, packed.stride, packed.offset)


class _Run(NamedTuple):
    """An operation run again: the inputs as leaves of its own graph, and the output."""

    leaves: list[Tensor]
    output: Tensor


class _Recipe:
    """How to compute an output again, and the run that did so, until its last use.

    The states of generators are saved only for modules with a dropout `rate`; each takes 5 KB.
    """

    def __init__(
        self, module: nn.Module, forward: Callable[..., Tensor], inputs: tuple[Any, ...]
    ) -> None:
        self.module = module
        self.forward = forward
        self.others = [None if isinstance(x, Tensor) else x for x in inputs]
        self.tensors_at = [i for i, x in enumerate(inputs) if isinstance(x, Tensor)]
        self.random: _RandomState | None = None
        # An attribute of the object: the `rate` of a scan is a property, which computes its decays.
        rate = vars(module).get("rate")
        if isinstance(rate, float) and rate > 0.0 and module.training:
            self.random = _RandomState([inputs[i] for i in self.tensors_at])
        self.node: Callable[[], Any] = lambda: None
        self.kept: _Run | None = None

    def call(self, tensors: list[Tensor]) -> Tensor:
        """Run the operation on these tensors and the other inputs as they were."""
        inputs = list(self.others)
        for place, tensor in zip(self.tensors_at, tensors, strict=True):
            inputs[place] = tensor
        return self.forward(*inputs)

    def rerun(self) -> _Run:
        """Compute the output again from what the node saved, once for all who ask."""
        if self.kept is None:
            # The node is alive, because its own backward comes after everything that reads this.
            saved, wanted = self.node().saved_tensors, self.node().needs_input_grad[2:]
            leaves = [
                x.detach().requires_grad_(needed) for x, needed in zip(saved, wanted, strict=False)
            ]
            random = nullcontext() if self.random is None else self.random.replayed()
            with torch.enable_grad(), random:
                self.kept = _Run(leaves, self.call(leaves))
        return self.kept


class _Recomputed(torch.autograd.Function):
    """An operation that saves its inputs only."""

    @staticmethod
    def forward(ctx: Any, recipe: _Recipe, count: int, *tensors: Tensor) -> Tensor:
        """Run `recipe` on the first `count` tensors; the others are its parameters."""
        ctx.save_for_backward(*tensors[:count])
        ctx.recipe = recipe
        # A weak reference, because the node holds the recipe.
        recipe.node = weakref.ref(ctx)
        return recipe.call(list(tensors[:count]))

    @staticmethod
    @once_differentiable
    def backward(ctx: Any, grad: Tensor) -> tuple[Tensor | None, ...]:
        """Gradients of the inputs and parameters, through the operation run again."""
        recipe: _Recipe = ctx.recipe
        run = recipe.rerun()
        recipe.kept = None
        sources = [*run.leaves, *recipe.module.parameters()]
        wanted = [x for x in sources if x.requires_grad]
        grads = iter(torch.autograd.grad(run.output, wanted, grad, allow_unused=True))
        return None, None, *(next(grads) if x.requires_grad else None for x in sources)


class _RandomState:
    """The states of the generators before an operation ran."""

    def __init__(self, tensors: list[Tensor]) -> None:
        self.cpu = torch.get_rng_state()
        self.devices = sorted({x.get_device() for x in tensors if x.is_cuda})
        self.cuda = [torch.cuda.get_rng_state(device) for device in self.devices]
        self.streams = recompute_contexts()[1]

    @contextmanager
    def replayed(self) -> Iterator[None]:
        """Inside, generators draw the same numbers again. Afterwards their states are restored."""
        with torch.random.fork_rng(self.devices):
            torch.set_rng_state(self.cpu)
            for device, state in zip(self.devices, self.cuda, strict=True):
                torch.cuda.set_rng_state(state, device)
            with self.streams:
                yield
