"""A flipped bit is caught by the guard that the page says, or escapes as it says."""

from __future__ import annotations

import subprocess
import sys
from pathlib import Path

import pytest

PROGRAM = Path(__file__).with_name("corruption.py")
PAGE = Path(__file__).resolve().parents[2] / "docs" / "corruption.md"

WIRE = {
    "send buffer": "",
    "send buffer, checked": "DamagedMessageError",
    "received buffer": "",
    "received buffer, checked": "DamagedMessageError",
}
AT_REST = dict.fromkeys(("sum", "main weights", "optimizer state"))
EXPECTED = {
    "DDP": WIRE | dict.fromkeys((*AT_REST, "replica's weights"), "ReplicaError"),
    "ZeRO-1": WIRE | dict.fromkeys((*AT_REST, "replica's weights"), ""),
    "ZeRO-3": WIRE | dict.fromkeys((*AT_REST, "gathered weights"), ""),
    "HSDP of ZeRO-3": WIRE
    | {"gathered weights": ""}
    | dict.fromkeys((*AT_REST, "replica's weights"), "ReplicaError"),
    "tp with ZeRO-3": dict.fromkeys(AT_REST, "ReplicaError"),
}


def verdicts(text: str) -> dict[str, str]:
    """What caught each flipped low bit, by the rows of a table."""
    # The program puts the setup before each row.
    lines = [line.partition("| ")[2] for line in text.splitlines() if ", bit 16 |" in line]
    return {
        row[0].removesuffix(", bit 16"): row[1]
        .strip("`")
        .removeprefix("caught by `")
        .removeprefix("escaped")
        for row in (line.split(" | ") for line in lines)
    }


@pytest.mark.slow
@pytest.mark.parametrize("setup", EXPECTED)
def test_a_flipped_bit_is_caught_as_the_page_says(setup):
    command = [sys.executable, str(PROGRAM), "-k", f"setup='{setup}'"]
    played = subprocess.run(command, capture_output=True, text=True, timeout=300, check=True)
    assert verdicts(played.stdout) == EXPECTED[setup], played.stdout


def test_the_page_of_corruption_shows_every_flip_and_what_it_left():
    sections = PAGE.read_text().split("\n## ")
    for setup, expected in EXPECTED.items():
        (text,) = [one for one in sections if one.startswith(f"{setup}, ")]
        assert verdicts(text) == expected
