"""Releases of packages one by one, on planted packages: `mesh` beneath `buffers` beneath `ddp`."""

from __future__ import annotations

import subprocess
import sys
import tarfile
import zipfile
from pathlib import Path

import pytest
import source_trees
from tasks.bootstrap import LAYERS, ROOT, SUB_FACES
from tasks.clean_install import unpack
from tasks.release.archives import build_reproducibly
from tasks.release.budgets import Cost, budgets, measure, over
from tasks.release.check import check
from tasks.release.make import ReleaseError, archives_of, edit, release
from tasks.release.neighbours import Combination, combinations, released_packages, try_all
from tasks.release.packages import Package, Version, git, packages_of

BENEATH = {"mesh": (), "buffers": ("mesh",), "ddp": ("mesh", "buffers")}
PROJECT = """\
[build-system]
requires = ["hatchling"]
build-backend = "hatchling.build"

[project]
name = "lamina-{layer}"
version = "0.1.0"
requires-python = ">=3.11"
dependencies = [{needs}]

[tool.hatch.build.targets.wheel]
packages = ["src/lamina"]
"""
FACE = '__all__ = ["work"]\n\n\ndef work(size, scale=1):\n    return size * scale\n'
README = "# {layer}\n\n```python\nfrom lamina.{layer} import work\n{uses}```\n"


@pytest.fixture
def tree(tmp_path: Path) -> Path:
    root = tmp_path / "tree"
    for layer, beneath in BENEATH.items():
        place = root / "packages" / layer
        source = place / "src" / "lamina" / layer
        source.mkdir(parents=True)
        needs = ", ".join(f'"lamina-{other}>=0.1,<0.2"' for other in beneath)
        (place / "pyproject.toml").write_text(PROJECT.format(layer=layer, needs=needs))
        (place / "CHANGELOG.md").write_text(f"# {layer}\n\n## 0.1.0 (unreleased)\n\n- `work`.\n")
        (source / "__init__.py").write_text(FACE)
        uses = "".join(f"import lamina.{other} as o\nassert o.work(2) == 2\n" for other in beneath)
        (place / "README.md").write_text(README.format(layer=layer, uses=uses))
    git(root, "init", "-q")
    save(root, "planted")
    return root


def save(root: Path, message: str) -> None:
    """Commit everything."""
    git(root, "add", "-A")
    who = ("-c", "user.name=a", "-c", "user.email=a@b")
    git(root, *who, "commit", "-q", "--allow-empty", "-m", message)


def face(root: Path, layer: str) -> Path:
    return root / "packages" / layer / "src" / "lamina" / layer / "__init__.py"


def verdict(root: Path, layer: str):
    return check(Package(root, layer), Path(sys.executable))


def make(
    root: Path, layer: str, kind: str = "minor", smoke=lambda package, archives: "", **options
):
    return release(
        root,
        layer,
        kind,
        check=lambda package: check(package, Path(sys.executable)),
        smoke=smoke,
        date="2026-11-30",
        out=root.parent / "dist",
        **options,
    )


def mark_released(root: Path, *layers: str) -> None:
    """Release layers as they are, without their archives: a commit and a tag each."""
    for layer in layers:
        package = Package(root, layer)
        edit(root, layer, package.version, "2026-11-01")
        save(root, f"{layer} {package.version}")
        git(root, "tag", package.tag(package.version))


def open_next(root: Path, layer: str, version: str, line: str) -> None:
    """What a change does after a release: the next version in both files, and a line."""
    package = Package(root, layer)
    package.set_version(Version.parse(version))
    text = package.changelog.read_text()
    head = f"# {layer}\n\n"
    section = f"## {version} (unreleased)\n\n- {line}\n\n"
    package.changelog.write_text(text.replace(head, head + section))


def test_the_faces_that_are_compared_are_those_that_the_layer_tests_know():
    assert SUB_FACES == source_trees.SUB_FACES


def test_ranges_follow_semantic_versions():
    assert Version.parse("0.3.7").range == ">=0.3,<0.4"
    assert Version.parse("2.1.0").range == ">=2.1,<3"
    assert [str(Version(1, 2, 3).next(kind)) for kind in ("major", "minor", "patch")] == [
        "2.0.0",
        "1.3.0",
        "1.2.4",
    ]


# ------------------------------------------------------------------------ what a change needs


def test_before_the_first_tag_there_is_no_release(tree):
    answer = verdict(tree, "ddp")
    assert (answer.released, answer.complaints) == (None, [])
    assert released_packages(tree, tree.parent / "released") == {}


