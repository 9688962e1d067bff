"""A pipeline of any schedule trains like one process."""

from __future__ import annotations

import functools
from dataclasses import replace

import pytest
import torch
from torch.distributed.device_mesh import init_device_mesh
from torch.multiprocessing.reductions import StorageWeakRef

from lamina.collectives import Ledger
from lamina.ddp import (
    DistributedDataParallel,
    DistributedDataParallelConfig,
    ShardedOptimizer,
    clip_grad_norm,
    full_gradients,
    memory_plan,
)
from lamina.fsdp import fully_shard, fully_shard_optimizer
from lamina.mesh import ParallelLayout
from lamina.models import (
    GPTModel,
    LayerSpec,
    MambaConfig,
    MoEConfig,
    TransformerConfig,
    apply_recompute,
    pipeline,
)
from lamina.models.mamba import GatedDeltaNet, Mamba1, Mamba2
from lamina_testing import Meter, device_type

CONFIG = TransformerConfig(
    vocab_size=40,
    hidden_size=16,
    num_layers=4,
    num_heads=2,
    ffn_size=24,
    max_sequence_length=16,
    init_std=0.2,
)
SCHEDULES = {
    "gpipe": 4,
    "1f1b": 4,
    "interleaved_1f1b": 4,
    "looped_bfs": 4,
    "interleaved_zero_bubble": 4,
    "zbv_zero_bubble": 4,
    "dualpipev": 4,
}


def batch(step, rows=6):
    """Tokens, and labels of which each sequence has other numbers to be left out."""
    generator = torch.Generator().manual_seed(step)
    text = torch.randint(0, 40, (rows, 9), generator=generator)
    labels = text[:, 1:].clone()
    for row in range(rows):
        labels[row, : (3 * row + step) % 8] = -100
    return text[:, :-1], labels


def wrapper(kind, mesh, **settings):
    """What makes a stage data-parallel; None leaves it bare."""
    if kind is None:
        return None
    if kind == "ddp":
        config = DistributedDataParallelConfig(overlap_grad_reduce=True, **settings)
        return lambda stage: DistributedDataParallel(stage, config, mesh)
    return lambda stage: fully_shard(stage, device_mesh=mesh, zero_dp_strategy=kind, **settings)


def optimizers(kind, runner, mesh, *, per_stage=False):
    """One over all stages of the rank, or one for each."""
    if per_stage:
        return [
            fully_shard_optimizer(torch.optim.AdamW(stage.parameters(), 1e-2), stage)
            for stage in runner.stages
        ]
    adamw = torch.optim.AdamW(runner.parameters(), 1e-2)
    if kind == "ddp":
        return [ShardedOptimizer(adamw, runner, mesh)]
    return [adamw if kind is None else fully_shard_optimizer(adamw, runner)]


def gradients(kind, runner):
    if kind is None:
        return {name: p.grad for name, p in runner.named_parameters() if p.grad is not None}
    return full_gradients(runner)


def check_training(runner, mesh, config, kind, steps=3, rows=6, per_token=False):
    """Train beside one process: losses, gradients of every step, so parameters too."""
    whole = GPTModel(config, seed=1).double()
    plain = torch.optim.AdamW(whole.parameters(), 1e-2)
    stepping = optimizers(kind, runner, mesh)
    dp = mesh.axis("dp")
    for step in range(steps):
        tokens, labels = batch(step, rows * dp.size)
        shares = list(zip(tokens.chunk(dp.size), labels.chunk(dp.size), strict=True))
        if per_token:
            whole(tokens, labels).backward()
        else:
            for mine in shares:
                (whole(*mine) / dp.size).backward()
        with torch.no_grad():
            wanted = whole(*shares[dp.rank])
        torch.testing.assert_close(runner.evaluate(*shares[dp.rank]), wanted, rtol=0, atol=1e-10)
        loss = runner.step(*shares[dp.rank])
        torch.testing.assert_close(loss, wanted, rtol=0, atol=1e-10)
        expected = {name: p.grad for name, p in whole.named_parameters()}
        found = gradients(kind, runner)
        assert found.keys() <= expected.keys()
        for name, gradient in found.items():
            torch.testing.assert_close(
                gradient, expected[name], rtol=0, atol=1e-9, msg=lambda m, n=name: f"{n}: {m}"
            )
        for each in (plain, *stepping):
            each.step()
            each.zero_grad()
    return whole


