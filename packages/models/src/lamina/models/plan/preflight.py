"""What would go wrong, said before a run is started: for a check in CI.

Each function returns complaints, one sentence each; none says that nothing was seen.
"""

from __future__ import annotations

from collections import Counter
from collections.abc import Mapping, Sequence
from dataclasses import dataclass, replace
from importlib.util import find_spec

import torch

from lamina.mesh import ParallelLayout, init_distributed
from lamina.models.attention.latent_attention import LatentAttention
from lamina.models.base.config import LayerSpec, TransformerConfig
from lamina.models.decoder.gpt import GPTModel
from lamina.models.plan.constants import GIB
from lamina.models.plan.job import Job, layer_specs, play
from lamina.models.plan.job_plan import Plan


def complaints(planned: Plan) -> list[str]:
    """All that is wrong with a plan: memory, settings without effect, types, ranks that wait."""
    problems = []
    if not planned.fits:
        remedy = ""
        if planned.fits_unfragmented:
            remedy = (
                f". Its tensors take {planned.allocated / GIB:.2f} GiB: with PyTorch's "
                "expandable_segments:True, whose fragments are not planned, it may fit"
            )
        problems.append(
            f"{planned.gpu} has {-planned.margin / GIB:.2f} GiB too little: "
            f"{planned.reserved / GIB:.2f} GiB are reserved, most of it "
            f"{planned.binds.partition(';')[0].removeprefix('memory: ')}{remedy}"
        )
    job = planned.job
    return problems + switched_off(job) + wrong_types(job) + waits_of(job)


def switched_off(job: Job) -> list[str]:
    """Settings that differ from their defaults and do nothing, because of another one."""
    layout, problems = job.layout, []
    if job.schedule != "1f1b" and layout.pp == 1:
        problems.append(f"schedule={job.schedule!r} does nothing: the mesh has no pipeline (pp=1)")
    expert_ranks = layout.ep * layout.expert_tp
    if expert_ranks > 1 and job.config.moe is None:
        problems.append(f"ep={layout.ep} does nothing: the model has no experts")
    shards = layout.dp_replicate * layout.dp_shard * layout.cp
    if shards == 1 and job.strategy not in (0, "no_shard"):
        problems.append(
            f"strategy={job.strategy!r} does nothing: one rank has nothing to shard over"
        )
    if job.precision == "fp32" and job.compiled is False and job.settings.get("grad_comm_dtype"):
        problems.append(
            "grad_comm_dtype does nothing: precision='fp32' sends gradients as they are"
        )
    return problems


def _small(job: Job) -> Job:
    """The job on a mesh of two ranks for each axis that has more, with a layer of each kind."""
    layout = job.layout
    sizes = {
        axis: min(2, getattr(layout, axis))
        for axis in ("dp_replicate", "dp_shard", "cp", "tp", "pp", "ep", "expert_tp")
    }
    if layout.pp > 2:
        sizes["pp"] = 3  # a first, a middle and a last stage differ
    ranks = sizes["dp_replicate"] * sizes["dp_shard"] * sizes["cp"] * sizes["tp"] * sizes["pp"]
    fits = sizes["dp_shard"] * sizes["cp"] * sizes["tp"] % (sizes["ep"] * sizes["expert_tp"]) == 0
    if not fits:
        sizes["ep"] = sizes["expert_tp"] = 1
    passes = min(job.microbatches, 2 * sizes["pp"]) if sizes["pp"] > 1 else min(job.microbatches, 2)
    stages = len(job.stage_sizes) // layout.pp * sizes["pp"] if layout.pp > 1 else 1
    specs = tuple(dict.fromkeys(layer_specs(job.config)))
    moe = job.config.moe
    config = replace(
        job.config, layers=specs * stages, layer_pattern=None, num_layers=len(specs) * stages,
        moe=None if moe is None else replace(moe, first_dense=0, every=1),
    )  # fmt: skip
    stage = (len(specs),) * stages if layout.pp > 1 else None
    sequence = min(job.sequence, 128 * sizes["cp"])
    return replace(
        job, config=config, ranks=ranks, layout=ParallelLayout(**sizes), batch=passes,
        microbatches=passes, sequence=sequence, stage=stage,
    )  # fmt: skip


