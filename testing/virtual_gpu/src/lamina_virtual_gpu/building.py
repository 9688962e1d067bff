"""Builds the stand-ins with g++, from `stand_ins/` and from the names that torch asks for."""

from __future__ import annotations

import re
import subprocess
import tempfile
from collections.abc import Iterable
from concurrent.futures import ThreadPoolExecutor
from pathlib import Path

from lamina_virtual_gpu.libraries import LIBRARIES, QUIET, Library
from lamina_virtual_gpu.profiles import c_source

SOURCES = Path(__file__).parent / "stand_ins"
COMPILE = ("g++", "-std=c++17", "-O2", "-fPIC", "-Wall", "-Wextra", "-Wno-cast-function-type")


def nm(file: Path, *options: str) -> Iterable[str]:
    """Yield the names in a library's or an object's table of symbols."""
    answer = subprocess.run(["nm", *options, str(file)], capture_output=True, text=True, check=True)
    for line in answer.stdout.splitlines():
        if line:
            yield line.split()[-1]


def wanted(torch_libraries: Path) -> dict[str, str]:
    """Return what torch's libraries leave undefined: symbol -> its version, or nothing."""
    symbols = {}
    for file in sorted(torch_libraries.glob("*.so")):
        for text in nm(file, "-D", "--undefined-only", "--with-symbol-versions"):
            name, _, version = text.partition("@")
            symbols[name] = version.strip("@")
    return symbols


def generated(library: Library, names: Iterable[str]) -> str:
    """Return the C++ source of entries that nothing models."""
    lines = ['#include "machine.h"']
    for name in names:
        if name in QUIET:
            lines.append(f"EXPORT int {name}() {{ return 0; }}")
        else:
            lines.append(
                f'EXPORT long {name}() {{ vgpu_not_modelled("{name}"); return {library.refusal}; }}'
            )
    return "\n".join(lines) + "\n"


def compiled(source: Path, folder: Path) -> Path:
    """Compile one file and return its object."""
    target = folder / f"{source.stem}.o"
    words = [*COMPILE, "-fvisibility=hidden", f"-I{SOURCES}", f"-I{folder}"]
    subprocess.run([*words, "-c", str(source), "-o", str(target)], check=True)
    return target


def build(torch_libraries: Path, target: Path) -> dict[str, tuple[int, int]]:
    """Build all libraries into `target`.

    Returns:
        For each library how many of the entries that torch wants are modelled, and how many are
        generated.
    """
    target.mkdir(parents=True, exist_ok=True)
    symbols, counts = wanted(torch_libraries), {}
    with tempfile.TemporaryDirectory() as name, ThreadPoolExecutor() as pool:
        folder = Path(name)
        (folder / "profiles.inc").write_text(c_source())
        sources = [SOURCES / f"{part}.cpp" for library in LIBRARIES for part in library.sources]
        objects = dict(zip(sources, pool.map(lambda s: compiled(s, folder), sources), strict=True))
        for library in LIBRARIES:
            own = [objects[SOURCES / f"{part}.cpp"] for part in library.sources]
            have = {text for file in own for text in nm(file, "--defined-only", "-g")}
            asked = {
                symbol for symbol, version in symbols.items() if library.wants(symbol, version)
            }
            rest = folder / f"rest-{library.name}.cpp"
            rest.write_text(generated(library, sorted(asked - have)))
            link(library, [*own, compiled(rest, folder)], target, folder)
            counts[library.name] = len(asked & have), len(asked - have)
    return counts


def build_arithmetic(torch_folder: Path, target: Path) -> None:
    """Build what computes torch's operators, against the headers of the torch at hand."""
    headers = [torch_folder / "include", torch_folder / "include/torch/csrc/api/include", SOURCES]
    words = ["g++", "-std=c++20", "-O1", "-fPIC", "-shared", "-fvisibility=hidden"]
    words += [word for folder in headers for word in ("-isystem", str(folder))]
    libraries = [torch_folder / "lib" / f"lib{name}.so" for name in ("torch_cpu", "c10")]
    libraries.append(target / LIBRARIES[0].file)
    source = SOURCES.parent / "arithmetic" / "kernels.cpp"
    words += [str(source), "-o", str(target / "liblamina_arithmetic.so"), *map(str, libraries)]
    subprocess.run([*words, "-Wl,-rpath,$ORIGIN"], check=True)


def link(library: Library, objects: list[Path], target: Path, folder: Path) -> None:
    """Link a library, with the version of symbols that torch expects."""
    script = folder / "symbols.map"
    script.write_text(f"{library.symbol_version} {{ global: *; }};\n")
    runtime = target / LIBRARIES[0].file
    others = [] if library is LIBRARIES[0] else ["-Wl,--no-as-needed", str(runtime)]
    words = ["g++", "-shared", f"-Wl,-soname,{library.file}", f"-Wl,--version-script={script}"]
    words += ["-Wl,-rpath,$ORIGIN", "-o", str(target / library.file)]
    subprocess.run([*words, *map(str, objects), *others, "-ldl"], check=True)
    if not re.match(r"lib(cuda|nvidia-ml)$", library.name):
        return
    # Compilers look for the name without a version.
    plain = target / f"{library.name}.so"
    plain.unlink(missing_ok=True)
    plain.symlink_to(library.file)
