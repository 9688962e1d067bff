"""Small messages: a broadcast, reductions of a few numbers at once, and facts that are compared.

Backends do not compare what ranks call: gloo ends the process or goes on with wrong numbers, NCCL
hangs. So whoever makes something that ranks share (a wrapper, an optimizer, a directory of
checkpoints) first compares its facts by a digest, before anything depends on them. Note [Compared
before anything is sent] tells how.
"""

import functools
import hashlib
import importlib.metadata
import json
import platform
import struct
from collections import Counter
from collections.abc import Callable, Iterable, Mapping, Sequence
from dataclasses import fields, is_dataclass
from itertools import accumulate, zip_longest
from typing import Literal, TypeAlias

import torch
import torch.distributed as dist
from torch.distributed import ProcessGroup

from lamina.collectives.call.checks import require_agreement, require_same_device, texts_of_all
from lamina.collectives.call.collective import Handle, issue, launch
from lamina.collectives.compat import group_named
from lamina.collectives.move.all_gather import AllGather
from lamina.collectives.reduction.summation import sum_rows
from lamina.collectives.transport.groups import backend_name, where
from lamina.collectives.transport.lanes import lane_of
from lamina.collectives.transport.transport import Completion, end_of, nothing_left
from lamina.mesh.engine import GroupRef

_ALIGNMENT = 16
_BACKEND = {"sum": dist.ReduceOp.SUM, "max": dist.ReduceOp.MAX, "min": dist.ReduceOp.MIN}
_ORDERLESS = (torch.uint8, torch.int32, torch.int64)
"""Dtypes that every backend reduces, and whose reductions know no order and no NaN."""
_ROW = 640
"""Bytes that each rank may say of a difference."""
_LONGEST = 200
_LAYERS = ("mesh", "buffers", "collectives", "ddp", "fsdp", "models", "checkpoint")


def broadcast(
    tensor: torch.Tensor,
    group: ProcessGroup | None,
    *,
    src: int = 0,
    async_op: bool = False,
    check: bool = False,
) -> Handle:
    """Copy `tensor` from one rank to all, in place.

    Args:
        tensor: contiguous, any shape and dtype, the same on every rank.
        group: the ranks, or None for a group of one.
        src: rank within the group that has the value.
        async_op: return at once.
        check: compare this call over the ranks first (for debugging; on all ranks or on none).

    Raises:
        ValueError: a tensor with strides, or a source outside the group.
    """
    lane = lane_of(group)
    size = lane.size
    if not 0 <= src < size:
        raise ValueError(
            f"broadcast {where(group)}: src={src} is not a rank of the group (0..{size - 1}); src "
            f"counts within the group"
        )
    if not tensor.is_contiguous():
        raise ValueError(
            f"broadcast {where(group)}: `tensor` has strides {tensor.stride()}; it must be "
            f"contiguous"
        )
    if check:
        shape = tuple(tensor.shape)
        require_agreement(
            "broadcast", group, tensor.device, dtype=tensor.dtype, shape=shape, src=src
        )
    sent = (size - 1) * tensor.numel() * tensor.element_size() if lane.rank == src else 0
    call = issue("broadcast", lane, tensor.dtype, sent, async_op=async_op)
    # Bytes travel as bytes: backends know few dtypes (gloo neither fp8 nor uint16).
    payload = tensor.detach().view(-1).view(torch.uint8)

    def start() -> Completion:
        """Post the broadcast."""
        if group is None or size == 1 or payload.numel() == 0 or payload.is_meta:
            return nothing_left
        work = dist.broadcast(payload, group=group, group_src=src, async_op=True)
        return end_of(work, tensor.device)

    return launch(Handle(call, (tensor,)), lane, tensor.device, start)


