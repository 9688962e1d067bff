"""What the reductions compute: factors, accumulation, dtypes, norms; and what they refuse."""

from __future__ import annotations

import math

import pytest
import torch
import torch.distributed as dist

from lamina.collectives import all_reduce_fp32, reduce_scatter_fp32
from lamina.collectives.reduction import reduce as native_module

from .native import all_reduce_native, reduce_scatter_native

REDUCE_SCATTERS = [reduce_scatter_fp32, reduce_scatter_native]
ALL_REDUCES = [all_reduce_fp32, all_reduce_native]


# A factor for which rounding scale first, and scale / 3 then, gives another fp32 number.
TWICE_ROUNDED = next(
    scale
    for scale in (k / 997 for k in range(1, 997))
    if torch.tensor(torch.tensor(scale).item() / 3) != torch.tensor(scale / 3)
)


def of_rank(rank: int, numel: int, wire: torch.dtype = torch.float32) -> torch.Tensor:
    return torch.randn(numel, generator=torch.Generator().manual_seed(rank)).to(wire)


def exact(world: int, numel: int, wire: torch.dtype) -> torch.Tensor:
    return sum(of_rank(rank, numel, wire).double() for rank in range(world))


def my_piece(tensor: torch.Tensor) -> torch.Tensor:
    return tensor.chunk(dist.get_world_size())[dist.get_rank()]


def eps(wire: torch.dtype, output: torch.dtype) -> float:
    return max(
        torch.finfo(torch.float32 if wire != torch.float64 else wire).eps, torch.finfo(output).eps
    )


@pytest.mark.ranks(1, 2, 3)
@pytest.mark.parametrize("wire", [torch.float32, torch.bfloat16, torch.float16, torch.float64])
@pytest.mark.parametrize("narrow", [False, True])
def test_output_may_be_fp32_or_the_wire_dtype_and_is_rounded_once(wire, narrow):
    world = dist.get_world_size()
    output = torch.empty(500, dtype=wire if narrow else torch.float32)
    reduce_scatter_fp32(output, of_rank(dist.get_rank(), world * 500, wire), dist.group.WORLD)
    expected = my_piece(exact(world, world * 500, wire))
    tolerance = eps(wire, output.dtype)
    torch.testing.assert_close(output.double(), expected, rtol=tolerance, atol=4 * tolerance)


@pytest.mark.ranks(3)
def test_the_factor_is_applied_once_to_the_fp32_sum():
    world, rank = 3, dist.get_rank()
    whole, total = of_rank(rank, world * 64), torch.empty(64)
    reduce_scatter_fp32(total, whole, dist.group.WORLD)
    for options, factor in [
        ({"scale": 0.3}, 0.3),
        ({"op": "avg"}, 1 / 3),
        ({"op": "avg", "scale": TWICE_ROUNDED}, TWICE_ROUNDED / 3),
    ]:
        output = torch.empty(64)
        reduce_scatter_fp32(output, whole, dist.group.WORLD, **options)
        # fp32(factor), one multiplication: neither a division nor two roundings of the factor
        assert torch.equal(output, total * torch.tensor(factor, dtype=torch.float32))
        all_reduced = torch.empty(world * 64)
        all_reduce_fp32(all_reduced, whole, dist.group.WORLD, **options)
        assert torch.equal(my_piece(all_reduced), output)


@pytest.mark.ranks(1, 2)
@pytest.mark.parametrize("output_dtype", [torch.float32, torch.bfloat16])
def test_accumulation_adds_the_scaled_sum_to_the_output(output_dtype):
    world, rank = dist.get_world_size(), dist.get_rank()
    whole = of_rank(rank, world * 100, torch.bfloat16)
    total = torch.empty(100)
    reduce_scatter_fp32(total, whole, dist.group.WORLD, scale=0.3)
    before = of_rank(50 + rank, world * 100).to(output_dtype)
    output = my_piece(before).clone()
    reduce_scatter_fp32(output, whole, dist.group.WORLD, scale=0.3, accumulate=True)
    expected = (my_piece(before).float() + total).to(output_dtype)
    assert torch.equal(output, expected)
    whole_output = before.clone()
    all_reduce_fp32(whole_output, whole, dist.group.WORLD, scale=0.3, accumulate=True)
    assert torch.equal(my_piece(whole_output), expected)


