"""A run to plan, and a step of it: the real mesh, wrappers, blocks, schedule and optimizer.

One process plays one rank of a world that is not there (torch's fake process group). On meta
tensors a step has no values and takes no memory, so models of any size can be played.
"""

from __future__ import annotations

import gc
import math
from collections.abc import Callable, Hashable, Iterator, Mapping, Sequence
from contextlib import AbstractContextManager, ExitStack, contextmanager, nullcontext
from dataclasses import dataclass, field, replace
from itertools import accumulate, pairwise
from typing import Any, Literal, NamedTuple, Protocol, cast, runtime_checkable

import torch
from torch import Tensor, nn
from torch.distributed.fsdp import CPUOffloadPolicy

import lamina.fsdp as fsdp
from lamina.ddp import clip_grad_norm, finalize_grads
from lamina.ddp.engine import HasGroups, groups_of
from lamina.mesh import ParallelLayout, ParallelMesh, init_distributed
from lamina.models.activation_memory.recompute import Kind, RecomputePolicy, apply_recompute
from lamina.models.base.computing_device import computes_on
from lamina.models.base.config import LayerSpec, TransformerConfig
from lamina.models.base.configs.product_precision import Precision
from lamina.models.compat import FakeTensorMode, forget_specs, specs_found_in
from lamina.models.decoder.gpt import GPTModel
from lamina.models.decoder.layer_stack import ResidualBlock, TransformerBlock
from lamina.models.pipelining.cuts import cut_layers
from lamina.models.pipelining.pipeline import pipeline
from lamina.models.pipelining.runner import PipelineRunner
from lamina.models.pipelining.schedule import Schedule, number_of_stages, schedule_kind
from lamina.models.plan.record.compiled import GraphRecorder, compiled
from lamina.models.plan.record.device_forms import device_forms
from lamina.models.plan.record.recorder import StepRecorder
from lamina.models.plan.record.step_record import StepRecord
from lamina.models.plan.record.storages import local_memory
from lamina.models.plan.record.torch_streams import Streams

BLOCKS = (TransformerBlock, ResidualBlock)
RANKS_PER_HOST = 8


@runtime_checkable
class _Accumulates(Protocol):
    def no_sync(self) -> AbstractContextManager[None]:
        """Inside, backwards are not the last of the step."""


@runtime_checkable
class RunsSchedule(Protocol):
    """Forward and backward of all microbatches are one call, as of a rank's pipeline stages.

    `schedule` is torch's, or None where ranks wait for no order of others.
    """

    schedule: Any

    def step(self, tokens: Tensor, labels: Tensor, /) -> object:
        """Forward and backward of a batch."""


Shard = Callable[[nn.Module, "Job", ParallelMesh], nn.Module]


