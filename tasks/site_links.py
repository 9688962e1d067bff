"""A hook of MkDocs: files of the repository that pages link to become pages of the site.

The pages of docs/ link to RESULTS.md, to examples and to sources, as one reads them in the
repository. The site has only docs/. So each such file is added under `repository/`, with the files
that it links to in turn, and links are turned to where they lie in the site.
"""

from __future__ import annotations

import importlib
import posixpath
import re
from pathlib import Path
from typing import TYPE_CHECKING, Any

if TYPE_CHECKING:
    from collections.abc import Iterator

ROOT = Path(__file__).resolve().parent.parent
LINK = re.compile(r"(\]\()(?!https?:|#|mailto:)([^)#\s]+)")
TEXT = (".md", ".py", ".toml", ".txt", ".yml", ".yaml", ".cfg", ".sh")


def place_of(path: str) -> str:
    """Where a file of the repository lies in the site's sources; "" if it is not there."""
    if path.startswith("docs/"):
        return path.removeprefix("docs/")
    known = (ROOT / path).is_file() and not path.startswith("..")
    end = ".md" if path.endswith(TEXT) and not path.endswith(".md") else ""
    return f"repository/{path}{end}" if known else ""


def path_of(place: str) -> str:
    """The file of the repository that lies at a place in the site's sources."""
    inside = place.removeprefix("repository/")
    return inside if (ROOT / inside).is_file() else inside.removesuffix(".md")


def links(text: str, path: str) -> Iterator[str]:
    """Files of the repository that the page at `path` links to."""
    for found in LINK.finditer(text):
        yield posixpath.normpath(posixpath.join(posixpath.dirname(path), found[2]))


def on_files(files: Any, config: Any) -> Any:
    """Add what pages link to, and what that links to."""
    # Only the environment of the site has MkDocs.
    generated = importlib.import_module("mkdocs.structure.files").File.generated
    waiting = [(one.content_string, f"docs/{one.src_uri}") for one in files.documentation_pages()]
    while waiting:
        text, path = waiting.pop()
        for target in links(text, path):
            place = place_of(target)
            if not place.startswith("repository/") or files.get_file_from_path(place):
                continue
            if not target.endswith(TEXT):  # a picture
                added = generated(config, place, abs_src_path=str(ROOT / target))
            else:
                text_of = (ROOT / target).read_text()
                if not target.endswith(".md"):
                    name = target.rpartition("/")[2]
                    text_of = f"# {name}\n\n````{target.rpartition('.')[2]}\n{text_of}````\n"
                else:
                    waiting.append((text_of, target))
                added = generated(config, place, content=text_of)
            files.append(added)
    return files


def on_page_markdown(markdown: str, page: Any, config: Any, files: Any) -> str:
    """Turn links to files of the repository to where these lie in the site."""
    here = page.file.src_uri
    outside = here.startswith("repository/")
    path = path_of(here) if outside else f"docs/{here}"

    def turned(found: re.Match[str]) -> str:
        target = posixpath.normpath(posixpath.join(posixpath.dirname(path), found[2]))
        place = place_of(target)
        if not files.get_file_from_path(place):
            return found[0]
        return found[1] + posixpath.relpath(place, posixpath.dirname(here) or ".")

    return LINK.sub(turned, markdown) if path.endswith(".md") else markdown
