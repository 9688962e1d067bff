"""The catalogue of parts: modules from [rows, 8] to [rows, 8], each awkward in one way.

A case's program has the source of the parts that it is made of. So a part needs nothing but torch
and the parts that it names. `PARTS` is the catalogue.
"""

from __future__ import annotations

import collections
import dataclasses

import torch
import torch.nn.functional as F
from torch import nn
from torch.nn.utils import parametrizations
from torch.utils.checkpoint import checkpoint


class Affine(nn.Module):
    def __init__(self):
        super().__init__()
        self.linear = nn.Linear(8, 8)

    def forward(self, x):
        return self.linear(x)


class NoBias(nn.Module):
    def __init__(self):
        super().__init__()
        self.linear = nn.Linear(8, 8, bias=False)

    def forward(self, x):
        return torch.tanh(self.linear(x))


class Mlp(nn.Module):
    def __init__(self):
        super().__init__()
        self.norm = nn.LayerNorm(8)
        self.up = nn.Linear(8, 13)
        self.down = nn.Linear(13, 8)

    def forward(self, x):
        return self.down(F.gelu(self.up(self.norm(x))))


class Conv1(nn.Module):
    def __init__(self):
        super().__init__()
        self.conv = nn.Conv1d(1, 3, 3, padding=1)

    def forward(self, x):
        return self.conv(x[:, None]).sum(1)


class Conv2(nn.Module):
    def __init__(self):
        super().__init__()
        self.conv = nn.Conv2d(1, 2, (1, 3), padding=(0, 1), bias=False)
        self.norm = nn.GroupNorm(1, 2)

    def forward(self, x):
        return self.norm(self.conv(x.view(-1, 1, 2, 4))).mean(1).reshape(-1, 8)


class ChannelsLast(nn.Module):
    def __init__(self):
        super().__init__()
        self.conv = nn.Conv2d(2, 2, 1).to(memory_format=torch.channels_last)

    def forward(self, x):
        return self.conv(x.view(-1, 2, 2, 2)).reshape(-1, 8)


class Transposed(nn.Module):
    def __init__(self):
        super().__init__()
        self.conv = nn.ConvTranspose1d(1, 2, 3, padding=1)

    def forward(self, x):
        return self.conv(x[:, None]).sum(1)


class Batch(nn.Module):
    def __init__(self):
        super().__init__()
        self.norm = nn.BatchNorm1d(8)
        self.linear = nn.Linear(8, 8)

    def forward(self, x):
        return self.linear(self.norm(x))


class Norms(nn.Module):
    def __init__(self):
        super().__init__()
        self.rms = nn.RMSNorm(8)
        self.group = nn.GroupNorm(2, 8)
        self.instance = nn.InstanceNorm1d(1, affine=True)

    def forward(self, x):
        return self.instance(self.group(self.rms(x))[:, None])[:, 0]


class Gru(nn.Module):
    def __init__(self):
        super().__init__()
        self.rnn = nn.GRU(4, 4, batch_first=True)

    def forward(self, x):
        return self.rnn(x.view(-1, 2, 4))[0].reshape(-1, 8)


class Lstm(nn.Module):
    def __init__(self):
        super().__init__()
        self.rnn = nn.LSTM(2, 1, num_layers=2, bidirectional=True, batch_first=True)

    def forward(self, x):
        return self.rnn(x.view(-1, 4, 2))[0].reshape(-1, 8)


class Cell(nn.Module):
    def __init__(self):
        super().__init__()
        self.cell = nn.GRUCell(4, 4)

    def forward(self, x):
        states = [x[:, :4]]
        for _ in range(2):
            states.append(self.cell(x[:, 4:], states[-1]))
        return torch.cat(states[1:], 1)


class Embedded(nn.Module):
    def __init__(self):
        super().__init__()
        self.table = nn.Embedding(7, 8, padding_idx=0)

    def forward(self, x):
        return self.table((x.detach().abs().sum(-1) * 3).long() % 7)


class Bag(nn.Module):
    def __init__(self):
        super().__init__()
        self.table = nn.EmbeddingBag(5, 8, mode="mean")

    def forward(self, x):
        return self.table((x.detach().abs() * 3).long() % 5) * x


