"""Twenty planted faults of parallelism, each named by its module, with no tolerance.

The first are the eleven findings of Megatron-LM issue 7452, where Lamina does the same under
`invariant=True`; nine are ours.
"""

from __future__ import annotations

from contextlib import nullcontext
from dataclasses import dataclass, replace

import pytest
import torch
import torch.distributed as dist
from planted import FINDINGS, Bug, in_this_process

from lamina.models import GPTModel, MambaConfig, MoEConfig, TransformerConfig
from lamina.models.bisect import Step, first_difference, load_traces, record_step
from lamina.models.decoder.splice import Splice

LENGTH = 64
DENSE = TransformerConfig(
    vocab_size=44, vocab_multiple=16, hidden_size=16, num_layers=2, num_heads=4, ffn_size=32,
    max_sequence_length=LENGTH, qk_norm=True, init_std=0.2, invariant=True,
)  # fmt: skip
MODELS = {
    "dense": DENSE,
    "sp": replace(DENSE, sequence_parallel=True),
    "learned": replace(DENSE, positions="learned", sequence_parallel=True),
    "experts": replace(
        DENSE, sequence_parallel=True,
        moe=MoEConfig(num_experts=8, top_k=2, ffn_size=8, sequence_loss=0.1),
    ),
    "mamba": replace(
        DENSE, layer_pattern="M*", qk_norm=False, num_layers=2,
        mamba=MambaConfig(head_dim=4, state_size=8, groups=4, chunk_size=32),
    ),
}  # fmt: skip


@dataclass(frozen=True)
class Case:
    """A fault, the layout on which it does harm, and the module that is to be named."""

    bug: Bug
    model: str
    layout: str
    module: str
    what: str
    given: str = ""
    loss: str = "per_token"


def planted(file, line, becomes, what="ours"):
    return Bug(what, file, line, becomes, "")


TP_DP = "tp 2, dp_shard 2, strategy 1"
SUMS = "models/invariance/vocabulary.py"
CASES = {
    "1: exponentials are summed over this rank's vocabulary": Case(
        planted(
            SUMS, "top, head.sums(logits.exp_())",
            "top, __import__('lamina.models.invariance.products', fromlist=['x'])"
            ".row_sum(logits.exp_())",
        ),
        "dense", "tp 2", "head", "output",
    ),
    "2: the loss takes labels as if it had all logits": Case(
        planted(
            SUMS, "column, here = _columns(labels[rows], head.first, logits.shape[1])",
            "column, here = _columns(labels[rows], 0, logits.shape[1])",
        ),
        "dense", "tp 2", "head", "output",
    ),
    "3": Case(FINDINGS[2], "dense", "dp_shard 2", "", "gradient of parameter"),
    "4": Case(FINDINGS[3], "sp", TP_DP, "blocks.0.attention.qkv", "gradient of parameter"),
    "5": Case(FINDINGS[4], "experts", TP_DP, "", "input", "padding"),
    "6": Case(FINDINGS[5], "sp", TP_DP, "blocks.0.attention.qkv", "output"),
    "6 and 7: positions": Case(FINDINGS[6], "learned", TP_DP, "", "input"),
    "7: images": Case(FINDINGS[7], "sp", TP_DP, "", "input", "splice"),
    "8": Case(FINDINGS[8], "mamba", "tp 2", "blocks.0.mixer.scan", "parameter before"),
    "9": Case(FINDINGS[9], "dense", "cp 2", "", "gradient of output", loss="mean"),
    "10": Case(FINDINGS[10], "experts", TP_DP, "blocks.1.mlp.router", "gradient of input"),
    "11": Case(FINDINGS[11], "dense", "tp 2", "blocks.0.attention.query_norm",
               "gradient of parameter"),
    "a column-parallel layer does not sum gradients": Case(
        planted("models/layers/linear.py", "if by_rows and cut.group is not None:", "if False:"),
        "dense", "tp 2", "blocks.1.mlp.up", "gradient of input",
    ),
    "a row-parallel layer sums nothing": Case(
        planted("models/layers/linear.py", 'if cut.side == "input":', "if False:"),
        "dense", "tp 2", "blocks.0.attention.output", "output",
    ),
    "gradients of norms are not summed over tp": Case(
        planted("ddp/finalize/role_sums.py", "_all_reduce(sums, axis, None)", "pass"),
        "sp", "tp 2", "blocks.0.attention_norm", "gradient of parameter",
    ),
    "positions of a cut sequence are those of its start": Case(
        planted("models/attention/context.py",
                "rotary_tables(config, cut_sequence(positions, cp, dim=-1))",
                "rotary_tables(config, positions[..., : positions.shape[-1] // "
                "(1 if cp is None else 2)])"),
        "dense", "cp 2", "", "input",
    ),
    "the ranks of ep begin with the same experts": Case(
        planted("models/moe/experts.py",
                "self.first = 0 if self.axes.ep is None else self.axes.ep.rank * local_experts",
                "self.first = 0"),
        "experts", "dp_shard 2, ep 2", "blocks.0.mlp.experts", "parameter before",
    ),
    "pieces of experts are added without their last rank's": Case(
        planted("models/moe/dispatcher.py",
                "return torch.cat([fold(torch.unflatten(part, 0, (times, -1))) for part in parts])",
                "return torch.cat([torch.unflatten(part, 0, (times, -1))[0] for part in parts])"),
        "experts", "dp_shard 2, expert_tp 2", "blocks.0.mlp", "output",
    ),
    "B and C of Mamba are cut as if they were x": Case(
        planted("models/mamba/convolution.py",
                "fill(self.weight, draw, self.init_seed, self.axis, blocks=self.blocks)",
                "fill(self.weight, draw, self.init_seed, self.axis)"),
        "mamba", "tp 2", "blocks.0.mixer.conv", "parameter before",
    ),
    "a stage takes the labels of the microbatch before": Case(
        planted("models/pipelining/runner.py", "labels.tensor_split(number),",
                "labels.roll(1, 0).tensor_split(number),"),
        "dense", "pp 2", "", "input",
    ),
    "the last stage weighs its loss by the pipeline's ranks": Case(
        planted("models/pipelining/module.py", "return total * batch.factor",
                "return total * batch.factor * 2"),
        "dense", "pp 2", "", "gradient of output",
    ),
}  # fmt: skip
QUICK = ("1: exponentials are summed over this rank's vocabulary", "9", "11")


