"""Everything that `fully_shard` and `shard_module` can be told: each setting, its text, its rules.

A rule that settings decide among themselves is checked here, when the settings are made. What
needs the module, the mesh or the machine is decided in `lamina.fsdp.api.build`.
"""

from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass, fields
from fnmatch import fnmatchcase
from functools import cached_property
from typing import Any

import torch
from torch import nn
from torch.distributed import ProcessGroup
from torch.distributed.device_mesh import DeviceMesh
from torch.distributed.fsdp import MixedPrecisionPolicy as TorchPolicy
from torch.distributed.fsdp import OffloadPolicy

from lamina.ddp import Strategy
from lamina.ddp.engine import (
    BufferPolicy,
    GradientReduction,
    resolve_reduction,
    resolve_strategy,
)
from lamina.fsdp.settings.precision import MixedPrecisionPolicy, policy_from
from lamina.mesh import ParallelMesh
from lamina.mesh.engine import check_fields, setting

StrategyChoice = int | str | Strategy
"""A strategy's number or name, or the strategy itself."""


_FIXED = ("fsdp_double_buffer", "the fixed buffers of fsdp_double_buffer=True")
_OVERLAPPED = (
    "overlap_grad_reduce",
    "the reductions that overlap_grad_reduce=True runs beside backward",
)
_AHEAD = ("overlap_param_gather", "the units that overlap_param_gather=True gathers ahead")
_REGISTERED = ("nccl_ub", "the memory that nccl_ub=True registers")


