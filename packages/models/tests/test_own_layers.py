"""A user's own attention and layers: one object in the config brings all that Lamina asks about."""

from __future__ import annotations

import json
import math
from collections.abc import Iterator, Mapping
from dataclasses import dataclass, replace
from typing import Any

import pytest
import torch
import torch.nn.functional as F
from torch import Tensor, nn

from lamina.mesh import ParallelLayout
from lamina.models import (
    AttentionVariant,
    ColumnParallelLinear,
    GPTModel,
    LatentAttention,
    LayerKind,
    ResidualBlock,
    RowParallelLinear,
    SelfAttention,
    WeightLink,
    apply_recompute,
    config_from_huggingface,
    from_huggingface,
    huggingface_config,
    matrix_parameters,
    to_huggingface,
    training_flops_per_token,
)
from lamina.models.attention import AttentionContext, MultiHeadAttention
from lamina.models.engine import cut_layers
from lamina_testing import device_type

from . import test_context_parallel, test_tensor_parallel

LLAMA = test_tensor_parallel.LLAMA


@dataclass(frozen=True, kw_only=True)
class GatedAttention(MultiHeadAttention):
    """Each head's result is multiplied by a gate that is made from the token."""

    huggingface_type = "gated_llama"

    gates: int = 1
    """Gates per head, which are multiplied with each other."""

    def make(self, config, mesh=None) -> nn.Module:
        return GatedSelfAttention(config, self, mesh)

    def parameters(self, config) -> int:
        return super().parameters(config) + config.hidden_size * config.num_heads * self.gates

    def huggingface_fields(self, config) -> dict[str, Any]:
        return {"gates_per_head": self.gates}

    @classmethod
    def read_huggingface(cls, source: Mapping[str, Any]) -> dict[str, Any]:
        own = {"attention": cls(gates=source["gates_per_head"])}
        return super().read_huggingface(source) | own

    def huggingface_links(self, config, ours: str, theirs: str) -> Iterator[WeightLink]:
        yield from super().huggingface_links(config, ours, theirs)
        yield WeightLink(f"{ours}.gate.weight", (f"{theirs}.gate_proj.weight",))


class GatedSelfAttention(SelfAttention):
    def __init__(self, config, variant: GatedAttention, mesh=None) -> None:
        super().__init__(config, mesh)
        self.gates = variant.gates
        self.gate = ColumnParallelLinear(
            config.hidden_size,
            config.num_heads * variant.gates,
            mesh,
            sequence_parallel=config.sequence_parallel,
            init_std=config.init_std,
        )

    def mix(self, x: Tensor, context: AttentionContext) -> Tensor:
        gates = self.gate(x).view(*context.shape, -1, self.gates).sigmoid()
        return super().mix(x, context) * gates.prod(dim=-1, keepdim=True)


@dataclass(frozen=True, kw_only=True)
class Squared(LayerKind):
    """A linear map of the squares of the normalised tokens."""

    letter: str = "S"
    width: int = 24

    def make(self, config, mesh=None) -> nn.Module:
        return ResidualBlock(config, SquaredMixer(config, self.width, mesh), mesh)

    def parameters(self, config) -> int:
        return 2 * config.hidden_size * self.width

    def products_per_token(self, config, sequence: int) -> float:
        return float(self.width)


class SquaredMixer(nn.Module):
    def __init__(self, config, width: int, mesh=None) -> None:
        super().__init__()
        cut = {"sequence_parallel": config.sequence_parallel, "init_std": config.init_std}
        self.up = ColumnParallelLinear(config.hidden_size, width, mesh, **cut)
        self.down = RowParallelLinear(width, config.hidden_size, mesh, **cut)

    def forward(self, x: Tensor, context: AttentionContext | None = None) -> Tensor:
        return self.down(self.up(x).square())


