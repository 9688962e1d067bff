"""Sequences cut over ranks train like whole ones, by each way of attending."""

from __future__ import annotations

import time
from dataclasses import replace

import pytest
import torch
import torch.distributed as dist
from torch.utils._python_dispatch import TorchDispatchMode

from lamina.collectives import Ledger
from lamina.mesh import ParallelLayout, role_of, seed_everything
from lamina.models import (
    AttentionContext,
    GPTModel,
    LatentAttention,
    SelfAttention,
    TransformerBlock,
    TransformerConfig,
    apply_recompute,
)
from lamina.models.attention import RopeScaling, cut_sequence, join_sequence
from lamina.models.attention import pieced as pieces
from lamina.models.attention.context_parallel import Ring, positions_of
from lamina.models.attention.kernels import Flex, Varlen
from lamina.models.attention.pieced import InPieces
from lamina_testing import Meter, device_type

WAYS = ("ring", "all_gather", "ulysses")
LLAMA = TransformerConfig(
    vocab_size=62,
    hidden_size=32,
    num_layers=2,
    num_heads=8,
    num_kv_heads=2,
    ffn_size=48,
    max_sequence_length=64,
)
CONFIGS = {
    "llama": LLAMA,
    "window": replace(LLAMA, sliding_window=5),
    "learned": replace(LLAMA, positions="learned", norm="layernorm", tie_embeddings=True),
    "growing queries": replace(
        LLAMA,
        rope_scaling=RopeScaling(kind="yarn", factor=4.0, original_length=6, query_beta=0.5),
    ),
    "latent": replace(
        LLAMA,
        num_kv_heads=None,
        mla=LatentAttention(kv_lora_rank=12, qk_nope_head_dim=8, qk_rope_head_dim=4, v_head_dim=6),
    ),
}


def batch(step: int, documents: bool) -> dict[str, torch.Tensor]:
    generator = torch.Generator().manual_seed(step)
    tokens = torch.randint(0, 62, (2, 24), generator=generator)
    labels = torch.randint(0, 62, (2, 24), generator=generator)
    # Ranks have different numbers of labels that count.
    labels[0, :9] = -100
    if not documents:
        return {"tokens": tokens, "labels": labels}
    ids = torch.tensor([[0] * 4 + [1] * 9 + [2] * 11, [5] * 17 + [6] * 7])
    return {"tokens": tokens, "labels": labels, "document_ids": ids}


def train_alike(config, layout, *, documents=False, recompute="none", dtype=torch.float64):
    """Train one process and the mesh side by side, and compare parameters and losses."""
    mesh = layout.build(device_type())
    whole = GPTModel(config, seed=5).to(dtype)
    model = apply_recompute(GPTModel(config, mesh, seed=5).to(dtype), recompute)
    optimizers = [
        torch.optim.AdamW(each.parameters(), lr=3e-3, foreach=False) for each in (whole, model)
    ]
    cp, tp = mesh.axis("cp"), mesh.axis("tp")
    for step in range(3):
        data = batch(step, documents)
        expected, loss = whole(**data), model(**data)
        mean = loss.detach().clone()
        dist.all_reduce(mean, group=cp.group)
        torch.testing.assert_close(mean / cp.size, expected.detach())
        for each in (expected, loss):
            each.backward()
        for parameter in model.parameters():
            dist.all_reduce(parameter.grad, group=cp.group)
            parameter.grad /= cp.size
            if role_of(parameter).tp_grad == "sum":
                dist.all_reduce(parameter.grad, group=tp.group)
        for optimizer in optimizers:
            optimizer.step()
            optimizer.zero_grad()
    if tp.size == 1:
        for (name, parameter), other in zip(
            model.named_parameters(), whole.parameters(), strict=True
        ):
            torch.testing.assert_close(
                parameter, other, rtol=1e-9, atol=1e-9, msg=lambda m, n=name: f"{n}: {m}"
            )


@pytest.mark.matrix(strength=1)
@pytest.mark.ranks(2)
@pytest.mark.parametrize("way", WAYS)
@pytest.mark.parametrize("name", list(CONFIGS))
def test_training_equals_one_process(name, way):
    config = replace(CONFIGS[name], context_parallel=way)
    train_alike(config, ParallelLayout(cp=2))