def build(config, mesh):
    return GPTModel(config, mesh, seed=1).double()


@pytest.mark.matrix(few=4)
@pytest.mark.ranks(2)
@pytest.mark.parametrize("schedule", list(SCHEDULES))
def test_every_schedule_trains_bare_stages_like_one_process(schedule, ranks):
    config = replace(CONFIG, tie_embeddings=True)
    mesh = ParallelLayout(pp=2).build(device_type())
    runner = pipeline(build(config, mesh), mesh, schedule, SCHEDULES[schedule])
    check_training(runner, mesh, config, None)


WRAPPED = {
    # schedule, wrapper, its settings, axes, tied; the whole product is below
    "1f1b, strategy 3": ("1f1b", 3, {}, {"pp": 2, "dp_shard": 2}, True),
    "zero bubble, strategy 3": ("interleaved_zero_bubble", 3, {}, {"pp": 2, "dp_shard": 2}, True),
    "V, strategy 3, every microbatch": (
        "zbv_zero_bubble",
        3,
        {"each": True},
        {"pp": 2, "dp_shard": 2},
        True,
    ),
    "zero bubble, ZeRO-1": (
        "interleaved_zero_bubble",
        "ddp",
        {"use_distributed_optimizer": True},
        {"pp": 2, "dp_shard": 2},
        False,
    ),
    "per token, V, cp, DDP": (
        "dualpipev",
        "ddp",
        {"calculate_per_token_loss": True},
        {"pp": 2, "cp": 2},
        True,
    ),
}


@pytest.mark.matrix(few=2)
@pytest.mark.ranks(4)
@pytest.mark.parametrize("case", list(WRAPPED))
def test_wrapped_stages_train_like_one_process(case, ranks):
    schedule, kind, settings, axes, tied = WRAPPED[case]
    settings = dict(settings)
    each = settings.pop("each", False)
    config = replace(CONFIG, tie_embeddings=tied)
    mesh = ParallelLayout(**axes).build(device_type())
    model, wrap = build(config, mesh), wrapper(kind, mesh, **settings)
    number = SCHEDULES[schedule]
    runner = pipeline(model, mesh, schedule, number, wrap=wrap, each_microbatch=each)
    per_token = "calculate_per_token_loss" in settings
    check_training(runner, mesh, config, kind, steps=2, per_token=per_token)
    if "cp" in axes:  # on every rank: one stage would wait for the other
        with pytest.raises(ValueError, match="10 tokens is not divisible by 4, twice cp 2"):
            runner.step(*torch.zeros(2, 4, 10, dtype=torch.int64))


