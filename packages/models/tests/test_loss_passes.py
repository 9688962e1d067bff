"""A GPU's passes over narrow logits: the bits of a CPU's, which widens first and rounds last."""

from __future__ import annotations

import pytest
import torch

from lamina.models import linear_cross_entropy, vocab_parallel_cross_entropy
from lamina.models.layers import loss


def of_logits(hidden, weight, labels):
    """The loss of logits that somebody else has computed."""
    return vocab_parallel_cross_entropy(hidden @ weight.t(), labels, chunk=20).sum()


def of_hidden(hidden, weight, labels):
    """The loss that computes the logits of a chunk, of which the last ten are padding."""
    return linear_cross_entropy(hidden, weight, labels, vocab_size=190, chunk=20)


@pytest.mark.parametrize("function", [of_logits, of_hidden])
@pytest.mark.parametrize("dtype", [torch.bfloat16, torch.float16, torch.float32])
def test_the_passes_of_a_gpu_give_the_same_bits(function, dtype, monkeypatch):
    torch.manual_seed(0)
    hidden, weight = torch.randn(77, 24).to(dtype), torch.randn(200, 24).to(dtype)
    labels = torch.randint(190, (77,))
    labels[::5] = -100
    results = []
    for device in ("cpu", "cuda"):
        monkeypatch.setattr(loss, "computes_on", lambda _, device=device: device)
        inputs = [each.clone().requires_grad_() for each in (hidden, weight)]
        total = function(*inputs, labels)
        (total * 1.7).backward()
        results.append([total.detach(), *(each.grad for each in inputs)])
    for on_cpu, on_gpu in zip(*results, strict=True):
        assert torch.equal(on_cpu, on_gpu)
