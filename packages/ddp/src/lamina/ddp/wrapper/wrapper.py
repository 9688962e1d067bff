"""`DistributedDataParallel`: whole parameters, bucketed gradients, optional sharded optimizer.

`DataParallel` is the contract that it, and every other wrapper, meets.
"""

import copy
from abc import ABC, abstractmethod
from collections.abc import Callable, Iterator
from contextlib import AbstractContextManager, nullcontext
from dataclasses import replace
from typing import Any

import torch
from torch import nn
from torch.distributed.device_mesh import DeviceMesh

from lamina.buffers import Granularity
from lamina.buffers.engine import ScratchBuffers
from lamina.collectives.engine import RegisteredPool, broadcast
from lamina.ddp.backward.gradient_hooks import refuse_wrapped
from lamina.ddp.backward.reducer import GradientReducer
from lamina.ddp.compat import local_of_state_call
from lamina.ddp.execution.engine import Engine, Guards, Prefetcher
from lamina.ddp.execution.hooks import ModuleWatch, mark_outputs
from lamina.ddp.execution.module_buffers import ModuleBuffers
from lamina.ddp.execution.unit import Unit
from lamina.ddp.gradients.reduction import resolve_reduction
from lamina.ddp.gradients.states import FINAL
from lamina.ddp.group.group import GroupSettings, ParameterGroup, refuse_changed
from lamina.ddp.inspect.memory import MemoryBudgets
from lamina.ddp.optimizer.sharded_optimizer import ShardedOptimizer
from lamina.ddp.parameters.axes import (
    DataParallelAxes,
    ModelAxes,
    check_dimensions,
    check_experts,
    data_parallel_axes,
    refuse_unplaced,
)
from lamina.ddp.parameters.facts import require_same_model
from lamina.ddp.parameters.invariance import check_invariance
from lamina.ddp.parameters.parameters import collect_parameters
from lamina.ddp.wrapper.buckets import (
    BucketWaits,
    adopt_model_weights,
    make_buckets,
    registered_pool,
)
from lamina.ddp.wrapper.config import DistributedDataParallelConfig
from lamina.mesh import ParallelLayout, ParallelMesh
from lamina.mesh.engine import axis_if_there, copy_roles, named_mesh, require_overlap, translates

_IN_FLIGHT = 4
"""Reductions that are not waited for yet."""
_AHEAD = 4
"""Buckets whose weights are on their way while one is waited for: one alone would leave the wire
idle from its arrival to the next bucket's use. They are gathered in place, so more cost nothing."""

_LEAVE_OUT = "nothing in its place; leave it out"
_TORCH_NAMES = {
    "device_ids": "mesh=, and move the model to its device before it is wrapped",
    "output_device": "mesh=, and move outputs yourself",
    "process_group": "mesh=, such as DeviceMesh.from_group(group, device_type)",
    "device_mesh": "mesh=",
    "find_unused_parameters": f"{_LEAVE_OUT}: unused parameters are found in any case",
    "static_graph": f"{_LEAVE_OUT}: buckets never depend on the first iteration",
    "gradient_as_bucket_view": f"{_LEAVE_OUT}: gradients always are views of buckets",
    "bucket_cap_mb": "config=DistributedDataParallelConfig(bucket_size=elements)",
    "mixed_precision": "a model in bfloat16 and ShardedOptimizer, which keeps fp32 main weights",
    "optimizer": "ShardedOptimizer(optimizer, module, mesh) around the optimizer afterwards",
}
"""What torch's `DistributedDataParallel` is told, and what does the same here."""


