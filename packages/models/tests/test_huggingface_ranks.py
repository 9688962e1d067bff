"""Weights that are cut over ranks leave and arrive whole (without importing transformers)."""

from __future__ import annotations

import json
from dataclasses import replace

import pytest
import torch
import torch.distributed as dist

from lamina.mesh import ParallelLayout
from lamina.models import (
    GPTModel,
    LatentAttention,
    from_huggingface,
    huggingface_config,
    preset,
    to_huggingface,
)
from lamina_testing import device_type

TINY = {"vocab_size": 61, "hidden_size": 32, "num_layers": 2, "num_heads": 4, "vocab_multiple": 2}
LLAMA = preset("llama3-8b", **TINY, num_kv_heads=2, ffn_size=40, max_sequence_length=64)
CONFIGS = {
    "gpt2": preset("gpt2", **TINY, max_sequence_length=64),
    "llama": LLAMA,
    "deepseek": replace(
        LLAMA,
        num_kv_heads=None,
        mla=LatentAttention(kv_lora_rank=16, qk_nope_head_dim=8, qk_rope_head_dim=6, v_head_dim=10),
    ),
}


@pytest.mark.ranks(2)
@pytest.mark.parametrize("name", list(CONFIGS))
def test_weights_cut_over_ranks_export_whole(name):
    mesh = ParallelLayout(tp=2).build(device_type())
    whole, model = GPTModel(CONFIGS[name], seed=4), GPTModel(CONFIGS[name], mesh, seed=4)
    expected, exported = to_huggingface(whole), to_huggingface(model)
    assert expected.keys() == exported.keys()
    assert all(torch.equal(exported[key], value) for key, value in expected.items())


@pytest.mark.ranks(2)
def test_each_rank_reads_its_pieces(tmp_path):
    save_file = pytest.importorskip("safetensors.torch").save_file
    config = replace(LLAMA, vocab_size=62)
    if dist.get_rank() == 0:
        save_file(to_huggingface(GPTModel(config, seed=4)), tmp_path / "model.safetensors")
        (tmp_path / "config.json").write_text(json.dumps(huggingface_config(config)))
    dist.barrier()
    mesh = ParallelLayout(tp=2).build(device_type())
    model, expected = from_huggingface(tmp_path, mesh), GPTModel(config, mesh, seed=4)
    for (name, parameter), other in zip(
        model.named_parameters(), expected.parameters(), strict=True
    ):
        assert torch.equal(parameter, other), name


@pytest.mark.parametrize(
    ("change", "message"),
    [
        ({"model.norm.weight_scale_inv": torch.ones(1)}, r"norm\.weight has codes torch\.float32"),
        ({"model.norm.weight": torch.ones(32).to(torch.float8_e4m3fn)}, r"float8_e4m3fn, codes"),
        ({"model.norm.weight": torch.ones(32, dtype=torch.int8)}, r"torch\.int8, codes"),
        ({}, "quantization_config of config.json: {'quant_method': 'fp8'}"),
    ],
)
def test_quantised_weights_are_refused(change, message, tmp_path):
    save_file = pytest.importorskip("safetensors.torch").save_file
    config = replace(LLAMA, num_layers=1)
    save_file(to_huggingface(GPTModel(config, seed=4)) | change, tmp_path / "model.safetensors")
    written = huggingface_config(config)
    if not change:
        written["quantization_config"] = {"quant_method": "fp8"}
    (tmp_path / "config.json").write_text(json.dumps(written))
    with pytest.raises(ValueError, match=message):
        from_huggingface(tmp_path)
