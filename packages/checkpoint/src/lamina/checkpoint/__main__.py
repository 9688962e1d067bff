"""`python -m lamina.checkpoint verify | inspect | diff`: looks at checkpoints without a model."""

import argparse
import sys
from collections.abc import Sequence
from pathlib import Path

from lamina.checkpoint.errors import CheckpointError
from lamina.checkpoint.inspection import Opened, compare_checkpoints, flat_values, verify_checkpoint
from lamina.checkpoint.storage.locations import is_url, local_path, location_of
from lamina.checkpoint.storage.manifest import MANIFEST
from lamina.checkpoint.storage.stores import store_of


def main(arguments: Sequence[str] | None = None) -> int:
    """Run a command; 0: fine, 1: damage or differences, 2: it could not be done."""
    parser = argparse.ArgumentParser(prog="python -m lamina.checkpoint", description=__doc__)
    commands = parser.add_subparsers(dest="command", required=True)
    where = "a checkpoint (.../step-00000100), or a directory of them"
    verify = commands.add_parser("verify", help="read everything and compare checksums")
    verify.add_argument("directory", help=f"{where}: then all of them")
    inspect = commands.add_parser("inspect", help="list what a checkpoint holds")
    inspect.add_argument("directory", help=f"{where}: then the newest")
    inspect.add_argument("--values", action="store_true", help="also what is no tensor")
    diff = commands.add_parser("diff", help="compare two checkpoints")
    diff.add_argument("first", help=f"{where}: then the newest")
    diff.add_argument("second")
    given = parser.parse_args(arguments)
    try:
        if given.command == "verify":
            return _verify(given.directory)
        if given.command == "inspect":
            return _inspect(given.directory, values=given.values)
        return _diff(given.first, given.second)
    except (CheckpointError, OSError, ImportError) as error:
        print(error, file=sys.stderr)
        return 2


def _checkpoints(directory: str) -> list[Path | str]:
    """Return the checkpoint, or those in the directory, oldest first."""
    if not is_url(directory) and not local_path(directory).exists():
        raise FileNotFoundError(f"{directory} does not exist")
    store = store_of(directory)
    checkpoints = [location.address for location in store.locations().values()]
    if checkpoints:
        return checkpoints
    try:
        location_of(directory).size(MANIFEST)
    except OSError:
        raise FileNotFoundError(
            f"{directory} is no complete checkpoint, nor does it hold any"
        ) from None
    return [directory]


def _verify(directory: str) -> int:
    damaged = False
    for path in _checkpoints(directory):
        problems = verify_checkpoint(path)
        print(f"{path}: {'DAMAGED' if problems else 'ok'}")
        for problem in problems:
            print(f"  {problem}")
        damaged |= bool(problems)
    return int(damaged)


def _inspect(directory: str, *, values: bool) -> int:
    opened = Opened(_checkpoints(directory)[-1])
    manifest, tensors = opened.manifest, opened.tensors
    print(
        f"{opened.location}: step {manifest.step}, {manifest.bytes:,} bytes in "
        f"{len(manifest.files)} files, written by {manifest.world_size} ranks with torch "
        f"{manifest.torch}" + ("" if manifest.metric is None else f", metric {manifest.metric:g}")
    )
    width = max(map(len, tensors), default=0)
    for name, described in tensors.items():
        dtype = str(described.properties.dtype).removeprefix("torch.")
        boxes = f"  in {len(described.chunks)} boxes" if len(described.chunks) > 1 else ""
        print(f"  {name:<{width}}  {dtype:<8}  {list(described.size)}{boxes}")
    if values:
        for name, value in flat_values(opened.values).items():
            print(f"  {name} = {value!r}")
    return 0


def _diff(first: str, second: str) -> int:
    differences = compare_checkpoints(_checkpoints(first)[-1], _checkpoints(second)[-1])
    for difference in differences:
        print(f"{difference.name}: {difference.how}")
    if not differences:
        print("equal, bit for bit")
    return int(bool(differences))


if __name__ == "__main__":
    raise SystemExit(main())
