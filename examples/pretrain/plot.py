"""loss.png."""

from __future__ import annotations

from collections.abc import Sequence
from pathlib import Path
from typing import Any

_FADE = 0.9  # weight of the past in the smoothed training loss, per step


def draw(records: list[dict[str, Any]], entropy: float, path: Path) -> None:
    """Draw training and held-out loss over steps, with the unigram entropy as a yardstick.

    Args:
        records: lines of metrics.jsonl.
        entropy: nats per token.
        path: of the PNG.
    """
    import matplotlib as mpl

    mpl.use("Agg")  # no display needed
    from matplotlib import pyplot as plt

    train = [(r["step"], r["loss"]) for r in records if "loss" in r]
    held_out = [(r["step"], r["held_out_loss"]) for r in records if "held_out_loss" in r]
    figure, axes = plt.subplots(figsize=(8, 4.5), layout="constrained")
    if train:
        steps, losses = zip(*train, strict=True)
        axes.plot(steps, losses, color="tab:blue", alpha=0.25, linewidth=0.8)
        axes.plot(steps, _smooth(losses), color="tab:blue", label="training loss (smoothed)")
    if held_out:
        axes.plot(*zip(*held_out, strict=True), "o-", color="tab:orange", label="held-out loss")
    axes.axhline(entropy, color="gray", linestyle="--", label="unigram entropy of the text")
    axes.axhline(0.6 * entropy, color="gray", linestyle=":", label="0.6 of it")
    axes.set(xlabel="step", ylabel="nats per token", ylim=(0, None))
    axes.legend()
    figure.savefig(path, dpi=120)
    plt.close(figure)


def _smooth(losses: Sequence[float]) -> list[float]:
    """Average over the past with weights that fade; the first values count as much as they should.

    Without the division the beginning would weigh too much (Kingma and Ba, 2015, section 3).
    """
    smooth, total, weight = [], 0.0, 0.0
    for loss in losses:
        total = _FADE * total + (1 - _FADE) * loss
        weight = _FADE * weight + (1 - _FADE)
        smooth.append(total / weight)
    return smooth
