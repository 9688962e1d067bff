"""Mamba with `invariant=True`: sums against Python's, and layouts against one process."""

from __future__ import annotations

from contextlib import nullcontext

import pytest
import torch

from lamina.ddp import finalize_grads, full_gradients
from lamina.fsdp import fully_shard
from lamina.mesh import ParallelLayout, role_of
from lamina.models import MambaConfig, TransformerConfig
from lamina.models.attention import AttentionContext
from lamina.models.base.mesh_axes import axis_of
from lamina.models.bisection.pieces import Share, parameter_piece
from lamina.models.invariance.fixed_sums import fix_sums
from lamina.models.invariance.row_functions import (
    below_last,
    decay_between,
    for_each,
    matrix_products,
    scale_rows,
    softplus,
    times_vector,
)
from lamina.models.invariance.token_sums import TokenCut, TokenSum
from lamina.models.mamba.block import MambaMixer
from lamina.models.mamba.convolution import fixed_convolution

from .test_invariant_sums import by_tree, chain, numbers, single

SEQUENCES, LENGTH, HIDDEN = 8, 64, 16
TOTAL = TokenSum(TokenCut())


def mixer_of(mesh, *, sequence_parallel=False):
    config = TransformerConfig(
        vocab_size=40, hidden_size=HIDDEN, num_layers=1, num_heads=4, layer_pattern="M",
        init_std=0.2, sequence_parallel=sequence_parallel,
        mamba=MambaConfig(head_dim=4, state_size=8, groups=4, chunk_size=32),
    )  # fmt: skip
    mixer = MambaMixer(config, mesh)
    for module in mixer.modules():
        if hasattr(module, "init_seed"):
            module.init_seed = 5
            module.reset_parameters()
    return mixer


def test_a_channels_taps_are_added_from_the_token_itself_and_then_from_the_first():
    x, weight = numbers(2, 10, 3), numbers(3, 1, 4, seed=1)
    y = fixed_convolution(x, weight, None, TOTAL)
    for token in (0, 2, 9):
        total = single(x[1, token, 2].item() * weight[2, 0, 3].item())
        for tap in range(3):
            before = token - 3 + tap
            seen = x[1, before, 2].item() if before >= 0 else 0.0
            total = single(total + single(seen * weight[2, 0, tap].item()))
        assert y[1, token, 2].item() == total


def test_gradients_of_taps_and_of_rates_are_the_tree_over_tokens():
    x, grad = numbers(2, 16, 3).requires_grad_(), numbers(2, 16, 3, seed=2)
    weight = numbers(3, 1, 4, seed=1).requires_grad_()
    fixed_convolution(x, weight, None, TOTAL).backward(grad)
    seen = torch.nn.functional.pad(x.detach(), (0, 0, 2, 0))[:, :16]  # tap 1 is two tokens back
    leaves = (seen * grad)[:, :, 2].flatten().tolist()
    assert weight.grad[2, 0, 1].item() == by_tree(leaves)

    rate = torch.tensor([-1.0, 0.5, 2.0], requires_grad=True)
    times_vector(x, rate, TOTAL, negative_exponential=True).backward(grad)
    factor = -rate.detach()[1].exp()
    leaves = (grad * x.detach())[:, :, 1].flatten() * factor
    assert rate.grad[1].item() == by_tree(leaves.tolist())


def test_gradients_of_what_heads_share_are_added_in_the_tree():
    x, grad = numbers(2, 5).requires_grad_(), numbers(2, 6, 5, seed=1)
    for_each(x, 6, 1).backward(grad)
    assert x.grad[1, 3].item() == by_tree(grad[1, :, 3].tolist())


def test_matrices_of_a_scan_are_chains():
    left, right = numbers(2, 3, 20, 7), numbers(2, 3, 7, 18, seed=1)
    y = matrix_products(left, right)
    assert y[1, 2, 4, 5].item() == chain(left[1, 2, 4].tolist(), right[1, 2, :, 5].tolist())


@pytest.mark.parametrize(
    "function",
    [
        softplus,
        below_last,
        lambda x: decay_between(x, torch.ones(x.shape[-1], x.shape[-1]).bool().tril()),
        lambda x: scale_rows(x, x[..., 0]),
        lambda x: matrix_products(x[:, None], x[..., None]),
        lambda x: for_each(x, 3, 1),
    ],
)
def test_functions_and_their_gradients_are_those_of_torch(function):
    plain = {
        softplus: torch.nn.functional.softplus,
        below_last: lambda x: x[..., -1:] - x,
    }.get(function)
    x = torch.randn(4, 6)
    direction = torch.randn(4, 6)
    a = x.clone().requires_grad_()
    y = function(a)
    weights = torch.randn_like(y)
    (y * weights).sum().backward()
    if plain is not None:
        torch.testing.assert_close(y, plain(x))
    step = 1e-2
    change = ((function(x + step * direction) - function(x - step * direction)) * weights).sum()
    expected = (a.grad * direction).sum()
    torch.testing.assert_close(change / (2 * step), expected, rtol=2e-2, atol=2e-2)


@pytest.mark.parametrize("values", [[-30.0, -16.7, -7.0, -1e-3, 0.0, 3.0, 90.0]])
def test_softplus_keeps_small_values(values):
    x = torch.tensor(values)
    torch.testing.assert_close(
        softplus(x), torch.nn.functional.softplus(x.double()).float(), rtol=1e-6, atol=0
    )


