"""Attention to the keys that an indexer chooses, beside the same written out query by query."""

from __future__ import annotations

import functools
from dataclasses import replace

import pytest
import torch
import torch.nn.functional as F

from lamina.ddp import full_gradients
from lamina.fsdp import fully_shard
from lamina.mesh import ParallelLayout
from lamina.models import (
    GPTModel,
    LatentAttention,
    TransformerConfig,
    apply_recompute,
    pipeline,
)
from lamina.models.attention import (
    AttentionContext,
    RopeScaling,
    SparseLatentAttention,
    apply_rotary,
    sparse_attention,
)
from lamina_testing import Meter, device_type

from .recurrent import DOCUMENTS, TEXT, check_cut_over_ranks
from .test_context_parallel import train_alike

SPARSE = SparseLatentAttention(
    kv_lora_rank=12, q_lora_rank=10, qk_nope_head_dim=6, qk_rope_head_dim=4, v_head_dim=5,
    top_k=4, index_heads=5, index_width=7, index_loss=0.3,
)  # fmt: skip
CONFIG = TransformerConfig(
    vocab_size=62, hidden_size=16, num_layers=2, num_heads=4, ffn_size=24, init_std=0.3,
    mla=SPARSE, context_parallel="all_gather",
)  # fmt: skip
GROWING = RopeScaling(kind="yarn", factor=2.0, original_length=3, query_beta=0.6)
KINDS = {
    "latents of queries": (SPARSE, {}),
    "queries from tokens": (replace(SPARSE, q_lora_rank=None), {}),
    "all keys": (replace(SPARSE, top_k=99), {}),
    "growing queries": (SPARSE, {"rope_scaling": GROWING}),
}


def module_of(sizes, **changes):
    config = replace(CONFIG, mla=sizes, **changes)
    torch.manual_seed(3)
    module = GPTModel(config, seed=1).double().blocks[0].attention
    for parameter in module.parameters():
        parameter.data.add_(0.3 * torch.randn_like(parameter))
    return config, module


def turned(x, table):
    return apply_rotary(x[None], *table)[0]


def normed(x, norm):
    return F.rms_norm(x, x.shape[-1:], norm.weight, norm.eps)


