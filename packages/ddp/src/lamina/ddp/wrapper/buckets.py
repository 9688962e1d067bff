"""The plan of buckets: which parameters share one, and which modules wait for its weights.

A parameter is waited for by the module that owns it. But a module may read the weights of a child
that it never calls (torch's `MultiheadAttention` reads `out_proj`), so those of modules that nobody
has called in training yet are waited for by the nearest module around them that was called.
"""

import weakref
from collections.abc import Callable, Iterable, Sequence
from typing import Any

import torch
from torch import nn
from torch.distributed import ProcessGroup

from lamina.buffers.engine import ScratchBuffers
from lamina.collectives import RegistrationError, register_pool
from lamina.collectives.engine import RegisteredPool, broadcast, registration_problem
from lamina.ddp.execution.engine import Prefetcher
from lamina.ddp.group.group import GroupSettings, ParameterGroup
from lamina.ddp.parameters.axes import DataParallelAxes
from lamina.ddp.parameters.dtypes import resolve_dtypes
from lamina.ddp.parameters.invariance import check_invariant_wire
from lamina.ddp.parameters.parameters import GroupKey, ParameterRef, group_parameters
from lamina.ddp.wrapper.config import DistributedDataParallelConfig


class BucketWaits:
    """Which modules of one wrapped model wait for which buckets' weights.

    The places are those of `groups` in the prefetcher's order.
    """

    def __init__(
        self, module: nn.Module, groups: Sequence[ParameterGroup], prefetcher: Prefetcher
    ) -> None:
        self._prefetcher = prefetcher
        self._learning = False
        numbers = {inner: number for number, inner in enumerate(module.modules())}
        self._called = [False] * len(numbers)
        self._parents: list[list[int]] = [[] for _ in numbers]
        self._own: list[list[int]] = [[] for _ in numbers]
        self._waits: list[list[int]] | None = None
        # By number and not by module: the wrapper must not keep modules that the user takes out.
        for inner, number in numbers.items():
            for child in inner.children():
                self._parents[numbers[child]].append(number)
        for place, group in enumerate(groups):
            for reference, _ in (owner for ref in group.refs for owner in ref.owners):
                owner = reference()
                if owner is not None and place not in self._own[numbers[owner]]:
                    self._own[numbers[owner]].append(place)
        self._handles: set[int] = set()
        for inner, number in numbers.items():
            if any(True for _ in inner.parameters()):
                hook = _before_forward(weakref.ref(self), number)
                self._handles.add(inner.register_forward_pre_hook(hook, prepend=True).id)

    def leave(self, module: nn.Module) -> None:
        """Take the hooks, which were copied with it, out of a copy of the wrapped module."""
        for inner in module.modules():
            for handle in self._handles & inner._forward_pre_hooks.keys():
                del inner._forward_pre_hooks[handle]

    def begin(self, *, overlapped: bool) -> None:
        """The forward begins: bring the first weights on their way, or all of them in.

        `overlapped` says that this is a forward as those that were learnt from. Others (in
        evaluation the encoder layers of torch read all weights and call nobody) wait here.
        """
        self._learning = overlapped
        if overlapped:
            self._prefetcher.begin_up_to(self._prefetcher.ahead)
        else:
            self._prefetcher.finish()

    def before_module(self, number: int) -> None:
        """A module is about to run."""
        # Only the first forwards change anything here: later ones wait for what is known.
        if self._learning and not self._called[number]:
            self._called[number] = True
            self._waits = None
        if self._waits is None:
            self._waits = self._who_waits()
        for place in self._waits[number]:
            self._prefetcher.wait_for(place)

    def _who_waits(self) -> list[list[int]]:
        """For every module, the places of the buckets it waits for."""
        waits: list[list[int]] = [[] for _ in self._own]
        for owner, places in enumerate(self._own):
            # Outwards from the owner, along all modules that hold it, to the first that was called.
            around = [owner]
            while around and places:
                module = around.pop()
                if self._called[module] or not self._parents[module]:
                    waits[module] += [place for place in places if place not in waits[module]]
                else:
                    around += self._parents[module]
        return [sorted(places) for places in waits]


def _before_forward(waits: weakref.ref[BucketWaits], number: int) -> Callable[..., None]:
    """A pre-forward hook. Its reference is weak: groups hold the module's parameters."""

    def hook(*_: Any) -> None:
        """Wait for what the module reads."""
        if (known := waits()) is not None:
            known.before_module(number)

    disabled: Callable[..., None] = torch.compiler.disable(hook)  # type: ignore[no-untyped-call]
    return disabled


_LEAST, _PER_RANK = 40_000_000, 1_000_000


