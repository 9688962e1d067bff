"""`DistributedDataParallel`: whole parameters, bucketed gradients, optional sharded optimizer."""

from __future__ import annotations

import weakref
from collections.abc import Callable, Iterator
from contextlib import AbstractContextManager
from typing import Any

import torch
from torch import nn
from torch.distributed.device_mesh import DeviceMesh
from torch.utils._pytree import tree_leaves

from lamina.buffers import Granularity
from lamina.collectives import broadcast
from lamina.ddp.axes import DataParallelAxes, data_parallel_axes
from lamina.ddp.buckets import plan_buckets
from lamina.ddp.config import DistributedDataParallelConfig
from lamina.ddp.contract import DataParallel
from lamina.ddp.group import GroupSettings, ParameterGroup
from lamina.ddp.grouping import collect_parameters
from lamina.ddp.precision import resolve_dtypes
from lamina.ddp.rank_sums import GradientState
from lamina.ddp.reducer import GradientReducer
from lamina.ddp.reduction import resolve_reduction
from lamina.ddp.strategy import resolve_strategy
from lamina.ddp.transient import TransientBuffers
from lamina.mesh import ParallelMesh, require_overlap

__all__ = ["DistributedDataParallel"]

_GATHERS_AHEAD = 4
"""Buckets whose weights are on their way while one is waited for: one alone would leave the wire
idle from its arrival to the next bucket's use. They are gathered in place, so more cost nothing."""


