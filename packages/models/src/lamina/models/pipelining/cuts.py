"""The layers of each pipeline stage, by cost or as the caller gives them."""

import functools
import math
from collections.abc import Sequence
from itertools import accumulate, pairwise

from lamina.models.base.config import TransformerConfig
from lamina.models.decoder.cost import head_flops_per_token, layer_flops_per_token

Layout = tuple[tuple[int, ...], ...]
"""Layers of each stage, in order."""

_Cut = tuple[float, float, tuple[int, ...]]
"""The largest cost, the sum of squared costs, and the end of each stage."""

_IMPOSSIBLE: _Cut = (math.inf, math.inf, ())

LOOKUP_COST = 600
"""The cost of looking up one element of an embedding, as a number of operations. The look-up and
its gradient move bytes, and a device computes about 60 operations in the time of one byte."""


def part_costs(config: TransformerConfig, sequence: int) -> tuple[float, list[float], float]:
    """The cost of a training step per token: of the embedding, of each layer, and of what follows.

    It is in floating-point operations or their equivalent, for sequences of this many tokens.
    """
    layers = [layer_flops_per_token(config, at, sequence) for at in range(config.num_layers)]
    head = head_flops_per_token(config, sequence)
    return LOOKUP_COST * config.hidden_size, layers, head


def cut_layers(config: TransformerConfig, num_stages: int, sequence: int | None = None) -> Layout:
    """Cut the layers into contiguous runs so that the most expensive stage is as cheap as possible.

    Embedding and head count for the first and the last stage, which may have no layer. Among cuts
    with the same largest cost the one with the smallest sum of squared costs is taken.

    A sequence has `max_sequence_length` tokens by default. A ValueError if there are fewer layers
    than stages need.
    """
    needed = max(num_stages - 2, 1)
    if num_stages < 1 or config.num_layers < needed:
        raise ValueError(
            f"{config.num_layers} layers cannot be cut into {num_stages} stages: every stage but "
            f"the first and the last needs one, {needed} in all; use fewer stages"
        )
    first, layers, last = part_costs(config, sequence or config.max_sequence_length)
    ends = _best_ends(layers, first, last, num_stages)
    return tuple(tuple(range(*run)) for run in pairwise((0, *ends)))


def _best_ends(
    layers: Sequence[float], first: float, last: float, num_stages: int
) -> tuple[int, ...]:
    """Find the end of each stage, by dynamic programming over numbers of stages and layers."""
    before = list(accumulate(layers, initial=0.0))

    @functools.cache
    def best(stages: int, end: int) -> _Cut:
        """The best cut of the layers before `end` into this many stages."""
        if stages == 0:
            return (0.0, 0.0, ()) if end == 0 else _IMPOSSIBLE
        ends = stages == 1, stages == num_stages
        extra = first * ends[0] + last * ends[1]
        least = 0 if any(ends) and num_stages > 1 else 1
        candidates = []
        for begin in range(end - least + 1):
            largest, squares, cuts = best(stages - 1, begin)
            cost = before[end] - before[begin] + extra
            candidates.append((max(largest, cost), squares + cost * cost, (*cuts, end)))
        return min(candidates, default=_IMPOSSIBLE)

    return best(num_stages, len(layers))[2]


def resolve_layout(layout: Sequence[int] | Sequence[Sequence[int]], num_layers: int) -> Layout:
    """Turn numbers or lists of layers into the layers of stages.

    ValueError unless every layer is in it once, in order, and no inner stage is empty.
    """
    runs: list[tuple[int, ...]] = []
    start = 0
    for stage in layout:
        run = tuple(range(start, start + stage)) if isinstance(stage, int) else tuple(stage)
        runs.append(run)
        start += len(run)
    layers = [layer for run in runs for layer in run]
    if layers != list(range(num_layers)):
        raise ValueError(
            f"layout {list(map(list, runs))} holds layers {layers}: it must hold 0 to "
            f"{num_layers - 1}, each once and in order (numbers of layers per stage must sum to "
            f"{num_layers})"
        )
    empty = [stage for stage, run in enumerate(runs[1:-1], start=1) if not run]
    if empty:
        raise ValueError(
            f"layout {list(map(list, runs))}: stages {empty} hold nothing; only the first (which "
            "embeds) and the last (which has the head) may be without a layer"
        )
    return tuple(runs)
