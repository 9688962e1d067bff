"""Layouts keep their promises whatever the tensors, and cost what the page says they cost."""

from __future__ import annotations

import math
import pickle

import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from lamina.buffers import BufferLayout, Granularity, TensorSpec, padding_report
from lamina.buffers.engine import split_by_row
from lamina_testing.work import executed_by

SHAPES = st.one_of(
    st.just(()),
    st.tuples(st.integers(0, 300)),
    st.tuples(st.integers(0, 60), st.integers(0, 40)),
    st.tuples(st.integers(1, 5), st.integers(1, 12), st.integers(1, 9)),
)
GRANULARITIES = st.one_of(
    st.just(Granularity.element()),
    st.just(Granularity.row()),
    st.builds(Granularity.block, st.integers(1, 7)),
    st.just(Granularity.tensor()),
)


@st.composite
def plans(draw, granularities=GRANULARITIES):
    shapes = draw(st.lists(st.tuples(SHAPES, granularities), max_size=12))
    specs = [TensorSpec(f"t{at}", shape, kind) for at, (shape, kind) in enumerate(shapes)]
    shards = draw(st.integers(1, 9))
    alignment = draw(st.sampled_from([1, 2, 4, 6, 16]))
    multiple = draw(st.sampled_from([1, 1, 5, 32]))
    return specs, shards, alignment, multiple


def owners(layout: BufferLayout) -> list[tuple[str, int] | None]:
    """Oracle: every element of the buffer, one by one, to the tensor element it holds."""
    cells: list[tuple[str, int] | None] = [None] * layout.size
    for spec, offset in zip(layout.specs, layout.offsets, strict=True):
        for element in range(math.prod(spec.shape)):
            assert cells[offset + element] is None, "two tensors overlap"
            cells[offset + element] = (spec.name, element)
    return cells


def stays_together(spec: TensorSpec, left: int, right: int) -> bool:
    """Oracle for granularity: whether two elements of a tensor may not be parted."""
    kind, shape = spec.granularity.kind, spec.shape
    if kind == "element":
        return False
    if kind == "tensor":
        return True
    width = shape[-1] if len(shape) > 1 else 1
    rows = spec.granularity.rows if kind == "block" else 1
    return left // width // rows == right // width // rows


@settings(max_examples=120, deadline=None)
@given(plans())
def test_a_layout_covers_all_overlaps_nothing_and_cuts_no_granule(plan):
    specs, shards, alignment, multiple = plan
    layout = BufferLayout.plan(specs, shards, alignment, multiple)
    cells = owners(layout)
    size = layout.shard_size
    assert layout.size == shards * size == len(cells)
    assert size % alignment == 0
    assert size % multiple == 0
    assert all(offset % alignment == 0 for offset in layout.offsets)
    by_name = {spec.name: spec for spec in specs}
    for boundary in range(size, layout.size, size) if size else ():
        left, right = cells[boundary - 1], cells[boundary]
        if left and right and left[0] == right[0]:
            assert not stays_together(by_name[left[0]], left[1], right[1])


