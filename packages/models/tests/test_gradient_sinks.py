"""Layers write their weights' gradients where the collective reads them: nothing is copied."""

from __future__ import annotations

from dataclasses import replace
from functools import partial

import pytest
import torch

from lamina.collectives import Ledger
from lamina.collectives.engine import use_messages
from lamina.ddp import (
    DistributedDataParallel,
    DistributedDataParallelConfig,
    finalize_grads,
    full_gradients,
    full_parameters,
    memory_plan,
)
from lamina.fsdp import MixedPrecisionPolicy, fully_shard
from lamina.mesh import ParallelLayout
from lamina.models import (
    GPTModel,
    LatentAttention,
    MoEConfig,
    Precision,
    RecomputePolicy,
    TransformerConfig,
    apply_precision,
    apply_recompute,
    pipeline,
)
from lamina.models.activation_memory import recompute as recompute_module
from lamina.models.activation_memory.offload import Offloader
from lamina.models.engine import cut_weight
from lamina_testing import Meter, device_type

CONFIG = TransformerConfig(
    vocab_size=64, hidden_size=32, num_layers=2, num_heads=2, ffn_size=48, max_sequence_length=32
)
CONFIGS = {
    "llama": CONFIG,
    "tied, biases": replace(
        CONFIG, tie_embeddings=True, attention_bias=True, mlp_bias=True, positions="learned"
    ),
    "latent": replace(CONFIG, mla=LatentAttention(
        kv_lora_rank=16, q_lora_rank=16, qk_nope_head_dim=8, qk_rope_head_dim=8, v_head_dim=16
    )),
}  # fmt: skip
SMALLEST = 16 * 32  # elements of the smallest matrix
# So wide that with few tokens nothing but a matrix is as large as the smallest one.
WIDE = replace(CONFIG, hidden_size=64, ffn_size=64)
WIDEST = 64 * 64
FP8 = Precision(backend="torch-fp8")


def batch(seed: int, rows: int = 2, columns: int = 16) -> tuple[torch.Tensor, torch.Tensor]:
    generator = torch.Generator().manual_seed(seed)
    tokens = torch.randint(0, 64, (rows, columns + 1), generator=generator)
    return tokens[:, :-1], tokens[:, 1:]


def wrap(model, mesh, strategy):
    optimizer = torch.optim.SGD(model.parameters(), lr=0.1, momentum=0.9)
    return fully_shard(model, optimizer, device_mesh=mesh, zero_dp_strategy=strategy)


@pytest.mark.matrix(few=3)
@pytest.mark.ranks(2)
@pytest.mark.parametrize(
    ("name", "strategy", "recompute"),
    [
        ("llama", 0, "full"),
        ("llama", 3, "offload"),
        ("tied, biases", 0, "none"),
        ("tied, biases", 3, "selective"),
        ("latent", 2, "selective"),
        ("latent", 3, "full"),
    ],
)
def test_training_equals_one_process(name, strategy, recompute, ranks, monkeypatch):
    mesh = ParallelLayout(dp_shard=2).build(device_type())
    model = GPTModel(CONFIGS[name], seed=1).double()
    # A CPU is a device too; weights, which may lie in a slot, stay where they are.
    monkeypatch.setattr(recompute_module, "Offloader", partial(Offloader, ("cpu",)))
    options = {"min_numel": 1} if recompute == "offload" else {}
    apply_recompute(model, RecomputePolicy(kind=recompute, **options))
    model, optimizer = wrap(model, mesh, strategy)
    whole = GPTModel(CONFIGS[name], seed=1).double()
    plain = torch.optim.SGD(whole.parameters(), lr=0.1, momentum=0.9)
    for step in range(2):
        for microbatch in range(2):
            seeds = [100 * step + 10 * microbatch + rank for rank in range(2)]
            (model(*batch(seeds[ranks.rank])) / 2).backward()
            for seed in seeds:
                (whole(*batch(seed)) / 4).backward()
        gradients = full_gradients(model)
        for key, parameter in whole.named_parameters():
            torch.testing.assert_close(gradients[key], parameter.grad, rtol=1e-9, atol=1e-12)
        for each in (plain, optimizer):
            each.step()
            each.zero_grad()
    found = full_parameters(model)
    for key, parameter in whole.named_parameters():
        torch.testing.assert_close(found[key], parameter.detach(), rtol=1e-9, atol=1e-12)


