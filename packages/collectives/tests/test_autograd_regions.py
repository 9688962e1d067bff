"""Regions against what one process computes from all ranks' tensors, without communication."""

from __future__ import annotations

from collections.abc import Callable

import pytest
import torch
import torch.distributed as dist

from lamina.collectives import (
    Ledger,
    all_to_all_tokens,
    copy_to,
    gather_from,
    reduce_from,
    reduce_scatter_to,
    scatter_to,
)

WORLD = (1, 2, 3, 4)


def of_rank(rank: int, shape: tuple[int, ...], salt: int = 0) -> torch.Tensor:
    """The tensor that `rank` holds: every rank can make every rank's."""
    generator = torch.Generator().manual_seed(1000 * salt + rank)
    return torch.randn(shape, generator=generator, dtype=torch.float64)


def everyone(shape: tuple[int, ...], salt: int = 0) -> list[torch.Tensor]:
    return [of_rank(rank, shape, salt) for rank in range(dist.get_world_size())]


def run(
    region: Callable[[torch.Tensor], torch.Tensor], mine: torch.Tensor, gradient: torch.Tensor
) -> tuple[torch.Tensor, torch.Tensor]:
    """Value of a region and its vector-Jacobian product."""
    leaf = mine.clone().requires_grad_()
    value = region(leaf)
    (back,) = torch.autograd.grad(value, leaf, gradient)
    return value.detach(), back


@pytest.mark.ranks(*WORLD)
def test_copy_to_keeps_values_and_sums_gradients():
    group, rank = dist.group.WORLD, dist.get_rank()
    gradients = everyone((3, 4), salt=1)
    value, back = run(lambda x: copy_to(x, group), of_rank(0, (3, 4)), gradients[rank])
    assert torch.equal(value, of_rank(0, (3, 4)))
    torch.testing.assert_close(back, sum(gradients))


@pytest.mark.ranks(*WORLD)
def test_reduce_from_sums_values_and_keeps_gradients():
    group, rank = dist.group.WORLD, dist.get_rank()
    gradient = of_rank(0, (3, 4), salt=1)
    value, back = run(lambda x: reduce_from(x, group), of_rank(rank, (3, 4)), gradient)
    torch.testing.assert_close(value, sum(everyone((3, 4))))
    assert torch.equal(back, gradient)


@pytest.mark.ranks(*WORLD)
@pytest.mark.parametrize("dim", [0, 1, -1])
def test_scatter_to_keeps_a_piece_and_gathers_gradients(dim):
    group, rank, size = dist.group.WORLD, dist.get_rank(), dist.get_world_size()
    shape = (2 * size, 3 * size, size)
    whole = of_rank(0, shape)
    gradients = [of_rank(r, whole.chunk(size, dim)[0].shape, salt=1) for r in range(size)]
    value, back = run(lambda x: scatter_to(x, group, dim), whole, gradients[rank])
    assert torch.equal(value, whole.chunk(size, dim)[rank])
    assert value.is_contiguous()
    assert torch.equal(back, torch.cat(gradients, dim))


@pytest.mark.ranks(*WORLD)
@pytest.mark.parametrize("dim", [0, 1, -1])
def test_gather_from_concatenates_and_splits_gradients(dim):
    group, rank, size = dist.group.WORLD, dist.get_rank(), dist.get_world_size()
    pieces = everyone((2, 3, 5))
    gradient = torch.cat(everyone((2, 3, 5), salt=1), dim)
    value, back = run(lambda x: gather_from(x, group, dim), pieces[rank], gradient)
    assert torch.equal(value, torch.cat(pieces, dim))
    assert torch.equal(back, gradient.chunk(size, dim)[rank])


@pytest.mark.ranks(*WORLD)
@pytest.mark.parametrize("dim", [0, 1, -1])
def test_gather_from_can_sum_partial_gradients(dim):
    group, rank, size = dist.group.WORLD, dist.get_rank(), dist.get_world_size()
    pieces = everyone((2, 3, 5))
    gradients = [of_rank(r, torch.cat(pieces, dim).shape, salt=1) for r in range(size)]
    value, back = run(
        lambda x: gather_from(x, group, dim, grad="reduce_scatter"), pieces[rank], gradients[rank]
    )
    assert torch.equal(value, torch.cat(pieces, dim))
    torch.testing.assert_close(back, sum(gradients).chunk(size, dim)[rank])


