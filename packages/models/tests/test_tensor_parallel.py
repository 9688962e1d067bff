"""Models cut over tensor-parallel ranks train like the whole model in one process."""

from __future__ import annotations

import time
from collections import Counter
from dataclasses import replace

import pytest
import torch
import torch.distributed as dist
from torch import nn
from torch.distributed.device_mesh import init_device_mesh
from torch.utils._python_dispatch import TorchDispatchMode

from lamina.collectives import Ledger
from lamina.ddp import DistributedDataParallel, DistributedDataParallelConfig
from lamina.mesh import ParallelLayout, rng_state, role_of, seed_everything, set_rng_state
from lamina.models import (
    AttentionContext,
    ColumnParallelLinear,
    GPTModel,
    LatentAttention,
    RowParallelLinear,
    TransformerBlock,
    TransformerConfig,
    VocabParallelEmbedding,
    apply_recompute,
    generate,
    vocab_parallel_cross_entropy,
)
from lamina_testing import device_type

LLAMA = TransformerConfig(
    vocab_size=61,
    hidden_size=32,
    num_layers=2,
    num_heads=4,
    num_kv_heads=2,
    ffn_size=48,
    max_sequence_length=32,
    vocab_multiple=4,
    loss_chunk=10,
)
GPT = replace(
    LLAMA,
    num_kv_heads=None,
    positions="learned",
    norm="layernorm",
    activation="gelu",
    attention_bias=True,
    mlp_bias=True,
    tie_embeddings=True,
)
QWEN = replace(LLAMA, qk_norm=True, head_dim=12, post_norm=True, tie_embeddings=True)
DEEPSEEK = replace(
    LLAMA,
    num_kv_heads=None,
    mla=LatentAttention(
        kv_lora_rank=12, q_lora_rank=20, qk_nope_head_dim=8, qk_rope_head_dim=4, v_head_dim=6
    ),
)
CONFIGS = {"llama": LLAMA, "gpt": GPT, "qwen": QWEN, "deepseek": DEEPSEEK}


