"""Types of transformers that are read by tables: the same logits, and the same bits back."""

from __future__ import annotations

import copy
import json
import re
import sys
from collections.abc import Iterator, Mapping
from dataclasses import replace
from pathlib import Path
from typing import Any

import pytest
import torch

from lamina.models import (
    Activation,
    GPTModel,
    TransformerConfig,
    config_from_huggingface,
    from_huggingface,
    huggingface_config,
    to_huggingface,
)
from lamina.models.huggingface.known_types import known_types
from lamina.models.huggingface.model_types import Field, ModelType
from lamina.models.layers.mlp import ActivationFunction
from lamina.models.mamba import GatedDeltaNet, Mamba1, ShortConvolution

transformers = pytest.importorskip("transformers")
safetensors = pytest.importorskip("safetensors.torch")
mxfp4 = pytest.importorskip("transformers.integrations.mxfp4")

SIZES = {
    "vocab_size": 61, "hidden_size": 32, "num_hidden_layers": 2, "num_attention_heads": 4,
    "num_key_value_heads": 2, "intermediate_size": 40, "max_position_embeddings": 64,
    "head_dim": 8, "n_embd": 32, "n_layer": 2, "n_head": 4, "n_positions": 64, "n_inner": 40,
    "ffn_dim": 40, "moe_intermediate_size": 12, "num_experts": 4, "n_routed_experts": 4,
    "num_local_experts": 4,
    "num_experts_per_tok": 2, "n_group": 2, "topk_group": 1, "first_k_dense_replace": 1,
    "kv_lora_rank": 16, "q_lora_rank": 24, "qk_nope_head_dim": 8, "qk_rope_head_dim": 8,
    "v_head_dim": 8, "initializer_range": 0.1, "bos_token_id": 0, "eos_token_id": 1,
    "pad_token_id": None,
}  # fmt: skip
CAPPED = {"attn_logit_softcapping": 0.5, "final_logit_softcapping": 0.7}
TWO_KINDS = {"layer_types": ["sliding_attention", "full_attention"], "sliding_window": 5}
SCALED = {"embedding_multiplier": 3.0, "residual_multiplier": 0.5, "logits_scaling": 4.0,
          "attention_multiplier": 0.2}  # fmt: skip
YARN = {"rope_type": "yarn", "rope_theta": 1e4, "factor": 4.0, "mscale": 1.0,
        "mscale_all_dim": 0.7, "original_max_position_embeddings": 16}  # fmt: skip
GROWING = {**YARN, "original_max_position_embeddings": 7, "llama_4_scaling_beta": 0.4}
LATENT = {"num_key_value_heads": 4, "rope_parameters": YARN}
SPARSE_LATENT = {**LATENT, "mlp_layer_types": ["dense", "sparse"], "index_topk": 5,
                 "index_head_dim": 12, "index_n_heads": 3}  # fmt: skip
