"""A pipeline's schedule on a clock: how long its stages take together, and whether they end."""

from __future__ import annotations

from collections import Counter
from collections.abc import Iterator, Mapping, Sequence
from typing import Any

import torch

from lamina.models.plan.job import Job, program

Action = tuple[int, str, int]
"""A stage, what it does with a microbatch (F, B, or B's halves I and W), and the microbatch."""


def pipeline_order(job: Job) -> dict[int, list[Action]]:
    """What each pipeline rank does in a step, in the order of torch's schedule."""
    ranks, passes = job.layout.pp, job.microbatches
    if job.schedule == "gpipe":
        return {
            rank: [(rank, kind, chunk) for kind in "FB" for chunk in range(passes)]
            for rank in range(ranks)
        }
    if job.schedule == "1f1b":  # torch 2.13 tells another order here than the one it runs
        return {rank: list(_one_forward_one_backward(rank, ranks, passes)) for rank in range(ranks)}
    with program(job.with_one_layer(), 0, torch.device("meta")) as playing:
        shown: Mapping[int, Sequence[Any]] = playing.module.schedule.pipeline_order  # type: ignore[union-attr, assignment]
        return {rank: list(_flat(actions)) for rank, actions in shown.items()}


def _one_forward_one_backward(rank: int, ranks: int, passes: int) -> Iterator[Action]:
    """Narayanan et al., 2019: as many forwards ahead as there are stages from here to the end."""
    ahead = min(passes, ranks - rank)
    yield from ((rank, "F", chunk) for chunk in range(ahead))
    for chunk in range(passes):
        yield rank, "B", chunk
        if ahead + chunk < passes:
            yield rank, "F", ahead + chunk


def simulate(
    order: Mapping[int, Sequence[Action]], durations: Mapping[int, Mapping[str, float]], hop: float
) -> float:
    """Run a schedule: every action waits for its own rank and for what it is given.

    Args:
        order: each rank's actions.
        durations: seconds of a forward (F), a backward (B) and its two halves (I, W), by rank.
        hop: seconds of a message between two stages.

    Raises:
        RuntimeError: ranks that would wait for each other for ever.
    """
    queues = dict(order)
    stages = {stage for queue in queues.values() for stage, _, _ in queue}
    last = max(stages, default=0)
    owner = {stage: rank for rank, queue in queues.items() for stage, _, _ in queue}
    places, now, done = Counter[int](), dict.fromkeys(queues, 0.0), dict[tuple[Any, ...], float]()
    left = sum(map(len, queues.values()))
    while left:
        before = left
        for rank, queue in queues.items():
            while places[rank] < len(queue):
                stage, kind, chunk = queue[places[rank]]
                needs = _needs(stage, kind, chunk, last)
                if any(need not in done for need in needs):
                    break
                received = (done[need] + (hop if owner[need[0]] != rank else 0.0) for need in needs)
                now[rank] = max([now[rank], *received]) + durations[rank][kind]
                done[stage, "F" if kind == "F" else "W" if kind == "W" else "B", chunk] = now[rank]
                places[rank] += 1
                left -= 1
        if left == before:
            stuck = {rank: queue[places[rank]] for rank, queue in queues.items()
                     if places[rank] < len(queue)}  # fmt: skip
            raise RuntimeError(f"the schedule stands still: {stuck} wait for each other")
    return max(now.values())


_KINDS = {"FORWARD": "F", "FULL_BACKWARD": "B", "BACKWARD_INPUT": "I", "BACKWARD_WEIGHT": "W"}


def _flat(actions: Sequence[Any]) -> Iterator[Action]:
    for action in actions:
        if action is None:
            continue
        if getattr(action, "sub_actions", None):
            yield from _flat(list(action.sub_actions))
        elif action.computation_type.name in _KINDS:
            kind = _KINDS[action.computation_type.name]
            yield action.stage_index, kind, action.microbatch_index


def _needs(stage: int, kind: str, chunk: int, last: int) -> list[tuple[Any, ...]]:
    if kind == "F":
        return [(stage - 1, "F", chunk)] if stage else []
    if kind == "W":
        return [(stage, "B", chunk)]
    return [(stage, "F", chunk)] + ([(stage + 1, "B", chunk)] if stage < last else [])
