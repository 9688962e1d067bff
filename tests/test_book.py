"""The book in docs/: its figures are drawn by their script, and its lists are complete."""

from __future__ import annotations

import ast
import importlib
import re
import statistics
from types import SimpleNamespace

import pytest
from tasks import site_links
from tasks.book import write_decisions
from tasks.bootstrap import LAYERS, ROOT
from tasks.figures import FIGURES, FOLDER

DOCS = ROOT / "docs"
APART = ("decisions", "records", "reference")  # folders of pages that are not the book's prose
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


def test_the_search_of_pages_opened_as_files_fetches_nothing_from_elsewhere():
    # Without a helper of this name the plugin `offline` names one on another host, and a browser
    # without a network finds nothing.
    settings = (ROOT / "mkdocs.yml").read_text()
    (helper,) = re.findall(r"^  polyfills: \[(.*)\]", settings, re.MULTILINE)
    assert re.search(r"^  - offline\b", settings, re.MULTILINE)
    assert "iframe-worker" in helper
    assert "://" not in helper
    assert "IFrameWorker" in (DOCS / helper).read_text()  # what the theme's script looks for


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


@pytest.mark.parametrize(
    ("page", "text", "turned"),
    [
        (
            "how-to/new-layer.md",
            "../../examples/moe/README.md",
            "../repository/examples/moe/README.md",
        ),
        ("examples.md", "../examples/simple_loop.py", "repository/examples/simple_loop.py.md"),
        ("how-to/index.md", "hang.md#a-wait", "hang.md#a-wait"),
        ("repository/examples/moe/README.md", "../../docs/moe.md", "../../../moe.md"),
        ("repository/examples/moe/README.md", "train.py", "train.py.md"),
        ("index.md", "https://example.org/a.md", "https://example.org/a.md"),
    ],
)
def test_links_out_of_the_book_lead_to_a_page_of_the_site(page, text, turned):
    files = SimpleNamespace(get_file_from_path=lambda place: place)
    here = SimpleNamespace(file=SimpleNamespace(src_uri=page))
    got = site_links.on_page_markdown(f"[a]({text})", here, None, files)
    assert got == f"[a]({turned})"


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


# ------------------------------------------------------------------------ the prose

PROSE = [
    ROOT / "README.md",
    *(page for page in sorted(DOCS.rglob("*.md")) if page.parent.name not in APART),
]
LONGEST = 35  # words of a sentence
MEDIAN = 15


def sentences(text: str) -> list[str]:
    """Return the sentences of a page's paragraphs, list items and table cells, without code."""
    text = re.sub(r"^( *)```.*?^\1```[ ]*$", "\n\n", text, flags=re.DOTALL | re.MULTILINE)
    text = re.sub(r"<!--.*?-->|!\[[^\]]*\]\([^)]*\)", "", text, flags=re.DOTALL)
    text = re.sub(r"^\[[^\]]+\]: \S+$", "", text, flags=re.MULTILINE)  # where links lead
    text = re.sub(r"`[^`]*`", "CODE", text)
    text = re.sub(r"\[([^\]]*)\]\([^)]*\)", r"\1", text)
    pieces = re.split(r"\n\s*\n|\n(?=\s*(?:[-*]|\d+\.)\s)|\n(?=\|)|\n(?=#)|^#.*$", text, flags=re.M)
    cells = [
        cell for piece in pieces for cell in (piece.split("|") if piece[:1] == "|" else [piece])
    ]
    return [end.strip() for cell in cells for end in re.split(r"(?<=[.?!])[)\"]?\s+", cell)]


def words(sentence: str) -> int:
    return len(re.findall(r"[A-Za-z0-9][\w'/.-]*", sentence))


@pytest.mark.parametrize("page", PROSE, ids=lambda page: page.relative_to(ROOT).as_posix())
def test_sentences_of_a_page_are_short(page):
    found = [sentence for sentence in sentences(page.read_text()) if words(sentence) > 3]
    long = [sentence for sentence in found if words(sentence) > LONGEST]
    assert not long, "\n\n".join(long)
    short_enough = not found or statistics.median(map(words, found)) <= MEDIAN
    assert short_enough, f"half of the sentences have more than {MEDIAN} words"


def test_long_sentences_are_found_and_code_is_left_out():
    long = "word " * 36
    page = f"# {long}\n\nShort one. {long}.\n\n- item {long}\n\n```\n{long}\n```\n| a | {long} |\n"
    assert [words(s) for s in sentences(page) if words(s) > LONGEST] == [36, 37, 36]
    assert sentences("`a b c` of [one two](three)!") == ["CODE of one two!"]


def resolves(name: str) -> bool:
    """Whether a dotted name is a module, or leads from one to an attribute."""
    parts = name.split(".")
    for end in range(len(parts), 1, -1):
        module_name = ".".join(parts[:end])
        try:
            found = importlib.import_module(module_name)
        except ImportError:
            continue
        for part in parts[end:]:
            if not hasattr(found, part):
                return False
            found = getattr(found, part)
        return True
    return False


@pytest.mark.parametrize("page", PROSE, ids=lambda page: page.relative_to(ROOT).as_posix())
def test_names_in_a_page_are_alive(page):
    text = page.read_text()
    names = set(re.findall(r"`(lamina(?:\.[a-z]\w*)(?:\.\w+)*)", text))
    assert [name for name in sorted(names) if not resolves(name)] == []
    terms = (DOCS / "index.md").read_text().partition("## Words")[2].partition("## Laws")[0]
    last = [row.split("|")[-2] for row in terms.splitlines() if row.startswith("|")]
    dead = {word for cell in last for word in re.findall(r"`(\w+)`", cell)}
    spans = set(re.findall(r"`(\w+)`", text)) if page.name != "index.md" else set()
    assert spans & dead == set()