@pytest.mark.ranks(*WORLD)
@pytest.mark.parametrize("dim", [0, 1, -1])
def test_reduce_scatter_to_sums_a_piece_and_gathers_gradients(dim):
    group, rank, size = dist.group.WORLD, dist.get_rank(), dist.get_world_size()
    partials = everyone((2 * size, 3 * size, size))
    gradients = [of_rank(r, partials[0].chunk(size, dim)[0].shape, salt=1) for r in range(size)]
    value, back = run(lambda x: reduce_scatter_to(x, group, dim), partials[rank], gradients[rank])
    torch.testing.assert_close(value, sum(partials).chunk(size, dim)[rank])
    assert torch.equal(back, torch.cat(gradients, dim))


def split_matrix(size: int, salt: int, least: int = 0) -> list[list[int]]:
    """Rows that rank i sends to rank j, some of them none."""
    generator = torch.Generator().manual_seed(salt)
    return torch.randint(least, 4, (size, size), generator=generator).tolist()


@pytest.mark.ranks(*WORLD)
@pytest.mark.parametrize("salt", [0, 1, 2])
def test_all_to_all_tokens_moves_rows_there_and_gradients_back(salt):
    group, rank, size = dist.group.WORLD, dist.get_rank(), dist.get_world_size()
    counts = split_matrix(size, salt)
    if salt == 2:  # one rank has no tokens at all, and nobody sends to the last
        counts = [[0] * size if r == 0 else [*row[:-1], 0] for r, row in enumerate(counts)]
    rows = [of_rank(r, (sum(counts[r]), 5)) for r in range(size)]
    sends = [rows[r].split(counts[r]) for r in range(size)]
    incoming = [counts[r][rank] for r in range(size)]
    gradients = [
        of_rank(r, (sum(counts[s][r] for s in range(size)), 5), salt=1) for r in range(size)
    ]
    returns = [gradients[r].split([counts[s][r] for s in range(size)]) for r in range(size)]
    value, back = run(
        lambda x: all_to_all_tokens(x, group, output_splits=incoming, input_splits=counts[rank]),
        rows[rank],
        gradients[rank],
    )
    assert torch.equal(value, torch.cat([sends[r][rank] for r in range(size)]))
    assert torch.equal(back, torch.cat([returns[r][rank] for r in range(size)]))


@pytest.mark.ranks(2)
def test_no_tokens_anywhere_is_no_error():
    nothing = torch.zeros(0, 3, requires_grad=True)
    value = all_to_all_tokens(nothing, dist.group.WORLD, output_splits=[0, 0], input_splits=[0, 0])
    value.sum().backward()
    assert value.shape == (0, 3)
    assert nothing.grad is not None
    assert nothing.grad.shape == (0, 3)


@pytest.mark.ranks(2)
@pytest.mark.parametrize("empty", [(0, 4), (4, 0), (0,)])
def test_tensors_without_elements_pass_every_region(empty):
    group = dist.group.WORLD
    tensor = torch.zeros(empty, requires_grad=True)
    for region in (copy_to, reduce_from, scatter_to, gather_from, reduce_scatter_to):
        region(tensor, group).sum().backward()
    assert reduce_from(tensor, group).shape == empty


@pytest.mark.ranks(2)
def test_equal_splits_are_the_default_of_all_to_all():
    rank = dist.get_rank()
    value = all_to_all_tokens(of_rank(rank, (4, 3)), dist.group.WORLD)
    pieces = [of_rank(r, (4, 3)).chunk(2)[rank] for r in range(2)]
    assert torch.equal(value, torch.cat(pieces))


