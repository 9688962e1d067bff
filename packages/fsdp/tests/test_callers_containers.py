"""What a block does to a container that it was given, its caller sees, as in plain PyTorch."""

import dataclasses
from collections import OrderedDict, deque, namedtuple

import pytest
import torch
from torch import nn
from torch.nn.utils.rnn import PackedSequence, pack_sequence

from lamina.fsdp import MixedPrecisionPolicy, fully_shard, shard_module
from lamina_testing.toys import Block, OddNet, inputs

from .module_parity import STRATEGIES, build, check, compare, one_process, sgd, train


@dataclasses.dataclass
class Notes:
    first: torch.Tensor
    last: torch.Tensor | None = None


Pair = namedtuple("Pair", "kept x")


class Writes(Block):
    """Takes x with a container that it writes to, and gives x only."""

    def forward(self, kept, x=None):
        if isinstance(kept, Pair):
            kept, x = kept
        if isinstance(kept, tuple):
            (kept,) = kept
        out = super().forward(x)
        if isinstance(kept, dict):
            kept["last"] = kept["first"] * out
            kept[f"new {len(kept)}"] = out
        elif isinstance(kept, Notes):
            kept.last = kept.first * out
        else:
            kept.append(kept[0] * out)
            kept.append(x)
        return out


def values_of(kept):
    if isinstance(kept, Notes):
        return [kept.first, kept.last]
    return list(kept.values() if isinstance(kept, dict) else kept)


KINDS = {
    "list": lambda x: [x],
    "deque": lambda x: deque([x]),
    "dict": lambda x: {"first": x},
    "ordered": lambda x: OrderedDict(first=x),
    "dataclass": Notes,
}
WAYS = {
    "as it is": lambda block, kept, x: block(kept, x),
    "by name": lambda block, kept, x: block(x=x, kept=kept),
    "in a tuple": lambda block, kept, x: block((kept,), x),
    "in a named tuple": lambda block, kept, x: block(Pair(kept, x)),
}


class Keeping(OddNet):
    """The loss is of what blocks wrote; the last block's own output is in no loss."""

    kind, way = "list", "as it is"

    def __init__(self):
        super().__init__()
        self.blocks = nn.ModuleList(Writes(17) for _ in range(3))

    def forward(self, x):
        x = self.enter(x)
        first, kept = x, KINDS[self.kind](x)
        for block in self.blocks:
            x = WAYS[self.way](block, kept, x)
        assert values_of(kept)[0] is first
        return sum(value.square().mean() for value in values_of(kept)) + 0 * self.leave(x).sum()


def of(kind, way):
    return type("Keeping", (Keeping,), {"kind": kind, "way": way})


def loss(model, rank, step):
    return model(inputs(model, 10 * step + rank))


@pytest.mark.ranks(2)
@STRATEGIES
@pytest.mark.parametrize("kind", KINDS)
def test_what_blocks_write_is_the_callers(kind, strategy, ranks):
    for way in WAYS:
        check(of(kind, way), loss, ranks, strategy, [Writes])


@pytest.mark.ranks(2)
def test_what_blocks_write_is_the_callers_under_shard_module(ranks):
    for kind in KINDS:
        make = of(kind, "as it is")
        model = build(make)
        for block in (*model.blocks, model):
            shard_module(block)
        train(model, sgd(model), loss, ranks.rank)
        compare(model, one_process(make, loss))


class Looks(nn.Module):
    """Says what it was given, writes in place where it is told to, and may raise."""

    def __init__(self):
        super().__init__()
        self.linear = nn.Linear(4, 4)
        self.given = None

    def forward(self, kept, then="return"):
        self.given = kept
        if then == "raise":
            raise ArithmeticError
        if then == "write":
            kept["x"] += 1
        return self.linear(kept["x"])


@pytest.mark.ranks(1)
@pytest.mark.parametrize("dtype", [None, torch.bfloat16])
def test_the_container_is_the_same_and_holds_the_same_afterwards(dtype, ranks):
    policy = MixedPrecisionPolicy(param_dtype=dtype)
    model = fully_shard(Looks(), mixed_precision_policy=policy)
    x, other = torch.ones(2, 4, requires_grad=True), object()
    for then in ("return", "raise"):
        kept = {"x": x, "other": other}
        try:
            assert model(kept, then).dtype == (dtype or torch.float32)
        except ArithmeticError:
            assert then == "raise"
        assert model.given is kept
        assert kept == {"x": x, "other": other}
        assert kept["x"] is x


@pytest.mark.ranks(1)
@pytest.mark.parametrize("dtype", [None, torch.bfloat16])
def test_what_is_written_in_place_stays(dtype, ranks):
    policy = MixedPrecisionPolicy(param_dtype=dtype)
    model = fully_shard(Looks(), mixed_precision_policy=policy)
    kept = {"x": torch.ones(2, 4)}
    model(kept, "write")
    assert kept["x"].tolist() == torch.full((2, 4), 2.0).tolist()


class Packed(nn.Module):
    def __init__(self):
        super().__init__()
        self.linear = nn.Linear(4, 4)

    def forward(self, sequence):
        assert isinstance(sequence, PackedSequence)
        return self.linear(sequence.data)


@pytest.mark.ranks(1)
def test_a_packed_sequence_is_cast_and_still_one(ranks):
    model = fully_shard(
        Packed(), mixed_precision_policy=MixedPrecisionPolicy(param_dtype=torch.bfloat16)
    )
    x = torch.ones(3, 4, requires_grad=True)
    with torch.device("cpu"):  # lengths are there on a GPU too
        packed = pack_sequence([x, x[:2]])
    assert model(packed).dtype == torch.bfloat16