class DistributedDataParallel(DataParallel):
    """Data parallelism over buckets of contiguous gradients (ZeRO-0, or ZeRO-1 with its optimizer).

    The module's parameters stay the user's, whole, and become views of the buckets' weight
    buffers. Gradients are averaged over the data-parallel ranks at the end of every backward that
    is not inside `no_sync`. With `use_distributed_optimizer`, wrap the optimizer in
    `ShardedOptimizer`: gradients then lie on its parameters, not on the module's.

    Args:
        module: the model, with the same architecture on every rank; its first data-parallel
            rank's values are taken.
        config: see `DistributedDataParallelConfig`.
        mesh: a `ParallelMesh`, or a `DeviceMesh` with a dimension called `dp_shard` or `dp` (and
            `dp_replicate`), or with one dimension.

    Raises:
        ValueError: for a mesh that does not fit the config, or a model on the meta device.
    """

    def __init__(
        self,
        module: nn.Module,
        config: DistributedDataParallelConfig,
        mesh: ParallelMesh | DeviceMesh,
    ) -> None:
        super().__init__()
        if config.overlap_grad_reduce or config.overlap_param_gather:
            require_overlap("DistributedDataParallel with overlap")
        self.module = module
        self.config = config
        self._in_backward = False
        dense, expert = _axes(mesh, config)
        transient = TransientBuffers(keep_on_cpu=True)
        settings = _settings(config, dense)
        self._groups = _make_groups(module, config, settings, dense, expert, transient)
        self._reducer = GradientReducer(
            [group for group in self._groups if group.requires_grad],
            settings.cadence,
            transient,
            overlap=config.overlap_grad_reduce,
            max_in_flight=4,
            close_when_complete=config.overlap_grad_reduce,
            check_finite=config.check_for_nan_in_grad,
            largest=config.check_for_large_grads,
        )
        self._hook_weights()

    def forward(self, *args: Any, **kwargs: Any) -> Any:
        """The wrapped module's forward; updated weights are waited for where they are used."""
        if self._in_backward and torch._C._current_graph_task_id() == -1:
            self._reducer.abandon_backward()  # the last backward raised
            self._in_backward = False
        self._begin_weights()
        output = self.module(*args, **kwargs)
        if torch.is_grad_enabled():
            begin = weakref.WeakMethod(self._begin_backward)
            for leaf in tree_leaves(output):
                if isinstance(leaf, torch.Tensor) and leaf.requires_grad:
                    leaf.register_hook(_starting(begin))  # type: ignore[no-untyped-call]
        return output

    def parameter_groups(self) -> Iterator[ParameterGroup]:
        """All buckets, in the order in which they are reduced."""
        yield from self._groups

    def no_sync(self) -> AbstractContextManager[None]:
        """Backwards inside are not the step's last microbatch."""
        return self._reducer.no_sync()

    def late_gradients(self) -> AbstractContextManager[None]:
        """Gradients that arrive inside belong to backwards that are over (split backwards)."""
        return self._reducer.late_gradients()

    def start_grad_sync(self) -> None:
        """Begin to sum what `no_sync` accumulated; nothing where nothing waits to be summed."""
        self._reducer.start()

    def finish_grad_sync(self) -> None:
        """Sum what was accumulated and not yet summed, and wait for it."""
        self._reducer.finish()

    def scale_gradients(self, factor: float) -> None:
        """Multiply all main grads by `factor`."""
        for group in self._groups:
            if group.gradients is not None and group.gradients.state is not GradientState.EMPTY:
                group.gradients.main.data.mul_(factor)

    def zero_grad_buffer(self) -> None:
        """Forget all gradients, those of microbatches inside `no_sync` included."""
        for group in self._groups:
            group.discard_gradients()

    def broadcast_params(self) -> None:
        """Take the first data-parallel rank's weights (collective)."""
        for group in self._groups:
            for process_group in group.axes.groups("gather"):
                broadcast(group.weights.full, process_group, src=0)
            group.adopt_model_weights()

    def start_param_sync(self) -> None:
        """Begin to bring updated main weights into the module's, bucket by bucket."""
        for group in reversed(self._groups):
            group.weights.mark_changed()
        self._begin_weights(everything=True)

    def weights_written(self) -> None:
        """The optimizer has stepped (called by `ShardedOptimizer`)."""
        for group in self._groups:
            group.weights.mark_changed()
        if not self.config.overlap_param_gather:
            self._begin_weights(everything=True)
            for group in self._groups:
                group.weights.wait()

    def state_dict(self, *args: Any, **kwargs: Any) -> Any:
        """The wrapped module's, under its own names (no "module." prefix)."""
        for group in self._groups:
            group.weights.start()
            group.weights.wait()
        return self.module.state_dict(*args, **kwargs)

    def load_state_dict(self, *args: Any, **kwargs: Any) -> Any:
        """Load into the wrapped module, and into main weights where those are apart."""
        result = self.module.load_state_dict(*args, **kwargs)
        for group in self._groups:
            group.adopt_model_weights()
        return result

    # -- weights ------------------------------------------------------------------------------

    def _begin_weights(self, *, everything: bool = False) -> None:
        """Start gathers of updated weights, first used first (registration order)."""
        order = list(reversed(self._groups))
        ahead = order if everything or self.config.align_param_gather else order[:_GATHERS_AHEAD]
        for group in ahead:
            group.weights.start()

    def _hook_weights(self) -> None:
        """Before a module runs, wait for its buckets, and start some after them."""
        order = list(reversed(self._groups))
        following = {
            id(group): order[at + 1 : at + _GATHERS_AHEAD] for at, group in enumerate(order)
        }
        needed: dict[nn.Module, list[ParameterGroup]] = {}
        for group in order:
            for ref in group.refs:
                for reference, _ in ref.owners:
                    owner = reference()
                    if owner is not None and group not in needed.setdefault(owner, []):
                        needed[owner].append(group)
        for owner, groups in needed.items():
            owner.register_forward_pre_hook(_waiting(groups, following), prepend=True)

    # -- backward -----------------------------------------------------------------------------

    def _begin_backward(self) -> None:
        if self._in_backward:
            return
        self._in_backward = True
        self._reducer.begin_backward()
        torch.autograd.Variable._execution_engine.queue_callback(self._end_backward)

    def _end_backward(self) -> None:
        self._in_backward = False
        self._reducer.end_backward()


