"""Models nobody here wrote, in one line: `transformers` with random weights, no list of units.

Importing a model of `transformers` takes seconds in every rank, so one test trains them all.
"""

import importlib
import os

import pytest
import torch
from torch.distributed.device_mesh import init_device_mesh

from lamina.collectives import Ledger
from lamina.ddp import full_gradients, full_parameters
from lamina.fsdp import fully_shard
from lamina_testing import device_type

STEPS, WORLD, VOCABULARY = 5, 2, 67

SIZES = {"hidden_size": 32, "num_hidden_layers": 2, "num_attention_heads": 2}
TEXT = {**SIZES, "intermediate_size": 64, "vocab_size": VOCABULARY, "max_position_embeddings": 32}
GROUPED = {**TEXT, "num_key_value_heads": 1, "head_dim": 16}
NO_DROPOUT = {"hidden_dropout_prob": 0.0, "attention_probs_dropout_prob": 0.0}
GPT2 = {"vocab_size": VOCABULARY, "n_positions": 32, "n_embd": 32, "n_layer": 2, "n_head": 2}
GPT2 |= {"attn_pdrop": 0.0, "resid_pdrop": 0.0, "embd_pdrop": 0.0}
MIXTRAL = {**GROUPED, "num_local_experts": 4, "num_experts_per_tok": 2}
VIT = {**SIZES, "intermediate_size": 64, **NO_DROPOUT}
VIT |= {"image_size": 16, "patch_size": 8, "num_labels": 3}
T5 = {"vocab_size": VOCABULARY, "d_model": 32, "d_kv": 16, "d_ff": 64, "num_layers": 2}
T5 |= {"num_heads": 2, "dropout_rate": 0.0, "decoder_start_token_id": 0}
MAMBA = {"vocab_size": VOCABULARY, "hidden_size": 32, "state_size": 4, "num_hidden_layers": 2}

# module of transformers.models, class, configuration, units that must be found (the root is one)
MODELS = {
    "gpt2": ("gpt2", "GPT2LMHeadModel", GPT2, 3),
    "llama": ("llama", "LlamaForCausalLM", GROUPED, 3),
    "mixtral": ("mixtral", "MixtralForCausalLM", MIXTRAL, 3),
    "qwen3": ("qwen3", "Qwen3ForCausalLM", GROUPED, 3),
    "bert": ("bert", "BertForMaskedLM", {**TEXT, **NO_DROPOUT}, 3),
    "vit": ("vit", "ViTForImageClassification", VIT, 4),
    "t5": ("t5", "T5ForConditionalGeneration", T5, 5),
    "mamba": ("mamba", "MambaForCausalLM", MAMBA, 3),
}


def build(name):
    os.environ.setdefault("TRANSFORMERS_VERBOSITY", "error")
    family, cls, settings, _ = MODELS[name]
    module = importlib.import_module(f"transformers.models.{family}.modeling_{family}")
    torch.manual_seed(11)
    model_class = getattr(module, cls)
    return model_class(model_class.config_class(**settings)).train()


def batch_of(name, rank, step):
    generator = torch.Generator().manual_seed(100 * step + rank)
    if name == "vit":
        pixels = torch.randn(2, 3, 16, 16, generator=generator)
        return {"pixel_values": pixels, "labels": torch.tensor([rank, step % 3])}
    tokens = torch.randint(2, VOCABULARY, (2, 8), generator=generator)
    return {"input_ids": tokens, "labels": tokens.flip(1) if name == "t5" else tokens}


def sgd(model):
    return torch.optim.SGD(model.parameters(), lr=0.1, momentum=0.9, foreach=False)


def one_process(name):
    """Gradients and parameters of plain PyTorch on the mean of the ranks' losses."""
    model = build(name)
    optimizer = sgd(model)
    for step in range(STEPS):
        optimizer.zero_grad()
        for rank in range(WORLD):
            (model(**batch_of(name, rank, step)).loss / WORLD).backward()
        gradients = {n: p.grad.clone() for n, p in model.named_parameters() if p.grad is not None}
        optimizer.step()
    return gradients, dict(model.named_parameters())


