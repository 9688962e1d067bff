"""The planner: its record of a step, its lines through fewer layers, its clock and its checks."""

from __future__ import annotations

import gc
import importlib
import json
import random
import re
from collections import Counter, namedtuple
from dataclasses import asdict, replace
from pathlib import Path
from unittest import mock

import pytest
import torch
from torch.distributed.fsdp import CPUOffloadPolicy

from lamina.mesh import ParallelLayout
from lamina.models import (
    GPTModel,
    LatentAttention,
    LayerSpec,
    MambaConfig,
    MoEConfig,
    RMSNorm,
    TransformerConfig,
    parallel_types,
)
from lamina.models.layers.matmul_products import write_product
from lamina.models.mamba import GatedDeltaNet, Mamba1
from lamina.models.plan import Call, Job, StepRecorder, job_plan, machine, plan, search, standstill
from lamina.models.plan.clock import message_seconds, replay
from lamina.models.plan.command import _parser, layout_of, main
from lamina.models.plan.constants import Costs, workspaces_of
from lamina.models.plan.job import layer_specs, longest_run, play
from lamina.models.plan.job_plan import peak_at
from lamina.models.plan.pipeline_clock import pipeline_order, simulate
from lamina.models.plan.preflight import complaints, switched_off, waits_of, wrong_types
from lamina.models.plan.record.device_forms import device_forms
from lamina.models.plan.record.step_record import Life, Message, Operation, StepRecord

CONFIG = TransformerConfig(vocab_size=256, hidden_size=64, num_layers=6, num_heads=4, ffn_size=128)
JOB = Job(config=CONFIG, ranks=2, batch=2, sequence=64)


def test_a_record_knows_each_storage_from_birth_to_death():
    with StepRecorder("cpu") as recorder:
        first = torch.zeros(1000)
        second = first + 1.0
        del first
        third = second.view(10, 100) * 2.0
        del second, third
    sizes = [(life.sizes[0][1], life.died is not None) for life in recorder.record.lives[-3:]]
    assert sizes == [(4000, True)] * 3
    before = sum(recorder.record.timeline()[0][1].values())
    assert sum(recorder.record.peak().values()) - before <= 8000  # two at once, never three


def test_inputs_that_go_right_after_an_operator_were_there_beside_its_results():
    with StepRecorder("cpu") as recorder:
        torch.zeros(1000) + 1.0
    given, result = recorder.record.lives[-2:]
    assert (given.sizes[0][1], result.sizes[0][1]) == (4000, 4000)
    assert given.died > result.born, "the operator reads what is gone"


def test_whole_units_are_named_at_the_peak():
    """Of strategy 3: the unit that computes, and one that is gathered ahead of it."""
    memory = play(JOB).record.peak()
    layer = 4 * 64 * 64 + 3 * 64 * 128 + 2 * 64
    assert memory["gathered units"] >= 2 * layer  # in bf16


def test_embeddings_are_looked_up_as_on_a_gpu():
    """Where their gradient is a tensor of the table's size, and not added into the bucket."""
    for device, there in (("cuda", True), ("cpu", False)):
        names = {operation.name for operation in play(JOB, device_type=device).record.operations}
        assert ("embedding_dense_backward" in names, "index_add_" in names) == (there, not there)


def test_a_record_counts_what_products_multiply():
    left, right = torch.ones(3, 5), torch.ones(5, 7)
    heads = torch.ones(1, 2, 8, 4)
    with StepRecorder("cpu") as recorder:
        left @ right
        torch.baddbmm(torch.zeros(2, 3, 7), left.expand(2, 3, 5), right.expand(2, 5, 7))
        torch.nn.functional.scaled_dot_product_attention(heads, heads, heads, is_causal=True)
    flops = [operation.flops for operation in recorder.record.operations if operation.flops]
    assert flops == [2 * 3 * 5 * 7, 2 * 2 * 3 * 5 * 7, 2 * 2 * (8 * 8 / 2) * (4 + 4)]