def piece_of(whole: torch.Tensor, parameter: nn.Parameter, rank: int, size: int) -> torch.Tensor:
    """This rank's piece by the parameter's role, cut row by row (shares no code with Lamina)."""
    role = role_of(parameter)
    if role.tp_shard_dim is None:
        return whole
    length = whole.shape[role.tp_shard_dim]
    kept, start = [], 0
    for block in role.tp_blocks or (length,):
        kept += [start + i for i in range(block) if i * size // block == rank]
        start += block
    return whole.index_select(role.tp_shard_dim, torch.tensor(kept))


def batch(step: int) -> dict[str, torch.Tensor]:
    generator = torch.Generator().manual_seed(step)
    tokens = torch.randint(0, 61, (3, 16), generator=generator)
    labels = torch.randint(0, 61, (3, 16), generator=generator)
    labels[0, :5] = -100
    documents = torch.arange(16).expand(3, 16) // 6
    return {"tokens": tokens, "labels": labels, "document_ids": documents}


def train_alike(config: TransformerConfig, dtype: torch.dtype, tp: int, recompute: str = "none"):
    """Train the whole and the cut model side by side; return both and the mesh."""
    mesh = ParallelLayout(tp=tp).build(device_type())
    whole = GPTModel(config, seed=5).to(dtype)
    model = GPTModel(config, mesh, seed=5).to(dtype)
    apply_recompute(model, recompute)
    optimizers = []
    for each in (whole, model):
        if dtype == torch.float64:
            optimizers.append(torch.optim.AdamW(each.parameters(), lr=3e-3, foreach=False))
        else:
            optimizers.append(torch.optim.SGD(each.parameters(), lr=0.05, momentum=0.9))
    for step in range(4):
        for each, optimizer in zip((whole, model), optimizers, strict=True):
            each(**batch(step)).backward()
            for parameter in each.parameters():
                if role_of(parameter).tp_grad == "sum":
                    dist.all_reduce(parameter.grad, group=mesh.axis("tp").group)
            optimizer.step()
            optimizer.zero_grad()
    return whole, model, mesh


def check_alike(whole: GPTModel, model: GPTModel, tolerance: float) -> None:
    rank, size = dist.get_rank(), dist.get_world_size()
    wholes = dict(whole.named_parameters())
    assert wholes.keys() == dict(model.named_parameters()).keys()
    for name, parameter in model.named_parameters():
        expected = piece_of(wholes[name], parameter, rank, size)
        torch.testing.assert_close(
            parameter, expected, rtol=tolerance, atol=tolerance, msg=lambda m, n=name: f"{n}: {m}"
        )
        if role_of(parameter).tp_shard_dim is None:
            copies = [torch.empty_like(parameter) for _ in range(size)]
            dist.all_gather(copies, parameter.detach())
            assert all(torch.equal(copy, copies[0]) for copy in copies), f"{name} differs"


@pytest.mark.matrix(strength=1)
@pytest.mark.ranks(2)
@pytest.mark.parametrize("sequence_parallel", [False, True])
@pytest.mark.parametrize("name", list(CONFIGS))
def test_training_equals_one_process_in_float64(name, sequence_parallel):
    config = replace(CONFIGS[name], sequence_parallel=sequence_parallel)
    whole, model, _ = train_alike(config, torch.float64, tp=2)
    check_alike(whole, model, 1e-9)


@pytest.mark.ranks(2)
@pytest.mark.parametrize("sequence_parallel", [False, True])
@pytest.mark.parametrize("tied", [False, True])
def test_training_equals_one_process_in_float32(tied, sequence_parallel):
    config = replace(LLAMA, sequence_parallel=sequence_parallel, tie_embeddings=tied)
    whole, model, _ = train_alike(config, torch.float32, tp=2)
    check_alike(whole, model, 2e-5)


@pytest.mark.ranks(4)
def test_training_equals_one_process_on_four_ranks():
    config = replace(GPT, sequence_parallel=True)
    whole, model, _ = train_alike(config, torch.float64, tp=4)
    check_alike(whole, model, 1e-9)


@pytest.mark.matrix(strength=1)
@pytest.mark.ranks(2)
@pytest.mark.parametrize("recompute", ["full", "selective"])
@pytest.mark.parametrize("name", ["qwen", "deepseek"])
def test_recomputation_changes_nothing(name, recompute):
    config = replace(CONFIGS[name], sequence_parallel=True)
    _, plain, _ = train_alike(config, torch.float32, tp=2)
    _, model, _ = train_alike(config, torch.float32, tp=2, recompute=recompute)
    for expected, parameter in zip(plain.parameters(), model.parameters(), strict=True):
        assert torch.equal(parameter, expected)


@pytest.mark.ranks(2)
@pytest.mark.parametrize("sequence_parallel", [False, True])
def test_logits_are_whole_and_equal_on_all_ranks(sequence_parallel):
    mesh = ParallelLayout(tp=2).build(device_type())
    config = replace(QWEN, sequence_parallel=sequence_parallel)
    whole, model = GPTModel(config, seed=5), GPTModel(config, mesh, seed=5)
    tokens = batch(0)["tokens"]
    expected, logits = whole(tokens), model(tokens)
    assert logits.shape == (3, 16, 61)
    torch.testing.assert_close(logits, expected, rtol=1e-5, atol=1e-5)


@pytest.mark.ranks(2)
@pytest.mark.parametrize("sequence_parallel", [False, True])
@pytest.mark.parametrize("recompute", ["none", "selective"])
def test_a_block_sends_what_the_formula_says(recompute, sequence_parallel):
    mesh = ParallelLayout(tp=2).build(device_type())
    config = replace(LLAMA, sequence_parallel=sequence_parallel)
    block = TransformerBlock(config, mesh)
    apply_recompute(nn.Sequential(block), recompute)
    context = AttentionContext.build(config, torch.zeros(2, 16), torch.float32)
    shape = (16, 32) if sequence_parallel else (2, 16, 32)
    x = torch.randn(shape, requires_grad=True)
    with Ledger() as ledger:
        output = block(x, context)
        forward = Counter(record.op for record in ledger.records)
        output.sum().backward()
    total = Counter(record.op for record in ledger.records)
    whole, half = 2 * 16 * 32 * 4, 2 * 16 * 32 * 4 // 2
    if sequence_parallel:
        # Into each half of the block a gather, out of it a sum that is scattered; backward the
        # same in turn, and each input gathered once more for the weight's gradient.
        assert forward == {"all_gather_into": 2, "reduce_scatter_fp32": 2}
        assert total == {"all_gather_into": 6, "reduce_scatter_fp32": 4}
        assert ledger.bytes() == 10 * half
    else:
        assert forward == {"all_reduce_fp32": 2}
        assert total == {"all_reduce_fp32": 4}
        assert ledger.bytes() == 4 * whole


@pytest.mark.ranks(2)
@pytest.mark.parametrize("sequence_parallel", [False, True])
@pytest.mark.parametrize("name", ["llama", "deepseek"])
def test_the_backend_may_sum(name, sequence_parallel):
    """The same numbers within tolerance, and no sum of activations but the backend's."""
    config = replace(
        CONFIGS[name], sequence_parallel=sequence_parallel, tp_reduction="native", num_layers=1
    )
    mesh = ParallelLayout(tp=2).build(device_type())
    whole, model = (GPTModel(config, m, seed=5).double() for m in (None, mesh))
    with Ledger() as ledger:
        loss = model(**batch(0))
        loss.backward()
    expected = whole(**batch(0))
    expected.backward()
    torch.testing.assert_close(loss, expected)
    for key, parameter in model.named_parameters():
        if role_of(parameter).tp_grad == "sum":
            dist.all_reduce(parameter.grad, group=mesh.axis("tp").group)
        wanted = piece_of(whole.get_parameter(key).grad, parameter, dist.get_rank(), 2)
        torch.testing.assert_close(parameter.grad, wanted)
    large = Counter(record.op for record in ledger.records if record.bytes > 1000)
    assert large.keys() <= {"all_reduce_native", "reduce_scatter_native", "all_gather_into"}, large
    assert large["reduce_scatter_native" if sequence_parallel else "all_reduce_native"] >= 6


@pytest.mark.ranks(2)
@pytest.mark.parametrize("axes", [{"tp": 2}, {"cp": 2}])
def test_generation_pads_to_what_ranks_can_share(axes):
    mesh = ParallelLayout(**axes).build(device_type())
    config = replace(LLAMA, sequence_parallel=True, max_sequence_length=15)
    whole, model = GPTModel(config, seed=5), GPTModel(config, mesh, seed=5)
    prompt = batch(0)["tokens"][:, :5]
    expected = generate(whole, prompt, 6, temperature=0.0)
    wrapped = DistributedDataParallel(model, DistributedDataParallelConfig(), mesh)
    for each in (model, wrapped):
        assert torch.equal(generate(each, prompt, 12, temperature=0.0)[:, :11], expected)


@pytest.mark.ranks(2)
def test_loss_never_gathers_the_vocabulary():
    mesh = ParallelLayout(tp=2).build(device_type())
    config = replace(LLAMA, vocab_size=20_000, num_layers=1, vocab_multiple=1)
    model = GPTModel(config, mesh, seed=5)
    data = batch(0)
    with Ledger() as ledger:
        model(data["tokens"], data["labels"]).backward()
    sent = max(record.bytes for record in ledger.records)
    assert sent <= 4 * 48 * 64, "more than activations of one layer in one message"


@pytest.mark.ranks(2)
@pytest.mark.parametrize("shape", [(7,), (2, 5)])
def test_cross_entropy_over_ranks_equals_torch(shape):
    axis = ParallelLayout(tp=2).build(device_type()).axis("tp")
    torch.manual_seed(0)
    logits = torch.randn(*shape, 12, dtype=torch.float64, requires_grad=True)
    labels = torch.randint(0, 12, shape)
    labels.view(-1)[1] = -100
    weights = torch.rand(shape, dtype=torch.float64)
    expected = nn.functional.cross_entropy(
        logits.flatten(0, -2), labels.flatten(), reduction="none"
    ).view(shape)
    (expected * weights).sum().backward()
    mine = logits.detach().chunk(2, dim=-1)[axis.rank].requires_grad_()
    losses = vocab_parallel_cross_entropy(mine, labels, axis)
    (losses * weights).sum().backward()
    torch.testing.assert_close(losses, expected)
    torch.testing.assert_close(mine.grad, logits.grad.chunk(2, dim=-1)[axis.rank])


@pytest.mark.ranks(2)
def test_layers_are_cut_from_the_same_whole_weight():
    axis = ParallelLayout(tp=2).build(device_type()).axis("tp")
    for make in (
        lambda axis: ColumnParallelLinear(6, 8, axis, blocks=(4, 4), bias=True),
        lambda axis: RowParallelLinear(8, 6, axis, bias=True),
        lambda axis: VocabParallelEmbedding(8, 6, axis),
    ):
        layers = [make(None), make(axis)]
        for layer in layers:
            layer.init_seed = 11
            layer.reset_parameters()
        assert torch.equal(
            layers[1].weight, piece_of(layers[0].weight, layers[1].weight, axis.rank, 2)
        )


class Products(TorchDispatchMode):
    """Notes when each matrix product begins."""

    def __init__(self):
        super().__init__()
        self.times = []

    def __torch_dispatch__(self, function, types, args=(), kwargs=None):
        if function.overloadpacket in (torch.ops.aten.mm, torch.ops.aten.addmm):
            self.times.append(time.perf_counter())
        return function(*args, **(kwargs or {}))


@pytest.mark.ranks(2, backend="gloo")  # on a GPU a ledger has the device's times
@pytest.mark.parametrize("sequence_parallel", [False, True])
def test_backward_computes_the_weight_gradient_while_the_sum_travels(sequence_parallel):
    axis = ParallelLayout(tp=2).build(device_type()).axis("tp")
    layer = ColumnParallelLinear(6, 8, axis, sequence_parallel=sequence_parallel)
    output = layer(torch.randn(4, 6, requires_grad=True))
    with Ledger() as ledger, Products() as products:
        output.sum().backward()
    within = {
        record.op: sum(record.issued < moment < record.waited for moment in products.times)
        for record in ledger.records
    }
    if sequence_parallel:
        assert within == {"all_gather_into": 1, "reduce_scatter_fp32": 1}
    else:
        assert within == {"all_reduce_fp32": 1}


@pytest.mark.ranks(2)
def test_gather_output_returns_the_whole_output_with_its_gradients():
    axis = ParallelLayout(tp=2).build(device_type()).axis("tp")
    whole, layer = ColumnParallelLinear(6, 8), ColumnParallelLinear(6, 8, axis, gather_output=True)
    for each in (whole, layer):
        each.init_seed = 3
        each.reset_parameters()
    x = torch.randn(5, 6, generator=torch.Generator().manual_seed(1))
    inputs = [x.clone().requires_grad_() for _ in range(2)]
    outputs = [each(y) for each, y in zip((whole, layer), inputs, strict=True)]
    for output in outputs:
        output.square().sum().backward()
    torch.testing.assert_close(outputs[1], outputs[0])
    torch.testing.assert_close(inputs[1].grad, inputs[0].grad)
    torch.testing.assert_close(
        layer.weight.grad, piece_of(whole.weight.grad, layer.weight, axis.rank, 2)
    )


@pytest.mark.ranks(2)
def test_dropout_is_equal_on_whole_activations_and_independent_on_pieces():
    mesh = ParallelLayout(tp=2).build(device_type())
    # Ranks that keep their groups run many tests, and another one may have seeded this process.
    set_rng_state(rng_state() | {"streams": {}})
    for sequence_parallel in (False, True):
        config = replace(LLAMA, dropout=0.5, sequence_parallel=sequence_parallel)
        if not sequence_parallel:  # ranks that nobody seeded may drop different elements
            model = GPTModel(config, mesh, seed=1)
            with pytest.raises(KeyError, match=r"seed_everything\(\)"):
                model(torch.zeros(2, 16, dtype=torch.int64))
            with pytest.raises(KeyError, match=r"seed_everything\(\)"):
                torch.compile(model, backend="eager")(torch.zeros(2, 16, dtype=torch.int64))
            model.eval()(torch.zeros(2, 16, dtype=torch.int64))
        with seed_everything(3, mesh):
            model = GPTModel(config, mesh)
        model.embedding.weight.data.fill_(1.0 / 2)
        tokens = torch.arange(32).view(2, 16)
        masks = model.embed(tokens, torch.arange(16)) == 0
        both = [torch.empty_like(masks) for _ in range(2)]
        dist.all_gather(both, masks)
        assert torch.equal(*both) is not sequence_parallel
        assert 0.3 < masks.float().mean() < 0.7
    # Each rank has other heads, so attention loses elements independently.
    config = replace(LLAMA, attention_dropout=0.5)
    context = AttentionContext.build(config, tokens, torch.float32, training=True)
    seed_everything(4, mesh)
    attended = (
        GPTModel(config, mesh, seed=1)
        .blocks[0]
        .attention.core(*(torch.ones(2, 16, 2, 8) for _ in range(3)), context)
    )
    both = [torch.empty_like(attended) for _ in range(2)]
    dist.all_gather(both, attended.contiguous())
    assert not torch.equal(*both)
    assert not torch.equal(attended, torch.ones_like(attended))


@pytest.mark.ranks(2)
def test_layers_take_any_mesh_that_names_its_axes():
    meshes = [
        ParallelLayout(tp=2).build(device_type()),
        init_device_mesh(device_type(), (1, 2), mesh_dim_names=("dp_shard", "tp")),
    ]
    meshes += [meshes[0].axis("tp"), meshes[1]["tp"]]
    x = torch.randn(3, 6)
    for mesh in meshes:
        assert ColumnParallelLinear(6, 8, mesh)(x).shape == (3, 4)
        assert RowParallelLinear(12, 5, mesh)(x).shape == (3, 5)
        assert VocabParallelEmbedding(8, 6, mesh).weight.shape == (4, 6)
    # A mesh without the axis is one process along it.
    assert ColumnParallelLinear(6, 8, meshes[1]["dp_shard"])(x).shape == (3, 8)