@dataclass(frozen=True, kw_only=True)
class Averaging(AttentionVariant):
    """No scores at all: a token gets the mean of the tokens so far; not over a cut sequence."""

    context_parallel = ()

    def make(self, config, mesh=None) -> nn.Module:
        return AveragingMixer(config, mesh)

    def parameters(self, config) -> int:
        return 2 * config.hidden_size**2

    def products_per_pair(self, config) -> int:
        return 0


class AveragingMixer(nn.Module):
    def __init__(self, config, mesh=None) -> None:
        super().__init__()
        hidden, cut = config.hidden_size, {"sequence_parallel": config.sequence_parallel}
        self.up = ColumnParallelLinear(hidden, hidden, mesh, **cut)
        self.down = RowParallelLinear(hidden, hidden, mesh, **cut)

    def forward(self, x: Tensor, context: AttentionContext | None = None) -> Tensor:
        tokens = self.up(x)
        tokens = tokens if context is None else tokens.view(*context.shape, -1)
        counts = torch.arange(1, tokens.shape[1] + 1, dtype=tokens.dtype).unsqueeze(-1)
        means = tokens.cumsum(dim=1) / counts
        return self.down(means if x.ndim == 3 else means.flatten(0, 1))


GATED = replace(LLAMA, attention=GatedAttention(gates=2))
STACK = replace(
    LLAMA,
    num_layers=3,
    layer_pattern="TS*",
    layer_kinds=(Squared(),),
    attention=GatedAttention(),
)
CONFIGS = {"gated": GATED, "stack": STACK, "averaging": replace(LLAMA, attention=Averaging())}


@pytest.mark.matrix(strength=1)
@pytest.mark.ranks(2)
@pytest.mark.parametrize("sequence_parallel", [False, True])
@pytest.mark.parametrize("name", list(CONFIGS))
def test_training_over_tp_equals_one_process(name, sequence_parallel):
    config = replace(CONFIGS[name], sequence_parallel=sequence_parallel)
    whole, model, _ = test_tensor_parallel.train_alike(config, torch.float64, tp=2)
    test_tensor_parallel.check_alike(whole, model, 1e-9)


@pytest.mark.ranks(2)
@pytest.mark.parametrize("way", test_context_parallel.WAYS)
def test_training_over_cp_equals_one_process(way):
    config = replace(test_context_parallel.LLAMA, attention=GatedAttention(), context_parallel=way)
    test_context_parallel.train_alike(config, ParallelLayout(cp=2))


@pytest.mark.ranks(2)
def test_attention_that_cannot_have_its_sequence_cut_is_refused_over_cp():
    mesh = ParallelLayout(cp=2).build(device_type())
    with pytest.raises(ValueError, match="context_parallel 'ring' with Averaging, which has none"):
        GPTModel(replace(LLAMA, attention=Averaging()), mesh, seed=0)


def test_the_attention_computes_what_its_formula_says():
    torch.manual_seed(0)
    config = replace(GATED, positions="none", num_kv_heads=None, hidden_size=8, num_heads=2)
    module = GPTModel(config).double().blocks[0].attention
    x = torch.randn(2, 5, 8, dtype=torch.float64)
    query, key, value = F.linear(x, module.qkv.weight).view(2, 5, 3, 2, 4).unbind(2)
    scores = torch.einsum("bqhd,bkhd->bhqk", query, key) / math.sqrt(4)
    above = torch.ones(5, 5, dtype=torch.bool).triu(1)
    mixed = torch.einsum("bhqk,bkhd->bqhd", scores.masked_fill(above, -math.inf).softmax(-1), value)
    gates = F.linear(x, module.gate.weight).view(2, 5, 2, 2).sigmoid()
    mixed = mixed * (gates[..., :1] * gates[..., 1:])
    torch.testing.assert_close(module(x), F.linear(mixed.flatten(2), module.output.weight))


