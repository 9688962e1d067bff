"""Blocks compile into one graph, so that Inductor can fuse what no kernel of ours does.

Whole models of other kinds are compiled in test_torch_interop.py and test_fp8.py.
"""

from __future__ import annotations

import subprocess
import sys
from dataclasses import replace

import pytest
import torch

from lamina.models import (
    AttentionContext,
    LatentAttention,
    LayerNorm,
    RMSNorm,
    TransformerBlock,
    TransformerConfig,
)

LLAMA = TransformerConfig(
    vocab_size=64, hidden_size=32, num_layers=2, num_heads=4, num_kv_heads=2, ffn_size=48
)
CONFIGS = {
    "window, qk-norm": replace(LLAMA, sliding_window=5, qk_norm=True, activation="relu2",
                               post_norm=True, dropout=0.1, attention_bias=True),
    "latent": replace(LLAMA, num_kv_heads=None, mla=LatentAttention(
        kv_lora_rank=12, q_lora_rank=20, qk_nope_head_dim=8, qk_rope_head_dim=4, v_head_dim=8
    )),
}  # fmt: skip


@pytest.mark.parametrize("name", list(CONFIGS))
def test_a_block_is_one_graph(name):
    torch.manual_seed(0)
    block = TransformerBlock(CONFIGS[name])
    x = torch.randn(2, 16, 32)
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