# 1,000 rows of 8 numbers: 32,000 bytes. Two rows have 64, and their indices 16.
MOVES = {
    "two read, one written": (lambda x, y, _: x + y, 3 * 32000),
    "in place": (lambda x, y, _: x.add_(y), 3 * 32000),
    "in place, one operand": (lambda x, y, _: x.exp_(), 2 * 32000),
    "a list in place": (lambda x, y, _: torch._foreach_add_([x], [y]), 3 * 32000),
    "overwritten": (lambda x, y, _: x.copy_(y), 2 * 32000),
    "zeroed": (lambda x, y, _: x.zero_(), 32000),
    "into another tensor": (lambda x, y, _: torch.add(x, x, out=y), 2 * 32000),
    "expanded": (lambda x, _, two: x + two[:1].expand(1000, 8), 2 * 32000 + 16),
    "rows picked": (lambda x, y, two: x.index_select(0, two), 64 + 64 + 16),
    "rows indexed": (lambda x, y, two: x[two], 64 + 64 + 16),
    "rows added": (lambda x, y, two: x.index_add_(0, two, y[:2]), 3 * 64 + 16),
    "numbers picked": (lambda x, y, two: x.gather(0, two[None]), 8 + 8 + 16),
    "a view": (lambda x, y, _: x.view(-1), 0),
    "a view of a fresh tensor": (lambda x, y, _: torch.ops.aten._unsafe_view(x, [8000]), 0),
}


@pytest.mark.parametrize("name", MOVES)
def test_a_record_counts_the_bytes_that_a_kernel_moves(name):
    move, expected = MOVES[name]
    x, y, two = torch.ones(1000, 8), torch.ones(1000, 8), torch.tensor([3, 7])
    with StepRecorder("cpu") as recorder:
        move(x, y, two)
    assert sum(operation.nbytes for operation in recorder.record.operations) == expected


@pytest.mark.parametrize(
    ("change", "precision", "share"),
    [
        ({}, "fp32", 1.0),
        ({"sliding_window": 512}, "bf16", 1.0),
        ({"sliding_window": 64}, "bf16", 0.25),
    ],
    ids=["fp32", "a window of all", "a window of an eighth"],
)
def test_each_kernel_of_attention_multiplies(change, precision, share):
    """As flash attention does in bf16, where half of the pairs are seen; a window sees its own."""

    def products(config, precision):
        operations = play(Job(config=config, ranks=2, sequence=512, precision=precision)).record
        return sum(each.flops for each in operations.operations if "att" in each.name)

    plain = TransformerConfig(vocab_size=512, hidden_size=256, num_layers=2, num_heads=4)
    expected = share * products(plain, "bf16")
    assert products(replace(plain, **change), precision) == pytest.approx(expected, rel=0.02)


def test_products_in_fp8_are_played_in_fp8():
    """Projections of blocks are. Attention and the head are not, and FP8 sends tp's maxima too."""
    config = TransformerConfig(vocab_size=512, hidden_size=256, num_layers=2, num_heads=4)
    how = {"config": config, "ranks": 4, "sequence": 512, "layout": ParallelLayout(tp=2)}
    narrow, wide = (play(Job(precision=name, **how)).record for name in ("fp8", "bf16"))
    flops = {
        width: sum(each.flops for each in narrow.operations if each.width == width)
        for width in (1, 2)
    }
    layer = 4 * 256**2 + 3 * 256 * config.ffn_width
    assert flops[1] == 6 * 512 * 2 * layer / 2
    assert flops[1] + flops[2] == sum(each.flops for each in wide.operations)
    assert len(narrow.messages) > len(wide.messages)


def test_what_is_offloaded_takes_the_time_of_its_copies():
    """The last tensors of forward are used as they are, and the wire is between ranks."""
    job = Job(config=CONFIG, ranks=2, sequence=4096, recompute="offload")
    record = play(job).record
    sent = {
        direction: sum(each.nbytes for each in record.messages if each.op == direction)
        for direction in ("copy_to_host", "copy_from_host")
    }
    assert sent["copy_to_host"] > sent["copy_from_host"] > 0
    assert "host" not in record.wire_bytes()
    quick = machine("h100-80gb")
    slow = replace(quick, gpu=replace(quick.gpu, host=1e9))
    longer = replay(record, slow).total - replay(record, quick).total
    assert 0.5 < longer / (sum(sent.values()) / 1e9) < 1.0


def test_the_collector_does_not_run_in_the_step_that_is_recorded():
    """A compiler leaves cycles. When they are collected would decide what a plan says."""
    seen = []

    def inputs(tokens, labels):
        seen.append(gc.isenabled())
        return {"tokens": tokens, "labels": labels}

    play(Job(config=CONFIG, ranks=2, sequence=64, inputs=inputs))
    assert seen == [True, False]
    assert gc.isenabled()


