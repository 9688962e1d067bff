"""Mamba-1 beside the recurrence written out, token by token, and one process."""

from __future__ import annotations

import itertools
from dataclasses import replace

import pytest
import torch
import torch.nn.functional as F

from lamina.mesh import ParallelLayout
from lamina.models import GPTModel, LayerSpec, TransformerConfig, generate
from lamina.models.attention import AttentionContext
from lamina.models.mamba import Mamba1, Mamba2
from lamina.models.mamba.selective_scan import selective_scan
from lamina_testing import device_type

from .recurrent import DOCUMENTS, TEXT, check_cut_over_ranks

SIZES = Mamba1(state_size=3, step_rank=2, chunk_size=4, dt_min=0.1, dt_max=1.0)
NORMED = replace(SIZES, norms="weighted", bias=True, conv_bias=False, taps=2)
CONFIG = TransformerConfig(
    vocab_size=50, hidden_size=16, num_layers=3, num_heads=4, ffn_size=24, init_std=0.3,
    layers=(LayerSpec(attention=SIZES), LayerSpec(), LayerSpec(attention=NORMED)),
)  # fmt: skip
ENDS = {True: [(0, 5, 12), (0, 2, 12)], False: [(0, 12), (0, 12)]}


def recurrence(x, dt, rate, b, c):
    """The scan of one document `[tokens, ...]`, a channel and a token at a time."""
    results, states = [], []
    for channel in range(x.shape[1]):
        state, row = x.new_zeros(b.shape[1]), []
        for t in range(len(x)):
            decay = (dt[t, channel] * rate[channel]).exp()
            state = decay * state + dt[t, channel] * x[t, channel] * b[t]
            row.append(state @ c[t])
        results.append(torch.stack(row))
        states.append(state)
    return torch.stack(results, dim=1), torch.stack(states)


def operands(length=12):
    torch.manual_seed(0)
    x = torch.randn(2, length, 5, dtype=torch.float64)
    dt = torch.rand(2, length, 5, dtype=torch.float64)
    rate = -4 * torch.rand(5, 3, dtype=torch.float64)
    b, c = torch.randn(2, 2, length, 3, dtype=torch.float64)
    return [each.requires_grad_() for each in (x, dt, rate, b, c)]


def of_rows(row, start, end, x, dt, rate, b, c):
    return [x[row, start:end], dt[row, start:end], rate, b[row, start:end], c[row, start:end]]


@pytest.mark.parametrize("chunk", [1, 4, 5, 64])
@pytest.mark.parametrize("packed", [False, True])
def test_chunks_are_the_recurrence_in_each_document(chunk, packed):
    given, again = operands(), operands()
    y, state = selective_scan(*given, chunk=chunk, runs=DOCUMENTS if packed else None)
    rows = []
    for row, cuts in enumerate(ENDS[packed]):
        pieces = [recurrence(*of_rows(row, *ends, *again)) for ends in itertools.pairwise(cuts)]
        rows.append(torch.cat([piece for piece, _ in pieces]))
        torch.testing.assert_close(state[row], pieces[-1][1], rtol=0, atol=1e-12)
    wanted = torch.stack(rows)
    torch.testing.assert_close(y, wanted, rtol=0, atol=1e-12)
    for out in (y, wanted):
        (out * out.detach().cos()).sum().backward()
    for made, expected in zip(given, again, strict=True):
        torch.testing.assert_close(made.grad, expected.grad, rtol=0, atol=1e-11)


def test_backward_keeps_the_states_of_no_chunk():
    """What is saved for backward does not grow with `state_size`, as the states would."""

    def bytes_saved(state_size):
        x, dt = torch.randn(2, 1, 256, 32, requires_grad=True).unbind()
        b, c = torch.randn(2, 1, 256, state_size)
        rate, sizes = -torch.rand(32, state_size), dict[int, int]()

        def pack(tensor):
            sizes[tensor.untyped_storage().data_ptr()] = tensor.untyped_storage().nbytes()
            return tensor

        with torch.autograd.graph.saved_tensors_hooks(pack, lambda tensor: tensor):
            y, _ = selective_scan(x, dt.abs(), rate, b, c, chunk=16)
        assert y.requires_grad
        return sum(sizes.values())

    states = 256 * 32 * (64 - 4) * 4
    assert bytes_saved(64) - bytes_saved(4) < states / 4


@torch.no_grad()
def test_a_token_alone_goes_on_from_the_state():
    given = operands()
    whole, last = selective_scan(*given, chunk=5)

    def part(start, end):
        return [x[:, start:end] if x.ndim == 3 else x for x in given]

    _, state = selective_scan(*part(0, 7), chunk=5)
    for t in range(7, 12):
        y, state = selective_scan(*part(t, t + 1), chunk=5, state=state)
        torch.testing.assert_close(y[:, 0], whole[:, t], rtol=0, atol=1e-12)
    torch.testing.assert_close(state, last, rtol=0, atol=1e-12)


