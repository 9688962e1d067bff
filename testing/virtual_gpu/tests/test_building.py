"""What is generated refuses; what the sources define is never generated."""

from __future__ import annotations

import ctypes
from pathlib import Path

import torch

from lamina_virtual_gpu.activate import LIBRARY_FOLDER
from lamina_virtual_gpu.building import nm, wanted
from lamina_virtual_gpu.libraries import LIBRARIES, QUIET

TORCH = Path(torch.__file__).parent / "lib"


def test_every_entry_that_torch_wants_is_there():
    symbols = wanted(TORCH)
    for library in LIBRARIES:
        have = set(nm(LIBRARY_FOLDER / library.file, "-D", "--defined-only"))
        have = {name.partition("@")[0] for name in have}
        missing = {name for name, version in symbols.items() if library.wants(name, version)} - have
        assert not missing, library.name


def test_the_runtime_has_no_entry_that_refuses():
    library = LIBRARIES[0]
    objects = {name.partition("@")[0] for name in nm(LIBRARY_FOLDER / library.file, "-D")}
    assert all(name in objects for name, v in wanted(TORCH).items() if library.wants(name, v))


def test_a_generated_entry_returns_its_librarys_refusal():
    names = {library.name: library for library in LIBRARIES}
    solver = ctypes.CDLL(str(LIBRARY_FOLDER / names["libcusolver"].file))
    assert solver.cusolverDnXpotrf() == names["libcusolver"].refusal


def test_quiet_entries_are_ones_that_torch_wants():
    assert set(wanted(TORCH)) >= QUIET