@settings(max_examples=60, deadline=None)
@given(plans())
def test_spans_gaps_and_overlaps_say_what_the_cells_say(plan):
    specs, shards, alignment, multiple = plan
    layout = BufferLayout.plan(specs, shards, alignment, multiple)
    cells = owners(layout)
    for spec in specs:
        found = []
        for span in layout.spans(spec.name):
            at = span.shard * layout.shard_size + span.offset
            assert cells[at : at + span.stop - span.start] == [
                (spec.name, element) for element in range(span.start, span.stop)
            ]
            assert layout.span(spec.name, span.shard) == span
            found.extend(range(span.start, span.stop))
        assert found == list(range(spec.numel))
    gaps = [at for start, stop in layout.padding_ranges() for at in range(start, stop)]
    assert gaps == [at for at, cell in enumerate(cells) if cell is None]
    assert len(gaps) == layout.padding
    for start, stop in ((0, layout.size), (layout.size // 3, layout.size // 2)):
        within = [(spec.name, layout.within(spec.name, start, stop)) for spec in specs]
        listed = {(name, element) for name, run in within for element in range(*run)}
        assert listed == {cell for cell in cells[start:stop] if cell is not None}


@settings(max_examples=60, deadline=None)
@given(plans())
def test_planning_is_deterministic(plan):
    specs, shards, alignment, multiple = plan
    one = BufferLayout.plan(specs, shards, alignment, multiple)
    two = BufferLayout.plan(pickle.loads(pickle.dumps(specs)), shards, alignment, multiple)
    assert one == two
    assert hash(one) == hash(two)


@settings(max_examples=60, deadline=None)
@given(plans(st.just(Granularity.element())))
def test_elementwise_tensors_keep_their_order(plan):
    layout = BufferLayout.plan(*plan)
    assert not layout.reordered
    assert list(layout.offsets) == sorted(layout.offsets)


@settings(max_examples=80, deadline=None)
@given(plans())
def test_no_plan_is_below_the_lower_bound(plan):
    specs, shards, alignment, _ = plan
    report = padding_report(BufferLayout.plan(specs, shards, alignment))
    assert report.size >= report.least_size >= report.numel
    assert report.distance >= 0


@settings(max_examples=40, deadline=None)
@given(
    st.lists(
        st.tuples(
            st.tuples(st.integers(1, 6), st.integers(1, 4)),
            st.sampled_from([Granularity.element(), Granularity.row(), Granularity.tensor()]),
        ),
        min_size=1,
        max_size=4,
    ),
    st.integers(2, 3),
)
def test_no_smaller_shard_size_fits_in_the_order_given(shapes, shards):
    """Oracle: try every smaller shard size with every start of every tensor, by brute force."""
    specs = [TensorSpec(f"t{at}", shape, kind) for at, (shape, kind) in enumerate(shapes)]
    layout = BufferLayout.plan(specs, shards, alignment=1)
    order = list(range(len(specs)))

    def fits(size: int, rest: list[int], cursor: int) -> bool:
        if not rest:
            return True
        spec = specs[rest[0]]
        for start in range(cursor, shards * size - spec.numel + 1):
            cuts = [
                b - start for b in range(size, shards * size, size) if 0 < b - start < spec.numel
            ]
            if any(stays_together(spec, cut - 1, cut) for cut in cuts):
                continue
            return fits(size, rest[1:], start + spec.numel)  # the first start leaves most room
        return False

    assert layout.reordered or fits(layout.shard_size, order, 0)
    for size in range(-(-layout.numel // shards), layout.shard_size):
        assert not fits(size, order, 0), f"shards of {size} would do, planned {layout.shard_size}"


def test_planning_a_layout_executes_about_a_thousand_lines_a_tensor():
    """So 2,000 tensors at 1,024 shards take 0.1 to 0.3 s; a limit in seconds would be noise."""
    mixes = {
        "element": [Granularity.element()],
        "row": [Granularity.row()],
        "tensor": [Granularity.tensor()],
        "mixed": [Granularity.element(), Granularity.row(), Granularity.tensor()],
    }
    for label, kinds in mixes.items():
        specs = [
            TensorSpec(f"t{at}", (512 + at % 7, 256 + 64 * (at % 5)), kinds[at % len(kinds)])
            for at in range(1000)
        ]
        executed = executed_by(lambda specs=specs: BufferLayout.plan(specs, 512))
        assert len(specs) < executed.lines < 1100 * len(specs), label


def test_long_row_tensors_force_the_shard_to_a_multiple_of_their_row():
    specs = [TensorSpec("w", (1000, 96), Granularity.row())]
    layout = BufferLayout.plan(specs, 8, alignment=64)
    assert layout.shard_size % math.lcm(96, 64) == 0
    # w has 96,000 elements: 12,000 a shard, and 12,096 is the next multiple of 192.
    assert layout.shard_size == 12_096


def test_one_buffer_per_row_size_pads_less_than_all_rows_together():
    specs = [
        TensorSpec("a", (4096, 2880), Granularity.row()),
        TensorSpec("b", (2880, 4096), Granularity.row()),
        TensorSpec("norm", (2880,)),
    ]
    report = padding_report(BufferLayout.plan(specs, 256))
    assert report.split_buffers == 2
    assert report.split_fraction < report.fraction
    assert [len(group) for group in split_by_row(specs)] == [2, 1]
    whole = [TensorSpec(f"t{at}", (at, 8), Granularity.tensor()) for at in (3, 4)]
    assert len(split_by_row(whole)) == 1


def test_whole_tensors_are_packed_in_another_order_and_the_layout_says_so():
    specs = [TensorSpec(f"t{at}", (at + 1, 64), Granularity.tensor()) for at in range(8)]
    layout = BufferLayout.plan(specs, 4, alignment=64)
    assert layout.reordered
    assert layout.padding_fraction == 0  # 1 + 8, 2 + 7, 3 + 6, 4 + 5
    assert all(len(layout.spans(spec.name)) == 1 for spec in specs)


def test_experts_are_rows_of_their_last_dimension():
    assert Granularity.row().elements((8, 32, 16)) == 16
    assert Granularity.block(4).elements((8, 32, 16)) == 64
    assert Granularity.row().elements((5,)) == 1
    assert Granularity.row().elements(()) == 1
    assert Granularity.tensor().elements((3, 0)) == 1


def test_shards_can_be_multiples_of_two_to_the_sixteenth():
    layout = BufferLayout.plan([TensorSpec("w", (3000, 4096))], 8, shard_multiple=2**16)
    assert layout.shard_size % 2**16 == 0
    assert layout.padding < 8 * 2**16


def test_an_empty_layout_has_no_elements():
    for specs in ([], [TensorSpec("e", (0, 4))]):
        layout = BufferLayout.plan(specs, 4)
        assert layout.size == 0
        assert layout.padding_fraction == 0.0
        assert layout.padding_ranges() == ()
    assert layout.spans("e") == ()
    assert layout.span("e", 3) is None


@pytest.mark.parametrize(
    ("call", "words"),
    [
        (lambda: BufferLayout.plan([], 0), "num_shards is 0"),
        (lambda: BufferLayout.plan([], 1, alignment=0), "alignment is 0"),
        (lambda: BufferLayout.plan([], 1, shard_multiple=-1), "shard_multiple is -1"),
        (
            lambda: BufferLayout.plan([TensorSpec("w", ()), TensorSpec("w", ())], 1),
            "two tensors are named 'w'.*named_parameters",
        ),
        (lambda: TensorSpec("w", (3, -1)), "negative dimension"),
        (lambda: Granularity.block(0), "block of 0 rows"),
        (lambda: Granularity("column"), "unknown"),
    ],
)
def test_impossible_arguments_are_named(call, words):
    with pytest.raises(ValueError, match=words):
        call()


@given(plans())
def test_a_position_is_as_good_as_a_name(plan):
    layout = BufferLayout.plan(*plan)
    for at, spec in enumerate(layout.specs):
        assert layout.spec(at) is spec
        assert layout.offset(at) == layout.offset(spec.name)
        assert layout.spans(at) == layout.spans(spec.name)
        assert layout.within(at, 3, 40) == layout.within(spec.name, 3, 40)


def test_unknown_names_and_shards_are_named():
    layout = BufferLayout.plan([TensorSpec("weight", (4,))], 2)
    with pytest.raises(KeyError, match=r"no tensor 'bias'.*weight"):
        layout.offset("bias")
    with pytest.raises(IndexError, match="shard 2 of 2"):
        layout.span("weight", 2)