@pytest.mark.parametrize("policy", ["full", "selective"])
def test_own_layers_are_recomputed(policy):
    models = [GPTModel(STACK, seed=1), apply_recompute(GPTModel(STACK, seed=1), policy)]
    tokens = torch.randint(0, 61, (2, 8), generator=torch.Generator().manual_seed(0))
    for model in models:
        model(tokens, tokens).backward()
    for expected, found in zip(*(model.parameters() for model in models), strict=True):
        assert torch.equal(found.grad, expected.grad)


def test_costs_count_what_the_modules_hold():
    for config in CONFIGS.values():
        matrices = sum(p.numel() for p in GPTModel(config).parameters() if p.ndim == 2)
        embedding = config.padded_vocab_size * config.hidden_size
        assert matrix_parameters(config) == matrices - embedding
    pairs = [training_flops_per_token(CONFIGS[name], 16) for name in ("gated", "averaging")]
    assert pairs[0] - 6 * matrix_parameters(CONFIGS["gated"]) > 0
    assert pairs[1] == 6 * matrix_parameters(CONFIGS["averaging"])
    longer = replace(STACK, num_layers=8, layer_pattern="SSSSSSTT")
    assert [len(layers) for layers in cut_layers(longer, 2, 16)] == [6, 2]


def test_hugging_face_has_the_names_of_the_variant(tmp_path):
    safetensors = pytest.importorskip("safetensors.torch")
    config = replace(GATED, vocab_multiple=1)
    model = GPTModel(config, seed=2)
    written = json.loads(json.dumps(huggingface_config(config)))
    assert (written["model_type"], written["gates_per_head"]) == ("gated_llama", 2)
    (tmp_path / "config.json").write_text(json.dumps(written))
    safetensors.save_file(to_huggingface(model), tmp_path / "model.safetensors")
    back = from_huggingface(tmp_path, variants=[GatedAttention])
    assert back.config.attention == config.attention
    for (name, found), expected in zip(back.named_parameters(), model.parameters(), strict=True):
        assert torch.equal(found, expected), name
    with pytest.raises(ValueError, match="model_type is 'gated_llama': known are gpt2"):
        config_from_huggingface(written)
    with pytest.raises(ValueError, match="Averaging has no huggingface_type"):
        huggingface_config(replace(LLAMA, attention=Averaging()))


def test_a_subclass_of_multi_head_attention_is_no_llama():
    @dataclass(frozen=True, kw_only=True)
    class Other(MultiHeadAttention):
        def make(self, config, mesh=None):
            raise NotImplementedError

    assert huggingface_config(replace(LLAMA, attention=MultiHeadAttention()))["model_type"]
    with pytest.raises(ValueError, match="Other has no huggingface_type"):
        huggingface_config(replace(LLAMA, attention=Other()))


def test_two_models_in_a_process_have_different_kinds():
    first, second = (GPTModel(replace(GATED, attention=GatedAttention(gates=n))) for n in (1, 3))
    shapes = [model.blocks[0].attention.gate.weight.shape[0] for model in (first, second)]
    assert shapes == [4, 12]
    one, other = Squared(width=8), Squared(width=16)
    widths = [
        GPTModel(replace(STACK, layer_kinds=(kind,))).blocks[1].mixer.up.weight.shape[0]
        for kind in (one, other)
    ]
    assert widths == [8, 16]


@pytest.mark.parametrize(
    ("change", "message"),
    [
        ({"mla": LatentAttention(kv_lora_rank=4), "num_kv_heads": None}, "both given"),
        ({"layer_kinds": (Squared(), Squared(width=8))}, "layer_kinds have letters"),
        ({"layer_kinds": ()}, r"layer_pattern 'TS\*' has \['S'\], which mean nothing"),
    ],
)
def test_what_does_not_fit_is_refused(change, message):
    with pytest.raises(ValueError, match=message):
        replace(STACK, **change)


@pytest.mark.parametrize("letter", ["", "SS", "M"])
def test_a_letter_is_one_that_is_free(letter):
    with pytest.raises(ValueError, match="it must be one character, and none of M"):
        Squared(letter=letter)
