"""Operators, autograd and optimizers run; what torch launches is in the record."""

from __future__ import annotations

import pytest
import torch
import torch.nn as nn
import torch.nn.functional as F

import lamina_virtual_gpu as virtual_gpu


def test_a_value_copied_to_the_device_comes_back():
    there = torch.arange(10.0).cuda()
    assert there.device == torch.device("cuda", 0)
    assert there.cpu().tolist() == list(range(10))
    assert there[3].item() == 3


def test_a_tensor_is_printed_as_the_host_would_read_it():
    assert repr(torch.tensor([1.5, 2.0]).cuda()) == "tensor([1.5000, 2.0000], device='cuda:0')"


@pytest.mark.parametrize("optimizer", [{"foreach": True}, {"fused": True}, {"capturable": True}])
def test_a_training_step_launches_and_reads_its_loss_with_one_wait(optimizer):
    model = nn.Sequential(nn.Linear(64, 128), nn.GELU(), nn.LayerNorm(128)).cuda()
    adamw = torch.optim.AdamW(model.parameters(), **optimizer)
    x = torch.randn(8, 64, device="cuda")
    torch.cuda.synchronize()
    virtual_gpu.reset()
    loss = model(x).square().mean()
    loss.backward()
    adamw.step()
    assert not virtual_gpu.record().host_waits
    with virtual_gpu.host_waits() as waits:
        loss.item()
    assert sum(waits.values()) == 1
    (where,) = waits
    assert __file__ in where[1]
    assert virtual_gpu.record().launches > 10


def test_a_program_may_end_right_after_its_backward(program):
    """Without a switch, autograd's thread first asks for the lock when the interpreter ends."""
    assert program("""
        import sys
        import torch

        x = torch.zeros(8, device="cuda", requires_grad=True)
        sys.setswitchinterval(100)
        x.sum().backward()
        print("true")
    """)


def test_flash_attention_is_chosen_and_its_operations_are_counted():
    shape = (2, 16, 512, 128)
    query = torch.randn(shape, device="cuda", dtype=torch.bfloat16, requires_grad=True)
    virtual_gpu.reset()
    out = F.scaled_dot_product_attention(query, query, query, is_causal=True)
    assert out.grad_fn.name() == "ScaledDotProductFlashAttentionBackward0"
    # Two products of 512 x 512 x 128 for each head, half of which causality leaves out.
    assert virtual_gpu.record().operations == 2 * 2 * 512 * 512 * 128 * 32 / 2


def test_a_product_of_matrices_is_counted_by_its_shape():
    a, b = torch.randn(512, 256, device="cuda"), torch.randn(256, 128, device="cuda")
    virtual_gpu.reset()
    a @ b
    assert virtual_gpu.record().operations == 2 * 512 * 256 * 128


def test_convolutions_use_torchs_own_kernels():
    before = virtual_gpu.record().not_modelled  # of the process, whatever ran in it before
    model = nn.Conv2d(3, 8, 3).cuda()
    model(torch.randn(2, 3, 16, 16, device="cuda")).sum().backward()
    assert virtual_gpu.record().not_modelled == before


def test_what_is_not_modelled_says_its_name_and_fails(capfd):
    with pytest.raises(RuntimeError, match=r"(?i)cusolver|not_supported"):
        torch.linalg.eigh(torch.eye(600, device="cuda"))
    assert "is not modelled" in capfd.readouterr().err
    assert virtual_gpu.record().not_modelled
