"""The plan of a job: memory and time of each kind of pipeline stage, and whether it fits.

Note [Layers that are alike]
A deep model is played with few layers, or with few periods of layers whose kinds repeat, where that
is less work than to play it whole. What a step takes is then a straight line in the number of
layers, and the plan follows it to the true number, if three runs lie on it: the third one checks
the line that the first two draw. Otherwise the whole model is played. Memory has a line for each
moment of the step, see Note [Peaks change places]. Microbatches are treated in the same way, as a
schedule repeats its middle. What further ones add is seen at two depths, and a third number of them
checks it. If it does not hold, few layers are played with all microbatches.

Note [Peaks change places]
Of a shallow model the memory may be most where one unit is reduced, and of a deep one where forward
ends, with the activations of all layers. A line through the peaks of shallow models would follow
the first place for ever. So each moment of a step has a line of its own, and the peak of the deep
model is the highest of them. In layers that are alike memory grows evenly from layer to layer, so
what counts are the first and the last layer of a pass. A moment is therefore known by its distance
from the begin or the end of a pass, as long as all records run the same operators there. The third
record has to be on the line of the first two, or the moment is none.

Microbatches move the peak as well. If a schedule runs all forwards first, what waits for backwards
grows with layers times microbatches. A shallow model of few microbatches then has its peak in
another place. More microbatches may be more passes, so a pass is known by how many come before it,
or by how many come after it.
"""

from __future__ import annotations

from bisect import bisect_left
from collections.abc import Callable, Iterator, Mapping, Sequence
from dataclasses import dataclass, field, replace
from typing import Any

from lamina.models.decoder.cost import training_flops_per_token
from lamina.models.pipelining.schedule import schedule_kind
from lamina.models.plan.clock import Timing, message_seconds, replay
from lamina.models.plan.constants import GIB, Machine, machine, workspaces_of
from lamina.models.plan.job import Job, Played, play
from lamina.models.plan.pipeline_clock import pipeline_order, simulate
from lamina.models.plan.record.allocator import reserved_for
from lamina.models.plan.record.step_record import CATEGORIES, Message, StepRecord

Numbers = dict[str, float]
_EXACT = 2e-3
"""Part of a number by which the third run may miss the line of the first two."""


@dataclass(frozen=True)
class StagePlan:
    """One kind of pipeline stage.

    `memory` is in bytes at the peak, by category, `seconds` by category, `sent` in bytes by axis.
    """

    rank: int
    layers: int
    parameters: int
    memory: dict[str, int]
    seconds: dict[str, float]
    sent: dict[str, int]
    forward: float
    backward: float
    update: float
    fragments: int
    """Bytes that the allocator reserves at the end of a step beyond those at the peak."""
    extrapolated: bool
    """Whether fewer layers or microbatches were played than there are."""

    @property
    def allocated(self) -> int:
        """Bytes at the peak."""
        return sum(self.memory.values())


