"""Whether a step may change the weights: its loss and gradient norm, judged alike on all ranks.

Note [Judged without a message of its own]
A rank that alone skipped a step would train other weights than its peers, or leave them waiting. So
a verdict follows from nothing but values that all ranks have in the same bits: the norm, and the
mean loss, which rides in the norm's message. Ranks send words only after an unhealthy step, to name
the rank, microbatch and parameters, and once about a rank that holds the others up. See
docs/decisions/0415-health-rides-on-the-norm.md.
"""

from __future__ import annotations

import math
import statistics
import warnings
from collections import Counter, deque
from collections.abc import Callable, Mapping, Sequence
from contextlib import AbstractContextManager
from dataclasses import dataclass, replace
from enum import Enum
from typing import Any, Literal

import torch
import torch.distributed as dist

from lamina.collectives.engine import CommonFacts
from lamina.ddp.monitor.pace import NUMBERS, Pace, Straggler
from lamina.mesh.engine import MeshAxis, check_arguments

Policy = Literal["stop", "skip", "back"]

_OF_NORMS = 10.0  # times the limit of losses; decision 0415 has the figures
_TO_STANDARD_DEVIATION = 1.4826  # from the median distance, for normally distributed values


class Decision(Enum):
    """What becomes of a step."""

    STEP = "step"
    """It is healthy: the optimizer steps."""
    SKIP = "skip"
    """The optimizer does not step, and training goes on with the next batch."""
    BACK = "back"
    """Training returns to the last healthy checkpoint, and passes over the batches since then."""


@dataclass(frozen=True)
class Judgement:
    """What was found of one step; equal on all ranks.

    Attributes:
        loss: mean over the ranks of the losses noted (with `norm_type=inf` the largest); None if no
            rank noted one.
        norm: of the gradients, before clipping.
        decision: what becomes of the step.
        reason: what is wrong, with rank, microbatch and parameters where known; empty if healthy.
        stragglers: ranks that have been found to hold the others up; told once.
        network: says that the network has become slow; told once.

    Examples:
        >>> Judgement(loss=2.0, norm=0.5, decision=Decision.STEP).healthy
        True
    """

    loss: float | None
    norm: float
    decision: Decision
    reason: str = ""
    stragglers: tuple[Straggler, ...] = ()
    network: str = ""

    @property
    def healthy(self) -> bool:
        """Whether nothing is wrong."""
        return not self.reason


