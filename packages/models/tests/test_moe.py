"""Routing, experts and their losses in one process, against loops and by hand."""

from __future__ import annotations

import math
from dataclasses import replace
from unittest import mock

import pytest
import torch
import torch.nn.functional as F
from torch.utils.checkpoint import checkpoint

from lamina.models import (
    GPTModel,
    GroupedExperts,
    MoEConfig,
    MoELayer,
    RoutingContext,
    TopKRouter,
    TransformerConfig,
    generate,
    matrix_parameters,
    routing_statistics,
)
from lamina.models.moe import ExpertRows
from lamina.models.moe.routing import (
    choose_experts,
    copies_to_rows,
    rows_by_expert,
    rows_to_capacity,
    rows_to_tokens,
)
from lamina_testing import device_type

from . import moe_oracle

MOE = MoEConfig(num_experts=4, top_k=2, ffn_size=8)
CONFIG = TransformerConfig(
    vocab_size=32, hidden_size=16, num_layers=2, num_heads=2, ffn_size=24, init_std=0.3, moe=MOE
)
LOSSES = {"switch_loss": 0.1, "sequence_loss": 0.2, "global_loss": 0.1, "z_loss": 0.02}


def layer_of(seed=1, config=CONFIG, **moe):
    torch.manual_seed(seed)
    return MoELayer(replace(config, moe=replace(MOE, **moe))).double()


def draw(*shape, seed=0):
    generator = torch.Generator().manual_seed(seed)
    return torch.randn(*shape, dtype=torch.float64, generator=generator)


def compare(layer, x, **about):
    """Outputs and gradients beside the loop over experts."""
    oracle = moe_oracle.LoopMoE(moe_oracle.weights_of(layer), layer.router.moe)
    oracle.senders = oracle.sets = [list(range(x.shape[0] * x.shape[1]))]
    for name, value in about.items():
        setattr(oracle, name, value)
    mine, other = x.clone().requires_grad_(), x.clone().requires_grad_()
    context = None
    if oracle.padding is not None:
        context = RoutingContext(padding=torch.tensor(oracle.padding))
    found, expected = layer(mine, context), oracle(other)
    torch.testing.assert_close(found, expected, rtol=1e-10, atol=1e-10)
    target = draw(*x.shape, seed=9)
    (found * target).sum().backward()
    ((expected * target).sum() + oracle.loss).backward()
    torch.testing.assert_close(mine.grad, other.grad, rtol=1e-9, atol=1e-10)
    for name, parameter in oracle.named_parameters():
        gradient = layer.get_parameter(moe_oracle.NAMES[name]).grad
        torch.testing.assert_close(gradient, parameter.grad, rtol=1e-9, atol=1e-10)
    return oracle


@pytest.mark.parametrize(
    "moe",
    [
        LOSSES,
        {"scores": "sigmoid", "num_groups": 2, "weight_scale": 2.5, "shared_ffn_size": 8},
        {"top_k": 3, "normalize_weights": False} | LOSSES,
        {"weights_eps": 0.3, "scores": "sigmoid"} | LOSSES,
        {"capacity_factor": 0.6} | LOSSES,
        {"capacity_factor": 0.6, "drop": "position", "pad_to_capacity": True},
        {"top_k": 1, "num_experts": 6, "normalize_weights": False},
    ],
    ids=str,
)
def test_the_layer_equals_a_loop_over_tokens_and_experts(moe):
    layer = layer_of(**moe)
    compare(layer, draw(2, 7, 16))
    # Not the loop's word alone: it could stop the router's gradient as the layer does.
    assert layer.router.weight.grad.norm() > 1e-3


def test_padding_goes_nowhere_and_counts_in_no_loss():
    layer, x = layer_of(**LOSSES, bias_rate=0.1), draw(2, 7, 16)
    padding = [t % 7 >= 4 for t in range(14)]
    compare(layer, x, padding=padding)
    with_padding = routing_statistics(torch.nn.Sequential(layer))["0.router"]
    alone = layer_of(**LOSSES, bias_rate=0.1)
    alone(x[:, :4])
    expected = routing_statistics(torch.nn.Sequential(alone))["0.router"]
    assert with_padding.losses == pytest.approx(expected.losses, rel=1e-12)
    assert with_padding.load == expected.load
    assert with_padding.entropy == pytest.approx(expected.entropy)


