"""Products in FP8 equal those of the decoded numbers, and train like the model's own dtype."""

from __future__ import annotations

import copy
import functools
import math
from dataclasses import replace

import pytest
import torch
from torch import nn
from torch.distributed.device_mesh import init_device_mesh
from torch.distributed.tensor.parallel import parallelize_module
from torch.utils._python_dispatch import TorchDispatchMode

from lamina.mesh import ParallelLayout
from lamina.models import (
    ColumnParallelLinear,
    GPTModel,
    Precision,
    RowParallelLinear,
    TransformerConfig,
    apply_precision,
    apply_recompute,
    float8_weights,
    tensor_parallel_plan,
)
from lamina.models.pipelining.module import GPTStage, Microbatch
from lamina.models.precision import fp8
from lamina_testing import device_type

E4M3, E5M2 = torch.float8_e4m3fn, torch.float8_e5m2
CONFIG = TransformerConfig(
    vocab_size=48,
    hidden_size=32,
    num_layers=3,
    num_heads=2,
    ffn_size=48,
    max_sequence_length=64,
    precision=Precision(backend="torch-fp8"),
)
PRECISIONS = {
    "tensorwise": Precision(backend="torch-fp8"),
    "rowwise": Precision(backend="torch-fp8", scaling="rowwise"),
    "delayed": Precision(backend="torch-fp8", amax="delayed", history=2),
    "transposed": Precision(backend="torch-fp8", keep_transpose=True),
    "rowwise transposed": Precision(backend="torch-fp8", scaling="rowwise", keep_transpose=True),
}


class Products(TorchDispatchMode):
    """Counts products of FP8 matrices, and those of others."""

    def __init__(self):
        super().__init__()
        self.scaled = self.plain = 0

    def __torch_dispatch__(self, function, types, args=(), kwargs=None):
        name = function._schema.name
        self.scaled += name.startswith("aten::_scaled_mm")
        self.plain += name in ("aten::mm", "aten::addmm")
        return function(*args, **(kwargs or {}))


def decoded(x: torch.Tensor, dtype: torch.dtype, amax: torch.Tensor) -> torch.Tensor:
    """What is left of numbers whose scales follow from ``amax``; in float64, one by one."""
    limit = torch.finfo(dtype).max
    scales = [2.0 ** math.floor(math.log2(limit / a)) for a in amax.flatten().tolist()]
    scale = torch.tensor(scales, dtype=torch.float64).view(amax.shape)
    return (x.double() * scale).clamp(-limit, limit).float().to(dtype).double() / scale


def largest(x: torch.Tensor, rowwise: bool) -> torch.Tensor:
    return x.abs().amax(dim=1, keepdim=True) if rowwise else x.abs().max()


def oracle(x, weight, grad, rowwise, amax=None):
    """Output and gradients of x and weight from decoded numbers."""
    amax = amax or [largest(m, rowwise) for m in (x, weight, grad)]
    x8, w8, g8 = (
        decoded(m, kind, a)
        for m, kind, a in zip((x, weight, grad), (E4M3, E4M3, E5M2), amax, strict=True)
    )
    if not rowwise:
        return x8 @ w8.t(), g8 @ w8, g8.t() @ x8
    turned = [
        decoded(m.t(), kind, largest(m.t(), True))
        for m, kind in ((x, E4M3), (weight, E4M3), (grad, E5M2))
    ]
    return x8 @ w8.t(), g8 @ turned[1].t(), turned[2] @ turned[0].t()


def layer_in(precision: Precision, axis=None, kind=ColumnParallelLinear) -> nn.Module:
    layer = kind(32, 64, axis, init_std=0.3)
    layer.init_seed = 7
    layer.reset_parameters()
    return apply_precision(nn.Sequential(layer), precision, axis, blocks=(kind,))


def numbers(*shape: int, seed: int) -> torch.Tensor:
    x = torch.randn(*shape, generator=torch.Generator().manual_seed(seed))
    return x * torch.logspace(-2, 1, shape[0])[:, None]