class Attention(nn.Module):
    def __init__(self):
        super().__init__()
        self.attention = nn.MultiheadAttention(4, 2, bias=False, batch_first=True)

    def forward(self, x):
        x = x.view(-1, 2, 4)
        return self.attention(x, x, x, need_weights=False)[0].reshape(-1, 8)


class Sdpa(nn.Module):
    def __init__(self):
        super().__init__()
        self.qkv = nn.Linear(4, 12, bias=False)  # of a key, its gradient is rounding alone

    def forward(self, x):
        q, k, v = self.qkv(x.view(-1, 2, 4)).chunk(3, -1)
        return F.scaled_dot_product_attention(q, k, v, is_causal=True).reshape(-1, 8)


class Encoder(nn.Module):
    def __init__(self):
        super().__init__()
        self.layer = nn.TransformerEncoderLayer(4, 2, 5, dropout=0.0, bias=False, batch_first=True)

    def forward(self, x):
        return self.layer(x.view(-1, 2, 4)).reshape(-1, 8)


class TiedPair(nn.Module):
    def __init__(self):
        super().__init__()
        self.first = nn.Linear(8, 8)
        self.second = nn.Linear(8, 8)
        self.second.weight = self.first.weight

    def forward(self, x):
        return self.second(torch.tanh(self.first(x)))


class TransposedTie(nn.Module):
    def __init__(self):
        super().__init__()
        self.up = nn.Linear(8, 5)

    def forward(self, x):
        return F.linear(torch.tanh(self.up(x)), self.up.weight.t())


class Twice(nn.Module):
    def __init__(self):
        super().__init__()
        self.block = Mlp()

    def forward(self, x):
        return self.block(torch.tanh(self.block(x)))


class Unused(nn.Module):
    def __init__(self):
        super().__init__()
        self.linear = nn.Linear(8, 8)
        self.unused = nn.Linear(8, 3)

    def forward(self, x):
        return self.linear(x)


class Alternates(nn.Module):
    """Of two weights, the one whose turn it is."""

    def __init__(self):
        super().__init__()
        self.even = nn.Parameter(torch.ones(8, 8))
        self.odd = nn.Parameter(torch.ones(8, 8))
        self.calls = 0

    def forward(self, x):
        self.calls += 1
        return torch.tanh(x @ (self.even if self.calls % 2 else self.odd))


class Branches(nn.Module):
    """Which weight is used depends on the data, so on the rank."""

    def __init__(self):
        super().__init__()
        self.positive = nn.Parameter(torch.ones(8, 8))
        self.negative = nn.Parameter(torch.ones(8, 8))

    def forward(self, x):
        return torch.tanh(x @ (self.positive if x.sum() > 0 else self.negative))


class Adapter(nn.Module):
    """A frozen base and trained factors."""

    def __init__(self):
        super().__init__()
        self.base = nn.Linear(8, 8).requires_grad_(False)
        self.a = nn.Parameter(torch.ones(2, 8))
        self.b = nn.Parameter(torch.ones(8, 2))

    def forward(self, x):
        return self.base(x) + x @ self.a.t() @ self.b.t()


class Scalar(nn.Module):
    def __init__(self):
        super().__init__()
        self.scale = nn.Parameter(torch.tensor(0.5))

    def forward(self, x):
        return x * self.scale


class Empty(nn.Module):
    def __init__(self):
        super().__init__()
        self.linear = nn.Linear(8, 8)
        self.empty = nn.Parameter(torch.empty(0, 4))

    def forward(self, x):
        return self.linear(x) + self.empty.sum()


class Odd(nn.Module):
    def __init__(self):
        super().__init__()
        self.cube = nn.Parameter(torch.ones(8, 1, 3, 5))
        self.line = nn.Parameter(torch.ones(7))
        self.back = nn.Parameter(torch.ones(3, 5, 8))

    def forward(self, x):
        mixed = torch.einsum("ra,aibc->rbc", x, self.cube) * self.line.mean()
        return torch.einsum("rbc,bcd->rd", mixed, self.back)


class Strided(nn.Module):
    """A weight that is not contiguous."""

    def __init__(self):
        super().__init__()
        self.weight = nn.Parameter(torch.ones(8, 16).t()[::2])

    def forward(self, x):
        return torch.tanh(F.linear(x, self.weight))


class Expanded(nn.Module):
    def __init__(self):
        super().__init__()
        self.row = nn.Parameter(torch.ones(1, 8))

    def forward(self, x):
        return x * self.row.expand_as(x)


