"""What a run ends with."""

from __future__ import annotations

import json
import math
from typing import Any

import torch
from config import Config
from data import Corpus, Windows
from engines import Sharded
from evaluation import Evaluator
from metrics import Metrics
from run import Run
from stopping import Stop, Stopping

from lamina.checkpoint import CheckpointManager, SaveReport

_COMMAND = "python3 noxfile.py -s train --"


def opening(model: Sharded, corpus: Corpus, samples: Windows, config: Config, run: Run) -> str:
    """Describe what is about to be trained, where and on what."""
    parameters = sum(parameter.numel() for parameter in model.parameters())
    ranks = run.runtime.world_size
    epochs = config.train.steps * config.train.batch_size / len(samples)
    return (
        f"{run.directory}: a GPT of {parameters / 1e6:.2f} million parameters on {ranks} "
        f"{run.runtime.device.type} rank{'s' if ranks > 1 else ''} ({run.runtime.backend}), "
        f"strategy {config.train.strategy}; {corpus.tokens / 1e6:.1f} million tokens, "
        f"{epochs:.2g} epochs of them"
    )


def report(
    model: Sharded,
    optimizer: torch.optim.Optimizer,
    evaluator: Evaluator,
    stopping: Stopping,
    checkpoints: CheckpointManager,
    metrics: Metrics,
    config: Config,
    run: Run,
) -> None:
    """Write samples, plot and report.json, and print what came out (collective)."""
    latest = checkpoints.latest()
    where = f"{run.checkpoints}/step-{latest:08d}"
    if stopping.reason in (Stop.INTERRUPT, Stop.PREEMPTED):
        metrics.finish()
        metrics.say(f"stopped on request after step {latest}; checkpoint: {where}")
        metrics.say("to continue: the same command again")
        return
    loss = metrics.last_held_out
    if loss is None:  # the run was finished before: nothing was trained now
        loss = evaluator.held_out_loss()
    samples = evaluator.samples()
    here, alone = state_bytes(model, optimizer)
    metrics.finish()
    if not run.runtime.is_main:
        return
    run.samples.write_text(
        "\n".join(
            f"{'=' * 20} given {'=' * 20}\n{given}\n{'-' * 20} written {'-' * 18}\n{written}\n"
            for given, written in samples
        )
    )
    numbers = {
        "held_out_loss": loss,
        "unigram_entropy": metrics.entropy,
        "ratio": loss / metrics.entropy,
        "step": latest,
        "ranks": run.runtime.world_size,
        "state_bytes_per_rank": here,
        "state_bytes_of_one_process": alone,
        "peak_bytes_per_rank": metrics.peak_bytes,
    }
    if stopping.reason is not Stop.OUT_OF_TIME:
        run.report.write_text(json.dumps(numbers, indent=1))
    saved = where + cost_of(checkpoints.last_save)
    for line in _lines(numbers, evaluator, stopping, saved, config, run):
        print(line, flush=True)


def cost_of(save: SaveReport | None) -> str:
    """Say what the last checkpoint cost; nothing where this run saved none."""
    if save is None:
        return ""
    return (
        f" ({save.bytes / 2**20:.1f} MiB at {save.bytes_per_second / 2**20:.1f} MiB/s; the loop "
        f"waited {save.blocked_seconds:.3f} s)"
    )


def _lines(
    numbers: dict[str, Any],
    evaluator: Evaluator,
    stopping: Stopping,
    where: str,
    config: Config,
    run: Run,
) -> list[str]:
    loss, entropy = numbers["held_out_loss"], numbers["unigram_entropy"]
    per_token = evaluator.corpus.bytes_per_token
    bits = "" if math.isnan(per_token) else f", {loss / per_token / math.log(2):.2f} bits per byte"
    here, alone = numbers["state_bytes_per_rank"], numbers["state_bytes_of_one_process"]
    kind = "GPU" if run.runtime.device.type == "cuda" else "process"
    ending = {
        Stop.OUT_OF_TIME: f"stopped by --train.seconds after step {numbers['step']}",
        Stop.FINISHED: f"finished {numbers['step']} steps on {numbers['ranks']} ranks",
        None: f"finished before ({numbers['step']} steps)",
    }[stopping.reason]
    return [
        "",
        f"{ending}",
        f"held-out loss    {loss:.3f} nats per token{bits}: {loss / entropy:.2f} of the text's "
        f"unigram entropy, {entropy:.3f}",
        f"model state      {here / 2**20:.1f} MiB per rank (weights, gradients, optimizer); one "
        f"process alone would need {alone / 2**20:.1f} MiB",
        f"memory           {numbers['peak_bytes_per_rank'] / 2**20:,.0f} MiB peak per {kind}",
        f"checkpoint       {where}",
        f"metrics          {run.metrics}"
        + (f", {run.directory}/tensorboard" if config.log.tensorboard else ""),
        f"plot             {run.plot}",
        f"samples          {run.samples}",
        f"next             {_next(stopping, config, run)}",
    ]


def _next(stopping: Stopping, config: Config, run: Run) -> str:
    if stopping.reason is Stop.OUT_OF_TIME:
        return f"{_COMMAND} --run.directory {run.directory} --train.seconds 0"
    if config.data.path == "stdlib":
        return f"{_COMMAND} --run.name mine --data.path PATH/TO/TEXT --data.pattern '**/*.txt'"
    return f"{_COMMAND} --run.directory {run.directory} --train.steps {2 * config.train.steps}"


def state_bytes(model: Sharded, optimizer: torch.optim.Optimizer) -> tuple[int, int]:
    """Count the model's state between backward and step.

    Returns:
        Bytes of main weights, main grads and optimizer state on this rank, and of the same
        things unsharded.
    """
    here = alone = 0
    for parameter in model.parameters():
        held = [parameter, parameter, *_state_tensors(optimizer, parameter)]  # weight, gradient
        for tensor in held:
            local = tensor.to_local() if hasattr(tensor, "to_local") else tensor
            here += local.numel() * local.element_size()
            alone += tensor.numel() * tensor.element_size()
    return here, alone


def _state_tensors(optimizer: torch.optim.Optimizer, parameter: torch.Tensor) -> list[torch.Tensor]:
    state = optimizer.state.get(parameter, {})
    return [value for value in state.values() if isinstance(value, torch.Tensor)]
