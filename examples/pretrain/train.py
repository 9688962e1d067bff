"""Pretrain a language model on text: the main job, read from top to bottom.

python3 noxfile.py -s train                                       # all GPUs, or two CPU ranks
torchrun --nproc-per-node=2 examples/pretrain/train.py --help     # by hand
"""

from __future__ import annotations

import contextlib
import sys
from collections.abc import Sequence
from dataclasses import dataclass
from pathlib import Path

import torch
from build import Shape, Sharded, learning_rate, make_model, model_shape, shard, whole_size
from config import Config
from data import Windows, open_corpus, prepare, slice_of_step
from dry_run import dry_run
from evaluation import Evaluator
from metrics import Metrics
from options import configure
from report import opening, report
from run import Run, Stop, Stopping, open_run
from text import load_tokenizer
from torch.distributed.elastic.multiprocessing.errors import record

from lamina.checkpoint import (
    RESUME_EXIT_CODE,
    CheckpointManager,
    export_huggingface,
    import_huggingface,
)
from lamina.ddp import (
    Decision,
    HealthMonitor,
    Judgement,
    ReplicaMonitor,
    clip_grad_norm,
    finalize_grads,
)
from lamina.fsdp import ShardedModule
from lamina.mesh import ParallelMesh, Runtime, derive_seed, init_distributed, seed_everything
from lamina.models import PipelineRunner


@record  # torchrun then knows what a rank that failed had to say
def main() -> None:
    """Start this rank, read the settings, train."""
    if "--dry-run" in sys.argv:
        dry_run(sys.argv[1:])
        return
    with init_distributed() as runtime:
        train(configure(sys.argv[1:], runtime), runtime)


def train(config: Config, runtime: Runtime) -> None:
    """The recipe: ranks, model, text, sharding, checkpoints, loop, report."""
    # Ranks: an axis for each way to share the work. The model, so far without memory: this rank's
    # pieces over tp, cp and ep. What does not fit is refused here, before anything is written.
    mesh = config.layout().build(runtime.device.type)
    shape = model_shape(config, load_tokenizer(config.data.tokenizer).vocab_size)
    model = make_model(shape, config, mesh)
    parameters = whole_size(shape)

    # Text: the first rank tokenises it, once per run; all map it into memory.
    run = open_run(config, runtime)
    run.main_first(lambda: prepare(config.data, run.directory / "data"))
    corpus = open_corpus(config.data, run.directory / "data")
    samples = Windows(corpus.train, config.model.sequence_length)

    # Sharding: each rank gets its part of weights, gradients and optimizer state.
    model, optimizer = shard(model, config, mesh, runtime.device)

    # Checkpoints: the newest one, if there is one, says where to go on.
    # Each is written while training goes on. One that is damaged or was saved in an unhealthy step
    # is passed over for the one before it.
    checkpoints = CheckpointManager(
        run.directory / "checkpoints",
        keep_last=config.checkpoint.keep,
        scrub_rate=config.checkpoint.scrub * 2**20 or None,
        async_save=True,
        mesh=mesh,
    )
    health = HealthMonitor(
        nonfinite=config.health.nonfinite,
        spike=None if config.health.spike == "ignore" else config.health.spike,
        limit=config.health.limit,
        patience=config.health.patience,
        slow=config.health.slow,
        slow_steps=config.health.slow_steps,
    )
    replicas = None  # Copies of weights and optimizer state must stay equal, bit for bit.
    if config.health.replicas:
        copied, heal = config.health.replicas, config.health.heal
        replicas = ReplicaMonitor(stages_of(model), optimizer, mesh, steps=copied, heal=heal)
    state = {"model": model, "optimizer": optimizer, "health": health}
    done = checkpoints.restore(state, default=0, fallback=True, healthy=True)
    if done == 0 and Path(config.model.name).is_dir():
        import_huggingface(model, config.model.name, mesh=mesh)

    job = Job(run, mesh, shape, model, optimizer, samples, health, replicas)
    evaluator = Evaluator(run, model, shape, corpus, mesh.axis("dp"))
    stopping = Stopping(config.train.seconds)
    with Metrics(run, corpus, shape, done) as metrics:
        metrics.say(opening(parameters, corpus, samples, run))
        while done < config.train.steps and not stopping.reason:
            try:
                with metrics.watched(done), health.step():
                    found = step(job, done, metrics)
            except FloatingPointError as error:
                raise FloatingPointError(
                    f"step {done + 1}: {error}; the newest checkpoint is of step "
                    f"{checkpoints.latest() or 0}: lower --train.learning-rate"
                ) from None
            metrics.judged(done + 1, found)
            if found.decision is Decision.BACK:
                bad = health.batch(done)
                done = checkpoints.back(state, before=done)
                health.went_back(done, bad)
                continue
            done += 1
            stopping.agree(last=done == config.train.steps)
            metrics.step(done, found.loss, found.norm, optimizer.param_groups[0]["lr"])
            if stopping.reason or done % config.checkpoint.every == 0:
                metrics.saved(checkpoints.save(done, state, healthy=found.healthy))
            if not stopping.told and (stopping.reason or done % config.eval.every == 0):
                metrics.held_out(done, evaluator.held_out_loss())
        checkpoints.close()
        report(optimizer, parameters, evaluator, stopping, checkpoints, metrics, run)
    if config.run.export and not stopping.told:
        export_huggingface(model, config.run.export, mesh=mesh)
    if stopping.reason is Stop.PREEMPTED:
        raise SystemExit(RESUME_EXIT_CODE)  # torchrun --max-restarts starts it again