@pytest.mark.ranks(2)
@pytest.mark.parametrize("dtype", [torch.float32, torch.bfloat16, torch.float16, torch.float64])
def test_strides_of_inputs_and_gradients_do_not_matter(dtype):
    group, rank = dist.group.WORLD, dist.get_rank()
    regions = {
        "copy": lambda x: copy_to(x, group),
        "reduce": lambda x: reduce_from(x, group),
        "scatter": lambda x: scatter_to(x, group, 1),
        "gather": lambda x: gather_from(x, group, 1),
        "partial": lambda x: gather_from(x, group, 1, grad="reduce_scatter"),
        "reduce_scatter": lambda x: reduce_scatter_to(x, group, 1),
        "tokens": lambda x: all_to_all_tokens(x, group),
    }
    plain = of_rank(rank, (4, 6)).to(dtype)
    strided = plain.t().contiguous().t()
    assert not strided.is_contiguous()
    for name, region in regions.items():
        shape = region(plain).shape
        gradient = torch.ones((), dtype=dtype).expand(shape)
        expected = run(region, plain, gradient.contiguous())
        for got, want in zip(run(region, strided, gradient), expected, strict=True):
            assert torch.equal(got, want), name
            assert got.dtype == dtype, name


@pytest.mark.ranks(4)
def test_bfloat16_sums_accumulate_in_float32():
    # 256 + 1 + 1 + 1 is 256 when bfloat16 accumulates, and 259 rounds to 260.
    group = dist.group.WORLD
    mine = torch.full((64, 8), 256.0 if dist.get_rank() == 0 else 1.0, dtype=torch.bfloat16)
    assert torch.all(reduce_from(mine, group) == 260)
    assert torch.all(reduce_scatter_to(mine, group, 1) == 260)
    _, back = run(lambda x: copy_to(x, group), mine, mine)
    assert torch.all(back == 260)


@pytest.mark.ranks(3, 4)
@pytest.mark.parametrize("dtype", [torch.float32, torch.bfloat16])
def test_sums_have_the_same_bits_on_every_rank_and_every_run(dtype):
    group, rank, size = dist.group.WORLD, dist.get_rank(), dist.get_world_size()
    mine = (of_rank(rank, (size * 5, 7)) * 10.0**rank).to(dtype)
    whole = reduce_from(mine, group)
    pieces = gather_from(reduce_scatter_to(mine, group), group)
    assert torch.equal(whole, pieces)
    assert torch.equal(whole, reduce_from(mine, group))
    copies: list[torch.Tensor | None] = [None] * size
    dist.all_gather_object(copies, whole)
    assert all(torch.equal(copy, whole) for copy in copies)


def test_group_none_returns_the_tensor_itself():
    tensor = torch.randn(3, 4, requires_grad=True)
    for region in (copy_to, reduce_from, scatter_to, gather_from, reduce_scatter_to):
        assert region(tensor, None) is tensor
    assert all_to_all_tokens(tensor, None, output_splits=[3], input_splits=[3]) is tensor


@pytest.mark.ranks(1)
def test_a_group_of_one_neither_sends_nor_doubles_gradients():
    group = dist.group.WORLD
    tensor = torch.randn(4, 6, requires_grad=True)
    with Ledger() as ledger:
        value = reduce_from(copy_to(tensor, group), group)
        value = gather_from(scatter_to(value, group, 1), group, 1, grad="reduce_scatter")
        value = all_to_all_tokens(reduce_scatter_to(value, group), group)
        value.sum().backward()
    assert torch.equal(value, tensor)
    assert torch.equal(tensor.grad, torch.ones(4, 6))
    assert ledger.records == []


@pytest.mark.ranks(2)
def test_what_cannot_be_cut_is_refused_with_shape_dimension_and_group_size():
    group = dist.group.WORLD
    for region in (scatter_to, reduce_scatter_to):
        with pytest.raises(ValueError, match=r"dimension 1 of shape \(4, 3\).*2 ranks.*pad"):
            region(torch.zeros(4, 3), group, 1)
    for region in (scatter_to, gather_from, reduce_scatter_to):
        with pytest.raises(IndexError, match=r"dim=2 .*shape \(4, 4\)"):
            region(torch.zeros(4, 4), group, 2)
    with pytest.raises(ValueError, match="'split' or 'reduce_scatter', not 'sum'"):
        gather_from(torch.zeros(4), group, grad="sum")
    with pytest.raises(ValueError, match="int64"):
        reduce_from(torch.zeros(4, dtype=torch.int64), group)