@pytest.mark.ranks(2)
@pytest.mark.parametrize(("axes", "kind"), [({"pp": 2}, None), ({"cp": 2}, "ddp")])
def test_documents_and_positions_are_cut_with_their_sequences(axes, kind, ranks):
    """Five sequences in three microbatches, each with documents and positions of its own."""
    mesh, on_gpu = ParallelLayout(**axes).build(device_type()), device_type() == "cuda"
    # A GPU's ring takes no documents.
    config = replace(CONFIG, context_parallel="all_gather") if on_gpu else CONFIG
    runner = pipeline(build(config, mesh), mesh, "1f1b", 3, wrap=wrapper(kind, mesh))
    tokens, labels = batch(0, 5)
    ids = (torch.arange(8) > torch.arange(5)[:, None]).long()
    places = torch.arange(8) + torch.arange(5)[:, None]
    for positions in (None, places, places[3], places[3:4]):
        whole = build(CONFIG, None)
        loss = whole(tokens, labels, positions, ids)
        loss.backward()
        found = runner.evaluate(tokens, labels, positions, ids)
        torch.testing.assert_close(found, loss.detach(), rtol=0, atol=1e-10)
        found = runner.step(tokens, labels, positions, ids)
        torch.testing.assert_close(found, loss.detach(), rtol=0, atol=1e-10)
        for name, gradient in gradients(kind, runner).items():
            wanted = whole.get_parameter(name).grad
            torch.testing.assert_close(gradient, wanted, rtol=0, atol=1e-9)
        for stage in runner.stages:
            stage.zero_grad() if kind is None else stage.zero_grad_buffer()
    # Refused on every rank, before one stage waits for another.
    with pytest.raises(ValueError, match=r"document_ids have shape \(3, 8\), tokens \(5, 8\)"):
        runner.step(tokens, labels, None, ids[:3])
    with pytest.raises(ValueError, match=r"positions have shape \(2, 8\), tokens \(5, 8\)"):
        runner.step(tokens, labels, places[:2])
    if not on_gpu:  # where the host would wait to see them
        with pytest.raises(ValueError, match="labels hold 40"):
            runner.step(tokens, labels.masked_fill(labels == -100, 40))