def _starting(begin: weakref.WeakMethod[Callable[[], None]]) -> Callable[[Any], None]:
    def hook(_: torch.Tensor) -> None:
        if (method := begin()) is not None:
            method()

    return hook


def _waiting(
    groups: list[ParameterGroup], following: dict[int, list[ParameterGroup]]
) -> Callable[..., None]:
    """A pre-forward hook. It holds weak references: the groups hold the module's parameters."""
    pairs = [
        (weakref.ref(group), [weakref.ref(other) for other in following[id(group)]])
        for group in groups
    ]

    def hook(*_: Any) -> None:
        for reference, successors in pairs:
            group = reference()
            if group is None or group.weights.ready:
                continue
            group.weights.start()
            for successor in successors:
                if (after := successor()) is not None:
                    after.weights.start()
            group.weights.wait()

    disabled: Callable[..., None] = torch.compiler.disable(hook)  # type: ignore[no-untyped-call]
    return disabled


def _settings(config: DistributedDataParallelConfig, dense: DataParallelAxes) -> GroupSettings:
    return GroupSettings(
        resolve_strategy(1 if config.use_distributed_optimizer else 0),
        granularity=Granularity.tensor() if config.keep_tensors_whole else None,
        scale=None if config.calculate_per_token_loss else 1.0 / dense.divisor,
        shard_multiple=1 << 16 if config.pad_buckets_for_high_nccl_busbw else 1,
        reduction=resolve_reduction(
            config.reduction, config.reproducible, config.average_in_collective
        ),
    )


def _make_groups(
    module: nn.Module,
    config: DistributedDataParallelConfig,
    settings: GroupSettings,
    dense: DataParallelAxes,
    expert: DataParallelAxes | None,
    transient: TransientBuffers,
) -> list[ParameterGroup]:
    refs = collect_parameters(module)
    meta = [ref.name for ref in refs if ref.parameter.is_meta]
    if meta:
        raise ValueError(
            f"{meta[0]} and {len(meta) - 1} others are on the meta device: give them values "
            "before wrapping, or use lamina.fsdp.fully_shard, which materialises unit by unit"
        )
    groups = []
    for key, members in plan_buckets(refs, config, dense.size):
        wide = torch.promote_types(key.dtype, torch.float32)
        dtypes = resolve_dtypes(key.dtype, wire=wide if config.grad_reduce_in_fp32 else None)
        axes = expert if key.expert and expert is not None else dense
        groups.append(ParameterGroup(members, axes, dtypes, settings, transient))
    return groups


def _axes(
    mesh: ParallelMesh | DeviceMesh, config: DistributedDataParallelConfig
) -> tuple[DataParallelAxes, DataParallelAxes | None]:
    expert = None
    if isinstance(mesh, ParallelMesh):
        dense = data_parallel_axes(mesh, "dp_shard_cp", "dp_replicate")
        if mesh.layout.ep * mesh.layout.expert_tp * mesh.layout.tp > 1:
            expert = data_parallel_axes(mesh, "expert_dp", "dp_replicate", dense.size)
    else:
        names = mesh.mesh_dim_names or ()
        known = [n for n in ("dp_shard", "dp") if n in names]
        inner = known[0] if known else names[0] if len(names) == 1 else None
        if inner is None:
            raise ValueError(
                f"the mesh has dimensions {names}: name the data-parallel one 'dp' or 'dp_shard'"
            )
        dense = data_parallel_axes(mesh, inner, "dp_replicate" if "dp_replicate" in names else None)
    instances = config.num_distributed_optimizer_instances
    if instances > 1 and dense.outer.size != instances:
        raise ValueError(
            f"num_distributed_optimizer_instances={instances} needs a mesh with "
            f"dp_replicate={instances}; this one has {dense.outer.size} (build it with "
            f"ParallelLayout(dp_replicate={instances}))"
        )
    return dense, expert
