"""Compiled models over tensor and context parallelism: one graph, and one order of collectives."""

from __future__ import annotations

from dataclasses import replace

import pytest
import torch
import torch.distributed as dist
from torch._dynamo.backends.debugging import aot_eager

from lamina.collectives import Ledger
from lamina.mesh import ParallelLayout
from lamina.models import (
    GPTModel,
    LatentAttention,
    MoEConfig,
    Precision,
    TransformerBlock,
    TransformerConfig,
    apply_recompute,
)
from lamina_testing import device_type
from lamina_testing.inductor import needs_inductor

LLAMA = TransformerConfig(
    vocab_size=61, hidden_size=32, num_layers=1, num_heads=4, num_kv_heads=2, ffn_size=48,
    max_sequence_length=32, vocab_multiple=4, loss_chunk=10,
)  # fmt: skip
WHOLE_HEADS = replace(LLAMA, num_kv_heads=None)
FP8 = replace(LLAMA, ffn_size=64)  # its products need widths that 16 divides
CONFIGS = {
    "llama": LLAMA,
    "gpt": replace(WHOLE_HEADS, positions="learned", norm="layernorm", activation="gelu",
                   attention_bias=True, mlp_bias=True, tie_embeddings=True),
    "window": replace(LLAMA, sliding_window=5),
    "parallel MLP": replace(LLAMA, parallel_mlp="one_norm"),
    "norms over whole projections": replace(LLAMA, qk_norm="whole"),
    "latent": replace(WHOLE_HEADS, mla=LatentAttention(
        kv_lora_rank=12, q_lora_rank=20, qk_nope_head_dim=8, qk_rope_head_dim=4, v_head_dim=6
    )),
    "fp8": replace(FP8, precision=Precision(backend="torch-fp8")),
    "fp8 kept": replace(FP8, precision=Precision(backend="torch-fp8", keep_transpose=True)),
    "fp8 by rows": replace(FP8, precision=Precision(backend="torch-fp8", scaling="rowwise")),
}  # fmt: skip


MODES = [
    ("llama", "tp", {}, "none"),
    ("llama", "tp", {"sequence_parallel": True}, "full"),
    ("latent", "tp", {"sequence_parallel": True}, "selective"),
    ("gpt", "tp", {"sequence_parallel": True}, "none"),
    ("parallel MLP", "tp", {"sequence_parallel": True}, "none"),
    ("norms over whole projections", "tp", {}, "full"),
    ("llama", "cp", {"context_parallel": "ring"}, "full"),
    ("window", "cp", {"context_parallel": "ring"}, "none"),
    ("llama", "cp", {"context_parallel": "all_gather"}, "none"),
    ("llama", "cp", {"context_parallel": "ulysses"}, "none"),
    ("latent", "cp", {"context_parallel": "ulysses"}, "selective"),
    ("fp8", "tp", {"sequence_parallel": True}, "none"),
    ("fp8 kept", "tp", {}, "selective"),
    ("fp8 by rows", "tp", {"sequence_parallel": True}, "full"),
]
QUICK = (1, 6)


def modes(quick: bool):
    """Those of the default tier, or the others, which are slow."""
    return [mode for number, mode in enumerate(MODES) if (number in QUICK) == quick]


def built(name, axis, settings, recompute) -> GPTModel:
    mesh = ParallelLayout(**{axis: dist.get_world_size()}).build(device_type())
    torch.manual_seed(0)
    with torch.device(device_type()):
        model = GPTModel(replace(CONFIGS[name], **settings), mesh)
    return apply_recompute(model, recompute)


def trained(model, parameters) -> list[torch.Tensor]:
    """The gradients of a step, and the parameters after three."""
    torch.manual_seed(1)
    ids = torch.randint(0, 61, (2, 16), device=device_type())
    optimizer, first = torch.optim.SGD(parameters, lr=0.1), []
    for step in range(3):
        model(tokens=ids, labels=ids.roll(-1, 1)).backward()
        first += [each.grad.clone() for each in parameters if step == 0]
        optimizer.step()
        optimizer.zero_grad()
    return [*first, *(each.detach() for each in parameters)]


def compare(name, axis, settings, recompute, **how) -> None:
    """A compiled model has the gradients and parameters of the same model without a compiler."""
    plain, model = (built(name, axis, settings, recompute) for _ in range(2))
    expected = trained(plain, list(plain.parameters()))
    compiled = trained(torch.compile(model, fullgraph=True, **how), list(model.parameters()))
    torch.testing.assert_close(compiled, expected)


def compiles_into_one_graph(mode) -> None:
    graphs = []

    def backend(graph, inputs):
        graphs.append(graph)
        return aot_eager(graph, inputs)

    compare(*mode, backend=backend)
    assert len(graphs) == 1


@pytest.mark.ranks(2, timeout=300)  # a rank compiles for 7 s, and for 60 at load 60
@pytest.mark.parametrize("mode", modes(quick=True), ids=str)
def test_a_model_compiles_into_one_graph_over_ranks(mode):
    compiles_into_one_graph(mode)


@pytest.mark.slow
@pytest.mark.ranks(2, timeout=300)
@pytest.mark.parametrize("mode", modes(quick=False), ids=str)
def test_models_of_other_kinds_compile_into_one_graph_over_ranks(mode):
    compiles_into_one_graph(mode)


@pytest.mark.slow
@needs_inductor
@pytest.mark.ranks(2, timeout=300)  # Inductor compiles, and a busy machine gives it little
@pytest.mark.parametrize("mode", MODES, ids=str)
def test_ranks_communicate_in_one_order_whatever_the_compiler_exchanges(mode):
    # The order is Inductor's. Ranks whose orders differ would wait for each other for ever.
    with Ledger() as ledger:
        compare(*mode)
    mine = [(record.op, record.bytes) for record in ledger.records]
    theirs = [None] * dist.get_world_size()
    dist.all_gather_object(theirs, mine)
    assert all(each == mine for each in theirs)


@pytest.mark.ranks(2, reuse=False)  # the group of the tokens is not made before
def test_a_compiled_block_may_be_the_first_to_need_a_group(ranks):
    """Experts exchange tokens over a group of their own, which their first forward makes."""
    mesh = ParallelLayout(ep=2).build("cpu")
    experts = MoEConfig(num_experts=4, top_k=2, capacity_factor=1.0, pad_to_capacity=True)
    config = replace(LLAMA, moe=experts, num_layers=2)
    model, plain = (GPTModel(config, mesh, seed=0) for _ in range(2))
    for block in model.blocks:
        block.compile(backend=aot_eager)
    ids = torch.arange(32).view(1, 32) % 61
    losses = []
    for each in (model, plain):
        losses.append(each(ids, labels=ids))
        losses[-1].backward()
    torch.testing.assert_close(*losses)
    for own, wanted in zip(model.parameters(), plain.parameters(), strict=True):
        torch.testing.assert_close(own.grad, wanted.grad)


@pytest.mark.ranks(2)
def test_blocks_compile_once_for_all_of_them_and_share_the_graph():
    graphs = []

    def backend(graph, _):
        graphs.append(graph)
        return graph.forward

    model = built("llama", "tp", {"sequence_parallel": True, "num_layers": 3}, "full")
    for block in model.modules():
        if isinstance(block, TransformerBlock):
            block.compile(backend=backend)
    trained(model, list(model.parameters()))
    assert len(graphs) == 1
