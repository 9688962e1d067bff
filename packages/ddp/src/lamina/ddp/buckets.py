"""Cutting a model's parameters into buckets, the pieces that one collective reduces."""

from __future__ import annotations

from collections.abc import Sequence

from lamina.ddp.config import DistributedDataParallelConfig
from lamina.ddp.grouping import GroupKey, ParameterRef, group_parameters

__all__ = ["plan_buckets"]

_LEAST, _PER_RANK = 40_000_000, 1_000_000


def plan_buckets(
    refs: Sequence[ParameterRef], config: DistributedDataParallelConfig, ranks: int
) -> list[tuple[GroupKey, list[ParameterRef]]]:
    """Buckets in the order in which backward is expected to complete them.

    Parameters are taken in reverse order of registration, since the last layers' gradients are
    there first. A bucket closes with the parameter that fills it, so none is cut. Buckets hold
    parameters that agree on dtype, role and requires_grad.

    Args:
        refs: all parameters, in order of registration.
        config: gives `bucket_size` or `num_buckets`.
        ranks: data-parallel ranks.
    """
    limit = config.bucket_size or max(_LEAST, _PER_RANK * ranks)
    if config.num_buckets is not None:
        total = sum(ref.parameter.numel() for ref in refs)
        limit = max(1, -(-total // config.num_buckets))
    buckets: list[tuple[GroupKey, list[ParameterRef]]] = []
    for key, members in group_parameters(reversed(refs)):
        bucket: list[ParameterRef] = []
        held = 0
        for ref in members:
            bucket.append(ref)
            held += ref.parameter.numel()
            if held >= limit:
                buckets.append((key, bucket))
                bucket, held = [], 0
        if bucket:
            buckets.append((key, bucket))
    place = {ref.name: index for index, ref in enumerate(reversed(refs))}
    # A bucket is complete when the last of its parameters is: order the kinds by that.
    return sorted(buckets, key=lambda bucket: place[bucket[1][-1].name])
