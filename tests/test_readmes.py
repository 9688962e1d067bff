"""Every ```python block of the READMEs and of the pages in docs/ runs."""

from __future__ import annotations

import re
import sysconfig
from pathlib import Path

import pytest
from tasks.bootstrap import LAYERS, ROOT
from tasks.clean_install import closure, gather, layers_of
from tasks.snippets import Job, run, snippets

SOURCES = {layer: ROOT / "packages" / layer / "src" for layer in LAYERS}
ALL = (*SOURCES.values(), Path(sysconfig.get_path("purelib")))
PAGES = [
    page
    for page in [
        ROOT / "README.md",
        ROOT / "CONTRIBUTING.md",
        *sorted((ROOT / "docs").rglob("*.md")),
    ]
    if page.exists() and snippets(page)
]


def job_of(layer: str) -> Job:
    """A package's README may import torch, its layer and those beneath it: no path to others."""
    blocks = snippets(ROOT / "packages" / layer / "README.md")
    paths = tuple(SOURCES[other] for other in layers_of(layer))
    return Job(tuple(blocks), paths, (f"lamina.{layer}",))


@pytest.fixture(scope="module")
def complaints(tmp_path_factory: pytest.TempPathFactory) -> dict[object, str]:
    """What went wrong in each job; all run here at once, so that little is imported twice."""
    planted = tmp_path_factory.mktemp("planted") / "page.md"
    planted.write_text("```python\nimport lamina.fsdp\n```\n")
    jobs: dict[object, Job] = {}
    for size, restarts in RANKS_CASES:
        page = planted.with_name(f"ranks-{size}-{restarts}.md")
        page.write_text(PAGE_OF_RANKS.format(size=size, restarts=restarts))
        jobs[size, restarts] = Job(tuple(snippets(page)), ())
    for layer in LAYERS:  # from below, so that a layer is imported once, for those above it too
        jobs[layer] = job_of(layer)
        if layer == "ddp":
            jobs["planted"] = Job(tuple(snippets(planted)), jobs[layer].paths)
    # numpy is what the checkpoint layer declares beside torch (test_packages.py holds who may).
    third_party = closure("torch", "numpy").values()
    base = gather(third_party, tmp_path_factory.mktemp("torch") / "only")
    found = dict(zip(jobs, run(list(jobs.values()), base), strict=True))
    # A page may use all that is installed. A process that lacked it once must not run them.
    faces = tuple(f"lamina.{layer}" for layer in LAYERS)
    pages = [Job(tuple(snippets(page)), ALL, ("torch._dynamo", *faces)) for page in PAGES]
    return found | dict(zip(PAGES, run(pages, base), strict=True))


@pytest.mark.parametrize("layer", LAYERS)
def test_readme_of_a_layer_has_one_snippet_that_runs_with_what_lies_beneath(layer, complaints):
    assert len(snippets(ROOT / "packages" / layer / "README.md")) == 1
    assert not complaints[layer], complaints[layer]


@pytest.mark.parametrize("page", PAGES, ids=[str(page.relative_to(ROOT)) for page in PAGES])
def test_snippets_of_a_page_run_in_order(page, complaints):
    assert not complaints[page], complaints[page]


def test_a_snippet_that_reaches_for_a_layer_above_fails(complaints):
    assert "No module named 'lamina.fsdp'" in complaints["planted"]
    assert "page.md" in complaints["planted"]


def test_blocks_are_found_with_their_lines_and_without_those_not_to_be_run(tmp_path):
    page = tmp_path / "page.md"
    page.write_text(
        "# A\n\n```python\nx = 1\n```\n\n<!-- not run: needs 8 GPUs -->\n```python\ny\n```\n"
        "- item\n\n  ```python\n  if x:\n      z = 2\n  ```\n\n```bash\nls\n```\n"
    )
    found = [(snippet.line, snippet.source) for snippet in snippets(page)]
    assert found == [(4, "x = 1\n"), (14, "if x:\n    z = 2\n")]


PAGE_OF_RANKS = """
<!-- ranks: 2 -->
```python
import os
print("rank", os.environ["RANK"], "of", os.environ["WORLD_SIZE"])
```

<!-- prints -->
```text
rank 0 ...{size}
```

<!-- ranks: 2, restarts: {restarts} -->
```python
import os
if os.environ["RANK"] == "1" and os.environ["TORCHELASTIC_RESTART_COUNT"] == "0":
    raise SystemExit("the first attempt")
```
"""


RANKS_CASES = {
    (2, 1): "",
    (3, 1): "instead of",
    (2, 0): "attempt 0 failed",
    (2, 2): "attempt 1 did not fail",
}


@pytest.mark.parametrize("case", RANKS_CASES)
def test_a_block_for_ranks_runs_on_all_and_prints_what_its_page_says(case, complaints):
    complaint = RANKS_CASES[case]
    assert complaint in complaints[case]
    assert complaint or not complaints[case], complaints[case]


READ_ON_GITHUB = [
    page
    for pattern in ("*.md", "packages/*/README.md", "testing/README.md", "docs/**/*.md")
    for page in sorted(ROOT.glob(pattern))
]


@pytest.mark.parametrize("page", READ_ON_GITHUB, ids=lambda page: str(page.relative_to(ROOT)))
def test_links_of_a_page_lead_somewhere(page):
    targets = re.findall(r"\]\((?!https?:|#|mailto:)([^)#\s]+)", page.read_text())
    assert not [target for target in targets if not (page.parent / target).exists()]


def test_each_decision_has_a_number_of_its_own_and_what_is_cited_exists():
    pages = sorted((ROOT / "docs" / "decisions").glob("[0-9]*.md"))  # not the written index
    numbers = [page.name[:4] for page in pages]
    assert len(set(numbers)) == len(numbers), "two decisions carry one number"
    for page, number in zip(pages, numbers, strict=True):
        assert page.read_text().startswith(f"# {number}: "), page.name
    files = [path for end in ("py", "md") for path in ROOT.glob(f"[!.]*/**/*.{end}")]
    cited = {
        number
        for path in files
        for number in re.findall(r"[Dd]ecision (\d{4})\b|decisions/(\d{4})-", path.read_text())
    }
    assert {one or other for one, other in cited} <= set(numbers)
    assert len(cited) > 20, "the pattern no longer finds citations"
