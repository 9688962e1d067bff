"""`pipeline`: cutting a model into stages over the ranks of `pp`, which torch's schedules run."""

import warnings
from collections.abc import Callable, Sequence

import torch
from torch import nn
from torch.distributed.device_mesh import DeviceMesh

from lamina.collectives.engine import CommonFacts, broadcast, describe, software
from lamina.ddp.engine import HasGroups, groups_of
from lamina.mesh import ParallelMesh
from lamina.mesh.engine import DENSE_AXES, MeshAxis, mesh_axis
from lamina.models.base.config import TransformerConfig
from lamina.models.base.initialise import check_same_seed
from lamina.models.base.mesh_axes import axis_of
from lamina.models.decoder.gpt import HOOKS, GPTModel, require_gpt
from lamina.models.decoder.precision_backends import amax_exchanges
from lamina.models.pipelining.cuts import Layout, cut_layers, resolve_layout
from lamina.models.pipelining.module import GPTStage, OncePerStep
from lamina.models.pipelining.runner import PipelineRunner
from lamina.models.pipelining.schedule import (
    Schedule,
    make_schedule,
    number_of_stages,
    schedule_kind,
)


def pipeline(
    model: GPTModel,
    mesh: ParallelMesh | DeviceMesh,
    schedule: Schedule = "1f1b",
    num_microbatches: int = 1,
    layout: Sequence[int] | Sequence[Sequence[int]] | None = None,
    *,
    stages_per_rank: int | None = None,
    wrap: Callable[[GPTStage], nn.Module] | None = None,
    device: torch.device | str | None = None,
    dtype: torch.dtype | None = None,
    each_microbatch: bool = False,
    sequence: int | None = None,
) -> PipelineRunner:
    """Cut a model into pipeline stages, and make the runner that trains them.

    Every rank builds the whole model (a large one on the meta device) and keeps its stages. `model`
    must not be used afterwards. Parameters keep the names that they have in the whole model.

    Args:
        model: the whole model, built for this mesh, with the same seed on every pipeline rank.
        mesh: has an axis `pp`. A model with tied embeddings, or with `mtp`, needs a ParallelMesh.
        schedule: `gpipe`, `1f1b`, `interleaved_1f1b`, `looped_bfs`,
            `interleaved_zero_bubble`, `zbv_zero_bubble` or `dualpipev`.
        num_microbatches: the number of pieces that a batch is cut into; they may differ in size.
        layout: the number of layers of each stage (`[3, 5, 5, 3]`), or the layers themselves. By
            default layers are cut by cost, including that of embedding and head.
        stages_per_rank: for interleaved and breadth-first schedules, 2 or more (default 2).
        wrap: makes a stage data-parallel: `lambda stage: fully_shard(stage, device_mesh=mesh)` or
            `lambda stage: DistributedDataParallel(stage, config, mesh)`. None leaves stages bare.
        device: where stages on the meta device are materialised before `wrap`; None leaves that
            to `wrap`.
        dtype: the dtype of activations between stages; by default the compute dtype of weights.
        each_microbatch: gather units of `fully_shard` and sum their gradients at every microbatch
            instead of once per step. This takes less memory and sends more.
        sequence: tokens per sequence in training, on which the cost of attention depends if
            layers are cut by cost; by default `max_sequence_length`.

    Returns:
        A runner: `loss = runner.step(tokens, labels)`, then the optimizer.

    Raises:
        TypeError: for another model than a `GPTModel`.
        ValueError: for a schedule, layout, number of microbatches or mesh that do not fit together,
            and for modules, hooks or methods that were added to the model and no stage would have.
        DisagreementError: for another configuration than other ranks have.

    Examples:
        >>> config = TransformerConfig(vocab_size=256, hidden_size=64, num_layers=2, num_heads=4)
        >>> runner = pipeline(GPTModel(config), ParallelLayout().build("cpu"), num_microbatches=2)
        >>> tokens = torch.randint(256, (2, 17))
        >>> loss = runner.step(tokens[:, :-1], tokens[:, 1:])
    """
    model = require_gpt(model, "pipeline()")
    if isinstance(mesh, DeviceMesh) and "pp" not in (mesh.mesh_dim_names or ()):
        raise ValueError(
            f"the mesh has dimensions {mesh.mesh_dim_names}: name the pipeline's 'pp', or build it "
            "with lamina.mesh.ParallelLayout(pp=...)"
        )
    axis, kind = mesh_axis(mesh, "pp"), schedule_kind(schedule)
    _refuse_unread(model, layout, wrap, device, sequence, each_microbatch=each_microbatch)
    if axis.size == 1:
        _warn_of_one_stage(layout, stages_per_rank, sequence)
    cut = _layout(model.config, schedule, axis.size, stages_per_rank, layout, sequence)
    mine = (0,) if axis.size == 1 else kind.stages_of(axis.rank, axis.size, len(cut))
    _require_same(mesh, axis, (model.config, schedule, num_microbatches, cut, each_microbatch))
    _check(model, mesh, axis, wrap)
    end, copies = len(cut) - 1, 0 in mine and len(cut) > 1
    modules = [
        GPTStage(model, cut[at], first=at == 0, last=at == end, copies=copies) for at in mine
    ]
    for stage in modules if device is not None else ():
        if any(parameter.is_meta for parameter in stage.parameters()):
            stage.to_empty(device=device)
            stage.init_weights()
    if model.reads_embedding_last and not kind.v_shape:  # in a V shape one rank has both ends
        _spread_embedding(modules, mesh)
    wrapped = [module if wrap is None else wrap(module) for module in modules]
    for module in wrapped:
        if isinstance(module, OncePerStep) and not each_microbatch:
            module.gather_once_per_step()
            module.reduce_once_per_step()
    where = _device_of(mesh)
    dtype = _activation_dtype(wrapped[0], modules[0], axis, dtype, where)
    from lamina.models.pipelining.stage import LaminaStage  # imports torch._dynamo

    if all(parameter.is_meta for stage in modules for parameter in stage.parameters()):
        where = torch.device("meta")  # a plan: what stages hand on has no values either
    group, split = axis.sibling("pipeline"), kind.splits_backward
    stages = [
        LaminaStage(module, stage, at, len(cut), where, group, dtype, splits_backward=split)
        for at, module, stage in zip(mine, wrapped, modules, strict=True)
    ]
    return PipelineRunner(
        stages,
        make_schedule(schedule, stages, num_microbatches),
        num_microbatches,
        mesh,
        cut,
        last=kind.rank_of_last(axis.size),
    )


