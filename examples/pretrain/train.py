"""Pretrain a GPT on text: the main job, read from top to bottom.

python3 noxfile.py -s train                                       # all GPUs, or two CPU ranks
torchrun --nproc-per-node=2 examples/pretrain/train.py --help     # by hand
"""

from __future__ import annotations

import contextlib
import sys

import torch
from config import Config
from data import Windows, open_corpus, prepare, slice_of_step
from engines import Sharded, sharded_model
from evaluation import Evaluator
from metrics import Metrics
from options import configure
from report import opening, report
from run import open_run
from schedule import learning_rate
from stopping import Stop, Stopping
from torch.distributed.tensor import DTensor

from lamina.checkpoint import RESUME_EXIT_CODE, CheckpointManager
from lamina.mesh import ParallelLayout, Runtime, derive_seed, init_distributed
from lamina.mesh.engine import MeshAxis


def main() -> None:
    """Start this rank, read the settings, train."""
    with init_distributed() as runtime:
        config = configure(sys.argv[1:], runtime)
        train(config, runtime)


def train(config: Config, runtime: Runtime) -> None:
    """The recipe: ranks, text, model, sharding, checkpoints, loop, report."""
    # Ranks: all share the work of every batch, and shard the model's state.
    mesh = ParallelLayout(dp_shard=-1).build(runtime.device.type)
    dp = mesh.axis("dp")
    run = open_run(config, runtime)

    # Text: the first rank tokenises it, once per run; all map it into memory.
    run.main_first(lambda: prepare(config.data, run.data))
    corpus = open_corpus(config.data, run.data)
    samples = Windows(corpus.train, config.model.sequence_length)

    # Model and optimizer: each rank holds its part, and the loop below stays plain PyTorch.
    model, optimizer = sharded_model(config, corpus, mesh, runtime)

    # Checkpoints: the newest one, if there is one, says where to go on.
    # Each is written while training goes on. A damaged one is passed over for the one before it.
    checkpoints = CheckpointManager(
        run.checkpoints, keep_last=config.checkpoint.keep, async_save=True
    )
    state = {"model": model, "optimizer": optimizer}
    done = checkpoints.restore(state, default=0, fallback=True)

    evaluator = Evaluator(model, corpus, config, dp, runtime)
    stopping = Stopping(config, dp)
    with Metrics(config, runtime, run, corpus, done) as metrics:
        metrics.say(opening(model, corpus, samples, config, run))
        while done < config.train.steps and not stopping.reason:
            loss, norm = step(done, model, optimizer, samples, config, dp, runtime)
            done += 1
            loss = stopping.share(loss, last=done == config.train.steps)
            metrics.step(done, loss, norm, optimizer.param_groups[0]["lr"])
            if stopping.reason or done % config.checkpoint.every == 0:
                metrics.saved(checkpoints.save(done, state))
            if stopping.reason not in (Stop.INTERRUPT, Stop.PREEMPTED) and (
                stopping.reason or done % config.eval.every == 0
            ):
                metrics.held_out(done, evaluator.held_out_loss())
        checkpoints.close()
        report(model, optimizer, evaluator, stopping, checkpoints, metrics, config, run)
    if stopping.reason is Stop.PREEMPTED:
        raise SystemExit(RESUME_EXIT_CODE)  # torchrun --max-restarts starts it again


def step(
    number: int,
    model: Sharded,
    optimizer: torch.optim.Optimizer,
    samples: Windows,
    config: Config,
    dp: MeshAxis,
    runtime: Runtime,
) -> tuple[float, float]:
    """One optimizer step. Its samples, learning rate and random numbers follow from its number.

    Returns:
        This rank's loss (nats per token) and the norm of the whole gradient before clipping.
    """
    seed, microbatches = config.run.seed, config.train.microbatches
    torch.manual_seed(derive_seed(seed, "step", number, dp.rank))
    for group in optimizer.param_groups:
        group["lr"] = learning_rate(number, config.train)

    mine = slice_of_step(number, seed, len(samples), config.train.batch_size, dp.rank, dp.size)
    loss, share = 0.0, len(mine) // microbatches
    for first in range(0, len(mine), share):
        inputs, labels = samples.batch(mine[first : first + share], runtime.device)
        last = first + share == len(mine)
        with contextlib.nullcontext() if last else model.no_sync():
            part = model(inputs, labels=labels) / microbatches
            part.backward()
        loss += part.item()

    norm = torch.nn.utils.clip_grad_norm_(model.parameters(), config.train.clip_norm)
    optimizer.step()
    optimizer.zero_grad()
    return loss, float(norm.full_tensor() if isinstance(norm, DTensor) else norm)


if __name__ == "__main__":
    main()