def test_weights_on_the_host_are_refused():
    with pytest.raises(ValueError, match="Plan without it: then weights, gradients and optimizer"):
        Job(config=CONFIG, ranks=2, settings={"offload_policy": CPUOffloadPolicy()})


def test_what_a_forward_leaves_for_its_backward_is_an_activation():
    weight = torch.ones(50, 50, requires_grad=True)
    with StepRecorder("cpu", lambda: {"weights": [weight]}) as recorder:
        hidden = torch.ones(20, 50) @ weight
        hidden = hidden.exp()  # kept: its gradient needs it
        hidden.sum().backward()
        del hidden
    kinds = [life.category for life in recorder.record.lives if life.sizes[0][1] == 20 * 50 * 4]
    assert "activations" in kinds
    assert recorder.record.peak()["weights"] == 50 * 50 * 4


def test_attention_keeps_its_name_for_those_who_replace_it():
    """torch's context parallelism looks its function up by `__name__`."""
    name = torch.nn.functional.scaled_dot_product_attention.__name__
    with device_forms("cuda"):
        assert torch.nn.functional.scaled_dot_product_attention.__name__ == name


def test_a_record_follows_another():
    """What is there still has its life in the record before, and what goes goes in the new one."""
    with StepRecorder("cpu") as recorder:
        weights, shrunk = [torch.ones(50, 50)], torch.ones(20)
        shrunk.untyped_storage().resize_(0)
        before = recorder.next_record(lambda: {"weights": weights})
        product = weights[0] @ weights[0]
        weights.clear()
        product.exp_()
    assert [life.died for life in before.lives] == [None, None]
    weight, nothing, result = recorder.record.lives
    assert (weight.earlier, nothing.earlier, result.earlier) == (*before.lives, None)
    assert (weight.category, weight.born, weight.died) == ("weights", 0, 2)
    assert nothing.sizes == [(0, 0)]
    assert [operation.at for operation in recorder.record.operations] == [0, 1]


def test_a_storage_that_was_emptied_is_not_there_beside_the_next_one():
    """Also if the next one's memory is made without values, and if `set_` fills it in between."""
    with StepRecorder("cpu") as recorder:
        first = torch.ones(1000)
        first.untyped_storage().resize_(0)
        second = torch.empty(1000)
        second.untyped_storage().resize_(0)
        torch.empty(0).set_(second.untyped_storage(), 0, (500,), (1,))
        second.untyped_storage().resize_(0)
    assert sum(recorder.record.peak().values()) == 4000
    sizes = [nbytes for life in recorder.record.lives for _, nbytes in life.sizes if nbytes]
    assert sizes == [4000, 4000, 2000]


def test_meta_tensors_are_kept_and_multiplied_as_on_a_gpu():
    x = torch.empty(8, 1024, dtype=torch.bfloat16, device="meta", requires_grad=True)
    norm, kept = RMSNorm(1024).to("meta", torch.bfloat16), []
    total = torch.empty(1024, 1024, device="meta")
    with device_forms("cuda"):
        with torch.autograd.graph.saved_tensors_hooks(lambda t: kept.append(t.nbytes), list):
            norm(x)
        with StepRecorder("meta") as recorder:
            write_product(x.t(), x, total, accumulate=True)
    given, two_numbers_per_row = x.nbytes + norm.weight.nbytes, 2 * 8 * 4
    assert sum(kept) <= given + two_numbers_per_row
    made = [life for life in recorder.record.lives if life.born]
    assert not made, "bf16 is multiplied into fp32 without a product in bf16"
    assert recorder.record.operations[-1].width == 2, "and in the time of bf16"


def storages(*lives: tuple[int, int, int], end: int) -> StepRecord:
    """A record of lives `(bytes, born, died)` over so many events, each of one operator."""
    record = StepRecord(end=end)
    for nbytes, born, died in lives:
        record.lives.append(Life(born, "activations", True, [(born, nbytes)], died))
    record.operations += [Operation("mm", at, False, 0.0, 0) for at in range(end)]
    return record


