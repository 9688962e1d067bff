"""Several residual streams, beside the same written out token by token, and beside transformers."""

from __future__ import annotations

from dataclasses import replace
from types import SimpleNamespace

import pytest
import torch

from lamina.ddp import full_gradients, full_parameters
from lamina.fsdp import MixedPrecisionPolicy, fully_shard
from lamina.mesh import ParallelLayout
from lamina.models import (
    GPTModel,
    HyperConnections,
    LayerSpec,
    MambaConfig,
    MoEConfig,
    MultiTokenPrediction,
    TransformerConfig,
    apply_recompute,
    generate,
    huggingface_config,
    matrix_parameters,
    pipeline,
    training_flops_per_token,
)
from lamina.models.layers.hyper_connections import HyperConnection, StreamSum, written
from lamina_testing import device_type

from .recurrent import TEXT, check_cut_over_ranks
from .test_context_parallel import train_alike

POLICY = MixedPrecisionPolicy(param_dtype=torch.bfloat16)
MIXED = HyperConnections(streams=3, iterations=4)
ALONE = HyperConnections(streams=3, mixed=False, magnitude=1.5)
CONFIG = TransformerConfig(
    vocab_size=62, hidden_size=16, num_layers=2, num_heads=4, ffn_size=24, init_std=0.3,
    hyper_connections=MIXED,
)  # fmt: skip
KINDS = {
    "mixed": CONFIG,
    "alone": replace(CONFIG, hyper_connections=ALONE),
    "parallel": replace(CONFIG, parallel_mlp="two_norms"),
    "norms after": replace(CONFIG, post_norm=True, residual_scale=0.7),
    "experts": replace(CONFIG, moe=MoEConfig(num_experts=4, top_k=2, ffn_size=12)),
    "one mixer a layer": replace(
        CONFIG, num_layers=4, layer_pattern="M*-*",
        mamba=MambaConfig(head_dim=8, state_size=8, groups=2),
    ),
    "windows by layer": replace(CONFIG, layers=(LayerSpec(sliding_window=4), LayerSpec())),
}  # fmt: skip


def perturbed(model, by=0.3):
    """A model whose streams differ: a new one reads the mean of equal streams."""
    torch.manual_seed(7)
    for name, parameter in model.named_parameters():
        if "stream" in name:
            parameter.data.add_(by * torch.randn_like(parameter))
    return model


def model_of(config, mesh=None, dtype=torch.float64):
    return perturbed(GPTModel(config, mesh, seed=1).to(dtype))


def rows_and_columns_divided(matrix, sizes):
    """Plain Python, one matrix at a time."""
    n = sizes.streams
    rows = [[float(e) + sizes.eps for e in row.softmax(dim=0)] for row in matrix.detach()]

    def by_columns():
        for k in range(n):
            total = sum(rows[j][k] for j in range(n)) + sizes.eps
            for j in range(n):
                rows[j][k] /= total

    by_columns()
    for _ in range(sizes.iterations - 1):
        for row in rows:
            total = sum(row) + sizes.eps
            row[:] = [e / total for e in row]
        by_columns()
    return rows


@pytest.mark.parametrize("sizes", [MIXED, ALONE], ids=["mixed", "alone"])
def test_a_token_reads_and_writes_its_streams_as_the_papers_say(sizes):
    config = replace(CONFIG, hyper_connections=sizes)
    n, width = sizes.streams, config.hidden_size
    reader = HyperConnection(config, sizes, partial=False).double()
    for parameter in reader.parameters():
        parameter.data.add_(0.5 * torch.randn_like(parameter))
    x, update = torch.randn(2, 5, n * width).double(), torch.randn(2, 5, width).double()
    inner, factors = reader(x)
    after = written(x, update, factors)
    for row in range(2):
        for place in range(5):
            streams = x[row, place].view(n, width)
            flat = x[row, place] / (x[row, place].square().mean() + config.norm_eps).sqrt()
            logits = reader.weight @ flat
            kinds = logits.split(reader.counts), reader.scale, reader.bias.split(reader.counts)
            read, write, *mix = (a * b + c for a, b, c in zip(*kinds, strict=True))
            summed = sum((read[j].sigmoid() + sizes.eps) * streams[j] for j in range(n))
            torch.testing.assert_close(inner[row, place], summed, rtol=0, atol=1e-12)
            matrix = rows_and_columns_divided(mix[0].view(n, n), sizes) if mix else torch.eye(n)
            for k in range(n):
                wanted = sum(matrix[j][k] * streams[j] for j in range(n))
                wanted = wanted + sizes.magnitude * write[k].sigmoid() * update[row, place]
                stream = after[row, place].view(n, width)[k]
                torch.testing.assert_close(stream, wanted, rtol=0, atol=1e-12)


