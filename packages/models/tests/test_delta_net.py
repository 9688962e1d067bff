"""Gated delta nets beside the recurrence written out, token by token, and one process."""

from __future__ import annotations

import itertools
from dataclasses import replace

import pytest
import torch
import torch.nn.functional as F

from lamina.mesh import ParallelLayout
from lamina.models import GPTModel, LayerSpec, TransformerConfig, generate
from lamina.models.attention import AttentionContext
from lamina.models.mamba import GatedDeltaNet
from lamina.models.mamba.delta_rule import chunked_delta_rule, delta_step
from lamina_testing import device_type

from .recurrent import DOCUMENTS, TEXT, check_cut_over_ranks

NET = GatedDeltaNet(key_heads=2, value_heads=4, key_width=6, value_width=5, chunk_size=4)
CONFIG = TransformerConfig(
    vocab_size=50, hidden_size=16, num_layers=3, num_heads=4, ffn_size=24, init_std=0.3,
    layers=(
        LayerSpec(attention=NET), LayerSpec(),
        LayerSpec(attention=replace(NET, negative=True, taps=2, norm_eps=1e-3)),
    ),
)  # fmt: skip


def rule(query, key, value, decay, step):
    """The rule for one document `[tokens, ...]`, a head and a token at a time."""
    each = value.shape[1] // key.shape[1]
    heads = []
    for head in range(value.shape[1]):
        state = value.new_zeros(key.shape[2], value.shape[2])
        rows = []
        for t in range(len(value)):
            k, q = key[t, head // each], query[t, head // each]
            state = decay[t, head].exp() * state
            state = state + step[t, head] * torch.outer(k, value[t, head] - k @ state)
            rows.append(q @ state)
        heads.append(torch.stack(rows))
    return torch.stack(heads, dim=1), state


def operands(length=12):
    torch.manual_seed(0)
    query, key = F.normalize(torch.randn(2, 2, length, 2, 6, dtype=torch.float64), dim=-1)
    value = torch.randn(2, length, 4, 5, dtype=torch.float64)
    decay = -torch.rand(2, length, 4, dtype=torch.float64)
    step = 2 * torch.rand(2, length, 4, dtype=torch.float64)
    return [each.requires_grad_() for each in (query, key, value, decay, step)]


@pytest.mark.parametrize("chunk", [1, 4, 5, 64])
@pytest.mark.parametrize("documents", [None, DOCUMENTS])
def test_chunks_are_the_recurrence_in_each_document(chunk, documents):
    given, again = operands(), operands()
    y, state = chunked_delta_rule(*given, chunk=chunk, runs=documents)
    ends = [(0, 12), (0, 12)] if documents is None else [(0, 5, 12), (0, 2, 12)]
    rows = []
    for row, cuts in enumerate(ends):
        pieces = [rule(*(x[row, a:b] for x in again)) for a, b in itertools.pairwise(cuts)]
        rows.append(torch.cat([piece for piece, _ in pieces]))
        torch.testing.assert_close(state[row, -1], pieces[-1][1], rtol=0, atol=1e-12)
    wanted = torch.stack(rows)
    torch.testing.assert_close(y, wanted, rtol=0, atol=1e-12)
    for out in (y, wanted):
        (out * out.detach().cos()).sum().backward()
    for found, expected in zip(given, again, strict=True):
        torch.testing.assert_close(found.grad, expected.grad, rtol=0, atol=1e-11)


@torch.no_grad()
def test_a_token_alone_goes_on_from_the_state():
    given = operands()
    whole, last = chunked_delta_rule(*given, chunk=5)
    _, state = chunked_delta_rule(*(each[:, :7] for each in given), chunk=5)
    for t in range(7, 12):
        y, state = delta_step(*(each[:, t] for each in given), state)
        torch.testing.assert_close(y, whole[:, t], rtol=0, atol=1e-12)
    torch.testing.assert_close(state, last, rtol=0, atol=1e-12)


@torch.no_grad()
def test_the_mixer_is_what_its_parameters_say():
    net = replace(NET, negative=True, norm_eps=1e-3)
    config = replace(CONFIG, layers=None, attention=net)
    mixer = GPTModel(config, seed=1).double().blocks[0].attention
    mixer.norm.weight.copy_(torch.linspace(0.5, 1.5, 5))
    x = torch.randn(2, 12, 16, dtype=torch.float64)
    context = AttentionContext.build(config, x, x.dtype, document_ids=DOCUMENTS)
    found = mixer(x, context)
    for row, ends in enumerate([(0, 5, 12), (0, 2, 12)]):
        for start, end in itertools.pairwise(ends):
            rows = x[row, start:end] @ mixer.input.weight.T
            mixed, gate, b, a = rows.split((2 * 12 + 20, 20, 4, 4), dim=-1)
            padded = F.pad(mixed.T, (3, 0))
            mixed = F.silu(F.conv1d(padded[None], mixer.conv.weight, groups=44)[0].T)
            query, key, value = mixed.split((12, 12, 20), dim=-1)
            query, key = (
                (h := each.view(-1, 2, 6)) / (h.square().sum(-1, keepdim=True) + 1e-6).sqrt()
                for each in (query, key)
            )
            decay = -mixer.rule.A_log.exp() * (a + mixer.rule.dt_bias).exp().log1p()
            value = value.view(-1, 4, 5)
            y, _ = rule(query / 6**0.5, key, value, decay, 2.0 / (1.0 + (-b).exp()))
            y = y / (y.square().mean(-1, keepdim=True) + 1e-3).sqrt() * mixer.norm.weight
            wanted = (y.flatten(1) * F.silu(gate)) @ mixer.output.weight.T
            torch.testing.assert_close(found[row, start:end], wanted, rtol=0, atol=1e-12)


@pytest.mark.ranks(2)
@pytest.mark.parametrize("sequence_parallel", [False, True])
@pytest.mark.parametrize("recompute", ["none", "selective"])
def test_heads_cut_over_ranks_train_like_one_process(sequence_parallel, recompute):
    check_cut_over_ranks(replace(CONFIG, sequence_parallel=sequence_parallel), recompute)


@torch.no_grad()
def test_text_is_written_with_a_state_as_from_the_whole():
    model = GPTModel(CONFIG, seed=1).double().eval()
    written = generate(model, TEXT[:, :7], 6, temperature=0.0)
    for end in range(7, 13):
        assert torch.equal(model(written[:, :end])[:, -1].argmax(-1), written[:, end])


def test_what_it_cannot_do_is_refused():
    with pytest.raises(ValueError, match="invariant=True beside GatedDeltaNet"):
        replace(CONFIG, invariant=True)
    with pytest.raises(ValueError, match="value_heads 3 is not divisible by key_heads 2"):
        GatedDeltaNet(key_heads=2, value_heads=3)
    with pytest.raises(ValueError, match="taps is 0"):
        replace(NET, taps=0)
    with pytest.raises(ValueError, match=r"dt_min and dt_max are 1\.0 and 0\.1"):
        replace(NET, dt_min=1.0)
    with pytest.raises(ValueError, match=r"norm_eps is 0\.0"):
        replace(NET, norm_eps=0.0)


@pytest.mark.ranks(2)
def test_cut_sequences_and_odd_heads_are_refused():
    with pytest.raises(ValueError, match=r"context_parallel .* with GatedDeltaNet, which has none"):
        GPTModel(CONFIG, ParallelLayout(cp=2).build(device_type()))
    odd = replace(CONFIG, layers=None, attention=replace(NET, key_heads=1))
    with pytest.raises(ValueError, match="key_heads"):
        GPTModel(odd, ParallelLayout(tp=2).build(device_type()))
