"""How many ranks each parallel axis takes, who stands where, and the groups to talk over.

A `ParallelLayout` is integers only: one of a million ranks can be checked on a laptop. A
`ParallelMesh` is a layout over the ranks of the running job.
"""

from __future__ import annotations

import math
from collections.abc import Collection, Mapping, Sequence
from dataclasses import dataclass, fields, replace
from functools import cached_property
from typing import Any

import torch
import torch.distributed as dist
from torch.distributed.device_mesh import DeviceMesh

from lamina.mesh.errors import AxisError, LayoutError
from lamina.mesh.groups.axis import MeshAxis, check_axis_names
from lamina.mesh.groups.hosts import make_host_groups, ranks_per_host
from lamina.mesh.groups.process_groups import (
    current_world,
    default_store,
    group_of,
    group_ref,
    running_watchdog,
    watch_mesh,
)

DENSE_AXES = ("pp", "dp_replicate", "dp_shard", "cp", "tp")
"""Axes of dense parameters, outermost first: neighbours in rank order share a tp group."""

EXPERT_AXES = ("pp", "dp_replicate", "expert_dp", "ep", "expert_tp")
"""Axes of expert parameters over the same ranks, outermost first."""

MODEL_AXES = ("pp", "tp", "ep", "expert_tp")
"""Axes along which ranks hold different parts of a model (of its experts: the last two)."""

DERIVED_AXES: Mapping[str, tuple[str, ...]] = {
    "dp": ("dp_replicate", "dp_shard"),
    "dp_cp": ("dp_replicate", "dp_shard", "cp"),
    "dp_shard_cp": ("dp_shard", "cp"),
}
"""Names for several dense axes taken as one."""