class MixedDtypes(nn.Module):
    def __init__(self):
        super().__init__()
        self.wide = nn.Linear(8, 8).double()
        self.narrow = nn.Linear(8, 8)

    def forward(self, x):
        return self.narrow(x) + self.wide(x.double()).float()


class Integers(nn.Module):
    def __init__(self):
        super().__init__()
        self.order = nn.Parameter(torch.arange(8).flip(0), requires_grad=False)
        self.linear = nn.Linear(8, 8)

    def forward(self, x):
        return self.linear(x[:, self.order])


class DictBlock(nn.Module):
    def __init__(self):
        super().__init__()
        self.linear = nn.Linear(8, 8)

    def forward(self, batch):
        return {"y": self.linear(batch["x"]), "count": len(batch)}


class Dicts(nn.Module):
    def __init__(self):
        super().__init__()
        self.block = DictBlock()

    def forward(self, x):
        return self.block({"x": x, "none": None})["y"]


class ListBlock(nn.Module):
    def __init__(self):
        super().__init__()
        self.linear = nn.Linear(8, 8)

    def forward(self, xs, *, scale=None, flag="no"):
        return [self.linear(x) for x in xs], (None, 3, flag)


class Lists(nn.Module):
    def __init__(self):
        super().__init__()
        self.block = ListBlock()

    def forward(self, x):
        (first, second), _ = self.block([x, x.tanh()], scale=x.mean())
        return first + second


@dataclasses.dataclass
class Result:
    value: torch.Tensor
    name: str = ""


class DataBlock(nn.Module):
    def __init__(self):
        super().__init__()
        self.linear = nn.Linear(8, 8)

    def forward(self, result):
        return Result(self.linear(result.value), result.name + "!")


class Dataclasses(nn.Module):
    def __init__(self):
        super().__init__()
        self.block = DataBlock()

    def forward(self, x):
        return self.block(Result(x)).value


Pair = collections.namedtuple("Pair", "left right")


class PairBlock(nn.Module):
    def __init__(self):
        super().__init__()
        self.linear = nn.Linear(8, 8)

    def forward(self, pair):
        return Pair(self.linear(pair.left), pair.right)


class NamedTuples(nn.Module):
    def __init__(self):
        super().__init__()
        self.block = PairBlock()

    def forward(self, x):
        pair = self.block(Pair(x, x * 2))
        return pair.left + pair.right


class AppendsBlock(nn.Module):
    def __init__(self):
        super().__init__()
        self.linear = nn.Linear(8, 8)

    def forward(self, x, seen):
        seen.append(self.linear(x))
        return x


class Appends(nn.Module):
    """The inner block appends to the list that it was given."""

    def __init__(self):
        super().__init__()
        self.block = AppendsBlock()

    def forward(self, x):
        seen = []
        x = self.block(x, seen)
        return x + sum(seen)


class WritesBlock(nn.Module):
    def __init__(self):
        super().__init__()
        self.linear = nn.Linear(8, 8)

    def forward(self, cache):
        cache["y"] = self.linear(cache["x"])
        return cache["x"].tanh()


class Writes(nn.Module):
    """The inner block writes into the dict that it was given."""

    def __init__(self):
        super().__init__()
        self.block = WritesBlock()

    def forward(self, x):
        cache = {"x": x}
        out = self.block(cache)
        return out + cache["y"] if "y" in cache else out


class InPlaceBlock(nn.Module):
    def __init__(self):
        super().__init__()
        self.linear = nn.Linear(8, 8)

    def forward(self, x):
        x += self.linear(x.clone())
        return x.mul_(0.5)


class InPlace(nn.Module):
    """The inner block writes into the tensor that it was given, and both use it afterwards."""

    def __init__(self):
        super().__init__()
        self.block = InPlaceBlock()

    def forward(self, x):
        given = x.clone()
        out = self.block(given)
        given += 0.1
        return (out + given).tanh()


class ViewsBlock(nn.Module):
    def __init__(self):
        super().__init__()
        self.linear = nn.Linear(8, 16)

    def forward(self, x):
        y = self.linear(x)
        return y[:, :8], y[:, 8:]


