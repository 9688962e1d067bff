"""What a layout's padding costs, beside what no layout could avoid: pure integers, no torch."""

from collections.abc import Iterable
from dataclasses import dataclass

from lamina.buffers.layout.granularity import TensorSpec
from lamina.buffers.layout.layout import BufferLayout
from lamina.buffers.layout.planning import Divisors, Item


@dataclass(frozen=True)
class PaddingReport:
    """Sizes in elements; fractions are padding per element of the tensors.

    Attributes:
        numel: elements of the tensors.
        size: elements of the planned buffer.
        least_size: no layout of these tensors in equal contiguous shards can be smaller: its shards
            hold everything, hold the largest tensor that may not be cut, and are a multiple of each
            granule whose tensor is longer than two shards.
        split_size: all buffers together when every row size gets one of its own (`split_by_row`).
        split_buffers: how many those are.
        reordered: whether the planner left the given order.
    """

    numel: int
    size: int
    least_size: int
    split_size: int
    split_buffers: int
    reordered: bool

    def _fraction(self, size: int) -> float:
        return (size - self.numel) / self.numel if self.numel else 0.0

    @property
    def fraction(self) -> float:
        """Padding of the planned buffer."""
        return self._fraction(self.size)

    @property
    def least_fraction(self) -> float:
        """The lower bound."""
        return self._fraction(self.least_size)

    @property
    def distance(self) -> float:
        """How far the plan lies above the lower bound, per element of the tensors."""
        return self.fraction - self.least_fraction

    @property
    def split_fraction(self) -> float:
        """Padding of one buffer per row size."""
        return self._fraction(self.split_size)

    def __str__(self) -> str:
        return (
            f"padding {self.fraction:.2%} (lower bound {self.least_fraction:.2%}, distance "
            f"{self.distance:.2%}; {self.split_buffers} buffers, one per row size: "
            f"{self.split_fraction:.2%})" + (", reordered" if self.reordered else "")
        )


def padding_report(layout: BufferLayout) -> PaddingReport:
    """Measure a layout against the lower bound and against one buffer per row size.

    Examples:
        >>> layout = BufferLayout.plan([TensorSpec("q", (512, 256))], num_shards=4)
        >>> report = padding_report(layout)
    """
    items = [Item(spec.numel, spec.granule) for spec in layout.specs]
    least = 0
    if layout.numel:
        least = Divisors(items, layout.num_shards, layout.alignment).least
    # The alternative: granules of one size need no padding between them, but buffers are more.
    split = split_by_row(layout.specs)
    plans = [BufferLayout.plan(specs, layout.num_shards, layout.alignment) for specs in split]
    return PaddingReport(
        layout.numel,
        layout.size,
        least * layout.num_shards,
        sum(plan.size for plan in plans),
        len(plans),
        layout.reordered,
    )


def split_by_row(specs: Iterable[TensorSpec]) -> tuple[tuple[TensorSpec, ...], ...]:
    """Group tensors by the number of elements that stay together, for one buffer each.

    Tensors that may not be cut at all share one buffer. Those that may be cut anywhere go with the
    largest group. Order is kept within a group, groups come in order of first appearance.
    """
    groups: dict[int, list[TensorSpec]] = {}
    for spec in specs:
        whole = spec.granule > 1 and spec.numel <= spec.granule
        groups.setdefault(0 if whole else spec.granule, []).append(spec)
    if len(groups) > 1 and 1 in groups:
        free = groups.pop(1)
        largest = max(groups.values(), key=lambda group: sum(spec.numel for spec in group))
        largest.extend(free)
    return tuple(tuple(group) for group in groups.values())
