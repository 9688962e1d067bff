"""`lamina-virtual-gpu setup FOLDER`: an environment whose programs find a GPU that is not there."""

from __future__ import annotations

import argparse
import sys
from pathlib import Path

from lamina_virtual_gpu.environment import TORCHES, OutOfReachError, set_up

OUT_OF_REACH = 69  # EX_UNAVAILABLE of sysexits.h


def main() -> None:
    """Read the command line."""
    parser = argparse.ArgumentParser(prog="lamina-virtual-gpu", description=__doc__)
    commands = parser.add_subparsers(required=True, metavar="COMMAND")
    setup = commands.add_parser("setup", help="make an environment, or bring it up to date")
    setup.add_argument("folder", type=Path)
    setup.add_argument("--torch", choices=TORCHES, default="2.14")
    setup.add_argument("--more", nargs="*", default=[], metavar="REQUIREMENT")
    words = parser.parse_args()
    try:
        set_up(words.folder.absolute(), words.torch, tuple(words.more))
    except OutOfReachError as reason:
        print(reason, file=sys.stderr)
        sys.exit(OUT_OF_REACH)


if __name__ == "__main__":
    main()
