"""Weights go to transformers' models and come back, and both compute the same."""

from __future__ import annotations

import json
from dataclasses import fields, replace

import pytest
import torch

from lamina.models import (
    AttentionScores,
    GPTModel,
    HyperConnections,
    LatentAttention,
    LayerSpec,
    MambaConfig,
    MoEConfig,
    MultiTokenPrediction,
    RopeScaling,
    TransformerConfig,
    config_from_huggingface,
    from_huggingface,
    huggingface_config,
    preset,
    preset_names,
    to_huggingface,
)
from lamina.models.attention import GatedAttention
from lamina.models.huggingface.model_types import TRAINING

from .test_layer_specs import TwoLayers
from .test_own_layers import Squared

transformers = pytest.importorskip("transformers")

TINY = {"vocab_size": 61, "hidden_size": 32, "num_layers": 2, "num_heads": 4, "ffn_size": 40}
LONG = RopeScaling(kind="yarn", factor=4.0, original_length=16)
CONFIGS = {
    "gpt2": preset("gpt2", **TINY | {"ffn_size": 128}, max_sequence_length=64),
    "gpt2-untied": preset("gpt2", **TINY | {"ffn_size": 128}, max_sequence_length=64,
                          tie_embeddings=False, activation="gelu"),
    "llama": preset("llama3.1-8b", **TINY, num_kv_heads=2, max_sequence_length=64,
                    rope_scaling=RopeScaling(kind="llama3", factor=4.0, original_length=16)),
    "qwen3": preset("qwen3-0.6b", **TINY, num_kv_heads=2, head_dim=12, max_sequence_length=64),
    "qwen2": TransformerConfig(**TINY, attention_bias=True, attention_output_bias=False),
    "mistral": TransformerConfig(**TINY, num_kv_heads=1, sliding_window=5),
    "llama-linear": TransformerConfig(**TINY, rope_scaling=RopeScaling(kind="linear", factor=3.0)),
    "llama-yarn": TransformerConfig(**TINY, rope_scaling=LONG, max_sequence_length=64,
                                    attention_bias=True, mlp_bias=True),
    "llama-yarn-uncut": TransformerConfig(  # pairs are interpolated between fractions
        **TINY, rope_scaling=replace(LONG, truncate=False), max_sequence_length=64),
    "deepseek": TransformerConfig(  # latents have DeepSeek's own eps
        **TINY, norm_eps=1e-2,
        mla=LatentAttention(kv_lora_rank=16, q_lora_rank=24, qk_nope_head_dim=8,
                            qk_rope_head_dim=6, v_head_dim=10)),
    "deepseek-yarn": TransformerConfig(
        **TINY, norm_eps=1e-6, rope_scaling=LONG, max_sequence_length=64, attention_scale=0.31,
        mla=LatentAttention(kv_lora_rank=16, qk_nope_head_dim=8, qk_rope_head_dim=8,
                            v_head_dim=8)),
}  # fmt: skip


def theirs_of(config: TransformerConfig, weights: dict[str, torch.Tensor] | None = None):
    written = huggingface_config(config)
    their_config = transformers.AutoConfig.for_model(written.pop("model_type"), **written)
    torch.manual_seed(0)
    model = transformers.AutoModelForCausalLM.from_config(their_config)
    if weights is not None:
        missing, unexpected = model.load_state_dict(weights, strict=False)
        assert not unexpected
        assert set(missing) <= {"lm_head.weight"}
        model.tie_weights()
    return model.eval()


def perturbed(config: TransformerConfig) -> GPTModel:
    """A model none of whose parameters is all zeros or ones."""
    model = GPTModel(config, seed=1).eval()
    generator = torch.Generator().manual_seed(2)
    with torch.no_grad():
        for parameter in model.parameters():
            parameter.add_(torch.randn(parameter.shape, generator=generator), alpha=0.1)
    return model


@pytest.mark.parametrize("name", list(CONFIGS))
def test_forward_equals_transformers_with_our_weights(name):
    model = perturbed(CONFIGS[name])
    theirs = theirs_of(CONFIGS[name], to_huggingface(model))
    tokens = torch.randint(0, 61, (2, 40), generator=torch.Generator().manual_seed(0))
    with torch.no_grad():
        torch.testing.assert_close(model(tokens), theirs(tokens).logits, rtol=1e-5, atol=1e-5)


