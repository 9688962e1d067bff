"""Two axes of a 2 x 2 mesh at work in one model: gradients are those of one process."""

from __future__ import annotations

import pytest
import torch
import torch.distributed as dist
import torch.nn.functional as F
from torch.distributed.device_mesh import init_device_mesh

from lamina.collectives import (
    Ledger,
    all_gather_into,
    all_reduce_fp32,
    all_to_all_tokens,
    copy_to,
    gather_from,
    reduce_from,
    reduce_scatter_fp32,
    reduce_scatter_to,
    scatter_to,
)
from lamina.mesh import ParallelLayout
from lamina.mesh.engine import mesh_axis
from lamina_testing import device_type


def seeded(salt: int, *shape: int) -> torch.Tensor:
    return torch.randn(shape, generator=torch.Generator().manual_seed(salt), dtype=torch.float64)


def leaves(*tensors: torch.Tensor) -> list[torch.Tensor]:
    return [tensor.clone().requires_grad_() for tensor in tensors]


def summed(gradient: torch.Tensor, group: dist.ProcessGroup) -> torch.Tensor:
    """Sum over data-parallel ranks the way a sharded optimizer does it: scatter, then gather."""
    whole, flat = torch.empty(gradient.numel(), dtype=torch.float64), gradient.reshape(-1)
    piece = torch.empty(flat.numel() // group.size(), dtype=torch.float64)
    reduce_scatter_fp32(piece, flat, group)
    all_gather_into(whole, piece, group)
    return whole.view(gradient.shape)


@pytest.mark.ranks(4)
@pytest.mark.parametrize("kind", ["ParallelMesh", "DeviceMesh"])
def test_sequence_parallel_layers_under_data_parallelism(kind):
    if kind == "ParallelMesh":
        mesh = ParallelLayout(dp_shard=2, tp=2).build(device_type())
    else:
        mesh = init_device_mesh(device_type(), (2, 2), mesh_dim_names=("dp_shard", "tp"))
    tp, dp = mesh_axis(mesh, "tp"), mesh_axis(mesh, "dp_shard")
    x, norm, first, second = seeded(1, 4, 6, 4), seeded(2, 4), seeded(3, 8, 4), seeded(4, 4, 8)

    whole = leaves(norm, first, second)
    hidden = torch.tanh(F.linear(x * whole[0], whole[1]))
    F.linear(hidden, whole[2]).square().sum().backward()

    parts = leaves(norm, first.chunk(2, 0)[tp.rank], second.chunk(2, 1)[tp.rank])
    with Ledger() as ledger:
        mine = scatter_to(x.chunk(2, 0)[dp.rank], tp.group, 1)  # batch over dp, sequence over tp
        y = gather_from(mine * copy_to(parts[0], tp.group), tp.group, 1, grad="reduce_scatter")
        y = F.linear(torch.tanh(F.linear(y, parts[1])), parts[2])
        reduce_scatter_to(y, tp.group, 1).square().sum().backward()
        grads = [summed(part.grad, dp.group) for part in parts]

    torch.testing.assert_close(grads[0], whole[0].grad)
    torch.testing.assert_close(grads[1], whole[1].grad.chunk(2, 0)[tp.rank])
    torch.testing.assert_close(grads[2], whole[2].grad.chunk(2, 1)[tp.rank])
    activation = 2 * 6 * 4 * 8  # bytes of a rank's batch over the whole sequence
    regions = 4 * activation // 2 + 2 * norm.numel() * 8 // 2  # two each way, and the norm's sum
    assert ledger.bytes(axis="tp") == regions
    assert ledger.bytes(axis="dp_shard") == sum(2 * p.numel() * 8 // 2 for p in parts)
    assert ledger.bytes() == ledger.bytes(axis="tp") + ledger.bytes(axis="dp_shard")


@pytest.mark.ranks(4)
def test_attention_with_sequence_over_cp_and_heads_over_tp():
    mesh = ParallelLayout(cp=2, tp=2).build(device_type())
    cp, tp = mesh.axis("cp"), mesh.axis("tp")
    heads, length, width = 4, 8, 3
    x, qkv = seeded(1, length, 5), seeded(2, 3, heads, width, 5)
    out = seeded(3, 5, heads, width)

    def attend(x, keys_from, qkv, out):
        q = torch.einsum("sd,hwd->hsw", x, qkv[0])
        k, v = (torch.einsum("sd,hwd->hsw", keys_from, weight) for weight in qkv[1:])
        return torch.einsum("hsw,dhw->sd", F.scaled_dot_product_attention(q, k, v), out)

    whole = leaves(x, qkv, out)
    attend(whole[0], whole[0], whole[1], whole[2]).square().sum().backward()

    parts = leaves(x.chunk(2)[cp.rank], qkv.chunk(2, 1)[tp.rank], out.chunk(2, 1)[tp.rank])
    mine = copy_to(parts[0], tp.group)
    keys_from = gather_from(mine, cp.group, grad="reduce_scatter")
    y = reduce_from(attend(mine, keys_from, parts[1], parts[2]), tp.group)
    y.square().sum().backward()
    for part in parts[1:]:  # cp ranks saw different positions with the same weights
        flat = part.grad.reshape(-1)
        all_reduce_fp32(flat, flat, cp.group)

    torch.testing.assert_close(parts[0].grad, whole[0].grad.chunk(2)[cp.rank])
    torch.testing.assert_close(parts[1].grad, whole[1].grad.chunk(2, 1)[tp.rank])
    torch.testing.assert_close(parts[2].grad, whole[2].grad.chunk(2, 1)[tp.rank])


@pytest.mark.ranks(4)
def test_experts_over_ep_with_copies_over_expert_dp():
    mesh = ParallelLayout(dp_shard=4, ep=2).build(device_type())
    ep, copies = mesh.axis("ep"), mesh.axis("expert_dp")
    rank = dist.get_rank()
    tokens, experts = seeded(1, 20, 6), seeded(2, 2, 6, 6)
    choice = torch.randint(2, (20,), generator=torch.Generator().manual_seed(3))
    choice[5:10] = 1  # rank 1 has nothing for the first expert

    whole = leaves(tokens, experts)
    y = torch.stack([torch.tanh(t @ whole[1][c]) for t, c in zip(whole[0], choice, strict=True)])
    y.square().sum().backward()

    parts = leaves(tokens.chunk(4)[rank], experts[ep.rank])
    order = choice.chunk(4)[rank].argsort(stable=True)
    sends = choice.chunk(4)[rank].bincount(minlength=2).tolist()
    counts = [choice.chunk(4)[other].bincount(minlength=2).tolist() for other in ep.ranks]
    receives = [row[ep.rank] for row in counts]
    there = all_to_all_tokens(parts[0][order], ep.group, output_splits=receives, input_splits=sends)
    back = all_to_all_tokens(
        torch.tanh(there @ parts[1]), ep.group, output_splits=sends, input_splits=receives
    )
    y = torch.zeros_like(back).index_copy(0, order, back)
    y.square().sum().backward()

    torch.testing.assert_close(parts[0].grad, whole[0].grad.chunk(4)[rank])
    torch.testing.assert_close(summed(parts[1].grad, copies.group), whole[1].grad[ep.rank])