class DataParallel(nn.Module, ABC):
    """A module whose gradients are summed over data-parallel ranks.

    A training step is `forward`, `backward`, optimizer; the methods below are for loops that
    accumulate, that drive synchronisation themselves, or that change weights by hand.
    """

    @abstractmethod
    def forward(self, *args: Any, **kwargs: Any) -> Any:
        """The wrapped module's forward."""

    @abstractmethod
    def parameter_groups(self) -> Iterator[ParameterGroup]:
        """All groups of parameters, in the same order on every rank."""

    @abstractmethod
    def no_sync(self) -> AbstractContextManager[None]:
        """Backwards inside are not the step's last microbatch."""

    @abstractmethod
    def start_grad_sync(self) -> None:
        """Begin to sum whatever was accumulated and not yet summed over ranks."""

    @abstractmethod
    def finish_grad_sync(self) -> None:
        """Wait until gradients are summed and visible; harmless when they are."""

    @abstractmethod
    def scale_gradients(self, factor: float) -> None:
        """Multiply all gradients, those of microbatches inside `no_sync` included."""

    @abstractmethod
    def zero_grad_buffer(self) -> None:
        """Forget all gradients, those of microbatches inside `no_sync` included."""

    @abstractmethod
    def broadcast_params(self) -> None:
        """Take the first data-parallel rank's weights."""

    @abstractmethod
    def start_param_sync(self) -> None:
        """Begin to bring updated main weights into the module's weights."""


class _NamesInside(nn.Module):
    """A wrapper whose parameters have the names that they have in `module`, without a prefix."""

    module: nn.Module

    def named_parameters(self, *args: Any, **kwargs: Any) -> Iterator[tuple[str, nn.Parameter]]:
        """The wrapped module's, under the names that `state_dict` has.

        Raises:
            NotImplementedError: where torch's generic functions ask, with a `ShardedOptimizer`.
        """
        if not torch.compiler.is_compiling():
            for optimizer in local_of_state_call("optims", within=1) or ():
                if isinstance(optimizer, ShardedOptimizer):
                    optimizer.refuse_generic_state()
        return self.module.named_parameters(*args, **kwargs)

    def __getattr__(self, name: str) -> Any:
        """A member of the wrapped module, by the first part of a name of `named_parameters`.

        `torch.func.functional_call` looks parameters up by their names.
        """
        try:
            return super().__getattr__(name)
        except AttributeError:
            if name in self._names_inside():
                return getattr(self.module, name)
            raise

    def __setattr__(self, name: str, value: Any) -> None:
        """Set an attribute; a tensor with the name of the wrapped module's goes there."""
        if isinstance(value, torch.Tensor) and name in self._names_inside():
            setattr(self.module, name, value)
        else:
            super().__setattr__(name, value)

    def _names_inside(self) -> set[str]:
        module = self.__dict__.get("_modules", {}).get("module")  # not there while it is made
        kinds = (module._modules, module._parameters, module._buffers) if module is not None else ()
        return {name for kind in kinds for name in kind}

    def _fqn_modifiers(self) -> dict[str, str]:
        """Names that `state_dict()` has without "module.", and where they are.

        `torch.distributed.checkpoint.state_dict` asks this of wrappers whose names have no prefix.
        """
        return dict.fromkeys(self._names_inside(), "module")


