"""A toy whose parameters play every role, and the same computation in one process.

Stage s of tensor rank t on data-parallel rank d computes, for each of its tokens,
`(sum_t tanh(e * norm_s @ W_s[t]))^2 + gain_s * c_t * x + expert term`. Whatever lies before the
sharded W gets a partial gradient on every tp rank; `gain` sees different factors on each.
"""

import torch
from torch import nn

from lamina.collectives import reduce_from
from lamina.mesh import mark

WIDTH, HIDDEN, EXPERTS = 4, 6, 2


def parameters_of_everyone(stages):
    generator = torch.Generator().manual_seed(11)

    def draw(*shape):
        return torch.randn(*shape, generator=generator, dtype=torch.float64)

    found = {"embedding": draw(5, WIDTH)}
    for stage in range(stages):
        found[f"norm{stage}"] = draw(WIDTH)
        found[f"gain{stage}"] = draw(WIDTH)
        found[f"w{stage}"] = draw(HIDDEN, WIDTH)
        for expert in range(EXPERTS):
            found[f"expert{stage}.{expert}"] = draw(WIDTH)
    return found


def tokens(step, rank, counts=None):
    """[n, 5] tokens of a data-parallel rank; n differs by rank where counts are given."""
    generator = torch.Generator().manual_seed(100 * step + rank)
    rows = torch.randn(6, 5, generator=generator, dtype=torch.float64)
    return rows if counts is None else rows[: counts[rank % len(counts)]]


def embed(x, stage, embedding):
    return (x if stage == 0 else x.flip(1)) @ embedding * (1 + stage)


def routed(x, expert):
    return x[x[:, 0] > 0] if expert == 0 else x[x[:, 0] <= 0]


def expert_loss(x, expert, weight):
    return (routed(x, expert)[:, :WIDTH] * weight).sin().sum()


class Router(nn.Module):
    """Has work of its own between backward and step."""

    def __init__(self):
        super().__init__()
        self.calls = 0

    def finalize_step(self, mesh):
        self.calls += 1


class Stage(nn.Module):
    """One pipeline stage on one tensor rank."""

    def __init__(self, mesh, stages):
        super().__init__()
        self.mesh, self.stage = mesh, mesh.coordinate["pp"]
        self.tp = mesh.axis("tp")
        whole = parameters_of_everyone(stages)
        rows = HIDDEN // self.tp.size
        start = self.tp.rank * rows
        self.w = nn.Parameter(whole[f"w{self.stage}"][start : start + rows].clone())
        if self.tp.size > 1:
            mark(self.w, tp_shard_dim=0)
        if self.stage in (0, stages - 1):
            self.embedding = nn.Parameter(whole["embedding"].clone())
            mark(self.embedding, tied="embedding", tp_grad="sum")
        self.norm = mark(nn.Parameter(whole[f"norm{self.stage}"].clone()), tp_grad="sum")
        self.gain = mark(nn.Parameter(whole[f"gain{self.stage}"].clone()), tp_grad="mean")
        self.ep = mesh.axis("ep")
        if self.ep.size == EXPERTS:
            name = f"expert{self.stage}.{self.ep.rank}"
            self.expert = mark(nn.Parameter(whole[name].clone()), expert=True)
        self.router = Router()

    def forward(self, x, x_of_expert=None):
        """The sum of the tokens' losses."""
        hidden = embed(x, self.stage, self.embedding) * self.norm
        partial = (hidden @ self.w.T).tanh().sum(1)
        y = reduce_from(partial, self.tp.group)
        loss = y.square().sum() + (self.gain * (1 + self.tp.rank) * x[:, :WIDTH]).sum()
        if x_of_expert is not None:
            loss = loss + expert_loss(x_of_expert, self.ep.rank, self.expert)
        return loss


def whole_loss(found, x, stages, tp, experts):
    """The loss of all stages and tensor ranks for some tokens, from whole parameters."""
    loss = 0.0
    for stage in range(stages):
        hidden = embed(x, stage, found["embedding"]) * found[f"norm{stage}"]
        y = (hidden @ found[f"w{stage}"].T).tanh().sum(1)
        loss = loss + y.square().sum()
        for rank in range(tp):
            loss = loss + (found[f"gain{stage}"] * (1 + rank) * x[:, :WIDTH]).sum() / tp
        for expert in range(EXPERTS if experts else 0):
            loss = loss + expert_loss(x, expert, found[f"expert{stage}.{expert}"])
    return loss


def expected(step, world, *, stages, tp, experts=False, counts=None, per_token=False):
    """Gradients of whole parameters by name: over all data-parallel ranks' tokens."""
    found = {n: p.clone().requires_grad_() for n, p in parameters_of_everyone(stages).items()}
    total, number = 0.0, 0
    for rank in range(world):
        x = tokens(step, rank, counts)
        total = total + whole_loss(found, x, stages, tp, experts)
        number += len(x)
    (total / (max(number, 1) if per_token else world)).backward()
    return {n: p.grad for n, p in found.items() if p.grad is not None}


def mine(gradients, module):
    """A stage's part of whole gradients, by the names it has for its parameters."""
    stage, tp = module.stage, module.tp
    rows = HIDDEN // tp.size
    found = {
        "w": gradients[f"w{stage}"][tp.rank * rows : (tp.rank + 1) * rows],
        "norm": gradients[f"norm{stage}"],
        "gain": gradients[f"gain{stage}"],
    }
    if hasattr(module, "embedding"):
        found["embedding"] = gradients["embedding"]
    if hasattr(module, "expert"):
        found["expert"] = gradients[f"expert{stage}.{module.ep.rank}"]
    return found
