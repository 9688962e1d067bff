"""What only a GPU runs: its attention kernels, their merging, offload, half-precision sums."""

from __future__ import annotations

from dataclasses import replace

import pytest
import torch
import torch.nn.functional as F

from lamina.models import (
    GPTModel,
    RecomputePolicy,
    TransformerConfig,
    apply_recompute,
    linear_cross_entropy,
)
from lamina.models.attention import choose_pattern
from lamina.models.attention.kernels import Flex, Masked, Varlen
from lamina.models.attention.pieced import Block, merge
from lamina.models.layers.matmul_products import write_product
from lamina.models.precision import fp8

pytestmark = pytest.mark.skipif(not torch.cuda.is_available(), reason="no CUDA device")

CONFIG = TransformerConfig(
    vocab_size=512, hidden_size=256, num_layers=2, num_heads=4, num_kv_heads=2,
    max_sequence_length=1024,
)  # fmt: skip


def documents(batch: int, sequence: int) -> torch.Tensor:
    generator = torch.Generator().manual_seed(0)
    starts = torch.rand(batch, sequence, generator=generator) < 0.02
    return starts.cumsum(dim=1).cuda()


def heads(dtype, batch=2, sequence=512, count=4, kv_count=2, width=64):
    torch.manual_seed(1)
    shapes = [(batch, sequence, n, width) for n in (count, kv_count, kv_count)]
    return [torch.randn(s, device="cuda", dtype=dtype, requires_grad=True) for s in shapes]


@pytest.mark.parametrize("window", [None, 100])
@pytest.mark.parametrize(
    ("path", "kind", "dtype"),
    [
        ("auto", Varlen, torch.bfloat16),
        ("auto", Flex, torch.float32),
        ("flex", Flex, torch.bfloat16),
    ],
)
def test_paths_train_alike(path, kind, dtype, window):
    ids = documents(2, 512)
    config = replace(CONFIG, attention_path=path, sliding_window=window)
    pattern = choose_pattern(config, ids, dtype, ids)
    assert isinstance(pattern, kind)
    oracle = choose_pattern(replace(config, attention_path="sdpa"), ids, torch.float64, ids)
    assert isinstance(oracle, Masked)
    inputs = heads(dtype)
    wide = [x.detach().double().requires_grad_() for x in inputs]
    found = pattern(*inputs, scale=0.125, dropout=0.0)
    expected = oracle(*wide, scale=0.125, dropout=0.0)
    grad = torch.randn_like(found)
    ours = torch.autograd.grad(found, inputs, grad)
    theirs = torch.autograd.grad(expected, wide, grad.double())
    tolerance = 3e-2 if dtype == torch.bfloat16 else 2e-3
    for a, b in zip((found, *ours), (expected, *theirs), strict=True):
        torch.testing.assert_close(a.double(), b, rtol=tolerance, atol=tolerance)


def test_heads_of_256_attend_without_scores_in_memory():
    """They are the widest that the kernel takes."""
    # Fewer heads would leave processors idle: the kernel then splits keys, and merges in memory.
    inputs = heads(torch.bfloat16, batch=16, sequence=256, count=4, kv_count=4, width=256)
    query, key, value = (x.detach().transpose(1, 2) for x in inputs)
    torch.cuda.reset_peak_memory_stats()
    before = torch.cuda.memory_allocated()
    out, _ = Block(0.0625).forward(query, key, value)
    taken = torch.cuda.max_memory_allocated() - before
    assert taken < 4 * 16 * 4 * 256 * 256, "as much as the scores in fp32"
    scores = (query.float() @ key.float().transpose(-1, -2)) * 0.0625
    expected = scores.softmax(dim=-1) @ value.float()
    torch.testing.assert_close(out.float(), expected, rtol=3e-2, atol=3e-2)