@dataclass(frozen=True)
class ParallelLayout:
    """Sizes of the parallel axes. One dense axis may be -1: it takes the ranks the others leave.

    Args:
        dp_replicate: copies of the whole sharded model (HSDP's and HFSDP's outer axis).
        dp_shard: ranks that a copy's parameters are sharded over.
        cp: ranks that a sequence is split over (context parallelism).
        tp: ranks that a layer's matrices are split over (tensor parallelism).
        pp: pipeline stages.
        ep: ranks that a layer's experts are spread over. Expert axes take their ranks from
            dp_shard x cp x tp: `ep * expert_tp * expert_dp == dp_shard * cp * tp`.
        expert_tp: ranks that one expert's matrices are split over.

    Raises:
        LayoutError: a size is not a positive integer (or -1), or several are -1.

    The order of the axes, pp outermost and tp innermost, puts the most talkative axes on the
    nearest ranks, as in Megatron-LM (Narayanan et al. 2021, section 3).

    Examples:
        >>> ParallelLayout(dp_shard=-1, tp=2).validate(world_size=8).dp_shard
        4
    """

    dp_replicate: int = 1
    dp_shard: int = -1
    cp: int = 1
    tp: int = 1
    pp: int = 1
    ep: int = 1
    expert_tp: int = 1

    def __post_init__(self) -> None:
        for field in fields(self):
            _check_size(field.name, getattr(self, field.name))
        open_axes = [name for name in DENSE_AXES if getattr(self, name) == -1]
        if len(open_axes) > 1:
            raise LayoutError(
                f"{' and '.join(f'{name}=-1' for name in open_axes)}: only one axis can be "
                "inferred from the world size. Give all but one of them a size."
            )

    def build(self, device_type: str | None = None) -> ParallelMesh:
        """The mesh of this layout over the ranks of the running job. Collective over all ranks.

        Args:
            device_type: "cpu" or "cuda"; by default "cuda" if the job runs NCCL, and there is a
                GPU, else "cpu".

        Raises:
            LayoutError: the layout does not fit the world size, or another rank builds another.
            RuntimeError: torch.distributed has not been started.
        """
        return ParallelMesh(self, device_type)

    @property
    def needs_sequence_parallel(self) -> bool:
        """Whether a model with experts must run sequence parallelism on this layout.

        Where expert parameters don't follow the dense tp axis, the ranks of one tp group route
        tokens to experts on their own. Without sequence parallelism they all hold the same
        tokens, so every token would be counted tp times. The layout can't know whether a model
        has experts: models ask `require_sequence_parallel`.
        """
        return self.tp > 1 and not (self.ep == 1 and self.expert_tp == self.tp)

    def require_sequence_parallel(self, enabled: bool) -> None:
        """Refuse to run experts on this layout without sequence parallelism.

        Models that have experts call this with their own flag when they are built.

        LayoutError: `needs_sequence_parallel` and not `enabled`.
        """
        if self.needs_sequence_parallel and not enabled:
            raise LayoutError(
                f"tp={self.tp} with ep={self.ep}, expert_tp={self.expert_tp} needs sequence "
                f"parallelism: without it the {self.tp} ranks of a tp group hold the same tokens "
                f"and send each of them to the experts {self.tp} times. Turn sequence parallelism "
                f"on in the model, or use tp=1, or ep=1 with expert_tp={self.tp}."
            )

    def validate(self, world_size: int) -> ParallelLayout:
        """This layout with every size known, if `world_size` ranks can take it.

        LayoutError has the arithmetic that does not work out.
        """
        if not isinstance(world_size, int) or world_size < 1:
            raise LayoutError(f"world size {world_size!r} is not a positive integer.")
        layout = self._infer(world_size)
        # Without an open axis nothing was inferred, and the product may be any number.
        sizes = {name: getattr(layout, name) for name in DENSE_AXES}
        product = math.prod(sizes.values())
        if product != world_size:
            raise LayoutError(
                f"world {world_size} = {_product(sizes)}: the axes take {product} ranks, not "
                f"{world_size}. {_suggestion(sizes, world_size)}"
            )
        layout._check_experts()
        return layout

    @property
    def world_size(self) -> int:
        """Ranks this layout takes. LayoutError while an axis is -1."""
        return math.prod(self.dense_shape)

    @property
    def expert_dp(self) -> int:
        """Copies of each expert inside one `dp_replicate` copy of the model."""
        self._must_be_known()
        return self.dp_shard * self.cp * self.tp // (self.ep * self.expert_tp)

    @property
    def dense_shape(self) -> tuple[int, ...]:
        """Sizes of DENSE_AXES, outermost first."""
        self._must_be_known()
        return tuple(getattr(self, name) for name in DENSE_AXES)

    @property
    def expert_shape(self) -> tuple[int, ...]:
        """Sizes of EXPERT_AXES, outermost first."""
        return tuple(getattr(self, name) for name in EXPERT_AXES)

    def coordinate_of(self, rank: int) -> dict[str, int]:
        """Where `rank` stands along each dense and each expert axis.

        LayoutError: no such rank, or an axis is still -1.
        """
        if not 0 <= rank < self.world_size:
            raise LayoutError(
                f"rank {rank} is outside this layout's ranks 0..{self.world_size - 1}."
            )
        place = dict.fromkeys([*DENSE_AXES, *EXPERT_AXES], 0)
        for axes in (DENSE_AXES, EXPERT_AXES):
            rest = rank
            # The innermost axis counts fastest, as neighbours in rank order share it.
            for name in reversed(axes):
                rest, place[name] = divmod(rest, getattr(self, name))
        return place

    def ranks_through(self, rank: int, axes: Collection[str]) -> tuple[int, ...]:
        """The ranks that share all of `rank`'s places except along `axes`, ascending.

        `axes` are names from DENSE_AXES, or from EXPERT_AXES. LayoutError: no such rank, or no mesh
        has all of these axes.
        """
        # Dense and expert axes cut the same ranks in two ways: a place in one says nothing of the
        # other.
        names = next((n for n in (DENSE_AXES, EXPERT_AXES) if set(axes) <= set(n)), None)
        if names is None:
            raise LayoutError(
                f"no mesh has all of the axes {', '.join(axes)}: name axes of one of "
                f"({', '.join(DENSE_AXES)}) and ({', '.join(EXPERT_AXES)})."
            )
        own = self.coordinate_of(rank)
        # Axis by axis, from the outermost: each rank so far becomes those at all wanted places.
        ranks = [0]
        for name in names:
            size = getattr(self, name)
            places = range(size) if name in axes else (own[name],)
            ranks = [outer * size + place for outer in ranks for place in places]
        return tuple(ranks)

    def rank_of(self, coordinate: Mapping[str, int]) -> int:
        """The rank at `coordinate`, which names either all dense or all expert axes.

        More names than needed are checked against each other, so the result of `coordinate_of`
        can be given back whole.

        LayoutError: axes are missing, a coordinate is outside its axis, or two contradict each
        other.
        """
        self._must_be_known()
        ranks = set()
        for axes in (DENSE_AXES, EXPERT_AXES):
            if not all(name in coordinate for name in axes):
                continue
            # Horner's rule: the innermost axis counts fastest.
            rank = 0
            for name in axes:
                place, size = coordinate[name], getattr(self, name)
                if not 0 <= place < size:
                    raise LayoutError(f"{name}={place} is outside its axis: 0..{size - 1}.")
                rank = rank * size + place
            ranks.add(rank)
        if len(ranks) == 1:
            return ranks.pop()
        given = ", ".join(f"{name}={place}" for name, place in coordinate.items())
        if ranks:
            raise LayoutError(
                f"({given}) names ranks {sorted(ranks)}: its dense and its expert part disagree."
            )
        raise LayoutError(
            f"({given}) names no rank: give all of {', '.join(DENSE_AXES)}, "
            f"or all of {', '.join(EXPERT_AXES)}."
        )

    def _infer(self, world_size: int) -> ParallelLayout:
        open_axis = next((name for name in DENSE_AXES if getattr(self, name) == -1), None)
        if open_axis is None:
            return self
        known = {n: getattr(self, n) for n in DENSE_AXES if n != open_axis and getattr(self, n) > 1}
        taken = math.prod(known.values())
        if world_size % taken:
            # Somebody has so many machines: the worlds around that number are what they can start.
            smaller = world_size // taken * taken
            nearest = f"{smaller} or {smaller + taken}" if smaller else f"{taken}"
            raise LayoutError(
                f"world {world_size} = {open_axis} ? x {_product(known)}: {world_size} is not "
                f"divisible by {taken}; the nearest worlds that are: {nearest}. Start that many "
                f"ranks or change {' or '.join(known)}."
            )
        return replace(self, **{open_axis: world_size // taken})

    def _check_experts(self) -> None:
        # Experts move between ranks that hold one copy of the model, in one stage.
        inner = {"dp_shard": self.dp_shard, "cp": self.cp, "tp": self.tp}
        ranks, wanted = math.prod(inner.values()), self.ep * self.expert_tp
        if ranks % wanted:
            raise LayoutError(
                f"{_product(inner)} = {ranks} ranks = expert_dp ? x ep {self.ep} x expert_tp "
                f"{self.expert_tp}: {ranks} is not divisible by {wanted}. Expert axes take their "
                f"ranks from dp_shard x cp x tp (dp_replicate and pp lie outside): make "
                f"ep x expert_tp a divisor of {ranks}."
            )

    def _must_be_known(self) -> None:
        for name in DENSE_AXES:
            if getattr(self, name) == -1:
                raise LayoutError(
                    f"{name}=-1 is not known yet: call layout.validate(world_size) and use the "
                    "layout it returns."
                )


class ParallelMesh:
    """A layout over the ranks of the running job. Build it with `ParallelLayout.build`.

    Args:
        layout: an axis may still be -1.
        device_type: "cpu" or "cuda"; by default "cuda" if the job runs NCCL, and there is a GPU,
            else "cpu".

    The groups of the five dense axes are made here, so building is collective over all ranks;
    every other group (expert axes, axes taken as one, siblings, the embedding group) is made when
    first asked for, by its members. Axes with the same ranks share one group, named after
    the first of them in the order pp, dp_replicate, dp_shard, cp, tp, and equal meshes share all.

    Examples:
        >>> mesh = ParallelLayout().build("cpu")
        >>> mesh.axis("dp").size
        1
    """

    def __init__(self, layout: ParallelLayout, device_type: str | None = None) -> None:
        current_world()  # says what to call if nothing has been started
        self.layout = layout.validate(dist.get_world_size())
        self.device_type = device_type if device_type is not None else _default_device_type()
        self.rank = dist.get_rank()
        _require_same(self.layout, self.rank)
        self._coordinate = self.layout.coordinate_of(self.rank)
        self._axes: dict[tuple[str, ...], MeshAxis] = {}
        self._submeshes: dict[str, DeviceMesh] = {}
        self.mesh = self._device_mesh(DENSE_AXES, self.layout.dense_shape)
        if (watchdog := running_watchdog()) is not None:
            sizes = zip(DENSE_AXES, self.layout.dense_shape, strict=True)
            wide = [name for name, size in sizes if size > 1]
            watchdog.locate(", ".join(f"{name}={self._coordinate[name]}" for name in wide))

    @cached_property
    def expert_mesh(self) -> DeviceMesh:
        """DeviceMesh with dims pp, dp_replicate, expert_dp, ep, expert_tp over the same ranks.

        The first access makes its groups: collective over the ranks of a pipeline stage.
        """
        return self._device_mesh(EXPERT_AXES, self.layout.expert_shape)

    @property
    def coordinate(self) -> Mapping[str, int]:
        """This rank's place along every dense and expert axis."""
        return dict(self._coordinate)

    def axis(self, name: str | Sequence[str]) -> MeshAxis:
        """The axis `name`, or several axes, outer first, taken as one.

        Args:
            name: pp, dp_replicate, dp_shard, cp, tp; ep, expert_tp, expert_dp; dp, dp_cp,
                dp_shard_cp; or a sequence of them, all dense or all expert.

        Raises:
            AxisError: no such axis, or they can't be taken as one.
        """
        # Derived names are taken apart first, so that "dp" and its two axes are one entry.
        dims = self._dims_of((name,) if isinstance(name, str) else tuple(name))
        if dims not in self._axes:
            # A group is made by its members alone. Of an axis of one rank there is nothing to make.
            ranks = self.layout.ranks_through(self.rank, dims)
            group = group_of(self._group_name(dims, ranks), ranks) if len(ranks) > 1 else None
            if group is not None:
                make_host_groups(group)
            place = ranks.index(self.rank)
            self._axes[dims] = MeshAxis(
                _axis_name(dims), len(ranks), place, ranks, group_ref(group)
            )
        return self._axes[dims]

    def group(self, name: str | Sequence[str]) -> dist.ProcessGroup | None:
        """The process group of `axis(name)`: None for an axis of one rank."""
        return self.axis(name).group

    def __getitem__(self, name: str | tuple[str, ...]) -> DeviceMesh:
        """A torch DeviceMesh of one axis (derived ones too) or of several, in order.

        Raises:
            AxisError: no such axis, or a mix of dense and expert axes.
        """
        if isinstance(name, tuple):
            axes = self._axes_of(name)
            check_axis_names(name, axes, str(self))
            return (self.mesh if axes == DENSE_AXES else self.expert_mesh)[name]
        if name not in self._submeshes:
            self._submeshes[name] = self._submesh(name)
        return self._submeshes[name]

    @property
    def embedding_axis(self) -> MeshAxis | None:
        """First and last pipeline stage at this rank's other coordinates; None on other stages.

        The parameters tied between those stages (input and output embedding) are summed over it.
        """
        stages = self.layout.pp
        if self._coordinate["pp"] not in (0, stages - 1):
            return None
        # Of one stage, both ends are the same rank, and there is nobody to sum with.
        ends = sorted({0, stages - 1})
        ranks = tuple(self.layout.rank_of({**self._coordinate, "pp": stage}) for stage in ends)
        group = group_of("embedding", ranks) if len(ranks) > 1 else None
        return MeshAxis("embedding", len(ranks), ranks.index(self.rank), ranks, group_ref(group))

    @property
    def embedding_group(self) -> dist.ProcessGroup | None:
        """Process group of `embedding_axis`; None where there is nobody to exchange with."""
        axis = self.embedding_axis
        return axis.group if axis is not None else None

    def describe(self, max_ranks: int = 32) -> str:
        """A table of the axes, and one of who is where: `max_ranks` ranks at most and this one."""
        world, per_host = self.layout.world_size, ranks_per_host()
        hosts = f", {per_host} per host" if per_host < world else ""
        ranks = f"{world} rank{'s'[: world > 1]} on {self.device_type}{hosts}"
        return "\n".join(
            [
                f"{ranks}, this is rank {self.rank}",
                "",
                *_axis_table(self),
                "",
                *_rank_table(self.layout, self.rank, max_ranks),
            ]
        )

    def __repr__(self) -> str:
        sizes = zip(DENSE_AXES, self.layout.dense_shape, strict=True)
        return f"ParallelMesh({', '.join(f'{name}={size}' for name, size in sizes)})"

    def __deepcopy__(self, memo: dict[int, Any]) -> ParallelMesh:
        return self  # a copied module runs on the same ranks

    def __reduce__(self) -> tuple[Any, ...]:
        raise TypeError(
            "a ParallelMesh holds process groups of running ranks and can't be pickled: save "
            "mesh.layout and build it again."
        )

    def _dims_of(self, names: tuple[str, ...]) -> tuple[str, ...]:
        """The mesh axes that `names` mean: derived names are taken apart."""
        dims = tuple(dim for name in names for dim in DERIVED_AXES.get(name, (name,)))
        check_axis_names(dims, self._axes_of(dims), str(self))
        return dims

    def _axes_of(self, names: tuple[str, ...]) -> tuple[str, ...]:
        """Which of the two meshes has all of `names`."""
        for axes in (DENSE_AXES, EXPERT_AXES):
            if all(name in axes for name in names):
                return axes
        # No mesh has all of them: either a name is unknown, or they are of both meshes.
        known = dict.fromkeys([*DENSE_AXES, *EXPERT_AXES, *DERIVED_AXES])
        unknown = [name for name in names if name not in known]
        if unknown:
            raise AxisError(f"no axis '{unknown[0]}' on {self}; it has: {', '.join(known)}.")
        raise AxisError(
            f"axes {names} mix dense axes ({', '.join(DENSE_AXES)}) and expert axes "
            f"({', '.join(EXPERT_AXES)}): they cut the same ranks in two ways and can't be joined."
        )

    def _group_name(self, dims: tuple[str, ...], members: tuple[int, ...]) -> str:
        # Axes with the same ranks share a group. Its name follows from the layout alone and never
        # from what this rank asked for before, or members would look for each other under
        # different names. Dense axes come first, as every model has them.
        dense, expert = ([(name,) for name in names] for names in (DENSE_AXES, EXPERT_AXES[2:]))
        for known in (*dense, *DERIVED_AXES.values(), *expert):
            if self.layout.ranks_through(self.rank, known) == members:
                return _axis_name(known)
        sizes = {name: len(self.layout.ranks_through(self.rank, (name,))) for name in dims}
        return _axis_name(tuple(name for name in dims if sizes[name] > 1))

    def _device_mesh(self, axes: tuple[str, ...], shape: tuple[int, ...]) -> DeviceMesh:
        # DeviceMesh's own constructor makes the groups of all ranks, one new_group after another:
        # from_group takes ours, which cost a rank one call per axis.
        groups = [self._group_or_self(name) for name in axes]
        ranks = torch.arange(self.layout.world_size, dtype=torch.int, device="cpu").view(shape)
        mesh = DeviceMesh.from_group(groups, self.device_type, ranks, mesh_dim_names=axes)
        watch_mesh(mesh)
        return mesh

    def _group_or_self(self, name: str) -> dist.ProcessGroup:
        # torch wants a group even for an axis of one rank: one for all such axes.
        group = self.axis(name).group
        return group if group is not None else group_of("self", (self.rank,))

    def _submesh(self, name: str) -> DeviceMesh:
        if name in DENSE_AXES:
            return self.mesh[name]
        if name in EXPERT_AXES:
            return self.expert_mesh[name]
        group = self._group_or_self(name)
        mesh = DeviceMesh.from_group(group, self.device_type, mesh_dim_names=(name,))
        watch_mesh(mesh)
        return mesh


def _require_same(layout: ParallelLayout, rank: int) -> None:
    """Compare a layout with that of the first rank that came, over the store and without waiting.

    Ranks of meshes that differ would wait for each other in groups that others never make. The
    store of a job that `init_distributed` has not started may hold what an earlier job has left.
    """
    world = current_world()
    if world.timeout is None or layout.world_size == 1 or "fake" in str(dist.get_backend()):
        return
    # Meshes are made in one order on all ranks, so their number tells which one is meant.
    world.meshes += 1
    mine = f"{layout} on rank {rank}"
    key = f"lamina:mesh:{world.meshes}"
    first = default_store().compare_set(key, "", mine).decode()
    if first.rpartition(" on rank ")[0] != str(layout):
        raise LayoutError(
            f"ranks do not agree: mesh number {world.meshes} of this job is {mine}, and {first}. "
            "All ranks must build the same meshes, in the same order"
        )


def _axis_name(dims: tuple[str, ...]) -> str:
    return next((name for name, p in DERIVED_AXES.items() if p == dims), "_".join(dims))


def _default_device_type() -> str:
    # gloo and fake carry CUDA tensors too, so only NCCL says that the job is meant for GPUs; torch
    # names it for CUDA where there is none, too.
    asked = "nccl" in str(dist.get_backend_config())
    return "cuda" if asked and torch.cuda.is_available() else "cpu"


def _axis_table(mesh: ParallelMesh) -> list[str]:
    rows: list[Sequence[str]] = [("axis", "size", "step", "place of this rank")]
    for axes, shape in (
        (DENSE_AXES, mesh.layout.dense_shape),
        (EXPERT_AXES[2:], mesh.layout.expert_shape[2:]),
    ):
        # An axis' step is how far apart its neighbours are in rank order.
        step = mesh.layout.world_size
        if axes != DENSE_AXES:
            step //= mesh.layout.pp * mesh.layout.dp_replicate
        for name, size in zip(axes, shape, strict=True):
            step //= size
            rows.append((name, str(size), str(step), str(mesh.coordinate[name])))
    return aligned(rows)


def _rank_table(layout: ParallelLayout, own_rank: int, max_ranks: int) -> list[str]:
    names = [*DENSE_AXES, *EXPERT_AXES[2:]]
    world = layout.world_size
    shown = sorted({*range(min(world, max(max_ranks, 0))), own_rank})
    rows: list[Sequence[str]] = [("rank", *names)]
    for rank in shown:
        place = layout.coordinate_of(rank)
        mark = "*" if rank == own_rank else ""
        rows.append((f"{rank}{mark}", *(str(place[name]) for name in names)))
    lines = aligned(rows)
    if len(shown) < world:
        lines.append(f"... and {world - len(shown)} more ranks")
    return lines


def aligned(rows: Sequence[Sequence[str]], left: int = 0) -> list[str]:
    """The lines of a table: columns to the right, but for the first `left` ones."""
    widths = enumerate(max(map(len, column)) for column in zip(*rows, strict=True))
    line = "  ".join(f"{{:{'<' if at < left else '>'}{width}}}" for at, width in widths)
    return [line.format(*row).rstrip() for row in rows]


def _check_size(name: str, size: object) -> None:
    may_be_open = name in DENSE_AXES
    if isinstance(size, bool) or not isinstance(size, int) or not (size >= 1 or size == -1):
        remedy = "a positive integer, or -1 to infer it" if may_be_open else "a positive integer"
        raise LayoutError(f"{name}={size!r}: an axis size is {remedy}.")
    if size == -1 and not may_be_open:
        raise LayoutError(
            f"{name}=-1: expert axes are not inferred (expert_dp is: dp_shard x cp x tp / "
            f"(ep x expert_tp)). Give {name} a size."
        )


def _product(sizes: Mapping[str, int]) -> str:
    return " x ".join(f"{name} {size}" for name, size in sizes.items())


def _suggestion(sizes: Mapping[str, int], world_size: int) -> str:
    others = math.prod(size for name, size in sizes.items() if name != "dp_shard")
    if world_size % others == 0:
        return f"dp_shard={world_size // others} (or -1) would fit."
    return f"Without dp_shard they take {others}, which does not divide {world_size}."
