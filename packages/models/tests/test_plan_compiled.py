"""Plans of compiled blocks: what forward keeps, what has no memory, and what a kernel moves.

tests/virtual_gpu/test_plan.py has them beside what Inductor allocates on a GPU.
"""

from __future__ import annotations

from dataclasses import replace
from functools import partial

import pytest
import torch
import torch.nn.functional as F
from torch import nn

from lamina.mesh import ParallelLayout
from lamina.models import GPTModel, MoEConfig, TransformerConfig
from lamina.models.plan import Job, StepRecorder, compiled, fsdp2, plan
from lamina.models.plan.job import play
from lamina.models.plan.record.compiled import GraphRecorder
from lamina.models.plan.record.device_forms import device_forms

CONFIG = TransformerConfig(
    vocab_size=512, hidden_size=128, num_layers=3, num_heads=4, ffn_size=512, activation="swiglu"
)
JOB = Job(config=CONFIG, ranks=2, batch=2, sequence=256)
ROWS, COLUMNS = 64, 1024
MATRIX = 4 * ROWS * COLUMNS  # bytes


@pytest.fixture(autouse=True)
def _graphs_end_here():
    yield
    torch.compiler.reset()


def recorded(function, *tensors, recorder_of=GraphRecorder):
    """The record of the function's second call on meta tensors, with its backward if it has one."""
    for _ in range(2):
        with recorder_of() as recorder:
            result = function(*tensors)
            if result.requires_grad:
                result.backward()
            del result
    return recorder.record


def sizes(record, category=None):
    """Bytes of what a step made, in the order in which it made them."""
    return [
        life.sizes[0][1]
        for life in record.lives
        if life.born and category in (None, life.category) and life.sizes[0][1] >= MATRIX
    ]


def matrix(**options):
    return torch.empty(ROWS, COLUMNS, device="meta", **options)


def test_operators_that_are_fused_are_one_kernel_and_leave_no_tensors():
    eager = recorded(lambda x: (x.exp() + 1).sin(), matrix())
    record = recorded(compiled(lambda x: (x.exp() + 1).sin()), matrix())
    assert sizes(eager) == [MATRIX] * 3
    assert sizes(record) == [MATRIX]
    assert [operation.nbytes for operation in record.operations] == [2 * MATRIX]
    assert record.fused
    assert not eager.fused


def test_what_others_have_compiled_is_recorded_as_if_it_were_not():
    """Inductor's kernels could not be seen."""
    function = torch.compile(lambda x: (x.exp() + 1).sin())
    record = recorded(
        function, torch.empty(ROWS, COLUMNS), recorder_of=partial(StepRecorder, "cpu")
    )
    assert sizes(record) == [MATRIX] * 3
    assert [operation.name for operation in record.operations] == ["exp", "add", "sin"]