@pytest.mark.parametrize("case", ["none for some", "all to one", "fewer tokens", "no token"])
@pytest.mark.parametrize("capacity", [None, 0.5])
def test_awkward_loads_equal_the_loop(case, capacity):
    top_k = 1 if case == "all to one" else 2
    layer = layer_of(
        top_k=top_k, normalize_weights=top_k > 1, capacity_factor=capacity, num_experts=6
    )
    x = draw(1, {"fewer tokens": 2, "no token": 0}.get(case, 9), 16)
    if case in ("none for some", "all to one"):
        # The first input is the same everywhere, and decides.
        x[..., 0] = 5.0
        with torch.no_grad():
            layer.router.weight[:, 0] = torch.tensor([9.0, 8.0, -9.0, -9.0, 0.0, -9.0])
    if case == "no token":
        out = layer(x.requires_grad_())
        assert out.shape == x.shape
        out.sum().backward()
        assert not layer.experts.up.grad.any()
        return
    compare(layer, x)
    if case == "all to one":
        assert layer.router.latest.chosen.tolist() == [9, 0, 0, 0, 0, 0]


@pytest.mark.parametrize("counts", [(3, 0, 5, 0), (0, 0, 0, 8), (2, 2, 2, 2), (0, 0, 0, 0)])
@pytest.mark.parametrize("activation", ["swiglu", "gelu"])
@pytest.mark.parametrize("bias", [False, True])
@pytest.mark.parametrize("dtype", [torch.float32, torch.bfloat16, torch.float16])
def test_grouped_products_equal_the_loop(counts, activation, bias, dtype):
    torch.manual_seed(0)
    experts = GroupedExperts(4, 16, 8, activation=activation, bias=bias, init_std=0.3).to(dtype)
    with torch.no_grad():
        for vectors in (experts.up_bias, experts.down_bias) if bias else ():
            vectors.copy_(torch.randn_like(vectors))
    results = {}
    for path in ("grouped", "loop", "batched"):
        experts.path = {"batched": "auto"}.get(path, path) if sum(counts) else "loop"
        x = draw(sum(counts), 16).to(dtype).requires_grad_()
        on_host = counts if path == "batched" else None
        out = experts(ExpertRows(x, torch.tensor(counts), on_host))
        (out * out.cos()).sum().backward()
        found = [out, x.grad, *(parameter.grad for parameter in experts.parameters())]
        results[path] = [value.detach().clone() for value in found]
        experts.zero_grad()
    for path in ("grouped", "batched"):
        for found, expected in zip(results[path], results["loop"], strict=True):
            bound = {torch.float32: 1e-5, torch.bfloat16: 3e-2, torch.float16: 4e-3}[dtype]
            torch.testing.assert_close(found, expected, rtol=bound, atol=bound)


class Blackwells(torch.autograd.Function):
    """A stand-in for grouped_mm that leaves the gradients of groups without rows unwritten."""

    @staticmethod
    def forward(ctx, rows, stack, offs):
        ctx.save_for_backward(rows, stack, offs)
        return GROUPED_MM(rows, stack, offs=offs)

    @staticmethod
    def backward(ctx, grad):
        rows, stack, offs = ctx.saved_tensors
        by_stack = unwritten(rows.t(), grad, offs=offs)
        return GROUPED_MM(grad, stack.transpose(1, 2), offs=offs), by_stack, None


GROUPED_MM = F.grouped_mm


def unwritten(left, right, *, offs):
    if right.ndim == 3:
        return Blackwells.apply(left, right, offs)
    found = GROUPED_MM(left, right, offs=offs)
    found[offs.diff(prepend=offs.new_zeros(1)) == 0] = torch.nan
    return found