@pytest.mark.parametrize("name", list(CONFIGS))
def test_forward_equals_transformers_with_their_weights(name):
    theirs = theirs_of(CONFIGS[name])
    model = from_huggingface(theirs).eval()
    tokens = torch.randint(0, 61, (2, 40), generator=torch.Generator().manual_seed(0))
    with torch.no_grad():
        torch.testing.assert_close(model(tokens), theirs(tokens).logits, rtol=1e-5, atol=1e-5)


@pytest.mark.parametrize("name", list(CONFIGS))
def test_gradients_equal_transformers(name):
    config = replace(CONFIGS[name], dropout=0.0, attention_dropout=0.0)
    model = perturbed(config).double()
    theirs = theirs_of(config, to_huggingface(model.float())).double()
    model.double()
    tokens = torch.randint(0, 61, (2, 17), generator=torch.Generator().manual_seed(0))
    model(tokens[:, :-1], tokens[:, 1:]).backward()
    logits = theirs(tokens[:, :-1]).logits
    torch.nn.functional.cross_entropy(logits.flatten(0, 1), tokens[:, 1:].flatten()).backward()
    expected = dict(theirs.named_parameters())
    gradients = {name: p.grad for name, p in model.named_parameters()}
    for theirs_name, gradient in to_huggingface(model, gradients).items():
        torch.testing.assert_close(
            gradient, expected[theirs_name].grad, rtol=2e-5, atol=2e-7,
            msg=lambda m, n=theirs_name: f"{n}: {m}",
        )  # fmt: skip


@pytest.mark.parametrize("name", list(CONFIGS))
def test_a_saved_directory_is_read_without_transformers(name, tmp_path):
    theirs = theirs_of(CONFIGS[name])
    theirs.save_pretrained(tmp_path)
    model = from_huggingface(tmp_path)
    expected = from_huggingface(theirs)
    for (key, value), other in zip(model.named_parameters(), expected.parameters(), strict=True):
        assert torch.equal(value, other), key


@pytest.mark.parametrize("name", list(CONFIGS))
def test_configs_survive_the_round_trip(name):
    config = CONFIGS[name]
    back = config_from_huggingface(json.loads(json.dumps(huggingface_config(config))))
    again = config_from_huggingface(theirs_of(config).config.to_dict())
    for field in ("vocab_size", "hidden_size", "kv_heads", "head_width", "ffn_width", "output_bias",
                  "mla", "qk_norm", "sliding_window", "tie_embeddings", "rope_theta", "norm",
                  "activation", "positions", "norm_eps", "max_sequence_length"):  # fmt: skip
        assert getattr(back, field) == getattr(config, field) == getattr(again, field), field
    for read in (back, again):
        assert read.score_scale == pytest.approx(config.score_scale)
        if config.rope_scaling is not None:
            assert read.rope_scaling.magnitude == pytest.approx(config.rope_scaling.magnitude)


def test_files_written_before_version_five_are_read():
    config = CONFIGS["llama"]
    written = huggingface_config(config)
    rope = written.pop("rope_parameters")
    written["rope_theta"] = rope.pop("rope_theta")
    written["rope_scaling"] = rope
    read = config_from_huggingface(written)
    assert read.rope_theta == config.rope_theta
    assert read.rope_scaling == config.rope_scaling


def test_what_a_file_leaves_out_means_what_it_means_to_transformers():
    def read_both(written):
        theirs = transformers.AutoConfig.for_model(**written)
        return config_from_huggingface(written), config_from_huggingface(theirs.to_dict())

    for name in ("llama", "llama-yarn"):
        written = huggingface_config(CONFIGS[name])
        del written["rope_parameters"]["original_max_position_embeddings"]
        ours, theirs = read_both(written)
        assert ours.rope_scaling == theirs.rope_scaling
        assert ours.rope_scaling.original_length == 64
    window = {"use_sliding_window": True, "sliding_window": 5}
    for name in ("qwen2", "qwen3"):
        written = huggingface_config(CONFIGS[name]) | window
        for full, expected in ((0, 5), (2, None), (28, None), (None, None)):
            own = {} if full is None else {"max_window_layers": full}
            for read in read_both(written | own):
                assert read.sliding_window == expected
        with pytest.raises(ValueError, match="max_window_layers is 1 of 2 layers"):
            config_from_huggingface(written | {"max_window_layers": 1})


@pytest.mark.parametrize("name", ["gpt2", "llama"])
def test_vocabulary_padding_stays_at_home(name):
    config = replace(CONFIGS[name], vocab_multiple=16)
    model = perturbed(config)
    weights = to_huggingface(model)
    assert all(61 in value.shape for key, value in weights.items() if "emb" in key or "wte" in key)
    theirs = theirs_of(config, weights)
    tokens = torch.randint(0, 61, (2, 9))
    with torch.no_grad():
        torch.testing.assert_close(model(tokens), theirs(tokens).logits, rtol=1e-5, atol=1e-5)