@pytest.mark.parametrize("name", ["tensorwise", "rowwise", "transposed", "rowwise transposed"])
def test_products_equal_those_of_decoded_numbers(name):
    model = layer_in(PRECISIONS[name])
    x, grad = numbers(20, 32, seed=1).requires_grad_(), numbers(20, 64, seed=2)
    weight = model[0].weight
    output = model(x)
    output.backward(grad)
    wanted = oracle(x.detach(), weight.detach(), grad, "rowwise" in name)
    for found, expected in zip((output, x.grad, weight.grad), wanted, strict=True):
        torch.testing.assert_close(found.double(), expected, rtol=1e-5, atol=1e-5)


@pytest.mark.parametrize("dtype", [E4M3, E5M2])
def test_scales_are_the_largest_powers_of_two_that_fit(dtype):
    generator = torch.Generator().manual_seed(0)
    bits = torch.randint(0x7F800000, (100_000,), dtype=torch.int32, generator=generator)
    limit = torch.finfo(dtype).max
    powers = 2.0 ** torch.arange(-126, 100, dtype=torch.float64)
    edges = torch.cat([powers, powers * limit]).float()
    edges = [edges, *(edges.nextafter(torch.tensor(to)) for to in (0.0, math.inf))]
    amax = torch.cat([bits.view(torch.float32), *edges, torch.zeros(1)])
    exact = torch.frexp(limit / amax.double().clamp(min=1e-300)).exponent - 1
    found = fp8.scale_exponent(amax, dtype)
    assert found.dtype == torch.int32
    assert torch.equal(found, exact.clamp(-120, 120).int())
    assert found[-1] == 120


@pytest.mark.parametrize("rows", [False, True])
@pytest.mark.skipif(fp8._OLDER_ON_CPU, reason="this torch has the older operator alone")
def test_the_older_operator_multiplies_alike(rows, monkeypatch):
    left, right = (fp8.encode(m, fp8.magnitude(m, rows=rows), E4M3)
                   for m in (numbers(20, 32, seed=1), numbers(48, 32, seed=2)))  # fmt: skip
    expected = fp8.scaled_product(left, right, torch.float32)
    monkeypatch.setattr(fp8, "_OLDER_ON_CPU", not fp8._OLDER_ON_CPU)
    torch.testing.assert_close(fp8.scaled_product(left, right, torch.float32), expected)


def test_delayed_scales_follow_from_the_steps_before():
    model = layer_in(PRECISIONS["delayed"])
    weight, seen = model[0].weight, []
    for step, size in enumerate((1.0, 0.25, 3.0, 0.5, 0.5)):
        with torch.no_grad():  # validation on other numbers is not remembered
            model(numbers(20, 32, seed=100) * 1000.0)
        x = (numbers(20, 32, seed=step) * size).requires_grad_()
        grad = numbers(20, 64, seed=10 + step) / size
        seen.append([largest(m.detach(), False) for m in (x, weight, grad)])
        past = seen[-3:-1] or seen
        wanted = oracle(
            x.detach(), weight.detach(), grad, False, [max(a) for a in zip(*past, strict=True)]
        )
        weight.grad = None
        output = model(x)
        output.backward(grad)
        for found, expected in zip((output, x.grad, weight.grad), wanted, strict=True):
            torch.testing.assert_close(found.double(), expected, rtol=1e-5, atol=1e-5)