@pytest.mark.parametrize("sunk", [False, True])
def test_experts_without_rows_have_no_gradient_whatever_the_kernel_left(sunk, monkeypatch):
    torch.manual_seed(0)
    experts = GroupedExperts(4, 16, 8, init_std=0.3, path="loop")
    x, rows = draw(8, 16).float(), torch.tensor((3, 0, 5, 0))
    wanted = {}
    for path in ("loop", "grouped"):
        experts.path = path
        if path == "grouped":
            monkeypatch.setattr(F, "grouped_mm", unwritten)
            monkeypatch.setattr("lamina.models.moe.experts.may_sink", lambda _: sunk)
        experts(ExpertRows(x, rows)).square().sum().backward()
        wanted[path] = [experts.up.grad, experts.down.grad]
        experts.zero_grad()
    torch.testing.assert_close(wanted["grouped"], wanted["loop"])


def test_an_expanded_gradient_is_no_trouble():
    experts = GroupedExperts(2, 16, 8, init_std=0.3)
    x = torch.ones(3, 16, requires_grad=True)
    experts(ExpertRows(x, torch.tensor([1, 2]))).sum().backward()  # refused by grouped_mm itself
    assert torch.equal(x.grad[1], x.grad[2])


def test_what_grouped_mm_cannot_is_named():
    experts = GroupedExperts(2, 16, 6, path="grouped")
    rows = ExpertRows(torch.randn(3, 16), torch.tensor([1, 2]))
    with pytest.raises(ValueError, match=r"widths \(12, 16, 6\): grouped_mm takes"):
        experts(rows)
    experts = GroupedExperts(2, 16, 8, path="grouped").double()
    rows = ExpertRows(draw(4, 16), torch.tensor([2, 2]), (2, 2))  # could be one batched product
    with pytest.raises(ValueError, match=r"experts='grouped' with torch\.float64"):
        experts(rows)


@pytest.mark.parametrize("holes", [False, True])
def test_permutations_have_right_derivatives(holes):
    experts = torch.tensor([[0, 2], [1, 0], [2, 1]])
    if holes:
        experts[1, 1] = 3
        order = rows_to_capacity(experts, 3, 2)
    else:
        order = rows_by_expert(experts)
    x, weights = draw(3, 4).requires_grad_(), draw(3, 2, seed=1).requires_grad_()

    def there_and_back(x, weights):
        rows = copies_to_rows(x, order)
        return rows_to_tokens(rows.sin(), weights, order)

    assert torch.autograd.gradcheck(there_and_back, (x, weights))


def test_groups_are_chosen_by_their_best_scores():
    moe = replace(MOE, num_experts=6, num_groups=3, groups_kept=1, top_k=2, group_best=2)
    # The first group has the best expert, the last the best two.
    scores = torch.tensor([[0.9, 0.1, 0.2, 0.2, 0.6, 0.5]])
    assert choose_experts(scores, moe).tolist() == [[4, 5]]
    assert choose_experts(scores, replace(moe, group_best=1)).tolist() == [[0, 1]]
    bias = torch.tensor([0.0, 0.4, 0.0, 0.0, 0.0, 0.0])
    assert choose_experts(scores, moe, bias).tolist() == [[0, 1]]


def test_the_bias_keeps_its_bits_whatever_the_models_dtype():
    router = TopKRouter(16, replace(MOE, bias_rate=0.001))
    with torch.no_grad():
        router.expert_bias.copy_(torch.tensor([1.001, 0.3, -1.002, 0.1]))
    before = router.expert_bias.clone()
    for change in (torch.nn.Module.bfloat16, torch.nn.Module.double):
        change(router)
        assert router.expert_bias.dtype == torch.float32
        assert torch.equal(router.expert_bias, before)
    assert "expert_bias" in router.state_dict()
    router.finalize_step(None)
    assert torch.equal(router.expert_bias, before)  # no token, nothing to balance


