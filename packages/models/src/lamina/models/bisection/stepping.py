"""One step of a model on a layout, recorded."""

from __future__ import annotations

from collections.abc import Callable
from contextlib import ExitStack
from dataclasses import dataclass, fields, replace
from typing import Any, Literal, cast, get_args

import torch
from torch import Tensor, nn

from lamina.ddp import finalize_grads, full_gradients, full_parameters
from lamina.fsdp import fully_shard, fully_shard_optimizer
from lamina.mesh import ParallelLayout, ParallelMesh, Role, role_of
from lamina.models.bisection.pieces import Share
from lamina.models.bisection.recording import Trace, recording
from lamina.models.decoder.gpt import GPTModel
from lamina.models.invariance.products import tree
from lamina.models.layers.loss import IGNORED
from lamina.models.layers.zigzag import cut_sequence
from lamina.models.pipelining.module import SumsGradients
from lamina.models.pipelining.pipeline import pipeline
from lamina.models.pipelining.schedule import Schedule

Loss = Literal["per_token", "mean"]

Inputs = Callable[[slice], dict[str, Tensor]]
"""Gives arguments of a forward, by name, for some of the sequences of the batch."""

Build = Callable[[ParallelMesh | None], GPTModel | tuple[GPTModel, Inputs]]
"""Builds the model for a mesh, or for one process; and may say what forwards are given beside the
tokens and the labels."""

_Part = tuple[tuple[Tensor, Tensor], dict[str, Tensor]]
"""The arguments of a microbatch's forward."""


