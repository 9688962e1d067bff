"""Layouts are arithmetic: every property holds for any sizes, and what can't be is refused."""

from __future__ import annotations

import math
import re
from pathlib import Path

import numpy as np
import pytest
from hypothesis import assume, given, settings
from hypothesis import strategies as st

from lamina.mesh import LayoutError, ParallelLayout
from lamina.mesh.engine import DENSE_AXES, DERIVED_AXES, EXPERT_AXES

LAYOUT = r"`ParallelLayout\(([^)]*)\)` on 16 ranks"
SIZE = st.sampled_from([1, 1, 2, 3, 4])

# Machines that run tests are shared: a slow example is no failure.
unhurried = settings(deadline=None)


@st.composite
def layouts(draw: st.DrawFn) -> ParallelLayout:
    """Any layout that some world can take, all sizes known."""
    dense = {name: draw(SIZE) for name in DENSE_AXES}
    assume(math.prod(dense.values()) <= 96)
    inner = dense["dp_shard"] * dense["cp"] * dense["tp"]
    ep = draw(st.sampled_from(divisors(inner)))
    expert_tp = draw(st.sampled_from(divisors(inner // ep)))
    return ParallelLayout(**dense, ep=ep, expert_tp=expert_tp)


def divisors(number: int) -> list[int]:
    return [divisor for divisor in range(1, number + 1) if number % divisor == 0]


def ranks_array(layout: ParallelLayout, axes: tuple[str, ...]) -> np.ndarray:
    """The oracle: ranks in C order, as numpy lays them out."""
    shape = [layout.expert_dp if name == "expert_dp" else getattr(layout, name) for name in axes]
    return np.arange(math.prod(shape)).reshape(shape)


@unhurried
@given(layouts())
def test_every_rank_is_in_exactly_one_group_per_axis(layout: ParallelLayout) -> None:
    for axes in (*((name,) for name in (*DENSE_AXES, *EXPERT_AXES)), *DERIVED_AXES.values()):
        groups = {layout.ranks_through(rank, axes) for rank in range(layout.world_size)}
        members = sorted(rank for group in groups for rank in group)
        assert members == list(range(layout.world_size))
        size = math.prod(getattr(layout, name) for name in axes)
        assert {len(group) for group in groups} == {size}


@unhurried
@given(layouts(), st.data())
def test_the_ranks_along_axes_are_numpys_slice_through_the_rank(
    layout: ParallelLayout, data: st.DataObject
) -> None:
    rank = data.draw(st.integers(0, layout.world_size - 1))
    mesh = data.draw(st.sampled_from([DENSE_AXES, EXPERT_AXES]))
    axes = data.draw(st.sets(st.sampled_from(mesh), min_size=1))
    array = ranks_array(layout, mesh)
    place = np.unravel_index(rank, array.shape)
    through = tuple(
        slice(None) if name in axes else index for name, index in zip(mesh, place, strict=True)
    )
    assert list(layout.ranks_through(rank, axes)) == array[through].ravel().tolist()


@unhurried
@given(layouts())
def test_the_expert_mesh_tiles_the_ranks_of_dp_shard_cp_tp(layout: ParallelLayout) -> None:
    inner = ("dp_shard", "cp", "tp")
    for rank in range(layout.world_size):
        dense = layout.ranks_through(rank, inner)
        assert layout.ranks_through(rank, ("expert_dp", "ep", "expert_tp")) == dense
    assert layout.ep * layout.expert_tp * layout.expert_dp == math.prod(
        getattr(layout, name) for name in inner
    )


@unhurried
@given(layouts())
def test_coordinates_round_trip(layout: ParallelLayout) -> None:
    dense, expert = ranks_array(layout, DENSE_AXES), ranks_array(layout, EXPERT_AXES)
    for rank in range(layout.world_size):
        place = layout.coordinate_of(rank)
        assert dense[tuple(place[name] for name in DENSE_AXES)] == rank
        assert expert[tuple(place[name] for name in EXPERT_AXES)] == rank
        assert layout.rank_of(place) == rank
        assert layout.rank_of({name: place[name] for name in DENSE_AXES}) == rank
        assert layout.rank_of({name: place[name] for name in EXPERT_AXES}) == rank


@unhurried
@given(layouts(), st.sampled_from(DENSE_AXES))
def test_one_size_can_be_inferred(layout: ParallelLayout, open_axis: str) -> None:
    sizes = {**vars(layout), open_axis: -1}
    assert ParallelLayout(**sizes).validate(layout.world_size) == layout


@unhurried
@given(layouts(), st.integers(1, 100))
def test_a_known_layout_takes_its_own_world_and_no_other(
    layout: ParallelLayout, world_size: int
) -> None:
    if world_size == layout.world_size:
        assert layout.validate(world_size) == layout
        return
    with pytest.raises(LayoutError, match=f"world {world_size} = .* take {layout.world_size}"):
        layout.validate(world_size)


def test_neighbouring_ranks_share_a_tp_group_and_pipeline_stages_lie_far_apart() -> None:
    layout = ParallelLayout(pp=2, dp_shard=2, tp=4)
    assert layout.ranks_through(5, ("tp",)) == (4, 5, 6, 7)
    assert layout.ranks_through(5, ("pp",)) == (5, 13)


@pytest.mark.parametrize(
    ("sizes", "world", "arithmetic"),
    [
        (
            {"tp": 8},
            12,
            r"world 12 = dp_shard \? x tp 8: 12 is not divisible by 8; .* 8 or 16",
        ),
        ({"tp": 8}, 4, r"world 4 = dp_shard \? x tp 8: 4 is not divisible by 8; .*: 8\."),
        ({"tp": 2, "pp": 3}, 8, r"world 8 = dp_shard \? x tp 2 x pp 3|dp_shard \? x pp 3 x tp 2"),
        ({"dp_shard": 4, "tp": 2}, 16, r"the axes take 8 ranks, not 16\. dp_shard=8 .*would fit"),
        ({"dp_shard": 4, "tp": 3}, 16, r"Without dp_shard they take 3, which does not divide 16"),
        ({"ep": 3}, 8, r"dp_shard 8 .*= 8 ranks = expert_dp \? x ep 3 .* not divisible by 3"),
        ({"pp": 4, "ep": 4}, 8, r"dp_shard 2 x cp 1 x tp 1 = 2 ranks = expert_dp \? x ep 4"),
        ({"ep": 2, "expert_tp": 4}, 4, r"4 is not divisible by 8"),
    ],
)
def test_impossible_layouts_are_refused_with_the_arithmetic(
    sizes: dict[str, int], world: int, arithmetic: str
) -> None:
    with pytest.raises(LayoutError, match=arithmetic):
        ParallelLayout(**sizes).validate(world)


@pytest.mark.parametrize(
    ("sizes", "message"),
    [
        ({"tp": 0}, r"tp=0: an axis size is a positive integer, or -1"),
        ({"tp": -2}, r"tp=-2"),
        ({"cp": 2.0}, r"cp=2\.0"),
        ({"cp": True}, r"cp=True"),
        ({"ep": -1}, r"ep=-1: expert axes are not inferred"),
        ({"ep": 0}, r"ep=0: an axis size is a positive integer\."),
        ({"tp": -1}, r"dp_shard=-1 and tp=-1: only one axis"),
    ],
)
def test_sizes_that_are_none_are_refused_at_once(sizes: dict[str, int], message: str) -> None:
    with pytest.raises(LayoutError, match=message):
        ParallelLayout(**sizes)


@pytest.mark.parametrize("world", [0, -4, 2.0, "8"])
def test_a_world_size_that_is_none_is_refused(world: object) -> None:
    with pytest.raises(LayoutError, match="not a positive integer"):
        ParallelLayout().validate(world)


def test_what_depends_on_the_world_asks_for_it() -> None:
    with pytest.raises(LayoutError, match=r"dp_shard=-1 is not known yet: .*validate"):
        _ = ParallelLayout(tp=2).expert_dp


def test_ranks_and_coordinates_outside_the_layout_are_refused() -> None:
    layout = ParallelLayout(dp_shard=4, tp=2)
    with pytest.raises(LayoutError, match=r"rank 8 is outside this layout's ranks 0\.\.7"):
        layout.coordinate_of(8)
    place = layout.coordinate_of(5)
    with pytest.raises(LayoutError, match=r"tp=2 is outside its axis: 0\.\.1"):
        layout.rank_of({**place, "tp": 2})
    with pytest.raises(LayoutError, match="dense and its expert part disagree"):
        layout.rank_of({**place, "tp": 1 - place["tp"]})
    with pytest.raises(LayoutError, match="names no rank: give all of pp, dp_replicate"):
        layout.rank_of({"tp": 1})
    with pytest.raises(LayoutError, match="no mesh has all of the axes tp, ep"):
        layout.ranks_through(0, ("tp", "ep"))


@pytest.mark.parametrize(
    ("sizes", "needed"),
    [
        ({"tp": 1, "ep": 4}, False),
        ({"tp": 4, "ep": 1, "expert_tp": 4}, False),
        ({"tp": 4, "ep": 2}, True),
        ({"tp": 4, "ep": 2, "expert_tp": 4}, True),
        ({"tp": 4, "ep": 1}, True),
    ],
)
def test_experts_beside_tp_need_sequence_parallelism(sizes: dict[str, int], needed: bool) -> None:
    layout = ParallelLayout(dp_shard=4, **sizes)
    assert layout.needs_sequence_parallel is needed
    layout.require_sequence_parallel(True)
    if needed:
        with pytest.raises(LayoutError, match=r"tp=4 .* needs sequence parallelism.*same tokens"):
            layout.require_sequence_parallel(False)
    else:
        layout.require_sequence_parallel(False)


def test_the_picture_in_the_docs_is_true() -> None:
    page = (Path(__file__).parents[3] / "docs" / "mesh.md").read_text()
    layout = ParallelLayout(**eval(f"dict({re.search(LAYOUT, page)[1]})")).validate(16)
    picture = page.split("as dense ranks")[1].split("```")[0]
    stages = re.split(r"pp=(\d)", picture)[1:]
    for stage, drawn in zip(stages[::2], stages[1::2], strict=True):
        for row in re.findall(r"dp_shard=(\d) +(\d+) +(\d+)", drawn):
            dp_shard, *ranks = map(int, row)
            for tp, rank in enumerate(ranks):
                found = layout.coordinate_of(rank)
                assert (found["pp"], found["dp_shard"], found["tp"]) == (int(stage), dp_shard, tp)
        for row in re.findall(r"expert_dp=(\d) +(\d+) +(\d+) +(\d+) +(\d+)", drawn):
            expert_dp, *ranks = map(int, row)
            for ep, rank in enumerate(ranks):
                found = layout.coordinate_of(rank)
                assert (found["expert_dp"], found["ep"]) == (expert_dp, ep)
    groups = re.findall(r"(\w+) group \(([\d, ]+)\)", picture)
    assert len(groups) == 5
    for name, members in groups:
        axes = DERIVED_AXES.get(name, (name,))
        assert layout.ranks_through(5, axes) == tuple(map(int, members.split(",")))