CHANGES = {
    "a comment": ("\n# why\n", "patch"),
    "a new name": ('\n__all__ += ["more"]\n\n\ndef more():\n    pass\n', "patch"),
    "a parameter with a default": (FACE.replace("scale=1", "scale=1, twice=False"), "patch"),
    "a parameter without one": (FACE.replace("size,", "size, twice,"), "minor"),
    "a parameter renamed": (FACE.replace("scale", "factor"), "minor"),
    "a name removed": ("__all__ = []\n", "minor"),
    "another default": (FACE.replace("scale=1", "scale=2"), "minor"),
    "a name that is no longer public": (FACE.replace('["work"]', "[]"), "minor"),
}


@pytest.mark.matrix(few=3)
@pytest.mark.parametrize("name", CHANGES)
def test_a_change_of_a_face_decides_the_kind_of_version(tree, name):
    mark_released(tree, "mesh")
    text, needs = CHANGES[name]
    face(tree, "mesh").write_text(FACE + text if text.startswith("\n") else text)
    open_next(tree, "mesh", "0.1.1", "`work` changed.")
    answer = verdict(tree, "mesh")
    assert answer.needs == needs, answer
    assert bool(answer.complaints) == (needs == "minor")
    if needs == "minor":
        assert "must be 0.2.0 or higher" in answer.complaints[0]


def test_what_no_face_shows_may_change_in_a_patch(tree):
    (face(tree, "mesh").parent / "inner.py").write_text("def helper(a, b):\n    return a\n")
    save(tree, "inner")
    mark_released(tree, "mesh")
    (face(tree, "mesh").parent / "inner.py").write_text("def helper(a):\n    return a\n")
    open_next(tree, "mesh", "0.1.1", "Faster.")
    assert (verdict(tree, "mesh").needs, verdict(tree, "mesh").complaints) == ("patch", [])


def test_after_1_0_a_break_needs_a_major_version_and_a_new_name_a_minor_one(tree):
    package = Package(tree, "mesh")
    package.set_version(Version(1, 0, 0))
    package.changelog.write_text("# mesh\n\n## 1.0.0 (unreleased)\n\n- `work`.\n")
    save(tree, "one")
    mark_released(tree, "mesh")
    face(tree, "mesh").write_text(FACE + CHANGES["a new name"][0])
    assert verdict(tree, "mesh").needs == "minor"
    face(tree, "mesh").write_text(FACE.replace("scale", "factor"))
    assert verdict(tree, "mesh").needs == "major"


def test_a_change_without_a_version_or_a_line_is_complained_of(tree):
    mark_released(tree, "mesh")
    assert verdict(tree, "mesh").complaints == []
    face(tree, "mesh").write_text(FACE.replace("scale", "factor"))
    complaints = "\n".join(verdict(tree, "mesh").complaints)
    assert "the version is 0.1.0 and must be 0.2.0 or higher" in complaints
    assert "no unreleased version" in complaints
    open_next(tree, "mesh", "0.2.0", "Something is different.")
    (complaint,) = verdict(tree, "mesh").complaints
    assert "CHANGELOG.md does not name `work`, which broke" in complaint
    changelog = Package(tree, "mesh").changelog
    changelog.write_text(changelog.read_text().replace("Something", "`work(factor=)`"))
    assert verdict(tree, "mesh").complaints == []


def test_version_and_changelog_must_agree(tree):
    Package(tree, "mesh").set_version(Version(0, 1, 1))
    (complaint,) = verdict(tree, "mesh").complaints
    assert complaint == "CHANGELOG.md begins with 0.1.0, pyproject.toml says 0.1.1"


# ------------------------------------------------------------------------ making one


def test_a_first_release_has_the_version_that_stands_in_the_tree(tree):
    made = make(tree, "mesh")
    assert made.tag == "lamina-mesh-v0.1.0"
    assert git(tree, "tag") == made.tag
    assert git(tree, "rev-parse", f"{made.tag}^{{commit}}") == git(tree, "rev-parse", "HEAD")
    assert git(tree, "status", "--porcelain") == ""
    assert "## 0.1.0 (2026-11-30)" in Package(tree, "mesh").changelog.read_text()
    assert "`work`" in git(tree, "tag", "-n9", "-l", made.tag)
    assert sorted(path.name for path in made.archives) == [
        "lamina_mesh-0.1.0-py3-none-any.whl",
        "lamina_mesh-0.1.0.tar.gz",
    ]


