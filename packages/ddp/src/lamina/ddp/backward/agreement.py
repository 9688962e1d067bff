"""What ranks tell each other at the end of a step's last backward, in one small message.

Which parameters have a gradient on any rank, what is wrong with gradients, and whether the ranks
still do the same: steps, hyperparameters, collectives (Note [Collectives that do not pair]), and
writes to parameters (Note [Writes on some ranks only] in `lamina.ddp.group.weights`).
"""

from __future__ import annotations

import math
from collections.abc import Mapping, Sequence
from dataclasses import dataclass

import torch

from lamina.buffers.engine import ScratchBuffers
from lamina.collectives import DisagreementError
from lamina.collectives.engine import (
    Agreement,
    CommonFacts,
    Fact,
    SmallReduction,
    all_reduce_small,
    host_device,
)
from lamina.ddp.compat import foreach_norm
from lamina.ddp.group.group import ParameterGroup, StepFacts
from lamina.ddp.parameters.facts import common_facts_of, digest_of
from lamina.mesh.engine import GroupRef, MeshAxis

_NAMED = 10_000
"""Gathers of a step that a message can name."""
_COLLECTIVES = (
    "the collectives of a step (run a unit on all ranks or on none, or use zero_dp_strategy=2, "
    "which keeps weights whole)"
)


class NonFiniteGradientError(RuntimeError):
    """A gradient holds NaN or infinity before it was sent to other ranks."""


class LargeGradientError(RuntimeError):
    """A gradient's magnitude exceeds the limit that was set."""


@dataclass(frozen=True, order=True)
class BadGradients:
    """What is wrong with the gradients of some ranks.

    `kind` is 0 for nothing, 1 for too large, 2 for not finite. `text` names parameters and ranks.
    """

    kind: int = 0
    text: str = ""

    def refuse(self) -> None:
        """Raise, unless nothing is wrong."""
        if self.kind == 2:
            raise NonFiniteGradientError(
                f"{self.text}: look at the batch of that rank, or lower the learning rate or the "
                "loss scale"
            )
        if self.kind == 1:
            raise LargeGradientError(
                f"{self.text}: look at the batch of that rank, clip, or raise the limit"
            )


class GradientChecks:
    """Finds a rank's gradients that are not finite, or too large.

    Magnitudes are taken before a gradient is sent, and stay on the device until the host looks at
    all of them, once, at the end of a step's last backward. What it finds rides to the other ranks
    in the message of `ProducedFlags`, so all ranks raise one error.

    `finite` refuses NaN and infinity, `limit` larger magnitudes (None refuses none).
    """

    def __init__(self, finite: bool, limit: float | None) -> None:
        self._finite, self._limit = finite, limit
        self._noted: list[tuple[ParameterGroup, int]] = []
        self._sizes: list[torch.Tensor] = []

    def note(self, group: ParameterGroup) -> None:
        """Take the magnitudes of a group's gradients of this rank."""
        local = group.trained.local
        there = (index for index, written in enumerate(local.written) if written)
        views = {index: view for index in there if (view := local.view(index)).numel()}
        if views:
            self._noted += [(group, index) for index in views]
            self._sizes += foreach_norm(list(views.values()), math.inf)

    def look(self) -> BadGradients:
        """The first bad gradient since the last look; the host waits for the device once."""
        # One copy to the host for the magnitudes of all parameters.
        largest = torch.stack(self._sizes).tolist() if self._sizes else []
        noted, first = self._noted, BadGradients()
        self.forget()
        for (group, index), size in zip(noted, largest, strict=True):
            what = f"gradient of {group.refs[index].name}"
            where = f"on {group.axes.here} before its reduction"
            if self._finite and not math.isfinite(size):
                return BadGradients(2, f"{what} is not finite {where}")
            if not first.kind and self._limit is not None and not size <= self._limit:  # NaN too
                above = f"above check_for_large_grads={self._limit:.3g}"
                # What is not finite is worse, so the others are looked at as well.
                first = BadGradients(1, f"{what} reaches {size:.3g} {where}, {above}")
        return first

    def forget(self) -> None:
        """Drop what was noted."""
        self._noted, self._sizes = [], []