@dataclass(frozen=True, kw_only=True)
class ShardingSettings:
    """What a user has chosen: the keyword arguments of `fully_shard`, which has them from here.

    A field has its type, its default and its rules. `needs` in its metadata is the setting that has
    to be on, and what of it this one is about. `gathered` is what of gathered weights it is about,
    which a strategy that keeps weights whole refuses. Both are about other values than the default.
    Some arguments exist because Megatron-FSDP has them, and name what Lamina does in any case. They
    are checked, and change nothing.

    Attributes:
        device_mesh: a `ParallelMesh` or a torch `DeviceMesh` with named dimensions; None builds
            one axis over the whole world, of GPUs if it runs NCCL and there are some.
        dp_shard_dim: name (or names, taken as one axis) of the mesh dimension to shard along; by
            default `dp_shard_cp` of a ParallelMesh, or a DeviceMesh's only dimension. Dimensions of
            a DeviceMesh that are neither data-parallel nor `tp_dim`, `tp` or `pp` are refused.
        dp_outer_dim: name of the dimension of replicas (HSDP, HFSDP); by default `dp_replicate` of
            a ParallelMesh, else none.
        tp_dim: name of the tensor-parallel dimension: one that is left out when the sharding
            dimension is found by itself, and may not be a data-parallel one.
        expt_device_mesh: mesh of expert parameters, under the same dimension names (or
            `expert_dp`); by default a ParallelMesh's own. Experts are not sharded along its
            dimensions `ep` and `expert_tp`, so that it may be the `device_mesh`.
        hybrid_fsdp_group: a group over outer and sharding dimension; its ranks are checked, and
            nothing is sent over it, as sums and gathers go axis by axis.
        hybrid_fsdp_expt_group: the same for expert parameters.
        fsdp_group_ag: communicator for gathers, over the sharding dimension's ranks; by default
            one is made.
        expt_fsdp_group_ag: the same for expert parameters.
        device: where the model computes: parameters and buffers are moved there, and inputs have to
            be there (`Runtime.device`); by default the mesh's. Under a mesh of CPUs a model stays
            on the accelerator it is on.
        zero_dp_strategy: 0 "no_shard", 1 "optim", 2 "optim_grads", 3 "optim_grads_params", or a
            `Strategy` (which speaks for the outer dimension as well). Or one for each pattern
            (`fnmatch`) of parameter names, of which the first that matches counts, such as
            `{"*lora*": 3, "*": 0}`: frozen weights that stay whole are never gathered.
        outer_dp_sharding_strategy: 0 "no_shard" (HSDP) or 1 "optim" (HFSDP), which needs an outer
            dimension.
        fsdp_unit_modules: classes, or import strings, of the modules that are gathered and
            released as units; None finds repeated blocks and large embeddings by themselves.
        enable_fine_grained_param_gather: gather module by module instead of unit by unit. Modules
            that read the weights of modules inside them need weights of their own (see
            docs/fsdp.md).
        disable_bucketing: a buffer, and so a collective, for every parameter.
        keep_tensors_whole: no shard boundary cuts a parameter, for optimizers of other libraries
            that look at one tensor at a time as a whole (Shampoo, CAME). The rank that has a tensor
            steps it, so what such an optimizer computes over several tensors is over those of one
            rank. Torch's Adafactor and Muon need no setting.
        mixed_precision_policy: dtypes of the copies of weights and gradients, as Lamina's policy or
            torch's (whose parameters keep their own dtype as main weights).
        offload_policy: torch FSDP2's `CPUOffloadPolicy()`: weights, main grads and optimizer state
            lie in host memory, and the optimizer steps there; needs `zero_dp_strategy=3`. The
            model may be built on the host: it computes on `device`, by default the mesh's.
        reshard_after_forward: with `zero_dp_strategy=3`, give whole weights back after forward
            (True), or keep them for backward (False). None gives back all but the root's. The unit
            whose backward comes first keeps them either way. For one unit:
            `model.unit_of(block).set_reshard_after_forward(...)`.
        fsdp_double_buffer: gather into fixed memory that units which never live together share.
        maxpool_double_buffer: with `fsdp_double_buffer`, which always makes a slot as large as the
            largest unit in it.
        fsdp_db_use_persist_buf_on_alloc_fail: with `fsdp_double_buffer`, which always gives a unit
            that can share with none fixed memory of its own.
        cuda_graph_mode: after the first step no unit's weights ever move, so that graphs of
            blocks (`torch.cuda.make_graphed_callables`) stay right; a unit whose place is taken is
            gathered later instead. Needs CUDA and `fsdp_double_buffer`.
        nccl_ub: gather into memory that NCCL has registered; needs `fsdp_double_buffer`, and is
            refused where NCCL cannot register memory, with the reason. Call
            `model.deregister_memory()` on all ranks before the process group is destroyed.
        disable_symmetric_registration: with `nccl_ub`, user buffers without symmetric windows.
        gather_budget: bytes of whole weights per rank that may be live at once: as many units as
            fit are gathered ahead. None gathers one ahead. Needs `zero_dp_strategy=3` and
            `overlap_param_gather`.
        overlap_param_gather: gather the next unit's weights while one computes.
        keep_fp8_transpose_cache: modules that multiply in FP8 keep the codes of their transposed
            weights from forward until backward, one byte per element, instead of quantising the
            gathered weights again. Refused where no module has that attribute.
        reduction: "ordered" (one order of summation on any transport), "native" (the backend's),
            "int8" (ordered, over a wire of int8 blocks with error feedback), or "checked" (ordered,
            over a wire with checksums, on CPUs: `DamagedMessageError` names the sender).
        reproducible: the same bits for every strategy and number of ranks.
        invariant: `reproducible`, for a model whose own sums have one order for every layout too
            (`TransformerConfig(invariant=True)`, docs/invariance.md). Modules that could and do not
            are refused, and so are gradients that are sent in less than fp32.
        average_in_collective: average inside the collective. The ordered reduction does so either
            way, on the fp32 sum: both settings give the same bits. With `reduction="native"` the
            backend averages, in the wire dtype.
        calculate_per_token_loss: sum gradients instead of averaging them over ranks
            (`lamina.ddp.finalize_grads` divides by the global token count).
        overlap_grad_reduce: reduce a unit's gradients while earlier units' backward runs.
        reduce_budget: bytes of gradients per rank that may be on the wire at once. None allows two
            reductions, and one beside a unit whose gradients are coming.
        reduce_message_bytes: of a message in which an ordered reduce-scatter brings a slice of a
            unit over NCCL. Three of them take the place of as many bytes as the unit's gradients
            have, where that is more. None takes a 96th of the GPU's memory, so that only units
            that have more than a 32nd of it are cut.
        report_nan_in_param_grad: refuse a step if a rank's own gradient is not finite, on all ranks
            that sum with it, naming parameter and rank (costs a pass over the gradients, and a wait
            for the device once per step).
        sync_model_each_microbatch: every backward ends with summed gradients. If False, every
            backward is as inside `no_sync` until `model.finish_grad_sync()`, or the step of the
            optimizer that was given, ends the accumulation.
        use_decoupled_grad: parameters have their gradient as `.decoupled_grad` too, for optimizers
            that read it there. It is another name of `.grad`, whose dtype may differ from the
            parameter's (`MixedPrecisionPolicy(main_grads_dtype=)`).
        init_module: initialises one meta module's own tensors; None calls `reset_parameters()`.
        init_model_with_meta_device: the model has to be on the meta device; False takes meta
            parameters where there are some.
        sync_module_states: start from the first data-parallel rank's values.
        broadcast_buffers: when the first data-parallel rank's buffers (running statistics, tables)
            are sent to the others: "start" once, with `sync_module_states`; "forward" also before
            each forward of training and the first one after it, as torch's DDP does; "never".
        preproc_state_dict_for_dcp_ckpt: `state_dict()` of model and optimizer hold what
            `torch.distributed.checkpoint` saves and loads on any number of ranks; if False, whole
            plain tensors on every rank (collective), for `torch.save`; refused where tp or ep has
            cut parameters.
        check_order: with `zero_dp_strategy=3`, tell other ranks before each gather which unit it
            is: a unit that runs on some ranks only is named (`RankOrderError`) instead of hanging
            the others, and so is an evaluation that only rank 0 runs. For debugging: a small
            collective and a synchronisation each time.
        check_storage: with `zero_dp_strategy=3`, name the unit whose whole weights are read while
            they are released (`StaleStorageError`), as by a reference to a parameter that was kept
            from an earlier gather, instead of crashing. Released storage is kept and holds NaN.
            For debugging: each operator of a forward is looked at, and no memory is given back.

    Raises:
        TypeError: for a value of another type.
        ValueError: for an unknown strategy or reduction, a value below its least, and settings that
            exclude or need others.

    Examples:
        >>> settings = ShardingSettings(zero_dp_strategy="optim", reduce_budget=2**28)
        >>> settings.gathers
        False
    """

    device_mesh: ParallelMesh | DeviceMesh | None = None
    dp_shard_dim: str | Sequence[str] | None = None
    dp_outer_dim: str | Sequence[str] | None = None
    tp_dim: str | None = None
    expt_device_mesh: ParallelMesh | DeviceMesh | None = None
    hybrid_fsdp_group: ProcessGroup | None = None
    hybrid_fsdp_expt_group: ProcessGroup | None = None
    fsdp_group_ag: ProcessGroup | None = None
    expt_fsdp_group_ag: ProcessGroup | None = None
    device: torch.device | str | int | None = None

    zero_dp_strategy: StrategyChoice | Mapping[str, StrategyChoice] = 3
    outer_dp_sharding_strategy: int | str = 0
    fsdp_unit_modules: Sequence[type[nn.Module] | str] | None = None
    enable_fine_grained_param_gather: bool = False
    disable_bucketing: bool = False
    keep_tensors_whole: bool = False

    mixed_precision_policy: MixedPrecisionPolicy | TorchPolicy | None = setting(  # noqa: RUF009  # a field
        None, example="MixedPrecisionPolicy(param_dtype=torch.bfloat16)"
    )
    offload_policy: OffloadPolicy | None = None
    reshard_after_forward: bool | None = setting(None, gathered="weights that are gathered")
    fsdp_double_buffer: bool = setting(False, gathered="the memory that units are gathered into")
    maxpool_double_buffer: bool = setting(False, needs=_FIXED)
    fsdp_db_use_persist_buf_on_alloc_fail: bool = setting(False, needs=_FIXED)
    cuda_graph_mode: bool = setting(False, needs=_FIXED)
    nccl_ub: bool = False
    disable_symmetric_registration: bool = setting(False, needs=_REGISTERED)
    gather_budget: int | None = setting(
        None, least=1, unit="bytes", needs=_AHEAD, gathered="whole weights that come and go"
    )
    overlap_param_gather: bool = True
    keep_fp8_transpose_cache: bool = False

    reduction: str = "ordered"
    reproducible: bool = False
    invariant: bool = False
    average_in_collective: bool = False
    calculate_per_token_loss: bool = False
    overlap_grad_reduce: bool = True
    reduce_budget: int | None = setting(None, least=1, unit="bytes", needs=_OVERLAPPED)
    reduce_message_bytes: int | None = setting(None, least=1, unit="bytes")
    report_nan_in_param_grad: bool = False
    sync_model_each_microbatch: bool = True
    use_decoupled_grad: bool = False

    init_module: Callable[[nn.Module], None] | None = None
    init_model_with_meta_device: bool = False
    sync_module_states: bool = True
    broadcast_buffers: BufferPolicy = "start"
    preproc_state_dict_for_dcp_ckpt: bool = True
    check_order: bool = setting(False, gathered="gathers that need all ranks")
    check_storage: bool = setting(False, gathered="whole weights that are released")

    def __post_init__(self) -> None:
        if not isinstance(self.reshard_after_forward, bool | None):
            raise ValueError(
                f"reshard_after_forward={self.reshard_after_forward!r}: True, False or None; for "
                "some units, model.unit_of(block).set_reshard_after_forward(...) after fully_shard"
            )
        check_fields(self)
        # First what each field's rules say of it, then what several fields say of each other.
        for each in fields(self):
            value, rules = getattr(self, each.name), each.metadata
            if value is not each.default:
                self._check(each.name, value, rules.get("needs"), rules.get("gathered", ""))
        has_axis = self.dp_outer_dim is not None or isinstance(self.device_mesh, ParallelMesh)
        if not has_axis and any(
            strategy.placements.optimizer_state[0].cuts for strategy in self.strategies.values()
        ):
            what = f"outer_dp_sharding_strategy={self.outer_dp_sharding_strategy!r}"
            # By default it cuts nothing: then a `Strategy` of the user's does.
            if resolve_strategy(0, self.outer_dp_sharding_strategy) == resolve_strategy(0):
                what = "the outer placement of zero_dp_strategy"
            raise ValueError(
                f"{what} is about the ranks along dp_outer_dim, which is not given: name the "
                "mesh's outer dimension, or cut nothing along it"
            )
        if self.keep_tensors_whole and not self._cuts:
            raise ValueError(
                "keep_tensors_whole=True is about tensors that ranks cut, and this strategy cuts "
                "none: leave it out"
            )
        if self.keep_tensors_whole and self.disable_bucketing:
            raise ValueError(
                "keep_tensors_whole=True with disable_bucketing=True puts each parameter's buffer "
                "on the first rank, which would have the whole model: leave one of them out"
            )
        if self.gather_budget is not None and self.fsdp_double_buffer:
            raise ValueError(
                f"gather_budget={self.gather_budget} is about whole weights that come and go, and "
                "fsdp_double_buffer=True gathers into fixed memory: leave one of them out"
            )
        if self.precision.weight_codec is not None and not self.gathers:
            raise ValueError(_kept_whole("weight_codec", "weights that are gathered"))
        _ = self.rank_sum  # which reductions exclude what is said where they are made

    def _check(self, name: str, value: Any, needs: tuple[str, str] | None, gathered: str) -> None:
        if needs is not None and not getattr(self, needs[0]):
            raise ValueError(
                f"{name}={value} is about {needs[1]}, which is off: turn it on, or leave this one "
                "out"
            )
        if gathered and not self.gathers:
            raise ValueError(_kept_whole(f"{name}={value}", gathered))

    @cached_property
    def strategies(self) -> dict[str, Strategy]:
        """Placements and cadence, by pattern of parameter names."""
        given = self.zero_dp_strategy
        patterns = given if isinstance(given, Mapping) else {"*": given}
        outer = self.outer_dp_sharding_strategy
        return {glob: resolve_strategy(strategy, outer) for glob, strategy in patterns.items()}

    def strategy_of(self, name: str) -> Strategy:
        """A parameter's strategy: that of the first pattern its name matches, or ValueError."""
        for pattern, strategy in self.strategies.items():
            if fnmatchcase(name, pattern):
                return strategy
        raise ValueError(
            f"zero_dp_strategy={{{', '.join(map(repr, self.strategies))}}} has no pattern that "
            f"{name} matches: add one, such as '*' for all that the patterns before it leave out"
        )

    @property
    def _cuts(self) -> bool:
        return any(strategy.shards_optimizer for strategy in self.strategies.values())

    @property
    def gathers(self) -> bool:
        """Whether weights are sharded, so that units are gathered."""
        return any(strategy.gathers for strategy in self.strategies.values())

    @cached_property
    def precision(self) -> MixedPrecisionPolicy:
        """The policy, as Lamina's."""
        given = self.mixed_precision_policy
        return policy_from(given, "mixed_precision_policy") or MixedPrecisionPolicy()

    @cached_property
    def rank_sum(self) -> GradientReduction:
        """How gradients are summed over ranks."""
        return resolve_reduction(
            self.reduction,
            self.reproducible or self.invariant,
            self.average_in_collective,
            per_token=self.calculate_per_token_loss,
            message_bytes=self.reduce_message_bytes,
        )


def _kept_whole(setting: str, about: str) -> str:
    return (
        f"{setting} is about {about}, and this strategy keeps weights whole: use "
        "zero_dp_strategy=3, or leave it out"
    )