def test_transformers_module_has_the_same_numbers_and_gradients():
    theirs = pytest.importorskip("transformers.models.deepseek_v4.modeling_deepseek_v4")
    sizes = SimpleNamespace(
        hc_mult=3, hc_sinkhorn_iters=4, hc_eps=1e-6, rms_norm_eps=1e-5, hidden_size=16
    )
    other, ours = theirs.DeepseekV4HyperConnection(sizes), HyperConnection(CONFIG, MIXED, False)
    head, our_head = theirs.DeepseekV4HyperHead(sizes), StreamSum(CONFIG, MIXED, False)
    pairs = [(other.fn, ours.weight), (other.base, ours.bias), (other.scale, ours.scale),
             (head.hc_fn, our_head.weight), (head.hc_base, our_head.bias),
             (head.hc_scale, our_head.scale)]  # fmt: skip
    for a, b in pairs:
        a.data = torch.randn_like(a)
        b.data = a.data.clone()
    x = torch.randn(2, 5, 48)
    mine, yours = x.clone().requires_grad_(), x.view(2, 5, 3, 16).clone().requires_grad_()
    post, matrix, inner = other(yours)
    read, factors = ours(mine)
    for made, wanted in ((read, inner), (factors.write, post), (factors.mix, matrix),
                         (our_head(mine), head(yours))):  # fmt: skip
        torch.testing.assert_close(made, wanted, rtol=1e-5, atol=1e-5)
    total = (read.cos().sum() + (factors.write * factors.mix.sum(-1)).sum()
             + factors.mix.square().sum() + our_head(mine).sin().sum())  # fmt: skip
    total.backward()
    (inner.cos().sum() + (post * matrix.sum(-1)).sum() + matrix.square().sum()
     + head(yours).sin().sum()).backward()  # fmt: skip
    torch.testing.assert_close(mine.grad, yours.grad.flatten(2), rtol=1e-4, atol=1e-5)
    for a, b in pairs:
        assert a.grad.norm() > 1e-4
        torch.testing.assert_close(b.grad, a.grad, rtol=1e-4, atol=1e-4)


def test_rows_and_columns_of_the_matrix_have_the_sum_one():
    sizes = HyperConnections(streams=4)
    reader = HyperConnection(replace(CONFIG, hyper_connections=sizes), sizes, False).double()
    reader.scale.data.fill_(0.2)
    reader.bias.data.zero_()
    matrix = reader(torch.randn(64, 64).double())[1].mix
    assert matrix.min() > 0.0
    for dim in (-1, -2):
        torch.testing.assert_close(matrix.sum(dim), torch.ones(64, 4).double(), rtol=0, atol=1e-3)
    identity = torch.eye(4).expand_as(matrix)
    assert (matrix - identity).abs().amax(dim=(1, 2)).max() > 0.5, "streams are mixed"


def test_the_logits_of_tokens_have_the_gradients_of_autograd():
    reader = HyperConnection(CONFIG, MIXED, False).double()

    def numbers(x, weight, bias, scale):
        given = {"weight": weight, "bias": bias, "scale": scale}
        inner, factors = torch.func.functional_call(reader, given, (x,))
        return inner, *factors

    x = torch.randn(2, 48).double().requires_grad_()
    assert torch.autograd.gradcheck(numbers, (x, *reader.parameters()))


def test_a_new_model_is_nearly_that_of_one_stream():
    plain = GPTModel(replace(CONFIG, hyper_connections=None), seed=1).double()
    model = GPTModel(CONFIG, seed=1).double()
    for name, parameter in plain.named_parameters():
        model.get_parameter(name).data.copy_(parameter)
    for name, parameter in model.named_parameters():
        if name.endswith("scale") and "stream" in name:
            parameter.data.zero_()
    torch.testing.assert_close(model(TEXT), plain(TEXT), rtol=0, atol=1e-4)


