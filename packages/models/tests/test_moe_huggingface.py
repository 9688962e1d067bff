"""Models with experts compute what transformers' do with the same weights, both ways."""

from __future__ import annotations

import json
import math
from dataclasses import fields, replace

import pytest
import torch

from lamina.models import (
    GPTModel,
    LatentAttention,
    MoEConfig,
    MultiTokenPrediction,
    config_from_huggingface,
    from_huggingface,
    huggingface_config,
    preset,
    to_huggingface,
)

transformers = pytest.importorskip("transformers")
save_file = pytest.importorskip("safetensors.torch").save_file

TINY = {"vocab_size": 61, "hidden_size": 32, "num_layers": 2, "num_heads": 4, "ffn_size": 40,
        "max_sequence_length": 64}  # fmt: skip
DEEPSEEK = preset("deepseek-v3").moe
CONFIGS = {
    "mixtral": preset("mixtral-8x7b", **TINY | {"ffn_size": 24}, num_kv_heads=2,
                      moe=MoEConfig(num_experts=4, top_k=2, ffn_size=24)),
    "qwen3_moe": preset("qwen3-30b-a3b", **TINY | {"num_layers": 3}, num_kv_heads=2, head_dim=12,
                        moe=MoEConfig(num_experts=6, top_k=3, ffn_size=12, first_dense=1)),
    "deepseek_v3": preset(
        "deepseek-v3", **TINY | {"num_layers": 3}, attention_scale=None, rope_scaling=None,
        mla=LatentAttention(kv_lora_rank=16, q_lora_rank=24, qk_nope_head_dim=8,
                            qk_rope_head_dim=6, v_head_dim=10),
        moe=replace(DEEPSEEK, num_experts=8, top_k=3, ffn_size=12, shared_ffn_size=24,
                    num_groups=4, groups_kept=2, first_dense=1, bias_rate=0.0,
                    sequence_loss=0.0)),
}  # fmt: skip


def theirs_of(config, weights=None):
    written = huggingface_config(config)
    their_config = transformers.AutoConfig.for_model(written.pop("model_type"), **written)
    torch.manual_seed(0)
    model = transformers.AutoModelForCausalLM.from_config(their_config)
    if weights is not None:
        missing, unexpected = model.load_state_dict(weights, strict=False)
        assert not missing
        assert not unexpected
    return model.eval()


def perturbed(config):
    """A model none of whose tensors is all zeros or ones."""
    model = GPTModel(config, seed=1).eval()
    generator = torch.Generator().manual_seed(2)
    with torch.no_grad():
        for tensor in (*model.parameters(), *model.buffers()):
            tensor.add_(torch.randn(tensor.shape, generator=generator), alpha=0.1)
    return model


def tokens_of(length=20):
    return torch.randint(0, 61, (2, length), generator=torch.Generator().manual_seed(0))


@pytest.mark.parametrize("name", list(CONFIGS))
def test_forward_and_gradients_equal_transformers_with_our_weights(name):
    model = perturbed(CONFIGS[name])
    theirs = theirs_of(CONFIGS[name], to_huggingface(model, names="memory"))
    tokens = tokens_of()
    found = model(tokens[:, :-1])
    logits = theirs(tokens[:, :-1]).logits
    torch.testing.assert_close(found, logits, rtol=1e-5, atol=1e-5)
    torch.nn.functional.cross_entropy(logits.flatten(0, 1), tokens[:, 1:].flatten()).backward()
    model(tokens[:, :-1], tokens[:, 1:]).backward()
    expected = dict(theirs.named_parameters())
    gradients = {name: p.grad for name, p in model.named_parameters()}
    for theirs_name, gradient in to_huggingface(model, gradients, names="memory").items():
        torch.testing.assert_close(
            gradient, expected[theirs_name].grad, rtol=1e-4, atol=1e-5,
            msg=lambda m, n=theirs_name: f"{n}: {m}",
        )  # fmt: skip


@pytest.mark.parametrize("name", list(CONFIGS))
def test_files_and_models_in_memory_are_read(name, tmp_path):
    theirs = theirs_of(CONFIGS[name])
    theirs.save_pretrained(tmp_path)
    model = from_huggingface(tmp_path).eval()
    expected = from_huggingface(theirs)
    for (key, value), other in zip(
        model.state_dict().items(), expected.state_dict().values(), strict=True
    ):
        assert torch.equal(value, other), key
    with torch.no_grad():
        found, logits = model(tokens_of()), theirs(tokens_of()).logits
    torch.testing.assert_close(found, logits, rtol=1e-5, atol=1e-5)


