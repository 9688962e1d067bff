"""Each tensor and each field of a Hugging Face model is read, known to be harmless, or refused."""

from __future__ import annotations

import json
import re
from collections.abc import Iterator, Mapping

import pytest
import torch
from torch import nn

from lamina.models import (
    AttentionVariant,
    GPTModel,
    TransformerConfig,
    WeightLink,
    config_from_huggingface,
    from_huggingface,
    huggingface_config,
    to_huggingface,
)
from lamina.models.attention.attention import MultiHeadAttention
from lamina.models.huggingface.known_types import known_types
from lamina_testing import device_type

transformers = pytest.importorskip("transformers")
safetensors = pytest.importorskip("safetensors.torch")

from .test_huggingface_fields import COMMON, TINY  # noqa: E402 (it needs transformers too)

FEW = {"num_key_value_heads": 2, "head_dim": 8, "bos_token_id": 0, "eos_token_id": 1}
FEW |= {"pad_token_id": None, "tie_word_embeddings": False}
OTHERS = {
    **dict.fromkeys(("helium", "internlm3", "olmo", "olmo2", "gemma", "cohere"), COMMON | FEW),
    **dict.fromkeys(("gemma2", "hunyuan_v1_dense"), COMMON | FEW),
    "minimax_m2": COMMON | FEW | {"num_local_experts": 4, "num_experts_per_tok": 2},
}
LLAMA = TransformerConfig(vocab_size=31, hidden_size=16, num_layers=2, num_heads=2, ffn_size=24)


def live(kind, **changes):
    sizes = (TINY | OTHERS)[kind]
    config = transformers.AutoConfig.for_model(kind, **sizes | changes)
    torch.manual_seed(0)
    model = transformers.AutoModelForCausalLM.from_config(config, dtype=torch.float32).eval()
    with torch.no_grad():
        for parameter in model.parameters():
            parameter.add_(torch.randn_like(parameter), alpha=0.1)
    return model


def written(folder, tensors, config=None, name="model.safetensors"):
    if config is not None:
        (folder / "config.json").write_text(json.dumps(config))
    safetensors.save_file({n: t.clone() for n, t in tensors.items()}, folder / name)
    return folder


# ------------------------------------------------------------------------ tensors


def test_a_tensor_that_nothing_reads_is_refused_in_memory_as_in_files(tmp_path):
    model = live("llama")
    model.model.layers[1].self_attn.q_proj.bias = nn.Parameter(torch.ones(16))
    words = r"layers\.1\.self_attn\.q_proj\.bias, for which .* no place \(1 tensors\)"
    with pytest.raises(ValueError, match=f"LlamaForCausalLM has model.{words}"):
        from_huggingface(model)
    model.save_pretrained(tmp_path)
    with pytest.raises(ValueError, match=words):
        from_huggingface(tmp_path)


@pytest.mark.parametrize("kind", list(OTHERS))
def test_a_type_that_pretends_to_be_another_computes_the_same_or_is_refused(kind, tmp_path):
    model = live(kind)
    tokens = torch.randint(0, 31, (2, 12), generator=torch.Generator().manual_seed(0))
    with torch.no_grad():
        wanted = model(tokens).logits
    model.save_pretrained(tmp_path)
    saved = json.loads((tmp_path / "config.json").read_text())
    refused = 0
    for other in TINY:
        model.config.model_type = other
        (tmp_path / "config.json").write_text(json.dumps(saved | {"model_type": other}))
        for source in (model, tmp_path):
            try:
                ours = from_huggingface(source).eval()
            except ValueError:
                refused += 1
            else:
                with torch.no_grad():
                    torch.testing.assert_close(ours(tokens), wanted, rtol=1e-5, atol=1e-5)
    # In memory transformers says the class's own type, and a type that is known is read as itself.
    assert refused >= (1 if kind in known_types() else 2) * len(TINY) - 2