class SmallReduction:
    """A reduction of a few small tensors, prepared once for tensors of their kinds.

    Integers of one dtype are the backend's to reduce: no order changes them, and a rank then sends
    and holds as much on a thousand ranks as on eight. Others are gathered and reduced here, in the
    fixed tree over ranks.

    Arguments and errors are those of `all_reduce_small`.
    """

    def __init__(
        self,
        tensors: Sequence[torch.Tensor],
        group: ProcessGroup | None,
        op: Literal["sum", "max", "min"] = "sum",
    ) -> None:
        if op not in _BACKEND:
            raise ValueError(
                f"all_reduce_small {where(group)}: op must be one of {sorted(_BACKEND)}, not {op!r}"
            )
        self._op, self._lane = op, lane_of(group)
        self._size = self._lane.size
        self._alone = not tensors or self._size == 1
        if self._alone:
            return
        self._device = require_same_device(
            "all_reduce_small", group, **{f"tensors[{i}]": t for i, t in enumerate(tensors)}
        )
        # Backends reduce integers as they are; all else is gathered, because of its order.
        dtypes = {tensor.dtype for tensor in tensors}
        if op != "sum" and dtypes == {torch.bool}:
            dtypes = {torch.uint8}
        self._dtype = dtypes.pop() if len(dtypes) == 1 and dtypes <= set(_ORDERLESS) else None
        if self._dtype is not None:
            return
        # Every tensor begins where any dtype may begin.
        lengths = (-(-tensor.nbytes // _ALIGNMENT) * _ALIGNMENT for tensor in tensors)
        self._offsets = [0, *accumulate(lengths)]
        self._gather = AllGather(*self._buffers(), group)

    def _buffers(self) -> tuple[torch.Tensor, torch.Tensor]:
        """What is gathered into, and what is sent."""
        packed = torch.zeros(self._offsets[-1], dtype=torch.uint8, device=self._device)
        return packed.new_empty(self._size * packed.numel()), packed

    def reduce(self, tensors: Sequence[torch.Tensor]) -> None:
        """Overwrite each tensor with its reduction over all ranks, in one message."""
        if self._alone:
            return
        if self._dtype is not None:
            self._by_backend([tensor.detach() for tensor in tensors], self._dtype)
            return
        # Ranks send their numbers as they are, and each combines them in the order of ranks: all
        # get the same bits.
        everyone, packed = self._buffers()
        for tensor, offset in zip(tensors, self._offsets, strict=False):
            flat = tensor.detach().contiguous().view(-1).view(torch.uint8)
            packed[offset : offset + tensor.nbytes].copy_(flat)
        self._gather.start(everyone, packed, async_op=False)
        rows = everyone.view(self._size, -1)
        for tensor, offset in zip(tensors, self._offsets, strict=False):
            terms = rows[:, offset : offset + tensor.nbytes].view(tensor.dtype)
            tensor.detach().copy_(self._combined(terms).view(tensor.shape))

    def _by_backend(self, tensors: Sequence[torch.Tensor], dtype: torch.dtype) -> None:
        packed = torch.cat([tensor.contiguous().view(-1).view(dtype) for tensor in tensors])
        sent = 2 * (self._size - 1) * -(-packed.numel() // self._size) * dtype.itemsize
        call = issue("all_reduce_small", self._lane, dtype, sent)

        def start() -> Completion:
            """Have the backend reduce all of them in place."""
            if packed.is_meta or not packed.numel():
                return nothing_left
            op = _BACKEND[self._op]
            work = dist.all_reduce(packed, op, self._lane.group, async_op=True)
            return nothing_left if work is None else work.wait  # its caller waits at once

        launch(Handle(call, (packed,)), self._lane, self._device, start)
        pieces = torch.split(packed, [tensor.numel() for tensor in tensors])
        for tensor, piece in zip(tensors, pieces, strict=True):
            tensor.copy_(piece.view(tensor.dtype).view(tensor.shape))

    def _combined(self, rows: torch.Tensor) -> torch.Tensor:
        """The reduction of the rows of [ranks, n], which it may overwrite."""
        if self._op != "sum":
            return rows.amax(0) if self._op == "max" else rows.amin(0)
        if not rows.is_floating_point():
            return rows.any(0) if rows.dtype == torch.bool else rows.sum(0, dtype=rows.dtype)
        # Narrow floats are summed in float32 and rounded once, when they are stored.
        return sum_rows(rows.float() if rows.itemsize < 4 else rows)


def all_reduce_small(
    tensors: Sequence[torch.Tensor],
    group: ProcessGroup | None,
    op: Literal["sum", "max", "min"] = "sum",
) -> None:
    """Reduce a few small tensors in place over all ranks, in one message.

    Integers are exact, float64 stays float64, bfloat16 and float16 are summed in float32 and
    rounded once; the order of the sum is the fixed tree over ranks.

    Args:
        tensors: any shapes and dtypes, on one device, the same on every rank. Overwritten.
        group: the ranks, or None for a group of one.
        op: "sum", "max" or "min".

    Raises:
        ValueError: an unknown op, or tensors on several devices.
    """
    if group is not None and torch.compiler.is_compiling():
        for tensor, made in zip(
            tensors, _reduced(list(tensors), group.group_name, op), strict=True
        ):
            tensor.copy_(made)
    else:
        SmallReduction(tensors, group, op).reduce(tensors)


# In a graph the numbers come as new tensors, as operators.py has it for other collectives.
@torch.library.custom_op("lamina::all_reduce_small", mutates_args=())
def _reduced(tensors: list[torch.Tensor], group: str, op: str) -> list[torch.Tensor]:
    made = [tensor.clone() for tensor in tensors]
    all_reduce_small(made, group_named(group), op)  # type: ignore[arg-type]
    return made


@_reduced.register_fake
def _(tensors: list[torch.Tensor], group: str, op: str) -> list[torch.Tensor]:
    return [tensor.clone() for tensor in tensors]


def host_device(groups: Iterable[ProcessGroup | None], device: torch.device | str) -> torch.device:
    """Where numbers that hosts agree on should lie: on the CPU, if the groups serve it.

    To read them from a GPU the host would wait for all that is queued there.

    `groups` are what the numbers will travel over; None is one rank alone. Without such groups they
    lie on `device`.
    """
    served = all(
        "cpu" in {kind.type for kind in group._device_types}
        for group in groups
        if group is not None
    )
    return torch.device("cpu" if served else device)


# -- facts that ranks compare --------------------------------------------------------------------

Fact: TypeAlias = tuple[str, str]
"""What something is called, and its value in words."""


class DisagreementError(RuntimeError):
    """Ranks differ in what all of them must have in common."""


class Agreement:
    """Facts with their digest, which is made once.

    To describe and to hash facts takes longer than to compare them. So who compares the same facts
    again and again keeps the agreement, and adds what has changed `with_facts`.

    Attributes:
        facts: what ranks must have in common.
        digest: 16 bytes; equal if and only if the facts are, and were put together alike.
    """

    def __init__(self, facts: Iterable[Fact], before: bytes = b"") -> None:
        self.facts = tuple(facts)
        text = json.dumps(self.facts).encode()
        self.digest = hashlib.blake2b(before + text, digest_size=16).digest()

    @classmethod
    def of_several(cls, agreements: Sequence["Agreement"]) -> "Agreement":
        """All facts of some agreements, in their order."""
        joined = cls((), b"".join(each.digest for each in agreements))
        joined.facts = tuple(fact for each in agreements for fact in each.facts)
        return joined

    def with_facts(self, *facts: Fact) -> "Agreement":
        """These facts and further ones, without another look at these."""
        both = Agreement(facts, self.digest)
        both.facts = self.facts + facts
        return both

    @property
    def numbers(self) -> tuple[int, int]:
        """The digest as two int64."""
        first, second = struct.unpack("<2q", self.digest)
        return first, second


class CommonFacts:
    """Compares facts over the ranks of some process groups.

    Note [Compared before anything is sent]
    Every rank sends a digest of its facts: 32 bytes, whatever the facts are, so that the message
    fits even where the ranks build different models. The ranks need only the largest digest and the
    largest complement, which are complements of each other if and only if all digests are equal.
    The facts themselves travel only after a mismatch: the first rank's to all, and from each rank
    the first difference. See docs/decisions/0320-common-facts.md.

    `what` is made, or done, with these facts; it begins the error. `groups` are one for each axis,
    the innermost first; None is one rank alone. `here` is this rank and its place in the mesh, by
    default its number. Messages lie on `device` if a group serves accelerators only.
    """

    def __init__(
        self,
        what: str,
        groups: Iterable[ProcessGroup | None],
        here: str = "",
        device: torch.device | str = "cpu",
    ) -> None:
        self._what = what
        several = [group for group in groups if group is not None and group.size() > 1]
        self._device = host_device(several, device)
        real = (group for group in several if backend_name(group, self._device) != "fake")
        self._refs = [] if self._device.type == "meta" else [GroupRef(group) for group in real]
        self.here = here or (f"rank {dist.get_rank()}" if self._refs else "")
        """This rank and its place in the mesh."""

    def require(self, facts: Iterable[Fact] | Agreement) -> None:
        """Compare facts: one collective of 32 bytes; all ranks of the groups call it.

        DisagreementError comes on every rank, if the facts of any two differ.
        """
        if not self._refs:
            return
        agreement = facts if isinstance(facts, Agreement) else Agreement(facts)
        words = self.words(agreement)
        for ref in self._refs:
            all_reduce_small([words], ref.group, op="max")
        self.compare(words, agreement)

    def words(self, agreement: Agreement) -> torch.Tensor:
        """What a message carries for `compare`: int64 [4], to be reduced by "max" over ranks."""
        first, second = agreement.numbers
        return torch.tensor([first, second, ~first, ~second], device=self._device)

    def differ(self, words: torch.Tensor) -> bool:
        """Whether any two ranks had other facts, from their reduced `words`; equal on all ranks."""
        first, second, not_first, not_second = words.tolist()
        return bool(self._refs) and (first, second) != (~not_first, ~not_second)

    def compare(self, words: torch.Tensor, agreement: Agreement) -> None:
        """Whether all ranks had equal facts, from their reduced `words`; collective if not.

        Errors are those of `require`.
        """
        if self.differ(words):
            raise DisagreementError(self._explain(agreement))

    def _explain(self, agreement: Agreement) -> str:
        """Name the ranks that differ, and the first difference of each (collective)."""
        # Everybody knows by now that there is a difference, so all ranks come here.
        facts = agreement.facts
        differs = _difference(facts, self._first(facts))
        row = "\n".join((agreement.digest.hex(), self.here, *differs))
        return f"{self._what}: {_verdict([said.split(chr(10)) for said in self.said(row)])}"

    def said(self, text: str) -> list[str]:
        """What each rank says, cut at 640 bytes (collective)."""
        return texts_of_all(text, _ROW, (ref.group for ref in self._refs), self._device)

    def _first(self, facts: Sequence[Fact]) -> list[Fact]:
        """The facts of the first rank on every axis."""
        text = json.dumps(facts).encode()
        for group in (ref.group for ref in self._refs):
            # The ranks do not know yet how much the first one has to say.
            length = torch.tensor([len(text)], device=self._device)
            broadcast(length, group, src=0).wait()
            payload = torch.zeros(int(length), dtype=torch.uint8, device=self._device)
            if group.rank() == 0:
                payload.copy_(torch.frombuffer(bytearray(text), dtype=torch.uint8))
            broadcast(payload, group, src=0).wait()
            text = bytes(payload.tolist())
        return [(name, value) for name, value in json.loads(text)]


def _difference(mine: Sequence[Fact], first: Sequence[Fact]) -> tuple[str, str, str]:
    """What the first fact that differs is called, its value here and on the first rank."""
    for own, other in zip_longest(mine, first, fillvalue=("", "nothing")):
        if own != other:
            if own[0] and other[0] and own[0] != other[0]:
                return "fact", _short(" = ".join(own)), _short(" = ".join(other))
            return _short(own[0] or other[0]), _short(own[1]), _short(other[1])
    return "", "", ""


def _verdict(rows: Sequence[Sequence[str]]) -> str:
    """Who differs from whom; the rows are digest, rank, fact, value there, value on the first."""
    # What most ranks have is taken for right, and the others are named.
    usual = Counter(row[0] for row in rows).most_common(1)[0][0]
    first, odd = rows[0], [row for row in rows if row[0] != usual]
    if first[0] == usual:  # each odd rank has compared itself with the first
        differences = [
            f"{name} is {mine} on {rank} and {other} on {first[1]}"
            for _, rank, name, mine, other in odd[:4]
        ]
    else:
        # The first rank is odd itself, as a usual one sees it.
        _, rank, name, mine, other = next(row for row in rows if row[0] == usual)
        differences = [f"{name} is {other} on {first[1]} and {mine} on {rank}"]
    more = f"; {len(odd)} of {len(rows)} ranks differ" if len(odd) > 1 else ""
    return (
        f"ranks do not agree: {'; '.join(differences)}{more}. All ranks must make the same thing, "
        "with the same settings, in the same order"
    )


def _short(text: str) -> str:
    text = text.replace("\n", " ")
    return text if len(text) <= _LONGEST else f"{text[: _LONGEST - 4]} ..."


def describe(value: object) -> str:
    """A value in words that are equal on all ranks: no addresses, of devices only the kind."""
    if isinstance(value, torch.Tensor):
        known = value.numel() == 1 and value.device.type == "cpu"
        return repr(value.item()) if known else f"{value.dtype} {tuple(value.shape)}"
    if isinstance(value, torch.device):
        return value.type
    if value is None or isinstance(value, (bool, int, float, complex, str, bytes, torch.dtype)):
        return repr(value)
    if isinstance(value, Mapping):
        return "{" + ", ".join(f"{describe(k)}: {describe(v)}" for k, v in value.items()) + "}"
    if isinstance(value, (set, frozenset)):
        return "{" + ", ".join(sorted(map(describe, value))) + "}"
    if isinstance(value, (list, tuple)):
        return "(" + ", ".join(map(describe, value)) + ")"
    if is_dataclass(value) and not isinstance(value, type):
        pairs = (f"{each.name}={describe(getattr(value, each.name))}" for each in fields(value))
        return f"{type(value).__name__}({', '.join(pairs)})"
    named = value if isinstance(value, (type, Callable)) else type(value)  # type: ignore[arg-type]
    return str(getattr(named, "__qualname__", type(value).__qualname__))


@functools.cache
def software() -> tuple[Fact, ...]:
    """Versions of Python, torch and the layers of Lamina that are installed."""
    layers = []
    for layer in _LAYERS:
        try:
            layers.append(f"{layer} {importlib.metadata.version(f'lamina-{layer}')}")
        except importlib.metadata.PackageNotFoundError:
            continue
    return (
        ("Python", platform.python_version()),
        ("torch", str(torch.__version__)),
        ("Lamina", ", ".join(layers) or "not installed as packages"),
    )