DELTA = {
    "layer_types": ["linear_attention", "full_attention"],
    "linear_num_key_heads": 2,
    "linear_num_value_heads": 4,
    "linear_key_head_dim": 6,
    "linear_value_head_dim": 10,
}
DELTA_SHARED = {**DELTA, "shared_expert_intermediate_size": 20}
OWN: dict[str, dict[str, Any]] = {
    **dict.fromkeys(("youtu", "glm4_moe_lite"), LATENT),
    "deepseek_v2": {**LATENT, "n_group": 1},
    **dict.fromkeys(("ministral", "cohere2", "olmo3", "exaone4", "exaone_moe", "cwm", "mellum",
                     "gemma3_text"), TWO_KINDS),
    "dots1": {"n_shared_experts": 1, **TWO_KINDS},
    "smollm3": {"no_rope_layers": [1, 0], "layer_types": ["full_attention"] * 2},
    **dict.fromkeys(("granite", "granitemoe", "hyperclovax"), SCALED),
    **dict.fromkeys(("deepseek_v3",), LATENT),
    **dict.fromkeys(("deepseek_v32", "glm_moe_dsa"), SPARSE_LATENT),
    "ministral3": {"sliding_window": 9, "rope_parameters": GROWING},
    "mistral4": {"num_key_value_heads": 4, "head_dim": 16, "rope_parameters": GROWING},
    "qwen2_moe": {"mlp_only_layers": [0],
                  "shared_expert_intermediate_size": 20},
    "gemma2": {**TWO_KINDS, **CAPPED},
    "vaultgemma": {**TWO_KINDS, **CAPPED},
    "mamba2": {"num_heads": 8, "head_dim": 8, "expand": 2, "n_groups": 2, "state_size": 8,
               "chunk_size": 8},
    "gpt_neo": {"num_layers": 2, "num_heads": 4, "attention_types": [[["global", "local"], 1]]},
    "lfm2": {"layer_types": ["conv", "full_attention"], "block_multiple_of": 8},
    "lfm2_moe": {"layer_types": ["conv", "full_attention"], "num_dense_layers": 1},
    "bamba": {"attn_layer_indices": [1], "mamba_n_heads": 8, "mamba_d_head": 8,
              "mamba_n_groups": 2, "mamba_d_state": 8, "mamba_chunk_size": 8},
    "granitemoehybrid": {**SCALED, "layer_types": ["mamba", "attention"], "mamba_n_heads": 8,
                         "mamba_d_head": 8, "mamba_n_groups": 2, "mamba_d_state": 8,
                         "shared_intermediate_size": 20},
    "zamba2": {"mamba_ngroups": 2, "n_mamba_heads": 8, "mamba_headdim": 8, "mamba_d_state": 8},
    "gemma3n_text": {"layer_types": ["sliding_attention", "full_attention"]},
    "gpt_oss": {**TWO_KINDS, "attention_bias": True},
    "qwen3_5_text": DELTA,
    **dict.fromkeys(("qwen3_next", "qwen3_5_moe_text"), DELTA_SHARED),
    "olmo_hybrid": {**DELTA, "linear_num_key_heads": 4, "linear_value_head_dim": 6},
    "nanochat": {"final_logit_softcapping": 0.7},
    "flint": {**TWO_KINDS, "mlp_only_layers": [0], "shared_expert_intermediate_size": 20},
    "kolibri1": {**TWO_KINDS, "shared_expert_intermediate_size": 20},
    "granite_swa": {**SCALED, **TWO_KINDS, "layer_rope_theta": [500.0, 0]},
    "granitemoe_swa": {**SCALED, **TWO_KINDS, "layer_rope_theta": [500.0, 0],
                       "shared_intermediate_size": 20},
    "phi": {"num_key_value_heads": 4},
    "gptj": {"rotary_dim": 4},
    "codegen": {"rotary_dim": 4},
    "minicpm3": {"num_key_value_heads": 4, "dim_model_base": 16},
    "hunyuan_v1_moe": {"moe_topk": 2},
    "axk1": {"num_key_value_heads": 4, "mlp_layer_types": ["dense", "sparse"]},
    "afmoe": {**TWO_KINDS, "num_dense_layers": 1, "num_shared_experts": 2, "mup_enabled": True},
    "granitemoeshared": {**SCALED, "shared_intermediate_size": 20},
    "phi3": {"rope_parameters": {"rope_type": "default", "rope_theta": 1e4,
                                 "partial_rotary_factor": 0.5}},
    "jamba": {"attn_layer_period": 2, "attn_layer_offset": 1, "expert_layer_offset": 0,
              "mamba_d_state": 8, "mamba_dt_rank": 3, "num_hidden_layers": 3},
    "mamba": {"state_size": 8, "time_step_rank": 3},
    "falcon_mamba": {"state_size": 8, "expand": 16},
    "nemotron_h": {
        "layers_block_type": ["linear_attention", "moe", "full_attention", "mlp"],
        "mamba_num_heads": 8, "mamba_head_dim": 8, "n_groups": 2, "ssm_state_size": 8,
        "moe_shared_expert_intermediate_size": 20,
    },
}  # fmt: skip
A_PART_EACH = {
    "phi3": "fused weights, partial RoPE",
    "starcoder2": "LayerNorm, no gate, biases",
    "helium": "RoPE of neighbours",
    "glm4": "RoPE of neighbours in a part of the head, norms before and after",
    "granitemoe": "multipliers, experts in one tensor",
    "cohere2": "attention and MLP side by side; windows and positions by layer",
    "gpt_neox": "two norms side by side, heads fused one by one",
    "olmo3": "norms after only, qk-norm over the whole projection, RoPE by kind of layer",
    "smollm3": "no positions in some layers",
    "hy_v3": "dense and sparse layers, a router of sigmoids",
    "youtu": "latent attention",
    "ministral3": "queries that grow with their position",
    "deepseek_v32": "an indexer that chooses the keys of latent attention",
    "qwen2_moe": "a gate of the shared expert",
    "gemma3_text": "norms around zero, scaled embeddings",
    "gpt_bigcode": "learned positions, one key head",
    "gemma2": "scores and logits with a cap",
    "granite_swa": "sinks, a wavelength for each layer or no positions",
    "gpt_oss": "experts with biases whose gate and rows take turns, a clamped gate",
    "qwen3_next": "gated delta nets whose rows stand by key head, gates among the queries",
    "olmo_hybrid": "gated delta nets before norms, attention before them",
    "bloom": "slopes, a norm of embeddings",
    "codegen": "a bias of the head, heads fused in quarters",
    "opt": "a table of positions with rows before the first",
    "persimmon": "LayerNorm of queries and keys",
    "nanochat": "norms after RoPE, which turns the other way",
    "afmoe": "gates of heads, a scale by a switch",
    "kolibri1": "experts chosen by logits",
    "axk1": "a norm after experts alone",
    "lfm2": "short convolutions in the place of attention",
    "lfm2_moe": "an epsilon of the router's weights",
    "nemotron_h": "Mamba, attention, MLP and experts without gates in one stack",
    "jamba": "Mamba-1 with norms, attention and experts by periods",
    "granitemoehybrid": "Mamba-2 in the place of attention, no positions",
    "falcon_mamba": "Mamba-1 alone, norms without weights",
}