def test_a_missing_tensor_is_named_in_memory_as_in_files(tmp_path):
    tensors = to_huggingface(GPTModel(LLAMA))
    del tensors["model.layers.1.self_attn.k_proj.weight"]
    words = r"has no model\.layers\.1\.self_attn\.k_proj\.weight"
    with pytest.raises(ValueError, match=words):
        from_huggingface(written(tmp_path, tensors, huggingface_config(LLAMA)))
    model = live("llama")
    model.model.layers[1].self_attn.k_proj = nn.Identity()
    with pytest.raises(ValueError, match=words):
        from_huggingface(model)


def test_tensors_of_other_shapes_are_named(tmp_path):
    config, tensors = huggingface_config(LLAMA), to_huggingface(GPTModel(LLAMA))
    norm, part = "model.norm.weight", "model.layers.0.self_attn.{}_proj.weight"
    with pytest.raises(ValueError, match=r"model\.norm\.weight in .* make \[1\] of final_norm"):
        from_huggingface(written(tmp_path, tensors | {norm: torch.ones(1)}, config))
    other = {part.format("q"): torch.ones(8, 16), part.format("k"): torch.ones(24, 16)}
    with pytest.raises(ValueError, match=r"q_proj\.weight has 8 rows, and by its config it has 16"):
        from_huggingface(written(tmp_path, tensors | other))


def test_a_tied_head_has_the_values_of_the_embeddings(tmp_path):
    config = huggingface_config(LLAMA) | {"tie_word_embeddings": True}
    tensors = to_huggingface(GPTModel(LLAMA))
    with pytest.raises(ValueError, match=r"lm_head\.weight with other values.*make it False"):
        from_huggingface(written(tmp_path, tensors, config))
    tensors["lm_head.weight"] = tensors["model.embed_tokens.weight"]
    assert from_huggingface(written(tmp_path, tensors)).config.tie_embeddings


def test_files_beside_those_of_the_index_are_left_alone_and_twins_refused(tmp_path):
    tensors = to_huggingface(GPTModel(LLAMA))
    written(tmp_path, tensors, huggingface_config(LLAMA))
    written(tmp_path, {"model.norm.weight": torch.zeros(16)}, name="older.safetensors")
    with pytest.raises(ValueError, match=r"model\.norm\.weight is in two files"):
        from_huggingface(tmp_path)
    index = {"weight_map": dict.fromkeys(tensors, "model.safetensors")}
    (tmp_path / "model.safetensors.index.json").write_text(json.dumps(index))
    assert from_huggingface(tmp_path).final_norm.weight.any()


class _Forgetful(MultiHeadAttention):
    """Multi-head attention with a gate whose tensor its author has not linked."""

    huggingface_type = "gated"

    def make(self, config, mesh=None):
        module = super().make(config, mesh)
        module.gate = nn.Parameter(torch.ones(2))
        return module

    @classmethod
    def read_huggingface(cls, source):
        return {**super().read_huggingface(source), "attention": cls()}


def test_a_parameter_that_no_link_names_is_refused_both_ways(tmp_path):
    model = GPTModel(LLAMA)
    tensors, config = to_huggingface(model), huggingface_config(LLAMA)
    model.blocks[0].attention.gate = nn.Parameter(torch.ones(2))
    with pytest.raises(ValueError, match=r"blocks\.0\.attention\.gate of GPTModel have no names"):
        to_huggingface(model)
    assert issubclass(_Forgetful, AttentionVariant)
    written(tmp_path, tensors, config | {"model_type": "gated"})
    with pytest.raises(ValueError, match=r"blocks\.0\.attention\.gate, .*have no names"):
        from_huggingface(tmp_path, variants=[_Forgetful])


# ------------------------------------------------------------------------ fields


def configs() -> Iterator[tuple[str, Mapping[str, object]]]:
    from transformers.models.auto.modeling_auto import MODEL_FOR_CAUSAL_LM_MAPPING_NAMES as NAMES

    for kind in NAMES:
        try:
            yield kind, transformers.CONFIG_MAPPING[kind]().to_dict()
        except Exception:
            continue


