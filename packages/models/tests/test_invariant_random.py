"""Random numbers and capacities with `invariant=True`: by the place of a token, on every layout."""

from __future__ import annotations

from collections import Counter
from dataclasses import replace

import pytest
import torch

from lamina.mesh import ParallelLayout, derive_seed
from lamina.models import GPTModel, MoEConfig
from lamina.models.invariance.chain_attention import ChainAttention
from lamina.models.invariance.random_keys import ForwardNumbers, PairDraws
from lamina.models.invariance.token_sums import TokenCut
from lamina.models.layers.dropout import Dropout
from lamina.models.moe.losses import RoutingContext

from .invariant_layouts import (
    RANDOM,
    SHAPE,
    Layout,
    batch,
    by_ranks,
    hashes_alone,
    hashes_of,
    sha256,
    train,
)

STEPS = 2
FEW = (
    ("dropout", Layout(recompute="full", microbatches=4), torch.bfloat16),
    ("dropout", Layout(recompute="selective", microbatches=2), torch.float32),
    ("dropout", Layout(dp=2, microbatches=2), torch.bfloat16),
    ("dropout", Layout(tp=2, sp=True, recompute="full"), torch.float32),
    ("dropout", Layout(cp=2), torch.bfloat16),
    ("dropout", Layout(pp=2, microbatches=2, recompute="full"), torch.float32),
    ("attention dropout", Layout(microbatches=4, recompute="selective"), torch.float32),
    ("attention dropout", Layout(tp=2, sp=True, recompute="full"), torch.float32),
    ("attention dropout", Layout(cp=2), torch.bfloat16),
    ("attention dropout", Layout(cp=2, way="ulysses"), torch.bfloat16),
    ("attention dropout", Layout(pp=2, microbatches=2), torch.float32),
    ("noisy experts", Layout(dp=2, ep=2, microbatches=2), torch.float32),
    ("noisy experts", Layout(tp=2, sp=True, ep=2, recompute="full"), torch.float32),
    ("noisy experts", Layout(cp=2), torch.float32),
    ("noisy experts", Layout(pp=2, microbatches=2), torch.float32),
)


@pytest.fixture(scope="module")
def alone(rank_server):
    """The hash of one rank after some steps, of each model and dtype."""
    cases = sorted({(model, dtype) for model, _, dtype in FEW}, key=str)
    hashes = rank_server.call(hashes_alone, init=True, cases=cases, steps=STEPS)
    return dict(zip(cases, hashes, strict=True))


def few(ranks):
    cases = [case for case in FEW if case[1].ranks == ranks]
    return pytest.mark.parametrize(("model", "layout", "dtype"), cases, ids=str)


@few(1)
@pytest.mark.ranks(1, backend="gloo")  # a GPU has other bits: tests/virtual_gpu/test_invariance.py
def test_one_rank_has_the_same_bits_however_it_steps(model, layout, dtype, alone):
    assert sha256(train(model, layout, dtype, STEPS)) == alone[model, dtype]


@few(2)
@pytest.mark.ranks(2, backend="gloo")  # a GPU has other bits: tests/virtual_gpu/test_invariance.py
def test_two_ranks_have_the_bits_of_one(model, layout, dtype, alone):
    assert sha256(train(model, layout, dtype, STEPS)) == alone[model, dtype]


@pytest.mark.slow
@pytest.mark.parametrize("model", RANDOM)
def test_every_layout_has_the_bits_of_one_rank(model, rank_server):
    case = {"model": model, "dtype": torch.float32, "steps": 4}
    (expected,) = rank_server.call(hashes_of, init=True, layouts=[Layout()], **case)
    for ranks, layouts in by_ranks(model, torch.float32).items():
        hashes = rank_server.call(
            hashes_of, init=True, world_size=ranks, layouts=layouts, timeout=1800, **case
        )
        got = dict(zip(map(str, layouts), hashes, strict=True))
        assert not {layout: value for layout, value in got.items() if value != expected}


MASK = (1 << 64) - 1


def mixed(x):
    """SplitMix64, in Python's integers."""
    x = (x ^ x >> 30) * 0xBF58476D1CE4E5B9 & MASK
    x = (x ^ x >> 27) * 0x94D049BB133111EB & MASK
    return x ^ x >> 31


def token_number(step, sequence, position):
    key = 0
    for counter in (step, sequence, position):
        key = mixed(key + (counter + 1) * 0x9E3779B97F4A7C15 & MASK)
    return key


