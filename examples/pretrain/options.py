"""Config from defaults, a TOML file and the command line, in this order."""

from __future__ import annotations

import argparse
import contextlib
import sys
import tomllib
from collections.abc import Iterator, Mapping
from dataclasses import asdict
from pathlib import Path
from typing import Any

import torch
import torch.distributed as dist
import tyro
from config import LIMITS, Config, check
from torch.torch_version import TorchVersion

from lamina.collectives.engine import CommonFacts
from lamina.mesh import Runtime

CONFIGS = Path(__file__).parent / "configs"


class OptionError(ValueError):
    """A file or a command line that cannot be read as settings."""


def load(arguments: list[str], device_type: str, *, speak: bool = True) -> Config:
    """Build the config: the command line over a file over the defaults.

    Args:
        arguments: of the command line.
        device_type: "cpu" or "cuda": which defaults to begin with.
        speak: print what is wrong; of several ranks one does.

    Raises:
        OptionError: no such file, or no TOML.
        SystemExit: --help, or what is no setting (tyro has then printed what is wrong, and the
            nearest that exists).
    """
    parser = argparse.ArgumentParser(add_help=False, allow_abbrev=False, exit_on_error=False)
    parser.add_argument("--config", type=Path)
    parser.add_argument("--model", "--model.name")
    try:
        given, rest = parser.parse_known_args(arguments)
    except argparse.ArgumentError as error:
        raise OptionError(error) from None
    named = CONFIGS / f"{given.model or ('gpu' if device_type == 'cuda' else 'cpu')}.toml"
    config = Config()
    if given.config or not given.model or named.is_file():
        config = from_toml(given.config or named, speak=speak)
    if given.model and (given.config or not named.is_file()):
        rest += ["--model.name", given.model]
    if config.tiny or "--tiny" in rest:
        config = from_toml(CONFIGS / "tiny.toml", config)
    return tyro.cli(Config, default=config, args=rest, prog="train.py", console_outputs=speak)


def from_toml(path: Path, default: Config | None = None, *, speak: bool = True) -> Config:
    """Read a config; keys that are not in the file keep their defaults.

    A file says what the command line can say, so it is read as one.

    Raises:
        OptionError: no such file, or no TOML.
        SystemExit: unknown keys, values of the wrong type (printed, with the file's name).
    """
    try:
        given = dict(flat(tomllib.loads(path.read_text())))
    except FileNotFoundError:
        near = ", ".join(sorted(p.name for p in CONFIGS.glob("*.toml")))
        raise OptionError(f"--config {path}: no such file; in {CONFIGS} there are {near}") from None
    except tomllib.TOMLDecodeError as error:
        raise OptionError(f"{path}: {error}") from None
    words = [word for name, value in given.items() for word in words_of(name, value)]
    start, prog = default or Config(), path.name
    try:
        return tyro.cli(Config, default=start, args=words, prog=prog, console_outputs=speak)
    except SystemExit:
        for name in given if speak else ():
            print(f"{path}: '{name}'{_hint(name)}", file=sys.stderr)
        raise


def flat(table: Mapping[str, Any], prefix: str = "") -> Iterator[tuple[str, Any]]:
    """Yield the values of nested tables, each with its dotted name."""
    for key, value in table.items():
        if isinstance(value, Mapping):
            yield from flat(value, f"{prefix}{key}.")
        else:
            yield prefix + key, value


def words_of(name: str, value: object) -> list[str]:
    """A setting as the command line has it."""
    if isinstance(value, bool):
        section, dot, key = name.rpartition(".")
        return [f"--{section}{dot}{'' if value else 'no-'}{key}"]
    return [f"--{name}", *map(str, value)] if isinstance(value, list) else [f"--{name}={value}"]


def _hint(name: str) -> str:
    """What tyro does not say: that a key is in the wrong section, or is a section itself."""
    if any(known.startswith(f"{name}.") for known in LIMITS):
        return f" is a section: write [{name}] above its keys"
    tails = {known.rpartition(".")[2]: known for known in LIMITS}
    right = tails.get(name.rpartition(".")[2], name)
    return f"; did you mean '{right}'?" if right != name else " was read"


@contextlib.contextmanager
def refusals(*, speak: bool = True) -> Iterator[None]:
    """Settings that cannot run end the process with status 2, and one line says why."""
    try:
        yield
    except ValueError as error:
        if speak:
            print(f"train.py: {error}", file=sys.stderr)
        raise SystemExit(2) from None


def configure(arguments: list[str], runtime: Runtime) -> Config:
    """Build the config on every rank, let the first one speak if it is wrong, and compare ranks.

    Raises:
        SystemExit: with status 0 after --help, 2 after an error.
        DisagreementError: hosts were started with other commands or files.
    """
    facts = [("settings", "refused, or --help")]
    try:
        with refusals(speak=runtime.is_main):
            config = load(arguments, runtime.device.type, speak=runtime.is_main)
            check(config, runtime.world_size)
            check_compiler(config, runtime.device.type)
            if config.dry_run:
                raise ValueError("dry_run in a file: give --dry-run on the command line instead")
            facts = [(name, str(value)) for name, value in flat(asdict(config))]
            return config
    finally:  # The launcher ends all ranks when one fails: this waits until the first has spoken.
        CommonFacts("settings", [dist.group.WORLD]).require(facts)


def check_compiler(config: Config, device_type: str, torch_file: str = torch.__file__) -> None:
    """Refuse --compile where torch cannot link what it has compiled for a CPU.

    Its linker's command has the folder of torch's libraries without quotes
    (pytorch/pytorch#191010). GPUs get kernels of Triton, which are not linked so.

    Args:
        config: of the run.
        device_type: "cpu" or "cuda".
        torch_file: where torch lies.

    Raises:
        ValueError: torch is older than 2.14 and lies under a path with a space.
    """
    old = TorchVersion(torch.__version__) < "2.14"
    if config.compile and device_type == "cpu" and old and " " in torch_file:
        raise ValueError(
            f"--compile: on a CPU torch {torch.__version__} cannot link under a path with a space, "
            f"and lies in {Path(torch_file).parent}; clone into a path without spaces, or leave "
            "--compile out"
        )