@pytest.mark.parametrize("dtype", [torch.bfloat16, torch.float32])
def test_blocks_of_attention_merge_into_the_whole(dtype):
    query, key, value = (x.detach().transpose(1, 2) for x in heads(dtype))
    half = query.shape[2] // 2
    early, late = slice(0, half), slice(half, None)
    out = torch.zeros_like(query, dtype=torch.float32)
    logs = torch.full(query.shape[:3], -torch.inf, device="cuda")
    pieces = [
        (early, early, Block(0.125, causal=True)),
        (late, late, Block(0.125, causal=True)),
        (late, early, Block(0.125)),
    ]
    for rows, columns, block in pieces:
        more = block.forward(query[:, :, rows], key[:, :, columns], value[:, :, columns])
        merge(out[:, :, rows], logs[:, :, rows], *more)
    wide = [x.double().requires_grad_() for x in (query, key, value)]
    expected = F.scaled_dot_product_attention(*wide, is_causal=True, scale=0.125, enable_gqa=True)
    tolerance = 3e-2 if dtype == torch.bfloat16 else 1e-4
    torch.testing.assert_close(out.double(), expected, rtol=tolerance, atol=tolerance)
    grad = torch.randn_like(query)
    theirs = torch.autograd.grad(expected, wide, grad.double())
    sums = [torch.zeros_like(x, dtype=torch.float32) for x in (query, key, value)]
    mixed = out.to(dtype)
    for rows, columns, block in pieces:
        parts = block.backward(
            grad[:, :, rows], query[:, :, rows], key[:, :, columns], value[:, :, columns],
            mixed[:, :, rows], logs[:, :, rows],
        )  # fmt: skip
        sums[0][:, :, rows] += parts[0]
        sums[1][:, :, columns] += parts[1]
        sums[2][:, :, columns] += parts[2]
    for a, b in zip(sums, theirs, strict=True):
        torch.testing.assert_close(a.double(), b, rtol=tolerance, atol=2 * tolerance)


def step(model: GPTModel) -> tuple[torch.Tensor, list[torch.Tensor], int]:
    tokens = torch.randint(0, 512, (4, 513), generator=torch.Generator().manual_seed(0)).cuda()
    model.zero_grad(set_to_none=True)
    torch.cuda.synchronize()
    before = torch.cuda.memory_allocated()
    loss = model(tokens[:, :-1], tokens[:, 1:])
    torch.cuda.synchronize()
    saved = torch.cuda.memory_allocated() - before
    loss.backward()
    torch.cuda.synchronize()
    return loss.detach(), [p.grad.clone() for p in model.parameters()], saved


@pytest.mark.parametrize("dtype", [torch.bfloat16, torch.float32])
@pytest.mark.parametrize(("kind", "least"), [("selective", 0.4), ("full", 0.8), ("offload", 0.7)])
def test_saved_activations_leave_the_device_and_numbers_stay(kind, least, dtype):
    with torch.device("cuda"):
        model = GPTModel(replace(CONFIG, num_layers=8), seed=0).to(dtype)
    loss, grads, plain = step(model)
    options = {"min_numel": 1024} if kind == "offload" else {}
    apply_recompute(model, RecomputePolicy(kind=kind, **options))
    step(model)
    found, ours, saved = step(model)
    assert torch.equal(found, loss)
    for a, b in zip(ours, grads, strict=True):
        torch.testing.assert_close(a, b, rtol=1e-2, atol=1e-4)
    assert saved < (1.0 - least) * plain, f"{saved} of {plain} bytes are still saved"


def test_the_loss_in_bfloat16_adds_its_chunks_in_float32():
    torch.manual_seed(0)
    hidden = torch.randn(4096, 256, device="cuda", dtype=torch.bfloat16, requires_grad=True)
    weight = torch.randn(1024, 256, device="cuda", dtype=torch.bfloat16).mul_(0.05)
    weight.requires_grad_()
    labels = torch.randint(0, 1024, (4096,), device="cuda")
    loss = linear_cross_entropy(hidden, weight, labels, chunk=256)
    ours = torch.autograd.grad(loss, (hidden, weight))
    wide = [x.detach().double().requires_grad_() for x in (hidden, weight)]
    expected = F.cross_entropy(wide[0] @ wide[1].t(), labels, reduction="sum")
    theirs = torch.autograd.grad(expected, wide)
    torch.testing.assert_close(loss.double(), expected, rtol=1e-3, atol=0.0)
    for a, b in zip(ours, theirs, strict=True):
        error = (a.double() - b).norm() / b.norm()
        assert error < 1e-2