@dataclass(frozen=True)
class Plan:
    """What a job needs and how long a step takes, on one kind of GPU.

    Attributes:
        job: what was planned.
        gpu: the name of the GPU's profile.
        stages: each kind of pipeline stage; of a run without pipeline the only one.
        seconds: of a step, by category, of the slowest stage; with `bubbles`.
        played: the record and its timing, of the stage that needs most memory.
    """

    job: Job
    gpu: str
    machine: Machine
    stages: tuple[StagePlan, ...]
    seconds: dict[str, float]
    played: tuple[Played, Timing] = field(repr=False, compare=False)

    @property
    def step_seconds(self) -> float:
        """Seconds of a step."""
        return sum(self.seconds.values())

    @property
    def worst(self) -> StagePlan:
        """The stage that needs most memory."""
        return max(self.stages, key=lambda stage: stage.allocated)

    @property
    def allocated(self) -> int:
        """Bytes of tensors at the peak."""
        return self.worst.allocated

    @property
    def reserved(self) -> int:
        """Bytes that PyTorch's caching allocator has taken from the GPU."""
        return max(stage.allocated + stage.fragments for stage in self.stages)

    @property
    def margin(self) -> int:
        """Bytes of the GPU that are left; below zero it does not fit."""
        return self.machine.gpu.memory - self.machine.costs.context - self.reserved

    @property
    def fits(self) -> bool:
        """Whether the GPU has the memory."""
        return self.margin >= 0

    @property
    def fits_unfragmented(self) -> bool:
        """Whether it would fit if the allocator reserved what the tensors take and no more.

        PyTorch's `expandable_segments:True` comes near that, and is not planned. Without it the
        allocator gives cached memory back when there is no more, and the GPU waits for it.
        """
        return self.margin + self.reserved >= self.allocated

    @property
    def tokens_per_second(self) -> float:
        """Tokens of one GPU in a second."""
        return self.job.tokens / self.job.ranks / self.step_seconds

    @property
    def flops_per_second(self) -> float:
        """Operations of the model of one GPU in a second, without those of recomputation."""
        per_token = training_flops_per_token(self.job.config, self.job.sequence)
        return per_token * self.tokens_per_second

    @property
    def mfu(self) -> float:
        """Model FLOP utilisation, of the peak in bf16 (of FP8 runs too)."""
        return self.flops_per_second / self.machine.gpu.bf16

    @property
    def binds(self) -> str:
        """What is largest in memory, and what takes most time beside products."""
        memory = max(self.worst.memory, key=lambda name: self.worst.memory[name])
        others = {name: s for name, s in self.seconds.items() if name != "products"}
        return f"memory: {memory}; time: {max(others, key=lambda name: others[name])}"

    def as_json(self) -> dict[str, Any]:
        """All numbers, for `json.dumps`."""
        return {
            "gpu": self.gpu,
            "ranks": self.job.ranks,
            "allocated_bytes": self.allocated,
            "reserved_bytes": self.reserved,
            "margin_bytes": self.margin,
            "fits": self.fits,
            "binds": self.binds,
            "step_seconds": self.step_seconds,
            "seconds": self.seconds,
            "mfu": self.mfu,
            "tokens_per_second_per_gpu": self.tokens_per_second,
            "flops_per_second_per_gpu": self.flops_per_second,
            "stages": [
                {
                    "pp": stage.rank, "layers": stage.layers, "parameters": stage.parameters,
                    "memory_bytes": stage.memory, "sent_bytes": stage.sent,
                    "fragments_bytes": stage.fragments, "extrapolated": stage.extrapolated,
                }
                for stage in self.stages
            ],
        }  # fmt: skip

    def __str__(self) -> str:
        sent = [n for stage in self.stages for n in stage.sent.values()]
        unit, size_of_unit = (
            ("GiB", GIB) if max(self.allocated, *sent, 0) >= GIB else ("MiB", GIB >> 10)
        )
        rows = {name: [stage.memory[name] for stage in self.stages] for name in self.worst.memory}
        rows["allocated"] = [stage.allocated for stage in self.stages]
        axes = dict.fromkeys(axis for stage in self.stages for axis in stage.sent)
        messages = {axis: [stage.sent.get(axis, 0) for stage in self.stages] for axis in axes}

        def table(title: str, rows: dict[str, list[int]]) -> Iterator[str]:
            yield f"{title:<28}" + "".join(f"pp={s.rank:<12}" for s in self.stages).rstrip()
            for name, sizes in rows.items():
                row = "   ".join(f"{size / size_of_unit:8.2f} {unit}" for size in sizes)
                yield f"  {name:<26}{row}"

        lines = [*table("memory at the peak", rows)]
        limit = (self.machine.gpu.memory - self.machine.costs.context) / GIB
        verdict = "fits" if self.fits else "DOES NOT FIT"
        if not self.fits and self.fits_unfragmented:
            verdict += ", but for the allocator's fragments (see expandable_segments:True)"
        lines += [
            f"reserved {self.reserved / GIB:.2f} of {limit:.2f} GiB of {self.gpu}: {verdict}, with "
            f"{self.margin / GIB:+.2f} GiB",
            f"a step takes {self.step_seconds:.3f} s",
        ]
        lines += [
            f"  {name:<26}{seconds:10.4f} s {100 * seconds / self.step_seconds:5.1f}%"
            for name, seconds in sorted(self.seconds.items(), key=lambda pair: -pair[1])
            if seconds > 0
        ]
        lines += [
            *table("a rank sends in a step", messages),
            f"MFU {100 * self.mfu:.1f}%, {self.flops_per_second / 1e12:.0f} TFLOP/s and "
            f"{self.tokens_per_second:,.0f} tokens/s per GPU",
            f"what binds: {self.binds}",
        ]
        return "\n".join(lines)


