"""What tests of recurrent layers have in common: a text of documents, and parity over tp."""

from __future__ import annotations

import torch

from lamina.ddp.engine import finalize_plain_gradients
from lamina.mesh import ParallelLayout, role_of
from lamina.mesh.engine import mesh_axis
from lamina.models import GPTModel, TransformerConfig, apply_recompute
from lamina.models.base.mesh_axes import cut_weight
from lamina_testing import device_type

TEXT = torch.randint(50, (2, 13), generator=torch.Generator().manual_seed(0))
DOCUMENTS = torch.tensor([[0] * 5 + [1] * 7, [3] * 2 + [4] * 10])


def check_cut_over_ranks(config: TransformerConfig, recompute: str = "none") -> None:
    """A step in double over two tp ranks has the loss and the gradients of one process."""
    mesh = ParallelLayout(tp=2).build(device_type())
    axis = mesh_axis(mesh, "tp")
    whole, model = GPTModel(config, seed=1).double(), GPTModel(config, mesh, seed=1).double()
    apply_recompute(model, recompute)
    text, documents = TEXT.to(device_type()), DOCUMENTS.to(device_type())
    losses = [each(text[:, :-1], text[:, 1:], document_ids=documents) for each in (whole, model)]
    torch.testing.assert_close(losses[1], losses[0], rtol=0, atol=1e-12)
    for loss in losses:
        loss.backward()
    finalize_plain_gradients(model, mesh)
    wanted = {name: parameter.grad for name, parameter in whole.named_parameters()}
    assert all(gradient.norm() > 1e-6 for gradient in wanted.values())
    for name, parameter in model.named_parameters():
        role, gradient = role_of(parameter), wanted[name]
        if role.tp_shard_dim is not None:
            gradient = cut_weight(gradient, role.tp_shard_dim, axis.rank, axis.size, role.tp_blocks)
        torch.testing.assert_close(parameter.grad, gradient, rtol=0, atol=1e-11, msg=name)