@pytest.mark.parametrize("name", list(CONFIGS))
def test_what_we_write_transformers_reads(name, tmp_path):
    save_file = pytest.importorskip("safetensors.torch").save_file
    model = perturbed(CONFIGS[name])
    save_file(to_huggingface(model), tmp_path / "model.safetensors", metadata={"format": "pt"})
    (tmp_path / "config.json").write_text(json.dumps(huggingface_config(CONFIGS[name])))
    theirs = transformers.AutoModelForCausalLM.from_pretrained(tmp_path).eval()
    with torch.no_grad():
        found, logits = model(tokens_of()), theirs(tokens_of()).logits
    torch.testing.assert_close(found, logits, rtol=1e-5, atol=1e-5)


@pytest.mark.parametrize("name", list(CONFIGS))
def test_configs_survive_the_round_trip(name):
    config = CONFIGS[name]
    back = config_from_huggingface(json.loads(json.dumps(huggingface_config(config))))
    again = config_from_huggingface(theirs_of(config).config.to_dict())
    for field in ("mla", "qk_norm", "sliding_window", "ffn_width", "kv_heads", "num_layers"):
        assert getattr(back, field) == getattr(config, field) == getattr(again, field), field
    expected = replace(config.moe, global_loss=0.0)
    assert back.moe == expected
    assert again.moe == expected


def test_experts_that_take_no_more_are_told_of():
    config = CONFIGS["mixtral"]
    with pytest.warns(UserWarning, match=r"capacity_factor is 0\.5: .* transformers drops none"):
        written = huggingface_config(replace(config, moe=replace(config.moe, capacity_factor=0.5)))
    assert written == huggingface_config(config)


def test_a_balanced_switch_loss_is_transformers_over_top_k():
    from transformers.models.mixtral.modeling_mixtral import load_balancing_loss_func

    from lamina.models import TopKRouter, routing_statistics

    router = TopKRouter(16, MoEConfig(num_experts=4, top_k=2, switch_loss=1.0), init_std=0.5)
    x = torch.randn(30, 16, generator=torch.Generator().manual_seed(3))
    router(x)
    expected = load_balancing_loss_func((x @ router.weight.t(),), 4, 2) / 2
    found = routing_statistics(torch.nn.ModuleDict({"router": router}))["router"]
    assert found.losses["switch"] == pytest.approx(expected.item(), rel=1e-6)


def test_what_has_no_counterpart_is_refused():
    config = CONFIGS["mixtral"]
    with pytest.raises(ValueError, match="no Hugging Face architecture known here has these exp"):
        huggingface_config(replace(config, moe=replace(config.moe, scores="sigmoid")))
    written = huggingface_config(CONFIGS["qwen3_moe"]) | {"mlp_only_layers": [2]}
    with pytest.raises(ValueError, match=r"mlp_only_layers is \[2\]"):
        config_from_huggingface(written)


YARN = {
    "rope_type": "yarn", "rope_theta": 10_000.0, "factor": 40, "beta_fast": 32, "beta_slow": 1,
    "mscale": 1.0, "mscale_all_dim": 1.0, "original_max_position_embeddings": 4096,
}  # fmt: skip


def test_deepseeks_published_config_is_the_preset():
    """Its numbers are the defaults of transformers' class, but for YaRN and the lengths."""
    published = transformers.DeepseekV3Config(
        max_position_embeddings=163_840, rope_parameters=YARN, first_k_dense_replace=3
    )
    found, expected = config_from_huggingface(published.to_dict()), preset("deepseek-v3")
    moe = replace(expected.moe, bias_rate=0.0, sequence_loss=0.0)  # of training, not of weights
    for field in fields(expected):
        wanted = moe if field.name == "moe" else getattr(expected, field.name)
        if isinstance(wanted, float):
            wanted = pytest.approx(wanted, rel=1e-12)
        assert getattr(found, field.name) == wanted, field.name


def test_deepseeks_yarn_gives_transformers_logits():
    """At lengths beyond the first one, where wavelengths are stretched and scores scaled."""
    tiny = CONFIGS["deepseek_v3"]
    written = huggingface_config(replace(tiny, max_sequence_length=320))
    del written["model_type"]
    yarn = YARN | {"original_max_position_embeddings": 8}
    written.pop("rope_theta", None)
    written["rope_parameters"] = yarn
    theirs = transformers.DeepseekV3ForCausalLM(transformers.DeepseekV3Config(**written)).eval()
    ours = from_huggingface(theirs).eval()
    assert ours.config.attention_scale == pytest.approx((0.1 * math.log(40) + 1) ** 2 / 14**0.5)
    tokens = torch.randint(0, 61, (2, 48), generator=torch.Generator().manual_seed(0))
    with torch.no_grad():
        torch.testing.assert_close(ours(tokens), theirs(tokens).logits, rtol=1e-5, atol=1e-5)