@pytest.mark.ranks(2)
@pytest.mark.parametrize("sequence_parallel", [False, True])
@pytest.mark.parametrize("name", ["tensorwise", "rowwise", "delayed"])
def test_cut_layers_multiply_what_the_whole_layer_does(name, sequence_parallel):
    axis = ParallelLayout(tp=2).build(device_type()).axis("tp")
    first, second = numbers(8, 32, seed=1), numbers(8, 64, seed=2)
    for kind in (ColumnParallelLinear, RowParallelLinear):
        column = kind is ColumnParallelLinear
        whole, model = (layer_in(PRECISIONS[name], a, kind) for a in (None, axis))
        if sequence_parallel:
            model[0].sequence_parallel = True
        # The second rank's features are so small beside the first's that codes by a common scale
        # lose digits, and its weights so large that it matters.
        cut = 1 if column else 0
        with torch.no_grad():
            whole[0].weight.chunk(2, dim=1 - cut)[1].mul_(2.0**14)
            model[0].weight.mul_(2.0 ** (14 * axis.rank))
        for step in range(3):
            # Column: whole tokens in, features cut out. Row: the other way round.
            x, grad = ((m * (step + 1)).detach() for m in (first, second))
            (x, grad)[cut].chunk(2, dim=1)[1].mul_(2.0**-14)
            mine = [x.clone(), grad.clone()]
            mine[cut] = mine[cut].chunk(2, dim=1)[axis.rank]
            if sequence_parallel:
                mine[1 - cut] = mine[1 - cut].chunk(2, dim=0)[axis.rank]
            inputs = [x.requires_grad_(), mine[0].requires_grad_()]
            outputs = [whole(inputs[0]), model(inputs[1])]
            outputs[0].backward(grad)
            outputs[1].backward(mine[1])
            found = [outputs[1], inputs[1].grad, model[0].weight.grad]
            expected = [outputs[0], inputs[0].grad, whole[0].weight.grad]
            places = [1, 0] if column else [0, 1]  # whose features are cut: output or input
            for place in (0, 1):
                if places[place]:
                    expected[place] = expected[place].chunk(2, dim=1)[axis.rank]
                elif sequence_parallel:
                    expected[place] = expected[place].chunk(2, dim=0)[axis.rank]
            expected[2] = expected[2].chunk(2, dim=0 if column else 1)[axis.rank]
            for one, other in zip(found, expected, strict=True):
                size = other.abs().max().item()
                # On a GPU torch's rowwise kernel writes bf16, so the ranks' partial sums are bf16.
                in_bf16 = name == "rowwise" and device_type() == "cuda"
                rtol, atol = (2**-7, 2**-7 * size) if in_bf16 else (1e-4, 1e-6 * size)
                torch.testing.assert_close(one, other, rtol=rtol, atol=atol)
            whole.zero_grad()
            model.zero_grad()


@pytest.mark.ranks(2)
def test_parallelize_module_keeps_the_precision():
    mesh = init_device_mesh(device_type(), (2,), mesh_dim_names=("tp",))
    config = replace(CONFIG, ffn_size=64, precision=PRECISIONS["delayed"])
    model = GPTModel(config, seed=1)
    parallelize_module(model, mesh["tp"], tensor_parallel_plan(model))
    expected = GPTModel(config, mesh, seed=1)
    assert float8_weights(model) == float8_weights(expected)
    for step in range(3):
        losses = [each(**batch(step)) for each in (model, expected)]
        assert torch.equal(*losses)
        for loss in losses:
            loss.backward()
    assert model.blocks[0].mlp.up.float8.amax_history[2].any()


def test_a_pipeline_s_stage_moves_its_histories_on():
    model = GPTModel(replace(CONFIG, precision=PRECISIONS["delayed"]), seed=1)
    stage = GPTStage(model, range(2), first=True, last=False)
    history = stage.blocks.get_submodule("1").mlp.up.float8.amax_history
    outputs = [stage(None, Microbatch(**batch(step), positions=None, document_ids=None))
               for step in range(2)]  # fmt: skip
    assert history[0, 0]
    assert not history[1:].any()
    outputs[0].sum().backward()
    before = history.clone()
    assert before[1].all()
    # No forward since: what this backward sees belongs to the same row.
    outputs[1].backward(torch.full_like(outputs[1], 64.0))
    assert torch.equal(history[1], torch.maximum(before[1], history[1]))
    assert history[1, 2] > before[1, 2]
    assert not history[0].any()
    assert not history[2].any()


def batch(seed: int, size: int = 2) -> dict[str, torch.Tensor]:
    tokens = torch.randint(0, 48, (size, 17), generator=torch.Generator().manual_seed(seed))
    return {"tokens": tokens[:, :-1], "labels": tokens[:, 1:]}


