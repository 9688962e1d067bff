"""Where two layouts part: the module, the tensor and the element, without a tolerance."""

from __future__ import annotations

import math
from dataclasses import replace

import pytest
import torch
import torch.distributed as dist

from lamina.mesh import ParallelLayout, Role
from lamina.models import GPTModel, TransformerConfig
from lamina.models.bisect import Step, first_difference, load_traces, record_step
from lamina.models.bisection.pieces import (
    ALONE,
    MismatchError,
    Share,
    parameter_piece,
    token_piece,
)

CONFIG = TransformerConfig(
    vocab_size=40, hidden_size=16, num_layers=2, num_heads=4, ffn_size=24,
    max_sequence_length=16, qk_norm=True, init_std=0.2,
)  # fmt: skip


def build(mesh):
    return GPTModel(CONFIG, mesh, seed=1)


class Nearby(torch.autograd.Function):
    """Changes the last bit of an element, in forward or in backward."""

    @staticmethod
    def forward(ctx, x, at, backward):
        ctx.at, ctx.backward = at, backward
        return x.clone() if backward else changed(x, at)

    @staticmethod
    def backward(ctx, grad):
        return changed(grad, ctx.at) if ctx.backward else grad, None, None


def changed(x, at):
    x = x.clone()
    x[at] = x[at].nextafter(torch.tensor(math.inf))
    return x


# The last bit of an element that rank 1 computes in its second microbatch.
FAULTS = {
    "blocks.1.mlp.activation": (False, "output", "sequence 3, token 5, element [7]"),
    "blocks.0.attention.core": (True, "gradient of input", "sequence 3, token 5, element [2, 1]"),
}


@pytest.mark.ranks(2, backend="gloo")  # traces are of a CPU
@pytest.mark.parametrize("strategy", [1, 3])
@pytest.mark.parametrize("name", [None, *FAULTS])
def test_a_bit_that_a_rank_computes_wrong_is_named(name, strategy, ranks, tmp_path):
    step = Step.parse(f"dp_shard 2, strategy {strategy}", Step(length=16))

    def with_fault(mesh):
        model = build(mesh)
        if name is None or ranks.rank == 0:
            return model
        module, calls = model.get_submodule(name), []
        forward, backward = module.forward, FAULTS[name][0]

        def wrong(*inputs):
            calls.append(len(calls))
            at = (0, 5, 2, 1) if backward else (0, 5, 7)
            if len(calls) != 2:
                return forward(*inputs)
            if backward:
                return forward(Nearby.apply(inputs[0], at, True), *inputs[1:])
            return Nearby.apply(forward(*inputs), at, False)

        module.forward = wrong
        return model

    record_step(with_fault, step, mesh=step.layout.build("cpu"), rank=ranks.rank).save(tmp_path)
    dist.barrier()
    if ranks.rank == 0:
        reference = record_step(build, Step(length=16))
        difference = first_difference(reference, [reference], load_traces(tmp_path))
        if name is None:
            assert difference is None
            return
        assert (difference.module, difference.key.what) == (name, FAULTS[name][1])
        assert FAULTS[name][2] in str(difference)
        assert "on rank 1 (dp 1), microbatch 1" in str(difference)
        assert difference.count == 1


@pytest.mark.ranks(2, backend="gloo")  # traces are of a CPU
def test_a_gradient_that_is_not_summed_is_named_by_its_module(ranks, tmp_path):
    step = Step.parse("dp_shard 2, strategy 1", Step(length=16))

    def with_fault(mesh):
        model = build(mesh)
        weight = model.blocks[1].mlp_norm.weight
        if ranks.rank == 1:
            weight.register_hook(torch.zeros_like)
        return model

    record_step(with_fault, step, mesh=step.layout.build("cpu"), rank=ranks.rank).save(tmp_path)
    dist.barrier()
    if ranks.rank == 0:
        reference = record_step(build, Step(length=16))
        difference = first_difference(reference, [reference], load_traces(tmp_path))
        assert difference.module == "blocks.1.mlp_norm"
        assert difference.key.what == "gradient of parameter"