@pytest.mark.ranks(2, 3)
@pytest.mark.parametrize("numel", [1, 5])  # of one element some ranks own none
def test_an_all_reduce_that_accumulates_adds_to_each_ranks_own_output(numel):
    rank, world = dist.get_rank(), dist.get_world_size()
    output = torch.full((numel,), float(rank))
    all_reduce_fp32(output, torch.ones(numel), dist.group.WORLD, accumulate=True)
    assert torch.equal(output, torch.full((numel,), float(world + rank)))


@pytest.mark.parametrize("reduce", REDUCE_SCATTERS + ALL_REDUCES)
@pytest.mark.parametrize("async_op", [False, True])
def test_a_group_of_one_does_not_double_gradients(reduce, async_op):
    gradient = of_rank(0, 64)
    output = torch.empty(64)
    reduce(output, gradient, None, op="avg", async_op=async_op).wait()
    assert torch.equal(output, gradient)
    reduce(gradient, gradient, None).wait()  # in place
    assert torch.equal(output, gradient)
    reduce(output, gradient, None, scale=0.5, accumulate=True).wait()
    assert torch.equal(output, gradient + gradient * 0.5)


@pytest.mark.ranks(2)
@pytest.mark.parametrize("op", ["sum", "avg"])
def test_a_native_average_is_the_backends_own(op, monkeypatch):
    asked = []

    def noting(function):
        def call(*args, op, **settings):
            asked.append(op)
            return function(*args, op=op, **settings)

        return call

    scatter = native_module.reduce_scatter_single
    monkeypatch.setattr(native_module, "reduce_scatter_single", noting(scatter))
    monkeypatch.setattr(native_module.dist, "all_reduce", noting(dist.all_reduce))
    rank, output, whole = dist.get_rank(), torch.empty(3), torch.empty(6)
    mine = torch.full((6,), 1.0 + rank)
    reduce_scatter_native(output, mine, dist.group.WORLD, op=op, scale=3.0)
    all_reduce_native(whole, mine, dist.group.WORLD, op=op, scale=3.0)
    expected = 9.0 if op == "sum" else 4.5
    assert set(output.tolist()) == set(whole.tolist()) == {expected}
    assert [str(one).lower() for one in asked] == [f"redoptype.{op}"] * 2


@pytest.mark.ranks(1)
def test_a_process_group_of_one_rank_is_a_group_of_one():
    gradient, output = of_rank(0, 64), torch.empty(64)
    reduce_scatter_fp32(output, gradient, dist.group.WORLD, async_op=True).wait()
    assert torch.equal(output, gradient)


@pytest.mark.ranks(3)
@pytest.mark.parametrize("numel", [1, 4096, 200_003])
@pytest.mark.parametrize("reduce", REDUCE_SCATTERS)
def test_the_squared_norm_is_that_of_the_stored_shard_in_fp64(reduce, numel):
    whole = of_rank(dist.get_rank(), 3 * numel, torch.bfloat16)
    for output in (torch.empty(numel), torch.empty(numel, dtype=torch.bfloat16)):
        handle = reduce(output, whole, dist.group.WORLD, scale=3.0, async_op=True)
        norm = handle.squared_norm  # reading waits
        expected = math.fsum(value * value for value in output.double().tolist())
        assert norm.dtype == torch.float64
        assert norm.item() == pytest.approx(expected, rel=1e-13)
        assert not handle.nonfinite


@pytest.mark.ranks(2)
def test_statistics_of_an_all_reduce_add_up_to_those_of_the_whole():
    output = torch.empty(1001)
    handle = all_reduce_fp32(output, of_rank(dist.get_rank(), 1001), dist.group.WORLD)
    norms = [torch.empty((), dtype=torch.float64) for _ in range(2)]
    dist.all_gather(norms, handle.squared_norm)
    assert sum(norms).item() == pytest.approx(output.double().square().sum().item(), rel=1e-13)