@pytest.mark.ranks(2)
@pytest.mark.parametrize("way", WAYS)
def test_packed_documents_train_like_in_one_process(way):
    if way == "ring" and device_type() == "cuda":
        pytest.skip("a ring has no documents on a GPU")
    config = replace(LLAMA, context_parallel=way, sliding_window=8)
    train_alike(config, ParallelLayout(cp=2), documents=True)


@pytest.mark.matrix(few=1)
@pytest.mark.ranks(4)
@pytest.mark.parametrize("way", WAYS)
def test_training_equals_one_process_on_four_ranks(way):
    config = replace(LLAMA, context_parallel=way, sliding_window=None)
    train_alike(config, ParallelLayout(cp=4), documents=way != "ring")


@pytest.mark.matrix(few=1)
@pytest.mark.ranks(4)
@pytest.mark.parametrize("way", WAYS)
def test_losses_agree_beside_tensor_and_sequence_parallelism(way):
    config = replace(LLAMA, context_parallel=way, sequence_parallel=True)
    train_alike(config, ParallelLayout(cp=2, tp=2))


@pytest.mark.matrix(strength=1)
@pytest.mark.ranks(2)
@pytest.mark.parametrize("recompute", ["full", "selective"])
@pytest.mark.parametrize("way", WAYS)
def test_recomputation_goes_with_it(way, recompute):
    train_alike(replace(LLAMA, context_parallel=way), ParallelLayout(cp=2), recompute=recompute)


@pytest.mark.ranks(2)
@pytest.mark.parametrize("way", WAYS)
def test_logits_come_back_whole_and_in_order(way):
    mesh = ParallelLayout(cp=2).build(device_type())
    config = replace(LLAMA, context_parallel=way)
    tokens = batch(0, False)["tokens"]
    whole, model = GPTModel(config, seed=5), GPTModel(config, mesh, seed=5)
    torch.testing.assert_close(model(tokens), whole(tokens), rtol=1e-5, atol=1e-5)


@pytest.mark.ranks(3)
def test_a_sequence_that_is_cut_and_joined_is_itself():
    axis = ParallelLayout(cp=3).build(device_type()).axis("cp")
    x = torch.arange(36.0).view(2, 18)
    piece = cut_sequence(x, axis)
    chunk = 3
    mine = [*range(axis.rank * chunk, axis.rank * chunk + chunk)]
    mine += [*range((5 - axis.rank) * chunk, (6 - axis.rank) * chunk)]
    assert torch.equal(piece, x[:, mine])
    assert torch.equal(join_sequence(piece, axis), x)