def tiny(kind: str) -> Any:
    """A config of a type with small sizes where it has them."""
    made = transformers.CONFIG_MAPPING[kind]
    have = made().to_dict()
    sizes = {name: value for name, value in SIZES.items()
             if name in have or name in made.attribute_map}  # fmt: skip
    if kind == "gpt_bigcode":
        del sizes["num_key_value_heads"]
    return made(
        **copy.deepcopy({**sizes, **OWN.get(kind, {})})
    )  # configs change what they are given


def made_by(kind: str, config: Any) -> Any:
    """The model of a config, by its class: AutoModelForCausalLM does not know mistral4."""
    known = known_types().get(kind)
    auto = transformers.AutoModelForCausalLM
    maker = getattr(transformers, known.architecture)._from_config if known else auto.from_config
    return maker(config, dtype=torch.float32).eval()


def live(kind: str) -> Any:
    """A model of a type, no parameter or buffer of which is all zeros or ones."""
    torch.manual_seed(0)
    model = made_by(kind, tiny(kind))
    biases = (b for name, b in model.named_buffers() if name.endswith("correction_bias"))
    with torch.no_grad():
        for tensor in (*model.parameters(), *biases):
            tensor.add_(torch.randn_like(tensor), alpha=0.1)
    return model


def tokens_of() -> torch.Tensor:
    return torch.randint(0, 61, (2, 24), generator=torch.Generator().manual_seed(0))


# Two programs' logits in fp32 differ by rounding, which differs from CPU to CPU: 1e-6 on one, and
# 2.1e-6 on another. A weight that is lost or misread moves them by 1e-3 and more.
ROUNDING = 5e-6


