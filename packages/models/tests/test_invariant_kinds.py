"""Experts, Mamba and hybrids with `invariant=True`: one SHA-256 on every layout."""

import pytest
import torch

from lamina.models import GPTModel

from .invariant_layouts import (
    KINDS,
    MODELS,
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
    ("experts", Layout(dp=2, ep=2, strategy=1, microbatches=2), torch.float32),
    ("sigmoid experts", Layout(tp=2, sp=True, ep=2), torch.bfloat16),
    ("sigmoid experts", Layout(dp=2, microbatches=2), torch.bfloat16),
    ("hybrid", Layout(tp=2, expert_tp=2), torch.float32),
    ("mamba", Layout(tp=2, sp=True), torch.bfloat16),
    ("mamba blocks", Layout(tp=2, sp=True), torch.float32),
)


@pytest.fixture(scope="module")
def alone(rank_server):
    """The hash of one rank after some steps, of each model and dtype."""
    cases = sorted({(model, dtype) for model, _, dtype in FEW}, key=str)
    hashes = rank_server.call(hashes_alone, init=True, cases=cases, steps=STEPS)
    return dict(zip(cases, hashes, strict=True))


@pytest.mark.ranks(2, backend="gloo")  # a GPU has other bits: tests/virtual_gpu/test_invariance.py
@pytest.mark.parametrize(("model", "layout", "dtype"), FEW, ids=str)
def test_two_ranks_have_the_bits_of_one(model, layout, dtype, alone):
    assert sha256(train(model, layout, dtype, STEPS)) == alone[model, dtype]


@pytest.mark.slow
@pytest.mark.parametrize("dtype", [torch.float32, torch.bfloat16], ids=str)
@pytest.mark.parametrize("model", [*MODELS, *KINDS])
def test_every_layout_has_the_bits_of_one_rank(model, dtype, rank_server):
    """20 steps on all layouts; docs/records/invariance.md has the hashes that this prints."""
    how = {"model": model, "dtype": dtype, "steps": 20}
    (expected,) = rank_server.call(hashes_of, init=True, layouts=[Layout()], **how)
    for ranks, layouts in by_ranks(model, dtype).items():
        hashes = rank_server.call(
            hashes_of, init=True, world_size=ranks, layouts=layouts, timeout=1800, **how
        )
        got = dict(zip(map(str, layouts), hashes, strict=True))
        assert not {layout: value for layout, value in got.items() if value != expected}
        print(f"{model}, {dtype}, {ranks} ranks: {len(got)} layouts, {expected}", flush=True)


@pytest.mark.parametrize("name", KINDS)
@torch.no_grad()
def test_a_tokens_logits_do_not_depend_on_batch_or_later_tokens(name):
    model = GPTModel(KINDS[name], seed=1).eval()
    tokens = batch(0)[0]
    whole = model(tokens)
    for row, end in [(0, 1), (2, 17), (3, 64)]:
        assert torch.equal(model(tokens[row : row + 1, :end])[0], whole[row, :end])
