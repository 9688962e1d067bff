"""A page of pictures with the captions that the model wrote."""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from pathlib import Path

from scenes import Scene, draw


def contact_sheet(scenes: Sequence[Scene], captions: Mapping[Scene, str], path: Path) -> None:
    """Save a PNG; captions that are right are green, others red with what is to be seen below."""
    import matplotlib

    matplotlib.use("Agg")
    from matplotlib import pyplot

    columns = 6
    rows = -(-len(scenes) // columns)
    figure, axes = pyplot.subplots(
        rows, columns, figsize=(2.6 * columns, 2.5 * rows), squeeze=False
    )
    for place in axes.flat:
        place.axis("off")
    for place, scene, image in zip(axes.flat, scenes, draw(scenes), strict=False):
        place.imshow((0.5 + image.permute(1, 2, 0) / 2).numpy(), interpolation="nearest")
        words = captions[scene].split()
        right = captions[scene] == scene.caption
        title = " ".join(words[:3]) + "\n" + " ".join(words[3:])
        place.set_title(title, fontsize=10, color="darkgreen" if right else "crimson")
        if not right:
            place.text(0.5, -0.12, f"is: {scene.caption}", transform=place.transAxes,
                       ha="center", fontsize=6)  # fmt: skip
    figure.tight_layout()
    path.parent.mkdir(parents=True, exist_ok=True)
    figure.savefig(path, dpi=70)
    pyplot.close(figure)