@pytest.mark.parametrize("recompute", ["full", "selective"])
def test_recomputation_changes_no_gradient(recompute):
    models = [model_of(CONFIG) for _ in range(2)]
    apply_recompute(models[1], recompute)
    for model in models:
        model(TEXT[:, :-1], TEXT[:, 1:]).backward()
    for one, other in zip(*(model.parameters() for model in models), strict=True):
        assert one.grad.norm() > 1e-9
        assert torch.equal(one.grad, other.grad)


@pytest.mark.parametrize("kind", list(KINDS))
def test_a_cache_gives_the_tokens_of_whole_contexts(kind, monkeypatch):
    model = model_of(KINDS[kind])
    tokens = generate(model, TEXT[:, :5], 8, temperature=0.0)
    monkeypatch.setattr(GPTModel, "caches", False)
    assert torch.equal(tokens, generate(model, TEXT[:, :5], 8, temperature=0.0))


@pytest.mark.ranks(2)
@pytest.mark.parametrize("sequence_parallel", [False, True])
@pytest.mark.parametrize("kind", [kind for kind in KINDS if kind != "experts"])
def test_a_step_over_tp_is_that_of_one_process(kind, sequence_parallel, ranks):
    check_cut_over_ranks(replace(KINDS[kind], sequence_parallel=sequence_parallel))


@pytest.mark.ranks(2)
@pytest.mark.parametrize("way", ["ring", "all_gather", "ulysses"])
def test_a_sequence_cut_over_ranks_trains_like_a_whole_one(way, ranks):
    train_alike(replace(CONFIG, context_parallel=way), ParallelLayout(cp=2))


@pytest.mark.ranks(2)
@pytest.mark.parametrize("schedule", ["1f1b", "interleaved_zero_bubble"])
@pytest.mark.parametrize("kind", ["mixed", "one mixer a layer"])
def test_stages_train_like_one_process(kind, schedule, ranks):
    config = replace(KINDS[kind], num_layers=4)
    mesh = ParallelLayout(pp=2).build(device_type())
    model, whole = model_of(config, mesh), model_of(config)
    runner = pipeline(model, mesh, schedule, 2)
    tokens, labels = TEXT[:, :-1].to(device_type()), TEXT[:, 1:].to(device_type())
    whole(tokens, labels).backward()
    runner.step(tokens, labels)
    wanted = dict(whole.named_parameters())
    for name, parameter in runner.named_parameters():
        torch.testing.assert_close(parameter.grad, wanted[name].grad, rtol=0, atol=1e-11)


@pytest.mark.ranks(2)
def test_experts_over_ranks_train_like_one_process(ranks):
    mesh = ParallelLayout(ep=2, dp_shard=-1).build(device_type())
    config = KINDS["experts"]
    whole, model = model_of(config), model_of(config, mesh)
    tokens, labels = TEXT[:, :-1].to(device_type()), TEXT[:, 1:].to(device_type())
    for row in range(2):
        (whole(tokens[row, None], labels[row, None]) / 2).backward()
    wrapped = fully_shard(model, device_mesh=mesh)
    mine = slice(ranks.rank, ranks.rank + 1)
    wrapped(tokens[mine], labels[mine]).backward()
    gradients = full_gradients(wrapped)
    for name, parameter in whole.named_parameters():
        if "experts" not in name:
            torch.testing.assert_close(gradients[name], parameter.grad, rtol=0, atol=1e-11)


@pytest.mark.ranks(2)
@pytest.mark.parametrize("strategy", [0, 1, 2, 3])
def test_a_sharded_model_trains_like_one_process(strategy, ranks):
    whole, model = model_of(CONFIG), model_of(CONFIG)
    tokens, labels = TEXT[:, :-1].to(device_type()), TEXT[:, 1:].to(device_type())
    plain = torch.optim.AdamW(whole.parameters(), 1e-2)
    optimizer = torch.optim.AdamW(model.parameters(), 1e-2)
    wrapped, optimizer = fully_shard(model, optimizer, zero_dp_strategy=strategy)
    mine = slice(ranks.rank, ranks.rank + 1)
    for _ in range(3):
        for row in range(2):
            (whole(tokens[row, None], labels[row, None]) / 2).backward()
        wrapped(tokens[mine], labels[mine]).backward()
        for each in (plain, optimizer):
            each.step()
            each.zero_grad()
    wanted = dict(whole.named_parameters())
    for name, parameter in full_parameters(wrapped).items():
        torch.testing.assert_close(parameter, wanted[name], rtol=0, atol=1e-10)