@pytest.mark.ranks(1, 2)
@pytest.mark.parametrize("reduce", REDUCE_SCATTERS + ALL_REDUCES)
def test_statistics_can_be_left_out_and_are_then_not_made_up(reduce):
    world = dist.get_world_size()
    whole = torch.ones(world * 10)
    output = torch.empty(10 if reduce in REDUCE_SCATTERS else world * 10)
    handle = reduce(output, whole, dist.group.WORLD, statistics=False)
    assert torch.equal(output, torch.full_like(output, world))
    for statistic in ("squared_norm", "nonfinite"):
        with pytest.raises(RuntimeError, match="statistics=False"):
            getattr(handle, statistic)


@pytest.mark.ranks(2)
@pytest.mark.parametrize("bad", [math.inf, -math.inf, math.nan])
@pytest.mark.parametrize("wire", [torch.float32, torch.float64])
def test_only_the_rank_whose_shard_is_not_finite_says_so(bad, wire):
    whole = torch.ones(200, dtype=wire)
    if dist.get_rank() == 0:
        whole[130] = bad
    handle = reduce_scatter_fp32(torch.empty(100, dtype=wire), whole, dist.group.WORLD)
    assert bool(handle.nonfinite) == (dist.get_rank() == 1)


def test_squares_that_overflow_fp64_are_not_a_nonfinite_gradient():
    gradient = torch.full((3,), 1e200, dtype=torch.float64)
    handle = reduce_scatter_fp32(torch.empty_like(gradient), gradient, None)
    assert handle.squared_norm == math.inf
    assert not handle.nonfinite


def test_a_sum_that_overflows_a_narrow_output_is_seen():
    output = torch.empty(4, dtype=torch.float16)
    handle = reduce_scatter_fp32(output, torch.full((4,), 6e4).half(), None, scale=2.0)
    assert handle.nonfinite


@pytest.mark.ranks(3)
@pytest.mark.parametrize("wire", [torch.float32, torch.bfloat16])
def test_the_output_may_be_the_ranks_own_piece_of_the_input(wire):
    whole = of_rank(dist.get_rank(), 300, wire)
    apart = torch.empty(100, dtype=wire)
    reduce_scatter_fp32(apart, whole.clone(), dist.group.WORLD)
    own = my_piece(whole)
    reduce_scatter_fp32(own, whole, dist.group.WORLD)
    assert torch.equal(own, apart)
    both = of_rank(dist.get_rank(), 301, wire)
    separate = torch.empty_like(both)
    all_reduce_fp32(separate, both.clone(), dist.group.WORLD)
    all_reduce_fp32(both, both, dist.group.WORLD)
    assert torch.equal(both, separate)


@pytest.mark.ranks(2)
@pytest.mark.parametrize("numel", [10, 1 << 19])
def test_the_callers_scratch_may_be_used(numel, ranks):
    whole = of_rank(dist.get_rank(), 2 * numel)
    room = numel if ranks.backend == "gloo" else 2 * numel  # NCCL brings a rank's own piece too
    output, scratch = torch.empty(numel), torch.full((room + 7,), math.nan)
    reduce_scatter_fp32(output, whole, dist.group.WORLD, scratch=scratch)
    torch.testing.assert_close(output.double(), my_piece(exact(2, 2 * numel, torch.float32)))
    assert scratch[room:].isnan().all()


@pytest.mark.ranks(4)
def test_native_reductions_stay_within_their_stated_tolerance():
    rank, group = dist.get_rank(), dist.group.WORLD
    for wire in (torch.float32, torch.bfloat16):
        whole = of_rank(rank, 4000, wire)
        bound = sum(of_rank(r, 4000, wire).double().abs() for r in range(4))
        bound *= 3 * torch.finfo(wire).eps / 2
        piece, everything = torch.empty(1000), torch.empty(4000)
        reduce_scatter_native(piece, whole, group)
        all_reduce_native(everything, whole, group)
        total = exact(4, 4000, wire)
        assert ((piece.double() - my_piece(total)).abs() <= my_piece(bound)).all()
        assert ((everything.double() - total).abs() <= bound).all()