@pytest.mark.parametrize("documents", [False, True])
def test_the_layer_computes_what_the_plain_layer_computes(documents):
    torch.manual_seed(0)
    mixer = mixer_of(None)
    x = torch.randn(2, 50, HIDDEN)
    context = None
    if documents:
        ids = torch.arange(50).div(13, rounding_mode="floor").expand(2, -1)
        context = AttentionContext.build(
            mixer_config(), torch.zeros(2, 50, dtype=torch.int64), x.dtype, document_ids=ids
        )
    outcomes = []
    for fixed in (False, True):
        if fixed:
            fix_sums(mixer, TokenCut())
        inputs = x.clone().requires_grad_()
        y = mixer(inputs, context)
        y.square().sum().backward()
        grads = {name: p.grad for name, p in mixer.named_parameters()}
        outcomes.append((y.detach(), inputs.grad, grads))
        mixer.zero_grad()
    torch.testing.assert_close(outcomes[0], outcomes[1], rtol=2e-4, atol=2e-5)


def mixer_config():
    return TransformerConfig(
        vocab_size=40, hidden_size=HIDDEN, num_layers=1, num_heads=4, layer_pattern="M",
        mamba=MambaConfig(head_dim=4, state_size=8, groups=4),
    )  # fmt: skip


def test_a_tokens_result_does_not_depend_on_later_tokens_nor_on_other_sequences():
    mixer = mixer_of(None)
    fix_sums(mixer, TokenCut())
    x = torch.randn(3, 50, HIDDEN)
    whole = mixer(x)
    for rows, tokens in ((slice(1, 2), 50), (slice(0, 2), 20), (slice(2, 3), 7)):
        assert torch.equal(mixer(x[rows, :tokens]), whole[rows, :tokens])


def train(mesh, rows, *, sequence_parallel=False):
    mixer = mixer_of(mesh, sequence_parallel=sequence_parallel)
    axis = axis_of(mesh, "tp")
    fix_sums(mixer, TokenCut(axis, sequence_parallel, None, rows))
    roles = {name: role_of(parameter) for name, parameter in mixer.named_parameters()}
    share = Share.of(mesh, SEQUENCES, LENGTH, rows)
    generator = torch.Generator().manual_seed(0)
    x, weights = (torch.randn(SEQUENCES, LENGTH, HIDDEN, generator=generator) for _ in range(2))
    if mesh is not None:
        mixer = fully_shard(
            mixer, device_mesh=mesh, invariant=True, calculate_per_token_loss=True,
            zero_dp_strategy=1, fsdp_unit_modules=[],
        )  # fmt: skip
    outputs = {}
    for microbatch in range(share.microbatches):
        here = share.rows_of(microbatch)
        inputs = x[here].clone().requires_grad_()
        context = AttentionContext.build(
            mixer_config(), torch.zeros(rows, LENGTH, dtype=torch.int64), x.dtype
        )
        given = inputs
        own = slice(0, rows * LENGTH)
        if sequence_parallel:
            size = rows * LENGTH // axis.size
            own = slice(axis.rank * size, (axis.rank + 1) * size)
            given = inputs.flatten(0, 1)[own]
        last = mesh is None or microbatch == share.microbatches - 1
        with nullcontext() if last else mixer.no_sync():
            y = mixer(given, context)
            (y.flatten(0, -2) * weights[here].flatten(0, 1)[own]).sum().backward()
        tokens = share.tokens(microbatch).flatten()[own].tolist()
        by_x = inputs.grad.flatten(0, 1)[own]
        outputs |= dict(zip(tokens, zip(y.detach().flatten(0, -2), by_x, strict=True), strict=True))
    if mesh is None:
        return outputs, {name: p.grad for name, p in mixer.named_parameters()}, roles, share
    finalize_grads(mixer, mesh, num_tokens=1)  # which divides by the number of ranks
    ranks = share.axes["dp"][1]
    return outputs, {n: g * ranks for n, g in full_gradients(mixer).items()}, roles, share


@pytest.mark.ranks(4, backend="gloo")  # a GPU has other bits: tests/virtual_gpu/test_invariance.py
@pytest.mark.parametrize(
    ("axes", "sequence_parallel", "rows"),
    [
        ({"dp_shard": 4}, False, 1),
        ({"tp": 2, "dp_shard": 2}, False, 2),
        ({"tp": 4, "dp_shard": 1}, False, 2),
        ({"tp": 2, "dp_shard": 2}, True, 1),
        ({"dp_replicate": 2, "dp_shard": 2}, False, 2),
    ],
)
def test_a_layer_has_the_bits_of_one_process(axes, sequence_parallel, rows, ranks):
    expected, gradients, _, _ = train(None, SEQUENCES)
    mesh = ParallelLayout(**axes).build("cpu")
    outputs, got, roles, share = train(mesh, rows, sequence_parallel=sequence_parallel)
    for token, pair in outputs.items():
        assert all(map(torch.equal, pair, expected[token])), f"token {token}"
    for name, gradient in got.items():
        whole = gradients[name]
        index = parameter_piece(gradient.shape, whole.shape, roles[name], share)
        assert torch.equal(gradient, whole.flatten()[index]), name
