"""Experts on a GPU: grouped products, a model beside the CPU, waits of the host, shared GPUs."""

from __future__ import annotations

import warnings
from dataclasses import replace

import pytest
import torch

from lamina.mesh import ParallelLayout
from lamina.models import GPTModel, GroupedExperts, MoEConfig, MoELayer, TransformerConfig
from lamina.models.moe import ExpertRows

pytestmark = pytest.mark.skipif(not torch.cuda.is_available(), reason="no CUDA device")

MOE = MoEConfig(num_experts=8, top_k=2, ffn_size=64, shared_ffn_size=64, switch_loss=0.01)
CONFIG = TransformerConfig(
    vocab_size=256, hidden_size=128, num_layers=2, num_heads=4, init_std=0.1, moe=MOE
)
PADDED = {"capacity_factor": 1.25, "pad_to_capacity": True}


@pytest.mark.parametrize(
    "counts", [(64, 64, 64, 64), (250, 0, 6, 0), (0, 0, 0, 256), (1, 2, 3, 250)]
)
@pytest.mark.parametrize("activation", ["swiglu", "gelu"])
def test_grouped_products_in_bfloat16_are_near_the_loop_in_float64(counts, activation):
    torch.manual_seed(0)
    experts = GroupedExperts(4, 128, 64, activation=activation, init_std=0.1).cuda().bfloat16()
    exact = GroupedExperts(4, 128, 64, activation=activation, path="loop").cuda().double()
    exact.load_state_dict(experts.state_dict())
    experts.path = "grouped"
    x = torch.randn(256, 128, device="cuda", dtype=torch.bfloat16)
    found = {}
    for module, rows in ((experts, x), (exact, x.double())):
        rows = rows.clone().requires_grad_()
        # Without numbers on the host equal counts are grouped as well.
        out = module(ExpertRows(rows, torch.tensor(counts, device="cuda")))
        out.square().sum().backward()
        found[module] = [out, rows.grad, module.up.grad, module.down.grad]
    for one, other in zip(found[experts], found[exact], strict=True):
        assert torch.isfinite(one).all()
        error = (one.double() - other).norm() / other.norm()
        assert error < 2e-2
    for expert, count in enumerate(counts):
        if count == 0:
            assert not experts.up.grad[expert].any()
            assert not experts.down.grad[expert].any()


def test_a_model_with_experts_computes_what_it_does_on_the_cpu():
    tokens = torch.randint(0, 256, (2, 33), generator=torch.Generator().manual_seed(0))
    # Angles of rotary positions are in float32, and the two devices round them differently.
    config = replace(
        CONFIG, positions="learned", max_sequence_length=32, moe=replace(MOE, bias_rate=0.01)
    )
    model = GPTModel(config, seed=0).double()
    losses, gradients, biases = [], [], []
    for device in ("cpu", "cuda"):
        model.to(device)
        model.zero_grad()
        for block in model.blocks:
            block.mlp.router.expert_bias.zero_()
        loss = model(tokens[:, :-1].to(device), tokens[:, 1:].to(device))
        loss.backward()
        for block in model.blocks:
            block.mlp.router.finalize_step(None)
        losses.append(loss.detach().cpu())
        # Clones: `model.to` moves the gradients of the CPU themselves.
        gradients.append([parameter.grad.cpu().clone() for parameter in model.parameters()])
        biases.append([block.mlp.router.expert_bias.cpu().clone() for block in model.blocks])
    torch.testing.assert_close(losses[1], losses[0], rtol=1e-9, atol=0)
    for found, wanted in zip(gradients[1], gradients[0], strict=True):
        torch.testing.assert_close(found, wanted, rtol=1e-7, atol=1e-10)
    assert all(map(torch.equal, biases[1], biases[0]))


def test_padded_experts_here_make_the_host_wait_for_nothing():
    torch.manual_seed(0)
    layer = MoELayer(replace(CONFIG, moe=replace(MOE, **PADDED))).cuda().bfloat16()
    x = torch.randn(2, 64, 128, device="cuda", dtype=torch.bfloat16, requires_grad=True)
    assert waits(lambda: layer(x).sum().backward()) == []


def waits(call):
    """What CUDA's debug mode reports while ``call`` runs for the second time."""
    call()
    torch.cuda.synchronize()
    with warnings.catch_warnings(record=True) as caught:
        warnings.simplefilter("always")
        torch.cuda.set_sync_debug_mode("warn")
        try:
            call()
        finally:
            torch.cuda.set_sync_debug_mode("default")
    # The mode's own first warning speaks of synchronizing too.
    said = [str(w.message) for w in caught]
    return [text for text in said if "called a synchronizing CUDA operation" in text]


@pytest.mark.ranks(2, backend="gloo", device="cuda", timeout=240)
@pytest.mark.parametrize("transport", [{}, {"dispatcher": "all_gather"}, PADDED], ids=str)
def test_ranks_that_share_a_gpu_equal_one_process(transport, ranks):
    """gloo with CUDA tensors: streams, handles and kernels, not NCCL."""
    mesh = ParallelLayout(ep=2).build("cuda")
    config = replace(CONFIG, moe=replace(MOE, **transport))
    made = []
    for where in (mesh, None):
        torch.manual_seed(1)
        made.append(MoELayer(config, where).double().cuda())
    layer, whole = made
    generator = torch.Generator().manual_seed(0)
    pieces = torch.randn(2, 32, 128, generator=generator, dtype=torch.float64).cuda()
    mine = pieces[ranks.rank].clone().requires_grad_()
    found = layer(mine)
    found.square().sum().backward()
    # Capacity and losses count within a rank: the whole layer takes the ranks' tokens in turn.
    results = []
    for piece in pieces:
        other = piece.clone().requires_grad_()
        results.append((whole(other), other))
        results[-1][0].square().sum().backward()
    wanted, other = results[ranks.rank]
    torch.testing.assert_close(found, wanted, rtol=1e-9, atol=1e-9)
    torch.testing.assert_close(mine.grad, other.grad, rtol=1e-9, atol=1e-9)
    if not transport:
        held = slice(4 * ranks.rank, 4 * ranks.rank + 4)
        for name in ("up", "down"):
            one, both = layer.experts.get_parameter(name), whole.experts.get_parameter(name)
            torch.testing.assert_close(one.grad, both.grad[held], rtol=1e-9, atol=1e-9)
