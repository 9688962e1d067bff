"""The memory of a deep model from records of three shallow ones.

Note [Peaks change places]
Of a shallow model the memory may be most where one unit is reduced, and of a deep one where forward
ends, with the activations of all layers. A line through the peaks of shallow models would follow
the first place for ever. So each moment of a step has a line of its own, and the peak of the deep
model is the highest of them. In layers that are alike memory grows evenly from layer to layer, so
what counts are the first and the last layer of a pass. A moment is therefore known by its distance
from the begin or the end of a pass, as long as all records run the same operators there. The third
record has to be on the line of the first two, or the moment is none.
"""

from __future__ import annotations

from collections.abc import Iterator, Sequence

from lamina.models.plan.recorder import CATEGORIES, StepRecord

Moment = dict[str, int]
_NEAR = 2e-3
"""Part of a moment's bytes by which the third record may be off the line."""


def peak_at_depth(records: Sequence[StepRecord], steps: float) -> dict[str, float]:
    """Bytes by category at the peak of a model that has more layers.

    Of three records the second and the third have one step more layers than the one before, and the
    model has `steps` such steps more than the first. See Note [Peaks change places].
    """
    memory = [_at_each_event(record) for record in records]
    best = dict.fromkeys(CATEGORIES, 0.0)
    for places in _same_moments(records):
        low, high, third = (each[at] for each, at in zip(memory, places, strict=True))
        expected = 2 * sum(high.values()) - sum(low.values())
        if abs(sum(third.values()) - expected) > _NEAR * expected:
            continue
        grown = {
            name: max(0.0, low.get(name, 0) + steps * (high.get(name, 0) - low.get(name, 0)))
            for name in CATEGORIES
        }
        if sum(grown.values()) > sum(best.values()):
            best = grown
    return best


def _at_each_event(record: StepRecord) -> list[Moment]:
    """Bytes by category after each event."""
    points, now, memory = dict(record.timeline()), Moment(), list[Moment]()
    for at in range(record.end + 1):
        now = points.get(at, now)
        memory.append(now)
    return memory


def _same_moments(records: Sequence[StepRecord]) -> Iterator[list[int]]:
    """Events of all records that are as far from the begin, or from the end, of the same pass."""
    names = [_operators(record) for record in records]
    passes = [_passes(record) for record in records]
    if len(set(map(len, passes))) > 1:
        return
    for bounds in zip(*passes, strict=True):
        shortest = min(end - begin for begin, end in bounds)
        for from_end in (False, True):
            edges = [bound[from_end] for bound in bounds]
            yield edges
            for offset in range(1, shortest + 1):
                places = [edge - offset if from_end else edge + offset for edge in edges]
                ran = [places[n] if from_end else places[n] - 1 for n in range(len(places))]
                if len({each[at] for each, at in zip(names, ran, strict=True)}) > 1:
                    break
                yield places


def _operators(record: StepRecord) -> Sequence[str]:
    """The operator of each event; "" is a view."""
    names = [""] * (record.end + 1)
    for operation in record.operations:
        names[operation.at] = operation.name
    return names


def _passes(record: StepRecord) -> list[tuple[int, int]]:
    """Where each forward, each backward and the update begin and end."""
    begins, before = [0], False
    for operation in record.operations:
        if operation.backward != before:
            begins.append(operation.at)
            before = operation.backward
    begins = sorted({*begins, *(at for at, _ in record.marks)})
    return list(zip(begins, [*begins[1:], record.end], strict=True))