def written_out(module, sizes, x, document, turn, beta):
    """Attention's result `[tokens, hidden]` for one row, and the indexer's divergence."""
    latent = x if sizes.q_lora_rank is None else normed(x @ module.query_down.weight.T,
                                                        module.query_norm)  # fmt: skip
    index, tokens = module.indexer, len(x)
    positions = [int((document[:t] == document[t]).sum()) for t in range(tokens)]
    seen, seen_latent = x.detach(), latent.detach()
    index_query = turn((seen_latent @ index.query.weight.T).view(tokens, 5, 7))
    index_key = F.layer_norm(seen @ index.key.weight.T, (7,), index.key_norm.weight,
                             index.key_norm.bias, 1e-6)  # fmt: skip
    index_key = turn(index_key[:, None])[:, 0]
    weights = seen @ index.head_weights.weight.T / (5 * 7) ** 0.5
    query = (latent @ module.query_up.weight.T).view(tokens, 4, 10)
    query = torch.cat((query[..., :6], turn(query[..., 6:])), dim=-1)
    kv_latent, shared = (x @ module.kv_down.weight.T).split((12, 4), dim=-1)
    kv = (normed(kv_latent, module.kv_norm) @ module.kv_up.weight.T).view(tokens, 4, 11)
    key = torch.cat((kv[..., :6], turn(shared[:, None]).expand(-1, 4, -1)), dim=-1)
    rows, divergences = [], []
    for t in range(tokens):
        grown = (1.0 + beta * torch.tensor(positions[t] // 3).float().log1p()).double()
        before = [s for s in range(t + 1) if document[s] == document[t]]
        scores = torch.stack([
            sum(weights[t, h] * (index_query[t, h] @ index_key[s]).clamp(min=0) for h in range(5))
            for s in before
        ])  # fmt: skip
        ordered = scores.detach().sort(descending=True)
        best = ordered.indices[: sizes.top_k].tolist()
        if len(before) > sizes.top_k:  # otherwise either key could be chosen
            assert ordered.values[sizes.top_k - 1] - ordered.values[sizes.top_k] > 1e-6
        heads, target = [], 0.0
        for h in range(4):
            logits = torch.stack([query[t, h] @ key[before[i], h] for i in best]) * grown / 10**0.5
            probabilities = logits.softmax(dim=0)
            heads.append(probabilities @ torch.stack([kv[before[i], h, 6:] for i in best]))
            target = target + probabilities.detach() / 4
        divergences.append((target * (target / scores[best].softmax(dim=0)).log()).sum())
        rows.append(torch.cat(heads))
    return torch.stack(rows) @ module.output.weight.T, torch.stack(divergences)


@pytest.mark.parametrize("at_once", [1 << 25, 150])
@pytest.mark.parametrize("kind", list(KINDS))
def test_attention_and_the_loss_are_what_the_paper_says(kind, at_once, monkeypatch):
    monkeypatch.setattr(sparse_attention, "_SCORES_AT_ONCE", at_once)
    sizes, changes = KINDS[kind]
    config, module = module_of(sizes, **changes)
    x = torch.randn(2, 12, 16, dtype=torch.float64, requires_grad=True)
    context = AttentionContext.build(config, x, x.dtype, document_ids=DOCUMENTS)
    cos, sin = context.rotary
    out = module(x, context)
    made, divergences = [], []
    for row in range(2):
        table = (cos[row], sin[row]) if cos.ndim == 3 else (cos, sin)
        turn = functools.partial(turned, table=table)
        mixed, divergence = written_out(
            module, sizes, x[row], DOCUMENTS[row], turn, 0.6 if changes else 0.0
        )
        made.append(mixed)
        divergences.append(divergence)
    wanted, divergence = torch.stack(made), torch.stack(divergences).mean()
    torch.testing.assert_close(out, wanted, rtol=0, atol=1e-12)
    torch.testing.assert_close(module.divergence, divergence.detach(), rtol=0, atol=1e-12)
    assert divergence > 1e-3
    parameters = [x, *module.parameters()]
    gradients = torch.autograd.grad((out * out.detach().cos()).sum(), parameters)
    total = (wanted * wanted.detach().cos()).sum() + 0.3 * divergence
    expected = torch.autograd.grad(total, parameters)
    for gradient, other in zip(gradients, expected, strict=True):
        assert other.norm() > 1e-5
        torch.testing.assert_close(gradient, other, rtol=0, atol=1e-11)


def test_a_short_text_is_attended_to_whole_and_a_frozen_indexer_learns_nothing():
    sizes = replace(SPARSE, top_k=12, index_loss=0.0)
    _, sparse = module_of(sizes)
    latent = {f: getattr(sizes, f) for f in ("kv_lora_rank", "q_lora_rank", "qk_nope_head_dim",
                                             "qk_rope_head_dim", "v_head_dim")}  # fmt: skip
    _, plain = module_of(LatentAttention(**latent))
    shared = {n: p for n, p in sparse.state_dict().items() if not n.startswith("indexer")}
    plain.load_state_dict(shared)
    x = torch.randn(2, 12, 16, dtype=torch.float64)
    assert torch.equal(sparse(x), plain(x))
    sparse(torch.randn(2, 13, 16, dtype=torch.float64)).sum().backward()
    assert sparse.divergence is None
    for name, parameter in sparse.named_parameters():
        assert (parameter.grad is None) == name.startswith("indexer"), name
        assert parameter.requires_grad != name.startswith("indexer"), name


def test_an_indexer_that_was_frozen_later_adds_no_loss():
    """As somebody does who trains low-rank matrices alone."""
    _, module = module_of(SPARSE)
    module.indexer.requires_grad_(False)
    module(torch.randn(2, 13, 16, dtype=torch.float64)).sum().backward()
    assert module.divergence is None
    assert module.query_up.weight.grad.norm() > 0


def test_only_the_indexer_may_train():
    """The first stage of the paper: all else is frozen, and attention reads all keys."""
    model = GPTModel(replace(CONFIG, mla=replace(SPARSE, top_k=64)), seed=1)
    for name, parameter in model.named_parameters():
        parameter.requires_grad_(".indexer." in name)
    indexers = [p for p in model.parameters() if p.requires_grad]
    optimizer = torch.optim.AdamW(indexers, 1e-2)
    divergences = []
    for _ in range(30):
        model(TEXT[:, :-1], TEXT[:, 1:]).backward()
        divergences.append(float(sum(block.attention.divergence for block in model.blocks)))
        optimizer.step()
        optimizer.zero_grad()
    assert divergences[-1] < 0.5 * divergences[0]


def test_padding_counts_as_nothing_in_the_loss():
    model = GPTModel(CONFIG, seed=1).double()
    padding = torch.zeros(2, 12, dtype=torch.bool)
    padding[:, 8:] = True
    labels = TEXT[:, 1:].masked_fill(padding, -100)
    model(TEXT[:, :-1], labels, padding_mask=padding).backward()
    padded = [block.attention for block in model.blocks]
    short = GPTModel(CONFIG, seed=1).double()
    short(TEXT[:, :8], labels[:, :8]).backward()
    for one, other in zip(padded, short.blocks, strict=True):
        torch.testing.assert_close(one.divergence * 12, other.attention.divergence * 8)
        for name, parameter in one.indexer.named_parameters():
            gradient = other.attention.indexer.get_parameter(name).grad
            torch.testing.assert_close(parameter.grad * 12, gradient * 8)


@pytest.mark.parametrize("recompute", ["full", "selective"])
def test_recomputation_changes_no_gradient(recompute):
    models = [GPTModel(CONFIG, seed=1).double() for _ in range(2)]
    apply_recompute(models[1], recompute)
    for model in models:
        model(TEXT[:, :-1], TEXT[:, 1:], document_ids=DOCUMENTS).backward()
    for one, other in zip(*(model.parameters() for model in models), strict=True):
        torch.testing.assert_close(one.grad, other.grad, rtol=0, atol=1e-12)


def test_compiled_blocks_have_the_gradients_of_others():
    models = [GPTModel(CONFIG, seed=1).double() for _ in range(2)]
    for block in models[1].blocks:
        block.compile(backend="eager")
    for model in models:
        model(TEXT[:, :-1], TEXT[:, 1:]).backward()
    for one, other in zip(*(model.parameters() for model in models), strict=True):
        torch.testing.assert_close(one.grad, other.grad, rtol=0, atol=1e-12)


@pytest.mark.ranks(2)
@pytest.mark.parametrize("sequence_parallel", [False, True])
def test_a_step_over_tp_is_that_of_one_process(sequence_parallel, ranks):
    config = replace(CONFIG, sequence_parallel=sequence_parallel)
    check_cut_over_ranks(config)


@pytest.mark.ranks(2)
@pytest.mark.parametrize("documents", [False, True])
def test_a_sequence_cut_over_ranks_trains_like_a_whole_one(documents, ranks):
    train_alike(CONFIG, ParallelLayout(cp=2), documents=documents)


@pytest.mark.ranks(2)
@pytest.mark.parametrize("strategy", [0, 1, 2, 3])
@pytest.mark.parametrize("index_loss", [0.0, 0.3])
def test_a_sharded_model_has_the_gradients_of_one_process(strategy, index_loss, ranks):
    config = replace(CONFIG, mla=replace(SPARSE, index_loss=index_loss))
    whole, model = (GPTModel(config, seed=1).double() for _ in range(2))
    apply_recompute(model, "full")
    tokens, labels = TEXT[:, :-1].to(device_type()), TEXT[:, 1:].to(device_type())
    for row in range(2):
        (whole(tokens[row, None], labels[row, None]) / 2).backward()
    wrapped = fully_shard(model, zero_dp_strategy=strategy)
    mine = slice(ranks.rank, ranks.rank + 1)
    wrapped(tokens[mine], labels[mine]).backward()
    gradients = full_gradients(wrapped)
    for name, parameter in whole.named_parameters():
        if parameter.requires_grad:
            torch.testing.assert_close(gradients[name], parameter.grad, rtol=0, atol=1e-11)


@pytest.mark.ranks(2)
def test_stages_train_like_one_process(ranks):
    mesh = ParallelLayout(pp=2).build(device_type())
    model, whole = (GPTModel(CONFIG, each, seed=1).double() for each in (mesh, None))
    runner = pipeline(model, mesh, "1f1b", 2)
    tokens, labels = TEXT[:, :-1].to(device_type()), TEXT[:, 1:].to(device_type())
    whole(tokens, labels).backward()
    runner.step(tokens, labels)
    wanted = dict(whole.named_parameters())
    for name, parameter in runner.named_parameters():
        torch.testing.assert_close(parameter.grad, wanted[name].grad, rtol=0, atol=1e-11)


def test_what_does_not_go_with_it_is_refused():
    for change, words in (
        ({"attention_path": "flex"}, "attention_path='flex'"),
        ({"invariant": True}, "invariant=True"),
    ):
        with pytest.raises(ValueError, match=f"SparseLatentAttention beside {words}"):
            replace(CONFIG, **change)
    with pytest.raises(ValueError, match="index_width is 3, and RoPE turns qk_rope_head_dim 4"):
        replace(SPARSE, index_width=3)
    with pytest.raises(ValueError, match=r"index_loss is -1\.0"):
        replace(SPARSE, index_loss=-1.0)


def test_memory_holds_the_scores_of_some_queries_at_a_time(monkeypatch):
    """Without pieces, the scores of the heads are `heads * sequence^2` numbers."""
    peaks = []
    for at_once in (1 << 30, 1 << 18):
        monkeypatch.setattr(sparse_attention, "_SCORES_AT_ONCE", at_once)
        _, module = module_of(replace(SPARSE, index_heads=16))
        x = torch.randn(1, 512, 16, dtype=torch.float64)
        with Meter() as meter:
            module(x).sum().backward()
        peaks.append(meter.peak_live_bytes)
    assert peaks[1] < peaks[0] / 3