def test_what_a_product_reads_is_made_also_through_a_view():
    def function(x, weight):
        return x.exp().view(2 * ROWS, COLUMNS // 2) @ weight

    weight = torch.empty(COLUMNS // 2, COLUMNS // 2, device="meta")
    record = recorded(compiled(function), matrix(), weight)
    assert sizes(record) == [MATRIX, MATRIX]  # the exponentials, and the product
    assert [operation.flops > 0 for operation in record.operations] == [False, True]


def test_kernels_beside_each_other_read_a_tensor_once():
    """A norm reads its row to measure it, and again to scale it, in one kernel."""
    record = recorded(compiled(lambda x: x * x.square().mean(-1, keepdim=True).rsqrt()), matrix())
    assert sizes(record) == [MATRIX]
    assert sum(operation.nbytes for operation in record.operations) < 2.1 * MATRIX


def test_forward_keeps_what_torchs_partition_keeps():
    """Of SwiGLU both factors, and neither the activation nor the product."""

    def function(x, gate, up, down):
        return (F.silu(x @ gate) * (x @ up)) @ down

    square = torch.empty(COLUMNS, COLUMNS, device="meta", requires_grad=True)
    weights = [square, square.clone().detach().requires_grad_(), square.clone().detach()]
    arguments = matrix(), *weights
    eager = recorded(lambda *args: function(*args).sum(), *arguments)
    called = compiled(function)
    record = recorded(lambda *args: called(*args).sum(), *arguments)
    assert sizes(eager, "activations") == [MATRIX] * 3
    assert sizes(record, "activations") == [MATRIX] * 2


def test_a_compiled_loss_has_its_gradient_alone():
    """No logarithms, and nothing in fp32."""

    def loss(logits, labels):
        return F.cross_entropy(logits.float(), labels)

    logits, labels = (
        matrix(dtype=torch.bfloat16, requires_grad=True),
        torch.empty(ROWS, dtype=torch.int64, device="meta"),
    )
    assert max(recorded(loss, logits, labels).peak().values()) >= 2 * MATRIX
    peak = recorded(compiled(loss), logits, labels).peak()
    assert sum(peak.values()) < 1.1 * (2 * MATRIX / 2)  # the logits, and their gradient, in bf16


class Attends(nn.Module):
    """A block whose attention is not of Lamina."""

    def __init__(self):
        super().__init__()
        self.qkv = nn.Linear(128, 3 * 128, bias=False, device="meta", dtype=torch.bfloat16)

    def forward(self, x):
        query, key, value = self.qkv(x).view(*x.shape[:2], 3, 4, 32).transpose(1, 3).unbind(2)
        return F.scaled_dot_product_attention(query, key, value, is_causal=True)


@pytest.mark.parametrize("device", ["cuda", "cpu"])
def test_a_graph_has_the_attention_of_the_device_that_is_planned(device):
    x = torch.empty(2, 256, 128, device="meta", dtype=torch.bfloat16, requires_grad=True)
    block = compiled(Attends())
    with device_forms(device):
        record = recorded(lambda x: block(x).sum(), x)
    kernel = {"cuda": "flash_attention", "cpu": "flash_attention_for_cpu"}[device]
    names = [operation.name for operation in record.operations if "attention" in operation.name]
    assert names == [f"_scaled_dot_product_{kernel}", f"_scaled_dot_product_{kernel}_backward"]


KINDS = {
    "plain": {},
    "selective": {"recompute": "selective"},
    "full": {"recompute": "full"},
    "cp": {"layout": ParallelLayout(cp=2)},
    "experts": {"config": replace(CONFIG, moe=MoEConfig(num_experts=4, top_k=2))},
}
ENGINES = {"lamina": None, "fsdp2": fsdp2}
# The default tier takes one engine for each kind in turn, and both where nothing else is special.
OF_THE_SLOW_TIER = {("selective", "lamina"), ("full", "fsdp2"), ("cp", "lamina"),
                    ("experts", "fsdp2")}  # fmt: skip


@pytest.mark.parametrize(
    ("changes", "shard"),
    [
        pytest.param(changes, shard, id=f"{kind}-{engine}",
                     marks=[pytest.mark.slow] if (kind, engine) in OF_THE_SLOW_TIER else [])
        for kind, changes in KINDS.items()
        for engine, shard in ENGINES.items()
    ],
)  # fmt: skip
def test_compiled_blocks_multiply_no_more_and_hold_no_more(changes, shard):
    job = replace(JOB, **{"layout": ParallelLayout(), "shard": shard, **changes})
    records = [play(replace(job, compiled=kind)).record for kind in (False, True)]
    eager, record = records
    flops = [sum(operation.flops for operation in each.operations) for each in records]
    # Of a forward that is computed again, the partition leaves out what no gradient needs.
    least = 0.9 if changes.get("recompute") == "full" else 1.0
    assert least * flops[0] <= flops[1] <= flops[0]
    assert sum(record.peak().values()) <= 1.01 * sum(eager.peak().values())
    assert record.wire_bytes() == eager.wire_bytes()
    moved = [sum(operation.nbytes for operation in each.operations) for each in records]
    assert moved[1] < moved[0]


@pytest.mark.parametrize(
    "shard",
    [pytest.param(None, id="lamina"), pytest.param(fsdp2, id="fsdp2", marks=pytest.mark.slow)],
)
def test_one_process_plans_compiled_jobs_one_after_another(shard):
    """Graphs of one job, and what a compiler left, are no tensors of the next."""
    deep = replace(JOB, compiled=True, shard=shard, config=replace(CONFIG, num_layers=10))
    first = plan(deep)
    assert first.worst.extrapolated
    play(replace(JOB, compiled=True, shard=shard, sequence=512))
    again, whole = plan(deep), play(deep).record
    assert again.allocated == first.allocated
    tensors = again.allocated - again.worst.memory["workspaces"]
    assert tensors == pytest.approx(sum(whole.peak().values()), rel=2e-3)


class Plain(nn.Module):
    """A model of other blocks than Lamina's."""

    def __init__(self, config, mesh, compiles=True):
        super().__init__()
        self.embedding = nn.Embedding(config.vocab_size, config.hidden_size)
        wide = 4 * config.hidden_size
        block = nn.Sequential(
            nn.Linear(config.hidden_size, wide), nn.GELU(), nn.Linear(wide, config.hidden_size)
        )
        self.block = compiled(block) if compiles else block

    def forward(self, tokens, labels):
        return self.block(self.embedding(tokens)).square().mean()


def test_a_model_of_ones_own_compiles_blocks_that_are_not_laminas():
    own = replace(JOB, compiled=True, make=Plain)
    eager = replace(JOB, compiled=True, make=partial(Plain, compiles=False))
    records = [play(job).record for job in (own, eager)]
    assert [record.fused for record in records] == [True, False]
    peaks = [sum(record.peak().values()) for record in records]
    assert peaks[0] < peaks[1]


def test_a_block_is_compiled_once_whoever_does_it():
    def make(config, mesh):
        model = GPTModel(config, mesh)
        for number, block in enumerate(model.blocks):
            model.blocks[number] = compiled(block)
        return model

    peaks = [
        play(replace(JOB, compiled=True, make=function)).record.peak()
        for function in (make, GPTModel, None)
    ]
    assert peaks[0] == peaks[1] == peaks[2]


def test_what_torch_leaves_uncompiled_is_not_planned_as_fused():
    """Recomputed blocks of experts: routers break the graph, and torch compiles none of it."""
    config = replace(CONFIG, moe=MoEConfig(num_experts=4, top_k=2))
    job = replace(JOB, config=config, recompute="full")
    eager, blocks = (plan(replace(job, compiled=kind)) for kind in (False, True))
    assert blocks.allocated == eager.allocated
    assert blocks.seconds["other kernels"] == pytest.approx(
        eager.seconds["other kernels"], rel=0.01
    )
