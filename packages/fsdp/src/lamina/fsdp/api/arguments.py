"""From the arguments of `fully_shard` to settings: their defaults, and what is refused."""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import fields
from typing import Any, TypeVar

import torch
from torch import nn
from torch.optim import Optimizer

from lamina.ddp import Strategy
from lamina.ddp.engine import (
    DataParallelAxes,
    collect_parameters,
    refuse_optimizer,
    resolve_reduction,
    resolve_strategy,
)
from lamina.fsdp.api.build import ShardingSettings, updated_apart
from lamina.fsdp.module.sharded_module import is_sharded
from lamina.fsdp.settings.hardware_limits import BufferArguments, UnavailableError
from lamina.fsdp.settings.meshes import MeshArguments, computing_device, model_axes, resolve_meshes
from lamina.fsdp.settings.precision import MixedPrecisionPolicy, policy_from
from lamina.fsdp.state.cut_regions import beside_parts
from lamina.fsdp.state.whole_tensors import needs_whole_tensors, refuse_cut_by_model
from lamina.fsdp.units.casting import check_patterns
from lamina.fsdp.units.dtensors import point_at_localised
from lamina.fsdp.weights.offloaded import Offload, resolve_offload
from lamina.mesh import ParallelLayout, ParallelMesh
from lamina.mesh.engine import require_overlap

__all__ = ["Arguments", "refuse_sharded"]

T = TypeVar("T")

_TRANSPOSES = "keep_fp8_transpose_cache"


class Arguments:
    """What `fully_shard` was given for one model.

    Args:
        module: the model.
        optimizer: its optimizer, if one was given.
        given: every argument under its own name.

    Raises:
        ValueError: for arguments that exclude or need each other.
    """

    def __init__(
        self, module: nn.Module, optimizer: Optimizer | None, given: Mapping[str, Any]
    ) -> None:
        self.module = module
        self.optimizer = optimizer
        self.given = dict(given)
        _check_meta(module, given["init_model_with_meta_device"])
        _check_outer(given)
        if given["device_mesh"] is None:
            self.given["device_mesh"] = ParallelLayout().build()
        if given["overlap_grad_reduce"] or given["overlap_param_gather"]:
            require_overlap("fully_shard(overlap_grad_reduce=, overlap_param_gather=)")
        self.meshes = _those_of(MeshArguments, self.given)
        self.buffers = _those_of(BufferArguments, self.given)
        self._transposing: list[nn.Module] = []

    def settings(self) -> ShardingSettings:
        """Everything resolved, and checked against this machine.

        Raises:
            ValueError: for unknown strategies or mesh dimensions, and arguments that need others.
            UnavailableError: for what this machine lacks.
        """
        given = self.given
        if self.optimizer is not None:  # an earlier call may have been refused half-way
            point_at_localised(self.optimizer, self.module)
        dense, expert = self._axes()
        strategy = resolve_strategy(given["zero_dp_strategy"], given["outer_dp_sharding_strategy"])
        name = "mixed_precision_policy"
        policy = policy_from(given[name], name) or MixedPrecisionPolicy()
        check_patterns(self.module, policy)
        device, offload = self._place(dense, strategy)
        _check_codec(policy, strategy, offload)
        _check_resharding(given["reshard_after_forward"], strategy)
        _check_order(given["check_order"], strategy)
        axes = [dense] if expert is None else [dense, expert]
        gathering = [one.inner.sibling("gather") for one in axes]
        self.buffers.check(gathering, device, gathers=strategy.gathers)
        if given["keep_fp8_transpose_cache"]:
            self._transposing = _with_transposes(self.module)
        return ShardingSettings(
            strategy=strategy,
            dense=dense,
            expert=expert,
            model=model_axes(self.meshes),
            precision=policy,
            unit_classes=given["fsdp_unit_modules"],
            overlap_reduce=given["overlap_grad_reduce"],
            overlap_gather=given["overlap_param_gather"],
            average=not given["calculate_per_token_loss"],
            check_finite=given["report_nan_in_param_grad"],
            broadcast=given["sync_module_states"],
            slots=given["fsdp_double_buffer"],
            slot_memory=self.buffers.slot_memory(gathering, device),
            fixed_addresses=given["cuda_graph_mode"],
            gather_budget=given["gather_budget"],
            reduce_budget=given["reduce_budget"],
            fine_grained=given["enable_fine_grained_param_gather"],
            bucket_per_parameter=given["disable_bucketing"],
            whole=needs_whole_tensors(self.optimizer),
            reduction=resolve_reduction(
                given["reduction"],
                given["reproducible"],
                given["average_in_collective"],
                per_token=given["calculate_per_token_loss"],
            ),
            offload=offload,
            device=device,
            init_module=given["init_module"],
            check_order=given["check_order"],
        )

    def refuse_optimizer(self, settings: ShardingSettings) -> None:
        """Raise ValueError if the optimizer could not be pointed at what it would update."""
        if self.optimizer is not None:
            refs = collect_parameters(self.module)
            known = {id(ref.parameter) for ref in refs}
            refuse_optimizer(self.optimizer, known, updated_apart(refs, settings))
            refuse_cut_by_model(self.optimizer, refs, settings.model)

    def keep_transposes(self) -> None:
        """Tell modules to keep transposes, if that was asked for; after the last refusal."""
        for module in self._transposing:
            setattr(module, _TRANSPOSES, True)

    def _axes(self) -> tuple[DataParallelAxes, DataParallelAxes | None]:
        dense, expert = resolve_meshes(self.meshes)
        refs, model = collect_parameters(self.module), model_axes(self.meshes)
        dense = beside_parts(dense, refs, model)
        return dense, None if expert is None else beside_parts(expert, refs, model)

    def _place(
        self, dense: DataParallelAxes, strategy: Strategy
    ) -> tuple[torch.device, Offload | None]:
        """Where the model computes, and whether shards are kept on the host."""
        mesh, gathers = self.given["device_mesh"], strategy.gathers
        asked = self.given["device"]
        device = computing_device(self.module, mesh, asked)
        policy = self.given["offload_policy"]
        offload = resolve_offload(policy, device, dense, gathers=gathers)
        if offload is None or asked is not None:
            return device, offload
        # A model that has to be offloaded may not fit on the device: its parameters may be on the
        # host, and then say nothing about where it computes.
        device = computing_device(nn.Module(), mesh, None)
        return device, resolve_offload(policy, device, dense)