def plan(job: Job, gpu: str | Machine = "h100-80gb", *, whole: bool = False) -> Plan:
    """Plan a job by steps of its code on meta tensors.

    Args:
        job: the run.
        gpu: a profile's name, or a machine with constants of your own.
        whole: play all layers and microbatches, however long it takes. What the allocator reserves
            grows by no rule, so a deep model's comes out up to a tenth too low without it.

    Raises:
        ValueError: an unknown GPU, or a job that cannot run, with the run's own words.

    Examples:
        >>> from lamina.models.plan import Job, plan
        >>> tiny = TransformerConfig(vocab_size=256, hidden_size=64, num_layers=2, num_heads=4)
        >>> plan(Job(config=tiny, ranks=2, sequence=64), "h100-80gb").fits
        True
    """
    at = machine(gpu) if isinstance(gpu, str) else gpu
    pp = job.layout.pp
    planned = [_plan_stage(job, rank, at, whole) for rank in _kinds_of_stages(job)]
    stages = tuple(stage for stage, _ in planned)
    worst = max(range(len(stages)), key=lambda place: stages[place].allocated)
    slow = max(stages, key=lambda stage: sum(stage.seconds.values()))
    seconds = dict(slow.seconds)
    if pp > 1:
        length = _pipeline_seconds(job, stages, at)
        seconds["bubbles"] = max(0.0, length - slow.forward - slow.backward)
    name = gpu if isinstance(gpu, str) else "a machine of your own"
    return Plan(job, name, at, stages, seconds, planned[worst][1])


# ------------------------------------------------------------------------------ one kind of stage


def _plan_stage(
    job: Job, rank: int, at: Machine, whole: bool
) -> tuple[StagePlan, tuple[Played, Timing]]:
    layers = _layers_of(job, rank)
    shown: list[tuple[Played, Timing]] = []

    def run(smaller: Job) -> _Run:
        played = play(smaller, rank)
        numbers, timing = _numbers(smaller, played, at)
        shown.append((played, timing))
        return _Run(_layers_of(smaller, rank), smaller.microbatches, numbers, played.record)

    values, extrapolated = (run(job).numbers, False) if whole else _from_few(job, rank, run)
    workspaces = workspaces_of(at.gpu)
    early = job.shard is None  # see Note [Workspaces come first] of `fully_shard`
    beyond = [
        reserved_for(played.before, played.record, workspaces, made_early=early)
        - sum(played.record.peak().values())
        - workspaces
        for played, _ in shown
    ]

    def under(prefix: str) -> dict[str, float]:
        return {k.removeprefix(prefix): v for k, v in values.items() if k.startswith(prefix)}

    memory = under("memory ")
    stage = StagePlan(
        rank,
        layers,
        int(values["parameters"]),
        {name: int(memory.get(name, 0)) for name in CATEGORIES} | {"workspaces": workspaces},
        under("seconds "),
        {axis: int(nbytes) for axis, nbytes in under("sent ").items()},
        values["forward"],
        values["backward"],
        values["update"],
        max(beyond),
        extrapolated,
    )
    return stage, shown[-1]


def _numbers(job: Job, played: Played, at: Machine) -> tuple[Numbers, Timing]:
    record = played.record
    resting = record.at_rest()
    states = resting["weights"] + resting["optimizer state"]
    touched = 2 * states + resting["gradients"]
    timing = replay(record, at, compiled=job.compiled, optimizer_bytes=touched)
    values: Numbers = {f"memory {name}": n for name, n in record.peak().items()}
    values |= {f"seconds {name}": s for name, s in timing.spent.items()}
    values |= {f"sent {axis}": n for axis, n in record.wire_bytes().items()}
    values |= {"forward": timing.forward, "backward": timing.backward, "update": timing.update}
    values["parameters"] = played.parameters
    values["peak"] = sum(record.peak().values())
    values["flops"] = sum(operation.flops for operation in record.operations)
    return values, timing


@dataclass(frozen=True)
class _Run:
    """What came of a stage that was played with so many layers and microbatches."""

    layers: int
    microbatches: int
    numbers: Numbers
    record: StepRecord


@dataclass(frozen=True)
class _Runs:
    """Runs of a stage that deeper ones, and ones of more microbatches, follow from.

    Attributes:
        deeper: of three depths, each as many layers deeper than the one before.
        longer: of more microbatches at the first depth and at the second, and of as many more again
            at the first. Empty where `deeper` has all microbatches.
    """

    deeper: Sequence[_Run]
    longer: Sequence[_Run] = ()

    def at(self, layers: int, microbatches: int) -> Numbers:
        """The numbers of so many layers and microbatches."""
        shallow, deep, *_ = self.deeper
        steps = (layers - shallow.layers) / (deep.layers - shallow.layers)
        times, corners = 0.0, [shallow, deep]
        if self.longer:
            corners += self.longer[:2]
            further = self.longer[0].microbatches - shallow.microbatches
            times = (microbatches - shallow.microbatches) / further
        numbers = _mixed([run.numbers for run in corners], _weights(steps, times))
        deeper, longer = ([run.record for run in runs] for runs in (self.deeper, self.longer))
        memory = peak_at(deeper, longer, steps, times)
        numbers |= {f"memory {name}": nbytes for name, nbytes in memory.items()}
        return numbers | {"peak": sum(memory.values())}

    def predict(self, run: _Run) -> bool:
        """Whether a run that was played has the numbers that follow for it."""
        guess = self.at(run.layers, run.microbatches)
        return all(
            abs(guess[key] - run.numbers[key]) <= _EXACT * max(run.numbers[key], 1.0)
            for key in ("peak", "parameters", "flops")
        )