def test_first_and_last_blocks_keep_their_dtype():
    precision = Precision(
        backend="torch-fp8", num_layers_at_start_in_bf16=1, num_layers_at_end_in_bf16=1
    )
    model = GPTModel(replace(CONFIG, precision=precision), seed=1)
    names = ("attention.qkv", "attention.output", "mlp.up", "mlp.down")
    assert float8_weights(model) == [f"blocks.1.{name}.weight" for name in names]
    with Products() as products:
        model(**batch(0)).backward()
    assert products.scaled == 3 * 4
    plain = GPTModel(replace(CONFIG, precision=Precision()), seed=1)
    with Products() as others:
        plain(**batch(0)).backward()
    assert products.plain + products.scaled == others.plain


def learn(model: GPTModel, steps: int) -> torch.Tensor:
    """Train on sequences that count up by 1, 2 or 3; return the mean loss of the last ten."""
    optimizer = torch.optim.AdamW(model.parameters(), lr=5e-3)
    generator = torch.Generator().manual_seed(5)
    losses = []
    for _ in range(steps):
        tokens = torch.randint(1, 4, (8, 17), generator=generator).cumsum(dim=1) % 48
        loss = model(tokens[:, :-1], tokens[:, 1:])
        loss.backward()
        optimizer.step()
        optimizer.zero_grad()
        losses.append(loss.detach().float())
    return torch.stack(losses[-10:]).mean()


@functools.cache
def learned_in_bf16():
    config = replace(CONFIG, num_layers=1, precision=Precision())
    return learn(GPTModel(config, seed=1).to(torch.bfloat16), 200)


@pytest.mark.slow
@pytest.mark.parametrize(
    "name",
    [*(pytest.param(n, marks=pytest.mark.slow) for n in ("tensorwise", "rowwise")), "delayed"],
)
def test_training_ends_where_bf16_does(name):
    config = replace(CONFIG, num_layers=1, precision=PRECISIONS[name])
    model = GPTModel(config, seed=1).to(torch.bfloat16)
    with Products() as products:
        found = learn(model, 200)
    assert products.scaled == 200 * 4 * 3
    expected = learned_in_bf16()
    assert expected < 1.3, "nothing was learnt: ln 3 = 1.10 is the least"
    assert abs(found - expected) < 0.02 * expected, f"{found} in FP8, {expected} in bf16"


@pytest.mark.parametrize("name", ["rowwise", "delayed", "transposed"])
def test_recomputation_changes_no_number(name):
    results = []
    for policy in ("none", "full", "selective"):
        model = GPTModel(replace(CONFIG, precision=PRECISIONS[name]), seed=1)
        apply_recompute(model, policy)
        for step in range(3):
            model.zero_grad()
            model(**batch(step)).backward()
        results.append([p.grad for p in model.parameters()])
    for other in results[1:]:
        assert all(map(torch.equal, results[0], other))


def test_what_is_recomputed_has_the_scales_of_its_forward():
    """As under 1F1B: a later forward moves the history on before an earlier one's backward."""
    results = []
    for policy in ("none", "full"):
        model = layer_in(PRECISIONS["delayed"])
        apply_recompute(model, policy, blocks=(ColumnParallelLinear,))
        inputs = [(numbers(20, 32, seed=i) * (1000.0 if i else 1.0)).requires_grad_()
                  for i in range(4)]  # fmt: skip
        outputs = {}
        for forward, backward in ((0, 0), (1, None), (2, 1), (3, 2), (None, 3)):
            if forward is not None:
                outputs[forward] = model(inputs[forward])
            if backward is not None:
                output = outputs.pop(backward)
                output.backward(numbers(20, 64, seed=9), retain_graph=True)
                output.backward(numbers(20, 64, seed=9))  # recomputed twice
        results.append([model[0].weight.grad, *(x.grad for x in inputs), *model.buffers()])
        layers = [module for module in model.modules() if hasattr(module, "kept_scales")]
        assert layers
        assert all(layer.kept_scales is None for layer in layers)
    assert all(map(torch.equal, *results))


