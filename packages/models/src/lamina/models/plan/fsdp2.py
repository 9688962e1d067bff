"""torch's FSDP2 in place of Lamina's engine, so that a plan can have either."""

from __future__ import annotations

from typing import Any

import torch
from torch import nn
from torch.distributed.device_mesh import DeviceMesh

from lamina.mesh import ParallelMesh
from lamina.models.decoder.gpt import GPTModel
from lamina.models.plan.job import BLOCKS, Job

_RESHARDS: dict[int | str, bool] = {
    3: True,
    "optim_grads_params": True,
    2: False,
    "optim_grads": False,
}


def fsdp2(model: nn.Module, job: Job, mesh: ParallelMesh) -> nn.Module:
    """Shard a model by torch's `fully_shard`, as torchtitan's recipe does.

    Units are the embedding, each block, the last norm with the head (which stays gathered after
    forward, as backward begins with it), and the root. It is a `Job`'s `shard`.

    Raises:
        ValueError: a strategy other than 2 (weights stay gathered) and 3, an axis that FSDP2 would
            have to be told of by DTensors, or settings, which are `lamina.fsdp.fully_shard`'s.

    Examples:
        >>> from lamina.models.plan import Job, fsdp2, plan
        >>> tiny = TransformerConfig(vocab_size=256, hidden_size=64, num_layers=2, num_heads=4)
        >>> plan(Job(config=tiny, ranks=2, sequence=64, shard=fsdp2)).fits
        True
    """
    from torch.distributed.fsdp import MixedPrecisionPolicy, fully_shard

    if job.strategy not in _RESHARDS:
        raise ValueError(
            f"strategy={job.strategy!r} of torch's FSDP2: it shards weights (3), or keeps them "
            "gathered from the first forward of a step on (2)"
        )
    if job.settings:
        raise ValueError(
            f"settings {sorted(job.settings)} are those of lamina.fsdp.fully_shard, and FSDP2 has "
            "none of them: leave them out"
        )
    dtype = None if job.precision == "fp32" else torch.bfloat16
    how: dict[str, Any] = {
        "mesh": _data_mesh(mesh),
        "mp_policy": MixedPrecisionPolicy(param_dtype=dtype, reduce_dtype=torch.float32),
        "reshard_after_forward": _RESHARDS[job.strategy],
    }
    if isinstance(model, GPTModel) and not model.config.tie_embeddings:
        fully_shard(model.embedding, **how)
        fully_shard([model.final_norm, model.head], **{**how, "reshard_after_forward": False})
    # Of a compiled block FSDP2 shards the module around it, whose hooks are outside of the graph.
    around = {id(m._modules["_orig_mod"]): m for m in model.modules() if "_orig_mod" in m._modules}
    for block in [module for module in model.modules() if isinstance(module, BLOCKS)]:
        fully_shard(around.get(id(block), block), **how)
    fully_shard(model, **how)
    return model


def _data_mesh(mesh: ParallelMesh) -> DeviceMesh:
    layout = mesh.layout
    others = {"tp": layout.tp, "pp": layout.pp, "ep": layout.ep, "expert_tp": layout.expert_tp}
    if (cut := {name: size for name, size in others.items() if size > 1}) or (
        layout.cp > 1 and layout.dp_replicate > 1
    ):
        raise ValueError(
            f"{cut or 'cp with dp_replicate'}: torch's FSDP2 is planned over data-parallel and "
            "context-parallel ranks. Plan lamina.fsdp over the other axes"
        )
    if layout.dp_replicate > 1:
        return mesh[("dp_replicate", "dp_shard")]
    return mesh["dp_shard_cp"]
