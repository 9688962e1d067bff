"""Layers that differ within a model, and the parts that a layer is made of."""

from __future__ import annotations

import math
from collections.abc import Iterator
from dataclasses import dataclass, replace

import pytest
import torch
from torch import Tensor, nn

from lamina.mesh import ParallelLayout, init_distributed
from lamina.models import (
    Activation,
    AttentionScores,
    ColumnParallelLinear,
    GPTModel,
    LayerPart,
    LayerSpec,
    MambaConfig,
    MoEConfig,
    NormPart,
    RMSNorm,
    RowParallelLinear,
    WeightLink,
    apply_recompute,
    matrix_parameters,
    training_flops_per_token,
)
from lamina.models.attention import GatedAttention
from lamina.models.mamba import GatedDeltaNet, Mamba1, Mamba2
from lamina_testing import device_type

from . import moe_parity, test_context_parallel, test_tensor_parallel

LLAMA = test_tensor_parallel.LLAMA
LOCAL, WIDE, STILL = (
    LayerSpec(sliding_window=3, rope_theta=500.0),
    LayerSpec(ffn_size=56, activation="geglu"),
    LayerSpec(positions="none", qk_norm=True),
)
MIXED = replace(LLAMA, num_layers=4, layers=(LOCAL, WIDE, STILL, LOCAL))
NET = GatedDeltaNet(key_heads=2, value_heads=4, key_width=8, value_width=6, chunk_size=8)
FIRST = Mamba1(state_size=4, chunk_size=4)
SCORES = AttentionScores(softcap=2.0, sinks=True, linear_bias=True)
PARTS = {
    "mixed": MIXED,
    "whole_norm": replace(LLAMA, qk_norm="whole", pre_norm=False, post_norm=True),
    "one_norm": replace(LLAMA, parallel_mlp="one_norm", rotary_fraction=0.5, norm="layernorm_zero"),
    "two_norms": replace(LLAMA, parallel_mlp="two_norms", norm="layernorm_unbiased"),
    "scales": replace(LLAMA, embedding_scale=3.0, residual_scale=0.5, logit_scale=0.2,
                      norm="rmsnorm_zero", qk_norm=True, activation="geglu_tanh"),
    "scores": replace(LLAMA, scores=SCORES, logit_softcap=1.5, head_bias=True, post_norm="mlp"),
    "gates": replace(LLAMA, attention=GatedAttention(), qk_norm="after_rope", norm="rmsnorm_plain",
                     embedding_norm=True),
    "gates_in_queries": replace(LLAMA, attention=GatedAttention(in_queries=True), qk_norm=True),
    "delta_nets": replace(MIXED, layers=(LayerSpec(attention=NET), WIDE, LayerSpec(attention=NET),
                                         STILL)),
    "mamba1": replace(MIXED, layers=(LayerSpec(attention=FIRST), WIDE, LayerSpec(attention=FIRST),
                                     STILL)),
    "mamba2": replace(MIXED, mamba=MambaConfig(state_size=8, head_dim=8, groups=2), layers=(
        LayerSpec(attention=Mamba2()), WIDE, LayerSpec(attention=Mamba2()), STILL)),
}  # fmt: skip


def tokens_of(length: int = 12) -> Tensor:
    return torch.randint(0, 61, (2, length), generator=torch.Generator().manual_seed(0))


def test_specifications_that_change_nothing_change_no_bit():
    plain, spelt = LLAMA, replace(LLAMA, layers=(LayerSpec(),) * LLAMA.num_layers)
    logits = [GPTModel(config, seed=3)(tokens_of()) for config in (plain, spelt)]
    assert torch.equal(*logits)
    assert matrix_parameters(plain) == matrix_parameters(spelt)
    assert training_flops_per_token(plain, 64) == training_flops_per_token(spelt, 64)


def test_each_layer_attends_within_its_own_window():
    config = replace(
        LLAMA, positions="none", num_layers=2,
        layers=(LayerSpec(sliding_window=2), LayerSpec(sliding_window=4)),
    )  # fmt: skip
    model = GPTModel(config, seed=3).double()
    embedded: list[Tensor] = []
    model.embedding.register_forward_hook(lambda _, __, out: embedded.append(out))
    model.embedding.weight.requires_grad_()
    logits = model(tokens_of())
    (gradient,) = torch.autograd.grad(logits[:, 9].sum(), embedded)
    reached = gradient.abs().sum(dim=(0, 2)).nonzero().flatten().tolist()
    assert reached == [5, 6, 7, 8, 9]  # 1 token back, then 3 more


def test_a_layer_is_what_a_model_of_such_layers_has():
    mixed = GPTModel(MIXED, seed=3)
    x = torch.randn(2, 12, LLAMA.hidden_size)
    for number in range(4):
        own = replace(MIXED.of_layer(number), residual_additions=None)
        block = GPTModel(own, seed=4).blocks[0]
        block.load_state_dict(mixed.blocks[number].state_dict())
        context = mixed.context(tokens_of(), x.dtype, torch.arange(12), None, None, 1)
        assert torch.equal(mixed.blocks[number](x, context), block(x))


