"""What a run begins and ends with: lines, samples, and one page of HTML.

The page needs no other file and no network to be opened.
"""

from __future__ import annotations

import io
import json
import math
from collections.abc import Mapping, Sequence
from itertools import accumulate
from pathlib import Path
from typing import Any

import torch
from data import Corpus, Windows
from evaluation import Evaluator
from jinja2 import Template
from metrics import Metrics
from options import flat
from run import Run, Stop, Stopping, command

from lamina.checkpoint import CheckpointManager, SaveReport

# Of the figure and of a panel; "constrained" finds them too, in a second of its own.
_MARGINS = {"left": 0.08, "right": 0.99, "top": 0.98, "bottom": 0.03, "hspace": 0.4}
_FADE = 0.9  # weight of the past in the smoothed training loss, per step
# Title, unit, divisor, and what of a line of metrics.jsonl is drawn under which name.
_PANELS = (
    ("Loss", "nats per token", 1, {"loss": "training", "held_out_loss": "held-out"}),
    ("Norm of the gradient", "before clipping", 1, {"grad_norm": "all parameters"}),
    ("Throughput", "tokens per second", 1, {"tokens_per_second": "all ranks"}),
    ("Memory", "MiB", 2**20, {"memory_bytes": "peak of the first rank"}),
    ("Share of the time", "of the run so far", 1, {
        "exposed_share": "exposed communication", "data_share": "reading data",
        "checkpoint_share": "waiting for checkpoints",
    }),
)  # fmt: skip


def opening(metrics: Metrics, corpus: Corpus, samples: Windows, run: Run) -> str:
    """Describe what is about to be trained, where and on what."""
    config, ranks = run.config, run.runtime.world_size
    epochs = config.train.steps * config.train.batch_size / len(samples)
    tokens = sum(part.size for part in corpus.train)
    silent = ""
    if config.layout().pp > 1 and config.eval.samples:
        silent = (
            "\nno samples will be written, for no rank of a pipeline (pp) has a whole model; after "
            f"the run --run.directory {run.directory} --mesh dp_shard=-1 writes them"
        )
    return (
        f"{run.directory}: {config.model.name}{' (tiny)' if config.tiny else ''} of "
        f"{metrics.parameters / 1e6:.2f} million parameters on {ranks} "
        f"{run.runtime.device.type} rank{'s' if ranks > 1 else ''} ({run.runtime.backend}), "
        f"{config.mesh}, strategy {config.train.strategy}; {tokens / 1e6:.1f} million "
        f"tokens, {epochs:.2g} epochs of them{silent}"
    )


