"""Modules that widen what they need by themselves, under a policy that keeps them in float32."""

from __future__ import annotations

import pytest
import torch
from torch import nn

from lamina.ddp import finalize_grads
from lamina.fsdp import MixedPrecisionPolicy, fully_shard, shard_module
from lamina.mesh import ParallelLayout
from lamina.models import MambaConfig, MoEConfig, MoELayer, TransformerConfig
from lamina.models.mamba import MambaMixer
from lamina_testing import device_type

BF16 = torch.bfloat16
SIZES = {"vocab_size": 32, "hidden_size": 16, "num_layers": 1, "num_heads": 2}
MOE = MoEConfig(num_experts=4, top_k=2, ffn_size=8, bias_rate=0.001, scores="sigmoid")
MAMBA = MambaConfig(state_size=8, head_dim=8)


class Both(nn.Module):
    def __init__(self):
        super().__init__()
        self.mixer = MambaMixer(TransformerConfig(**SIZES, mamba=MAMBA, layer_pattern="M"))
        self.moe = MoELayer(TransformerConfig(**SIZES, moe=MOE))

    def forward(self, x):
        return self.moe(self.mixer(x))


@pytest.mark.ranks(2)
def test_routers_and_scans_kept_in_float32_take_and_give_what_they_do_without_it(ranks):
    policy = MixedPrecisionPolicy(
        param_dtype=BF16,
        buffer_dtype=BF16,
        keep_full_precision=["*router*", "*A_log", "*dt_bias", "*scan.D"],
    )
    mesh = ParallelLayout().build(device_type())
    for shard in (
        lambda model: fully_shard(model, device_mesh=mesh, mixed_precision_policy=policy),
        lambda model: shard_module(model, mesh["dp_shard"], mp_policy=policy),
    ):
        torch.manual_seed(3)
        model, seen = Both(), {}
        model.moe.router.register_forward_hook(
            lambda _, __, routing, seen=seen: seen.update(weights=routing.weights.dtype)
        )
        model.mixer.scan.register_forward_hook(
            lambda _, args, y, seen=seen: seen.update(scan=[x.dtype for x in args[:4]], y=y.dtype)
        )
        model = shard(model)
        for step in range(3):
            generator = torch.Generator().manual_seed(10 * step + ranks.rank)
            model(
                torch.randn(2, 8, 16, generator=generator).to(BF16)
            ).float().square().mean().backward()
            finalize_grads(model, mesh)
        assert seen == {"weights": torch.float32, "scan": [BF16] * 4, "y": BF16}
        bias = model.state_dict()["moe.router.expert_bias"]
        steps = (bias / 0.001).round()
        assert bias.dtype == torch.float32
        assert steps.any()
        assert torch.allclose(bias, steps * 0.001, rtol=0, atol=1e-8)  # bfloat16 is off by 2e-6