def number(step, sequence, position, seed, channel):
    key = mixed(token_number(step, sequence, position) ^ seed)
    return mixed(key + (channel + 1) * 0x9E3779B97F4A7C15 & MASK) >> 40


def token_keys(step=0, forward=0, rows=2, length=64):
    numbers = ForwardNumbers(None)
    numbers.step.fill_(step)
    return numbers.token_keys(torch.empty(rows, length), TokenCut(), forward)


def test_a_number_follows_from_step_sequence_position_seed_and_channel():
    drawn = token_keys(step=7, forward=3).draw(2**62 + 11, 5)
    for row, position, channel in [(0, 0, 0), (1, 0, 4), (0, 63, 1), (1, 20, 3)]:
        expected = number(7, 2 * 3 + row, position, 2**62 + 11, channel)
        assert drawn[row, position, channel] == expected


def test_elements_are_kept_at_the_rate_and_independently():
    x = torch.ones(2, 64, 512)
    base = token_keys().dropout(x, 0.3, seed=1)
    assert set(base.unique().tolist()) == {0.0, torch.tensor(1 / 0.7).item()}
    kept = base > 0
    # Six standard deviations.
    count = kept.numel()
    assert abs(kept.double().mean() - 0.7) < 6 * (0.3 * 0.7 / count) ** 0.5
    others = {
        "seed": token_keys().dropout(x, 0.3, seed=2),
        "step": token_keys(step=1).dropout(x, 0.3, seed=1),
        "forward": token_keys(forward=1).dropout(x, 0.3, seed=1),
        "sequence": base.flip(0),
        "position": base.roll(1, 1),
        "channel": base.roll(1, 2),
        "later channel": base.roll(64, 2),
    }
    for what, other in others.items():
        centred = (kept.double() - 0.7) * ((other > 0).double() - 0.7)
        assert abs(centred.mean()) < 6 * 0.3 * 0.7 / count**0.5, what
    drawn = token_keys().uniform(x, 0.9, 1.1, seed=1)
    assert drawn.min() >= 0.9
    assert drawn.max() < 1.1
    assert abs(drawn.double().mean() - 1.0) < 6 * 0.2 / (12 * count) ** 0.5


class Written(torch.nn.Module):
    """Dropout by a mask that is written out, for each use of the module in turn."""

    def __init__(self, rate, masks):
        super().__init__()
        self.rate, self.masks = rate, iter(masks)

    def forward(self, x, token_keys=None):
        return x * next(self.masks) / (1.0 - self.rate)


def test_gradients_are_those_of_written_out_masks():
    config = RANDOM["dropout"]
    tokens, labels = (x[:2, :8] for x in batch(0))
    model = GPTModel(config, seed=1)
    plain = GPTModel(replace(config, invariant=False, dropout=0.0, embedding_dropout=0.0), seed=1)
    for name, module in list(model.named_modules()):
        if not isinstance(module, Dropout):
            continue
        seed, masks = derive_seed(1, name), []
        for use in range(2):
            drawn = torch.tensor([
                [[number(0, row, at, derive_seed(seed, use), c) for c in range(32)]
                 for at in range(8)]
                for row in range(2)
            ])  # fmt: skip
            masks.append(drawn >= round(module.rate * 2**24))
        plain.set_submodule(name, Written(module.rate, masks))
    for each in (model, plain):
        each(tokens, labels).backward()
    for (name, ours), theirs in zip(model.named_parameters(), plain.parameters(), strict=True):
        scale = theirs.grad.abs().max()
        assert (ours.grad - theirs.grad).abs().max() < 1e-5 * scale, name