LATENT = LatentAttention(kv_lora_rank=16, qk_nope_head_dim=8, qk_rope_head_dim=8, v_head_dim=8)
CHANGED = {
    "vocab_size": 99, "hidden_size": 64, "num_layers": 3, "num_heads": 8, "num_kv_heads": 1,
    "head_dim": 6, "ffn_size": 88, "max_sequence_length": 77, "activation": "geglu",
    "norm": "layernorm", "norm_eps": 1e-3, "positions": "none", "rope_theta": 77.0,
    "rope_scaling": RopeScaling(kind="linear", factor=3.0), "rotary_fraction": 0.5,
    "attention": GatedAttention(), "mla": LATENT, "mlp": TwoLayers(width=40), "qk_norm": True,
    "scores": AttentionScores(softcap=9.0), "attention_bias": True, "attention_output_bias": True,
    "mlp_bias": True, "pre_norm": False, "post_norm": True, "embedding_norm": True,
    "parallel_mlp": "one_norm", "embedding_scale": 2.0, "residual_scale": 2.0,
    "hyper_connections": HyperConnections(), "logit_scale": 2.0, "logit_softcap": 9.0,
    "head_bias": True, "position_offset": 2, "tie_embeddings": True, "sliding_window": 5,
    "attention_scale": 0.3, "layer_pattern": "*-", "layer_kinds": (Squared(letter="S"),),
    "layers": (LayerSpec(sliding_window=4), LayerSpec()), "mamba": MambaConfig(num_heads=1),
    "moe": MoEConfig(num_experts=4, top_k=2, ffn_size=48), "mtp": MultiTokenPrediction(),
    "invariant": True, "huggingface_type": "olmo",
}  # fmt: skip
BESIDE = {
    "position_offset": {"positions": "learned"}, "pre_norm": {"post_norm": True},
    "mamba": {"layer_pattern": "MM", "positions": "none", "tie_embeddings": True},
    "mtp": {"moe": MoEConfig(num_experts=4, top_k=2), "mla": LATENT},
}  # fmt: skip


def test_each_field_is_written_or_refused():
    """A field that is left unsaid would be another model, without a word."""
    assert CHANGED.keys() == {field.name for field in fields(TransformerConfig)} - TRAINING
    survived = set()
    for name, value in CHANGED.items():
        config = TransformerConfig(**{**TINY, **BESIDE.get(name, {}), name: value})
        try:
            written = huggingface_config(config)
        except ValueError:
            continue
        if name in ("layer_kinds", "invariant"):  # no layer is of that kind; the same model
            continue
        back = config_from_huggingface(written)
        assert getattr(back, name) == value, f"{name}: {getattr(back, name)}"
        survived.add(name)
    assert survived >= {"vocab_size", "num_kv_heads", "rope_scaling", "mla", "tie_embeddings"}


def test_what_has_no_counterpart_is_refused():
    with pytest.raises(ValueError, match="model_type is 'bert'"):
        config_from_huggingface({"model_type": "bert"})
    with pytest.raises(ValueError, match="activation 'relu2'"):
        huggingface_config(replace(CONFIGS["llama"], activation="relu2"))
    for name, change, message in (
        ("llama", {"attention_scale": 1.0}, r"attention_scale is 1\.0: .* 0\.3535"),
        ("gpt2", {"attention_scale": 1.0}, r"attention_scale is 1\.0"),
        ("deepseek", {"attention_scale": 1.0}, r"attention_scale is 1\.0"),
        ("deepseek", {"sliding_window": 5}, "sliding_window is 5 beside mla"),
        ("llama", {"attention_output_bias": True}, "biases False, True, False"),
        ("qwen2", {"mlp_bias": True}, "biases True, False, True"),
        ("deepseek", {"mla": replace(CONFIGS["deepseek"].mla, norm_eps=1e-5)}, "norm_eps of mla"),
    ):
        with pytest.raises(ValueError, match=message):
            huggingface_config(replace(CONFIGS[name], **change))
    assert huggingface_config(replace(CONFIGS["llama"], attention_scale=8**-0.5))
    for name, value, message in (
        ("scale_attn_weights", False, "scale_attn_weights is False"),
        ("embd_pdrop", 0.3, r"embd_pdrop is 0\.3, resid_pdrop 0\.1"),
    ):
        with pytest.raises(ValueError, match=message):
            config_from_huggingface(huggingface_config(CONFIGS["gpt2"]) | {name: value})
    written = huggingface_config(CONFIGS["deepseek"]) | {"first_k_dense_replace": 1}
    with pytest.raises(ValueError, match="1 of 2 layers: the others have experts"):
        config_from_huggingface(written)