class Views(nn.Module):
    """The inner block returns two views of one tensor, and one of them is written to."""

    def __init__(self):
        super().__init__()
        self.block = ViewsBlock()

    def forward(self, x):
        left, right = self.block(x)
        left *= 0.5
        return left * right.sigmoid()


class Averages(nn.Module):
    """Buffers: a running mean that the forward reads and writes, a count, one that is not saved."""

    def __init__(self):
        super().__init__()
        self.linear = nn.Linear(8, 8)
        self.register_buffer("mean", torch.zeros(8))
        self.register_buffer("count", torch.zeros((), dtype=torch.int64))
        self.register_buffer("factor", torch.full((1,), 0.5), persistent=False)

    def forward(self, x):
        if self.training:
            with torch.no_grad():
                self.mean.lerp_(x.mean(0), 0.1)
                self.count += 1
        return self.linear(x - self.factor * self.mean)


class Collections(nn.Module):
    def __init__(self):
        super().__init__()
        self.matrices = nn.ParameterList([nn.Parameter(torch.ones(8, 3)) for _ in range(2)])
        self.named = nn.ParameterDict({"scale": nn.Parameter(torch.ones(8))})
        self.modules_by_name = nn.ModuleDict({"a": nn.Linear(8, 8), "b": nn.PReLU(8)})

    def forward(self, x):
        x = x @ self.matrices[0] @ self.matrices[1].t() * self.named["scale"]
        for module in self.modules_by_name.values():
            x = module(x)
        return x


class WeightNorm(nn.Module):
    def __init__(self):
        super().__init__()
        self.linear = parametrizations.weight_norm(nn.Linear(8, 8))

    def forward(self, x):
        return self.linear(x)


class SpectralNorm(nn.Module):
    def __init__(self):
        super().__init__()
        self.linear = parametrizations.spectral_norm(nn.Linear(8, 8))

    def forward(self, x):
        return self.linear(x)


class Multiplies(nn.Module):
    def __init__(self):
        super().__init__()
        self.both = nn.Bilinear(8, 8, 8)

    def forward(self, x):
        return torch.tanh(self.both(x, x.flip(0)))


class Reader(nn.Module):
    """Reads the weight of a child that it never calls."""

    def __init__(self):
        super().__init__()
        self.child = nn.Linear(8, 8)

    def forward(self, x):
        return F.linear(x, self.child.weight * 0.5, self.child.bias)


class ByHand(torch.autograd.Function):
    @staticmethod
    def forward(ctx, x, weight):
        ctx.save_for_backward(x, weight)
        return x @ weight

    @staticmethod
    def backward(ctx, gradient):
        x, weight = ctx.saved_tensors
        return gradient @ weight.t(), x.t() @ gradient


class Custom(nn.Module):
    def __init__(self):
        super().__init__()
        self.weight = nn.Parameter(torch.ones(8, 8))

    def forward(self, x):
        return ByHand.apply(x, self.weight)


class Hooks(nn.Module):
    """The user's own hooks change what goes in, what comes out, and gradients."""

    def __init__(self):
        super().__init__()
        self.linear = nn.Linear(8, 8)
        self.linear.register_forward_pre_hook(lambda module, args: (args[0] * 0.5,))
        self.linear.register_forward_hook(lambda module, args, out: out.tanh())
        self.linear.register_full_backward_hook(lambda module, into, out: (into[0] * 0.5,))

    def forward(self, x):
        return self.linear(x)


class StopsGradients(nn.Module):
    def __init__(self):
        super().__init__()
        self.linear = nn.Linear(8, 8)
        self.gate = nn.Linear(8, 8)

    def forward(self, x):
        return self.linear(x.detach()) * self.gate(x).sigmoid()


class Teacher(nn.Module):
    """A frozen part runs without gradients."""

    def __init__(self):
        super().__init__()
        self.teacher = Mlp().requires_grad_(False)
        self.student = nn.Linear(8, 8)

    def forward(self, x):
        with torch.no_grad():
            target = self.teacher(x)
        return self.student(x) - target


class Recomputed(nn.Module):
    def __init__(self):
        super().__init__()
        self.block = Mlp()

    def forward(self, x):
        return checkpoint(self.block, x, use_reentrant=False)


class Reentrant(nn.Module):
    def __init__(self):
        super().__init__()
        self.enter = nn.Linear(8, 8)
        self.block = Mlp()

    def forward(self, x):
        return checkpoint(self.block, self.enter(x), use_reentrant=True)


