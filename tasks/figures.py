"""The figures of the book, drawn as SVG: `python tasks/figures.py` writes them.

They are in `docs/figures/`. `tests/test_book.py` compares the files with what this draws.
"""

from __future__ import annotations

from html import escape
from pathlib import Path

FOLDER = Path(__file__).resolve().parent.parent / "docs" / "figures"
RANKS = ("#7c5cd6", "#0f8b8d", "#c8553d", "#5b67d8")  # a colour for each rank
FONT = "system-ui, -apple-system, Segoe UI, Helvetica, Arial, sans-serif"
STYLE = """
    .ink { fill: #1f2430 } .soft { fill: #5c6473 } .line { stroke: #8b93a3; fill: none }
    .paper { fill: #8b93a3; fill-opacity: 0.12; stroke: #8b93a3 } .in { fill: #fff }
    @media (prefers-color-scheme: dark) { .ink { fill: #e8ebf2 } .soft { fill: #a6aebd } }
"""


class Figure:
    """An SVG of a given size; shapes are added from back to front."""

    def __init__(self, title: str, width: int, height: int) -> None:
        self.parts = [
            f'<svg xmlns="http://www.w3.org/2000/svg" viewBox="0 0 {width} {height}" role="img" '
            f'aria-label="{escape(title)}" font-family="{FONT}" font-size="15">',
            f"  <title>{escape(title)}</title>",
            f"  <style>{STYLE}  </style>",
            '  <marker id="tip" markerWidth="9" markerHeight="9" refX="8" refY="4" orient="auto">'
            '<path d="M0,0 L9,4 L0,8 z" fill="#8b93a3"/></marker>',
        ]

    def text(
        self, x: float, y: float, words: str, kind: str = "ink", anchor: str = "start"
    ) -> None:
        """Write words; `y` is the baseline."""
        self.parts.append(
            f'  <text x="{x}" y="{y}" class="{kind}" text-anchor="{anchor}">{escape(words)}</text>'
        )

    def box(
        self, x: float, y: float, width: float, height: float, words: str = "", colour: str = ""
    ) -> None:
        """Draw a rectangle, in a colour or pale, with words in its middle."""
        look = f'fill="{colour}"' if colour else 'class="paper"'
        self.parts.append(
            f'  <rect x="{x}" y="{y}" width="{width}" height="{height}" rx="6" {look}/>'
        )
        if words:
            self.text(x + width / 2, y + height / 2 + 5, words, "in" if colour else "ink", "middle")

    def arrow(self, x1: float, y1: float, x2: float, y2: float) -> None:
        """Draw a line with a tip at its second end."""
        self.parts.append(
            f'  <line x1="{x1}" y1="{y1}" x2="{x2}" y2="{y2}" class="line" marker-end="url(#tip)"/>'
        )

    def __str__(self) -> str:
        return "\n".join([*self.parts, "</svg>"]) + "\n"


def two_ranks() -> Figure:
    """Draw two ranks with the same model, different data, and one mean of their gradients."""
    figure = Figure("Two ranks compute gradients of different data and use their mean", 720, 220)
    for rank in (0, 1):
        y = 20 + 100 * rank
        figure.text(20, y + 45, f"rank {rank}")
        for step, (x, words) in enumerate(
            ((100, f"data {rank}"), (260, "model"), (420, "gradient"))
        ):
            figure.box(x, y + 15, 120, 50, words, RANKS[rank] if step != 1 else "")
            if step:
                figure.arrow(x - 40, y + 40, x - 3, y + 40)
        figure.arrow(540, y + 40, 597, 110 if rank else 100)
    figure.box(600, 80, 100, 50, "mean")
    return figure


def shard() -> Figure:
    """Draw the flat buffer of a layer, and the half of it that each rank keeps."""
    figure = Figure("A flat buffer is cut into two equal shards", 720, 230)
    figure.text(20, 30, "tensors of one unit, one after the other")
    for x, width, words in ((20, 420, "weight"), (440, 160, "bias"), (600, 80, "padding")):
        figure.box(x, 45, width, 45, words)
    for rank in (0, 1):
        figure.arrow(185 + 330 * rank, 95, 185 + 330 * rank, 147)
        figure.box(20 + 330 * rank, 150, 330, 50, f"shard of rank {rank}", RANKS[rank])
    return figure


