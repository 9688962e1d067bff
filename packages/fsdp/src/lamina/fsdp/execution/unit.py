"""A unit at work: its groups' weights come and go together."""

from __future__ import annotations

import weakref
from collections.abc import Callable, Sequence

import torch
from torch import nn

from lamina.buffers import StaleStorageError
from lamina.ddp.engine import ParameterGroup, WeightsState
from lamina.fsdp.settings.hardware_limits import UnavailableError
from lamina.fsdp.weights.sharded import ShardedWeights

__all__ = ["PendingBackward", "Unit"]


class PendingBackward:
    """One forward of a unit whose backward is still to come.

    It lives on the autograd graph and nowhere else: when the graph is freed without a backward
    (a discarded loss, a recomputation), it is gone, and nobody waits for it.
    """

    __slots__ = ("__weakref__", "done")

    def __init__(self) -> None:
        self.done = False


class Unit:
    """Modules' parameters that are gathered and released together.

    Args:
        name: qualified name of the unit's module; "" for the root.
        module: the module (held weakly: it holds its engine through its hooks).
        groups: the groups that hold its own parameters.
        reshard_after_forward: give whole weights back between forward and backward.
    """

    def __init__(
        self,
        name: str,
        module: nn.Module,
        groups: list[ParameterGroup],
        reshard_after_forward: bool = True,
    ) -> None:
        self.name = name
        self.module_class = type(module).__name__
        self.groups = tuple(groups)
        self.reshard_after_forward = reshard_after_forward
        self.explicit_reshard = False
        """Whether somebody asked for that; otherwise the root keeps its weights for backward."""
        self.unshard_in_backward = True
        """Whether backward reads the weights, as all but embeddings' do."""
        self.prefetch: dict[int, tuple[Unit, ...]] = {}
        """Units to gather when this one's forward (1) or backward (-1) begins, where somebody said
        so; otherwise the recorded order says it."""
        self.members = 1
        """How many modules that are called are one unit (`shard_module` of a list)."""
        self.called: set[int] = set()
        """Those of them that have run since all had."""
        self.to_come: set[int] = set()
        """Those of several whose backward may be yet to come."""
        self.stays_whole = False
        """Whether it is given back at the end of a step only."""
        self.in_backward = False
        """Between this unit's pre-backward and the end of its last backward."""
        self.calls_without_grad = 0
        """Runs in the newest forward of the model with gradients off: reentrant recomputation will
        come back to each of them, one at a time and without notice."""
        self.gathered = tuple(
            group.weights for group in groups if isinstance(group.weights, ShardedWeights)
        )
        """Those of the groups' weights that come and go."""
        for group in groups:
            if isinstance(group.weights, ShardedWeights):
                group.weights.belongs_to(group)
        self.before_gather: Callable[[Unit], None] | None = None
        """Called when a gather is about to begin (`check_order`)."""
        self.awaited = False
        """Between the begin of a gather and the use of what it brings."""
        self._pending: weakref.WeakSet[PendingBackward] = weakref.WeakSet()

    @property
    def gathered_bytes(self) -> int:
        """Bytes of the whole weights that come and go."""
        return sum(weights.nbytes for weights in self.gathered)

    @property
    def live_bytes(self) -> int:
        """Bytes of those that are there, or on their way."""
        there = (w for w in self.gathered if w.state is not WeightsState.RELEASED)
        return sum(weights.nbytes for weights in there)

    def start_unshard(self) -> None:
        """Begin the gathers of all groups."""
        self.awaited = True
        if self.before_gather is not None and self.live_bytes < self.gathered_bytes:
            self.before_gather(self)
        for group in self.groups:
            group.weights.start()

    def unshard(self) -> None:
        """Make the whole weights ready and the module compute with them."""
        self.start_unshard()
        for group in self.groups:
            group.weights.wait()
            group.install_compute_parameters()
        self.awaited = False

    def reshard(self, *, even_if_kept: bool = False) -> None:
        """Give the whole weights back; the module holds what the optimizer updates.

        Args:
            even_if_kept: also where the unit `stays_whole` for a step.
        """
        if self.stays_whole and not even_if_kept:
            return
        self.awaited = False
        for group in self.groups:
            group.weights.release()
            group.install_main_parameters()

    def places(self) -> tuple[int, ...]:
        """Where the whole weights lie now, which is where autograd saves views of them."""
        return tuple(weights.place for weights in self.gathered)

    def return_to(self, places: Sequence[int]) -> None:
        """The backward of a forward that ran in these places comes now (again).

        Raises:
            StaleStorageError: if another place was taken since, which that graph does not know.
        """
        if self.places() != tuple(places):
            raise StaleStorageError(
                f"{self.name or 'the root'} has taken another place since the forward whose "
                "backward runs again (retain_graph=True), as other backwards came between: run "
                "that forward anew, walk its graph again before other backwards, or use "
                "fsdp_double_buffer=False"
            )
        for weights in self.gathered:
            weights.remember_place()

    def set_reshard_after_forward(self, reshard: bool) -> None:
        """Whether whole weights are given back between forward and backward, the root's too."""
        self.reshard_after_forward = reshard
        self.explicit_reshard = True

    def set_gradient_divide_factor(self, factor: float) -> None:
        """Divide summed gradients by this instead of the number of data-parallel ranks.

        Raises:
            ValueError: if it is not positive.
            RuntimeError: while gradients are accumulated.
        """
        if not factor > 0:
            raise ValueError(f"set_gradient_divide_factor({factor!r}): a number above 0")
        for group in self.groups:
            if group.gradients is not None:
                group.gradients.set_sum(group.settings.reduction.make, 1.0 / factor)

    def set_unshard_in_backward(self, unshard_in_backward: bool) -> None:
        """Whether the weights are gathered for backward.

        Raises:
            UnavailableError: for False where a backward may read weights.
        """
        for ref in () if unshard_in_backward else (r for g in self.groups for r in g.refs):
            owners = [owner() for owner, _ in ref.owners]
            if not all(isinstance(one, (nn.Embedding, nn.EmbeddingBag)) for one in owners):
                raise UnavailableError(
                    f"set_unshard_in_backward(False) on {self.name or self.module_class}: "
                    f"{ref.name} is no embedding's, so its backward may read weights, which are "
                    "released: shard embeddings on their own, or keep weights with "
                    "set_reshard_after_forward(False)"
                )
        self.unshard_in_backward = unshard_in_backward

    def set_all_reduce_hook(self, hook: Callable[[torch.Tensor], None] | None) -> None:
        """Call `hook(gradients)` when a step's last reduction is done, before anybody reads them.

        Args:
            hook: changes main grads in place: flat, this rank's part of one group of the unit's
                parameters. It may communicate: all ranks come to it in the same order, wherever the
                unit had gradients. None for none.
        """
        for group in self.groups:
            if group.gradients is not None:
                group.gradients.when_final = hook

    def has_run(self, member: int) -> bool:
        """One of the unit's modules has run: whether all of them have, since this was so last."""
        self.called.add(member)
        complete = len(self.called) == self.members
        if complete:
            self.called.clear()
        return complete

    def expect_backward(self) -> PendingBackward:
        """Note a forward that autograd will come back to; the caller puts it on the graph."""
        pending = PendingBackward()
        self._pending.add(pending)
        return pending

    @property
    def expects_more(self) -> bool:
        """Whether some forward's backward has not run yet, or may be yet to come."""
        return self.calls_without_grad > 1 or any(not pending.done for pending in self._pending)
