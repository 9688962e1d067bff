"""torch's schedules by name, and the stages that a rank holds under each of them."""

from collections.abc import Sequence
from dataclasses import dataclass
from typing import Any, Literal

from torch import Tensor

Schedule = Literal[
    "gpipe",
    "1f1b",
    "interleaved_1f1b",
    "looped_bfs",
    "interleaved_zero_bubble",
    "zbv_zero_bubble",
    "dualpipev",
]


@dataclass(frozen=True)
class ScheduleKind:
    """The properties of a schedule that are needed before its stages are made.

    `torch_class` is its name in `torch.distributed.pipelining.schedules`. `stages_per_rank` of None
    leaves the number to the caller, 2 or more. With `v_shape`, rank r of R holds stages r and 2 R -
    1 - r, so the first rank computes the loss. With `splits_backward`, weights' gradients are
    computed separately from inputs' gradients.
    """

    torch_class: str
    stages_per_rank: int | None = 1
    v_shape: bool = False
    splits_backward: bool = False

    def stages_of(self, rank: int, ranks: int, num_stages: int) -> tuple[int, ...]:
        """Stages that a rank holds, in order."""
        if self.v_shape:
            return (rank, num_stages - 1 - rank)
        return tuple(range(rank, num_stages, ranks))

    def rank_of_last(self, ranks: int) -> int:
        """The rank that computes the loss."""
        return 0 if self.v_shape else ranks - 1


SCHEDULES: dict[str, ScheduleKind] = {
    "gpipe": ScheduleKind("ScheduleGPipe"),
    "1f1b": ScheduleKind("Schedule1F1B"),
    "interleaved_1f1b": ScheduleKind("ScheduleInterleaved1F1B", None),
    "looped_bfs": ScheduleKind("ScheduleLoopedBFS", None),
    "interleaved_zero_bubble": ScheduleKind(
        "ScheduleInterleavedZeroBubble", None, splits_backward=True
    ),
    "zbv_zero_bubble": ScheduleKind("ScheduleZBVZeroBubble", 2, v_shape=True, splits_backward=True),
    "dualpipev": ScheduleKind("ScheduleDualPipeV", 2, v_shape=True, splits_backward=True),
}
"""GPipe (Huang et al., 2019); 1F1B (Narayanan et al., 2019) and its interleaved form (Narayanan et
al., 2021); breadth-first (Lamy-Poirier, 2022); zero bubble and ZB-V (Qi et al., 2023, 2024);
DualPipe in V form (DeepSeek-AI, 2024)."""


def schedule_kind(name: str) -> ScheduleKind:
    """Look a schedule up. Raises ValueError for an unknown name, listing the known ones."""
    if name not in SCHEDULES:
        raise ValueError(f"schedule {name!r} is not known: choose one of {', '.join(SCHEDULES)}")
    return SCHEDULES[name]


def number_of_stages(name: str, ranks: int, given: int | None, layout_length: int | None) -> int:
    """The number of stages of a schedule, from the layout's length or the stages per rank.

    ValueError says why layout, stages per rank and schedule do not fit together.
    """
    fixed = schedule_kind(name).stages_per_rank
    per_rank = given if given is not None else fixed
    if per_rank is None:
        per_rank = 2 if layout_length is None else layout_length // ranks
    if (fixed is not None and per_rank != fixed) or (fixed is None and per_rank < 2):
        wanted = "2 or more stages" if fixed is None else f"{fixed} stage{'s' * (fixed > 1)}"
        raise ValueError(
            f"{per_rank} stages per rank with schedule {name!r}: it needs {wanted} per rank"
        )
    if layout_length is not None and layout_length != per_rank * ranks:
        raise ValueError(
            f"layout has {layout_length} stages; schedule {name!r} over {ranks} ranks with "
            f"{per_rank} per rank needs {per_rank * ranks}"
        )
    return per_rank * ranks


def make_schedule(name: str, stages: Sequence[Any], num_microbatches: int) -> Any:
    """Make torch's schedule for this rank's stages, which compute the loss themselves.

    ValueError says that it cannot run this number of microbatches.
    """
    if stages[0].group is None:
        return _OneStage(stages[0], num_microbatches)
    kind = schedule_kind(name)
    single = kind.stages_per_rank == 1
    ranks = stages[0].group_size
    if name in ("1f1b", "zbv_zero_bubble", "dualpipev"):
        least = stages[0].num_stages
        if num_microbatches < least:
            raise ValueError(
                f"num_microbatches={num_microbatches} with schedule {name!r}: it must be at least "
                f"the number of stages, {least}; use more microbatches, or 'gpipe'"
            )
    # Imported here, because it imports torch._dynamo, which takes longer than all of Lamina.
    from torch.distributed.pipelining import schedules as torch_schedules

    try:
        return getattr(torch_schedules, kind.torch_class)(
            stages[0] if single else list(stages),
            num_microbatches,
            # The last stage's output is the loss, because its module was given the labels.
            loss_fn=lambda output, _: output,
            scale_grads=False,
        )
    except ValueError as error:
        raise ValueError(
            f"schedule {name!r} cannot run num_microbatches={num_microbatches} on {ranks} pipeline "
            f"ranks with {len(stages)} stages each: {error}; a multiple of {ranks} always works"
        ) from error


class _OneStage:
    """Runs microbatch after microbatch, for a mesh with one pipeline rank."""

    def __init__(self, stage: Any, num_microbatches: int) -> None:
        self._stage = stage
        self._number = num_microbatches

    def step(self, *, losses: list[Tensor], **_: Any) -> None:
        """Run forward and backward of each microbatch; the losses are appended to `losses`."""
        self._stage.has_backward = True
        for chunk in range(self._number):
            losses.append(self._stage.forward_one_chunk(chunk))
            self._stage.backward_one_chunk(chunk, last_backward=chunk == self._number - 1)

    def eval(self, *, losses: list[Tensor], **_: Any) -> None:
        """Run forward of each microbatch, without backward; as `step` otherwise."""
        self._stage.has_backward = False
        losses.extend(map(self._stage.forward_one_chunk, range(self._number)))