def read(fields):
    """The refusal of a config, or None: any other error than ValueError is a failure."""
    try:
        config_from_huggingface(fields)
    except ValueError as error:
        return str(error)
    return None


@pytest.mark.slow
def test_a_config_that_pretends_to_be_a_known_type_is_read_or_refused_in_words():
    tried = 0
    for kind, fields in configs():
        for other in TINY.keys() - {kind}:
            for changes in ({}, {"hidden_size": None}, {"architectures": ["OtherForCausalLM"]}):
                tried += 1
                said = read({**fields, "model_type": other, **changes})
                assert said is None or "fully_shard" in said, (kind, other)
                assert said or not changes.get("architectures")
    assert tried > 4000


@pytest.mark.parametrize("kind", ["gemma2", "bart", "falcon", "mamba", "olmo2"])
@pytest.mark.parametrize("other", list(TINY))
def test_a_few_of_them(kind, other):
    fields = transformers.CONFIG_MAPPING[kind]().to_dict()
    if (kind, other) in {("olmo2", "llama"), ("olmo2", "mistral"), ("olmo2", "qwen3")}:
        return  # their configs are alike, and their tensors are not
    with pytest.raises(ValueError, match=r"(?s)config|says|is|has .*fully_shard"):
        config_from_huggingface({**fields, "model_type": other})


def test_a_refused_type_is_told_what_is_missing():
    for kind, words in {
        "jetmoe": "nearest is .*, which lacks",
        "diffllama": r"nearest is llama, which lacks lambda_std_dev=0\.1",
        # Nearer ones need fields that its file has not got, which says nothing of it.
        "apertus": "nearest is phi3, for which hidden_act is 'xielu'",
    }.items():
        fields = transformers.CONFIG_MAPPING[kind]().to_dict()
        with pytest.raises(ValueError, match=f"model_type is '{kind}': known are .*{words}"):
            config_from_huggingface(fields)
    with pytest.raises(ValueError, match=r"config\.json has no 'intermediate_size', which a model"):
        config_from_huggingface({"model_type": "llama", **LLAMA_WITHOUT})
    fields = transformers.AutoConfig.for_model("mixtral", **TINY["mixtral"]).to_dict()
    with pytest.raises(ValueError, match=r"scoring_func='sigmoid', and only 'softmax' is known"):
        config_from_huggingface(fields | {"scoring_func": "sigmoid"})
    with pytest.raises(ValueError, match=r"architectures=\['Qwen3MoeForCausalLM'\]"):
        config_from_huggingface(
            huggingface_config(LLAMA) | {"architectures": ["Qwen3MoeForCausalLM"]}
        )


LLAMA_WITHOUT = {name: value for name, value in COMMON.items() if name != "intermediate_size"}


@pytest.mark.ranks(1)
def test_the_lines_of_a_refusal_train_the_model(ranks, tmp_path):
    if device_type() == "cuda":  # where this test bed sets a default device
        pytest.importorskip("accelerate", reason="transformers reads a model through it then")
    sizes = COMMON | FEW
    transformers.AutoModelForCausalLM.from_config(
        transformers.AutoConfig.for_model("diffllama", **sizes)
    ).save_pretrained(tmp_path)
    with pytest.raises(ValueError, match="fully_shard") as refusal:
        from_huggingface(tmp_path)
    *_, first, second, third = str(refusal.value).splitlines()
    names = {"path": tmp_path}
    exec("import lamina.fsdp, torch, transformers", names)
    exec(re.sub("^ +", "", "\n".join((first, second, third)), flags=re.MULTILINE), names)
    tokens = torch.randint(0, 31, (2, 8))
    before = names["model"](input_ids=tokens, labels=tokens).loss
    before.backward()
    names["optimizer"].step()
    assert names["model"](input_ids=tokens, labels=tokens).loss < before


def test_links_refuse_rows_that_only_add_up():
    link = WeightLink("ours", ("a", "b"), rows=(2, 4))
    with pytest.raises(ValueError, match="a has 3 rows, and by its config it has 2"):
        link.to_ours([torch.ones(3, 1), torch.ones(3, 1)])
