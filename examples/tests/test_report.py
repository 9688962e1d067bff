"""What a run ends with: the command that goes on, and the page."""

from __future__ import annotations

import math
import re
import shlex
from html.parser import HTMLParser
from xml.etree import ElementTree

import pytest
from report import page
from run import command


@pytest.mark.parametrize(
    ("given", "wanted"),
    [
        ([], ["--train.steps", "8"]),
        (["--train.steps", "4", "--tiny"], ["--tiny", "--train.steps", "8"]),
        (["--train.steps=4", "--mesh", "tp=2"], ["--mesh", "tp=2", "--train.steps", "8"]),
        (["--tiny", "--train.steps", "2", "--train.steps", "4"], ["--tiny", "--train.steps", "8"]),
        (["--run.name", "a b"], ["--run.name", "a b", "--train.steps", "8"]),
    ],
)
def test_the_command_that_goes_on_says_each_option_once(given, wanted, monkeypatch):
    monkeypatch.setattr("sys.argv", ["train.py", *given])
    words = shlex.split(command({"train.steps": 8}))
    assert words[: words.index("--")] == ["python3", "noxfile.py", "-s", "train"]
    assert words[words.index("--") + 1 :] == wanted
    assert shlex.split(command({"train.steps": 8}, anew=True))[-2:] == wanted[-2:]


class Read(HTMLParser):
    """The tags, attributes and text of a page."""

    def __init__(self, html: str) -> None:
        super().__init__()
        self.tags: list[str] = []
        self.names: list[tuple[str, str | None]] = []
        self.text = ""
        self.feed(html)

    def handle_starttag(self, tag, attributes):
        self.tags.append(tag)
        self.names += attributes

    def handle_data(self, data):
        self.text += data


def test_the_page_of_a_run_needs_nothing_else_and_shows_all_of_it():
    written = "<script>alert('&amp;')</script>"
    records = [
        {"step": n, "loss": 4 / n, "grad_norm": 1 / n, "tokens_per_second": 100.0 * n,
         "memory_bytes": n << 20, "exposed_share": 0.2, "data_share": 0.1, "checkpoint_share": 0.0}
        for n in range(1, 9)
    ] + [{"step": 8, "held_out_loss": 0.625}]  # fmt: skip
    settings = {"mesh": "dp_shard=-1", "train": {"steps": 8, "batch_size": 16}}
    html = page("runs/a", ["", "held-out 0.625"], records, 3.25, [("given &", written)], settings)
    read = Read(html)
    assert not {"script", "link", "img", "iframe"} & set(read.tags)
    assert not [value for name, value in read.names if name in ("src", "href") and value]
    assert f"given &{written}" in read.text
    for word in ("held-out 0.625", "train.batch_size", "16", "mesh", "dp_shard=-1"):
        assert word in read.text
    svg = html[html.index("<svg") : html.index("</svg>") + len("</svg>")]
    words = "".join(ElementTree.fromstring(svg).itertext())
    for title in ("Loss", "Norm of the gradient", "Throughput", "Memory", "Share of the time"):
        assert title in words
    for label in ("held-out", "unigram entropy", "exposed communication"):
        assert label in words
    assert len(html) < 200_000


def test_a_run_that_was_stopped_before_its_first_step_has_a_page():
    assert "<svg" in page("runs/a", [], [], 3.25, [], {})


def test_the_smoothed_loss_goes_on_after_a_step_whose_loss_was_not_finite():
    def curves(records):
        return re.findall(r' d="([^"]*)"', page("runs/a", [], records, 3.25, [], {}))

    good = [{"step": n, "loss": 4 / n} for n in (1, 2, 4, 5)]
    assert curves([*good[:2], {"step": 3, "loss": math.nan}, *good[2:]]) == curves(good)