@dataclass(frozen=True, kw_only=True)
class Job:
    """A run to plan.

    Args:
        config: the decoder's.
        ranks: GPUs of the whole run.
        layout: ranks per axis; -1 takes the ranks that the others leave.
        batch: sequences that a data-parallel rank takes in a step.
        sequence: tokens per sequence.
        microbatches: the passes in which it takes them.
        strategy: of `fully_shard`, 0 to 3 or a name.
        schedule: the order in which pipeline stages run microbatches.
        recompute: `none`, `selective`, `full`, `offload`, or a policy.
        precision: of products; `fp8` is `torch-fp8` where the config names no backend.
        compiled: whether Lamina's blocks are compiled: their graphs are played. A model of other
            blocks compiles them in `make`, by `compiled`. Otherwise the time alone changes.
        settings: further arguments of `fully_shard`.
        make: builds the model of a config on a mesh, if it is no `GPTModel`.
        shard: makes a model on the meta device data-parallel in place of `fully_shard`, such as
            `fsdp2`. Then it gets fake tensors (torch's `FakeTensorMode`) for its memory, which
            engines of others take for real ones, and AdamW. If what it returns has
            `step(tokens, labels)` and a `schedule` (torch's, or None), that call is the forward and
            backward of a step. Over `pp` it has them, and holds the rank's stages
            (`job.stages_of`).
        inputs: the model's arguments from tokens and labels.
        stage: layers per pipeline stage, if they are not cut by cost.

    Raises:
        ValueError: a batch that the microbatches do not divide, or weights that are offloaded.
        LayoutError: ranks that do not fill the layout.

    Examples:
        >>> from lamina.models.plan import Job
        >>> Job(config=preset("llama3-8b"), ranks=8, batch=2, sequence=8192).layout.dp_shard
        8
    """

    config: TransformerConfig
    ranks: int
    layout: ParallelLayout = field(default_factory=ParallelLayout)
    batch: int = 1
    sequence: int = 4096
    microbatches: int = 1
    strategy: int | str = 3
    schedule: Schedule = "1f1b"
    recompute: Kind | RecomputePolicy = "none"
    precision: Literal["bf16", "fp32", "fp8"] = "bf16"
    compiled: bool = False
    settings: Mapping[str, Any] = field(default_factory=dict)
    make: Callable[[TransformerConfig, ParallelMesh], nn.Module] | None = None
    shard: Shard | None = None
    inputs: Callable[[Tensor, Tensor], dict[str, Any]] | None = None
    stage: tuple[int, ...] | None = None

    def __post_init__(self) -> None:
        layout = self.layout.validate(self.ranks)
        if self.batch % self.microbatches:
            raise ValueError(
                f"batch={self.batch} sequences of a data-parallel rank and microbatches="
                f"{self.microbatches}: microbatches are equal, so they must divide the batch"
            )
        if isinstance(self.settings.get("offload_policy"), CPUOffloadPolicy):
            raise ValueError(
                "settings={'offload_policy': CPUOffloadPolicy()}: a plan has the memory of a GPU "
                "alone. Plan without it: then weights, gradients and optimizer state count, which "
                "would lie on the host"
            )
        changes: dict[str, Any] = {"max_sequence_length": self.sequence}
        if layout.tp > 1:
            multiple = math.lcm(self.config.vocab_multiple, layout.tp)
            changes |= {"vocab_multiple": multiple, "sequence_parallel": True}
        if self.config.moe is not None:
            # On meta tensors nobody knows which tokens an expert gets: as many as all others do.
            changes["moe"] = replace(self.config.moe, capacity_factor=1.0, pad_to_capacity=True)
        if self.precision == "fp8" and self.config.precision == Precision():
            changes["precision"] = Precision(backend="torch-fp8")
        object.__setattr__(self, "layout", layout)
        object.__setattr__(self, "config", replace(self.config, **changes))

    @property
    def data_ranks(self) -> int:
        """Ranks with sequences of their own."""
        return self.layout.dp_replicate * self.layout.dp_shard

    @property
    def tokens(self) -> int:
        """Tokens of a step, of all ranks."""
        return self.batch * self.sequence * self.data_ranks

    @property
    def stage_sizes(self) -> tuple[int, ...]:
        """Layers of each pipeline stage."""
        pp = self.layout.pp
        if pp == 1:
            return (self.config.num_layers,)
        if self.stage is not None:
            return self.stage
        stages = number_of_stages(self.schedule, pp, None, None)
        return tuple(map(len, cut_layers(self.config, stages, self.sequence)))

    def stages_of(self, rank: int) -> tuple[int, ...]:
        """The stages that a pipeline rank holds."""
        sizes, pp = self.stage_sizes, self.layout.pp
        return (0,) if pp == 1 else schedule_kind(self.schedule).stages_of(rank, pp, len(sizes))

    @property
    def stage_layers(self) -> list[tuple[int, ...]]:
        """The layers of each stage, by their numbers in the model."""
        ends = [0, *accumulate(self.stage_sizes)]
        return [tuple(range(start, end)) for start, end in pairwise(ends)]

    def with_one_layer(self) -> Job:
        """The same with one layer of a kind in each stage."""
        specs = layer_specs(self.config)
        return self._with([_one_of_each(specs, layers) for layers in self.stage_layers])

    def shallow(self, rank: int, least: int) -> list[Job]:
        """Three jobs with few layers, each with one more than the one before in each deep stage.

        What a deep stage lacks are layers that are alike, or whole periods of layers whose kinds
        repeat. A pipeline rank's deep stages lack as many each, so the job itself is on the line of
        the three. Stages of other ranks have one layer of a kind. The shallowest stage has `least`
        layers that are alike, or one period. Empty if no stage is deep.
        """
        specs, layers = layer_specs(self.config), self.stage_layers
        runs = {
            stage: longest_run([specs[at] for at in layers[stage]])
            for stage in self.stages_of(rank)
        }
        kept = {stage: least if run.period == 1 else 1 for stage, run in runs.items()}
        missing = [run.times - kept[s] for s, run in runs.items() if run.times > kept[s] + 2]
        if not missing:
            return []
        jobs = []
        for fewer in range(min(missing), min(missing) - 3, -1):
            few = [_one_of_each(specs, each) for each in layers]
            for stage, run in runs.items():
                deep = run.times > kept[stage] + 2
                without = run.period * fewer if deep else 0
                few[stage] = layers[stage][: run.end - without] + layers[stage][run.end :]
            jobs.append(self._with(few))
        return jobs

    def _with(self, stages: Sequence[Sequence[int]]) -> Job:
        """The same with stages of some of the layers."""
        config, sizes = self.config, tuple(map(len, stages))
        layers = [at for stage in stages for at in stage]
        changes: dict[str, Any] = {"num_layers": len(layers)}
        if config.layers or config.layer_pattern or (config.moe and config.moe.every > 1):
            specs = layer_specs(config)
            changes |= {"layers": tuple(specs[at] for at in layers), "layer_pattern": None}
        if config.moe is not None:
            # Where there are specifications, these say which layers have experts.
            dense = 0 if "layers" in changes else sum(not config.has_experts(at) for at in layers)
            changes["moe"] = replace(config.moe, first_dense=dense, every=1)
        stage = sizes if self.layout.pp > 1 else None
        return replace(self, config=replace(config, **changes), stage=stage)