@pytest.mark.parametrize(
    ("change", "words"),
    [
        ({"truncated": False}, r"'truncated': False.*nothing here reads"),
        ({"partial_rotary_factor": 0.5}, "nothing here reads"),
    ],
)
def test_what_rope_is_told_is_read_or_refused(change, words):
    written = huggingface_config(CONFIGS["llama-yarn"])
    with pytest.raises(ValueError, match=words):
        config_from_huggingface(written | {"rope_parameters": written["rope_parameters"] | change})


def test_tensors_that_the_model_has_no_place_for_are_named(tmp_path):
    save_file = pytest.importorskip("safetensors.torch").save_file
    config = CONFIGS["llama"]
    tensors = to_huggingface(perturbed(config))
    (tmp_path / "config.json").write_text(json.dumps(huggingface_config(config)))
    derived = {"model.layers.0.self_attn.rotary_emb.inv_freq": torch.ones(2)}
    save_file(
        {n: t.contiguous() for n, t in (tensors | derived).items()}, tmp_path / "model.safetensors"
    )
    assert from_huggingface(tmp_path) is not None
    odd = {"model.layers.0.self_attn.q_norm.weight": torch.ones(4)}
    save_file(odd, tmp_path / "more.safetensors")
    with pytest.raises(ValueError, match=r"layers\.0\.self_attn\.q_norm\.weight.*no place"):
        from_huggingface(tmp_path)


def test_an_empty_directory_is_named(tmp_path):
    with pytest.raises(FileNotFoundError, match=r"config\.json is missing"):
        from_huggingface(tmp_path)
    (tmp_path / "config.json").write_text(json.dumps(huggingface_config(CONFIGS["llama"])))
    with pytest.raises(FileNotFoundError, match=r"names of the hub are not downloaded"):
        from_huggingface("gpt2")
    with pytest.raises(FileNotFoundError, match=r"no \*\.safetensors"):
        from_huggingface(tmp_path)


PUBLISHED = {
    # Counts of the released checkpoints, from their index files.
    "gpt2": 124_439_808,
    "gpt2-medium": 354_823_168,
    "gpt2-large": 774_030_080,
    "gpt2-xl": 1_557_611_200,
    "llama3-8b": 8_030_261_248,
    "llama3-70b": 70_553_706_496,
    "llama3.1-8b": 8_030_261_248,
    "llama3.1-70b": 70_553_706_496,
    "llama3.1-405b": 405_853_388_800,
    "llama3-405b": 405_853_388_800,
    "llama3.2-1b": 1_235_814_400,
    "llama3.2-3b": 3_212_749_824,
    "qwen3-0.6b": 596_049_920,
    "qwen3-1.7b": 1_720_574_976,
    "qwen3-4b": 4_022_468_096,
    "qwen3-8b": 8_190_735_360,
    "qwen3-14b": 14_768_307_200,
    "qwen3-32b": 32_762_123_264,
    "mixtral-8x7b": 46_702_792_704,
    "qwen3-30b-a3b": 30_532_122_624,
    "qwen3-235b-a22b": 235_093_634_560,
    "gpt-oss-20b": 20_914_757_184,  # the model card says 20.91 and 116.83 billion
    "gpt-oss-120b": 116_829_156_672,
    "qwen3-next-80b-a3b": 79_674_391_296,  # as of transformers' model of its config
    "deepseek-v3": 671_026_404_352,  # without the bias per expert and multi-token prediction
}


@pytest.mark.matrix(few=6)
@pytest.mark.parametrize("name", preset_names())
def test_presets_have_the_published_number_of_parameters(name):
    with torch.device("meta"):
        model = GPTModel(preset(name))
    assert model.num_parameters() == PUBLISHED[name]


def test_fewer_layers_of_a_preset_are_its_first_ones():
    whole, few = preset("gpt-oss-20b"), preset("gpt-oss-20b", num_layers=3)
    assert few.layers == whole.layers[:3]
    assert preset("gpt-oss-20b", num_layers=26).layers[24:] == whole.layers[:2]
    assert preset("gpt-oss-20b", num_layers=2, layers=None).layers is None


def test_a_misspelt_preset_names_the_nearest():
    with pytest.raises(ValueError, match="did you mean llama3-8b"):
        preset("lama3-8b")