def sharded(name, strategy, rank):
    model = build(name)
    mesh = init_device_mesh(device_type(), (WORLD,), mesh_dim_names=("dp",))
    model, optimizer = fully_shard(model, sgd(model), device_mesh=mesh, zero_dp_strategy=strategy)
    for step in range(STEPS):
        model(**batch_of(name, rank, step)).loss.backward()
        gradients = full_gradients(model)
        optimizer.step()
        optimizer.zero_grad()
    return gradients, full_parameters(model), len(model.sharding_engine.units)


def differences(found, wanted):
    if found.keys() != wanted.keys():
        return [f"names differ: {sorted(found.keys() ^ wanted.keys())}"]
    return [
        f"{name} is off by {worst}"
        for name in wanted
        if (worst := float((found[name] - wanted[name].detach()).abs().max())) > 2e-5
    ]


@pytest.mark.slow
@pytest.mark.ranks(2, timeout=400)
def test_models_of_transformers_train_like_one_process_without_a_unit_list(ranks):
    wrong = []
    for name, (*_, units) in MODELS.items():
        gradients, parameters = one_process(name)
        for strategy in (3, 1):
            case = f"{name}, strategy {strategy}"
            found_gradients, found_parameters, found_units = sharded(name, strategy, ranks.rank)
            if found_units != units:
                wrong.append(f"{case}: {found_units} units instead of {units}")
            wrong += [f"{case}: gradient {d}" for d in differences(found_gradients, gradients)]
            wrong += [f"{case}: parameter {d}" for d in differences(found_parameters, parameters)]
    assert wrong == []


@pytest.mark.slow
@pytest.mark.ranks(2, timeout=400)
@pytest.mark.parametrize("name", ["llama", "gpt2"])
def test_lora_shards_adapters_and_sends_nothing_of_the_frozen_weights(name, ranks):
    peft = pytest.importorskip("peft", reason="pip install peft")

    def adapted():
        torch.manual_seed(5)
        settings = peft.LoraConfig(r=2, target_modules="all-linear", lora_dropout=0.0)
        return peft.get_peft_model(build(name), settings)

    def trained_sgd(model):
        trained = [p for p in model.parameters() if p.requires_grad]
        return torch.optim.SGD(trained, lr=0.1, momentum=0.9, foreach=False)

    model = adapted()
    mesh = init_device_mesh(device_type(), (WORLD,), mesh_dim_names=("dp",))
    mix = {"*lora_*": 3, "*": 0}
    settings = {"zero_dp_strategy": mix, "reshard_after_forward": False}
    model, optimizer = fully_shard(model, trained_sgd(model), device_mesh=mesh, **settings)
    adapters = [group for group in model.parameter_groups() if group.requires_grad]
    assert all("lora_" in ref.name for group in adapters for ref in group.refs)
    sent = sum(4 * group.layout.size // WORLD for group in adapters)
    frozen = sum(4 * p.numel() for p in build(name).parameters())
    assert sent < frozen / 5
    for step in range(STEPS):
        with Ledger() as ledger:
            model(**batch_of(name, ranks.rank, step)).loss.backward()
        assert ledger.bytes(axis="dp:gather") == sent
        assert ledger.bytes(op="reduce_scatter_fp32") == sent
        # Beside them one message: a number for each trained parameter, and eight to compare.
        assert ledger.bytes() - 2 * sent <= 8 * (sum(len(group.refs) for group in adapters) + 8)
        optimizer.step()
        optimizer.zero_grad()
    plain = adapted()
    reference = trained_sgd(plain)
    for step in range(STEPS):
        reference.zero_grad()
        for rank in range(WORLD):
            (plain(**batch_of(name, rank, step)).loss / WORLD).backward()
        reference.step()
    assert differences(full_parameters(model), dict(plain.named_parameters())) == []
