"""Pictures that the example draws itself, and captions that describe them."""

from __future__ import annotations

from collections.abc import Iterator, Sequence
from dataclasses import dataclass

import torch
from torch import Tensor

COLOURS = {
    "red": (0.9, 0.15, 0.1),
    "green": (0.1, 0.7, 0.2),
    "blue": (0.15, 0.25, 0.95),
    "yellow": (0.95, 0.85, 0.1),
    "white": (1.0, 1.0, 1.0),
}
SHAPES = ("circle", "square", "triangle", "cross")
ROWS, COLUMNS = ("top", "bottom"), ("left", "right")
SIZES = ((32, 32), (32, 48), (48, 32))  # height, width: several sizes in one batch
PATCH = 8

# The whole vocabulary; the first stands for one vector of an image.
WORDS = ("<image>", "<end>", "a", "at", "the", *COLOURS, *SHAPES, *ROWS, *COLUMNS)
IMAGE, END = 0, 1
CAPTION_LENGTH = 8  # "a red circle at the top left <end>"


@dataclass(frozen=True)
class Scene:
    """What is drawn, as indices into the lists above, and the generator's seed for the rest."""

    colour: int
    shape: int
    row: int
    column: int
    size: int
    seed: int

    @property
    def caption(self) -> str:
        """Say what can be seen."""
        colour, shape = list(COLOURS)[self.colour], SHAPES[self.shape]
        return f"a {colour} {shape} at the {ROWS[self.row]} {COLUMNS[self.column]}"

    @property
    def unseen(self) -> bool:
        """Whether training never sees this colour, shape and place together: one in nine."""
        return (self.colour + 2 * self.shape + 4 * self.row + 5 * self.column) % 9 == 0


def random_scenes(number: int, seed: int, *, unseen: bool = False) -> list[Scene]:
    """Make up scenes of combinations that training sees, or of those that it never sees."""
    generator = torch.Generator().manual_seed(seed)
    limits = (len(COLOURS), len(SHAPES), len(ROWS), len(COLUMNS), len(SIZES), 2**31)
    scenes: list[Scene] = []
    while len(scenes) < number:
        picks = [torch.randint(limit, (number,), generator=generator) for limit in limits]
        made = [Scene(*row) for row in torch.stack(picks, dim=1).tolist()]
        scenes += [scene for scene in made if scene.unseen == unseen]
    return scenes[:number]


def draw(scenes: Sequence[Scene]) -> list[Tensor]:
    """Images ``[3, height, width]`` in -1 .. 1, in the order of the scenes."""
    drawn: dict[int, Iterator[Tensor]] = {}
    for size in {scene.size for scene in scenes}:
        drawn[size] = iter(_draw([scene for scene in scenes if scene.size == size], *SIZES[size]))
    return [next(drawn[scene.size]) for scene in scenes]


def _draw(scenes: Sequence[Scene], height: int, width: int) -> Tensor:
    """Images ``[scenes, 3, height, width]`` of one size, all at once."""
    seeds = [torch.Generator().manual_seed(scene.seed) for scene in scenes]
    numbers = torch.stack([torch.rand(6 + 3 * height * width, generator=g) for g in seeds])
    picks = torch.tensor([[s.colour, s.shape, s.row, s.column] for s in scenes])
    colour, shape, row, column = picks.unbind(dim=1)
    background = 0.1 + 0.25 * numbers[:, :3, None, None]
    background = background + 0.05 * numbers[:, 6:].view(-1, 3, height, width)
    jitter = numbers[:, 3:6]
    radius = (6.5 + jitter[:, 0])[:, None, None]
    y0 = (row + 0.5) * height / 2 + 2 * (jitter[:, 1] - 0.5)
    x0 = (column + 0.5) * width / 2 + 2 * (jitter[:, 2] - 0.5)
    y = (torch.arange(height)[:, None] - y0[:, None, None]) / radius
    x = (torch.arange(width) - x0[:, None, None]) / radius
    square = (x.abs() < 1) & (y.abs() < 1)
    shapes = {
        "circle": x.square() + y.square() < 1,
        "square": square,
        "triangle": (y < 0.9) & (y > 2 * x.abs() - 1),
        "cross": ((x.abs() < 0.35) | (y.abs() < 0.35)) & square,
    }
    inside = torch.stack([shapes[name] for name in SHAPES])[shape, torch.arange(len(scenes))]
    fill = torch.tensor(list(COLOURS.values()))[colour][:, :, None, None]
    return 2 * torch.where(inside[:, None], fill, background) - 1


def encode(caption: str) -> list[int]:
    """Words to ids, with the end."""
    return [WORDS.index(word) for word in caption.split()] + [END]


def decode(ids: list[int]) -> str:
    """Ids to words, up to the end."""
    ids = ids[: ids.index(END)] if END in ids else ids
    return " ".join(WORDS[i] for i in ids)


def prompt(scene: Scene) -> list[int]:
    """The image's place in the text: one token for each patch."""
    height, width = SIZES[scene.size]
    return [IMAGE] * (height // PATCH * (width // PATCH))


def batch(scenes: list[Scene]) -> tuple[Tensor, list[Tensor], Tensor]:
    """Tokens and labels ``[batch, sequence]``, padded on the right, and the images.

    Labels are the next token where that is a word of the caption, else -100.
    """
    rows = [prompt(scene) + encode(scene.caption) for scene in scenes]
    longest = max(map(len, rows))
    tokens = torch.full((len(rows), longest), END)
    labels = torch.full((len(rows), longest), -100)
    for i, row in enumerate(rows):
        tokens[i, : len(row)] = torch.tensor(row)
        labels[i, len(row) - CAPTION_LENGTH - 1 : len(row) - 1] = torch.tensor(
            row[-CAPTION_LENGTH:]
        )
    return tokens, draw(scenes), labels