@pytest.mark.ranks(4)
def test_units_are_gathered_and_gradients_summed_once_per_step(ranks):
    mesh = ParallelLayout(pp=2, dp_shard=2).build(device_type())
    counts = {}
    for each in (False, True):
        runner = pipeline(
            build(CONFIG, mesh), mesh, "1f1b", 4, wrap=wrapper(3, mesh), each_microbatch=each
        )
        runner.step(*batch(0))  # makes what stays, the main gradients
        held, outputs, driver = [], {}, runner._drivers[0]
        inner = driver.backward_one_chunk

        def watched(chunk, *args, inner=inner, held=held, outputs=outputs, **options):
            # torch's schedule itself refers to the first one (by its send) and to the newest.
            if chunk in (1, 2) and mesh.axis("pp").rank == 0:
                assert outputs[chunk].expired(), "the graph is enough: the numbers were sent"
            inner(chunk, *args, **options)
            held.append(meter.live_bytes())

        driver.backward_one_chunk = watched
        forward = driver.forward_one_chunk

        def noted(chunk, *args, forward=forward, outputs=outputs, **options):
            output = forward(chunk, *args, **options)
            outputs[chunk] = StorageWeakRef(output.untyped_storage())
            return output

        driver.forward_one_chunk = noted
        with Ledger() as ledger, Meter() as meter:
            before = meter.live_bytes()
            runner.step(*batch(0))
            rise, left = [size - before for size in held], meter.live_bytes() - before
        counts[each] = [
            sum((r.op, r.communicator) == (op, f"dp_shard:{purpose}") for r in ledger.records)
            for op, purpose in (("all_gather_into", "gather"), ("reduce_scatter_fp32", "reduce"))
        ]
        groups = list(runner.parameter_groups())
        plan = memory_plan(runner)
        whole = sum(8 * group.layout.size for group in groups)
        assert (plan.gathered == whole) is not each
        assert plan.local_grads == (0 if each else whole)
        # Counted from outside: after a backward of the last stage, which has no other microbatch
        # in hands, the plan's bytes are there, and a few tensors that cross the boundary.
        if mesh.axis("pp").rank == 1:
            few = 5 * 2 * 8 * CONFIG.hidden_size * 8
            least, most = (whole // 2, plan.gathered + plan.in_flight) if each else (2 * whole,) * 2
            assert all(least <= size <= most + few for size in rise[:-1])
        assert left < whole // 2  # both are given back; a reduction's buffer may stay
        # Activations of 6 sequences of 8 tokens cross one boundary, and their gradients come back.
        sent = ledger.bytes(axis="pp", op="send_operation")
        assert sent == 6 * 8 * CONFIG.hidden_size * 8
    assert counts[False] == [len(groups), len(groups)]
    assert counts[True][0] > 3 * counts[False][0]
    assert counts[True][1] == 4 * counts[False][1]


@pytest.mark.ranks(2)
@pytest.mark.parametrize("policy", ["full", "selective"])
def test_zero_bubble_runs_blocks_again_and_puts_products_off(policy, ranks):
    mesh = ParallelLayout(pp=2).build(device_type())
    model = apply_recompute(build(CONFIG, mesh), policy)
    runner = pipeline(model, mesh, "interleaved_zero_bubble", 4)
    put_off = []
    queue_type = type(runner._drivers[0].queue)
    put = queue_type.put
    queue_type.put = lambda self, *late: put(self, *late) and not put_off.append(late[0].shape)
    try:
        check_training(runner, mesh, CONFIG, None, steps=2)
    finally:
        queue_type.put = put
    assert len(put_off) >= 4 * 2  # every linear layer of a stage, for several microbatches


@pytest.mark.ranks(2)
def test_layouts_may_leave_ends_without_layers(ranks):
    mesh = ParallelLayout(pp=2).build(device_type())
    runner = pipeline(build(CONFIG, mesh), mesh, "looped_bfs", 2, layout=[0, 1, 3, 0])
    assert runner.layout == ((), (0,), (1, 2, 3), ())
    check_training(runner, mesh, CONFIG, None, steps=2)


@pytest.mark.ranks(2)
def test_a_plain_device_mesh_says_enough_for_untied_models(ranks):
    mesh = init_device_mesh(device_type(), (2, 1), mesh_dim_names=("pp", "dp"))
    wrap = functools.partial(fully_shard, device_mesh=mesh, dp_shard_dim="dp")
    runner = pipeline(build(CONFIG, mesh), mesh, "1f1b", 3, wrap=wrap)
    whole = build(CONFIG, None)
    loss = whole(*batch(0))
    loss.backward()
    torch.testing.assert_close(runner.step(*batch(0)), loss.detach(), rtol=0, atol=1e-10)
    for name, gradient in full_gradients(runner).items():
        torch.testing.assert_close(gradient, whole.get_parameter(name).grad, rtol=0, atol=1e-9)
    tied = build(replace(CONFIG, tie_embeddings=True), mesh)
    with pytest.raises(ValueError, match="tied embeddings"):
        pipeline(tied, mesh, "1f1b", 3, wrap=wrap)


@pytest.mark.ranks(1)
def test_one_pipeline_rank_runs_microbatch_after_microbatch(ranks):
    mesh = ParallelLayout(pp=1).build(device_type())
    config = replace(CONFIG, tie_embeddings=True)
    with pytest.warns(UserWarning, match=r"layout=\[1, 3\] without effect"):
        runner = pipeline(build(config, mesh), mesh, "1f1b", 3, layout=[1, 3])
    check_training(runner, mesh, config, None, steps=2)
    sharded = pipeline(build(config, mesh), mesh, "1f1b", 3, wrap=wrapper(3, mesh))
    check_training(sharded, mesh, config, 3, steps=2)


@pytest.mark.ranks(2)
def test_stacks_of_experts_and_mamba_train_like_one_process(ranks):
    """One microbatch: auxiliary losses are those of a batch."""
    moe = MoEConfig(num_experts=4, top_k=2, switch_loss=0.1, z_loss=0.05, bias_rate=0.01)
    config = replace(
        CONFIG,
        layer_pattern="TM-E",
        mamba=MambaConfig(state_size=8, head_dim=8),
        moe=moe,
    )
    mesh = ParallelLayout(pp=2).build(device_type())
    runner = pipeline(build(config, mesh), mesh, "interleaved_zero_bubble", 1)
    check_training(runner, mesh, config, None, steps=1)
    # With padding, which no router counts.
    runner, whole = pipeline(build(config, mesh), mesh, "gpipe", 1), build(config, None)
    tokens, labels = batch(0)
    padding = labels == -100
    whole(tokens, labels, padding_mask=padding).backward()
    runner.step(tokens, labels, padding_mask=padding)
    for name, parameter in runner.named_parameters():
        wanted = whole.get_parameter(name).grad
        torch.testing.assert_close(parameter.grad, wanted, rtol=0, atol=1e-9)
    biases = {n: b for n, b in runner.state_dict().items() if n.endswith("expert_bias")}
    assert len(biases) == 1
    for name, bias in biases.items():
        whole.get_submodule(name.removesuffix(".expert_bias")).finalize_step(None)
        assert torch.equal(bias, whole.get_buffer(name))
    with pytest.raises(ValueError, match="padding_mask has shape"):
        runner.step(tokens, labels, padding_mask=padding[:, 1:])


@pytest.mark.ranks(2)
def test_recurrent_layers_train_in_stages_like_one_process(ranks):
    net = GatedDeltaNet(key_heads=2, value_heads=4, key_width=8, value_width=6, chunk_size=8)
    scan = Mamba1(state_size=4, norms="weighted", chunk_size=8)
    layers = tuple(LayerSpec(attention=each) for each in (net, None, scan, Mamba2()))
    moe = MoEConfig(num_experts=4, top_k=2, bias=True, router_bias=True)
    mamba = MambaConfig(state_size=8, head_dim=8)
    config = replace(CONFIG, layers=layers, mamba=mamba, moe=moe, activation="swiglu_clamped")
    mesh = ParallelLayout(pp=2).build(device_type())
    runner = pipeline(build(config, mesh), mesh, "interleaved_zero_bubble", 2)
    check_training(runner, mesh, config, None, steps=2)


@pytest.mark.ranks(4)
def test_experts_over_ranks_train_in_stages_like_one_process(ranks):
    """Gradients of what is whole here, and the norm, which counts the experts of all ranks."""
    moe = MoEConfig(num_experts=4, top_k=2, experts="loop")
    config = replace(CONFIG, moe=moe, tie_embeddings=True)
    mesh = ParallelLayout(pp=2, dp_shard=2, ep=2).build(device_type())
    wrap = wrapper(3, mesh, calculate_per_token_loss=True)
    runner = pipeline(build(config, mesh), mesh, "zbv_zero_bubble", 4, wrap=wrap)
    whole = build(config, None)
    stepping = [
        torch.optim.AdamW(whole.parameters(), 1e-2),
        *optimizers(3, runner, mesh, per_stage=True),
    ]
    dp = mesh.axis("dp")
    for step in range(2):
        tokens, labels = batch(step, 8)
        whole(tokens, labels).backward()
        runner.step(tokens.chunk(2)[dp.rank], labels.chunk(2)[dp.rank])
        for name, gradient in full_gradients(runner).items():
            wanted = whole.get_parameter(name).grad
            if "experts" not in name:
                torch.testing.assert_close(gradient, wanted, rtol=0, atol=1e-9)
        norm = clip_grad_norm(runner.stages, float("inf"), mesh)
        wanted = torch.nn.utils.clip_grad_norm_(whole.parameters(), float("inf"))
        torch.testing.assert_close(norm.double(), wanted, rtol=1e-5, atol=0)
        for optimizer in stepping:
            optimizer.step()
            optimizer.zero_grad()


@pytest.mark.slow
@pytest.mark.ranks(4)
@pytest.mark.parametrize("each", [False, True])
@pytest.mark.parametrize("tied", [False, True])
@pytest.mark.parametrize("kind", [0, 1, 2, 3, "ddp", "zero1"])
@pytest.mark.parametrize("schedule", list(SCHEDULES))
def test_every_schedule_under_every_wrapper(schedule, kind, tied, each, ranks):
    config = replace(CONFIG, tie_embeddings=tied)
    mesh = ParallelLayout(pp=2, dp_shard=2).build(device_type())
    settings = {"use_distributed_optimizer": True} if kind == "zero1" else {}
    kind = "ddp" if kind == "zero1" else kind
    wrap = wrapper(kind, mesh, **settings)
    model = build(config, mesh)
    runner = pipeline(model, mesh, schedule, 4, wrap=wrap, each_microbatch=each)
    check_training(runner, mesh, config, kind, steps=2)
