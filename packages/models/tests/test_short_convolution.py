"""Short convolutions in the place of attention, beside `nn.Conv1d` and one process."""

from __future__ import annotations

import itertools
from dataclasses import replace

import pytest
import torch
import torch.nn.functional as F

from lamina.mesh import ParallelLayout
from lamina.models import GPTModel, LayerSpec, TransformerConfig
from lamina.models.attention import AttentionContext
from lamina.models.mamba import ShortConvolution
from lamina_testing import device_type

from .recurrent import DOCUMENTS, check_cut_over_ranks

CONFIG = TransformerConfig(
    vocab_size=50, hidden_size=16, num_layers=3, num_heads=4, ffn_size=24,
    layers=(
        LayerSpec(attention=ShortConvolution()), LayerSpec(),
        LayerSpec(attention=ShortConvolution(taps=4)),
    ),
)  # fmt: skip


@torch.no_grad()
@pytest.mark.parametrize("taps", [1, 3, 5])
def test_each_document_is_what_conv1d_makes_of_it(taps):
    torch.manual_seed(0)
    config = replace(CONFIG, layers=None, attention=ShortConvolution(taps=taps))
    mixer = GPTModel(config, seed=1).double().blocks[0].attention
    x = torch.randn(2, 12, 16, dtype=torch.float64)
    context = AttentionContext.build(config, x, x.dtype, document_ids=DOCUMENTS)
    found = mixer(x, context)
    for row, ends in enumerate([(0, 5, 12), (0, 2, 12)]):
        for start, end in itertools.pairwise(ends):
            b, c, value = (x[row, start:end] @ mixer.input.weight.T).chunk(3, dim=-1)
            padded = F.pad((b * value).T, (taps - 1, 0))
            convolved = F.conv1d(padded[None], mixer.conv.weight, groups=16)[0].T
            wanted = (c * convolved) @ mixer.output.weight.T
            torch.testing.assert_close(found[row, start:end], wanted, rtol=0, atol=1e-12)


@pytest.mark.ranks(2)
@pytest.mark.parametrize("sequence_parallel", [False, True])
def test_channels_cut_over_ranks_train_like_one_process(sequence_parallel):
    check_cut_over_ranks(replace(CONFIG, sequence_parallel=sequence_parallel))


def test_what_it_cannot_do_is_refused():
    with pytest.raises(ValueError, match="invariant=True beside ShortConvolution"):
        replace(CONFIG, invariant=True)
    with pytest.raises(ValueError, match="taps is 0"):
        replace(CONFIG, layers=None, attention=ShortConvolution(taps=0))


@pytest.mark.ranks(2)
def test_a_cut_sequence_is_refused():
    mesh = ParallelLayout(cp=2).build(device_type())
    with pytest.raises(
        ValueError, match=r"context_parallel .* with ShortConvolution, which has none"
    ):
        GPTModel(CONFIG, mesh)
