"""Copies, loads and moves make new parameters, which stay what the old ones were to the mesh."""

from __future__ import annotations

import copy
from dataclasses import replace

import pytest
import torch
from torch import nn
from torch.optim.swa_utils import AveragedModel

from lamina.mesh import ParallelLayout, role_of
from lamina.models import GPTModel, TransformerConfig, VisionConfig, VisionLanguageModel
from lamina_testing import device_type

CONFIG = TransformerConfig(
    vocab_size=20, hidden_size=16, num_layers=1, num_heads=2, ffn_size=24, max_sequence_length=16,
    tie_embeddings=True,
)  # fmt: skip
VISION = VisionConfig(hidden_size=16, num_layers=1, num_heads=2, patch_size=4, max_grid=4)


def make(kind, mesh):
    config = replace(CONFIG, sequence_parallel=mesh is not None)
    if kind == "language":
        return GPTModel(config, mesh, seed=1)
    return VisionLanguageModel(VISION, config, mesh, image_token=19, seed=1)


class Around(nn.Module):
    def __init__(self, model):
        super().__init__()
        self.inner = model


def loaded(kind, mesh):
    with torch.device("meta"):
        model = Around(make(kind, mesh))
    model.load_state_dict(Around(make(kind, mesh)).state_dict(), assign=True)
    return model.inner


WAYS = {
    "deepcopy": lambda kind, mesh: copy.deepcopy(make(kind, mesh)),
    "a list's deepcopy": lambda kind, mesh: copy.deepcopy([make(kind, mesh)])[0],
    "average": lambda kind, mesh: AveragedModel(make(kind, mesh)).module,
    "assign": loaded,
    "bfloat16": lambda kind, mesh: make(kind, mesh).to(torch.bfloat16),
}


@pytest.mark.ranks(1, 2)
def test_parameters_that_are_replaced_keep_roles_and_ties(ranks):
    mesh = None if ranks.world_size == 1 else ParallelLayout(tp=2).build(device_type())
    for kind in ("language", "vision"):
        expected = make(kind, mesh)
        assert mesh is None or role_of(expected.get_parameter(
            "final_norm.weight" if kind == "language" else "language.final_norm.weight"
        )).tp_grad == "sum"  # fmt: skip
        for way, function in WAYS.items():
            model = function(kind, mesh)
            inner = model if kind == "language" else model.language
            assert inner.head.weight is inner.embedding.weight, way
            pairs = zip(model.named_parameters(), expected.named_parameters(), strict=True)
            for (name, parameter), (_, other) in pairs:
                assert role_of(parameter) == role_of(other), (way, name)
                assert torch.equal(parameter, other.to(parameter.dtype)), (way, name)