def root_mean_square(x, eps):
    return x / (x.square().mean(-1, keepdim=True) + eps).sqrt()


@torch.no_grad()
@pytest.mark.parametrize("norms", ["none", "plain", "weighted"])
def test_the_mixer_is_what_its_parameters_say(norms):
    sizes = replace(SIZES, norms=norms, norm_eps=None if norms == "none" else 1e-2)
    config = replace(CONFIG, layers=None, layer_pattern="***", positions="none", attention=sizes)
    mixer = GPTModel(config, seed=1).double().blocks[0].mixer
    torch.manual_seed(3)
    for parameter in mixer.parameters():
        parameter.add_(0.3 * torch.randn_like(parameter))
    x = torch.randn(2, 12, 16, dtype=torch.float64)
    context = AttentionContext.build(config, x, x.dtype, document_ids=DOCUMENTS)
    mixed = mixer(x, context)
    for row, ends in enumerate(ENDS[True]):
        for start, end in itertools.pairwise(ends):
            inputs, gate = (x[row, start:end] @ mixer.input.weight.T).split((32, 32), dim=-1)
            padded = F.pad(inputs.T, (3, 0))[None]
            inputs = F.conv1d(padded, mixer.conv.weight, mixer.conv.bias, groups=32)[0].T
            inputs = F.silu(inputs)
            made = (inputs @ mixer.low.weight.T).split((2, 3, 3), dim=-1)
            if norms != "none":
                made = [root_mean_square(each, 1e-2) for each in made]
            if norms == "weighted":
                weights = (norm.weight for norm in mixer.norms.values())
                made = [each * weight for each, weight in zip(made, weights, strict=True)]
            dt = (made[0] @ mixer.scan.dt_weight.T + mixer.scan.dt_bias).exp().log1p()
            y, _ = recurrence(inputs, dt, -mixer.scan.A_log.exp(), *made[1:])
            y = (y + mixer.scan.D * inputs) * F.silu(gate)
            wanted = y @ mixer.output.weight.T
            torch.testing.assert_close(mixed[row, start:end], wanted, rtol=0, atol=1e-12)


def test_fresh_parameters_are_those_of_the_paper():
    config = replace(CONFIG, layers=None, attention=replace(SIZES, dt_min=0.01, dt_max=0.02))
    scan = GPTModel(config, seed=1).blocks[0].attention.scan
    torch.testing.assert_close(scan.A_log.exp(), torch.tensor([1.0, 2.0, 3.0]).expand(32, 3))
    steps = F.softplus(scan.dt_bias)
    assert 0.01 <= steps.min() < steps.max() <= 0.02
    assert 0 < scan.dt_weight.abs().max() <= 2**-0.5
    assert (scan.D == 1).all()


@pytest.mark.ranks(2)
@pytest.mark.parametrize("sequence_parallel", [False, True])
@pytest.mark.parametrize("recompute", ["none", "selective", "full"])
def test_channels_cut_over_ranks_train_like_one_process(sequence_parallel, recompute):
    check_cut_over_ranks(replace(CONFIG, sequence_parallel=sequence_parallel), recompute)


@torch.no_grad()
def test_text_is_written_with_a_state_as_from_the_whole():
    model = GPTModel(CONFIG, seed=1).double().eval()
    written = generate(model, TEXT[:, :7], 6, temperature=0.0)
    for end in range(7, 13):
        assert torch.equal(model(written[:, :end])[:, -1].argmax(-1), written[:, end])


def test_what_it_cannot_do_is_refused():
    with pytest.raises(ValueError, match="invariant=True beside Mamba1"):
        replace(CONFIG, invariant=True)
    with pytest.raises(ValueError, match="the config has no mamba"):
        replace(CONFIG, layers=None, attention=Mamba2())
    with pytest.raises(ValueError, match="taps is 0"):
        replace(SIZES, taps=0)
    with pytest.raises(ValueError, match="norms is 'rms'"):
        replace(SIZES, norms="rms")
    with pytest.raises(ValueError, match=r"dt_min and dt_max are 2\.0 and 1\.0"):
        replace(SIZES, dt_min=2.0)
    with pytest.raises(ValueError, match=r"norm_eps is 0\.0"):
        replace(NORMED, norm_eps=0.0)
    with pytest.raises(ValueError, match=r"norm_eps=0\.01 has no effect: norms is 'none'"):
        replace(SIZES, norm_eps=0.01)


@pytest.mark.ranks(2)
def test_cut_sequences_are_refused():
    with pytest.raises(ValueError, match=r"context_parallel .* with Mamba1, which has none"):
        GPTModel(CONFIG, ParallelLayout(cp=2).build(device_type()))
