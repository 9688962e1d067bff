"""What the book is made of beside its pages: the list of decisions, written when it is built."""

from __future__ import annotations

from pathlib import Path

from tasks.bootstrap import ROOT

LAYERS_OF_DECISIONS = {
    "00": "The house and its tests",
    "01": "mesh",
    "02": "buffers",
    "03": "collectives",
    "04": "ddp",
    "05": "fsdp",
    "06": "models",
    "07": "checkpoint",
}


def write_decisions(folder: Path = ROOT / "docs" / "decisions") -> None:
    """Write `index.md`, a list of the decisions by layer under their titles. Git ignores it."""
    lines = [
        "# Decisions",
        "",
        "A decision is a choice that another person would make otherwise.",
        "Each page says in some ten lines what was chosen, and why.",
    ]
    for number, layer in LAYERS_OF_DECISIONS.items():
        lines += ["", f"## {layer}", ""]
        for page in sorted(folder.glob(f"{number}??-*.md")):
            title = page.read_text().partition("\n")[0].removeprefix("# ")
            lines.append(f"- [{title}]({page.name})")
    (folder / "index.md").write_text("\n".join(lines) + "\n")
