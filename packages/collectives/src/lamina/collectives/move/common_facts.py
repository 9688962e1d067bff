"""Facts that all ranks must have in common, compared by a digest before anything depends on them.

Backends do not compare what ranks call: gloo ends the process or goes on with wrong numbers, NCCL
hangs. So whoever makes something that ranks share (a wrapper, an optimizer, a directory of
checkpoints) first compares its facts. Note [Compared before anything is sent] tells how.
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
from itertools import zip_longest
from typing import TypeAlias

import torch
import torch.distributed as dist
from torch.distributed import ProcessGroup

from lamina.collectives.call.checks import texts_of_all
from lamina.collectives.move.small import all_reduce_small, broadcast, host_device
from lamina.collectives.transport.groups import backend_name
from lamina.mesh.engine import GroupRef

Fact: TypeAlias = tuple[str, str]
"""What something is called, and its value in words."""

_ROW = 640
_LONGEST = 200
_LAYERS = ("mesh", "buffers", "collectives", "ddp", "fsdp", "models", "checkpoint")


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
