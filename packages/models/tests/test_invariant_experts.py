"""Experts with `invariant=True`: sums against Python's, and layouts against one process."""

from __future__ import annotations

from contextlib import nullcontext

import pytest
import torch

from lamina.ddp import finalize_grads, full_gradients
from lamina.fsdp import fully_shard
from lamina.mesh import ParallelLayout, role_of
from lamina.models import MoEConfig, TransformerConfig
from lamina.models.base.mesh_axes import axis_of
from lamina.models.bisection.pieces import Share, parameter_piece
from lamina.models.invariance.expert_sums import rows_weight_product
from lamina.models.invariance.fixed_sums import fix_sums
from lamina.models.invariance.products import GRANULE
from lamina.models.invariance.token_sums import TokenCut
from lamina.models.moe import MoELayer
from lamina.models.moe.losses import AuxiliaryScale, RoutingContext
from lamina.models.moe.routing import rows_by_expert, rows_to_tokens

from .test_invariant_sums import by_tree, chain, numbers, single

SEQUENCES, LENGTH, HIDDEN = 8, 64, 16


def test_an_experts_gradient_is_granules_of_the_batch_in_the_tree():
    tokens = torch.tensor([5, 3, 70, 64, 260, 200, 199, 700])  # in the order of their arrival
    grad, x = numbers(len(tokens), 3), numbers(len(tokens), 4, seed=1)
    got = rows_weight_product(grad, x, tokens)
    for row, column in [(0, 0), (2, 3)]:
        leaves = []
        for start in range(0, 12 * GRANULE, GRANULE):
            here = sorted(
                (t, at) for at, t in enumerate(tokens.tolist()) if start <= t < start + 64
            )
            ys = [grad[at, row].item() for _, at in here]
            leaves.append(chain(ys, [x[at, column].item() for _, at in here]))
        assert got[row, column].item() == by_tree(leaves)


def test_a_tokens_results_are_added_in_the_order_of_its_copies():
    experts = torch.tensor([[0, 2, 3], [1, 2, 3]])
    rows, weights = numbers(6, 4), numbers(2, 3, seed=1)
    order = rows_by_expert(experts)
    got = rows_to_tokens(rows, weights, order, fixed=True)
    for token in range(2):
        places = order.row_of_copy[token].tolist()
        total = 0.0
        for copy, at in enumerate(places):
            total = single(total + single(rows[at, 1].item() * weights[token, copy].item()))
        assert got[token, 1].item() == total


def layer_of(mesh, moe, *, sequence_parallel=False):
    """A layer with the same weights on every mesh, whose sums are in the order of the model."""
    config = TransformerConfig(
        vocab_size=40, hidden_size=HIDDEN, num_layers=1, num_heads=4, ffn_size=24, moe=moe,
        init_std=0.2, activation="relu2", sequence_parallel=sequence_parallel,
    )  # fmt: skip
    layer = MoELayer(config, mesh)
    for module in layer.modules():
        if hasattr(module, "init_seed"):
            module.init_seed = 5
            module.reset_parameters()
    return layer


MOE = MoEConfig(num_experts=8, top_k=3, ffn_size=8)


def test_a_tokens_result_does_not_depend_on_which_others_its_expert_received():
    layer = layer_of(None, MOE)
    fix_sums(layer, TokenCut())
    x = torch.randn(50, HIDDEN)
    whole = layer(x)
    for piece in (slice(0, 1), slice(3, 20), slice(17, 50)):
        assert torch.equal(layer(x[piece]), whole[piece])


def test_the_order_of_a_tokens_experts_is_their_number():
    layer = layer_of(None, MOE)
    fix_sums(layer, TokenCut())
    experts = layer.router(torch.randn(30, HIDDEN)).experts
    assert torch.equal(experts, experts.sort(dim=-1).values)


def train(mesh, moe, rows, *, sequence_parallel=False):
    """Outputs and gradients by token, gradients of parameters, and how these are cut."""
    layer = layer_of(mesh, moe, sequence_parallel=sequence_parallel)
    axis = axis_of(mesh, "tp")
    cut = TokenCut(axis, sequence_parallel, axis_of(mesh, "cp"), rows)
    fix_sums(layer, cut)
    roles = {name: role_of(parameter) for name, parameter in layer.named_parameters()}
    share = Share.of(mesh, SEQUENCES, LENGTH, rows)
    generator = torch.Generator().manual_seed(0)
    x, weights = (torch.randn(SEQUENCES * LENGTH, HIDDEN, generator=generator) for _ in range(2))
    if mesh is not None:
        layer = fully_shard(
            layer, device_mesh=mesh, invariant=True, calculate_per_token_loss=True,
            zero_dp_strategy=1, fsdp_unit_modules=[],
        )  # fmt: skip
    by_token = {}
    for microbatch in range(share.microbatches):
        tokens = share.tokens(microbatch)
        shape = tuple(tokens.shape)
        tokens = tokens.flatten()
        if sequence_parallel:
            tokens = tokens.chunk(axis.size)[axis.rank]
        # Sequences have different numbers of labels.
        labels = torch.arange(SEQUENCES)[share.rows_of(microbatch)] + 1
        context = RoutingContext(AuxiliaryScale(labels))
        inputs = x[tokens].requires_grad_()
        last = mesh is None or microbatch == share.microbatches - 1
        with nullcontext() if last else layer.no_sync():
            output = layer(inputs, context, shape)
            (output * weights[tokens]).sum().backward()
        for at, token in enumerate(tokens.tolist()):
            by_token[token] = output[at].detach(), inputs.grad[at]
    if mesh is None:
        return by_token, {name: p.grad for name, p in layer.named_parameters()}, roles, share
    finalize_grads(layer, mesh, num_tokens=1)  # which divides by the number of ranks
    ranks = share.axes["dp"][1] * share.axes["cp"][1]
    return by_token, {n: g * ranks for n, g in full_gradients(layer).items()}, roles, share


