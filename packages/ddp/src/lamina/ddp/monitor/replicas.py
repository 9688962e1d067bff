"""Whether the copies that ranks hold of weights and optimizer state are still equal, bit for bit.

Note [A sum that is zero if copies agree]
Each step every rank digests a share of its state. The first of K copies multiplies its digest by
1 - K, and each other copy by 1, so the sum over all ranks is zero if copies agree, whatever the
mesh is. Two numbers in the norm's message therefore compare all copies along all axes. They are
integers in fp64, and their sums are exact below 2^53: for up to a million ranks. Only where the sum
is not zero do copies exchange digests, vote, and send words. See
docs/decisions/0416-a-sum-that-is-zero-if-copies-agree.md.
"""

from __future__ import annotations

import functools
import itertools
import math
import platform
import warnings
from bisect import bisect_right
from collections import Counter, defaultdict
from collections.abc import Callable, Iterator, Mapping, Sequence
from dataclasses import dataclass
from typing import Any

import torch
import torch.distributed as dist
from torch import nn
from torch.distributed.device_mesh import DeviceMesh
from torch.optim import Optimizer

from lamina.buffers import FlatBuffer
from lamina.collectives.engine import CommonFacts, all_reduce_small, broadcast, start_all_gather
from lamina.ddp.group.group import ParameterGroup
from lamina.ddp.group.shown import local_of
from lamina.ddp.group.weights import shares_storage
from lamina.ddp.inspect.inspection import groups_of
from lamina.ddp.monitor.health import shortened, words_of_all
from lamina.ddp.parameters.axes import whole_mesh
from lamina.ddp.parameters.facts import digest_of
from lamina.mesh import ParallelMesh
from lamina.mesh.engine import MeshAxis, axis_if_there, check_arguments

_LOW = 0xFFFFFFFF

Axes = tuple[MeshAxis, ...]


class ReplicaError(RuntimeError):
    """Copies that ranks hold of the same weights or optimizer state differ."""