def _narrow(config: TransformerConfig) -> TransformerConfig:
    """The config with small widths, as types need no others, and nothing that is drawn."""
    width = config.num_heads * 8
    changes: dict[str, object] = {
        "hidden_size": width, "head_dim": 8, "ffn_size": 4 * width, "vocab_size": 256,
        "dropout": 0.0, "attention_dropout": 0.0, "embedding_dropout": 0.0,
    }  # fmt: skip
    # No layer has its own of these.
    shared = ("head_dim", *(name for name, value in changes.items() if value == 0.0))
    if isinstance(latent := config.attention_variant, LatentAttention):
        small = replace(
            latent, kv_lora_rank=16, q_lora_rank=None if latent.q_lora_rank is None else 16,
            qk_nope_head_dim=8, qk_rope_head_dim=8, v_head_dim=8,
        )  # fmt: skip
        changes |= {"mla": None, "attention": small, "head_dim": None}
    if config.mamba is not None and config.mamba.num_heads is None:
        changes["mamba"] = replace(config.mamba, head_dim=8)
    layers = tuple(
        LayerSpec(spec.letter, **{n: v for n, v in spec.changes if n not in shared})
        for spec in config.layers or ()
    )
    return replace(config, **{**changes, "layers": layers})  # type: ignore[arg-type]


def wrong_types(job: Job) -> list[str]:
    """What `lamina.models.parallel_types` says of the model on a small mesh."""
    if find_spec("spmd_types") is None:
        return ["types of parallelism are not checked: pip install lamina-models[types]"]
    if job.make is not None:
        return ["types of parallelism are not checked: the job makes its own model (make=)"]
    from lamina.models.parallel_types import ParallelTypeError, check_types

    small = _small(job)
    config = _narrow(small.config)
    with init_distributed("fake", rank=0, world_size=small.ranks):
        mesh = small.layout.build("cpu")
        ids = torch.zeros(1, small.sequence, dtype=torch.int64)
        try:
            check_types(GPTModel(config, mesh), ids, ids, mesh=mesh)
        except ParallelTypeError as error:
            return [f"types of parallelism: {error}"]
    return []


@dataclass(frozen=True)
class Call:
    """A collective of a rank: the ranks of its group, and what it sends."""

    group: tuple[int, ...]
    what: str


def waits_of(job: Job) -> list[str]:
    """Whether ranks would wait for each other: every rank of a small mesh is played."""
    small = _small(job)
    orders: dict[int, list[Call]] = {}
    for rank in range(small.layout.pp):
        played = play(small, rank)
        per_stage = small.ranks // small.layout.pp
        for other in range(per_stage):
            own = rank * per_stage + other
            orders[own] = [
                Call(_members(small, own, message.axis), f"{message.op} of {message.nbytes} bytes")
                for message in played.record.messages
                # Sends of a pipeline are matched by the schedule, which the plan has run.
                if message.axis not in ("pp", "embedding")
            ]
    return standstill(orders)


def _members(job: Job, rank: int, axis: str) -> tuple[int, ...]:
    """The ranks that share an axis with a rank; of axes that are no single one, all of a stage."""
    layout = job.layout
    sizes = {
        "pp": layout.pp, "dp_replicate": layout.dp_replicate, "dp_shard": layout.dp_shard,
        "cp": layout.cp, "tp": layout.tp,
    }  # fmt: skip
    per_stage = job.ranks // layout.pp
    if axis not in sizes:
        first = rank // per_stage * per_stage
        return tuple(range(first, first + per_stage))
    names = list(sizes)
    stride = 1
    for name in names[names.index(axis) + 1 :]:
        stride *= sizes[name]
    place = rank // stride % sizes[axis]
    return tuple(rank + (other - place) * stride for other in range(sizes[axis]))


def standstill(orders: Mapping[int, Sequence[Call]]) -> list[str]:
    """Run the ranks' collectives, each when all of its group have come to it.

    Args:
        orders: for each rank its collectives, in the order in which it issues them.

    Returns:
        A sentence on the ranks that wait for ever, or on collectives of a group that differ; an
        empty list if all end.

    Examples:
        >>> both, call = (0, 1), "all_reduce"
        >>> standstill({0: [Call(both, call)], 1: [Call(both, call)]})
        []
    """
    places: Counter[int] = Counter()
    while True:
        waiting = {r: calls[places[r]] for r, calls in orders.items() if places[r] < len(calls)}
        if not waiting:
            return []
        ready = next(
            (
                call.group
                for call in waiting.values()
                if all(r in waiting and waiting[r].group == call.group for r in call.group)
            ),
            None,
        )
        if ready is None:
            parts = [
                f"rank {rank} waits in {call.what} for ranks {list(call.group)}"
                for rank, call in sorted(waiting.items())
            ]
            return ["collectives stand still: " + "; ".join(parts[:8])]
        kinds = {waiting[rank].what for rank in ready}
        if len(kinds) > 1:
            return [f"ranks {list(ready)} do not send the same: {', '.join(sorted(kinds))}"]
        places.update(ready)