@pytest.mark.ranks(2)
@pytest.mark.parametrize("sequence_parallel", [False, True])
@pytest.mark.parametrize("name", list(PARTS))
def test_training_equals_one_process_over_tp(name, sequence_parallel):
    config = replace(PARTS[name], sequence_parallel=sequence_parallel)
    whole, model, _ = test_tensor_parallel.train_alike(config, torch.float64, tp=2)
    test_tensor_parallel.check_alike(whole, model, 1e-9)


@pytest.mark.ranks(2)
@pytest.mark.parametrize("way", ["ring", "all_gather", "ulysses"])
def test_training_equals_one_process_over_cp(way):
    if way == "ring" and device_type() == "cuda":
        pytest.skip("a ring has no sliding windows on a GPU")
    layout = ParallelLayout(cp=2)
    config = replace(MIXED, vocab_size=62, context_parallel=way)
    test_context_parallel.train_alike(config, layout)


@pytest.mark.ranks(2)
@pytest.mark.parametrize("way", ["all_gather", "ulysses"])
def test_scores_and_gates_train_over_cp(way):
    gated = {"scores": SCORES, "attention": GatedAttention(each="head")}
    config = replace(LLAMA, vocab_size=62, context_parallel=way, **gated)
    test_context_parallel.train_alike(config, ParallelLayout(cp=2), documents=True)
    mesh = ParallelLayout(cp=2).build(device_type())
    with pytest.raises(ValueError, match="'ring' merges scores as they are"):
        GPTModel(replace(config, context_parallel="ring"), mesh)


@pytest.mark.parametrize("name", list(PARTS))
def test_the_parts_fit_on_a_mesh(name):
    pytest.importorskip("spmd_types")
    from lamina.models.parallel_types import check_types

    way = "ring" if PARTS[name].scores is None else "ulysses"
    config = replace(PARTS[name], sequence_parallel=True, context_parallel=way)
    cp = 1 if name in ("delta_nets", "mamba1", "mamba2") else 2  # they take whole sequences
    with init_distributed("fake", world_size=4 * cp):
        mesh = ParallelLayout(tp=2, cp=cp).build(device_type())
        tokens = torch.randint(0, 61, (2, 16))
        types = check_types(GPTModel(config, mesh), tokens, tokens.clone(), mesh=mesh)
    assert types.pop("tp") == "I"
    assert set(types.values()) <= {"P"}


def test_gates_among_the_queries_are_those_of_a_projection_of_their_own():
    inside = GPTModel(replace(LLAMA, attention=GatedAttention(in_queries=True)), seed=1)
    beside = GPTModel(replace(LLAMA, attention=GatedAttention()), seed=2)
    state = dict(inside.state_dict())
    width, heads = LLAMA.head_width, LLAMA.num_heads
    for at in range(LLAMA.num_layers):
        name = f"blocks.{at}.attention"
        rows = state[f"{name}.qkv.weight"]
        both = rows[: 2 * heads * width].view(heads, 2, width, -1)
        queries, state[f"{name}.gate.weight"] = (both[:, i].flatten(0, 1) for i in (0, 1))
        state[f"{name}.qkv.weight"] = torch.cat((queries, rows[2 * heads * width :]))
    beside.load_state_dict(state)
    torch.testing.assert_close(inside(tokens_of()), beside(tokens_of()), rtol=0, atol=1e-6)
    with pytest.raises(ValueError, match="in_queries=True with each='head'"):
        GatedAttention(each="head", in_queries=True)


@pytest.mark.parametrize("policy", ["full", "selective"])
def test_layers_that_differ_are_recomputed(policy):
    config = replace(MIXED, scores=SCORES, attention=GatedAttention())
    models = [GPTModel(config, seed=1), apply_recompute(GPTModel(config, seed=1), policy)]
    for model in models:
        model(tokens_of(), tokens_of()).backward()
    for expected, found in zip(*(model.parameters() for model in models), strict=True):
        assert torch.equal(found.grad, expected.grad)


def test_layers_of_several_kinds_stand_in_a_list():
    config = replace(
        LLAMA, num_layers=4, mamba=MambaConfig(state_size=8, head_dim=8),
        moe=MoEConfig(num_experts=4, top_k=2, ffn_size=16),
        layers=(LayerSpec("M"), LayerSpec(moe=None), LayerSpec("E"), LayerSpec("*")),
    )  # fmt: skip
    assert config.pattern == "MTE*"
    assert [config.has_experts(at) for at in range(4)] == [False, False, True, False]
    model = GPTModel(config)
    assert [type(block).__name__ for block in model.blocks] == [
        "MambaBlock", "TransformerBlock", "ExpertBlock", "AttentionBlock",
    ]  # fmt: skip
    model(tokens_of(), tokens_of()).backward()
    assert all(parameter.grad is not None for parameter in model.parameters())


