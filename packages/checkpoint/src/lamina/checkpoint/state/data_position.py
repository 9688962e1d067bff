"""The position of a run in its data, in samples of the whole job, so that no rank occurs in it.

The order of samples is a function of seed and position; ranks take contiguous slices of each batch.
So a run may go on with another number of ranks, and no sample is repeated or skipped. A batch that
the ranks do not divide is cut unevenly, and `cut_batch` says how much each part counts.
"""

import hashlib
import itertools
from collections.abc import Iterator, Mapping
from dataclasses import dataclass
from typing import Any


@dataclass(frozen=True)
class BatchPart:
    """What one rank takes in one of its forward and backward passes.

    Attributes:
        samples: places in the batch, from 0; never empty.
        counted: how many of them the part stands for: all, or 0 where the batch has nothing left
            for this pass. The rank then runs samples of other ranks, as every rank must take part
            in every pass, and its loss must count nothing.
        weight: factor of the mean loss of `samples`. Gradients are averaged over ranks and summed
            over passes; with it they are those of the mean over all samples of the batch.

    Examples:
        >>> BatchPart(samples=range(0, 2), counted=2, weight=0.75).weight  # 2 of 8, on 3 ranks
        0.75
    """

    samples: range
    counted: int
    weight: float


def cut_batch(
    batch_size: int, rank: int = 0, ranks: int = 1, *, microbatches: int = 1, size: int = 0
) -> list[BatchPart]:
    """Cut a batch over any number of ranks, and say how much each part counts.

    Without `size`, each rank takes a contiguous slice, and the slices of two ranks differ by at
    most one sample. With it, the batch is a row of leaves of `size` samples, and rank r takes
    leaves r, r + ranks, ...: the leaves, and with `reproducible=True` the order in which their
    gradients are added, then do not depend on the ranks. For the same bits on any number of ranks
    use `counted` and a loss that is a sum (`calculate_per_token_loss=True`), because `weight` and
    the mean over ranks are rounded.

    Args:
        batch_size: samples over all ranks.
        rank: place among the data-parallel ranks.
        ranks: how many there are.
        microbatches: passes of each rank; unused with `size`.
        size: samples of a pass, however many ranks there are.

    Returns:
        As many parts on every rank: one for each pass.

    Raises:
        ValueError: a rank that is not among the ranks, or a number below its limit.

    Examples:
        >>> [cut_batch(8, rank, ranks=3)[0].samples for rank in range(3)]
        [range(0, 2), range(2, 5), range(5, 8)]
        >>> [part.counted for part in cut_batch(4, rank=2, ranks=3, size=1)]
        [1, 0]
    """
    limits = {"batch_size": (batch_size, 1), "microbatches": (microbatches, 1), "size": (size, 0)}
    for name, (value, least) in limits.items():
        if value < least:
            raise ValueError(f"{name} is {value}: it must be at least {least}")
    if not 0 <= rank < ranks:
        raise ValueError(f"rank is {rank} of {ranks}: it must be 0 to {ranks - 1}")
    if size:
        leaves = range(rank, -(-batch_size // (size * ranks)) * ranks, ranks)
        cuts = [(leaf * size, min(batch_size, (leaf + 1) * size)) for leaf in leaves]
    else:
        first, last = batch_size * rank // ranks, batch_size * (rank + 1) // ranks
        edges = [first + (last - first) * m // microbatches for m in range(microbatches + 1)]
        cuts = list(itertools.pairwise(edges))
    parts = []
    for first, last in cuts:
        counted = max(0, last - first)
        samples = range(first, last) if counted else range(min(size or 1, batch_size))
        parts.append(BatchPart(samples, counted, counted * ranks / batch_size))
    return parts


class DataPosition:
    """Hands out samples, and remembers how many the job has had.

        position = DataPosition(size=len(dataset), seed=1)
        state = {"model": model, "optimizer": optimizer, "data": position}
        manager.restore(state, default=0)
        for indices in position.batches(batch_size, rank=dp.rank, ranks=dp.size):
            batch = dataset[indices]
            ...                              # the step; position counted it when it was handed out
            manager.save(step, state)        # after the step, before the next batch

    Args:
        size: samples in the dataset.
        seed: of the order; None is the dataset's own order.

    Attributes:
        samples: that the job has trained on; sample k of the job is
            `order(k)`, in epoch `k // size`.

    Raises:
        ValueError: a size below 1.

    Examples:
        >>> position = DataPosition(size=100, seed=0)
        >>> len(position.indices(4))
        4
    """

    def __init__(self, size: int, seed: int | None = None) -> None:
        if size < 1:
            raise ValueError(f"size is {size}: a dataset must have at least 1 sample")
        self.size, self.seed = size, seed
        self.samples = 0

    @property
    def epoch(self) -> int:
        """How often the whole dataset has been gone through."""
        return self.samples // self.size

    def order(self, position: int) -> int:
        """Return the index in the dataset of the job's sample at a position."""
        if self.seed is None:
            return position % self.size
        return shuffled(position, self.size, self.seed)

    def indices(self, batch_size: int, rank: int = 0, ranks: int = 1) -> list[int]:
        """Return one rank's indices of the next batch, without advancing.

        Args:
            batch_size: samples over all ranks; shares differ by at most one.
            rank: place among the data-parallel ranks.
            ranks: how many there are.

        Raises:
            ValueError: a rank that is not among the ranks.
        """
        if not 0 <= rank < ranks:
            raise ValueError(f"rank is {rank} of {ranks}: it must be 0 to {ranks - 1}")
        first = self.samples + batch_size * rank // ranks
        last = self.samples + batch_size * (rank + 1) // ranks
        return [self.order(position) for position in range(first, last)]

    def advance(self, batch_size: int) -> None:
        """Count a batch that has been trained on (on every rank alike)."""
        self.samples += batch_size

    def batches(self, batch_size: int, rank: int = 0, ranks: int = 1) -> Iterator[list[int]]:
        """Yield one rank's indices of batch after batch, without end.

        `batch_size` counts the samples of all ranks together: each rank gets its part of them.

        A batch is counted as it is handed out: what is saved while it is worked on says that it has
        been trained on, so save after the step. A loader that fetches ahead (torch's DataLoader
        with workers) takes batches long before they are trained on: give it another position's,
        which begins at this one's `state_dict()`, and `advance` this one, which is saved, at each
        step.

        Raises:
            ValueError: a batch without samples, or a rank that is not among the ranks.
        """
        if batch_size < 1:
            raise ValueError(f"batch_size is {batch_size}: a batch must have at least 1 sample")
        while True:
            indices = self.indices(batch_size, rank, ranks)
            self.advance(batch_size)
            yield indices

    def state_dict(self) -> dict[str, Any]:
        """Return samples, size and seed."""
        return {"samples": self.samples, "size": self.size, "seed": self.seed}

    def load_state_dict(self, state: Mapping[str, Any]) -> None:
        """Go on where another run was.

        Raises:
            ValueError: that run had another dataset or another order.
        """
        for name in ("size", "seed"):
            if state[name] != getattr(self, name):
                raise ValueError(
                    f"the checkpoint's data has {name} {state[name]}, here it is "
                    f"{getattr(self, name)}: samples would be repeated and skipped; to begin anew, "
                    "leave the data position out of the restored state"
                )
        self.samples = int(state["samples"])


def shuffled(position: int, size: int, seed: int) -> int:
    """Return the sample at a position of an endless sequence that shuffles anew every epoch.

    Position p is in epoch p // size; each epoch is a permutation of 0..size-1. It is computed, not
    stored: a Feistel network of four rounds permutes the numbers below a power of four, and numbers
    that fall outside `size` go through it again until they fall inside (cycle walking; Black and
    Rogaway, 2002).

    Examples:
        >>> sorted(shuffled(position, 5, seed=0) for position in range(5))
        [0, 1, 2, 3, 4]
    """
    epoch, value = divmod(position, size)
    half = max(1, ((size - 1).bit_length() + 1) // 2)
    mask = (1 << half) - 1
    while True:
        left, right = value >> half, value & mask
        for number in range(4):
            left, right = right, left ^ (_mix(right, seed, epoch, number) & mask)
        value = (left << half) | right
        if value < size:
            return value


def _mix(value: int, seed: int, epoch: int, number: int) -> int:
    text = f"{value},{seed},{epoch},{number}".encode()
    return int.from_bytes(hashlib.blake2b(text, digest_size=8).digest(), "little")
