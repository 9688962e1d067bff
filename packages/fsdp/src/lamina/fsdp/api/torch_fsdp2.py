"""torch's own FSDP2 behind the `DataParallel` contract: another engine, the same loop.

For comparing engines on one job, and for those who want torch's. Its gradients are reduced by the
backend in the backend's order, so law 2 does not hold here.
"""

import math
from collections.abc import Iterator, Sequence
from contextlib import contextmanager
from dataclasses import dataclass
from typing import Any

import torch
from torch import nn
from torch.distributed.device_mesh import DeviceMesh
from torch.distributed.fsdp import FSDPModule, fully_shard
from torch.distributed.tensor import DTensor

from lamina.collectives.engine import broadcast
from lamina.ddp import DataParallel, MemoryPlan
from lamina.ddp.engine import (
    BufferPolicy,
    DataParallelAxes,
    ModuleBuffers,
    ParameterGroup,
    collect_parameters,
    data_parallel_axes,
    refuse_wrapped,
    require_same_model,
)
from lamina.fsdp.compat import forget_groups
from lamina.fsdp.units.plan import plan_units
from lamina.mesh import ParallelMesh, role_of
from lamina.mesh.engine import (
    MODEL_AXES,
    check_fields,
    ends_with_groups,
    mesh_axis,
    require_overlap,
)

__all__ = ["TorchFullyShardedDataParallel", "TorchFullyShardedDataParallelConfig"]


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
        self._module_buffers: ModuleBuffers | None = None
        require_overlap("TorchFullyShardedDataParallel")
        refuse_wrapped("TorchFullyShardedDataParallel", module)
        _refuse_roles(module)
        self.config = config
        device_mesh = _mesh_for_torch(mesh)
        axes = _axes(device_mesh)
        if axes is not None:  # compare over ranks what torch's FSDP2 takes for equal
            refs = collect_parameters(module)
            require_same_model(type(self).__name__, refs, axes, None, config)
            self._module_buffers = ModuleBuffers(config.broadcast_buffers, axes, None)
            self._module_buffers.start(module, module.modules())
        _take_first_ranks_values(module, device_mesh)
        settings: dict[str, Any] = {
            "mesh": device_mesh,
            "reshard_after_forward": config.reshard_after_forward,
        }
        if config.mp_policy is not None:
            settings["mp_policy"] = config.mp_policy
        # Innermost first: each call takes what is left of its module's parameters.
        plans = plan_units(module, sub_modules_to_wrap)
        self._unit_bytes = [sum(ref.parameter.nbytes for ref in plan.refs) for plan in plans]
        for plan in reversed(plans):
            fully_shard(plan.module, **settings)
        ends_with_groups(module, forget_groups)
        self.module = module
        self._syncs = True
        self._unsummed = False

    @property
    def _root(self) -> FSDPModule:
        if not isinstance(self.module, FSDPModule):
            raise TypeError(f"{type(self.module).__name__} has lost its FSDP2 class")
        return self.module

    def forward(self, *args: Any, **kwargs: Any) -> Any:
        """The wrapped module's forward."""
        if torch.is_grad_enabled():
            self._unsummed = not self._syncs
        if self._module_buffers is not None:
            self._module_buffers.before_forward(self.module)
        return self.module(*args, **kwargs)

    def parameter_groups(self) -> Iterator[ParameterGroup]:
        """None of Lamina's: FSDP2 has its own buffers."""
        yield from ()

    def full_parameters(self) -> dict[str, torch.Tensor]:
        """Whole parameters by the wrapped module's names, on every rank (collective)."""
        named = self.module.named_parameters()
        return {name: _whole(parameter.detach()) for name, parameter in named}

    def full_gradients(self) -> dict[str, torch.Tensor]:
        """Whole gradients of those parameters that have one (collective)."""
        named = self.module.named_parameters()
        return {name: _whole(p.grad) for name, p in named if p.grad is not None}

    def memory_plan(self) -> MemoryPlan:
        """Bytes at rest, exactly; of a step what FSDP2's own code says that it holds.

        That is the output of one unit's gather beside the whole weights of two units, and the
        input and output of two reductions.
        """
        held = list(self.module.parameters())
        units = sorted(self._unit_bytes)[-2:]
        ranks = max((_pieces(parameter) for parameter in held), default=1)
        return MemoryPlan(
            weights=sum(_local_bytes(parameter) for parameter in held),
            main_weights=0,
            main_grads=sum(_local_bytes(p) for p in held if p.requires_grad),
            local_grads=0,
            gathered=sum(units) + max(units, default=0),
            in_flight=sum(size + size // ranks for size in units),
            padding=0,
        )

    @contextmanager
    def no_sync(self) -> Iterator[None]:
        """Backwards inside are not the step's last microbatch: gradients stay whole and local."""
        before, self._syncs = self._syncs, False
        self._root.set_requires_gradient_sync(False)
        try:
            yield
        finally:
            self._syncs = before
            self._root.set_requires_gradient_sync(before)

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
        for parameter in self.module.parameters():
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
        self.module.zero_grad(set_to_none=True)

    def broadcast_params(self) -> None:
        """FSDP2's shards are the only copies, but for replicas along the outer dimension."""
        for parameter in self.module.parameters():
            if isinstance(parameter, DTensor) and parameter.device_mesh.ndim == 2:
                names = parameter.device_mesh.mesh_dim_names or ()
                axis = mesh_axis(parameter.device_mesh, names[0])
                broadcast(parameter.to_local().detach(), axis.group, src=0).wait()

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


def _pieces(tensor: torch.Tensor) -> int:
    if not isinstance(tensor, DTensor):
        return 1
    sizes = zip(tensor.placements, tensor.device_mesh.shape, strict=True)
    return math.prod(size for placement, size in sizes if placement.is_shard())


def _mesh_for_torch(mesh: ParallelMesh | DeviceMesh) -> DeviceMesh:
    if not isinstance(mesh, ParallelMesh):
        for name, size in zip(mesh.mesh_dim_names or (), mesh.shape, strict=False):
            if name in MODEL_AXES and size > 1:
                raise ValueError(
                    f"the {size} ranks along {name!r} hold different parts of the model, and "
                    "torch's FSDP2 takes all of its mesh for data-parallel: pass mesh['dp'] alone"
                )
        return mesh
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


def _axes(mesh: DeviceMesh) -> DataParallelAxes | None:
    """The data-parallel axes; None for a mesh whose dimensions have no names."""
    names = mesh.mesh_dim_names or ()
    return data_parallel_axes(mesh, names[-1], names[:-1]) if names else None


def _take_first_ranks_values(module: nn.Module, mesh: DeviceMesh) -> None:
    """FSDP2 cuts each rank's own values: ranks seeded differently would train a mixture."""
    for name in reversed(mesh.mesh_dim_names or ()):
        group = mesh_axis(mesh, name).group
        for parameter in module.parameters():
            sent = parameter.detach().contiguous()  # itself, unless it has other strides
            broadcast(sent, group, src=0).wait()
            parameter.detach().copy_(sent)
