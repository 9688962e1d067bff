"""The book in docs/: its figures are drawn by their script, and its lists are complete."""

from __future__ import annotations

import ast
import importlib
import re

import pytest
from tasks.book import write_decisions
from tasks.bootstrap import LAYERS, ROOT
from tasks.figures import FIGURES, FOLDER

DOCS = ROOT / "docs"
NAV = (ROOT / "mkdocs.yml").read_text().partition("\nnav:\n")[2].partition("\nvalidation:")[0]


@pytest.mark.parametrize("name", FIGURES)
def test_a_figure_is_what_its_script_draws(name):
    drawn = (FOLDER / f"{name}.svg").read_text()
    assert drawn == str(FIGURES[name]()), "run python tasks/figures.py"


def test_every_figure_has_a_script_and_a_page():
    names = {path.stem for path in FOLDER.iterdir()}
    assert names == set(FIGURES)
    pages = "".join(page.read_text() for page in [ROOT / "README.md", *DOCS.rglob("*.md")])
    assert [name for name in names if f"figures/{name}.svg" not in pages] == []


def test_every_page_is_in_the_order_of_the_book_and_every_entry_is_a_page():
    listed = set(re.findall(r"[\w./-]+\.md", NAV))
    pages = {path.relative_to(DOCS).as_posix() for path in DOCS.rglob("*.md")}
    apart = {"decisions/index.md", "matrix.md"}  # written by tasks
    wanted = {page for page in pages if not page.startswith(("decisions/", "records/"))}
    assert wanted - apart == listed - apart


def test_decisions_are_listed_by_layer(tmp_path):
    (tmp_path / "0102-b.md").write_text("# 0102: second\n\nWhy.\n")
    (tmp_path / "0401-a.md").write_text("# 0401: first\n")
    write_decisions(tmp_path)
    text = (tmp_path / "index.md").read_text()
    assert "## mesh\n\n- [0102: second](0102-b.md)\n" in text
    assert "## ddp\n\n- [0401: first](0401-a.md)\n" in text


@pytest.mark.parametrize("layer", LAYERS)
def test_a_page_of_the_reference_that_orders_names_leaves_none_out(layer):
    page = (DOCS / "reference" / f"{layer}.md").read_text().partition("\n::: lamina.models.")[0]
    ordered = re.findall(r"^ {8}- (\w+)$", page, re.MULTILINE)
    if ordered:
        assert sorted(ordered) == sorted(importlib.import_module(f"lamina.{layer}").__all__)


def texts_in_sources() -> str:
    """Return all strings in the packages' sources; what an f-string inserts is left out."""
    trees = [ast.parse(path.read_text()) for path in ROOT.glob("packages/*/src/**/*.py")]
    nodes = [node for tree in trees for node in ast.walk(tree)]
    joined = [
        "".join(part.value if isinstance(part, ast.Constant) else "\0" for part in node.values)
        for node in nodes
        if isinstance(node, ast.JoinedStr)
    ]
    plain = [
        node.value
        for node in nodes
        if isinstance(node, ast.Constant) and isinstance(node.value, str)
    ]
    return "\n".join(joined + plain)


def test_texts_of_our_errors_are_in_the_sources():
    page = (DOCS / "troubleshooting.md").read_text().partition("\n## torch\n")[0]
    quoted = re.findall(r"^\| `([^`]+)`", page, re.MULTILINE)
    sources = texts_in_sources()
    assert len(quoted) > 50
    assert [text for text in quoted if text not in sources] == []