class ReplicaMonitor:
    """Compares the copies that ranks hold of a model's state, a share of the bytes at each step.

    Copies are what data-parallel ranks hold whole (all state under strategy 0, along `dp_replicate`
    under every strategy, compute weights under strategies 1 and 2), what every rank of tp holds
    whole, and parameters tied over pipeline stages. State that lies on one rank alone has no copy
    to be compared with. Buffers of modules may differ, so they are compared only if asked for.

    Give it to `clip_grad_norm`: digests then ride in the norm's message. Call `compare` instead
    where no norm is taken, once per step, between the backward and the optimizer's step.

    If copies differ, the whole state is compared at once, and a majority of the copies tells which
    ones are wrong. Of two copies both are named. With `heal` each wrong copy becomes that of the
    majority, bit for bit. What it has done to gradients of earlier steps stays done.

    Args:
        module: a wrapped module, or this rank's pipeline stages.
        optimizer: whose state is compared as well (a parameter's tensors, also those in lists and
            dicts); None for weights alone.
        mesh: the mesh, for copies over tp and pp; None for data-parallel ranks alone.
        steps: every byte is compared once in so many steps.
        heal: copy the majority's bits over those of wrong copies, and warn; otherwise raise.
        buffers: data-parallel ranks have equal buffers (tables, and no statistics of their own
            batches), so compare them.

    Attributes:
        healed: how many tensors of this rank and its copies were healed, in the whole run.

    Raises:
        TypeError: if a module was not wrapped by Lamina.
        ValueError: for `steps` below 1.

    Examples:
        >>> model = DistributedDataParallel(torch.nn.Linear(4, 1))
        >>> replicas = ReplicaMonitor(model, steps=8)
        >>> model(torch.ones(2, 4)).mean().backward()
        >>> norm = clip_grad_norm(model, 1.0, replicas=replicas)
    """

    @check_arguments
    def __init__(
        self,
        module: nn.Module | Sequence[nn.Module],
        optimizer: Optimizer | None = None,
        mesh: ParallelMesh | DeviceMesh | None = None,
        *,
        steps: int = 64,
        heal: bool = False,
        buffers: bool = False,
    ) -> None:
        if steps < 1:
            raise ValueError(f"steps={steps}: every byte is compared once in at least 1 step")
        modules = list(module) if isinstance(module, (Sequence, nn.ModuleList)) else [module]
        self.healed = 0
        self._groups = [group for each in modules for group in groups_of(each)]
        self._buffers = modules if buffers else []
        self._optimizer, self._mesh, self._steps, self._heal = optimizer, mesh, steps, heal
        ties = Counter(ref.role.tied for group in self._groups for ref in group.refs)
        self._tied_here = {name for name, count in ties.items() if name and count > 1}
        self._step = 0
        self._families: list[_Family] = []

    @property
    def nbytes(self) -> int:
        """Bytes of this rank's state that other ranks hold copies of."""
        return sum(family.nbytes for family in self._plan())

    def compare(self) -> None:
        """Compare this step's share in a message of 16 bytes; collective over the mesh.

        Raises:
            ReplicaError: on every rank, if copies differ and are not healed.
        """
        axes = whole_mesh(self._mesh) or max(
            (_sized(group.axes.outer, group.axes.inner) for group in self._groups),
            key=lambda axes: math.prod(axis.size for axis in axes),
            default=(),
        )
        device = self._groups[0].device if self._groups else torch.device("cpu")
        words = self.message(device)
        for axis in axes:
            all_reduce_small([words], axis.sibling("reduce"))
        self.judge(words.tolist(), axes, device)

    # -- what `clip_grad_norm` calls ----------------------------------------------------------

    def message(self, device: torch.device) -> torch.Tensor:
        """This rank's part of the step's sum: fp64 [2], to be summed over the mesh."""
        if self._step % self._steps == 0:  # state may have been made, or loaded, since
            self._families = self._plan()
        # The step alone says which share it is, so all ranks digest the same bytes.
        share = self._step % self._steps, self._steps
        self._step += 1
        words = torch.zeros(2, dtype=torch.float64, device=device)
        # A digest is 64 bits, and fp64 adds integers exactly up to 53 only: it travels in halves.
        for family in self._families:
            digest = family.digest(*share).to(device, non_blocking=True)
            halves = torch.stack([digest & _LOW, (digest >> 32) & _LOW])
            words += halves.double() * family.factor
        return words

    def judge(self, words: Sequence[float], axes: Axes, device: torch.device) -> None:
        """Find and heal what differs, if the sum over ranks is not zero; collective then.

        Args:
            words: the sum of all ranks' `message`.
            axes: the ranks.
            device: where messages lie.

        Raises:
            ReplicaError: on every rank, if copies differ and are not healed.
        """
        if not any(words):
            return
        # Something differs somewhere, so every rank looks at all that it holds.
        votes = [vote for family in self._plan() for vote in family.votes(device)]
        # Whether one rank finds no majority decides for all: a rank that heals sends to the others.
        undecided = torch.tensor(sum(vote.good is None for vote in votes), device=device)
        for axis in axes:
            all_reduce_small([undecided], axis.sibling("reduce"), op="max")
        wrong = [vote.wrong for vote in votes if vote.wrong]
        what = f"on {platform.node()}, {shortened(wrong, 3, ', ')}" if wrong else ""
        # A rank whose copies agree has no words. If nobody has any, the digest itself was wrong.
        reason = f"copies of the training state differ{words_of_all(what, (), axes, device)}"
        if not reason.endswith("differ") and (not self._heal or bool(undecided)):
            raise ReplicaError(
                f"{reason}. Restore a checkpoint, and have the memory of that host tested"
            )
        for vote in votes:
            vote.heal()
        self.healed += len(votes)
        if not dist.is_initialized() or dist.get_rank() == 0:
            momentary = reason.endswith("differ")
            done = " no more: a digest was wrong for a moment" if momentary else "; it was replaced"
            warnings.warn(reason + done, stacklevel=4)

    # -- what is compared ---------------------------------------------------------------------

    def _plan(self) -> list[_Family]:
        """All state that has copies, by the axes along which these lie, in one order on all ranks.

        The pieces of tied parameters come at other places on the last stage than on the first. So
        each set of axes has shares of its own.
        """
        pieces: dict[Axes, list[_Piece]] = defaultdict(list)
        for group in self._groups:
            for index, ref in enumerate(group.refs):
                beyond = self._beyond(group, index)
                for buffer, piece in _weights_of(group, index):
                    if (axes := _uncut(group, buffer) + beyond) and piece.numel:
                        pieces[axes].append(piece)
                axes = _uncut(group, group.main_weights) + beyond
                if self._optimizer is not None and axes:
                    main = group.main_parameters[index]
                    pieces[axes] += _state_of(self._optimizer, main, ref.name)
        # Buffers belong to modules and not to groups: they have the axes of dense parameters.
        dense = next((g.axes for g in self._groups if not g.refs[0].role.expert), None)
        if dense is not None and (axes := _sized(dense.outer, dense.inner)):
            pieces[axes] += [piece for each in self._buffers for piece in _buffers_of(each)]
        in_order = sorted(pieces, key=lambda axes: [axis.name for axis in axes])
        return [_Family(axes, pieces[axes]) for axes in in_order]

    def _beyond(self, group: ParameterGroup, index: int) -> Axes:
        """The axes besides the data-parallel ones along which ranks hold copies of a parameter."""
        role, mesh = group.refs[index].role, self._mesh
        if mesh is None:
            return ()
        axes = []
        if role.tp_shard_dim is None:
            axes.append(axis_if_there(mesh, "expert_tp" if role.expert else "tp"))
        # Both ends of a V-shaped pipeline are on this rank, and are groups of their own here.
        if role.tied is not None and role.tied not in self._tied_here:
            if isinstance(mesh, ParallelMesh):
                axes.append(mesh.embedding_axis)
            else:
                axes.append(axis_if_there(mesh, "pp"))
        return _sized(*axes)