def _refuse_unread(
    model: GPTModel,
    layout: object,
    wrap: object,
    device: torch.device | str | None,
    sequence: int | None,
    *,
    each_microbatch: bool,
) -> None:
    """Raise ValueError for an argument that another one leaves without effect."""
    there = {parameter.device.type for parameter in model.parameters()} - {"meta"}
    elsewhere = device is not None and bool(there - {torch.device(device).type})
    for name, given, because in (
        ("sequence", sequence is not None and layout is not None, "layout says the stages' layers"),
        ("each_microbatch", each_microbatch and wrap is None, "wrap=None has nothing to gather"),
        ("device", elsewhere, f"model is on {', '.join(there)} already, and not on meta"),
    ):
        if given:
            raise ValueError(f"{name} has no effect: {because}; leave {name} out")


def _warn_of_one_stage(layout: object, stages_per_rank: int | None, sequence: int | None) -> None:
    """Name what a mesh without a pipeline passes over: a program may run there to be tried."""
    cuts = {"layout": layout, "stages_per_rank": stages_per_rank, "sequence": sequence}
    given = [f"{name}={value!r}" for name, value in cuts.items() if value is not None]
    if given:
        why = "the mesh has pp=1, and so one stage with all layers"
        warnings.warn(f"{', '.join(given)} without effect: {why}", stacklevel=3)


