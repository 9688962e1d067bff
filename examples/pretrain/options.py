"""Config from defaults, a TOML file and the command line, in this order."""

from __future__ import annotations

import argparse
import contextlib
import dataclasses
import difflib
import io
import sys
import tomllib
import typing
from pathlib import Path
from typing import Any

import torch.distributed as dist
import tyro
from config import Config, check

from lamina.mesh import Runtime

CONFIGS = Path(__file__).parent / "configs"


class OptionError(Exception):
    """A setting that does not exist or has the wrong type; the message says where and what else."""


def load(arguments: list[str], device_type: str) -> Config:
    """Build the config.

    Args:
        arguments: of the command line.
        device_type: "cpu" or "cuda": which defaults to begin with.

    Raises:
        OptionError: an unknown key of the file, or a value of the wrong type.
        SystemExit: --help, or an unknown option (tyro has then printed what is wrong).
    """
    parser = argparse.ArgumentParser(add_help=False, allow_abbrev=False)
    parser.add_argument("--config", type=Path)
    given, rest = parser.parse_known_args(arguments)
    path = given.config or CONFIGS / ("gpu.toml" if device_type == "cuda" else "cpu.toml")
    return tyro.cli(Config, default=from_toml(path), args=rest, prog="train.py")


def from_toml(path: Path) -> Config:
    """Read a config; keys that are not in the file keep their defaults.

    Raises:
        OptionError: no such file, not TOML, unknown keys, values of the wrong type.
    """
    try:
        return from_dict(Config, tomllib.loads(path.read_text()), str(path))
    except FileNotFoundError:
        near = ", ".join(sorted(p.name for p in CONFIGS.glob("*.toml")))
        raise OptionError(f"--config {path}: no such file; in {CONFIGS} there are {near}") from None
    except tomllib.TOMLDecodeError as error:
        raise OptionError(f"{path}: {error}") from None


def from_dict(kind: type, values: dict[str, Any], source: str, prefix: str = "") -> Any:
    """Fill a dataclass of dataclasses from nested dicts, refusing what is not a field."""
    types = typing.get_type_hints(kind)
    arguments = {}
    for key, value in values.items():
        name = f"{prefix}{key}"
        if key not in types:
            raise OptionError(f"{source}: unknown key '{name}'{_nearest(name, _all_names())}")
        wanted = types[key]
        if dataclasses.is_dataclass(wanted):
            if not isinstance(value, dict):
                raise OptionError(f"{source}: '{name}' is a section: write [{name}] above its keys")
            arguments[key] = from_dict(wanted, value, source, f"{name}.")
        else:
            arguments[key] = _checked(value, wanted, f"{source}: '{name}'")
    return kind(**arguments)


def _checked(value: Any, wanted: Any, where: str) -> Any:
    if typing.get_origin(wanted) is typing.Literal:
        choices = typing.get_args(wanted)
        if value not in choices:
            raise OptionError(f"{where} is {value!r}: choose {', '.join(map(repr, choices))}")
        return value
    if wanted is float and type(value) is int:
        return float(value)
    if type(value) is not wanted:
        raise OptionError(f"{where} is {value!r}: it must be {wanted.__name__}")
    return value


def _all_names(kind: type = Config, prefix: str = "") -> list[str]:
    names = []
    for key, wanted in typing.get_type_hints(kind).items():
        names.append(f"{prefix}{key}")
        if dataclasses.is_dataclass(wanted):
            names += _all_names(wanted, f"{prefix}{key}.")
    return names


def _nearest(name: str, names: list[str]) -> str:
    # A key is often right but in the wrong section: then its last part decides.
    tails = {n.rpartition(".")[2]: n for n in reversed(names)}
    close = difflib.get_close_matches(name, names, n=1, cutoff=0.7)
    if not close:
        tail = difflib.get_close_matches(name.rpartition(".")[2], list(tails), n=1)
        close = [tails[tail[0]]] if tail else []
    return f"; did you mean '{close[0]}'?" if close else f"; there are {', '.join(names)}"


def configure(arguments: list[str], runtime: Runtime) -> Config:
    """Build the config on every rank and let the first one speak if it is wrong.

    Raises:
        SystemExit: with status 0 after --help, 2 after an error.
    """
    with contextlib.ExitStack() as quiet:
        if not runtime.is_main:
            quiet.enter_context(contextlib.redirect_stdout(io.StringIO()))
            quiet.enter_context(contextlib.redirect_stderr(io.StringIO()))
        try:
            config = load(arguments, runtime.device.type)
            check(config, runtime.world_size)
        except (OptionError, ValueError) as error:
            print(f"train.py: {error}", file=sys.stderr)
            status: int | str | None = 2
        except SystemExit as leave:
            status = leave.code
        else:
            return config
    # The launcher ends all ranks when one fails: let the first one speak before.
    dist.barrier()
    raise SystemExit(status)
