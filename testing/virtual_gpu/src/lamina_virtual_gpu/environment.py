"""Makes an environment with a virtual GPU: a CUDA build of torch, and the stand-ins beneath it."""

from __future__ import annotations

import hashlib
import json
import os
import shutil
import subprocess
import sys
from pathlib import Path

from lamina_virtual_gpu.building import SOURCES, build, build_arithmetic

# Builds for CUDA 13.0 on PyPI, and the Triton that each goes with.
TORCHES = {"2.13": ("2.13.0", "3.7.*"), "2.14": ("2.14.1", "3.8.*"), "2.15": ("2.15.0", "3.9.*")}
# What torch needs beside NVIDIA's libraries, which are not installed.
NEEDS = "filelock fsspec jinja2 networkx numpy packaging sympy typing_extensions setuptools".split()


class OutOfReachError(Exception):
    """What would have to be downloaded cannot be had here."""


def pip(folder: Path, *words: str) -> None:
    """Run pip in the environment. A cap on torch's version elsewhere does not hold here."""
    command = [str(folder / "bin" / "python"), "-m", "pip", "install", "-q", "--no-compile"]
    env = {**os.environ, "PIP_CONSTRAINT": "", "PIP_DISABLE_PIP_VERSION_CHECK": "1"}
    answer = subprocess.run([*command, *words], env=env, capture_output=True, text=True)
    if answer.returncode:
        reason = (answer.stderr.strip().splitlines() or ["pip says nothing"])[-1]
        raise OutOfReachError(f"pip could not install {' '.join(words)}: {reason}")


def site_packages(folder: Path) -> Path:
    """Return the environment's folder of packages."""
    (found,) = folder.glob("lib/python3*/site-packages")
    return found


# What the libraries are built from, beside the sources in C++.
BUILDERS = ("building.py", "libraries.py", "profiles.py")


def digest(built: bool) -> str:
    """Hash of this package, or of what its libraries are built from."""
    texts = [path.read_bytes() for path in sorted(Path(__file__).parent.rglob("*.*"))
             if path.suffix in (".cpp", ".h") or path.name in BUILDERS
             or (path.suffix == ".py" and not built)]  # fmt: skip
    return hashlib.sha256(b"\0".join(texts)).hexdigest()[:16]


def refuse_beside_a_driver() -> None:
    """Stop where a real GPU is: results there would be lost, and nobody would notice."""
    for sign in ("/proc/driver/nvidia/version", "/dev/nvidiactl"):
        if Path(sign).exists():
            sys.exit(
                f"{sign} exists: this machine has a real NVIDIA driver, and a virtual GPU, which "
                "computes nothing, is refused.\nUse the GPU, or a machine without one"
            )


def install_torch(folder: Path, version: str, triton: str, *more: str) -> None:
    """Install torch without NVIDIA's libraries, and what else it and the caller need."""
    # Three signs: a build with a suffix, such as 2.13.0+cpu of a local index, is another one.
    pip(folder, "--no-deps", f"torch==={version}", f"triton=={triton}")
    cuda = (site_packages(folder) / "torch" / "version.py").read_text()
    if "cuda: _Optional[str] = None" in cuda or "cuda: Optional[str] = None" in cuda:
        raise OutOfReachError(
            f"torch {version} came without CUDA: a local index has a CPU build of that version. "
            "Unset PIP_FIND_LINKS and PIP_EXTRA_INDEX_URL, or choose another version"
        )
    pip(folder, *NEEDS, *more)


def set_up(folder: Path, torch: str = "2.14", more: tuple[str, ...] = ()) -> None:
    """Make the environment, or bring it up to date.

    Args:
        folder: where it shall be: a new folder, or one that an earlier call made.
        torch: minor version, a key of `TORCHES`.
        more: further requirements for pip, such as `pytest`.

    Raises:
        OutOfReachError: a download failed; nothing is wrong with the machine otherwise.
    """
    refuse_beside_a_driver()
    if shutil.which("g++") is None:
        raise OutOfReachError("the stand-ins are compiled with g++, and there is none in PATH")
    version, triton = TORCHES[torch]
    stamp = folder / "virtual-gpu.json"
    made = json.loads(stamp.read_text()) if stamp.exists() else {}
    wants = {"place": str(folder.resolve()), "torch": version, "more": list(more)}
    if {key: made.get(key) for key in wants} != wants:
        if not (folder / "bin" / "python").exists() or made.get("place") != wants["place"]:
            shutil.rmtree(folder, ignore_errors=True)
            subprocess.run([sys.executable, "-m", "venv", str(folder)], check=True)
        install_torch(folder, version, triton, *more)
        made = wants
    sources = {"sources": digest(built=False), "built": digest(built=True)}
    if made.get("built") != sources["built"]:
        build_stand_ins(folder)
    if {key: made.get(key) for key in sources} != sources:
        copy_package(folder)
        stamp.write_text(json.dumps({**wants, **sources}, indent=1) + "\n")


def build_stand_ins(folder: Path) -> None:
    """Build the libraries where torch looks for NVIDIA's."""
    packages = site_packages(folder)
    counts = build(packages / "torch" / "lib", packages / "nvidia" / "cu13" / "lib")
    build_arithmetic(packages / "torch", packages / "nvidia" / "cu13" / "lib")
    modelled, generated = map(sum, zip(*counts.values(), strict=True))
    print(f"{len(counts)} libraries: {modelled} entries modelled, {generated} refuse when called")


def copy_package(folder: Path) -> None:
    """Copy this package beside torch, so that it needs no path."""
    packages = site_packages(folder)
    own = packages / "lamina_virtual_gpu"
    shutil.rmtree(own, ignore_errors=True)
    shutil.copytree(SOURCES.parent, own, ignore=shutil.ignore_patterns("__pycache__"))
    (packages / "lamina_virtual_gpu.pth").write_text("import lamina_virtual_gpu.activate\n")
    put_entry_point(packages)


def put_entry_point(packages: Path) -> None:
    """Say what this package offers, as pip would: a planner finds `measured_step` so."""
    about = packages / "lamina_virtual_gpu-0.dist-info"
    about.mkdir(exist_ok=True)
    (about / "METADATA").write_text("Metadata-Version: 2.1\nName: lamina-virtual-gpu\nVersion: 0\n")
    entry = "virtual-gpu = lamina_virtual_gpu.planning:measured_step"
    (about / "entry_points.txt").write_text(f"[lamina.plan]\n{entry}\n")
