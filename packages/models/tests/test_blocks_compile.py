"""Blocks compile into one graph, so that Inductor can fuse what no kernel of ours does.

Whole models of other kinds are compiled in test_torch_interop.py and test_fp8.py.
"""

from __future__ import annotations

import subprocess
import sys
from dataclasses import replace

import pytest
import torch
from torch._subclasses import FakeTensorMode

from lamina.models import (
    AttentionContext,
    GPTModel,
    HyperConnections,
    LatentAttention,
    LayerNorm,
    MoEConfig,
    Precision,
    RMSNorm,
    TransformerBlock,
    TransformerConfig,
    apply_recompute,
    generate,
)
from lamina.models.attention import SparseLatentAttention
from lamina.models.layers.matmul_products import write_product

LLAMA = TransformerConfig(
    vocab_size=64, hidden_size=32, num_layers=2, num_heads=4, num_kv_heads=2, ffn_size=48
)
CONFIGS = {
    "window, qk-norm": replace(LLAMA, sliding_window=5, qk_norm=True, activation="relu2",
                               post_norm=True, dropout=0.1, attention_bias=True),
    "latent": replace(LLAMA, num_kv_heads=None, mla=LatentAttention(
        kv_lora_rank=12, q_lora_rank=20, qk_nope_head_dim=8, qk_rope_head_dim=4, v_head_dim=8
    )),
    "chosen keys": replace(LLAMA, num_kv_heads=None, mla=SparseLatentAttention(
        kv_lora_rank=12, q_lora_rank=20, qk_nope_head_dim=8, qk_rope_head_dim=4, v_head_dim=8,
        top_k=5, index_heads=8, index_width=8, index_loss=0.0,
    )),
    "streams": replace(LLAMA, hyper_connections=HyperConnections(streams=3, iterations=4)),
}  # fmt: skip


@pytest.mark.parametrize("name", list(CONFIGS))
def test_a_block_is_one_graph(name):
    torch.manual_seed(0)
    block = TransformerBlock(CONFIGS[name])
    x = torch.randn(2, 16, CONFIGS[name].stream_width)
    context = AttentionContext.build(CONFIGS[name], x, x.dtype)
    graphs = []

    def backend(graph, _):
        graphs.append(graph)
        return graph.forward

    compiled = torch.compile(block, backend=backend, fullgraph=True)
    outputs = []
    for function in (block, compiled):
        torch.manual_seed(1)
        outputs.append(function(x, context))
    torch.testing.assert_close(*outputs)
    assert len(graphs) == 1


@pytest.mark.parametrize("kind", ["none", "full", "selective", "offload"])
def test_blocks_share_a_graph_in_training_and_one_in_evaluation_and_sampling_compiles_none(kind):
    graphs = []

    def backend(graph, _):
        graphs.append(graph)
        return graph.forward

    tokens = torch.arange(32).view(2, 16)
    expected = GPTModel(LLAMA, seed=1)
    expected(tokens, tokens).backward()
    model = apply_recompute(GPTModel(LLAMA, seed=1), kind)
    for block in model.blocks:
        block.compile(backend=backend)
    for _ in range(2):
        model.zero_grad()
        model(tokens, tokens).backward()
    assert len(graphs) == 1
    for parameter, other in zip(model.parameters(), expected.parameters(), strict=True):
        torch.testing.assert_close(parameter.grad, other.grad)
    with torch.no_grad():
        model(tokens, tokens)
    assert len(graphs) == 2
    # A cache grows with each token, so blocks would be compiled for each length.
    generate(model, tokens[:, :4], 12, context_length=16)
    assert len(graphs) == 2


@pytest.mark.slow
def test_experts_in_fp32_compile():
    moe = MoEConfig(num_experts=4, top_k=2, ffn_size=16)
    tokens = torch.arange(32).view(2, 16)
    gradients = []
    for compiles in (False, True):
        model = GPTModel(replace(LLAMA, num_layers=1, moe=moe), seed=1)
        if compiles:
            model.blocks[0].compile(backend="aot_eager")
        model(tokens, tokens).backward()
        gradients.append([parameter.grad for parameter in model.parameters()])
    for found, wanted in zip(*gradients, strict=True):
        torch.testing.assert_close(found, wanted)


@pytest.mark.slow
@pytest.mark.parametrize("whole", [False, pytest.param(True, marks=pytest.mark.slow)])
def test_delayed_scales_move_compiled_as_they_do_uncompiled(whole):
    precision = Precision(backend="torch-fp8", amax="delayed", history=2)
    config = replace(LLAMA, num_layers=1, precision=precision)
    tokens = torch.arange(32).view(2, 16)
    runs = []
    for compiles in (False, True):
        model = GPTModel(config, seed=1)
        optimizer = torch.optim.SGD(model.parameters(), lr=0.5)
        if compiles:
            (model if whole else model.blocks[0].mlp).compile(backend="aot_eager")
        seen = []
        for step in range(2):
            loss = model(tokens + step, tokens)
            loss.backward()
            optimizer.step()
            optimizer.zero_grad()
            seen += [loss.detach(), *(buffer.clone() for buffer in model.buffers())]
        runs.append(seen)
    for found, expected in zip(*runs, strict=True):
        torch.testing.assert_close(found, expected)
    assert runs[0][1].any()


@pytest.mark.parametrize("kind", [RMSNorm, LayerNorm])
def test_norms_off_the_cpu_are_torch_s_own_operators(kind):
    # There is no GPU to ask: the meta device takes the same branch.
    norm = kind(32).to("meta")
    with torch.profiler.profile() as profile:
        norm(torch.empty(4, 32, device="meta"))
    names = {event.key for event in profile.key_averages()}
    assert names & {"aten::rms_norm", "aten::layer_norm"}


def test_importing_costs_no_compiler():
    program = "import sys, lamina.models; print(*sys.modules)"
    found = subprocess.run([sys.executable, "-c", program], capture_output=True, check=True)
    slow = {"torch._dynamo", "torch.distributed.tensor", "sympy"}  # seconds each
    assert not slow & set(found.stdout.decode().split())


def test_sums_of_products_in_fp32_are_traced_for_a_gpu():
    """As weights of the head get them, on CUDA in bf16; fake tensors need no GPU."""

    def add(left, right, total):
        write_product(left, right, total, accumulate=True)
        return total

    with FakeTensorMode():
        left, right = (torch.empty(4, 4, device="cuda", dtype=torch.bfloat16) for _ in range(2))
        total = torch.empty(4, 4, device="cuda")
        summed = torch.compile(add, backend="eager", fullgraph=True)(left, right, total)
        assert summed.shape == (4, 4)
        assert summed.dtype == torch.float32