@pytest.mark.ranks(4)
@pytest.mark.parametrize("sequence_parallel", [False, True])
def test_cut_layers_train_like_one_process(sequence_parallel):
    mesh = ParallelLayout(dp_shard=2, tp=2).build(device_type())
    config = replace(CONFIG, sequence_parallel=sequence_parallel)
    model, optimizer = wrap(GPTModel(config, mesh, seed=1).double(), mesh, 2)
    whole = GPTModel(config, seed=1).double()
    plain = torch.optim.SGD(whole.parameters(), lr=0.1, momentum=0.9)
    dp, tp = mesh.axis("dp"), mesh.axis("tp")
    for step in range(2):
        model(*batch(10 * step + dp.rank)).backward()
        for rank in range(2):
            (whole(*batch(10 * step + rank)) / 2).backward()
        finalize_grads(model, mesh)
        for each in (plain, optimizer):
            each.step()
            each.zero_grad()
    found = full_parameters(model)
    for key, parameter in whole.named_parameters():
        expected = parameter.detach()
        if found[key].shape != expected.shape:
            dim = 1 if "output" in key or "down" in key else 0
            blocks = {"qkv": (32, 32, 32), "up.": (48, 48)}
            fused = next((b for part, b in blocks.items() if part in key), None)
            expected = cut_weight(expected, dim, tp.rank, tp.size, fused)
        torch.testing.assert_close(found[key], expected, rtol=1e-9, atol=1e-12)


def copied_in_backward(model, step, wide) -> tuple[int, int]:
    """Bytes copied, and bytes gathered (a gather places this rank's own shard by a copy)."""
    loss = model(*(batch(step, 1, 8) if wide else batch(step)))
    with Meter(min_numel=WIDEST if wide else SMALLEST) as meter, Ledger() as ledger:
        loss.backward()
    return meter.bytes_copied, ledger.bytes(op="all_gather_into")


def own_copies(model, wide) -> tuple[int, int]:
    """What a bare model's backward copies of activations (rotated heads): no weight has one."""
    model.requires_grad_(False)
    model.embedding.register_forward_hook(lambda _, __, found: found.requires_grad_())
    return copied_in_backward(model, 0, wide)


@pytest.mark.matrix(strength=1)
@pytest.mark.ranks(2)
@pytest.mark.parametrize("wrapper", ["ddp", "ddp sharded", 2, 3])
@pytest.mark.parametrize("name", list(CONFIGS))
def test_no_weight_gradient_is_copied(name, wrapper, ranks):
    check_copies(CONFIGS[name], {"dp_shard": 2}, wrapper)


@pytest.mark.ranks(2, backend="gloo")  # a GPU has grouped products of bf16 alone
def test_no_gradient_of_experts_is_copied(ranks):
    moe = MoEConfig(num_experts=4, top_k=2, ffn_size=64)
    for wrapper, experts in (("ddp", "grouped"), (3, "loop")):
        config = replace(CONFIG, moe=replace(moe, experts=experts))
        check_copies(config, {"dp_shard": 2}, wrapper)


@pytest.mark.ranks(4)
@pytest.mark.parametrize("sequence_parallel", [False, True])
def test_no_gradient_of_a_cut_weight_is_copied(sequence_parallel, ranks):
    config = replace(CONFIGS["tied, biases"], sequence_parallel=sequence_parallel)
    check_copies(config, {"dp_shard": 2, "tp": 2}, 3)


@pytest.mark.ranks(2)
@pytest.mark.parametrize("wrapper", ["ddp", 3])
def test_no_weight_gradient_is_copied_in_fp8(wrapper, ranks):
    check_copies(replace(WIDE, precision=FP8), {"dp_shard": 2}, wrapper)


@pytest.mark.matrix(few=1)
@pytest.mark.ranks(4, reuse=False)  # groups that another test has used may have windows
@pytest.mark.parametrize(
    ("schedule", "wrapper", "precision"),
    [
        ("1f1b", 3, Precision()),
        ("interleaved_zero_bubble", "ddp", Precision()),
        ("interleaved_zero_bubble", 3, FP8),
    ],
)
def test_no_weight_gradient_is_copied_in_a_pipeline(schedule, wrapper, precision, ranks):
    """In a whole step: a gather places its own shard, and FP8 quantises weights, no more."""
    mesh = ParallelLayout(pp=2, dp_shard=2).build(device_type())
    if device_type() == "cuda":  # GPUs of a host would copy what they send into a window
        for purpose in ("gather", "reduce"):
            use_messages(mesh.axis("dp_shard_cp").sibling(purpose))
    model = GPTModel(replace(WIDE, precision=precision), mesh, seed=1)
    layout = [1, 1] if schedule == "1f1b" else [0, 1, 1, 0]
    runner = pipeline(
        model, mesh, schedule, 2, layout, wrap=lambda stage: data_parallel(stage, mesh, wrapper)
    )
    quantised = sum(
        layer.weight.numel()
        for layer in runner.modules()
        if getattr(layer, "float8", None) is not None
    )
    for step in range(2):
        with Meter(min_numel=WIDEST) as meter, Ledger() as ledger:
            runner.step(*batch(step, 2, 8))
    # Forward makes codes of the weight; backward does again, and turns them round.
    known = 3 * quantised * 2 + (ledger.bytes(op="all_gather_into") if wrapper == 3 else 0)
    assert meter.bytes_copied <= known
    if device_type() == "cpu":  # NCCL itself places what a gather has of this rank
        assert known - 4 * WIDEST < meter.bytes_copied