class GatherLog:
    """The gathers of units that a rank has begun since the last step; `titles` are the units'.

    Note [Collectives that do not pair]
        No backend compares what ranks gather or add. Where each rank leaves out another layer of
        the same size, all of them gather as often, and a rank computes with a piece of one layer
        beside a piece of another. Replicas that do so add the gradients of one layer to those of
        another. Nothing hangs. So ranks compare the order of their collectives before a step may be
        made, in a message that travels anyway: that of gathers among the ranks that gather from
        each other, as a replica may evaluate alone, and that of reductions among all. Whoever has a
        fixed order of them, whatever units run, has nothing to compare. `check_order=True` compares
        before each gather.
    """

    def __init__(self, titles: Sequence[str] = ()) -> None:
        self._titles = titles  # and not the units, which hold this log
        self.order = 0
        """A digest of which units were gathered, one after another; int64."""
        self._first: list[int] = []  # for messages

    def note(self, number: int, _: object = None) -> None:
        """The gather of the unit of this number begins."""
        self.order = hash((self.order, number))  # of integers: the same in every process
        if len(self._first) < _NAMED:  # an evaluation may gather without end
            self._first.append(number)

    def begin_step(self) -> None:
        """Ranks have compared what was noted."""
        self.order = 0
        self._first.clear()

    def facts(self) -> list[Fact]:
        """Which unit each gather was of, and the digest."""
        named = [
            (f"the unit of gather {place} since the last step", self._titles[number])
            for place, number in enumerate(self._first, 1)
        ]
        return [*named, ("the order of all gathers", str(self.order))]


@dataclass(frozen=True)
class _Flags:
    """What a rank says of its gradients, and of all ranks' the maximum.

    `produced` says of each parameter of each group whether it has a gradient, and `kind` is that
    of `BadGradients`.
    """

    produced: Sequence[Sequence[bool]]
    kind: int

    @property
    def words(self) -> list[int]:
        """As numbers, the kind last."""
        return [int(flag) for group in self.produced for flag in group] + [self.kind]

    def read(self, words: Sequence[int]) -> _Flags:
        """The same from reduced words, for groups of as many parameters."""
        flags = iter(words)
        produced = [[bool(next(flags)) for _ in group] for group in self.produced]
        return _Flags(produced, next(flags))


class ProducedFlags:
    """Which parameters got a gradient on any rank: agreed upon in one small collective per group.

    The groups are alike on all ranks of their data-parallel axes, one at least, and have numbers.
    One rank alone asks nobody.
    """

    def __init__(self, numbered: Mapping[int, ParameterGroup]) -> None:
        self._numbered = numbered
        self._groups = groups = [*numbered.values()]
        self._gradients = [group.trained for group in groups]
        axes, device = groups[0].axes, groups[0].device
        self._common = common_facts_of("at the end of a backward", axes, device)
        self._here = axes.here
        # The innermost axis first: its ranks gather from each other.
        several = [group for group in axes.groups("reduce")[::-1] if group is not None]
        self._over = [GroupRef(group) for group in several]
        self._device = host_device(several, device) if several else None
        self._reductions: list[SmallReduction] = []

    def agree(
        self, step: Agreement, bad: BadGradients, gathers: GatherLog, reduced: Sequence[int]
    ) -> BadGradients:
        """A parameter that got a gradient on one rank got one on all; collective.

        `step` is what the ranks must have in common in it, as are writes to parameters, `gathers`
        and the numbers of groups in the order in which they were `reduced` (else
        DisagreementError). `bad` is what this rank has found. The result is the worst kind that any
        rank has found, and what each of up to four of them says.
        """
        written = self._written()
        if not self._over:
            return bad  # one rank alone
        mine = _Flags([each.produced_gradient for each in self._gradients], bad.kind)
        writes = "parameters written outside of a step", str(written) if written else "none"
        # Groups of experts are reduced over ranks of their own.
        titles = [self._numbered[n].weights.title for n in reduced if n in self._numbered]
        sums = "the order in which gradients were summed", ", ".join(titles)
        # Of one dtype, so that the backend can reduce all at once (see `SmallReduction`).
        flags = torch.tensor(mine.words, dtype=torch.int64, device=self._device)
        order = torch.tensor([gathers.order, ~gathers.order], device=self._device)
        shared = [flags, self._common.words(step.with_facts(writes, sums)), order]
        if not self._reductions:
            self._reductions = [SmallReduction(shared, over.group, "max") for over in self._over]
        for number, reduction in enumerate(self._reductions):
            reduction.reduce(shared)
            if number == 0:  # other replicas are told whether these ranks differ, and not of what
                order.fill_(order[0] != ~order[1])
        # Of several differences a step left out is the cause, so it is named first.
        if differ := self._common.differ(shared[1]):
            self._common.require(step)
            self._refuse_lone_writes(written)
        if order[0]:
            self._collectives(self._over[:1]).require(gathers.facts())
            raise DisagreementError(
                f"{_COLLECTIVES}: ranks of another replica than {self._here} do not agree"
            )
        if differ:
            self._collectives(self._over).require([sums])
        merged = mine.read(flags.tolist())
        for gradients, produced in zip(self._gradients, merged.produced, strict=True):
            gradients.mark_produced(produced)
        # All ranks know the kind, and those that found it say which parameter it was.
        texts = [bad.text]
        if merged.kind:
            texts = self._common.said(bad.text)
        return BadGradients(merged.kind, "; ".join([text for text in texts if text][:4]))

    def _collectives(self, over: Sequence[GroupRef]) -> CommonFacts:
        """What compares the order of collectives over some groups."""
        groups = [each.group for each in over]
        return CommonFacts(_COLLECTIVES, groups, self._here, self._device or "cpu")

    def _written(self) -> dict[tuple[str, bool], int]:
        """What this rank has written since ranks compared that last, and how often (`Writes`)."""
        written: dict[tuple[str, bool], int] = {}
        for group in self._groups:
            group.look_for_writes()
            if group.writes.uncompared:
                taken = sorted(group.writes.take_uncompared().items())
                for (index, computed), times in taken:
                    written[group.refs[index].name, computed] = times if group.writes.whole else 1
        return written

    def _refuse_lone_writes(self, written: Mapping[tuple[str, bool], int]) -> None:
        """Raise if some ranks have written what others have not, and values show it; collective.

        A rank that holds no element of a main parameter need not write to it.
        """
        names, rows = [], []
        for group in self._groups:
            for index, ref in enumerate(group.refs):
                value, (start, stop) = _value(group, index), group.spans[index]
                main, computed = (ref.name, False) in written, (ref.name, True) in written
                # Alone is a write that some rank has made, and another that could have has not.
                flags = [main, not main and start < stop, computed, not computed]
                names.append((ref.name, value is None))
                # The largest of the complements is the complement of the smallest.
                rows.append([*map(int, flags), value or 0, ~(value or 0)])
        merged = torch.tensor(rows, dtype=torch.int64, device=self._device)
        for over in self._over:
            all_reduce_small([merged], over.group, op="max")
        lone = [
            name
            for (name, is_cut), (*flags, most, least) in zip(names, merged.tolist(), strict=True)
            if (all(flags[:2]) or all(flags[2:]) if is_cut else most != ~least)
        ]
        if lone:
            own = [f"{name} ({n} x)" for (name, _), n in written.items() if name in lone]
            mine = f"{self._common.here} has written {', '.join(own[:2]) or 'nothing of it'}"
            said = self._common.said(mine)
            more = f" (and {len(lone) - 1} more parameters)" if len(lone) > 1 else ""
            raise DisagreementError(
                f"{lone[0]}{more} was written outside of an optimizer's step on some ranks only: "
                f"{'; '.join([text for text in said if text][:4])}. Write the same values on all "
                "ranks, before the forward that computes with them"
            )