@pytest.mark.ranks(2)
def test_splits_that_do_not_fit_are_refused():
    group, tensor = dist.group.WORLD, torch.zeros(4, 2)
    with pytest.raises(ValueError, match=r"\[1, 1, 2\] must be 2 row counts"):
        all_to_all_tokens(tensor, group, output_splits=[2, 2], input_splits=[1, 1, 2])
    with pytest.raises(ValueError, match=r"\[-1, 5\] must be 2 row counts >= 0"):
        all_to_all_tokens(tensor, group, output_splits=[2, 2], input_splits=[-1, 5])
    with pytest.raises(ValueError, match=r"\[1, 2\] sum to 3, but the tensor has 4 rows"):
        all_to_all_tokens(tensor, group, output_splits=[2, 2], input_splits=[1, 2])
    with pytest.raises(ValueError, match=r"size 3, which is not divisible by the group's 2"):
        all_to_all_tokens(torch.zeros(3, 2), group)


@pytest.mark.ranks(2)
def test_a_scattered_piece_does_not_keep_the_whole_alive():
    whole = torch.zeros(1024, 64)
    piece = scatter_to(whole, dist.group.WORLD)
    assert piece.untyped_storage().nbytes() == whole.untyped_storage().nbytes() // 2


@pytest.mark.ranks(2)
@pytest.mark.parametrize("reduction", ["ordered", "native"])
def test_under_torch_compile_regions_are_operators_of_one_graph(reduction):
    group, size = dist.group.WORLD, dist.get_world_size()

    def function(x):
        x = copy_to(x * 2, group, reduction=reduction) + 1
        x = gather_from(scatter_to(x * 3, group) * 5, group).sin()
        x = reduce_scatter_to(x, group, 1, reduction=reduction).exp()
        x = gather_from(x, group, 1, grad="reduce_scatter", reduction=reduction)
        x = all_to_all_tokens(x, group, input_splits=[0, 4], output_splits=splits)
        return reduce_from(x.sum(), group, reduction=reduction).cos()

    splits = [0, 0] if dist.get_rank() == 0 else [4, 4]
    results, ledgers = [], []
    for call in (function, torch.compile(function, backend="aot_eager", fullgraph=True)):
        x = torch.linspace(-1, 1, 4 * size, requires_grad=True)
        with Ledger() as ledger:
            value = call(x.view(4, size))
            value.backward()
        results.append([value.detach(), x.grad])
        ledgers.append([(record.op, record.bytes) for record in ledger.records])
    torch.testing.assert_close(*results)
    assert ledgers[0] == ledgers[1]


@pytest.mark.ranks(3)
def test_native_reductions_stay_within_the_backends_tolerance():
    group, rank = dist.group.WORLD, dist.get_rank()
    partials = [of_rank(r, (6, 4)).float() for r in range(3)]
    exact = sum(partial.double() for partial in partials)
    bound = 2 * 2**-24 * sum(partial.double().abs() for partial in partials)

    def check(got, piece=slice(None)):
        assert torch.all((got.double() - exact[piece]).abs() <= bound[piece])

    mine = slice(2 * rank, 2 * rank + 2)
    with Ledger() as ledger:
        check(reduce_from(partials[rank], group, reduction="native"))
        check(reduce_scatter_to(partials[rank], group, reduction="native"), mine)
        check(run(lambda x: copy_to(x, group, reduction="native"), exact, partials[rank])[1])
        part = exact[mine].float()
        gather = gather_from
        _, back = run(
            lambda x: gather(x, group, grad="reduce_scatter", reduction="native"),
            part,
            partials[rank],
        )
        check(back, mine)
    assert [record.op for record in ledger.records] == [
        "all_reduce_native",
        "reduce_scatter_native",
        "all_reduce_native",
        "all_gather_into",
        "reduce_scatter_native",
    ]
    for region in (copy_to, reduce_from, gather_from, reduce_scatter_to):
        with pytest.raises(ValueError, match="'ordered' or 'native', not 'fast'"):
            region(partials[rank], group, reduction="fast")