def refuse_sharded(module: nn.Module) -> None:
    """Raise RuntimeError if a module, or one inside it, is sharded already."""
    for name, child in module.named_modules():
        if is_sharded(child):
            raise RuntimeError(
                f"{name or type(module).__name__} is sharded already: call fully_shard once, on "
                "the whole model"
            )


def _those_of(kind: type[T], given: Mapping[str, Any]) -> T:
    """A dataclass of those arguments that it has fields for."""
    return kind(**{field.name: given[field.name] for field in fields(kind)})  # type: ignore[arg-type]


def _check_outer(given: Mapping[str, Any]) -> None:
    outer = given["outer_dp_sharding_strategy"]
    strategy = resolve_strategy(given["zero_dp_strategy"], outer)
    has_axis = given["dp_outer_dim"] is not None or isinstance(given["device_mesh"], ParallelMesh)
    if strategy.placements.optimizer_state[0].cuts and not has_axis:
        what = f"outer_dp_sharding_strategy={outer!r}"
        if isinstance(given["zero_dp_strategy"], Strategy):
            what = "the outer placement of zero_dp_strategy"
        raise ValueError(
            f"{what} is about the ranks along dp_outer_dim, which is not given: name the mesh's "
            "outer dimension, or cut nothing along it"
        )


def _check_order(asked: bool, strategy: Strategy) -> None:
    if asked and not strategy.gathers:
        raise ValueError(
            "check_order=True is about gathers that need all ranks, and this strategy keeps "
            "weights whole: use zero_dp_strategy=3, or leave it out"
        )


def _check_resharding(asked: bool | None, strategy: Strategy) -> None:
    if asked is None or (isinstance(asked, bool) and strategy.gathers):
        return
    if isinstance(asked, bool):
        raise ValueError(
            f"reshard_after_forward={asked} is about weights that are gathered, and this strategy "
            "keeps them whole: use zero_dp_strategy=3, or leave it out"
        )
    raise ValueError(
        f"reshard_after_forward={asked!r}: True, False or None; for some units, "
        "model.unit_of(block).set_reshard_after_forward(...) after fully_shard"
    )


def _check_codec(policy: MixedPrecisionPolicy, strategy: Strategy, offload: Offload | None) -> None:
    if policy.weight_codec is None:
        return
    if not strategy.gathers:
        raise ValueError(
            "weight_codec encodes weights that are gathered, and this strategy keeps them whole: "
            "use zero_dp_strategy=3"
        )
    if offload is not None:
        raise ValueError(
            "weight_codec keeps codes on the device beside main weights, and offload_policy keeps "
            "shards on the host: use one of the two"
        )


def _with_transposes(module: nn.Module) -> list[nn.Module]:
    """The modules that multiply in FP8 and can keep their transposed weights until backward."""
    name = _TRANSPOSES
    found = [child for child in module.modules() if hasattr(child, name)]
    if not found:
        raise UnavailableError(
            f"{name}=True: no module of {type(module).__name__} multiplies in FP8 (none has an "
            f"attribute {name}), so there is no transpose to keep: use layers that do, such as "
            "lamina.models with Precision(backend='torch-fp8'), or leave it False"
        )
    return found


def _check_meta(module: nn.Module, expected: bool) -> None:
    parameters = list(module.parameters())
    if expected and parameters and not any(parameter.is_meta for parameter in parameters):
        raise ValueError(
            f"init_model_with_meta_device=True, and none of the {len(parameters)} parameters of "
            f"{type(module).__name__} is on the meta device: build it under "
            'torch.device("meta"), or leave the argument out'
        )