def test_a_deep_model_has_its_peak_at_another_moment_than_shallow_ones():
    """At the begin 100 bytes are there for a moment, and each layer leaves 10 until the end."""
    records = [
        storages((100, 0, 1), *((10, 2 + at, layers + 4) for at in range(layers)), end=layers + 4)
        for layers in (2, 3, 4)
    ]
    assert [sum(record.peak().values()) for record in records] == [100, 100, 100]
    assert sum(peak_at(records, (), 48 - 2, 0).values()) == 10 * 48
    # A record that is on no line tells nothing.
    records[2].lives.append(Life(0, "weights", False, [(0, 1000)]))
    assert sum(peak_at(records, (), 48 - 2, 0).values()) == 0


def forwards_first(layers: int, passes: int) -> StepRecord:
    """Each layer of a pass leaves 10 bytes for its backward. The update takes 500 for a moment."""
    waiting = layers * passes
    record = storages((500, 2 * waiting + 1, 2 * waiting + 2), end=2 * waiting + 3)
    for at in range(waiting):
        record.lives.append(Life(at, "activations", True, [(at, 10)], 2 * waiting - at))
    record.operations = [
        replace(each, backward=int(waiting <= each.at < 2 * waiting)) for each in record.operations
    ]
    return record


def test_what_waits_for_backwards_grows_with_layers_times_passes():
    """No run of few layers and passes has its peak where 17 layers have it with 24 passes."""
    deeper = [forwards_first(layers, 4) for layers in (1, 2, 3)]
    longer = [forwards_first(1, 6), forwards_first(2, 6), forwards_first(1, 8)]
    assert {sum(record.peak().values()) for record in (*deeper, *longer)} == {500}
    steps, times = 17 - 1, (24 - 4) / 2
    assert sum(peak_at(deeper, longer, steps, times).values()) == 10 * 17 * 24
    # Passes that are on no line tell nothing.
    longer[2].lives.append(Life(0, "weights", False, [(0, 1000)]))
    assert sum(peak_at(deeper, longer, steps, times).values()) == 0


def test_deep_models_follow_the_line_of_shallow_ones():
    """Played with 2, 3 and 4 layers, and extrapolated to 12; beside all 12."""
    job = replace(JOB, config=replace(CONFIG, num_layers=12))
    planned = plan(job)
    whole = play(job)
    assert planned.worst.extrapolated
    workspaces = {"workspaces": workspaces_of(machine("h100-80gb").gpu)}
    assert planned.worst.memory == whole.record.peak() | workspaces
    assert planned.worst.parameters == whole.parameters
    assert planned.worst.sent == dict(whole.record.wire_bytes())


LOCAL, WHOLE = LayerSpec(sliding_window=16), LayerSpec()
HYBRID = MambaConfig(state_size=16, head_dim=16, groups=2)
REPEATED = {
    "windows by layer": {"num_layers": 38, "layers": (WHOLE, *(LOCAL, LOCAL, WHOLE) * 12, LOCAL)},
    "a pattern": {"layer_pattern": "MM*-" * 8, "num_layers": 32, "mamba": HYBRID},
    "dense layers first": {
        "moe": MoEConfig(num_experts=4, top_k=2, ffn_size=32),
        "layers": (LayerSpec(moe=None),) * 3 + (LayerSpec(),) * 20,
        "num_layers": 23,
    },
    "experts in every second layer": {
        "moe": MoEConfig(num_experts=4, top_k=2, ffn_size=32, first_dense=1, every=2),
        "num_layers": 23,
    },
}


@pytest.mark.parametrize("name", list(REPEATED))
def test_deep_models_of_layers_that_repeat_follow_the_line_of_few_periods(name):
    job = replace(JOB, config=replace(CONFIG, **REPEATED[name]))
    played = []
    with mock.patch.object(job_plan, "play", lambda *args: played.append(args[0]) or play(*args)):
        stage = plan(job).worst
    assert sum(each.config.num_layers for each in played) < job.config.num_layers
    whole = play(job)
    assert stage.extrapolated
    assert stage.parameters == whole.parameters
    memory = stage.allocated - stage.memory["workspaces"]
    assert memory == pytest.approx(sum(whole.record.peak().values()), rel=2e-3)
    seconds = replay(whole.record, machine("h100-80gb"))
    assert stage.forward == pytest.approx(seconds.forward, rel=0.01)
    assert stage.backward == pytest.approx(seconds.backward, rel=0.01)
    assert stage.sent == pytest.approx(dict(whole.record.wire_bytes()), rel=1e-3)


