"""Matrices that ranks hold in copies and pieces: each brought whole to one rank, and back.

How a matrix is stored is the strategy's choice, and where it is computed is another one. Each
matrix has an owner among all ranks that hold copies or pieces of it. It travels along one axis
after the other, and all matrices together take one message per axis and rank. Along an axis that
has cut it, pieces travel. Along an axis of copies nothing travels to the owner, and each rank gets
the whole result.
"""

import heapq
import itertools
from collections.abc import Callable, Iterator, Sequence
from typing import NamedTuple

import torch

from lamina.buffers import ShardedTensor
from lamina.collectives.engine import start_all_gather, start_all_to_all
from lamina.ddp.group.group import ParameterGroup
from lamina.mesh.engine import MeshAxis

Pieces = dict[int, torch.Tensor]
"""Flat tensors by the number of their matrix."""


class _Leg(NamedTuple):
    """The way of some matrices along one axis, to their owners' places on it and back.

    Attributes:
        axis: its ranks exchange pieces.
        owners: of each matrix the owner's place on the axis, by the number of the matrix.
        lengths: of each matrix the elements of each rank's piece or copy.
        cut: the matrices that ranks hold pieces of, and in how many rows pieces lie side by side.
    """

    axis: MeshAxis
    owners: dict[int, int]
    lengths: list[list[int]]
    cut: dict[int, int]

    def there(self, pieces: Pieces, like: torch.Tensor) -> Pieces:
        """The matrices that this rank owns, as far as this axis has cut them; none, perhaps."""

        def used(job: int, rank: int) -> int:
            """Elements that travel from a rank: of copies, the owner's own alone."""
            return self.lengths[job][rank] if job in self.cut or rank == self.owners[job] else 0

        # A cut matrix comes together from all pieces. Of a copy one is enough, and the owner has
        # it.
        here, owned = self.axis.rank, self._owned()
        sent = [[pieces[job][: used(job, here)] for job in jobs] for jobs in owned]
        sizes = [[used(job, rank) for job in owned[here]] for rank in range(self.axis.size)]
        rows = self._exchange(sent, sizes, like)
        return {
            job: self._joined(job, parts) for job, *parts in zip(owned[here], *rows, strict=True)
        }

    def back(self, wholes: Pieces, like: torch.Tensor) -> Pieces:
        """The inverse: this rank's piece of each matrix, or its copy."""
        here, owned = self.axis.rank, self._owned()
        parts = [self._split(job, wholes[job]) for job in owned[here]]
        sent = [[part[rank] for part in parts] for rank in range(self.axis.size)]
        rows = self._exchange(sent, [[self.lengths[j][here] for j in jobs] for jobs in owned], like)
        pairs = zip(owned, rows, strict=True)
        return {job: part for jobs, row in pairs for job, part in zip(jobs, row, strict=True)}

    def _owned(self) -> list[list[int]]:
        """By place on the axis, the matrices that the rank there owns."""
        ranks = range(self.axis.size)
        return [[job for job, owner in self.owners.items() if owner == rank] for rank in ranks]

    def _joined(self, job: int, parts: Sequence[torch.Tensor]) -> torch.Tensor:
        rows = self.cut.get(job, 1)
        return torch.cat([part.view(rows, part.numel() // rows) for part in parts], 1).view(-1)

    def _split(self, job: int, whole: torch.Tensor) -> list[torch.Tensor]:
        if job not in self.cut:
            return [whole] * self.axis.size
        rows = self.cut[job]
        widths = [length // rows for length in self.lengths[job]]
        return [part.reshape(-1) for part in torch.split(whole.view(rows, -1), widths, 1)]

    def _exchange(
        self, sent: list[list[torch.Tensor]], sizes: list[list[int]], like: torch.Tensor
    ) -> list[list[torch.Tensor]]:
        """Send each rank its pieces, and get pieces of these sizes from each (collective)."""
        message = start_all_to_all(
            torch.cat([like[:0], *(piece for row in sent for piece in row)]),
            self.axis.sibling("gather"),
            input_splits=[sum(piece.numel() for piece in row) for row in sent],
            output_splits=[sum(row) for row in sizes],
            async_op=False,
        ).wait()
        parts = iter(torch.split(message, [size for row in sizes for size in row]))
        return [[next(parts) for _ in row] for row in sizes]


class _Matrix(NamedTuple):
    """Elements `start` to `stop` of what this rank holds of a parameter: a matrix, or its part.

    `shape` is of the matrix without data parallelism, and `dim` is where tp has cut it (-2 or -1).
    """

    parameter: int
    start: int
    stop: int
    shape: torch.Size
    dim: int | None

    def whole(self, numel: int) -> torch.Size:
        """The shape of the matrix of `numel` elements that tp ranks hold together."""
        rows, columns = self.shape
        if self.dim == -1:
            return torch.Size((rows, numel // rows))
        return torch.Size((numel // columns, columns))


class Owners:
    """Who computes which matrix of some parameters with the same axes (made collectively).

    A parameter is one matrix, or a stack of them (experts).

    Attributes:
        shapes: (rows, columns) of each parameter's matrices, as one process has them.
    """

    def __init__(self, members: Sequence[tuple[ParameterGroup, int]]) -> None:
        group = members[0][0]
        axes, cuts = group.axes, group.main_weights.cuts
        numbered = enumerate(members)
        self._matrices = [m for number, each in numbered for m in _matrices(number, *each)]
        every = range(len(self._matrices))
        flat = dict.fromkeys(every, 1)
        # The inner axis has cut first, so pieces meet in order if the outer one is undone first.
        both = zip((axes.outer, axes.inner), cuts, strict=True)
        ways = [(axis, flat if cut else {}) for axis, cut in both]
        if axes.pieces is not None:
            rows = {job: m.shape[0] if m.dim == -1 else 1 for job, m in enumerate(self._matrices)}
            cut = {job: rows[job] for job in every if self._matrices[job].dim is not None}
            ways.append((axes.pieces, cut))
        lengths, tables = [m.stop - m.start for m in self._matrices], []
        for axis, cut in ways:
            tables.append(_by_rank(lengths, axis, group.device))
            lengths = [
                sum(row) if job in cut else lengths[job] for job, row in enumerate(tables[-1])
            ]
        self._wholes = [m.whole(numel) for m, numel in zip(self._matrices, lengths, strict=True)]
        self.shapes = [owner.main_parameters[index].shape[-2:] for owner, index in members]
        for matrix, whole in zip(self._matrices, self._wholes, strict=True):
            self.shapes[matrix.parameter] = whole
        places = _balanced(self._wholes, [axis.size for axis, _ in ways])
        self._legs: list[_Leg] = []
        here = list(every)
        for number, ((axis, cut), table) in enumerate(zip(ways, tables, strict=True)):
            owners = {job: places[job][number] for job in here}
            if axis.size > 1:
                self._legs.append(_Leg(axis, owners, table, cut))
            here = [job for job in here if owners[job] == axis.rank]

    def compute(
        self,
        local: Sequence[torch.Tensor],
        function: Callable[[list[torch.Tensor]], list[torch.Tensor]],
    ) -> list[torch.Tensor]:
        """What a function gives for whole matrices, cut like the parameters (collective).

        `local` is flat, of each parameter what this rank holds, and so is the result. The function
        gets the matrices that this rank owns and gives results of their shapes.
        """
        if not self._matrices:
            return list(local)
        pieces = {job: local[m.parameter][m.start : m.stop] for job, m in enumerate(self._matrices)}
        stages = [pieces]
        for leg in self._legs:
            stages.append(leg.there(stages[-1], local[0]))
        wholes = stages.pop()
        results = function([flat.view(self._wholes[job]) for job, flat in wholes.items()])
        pieces = {job: r.reshape(-1) for job, r in zip(wholes, results, strict=True)}
        for leg in reversed(self._legs):
            pieces = leg.back(pieces, local[0])
        by_parameter = [[flat[:0]] for flat in local]  # an empty parameter has no matrices
        for job, matrix in enumerate(self._matrices):
            by_parameter[matrix.parameter].append(pieces[job])
        return [torch.cat(parts) for parts in by_parameter]


def _matrices(number: int, group: ParameterGroup, index: int) -> Iterator[_Matrix]:
    main, cut = group.main_parameters[index], group.refs[index].role.tp_shard_dim
    first, last = 0, main.numel()
    if isinstance(main, ShardedTensor):
        first, last = main.start, main.stop
    size = main.shape[-2:].numel()
    for begin in range(0, main.numel(), size or 1):
        start, stop = (min(max(at, first), last) - first for at in (begin, begin + size))
        yield _Matrix(
            number, start, stop, main.shape[-2:], None if cut is None else cut - main.ndim
        )


def _by_rank(lengths: Sequence[int], axis: MeshAxis, device: torch.device) -> list[list[int]]:
    """By matrix, what each rank on the axis has in place of these lengths (collective)."""
    if axis.size == 1:
        return [[length] for length in lengths]
    mine = torch.tensor([[length] for length in lengths], device=device)
    return start_all_gather(mine, axis.sibling("gather"), dim=1, async_op=False).wait().tolist()


def _balanced(shapes: Sequence[torch.Size], sizes: Sequence[int]) -> list[tuple[int, ...]]:
    """Of each matrix the owner's place on each of the axes.

    The most expensive ones are given away first, each to the rank that has the least to do so far.
    A product of a matrix with itself costs rows x columns x the smaller of both.
    """
    places = list(itertools.product(*map(range, sizes)))
    loads = [(0, place) for place in range(len(places))]
    owners: list[tuple[int, ...]] = [()] * len(shapes)
    costs = [shape.numel() * min(shape) for shape in shapes]
    for job in sorted(range(len(shapes)), key=lambda job: -costs[job]):
        load, place = loads[0]
        heapq.heapreplace(loads, (load + costs[job], place))
        owners[job] = places[place]
    return owners