def test_a_model_trains_with_documents_and_compiled_blocks():
    config = replace(CONFIG, qk_norm=True)
    with torch.device("cuda"):
        model = GPTModel(config, seed=0).to(torch.bfloat16)
    for block in model.blocks:
        block.compile()
    optimizer = torch.optim.AdamW(model.parameters(), 1e-3)
    tokens = torch.randint(0, 512, (2, 129), generator=torch.Generator().manual_seed(0)).cuda()
    losses = []
    for _ in range(6):
        loss = model(tokens[:, :-1], tokens[:, 1:], document_ids=documents(2, 128))
        loss.backward()
        optimizer.step()
        optimizer.zero_grad()
        losses.append(loss.item())
    assert losses[-1] < 0.7 * losses[0]


@pytest.mark.parametrize("rows", [False, True])
@pytest.mark.parametrize("dtype", [torch.bfloat16, torch.float32])
@pytest.mark.parametrize("backward", [False, True])
def test_fp8_products_equal_those_of_decoded_numbers(backward, dtype, rows):
    if torch.cuda.get_device_capability() < (8, 9):
        pytest.skip("no FP8 on this GPU")
    torch.manual_seed(1)
    # 40 is no multiple of 16, as tokens in a weight's gradient may be.
    inner = 40 if backward else 64
    kinds = (fp8.BACKWARD if backward else fp8.FORWARD, fp8.FORWARD)
    sides = [torch.randn(n, inner, device="cuda", dtype=dtype) for n in (96, 32)]
    left, right = (
        fp8.encode(m, fp8.magnitude(m, rows=rows), kind)
        for m, kind in zip(sides, kinds, strict=True)
    )
    found = fp8.scaled_product(left, right, dtype)
    decoded = [(side.codes.double() * side.decode).cpu() for side in (left, right)]
    expected = decoded[0] @ decoded[1].t()
    # Tensor cores add products of FP8 numbers in fewer digits than fp32 has (Hopper's have 13 bits
    # of fraction), so torch's own test of such results in fp32 allows 3e-3, too.
    assert found.dtype == dtype
    error = (found.double().cpu() - expected).norm() / expected.norm()
    assert error < (1e-2 if rows or dtype == torch.bfloat16 else 3e-3)


def test_an_fp8_product_takes_memory_for_padding_only_where_the_width_needs_it():
    if torch.cuda.get_device_capability() < (8, 9):
        pytest.skip("no FP8 on this GPU")

    def allocations(width: int) -> int:
        sides = [torch.ones(32, width, device="cuda", dtype=torch.bfloat16) for _ in range(2)]
        left, right = (fp8.encode(m, fp8.magnitude(m), fp8.FORWARD) for m in sides)
        fp8.scaled_product(left, right, torch.bfloat16)  # the first one takes a workspace for good
        before = torch.cuda.memory_stats()["allocation.all.allocated"]
        fp8.scaled_product(left, right, torch.bfloat16)
        return torch.cuda.memory_stats()["allocation.all.allocated"] - before

    assert allocations(40) == allocations(48) + 2  # the codes of both sides, padded to 48


@pytest.mark.parametrize("dtype", [torch.bfloat16, torch.float16, torch.float32])
def test_weight_gradients_are_written_in_fp32_without_a_temporary(dtype):
    torch.manual_seed(1)
    grad, x = (torch.randn(512, n, device="cuda", dtype=dtype) for n in (96, 64))
    total = torch.full((96, 64), float("nan"), device="cuda")
    expected = grad.double().t() @ x.double()
    write_product(grad.t(), x, total, False)  # the first one takes a workspace for good
    for accumulate, times in ((False, 1), (True, 2)):
        torch.cuda.reset_peak_memory_stats()
        before = torch.cuda.memory_allocated()
        write_product(grad.t(), x, total, accumulate)
        assert torch.cuda.max_memory_allocated() == before, "it makes a temporary"
        torch.testing.assert_close(total.double(), times * expected, rtol=1e-4, atol=2e-3)