@dataclass(frozen=True)
class _Piece:
    """A tensor that this rank holds of the state.

    `name` says what it is, of which parameter, and `numel` is of when the plan was made. `fetch`
    gives it, or None while its values mean nothing.
    """

    name: str
    numel: int
    itemsize: int
    fetch: Callable[[], torch.Tensor | None]

    def digest(self, start: int, stop: int, weight: int = 1) -> torch.Tensor | None:
        """Of elements `start..stop`; None where the tensor is not what it was planned as.

        `weight` is odd. Pieces that are added need different ones, or flips of the same bit in
        several of them could cancel.
        """
        values = self.fetch()
        if values is None or values.numel() != self.numel or start == stop:
            return None
        return digest_of(values.detach().contiguous().view(-1)[start:stop], weight)


class _Family:
    """Pieces whose copies lie along the same axes, each of several ranks.

    `factor` is of this rank's digests: those of all copies add up to zero.
    """

    def __init__(self, axes: Axes, pieces: Sequence[_Piece]) -> None:
        self.axes, self.pieces = axes, pieces
        self.copies = math.prod(axis.size for axis in axes)
        self.index = 0
        # The innermost axis is first, and counts fastest, as in the gathers of `votes`.
        for axis in reversed(axes):
            self.index = self.index * axis.size + axis.rank
        self.factor = 1 - self.copies if self.index == 0 else 1
        ends = itertools.accumulate(piece.numel * piece.itemsize for piece in pieces)
        self._starts = [0, *ends]
        self.nbytes = self._starts[-1]

    def digest(self, share: int, shares: int) -> torch.Tensor:
        """Of one of equal shares of the bytes: int64, no dimensions."""
        low, high = (self.nbytes * at // shares for at in (share, share + 1))
        parts = []
        # From the piece in which the share begins to that in which it ends. A piece is cut at whole
        # elements, and two shares that meet in it round the same way, so none is left out.
        for at in range(bisect_right(self._starts, low) - 1, len(self.pieces)):
            piece, begin, end = self.pieces[at], self._starts[at], self._starts[at + 1]
            if begin >= high:
                break
            start, stop = max(low - begin, 0), min(high, end) - begin
            part = piece.digest(start // piece.itemsize, stop // piece.itemsize, 2 * at + 1)
            if part is not None:
                parts.append(part)
        return sum(parts[1:], parts[0]) if parts else torch.zeros((), dtype=torch.int64)

    def votes(self, device: torch.device) -> Iterator[_Vote]:
        """Yield each piece whose copies are not all equal; collective over the copies."""
        groups = [axis.sibling("reduce") for axis in self.axes]
        # Digests are compared column by column: the pieces must be the same, in the same order.
        facts = [(piece.name, str(piece.numel)) for piece in self.pieces]
        CommonFacts("ReplicaMonitor", groups).require(facts)
        own = [piece.digest(0, piece.numel) for piece in self.pieces]
        known = [at for at, digest in enumerate(own) if digest is not None]
        if not known:
            return
        digests = torch.stack([each.to(device) for each in own if each is not None])
        for axis in self.axes:
            digests = start_all_gather(digests, axis.sibling("reduce"), async_op=False).wait()
        columns = digests.view(self.copies, -1).t().tolist()
        for at, copies in zip(known, columns, strict=True):
            if len(set(copies)) > 1:
                yield _Vote(self, self.pieces[at], copies)


class _Vote:
    """Copies of one piece, of which not all are equal; `digests` are theirs.

    `good` is the index of a copy that the majority holds, None without a majority. `wrong` is what
    is wrong with this rank's copy, and empty if nothing is.
    """

    def __init__(self, family: _Family, piece: _Piece, digests: Sequence[int]) -> None:
        # More than half of the copies, or nobody knows which are right.
        value, count = Counter(digests).most_common(1)[0]
        self.good = digests.index(value) if 2 * count > len(digests) else None
        self._family, self._piece = family, piece
        self.wrong = ""
        if self.good is None:
            self.wrong = f"{piece.name} (no majority among {len(digests)} copies)"
        elif digests[family.index] != value:
            self.wrong = f"{piece.name} (unlike {count} of {len(digests)} copies)"

    @torch.no_grad()
    def heal(self) -> None:
        """Replace all copies by a good one; collective over the copies."""
        values = self._piece.fetch()
        assert values is not None and self.good is not None  # noqa: S101, PT018 - see `votes`
        buffer, at = values.detach().contiguous(), self.good
        for axis in self._family.axes:
            # From axis to axis: after each broadcast all ranks along it have the good bits.
            at, source = divmod(at, axis.size)
            broadcast(buffer, axis.sibling("reduce"), src=source).wait()
        # `.data` has a version counter of its own. Who asks whether weights were written must get
        # the same answer on all ranks, and those of other pieces write nothing.
        values.data.copy_(buffer)


def _weights_of(group: ParameterGroup, index: int) -> Iterator[tuple[FlatBuffer, _Piece]]:
    """A parameter's weights as the model and as the optimizer has them, one in the other or not."""
    weights, main, name = group.weights, group.main_weights, group.refs[index].name
    local = weights.local

    def settled() -> torch.Tensor | None:
        """The elements, unless they are old or on their way."""
        return local.span_view(index) if weights.settled else None

    def span(buffer: FlatBuffer) -> int:
        """How many elements of the parameter a buffer has on this rank."""
        _, start, stop, _ = buffer.spans[index]
        return stop - start

    yield local, _Piece(f"weights of {name}", span(local), local.dtype.itemsize, settled)
    # In one dtype and place the optimizer writes to the model's own memory: there is one copy to
    # compare.
    if not shares_storage(main.data, local.data):
        what, itemsize = f"main weights of {name}", main.dtype.itemsize
        yield main, _Piece(what, span(main), itemsize, lambda: main.span_view(index))


def _state_of(optimizer: Optimizer, main: nn.Parameter, name: str) -> Iterator[_Piece]:
    """Tensors that an optimizer keeps for a parameter."""

    def tensor(path: Sequence[Any]) -> torch.Tensor | None:
        """What lies at a path of the state now, if it still is a tensor."""
        value: Any = optimizer.state.get(main, {})
        try:
            for key in path:
                value = value[key]
        except (KeyError, IndexError, TypeError):  # the state is no more what it was
            return None
        return local_of(value) if isinstance(value, torch.Tensor) else None

    for path in _paths(optimizer.state.get(main, {})):
        value = tensor(path)
        if value is not None and value.numel():
            what = f"{'.'.join(map(str, path))} of {name}"
            yield _Piece(what, value.numel(), value.itemsize, functools.partial(tensor, path))


def _paths(value: object, path: tuple[Any, ...] = ()) -> Iterator[tuple[Any, ...]]:
    """The keys that lead to each tensor in dicts and lists."""
    if isinstance(value, torch.Tensor):
        yield path
    elif isinstance(value, (Mapping, list, tuple)):
        within = value.items() if isinstance(value, Mapping) else enumerate(value)
        for key, inner in within:
            yield from _paths(inner, (*path, key))


def _buffers_of(module: nn.Module) -> Iterator[_Piece]:
    """A module's buffers."""

    def buffer(name: str) -> torch.Tensor:
        """What this rank has of a buffer now."""
        return local_of(module.get_buffer(name))

    for name, _ in module.named_buffers():
        if (values := buffer(name)).numel():
            fetch = functools.partial(buffer, name)
            yield _Piece(f"buffer {name}", values.numel(), values.itemsize, fetch)


def _uncut(group: ParameterGroup, buffer: FlatBuffer) -> Axes:
    """The data-parallel axes along which all ranks hold the same part of a buffer."""
    both = zip((group.axes.outer, group.axes.inner), buffer.cuts, strict=True)
    return _sized(*(axis for axis, cut in both if not cut))


def _sized(*axes: MeshAxis | None) -> Axes:
    return tuple(axis for axis in axes if axis is not None and axis.size > 1)