def test_the_longest_run_is_the_one_of_all_runs_that_repeats_most():
    generator = random.Random(0)
    for _ in range(300):
        kinds = generator.choices("ab", k=generator.randrange(14))
        end, period, times = longest_run(kinds)
        run = kinds[end - period * times : end]
        assert times == 0 or run == run[:period] * times
        repeated = [
            size * (number - 1)
            for size in range(1, len(kinds) // 3 + 1)
            for number in range(1, len(kinds) // size + 1)
            for start in range(len(kinds) - size * number + 1)
            if kinds[start : start + size * number] == kinds[start : start + size] * number
        ]
        assert period * max(times - 1, 0) == max(repeated, default=0)


SLOW = pytest.mark.slow
DENSE_FIRST = MoEConfig(num_experts=8, top_k=2, ffn_size=32, first_dense=3)


def pipeline_job(number: int, schedule: str, passes: int, **changes: object) -> Job:
    """A job on two stages, with changes of the model or of the job."""
    of_job = {name: changes.pop(name) for name in ("sequence", "recompute") if name in changes}
    return replace(
        JOB, config=replace(CONFIG, num_layers=number, **changes), ranks=4, schedule=schedule,
        layout=ParallelLayout(pp=2, dp_shard=-1), batch=passes, microbatches=passes, **of_job,
    )  # fmt: skip


LONG = {"sequence": 1024, "recompute": "full", "vocab_size": 32768}


@pytest.mark.parametrize(
    "job",
    [
        pytest.param(pipeline_job(2, "1f1b", 14), id="shallow"),
        pytest.param(pipeline_job(10, "1f1b", 14), id="deep", marks=SLOW),
        # What waits for backwards grows with layers times microbatches. Few layers with few
        # microbatches have most where the large embedding is reduced.
        pytest.param(pipeline_job(16, "gpipe", 12, **LONG), id="forwards first", marks=SLOW),
        # A rank has the first and the last stage, and those have different numbers of layers.
        pytest.param(pipeline_job(20, "zbv_zero_bubble", 40), id="uneven stages", marks=SLOW),
        pytest.param(pipeline_job(20, "1f1b", 14, moe=DENSE_FIRST), id="dense first", marks=SLOW),
    ],
)
def test_a_pipeline_holds_what_its_own_stage_does_however_many_passes_it_makes(job):
    """Planned from few layers and few microbatches; beside all of them."""
    for stage in plan(job).stages:
        played = play(job, stage.rank)
        whole, seconds = played.record, replay(played.record, machine("h100-80gb"))
        assert stage.extrapolated
        assert stage.parameters == pytest.approx(played.parameters, abs=1)
        tensors = stage.allocated - stage.memory["workspaces"]
        assert tensors == pytest.approx(sum(whole.peak().values()), rel=0.01)
        assert stage.forward == pytest.approx(seconds.forward, rel=0.01)
        assert stage.backward == pytest.approx(seconds.backward, rel=0.01)


def test_a_stage_has_no_weights_of_another_one():
    for rank in (0, 1):
        resting = play(pipeline_job(2, "1f1b", 4), rank).record.at_rest()
        assert resting["temporaries"] < 4 * 64 * 128


def kinds_of(job):
    """How many layers of each kind each stage of the first rank has."""
    specs, layers = layer_specs(job.config), job.stage_layers
    kinds = list(dict.fromkeys(specs))
    counts = [Counter(specs[at] for at in layers[stage]) for stage in job.stages_of(0)]
    return [[count[kind] for kind in kinds] for count in counts]


@pytest.mark.parametrize(
    "job",
    [
        pipeline_job(20, "zbv_zero_bubble", 40),
        pipeline_job(20, "1f1b", 14, moe=DENSE_FIRST),
        pipeline_job(24, "1f1b", 14, layers=(WHOLE, *(LOCAL, LOCAL, WHOLE) * 7, LOCAL, WHOLE)),
        pipeline_job(28, "1f1b", 14, moe=replace(DENSE_FIRST, every=2)),
        replace(JOB, config=replace(CONFIG, num_layers=20, moe=DENSE_FIRST)),
    ],
    ids=["uneven stages", "dense first", "windows by layer", "every second", "without a pipeline"],
)
def test_a_job_is_on_the_line_of_its_shallow_ones(job):
    """Of layers of each kind in each of a rank's stages: the straight line leads to the job."""
    first, second, third = job.shallow(0, least=2)
    low, high, there = (torch.tensor(kinds_of(each)) for each in (first, second, job))
    steps = (there - low).sum() / (high - low).sum()
    torch.testing.assert_close(low + steps * (high - low), there.float())
    assert third.config.num_layers < job.config.num_layers


def test_parameters_and_states_are_those_of_the_model():
    """With three states in fp32, of which each of two ranks holds half."""
    job = replace(JOB, config=replace(CONFIG, num_layers=2), precision="fp32")
    memory = play(job).record.at_rest()
    shape = job.config
    layer = 4 * 64 * 64 + 3 * 64 * 128 + 2 * 64
    count = shape.num_layers * layer + 2 * 256 * 64 + 64
    assert memory["weights"] == pytest.approx(4 * count / 2, rel=0.02)
    assert memory["optimizer state"] == pytest.approx(8 * count / 2, rel=0.02)


def test_the_clock_hides_a_message_behind_kernels_and_shows_what_is_left():
    at, record = machine("h100-80gb", Costs(launch=0.0)), StepRecord()
    moved = int(at.gpu.bandwidth * at.costs.memory)  # one second
    record.operations = [Operation("add", number, False, 0.0, moved) for number in range(3)]
    size = int(1.5 * at.gpu.link * at.costs.link)
    hidden = Message("dp", "dp:gather", "all_gather_into", "", size, 0, 2, 0, 2)
    record.messages, record.end = [hidden], 3
    timing = replay(record, at)
    assert timing.spent["exposed dp"] == pytest.approx(0.0, abs=1e-3)
    record.messages = [replace(hidden, waited=1)]
    late = replay(record, at)
    assert late.spent["exposed dp"] == pytest.approx(0.5, abs=1e-3)
    assert late.total == pytest.approx(3.5, abs=1e-3)


def test_between_hosts_a_ring_has_the_network_cards_of_all_its_ranks():
    at = machine("h100-80gb")
    alone = Message("dp", "dp", "all_gather_into", "", 1 << 30, 1 << 30, 2, 0, None)
    # Of 16 ranks on two hosts 8 are elsewhere: 8 of the 15 messages go there.
    rows = replace(alone, between=(1 << 30) * 8 // 15, ranks=16)
    outside = at.gpu.network * at.costs.network
    assert message_seconds(alone, at) == pytest.approx((1 << 30) / outside, rel=0.01)
    assert message_seconds(rows, at) < message_seconds(alone, at) / 5


@pytest.mark.parametrize("schedule", ["gpipe", "1f1b"])
def test_bubbles_are_those_of_the_paper(schedule):
    """Of p stages and m microbatches (m + p - 1) forwards and backwards take time."""
    job = replace(JOB, ranks=4, layout=ParallelLayout(pp=4), batch=8, microbatches=8)
    order = pipeline_order(replace(job, schedule=schedule, config=replace(CONFIG, num_layers=4)))
    durations = {rank: {"F": 1.0, "B": 2.0} for rank in range(4)}
    assert simulate(order, durations, 0.0) == (8 + 4 - 1) * 3.0


def test_interleaving_makes_bubbles_smaller():
    job = replace(JOB, ranks=2, layout=ParallelLayout(pp=2), batch=4, microbatches=4)
    job = replace(job, config=replace(CONFIG, num_layers=4), schedule="interleaved_1f1b")
    halves = {rank: {"F": 0.5, "B": 1.0} for rank in range(2)}
    assert simulate(pipeline_order(job), halves, 0.0) < (4 + 2 - 1) * 3.0


def test_a_schedule_whose_ranks_wait_for_each_other_is_named():
    order = {0: [(0, "B", 0), (0, "F", 0)], 1: [(1, "F", 0), (1, "B", 0)]}
    with pytest.raises(RuntimeError, match="stands still"):
        simulate(order, {rank: {"F": 1.0, "B": 1.0} for rank in order}, 0.0)


def test_groups_whose_ranks_come_in_another_order_are_named():
    """The bug of torchrec's issue 4149: two groups, and one rank that begins with the other one."""
    rows, columns = (0, 1), (0, 1, 2)
    first, second = Call(rows, "all_to_all"), Call(columns, "all_reduce")
    assert standstill({0: [first, second], 1: [first, second], 2: [second]}) == []
    (problem,) = standstill({0: [first, second], 1: [second, first], 2: [second]})
    assert "rank 0 waits in all_to_all for ranks [0, 1]" in problem
    assert "rank 1 waits in all_reduce for ranks [0, 1, 2]" in problem


def test_collectives_that_differ_in_a_group_are_named():
    Pair = namedtuple("Pair", "left right")
    both = Pair(Call((0, 1), "all_reduce of 8 bytes"), Call((0, 1), "all_reduce of 4 bytes"))
    (problem,) = standstill({0: [both.left], 1: [both.right]})
    assert "do not send the same" in problem


def test_a_check_names_the_memory_that_is_missing_and_settings_without_effect(monkeypatch):
    planned = plan(replace(JOB, config=replace(CONFIG, num_layers=2), schedule="gpipe"))
    small = replace(planned.machine, gpu=replace(planned.machine.gpu, memory=1 << 20))
    # Types and orders have tests of their own, and take seconds.
    monkeypatch.setattr("lamina.models.plan.preflight.wrong_types", lambda job: [])
    monkeypatch.setattr("lamina.models.plan.preflight.waits_of", lambda job: [])
    first, second = complaints(replace(planned, machine=small))
    assert "too little" in first
    assert "schedule='gpipe' does nothing" in second
    assert complaints(replace(planned, job=replace(planned.job, schedule="1f1b"))) == []


NET = GatedDeltaNet(key_heads=2, value_heads=4, key_width=16, value_width=16)
KINDS = {
    "delta nets beside experts": {
        "layers": (LayerSpec(attention=NET), LayerSpec()),
        "moe": MoEConfig(num_experts=8, top_k=2, ffn_size=32), "num_layers": 2,
    },
    "Mamba-1": {"layers": (LayerSpec(attention=Mamba1()), LayerSpec()), "num_layers": 2},
    "letters": {
        "layer_pattern": "M*M-", "num_layers": 4,
        "mamba": MambaConfig(state_size=16, head_dim=16, groups=2),
    },
    "latent attention": {
        "mla": LatentAttention(kv_lora_rank=32, q_lora_rank=32, qk_nope_head_dim=16,
                               qk_rope_head_dim=16, v_head_dim=16),
        "moe": MoEConfig(num_experts=8, top_k=2, ffn_size=32, first_dense=1), "num_layers": 2,
    },
}  # fmt: skip


@pytest.mark.parametrize("kind", list(KINDS))
@pytest.mark.parametrize(
    "axes", [{"dp_shard": 4}, {"tp": 2, "dp_shard": 2}, {"pp": 2, "dp_shard": 1}], ids=str
)
def test_layers_of_every_kind_are_checked(kind, axes, monkeypatch):
    pytest.importorskip("spmd_types")
    config = replace(CONFIG, **KINDS[kind])
    layout = ParallelLayout(**axes)
    ranks = layout.pp * layout.tp * layout.dp_shard
    job = replace(
        JOB, config=config, ranks=ranks, layout=layout, batch=4, microbatches=2 * layout.pp
    )
    checked: list[set[str]] = []
    original = parallel_types.check_types

    def check_types(model, *arguments, **named):
        checked.append({type(module).__name__ for module in model.modules()})
        return original(model, *arguments, **named)

    monkeypatch.setattr(parallel_types, "check_types", check_types)
    assert wrong_types(job) == []
    assert waits_of(job) == []
    whole = {type(module).__name__ for module in GPTModel(config).modules()}
    assert checked[0] >= whole - {"Linear"}  # cut over ranks, it is another class


def test_experts_axes_without_experts_do_nothing():
    job = replace(JOB, layout=ParallelLayout(ep=2))
    assert switched_off(job) == ["ep=2 does nothing: the model has no experts"]


LLAMA = {
    "model_type": "llama", "architectures": ["LlamaForCausalLM"], "vocab_size": 256,
    "hidden_size": 64, "num_hidden_layers": 4, "num_attention_heads": 4,
    "num_key_value_heads": 4, "intermediate_size": 128, "rms_norm_eps": 1e-5,
    "max_position_embeddings": 64, "tie_word_embeddings": False, "hidden_act": "silu",
}  # fmt: skip
PAGE = (Path(__file__).parents[3] / "docs/how-to/plan.md").read_text()
COMMANDS = [
    line.removeprefix("python -m lamina.models.plan ")
    for block in re.findall(r"```bash\n(.*?)```", PAGE, flags=re.DOTALL)
    for line in block.splitlines()
]
HERE = [words for words in COMMANDS if "--device" not in words]
"""tests/virtual_gpu/test_plan.py runs the other one."""


def test_the_page_has_a_command_for_each_option():
    words = {word for command in COMMANDS for word in command.split() if word.startswith("--")}
    known = {word for action in _parser()._actions for word in action.option_strings}
    assert known - {"-h", "--help", "--strategy"} == words


@pytest.fixture
def run_command(tmp_path, monkeypatch, capsys):
    """Run a command of the page where constants are measured already, and see what it promises."""
    monkeypatch.chdir(tmp_path)
    own = replace(Costs(), context=5 << 30)
    (tmp_path / "constants.json").write_text(json.dumps(asdict(own)))

    def run(words: str, gpu: str = "h100-80gb") -> None:
        assert main(words.split()) == 0
        shown = capsys.readouterr().out
        if "--search" in words:
            assert "the next ones lose" in shown
            assert len(re.findall(r"^ *\d+ .* s .* GiB \(.*--mesh ", shown, re.MULTILINE)) == 10
            deep = "llama3.1-405b" in words  # whose leading layouts take minutes to play
            assert deep or "(played)" in shown.partition("the next ones lose")[0]
        elif "--json" in words:
            numbers = json.loads(shown)
            assert numbers["fits"]
            assert numbers["step_seconds"] > 0
            memory = numbers["stages"][0]["memory_bytes"]
            assert sum(memory.values()) == numbers["allocated_bytes"]
            trace = json.loads((tmp_path / "step.json").read_text())["traceEvents"]
            assert {"X", "C"} <= {event["ph"] for event in trace}
            assert (tmp_path / "step.svg").read_text().count("<polygon") == 6
        else:
            context = own.context if "--calibrate" in words else Costs.context
            limit = (machine(gpu).gpu.memory - context) / 2**30
            assert f" of {limit:.2f} GiB of {gpu}: fits" in shown
            assert ("pp=1" in shown) == ("bubbles" in shown) == ("pp=2" in words)
            assert ("checked: it fits" in shown) == ("--check" in words)

    return run


@pytest.mark.parametrize("words", HERE)
def test_each_command_of_the_page_runs_for_a_small_model(run_command, tmp_path, words):
    (tmp_path / "config.json").write_text(json.dumps(LLAMA))
    small = {"--model": str(tmp_path), "--ranks": "8", "--sequence": "64", "--microbatches": "4"}
    for name, value in small.items():
        words = re.sub(rf"{name} \S+", f"{name} {value}", words)
    run_command(words.replace("tp=8", "tp=2"))


@pytest.mark.slow
@pytest.mark.parametrize("words", HERE)
def test_each_command_of_the_page_runs_as_it_is(run_command, words):
    run_command(words)


def test_plans_and_bounds_are_put_in_one_order_and_what_takes_too_long_is_not_played(monkeypatch):
    """All plans take ten times their bounds, so the order is that of the bounds."""
    module = importlib.import_module("lamina.models.plan.search")
    job = Job(config=replace(CONFIG, num_layers=4), ranks=8, batch=8, sequence=64)
    at = machine("h200")
    bounds = search(job, at, count=1000, budget=0.0).best
    assert not any(each.played for each in bounds)
    steps = {str(each.job): each.step for each in bounds}

    def play_slowly(job, at):
        fake = namedtuple("fake", "fits step_seconds allocated")
        return fake(True, 10 * steps[str(job)], 0)

    monkeypatch.setattr(module, "plan", play_slowly)
    best = search(job, at, budget=1e9).best
    assert len(best) == 10
    assert any(each.played for each in best)
    assert any(each.played is None for each in best)
    order = [steps[str(each.job)] for each in best]
    assert order == sorted(order)


def test_the_command_says_why_a_run_cannot_be(capsys):
    assert main("--model llama3-8b --ranks 6 --mesh tp=4,dp_shard=-1".split()) == 2
    assert "this cannot run" in capsys.readouterr().err
    with pytest.raises(ValueError, match="write tp=2,pp=2"):
        layout_of("tp:4")