@dataclass(frozen=True)
class Step:
    """What a layout trains in a step, and how.

    Attributes:
        layout: the sizes of the axes; None is one process without a wrapper.
        sequences: in the batch.
        length: tokens of a sequence.
        rows: sequences of a microbatch on a rank.
        strategy: the number of the data-parallel strategy.
        schedule: of the pipeline, if the layout has one.
        loss: `per_token`, or the `mean` of the microbatches' means.
        ignored: whether the first tokens of sequences have no labels. A pipeline takes its
            microbatches for one, so with `mean` and without labels it has another loss.
        seed: of the tokens.
    """

    layout: ParallelLayout | None = None
    sequences: int = 4
    length: int = 64
    rows: int = 1
    strategy: int = 3
    schedule: Schedule = "1f1b"
    loss: Loss = "per_token"
    ignored: bool = True
    seed: int = 0

    @staticmethod
    def parse(text: str, common: Step) -> Step:
        """Read `"tp 2, dp_shard 2, strategy 1"`; what it leaves out is as in `common`.

        Raises:
            ValueError: a word that is neither an axis nor a setting, or a value that is none.
        """
        axes = {each.name: 1 for each in fields(ParallelLayout)}
        settings: dict[str, Any] = {}
        for part in filter(None, (part.strip() for part in text.split(","))):
            name, _, value = part.replace("=", " ").partition(" ")
            kinds: dict[str, Any] = {**dict.fromkeys((*axes, "rows", "strategy"), int),
                                     "schedule": str}  # fmt: skip
            try:
                (axes if name in axes else settings)[name] = kinds[name](value.strip())
            except (KeyError, ValueError):
                raise ValueError(
                    f"{part!r} of the layout {text!r} is no size of an axis and no setting: write "
                    f"words of {', '.join(kinds)} with a value, as in 'tp 2, dp_shard 2'"
                ) from None
        return replace(common, layout=ParallelLayout(**axes), **settings)

    @property
    def world(self) -> int:
        """The number of ranks."""
        layout = self.layout
        if layout is None:
            return 1
        return layout.dp_replicate * layout.dp_shard * layout.cp * layout.tp * layout.pp

    def batch(self, vocabulary: int) -> tuple[Tensor, Tensor]:
        """The tokens and labels of all ranks."""
        generator = torch.Generator().manual_seed(self.seed)
        shape = self.sequences, self.length + 1
        text = torch.randint(vocabulary, shape, generator=generator)
        labels = text[:, 1:].clone()
        if self.ignored:
            for row in range(self.sequences):
                labels[row, : (7 * row + 3) % (self.length // 2)] = IGNORED
        return text[:, :-1], labels


def record_step(
    build: Build, step: Step, *, mesh: ParallelMesh | None = None, rank: int = 0
) -> Trace:
    """Run a step and record it; collective over the mesh's ranks.

    Args:
        build: makes the model, with the same weights for every mesh.
        step: what is trained.
        mesh: of `step.layout`; None is one process.
        rank: of this process in the job.

    Raises:
        ValueError: the batch does not fit the layout.
    """
    made = build(mesh)
    model, inputs = made if isinstance(made, tuple) else (made, _nothing)
    if step.loss not in get_args(Loss):
        raise ValueError(f"loss {step.loss!r}: choose one of {', '.join(get_args(Loss))}")
    if step.loss == "mean" and step.ignored and mesh is not None and mesh.layout.pp > 1:
        raise ValueError(
            "loss='mean' on a pipeline, which takes the mean over all its microbatches, and tokens "
            "without labels: take ignored=False, or loss='per_token'"
        )
    share = Share.of(mesh, step.sequences, step.length, step.rows, rank)
    ranks = share.axes["dp"][1] * share.axes["cp"][1]
    trace = Trace(share, 1.0 if step.loss == "per_token" else 1.0 / ranks)
    roles = {name: role_of(parameter) for name, parameter in model.named_parameters()}
    tokens, labels = step.batch(model.config.vocab_size)
    rows = [share.rows_of(at) for at in range(share.microbatches)]
    parts = [((tokens[each], labels[each]), inputs(each)) for each in rows]
    if mesh is None:
        _train_alone(model, step, parts, trace, roles)
    else:
        _train_on_mesh(model, step, mesh, parts, trace, roles)
    return trace


def _train_alone(
    model: GPTModel,
    step: Step,
    parts: list[_Part],
    trace: Trace,
    roles: dict[str, Role],
) -> None:
    """Train in one process, with sums over microbatches in the tree of law 2."""
    parameters = dict(model.named_parameters())
    trace.add_parameters("parameter before", parameters, roles)
    gradients: dict[str, list[Tensor]] = {name: [] for name in parameters}
    with recording(dict(model.named_modules()), trace):
        for part in parts:
            _backward(model, step, part, len(parts))
            for name, parameter in parameters.items():
                if parameter.grad is not None:
                    gradients[name].append(parameter.grad)
                    parameter.grad = None
    count = sum(int((labels != IGNORED).sum()) for (_, labels), _ in parts)
    for name, each in gradients.items():
        if each:
            total = tree(each)
            parameters[name].grad = total / count if step.loss == "per_token" else total
    grads = {name: p.grad for name, p in parameters.items() if p.grad is not None}
    trace.add_parameters("gradient of parameter", grads, roles)
    _optimizer(model).step()
    trace.add_parameters("parameter after", parameters, roles)


def _train_on_mesh(
    model: GPTModel,
    step: Step,
    mesh: ParallelMesh,
    parts: list[_Part],
    trace: Trace,
    roles: dict[str, Role],
) -> None:
    """Train under `fully_shard`, through the pipeline that the layout has."""
    per_token = step.loss == "per_token"

    def wrap(module: nn.Module) -> Any:
        return fully_shard(
            module, device_mesh=mesh, zero_dp_strategy=step.strategy, reproducible=True,
            invariant=model.config.invariant, calculate_per_token_loss=per_token,
        )  # fmt: skip

    runner = None
    if mesh.layout.pp > 1:
        runner = pipeline(model, mesh, step.schedule, len(parts), wrap=wrap)
    stages = [wrap(model)] if runner is None else list(runner.stages)
    for stage in stages:
        trace.add_parameters("parameter before", full_parameters(stage), roles)
    modules = {name: each for stage in stages for name, each in stage.named_modules()}
    with recording(modules, trace):
        if runner is not None:
            batch = (torch.cat(each) for each in zip(*(given for given, _ in parts), strict=True))
            named = {name: torch.cat([by[name] for _, by in parts]) for name in parts[0][1]}
            runner.step(*batch, **named)
        else:
            stage = stages[0]
            for at, part in enumerate(parts):
                with ExitStack() as stack:
                    if at < len(parts) - 1:
                        stack.enter_context(cast(SumsGradients, stage).no_sync())
                    _backward(stage, step, part, len(parts))
            axis = mesh.axis("cp") if mesh.layout.cp > 1 else None
            counts = [(cut_sequence(labels, axis) != IGNORED).sum() for (_, labels), _ in parts]
            finalize_grads(stage, mesh, num_tokens=sum(counts) if per_token else None)
    for stage in stages:
        trace.add_parameters("gradient of parameter", full_gradients(stage), roles)
        fully_shard_optimizer(_optimizer(stage), stage).step()
        trace.add_parameters("parameter after", full_parameters(stage), roles)


def _nothing(rows: slice) -> dict[str, Tensor]:
    """The `Inputs` of a model that is given tokens and labels alone."""
    return {}


def _backward(model: nn.Module, step: Step, part: _Part, parts: int) -> None:
    """Forward and backward of a microbatch, whose loss is weighed so that gradients are added."""
    given, named = part
    if step.loss == "per_token":
        named = {**named, "reduction": "sum"}  # type: ignore[dict-item]
    loss = model(*given, **named)
    (loss if step.loss == "per_token" else loss / parts).backward()


def _optimizer(module: nn.Module) -> torch.optim.Optimizer:
    """An optimizer whose step is elementwise: law 2 says nothing of fused or foreach ones."""
    return torch.optim.SGD(module.parameters(), 0.1, foreach=False)