def distance(found: torch.Tensor, expected: torch.Tensor) -> float:
    return float((found - expected).abs().max() / expected.abs().max().clamp(min=1.0))


@torch.no_grad()
def check_exact(kind: str, folder: Path) -> None:
    """Logits with their weights, their bits back from memory and files, logits with ours."""
    theirs = live(kind)
    expected = theirs(tokens_of()).logits
    model = from_huggingface(theirs).eval()
    assert distance(model(tokens_of()), expected) < ROUNDING
    theirs.save_pretrained(folder)
    from_files = from_huggingface(folder)
    for (name, ours), other in zip(model.state_dict().items(), from_files.state_dict().values(),
                                   strict=True):  # fmt: skip
        assert torch.equal(ours, other), name
    saved: dict[str, torch.Tensor] = {}
    for file in folder.glob("*.safetensors"):
        saved |= safetensors.load_file(file)
    back = to_huggingface(model)
    assert back.keys() == saved.keys() - ({"lm_head.weight"} - back.keys())
    assert all(torch.equal(tensor, saved[name]) for name, tensor in back.items())
    written = json.loads(json.dumps(huggingface_config(model.config)))
    assert huggingface_config(config_from_huggingface(written)) == written
    config = transformers.AutoConfig.for_model(written.pop("model_type"), **written,
                                               pad_token_id=None)  # fmt: skip
    again = made_by(kind, config)
    missing, unexpected = again.load_state_dict(to_huggingface(model, names="memory"), strict=False)
    assert not unexpected
    assert set(missing) <= {"lm_head.weight", "output_projection.weight"}  # tied heads
    again.tie_weights()
    assert distance(again(tokens_of()).logits, expected) < ROUNDING


@pytest.mark.parametrize("kind", list(A_PART_EACH))
def test_a_type_goes_both_ways(kind, tmp_path):
    check_exact(kind, tmp_path)


@pytest.mark.slow
@pytest.mark.parametrize("kind", sorted(known_types().keys() - A_PART_EACH.keys()))
def test_the_other_types_go_both_ways(kind, tmp_path):
    check_exact(kind, tmp_path)