@dataclass(frozen=True)
class Job:
    """What a step works with."""

    run: Run
    mesh: ParallelMesh
    shape: Shape
    model: Sharded
    optimizer: torch.optim.Optimizer
    samples: Windows
    health: HealthMonitor
    replicas: ReplicaMonitor | None


def step(job: Job, number: int, metrics: Metrics) -> Judgement:
    """One optimizer step. Its learning rate and random numbers follow from its number.

    So do its samples, until `health` passes over batches.

    Returns:
        The mean loss of all ranks (nats per token), the norm of the whole gradient before
        clipping, and whether these were healthy. If not, the weights are as they were.

    Raises:
        FloatingPointError: they were not, and training is to stop.
        ReplicaError: ranks hold copies of weights or optimizer state that differ.
    """
    config, mesh, model, health = job.run.config, job.mesh, job.model, job.health
    seed, train, dp = config.run.seed, config.train, mesh.axis("dp")
    seed_everything(derive_seed(seed, "step", number), mesh).begin_training()
    for group in job.optimizer.param_groups:
        group["lr"] = learning_rate(number, train)

    with metrics.timed("data"):
        batch = health.batch(number)
        parts = config.parts(dp.rank, dp.size)
        places = [place for part in parts for place in part.samples]
        mine = slice_of_step(batch, seed, len(job.samples), train.batch_size, places)
        inputs, labels = job.samples.batch(mine, job.run.runtime.device)
    if isinstance(model, PipelineRunner):
        model.step(**job.shape.arguments(inputs, labels))
        for part in model.losses:  # on the ranks of the last stage; their sum is the batch's loss
            health.note(part * len(model.losses))
    else:
        sizes = [len(part.samples) for part in parts]
        for index, piece in enumerate(zip(inputs.split(sizes), labels.split(sizes), strict=True)):
            part, last = parts[index], index == len(parts) - 1
            with contextlib.nullcontext() if last else model.no_sync():
                loss = model(**job.shape.arguments(*piece))
                # Of all ranks and passes the mean is the batch's loss.
                health.note(loss.detach().double() * (part.weight * len(parts)))
                # Sums over sequences have the same bits on any number of ranks, means do not.
                (loss * (part.counted if train.reproducible else part.weight)).backward()
        if isinstance(model, ShardedModule):  # sums over tp, and what else a step ends with
            counted = sum(part.counted for part in parts) if train.reproducible else None
            finalize_grads(model, mesh, num_tokens=counted)

    clip_grad_norm(stages_of(model), train.clip_norm, mesh, health=health, replicas=job.replicas)
    if health.last.decision is Decision.STEP:
        job.optimizer.step()
    job.optimizer.zero_grad()
    return health.last


def stages_of(model: Sharded) -> torch.nn.Module | Sequence[torch.nn.Module]:
    """What this rank holds: its pipeline stages, or the model."""
    return model.stages if isinstance(model, PipelineRunner) else model


if __name__ == "__main__":
    main()