LAYOUTS = {
    "dp 4": {"dp_shard": 4},
    "dp 2 x 2, ep 2": {"dp_replicate": 2, "dp_shard": 2, "ep": 2},
    "dp 4, ep 2": {"dp_shard": 4, "ep": 2},
    "dp 4, ep 4": {"dp_shard": 4, "ep": 4},
    "dp 4, ep 2, expert_tp 2": {"dp_shard": 4, "ep": 2, "expert_tp": 2},
    "dp 4, expert_tp 4": {"dp_shard": 4, "expert_tp": 4},
    "tp 2, expert_tp 2": {"tp": 2, "dp_shard": 2, "expert_tp": 2},
    "tp 4, expert_tp 4": {"tp": 4, "dp_shard": 1, "expert_tp": 4},
    "sp 2": {"tp": 2, "dp_shard": 2},
    "sp 2, ep 2": {"tp": 2, "dp_shard": 2, "ep": 2},
    "sp 2, expert_tp 2": {"tp": 2, "dp_shard": 2, "expert_tp": 2},
    "sp 2, ep 4": {"tp": 2, "dp_shard": 2, "ep": 4},
    "cp 2": {"cp": 2, "dp_shard": 2},
    "cp 2, ep 2": {"cp": 2, "dp_shard": 2, "ep": 2},
    "cp 4, ep 2": {"cp": 4, "dp_shard": 1, "ep": 2},
    "cp 2, sp 2": {"cp": 2, "tp": 2, "dp_shard": 1},
    "cp 2, sp 2, ep 2": {"cp": 2, "tp": 2, "dp_shard": 1, "ep": 2},
    "cp 2, sp 2, expert_tp 2": {"cp": 2, "tp": 2, "dp_shard": 1, "expert_tp": 2},
}
QUICK = ("dp 4, ep 2, expert_tp 2", "tp 2, expert_tp 2", "sp 2, ep 4", "cp 2, sp 2, ep 2")
KINDS = {
    "losses": MoEConfig(
        num_experts=8, top_k=3, ffn_size=8, sequence_loss=0.1, z_loss=0.01, bias_rate=0.001
    ),
    "sigmoid, groups, shared": MoEConfig(
        num_experts=8, top_k=2, ffn_size=8, scores="sigmoid", num_groups=4, groups_kept=2,
        shared_ffn_size=16, weight_scale=2.5,
    ),
}  # fmt: skip


def same_as_one_process(layout, kind, rows):
    expected, gradients, _, _ = train(None, KINDS[kind], SEQUENCES)
    mesh = ParallelLayout(**LAYOUTS[layout]).build("cpu")
    sequence_parallel = "sp" in layout
    by_token, got, roles, share = train(
        mesh, KINDS[kind], rows, sequence_parallel=sequence_parallel
    )
    for token, pair in by_token.items():
        assert all(map(torch.equal, pair, expected[token])), f"token {token}"
    for name, gradient in got.items():
        whole = gradients[name]
        index = parameter_piece(gradient.shape, whole.shape, roles[name], share)
        assert torch.equal(gradient, whole.flatten()[index]), name


@pytest.mark.ranks(4, backend="gloo")  # a GPU has other bits: tests/virtual_gpu/test_invariance.py
@pytest.mark.parametrize("layout", QUICK)
def test_a_layer_has_the_bits_of_one_process(layout, ranks):
    same_as_one_process(layout, "losses", 1)


@pytest.mark.slow
@pytest.mark.ranks(4, backend="gloo")  # a GPU has other bits: tests/virtual_gpu/test_invariance.py
@pytest.mark.parametrize("rows", [1, 2])
@pytest.mark.parametrize("kind", list(KINDS))
@pytest.mark.parametrize("layout", list(LAYOUTS))
def test_a_layer_has_the_bits_of_one_process_on_every_layout(layout, kind, rows, ranks):
    same_as_one_process(layout, kind, rows)


@pytest.mark.parametrize(
    ("setting", "message"),
    [
        ({"dispatcher": "all_gather"}, "dispatcher='all_gather'"),
        ({"capacity_factor": 1.5, "pad_to_capacity": True}, "pad_to_capacity=True"),
        ({"switch_loss": 0.1}, "switch_loss=0.1"),
        ({"global_loss": 0.1}, r"global_loss=0.1 .* add global_loads='last_step'"),
    ],
)
def test_what_depends_on_the_layout_is_refused_by_name(setting, message):
    moe = MoEConfig(num_experts=8, top_k=2, **setting)
    with pytest.raises(ValueError, match=f"invariant=True beside {message}"):
        TransformerConfig(
            vocab_size=40, hidden_size=16, num_layers=1, num_heads=4, moe=moe, invariant=True
        )