def test_a_minor_release_moves_the_ranges_above_and_says_so_there(tree):
    mark_released(tree, *BENEATH)
    face(tree, "mesh").write_text(FACE.replace("scale", "factor"))
    open_next(tree, "mesh", "0.1.1", "`work`: `scale` is `factor`.")
    save(tree, "factor")
    make(tree, "mesh")
    for layer in ("buffers", "ddp"):
        package = Package(tree, layer)
        assert package.requires()["mesh"] == ">=0.2,<0.3"
        assert str(package.version) == "0.1.1"
        assert package.newest() == ("0.1.1", True, ["- Needs lamina-mesh >=0.2,<0.3."])
        assert verdict(tree, layer).complaints == []
    assert Package(tree, "ddp").requires()["buffers"] == ">=0.1,<0.2"
    assert Package(tree, "mesh").newest()[0] == "0.2.0"


def test_a_patch_release_leaves_the_ranges_above_alone(tree):
    mark_released(tree, *BENEATH)
    face(tree, "mesh").write_text(FACE + "# why\n")
    open_next(tree, "mesh", "0.1.1", "A comment.")
    save(tree, "why")
    assert make(tree, "mesh", "patch").tag == "lamina-mesh-v0.1.1"
    assert Package(tree, "ddp").requires()["mesh"] == ">=0.1,<0.2"


def refused(tree: Path, match: str, kind: str = "minor", **options) -> None:
    """The release is refused, and nothing is left of it."""
    before = git(tree, "rev-parse", "HEAD"), git(tree, "tag"), git(tree, "status", "--porcelain")
    with pytest.raises(ReleaseError, match=match):
        make(tree, "mesh", kind, **options)
    after = git(tree, "rev-parse", "HEAD"), git(tree, "tag"), git(tree, "status", "--porcelain")
    assert after == before


def test_a_release_that_is_too_small_for_what_broke_is_refused(tree):
    mark_released(tree, "mesh")
    face(tree, "mesh").write_text(FACE.replace("scale", "factor"))
    open_next(tree, "mesh", "0.1.1", "`work`.")
    save(tree, "factor")
    refused(tree, "needs 0.2.0, a minor version:\n.*work", "patch")


def test_a_release_of_uncommitted_changes_is_refused(tree):
    (tree / "new").touch()
    refused(tree, "commit or stash first")


def test_a_release_without_a_line_in_the_changelog_is_refused(tree):
    mark_released(tree, "mesh")
    refused(tree, "begins with 0.1.0, which is released")
    open_next(tree, "mesh", "0.1.1", "x")
    changelog = Package(tree, "mesh").changelog
    changelog.write_text(changelog.read_text().replace("- x\n", ""))
    save(tree, "empty")
    refused(tree, "with no line")


def test_archives_that_do_not_work_are_not_tagged(tree):
    refused(tree, "do not work:\nno module", smoke=lambda package, archives: "no module")


def test_a_dry_run_changes_nothing_and_shows_the_commit(tree):
    before = git(tree, "rev-parse", "HEAD")
    made = make(tree, "mesh", dry_run=True)
    assert "+## 0.1.0 (2026-11-30)" in made.patch
    assert (git(tree, "rev-parse", "HEAD"), git(tree, "tag")) == (before, "")
    assert not (tree.parent / "dist").exists()


@pytest.mark.parametrize(
    ("name", "match"),
    [
        ("v0.1.0", "no layer and no tag such as"),
        ("lamina-mesh-v0.3.0", "is a tag of version 0.1.0"),
        ("lamina-mesh-v0.4.0", "unknown revision"),
    ],
)
def test_archives_are_made_of_a_tag_that_says_its_own_version(tree, name, match):
    git(tree, "tag", "lamina-mesh-v0.3.0")
    with pytest.raises((ReleaseError, RuntimeError), match=match):
        archives_of(tree, name, tree.parent / "dist")
    assert not (tree.parent / "dist").exists()


def test_the_archives_of_a_commit_are_the_same_bytes_and_hold_the_layer_alone(tree):
    made = build_reproducibly(Package(tree, "buffers"), tree.parent / "build")
    wheel, sdist = sorted(made, key=lambda path: path.suffix, reverse=True)
    with zipfile.ZipFile(wheel) as archive:
        names = [name for name in archive.namelist() if ".dist-info" not in name]
    assert names == ["lamina/buffers/__init__.py"]
    with tarfile.open(sdist) as archive:
        assert any(name.endswith("CHANGELOG.md") for name in archive.getnames())


def test_a_build_that_depends_on_when_it_is_made_is_refused(tree):
    hook = (
        "import time\n\nfrom hatchling.builders.hooks.plugin.interface import BuildHookInterface\n"
    )
    hook += "\n\nclass Hook(BuildHookInterface):\n    def initialize(self, version, data):\n"
    hook += "        with open(self.root + '/src/lamina/mesh/made.py', 'w') as file:\n"
    hook += "            file.write(f'x = {time.time_ns()}')\n"
    package = Package(tree, "mesh")
    (package.place / "hatch_build.py").write_text(hook)
    text = package.project.read_text() + "\n[tool.hatch.build.hooks.custom]\n"
    package.project.write_text(text)
    save(tree, "hook")
    with pytest.raises(RuntimeError, match="two builds of mesh at HEAD differ"):
        build_reproducibly(package, tree.parent / "build")


