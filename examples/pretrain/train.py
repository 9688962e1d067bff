"""Pretrain a language model on text: the main job, read from top to bottom.

python3 noxfile.py -s train                                       # all GPUs, or two CPU ranks
torchrun --nproc-per-node=2 examples/pretrain/train.py --help     # by hand
"""

from __future__ import annotations

import contextlib
import math
import sys
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
from run import Stop, Stopping, open_run
from text import load_tokenizer
from torch.distributed.elastic.multiprocessing.errors import record

from lamina.checkpoint import (
    RESUME_EXIT_CODE,
    CheckpointManager,
    export_huggingface,
    import_huggingface,
)
from lamina.ddp import clip_grad_norm, finalize_grads
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
    dp = mesh.axis("dp")
    tokenizer = load_tokenizer(config.data.tokenizer)
    shape = model_shape(config, tokenizer.vocab_size)
    model = make_model(shape, config, mesh)
    parameters = whole_size(shape)

    # Text: the first rank tokenises it, once per run; all map it into memory.
    run = open_run(config, runtime)
    run.main_first(lambda: prepare(config.data, run.data))
    corpus = open_corpus(config.data, run.data)
    samples = Windows(corpus.train, config.model.sequence_length)

    # Sharding: each rank gets its part of weights, gradients and optimizer state.
    model, optimizer = shard(model, config, mesh, runtime.device)

    # Checkpoints: the newest one, if there is one, says where to go on.
    # Each is written while training goes on. A damaged one is passed over for the one before it.
    checkpoints = CheckpointManager(
        run.checkpoints, keep_last=config.checkpoint.keep, async_save=True, mesh=mesh
    )
    state = {"model": model, "optimizer": optimizer}
    done = checkpoints.restore(state, default=0, fallback=True)
    if done == 0 and Path(config.model.name).is_dir():
        import_huggingface(model, config.model.name, mesh=mesh)

    evaluator = Evaluator(model, shape, corpus, config, dp, runtime)
    stopping = Stopping(config)
    with Metrics(config, run, corpus, shape, done) as metrics:
        metrics.say(opening(parameters, corpus, samples, config, run))
        while done < config.train.steps and not stopping.reason:
            with metrics.watched(done):
                loss, norm = step(done, model, optimizer, shape, samples, config, mesh, metrics)
            done += 1
            loss = stopping.share(loss, last=done == config.train.steps)
            if not math.isfinite(loss + norm):
                raise FloatingPointError(
                    f"step {done}: loss {loss}, gradient norm {norm}; the newest checkpoint is of "
                    f"step {checkpoints.latest() or 0}: lower --train.learning-rate"
                )
            metrics.step(done, loss, norm, optimizer.param_groups[0]["lr"])
            if stopping.reason or done % config.checkpoint.every == 0:
                metrics.saved(checkpoints.save(done, state))
            if not stopping.told and (stopping.reason or done % config.eval.every == 0):
                metrics.held_out(done, evaluator.held_out_loss())
        checkpoints.close()
        report(optimizer, parameters, evaluator, stopping, checkpoints, metrics, config, run)
    if config.run.export and not stopping.told:
        export_huggingface(model, config.run.export, mesh=mesh)
    if stopping.reason is Stop.PREEMPTED:
        raise SystemExit(RESUME_EXIT_CODE)  # torchrun --max-restarts starts it again


def step(
    number: int,
    model: Sharded,
    optimizer: torch.optim.Optimizer,
    shape: Shape,
    samples: Windows,
    config: Config,
    mesh: ParallelMesh,
    metrics: Metrics,
) -> tuple[float, float]:
    """One optimizer step. Its samples, learning rate and random numbers follow from its number.

    Returns:
        This rank's loss (nats per token) and the norm of the whole gradient before clipping.
    """
    seed, train, dp, device = config.run.seed, config.train, mesh.axis("dp"), metrics.device
    seed_everything(derive_seed(seed, "step", number), mesh).begin_training()
    for group in optimizer.param_groups:
        group["lr"] = learning_rate(number, train)

    with metrics.timed("data"):
        mine = slice_of_step(number, seed, len(samples), train.batch_size, dp.rank, dp.size)
        inputs, labels = samples.batch(mine, device)
    if isinstance(model, PipelineRunner):
        loss = model.step(**shape.arguments(inputs, labels)).item()
    else:
        loss = 0.0
        pieces = list(
            zip(inputs.chunk(train.microbatches), labels.chunk(train.microbatches), strict=True)
        )
        for index, piece in enumerate(pieces):
            last = index == len(pieces) - 1
            with contextlib.nullcontext() if last else model.no_sync():
                part = model(**shape.arguments(*piece)) / len(pieces)
                part.backward()
            loss += part.item()
        if isinstance(model, ShardedModule):
            finalize_grads(model, mesh)  # sums over tp, and what else a step ends with

    stages = model.stages if isinstance(model, PipelineRunner) else model
    norm = clip_grad_norm(stages, train.clip_norm, mesh)
    optimizer.step()
    optimizer.zero_grad()
    return loss, float(norm)


if __name__ == "__main__":
    main()
