"""Lamina as a user installs it: wheels, and an environment that holds nothing but what is named.

`python -m tasks.clean_install --installed LAYER [pytest options]` runs that layer's tests against
its built wheel (`noxfile.py -s matrix -- --installed LAYER`).
"""

from __future__ import annotations

import importlib.metadata
import re
import subprocess
import sys
import tempfile
import zipfile
from collections.abc import Iterable
from pathlib import Path

from tasks.bootstrap import LAYERS, ROOT


def closure(*names: str) -> dict[str, importlib.metadata.Distribution]:
    """Return the installed distributions that `names` need, extras left out, by name."""
    found: dict[str, importlib.metadata.Distribution] = {}
    missing = list(names)
    while missing:
        name = canonical(missing.pop())
        if name in found:
            continue
        try:
            found[name] = importlib.metadata.distribution(name)
        except importlib.metadata.PackageNotFoundError:
            continue  # for another platform: whoever needs it here fails at its import
        needs = [text for text in found[name].requires or [] if "extra ==" not in text]
        missing.extend(re.split(r"[^\w.-]", text, maxsplit=1)[0] for text in needs)
    return found


def canonical(name: str) -> str:
    """Return a distribution's name as PEP 503 writes it."""
    return re.sub(r"[-_.]+", "-", name).lower()


def layers_of(layer: str) -> list[str]:
    """Return a layer and those that installing it brings, lowest first."""
    names = closure(f"lamina-{layer}")
    return [other for other in LAYERS if f"lamina-{other}" in names]


def gather(distributions: Iterable[importlib.metadata.Distribution], where: Path) -> Path:
    """Make `where` a directory of links to these distributions: an import path without the rest."""
    where.mkdir(parents=True)
    for distribution in distributions:
        for file in distribution.files or []:
            top = file.parts[0]
            if top != ".." and not top.endswith((".pth", "__pycache__")):
                link = where / top
                if not link.exists():
                    link.symlink_to(Path(str(distribution.locate_file(top))))
    return where


def build_wheels(layers: Iterable[str], where: Path, *, test_bed: bool = False) -> list[Path]:
    """Build the layers' wheels into `where` with this environment's hatchling; return them."""
    places = [ROOT / "packages" / layer for layer in layers]
    for place in [*places, ROOT / "testing"] if test_bed else places:
        command = [sys.executable, "-m", "hatchling", "build", "-t", "wheel", "-d", str(where)]
        subprocess.run(command, cwd=place, check=True, capture_output=True)
    return sorted(where.glob("*.whl"))


def unpack(wheels: Iterable[Path], where: Path) -> Path:
    """Put wheels into `where` as an installer would into site-packages."""
    for wheel in wheels:
        with zipfile.ZipFile(wheel) as archive:
            archive.extractall(where)
    return where


def make_environment(where: Path, packages: Path, *, pip: bool = False) -> Path:
    """Make a virtual environment that also sees the directory `packages`; return its Python."""
    bare = [] if pip else ["--without-pip"]
    subprocess.run([sys.executable, "-m", "venv", *bare, str(where)], check=True)
    (site_packages,) = where.glob("lib/python3*/site-packages")
    (site_packages / "packages.pth").write_text(f"{packages}\n")
    return where / "bin" / "python"


def run_installed(layer: str, words: list[str]) -> int:
    """Run a layer's tests on its wheel and those beneath; return pytest's exit code."""
    with tempfile.TemporaryDirectory(prefix="lamina-installed-") as name:
        place = Path(name)
        others = [
            distribution
            for distribution in importlib.metadata.distributions()
            if not canonical(distribution.metadata["Name"]).startswith("lamina-")
        ]
        python = make_environment(place / "env", gather(others, place / "packages"))
        wheels = build_wheels(layers_of(layer), place / "wheels", test_bed=True)
        pip = [sys.executable, "-m", "pip", "--python", str(python), "install", "-qq"]
        subprocess.run([*pip, "--no-deps", "--no-index", *map(str, wheels)], check=True)
        show = f"import lamina.{layer} as x; print(x.__file__)"
        file = subprocess.run([python, "-c", show], check=True, capture_output=True, text=True)
        if not Path(file.stdout.strip()).is_relative_to(place):
            sys.exit(f"the tree's lamina.{layer} hides the installed one: {file.stdout}")
        print(f"lamina.{layer} from {file.stdout.strip()}", flush=True)
        command = [str(python), "-m", "pytest", f"packages/{layer}/tests", *words]
        return subprocess.run(command, cwd=ROOT).returncode


if __name__ == "__main__":
    words = sys.argv[1:]
    place = words.index("--installed")
    chosen = words[place + 1] if place + 1 < len(words) else ""
    if chosen not in LAYERS:
        sys.exit(f"--installed {chosen!r}: name one of {', '.join(LAYERS)}")
    sys.exit(run_installed(chosen, words[:place] + words[place + 2 :]))