def test_a_step_of_the_bias_is_towards_the_mean():
    moe = MoEConfig(num_experts=3, top_k=1, normalize_weights=False, bias_rate=0.5)
    router = TopKRouter(2, moe).double()
    with torch.no_grad():
        router.weight.copy_(torch.tensor([[1.0, 0.0], [0.0, 1.0], [-9.0, -9.0]]))
    router(torch.tensor([[3.0, 0.0], [2.0, 0.0], [0.0, 2.0]], dtype=torch.float64))
    router.finalize_step(None)
    assert router.expert_bias.tolist() == [-0.5, 0.0, 0.5]
    assert routing_statistics(torch.nn.Sequential(router))["0"].load == (2 / 3, 1 / 3, 0.0)


def test_routing_is_in_float32_under_autocast_and_bfloat16():
    router = TopKRouter(16, MOE, init_std=0.3)
    x = torch.randn(5, 16)
    expected = router(x).weights
    with torch.autocast(device_type(), torch.bfloat16):
        assert torch.equal(router(x).weights, expected)
    found = router.bfloat16()(x.bfloat16()).weights
    wide = TopKRouter(16, MOE)
    with torch.no_grad():
        wide.weight.copy_(router.weight)
    assert torch.equal(found, wide(x.bfloat16().float()).weights)


def test_jitter_is_for_training():
    router = TopKRouter(16, replace(MOE, jitter=0.5), init_std=0.3)
    x = torch.randn(5, 16)
    assert not torch.equal(router(x).weights, router(x).weights)
    router.eval()
    assert torch.equal(router(x).weights, router(x).weights)


def test_statistics_know_what_was_dropped_and_how_sure_routers_are():
    layer = layer_of(top_k=1, normalize_weights=False, capacity_factor=0.5)
    with torch.no_grad():
        layer.router.weight.zero_()  # all the same: one expert gets everything
    layer(draw(1, 8, 16))
    found = routing_statistics(torch.nn.Sequential(layer))["0.router"]
    assert sorted(found.load) == [0.0, 0.0, 0.0, 1.0]
    assert found.imbalance == 4.0
    assert found.dropped == pytest.approx(7 / 8)
    assert found.entropy == pytest.approx(math.log(4))
    layer.eval()(draw(1, 8, 16))
    assert layer.router.latest.forwards == 1


def test_which_layers_have_experts():
    config = replace(CONFIG, num_layers=6, moe=replace(MOE, first_dense=1, every=2))
    with torch.device("meta"):
        model = GPTModel(config)
    kinds = [isinstance(block.mlp, MoELayer) for block in model.blocks]
    assert kinds == [False, False, True, False, True, False]
    matrices = sum(
        p.numel() for n, p in model.named_parameters() if p.ndim == 2 and "norm" not in n
    )
    active = sum(p.numel() for n, p in model.named_parameters() if p.ndim == 3) * 2 // 4
    embedding = model.embedding.weight.numel()
    assert matrix_parameters(config) == matrices + active - embedding


def test_attention_then_experts_is_a_block_of_both():
    """Letters `*E` are one `T`: the same numbers, the same cost."""
    config = replace(CONFIG, moe=replace(MOE, **LOSSES))
    block = GPTModel(replace(config, num_layers=1), seed=1).double()
    pair = GPTModel(replace(config, layer_pattern="*E"), seed=2).double()
    names = {
        "blocks.0.attention.": "blocks.0.mixer.",
        "blocks.0.attention_norm.": "blocks.0.norm.",
        "blocks.0.mlp.": "blocks.1.mixer.",
        "blocks.0.mlp_norm.": "blocks.1.norm.",
    }
    same = {}
    for name, parameter in block.named_parameters():
        front = next((front for front in names if name.startswith(front)), "")
        same[name] = pair.get_parameter(names.get(front, "") + name.removeprefix(front))
        same[name].data.copy_(parameter.detach())
    assert len(same) == len(list(pair.parameters()))
    tokens = torch.randint(0, 32, (2, 9), generator=torch.Generator().manual_seed(0))
    for model in (block, pair):
        model(tokens[:, :-1], tokens[:, 1:]).backward()
    for name, parameter in block.named_parameters():
        assert torch.equal(parameter.grad, same[name].grad), name
    assert matrix_parameters(block.config) == matrix_parameters(pair.config)