def data_parallel(module, mesh, wrapper):
    if isinstance(wrapper, int):
        return fully_shard(module, device_mesh=mesh, zero_dp_strategy=wrapper)
    settings = DistributedDataParallelConfig(use_distributed_optimizer="sharded" in wrapper)
    return DistributedDataParallel(module, settings, mesh)


def check_copies(config, axes, wrapper):
    mesh = ParallelLayout(**axes).build(device_type())
    wide = config.hidden_size == WIDE.hidden_size
    own, own_gathered = own_copies(GPTModel(config, mesh, seed=1), wide)
    bare = GPTModel(config, mesh, seed=1)
    if isinstance(wrapper, int):
        model, optimizer = wrap(bare, mesh, wrapper)
    else:
        model, optimizer = data_parallel(bare, mesh, wrapper), None
    if memory_plan(model).windows:
        pytest.skip("GPUs of one host copy each slice into a window first")
    for step in range(2):  # the first has slots and buffers to make
        copied, gathered = copied_in_backward(model, step, wide)
        if optimizer is not None:
            finalize_grads(model, mesh)
            optimizer.step()
            optimizer.zero_grad()
        else:
            model.zero_grad_buffer()
    # Beside weights, sequence parallelism gathers inputs for their weights' gradients.
    gathered -= own_gathered
    assert copied <= own + gathered, f"{copied} bytes, of them {own} the model's own"
    assert gathered > 0 or wrapper != 3


@pytest.mark.ranks(1)
def test_bf16_and_fp8_layers_write_into_fp32_gradients(ranks):
    mesh = ParallelLayout(dp_shard=1).build(device_type())
    for precision in (Precision(), Precision(backend="torch-fp8")):
        gradients = []
        config = replace(CONFIG, precision=precision)
        for sunk in (True, False):
            model = GPTModel(config, seed=1)
            if sunk:
                policy = MixedPrecisionPolicy(param_dtype=torch.bfloat16)
                model = fully_shard(model, device_mesh=mesh, mixed_precision_policy=policy)
            else:
                model = model.to(torch.bfloat16)
            for seed in range(2):
                model(*batch(seed)).backward()
            gradients.append(
                full_gradients(model) if sunk else {n: p.grad for n, p in model.named_parameters()}
            )
        for name, gradient in gradients[0].items():
            assert gradient.dtype == torch.float32
            expected = gradients[1][name].float()
            error = (gradient - expected).norm() / expected.norm()
            assert error < 1e-2, f"{name}: {error}"


@pytest.mark.ranks(1)
def test_a_compiled_block_under_a_wrapper_has_the_same_gradients(ranks):
    mesh = ParallelLayout(dp_shard=1).build(device_type())
    config = replace(CONFIG, num_layers=1)
    whole, bare = GPTModel(config, seed=1), GPTModel(config, seed=1)
    whole(*batch(0)).backward()
    bare.blocks[0].compile(backend="eager")
    model = DistributedDataParallel(bare, DistributedDataParallelConfig(), mesh)
    model(*batch(0)).backward()
    gradients = full_gradients(model)
    for name, parameter in whole.named_parameters():
        torch.testing.assert_close(gradients[name], parameter.grad)


@pytest.mark.ranks(1)
@pytest.mark.parametrize("wrapper", ["ddp", 0, 3])
def test_a_precision_after_the_wrapper_is_refused(wrapper, ranks):
    mesh = ParallelLayout(dp_shard=1).build(device_type())
    model = GPTModel(CONFIG, seed=1)
    if wrapper == "ddp":
        wrapped = DistributedDataParallel(model, DistributedDataParallelConfig(), mesh)
    else:
        wrapped, _ = wrap(model, mesh, wrapper)
    with pytest.raises(ValueError, match=r"embedding.weight belongs to .* before the wrapper"):
        apply_precision(wrapped, Precision(backend="torch-fp8"))