def build(case):
    def make(mesh):
        tp = mesh is not None and mesh.layout.tp > 1
        config = MODELS[case.model]
        config = replace(config, sequence_parallel=config.sequence_parallel and tp)
        return GPTModel(config, mesh, seed=1), inputs

    def inputs(rows):
        if case.given == "padding":
            padding = torch.zeros(4, LENGTH, dtype=torch.bool)
            for row in range(4):
                padding[row, LENGTH - 8 * row - 3 :] = True
            return {"padding_mask": padding[rows]}
        if case.given == "splice":
            generator = torch.Generator().manual_seed(5)
            index = torch.full((4, LENGTH), -1)
            vectors = torch.randn(3, 16, generator=generator)
            index[:, 4:7] = torch.arange(3)
            index[2, 4:7], index[2, 40:43] = -1, torch.arange(3)
            return {"splice": Splice(vectors, index[rows])}
        return {}

    return make


def names_its_module(case, ranks, folder):
    step = Step.parse(case.layout, Step(loss=case.loss))
    for sound in (True, False):
        with nullcontext() if sound else in_this_process(case.bug):
            mesh = step.layout.build("cpu")
            trace = record_step(build(case), step, mesh=mesh, rank=ranks.rank)
        (folder / str(sound)).mkdir(exist_ok=True)
        trace.save(folder / str(sound))
    dist.barrier()
    if ranks.rank:
        return
    reference = record_step(build(case), Step(loss=case.loss))
    sound, faulty = (load_traces(folder / str(each)) for each in (True, False))
    assert (between := first_difference(reference, [reference], sound)) is None, str(between)
    difference = first_difference(reference, [reference], faulty)
    assert difference is not None
    assert (difference.module, difference.key.what) == (case.module, case.what), str(difference)


TWO = [name for name, case in CASES.items() if case.layout != TP_DP]
FOUR = [name for name, case in CASES.items() if case.layout == TP_DP]


def test_there_are_twenty_faults_and_the_eleven_findings_are_among_them():
    numbers = {name.partition(":")[0] for name in CASES if name[0].isdigit()}
    assert numbers - {"6 and 7"} == {str(number) for number in range(1, 12)}
    assert len(CASES) - ("6 and 7: positions" in CASES) == 20


@pytest.mark.ranks(2, backend="gloo")  # traces are of a CPU
@pytest.mark.parametrize("name", [name for name in TWO if name in QUICK])
def test_a_fault_is_named_by_its_module(name, ranks, tmp_path):
    names_its_module(CASES[name], ranks, tmp_path)


@pytest.mark.slow
@pytest.mark.ranks(2, backend="gloo")  # traces are of a CPU
@pytest.mark.parametrize("name", [name for name in TWO if name not in QUICK])
def test_every_other_fault_is_named(name, ranks, tmp_path):
    names_its_module(CASES[name], ranks, tmp_path)


@pytest.mark.slow
@pytest.mark.ranks(4, backend="gloo")  # traces are of a CPU
@pytest.mark.parametrize("name", FOUR)
def test_a_fault_on_four_ranks_is_named(name, ranks, tmp_path):
    names_its_module(CASES[name], ranks, tmp_path)