@torch.no_grad()
def test_published_files_of_gpt_oss_in_mxfp4_are_read(tmp_path):
    """Codes and scales in the place of the experts' weights, as openai/gpt-oss-20b has them."""
    sizes = {"hidden_size": 64, "intermediate_size": 32, "swiglu_limit": 7.0}
    config = transformers.CONFIG_MAPPING["gpt_oss"](**{**tiny("gpt_oss").to_dict(), **sizes})
    torch.manual_seed(0)
    theirs = transformers.AutoModelForCausalLM.from_config(config, dtype=torch.float32).eval()
    for parameter in theirs.parameters():
        parameter.add_(torch.randn_like(parameter), alpha=0.1)
    coded: dict[str, torch.Tensor] = {}
    for name, parameter in theirs.named_parameters():
        if name.endswith(("experts.gate_up_proj", "experts.down_proj")):
            experts, inner, rows = parameter.shape
            blocks = torch.randint(256, (experts, rows, inner // 32, 16), dtype=torch.uint8)
            scales = torch.randint(118, 123, blocks.shape[:-1], dtype=torch.uint8)
            coded |= {f"{name}_blocks": blocks, f"{name}_scales": scales}
            parameter.copy_(mxfp4.convert_moe_packed_tensors(blocks, scales, dtype=torch.float32))
    expected = theirs(tokens_of()).logits
    theirs.save_pretrained(tmp_path)
    saved = safetensors.load_file(tmp_path / "model.safetensors")
    plain = {name: tensor for name, tensor in saved.items() if f"{name}_blocks" not in coded}
    safetensors.save_file(plain | coded, tmp_path / "model.safetensors")
    written = json.loads((tmp_path / "config.json").read_text())
    written["quantization_config"] = {"quant_method": "mxfp4"}
    (tmp_path / "config.json").write_text(json.dumps(written))
    assert distance(from_huggingface(tmp_path).eval()(tokens_of()), expected) < ROUNDING


def test_the_clamped_gate_is_that_of_gpt_oss():
    experts = transformers.models.gpt_oss.modeling_gpt_oss.GptOssExperts(tiny("gpt_oss"))
    gate, up = torch.randn(2, 9, 40, dtype=torch.float64) * 8.0
    assert gate.max() > 7.0
    assert up.abs().max() > 7.0
    expected = experts._apply_gate(torch.stack((gate, up), dim=-1).flatten(-2))
    torch.testing.assert_close(ActivationFunction("swiglu_clamped")(torch.cat((gate, up), -1)),
                               expected, rtol=1e-14, atol=1e-14)  # fmt: skip


def test_an_activation_of_ones_own_may_change_both_halves():
    with pytest.raises(ValueError, match="has linear, and gated=False"):
        Activation(torch.tanh, linear=torch.sin)
    both = ActivationFunction(Activation(torch.tanh, gated=True, linear=torch.sin))
    x = torch.randn(3, 8)
    assert torch.equal(both(x), x[:, :4].tanh() * x[:, 4:].sin())


@pytest.mark.parametrize("kind", ["cohere2", "granitemoe", "olmo3", "nemotron_h"])
def test_an_unknown_name_of_a_known_type_is_refused(kind):
    written = tiny(kind).to_dict()
    assert config_from_huggingface(written).huggingface_type == kind
    with pytest.raises(ValueError, match=r"(?s)attention_gate=True, which nothing.*fully_shard"):
        config_from_huggingface(written | {"attention_gate": True})


def test_what_a_type_cannot_say_is_not_written():
    config = config_from_huggingface(tiny("cohere2").to_dict())
    for change in ({"norm": "rmsnorm"}, {"parallel_mlp": None}, {"residual_scale": 0.5}):
        (name,) = change
        with pytest.raises(ValueError, match=f"cohere2 of Hugging Face cannot say {name}="):
            huggingface_config(replace(config, **change))
    assert huggingface_config(replace(config, dropout=0.1, init_std=0.5, vocab_multiple=8))
    with pytest.raises(ValueError, match="huggingface_type is 'cohere9', which is not known"):
        huggingface_config(replace(config, huggingface_type="cohere9"))
    growing = config_from_huggingface(tiny("ministral3").to_dict())
    for kind in ("ministral", None):
        with pytest.raises(ValueError, match=r"query_beta=0\.4, which no model of this type reads"):
            huggingface_config(replace(growing, huggingface_type=kind))


@pytest.mark.parametrize(
    ("kind", "change", "words"),
    [
        ("cohere", {"use_qk_norm": True}, "use_qk_norm=True, and only False"),
        ("olmo_hybrid", {"rope_parameters": {"rope_theta": None}}, "without positions"),
        ("glm_moe_dsa", {"indexer_types": ["full", "shared"]}, "indexer_types is .*'shared'"),
        ("llama", {"rope_parameters": GROWING}, "'llama_4_scaling_beta': 0.4}, which nothing"),
        ("olmo", {"clip_qkv": 8.0}, r"clip_qkv=8\.0, and only None"),
        ("arcee", {"hidden_act": "xielu"}, "hidden_act is 'xielu': known are gelu"),
        ("cwm", {"layer_types": ["chunked", "chunked"]}, "layer_types is .*'chunked'"),
        ("cohere2", {"layer_types": ["full_attention"]}, "for each of 2 layers"),
    ],
)
def test_what_no_part_computes_is_refused(kind, change, words):
    with pytest.raises(ValueError, match=words):
        config_from_huggingface(tiny(kind).to_dict() | change)


MINE = ModelType(
    name="mine",
    architecture="MineForCausalLM",
    constants={"norm": "layernorm_plain"},
    fields={"rotary_fraction": Field("turned", 1.0), "norm_eps": None},
    names={"mlp": "feed", "model.layers": "stack"},
)


def test_a_type_of_ones_own_is_one_object(tmp_path):
    shape: Mapping[str, Any] = {
        "vocab_size": 61, "hidden_size": 32, "num_layers": 2, "num_heads": 4, "norm_eps": 1e-5,
    }  # fmt: skip
    config = TransformerConfig(**shape, norm="layernorm_plain", huggingface_type="mine")
    model = GPTModel(config, seed=1)
    tensors = to_huggingface(model, types=[MINE])
    assert "stack.0.feed.down_proj.weight" in tensors
    written = huggingface_config(config, types=[MINE])
    (tmp_path / "config.json").write_text(json.dumps(written))
    safetensors.save_file(tensors, tmp_path / "model.safetensors")
    back = from_huggingface(tmp_path, types=[MINE])
    assert torch.equal(back(tokens_of()), model(tokens_of()))
    with pytest.raises(ValueError, match="model_type is 'mine': known are"):
        from_huggingface(tmp_path)


@pytest.mark.parametrize("tables", [
    {"constants": {"norms": "rmsnorm"}}, {"fields": {"norms": None}},
    {"experts": {"norms": None}}, {"mamba": {"norms": Field("norms")}},
])  # fmt: skip
def test_a_table_of_fields_that_do_not_exist_is_refused(tables):
    with pytest.raises(ValueError, match=r"mine: norms is no field of .*Config, and a"):
        ModelType(name="mine", architecture="MineForCausalLM", **tables)


# ------------------------------------------------------------------------ field by field

SKIPPED = {
    *("model_type", "architectures", "dtype", "transformers_version", "_name_or_path"),
    *("id2label", "label2id", "problem_type", "return_dict", "output_attentions"),
    *("output_hidden_states", "chunk_size_feed_forward", "use_cache", "is_encoder_decoder"),
}
"""How transformers builds and calls a model."""


def changed(kind: str) -> Iterator[tuple[str, Any]]:
    """A type with one name of its config changed: features on or off, other sizes."""
    from .test_huggingface_fields import mutations

    source = tiny(kind).to_dict()
    for name, value in source.items():
        if name not in SKIPPED:
            for other in mutations(value)[:1]:
                yield name, {**source, name: other}


@torch.no_grad()
def differing_fields(kind: str) -> list[str]:
    """Names that can be changed such that what is read computes something else."""
    wrong = []
    for name, source in changed(kind):
        try:
            config_from_huggingface(source)
            config = transformers.CONFIG_MAPPING[kind].from_dict(source)
            torch.manual_seed(0)
            theirs = transformers.AutoModelForCausalLM.from_config(config).float().eval()
            for parameter in theirs.parameters():
                parameter.add_(torch.randn_like(parameter), alpha=0.1)
            expected = theirs(tokens_of(), return_dict=True).logits
        except Exception:
            continue  # refused here, or no model there
        try:
            model = from_huggingface(theirs).eval()
        except ValueError:
            continue
        found = model(tokens_of())
        # Some models magnify what float32 rounds: by how much, this one says itself.
        rounding = distance(found, model.double()(tokens_of()))
        if distance(found, expected) > max(5e-6, 2 * rounding):
            wrong.append(f"{name}={source[name]!r}")
    return wrong


@pytest.mark.slow
@pytest.mark.parametrize("kind", list(known_types()))
def test_no_name_changes_what_only_transformers_computes(kind):
    assert not differing_fields(kind)


@pytest.mark.parametrize("kind", ["granite", "hyperclovax"])
def test_multipliers_multiply_or_divide_as_they_do_there(kind, tmp_path):
    check_exact(kind, tmp_path)


@pytest.mark.parametrize(
    "changes",
    [
        {"num_local_experts": 0},
        {"layer_types": ["attention"] * 2, "position_embedding_type": "rope"},
        {"num_local_experts": 0, "time_step_limit": [0.01, 0.5], "mamba_d_head": "auto"},
    ],
    ids=["no experts", "no Mamba", "bounded steps"],
)
def test_granite_4_has_the_parts_that_its_file_says(changes, tmp_path, monkeypatch):
    kind = "granitemoehybrid"
    monkeypatch.setitem(OWN, kind, {**OWN[kind], **changes})
    check_exact(kind, tmp_path)
    config = config_from_huggingface(tiny(kind).to_dict())
    assert (config.moe is None) == ("num_local_experts" in changes)
    assert (config.mamba is None) == ("position_embedding_type" in changes)


def test_jamba_with_one_expert_has_none(tmp_path, monkeypatch):
    monkeypatch.setitem(OWN, "jamba", {**OWN["jamba"], "num_experts": 1, "num_local_experts": 1})
    check_exact("jamba", tmp_path)
    assert config_from_huggingface(tiny("jamba").to_dict()).moe is None


@torch.no_grad()
@pytest.mark.parametrize(
    "kind", ["deepseek_v2", "deepseek_v32", "glm4_moe_lite", "glm_moe_dsa", "mistral4", "axk1"]
)
def test_a_model_of_a_type_with_experts_may_have_none(kind):
    mixed = config_from_huggingface(tiny(kind).to_dict())
    config = replace(mixed.of_layer(0), moe=None, huggingface_type=kind)
    model = GPTModel(config, seed=1).eval()
    written = huggingface_config(config)
    assert config_from_huggingface(written).moe is None
    dense = transformers.AutoConfig.for_model(written.pop("model_type"), **written,
                                              pad_token_id=None)  # fmt: skip
    theirs = made_by(kind, dense)
    theirs.load_state_dict(to_huggingface(model, names="memory"))
    assert distance(model(tokens_of()), theirs(tokens_of()).logits) < ROUNDING


def test_names_of_experts_mean_nothing_in_a_model_whose_layers_are_all_dense():
    dense = {"mlp_layer_types": ["dense"] * 2, "scoring_func": "sigmoid", "moe_layer_freq": 1}
    assert config_from_huggingface(tiny("deepseek_v32").to_dict() | dense).moe is None


def test_layers_that_no_period_gives_are_refused():
    config = config_from_huggingface(tiny("jamba").to_dict())
    first, other, _ = config.layers or ()
    twice = replace(config, num_layers=5, layers=(other, other, first, first, other))
    with pytest.raises(ValueError, match="by attn_layer_period and attn_layer_offset, and no two"):
        huggingface_config(twice)


def test_a_type_with_recurrent_layers_may_have_none():
    changed = tiny("lfm2").to_dict() | {"layer_types": ["full_attention"] * 2}
    config = config_from_huggingface(changed)
    assert config.attention is None
    assert huggingface_config(config)["layer_types"] == ["full_attention"] * 2


# ------------------------------------------------------------------------ the sweep

TABLE = Path(__file__).parents[3] / "docs" / "records" / "model-types.md"
FIRST = ("gpt2", "llama", "mistral", "qwen2", "qwen3", "mixtral", "qwen3_moe", "deepseek_v3",
         "mamba2")  # fmt: skip


def axes_of(config: TransformerConfig) -> str:
    """The axes over which tests train the parts that a model is made of."""
    kinds = [each.attention for each in config.distinct_layers]
    whole = any(isinstance(kind, ShortConvolution | GatedDeltaNet | Mamba1) for kind in kinds)
    axes = ["dp", "tp", "sp", "pp", *(["cp"] if config.mamba is None and not whole else [])]
    if any(isinstance(kind, ShortConvolution) for kind in kinds):
        axes.remove("pp")
    return ", ".join([*axes, *(["ep"] if config.moe is not None else [])])


def row_of(kind: str, folder: Path) -> str:
    """A row of the table: what becomes of a tiny model of the type, or why there is none."""
    if kind in known_types():
        check_exact(kind, folder)
        axes = axes_of(config_from_huggingface(tiny(kind).to_dict()))
        return f"| {kind} | both ways, bit for bit, logits within 2e-6 | {axes} | - |"
    try:
        with torch.device("meta"):
            size = transformers.AutoModelForCausalLM.from_config(tiny(kind)).num_parameters()
        if size > 10_000_000:
            return f"| {kind} | not tried | - | its sizes have other names: {size:,} parameters |"
        model = live(kind)
    except Exception as error:
        return f"| {kind} | no tiny model was built | - | {type(error).__name__} |"
    try:
        found = from_huggingface(model).eval()
        with torch.no_grad():
            exact = distance(found(tokens_of()), model(tokens_of()).logits)
    except ValueError as error:
        said = str(error).splitlines()[0].partition("known are ")[2].partition(". ")[2]
        return f"| {kind} | refused | - | {(said or str(error).splitlines()[0])[:150]} |"
    assert exact < 2e-6, kind
    return f"| {kind} | both ways, logits within 2e-6 | {axes_of(found.config)} | - |"


@pytest.mark.slow
def test_every_type_is_read_exactly_or_refused_in_words(tmp_path):
    from transformers.models.auto.modeling_auto import MODEL_FOR_CAUSAL_LM_MAPPING_NAMES as NAMES

    rows = []
    for number, kind in enumerate(sorted({*NAMES, *FIRST, *known_types()})):
        folder = tmp_path / str(number)
        folder.mkdir()
        rows.append(row_of(kind, folder))
    head = (
        f"# Types of transformers {transformers.__version__}\n\n"
        "Written by `test_huggingface_types.py` (slow tier): a tiny random model of each type that "
        "has a head of a language model. The axes are those over which tests train the parts of a "
        "model (`test_layer_specs.py`, `test_moe_parity.py`, `test_mamba_ranks.py`). "
        "`lamina.fsdp.fully_shard` trains the other types as they are.\n\n"
        "| type | import and export | axes | what it lacks |\n| --- | --- | --- | --- |\n"
    )
    assert len(rows) > 130
    before = TABLE.read_text() if TABLE.exists() else ""
    _, heading, further = before.partition("\n## ")  # of test_transformers_plan.py
    text = head + "\n".join(rows) + "\n" + heading + further
    if text != before:
        TABLE.write_text(text)
    assert text == before, f"{TABLE} was out of date and is written anew: commit it"


WITH_KINDS = [kind.name for kind in known_types().values() if kind.layers]
RULES = {
    "qwen3_next": {"full_attention_interval": 4},
    "cohere2": {"sliding_window_pattern": 4},
    "gemma3_text": {"sliding_window_pattern": 6},
    "smollm3": {"no_rope_layer_interval": 4},
    "lfm2": {"full_attn_idxs": [2, 5, 8, 10, 12, 14]},
    "nemotron_h": {"hybrid_override_pattern": "M-M*-M"},
}


def of_an_older_release(name):
    """A whole config of a type, and the same as a file that has a rule in place of a list."""
    rule = RULES.get(name, {})
    whole = transformers.AutoConfig.for_model(name, **rule).to_dict() | {"architectures": None}
    left_out = set(known_types()[name].layers)
    return whole, {key: value for key, value in whole.items() if key not in left_out} | rule


@pytest.mark.parametrize("name", WITH_KINDS)
def test_files_of_older_releases_have_the_layers_that_transformers_gives_them(name):
    whole, older = of_an_older_release(name)
    try:
        expected = config_from_huggingface(whole)
    except ValueError as refusal:  # defaults that are no model (sizes or experts that are missing)
        with pytest.raises(ValueError, match=re.escape(str(refusal).split(",")[0])):
            config_from_huggingface(older)
    else:
        assert config_from_huggingface(older) == expected


def test_without_transformers_a_file_of_an_older_release_is_refused(monkeypatch):
    _, older = of_an_older_release("gemma2")
    monkeypatch.setitem(sys.modules, "transformers", None)
    with pytest.raises(ValueError, match=r"has no layer_types: .*install transformers"):
        config_from_huggingface(older)
