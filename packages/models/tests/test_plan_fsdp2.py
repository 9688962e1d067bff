"""Plans of torch's FSDP2: its messages, their order, and what is refused.

test_plan_truth.py has them beside steps on a CPU.
"""

from __future__ import annotations

from dataclasses import replace

import pytest
import torch
import torch.distributed as dist
import torch.nn.functional as F
from torch import nn
from torch._subclasses import FakeTensorMode
from torch.distributed.fsdp import fully_shard
from torch.distributed.tensor import Replicate, Shard
from torch.distributed.tensor.parallel import (
    ColwiseParallel,
    RowwiseParallel,
    loss_parallel,
    parallelize_module,
)

from lamina.mesh import ParallelLayout
from lamina.models import GPTModel, MoEConfig, TransformerConfig
from lamina.models.plan import Job, fsdp2, plan
from lamina.models.plan.command import main
from lamina.models.plan.job import play
from lamina.models.plan.record.torch_streams import Event, Stream, Streams

CONFIG = TransformerConfig(
    vocab_size=512, hidden_size=128, num_layers=3, num_heads=4, ffn_size=256, activation="swiglu"
)
JOB = Job(config=CONFIG, ranks=2, batch=2, sequence=128, precision="fp32", shard=fsdp2)
RING_OF_TWO = 4  # bytes of an fp32 element that a rank of two sends in a gather


def test_messages_of_a_step_are_those_of_its_units():
    """Each unit is gathered in forward and, but for the last one, in backward, and reduced once."""
    record = play(JOB).record
    parameters = sum(p.numel() for p in _model().parameters())
    last = _model().head.weight.numel() + _model().final_norm.weight.numel()
    sent = {op: sum(m.nbytes for m in record.messages if m.op == op) for op in _ops(record)}
    assert sent["all_gather_into"] == (2 * parameters - last) * RING_OF_TWO / 2
    assert sent["reduce_scatter_native"] == parameters * RING_OF_TWO / 2
    assert {message.axis for message in record.messages} == {"dp_shard"}


def test_a_gather_begins_before_the_unit_before_it_has_computed():
    """FSDP2 lets it wait for the copy of the gather before, and not for what was computed since."""
    gathers = [m for m in play(JOB).record.messages if m.op == "all_gather_into"]
    third = gathers[2]  # of the second block, while the first one computes
    assert third.after < third.issued - 10
    assert all(message.waited is not None for message in gathers)
    # Streams and events of the first step are known by the second one's numbers.
    assert all(0 <= message.after <= message.issued <= message.waited for message in gathers)
    assert min(message.after for message in gathers) < 10


def _model():
    with torch.device("meta"):
        return GPTModel(JOB.config)


def _ops(record):
    return {message.op for message in record.messages}


@pytest.mark.parametrize(
    "changes",
    [
        pytest.param({"layout": ParallelLayout(cp=2)}, id="cp"),
        pytest.param({"layout": ParallelLayout(dp_replicate=2)}, id="replicas"),
        pytest.param({"microbatches": 2}, id="microbatches"),
        pytest.param({"recompute": "offload"}, id="offload"),
        pytest.param({"config": replace(CONFIG, tie_embeddings=True)}, id="tied"),
        pytest.param(
            {"config": replace(CONFIG, moe=MoEConfig(num_experts=4, top_k=2))}, id="experts"
        ),
    ],
)
def test_one_process_plans_one_job_after_another(changes):
    """DTensor takes meshes of as many ranks for the same, whatever their groups are."""
    four = replace(JOB, ranks=4, layout=ParallelLayout())
    for job in (four, replace(four, **changes)):
        record = play(job).record
        assert sum(record.wire_bytes().values()) > 0
        assert record.peak()["gathered units"] > 0


def test_fake_tensors_of_a_compiler_are_not_counted():
    """Dynamo leaves some behind, whose sizes may be symbols."""
    before = play(JOB).record.peak()
    with FakeTensorMode():
        left = torch.empty(1 << 30)
    assert play(JOB).record.peak() == before
    del left


class Bigram(nn.Module):
    """Logits of the next token by the last one, and their loss."""

    def __init__(self, mesh):
        super().__init__()
        self.embedding, self.head = nn.Embedding(512, 128), nn.Linear(128, 512, bias=False)
        rows = RowwiseParallel(input_layouts=Replicate())
        columns = ColwiseParallel(output_layouts=Shard(-1), use_local_output=False)
        parallelize_module(self, mesh, {"embedding": rows, "head": columns})

    def forward(self, tokens, labels):
        logits = self.head(self.embedding(tokens)).flatten(0, 1).float()
        return F.cross_entropy(logits, labels.flatten())


def test_dtensors_have_what_a_rank_has_of_them():
    """Of logits that are cut over tp. DTensor plays operators on whole tensors for their shapes."""

    def shard(model, job, mesh):
        return fully_shard(model, mesh=mesh["dp_shard"])

    cut = ParallelLayout(tp=2)
    job = replace(JOB, ranks=4, layout=cut, shard=shard, make=lambda _, mesh: Bigram(mesh["tp"]))
    with loss_parallel():
        record = play(job).record
    logits = 2 * 128 * 512 // 2 * 4
    assert max(size for life in record.lives for _, size in life.sizes) == logits
    assert {message.axis for message in record.messages} == {"dp_shard", "tp"}