def plan_buckets(
    refs: Sequence[ParameterRef], config: DistributedDataParallelConfig, ranks: int
) -> list[tuple[GroupKey, list[ParameterRef]]]:
    """Buckets in the order in which backward is expected to complete them.

    Parameters are taken in reverse order of registration, since the last layers' gradients are
    there first. A bucket closes with the parameter that fills it, so none is cut. Buckets hold
    parameters that agree on dtype, role and requires_grad.

    `refs` are in order of registration, and `ranks` is the number of data-parallel ranks.
    """
    limit = config.bucket_size or max(_LEAST, _PER_RANK * ranks)
    if config.num_buckets is not None:
        total = sum(ref.parameter.numel() for ref in refs)
        limit = max(1, -(-total // config.num_buckets))
    buckets: list[tuple[GroupKey, list[ParameterRef]]] = []
    # First by kind, as a buffer has one dtype and one set of ranks; then by size.
    for key, members in group_parameters(reversed(refs)):
        bucket: list[ParameterRef] = []
        elements = 0
        for ref in members:
            bucket.append(ref)
            elements += ref.parameter.numel()
            if elements >= limit:
                buckets.append((key, bucket))
                bucket, elements = [], 0
        if bucket:
            buckets.append((key, bucket))
    place = {ref.name: index for index, ref in enumerate(reversed(refs))}
    # A bucket is complete when the last of its parameters is: order the kinds by that.
    return sorted(buckets, key=lambda bucket: place[bucket[1][-1].name])


def make_buckets(
    refs: Sequence[ParameterRef],
    config: DistributedDataParallelConfig,
    settings: GroupSettings,
    dense: DataParallelAxes,
    expert: DataParallelAxes | None,
    scratch: ScratchBuffers,
) -> list[ParameterGroup]:
    """Buffers for all buckets, in the order in which they are reduced (collective).

    ValueError: for a model on the meta device.
    """
    meta = [ref.name for ref in refs if ref.parameter.is_meta]
    if meta:
        raise ValueError(
            f"{meta[0]} and {len(meta) - 1} others are on the meta device: give them values "
            "before wrapping, or use lamina.fsdp.fully_shard, which materialises unit by unit"
        )
    groups = []
    for key, members in plan_buckets(refs, config, dense.size):
        # Never narrower than the parameters: fp64 gradients travel in fp64.
        wide = torch.promote_types(key.dtype, torch.float32)
        wire = wide if config.grad_reduce_in_fp32 else None
        dtypes = resolve_dtypes(key.dtype, wire=wire, moments=config.moments_dtype)
        if config.invariant:
            remedy = "grad_reduce_in_fp32=True"
            check_invariant_wire("DistributedDataParallel", remedy, members[0].name, dtypes)
        axes = expert if key.expert and expert is not None else dense
        groups.append(ParameterGroup(members, axes, dtypes, settings, scratch))
    return groups


def adopt_model_weights(group: ParameterGroup, indices: Iterable[int] | None = None) -> None:
    """Main weights take what the (whole) model weights hold: somebody wrote those.

    Args:
        group: the group; nothing has to be done where its main weights are part of the model's.
        indices: the parameters that were written; None means every element that no longer is its
            main weight, rounded, and on all ranks the first one's main weights (collective over
            axes along which they are whole).
    """
    if not group.requires_grad or group.dtypes.main == group.dtypes.weights:
        return
    main = group.main_weights.data
    model = group.weights.local.piece(group.main_weights.placement)
    if indices is not None:
        for start, stop in (group.spans[index] for index in indices):
            main[start:stop].copy_(model[start:stop])
        return
    # An element that still is its main weight, rounded, keeps the bits that rounding has taken.
    main.copy_(torch.where(main.to(model.dtype) == model, main, model.to(main.dtype)))
    axes = (group.axes.outer, group.axes.inner)
    for cut, axis in zip(group.main_weights.cuts, axes, strict=True):
        if not cut:
            broadcast(main, axis.sibling("gather"), src=0).wait()


def registered_pool(
    axes: tuple[DataParallelAxes | None, ...], device: torch.device
) -> RegisteredPool:
    """A pool that the communicators of all data-parallel axes may use in place.

    RegistrationError says why hardware, build or backend lack it.
    """
    communicators = [
        group
        for kind in axes
        if kind is not None
        for purpose in ("gather", "reduce")
        for group in kind.groups(purpose)
    ]
    refusal = registration_refusal(communicators, device)
    if refusal is not None:
        raise RegistrationError(refusal)
    # Axes may share a group, and a group takes a pool once.
    return register_pool(
        list({id(group): group for group in communicators if group is not None}.values()), device
    )


def registration_refusal(
    groups: Iterable[ProcessGroup | None], device: torch.device, *, symmetric: bool = True
) -> str | None:
    """Why `nccl_ub` cannot be had, for an error; None if it can.

    `groups` are to use it; None is an axis of one rank. `symmetric` is for symmetric windows.
    """
    where = device if device.type == "cuda" else None
    several: list[ProcessGroup | None] = [group for group in groups if group is not None]
    for group in several or [None]:
        problem = registration_problem(group, where, symmetric=symmetric)
        if problem is None and device.type != "cuda":
            problem = f"the model is on {device}, and NCCL registers only CUDA memory"
        if problem is not None:
            return f"nccl_ub=True: {problem}; leave it out here"
    return None
