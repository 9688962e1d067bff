"""torch's own FSDP2 behind the `DataParallel` contract: another engine, the same loop.

For comparing engines on one job, and for those who want torch's. Its gradients are reduced by the
backend in the backend's order, so law 2 does not hold here.
"""

from collections.abc import Iterator, Sequence
from contextlib import contextmanager
from dataclasses import dataclass
from typing import Any, cast

import torch
from torch import nn
from torch.distributed.device_mesh import DeviceMesh
from torch.distributed.fsdp import FSDPModule, MixedPrecisionPolicy, fully_shard
from torch.distributed.tensor import DTensor

from lamina.collectives.engine import broadcast
from lamina.ddp import DataParallel, MemoryPlan
from lamina.ddp.engine import (
    BufferPolicy,
    ModuleBuffers,
    ParameterGroup,
    collect_parameters,
    data_parallel_axes,
    refuse_wrapped,
    require_same_model,
)
from lamina.fsdp.compat import current_graph_task_id, forget_groups
from lamina.fsdp.units.plan import plan_units
from lamina.mesh import ParallelMesh, role_of
from lamina.mesh.engine import (
    MODEL_AXES,
    check_fields,
    ends_with_groups,
    named_mesh,
    require_overlap,
)


@dataclass(frozen=True)
class TorchFullyShardedDataParallelConfig:
    """What the wrapper over torch's FSDP2 can be told.

    Attributes:
        reshard_after_forward: as of torch's `fully_shard`; an int is the number of ranks that
            keep a copy between forward and backward.
        gradient_accumulation_fusion: has to be False: FSDP2 takes gradients from `.grad`, and
            fused weight gradients bypass it.
        ckpt_format: has to be "torch_dist": its DTensors are saved by
            `torch.distributed.checkpoint`.
        mp_policy: torch's `MixedPrecisionPolicy`; None means fp32 throughout.
        broadcast_buffers: when the first rank's buffers are sent to the others: "forward", "start"
            or "never", as of `DistributedDataParallelConfig`. torch's FSDP2 never sends them.

    Examples:
        >>> config = TorchFullyShardedDataParallelConfig(reshard_after_forward=False)
    """

    reshard_after_forward: bool | int = True
    gradient_accumulation_fusion: bool = False
    ckpt_format: str = "torch_dist"
    mp_policy: Any = None
    broadcast_buffers: BufferPolicy = "never"

    def __post_init__(self) -> None:
        check_fields(self)
        if self.gradient_accumulation_fusion:
            raise ValueError(
                "gradient_accumulation_fusion=True writes weight gradients past `.grad`, where "
                "torch's FSDP2 takes them from: turn it off, or use lamina.fsdp.fully_shard"
            )
        if self.ckpt_format != "torch_dist":
            raise ValueError(
                f"ckpt_format={self.ckpt_format!r}: FSDP2's parameters are DTensors, which "
                "torch.distributed.checkpoint saves: use 'torch_dist'"
            )


