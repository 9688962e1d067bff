"""Mamba-2 and vision on a GPU: the kernels beside torch, and each model beside the CPU."""

from __future__ import annotations

from dataclasses import replace

import pytest
import torch

from lamina.models import (
    GPTModel,
    MambaConfig,
    TransformerConfig,
    VisionConfig,
    VisionLanguageModel,
)
from lamina.models.mamba import chunked_scan
from lamina.models.mamba.scan import fused_scan, kernel_scan

pytestmark = pytest.mark.skipif(not torch.cuda.is_available(), reason="no CUDA device")

CONFIG = TransformerConfig(
    vocab_size=512, hidden_size=128, num_layers=4, num_heads=4, max_sequence_length=1024,
    layer_pattern="M*M-", mamba=MambaConfig(state_size=64, head_dim=32, groups=2, chunk_size=64),
)  # fmt: skip


@pytest.mark.parametrize("documents", [False, True])
@pytest.mark.parametrize("dtype", [torch.float32, torch.bfloat16])
def test_kernels_equal_the_chunked_scan_with_its_gradients(dtype, documents):
    if fused_scan() is None:
        pytest.skip("flash-linear-attention is not installed")
    torch.manual_seed(0)
    x = torch.randn(2, 300, 4, 32, device="cuda", dtype=dtype)
    b, c = (torch.randn(2, 300, 2, 64, device="cuda", dtype=dtype) / 8 for _ in range(2))
    dt, rate = torch.rand(2, 300, 4, device="cuda"), -torch.rand(4, device="cuda")
    runs = torch.arange(300, device="cuda").expand(2, -1) // 77 if documents else None
    inputs = [t.requires_grad_() for t in (x, dt, rate, b, c)]
    y = kernel_scan(*inputs, runs=runs)
    found = torch.autograd.grad(y.float().square().sum(), inputs)
    exact = [t.detach().double().requires_grad_() for t in inputs]
    expected, _ = chunked_scan(*exact, chunk=64, runs=runs)
    wanted = torch.autograd.grad(expected.square().sum(), exact)
    for one, other in zip((y, *found), (expected, *wanted), strict=True):
        error = (one.double() - other).norm() / other.norm()
        assert error < (5e-3 if dtype == torch.float32 else 3e-2)


def test_a_hybrid_stack_computes_what_it_does_on_the_cpu():
    tokens = torch.randint(0, 512, (2, 301), generator=torch.Generator().manual_seed(0))
    model = GPTModel(replace(CONFIG, mamba=replace(CONFIG.mamba, path="torch")), seed=0).double()
    expected = model(tokens[:, :-1], tokens[:, 1:])
    expected.backward()
    gradients = [parameter.grad.clone() for parameter in model.parameters()]
    model.zero_grad()
    loss = model.cuda()(tokens[:, :-1].cuda(), tokens[:, 1:].cuda())
    loss.backward()
    torch.testing.assert_close(loss.cpu(), expected, rtol=1e-9, atol=0)
    for parameter, gradient in zip(model.parameters(), gradients, strict=True):
        torch.testing.assert_close(parameter.grad.cpu(), gradient, rtol=1e-7, atol=1e-10)


def test_images_in_text_compute_what_they_do_on_the_cpu():
    model = VisionLanguageModel(
        VisionConfig(hidden_size=32, num_layers=2, num_heads=2, patch_size=8),
        TransformerConfig(vocab_size=64, hidden_size=48, num_layers=2, num_heads=4),
        image_token=0,
        seed=0,
    ).double()
    images = [torch.rand(3, 16, 16), torch.rand(3, 8, 24)]
    tokens = torch.tensor([[5, 0, 0, 0, 0, 6, 0, 0, 0, 7, 8, 9]])
    expected = model(tokens, images)
    found = model.cuda()(tokens.cuda(), [image.cuda() for image in images])
    torch.testing.assert_close(found.cpu(), expected, rtol=1e-9, atol=1e-10)