class HealthMonitor:
    """Judges every step before the optimizer's: finite loss and gradients, and no spikes.

    A loss spikes if it is above the median of the last `window` finite values by more than `limit`
    deviations, a norm if by more than ten times as many: norms of healthy steps reach 26
    deviations, their losses 3. A deviation is 1.4826 times the median distance from that median,
    but at least a tenth of the median's magnitude. Nothing spikes before `least` values are known.

    Call `note` with the loss of each microbatch, give the monitor to `clip_grad_norm`, and let the
    optimizer step only where `last.decision` is `Decision.STEP`. Zero the gradients in any case. A
    step that is skipped leaves weights and optimizer state alone, but not what a forward has
    changed (statistics of BatchNorm, scales of FP8).

    Enter `step` around each step, and a rank that holds the others up is named: one that for
    `slow_steps` steps on end needs more than `slow` times as long as the mean of the others, not
    counting the time in which it waits for them in Lamina's collectives. If instead every rank
    waits for more than twice `slow` times as long as it used to, and most of a step, the network
    has become slow, and that is told. Every eighth step is timed. With `norm_type=inf`, and across
    pipeline stages, nobody is found.

    Args:
        nonfinite: what to do about NaN and infinity: "stop" raises, "skip" and "back" as in
            `Decision`.
        spike: what to do about a spike; None does not look for any.
        limit: how many deviations of the loss are a spike.
        window: how many steps the median is of.
        least: how many values must be known.
        patience: stop after so many unhealthy steps in a row, whatever the policies say. After
            going back, the row ends only with as many healthy steps as batches were passed over.
        slow: how many times as long as others a slow rank needs.
        slow_steps: for how many steps on end.

    Attributes:
        last: the newest judgement; None before the first.
        counts: unhealthy steps by decision ("skip", "back"), of the whole run.

    Raises:
        ValueError: an unknown policy, or a number that cannot be.

    Examples:
        >>> model, health = DistributedDataParallel(torch.nn.Linear(4, 1)), HealthMonitor()
        >>> loss = model(torch.ones(2, 4)).mean()
        >>> health.note(loss)
        >>> loss.backward()
        >>> norm = clip_grad_norm(model, 1.0, health=health)
        >>> health.last.decision
        <Decision.STEP: 'step'>
    """

    @check_arguments
    def __init__(
        self,
        *,
        nonfinite: Policy = "stop",
        spike: Policy | None = "skip",
        limit: float = 10.0,
        window: int = 64,
        least: int = 16,
        patience: int = 10,
        slow: float = 1.5,
        slow_steps: int = 64,
    ) -> None:
        for name, policy in (("nonfinite", nonfinite), ("spike", spike)):
            if policy not in ("stop", "skip", "back") and (policy, name) != (None, "spike"):
                raise ValueError(f"{name}={policy!r} is no policy: give 'stop', 'skip' or 'back'")
        if not limit > 0 or not 1 <= least <= window or patience < 1:
            raise ValueError(
                f"limit={limit}, least={least}, window={window}, patience={patience}: limit must "
                "be above 0, least from 1 to window, patience at least 1"
            )
        if not slow > 1 or slow_steps < 1:
            raise ValueError(f"slow={slow}, slow_steps={slow_steps}: above 1, and at least 1")
        self.last: Judgement | None = None
        self.counts: Counter[str] = Counter()
        self._nonfinite, self._spike, self._limit = nonfinite, spike, limit
        self._least, self._patience = least, patience
        self._recent = {what: deque[float](maxlen=window) for what in ("loss", "gradient norm")}
        self._noted: list[torch.Tensor] = []
        self._in_a_row = self._repeated = 0
        self._passed_over = 0
        self._compared = False
        self._pace = Pace(slow, slow_steps)

    # -- what a training loop calls -----------------------------------------------------------

    def step(self) -> AbstractContextManager[None]:
        """Entered around a step on all ranks: finds those that hold the others up."""
        return self._pace.step()

    def note(self, loss: torch.Tensor | float) -> None:
        """Note the loss of this rank's next microbatch; the host does not wait for it."""
        self._noted.append(torch.as_tensor(loss).detach().double().reshape(()))

    def batch(self, step: int) -> int:
        """Number of the batch that step `step` takes: its own, until batches are passed over."""
        return step + self._passed_over

    def went_back(self, step: int, bad: int) -> None:
        """Training is at `step` again; it goes on with the batch after number `bad`."""
        # A run that always fails at the same step is to end, although it repeats those before.
        self._repeated = self._passed_over = bad + 1 - step

    def state_dict(self) -> dict[str, Any]:
        """The values that the next judgements depend on, the counts, the batches passed over."""
        recent = {what: list(values) for what, values in self._recent.items()}
        return {
            "recent": recent, "counts": dict(self.counts), "passed_over": self._passed_over
        }  # fmt: skip

    def load_state_dict(self, state: Mapping[str, Any]) -> None:
        """Go on as the monitor that the state is of. No unhealthy step is forgotten."""
        for what, values in self._recent.items():
            values.clear()
            values.extend(state["recent"][what])
        self.counts |= Counter(state["counts"])
        self._passed_over = state["passed_over"]
        self._compared = False

    # -- what `clip_grad_norm` calls ----------------------------------------------------------

    def message(self, op: str, device: torch.device) -> torch.Tensor:
        """This rank's loss (mean, at "max" the largest), 1 if it has one, its pace: fp64 [9]."""
        pace = [0.0] * NUMBERS if op == "max" else self._pace.message()
        nothing = -math.inf if op == "max" else 0.0
        sent = torch.tensor([nothing, bool(self._noted), *pace], dtype=torch.float64, device=device)
        if self._noted:
            losses = torch.stack([loss.to(device) for loss in self._noted])
            sent[0] = losses.max() if op == "max" else losses.mean()
        return sent

    def judge(
        self,
        loss: float | None,
        norm: float,
        axes: Sequence[MeshAxis],
        device: torch.device,
        gradients: Callable[[bool], Sequence[str]],
        pace: Sequence[float] = (0.0,) * NUMBERS,
    ) -> Judgement:
        """Judge a step by values that all ranks have; collective, the first time and if unhealthy.

        Args:
            loss: the mean loss; None if no rank has noted any.
            norm: of the gradients.
            axes: the ranks.
            device: where messages lie.
            gradients: names this rank's parameters whose gradients are not finite (True), or are
                the largest (False).
            pace: what ranks have told of it, summed.

        Raises:
            FloatingPointError: on every rank, if a policy says "stop", or patience is over.
            DisagreementError: ranks have other settings, or another past.
        """
        self._compare(axes, device)
        stragglers = self._stragglers(pace, axes, device)
        values = {"loss": loss, "gradient norm": norm}
        known = {what: value for what, value in values.items() if value is not None}
        infinite = [what for what, value in known.items() if not math.isfinite(value)]
        spikes = {} if infinite or self._spike is None else self._spikes(known)
        for what, value in known.items():
            if math.isfinite(value):
                self._recent[what].append(value)
        # A healthy step ends the row, unless it only repeats what was done before going back.
        if not infinite and not spikes:
            self._repeated -= 1
            if self._repeated <= 0:
                self._in_a_row = 0
            self.last = Judgement(loss, norm, Decision.STEP)
        else:
            cause = " and ".join(
                [f"the {what} is not finite" for what in infinite]
                + [f"the {what} is above its limit of {most:.4g}" for what, most in spikes.items()]
            )
            # Only now do ranks send words, and all of them, as the verdict is the same on all.
            suspects, names = self._suspects(bool(infinite)), gradients(bool(infinite))
            words = words_of_all(suspects, names, axes, device)
            reason = f"loss {loss}, gradient norm {norm:.6g}: {cause}{words}"
            self._conclude(loss, norm, reason, (self._nonfinite if infinite else self._spike) or "")
        network = self._pace.network
        if (stragglers or network) and self.last is not None:
            self.last = replace(self.last, stragglers=stragglers, network=network)
        self._noted.clear()
        return self.last  # type: ignore[return-value]  # set by either branch

    def _conclude(self, loss: float | None, norm: float, reason: str, policy: str) -> None:
        self._in_a_row += 1
        if policy == "stop" or self._in_a_row >= self._patience:
            self._noted.clear()
            times = f" ({self._in_a_row} steps in a row)" if self._in_a_row > 1 else ""
            raise FloatingPointError(reason + times)
        self.last = Judgement(loss, norm, Decision(policy), reason)
        self.counts[policy] += 1
        if not dist.is_initialized() or dist.get_rank() == 0:
            done = "the step is skipped" if policy == "skip" else "training goes back"
            warnings.warn(f"{reason}; {done}", stacklevel=5)

    def _spikes(self, known: Mapping[str, float]) -> dict[str, float]:
        """What is above its limit, and the limit."""
        above = {}
        for what, value in known.items():
            if len(recent := self._recent[what]) >= self._least:
                median = statistics.median(recent)
                # Median and median distance: earlier spikes hardly move them. A tenth of the median
                # is the least distance, or a loss that is almost constant would make each of its
                # steps a spike.
                distance = statistics.median(abs(each - median) for each in recent)
                deviation = max(_TO_STANDARD_DEVIATION * distance, 0.1 * abs(median))
                limit = self._limit * (_OF_NORMS if what == "gradient norm" else 1.0)
                if value > (most := median + limit * deviation):
                    above[what] = most
        return above

    def _stragglers(
        self, pace: Sequence[float], axes: Sequence[MeshAxis], device: torch.device
    ) -> tuple[Straggler, ...]:
        """The ranks that have found themselves slow, from words that all send if one has."""
        self._pace.compare(pace)
        first = not dist.is_initialized() or dist.get_rank() == 0
        if self._pace.network and first:
            warnings.warn(self._pace.network, stacklevel=5)
        if not pace[2]:
            return ()
        rows = _rows_of_all(self._pace.words(), axes, device)
        # One that is slow no more has no words.
        slow = tuple(Straggler(row[0], row[1], float(row[2])) for row in rows if len(row) == 3)
        if slow and first:
            warnings.warn("; ".join(map(str, slow)), stacklevel=5)
        return slow

    def _suspects(self, infinite: bool) -> str:
        """The microbatches of this rank that may be the cause: not finite, or the largest."""
        losses = [float(loss) for loss in self._noted]
        chosen = [at for at, loss in enumerate(losses) if not math.isfinite(loss)][:3]
        if not infinite and losses:
            chosen = [max(range(len(losses)), key=losses.__getitem__)]
        return ", ".join(f"microbatch {at} has loss {losses[at]:.6g}" for at in chosen)

    def _compare(self, axes: Sequence[MeshAxis], device: torch.device) -> None:
        # Ranks with other limits would judge the same step differently, and some would wait for
        # steps that others leave out. Settings don't change, so they are compared once.
        if self._compared:
            return
        facts = [
            ("nonfinite", str(self._nonfinite)),
            ("spike", str(self._spike)),
            ("limit, least, patience", str((self._limit, self._least, self._patience))),
            ("window", str(self._recent["loss"].maxlen)),
            ("slow, slow_steps", str((self._pace.factor, self._pace.steps))),
            ("state", str(self.state_dict())),
        ]
        groups = [axis.sibling("reduce") for axis in axes]
        CommonFacts("HealthMonitor", groups, device=device).require(facts)
        self._compared = True