class Shared(nn.Module):
    """One module under two names."""

    def __init__(self):
        super().__init__()
        self.first = self.second = nn.Linear(8, 8)

    def forward(self, x):
        return self.second(self.first(x).tanh())


class Recursive(nn.Module):
    """Calls itself."""

    def __init__(self):
        super().__init__()
        self.linear = nn.Linear(8, 8)

    def forward(self, x, depth=2):
        x = self.linear(x).tanh()
        return self(x, depth=depth - 1) if depth > 1 else x


class Random(nn.Module):
    def __init__(self):
        super().__init__()
        self.linear = nn.Linear(8, 8)
        self.dropout = nn.Dropout(0.3)

    def forward(self, x):
        return checkpoint(lambda y: self.dropout(self.linear(y)), x, use_reentrant=False)


class GivesParameterBlock(nn.Module):
    def __init__(self):
        super().__init__()
        self.linear = nn.Linear(8, 8)
        self.scale = nn.Parameter(torch.ones(8))

    def forward(self, x):
        return self.linear(x), self.scale * 1.0


class GivesParameter(nn.Module):
    """The inner block returns something made of its parameter alone."""

    def __init__(self):
        super().__init__()
        self.block = GivesParameterBlock()

    def forward(self, x):
        y, scale = self.block(x)
        return y * scale


class Autocast(nn.Module):
    def __init__(self):
        super().__init__()
        self.linear = nn.Linear(8, 8)

    def forward(self, x):
        with torch.autocast("cpu", torch.bfloat16):
            y = self.linear(self.linear(x))
        return y.float()


class Offloads(nn.Module):
    """Hooks of saved tensors look at what autograd keeps."""

    def __init__(self):
        super().__init__()
        self.block = Mlp()

    def forward(self, x):
        with torch.autograd.graph.saved_tensors_hooks(lambda t: t.clone(), lambda t: t):
            return self.block(x)


class Many(nn.Module):
    """Repeated blocks in a list, one of them called again at the end."""

    def __init__(self):
        super().__init__()
        self.blocks = nn.ModuleList(Mlp() for _ in range(3))

    def forward(self, x):
        for block in (*self.blocks, self.blocks[0]):
            x = x + 0.5 * block(x)
        return x


class Experts(nn.Module):
    """Each row goes to one of three matrices; some matrices may get none."""

    def __init__(self):
        super().__init__()
        self.router = nn.Linear(8, 3)
        self.experts = nn.Parameter(torch.ones(3, 8, 8))

    def forward(self, x):
        weights = self.router(x).softmax(-1)
        chosen = weights.argmax(-1)
        out = torch.zeros_like(x)
        for index in range(3):
            rows = (chosen == index).nonzero()[:, 0]
            if len(rows):
                out = out.index_add(0, rows, x[rows] @ self.experts[index])
        return out * weights.max(-1, keepdim=True).values


class ListedArguments(nn.Module):
    """A module that is called with keywords only, and gives nothing but a tuple of one."""

    def __init__(self):
        super().__init__()
        self.block = KeywordBlock()

    def forward(self, x):
        (out,) = self.block(x=x, mask=None)
        return out


class KeywordBlock(nn.Module):
    def __init__(self):
        super().__init__()
        self.linear = nn.Linear(8, 8)

    def forward(self, *, x, mask):
        return (self.linear(x),)


PARTS = [
    Affine, NoBias, Mlp, Conv1, Conv2, ChannelsLast, Transposed, Batch, Norms, Gru, Lstm, Cell,
    Embedded, Bag, Attention, Sdpa, Encoder, TiedPair, TransposedTie, Twice, Unused, Alternates,
    Branches, Adapter, Scalar, Empty, Odd, Strided, Expanded, MixedDtypes, Integers, Dicts, Lists,
    Dataclasses, NamedTuples, Appends, Writes, InPlace, Views, Averages, Collections, WeightNorm,
    SpectralNorm, Multiplies, Reader, Custom, Hooks, StopsGradients, Teacher, Recomputed,
    Reentrant, Shared, Recursive, Random, GivesParameter, Autocast, Offloads, Many, Experts,
    ListedArguments,
]  # fmt: skip
"""What a model is drawn from."""