def _layout(
    config: TransformerConfig,
    schedule: Schedule,
    ranks: int,
    stages_per_rank: int | None,
    layout: Sequence[int] | Sequence[Sequence[int]] | None,
    sequence: int | None,
) -> Layout:
    """Layers of each stage."""
    wanted = None if layout is None else resolve_layout(layout, config.num_layers)
    if ranks == 1:  # one stage, which runs microbatch after microbatch
        return (tuple(range(config.num_layers)),)
    length = None if layout is None else len(layout)
    num_stages = number_of_stages(schedule, ranks, stages_per_rank, length)
    return cut_layers(config, num_stages, sequence) if wanted is None else wanted


def _require_same(mesh: ParallelMesh | DeviceMesh, axis: MeshAxis, given: Sequence[object]) -> None:
    """Compare over all ranks of the mesh what a pipeline is made of."""
    names = DENSE_AXES if isinstance(mesh, ParallelMesh) else mesh.mesh_dim_names or ()
    groups = [mesh_axis(mesh, name).group for name in reversed(names)]
    here = f"rank {axis.ranks[axis.rank]} (pp={axis.rank})"
    labels = "config", "schedule", "num_microbatches", "layers of each stage", "each_microbatch"
    facts = zip(labels, map(describe, given), strict=True)
    CommonFacts("pipeline", groups, here, mesh.device_type).require([*software(), *facts])


def _check(
    model: GPTModel,
    mesh: ParallelMesh | DeviceMesh,
    axis: MeshAxis,
    wrap: Callable[[GPTStage], nn.Module] | None,
) -> None:
    if axis.size > 1:
        _check_ends(model)
    _check_additions(model)
    _check_axes(model, mesh)
    if not isinstance(mesh, ParallelMesh):
        if model.reads_embedding_last and axis.size > 1:
            raise ValueError(
                "tied embeddings, and those that mtp reads, lie on two stages, and a DeviceMesh "
                "does not say which ranks share them: build the mesh with "
                "lamina.mesh.ParallelLayout(pp=...), or untie them and leave mtp out"
            )
        if wrap is None:
            raise ValueError("bare stages need a ParallelMesh, which says who holds copies")
    elif wrap is None and mesh.axis("dp_cp").size > 1:
        raise ValueError(
            f"the mesh has {mesh.axis('dp_cp').size} data-parallel ranks ({mesh!r}), and wrap is "
            "None, so nobody would sum gradients over them: pass "
            "wrap=lambda stage: fully_shard(stage, device_mesh=mesh)"
        )
    if axis.size > 1:
        check_same_seed(model.seed, axis)


_PARTS = (
    "embedding",
    "position_embedding",
    "forward_numbers",
    "embedding_norm",
    "dropout",
    "blocks",
    "stream_sum",
    "final_norm",
    "head",
    "mtp",
)
# Methods that a step of the whole model calls. Stages use those of GPTModel or their own.
_CALLED = (
    "forward",
    "embed",
    "spread",
    "token_keys",
    "context",
    "final_states",
    "loss",
    "check_inputs",
    "_check_positions",
    "tie_weights",
)


def _check_ends(model: GPTModel) -> None:
    """Raise ValueError for what the last stage would need to embed later tokens, and lacks."""
    own = {"positions='learned'": model.position_embedding, "embedding_norm": model.embedding_norm}
    for name, module in own.items():
        if model.mtp is not None and module is not None:
            raise ValueError(
                f"{name} beside mtp={model.config.mtp} in a pipeline: the last stage has no copy "
                "of it; leave one out, or train without pipeline()"
            )