def _from_few(job: Job, rank: int, run: Callable[[Job], _Run]) -> tuple[Numbers, bool]:
    """The numbers of a rank's stages, and whether fewer layers or microbatches were played.

    See Note [Layers that are alike].
    """
    least = 1 if job.layout.pp > 1 else 2
    first, second, third = _few_passes(job, rank)
    every, layers = job.microbatches, _layers_of(job, rank)
    depths = job.shallow(rank, least)
    sizes = [_layers_of(depth, rank) for depth in depths]
    if depths and sum(sizes) < layers:
        few = sum(sizes) * first + sum(sizes[:2]) * second + sizes[0] * third
        all_passes = few >= sum(sizes) * every  # they take no longer
        n = every if all_passes else first
        runs = _Runs([run(_with_passes(depth, n)) for depth in depths])
        if runs.predict(runs.deeper[2]):
            if not all_passes:
                more = ((0, second), (1, second), (0, third))
                runs = replace(runs, longer=[run(_with_passes(depths[d], n)) for d, n in more])
                if not runs.predict(runs.longer[2]):
                    runs = _Runs([run(depth) for depth in depths])
            return runs.at(layers, every), True
    if first + second >= every:
        return run(job).numbers, False
    low, high = (run(_with_passes(job, n)).numbers for n in (first, second))
    times = (every - first) / (second - first)
    return _mixed([low, high], (1 - times, times)), True


def _weights(steps: float, times: float) -> tuple[float, ...]:
    """How much of each corner there is, so many steps and times away from the first one.

    The corners are the first depth and the second, and both again with more microbatches.
    """
    return (1 - steps) * (1 - times), steps * (1 - times), (1 - steps) * times, steps * times


def _mixed(corners: Sequence[Mapping[str, float]], weights: Sequence[float]) -> Numbers:
    """So much of each corner's numbers, none of them below zero."""
    keys = dict.fromkeys(key for each in corners for key in each)  # the same order in every run
    return {
        key: max(0.0, sum(w * c.get(key, 0) for w, c in zip(weights, corners, strict=False)))
        for key in keys
    }


def _layers_of(job: Job, rank: int) -> int:
    return sum(job.stage_sizes[stage] for stage in job.stages_of(rank))


def passes_to_play(job: Job) -> int:
    """How many microbatches `plan` plays in all, for three depths of each kind of stage."""
    total = 0
    for rank in _kinds_of_stages(job):
        first, second, third = _few_passes(job, rank)
        total += min(3 * first + 2 * second + third, 3 * job.microbatches)
    return total


def _kinds_of_stages(job: Job) -> list[int]:
    """Pipeline ranks that stand for all: the first, one between, and the last."""
    pp = job.layout.pp
    return sorted({0, min(1, pp - 1), pp - 1})


def _few_passes(job: Job, rank: int) -> tuple[int, int, int]:
    """Three numbers of microbatches that others follow from, each by as many more."""
    pp = job.layout.pp
    several = len(job.stages_of(rank)) > 1
    step = max(len(job.stage_sizes), pp) if schedule_kind(job.schedule).v_shape else pp
    if job.schedule == "1f1b":
        step = pp - rank  # it has no more of them under way
    # A schedule with several stages to a rank asks for multiples of `pp`. A step that is shorter
    # than what is under way at the end would take the end of the schedule for its middle.
    first = 2 * step if several else max(step + 2, pp)
    return first, first + step, first + 2 * step


