"""ZeRO-1 from three of Lamina's layers: a mesh, two flat buffers, two collectives.

Every rank holds all weights and gradients, and the optimizer state of its own piece (Rajbhandari et
al., 2020). Nothing of `lamina.ddp` or `lamina.fsdp` is used.
"""

from __future__ import annotations

from collections.abc import Callable

import torch
from torch import nn
from torch.optim import Optimizer

from lamina.buffers import BufferLayout, FlatBuffer, Replicate, TensorSpec
from lamina.collectives import all_gather_into, reduce_scatter_fp32
from lamina.mesh import ParallelMesh


class Zero1:
    """Move a model's parameters into one flat buffer, and step one rank's piece of it."""

    def __init__(
        self,
        model: nn.Module,
        mesh: ParallelMesh,
        make_optimizer: Callable[[list[nn.Parameter]], Optimizer],
    ) -> None:
        self.axis = mesh.axis("dp_shard")
        device = next(model.parameters()).device

        # Layout: where each parameter lies in a flat tensor that the ranks cut into equal pieces.
        specs = [TensorSpec(name, p.shape) for name, p in model.named_parameters()]
        self.layout = BufferLayout.plan(specs, num_shards=self.axis.size)

        # Buffers: autograd reads weights and adds gradients through views, so nothing is copied.
        self.weights = FlatBuffer(self.layout, Replicate(), torch.float32, device, self.axis)
        self.grads = FlatBuffer(self.layout, Replicate(), torch.float32, device, self.axis)
        self.weights.load_all(dict(model.named_parameters()))
        grads = self.grads.views()
        for name, view in self.weights.views().items():
            parameter = model.get_parameter(name)
            parameter.data, parameter.grad = view, grads[name]

        # The optimizer sees one parameter: this rank's piece of both buffers.
        self.mine = nn.Parameter(self.weights.shard)
        self.mine.grad = self.grads.shard
        self.optimizer = make_optimizer([self.mine])

    def step(self) -> None:
        """Average the gradients, step this rank's piece, hand it to the others."""
        group = self.axis.group
        reduce_scatter_fp32(self.grads.shard, self.grads.data, group, op="avg")
        self.optimizer.step()
        all_gather_into(self.weights.data, self.weights.shard, group)
        self.grads.data.zero_()
