"""Models work with torch's own tools: parallelize_module, FSDP2, autocast, compile, checkpoints."""

from __future__ import annotations

import copy
from dataclasses import replace

import pytest
import torch
from torch import nn
from torch.distributed.device_mesh import init_device_mesh
from torch.distributed.fsdp import fully_shard
from torch.distributed.tensor.parallel import parallelize_module
from torch.utils._python_dispatch import TorchDispatchMode

from lamina.mesh import ParallelLayout, role_of
from lamina.models import (
    GPTModel,
    LatentAttention,
    LayerSpec,
    Precision,
    TransformerConfig,
    apply_precision,
    apply_recompute,
    matrix_parameters,
    tensor_parallel_plan,
    training_flops_per_token,
)
from lamina.models.base import initialise
from lamina.models.decoder.precision_backends import amax_exchanges
from lamina_testing import device_type

CONFIG = TransformerConfig(
    vocab_size=64,
    hidden_size=32,
    num_layers=2,
    num_heads=4,
    num_kv_heads=2,
    ffn_size=48,
    max_sequence_length=32,
    tie_embeddings=True,
)
ON_HOST = torch.randint(0, 64, (2, 16), generator=torch.Generator().manual_seed(0))


def tokens():
    """The same ids on the rank's device."""
    return ON_HOST.to(device_type())


@pytest.mark.ranks(2)
@pytest.mark.parametrize("sequence_parallel", [None, True])
def test_parallelize_module_makes_the_model_that_a_mesh_makes(sequence_parallel):
    mesh = init_device_mesh(device_type(), (2,), mesh_dim_names=("tp",))
    config = replace(CONFIG, sequence_parallel=bool(sequence_parallel))
    expected = GPTModel(config, mesh, seed=3)
    model = GPTModel(CONFIG, seed=3)
    plan = tensor_parallel_plan(model, sequence_parallel=sequence_parallel)
    model = parallelize_module(model, mesh["tp"], plan)
    pairs = zip(model.named_parameters(), expected.named_parameters(), strict=True)
    for (name, parameter), (other_name, other) in pairs:
        assert name == other_name
        assert torch.equal(parameter, other), name
        assert role_of(parameter) == role_of(other), name
    assert model.head.weight is model.embedding.weight
    for each in (model, expected):
        each(tokens(), tokens()).backward()
    for parameter, other in zip(model.parameters(), expected.parameters(), strict=True):
        assert torch.equal(parameter.grad, other.grad)


@pytest.mark.ranks(2)
def test_parallelize_module_keeps_weights_that_were_trained():
    mesh = init_device_mesh(device_type(), (2,), mesh_dim_names=("tp",))
    model = GPTModel(CONFIG, seed=3)
    with torch.no_grad():
        for parameter in model.parameters():
            parameter.add_(0.01)
    expected = model(tokens())
    model.blocks[0].eval()
    modes = [module.training for module in model.modules()]
    parallelize_module(model, mesh["tp"], tensor_parallel_plan(model))
    torch.testing.assert_close(model(tokens()), expected)
    assert [module.training for module in model.modules()] == modes
    with pytest.raises(ValueError, match="cut over tp already"):
        tensor_parallel_plan(model)


@pytest.mark.ranks(2)
def test_parallelize_module_refuses_what_it_would_lose():
    mesh, fp8 = (
        init_device_mesh(device_type(), (2,), mesh_dim_names=("tp",)),
        Precision(backend="torch-fp8"),
    )
    plain, eight = CONFIG, replace(CONFIG, precision=fp8)
    changes = {
        "recompute": (plain, lambda model: apply_recompute(model, "full")),
        "selective": (plain, lambda model: apply_recompute(model, "selective")),
        "FP8": (plain, lambda model: apply_precision(model, fp8)),
        "no FP8": (eight, lambda model: apply_precision(model, Precision())),
        "other FP8": (eight, lambda model: apply_precision(model, replace(fp8, amax="delayed"))),
        "another layer": (plain, lambda model: setattr(model.blocks[1], "mlp", nn.Identity())),
        "a hook": (plain, lambda model: model.blocks[1].register_forward_hook(lambda *_: None)),
        "a rate": (plain, lambda model: setattr(model.blocks[1].dropout, "rate", 0.5)),
    }
    for config, change in changes.values():
        model = GPTModel(config, seed=3)
        change(model)
        before = model.eval()(tokens())
        with pytest.raises(ValueError, match=r"blocks\..* is not as its config makes it"):
            parallelize_module(model, mesh["tp"], tensor_parallel_plan(model))
        assert model.axis is None
        assert torch.equal(model(tokens()), before)
    # Nothing is lost that was put back, or is as the config says.
    model = apply_precision(GPTModel(plain, seed=3), fp8)
    apply_recompute(apply_recompute(apply_precision(model, Precision()), "full"), "none")
    parallelize_module(model, mesh["tp"], tensor_parallel_plan(model))


