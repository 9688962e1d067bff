"""First and second derivatives of the regions, by finite differences and against one process.

Finite differences need one function of one input: every rank gets the same input, perturbed in
step, and computes the same output, so the collectives inside are as much part of the function as
the arithmetic. Each program uses every rank's part differently, so that a missing sum, a wrong
piece or a factor of N shows.
"""

from __future__ import annotations

import pytest
import torch
import torch.distributed as dist
import torch.nn.functional as F

from lamina.collectives import (
    all_to_all_tokens,
    copy_to,
    gather_from,
    reduce_from,
    reduce_scatter_to,
    scatter_to,
)


def check_both(program, *inputs: torch.Tensor) -> None:
    inputs = tuple(tensor.double().requires_grad_() for tensor in inputs)
    assert torch.autograd.gradcheck(program, inputs)
    torch.manual_seed(7)  # the gradients that gradgradcheck draws must be the same on all ranks
    assert torch.autograd.gradgradcheck(program, inputs)


def seeded(*shape: int, salt: int = 0) -> torch.Tensor:
    return torch.randn(shape, generator=torch.Generator().manual_seed(salt), dtype=torch.float64)


@pytest.mark.ranks(2, 4)
def test_column_then_row():
    group, rank, size = dist.group.WORLD, dist.get_rank(), dist.get_world_size()
    weight = seeded(size, 3, salt=1)[rank]

    def program(x):
        return reduce_from(torch.tanh(copy_to(x, group) * weight) * weight, group)

    check_both(program, seeded(2, 3))


@pytest.mark.matrix(strength=1)
@pytest.mark.ranks(2, 4)
@pytest.mark.parametrize("dim", [0, 1])
def test_scatter_then_gather(dim):
    group, rank, size = dist.group.WORLD, dist.get_rank(), dist.get_world_size()
    shape = (size, 2) if dim == 0 else (2, size)

    def program(x):
        return gather_from(torch.sin(scatter_to(x, group, dim) * (rank + 1)), group, dim)

    check_both(program, seeded(*shape))


@pytest.mark.matrix(strength=1)
@pytest.mark.ranks(2, 4)
@pytest.mark.parametrize("dim", [0, 1])
def test_sequence_parallel_gather_then_reduce_scatter(dim):
    group, rank, size = dist.group.WORLD, dist.get_rank(), dist.get_world_size()
    shape = (size, 2) if dim == 0 else (2, size)
    weight = seeded(size, *shape, salt=1)[rank]

    def program(x):
        part = torch.tanh(scatter_to(x, group, dim))
        whole = gather_from(part, group, dim, grad="reduce_scatter")
        part = reduce_scatter_to(torch.sin(whole * weight), group, dim)
        return gather_from(part * part, group, dim)

    check_both(program, seeded(*shape))


@pytest.mark.ranks(2, 4)
def test_uneven_tokens_there_and_back():
    group, rank, size = dist.group.WORLD, dist.get_rank(), dist.get_world_size()
    # Rank i holds i tokens of the whole (rank 0 none) and sends them all to rank i - 1, in the
    # middle of the group partly to itself.
    held = [i for i in range(size) for _ in range(i)]
    counts = [[0] * size for _ in range(size)]
    for i in range(1, size):
        counts[i][i - 1] = i
    if size > 2:
        counts[2] = [0, 1, 1, 0]
    sends, receives = counts[rank], [counts[r][rank] for r in range(size)]
    mine = torch.tensor([place for place, owner in enumerate(held) if owner == rank]).long()

    def program(x):
        tokens = copy_to(x, group)[mine]
        there = all_to_all_tokens(tokens, group, output_splits=receives, input_splits=sends)
        there = torch.sin(there * (rank + 1))
        back = all_to_all_tokens(there, group, output_splits=sends, input_splits=receives)
        whole = torch.zeros_like(x).index_put((mine,), back * tokens)
        return reduce_from(whole, group)

    check_both(program, seeded(len(held), 2))


@pytest.mark.ranks(2, 4)
def test_a_gradient_penalty_over_tensor_parallel_layers_is_that_of_one_process():
    group, rank, size = dist.group.WORLD, dist.get_rank(), dist.get_world_size()
    x, first, second = seeded(3, 4, salt=2), seeded(8, 4, salt=3), seeded(4, 8, salt=4)

    def penalised(x, first, second, enter, leave):
        """Loss plus the squared norm of its gradient with respect to the input."""
        y = leave(F.linear(torch.tanh(F.linear(enter(x), first)), second))
        loss = y.square().sum()
        (gradient,) = torch.autograd.grad(loss, x, create_graph=True)
        return loss + gradient.square().sum()

    whole = [tensor.clone().requires_grad_() for tensor in (x, first, second)]
    penalised(*whole, enter=lambda t: t, leave=lambda t: t).backward()
    parts = [x, first.chunk(size, 0)[rank], second.chunk(size, 1)[rank]]
    parts = [tensor.clone().requires_grad_() for tensor in parts]
    penalised(
        *parts, enter=lambda t: copy_to(t, group), leave=lambda t: reduce_from(t, group)
    ).backward()

    torch.testing.assert_close(parts[0].grad, whole[0].grad)
    torch.testing.assert_close(parts[1].grad, whole[1].grad.chunk(size, 0)[rank])
    torch.testing.assert_close(parts[2].grad, whole[2].grad.chunk(size, 1)[rank])


@pytest.mark.matrix(strength=1)
@pytest.mark.ranks(2, 4)
@pytest.mark.parametrize("sequence_parallel", [False, True])
def test_gradients_of_tensor_parallel_layers_are_those_of_one_process(sequence_parallel):
    group, rank, size = dist.group.WORLD, dist.get_rank(), dist.get_world_size()
    x, norm, first, second = seeded(8, 4, salt=2), seeded(4), seeded(8, 4), seeded(4, 8)

    def run(tensors, enter, leave):
        x, norm, first, second = tensors
        return leave(F.linear(torch.tanh(F.linear(enter(x * norm), first)), second))

    whole = [tensor.clone().requires_grad_() for tensor in (x, norm, first, second)]
    run(whole, lambda t: t, lambda t: t).square().sum().backward()

    parts = [x, norm, first.chunk(size, 0)[rank], second.chunk(size, 1)[rank]]
    parts = [tensor.clone().requires_grad_() for tensor in parts]
    if sequence_parallel:
        local = [scatter_to(parts[0], group), copy_to(parts[1], group), *parts[2:]]
        y = run(
            local,
            lambda t: gather_from(t, group, grad="reduce_scatter"),
            lambda t: reduce_scatter_to(t, group),
        )
        reduce_from(y.square().sum(), group).backward()
    else:
        y = run(parts, lambda t: copy_to(t, group), lambda t: reduce_from(t, group))
        y.square().sum().backward()

    expected = [
        whole[0].grad,
        whole[1].grad,
        whole[2].grad.chunk(size, 0)[rank],
        whole[3].grad.chunk(size, 1)[rank],
    ]
    for part, want in zip(parts, expected, strict=True):
        torch.testing.assert_close(part.grad, want)