def _value(group: ParameterGroup, index: int) -> int | None:
    """A digest of a parameter that every rank holds whole, as it is kept and computed with."""
    if not group.writes.whole:
        return None
    start, stop = group.spans[index]
    kept = digest_of(group.main_weights.data[start:stop])
    used = digest_of(group.refs[index].parameter.detach().reshape(-1), 3)
    return int(kept + used)


class Settlement:
    """The end of a step's last backward: what ranks agree on then, for all groups of a model.

    What `checks` have found is refused, and free memory of `scratch` is given back.
    """

    def __init__(
        self,
        groups: Sequence[ParameterGroup],
        scratch: ScratchBuffers,
        checks: GradientChecks | None,
    ) -> None:
        self._groups, self._scratch, self._checks = groups, scratch, checks
        self._step_facts = StepFacts()
        self._flags: list[ProducedFlags] = []  # of groups that the same ranks have

    def forget(self) -> None:
        """A backward has raised: what was found in its gradients is nobody's concern."""
        if self._checks is not None:
            self._checks.forget()

    def settle(self, gathers: GatherLog, reduced: Sequence[int]) -> None:
        """Agree on who has a gradient, and refuse what any rank has found; collective.

        What `gathers` holds, and which groups were `reduced` one after another, must be the same on
        all ranks.
        """
        step, worst = self._step_facts.of(self._groups), BadGradients()
        bad = BadGradients() if self._checks is None else self._checks.look()
        if not self._flags:  # not before a backward has ended: communicators are made for it
            by_axes: dict[tuple[MeshAxis, MeshAxis], dict[int, ParameterGroup]] = {}
            for number, group in enumerate(self._groups):
                by_axes.setdefault((group.axes.outer, group.axes.inner), {})[number] = group
            self._flags = [ProducedFlags(numbered) for numbered in by_axes.values()]
        try:
            for flags in self._flags:
                worst = max(worst, flags.agree(step, bad, gathers, reduced))
        finally:
            gathers.begin_step()
        # Not before the last message: all ranks send as many, whatever they have found.
        worst.refuse()
        self._scratch.clear()
