"""What a run begins and ends with."""

from __future__ import annotations

import json
import math
from collections.abc import Mapping
from typing import Any

import torch
from data import Corpus, Windows
from evaluation import Evaluator
from metrics import Metrics
from page import page
from run import Run, Stop, Stopping, command

from lamina.checkpoint import CheckpointManager, SaveReport


def opening(parameters: int, corpus: Corpus, samples: Windows, run: Run) -> str:
    """Describe what is about to be trained, where and on what."""
    config, ranks = run.config, run.runtime.world_size
    epochs = config.train.steps * config.train.batch_size / len(samples)
    return (
        f"{run.directory}: {config.model.name}{' (tiny)' if config.tiny else ''} of "
        f"{parameters / 1e6:.2f} million parameters on {ranks} "
        f"{run.runtime.device.type} rank{'s' if ranks > 1 else ''} ({run.runtime.backend}), "
        f"{config.mesh}, strategy {config.train.strategy}; {corpus.tokens / 1e6:.1f} million "
        f"tokens, {epochs:.2g} epochs of them"
    )


def report(
    optimizer: torch.optim.Optimizer,
    parameters: int,
    evaluator: Evaluator,
    stopping: Stopping,
    checkpoints: CheckpointManager,
    metrics: Metrics,
    run: Run,
) -> None:
    """Write samples, the page and report.json, and print what came out (collective)."""
    step, place = checkpoints.latest(), run.directory
    where = f"{place}/checkpoints/step-{step:08d}"
    if stopping.told:
        metrics.finish([])
        metrics.say(f"stopped on request after step {step}; checkpoint: {where}")
        metrics.say("to continue: the same command again")
        return
    loss = metrics.last_held_out
    if loss is None:  # the run was finished before: nothing was trained now
        loss = evaluator.held_out_loss()
    samples = evaluator.samples()
    metrics.finish(samples)
    if not run.runtime.is_main:
        return
    texts = "\n".join(
        f"{' given ':=^47}\n{given}\n{' written ':-^47}\n{written}\n" for given, written in samples
    )
    (place / "samples.txt").write_text(texts)
    numbers = {
        "held_out_loss": loss,
        "unigram_entropy": metrics.entropy,
        "ratio": loss / metrics.entropy,
        "step": step,
        "ranks": run.runtime.world_size,
        "state_bytes_per_rank": state_bytes(optimizer),
        "state_bytes_of_one_process": 16 * parameters,  # weight, gradient and two moments in fp32
        "peak_bytes_per_rank": metrics.peak_bytes,
    }
    if stopping.reason is not Stop.OUT_OF_TIME:
        (place / "report.json").write_text(json.dumps(numbers, indent=1))
    where += cost_of(checkpoints.last_save)
    lines = _lines(numbers, evaluator.corpus.bytes_per_token, stopping, where, run)
    title = f"{place}: {run.config.model.name}"
    html = page(title, lines, metrics.records, metrics.entropy, samples, run.settings())
    (place / "report.html").write_text(html)
    print(*([texts] if run.config.eval.prompt else []), *lines, sep="\n", flush=True)


def _lines(
    numbers: Mapping[str, Any], bytes_per_token: float, stopping: Stopping, where: str, run: Run
) -> list[str]:
    place, loss, entropy = run.directory, numbers["held_out_loss"], numbers["unigram_entropy"]
    bits = loss / bytes_per_token / math.log(2)
    words = "" if math.isnan(bits) else f", {bits:.2f} bits per byte"
    here, alone = numbers["state_bytes_per_rank"], numbers["state_bytes_of_one_process"]
    kind = "GPU" if run.runtime.device.type == "cuda" else "process"
    board = f", {place}/tensorboard" if run.config.log.tensorboard else ""
    ending = {
        Stop.OUT_OF_TIME: f"stopped by --train.seconds after step {numbers['step']}",
        Stop.FINISHED: f"finished {numbers['step']} steps on {numbers['ranks']} ranks",
        None: f"finished before ({numbers['step']} steps)",
    }[stopping.reason]
    rows = {
        "held-out loss": f"{loss:.3f} nats per token{words}: {loss / entropy:.2f} of the text's "
        f"unigram entropy, {entropy:.3f}",
        "model state": f"{here / 2**20:.1f} MiB per rank (weights, gradients, optimizer); one "
        f"process alone would need {alone / 2**20:.1f} MiB",
        "memory": f"{numbers['peak_bytes_per_rank'] / 2**20:,.0f} MiB peak per {kind}",
        "checkpoint": where,
        "metrics": f"{place}/metrics.jsonl{board}",
        "page": f"{place}/report.html",
        "samples": f"{place}/samples.txt",
        **_next(stopping, run),
    }
    return ["", ending, *(f"{name:<16} {text}" for name, text in rows.items())]


def cost_of(save: SaveReport | None) -> str:
    """Say what the last checkpoint cost; nothing where this run saved none."""
    if save is None:
        return ""
    return (
        f" ({save.bytes / 2**20:.1f} MiB at {save.bytes_per_second / 2**20:.1f} MiB/s; the loop "
        f"waited {save.blocked_seconds:.3f} s)"
    )


def _next(stopping: Stopping, run: Run) -> dict[str, str]:
    """How this run goes on, and what else there is to do."""
    place = {} if run.config.run.directory else {"run.directory": run.directory}
    if stopping.reason is Stop.OUT_OF_TIME:
        return {"next": command(place | {"train.seconds": 0})}
    longer = command(place | {"train.steps": 2 * run.config.train.steps})
    if run.config.data.path != "stdlib":
        return {"next": longer}
    text = {"run.name": "mine", "data.path": "PATH/TO/TEXT", "data.pattern": "**/*.txt"}
    return {"to go on": longer, "next": command(text, anew=True)}


def state_bytes(optimizer: torch.optim.Optimizer) -> int:
    """Count main weights, main grads (as large) and optimizer state that this rank holds."""
    held: list[torch.Tensor] = []
    for parameter in (p for group in optimizer.param_groups for p in group["params"]):
        state = optimizer.state.get(parameter, {}).values()
        held += [parameter, parameter, *(t for t in state if isinstance(t, torch.Tensor))]
    local = (t.to_local() if hasattr(t, "to_local") else t for t in held)
    return sum(tensor.numel() * tensor.element_size() for tensor in local)