def layer_specs(config: TransformerConfig) -> tuple[LayerSpec, ...]:
    """A specification of each layer, which says too whether there are experts."""
    specs = []
    for at, letter in enumerate(config.pattern):
        changes = dict(config.layers[at].changes) if config.layers else {}
        moe = config.of_layer(at).moe
        if moe is not None and letter == "T":
            # Which layers have experts follows from their place, and these may be in others.
            own = replace(moe, first_dense=0, every=1)
            changes["moe"] = own if config.has_experts(at) else None
        specs.append(LayerSpec(letter, **changes))
    return tuple(specs)


def _one_of_each(specs: Sequence[LayerSpec], layers: Sequence[int]) -> tuple[int, ...]:
    """The first of these layers of each kind."""
    first = {specs[at]: at for at in reversed(layers)}
    return tuple(sorted(first.values()))


class Run(NamedTuple):
    """A part of a list that repeats: its end, the length of what repeats, and how often it does."""

    end: int
    period: int
    times: int


def longest_run(kinds: Sequence[Hashable]) -> Run:
    """The part of a list that repeats what is in it most, by the shortest period of several."""
    best = Run(0, 1, 0)
    for period in range(1, len(kinds) // 3 + 1):
        alike = 0
        for at in range(period, len(kinds)):
            alike = alike + 1 if kinds[at] == kinds[at - period] else 0
            times = alike // period + 1
            if (times - 1) * period > (best.times - 1) * best.period:
                best = Run(at + 1, period, times)
    return best


@dataclass(frozen=True)
class Played:
    """One rank's steady step, what was before it, and the parameters of its modules.

    `before` is the record of how memory was made, and of the first step.
    """

    record: StepRecord
    before: StepRecord
    parameters: int


def play(
    job: Job, rank: int = 0, device_type: str = "cuda", backend: str | None = "fake"
) -> Played:
    """Play a steady step of one pipeline rank on meta tensors.

    Args:
        job: the run.
        rank: along `pp`; the first rank along the other axes.
        device_type: the device whose kernels attention and norms are counted as.
        backend: None if the process is a rank of a job already, and plays itself.

    Raises:
        ValueError: a layout, model or schedule that cannot run, as in the run itself.
        TypeError: over `pp`, a `shard` whose result has no step of its own.
    """
    rounded = 512 if device_type == "cuda" else 1
    place = "meta" if job.shard is None else "cpu"
    with ExitStack() as stack:
        stack.enter_context(device_forms(device_type))
        if job.compiled:
            stack.callback(torch.compiler.reset)  # graphs have the shapes of this job
        streams = stack.enter_context(Streams().recorded())
        tensors = None if job.shard is None else FakeTensorMode(allow_non_fake_inputs=True)
        kind = GraphRecorder if job.compiled else StepRecorder
        recorder = kind(place, rounded=rounded, streams=streams)
        inside: list[AbstractContextManager[object]] = [recorder]
        if tensors is not None:
            inside.insert(0, tensors)
            stack.enter_context(specs_found_in(recorder.unnoted))
        with program(job, rank, torch.device(place), backend, inside) as playing:
            playing.step(recorder.mark)  # makes the optimizer's state, and the order of gathers
            # A compiler leaves tensors in cycles. When the collector comes to them is chance, and
            # jobs of two depths would not have the same lives.
            gc.collect()
            before = recorder.next_record(playing.states)
            with _without_collector():
                playing.step(recorder.mark)
        # What torch leaves uncompiled in blocks that were given to it is not fused in a run either.
        given = any("_orig_mod" in module._modules for module in playing.module.modules())
        recorder.record.fused = recorder.record.fused or given
        return Played(recorder.record, before, playing.parameters)


@contextmanager
def _without_collector() -> Iterator[None]:
    """Inside, objects go when nothing refers to them, and none go by themselves."""
    if not gc.isenabled():
        yield
        return
    gc.disable()
    try:
        yield
    finally:
        gc.enable()


@dataclass(frozen=True)
class Program:
    """A job's modules on one rank: `step` runs a step and is given a function that hears of phases,
    `states` names the tensors that steps rest on.
    """

    module: nn.Module
    step: Callable[[Callable[[str], None] | None], None]
    states: Callable[[], dict[str, list[Tensor]]]

    @property
    def parameters(self) -> int:
        """Elements of the parameters that this rank holds."""
        return sum(parameter.numel() for parameter in self.module.parameters())


@contextmanager
def program(
    job: Job,
    rank: int,
    device: torch.device,
    backend: str | None = "fake",
    inside: Sequence[AbstractContextManager[object]] = (),
) -> Iterator[Program]:
    """Inside, a step of the job can be run on a device as the first rank of a pipeline stage.

    Without a backend the process group is there already. The memory of the model is made, and its
    steps run, in the contexts `inside`.
    """
    with ExitStack() as stack:
        if backend is not None:
            per_stage = job.ranks // job.layout.pp
            kind: dict[str, Any] = {"rank": rank * per_stage, "world_size": job.ranks}
            hosts = RANKS_PER_HOST if job.ranks % RANKS_PER_HOST == 0 else None
            stack.enter_context(init_distributed(backend, **kind, ranks_per_host=hosts))
        mesh = job.layout.build("cpu" if device.type == "meta" else device.type)
        # Without values there is no code to compile, and blocks become what a plan counts.
        compiler = compiled if inside or device.type == "meta" else torch.compile
        if job.shard is None:
            # A run has the model on the meta device first, where it takes nothing. So it is made
            # outside of what counts memory, and no name here keeps the layers of other stages.
            made = [_make(job, mesh, compiler)]
            _enter(inside, stack)
            module, optimizer = _shard(made.pop(), job, mesh, device)
        else:
            # DTensor keeps results by mesh, and takes the mesh of an earlier plan for this one if
            # it has as many ranks. The groups of that one are gone.
            forget_specs()
            module = job.shard(_make(job, mesh, compiler), job, mesh)
            if job.layout.pp > 1 and not isinstance(module, RunsSchedule):
                raise TypeError(
                    f"pp={job.layout.pp}, and what shard returned ({type(module).__name__}) has no "
                    "step(tokens, labels) with a schedule: return the rank's stages with both"
                )
            _enter(inside, stack)
            optimizer = adamw(module.to_empty(device=device))
        ids = torch.zeros(job.batch, job.sequence, dtype=torch.int64, device=device)

        def step(mark: Callable[[str], None] | None) -> None:
            if isinstance(module, RunsSchedule):
                module.step(ids, ids)
            else:
                _passes(module, job, mesh, ids)
            if mark is not None:
                mark("optimizer")
            if isinstance(module, PipelineRunner):
                clip_grad_norm(list(module.stages), 1.0, mesh)
            elif isinstance(module, HasGroups):
                clip_grad_norm(module, 1.0, mesh)
            else:
                nn.utils.clip_grad_norm_(module.parameters(), 1.0)
            optimizer.step()
            optimizer.zero_grad()

        yield Program(module, step, lambda: _states(module, optimizer))


def _enter(contexts: Sequence[AbstractContextManager[object]], stack: ExitStack) -> None:
    for context in contexts:
        stack.enter_context(context)


def _make(job: Job, mesh: ParallelMesh, compiler: Callable[[nn.Module], Any]) -> nn.Module:
    with torch.device("meta"):
        model = GPTModel(job.config, mesh) if job.make is None else job.make(job.config, mesh)
    if job.recompute != "none":
        model = apply_recompute(model, job.recompute)
    for parent in list(model.modules()) if job.compiled else ():
        for name, child in list(parent.named_children()):
            if isinstance(child, BLOCKS) and name != "_orig_mod":  # not what is compiled already
                setattr(parent, name, compiler(child))
    return model


def _passes(module: nn.Module, job: Job, mesh: ParallelMesh, ids: Tensor) -> None:
    """Forward and backward of each microbatch."""
    parts = ids.tensor_split(job.microbatches)
    for number, part in enumerate(parts):
        last = number == job.microbatches - 1
        named = {"tokens": part, "labels": part}
        named = named if job.inputs is None else job.inputs(part, part)
        with nullcontext() if last or not isinstance(module, _Accumulates) else module.no_sync():
            module(**named).backward()
    if isinstance(module, HasGroups):
        finalize_grads(module, mesh)


def _shard(
    model: nn.Module, job: Job, mesh: ParallelMesh, device: torch.device
) -> tuple[nn.Module, torch.optim.Optimizer]:
    """`fully_shard` of the model, or of each pipeline stage."""

    def settings(module: nn.Module) -> dict[str, Any]:
        kinds = [kind for kind in BLOCKS if any(isinstance(m, kind) for m in module.modules())]
        dtype = None if job.precision == "fp32" else torch.bfloat16
        return {
            "device_mesh": mesh,
            "device": device,
            "fsdp_unit_modules": kinds or None,
            "zero_dp_strategy": job.strategy,
            "mixed_precision_policy": fsdp.MixedPrecisionPolicy(param_dtype=dtype),
            **job.settings,
        }

    if job.layout.pp == 1:
        return fsdp.fully_shard(model, adamw(model), **settings(model))
    runner = pipeline(
        cast(GPTModel, model), mesh, job.schedule, job.microbatches, job.stage,
        sequence=job.sequence if job.stage is None else None,
        wrap=lambda stage: fsdp.fully_shard_model(stage, **settings(stage)),
    )  # fmt: skip
    return runner, fsdp.fully_shard_optimizer(adamw(runner), runner)


def adamw(model: nn.Module) -> torch.optim.AdamW:
    """AdamW; matrices decay, vectors do not."""
    trained = [parameter for parameter in model.parameters() if parameter.requires_grad]
    matrices, vectors = [p for p in trained if p.ndim >= 2], [p for p in trained if p.ndim < 2]
    groups = [{"params": p, "weight_decay": d} for p, d in ((matrices, 0.1), (vectors, 0.0)) if p]
    # torch steps over lists of a GPU's tensors by default, which takes temporaries of their size.
    lists = all(computes_on(local_memory(parameter)) == "cuda" for parameter in trained)
    return torch.optim.AdamW(groups, lr=1e-4, foreach=lists or None)


def _states(module: nn.Module, optimizer: torch.optim.Optimizer) -> dict[str, list[Tensor]]:
    """What a step rests on, and the gradients that are there now."""
    parameters = list(module.parameters())
    states: dict[str, list[Tensor]] = {
        "weights": [local_memory(parameter) for parameter in parameters],
        "gradients": [local_memory(p.grad) for p in parameters if p.grad is not None],
        "optimizer state": [
            local_memory(value)
            for state in optimizer.state.values()
            for value in state.values()
            if isinstance(value, Tensor)
        ],
    }
    stages = module.stages if isinstance(module, PipelineRunner) else [module]
    for stage in stages:
        for group in groups_of(stage) if isinstance(stage, HasGroups) else ():
            states["weights"] += [group.weights.local.data, group.main_weights.data]
            whole = getattr(group.weights, "full", None)  # strategy 3 has it by turns
            if isinstance(whole, Tensor):
                states.setdefault("gathered units", []).append(whole)
    return states