def test_what_generation_appends_takes_no_experts_place():
    model = GPTModel(replace(CONFIG, moe=replace(MOE, capacity_factor=0.5)), seed=1)
    model.register_forward_pre_hook(lambda *call: seen.append(call[2]), with_kwargs=True)
    for multiple, appended in ((8, 3), (1, 0)):
        seen: list[dict[str, torch.Tensor]] = []
        with mock.patch.object(GPTModel, "length_multiple", multiple):
            generate(model, torch.ones(2, 5, dtype=torch.int64), 1)
        masks = [call["padding_mask"].tolist() for call in seen if call]
        assert masks == ([[[False] * 5 + [True] * 3] * 2] if appended else [])


@pytest.mark.parametrize(
    ("change", "message"),
    [
        ({"top_k": 5}, "top_k 5 is above num_experts 4"),
        ({"top_k": 0}, "top_k is 0: it must be at least 1"),
        ({"top_k": 1}, "top_k 1 with normalize_weights=True: .* set normalize_weights=False"),
        ({"num_groups": 3}, r"not divisible by num_groups 3 \(remainder 1\)"),
        ({"num_groups": 2, "groups_kept": 3}, "groups_kept 3 is above num_groups 2"),
        ({"num_groups": 4, "groups_kept": 1}, "top_k 2 is above 1, the experts in 1 of 4 groups"),
        ({"pad_to_capacity": True}, "pad_to_capacity=True has no effect: capacity_factor=None"),
        ({"capacity_factor": 0.0}, "capacity_factor is 0.0: it must be positive"),
        ({"jitter": 1.0}, r"jitter is 1.0: it must be in \[0, 1\)"),
        ({"z_loss": -1.0}, "z_loss is -1.0: it must be at least 0"),
        ({"scores": "tanh"}, "scores is 'tanh': it must be one of 'softmax', 'sigmoid'"),
        ({"pad_to_capacity": True, "capacity_factor": 1.0, "dispatcher": "all_gather"},
         "pad_to_capacity with dispatcher 'all_gather'"),
    ],
)  # fmt: skip
def test_configs_that_cannot_be_are_refused(change, message):
    with pytest.raises(ValueError, match=message):
        replace(MOE, **change)


def run_again(blocks, xs, context=None):
    """Chains of checkpointed blocks, backward in turn: the routers' gradients."""
    for x in xs:
        for block in blocks:
            x = checkpoint(block, x, context, use_reentrant=False)
        x.sin().sum().backward()
    return [block.router.weight.grad for block in blocks]


def test_loads_that_a_layer_run_again_cannot_know_are_asked_for():
    xs = [draw(1, 7, 16, seed=seed) for seed in range(2)]
    layer = layer_of(global_loss=0.5)
    with pytest.raises(ValueError, match=r"global_loss is 0\.5 .* pass layer\(x, RoutingContext"):
        run_again([layer], xs)
    # Its loads are of one call; a second one's are not those of the first.
    layer = layer_of(switch_loss=0.5)
    with pytest.raises(ValueError, match=r"2 calls of this router .* one of two"):
        run_again([layer, layer], xs[:1], RoutingContext())
    run_again([layer], xs)


def test_the_rest_is_refused_by_name():
    with pytest.raises(ValueError, match="mlp_bias beside moe"):
        replace(CONFIG, mlp_bias=True)
    for change in ({"first_dense": 2}, {"every": 3}):
        with pytest.raises(ValueError, match=r"none of 2 layers \(.*'TT'\) has experts"):
            replace(CONFIG, moe=replace(MOE, **change))
    with pytest.raises(ValueError, match=r"none of 2 layers \(layer_pattern '\*-'\) has experts"):
        replace(CONFIG, layer_pattern="*-")
    with pytest.raises(ValueError, match=r"config\.moe is None"):
        MoELayer(replace(CONFIG, moe=None))
    with pytest.raises(ValueError, match="which sequences are they of"):
        layer_of(sequence_loss=0.1)(draw(5, 16))
