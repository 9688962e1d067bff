"""Each name of `config.json` changes the import, is known to change nothing, or is refused."""

from __future__ import annotations

import pytest
import torch

from lamina.models import GPTModel, config_from_huggingface, huggingface_config, to_huggingface

transformers = pytest.importorskip("transformers")

SIZES = {"vocab_size": 31, "initializer_range": 0.3}
LAYERS = {"hidden_size": 16, "num_hidden_layers": 2, "num_attention_heads": 2}
COMMON = SIZES | LAYERS | {"intermediate_size": 24, "max_position_embeddings": 32}
EXPERTS = {"num_experts_per_tok": 2, "moe_intermediate_size": 8}
LATENT = {
    "q_lora_rank": 8, "kv_lora_rank": 8, "qk_nope_head_dim": 4, "qk_rope_head_dim": 4,
    "v_head_dim": 4, "n_routed_experts": 4, "n_group": 2, "topk_group": 1,
}  # fmt: skip
TINY = {
    "gpt2": SIZES | {"n_embd": 16, "n_layer": 2, "n_head": 2, "n_positions": 32},
    "llama": COMMON | {"num_key_value_heads": 1},
    "mistral": COMMON | {"num_key_value_heads": 1, "head_dim": 8, "sliding_window": 4},
    "qwen2": COMMON | {"num_key_value_heads": 1},
    "qwen3": COMMON | {"num_key_value_heads": 1, "head_dim": 8},
    "mixtral": COMMON | {"num_key_value_heads": 1, "num_local_experts": 2},
    "qwen3_moe": COMMON | EXPERTS | {"num_key_value_heads": 1, "num_experts": 4, "head_dim": 8},
    "deepseek_v3": COMMON | EXPERTS | LATENT | {"num_key_value_heads": 2,
                                                "first_k_dense_replace": 1},
    "mamba2": SIZES | {"hidden_size": 16, "num_hidden_layers": 2, "num_heads": 4, "head_dim": 8,
                       "n_groups": 1, "state_size": 8, "chunk_size": 8},
}  # fmt: skip


CANNOT_CHANGE = {"dtype", "architectures", "id2label", "label2id", "return_dict"}
CANNOT_CHANGE |= {"problem_type", "summary_activation"}
"""How transformers builds and calls a model, in which it takes certain values only."""


def mutations(value: object) -> list[object]:
    """Other values of the same kind: features turned on, sizes that still fit."""
    if isinstance(value, bool):
        return [not value]
    if isinstance(value, int):
        return [2 * value or 1]
    if isinstance(value, float):
        return [2 * value or 0.5]
    if isinstance(value, str):
        return ["something"]
    if isinstance(value, dict):
        return [{**value, "something": 2}]
    if isinstance(value, list):
        kinds = {type(each) for each in value}
        if kinds == {str}:
            return [["sliding_attention"] * len(value)]
        return [[0.001, 0.5]] if float in kinds else [[0]]
    return [3]


def logits(source: dict, weights: dict[str, torch.Tensor]) -> torch.Tensor:
    """What transformers computes with this config."""
    settings = {name: value for name, value in source.items() if name != "model_type"}
    config = transformers.AutoConfig.for_model(source["model_type"], **settings)
    model = transformers.AutoModelForCausalLM.from_config(config, dtype=torch.float32).eval()
    missing, unexpected = model.load_state_dict(weights, strict=False)
    assert not unexpected
    assert set(missing) <= {"lm_head.weight"}
    tokens = torch.randint(0, 31, (2, 12), generator=torch.Generator().manual_seed(0))
    with torch.no_grad():
        return model(tokens, return_dict=True).logits


def harmless(source: dict) -> list[str]:
    """Names whose mutation changes nothing in the import; the others do, or are refused."""
    base, found = config_from_huggingface(source), []
    for name, value in source.items():
        for other in mutations(value):
            try:
                config = config_from_huggingface({**source, name: other})
            except ValueError:
                continue
            written = huggingface_config(config)  # what is imported can be exported
            assert huggingface_config(config_from_huggingface(written)) == written, (name, other)
            if config == base and name not in CANNOT_CHANGE:
                found.append(name)
    return found


@pytest.mark.parametrize("kind", list(TINY))
def test_a_name_that_changes_nothing_here_changes_nothing_there(kind):
    source = transformers.AutoConfig.for_model(kind, **TINY[kind]).to_dict()
    model = GPTModel(config_from_huggingface(source), seed=1)
    weights = to_huggingface(model, names="memory")
    names = harmless(source)
    assert len(names) > 8
    expected = logits(source, weights)
    for name in names:
        found = logits({**source, name: mutations(source[name])[0]}, weights)
        torch.testing.assert_close(found, expected, msg=lambda text, name=name: f"{name}: {text}")


@pytest.mark.parametrize("kind", list(TINY))
def test_an_unknown_name_is_refused(kind):
    source = transformers.AutoConfig.for_model(kind, **TINY[kind]).to_dict()
    with pytest.raises(ValueError, match="final_logit_softcapping=30"):
        config_from_huggingface({**source, "final_logit_softcapping": 30})
    with pytest.raises(ValueError, match="is_encoder_decoder=True, and only False"):
        config_from_huggingface({**source, "is_encoder_decoder": True})


PUBLISHED = {
    "gpt2": {"_num_labels": 1, "n_special": 0, "output_past": True, "predict_special_tokens": True},
    "llama": {"is_llama_config": True, "rope_interleaved": False, "unsloth_fixed": True,
              "transformers.js_config": {"a": 1}, "unsloth_version": "2024.9",
              "max_sequence_length": 2048},
    "qwen2": {"use_mrope": False, "seq_length": 131072},
    "mamba2": {"hidden_dropout_prob": 0.0, "intermediate_size": 32, "norm_before_gate": True,
               "rms_norm": True, "time_step_init_scheme": "random", "time_step_scale": 1.0},
}  # fmt: skip
"""Leftovers in the files of distilgpt2, gpt2-medium, SmolLM2, Qwen2.5, QwQ and Codestral-Mamba."""


@pytest.mark.parametrize("kind", list(PUBLISHED))
def test_leftovers_of_published_files_change_nothing_here_and_there(kind):
    source = transformers.AutoConfig.for_model(kind, **TINY[kind]).to_dict()
    config, published = config_from_huggingface(source), {**source, **PUBLISHED[kind]}
    assert config_from_huggingface(published) == config
    weights = to_huggingface(GPTModel(config, seed=1), names="memory")
    assert torch.equal(logits(published, weights), logits(source, weights))
    for name in ("use_mrope", "rope_interleaved"):
        with pytest.raises(ValueError, match=f"{name}=True, and only False"):
            config_from_huggingface({**source, name: True})