def report(
    optimizer: torch.optim.Optimizer,
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
    if samples:
        (place / "samples.txt").write_text(texts)
    numbers = {
        "held_out_loss": loss,
        "unigram_entropy": metrics.entropy,
        "ratio": loss / metrics.entropy,
        "step": step,
        "ranks": run.runtime.world_size,
        "state_bytes_per_rank": state_bytes(optimizer),
        # Of weight, gradient and two moments in fp32.
        "state_bytes_of_one_process": 16 * metrics.parameters,
        "peak_bytes_per_rank": metrics.peak_bytes,
    }
    if stopping.reason is not Stop.OUT_OF_TIME:
        (place / "report.json").write_text(json.dumps(numbers, indent=1))
    save, corpus, written = checkpoints.last_save, evaluator.corpus, bool(samples)
    lines = _summary(numbers, stopping, save, corpus, run, written=written).splitlines()
    title = f"{place}: {run.config.model.name}"
    html = page(title, lines, metrics.records, metrics.entropy, samples, run.settings())
    (place / "report.html").write_text(html)
    print(*([texts] if run.config.eval.prompt else []), *lines, sep="\n", flush=True)


def _summary(
    numbers: dict[str, Any],
    stopping: Stopping,
    save: SaveReport | None,
    corpus: Corpus,
    run: Run,
    *,
    written: bool,
) -> str:
    place, loss, step = run.directory, numbers["held_out_loss"], numbers["step"]
    bits = loss / corpus.bytes_per_token / math.log(2)
    words = "" if math.isnan(bits) else f", {bits:.2f} bits per byte"
    mib = {name: size / 2**20 for name, size in numbers.items() if "bytes" in name}
    kind = "GPU" if run.runtime.device.type == "cuda" else "process"
    cost = save and (
        f" ({save.bytes / 2**20:.1f} MiB at {save.bytes_per_second / 2**20:.1f} MiB/s; the loop "
        f"waited {save.blocked_seconds:.3f} s)"
    )
    board = f", {place}/tensorboard" if run.config.log.tensorboard else ""
    ending = {
        Stop.OUT_OF_TIME: f"stopped by --train.seconds after step {step}",
        Stop.FINISHED: f"finished {step} steps on {numbers['ranks']} ranks",
        None: f"finished before ({step} steps)",
    }[stopping.reason]
    return f"""
{ending}
held-out loss    {loss:.3f} nats per token{words}: {numbers["ratio"]:.2f} of the text's unigram \
entropy, {numbers["unigram_entropy"]:.3f}
model state      {mib["state_bytes_per_rank"]:.1f} MiB per rank (weights, gradients, optimizer); \
one process alone would need {mib["state_bytes_of_one_process"]:.1f} MiB
memory           {mib["peak_bytes_per_rank"]:,.0f} MiB peak per {kind}
checkpoint       {place}/checkpoints/step-{step:08d}{cost or ""}
metrics          {place}/metrics.jsonl{board}
page             {place}/report.html
{f"samples          {place}/samples.txt" if written else "samples          none"}
{_next(stopping, run)}"""


def _next(stopping: Stopping, run: Run) -> str:
    """How this run goes on, and what else there is to do."""
    place = {} if run.config.run.directory else {"run.directory": run.directory}
    if stopping.reason is Stop.OUT_OF_TIME:
        return f"next             {command(place | {'train.seconds': 0})}"
    longer = command(place | {"train.steps": 2 * run.config.train.steps})
    if run.config.data.path != "stdlib":
        return f"next             {longer}"
    text = {"run.name": "mine", "data.path": "PATH/TO/TEXT", "data.pattern": "**/*.txt"}
    return f"to go on         {longer}\nnext             {command(text, anew=True)}"


def state_bytes(optimizer: torch.optim.Optimizer) -> int:
    """Count main weights, main grads (as large) and optimizer state that this rank holds."""
    held: list[Any] = []
    for parameter in (p for group in optimizer.param_groups for p in group["params"]):
        held += [parameter, parameter, *optimizer.state.get(parameter, {}).values()]
    local = (t.to_local() if hasattr(t, "to_local") else t for t in held if torch.is_tensor(t))
    return sum(tensor.numel() * tensor.element_size() for tensor in local)


def page(
    title: str,
    summary: Sequence[str],
    records: Sequence[Mapping[str, Any]],
    entropy: float,
    samples: Sequence[tuple[str, str]],
    settings: Mapping[str, Any],
) -> str:
    """Return the HTML.

    Args:
        title: what was run.
        summary: lines about what came out.
        records: lines of metrics.jsonl.
        entropy: of the text's tokens, in nats per token: a yardstick for the loss.
        samples: what the model was given and what it wrote.
        settings: of the run, by section.
    """
    template = Template(Path(__file__).with_name("page.html").read_text(), autoescape=True)
    return template.render(
        title=title,
        summary="\n".join(summary).strip(),
        curves=_curves(records, entropy),
        samples=samples,
        settings=flat(settings),
    )


def _curves(records: Sequence[Mapping[str, Any]], entropy: float) -> str:
    """Draw one panel under the other, as SVG."""
    from matplotlib import rc_context
    from matplotlib.figure import Figure  # without pyplot no display is needed

    figure = Figure(figsize=(9, 3 * len(_PANELS)))
    rows = figure.subplots(len(_PANELS), gridspec_kw=_MARGINS)
    for axes, (title, unit, divisor, kinds) in zip(rows, _PANELS, strict=True):
        for key, label in kinds.items():
            # A loss that is not finite (a skipped step) would make all later smoothed ones so.
            found = [r for r in records if key in r and math.isfinite(r[key])]
            steps, values = [r["step"] for r in found], [r[key] / divisor for r in found]
            if key == "loss":
                axes.plot(steps, values, color="tab:blue", alpha=0.25, linewidth=0.8)
                # The first value counts as if it had been there for ever.
                values = list(accumulate(values, lambda past, x: _FADE * past + (1 - _FADE) * x))
                label = "training (smoothed)"
            axes.plot(steps, values, "o-" if key == "held_out_loss" else "-", label=label)
        if title == "Loss":
            axes.axhline(entropy, color="gray", linestyle="--", label="unigram entropy of the text")
            axes.axhline(0.6 * entropy, color="gray", linestyle=":", label="0.6 of it")
        axes.set(title=title, xlabel="step", ylabel=unit, ylim=(0, None))
        axes.legend()
    drawn = io.StringIO()
    with rc_context({"svg.fonttype": "none"}):  # words stay words, which can be searched
        figure.savefig(drawn, format="svg", metadata={"Date": None, "Creator": None})
    return drawn.getvalue().partition("<!DOCTYPE")[2].partition(">")[2]