def words_of_all(
    suspects: str, names: Sequence[str], axes: Sequence[MeshAxis], device: torch.device
) -> str:
    """What all ranks know of the cause: suspects of each rank, and names of parameters."""
    rows = _rows_of_all([suspects, *names], axes, device)
    blamed = [f"{rank}: {words[0]}" for rank, *words in rows if words and words[0]]
    known = list(dict.fromkeys(name for row in rows for name in row[2:] if name))
    gradients = [f"gradients of {shortened(known, 5, ', ')}"] if known else []
    return "".join(f"; {each}" for each in [shortened(blamed, 3, "; "), *gradients] if each)


def _rows_of_all(
    words: Sequence[str], axes: Sequence[MeshAxis], device: torch.device
) -> list[list[str]]:
    """Each rank with its coordinates, and what it has to say; in order."""
    place = ", ".join(f"{axis.name}={axis.rank}" for axis in axes)
    here = f"rank {dist.get_rank() if dist.is_initialized() else 0}" + (f" ({place})" * bool(place))
    everybody = CommonFacts("", [axis.sibling("reduce") for axis in axes], device=device)
    return sorted(row.split("\n") for row in everybody.said("\n".join([here, *words])))


def shortened(words: Sequence[str], most: int, comma: str) -> str:
    """The first `most` words, and how many more there are."""
    more = f" and {len(words) - most} more" if len(words) > most else ""
    return comma.join(words[:most]) + more
