"""`--dry-run`: what each rank of a run would hold, compute and send, and how long a step takes.

The planner of `lamina.models` plays a step of the run's own model, settings and schedule on meta
tensors, as one rank of a world that is not there. So the numbers are the engine's own, and a model
of any size takes a laptop.
"""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import replace

import torch
from build import (
    Shape,
    choices,
    compute_dtype,
    make_model,
    model_shape,
    whole_size,
)
from config import Config, check, unused
from data import load_tokenizer
from options import load, refusals
from torch import nn

from lamina.mesh import LayoutError, ParallelMesh, init_distributed
from lamina.models import TransformerConfig, training_flops_per_token
from lamina.models.plan import Job, Plan, plan

META = torch.device("meta")


def dry_run(arguments: list[str]) -> None:
    """Print the plan of a run; exit with status 2 if it cannot run, and say why."""
    with refusals():
        config = load(arguments, "cpu")
        ranks = ranks_of(config)
        check(config, ranks)
        with init_distributed("fake", rank=0, world_size=ranks):
            about = describe_run(config, config.layout().build("cpu"))
            disk = what_it_writes(config)
        print(*unused(config, "cuda"), *about, planned(config, ranks), disk, sep="\n")


def ranks_of(config: Config) -> int:
    """The ranks that were asked for, or those of the plan if they fill the mesh, or the fewest."""
    planned = (config.plan.ranks,) if config.plan.ranks else ()
    for ranks in (*planned, *range(1, 1 << 20)) if config.ranks < 1 else ():
        try:
            config.layout().validate(ranks)
        except LayoutError:
            continue
        return ranks
    return config.ranks


def describe_run(config: Config, mesh: ParallelMesh) -> list[str]:
    """Lines about the model, its batches and the ranks."""
    shape = _shape(config)
    length = config.model.sequence_length
    flops = training_flops_per_token(shape.language, length) / 1e9
    return [
        f"{config.model.name}: {whole_size(shape) / 1e9:.3f} billion parameters, {flops:.2f} GFLOP "
        f"per token, {config.train.batch_size} sequences of {length} tokens per step",
        f"\n{mesh.layout.world_size} ranks, planned by this one process, which uses no device"
        f"\n{mesh.describe(max_ranks=8).partition(chr(10))[2]}\n",
    ]


def what_it_writes(config: Config) -> str:
    """A line on what the run will put on the disk."""
    # Of each parameter the main weight and AdamW's two moments, in fp32 whatever the precision.
    nbytes = 3 * 4 * whole_size(_shape(config))
    # A run says whether its steps were healthy, so the checkpoint before the newest stays too.
    every, keep = config.checkpoint.every, max(2, config.checkpoint.keep)
    number = -(-config.train.steps // every)
    # The oldest one goes when the next one is whole.
    most = min(number, keep + 1)
    return (
        f"\ndisk: {config.run.directory or 'the directory of the run'} gets {number} checkpoints "
        f"of {_size(nbytes)}, one in {every} steps and one at the end, of which {keep} stay: up to "
        f"{_size(most * nbytes)} at once, beside the tokenised text and some MiB of records"
    )


def _size(nbytes: float) -> str:
    return f"{nbytes / 2**30:.2f} GiB" if nbytes >= 2**30 else f"{nbytes / 2**20:.2f} MiB"


def planned(config: Config, ranks: int) -> Plan:
    """Plan a run on the GPU that its settings name."""
    return plan(job_of(config, ranks), config.plan.gpu)


def job_of(config: Config, ranks: int) -> Job:
    """A run as the planner takes it. A rank with fewer sequences than others is given as many."""
    shape, layout = _shape(config), config.layout().validate(ranks)
    copies = layout.dp_replicate * layout.dp_shard
    passes = config.parts(copies - 1, copies)
    sequences = max(len(part.samples) for part in passes)
    precision = config.train.precision
    return Job(
        config=shape.language,
        ranks=ranks,
        layout=layout,
        batch=sequences * len(passes),
        sequence=config.model.sequence_length,
        microbatches=len(passes),
        strategy=config.train.strategy,
        schedule=config.schedule,
        recompute=config.recompute,
        precision="bf16" if precision == "auto" else precision,
        compiled=config.compile,
        settings=choices(config, compute_dtype(config, META)),
        make=_maker(config, shape),
        inputs=shape.arguments,
    )


def _shape(config: Config) -> Shape:
    return model_shape(config, load_tokenizer(config.data.tokenizer).vocab_size)


def _maker(config: Config, shape: Shape) -> Callable[[TransformerConfig, ParallelMesh], nn.Module]:
    """Build models of fewer layers, too, as the planner asks for them; it recomputes by itself."""
    whole = replace(config, recompute="none")

    def make(language: TransformerConfig, mesh: ParallelMesh) -> nn.Module:
        return make_model(replace(shape, language=language), whole, mesh)

    return make
