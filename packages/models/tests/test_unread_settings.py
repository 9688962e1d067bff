"""A setting or an argument that another one leaves without effect is refused with both names."""

from __future__ import annotations

import pytest
import torch

from lamina.mesh import ParallelLayout
from lamina.models import (
    GPTModel,
    LatentAttention,
    MambaConfig,
    MoEConfig,
    Precision,
    RecomputePolicy,
    RopeScaling,
    TransformerConfig,
    pipeline,
)
from lamina_testing import device_type

SHAPE = {"vocab_size": 64, "hidden_size": 64, "num_layers": 2, "num_heads": 4}
LATENT = LatentAttention(kv_lora_rank=16, qk_nope_head_dim=8, qk_rope_head_dim=8, v_head_dim=8)
EXPERTS = {"num_experts": 8, "top_k": 2}

# Every pair: what is made, the setting without effect, the one that leaves it so.
PAIRS = [
    (TransformerConfig, {"rope_theta": 5.0}, {"positions": "none"}),
    (TransformerConfig, {"rope_theta": 5.0}, {"positions": "learned"}),
    (
        TransformerConfig,
        {"rope_scaling": RopeScaling(kind="linear", factor=2.0)},
        {"positions": "none"},
    ),
    (TransformerConfig, {"num_kv_heads": 2}, {"mla": LATENT}),
    (TransformerConfig, {"head_dim": 32}, {"mla": LATENT}),
    (TransformerConfig, {"qk_norm": True}, {"mla": LATENT}),
    (TransformerConfig, {"mamba": MambaConfig()}, {"layer_pattern": None}),
    (TransformerConfig, {"mamba": MambaConfig()}, {"layer_pattern": "*-"}),
    (TransformerConfig, {"moe": MoEConfig(**EXPERTS)}, {"layer_pattern": "*-"}),
    (TransformerConfig, {"mlp_bias": True}, {"moe": MoEConfig(**EXPERTS)}),
    (MoEConfig, {"group_best": 3}, {"num_groups": 1}),
    (MoEConfig, {"pad_to_capacity": True}, {"capacity_factor": None}),
    (MoEConfig, {"drop": "position"}, {"capacity_factor": None}),
    (RopeScaling, {"low_freq_factor": 2.0}, {"kind": "yarn"}),
    (RopeScaling, {"high_freq_factor": 8.0}, {"kind": "linear"}),
    (RopeScaling, {"beta_fast": 16.0}, {"kind": "llama3"}),
    (RopeScaling, {"beta_slow": 2.0}, {"kind": "llama3"}),
    (RopeScaling, {"attention_factor": 2.0}, {"kind": "linear"}),
    (RopeScaling, {"truncate": False}, {"kind": "llama3"}),
    (RopeScaling, {"original_length": 4096}, {"kind": "linear"}),
    (Precision, {"amax": "delayed"}, {"backend": "torch"}),
    (Precision, {"history": 4}, {"amax": "current"}),
    (Precision, {"keep_transpose": True}, {"backend": "torch"}),
    (RecomputePolicy, {"every": 2}, {"kind": "none"}),
    (RecomputePolicy, {"operations": ("norm",)}, {"kind": "full"}),
    (RecomputePolicy, {"min_numel": 1}, {"kind": "selective"}),
]
NEEDED = {
    TransformerConfig: SHAPE,
    MoEConfig: EXPERTS,
    RopeScaling: {"factor": 2.0},
    Precision: {"backend": "torch-fp8"},
    RecomputePolicy: {},
}


@pytest.mark.parametrize(("kind", "without", "because"), PAIRS)
def test_a_setting_without_effect_is_refused_with_the_one_that_leaves_it_so(kind, without, because):
    (name,), (other,) = without, because
    with pytest.raises(ValueError, match=rf"(?s){name}.*{other}|{other}.*{name}"):
        kind(**{**NEEDED[kind], **because, **without})
    kind(**{**NEEDED[kind], **because})


def test_layers_by_a_pattern_have_no_first_dense_ones():
    moe = MoEConfig(**EXPERTS, first_dense=1)
    with pytest.raises(ValueError, match=r"first_dense=1 .*layer_pattern='\*E'"):
        TransformerConfig(**SHAPE, layer_pattern="*E", moe=moe)


@pytest.mark.ranks(1)
@pytest.mark.parametrize(
    ("given", "said"),
    [
        ({"sequence": 8, "layout": [2]}, "sequence has no effect: layout"),
        ({"each_microbatch": True}, "each_microbatch has no effect: wrap=None"),
        ({"device": "meta"}, r"device has no effect: model is on \w+(:0)? already"),
    ],
)
def test_a_pipeline_refuses_arguments_without_effect(given, said):
    model = GPTModel(TransformerConfig(**SHAPE))
    with pytest.raises(ValueError, match=said):
        pipeline(model, ParallelLayout().build(device_type()), **given)


@pytest.mark.ranks(1)
def test_a_mesh_without_a_pipeline_says_what_it_passes_over():
    with torch.device("meta"):
        model = GPTModel(TransformerConfig(**SHAPE))
    with pytest.warns(UserWarning, match=r"layout=\[2\], stages_per_rank=2 without effect: .*pp=1"):
        pipeline(
            model,
            ParallelLayout().build(device_type()),
            layout=[2],
            stages_per_rank=2,
            device="cpu",
        )