def test_attention_drops_the_probabilities_of_written_out_numbers():
    """The oracle: softmax over whole rows in fp64, a loop over documents, Python's integers."""
    rate, seed, lengths = 0.3, 2**62 + 3, (5, 140)
    (query, key, value), rows = torch.randn(3, 2, 145, 2, 8, dtype=torch.float64), 2
    inputs = [x.clone().requires_grad_() for x in (query, key, value)]
    floats = [x.float().requires_grad_() for x in (query, key, value)]
    keys = token_keys(step=4, forward=1, rows=rows, length=145)
    runs = torch.tensor([0] * lengths[0] + [1] * lengths[1]).expand(rows, -1)
    draws = PairDraws.of(rate, keys, seed, 4, 2)
    ours = ChainAttention(runs=runs, draws=draws)(*floats, scale=0.5, dropout=rate)
    grad = torch.randn_like(query)
    ours.backward(grad.float())
    start = 0
    for length in lengths:
        span = slice(start, start + length)
        apart = torch.ones(length, length).triu(1) > 0
        for row in range(rows):
            for head in range(2):
                q, k, v = (x[row, span, head] for x in inputs)
                shares = (q @ k.T * 0.5).masked_fill(apart, -torch.inf).softmax(-1)
                of_head = mixed(seed + (4 + head + 1) * 0x9E3779B97F4A7C15 & MASK)
                kept = torch.zeros(length, length, dtype=torch.float64)
                for i in range(length):
                    token = token_number(4, rows + row, start + i)
                    for j in range(i + 1):
                        pair = mixed(token ^ of_head) + (j + 1) * 0x9E3779B97F4A7C15 & MASK
                        kept[i, j] = mixed(pair) >> 40 >= round(rate * 2**24)
                out = (shares * kept / (1 - rate)) @ v
                out.backward(grad[row, span, head], retain_graph=True)
                torch.testing.assert_close(
                    ours[row, span, head].double(), out, rtol=1e-5, atol=1e-5
                )
        start += length
    for float32, exact in zip(floats, inputs, strict=True):
        torch.testing.assert_close(float32.grad.double(), exact.grad, rtol=1e-4, atol=1e-4)


def test_a_step_ends_with_finalize_grads_and_is_in_a_checkpoint():
    tokens, labels = batch(0)
    model = GPTModel(RANDOM["dropout"], seed=1)
    losses = [model(tokens, labels).item() for _ in range(2)]
    assert model.forward_numbers.needs_finalize
    model.forward_numbers.finalize_step(None)
    losses.append(model(tokens, labels).item())
    assert len(set(losses)) == 3
    again = GPTModel(RANDOM["dropout"], seed=1)
    again.load_state_dict(model.state_dict())
    assert again(tokens, labels).item() == losses[2]
    again.eval()
    assert again(tokens, labels).item() == again(tokens, labels).item()
    assert again.forward_numbers.forwards == 1
    assert GPTModel(SHAPE).forward_numbers is None


@pytest.mark.parametrize("model", ["dropout", "attention dropout"])
def test_dropout_without_token_keys_is_refused(model):
    model = GPTModel(RANDOM[model], seed=1)
    with pytest.raises(ValueError, match=r"(Dropout\(0.2\)|attention_dropout 0.2).*no token_keys"):
        model.blocks[0](torch.randn(1, 64, 32))


@pytest.mark.ranks(2, backend="gloo")  # a GPU has other bits: tests/virtual_gpu/test_invariance.py
def test_a_model_without_the_mesh_is_refused_at_the_end_of_a_step():
    mesh = ParallelLayout(dp_shard=2).build("cpu")
    model = GPTModel(RANDOM["dropout"], seed=1)
    with pytest.raises(ValueError, match=r"2 ranks of dp.*GPTModel"):
        model.forward_numbers.finalize_step(mesh)


@pytest.mark.parametrize("drop", ["position", "weight"])
def test_each_sequence_has_a_capacity(drop):
    moe = MoEConfig(num_experts=4, top_k=2, ffn_size=8, capacity_factor=0.75, drop=drop)
    model = GPTModel(replace(SHAPE, moe=moe), seed=1)
    router = model.blocks[0].mlp.router
    x = torch.randn(3 * 16, 32)
    whole = router(x, RoutingContext(), (3, 16))
    capacity = 6  # 0.75 * 16 * 2 / 4
    router.moe = replace(moe, capacity_factor=None, drop="weight")
    free = router(x, RoutingContext(), (3, 16))
    for row in range(3):
        copies = [
            (0.0 if drop == "position" else -free.weights[at, j].item(), at, j)
            for at in range(16 * row, 16 * row + 16)
            for j in range(2)
        ]
        taken = Counter()
        for _, at, j in sorted(copies):
            expert = free.experts[at, j].item()
            taken[expert] += 1
            kept = taken[expert] <= capacity
            assert whole.experts[at, j] == (expert if kept else 4)
            assert (whole.weights[at, j] > 0) == kept
    assert whole.counts.tolist() == [int((whole.experts == e).sum()) for e in range(4)]