@pytest.mark.ranks(2)
@pytest.mark.parametrize("options", [{}, {"op": "avg", "scale": 0.5, "accumulate": True}], ids=str)
def test_native_reductions_take_the_same_arguments(options):
    rank, group = dist.get_rank(), dist.group.WORLD
    whole = torch.arange(200.0) + rank  # sums are exact, so bits must agree
    for ordered, native, numel in (
        (reduce_scatter_fp32, reduce_scatter_native, 100),
        (all_reduce_fp32, all_reduce_native, 200),
    ):
        first, second = torch.ones(numel), torch.ones(numel)
        ordered(first, whole, group, **options)
        native(second, whole, group, async_op=True, **options).wait()
        assert torch.equal(first, second)


REFUSED = {
    "not the 1 x 3": (lambda: (torch.empty(3), torch.empty(4)), {}),
    "must be one of": (lambda: (torch.empty(4), torch.empty(4, dtype=torch.int32)), {}),
    "must be torch.float32 or": (lambda: (torch.empty(4, dtype=torch.half), torch.empty(4)), {}),
    "must be flat and contiguous": (lambda: (torch.empty(2), torch.empty(4)[::2]), {}),
    r"shape \(2, 2\)": (lambda: (torch.empty(2, 2), torch.empty(4)), {}),
    "share one device": (lambda: (torch.empty(4, device="meta"), torch.empty(4)), {}),
    "not 'max'": (lambda: (torch.empty(4), torch.empty(4)), {"op": "max"}),
    "share memory": (lambda: (lambda x: (x[1:5], x[:4]))(torch.empty(5)), {}),
    "`scratch` has 0 elements of torch.float16": (
        lambda: (torch.empty(4), torch.empty(4)),
        {"scratch": torch.empty(0, dtype=torch.half)},
    ),
}


@pytest.mark.parametrize("reason", REFUSED)
def test_a_wrong_call_is_refused_with_its_reason(reason):
    make, options = REFUSED[reason]
    output, whole = make()
    with pytest.raises(ValueError, match=reason):
        reduce_scatter_fp32(output, whole, None, **options)


def test_in_place_accumulation_is_refused():
    gradient = torch.ones(4)
    for reduce in REDUCE_SCATTERS + ALL_REDUCES:
        with pytest.raises(ValueError, match="share memory"):
            reduce(gradient, gradient, None, accumulate=True)


@pytest.mark.ranks(2)
def test_an_indivisible_buffer_is_refused_before_anything_is_sent():
    group = dist.group.WORLD
    with pytest.raises(ValueError, match=r"rank [01] of 2 .* 7 elements.*pad the buffer"):
        reduce_scatter_fp32(torch.empty(3), torch.empty(7), group)
    output = torch.empty(3)
    reduce_scatter_fp32(output, torch.ones(6), group)  # the group still works
    assert torch.equal(output, torch.full((3,), 2.0))


def test_meta_tensors_plan_without_data():
    output, whole = torch.empty(4, device="meta"), torch.empty(4, device="meta")
    reduce_scatter_fp32(output, whole, None).wait()


@pytest.mark.ranks(64, backend="fake")
def test_meta_tensors_plan_for_worlds_that_do_not_run_here():
    output, whole = torch.empty(4, device="meta"), torch.empty(256, device="meta")
    for reduce in REDUCE_SCATTERS:
        reduce(output, whole, dist.group.WORLD, async_op=True).wait()
    all_reduce_fp32(whole, whole, dist.group.WORLD).wait()


@pytest.mark.ranks(64, backend="fake")
def test_the_backends_own_route_is_taken_where_there_is_no_gloo():
    output, whole = torch.empty(4), torch.ones(256)
    reduce_scatter_fp32(output, whole, dist.group.WORLD)
    all_reduce_fp32(torch.empty(255), torch.ones(255), dist.group.WORLD)