def written_to(path, model, **changes):
    """A directory as it is published; `changes` are tensors of other values."""
    tensors = to_huggingface(model) | changes
    (path / "config.json").write_text(json.dumps(huggingface_config(model.config)))
    save_file(
        {name: each.contiguous() for name, each in tensors.items()}, path / "model.safetensors"
    )
    return tensors


@pytest.mark.parametrize("dense", [False, True])
def test_layers_of_multi_token_prediction_are_read_and_written(dense, tmp_path):
    config = replace(CONFIGS["deepseek_v3"], mtp=MultiTokenPrediction(depth=2))
    model = perturbed(replace(config, moe=None) if dense else config)
    copies = {
        f"model.layers.{at}.{name}.weight": value.detach().clone()
        for at in (3, 4)
        for name, value in (
            ("embed_tokens", model.embedding.weight),
            ("shared_head.head", model.head.weight),
        )
    }
    tensors = written_to(tmp_path, model, **copies)
    layer = {name.removeprefix("model.layers.4.") for name in tensors if "layers.4." in name}
    assert {"enorm.weight", "hnorm.weight", "eh_proj.weight", "shared_head.norm.weight"} < layer
    assert {"input_layernorm.weight", "self_attn.o_proj.weight"} < layer
    assert json.loads((tmp_path / "config.json").read_text())["num_nextn_predict_layers"] == 2

    back = from_huggingface(tmp_path)
    assert back.config.mtp == MultiTokenPrediction(depth=2)
    state = back.state_dict()
    for name, value in model.state_dict().items():
        assert torch.equal(state[name], value), name
    tokens = tokens_of()
    assert torch.equal(*(each.train()(tokens[:, :-1], tokens[:, 1:]) for each in (model, back)))

    # transformers computes the model without them, and so does one that leaves them out.
    theirs = transformers.AutoModelForCausalLM.from_pretrained(tmp_path).eval()
    without = from_huggingface(tmp_path, mtp=False).eval()
    assert without.config.mtp is None
    for each in (without, back.eval()):
        torch.testing.assert_close(each(tokens), theirs(tokens).logits, rtol=1e-5, atol=1e-5)
    memory = to_huggingface(model, names="memory")
    assert memory.keys() == theirs.state_dict().keys()


def test_layers_of_multi_token_prediction_that_do_not_fit_are_refused(tmp_path):
    model = perturbed(replace(CONFIGS["deepseek_v3"], mtp=MultiTokenPrediction()))
    written_to(tmp_path, model, **{"model.layers.3.shared_head.head.weight": torch.zeros(61, 32)})
    with pytest.raises(
        ValueError, match=r"shared_head\.head\.weight with other values than lm_head"
    ):
        from_huggingface(tmp_path)
    tensors = written_to(tmp_path, model)
    del tensors["model.layers.3.hnorm.weight"]
    save_file(tensors, tmp_path / "model.safetensors")
    with pytest.raises(ValueError, match=r"has no model\.layers\.3\.hnorm\.weight"):
        from_huggingface(tmp_path)
    del tensors["model.layers.3.eh_proj.weight"]  # then they are tensors of another model
    save_file(tensors, tmp_path / "model.safetensors")
    with pytest.raises(ValueError, match="has no place"):
        from_huggingface(tmp_path)
    with pytest.raises(ValueError, match="of type mixtral: of the types known here, deepseek_v3"):
        huggingface_config(replace(CONFIGS["mixtral"], mtp=MultiTokenPrediction()))


def test_such_layers_of_another_type_are_refused_or_left_out(tmp_path):
    model = perturbed(CONFIGS["mixtral"])
    tensors = written_to(tmp_path, model, **{"model.layers.2.eh_proj.weight": torch.ones(32, 64)})
    config = huggingface_config(model.config) | {"num_nextn_predict_layers": 1}
    (tmp_path / "config.json").write_text(json.dumps(config))
    with pytest.raises(ValueError, match=r"of type mixtral.* give from_huggingface\(\) mtp=False"):
        from_huggingface(tmp_path)
    read = to_huggingface(from_huggingface(tmp_path, mtp=False))
    assert read.keys() == tensors.keys() - {"model.layers.2.eh_proj.weight"}