@pytest.mark.ranks(2)
def test_parallelize_module_refuses_models_that_differ(ranks):
    mesh, rank = init_device_mesh(device_type(), (2,), mesh_dim_names=("tp",)), ranks.rank
    one_off = GPTModel(CONFIG, seed=3)
    with torch.no_grad():
        one_off.blocks[1].mlp.up.weight[-1, -1] += rank
    with torch.device("meta"):
        late = GPTModel(CONFIG, seed=rank)
    hooked = GPTModel(CONFIG, seed=3)
    if rank == 1:
        hooked.blocks[0].register_forward_hook(lambda *_: None)
    for model, message in (
        (hooked, "forward hook" if rank == 1 else "another rank of tp is not as its config"),
        (one_off, r"different models \(blocks\.1\.mlp\.up\.weight; 1 such in all\)"),
        (GPTModel(CONFIG, seed=rank), r"different models \(embedding\.weight"),
        (GPTModel(replace(CONFIG, rope_theta=1e4 + rank), seed=3), r"different models \(config"),
        (late, "different seeds"),
    ):
        with pytest.raises(ValueError, match=message):
            parallelize_module(model, mesh["tp"], tensor_parallel_plan(model))
        assert model.axis is None


@pytest.mark.parametrize("dtype", [torch.float32, torch.bfloat16, torch.bool])
def test_weights_are_compared_in_little_memory(dtype, monkeypatch):
    monkeypatch.setattr(initialise, "_BYTES_AT_ONCE", 1000)
    weights = (torch.arange(100_000).view(-1, 4) % 7).to(dtype).t()
    expected = sum(weights.contiguous().view(torch.uint8).flatten().tolist())
    summed = []

    class Summed(TorchDispatchMode):
        def __torch_dispatch__(self, function, types, args=(), kwargs=None):
            if function.overloadpacket is torch.ops.aten.sum:
                summed.append(args[0].numel())
            return function(*args, **(kwargs or {}))

    with Summed():
        assert initialise._sum_of_bytes(weights) == expected
    # A sum copies what it adds to int64 first.
    assert max(summed) == 1000
    assert initialise._sum_of_bytes(torch.ones((), dtype=dtype)) > 0
    assert initialise._sum_of_bytes(torch.ones(0, dtype=dtype)) == 0


@pytest.mark.ranks(2)
def test_parallelize_module_keeps_the_axes_of_delayed_scaling():
    """Other numbers are seen by dp and cp ranks too; here all are the same two processes."""
    mesh = init_device_mesh(device_type(), (2,), mesh_dim_names=("tp",))
    precision = Precision(backend="torch-fp8", amax="delayed")
    config = replace(CONFIG, ffn_size=64, precision=precision)
    model = GPTModel(config, ParallelLayout(dp_shard=2).build(device_type()), seed=3)
    parallelize_module(model, mesh["tp"], tensor_parallel_plan(model))
    (exchange,) = amax_exchanges(model)
    assert [axis.name for axis in exchange.axes] == ["dp_shard", "tp"]


@pytest.mark.ranks(2)
@pytest.mark.parametrize("recompute", ["none", "selective"])
def test_torch_fsdp_trains_a_model_from_the_meta_device(recompute):
    mesh = ParallelLayout(dp_shard=2).build(device_type())
    with torch.device("meta"):
        model = GPTModel(CONFIG, seed=3)
    apply_recompute(model, recompute)
    for block in model.blocks:
        fully_shard(block, mesh=mesh.mesh["dp_shard"])
    fully_shard(model, mesh=mesh.mesh["dp_shard"])
    model.to_empty(device=device_type())
    model.init_weights()
    whole = GPTModel(CONFIG, seed=3)
    for each in (model, whole):
        each(tokens(), tokens()).backward()
    for (name, parameter), other in zip(model.named_parameters(), whole.parameters(), strict=True):
        torch.testing.assert_close(parameter.full_tensor(), other, msg=name)
        torch.testing.assert_close(parameter.grad.full_tensor(), other.grad)