@dataclass(frozen=True, kw_only=True)
class TwoLayers(LayerPart):
    """An MLP of one product, a sine, and one product."""

    width: int

    def make(self, config, mesh=None) -> nn.Module:
        return TwoLayersModule(config, self.width, mesh)

    def parameters(self, config) -> int:
        return 2 * config.hidden_size * self.width

    def huggingface_links(self, config, ours: str, theirs: str) -> Iterator[WeightLink]:
        for name in ("first", "second"):
            yield WeightLink(f"{ours}.{name}.weight", (f"{theirs}.{name}.weight",))


class TwoLayersModule(nn.Module):
    def __init__(self, config, width: int, mesh=None) -> None:
        super().__init__()
        cut = {"sequence_parallel": config.sequence_parallel, "init_std": config.init_std}
        self.first = ColumnParallelLinear(config.hidden_size, width, mesh, **cut)
        self.second = RowParallelLinear(width, config.hidden_size, mesh, **cut)

    def forward(self, x: Tensor) -> Tensor:
        return self.second(self.first(x).sin())


@dataclass(frozen=True, kw_only=True)
class Twice(NormPart):
    """RMSNorm, and the result doubled."""

    def make(self, size: int, eps: float, *, partial: bool = False) -> nn.Module:
        norm = RMSNorm(size, eps, partial=partial)
        norm.register_forward_hook(lambda _, __, normed: 2.0 * normed)
        return norm


OWN = replace(LLAMA, layers=(LayerSpec(mlp=TwoLayers(width=24)), LayerSpec(norm=Twice())),
              activation=Activation(torch.tanh, gated=True), num_layers=2)  # fmt: skip


@pytest.mark.ranks(2)
@pytest.mark.parametrize("sequence_parallel", [False, True])
def test_parts_of_ones_own_train_over_tp(sequence_parallel):
    config = replace(OWN, sequence_parallel=sequence_parallel)
    whole, model, _ = test_tensor_parallel.train_alike(config, torch.float64, tp=2)
    test_tensor_parallel.check_alike(whole, model, 1e-9)


def test_parts_of_ones_own_count_their_weights():
    matrices = sum(p.numel() for p in GPTModel(OWN).parameters() if p.ndim == 2)
    assert matrix_parameters(OWN) == matrices - OWN.padded_vocab_size * OWN.hidden_size


@pytest.mark.parametrize(
    ("layers", "message"),
    [
        ((LayerSpec(),), "layers has 1 layers, and num_layers is 2"),
        ((LayerSpec(), LayerSpec(num_heads=3)), r"layer 1 \(LayerSpec\('T', num_heads=3\)\): .* 3"),
        ((LayerSpec(), LayerSpec("?")), "which mean nothing"),
        ((LayerSpec(), LayerSpec(moe=MoEConfig(num_experts=2, top_k=1, normalize_weights=False))),
         "layer 1 has moe, and the model none"),
    ],
)  # fmt: skip
def test_lists_that_do_not_fit_are_refused(layers, message):
    with pytest.raises(ValueError, match=message):
        replace(LLAMA, num_layers=2, layers=layers)


def test_what_layers_share_is_no_change_of_one():
    for name, words in {"hidden_size": "all layers of a model share it", "x": "no such"}.items():
        with pytest.raises(ValueError, match=f"{name} cannot be that of one layer: .*{words}"):
            LayerSpec(**{name: 8})
    with pytest.raises(ValueError, match="layer_pattern 'TT' and layers are both given"):
        replace(LLAMA, num_layers=2, layer_pattern="TT", layers=(LayerSpec(),) * 2)


@pytest.mark.parametrize(
    ("change", "message"),
    [
        ({"rotary_fraction": 0.4}, r"rotary_fraction is 0\.4, and turns 3\.2\d* of 8"),
        ({"parallel_mlp": "one_norm", "post_norm": True}, "such blocks normalise their inputs"),
        ({"norm": "batchnorm"}, "norm is 'batchnorm': it must be one of 'rmsnorm'"),
        ({"qk_norm": "half"}, "qk_norm is 'half'"),
        ({"activation": "sine"}, "activation is 'sine': it must be one of 'gelu'"),
    ],
)
def test_parts_that_do_not_exist_are_refused(change, message):
    with pytest.raises(ValueError, match=message):
        replace(LLAMA, **change)


def test_configs_with_specifications_print_as_they_are_written():
    spec = LayerSpec("T", sliding_window=5, positions="none")
    assert eval(repr(spec)) == spec


@pytest.mark.ranks(2, timeout=120)
@pytest.mark.parametrize("axes", [{"tp": 2}, {"tp": 2, "expert_tp": 2}, {"ep": 2}])
def test_a_gated_shared_expert_trains_as_in_one_process(axes):
    moe = {"shared_ffn_size": 16, "shared_gate": True}
    cut = {"sequence_parallel": axes == {"tp": 2}}
    moe_parity.check(moe_parity.Case(axes, moe, strategy=0, config=cut, max_norm=math.inf), 2)
