"""One page of HTML about a run: it needs no other file and no network to be opened."""

from __future__ import annotations

import io
import math
from collections.abc import Iterator, Mapping, Sequence
from itertools import accumulate
from typing import Any

from jinja2 import Template

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
_PAGE = """<!DOCTYPE html><html lang=en><meta charset=utf-8><title>{{ title }}</title>
<style>body{font:16px sans-serif;max-width:60em;margin:2em auto;padding:0 1em}
svg{width:100%;height:auto}td,th{text-align:left;padding:.1em 1em .1em 0}
pre{white-space:pre-wrap;background:#f4f4f4;padding:.5em}</style>
<h1>{{ title }}</h1><pre>{{ summary }}</pre>{{ curves | safe }}
<h2>Samples</h2><p>In bold: what the model wrote.
{% for given, text in samples %}<pre>{{ given }}<b>{{ text }}</b></pre>
{% endfor %}<h2>Settings</h2><table>
{% for name, value in settings %}<tr><th>{{ name }}<td>{{ value }}
{% endfor %}</table></html>
"""


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
    return Template(_PAGE, autoescape=True).render(
        title=title,
        summary="\n".join(summary).strip(),
        curves=_curves(records, entropy),
        samples=samples,
        settings=_flat(settings),
    )


def _flat(settings: Mapping[str, Any], prefix: str = "") -> Iterator[tuple[str, object]]:
    for name, value in settings.items():
        if isinstance(value, Mapping):
            yield from _flat(value, f"{prefix}{name}.")
        else:
            yield prefix + name, value


def _curves(records: Sequence[Mapping[str, Any]], entropy: float) -> str:
    """Draw one panel under the other, as SVG."""
    from matplotlib import rc_context
    from matplotlib.figure import Figure  # without pyplot no display is needed

    figure = Figure(figsize=(9, 3 * len(_PANELS)), layout="constrained")
    rows = figure.subplots(len(_PANELS))
    for axes, (title, unit, divisor, kinds) in zip(rows, _PANELS, strict=True):
        for key, label in kinds.items():
            # A loss that is not finite (a skipped step) would make all later smoothed ones so.
            found = ((r["step"], r[key] / divisor) for r in records if key in r)
            points = [point for point in found if math.isfinite(point[1])]
            steps, values = zip(*points, strict=True) if points else ((), ())
            if key == "loss":
                axes.plot(steps, values, color="tab:blue", alpha=0.25, linewidth=0.8)
                # The first value counts as if it had been there for ever.
                values = accumulate(values, lambda past, new: _FADE * past + (1 - _FADE) * new)
                label = "training (smoothed)"
            axes.plot(steps, list(values), "o-" if key == "held_out_loss" else "-", label=label)
        if title == "Loss":
            axes.axhline(entropy, color="gray", linestyle="--", label="unigram entropy of the text")
            axes.axhline(0.6 * entropy, color="gray", linestyle=":", label="0.6 of it")
        axes.set(title=title, xlabel="step", ylabel=unit, ylim=(0, None))
        axes.legend()
    drawn = io.StringIO()
    with rc_context({"svg.fonttype": "none"}):  # words stay words, which can be searched
        figure.savefig(drawn, format="svg", metadata={"Date": None, "Creator": None})
    return drawn.getvalue().partition("<!DOCTYPE")[2].partition(">")[2]
