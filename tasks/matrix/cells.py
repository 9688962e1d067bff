"""The cells of the matrix, layer x backend x world x torch: which exist and which can run here."""

from __future__ import annotations

import itertools
import json
import os
import subprocess
from collections.abc import Iterable, Sequence
from dataclasses import dataclass, field
from pathlib import Path

from tasks.matrix.cover import in_shard

BACKENDS = ("gloo", "nccl")
WORLDS = (1, 2, 4, 8)
DRIVER = Path("/dev/nvidiactl")

VERSIONS = """
import importlib.metadata as m, json, platform
def version(name):
    try:
        return m.version(name)
    except m.PackageNotFoundError:
        return ""
names = {"torch": "torch", "triton": "triton", "transformer_engine": "transformer-engine"}
found = {key: version(name) for key, name in names.items()}
print(json.dumps({"python": platform.python_version(), **found}))
"""
CARDS = """
import json, torch
print(json.dumps([torch.cuda.get_device_name(n) for n in range(torch.cuda.device_count())]))
"""


@dataclass(frozen=True)
class Cell:
    """One layer's tests on one backend, world size and minor version of torch."""

    layer: str
    backend: str
    world: int
    torch: str

    @property
    def name(self) -> str:
        """Return the name by which people choose the cell, such as fsdp-nccl-8-2.13."""
        return f"{self.layer}-{self.backend}-{self.world}-{self.torch}"


@dataclass(frozen=True)
class Torch:
    """An interpreter that has torch: where it is, and the versions that it has.

    `versions` has the keys python, torch, triton and transformer_engine; what is absent is "".
    """

    python: Path
    versions: dict[str, str] = field(hash=False)

    @classmethod
    def of(cls, python: Path) -> Torch | None:
        """Ask an interpreter for its versions, without importing torch; None if it has no torch."""
        answer = subprocess.run([python, "-c", VERSIONS], capture_output=True, text=True)
        versions = json.loads(answer.stdout) if answer.returncode == 0 else {}
        return cls(python, versions) if versions.get("torch") else None

    @property
    def minor(self) -> str:
        """Return torch's minor version, such as 2.13."""
        return ".".join(self.versions["torch"].split(".")[:2])


@dataclass(frozen=True)
class Devices:
    """What this machine has to run ranks on."""

    cores: int
    cards: tuple[str, ...] = ()

    @classmethod
    def find(cls, python: Path) -> Devices:
        """Look once. Without NVIDIA's driver this takes no time; else torch is asked."""
        cores = len(os.sched_getaffinity(0))
        if not DRIVER.exists():
            return cls(cores)
        answer = subprocess.run([python, "-c", CARDS], capture_output=True, text=True)
        cards = json.loads(answer.stdout) if answer.returncode == 0 else []
        return cls(cores, tuple(cards))

    def refuse(self, backend: str, world: int) -> str:
        """Return why ranks of that world cannot run here, or ""."""
        if backend == "nccl" and len(self.cards) < world:
            return f"nccl needs a GPU per rank; found {len(self.cards)}"
        if backend == "gloo" and world > (most := max(4, self.cores)):
            return f"{self.cores} cores run at most {most} ranks of gloo"
        return ""

    def __str__(self) -> str:
        """Describe the machine in a few words."""
        cards = [f"{self.cards.count(c)} x {c}" for c in dict.fromkeys(self.cards)] or ["no GPU"]
        return ", ".join([f"{self.cores} cores", *cards])


@dataclass(frozen=True)
class Planned:
    """A cell, and why it cannot run here ("" if it can)."""

    cell: Cell
    refusal: str = ""


def plan(
    layers: Iterable[str], devices: Devices, torches: Iterable[str], supported: Sequence[str]
) -> list[Planned]:
    """Return every cell, with the reason for those that cannot run here.

    Args:
        layers: the layers that have tests.
        devices: what this machine has.
        torches: the minor versions of torch that there are environments for.
        supported: the minor versions of torch that the packages declare.
    """
    there = list(torches)
    versions = [*supported, *(minor for minor in there if minor not in supported)]
    planned = []
    for minor, layer, backend, world in itertools.product(versions, layers, BACKENDS, WORLDS):
        refusal = devices.refuse(backend, world)
        if minor not in there:
            refusal = (
                f"no environment with torch {minor}: `noxfile.py -s torch -- {minor}` makes it"
            )
        planned.append(Planned(Cell(layer, backend, world, minor), refusal))
    return planned


def choose(
    planned: Sequence[Planned], words: Iterable[str], shard: tuple[int, int] = (1, 1)
) -> list[Planned]:
    """Keep the cells that any of `words` names and that belong to the shard; no words: all.

    A word's parts, joined by "-", are values along the axes: `fsdp`, `fsdp-nccl`, `gloo-2-2.13`.
    Raises ValueError for a word that names no cell.
    """
    chosen: set[Cell] = set()
    for word in words:
        parts = set(word.split("-"))
        named = {p.cell for p in planned if parts <= set(p.cell.name.split("-"))}
        if not named:
            raise ValueError(f"{word!r} names no cell; write for example fsdp-nccl-8 or gloo-2")
        chosen |= named
    return [
        entry
        for entry in planned
        if (entry.cell in chosen or not chosen) and in_shard(entry.cell.name, *shard)
    ]