def _check_additions(model: GPTModel) -> None:
    """Raise ValueError for additions to the model, as stages take only its blocks and its ends."""
    exchanges = amax_exchanges(model)
    hooks = [hook for kind in HOOKS for hook in getattr(model, kind).values()]
    added = {
        "modules": [name for name in model._modules if name not in _PARTS],
        "parameters and buffers": [*model._parameters, *model._buffers],
        "hooks": [getattr(h, "__name__", type(h).__name__) for h in hooks if h not in exchanges],
        "methods": _changed_methods(model),
        "blocks": [str(i) for i in range(model.config.num_layers, len(model.blocks))],
    }
    for kind, names in added.items():
        if names:
            raise ValueError(
                f"the {type(model).__name__} has {kind} of its own that no stage would have "
                f"({', '.join(names)}): put them into the blocks, the embedding or the head (and "
                "count blocks in num_layers of TransformerConfig), or into wrap="
            )
    if len(model.blocks) < model.config.num_layers:
        raise ValueError(
            f"the model has {len(model.blocks)} blocks, and num_layers of its TransformerConfig is "
            f"{model.config.num_layers}: they must be equal"
        )


def _changed_methods(model: GPTModel) -> list[str]:
    """Overridden methods, of a subclass or the instance; stages would call GPTModel's instead."""
    names = list(_CALLED)
    if any(parameter.is_meta for parameter in model.parameters()):
        names.append("init_weights")
    return [
        name
        for name in names
        if name in vars(model) or getattr(type(model), name) is not getattr(GPTModel, name)
    ]


def _check_axes(model: GPTModel, mesh: ParallelMesh | DeviceMesh) -> None:
    """Raise ValueError for a model that is cut over other ranks than the mesh has.

    Otherwise gradients would not be summed over an axis that the model does not know, or a rank
    would take a part of the model for the whole.
    """
    cuts = {"cp": model.cp, "tp": model.axis}
    if model.config.moe is not None:
        cuts["ep"] = model.expert_axes.ep
    for name, cut in cuts.items():
        there = axis_of(mesh, name)
        sizes = [1 if axis is None else axis.size for axis in (cut, there)]
        if sizes[0] != sizes[1]:
            raise ValueError(
                f"the model is built for {name} {sizes[0]}, and the mesh has {name} {sizes[1]} "
                f"({mesh!r}): build it as GPTModel(config, mesh) with the mesh of pipeline()"
            )


def _spread_embedding(modules: Sequence[GPTStage], mesh: ParallelMesh | DeviceMesh) -> None:
    """Copy the values of an embedding that both ends have from the first stage to the last's."""
    axis = mesh.embedding_axis if isinstance(mesh, ParallelMesh) else None
    for module in modules:
        if axis is not None and module.first is not module.last:
            weight = module.embedding.weight
            if not weight.is_meta:
                broadcast(weight.data, axis.sibling("reduce"), src=0)


def _activation_dtype(
    wrapped: nn.Module,
    stage: GPTStage,
    axis: MeshAxis,
    given: torch.dtype | None,
    device: torch.device,
) -> torch.dtype:
    """The compute dtype of the first stage's embedding, on every rank."""
    known = [torch.float32, torch.bfloat16, torch.float16, torch.float64]
    dtype = given or torch.float32
    if given is None and stage.first:
        dtype = stage.embedding.weight.dtype
        for group in groups_of(wrapped) if isinstance(wrapped, HasGroups) else ():
            if any(ref.name == "embedding.weight" for ref in group.refs):
                dtype = group.dtypes.weights
    code = torch.tensor([known.index(dtype)], device=device)
    # This is also the first message over the communicator, for which NCCL needs all of its ranks.
    broadcast(code, axis.sibling("pipeline"), src=0)
    return known[int(code)]


def _device_of(mesh: ParallelMesh | DeviceMesh) -> torch.device:
    kind = mesh.device_type
    return torch.device(kind, torch.cuda.current_device()) if kind == "cuda" else torch.device(kind)