class Half(nn.Module):
    """One of two stages: a layer, and forwards of all microbatches before the backwards."""

    schedule = None

    def __init__(self, model, job, mesh):
        super().__init__()
        self.group = mesh["pp"].get_group()
        self.place, self.microbatches = self.group.rank(), job.microbatches
        self.layer = fully_shard(model[self.place], mesh=mesh["dp_shard"])
        self.hidden = job.batch // job.microbatches, job.sequence, job.config.hidden_size

    def step(self, tokens, labels):
        other, kept = dist.get_global_rank(self.group, 1 - self.place), []
        for _ in range(self.microbatches):
            hidden = torch.empty(self.hidden)
            if self.place:
                dist.recv(hidden, other, self.group)
            kept.append((hidden.requires_grad_(), self.layer(hidden)))
            if not self.place:
                dist.send(kept[-1][1].detach(), other, self.group)
        for hidden, result in kept:
            grad = torch.empty(self.hidden)
            if not self.place:
                dist.recv(grad, other, self.group)
            result.backward(grad)
            if self.place:
                dist.send(hidden.grad, other, self.group)


def test_another_programs_pipeline_is_planned():
    def make(config, mesh):
        return nn.ModuleList(nn.Linear(128, 128) for _ in range(2))

    job = replace(
        JOB, ranks=4, layout=ParallelLayout(pp=2), microbatches=2, schedule="gpipe", make=make,
        shard=Half, stage=(1, 2), config=replace(CONFIG, num_layers=3),
    )  # fmt: skip
    planned = plan(job, whole=True)
    hidden = 2 * 128 * 128 * 4  # of the whole batch, in fp32
    for stage in planned.stages:
        assert stage.sent["pp"] == hidden
        assert stage.parameters == 128 * 128 + 128, "whole, as of DTensors"
    sent = [m for m in planned.played[0].record.messages if m.op == "send"]
    assert [(m.nbytes, m.waited) for m in sent] == [(hidden / 2, None)] * 2
    passes = planned.stages[0].forward + planned.stages[0].backward
    assert planned.seconds["bubbles"] == pytest.approx(passes / 2, rel=0.2)  # of (2 - 1) / 2


def test_a_pipeline_of_another_program_has_a_step_of_its_own():
    job = replace(JOB, ranks=4, layout=ParallelLayout(pp=2), shard=lambda model, *_: model)
    with pytest.raises(TypeError, match="pp=2, and what shard returned \\(GPTModel\\) has no step"):
        play(job)


def test_offloaded_activations_are_not_on_the_device():
    kept, offloaded = (
        play(replace(JOB, sequence=1024, recompute=kind)).record.peak()
        for kind in ("none", "offload")
    )
    assert sum(offloaded.values()) < 0.8 * sum(kept.values())


def test_deep_models_follow_from_shallow_ones():
    deep = replace(JOB, config=replace(CONFIG, num_layers=10))
    planned, whole = plan(deep), play(deep).record
    assert planned.worst.extrapolated
    tensors = planned.allocated - planned.worst.memory["workspaces"]
    assert tensors == sum(whole.peak().values())
    assert planned.worst.sent == whole.wire_bytes()


def test_a_side_streams_message_waits_for_what_its_stream_comes_after():
    streams, at = Streams(), [5]
    streams.number_by(lambda: at[0])
    with streams.recorded():
        side = torch.cpu.Stream()
        side.wait_stream(torch.cpu.current_stream())
        at[0] = 9  # kernels go on
        with torch.cpu.stream(side):
            message = torch.cpu.current_stream().post("all_gather_into", 8, None)
        ready = side.record_event()
        assert (message.issued, message.after, message.waited) == (9, 5, None)
        other = torch.cpu.Stream()
        other.wait_event(ready)
        follows = other.post("all_reduce_native", 8, None)
        assert message in follows.behind
        at[0] = 12
        torch.cpu.current_stream().wait_event(ready)
    assert message.waited == 12
    assert follows.waited is None


def test_a_message_on_the_stream_of_kernels_is_waited_for_at_once():
    streams = Streams()
    streams.number_by(lambda: 3)
    message = streams.kernels.post("all_reduce_native", 8, None)
    assert (message.after, message.waited) == (3, 3)


def test_torchs_own_streams_are_back_afterwards():
    names = ("Stream", "Event", "current_stream", "stream")
    before = [getattr(torch.cpu, name) for name in names]
    with Streams().recorded():
        made = torch.cpu.Stream(), torch.cpu.Event()
    assert isinstance(made[0], Stream)
    assert isinstance(made[1], Event)
    with pytest.raises(KeyError), Streams().recorded():
        raise KeyError
    assert before == [getattr(torch.cpu, name) for name in names]


@pytest.mark.parametrize(
    ("changes", "words"),
    [
        ({"strategy": 1}, "strategy=1 of torch's FSDP2: it shards weights"),
        ({"settings": {"slots": 2}}, "settings \\['slots'\\] are those of lamina.fsdp"),
        ({"ranks": 4, "layout": ParallelLayout(tp=2)}, "'tp': 2.*planned over data-parallel"),
        ({"ranks": 4, "layout": ParallelLayout(cp=2, dp_replicate=2)}, "cp with dp_replicate"),
    ],
)
def test_what_fsdp2_cannot_do_is_refused(changes, words):
    with pytest.raises(ValueError, match=words):
        play(replace(JOB, **changes))


def test_the_command_plans_it_and_does_not_search_with_it(capsys, tmp_path):
    words = "--engine fsdp2 --model llama3.2-1b --ranks 2 --sequence 512".split()
    assert main(words) == 0
    assert "gathered units" in capsys.readouterr().out
    with pytest.raises(SystemExit):
        main([*words, "--search"])
    assert "--engine lamina alone" in capsys.readouterr().err