class DistributedDataParallel(_NamesInside, DataParallel):
    """Data parallelism over buckets of contiguous gradients (ZeRO 0; 1 and 2 with its optimizer).

    The module's parameters stay the user's, whole, and become views of the buckets' weight
    buffers. Gradients are averaged over the data-parallel ranks at the end of every backward that
    is not inside `no_sync`. Wrap the optimizer in `ShardedOptimizer`: with a sharded strategy, or
    with bf16 or fp16 weights, gradients lie on its parameters and not on the module's.

    Args:
        module: the model, with the same architecture on every rank; its first data-parallel
            rank's values are taken.
        config: see `DistributedDataParallelConfig`; None is the defaults.
        mesh: a `ParallelMesh`, or a `DeviceMesh` with a dimension called `dp_shard` or `dp`, or
            `dp_replicate`, or both, or with one dimension; beside them it may have `tp` and `pp`.
            None is one axis over the whole world.

    Raises:
        TypeError: for something else in place of config or mesh.
        ValueError: for a mesh that does not fit the config or the model's experts, or has
            dimensions of another kind, and for a model on the meta device.
        RuntimeError: if the module, or part of it, is wrapped already, by Lamina or another.
        DisagreementError: for another model or config than other ranks have.

    Examples:
        >>> mesh = ParallelLayout().build("cpu")
        >>> model = DistributedDataParallel(torch.nn.Linear(4, 1), mesh=mesh)
        >>> optimizer = ShardedOptimizer(torch.optim.AdamW(model.parameters()), model, mesh)
        >>> model(torch.ones(2, 4)).mean().backward()
        >>> optimizer.step()
    """

    @translates(_TORCH_NAMES)
    def __init__(
        self,
        module: nn.Module,
        config: DistributedDataParallelConfig | None = None,
        mesh: ParallelMesh | DeviceMesh | None = None,
    ) -> None:
        super().__init__()
        config = DistributedDataParallelConfig() if config is None else config
        mesh = ParallelLayout().build() if mesh is None else named_mesh(mesh)
        _check_kinds(config, mesh)
        refuse_wrapped("DistributedDataParallel", module)
        check_invariance("DistributedDataParallel", module, config.invariant)
        if config.overlap_grad_reduce or config.overlap_param_gather:
            require_overlap("DistributedDataParallel with overlap")
        self.module = module
        self.config = config
        self._mesh = mesh
        dense, expert = _axes(mesh, config)
        # Ranks compare what they wrap before any collective whose size depends on it: those that
        # differ would wait for each other for good.
        left_alone = _left_alone(module)
        refs = [ref for ref in collect_parameters(module) if id(ref.parameter) not in left_alone]
        refuse_unplaced(refs, dense, axis_if_there(mesh, "tp"))
        require_same_model(type(self).__name__, refs, dense, expert, config)
        if isinstance(mesh, ParallelMesh):
            model = ModelAxes(*(mesh.axis(name) for name in ("tp", "expert_tp", "ep")))
            check_experts(refs, dense, expert, model)
        scratch = ScratchBuffers(keep_on_cpu=True)
        settings = _settings(config, dense)
        # Weights and main grads lie in registered memory, where that was asked for.
        self._pool: RegisteredPool | None = None
        if config.nccl_ub and (first := next(module.parameters(), None)) is not None:
            self._pool = registered_pool((dense, expert), first.device)
        # From here on the parameters are views of the buckets.
        with nullcontext() if self._pool is None else self._pool:
            self._groups = make_buckets(refs, config, settings, dense, expert, scratch)
        for group in self._groups:
            same = group.dtypes.grads == group.dtypes.weights
            if same and group.requires_grad and group.mains_are_separate:
                # `model.parameters()` are what modules compute with, and users look there.
                group.shown.mirror_on_compute()
        self._gathers, self._engine = self._start(scratch, dense, expert, left_alone)
        self._waits: BucketWaits | None = None
        if config.overlap_param_gather:
            self._waits = BucketWaits(module, self._groups[::-1], self._gathers)
        self._before_load: list[list[int]] = []
        self.register_load_state_dict_pre_hook(_load_within)  # type: ignore[no-untyped-call]
        self.register_load_state_dict_post_hook(_loaded_within)  # type: ignore[no-untyped-call]
        self._own_names: frozenset[str] = frozenset({*self.__dict__, "_own_names"})

    def _start(
        self,
        scratch: ScratchBuffers,
        dense: DataParallelAxes,
        expert: DataParallelAxes | None,
        left_alone: set[int],
    ) -> tuple[Prefetcher, Engine]:
        """Put the buckets to work: what gathers their weights, and the engine of a step."""
        module, config = self.module, self.config
        reducer = GradientReducer(
            [group for group in self._groups if group.requires_grad],
            scratch,
            overlap=config.overlap_grad_reduce,
            max_in_flight=_IN_FLIGHT,
            close_when_complete=config.overlap_grad_reduce,
            check_finite=config.check_for_nan_in_grad,
            largest=config.check_for_large_grads,
        )
        ignored = getattr(module, "_ddp_params_and_buffers_to_ignore", ())
        buffers = ModuleBuffers(config.broadcast_buffers, dense, expert, ignored)
        buffers.start(module, module.modules())
        # Gradients complete the last layers' buckets first, and forwards use them last.
        order = self._groups[::-1]
        gathers = Prefetcher(
            [Unit(group.weights.title, "a bucket", [group]) for group in order],
            fixed=True,
            ahead=len(order) if config.align_param_gather else _AHEAD,
        )
        watch = ModuleWatch(
            self._groups,
            "DistributedDataParallel",
            "Wrap one over model.parameters() in ShardedOptimizer(optimizer, model, mesh)",
            left_alone,
        )
        guards = Guards(look=watch.look, module_buffers=buffers if buffers.per_forward else None)
        # The root alone is a unit of the engine: what it calls is never given back.
        root = Unit("", type(module).__name__, ())
        return gathers, Engine([root], reducer, gathers, guards=guards)

    def forward(self, *args: Any, **kwargs: Any) -> Any:
        """The wrapped module's forward; updated weights are waited for where they are used."""
        engine, training = self._engine, torch.is_grad_enabled()
        engine.look(self.module)
        if training:  # forwards in evaluation are right with gradients that nobody steps
            self._refuse_what_never_trains()
        engine.before_forward(engine.root)
        if self._waits is not None:
            self._waits.begin(overlapped=self.training and training)
        else:
            self._gathers.finish()
        # Dynamo, which may compile a part now, fails over gradients of another class than weights.
        mirrors = [group.shown for group in self._groups if group.shown.mirrored]
        for shown in mirrors:
            shown.mirror(False)
        try:
            output = self.module(*args, **kwargs)
        finally:
            for shown in mirrors:
                shown.mirror(True)
        if training:
            mark_outputs(engine, engine.root, 0, output)
        engine.after_forward(engine.root)
        return output

    def register_comm_hook(self, state: object, hook: Callable[..., Any]) -> None:
        """Torch's communication hooks, refused by name.

        Raises:
            NotImplementedError: always.
        """
        raise NotImplementedError(
            f"register_comm_hook({getattr(hook, '__name__', hook)}): gradients are summed in one "
            "fixed order, and a hook would replace the sum. A bf16 wire is what a bf16 model has "
            "by default; DistributedDataParallelConfig(reduction='native') leaves sums to the "
            "backend; for another scheme, sum by hand after no_sync()"
        )

    def join(self, *_: Any, **__: Any) -> AbstractContextManager[None]:
        """Torch's context for uneven inputs, refused by name.

        Raises:
            NotImplementedError: always.
        """
        raise NotImplementedError(
            "join(): ranks have to run the same number of backwards. Give all ranks equally many "
            "batches (drop_last=True), or let a rank without one run a forward whose loss is "
            "multiplied by 0"
        )

    def __deepcopy__(self, memo: dict[int, Any]) -> Any:
        """A wrapper of its own around a copy of the module, over the same ranks (collective).

        Main weights come along. As with torch's, gradients do not, and no optimizer holds the
        parameters of the copy.
        """
        made = _wrap_again(type(self), _copy_of_module(self, memo), *_how_wrapped(self))
        memo[id(self)] = made
        state = copy.deepcopy(_users_state(self), memo)
        made.__setstate__(state)  # type: ignore[no-untyped-call]
        return made

    def __reduce_ex__(self, protocol: Any) -> Any:
        """The module, config and layout of the mesh; unpickling wraps again (collective).

        It takes as many ranks as before. Main weights that are apart are this rank's, so each rank
        unpickles what it has pickled.
        """
        module, how = _copy_of_module(self, {}), _how_wrapped(self)
        return _wrap_again, (type(self), module, *how), _users_state(self)

    def _refuse_what_never_trains(self) -> None:
        """Gradients that nobody will step, and parameters whose gradients nobody would sum."""
        for group in self._groups:
            refuse_changed(group)
            if group.gradients is None or group.gradients.state not in FINAL:
                continue
            if group.mains_are_separate and not group.shown.has_optimizer:
                raise RuntimeError(
                    f"the gradient of {group.refs[0].name} is on a main parameter that no "
                    "optimizer holds, so an optimizer over model.parameters() trains nothing: wrap "
                    "it in ShardedOptimizer(optimizer, model, mesh), or call zero_grad() first if "
                    "gradients are all you want"
                )

    def parameter_groups(self) -> Iterator[ParameterGroup]:
        """All buckets, in the order in which they are reduced."""
        yield from self._groups

    @property
    def memory_budgets(self) -> MemoryBudgets:
        """Which gradient buffers are held at once: for `memory_plan`."""
        trained = [group for group in self._groups if group.requires_grad]
        return MemoryBudgets(
            # One is filled meanwhile. Without overlap all are, until the backward ends.
            buffers=_IN_FLIGHT + 1 if self.config.overlap_grad_reduce else len(trained),
            keeps_buffers=any(group.device.type == "cpu" for group in trained),
        )

    def deregister_memory(self) -> None:
        """With `nccl_ub`: deregister, on all ranks, before the process group is destroyed."""
        if self._pool is not None:
            self._pool.close()

    def no_sync(self) -> AbstractContextManager[None]:
        """Backwards inside are not the step's last microbatch."""
        return self._engine.reducer.no_sync()

    def late_gradients(self) -> AbstractContextManager[None]:
        """Gradients that arrive inside belong to backwards that are over (split backwards)."""
        return self._engine.reducer.late_gradients()

    def start_grad_sync(self) -> None:
        """Begin to sum what `no_sync` accumulated; nothing where nothing waits to be summed."""
        self._engine.reducer.start()

    def finish_grad_sync(self) -> None:
        """Sum what was accumulated and not yet summed, and wait for it."""
        self._engine.reducer.finish()

    def scale_gradients(self, factor: float) -> None:
        """Multiply all gradients by `factor`, those of microbatches inside `no_sync` included."""
        self._engine.reducer.scale(factor)

    def zero_grad(self, set_to_none: bool = True) -> None:
        """Forget all gradients, or make those that are shown zeros, wherever they are kept."""
        for group in self._groups:
            if set_to_none:
                group.discard_gradients()
            elif group.requires_grad:
                group.shown.zero()

    def zero_grad_buffer(self) -> None:
        """Forget all gradients, those of microbatches inside `no_sync` included."""
        for group in self._groups:
            group.discard_gradients()

    def broadcast_params(self) -> None:
        """Take the first data-parallel rank's weights (collective over the data-parallel ranks)."""
        self._gathers.finish()
        for group in self._groups:
            for process_group in group.axes.groups("gather"):
                broadcast(group.weights.full, process_group, src=0)
            adopt_model_weights(group)

    def start_param_sync(self) -> None:
        """Begin to bring main weights into the module's: somebody wrote those (collective)."""
        for group in self._groups:
            group.shown.expect_optimizer()  # the caller's own hands
        self._gathers.start_again()
        self._gathers.end_forward()  # which begins the gathers of all buckets

    def weights_written(self) -> None:
        """The optimizer has stepped (called by `ShardedOptimizer`)."""
        self._gathers.start_again()
        # With overlap the next forward brings the weights back, under its own computing.
        if not self.config.overlap_param_gather:
            self._gathers.finish()

    def state_dict(self, *args: Any, **kwargs: Any) -> Any:
        """The wrapped module's, under its own names (no "module." prefix).

        After a step under `overlap_param_gather` this is collective over the data-parallel ranks,
        as the step's weights are still to be gathered: call it on all of them, save on one.
        """
        self._gathers.finish()
        return self.module.state_dict(*args, **kwargs)

    def load_state_dict(self, *args: Any, **kwargs: Any) -> Any:
        """Load into the wrapped module, and into main weights where those are apart.

        Collective where `state_dict` is. Parameters that the state leaves out (`strict=False`) keep
        their main weights.

        Raises:
            ValueError: for `assign=True`, which would put tensors in the parameters' places that no
                bucket knows.
        """
        self._begin_load(kwargs.get("assign", len(args) > 2 and args[2]))
        result = self.module.load_state_dict(*args, **kwargs)
        self._end_load()
        return result

    def _begin_load(self, assign: bool) -> None:
        if assign:
            raise ValueError(
                "load_state_dict(assign=True) replaces parameters, and the buckets hold the ones "
                "that were wrapped: leave assign out, which copies"
            )
        # What a load writes to must be there, and what it leaves out must be up to date.
        self._gathers.finish()
        # Versions tell afterwards which parameters it has written: the others keep main weights
        # of more bits than the model's.
        self._before_load = [[p._version for p in g.compute_parameters] for g in self._groups]

    def _end_load(self) -> None:
        for group, versions in zip(self._groups, self._before_load, strict=True):
            pairs = enumerate(zip(group.compute_parameters, versions, strict=True))
            adopt_model_weights(group, (i for i, (p, old) in pairs if p._version != old))