@pytest.mark.ranks(4, backend="gloo")  # traces are of a CPU
@pytest.mark.parametrize("loss", ["per_token", "mean"])
@pytest.mark.parametrize(
    "layout", ["dp_shard 2, pp 2", "dp_replicate 2, dp_shard 2", "pp 2, dp_shard 2, rows 2"]
)
def test_layouts_that_have_the_same_bits_do_not_part(layout, loss, ranks, tmp_path):
    common = Step(length=16, loss=loss, sequences=8, ignored=loss == "per_token")
    step = Step.parse(layout, common)
    record_step(build, step, mesh=step.layout.build("cpu"), rank=ranks.rank).save(tmp_path)
    dist.barrier()
    if ranks.rank == 0:
        reference = record_step(build, replace(common, rows=step.rows))
        assert first_difference(reference, [reference], load_traces(tmp_path)) is None


def share(**axes: tuple[int, int]) -> Share:
    names = ("dp", "cp", "tp", "pp", "ep", "expert_tp")
    return Share(8, 8, 2, {name: axes.get(name, ALONE) for name in names})


def test_pieces_of_ranks_are_the_whole_once():
    whole = torch.arange(8 * 8 * 12).view(8, 8, 12)
    for size in ({}, {"tp": 2}, {"cp": 2}, {"dp": 2}, {"dp": 2, "cp": 2, "tp": 2}):
        seen = torch.zeros(whole.numel(), dtype=torch.int64)
        for dp in range(size.get("dp", 1)):
            for cp in range(size.get("cp", 1)):
                for tp in range(size.get("tp", 1)):
                    rank = {"dp": dp, "cp": cp, "tp": tp}
                    mine = share(**{axis: (rank[axis], n) for axis, n in size.items()})
                    shape = (2, 8 // size.get("cp", 1), 12 // size.get("tp", 1))
                    for microbatch in range(mine.microbatches):
                        index = token_piece(shape, (12,), mine, microbatch, fused=(8, 4))
                        seen[index.flatten()] += 1
        assert seen.eq(1).all()


def test_the_second_rank_of_a_zigzag_has_the_middle_of_a_sequence_and_its_part_of_fused_widths():
    mine = share(cp=(1, 2), tp=(1, 2), dp=(0, 2))
    index = token_piece((2, 4, 6), (12,), mine, 1, fused=(8, 4))
    # Microbatch 1 of data-parallel rank 0 has sequences 4 and 5; columns 4 to 7, then 10 and 11.
    tokens = [4 * 8 + 2, 4 * 8 + 3, 4 * 8 + 4, 4 * 8 + 5]
    columns = [4, 5, 6, 7, 10, 11]
    assert index[0].tolist() == [[token * 12 + column for column in columns] for token in tokens]
    # Under sequence parallelism it has the second half of these tokens of both sequences.
    assert token_piece((4, 12), (12,), mine, 1)[:, 0].div(12).tolist() == [
        5 * 8 + at for at in (2, 3, 4, 5)
    ]


def test_what_is_no_piece_is_said():
    with pytest.raises(MismatchError, match=r"shape \(2, 8, 5\) on rank 0 \(tp 1\)"):
        token_piece((2, 8, 5), (12,), share(tp=(1, 2)), 0)
    with pytest.raises(MismatchError, match=r"should be the piece \(4, 3\) of \(4, 6\)"):
        parameter_piece((4, 6), (4, 6), Role(tp_shard_dim=1), share(tp=(0, 2)))
    with pytest.raises(ValueError, match="'width 3' of the layout 'tp 2, width 3' is no size"):
        Step.parse("tp 2, width 3", Step())


def test_the_pieces_of_experts_are_those_of_their_axes():
    mine = share(ep=(1, 2), expert_tp=(1, 2), tp=(0, 4))
    index = parameter_piece((2, 3, 2), (4, 3, 4), Role(expert=True, tp_shard_dim=2), mine)
    assert index[0].tolist() == [[26, 27], [30, 31], [34, 35]]


def test_a_layout_is_read_from_words():
    step = Step.parse("tp 2, dp_shard=4, strategy 1, rows 2", Step(length=32))
    assert step.layout == ParallelLayout(tp=2, dp_shard=4)
    assert (step.strategy, step.rows, step.length, step.world) == (1, 2, 32, 8)
