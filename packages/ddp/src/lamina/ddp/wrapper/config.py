"""Settings of `DistributedDataParallel`, under the names Megatron-Core documents them by."""

from dataclasses import dataclass
from typing import Literal

import torch

from lamina.ddp.execution.module_buffers import BufferPolicy
from lamina.ddp.gradients.reduction import resolve_reduction
from lamina.ddp.parameters.strategy import Strategy, resolve_strategy
from lamina.mesh.engine import check_fields, setting


@dataclass(frozen=True)
class DistributedDataParallelConfig:
    """How gradients are kept and summed, and how updated weights come back.

    Raises:
        TypeError: for a value of another type.
        ValueError: for settings that contradict each other, or that would do nothing.

    Attributes:
        grad_reduce_in_fp32: send gradients in fp32 whatever the parameters' dtype; otherwise in
            the parameters' dtype. They are kept in fp32 either way, and summed in fp32 too unless
            `reduction="native"`, whose backend adds in the dtype that it sends.
        overlap_grad_reduce: reduce a bucket as soon as its gradients are complete; otherwise all
            buckets are reduced one after another at the end of the backward.
        overlap_param_gather: gather updated weights bucket by bucket under the next forward;
            otherwise right after the optimizer's step. Needs `use_distributed_optimizer`.
        align_param_gather: start the gathers of all buckets when the forward starts, so that
            pipeline stages gather at the same time; otherwise a few are on their way at a time.
            Needs `overlap_param_gather`.
        use_distributed_optimizer: shard optimizer state and main weights (ZeRO-1).
        zero_dp_strategy: 0, 1, 2 or a name: "no_shard", "optim", "optim_grads"; or a `Strategy`
            that keeps model weights whole. 2 sums every microbatch over ranks, so that no rank
            keeps a whole gradient from one to the next. None is 1 with
            `use_distributed_optimizer` and 0 without; a value must agree with it.
        num_distributed_optimizer_instances: copies of the sharded optimizer (HSDP): the size that
            the mesh's `dp_replicate` must have. None takes the mesh's.
        check_for_nan_in_grad: refuse a step if a rank's own gradient is not finite. All ranks that
            sum with it raise at the end of the step's last backward, naming parameter and rank.
        check_for_large_grads: refuse gradients whose largest magnitude exceeds this number (not a
            bool, as Megatron-Core has it: it has no limit of its own); None does not look.
        bucket_size: elements of a bucket; None means max(40M, 1M x data-parallel ranks).
        num_buckets: cut into about this many equal buckets instead; not together with
            `bucket_size`.
        pad_buckets_for_high_nccl_busbw: make shard sizes a multiple of 2^16 elements.
        reduce_scatter_with_fp32_accumulation: sums in fp32 over a narrower wire. The ordered
            reduction always does, so both settings give the same bits; the native one cannot and
            is refused with it.
        average_in_collective: apply 1/D inside the collective. The ordered reduction always
            applies it there, once, to the fp32 sum, so both settings give the same bits; the
            native one lets the backend average in the wire dtype.
        nccl_ub: keep weights and main grads in memory that NCCL has registered, so that it needs
            no buffers of its own (docs/collectives-nccl.md). Refused where hardware or build lack
            it, with the reason.
        reduction: "ordered" sums in fp32 in one fixed order (the same bits on any transport);
            "native" leaves the sum to the backend (SHARP, user buffers) and claims a tolerance;
            "int8" is the ordered sum over a wire of int8 blocks with error feedback: a quarter of
            the bytes of fp32 gradients, for one fp32 number per parameter on every rank;
            "checked" is the ordered sum over a wire with checksums (CPUs only): a bit that flips in
            what a rank sends raises `DamagedMessageError` on the rank that sums it.
        reproducible: one order of summation over microbatches and ranks: the same bits for every
            strategy and number of ranks. Every microbatch is reduced, so M microbatches send M
            times the bytes.
        invariant: `reproducible`, for a model whose own sums have one order for every layout too
            (`TransformerConfig(invariant=True)`, docs/invariance.md). Modules that could and do not
            are refused, and so are gradients that are sent in less than fp32.
        calculate_per_token_loss: leave sums over ranks instead of means; `finalize_grads(...,
            num_tokens=)` divides by the global token count. The loss is then a sum over tokens.
        broadcast_buffers: when the first data-parallel rank's buffers (running statistics, tables)
            are sent to the others: "forward" at the start, before each forward of training and the
            first one after it, as torch does; "start" once; or "never". True and False are
            "forward" and "never".
        keep_tensors_whole: no shard boundary cuts a parameter, for optimizers that look at whole
            tensors (Adafactor); shards are then less even.
        moments_dtype: dtype that Adam and AdamW keep their moments in between steps, such as
            `torch.bfloat16` (Megatron's `exp_avg_dtype` and `exp_avg_sq_dtype`); None is the main
            weights'. Steps are made in the main weights' dtype, and rounded once. It takes a
            `ShardedOptimizer`.

    Examples:
        >>> config = DistributedDataParallelConfig(use_distributed_optimizer=True)  # ZeRO-1
        >>> model = DistributedDataParallel(torch.nn.Linear(4, 1), config)
    """

    grad_reduce_in_fp32: bool = False
    overlap_grad_reduce: bool = False
    overlap_param_gather: bool = False
    align_param_gather: bool = False
    use_distributed_optimizer: bool = False
    zero_dp_strategy: int | str | Strategy | None = None
    num_distributed_optimizer_instances: int | None = setting(None, least=1)
    check_for_nan_in_grad: bool = False
    check_for_large_grads: float | None = None
    bucket_size: int | None = setting(None, least=1, unit="elements")
    num_buckets: int | None = setting(None, least=1)
    pad_buckets_for_high_nccl_busbw: bool = False
    reduce_scatter_with_fp32_accumulation: bool = False
    average_in_collective: bool = False
    nccl_ub: bool = False
    reduction: Literal["ordered", "native", "int8", "checked"] = "ordered"
    reproducible: bool = False
    invariant: bool = False
    calculate_per_token_loss: bool = False
    keep_tensors_whole: bool = False
    broadcast_buffers: BufferPolicy = "forward"
    moments_dtype: torch.dtype | None = None

    def __post_init__(self) -> None:
        largest = self.check_for_large_grads
        # True is an int, and would be a limit of 1.
        if isinstance(largest, bool) or (isinstance(largest, int | float) and not largest > 0):
            raise ValueError(
                f"check_for_large_grads={largest} is no limit: give the "
                "largest magnitude that is still right, such as 1e4, or None not to look"
            )
        check_fields(self)
        if self.bucket_size is not None and self.num_buckets is not None:
            raise ValueError(
                f"bucket_size={self.bucket_size} and num_buckets={self.num_buckets} both say how "
                "large a bucket is: give one"
            )
        self._check_strategy()
        self._check_gathers()
        self._check_reduction()

    @property
    def strategy(self) -> Strategy:
        """Where the three states live along each axis, and when gradients are summed."""
        if self.zero_dp_strategy is None:
            return resolve_strategy(1 if self.use_distributed_optimizer else 0)
        return resolve_strategy(self.zero_dp_strategy)

    def _check_strategy(self) -> None:
        strategy = self.strategy
        if strategy.gathers:
            raise ValueError(
                f"zero_dp_strategy={self.zero_dp_strategy!r} cuts weights: use "
                "lamina.fsdp.fully_shard; DistributedDataParallel keeps them whole (0, 1, 2)"
            )
        if strategy.shards_optimizer is not self.use_distributed_optimizer:
            raise ValueError(
                f"zero_dp_strategy={self.zero_dp_strategy!r} contradicts "
                f"use_distributed_optimizer={self.use_distributed_optimizer}, which says whether "
                "optimizer state is sharded: 0 keeps it whole, 1 and 2 shard it"
            )
        instances = self.num_distributed_optimizer_instances
        if instances is not None and instances > 1 and not strategy.shards_optimizer:
            raise ValueError(
                f"num_distributed_optimizer_instances={instances} has no sharded optimizer to "
                "make copies of without use_distributed_optimizer=True: leave it out"
            )

    def _check_gathers(self) -> None:
        if self.overlap_param_gather and not self.use_distributed_optimizer:
            raise ValueError(
                "overlap_param_gather=True has nothing to gather without "
                "use_distributed_optimizer=True: every rank updates whole weights"
            )
        if self.align_param_gather and not self.overlap_param_gather:
            raise ValueError(
                "align_param_gather=True is about the gathers that overlap_param_gather=True puts "
                "under the forward, which is off: turn it on, or leave this one out"
            )

    def _check_reduction(self) -> None:
        resolve_reduction(
            self.reduction,
            self.reproducible or self.invariant,
            self.average_in_collective,
            per_token=self.calculate_per_token_loss,
        )
        if self.reduction == "native" and self.reduce_scatter_with_fp32_accumulation:
            raise ValueError(
                "reduction='native' adds in the wire dtype, whatever "
                "reduce_scatter_with_fp32_accumulation asks for: use reduction='ordered', or send "
                "fp32 with grad_reduce_in_fp32=True"
            )