# ------------------------------------------------------------------------ beside each other


def pairs(tree: Path) -> dict[tuple[str, str], Combination | None]:
    new = packages_of(tree)
    released = released_packages(tree, tree.parent / "released")
    return {(top, changed): found for top, changed, found in combinations(new, released)}


def test_without_releases_every_combination_is_unreleased_and_nothing_is_run(tree):
    assert set(pairs(tree).values()) == {None}
    assert {outcome.verdict for outcome in try_all(tree)} == {"unreleased"}


def test_each_new_layer_is_combined_with_the_released_ones_beneath_and_above(tree):
    mark_released(tree, *BENEATH)
    assert pairs(tree) == {}  # nothing is new
    for layer in ("mesh", "buffers"):
        face(tree, layer).write_text(FACE + "# new\n")
    found = pairs(tree)
    assert set(found) == {
        ("buffers", "mesh"),
        ("ddp", "mesh"),
        ("buffers", "buffers"),
        ("ddp", "buffers"),
    }
    for (_, changed), combination in found.items():
        for package in combination.packages:
            assert (package.root == tree) == (package.layer == changed)


def fast_run(jobs, base):
    """Run each job's snippets as `tasks.snippets.run` does, without importing torch first."""
    answers = []
    for job in jobs:
        source = "\n".join(snippet.source for snippet in job.snippets)
        program = f"import sys\nsys.path += {[str(path) for path in job.paths]}\n{source}"
        done = subprocess.run(
            [sys.executable, "-I", "-S", "-c", program], capture_output=True, text=True
        )
        answers.append(done.stderr if done.returncode else "")
    return answers


def test_a_released_layer_that_breaks_over_a_new_one_is_found(tree, monkeypatch):
    monkeypatch.setattr("tasks.release.neighbours.run", fast_run)
    mark_released(tree, *BENEATH)
    face(tree, "buffers").write_text(FACE.replace("size * scale", "size * scale + 1"))
    verdicts = {outcome.what: outcome for outcome in try_all(tree)}
    works = verdicts["buffers 0.1.0 (new) over mesh 0.1.0"]
    breaks = verdicts["ddp 0.1.0 over buffers 0.1.0 (new) over mesh 0.1.0"]
    assert (works.verdict, breaks.verdict) == ("works", "breaks")
    assert "AssertionError" in breaks.detail


def test_a_combination_that_a_declared_range_forbids_is_excluded_and_not_run(tree):
    mark_released(tree, *BENEATH)
    Package(tree, "mesh").set_version(Version(0, 2, 0))
    outcomes = {outcome.what: outcome for outcome in try_all(tree)}
    assert {outcome.verdict for outcome in outcomes.values()} == {"excluded"}
    assert "buffers 0.1.0 wants mesh>=0.1,<0.2" in {o.detail for o in outcomes.values()}


def test_what_an_installer_would_lay_down_is_what_the_wheel_holds(tree):
    made = make(tree, "mesh")
    (wheel,) = (path for path in made.archives if path.suffix == ".whl")
    site = unpack([wheel], tree.parent / "site")
    assert (site / "lamina/mesh/__init__.py").read_text() == FACE


# ------------------------------------------------------------------------ what a layer costs


def test_every_layer_has_a_budget_and_what_exceeds_one_is_named():
    assert tuple(budgets()) == LAYERS
    budget = Cost(milliseconds=10, modules=5, kilobytes=100)
    assert over(Cost(10, 5, 100), budget) == []
    assert over(Cost(9, 6, 101), budget) == [
        "modules: 6, the budget is 5",
        "kilobytes: 101, the budget is 100",
    ]


def test_the_cost_of_a_layer_is_counted():
    cost = measure("mesh", repeats=1)
    beside = subprocess.run(
        [sys.executable, "-X", "importtime", "-c", "import torch.distributed, lamina.mesh"],
        capture_output=True,
        text=True,
    )
    lines = beside.stderr.splitlines()
    names = [line.rpartition("|")[2].strip() for line in lines]
    mine = names[names.index("torch.distributed") + 1 :]
    assert 0 < cost.modules <= len(mine)
    source = ROOT / "packages/mesh/src"
    held = sum(path.stat().st_size for path in source.rglob("*.py")) / 1024
    assert held < cost.kilobytes < 2 * held + 50