class TorchFullyShardedDataParallel(DataParallel):
    """A module under torch's FSDP2.

    Args:
        module: the whole model, on its device.
        config: see `TorchFullyShardedDataParallelConfig`.
        mesh: a `ParallelMesh`, or a `DeviceMesh` of one dimension (sharding) or two (replicas
            outside).
        sub_modules_to_wrap: classes (or import strings) of units; None finds them.

    Raises:
        OverlapError: if CUDA_DEVICE_MAX_CONNECTIONS is 1 (FSDP2 always overlaps).
        DisagreementError: for another model or config than other ranks have.
        ValueError: for expert parameters or tensor-parallel meshes, which FSDP2 needs told apart.
    """

    def __init__(
        self,
        module: nn.Module,
        config: TorchFullyShardedDataParallelConfig,
        mesh: ParallelMesh | DeviceMesh,
        sub_modules_to_wrap: Sequence[type[nn.Module] | str] | None = None,
    ) -> None:
        super().__init__()
        require_overlap("TorchFullyShardedDataParallel")
        refuse_wrapped("TorchFullyShardedDataParallel", module)
        _refuse_roles(module)  # FSDP2 sums all gradients over the whole mesh
        self.config = config
        device_mesh = _mesh_for_torch(mesh)
        *outer, inner = device_mesh.mesh_dim_names or ()
        self._axes = axes = data_parallel_axes(device_mesh, inner, outer)
        # torch's FSDP2 takes for equal what ranks have built: compare it, and send what it never
        # sends. It cuts each rank's own values, so ranks seeded differently would train a mixture.
        require_same_model(type(self).__name__, collect_parameters(module), axes, None, config)
        self._module_buffers = ModuleBuffers(config.broadcast_buffers, axes, None)
        self._module_buffers.start(module, module.modules())
        for axis in (axes.inner, axes.outer):
            for parameter in module.parameters():
                sent = parameter.detach().contiguous()  # itself, unless it has other strides
                broadcast(sent, axis.group, src=0).wait()
                parameter.detach().copy_(sent)
        # Innermost first: each call takes what is left of its module's parameters.
        plans = plan_units(module, sub_modules_to_wrap)
        self._unit_bytes = [sum(ref.parameter.nbytes for ref in plan.refs) for plan in plans]
        for plan in reversed(plans):
            fully_shard(
                plan.module,
                mesh=device_mesh,
                reshard_after_forward=config.reshard_after_forward,
                mp_policy=config.mp_policy or MixedPrecisionPolicy(),
            )
        # It keeps process groups, which then outlive `destroy_process_group` and abort the process.
        ends_with_groups(module, forget_groups)
        self.module = module
        self._syncs = True
        self._unsummed = False
        self._in_forward = False

    def forward(self, *args: Any, **kwargs: Any) -> Any:
        """The wrapped module's forward."""
        # The last forward of training says how its backward ends: summed, or left by `no_sync`.
        if torch.is_grad_enabled():
            self._unsummed = not self._syncs
        self._module_buffers.before_forward(self.module)
        self._in_forward = True
        try:
            return self.module(*args, **kwargs)
        finally:
            self._in_forward = False

    def named_parameters(self, *args: Any, **kwargs: Any) -> Iterator[tuple[str, nn.Parameter]]:
        """As of any module: the parameters that optimizers step, which hold the gradients.

        With `reshard_after_forward=False`, and after a forward that no backward follows, FSDP2
        leaves whole parameters without gradients in their places until it is told to reshard.
        """
        if not self._in_forward and current_graph_task_id() == -1:
            for module in self.module.modules():
                if isinstance(module, FSDPModule):
                    module.reshard()
        return super().named_parameters(*args, **kwargs)

    def _named(self) -> Iterator[tuple[str, nn.Parameter]]:
        """The parameters by the wrapped module's names."""
        return ((name.removeprefix("module."), p) for name, p in self.named_parameters())

    def parameter_groups(self) -> Iterator[ParameterGroup]:
        """None of Lamina's: FSDP2 has its own buffers."""
        yield from ()

    def full_parameters(self) -> dict[str, torch.Tensor]:
        """Whole parameters by the wrapped module's names, on every rank (collective)."""
        return {name: _whole(parameter.detach()) for name, parameter in self._named()}

    def full_gradients(self) -> dict[str, torch.Tensor]:
        """Whole gradients of those parameters that have one (collective)."""
        return {name: _whole(p.grad) for name, p in self._named() if p.grad is not None}

    def memory_plan(self) -> MemoryPlan:
        """Bytes at rest, exactly; of a step what FSDP2's own code says that it holds.

        That is the output of one unit's gather beside the whole weights of two units, and the
        input and output of two reductions.
        """
        parameters = list(self.parameters())
        units = sorted(self._unit_bytes)[-2:]  # the largest two may follow each other
        return MemoryPlan(
            weights=sum(map(_local_bytes, parameters)),
            main_weights=0,
            main_grads=sum(_local_bytes(p) for p in parameters if p.requires_grad),
            local_grads=0,
            gathered=sum(units) + max(units, default=0),
            in_flight=sum(size + size // self._axes.inner.size for size in units),
            padding=0,
        )

    @contextmanager
    def no_sync(self) -> Iterator[None]:
        """Backwards inside are not the step's last microbatch: gradients stay whole and local."""
        before, self._syncs = self._syncs, False
        root = cast(FSDPModule, self.module)
        root.set_requires_gradient_sync(False)
        try:
            yield
        finally:
            self._syncs = before
            root.set_requires_gradient_sync(before)

    @contextmanager
    def unsharded(self) -> Iterator[None]:
        """Whole parameters while the model runs: FSDP2 gathers in every forward (collective)."""
        yield

    def start_grad_sync(self) -> None:
        """FSDP2 sums in backward."""

    def finish_grad_sync(self) -> None:
        """FSDP2 waits at the end of backward.

        Raises:
            RuntimeError: if `no_sync` left gradients that no backward outside it has summed.
        """
        if self._unsummed:
            raise RuntimeError(
                "gradients were accumulated inside no_sync and not summed: torch's FSDP2 sums in "
                "backward only, so run the step's last microbatch outside no_sync"
            )

    def scale_gradients(self, factor: float) -> None:
        """Multiply all gradients."""
        for parameter in self.parameters():
            if parameter.grad is not None:
                parameter.grad.mul_(factor)

    def zero_grad_buffer(self) -> None:
        """Forget all gradients.

        Raises:
            RuntimeError: if `no_sync` left some: torch's FSDP2 keeps them where only it can.
        """
        if self._unsummed:
            raise RuntimeError(
                "zero_grad_buffer: torch's FSDP2 cannot forget gradients that were accumulated "
                "inside no_sync: run the step's last microbatch outside it first"
            )
        self.zero_grad(set_to_none=True)

    def broadcast_params(self) -> None:
        """FSDP2's shards are the only copies, but for replicas along the outer dimension."""
        for parameter in self.parameters():
            if isinstance(parameter, DTensor):
                local = parameter.to_local().detach()
                broadcast(local, self._axes.outer.group, src=0).wait()

    def start_param_sync(self) -> None:
        """FSDP2 gathers in every forward what the optimizer wrote."""

    def state_dict(self, *args: Any, **kwargs: Any) -> Any:
        """The wrapped module's, under its own names (no "module." prefix)."""
        return self.module.state_dict(*args, **kwargs)

    def load_state_dict(self, *args: Any, **kwargs: Any) -> Any:
        """Load into the wrapped module."""
        return self.module.load_state_dict(*args, **kwargs)


def _whole(tensor: torch.Tensor) -> torch.Tensor:
    return tensor.full_tensor() if isinstance(tensor, DTensor) else tensor.clone()


def _local_bytes(tensor: torch.Tensor) -> int:
    return tensor.to_local().nbytes if isinstance(tensor, DTensor) else tensor.nbytes


def _mesh_for_torch(mesh: ParallelMesh | DeviceMesh) -> DeviceMesh:
    if not isinstance(mesh, ParallelMesh):
        mesh = named_mesh(mesh)
        if not mesh.mesh_dim_names:
            raise ValueError(
                f"the mesh of shape {tuple(mesh.shape)} has no names, which say what shards: make "
                "it with mesh_dim_names=('dp_replicate', 'dp_shard')"
            )
        for name, size in zip(mesh.mesh_dim_names, mesh.shape, strict=True):
            if name in MODEL_AXES and size > 1:
                raise ValueError(
                    f"the {size} ranks along {name!r} hold different parts of the model, and "
                    "torch's FSDP2 takes all of its mesh for data-parallel: pass mesh['dp'] alone"
                )
        return mesh
    # A ParallelMesh knows what its other axes are for. FSDP2 takes a mesh of one dimension, or of
    # two that are (replicate, shard).
    layout = mesh.layout
    if layout.tp * layout.ep * layout.expert_tp > 1:
        raise ValueError(
            f"{mesh} has tensor- or expert-parallel ranks, which torch's FSDP2 has to be told of "
            "by DTensor parameters: use lamina.fsdp.fully_shard, or apply torch's fully_shard"
        )
    if layout.dp_replicate == 1:
        return mesh["dp_shard_cp"]
    if layout.cp == 1:
        return mesh[("dp_replicate", "dp_shard")]
    raise ValueError(
        f"{mesh}: replicas and context-parallel ranks together have no mesh of two dimensions"
    )


def _refuse_roles(module: nn.Module) -> None:
    for name, parameter in module.named_parameters():
        role = role_of(parameter)
        if role.expert or role.tp_shard_dim is not None:
            raise ValueError(
                f"{name} is {'an expert' if role.expert else 'a tensor-parallel'} parameter, and "
                "torch's FSDP2 would sum its gradient over the wrong ranks: use "
                "lamina.fsdp.fully_shard"
            )
        if parameter.is_meta:
            raise ValueError(
                f"{name} is on the meta device: give it values first (lamina.fsdp.fully_shard "
                "materialises unit by unit)"
            )