@pytest.mark.ranks(4)
def test_the_ring_gathers_nothing_and_holds_two_blocks_that_pass(monkeypatch):
    """Own keys and values, which backward needs, and 2/cp of all that pass; gradients beside."""
    merged, merge = [], pieces.merge
    monkeypatch.setattr(
        pieces, "merge", lambda *both: merged.append({x.dtype for x in both[:2]}) or merge(*both)
    )
    axis = ParallelLayout(cp=4).build(device_type()).axis("cp")
    sequence = 1024
    attention = SelfAttention(LLAMA)
    tokens = torch.zeros(1, sequence, dtype=torch.int32)
    context = AttentionContext.build(LLAMA, tokens, torch.bfloat16, mesh=axis)
    shapes = [(1, sequence // 4, heads, 8) for heads in (6, 2, 2)]
    query, key, value = (torch.randn(s).bfloat16().requires_grad_() for s in shapes)
    held = {"": [], "_backward": []}

    class Watch(TorchDispatchMode):
        def __torch_dispatch__(self, function, types, args=(), kwargs=None):
            name = function._schema.name
            if "flash_attention" in name:
                sizes = list(meter.live_storages().values())
                # In keys and values of one rank: they are bfloat16, their gradients float32.
                counts = [sizes.count(key.nbytes) / 2, sizes.count(2 * key.nbytes) / 2]
                held["_backward" if "backward" in name else ""].append(counts)
            return function(*args, **(kwargs or {}))

    with Ledger() as ledger, Meter() as meter, Watch():
        attention.core(query, key, value, context).sum().backward()
    assert {record.op for record in ledger.records} == {"send_recv"}
    assert merged == [{torch.float32}] * 4
    assert held[""] == [[2, 0], [3, 0], [3, 0], [3, 0]]
    # Gradients: those of the block at hand, those on their way out and those arriving.
    assert held["_backward"] == [[2, 1], [3, 3], [3, 3], [3, 3]]


@pytest.mark.ranks(2, backend="gloo")  # on a GPU narrow heads take a mask
def test_gathered_keys_write_out_no_pairs(ranks):
    axis = ParallelLayout(cp=2).build(device_type()).axis("cp")
    sequence = 2048
    config = replace(LLAMA, context_parallel="all_gather")
    tokens = torch.zeros(1, sequence, dtype=torch.int32)
    shapes = [(1, sequence // 2, heads, 8) for heads in (2, 1, 1)]
    inputs = [torch.randn(shape).requires_grad_() for shape in shapes]
    attention = SelfAttention(config)
    with Meter() as meter:
        before = meter.live_bytes()
        context = AttentionContext.build(config, tokens, torch.float32, mesh=axis)
        attention.core(*inputs, context).sum().backward()
        rise = meter.peak_live_bytes - before
    assert rise < sequence * sequence // 2, "a bool for every pair of a query and a key"


@pytest.mark.ranks(2, backend="gloo")  # on a GPU streams wait
def test_the_ring_sends_the_next_block_while_it_attends_to_one():
    mesh = ParallelLayout(cp=2).build(device_type())
    model = GPTModel(replace(LLAMA, num_layers=1), mesh, seed=5)
    moments = []

    class Watch(TorchDispatchMode):
        def __torch_dispatch__(self, function, types, args=(), kwargs=None):
            if "flash_attention" in str(function):
                moments.append(time.perf_counter())
            return function(*args, **(kwargs or {}))

    with Ledger() as ledger, Watch():
        model(**batch(0, False)).backward()
    steps = [record for record in ledger.records if record.op == "send_recv"]
    # Forward sends keys and values once; backward again, and their gradients after each block.
    hidden = [any(step.issued < moment < step.waited for moment in moments) for step in steps]
    assert len(moments) == 4
    assert hidden == [True, True, True, False]


@pytest.mark.ranks(2)
@pytest.mark.parametrize("way", ["all_gather", "ulysses"])
def test_attention_dropout_over_ranks_is_one_processs_with_the_same_elements_dropped(way):
    """Values are unit vectors, so that results show every probability, dropped ones too."""
    mesh = ParallelLayout(cp=2).build(device_type())
    axis, rate, size = mesh.axis("cp"), 0.25, 16
    config = replace(LLAMA, num_heads=2, context_parallel=way, attention_dropout=rate)
    core = SelfAttention(config).core
    generator = torch.Generator().manual_seed(1)
    query, key, grad = torch.randn(
        3, 1, size, 2, size, dtype=torch.float64, generator=generator
    ).unbind()
    value = torch.eye(size, dtype=torch.float64)[None, :, None].repeat(1, 1, 2, 1)
    query, key, value = whole = [x.clone().requires_grad_() for x in (query, key, value)]
    mine = [cut_sequence(x.detach(), axis).requires_grad_() for x in whole]
    tokens = torch.zeros(1, size, dtype=torch.int64)
    context = AttentionContext.build(config, tokens, torch.float64, training=True, mesh=axis)
    seed_everything(3, mesh).begin_training()
    found = core(*mine, context)
    found.backward(cut_sequence(grad, axis))

    allowed = torch.ones(size, size, dtype=torch.bool).tril()
    scores = torch.einsum("bqhd,bkhd->bhqk", query, key) * core.scale
    weights = scores.masked_fill(~allowed, -torch.inf).softmax(dim=-1)
    kept = join_sequence(found.detach(), axis).transpose(1, 2) != 0
    assert abs(kept[..., allowed].double().mean() - (1 - rate)) < 0.1
    expected = torch.einsum("bhqk,bkhd->bqhd", weights * kept / (1 - rate), value)
    torch.testing.assert_close(found, cut_sequence(expected.detach(), axis))
    expected.backward(grad)
    for x, other in zip(mine, whole, strict=True):
        torch.testing.assert_close(x.grad, cut_sequence(other.grad, axis))

    # Ranks draw independently, of other heads or for other queries; here is what they have both.
    if way == "ulysses":
        assert not torch.equal(*(kept[0, head][allowed] for head in range(2)))
    else:
        rows = [positions_of(rank, 2, size, torch.device("cpu")) for rank in range(2)]
        both = allowed[rows[0]] & allowed[rows[1]]
        assert not torch.equal(*(kept[..., mine, :][..., both] for mine in rows))

    model = GPTModel(replace(config, dropout=rate), mesh, seed=5)
    results = []
    for recompute in ("none", "full", "selective"):
        seed_everything(3, mesh).begin_training()
        model.zero_grad()
        apply_recompute(model, recompute)(**batch(0, True)).backward()
        results.append([parameter.grad for parameter in model.parameters()])
    assert all(map(torch.equal, *results[:2]))
    assert all(map(torch.equal, *results[1:]))


@pytest.mark.ranks(2)
def test_what_cannot_be_is_refused():
    mesh = ParallelLayout(cp=2).build(device_type())
    with pytest.raises(ValueError, match="'ring' has no attention_dropout"):
        GPTModel(replace(LLAMA, attention_dropout=0.1), mesh)
    model = replace(LLAMA, attention_dropout=0.1)
    tokens, axis = torch.zeros(1, 8, dtype=torch.int64), mesh.axis("cp")
    with pytest.raises(ValueError, match="'ring' has no attention_dropout"):
        AttentionContext.build(model, tokens, torch.float32, training=True, mesh=mesh)
    x = torch.zeros(1, 4, 2, 8)
    starts = torch.zeros(2, dtype=torch.int32)
    for pattern in (Ring(axis), InPieces(()), Varlen(starts, 4), Flex(None)):
        with pytest.raises(ValueError, match=f"{type(pattern).__name__} has no attention_dropout"):
            pattern(x, x, x, scale=1.0, dropout=0.1)
    for way in ("ring", "all_gather"):
        with pytest.raises(ValueError, match=f"attention_path 'sdpa' beside .* '{way}'"):
            GPTModel(replace(LLAMA, attention_path="sdpa", context_parallel=way), mesh)
    with pytest.raises(ValueError, match="'ulysses' gives each of 2 ranks a share of the heads"):
        GPTModel(
            replace(LLAMA, num_heads=3, num_kv_heads=1, head_dim=8, context_parallel="ulysses"),
            mesh,
        )
    with pytest.raises(ValueError, match="sequence of 18 tokens is not divisible by 4, twice cp 2"):
        GPTModel(LLAMA, mesh)(torch.zeros(1, 18, dtype=torch.int64))
    # By itself a block would attend within its own tokens.
    for each in (mesh, mesh.mesh):
        for config in (LLAMA, CONFIGS["latent"]):
            with pytest.raises(ValueError, match=r"without a context .* cp 2 cuts the sequence"):
                TransformerBlock(config, each)(torch.zeros(1, 4, 32))
            with pytest.raises(ValueError, match=r"without a context .* cp 2 cuts the sequence"):
                GPTModel(config, each).blocks[0](torch.zeros(1, 4, 32))


@pytest.mark.ranks(2)
def test_a_layer_may_scale_its_scores_by_itself():
    mesh = ParallelLayout(cp=2).build(device_type())
    tokens = batch(0, False)["tokens"]
    logits = {}
    for way in (None, *WAYS):
        config = replace(LLAMA, context_parallel=way or "ring", init_std=0.3)
        model = GPTModel(config, None if way is None else mesh, seed=5).double()
        model.blocks[1].attention.core.scale = 1.0
        logits[way] = model(tokens)
        torch.testing.assert_close(logits[way], logits[None])