def _load_within(
    wrapper: DistributedDataParallel, state: dict[str, Any], prefix: str, metadata: Any, *_: Any
) -> None:
    """Give a module around the wrapper, such as a compiled one, the names that are inside it."""
    wrapper._begin_load(metadata.get("assign_to_params_buffers", False))
    for name in [name for name in state if name.startswith(prefix)]:
        state[f"{prefix}module.{name.removeprefix(prefix)}"] = state.pop(name)


def _loaded_within(wrapper: DistributedDataParallel, _: Any) -> None:
    wrapper._end_load()


def _copy_of_module(wrapper: DistributedDataParallel, memo: dict[int, Any]) -> nn.Module:
    """A plain copy of the wrapped module with today's weights, marks and hooks of the user."""
    written = [group.follow_main_weights() for group in wrapper._groups]  # all of them look
    if any(written):
        wrapper._gathers.start_again()
    wrapper._gathers.finish()
    module = copy.deepcopy(wrapper.module, memo)
    if wrapper._waits is not None:
        wrapper._waits.leave(module)
    copy_roles(wrapper.module, module)
    return module


def _how_wrapped(wrapper: DistributedDataParallel) -> tuple[Any, ...]:
    """Config, mesh and main weights that are apart, for `_wrap_again`."""
    mesh = wrapper._mesh
    parallel = isinstance(mesh, ParallelMesh)
    where = (mesh.layout, mesh.device_type) if isinstance(mesh, ParallelMesh) else mesh
    apart = {
        number: (group.main_weights.range, group.main_weights.data.clone())
        for number, group in enumerate(wrapper._groups)
        if group.requires_grad and group.dtypes.main != group.dtypes.weights
    }
    return wrapper.config, parallel, where, apart