def _with_passes(job: Job, passes: int) -> Job:
    return replace(job, microbatches=passes, batch=job.batch // job.microbatches * passes)


# ------------------------------------------------------------------------------ more layers


def peak_at(
    deeper: Sequence[StepRecord],
    longer: Sequence[StepRecord],
    steps: float,
    times: float,
) -> dict[str, float]:
    """Bytes by category at the peak of a model that has more layers and microbatches.

    From the first record to the second is one step of layers, of which the model is `steps` away.
    From the first record to the first of `longer` is one step of microbatches, of which it is
    `times` away. See `_Runs` for the records, and Note [Peaks change places].
    """
    records = [_Moments.of(record) for record in (*deeper, *longer)]
    totals = [[sum(now.values()) for now in each.memory] for each in records]
    # Of each line: the two records that draw it, the one that checks it, and how far it leads.
    lines = [(0, 1, 2, steps)] + ([(0, 3, 5, times)] if longer else [])
    corners = (0, 1, 3, 4) if longer else (0, 1)
    weights = _weights(steps, times)
    most, best = 0.0, list[int]()
    for places in _same_moments(records):
        here = [each[at] for each, at in zip(totals, places, strict=True)]
        total = sum(w * here[corner] for w, corner in zip(weights, corners, strict=False))
        # A line that is bent a little leads far away in many steps.
        bent = (abs(here[c] - 2 * here[b] + here[a]) * max(n, 1.0) for a, b, c, n in lines)
        if total > most and max(bent) <= _EXACT * total:
            most, best = total, places
    peak = [records[corner].memory[best[corner]] for corner in corners] if best else []
    return dict.fromkeys(CATEGORIES, 0.0) | _mixed(peak, weights)


@dataclass(frozen=True)
class _Moments:
    """The events of a record at which an operator ran or memory changed.

    Views are left out: a backward may end with some for each layer, and what is before these would
    be at another distance from its end in each record.

    Attributes:
        operators: the operator of each, or "".
        memory: bytes by category after each.
        passes: where each forward, each backward and the update begin and end.
    """

    operators: Sequence[str]
    memory: Sequence[dict[str, int]]
    passes: Sequence[tuple[int, int]]

    @staticmethod
    def of(record: StepRecord) -> _Moments:
        """The moments of a record."""
        ran = {operation.at: operation.name for operation in record.operations}
        changed, now, memory = dict(record.timeline()), dict[str, int](), list[dict[str, int]]()
        events = sorted({0, record.end, *ran, *changed})
        for at in events:
            now = changed.get(at, now)
            memory.append(now)
        begins, before = [0], 0
        for operation in record.operations:
            if operation.backward != before:  # each backward is a pass of its own
                begins.append(operation.at)
                before = operation.backward
        begins = sorted({*begins, *(at for at, _ in record.marks)})
        starts = [bisect_left(events, at) for at in begins]
        ends = [*starts[1:], len(events) - 1]
        return _Moments(
            [ran.get(at, "") for at in events], memory, list(zip(starts, ends, strict=True))
        )


def _same_moments(records: Sequence[_Moments]) -> Iterator[list[int]]:
    """Moments of all records that are as far from the begin, or from the end, of the same pass."""
    passes = [record.passes for record in records]
    common = min(map(len, passes))
    pairs = list(zip(*(each[:common] for each in passes), strict=True))
    if max(map(len, passes)) > common:
        pairs += zip(*(each[-common:] for each in passes), strict=True)
    for bounds in pairs:
        shortest = min(end - begin for begin, end in bounds)
        for from_end in (False, True):
            edges = [bound[from_end] for bound in bounds]
            yield edges
            for offset in range(1, shortest + 1):
                places = [edge - offset if from_end else edge + offset for edge in edges]
                ran = [places[n] if from_end else places[n] - 1 for n in range(len(places))]
                there = zip(records, ran, strict=True)
                if len({record.operators[at] for record, at in there}) > 1:
                    break
                yield places


# ------------------------------------------------------------------------------ the schedule


def _pipeline_seconds(job: Job, stages: tuple[StagePlan, ...], at: Machine) -> float:
    """Seconds from the first forward to the last backward, by the schedule's own order."""
    pp, order = job.layout.pp, pipeline_order(job)
    by_rank = {rank: stages[min(rank, 1) if rank < pp - 1 else -1] for rank in range(pp)}
    stages_held = {rank: len(job.stages_of(rank)) for rank in range(pp)}
    each = {
        rank: (stage.forward / stages_held[rank], stage.backward / stages_held[rank])
        for rank, stage in by_rank.items()
    }
    passes = job.microbatches
    sent = stages[0].sent.get("pp", 0) / max(1, passes)
    near = job.ranks // pp >= 8
    hop = Message("pp", "pp", "send", "", int(sent), int(sent) if near else 0, 2, 0, None)
    durations = {
        rank: {"F": forward / passes, "B": backward / passes, "I": backward / passes / 2,
               "W": backward / passes / 2}
        for rank, (forward, backward) in each.items()
    }  # fmt: skip
    return simulate(order, durations, message_seconds(hop, at))