def test_histories_are_in_checkpoints_and_keep_their_bits(tmp_path):
    config = replace(CONFIG, precision=PRECISIONS["delayed"])
    model = GPTModel(config, seed=1)
    for step in range(3):
        model(**batch(step)).backward()
    torch.save(model.state_dict(), tmp_path / "model.pt")
    other = GPTModel(config, seed=2)
    other.load_state_dict(torch.load(tmp_path / "model.pt", weights_only=True))
    history = other.blocks[1].mlp.down.float8.amax_history
    assert history.any()
    assert torch.equal(history, model.blocks[1].mlp.down.float8.amax_history)
    assert torch.equal(history, other.to(torch.bfloat16).blocks[1].mlp.down.float8.amax_history)


@pytest.mark.parametrize("name", ["tensorwise", "rowwise", "delayed"])
@pytest.mark.parametrize("bad", [float("inf"), float("nan")])
def test_overflows_show_and_are_not_remembered(name, bad):
    model = layer_in(PRECISIONS[name])
    x = numbers(20, 32, seed=1)
    for _ in range(2):
        model(x).sum().backward()
    x[3, 4] = bad
    output = model(x)
    assert output[3].isnan().all()
    output.sum().backward()
    x[3, 4] = 0.0
    assert model(x).isfinite().all()


def test_a_second_precision_replaces_the_first():
    model = GPTModel(replace(CONFIG, precision=PRECISIONS["delayed"]), seed=1)
    copied = copy.deepcopy(model)
    apply_precision(model, Precision())
    assert float8_weights(model) == []
    assert not model._forward_pre_hooks
    plain = GPTModel(replace(CONFIG, precision=Precision()), seed=1)
    assert torch.equal(model(**batch(0)), plain(**batch(0)))
    assert len(float8_weights(copied)) == 12


@pytest.mark.parametrize("half", [torch.bfloat16, torch.float16])
def test_half_precision_models_and_autocast_multiply_in_fp8(half):
    expected = GPTModel(CONFIG, seed=1)(**batch(0))
    model = GPTModel(CONFIG, seed=1).to(half)
    with Products() as products:
        loss = model(**batch(0))
        loss.backward()
        assert products.scaled == 36
        torch.testing.assert_close(loss, expected, rtol=2e-2, atol=2e-2)
        if half is torch.bfloat16:
            model = GPTModel(CONFIG, seed=1)
            with torch.autocast(device_type(), dtype=half):
                loss = model(**batch(0))
            loss.backward()
            assert products.scaled == 72
            torch.testing.assert_close(loss, expected, rtol=2e-2, atol=2e-2)


def test_a_model_in_fp8_compiles_into_one_graph():
    model = GPTModel(replace(CONFIG, num_layers=1), seed=1)
    compiled = torch.compile(model, backend="eager", fullgraph=True)
    loss = compiled(**batch(0))
    loss.backward()
    torch.testing.assert_close(loss, model(**batch(0)))


@pytest.mark.ranks(2, timeout=120)
def test_a_compiled_layer_in_fp8_over_tp_trains_and_evaluates_like_a_plain_one():
    axis = ParallelLayout(tp=2).build(device_type()).axis("tp")
    plain, compiled = (
        layer_in(PRECISIONS["tensorwise"], axis, RowParallelLinear) for _ in range(2)
    )
    compiled.compile(backend="eager")
    x = numbers(8, 16, seed=1)
    outputs = [layer(x) for layer in (plain, compiled)]
    torch.testing.assert_close(*outputs)
    for output in outputs:
        output.square().sum().backward()
    for one, other in zip(plain.parameters(), compiled.parameters(), strict=True):
        torch.testing.assert_close(one.grad, other.grad)
    with torch.no_grad():
        torch.testing.assert_close(plain.eval()(x), compiled.eval()(x))


def test_what_does_not_fit_is_refused_with_the_arithmetic():
    precision = Precision(
        backend="torch-fp8", num_layers_at_start_in_bf16=2, num_layers_at_end_in_bf16=1
    )
    with pytest.raises(ValueError, match=r"2 \+ num_layers_at_end_in_bf16 1 = 3 of 3 blocks"):
        replace(CONFIG, precision=precision)
    with pytest.raises(ValueError, match=r"blocks.0.mlp.down.weight is \(32, 40\) .* divisible by"):
        GPTModel(replace(CONFIG, ffn_size=40))