def _users_state(wrapper: DistributedDataParallel) -> dict[str, Any]:
    """Hooks, mode and attributes that a user has given the wrapper since it was made."""
    of_any = nn.Module().__dict__.keys() - {"_parameters", "_buffers", "_modules"}
    return {n: v for n, v in wrapper.__dict__.items() if n in of_any or n not in wrapper._own_names}


def _wrap_again(
    cls: type[DistributedDataParallel],
    module: nn.Module,
    config: DistributedDataParallelConfig,
    parallel: bool,
    where: Any,
    apart: dict[int, tuple[tuple[int, int], torch.Tensor]],
) -> DistributedDataParallel:
    """A wrapper like one that was copied or pickled (collective).

    The `__init__` of its class is not called. `where` is the layout and device type of a mesh that
    was a `ParallelMesh` (`parallel`), or the mesh itself. `apart` are main weights that are apart,
    and which elements they are, by number of the group. ValueError refuses those of another rank.
    """
    mesh = ParallelMesh(*where) if parallel else where
    buffers = [buffer.clone() for buffer in module.buffers()]
    # A class of the user's may take other arguments, and its attributes come with its state.
    made = cls.__new__(cls)
    DistributedDataParallel.__init__(made, module, config, mesh)
    if config.broadcast_buffers not in ("forward", True):  # each rank has its own by now
        for buffer, value in zip(module.buffers(), buffers, strict=True):
            buffer.copy_(value)
    groups = list(made.parameter_groups())
    for number, (elements, values) in apart.items():
        main = groups[number].main_weights
        if main.range != elements:
            raise ValueError(
                f"this {cls.__name__} was pickled by a rank that holds the main weights "
                f"{elements}, and this one holds {main.range}: let each rank load what it saved, "
                "or save model.state_dict()"
            )
        main.data.copy_(values)
    return made