@pytest.mark.ranks(2)
@pytest.mark.parametrize("sequence_parallel", [False, True])
def test_autocast_reaches_cut_layers_and_the_loss(sequence_parallel):
    mesh = ParallelLayout(tp=2).build(device_type())
    config = replace(CONFIG, sequence_parallel=sequence_parallel, mlp_bias=True)
    model, whole = GPTModel(config, mesh, seed=3), GPTModel(config, seed=3)
    with torch.autocast(device_type(), dtype=torch.bfloat16):
        assert model.blocks[0].mlp.up(torch.zeros(4, 32)).dtype == torch.bfloat16
        losses = [each(tokens(), tokens()) for each in (model, whole)]
    for loss in losses:
        loss.backward()
    torch.testing.assert_close(*losses, rtol=1e-2, atol=1e-2)
    gradient = model.final_norm.weight.grad
    assert gradient.dtype == torch.float32
    assert gradient.isfinite().all()


@pytest.mark.parametrize("dtype", [torch.bfloat16, torch.float16])
def test_half_precision_models_train(dtype):
    model = GPTModel(CONFIG, seed=3).to(dtype)
    loss = model(tokens(), tokens())
    loss.backward()
    assert loss.dtype == torch.float32
    assert model(tokens()).dtype == dtype
    expected = GPTModel(CONFIG, seed=3)(tokens(), tokens())
    torch.testing.assert_close(loss, expected, rtol=2e-2, atol=2e-2)
    assert all(p.grad.isfinite().all() for p in model.parameters())


@pytest.mark.matrix(few=1)
@pytest.mark.parametrize("norm", ["rmsnorm", "layernorm"])
def test_a_model_compiles_into_one_graph(norm):
    model = GPTModel(replace(CONFIG, norm=norm, qk_norm=norm == "rmsnorm"), seed=3)
    expected = model(tokens(), tokens())
    compiled = torch.compile(model, backend="aot_eager", fullgraph=True)
    loss = compiled(tokens(), tokens())
    loss.backward()
    torch.testing.assert_close(loss, expected)


def test_a_model_whose_layers_differ_compiles_into_one_graph():
    layers = tuple(LayerSpec(sliding_window=4 if at else None) for at in range(CONFIG.num_layers))
    model = GPTModel(replace(CONFIG, layers=layers), seed=3)
    compiled = torch.compile(model, backend="eager", fullgraph=True)
    torch.testing.assert_close(compiled(tokens()), model(tokens()))


def test_state_dicts_survive_a_round_trip(tmp_path):
    model = GPTModel(CONFIG, seed=3)
    torch.save(model.state_dict(), tmp_path / "model.pt")
    other = GPTModel(CONFIG, seed=4)
    other.load_state_dict(torch.load(tmp_path / "model.pt", weights_only=True))
    assert torch.equal(other(tokens()), model(tokens()))


def test_a_users_module_in_the_place_of_dropout_is_called_as_dropout_is():
    model = GPTModel(replace(CONFIG, dropout=0.5, embedding_dropout=0.5), seed=3)
    expected = model.eval()(tokens())
    for module in model.modules():
        if hasattr(module, "dropout"):
            module.dropout = nn.Identity()
    assert torch.equal(model.train()(tokens()), expected)


def test_a_copied_model_is_independent():
    model = GPTModel(CONFIG, seed=3)
    other = copy.deepcopy(model)
    assert other.head.weight is other.embedding.weight
    with torch.no_grad():
        other.embedding.weight.zero_()
    assert model.embedding.weight.any()


MLA = LatentAttention(kv_lora_rank=12, q_lora_rank=20, qk_nope_head_dim=8, qk_rope_head_dim=4)


@pytest.mark.parametrize(
    "change",
    [{}, {"activation": "gelu"}, {"num_kv_heads": None, "mla": MLA}, {"tie_embeddings": False}],
)
def test_matrix_parameters_are_those_of_the_model(change):
    config = replace(CONFIG, **change)
    with torch.device("meta"):
        model = GPTModel(config)
    matrices = sum(p.numel() for p in model.parameters() if p.ndim == 2)
    if not config.tie_embeddings:
        matrices -= model.embedding.weight.numel()
    assert matrix_parameters(config) == matrices


@pytest.mark.parametrize("window", [None, 5])
def test_flops_are_those_that_torch_counts(window):
    config = replace(CONFIG, sliding_window=window, tie_embeddings=False)
    pairs = sum(min(i + 1, window or 16) for i in range(16)) / 16
    expected = 6 * (matrix_parameters(config) + 2 * pairs * 4 * (8 + 8))
    assert training_flops_per_token(config, 16) == pytest.approx(expected)