@pytest.mark.ranks(2)
def test_in_bf16_the_numbers_of_tokens_are_in_fp32(ranks):
    model = model_of(CONFIG, dtype=torch.float32)
    seen = []
    model.blocks[0].mlp_streams.register_forward_hook(lambda _m, _i, out: seen.append(out))
    wrapped = fully_shard(model, mixed_precision_policy=POLICY)
    loss = wrapped(TEXT[:, :-1].to(device_type()), TEXT[:, 1:].to(device_type()))
    loss.backward()
    inner, factors = seen[0]
    assert inner.dtype == torch.bfloat16
    assert factors.write.dtype == factors.mix.dtype == torch.float32
    assert loss.isfinite()


def test_backward_keeps_no_streams_in_float32():
    """In bf16 autograd would keep each reader's streams twice in float32."""
    config = replace(CONFIG, hidden_size=256, hyper_connections=HyperConnections(iterations=9))
    reader = HyperConnection(config, config.hyper_connections, False).bfloat16()
    x = torch.randn(1, 256, 1024, dtype=torch.bfloat16, requires_grad=True)
    kept = {}
    with torch.autograd.graph.saved_tensors_hooks(
        lambda t: kept.setdefault(t.untyped_storage().data_ptr(), t), lambda t: t
    ):
        reader(x)
    nbytes = sum(t.untyped_storage().nbytes() for t in kept.values())
    assert nbytes < 1.5 * x.numel() * x.element_size()


def test_what_it_costs_is_counted():
    plain = replace(CONFIG, hyper_connections=None)
    modules = [m for m in GPTModel(CONFIG, seed=1).modules() if isinstance(m, HyperConnection)]
    assert len(modules) == 4
    weights = sum(module.weight.numel() for module in modules)
    assert matrix_parameters(CONFIG) - matrix_parameters(plain) == weights
    # Each number of a token but the weights multiplies one element of each of some stream.
    numbers = sum(len(module.bias) for module in modules) * CONFIG.hidden_size
    more = training_flops_per_token(CONFIG, 8) - training_flops_per_token(plain, 8)
    assert more == 6 * (weights + numbers)


def test_compiled_blocks_have_the_gradients_of_others():
    models = [model_of(CONFIG) for _ in range(2)]
    for block in models[1].blocks:
        block.compile(backend="aot_eager", fullgraph=True)
    for model in models:
        model(TEXT[:, :-1], TEXT[:, 1:]).backward()
    for one, other in zip(*(model.parameters() for model in models), strict=True):
        torch.testing.assert_close(one.grad, other.grad, rtol=0, atol=1e-12)


def test_autocast_leaves_streams_and_numbers_as_they_are():
    model = model_of(CONFIG, dtype=torch.float32)
    x = torch.randn(1, 6, 48)
    inner, factors = model.blocks[0].mlp_streams(x)
    after = written(x, torch.randn(1, 6, 16, generator=torch.Generator().manual_seed(0)), factors)
    with torch.autocast("cpu", torch.bfloat16):
        other, others = model.blocks[0].mlp_streams(x)
        update = torch.randn(1, 6, 16, generator=torch.Generator().manual_seed(0))
        again = written(x, update, others)
    assert torch.equal(inner, other)
    assert torch.equal(after, again)


def test_what_does_not_go_with_it_is_refused():
    with pytest.raises(ValueError, match=r"mtp is .* beside hyper_connections"):
        replace(CONFIG, mtp=MultiTokenPrediction())
    with pytest.raises(ValueError, match="invariant=True beside hyper_connections"):
        replace(CONFIG, invariant=True)
    with pytest.raises(ValueError, match="streams is 1"):
        HyperConnections(streams=1)
    with pytest.raises(ValueError, match=r"iterations=3.*mixed=False"):
        HyperConnections(mixed=False, iterations=3)
    with pytest.raises(ValueError, match="hyper_connections"):
        huggingface_config(CONFIG)