def _check_kinds(config: object, mesh: object) -> None:
    for name, given, kinds in (
        ("config", config, (DistributedDataParallelConfig,)),
        ("mesh", mesh, (ParallelMesh, DeviceMesh)),
    ):
        if not isinstance(given, kinds):
            wanted = " or ".join(kind.__name__ for kind in kinds)
            raise TypeError(
                f"{name} is a {type(given).__name__}, not a {wanted}: call "
                "DistributedDataParallel(module, config, mesh)"
            )


def _settings(config: DistributedDataParallelConfig, dense: DataParallelAxes) -> GroupSettings:
    return GroupSettings(
        config.strategy,
        granularity=Granularity.tensor() if config.keep_tensors_whole else None,
        scale=None if config.calculate_per_token_loss else 1.0 / dense.divisor,
        shard_multiple=1 << 16 if config.pad_buckets_for_high_nccl_busbw else 1,
        reduction=resolve_reduction(
            config.reduction,
            config.reproducible or config.invariant,
            config.average_in_collective,
        ),
        exact_norm=config.invariant,
    )


def _left_alone(module: nn.Module) -> set[int]:
    """`id`s of the parameters that torch's DDP leaves alone too."""
    names = set(getattr(module, "_ddp_params_and_buffers_to_ignore", ()))
    return {id(p) for name, p in module.named_parameters(remove_duplicate=False) if name in names}