def unit() -> Figure:
    """Draw the forward of three units, with the gather of the next one beside the compute."""
    figure = Figure("While one unit computes, the next one is gathered", 720, 190)
    figure.text(20, 55, "compute")
    figure.text(20, 115, "gather")
    figure.text(20, 170, "time", "soft")
    figure.arrow(70, 165, 700, 165)
    for number in range(3):
        x = 240 + 150 * number
        figure.box(x, 25, 140, 45, f"unit {number + 1}", RANKS[1])
        figure.box(x - 150, 85, 140, 45, f"unit {number + 1}", RANKS[0])
    return figure


def strategies() -> Figure:
    """Draw which states each strategy cuts, as two ranks hold them."""
    figure = Figure("What a rank of two holds under each strategy", 720, 270)
    states = ("weights", "gradients", "optimizer state")
    for column, state in enumerate(states):
        figure.text(270 + 170 * column, 30, state, "ink", "middle")
    rows = (("0  DDP", ""), ("1  ZeRO-1", "o"), ("2  ZeRO-2", "go"), ("3  ZeRO-3", "wgo"))
    for row, (name, cut) in enumerate(rows):
        y = 45 + 55 * row
        figure.text(20, y + 27, name)
        for column, state in enumerate(states):
            x, width = 195 + 170 * column, 150
            figure.box(x, y, width, 42)
            is_cut = state[0] in cut
            words = "half" if is_cut else "whole"
            figure.box(x, y, width / 2 if is_cut else width, 42, words, RANKS[0])
    return figure


def mesh() -> Figure:
    """Draw four ranks on two axes."""
    figure = Figure("Four ranks: two copies of a model, each cut into two shards", 720, 230)
    figure.text(440, 25, "dp_shard: different shards of one copy", "soft", "middle")
    for copy in (0, 1):
        y = 45 + 90 * copy
        figure.text(20, y + 40, f"copy {copy} (dp_replicate={copy})")
        for cut in (0, 1):
            rank = 2 * copy + cut
            figure.box(230 + 220 * cut, y, 200, 65, f"rank {rank}: shard {cut}", RANKS[cut])
    return figure


def checkpoint() -> Figure:
    """Draw two ranks that write, and one that reads."""
    figure = Figure("Two ranks write their shards, and one rank reads the whole", 720, 200)
    figure.box(270, 25, 180, 150, "step-00000003/")
    for rank in (0, 1):
        y = 30 + 80 * rank
        figure.box(20, y, 160, 60, f"rank {rank} of 2", RANKS[rank])
        figure.arrow(180, y + 30, 267, y + 30)
    figure.arrow(450, 100, 537, 100)
    figure.box(540, 70, 160, 60, "rank 0 of 1", RANKS[2])
    return figure


# Step time beside torch FSDP2: benchmarks/RESULTS.md, "fsdp.py", loopback, 2 ranks, foreach.
STEPS = (
    ("torch FSDP2", 1154),
    ("torch DDP", 734),
    ("Lamina, strategy 3", 729),
    ("Lamina, strategy 1", 697),
)


def step_time() -> Figure:
    """Draw the one chart of the README: milliseconds per step."""
    figure = Figure("Milliseconds per training step, 34.1M parameters, 2 CPU ranks", 720, 250)
    figure.text(20, 28, "Milliseconds per step: GPT of 34.1M parameters, fp32, 2 CPU ranks (gloo)")
    for row, (name, milliseconds) in enumerate(STEPS):
        y, ours = 48 + 45 * row, name.startswith("Lamina")
        figure.text(190, y + 22, name, "ink", "end")
        width = milliseconds * 0.4
        figure.box(205, y, width, 32, "", RANKS[0] if ours else "#8b93a3")
        figure.text(215 + width, y + 22, str(milliseconds))
    figure.text(20, 242, "benchmarks/RESULTS.md, 2026-11-21. Not run on a GPU.", "soft")
    return figure


FIGURES = {
    "two-ranks": two_ranks,
    "shard": shard,
    "unit": unit,
    "strategies": strategies,
    "mesh": mesh,
    "checkpoint": checkpoint,
    "step-time": step_time,
}


def main() -> None:
    """Write all figures."""
    FOLDER.mkdir(exist_ok=True)
    for name, draw in FIGURES.items():
        (FOLDER / f"{name}.svg").write_text(str(draw()))


if __name__ == "__main__":
    main()
