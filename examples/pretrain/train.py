"""Pretrain a language model on text: the main job, read from top to bottom.

python3 noxfile.py -s train                                       # all GPUs, or two CPU ranks
torchrun --nproc-per-node=2 examples/pretrain/train.py --help     # by hand
"""

from __future__ import annotations

import sys
from contextlib import nullcontext
from pathlib import Path

import first_line  # noqa: F401 (before torch, whose import takes seconds)

# isort: split
from build import Sharded, learning_rate, make_model, model_shape, monitors, shard
from config import Config
from data import Batch, Windows, load_tokenizer, open_corpus, prepare, read_batch
from dry_run import dry_run
from evaluation import Evaluator
from metrics import Metrics
from options import configure
from report import opening, report
from run import Stopping, open_run
from torch.distributed.elastic.multiprocessing.errors import record

from lamina.checkpoint import CheckpointManager, export_huggingface, import_huggingface
from lamina.ddp import Decision, HealthMonitor, clip_grad_norm, finalize_grads
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

    # Text: the first rank tokenises it, once per run; all map it into memory.
    run = open_run(config, runtime)
    config = run.config  # a run that goes on keeps its schedule
    run.main_first(lambda: prepare(config.data, run.directory / "data"))
    corpus = open_corpus(config.data, run.directory / "data")
    samples = Windows(corpus.train, config.model.sequence_length)

    # Sharding: each rank gets its part of weights, gradients and optimizer state.
    model, optimizer = shard(model, config, mesh, runtime.device)
    stages = model.stages if isinstance(model, PipelineRunner) else model
    health, replicas = monitors(stages, optimizer, config, mesh)

    # Checkpoints: the newest one, if there is one, says where to go on. One that is damaged or was
    # saved in an unhealthy step is passed over. Each is written while training goes on.
    keep, scrub = config.checkpoint.keep, config.checkpoint.scrub * 2**20 or None
    checkpoints = CheckpointManager(
        run.directory / "checkpoints", keep_last=keep, scrub_rate=scrub, async_save=True, mesh=mesh
    )
    state = {"model": model, "optimizer": optimizer, "health": health}
    done = checkpoints.restore(state, default=0, fallback=True, healthy=True)
    if done == 0 and Path(config.model.name).is_dir():
        import_huggingface(model, config.model.name, mesh=mesh)

    evaluator = Evaluator(run, model, shape, corpus, mesh.axis("dp"))
    stopping = Stopping(config.train.seconds)
    with Metrics(run, corpus, shape, done) as metrics:
        metrics.say(opening(metrics, corpus, samples, run))
        while done < config.train.steps and not stopping.reason:
            with metrics.watched(done, checkpoints), health.step():
                # The rate, random numbers and (until `health` passes over batches) samples of a
                # step follow from its number.
                for group in optimizer.param_groups:
                    group["lr"] = learning_rate(done, config.train)
                seed_everything(derive_seed(config.run.seed, "step", done), mesh).begin_training()
                with metrics.timed("data"):
                    batch = read_batch(run, samples, shape, mesh, health.batch(done))
                backward(model, batch, mesh, health, exact=config.train.reproducible > 0)
                clip = config.train.clip_norm
                clip_grad_norm(stages, clip, mesh, health=health, replicas=replicas)
                if health.last.decision is Decision.STEP:  # or else the weights stay as they are
                    optimizer.step()
                optimizer.zero_grad()
            metrics.judged(done + 1, health.last)
            if health.last.decision is Decision.BACK:
                bad = health.batch(done)
                done = checkpoints.back(state, before=done)
                health.went_back(done, bad)
                continue
            done += 1
            stopping.agree(last=done == config.train.steps)
            metrics.step(done, health.last, optimizer.param_groups[0]["lr"])
            if stopping.reason or done % config.checkpoint.every == 0:
                metrics.saved(checkpoints.save(done, state, healthy=health.last.healthy))
            if not stopping.told and (stopping.reason or done % config.eval.every == 0):
                metrics.held_out(done, evaluator.held_out_loss())
        checkpoints.close()
        report(optimizer, evaluator, stopping, checkpoints, metrics, run)
    if config.run.export and not stopping.told:
        export_huggingface(model, config.run.export, mesh=mesh)
    stopping.leave()


def backward(
    model: Sharded, batch: Batch, mesh: ParallelMesh, health: HealthMonitor, *, exact: bool
) -> None:
    """Forwards and backwards over a batch, of whose mean loss `health` is told."""
    if isinstance(model, PipelineRunner):
        model.step(**batch.arguments)
        # Of exact sums, each is of a rank's tokens: `health` is told of means.
        tokens = batch.arguments["labels"].numel() if exact else 1
        weight = mesh.axis("cp").size / tokens if exact else 1
        for part in model.losses:  # on the ranks of the last stage; their sum is the batch's loss
            health.note(part * (len(model.losses) * weight))
        return
    count = len(batch.parts)
    for index, (part, arguments) in enumerate(batch.passes(), 1):
        with nullcontext() if index == count else model.no_sync():
            loss = model(**arguments)
            # Of all ranks and passes the mean is the batch's loss.
            health.note(loss.detach().double() * (part.weight * count))
            # Sums over sequences have the same bits on any number of ranks, means do not.
            (loss * (part.counted if exact else part.weight)).backward()
    if isinstance(model, ShardedModule):  # sums over tp, and what else a step ends with
        counted = sum(part.counted for part in batch.parts) if exact else None
        finalize_grads(model, mesh, num_tokens=counted)


if __name__ == "__main__":
    main()