def _axes(
    mesh: ParallelMesh | DeviceMesh, config: DistributedDataParallelConfig
) -> tuple[DataParallelAxes, DataParallelAxes | None]:
    expert = None
    if isinstance(mesh, ParallelMesh):
        dense = data_parallel_axes(mesh, "dp_shard_cp", "dp_replicate")
        # With one rank along each of these axes, experts lie over the same ranks as the rest.
        if mesh.layout.ep * mesh.layout.expert_tp * mesh.layout.tp > 1:
            expert = data_parallel_axes(mesh, "expert_dp", "dp_replicate", dense.size)
            expert = replace(expert, pieces=mesh.axis("expert_tp"))
    else:
        dense = _axes_of_device_mesh(mesh)
        outer_cut = config.strategy.placements.optimizer_state[0].cuts
        if outer_cut and "dp_replicate" not in (mesh.mesh_dim_names or ()):
            raise ValueError(
                "the outer placement of zero_dp_strategy is about the ranks along 'dp_replicate', "
                f"and the mesh has dimensions {mesh.mesh_dim_names}: name one so, or cut nothing "
                "along it"
            )
    instances = config.num_distributed_optimizer_instances
    if instances is not None and dense.outer.size != instances:
        raise ValueError(
            f"num_distributed_optimizer_instances={instances} needs a mesh with "
            f"dp_replicate={instances}; this one has {dense.outer.size} (build it with "
            f"ParallelLayout(dp_replicate={instances}))"
        )
    return dense, expert


def _axes_of_device_mesh(mesh: DeviceMesh) -> DataParallelAxes:
    names = mesh.mesh_dim_names or ()
    outer = "dp_replicate" if "dp_replicate" in names else None
    known: list[str] = [name for name in ("dp_shard", "dp") if name in names]
    # Of a mesh of one dimension there is no doubt which one it is.
    if not known and outer is None:
        if len(names) != 1:
            raise ValueError(
                f"the mesh has dimensions {names}: name the data-parallel one 'dp' or 'dp_shard'"
            )
        known = [names[0]]
    inner = known[0] if known else None
    for name, size in zip(names, mesh.shape, strict=True):
        if name in ("ep", "expert_tp") and size > 1:
            raise ValueError(
                f"the mesh has {size} ranks along {name!r}, and only a ParallelMesh says which "
                f"ranks hold copies of experts: use ParallelLayout({name}={size}, ...).build()"
            )
    axes = data_parallel_axes(mesh, inner, outer)
    data = inner or outer
    check_dimensions(
        mesh,
        axes,
        ("tp", "pp"),
        "If they train the same weights on other data, use ParallelLayout(...).build(), or flatten "
        "the dimensions into one and pass that; if they hold other parts of the model, pass "
        f"mesh[{data!r}]",
    )
    return axes
