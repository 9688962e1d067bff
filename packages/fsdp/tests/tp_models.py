"""A toy with the four kinds of tensor-parallel weights, whole or as one tp rank's part of it."""

import torch
import torch.nn.functional as F
from torch import nn
from torch.distributed.device_mesh import init_device_mesh

from lamina.collectives import all_gather_into, copy_to, reduce_from
from lamina.mesh import mark, role_of
from lamina_testing import device_type

WIDTH, HEADS, INNER = 8, 4, 12


def mesh_2x2():
    return init_device_mesh(device_type(), (2, 2), mesh_dim_names=("dp", "tp"))


def sgd(model):
    return torch.optim.SGD(model.parameters(), lr=0.1, momentum=0.9, foreach=False)


def cut(whole, dim, rank, size, blocks=None):
    """This rank's piece of a matrix, or of each of the matrices that are fused in it."""
    parts = whole.split(list(blocks or [whole.shape[dim]]), dim)
    return torch.cat([part.chunk(size, dim)[rank] for part in parts], dim).clone()


def together(pieces, dim, blocks=None):
    """The inverse of `cut`: from the pieces of all tp ranks."""
    size = len(pieces)
    lengths = [b // size for b in blocks or [pieces[0].shape[dim] * size]]
    split = [piece.split(lengths, dim) for piece in pieces]
    return torch.cat([torch.cat([p[i] for p in split], dim) for i in range(len(lengths))], dim)


ROLES = {
    "qkv.weight": (0, (WIDTH, WIDTH // 2, WIDTH // 2)),
    "out.weight": (1, None),
    "gate_up.weight": (0, (INNER, INNER)),
    "gate_up.bias": (0, (INNER, INNER)),
    "down.weight": (1, None),
}


class Layer(nn.Module):
    """Fused QKV, row-parallel output, fused SwiGLU; whole, or one tp rank's part of it."""

    def __init__(self, axis=None):
        super().__init__()
        self.axis = axis
        parts = 1 if axis is None else axis.size
        self.norm = nn.LayerNorm(WIDTH)
        self.qkv = nn.Linear(WIDTH, 2 * WIDTH // parts, bias=False)
        self.out = nn.Linear(WIDTH // parts, WIDTH, bias=False)
        self.gate_up = nn.Linear(WIDTH, 2 * INNER // parts)
        self.down = nn.Linear(INNER // parts, WIDTH, bias=False)
        if axis is not None:
            for name, (dim, blocks) in ROLES.items():
                mark(self.get_parameter(name), tp_shard_dim=dim, tp_blocks=blocks)

    def enter(self, x):
        return x if self.axis is None else copy_to(x, self.axis.group)

    def leave(self, x):
        return x if self.axis is None else reduce_from(x, self.axis.group)

    def forward(self, x):
        parts = 1 if self.axis is None else self.axis.size
        q, k, v = self.qkv(self.enter(self.norm(x))).split(
            [WIDTH // parts, WIDTH // 2 // parts, WIDTH // 2 // parts], dim=-1
        )
        mixed = torch.cat([q[..., ::2] * k, q[..., 1::2] + v], dim=-1)
        x = x + self.leave(self.out(mixed))
        gate, up = self.gate_up(self.enter(x)).chunk(2, dim=-1)
        return x + self.leave(self.down(F.silu(gate) * up))


class Net(nn.Module):
    def __init__(self, axis=None):
        super().__init__()
        self.layers = nn.ModuleList(Layer(axis) for _ in range(2))

    def forward(self, x):
        for layer in self.layers:
            x = layer(x)
        return x


def interleaved(whole, parts):
    """`out` reads what each tp rank has concatenated from its own pieces of q, k and v."""
    half = WIDTH // 2
    order = torch.cat(
        [
            torch.cat(
                [torch.arange(half).chunk(parts)[r], half + torch.arange(half).chunk(parts)[r]]
            )
            for r in range(parts)
        ]
    )
    return whole[:, order]


def take_pieces(model, whole, axis):
    with torch.no_grad():
        for name, parameter in model.named_parameters():
            value = whole.get_parameter(name)
            if name.endswith("out.weight"):
                value = interleaved(value, axis.size)
            role = role_of(parameter)
            if role.tp_shard_dim is not None:
                value = cut(value, role.tp_shard_dim, axis.rank, axis.size, role.tp_blocks)
            parameter.copy_(value)


def gathered_over(tensor, axis):
    out = torch.empty(axis.size * tensor.numel())
    all_gather_into(out, tensor.contiguous().view(-1), axis.group).wait()
    return [piece.view(tensor.shape) for piece in out.chunk(axis.size)]


def put_together(found, model, axis):
    roles = {name: role_of(parameter) for name, parameter in model.named_parameters()}
    whole = {}
    for name, value in found.items():
        pieces, role = gathered_over(value, axis), roles[name]
        if role.tp_shard_dim is None:
            assert all(torch.equal(piece, pieces[0]) for piece in pieces), name
            whole[name] = pieces[0]
        else:
            whole[name] = together(pieces, role.tp_shard_dim, role.tp_blocks)
    return whole


def batch(rank, step):
    return torch.randn(3, WIDTH, generator=torch.Generator().manual_seed(100 * step + rank))


def make_whole():
    torch.manual_seed(6)
    return Net()


def in_tp_order(values, parts):
    return {n: interleaved(v, parts) if n.endswith("out.weight") else v for n, v in values.items()}
